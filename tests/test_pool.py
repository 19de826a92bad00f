"""The pool of pages: who holds which, what a job may count on, and that nobody writes to what others hold.

Not here: attention over pages (test_paged_attention), steps over them (test_runner), what is kept (kv.resident).
"""

from __future__ import annotations

import collections
import itertools
import random

import numpy as np
import pytest

from ca_jax.device.pages import Holding, PagePool, PoolFullError, PoolSize
from ca_jax.testing import tiny

CONFIG = tiny.tiny_config(num_layers=1)
PAGE, WINDOW, NUM_PAGES, NUM_ROWS = 4, 18, 8, 4  # A window fills five pages, the last one in part.


def pool_of(num_pages: int = NUM_PAGES, num_parts: int = 1) -> PagePool:
    return PagePool(CONFIG, "float32", PoolSize(num_pages, PAGE, WINDOW, NUM_ROWS, num_parts))


def held(pool: PagePool, pages: list[int] | tuple[int, ...]) -> np.ndarray:
    """One number of each place of these pages, all others being the same."""
    found = np.asarray(pool.buffers[0])[np.array(pages, int)]  # [n, 2, K, page, H]
    assert (found == found[:, :1, :1, :, :1]).all()
    return found[:, 0, 0, :, 0].ravel()


def put(pool: PagePool, row: int, values: list[int], start: int) -> None:
    """Writes tokens of a row from a place on, as a step does."""
    pool.make_room(row, start + len(values), start)
    kv = np.zeros((2, WINDOW, CONFIG.num_kv_heads, CONFIG.head_dim), np.float32)
    kv[:, : len(values)] = np.array(values)[:, None, None]
    pool.fill(row, 0, kv, start, len(values))


def begun(pool: PagePool, row: int, num_tokens: int, most: int = WINDOW) -> PagePool:
    """The same with a row of tokens 1, 2, … in it."""
    pool.begin(row, most)
    put(pool, row, list(range(1, num_tokens + 1)), 0)
    return pool


def test_a_pool_has_room_for_a_window_and_no_more_than_is_asked_for():
    sizes = [PoolSize.for_window(WINDOW, NUM_ROWS, 2, PAGE, most) for most in (None, 13, 100)]
    assert [size.num_pages for size in sizes] == [10, 6, 10], "in each part"
    assert [sizes[0].part_of(row) for row in range(NUM_ROWS)] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="pool's pages must be at least 5, for one window, got 4"):
        PoolSize.for_window(WINDOW, NUM_ROWS, 2, PAGE, 9)


def test_a_job_begins_where_what_it_may_come_to_need_fits_beside_what_others_of_its_part_may():
    pool = pool_of(num_parts=2)
    pool.begin(0, 1000)  # A window at most.
    assert [pool.admits(1, num_tokens) for num_tokens in (12, 13, 1000)] == [True, False, False]
    assert pool.admits(2, 1000), "it is of the other part"
    pool.end(0)
    assert pool.admits(1, 1000)
    begun(pool, 0, 9)
    kept = pool.hand_over(0)
    assert (len(kept.pages), pool.num_held) == (3, 3)
    assert pool.admits(1, 1000), "what is kept is in nobody's way"


def test_others_give_pages_back_where_none_is_free_and_running_jobs_never_do():
    pool = begun(begun(pool_of(num_parts=2), 0, 12), 1, 16)
    kept, asked = [pool.hand_over(0), pool.hand_over(1)], []

    def evict(part: int) -> bool:
        asked.append(part)
        if kept:
            pool.release(kept.pop())
        return len(asked) < 3

    pool.evict = evict
    begun(pool, 1, 4)
    assert asked == [], "one was free"
    pool.make_room(1, 5, 4)
    assert asked == [0], "of this part, and no more than it takes"
    pool.begin(0, WINDOW)
    pool.make_room(0, 12, 0)
    pool.make_room(0, 16, 12)
    assert asked == [0, 0]
    pool.end(0)
    begun(pool, 0, 16)
    with pytest.raises(PoolFullError, match="running jobs hold all 8"):
        pool.make_room(1, 17, 5)
    assert asked == [0, 0, 0]
    pool.end(1)
    pool.end(0)
    assert pool.num_held == 0


def test_where_a_call_broke_all_is_made_anew_and_what_was_held_is_nothing():
    pool = begun(begun(pool_of(), 0, 9), 1, 9)
    kept = pool.hand_over(0)
    assert not pool.remake_if_broken()
    pool.buffers[0].delete()
    assert pool.remake_if_broken()
    assert pool.num_held == 0
    assert pool.hand_over(1) is None
    pool.end(1)
    begun(pool, 1, 8)
    pool.release(kept)
    assert pool.num_held == 2, "it is another's now"
    np.testing.assert_array_equal(held(pool, pool.pages_of(1))[:8], range(1, 9))
    assert not pool.remake_if_broken()


# Against rows that are lists.


class Campaign:
    """Contexts come, grow, are shared, cut and kept, and go; each is what was put into it, whatever others do."""

    def __init__(self, seed: int, num_pages: int) -> None:
        self.rng, self.num_pages, self.pool = random.Random(seed), num_pages, pool_of(num_pages)
        self.pool.evict = self.evict
        self.values = itertools.count(1)
        self.rows: dict[int, list[int]] = {}
        self.most: dict[int, int] = {}
        self.kept: list[tuple[Holding, list[int]]] = []
        self.num_evicted = 0

    def evict(self, part: int) -> bool:
        assert len(self.pool._free[part]) < self.pool.size.most_pages, "there was room for all of a context"
        if self.kept:
            self.pool.release(self.kept.pop(0)[0])
            self.num_evicted += 1
            return True
        return False

    def up_to(self, most: int) -> int:
        """Often all of it."""
        return self.rng.choice((most, self.rng.randint(0, most)))

    def begin(self) -> None:
        """With nothing, or with the first tokens of what is kept."""
        row, most = self.rng.choice(sorted(set(range(NUM_ROWS)) - set(self.rows))), self.up_to(WINDOW + 5)
        promised = [-(-min(each, WINDOW) // PAGE) for each in (*self.most.values(), most)]
        assert self.pool.admits(row, most) == (sum(promised) <= self.num_pages)
        if not self.pool.admits(row, most):
            return
        self.pool.begin(row, most)
        self.rows[row], self.most[row] = [], min(most, WINDOW)
        if self.kept and self.rng.random() < 0.7:
            holding, values = self.rng.choice(self.kept)
            num_tokens = self.up_to(min(len(values), self.most[row]))
            self.pool.take(row, self.pool.share(holding, num_tokens))
            self.rows[row] = values[:num_tokens]

    def write(self, row: int) -> None:
        """Behind its tokens, or over some of them."""
        values = self.rows[row]
        start = self.up_to(len(values))
        new = list(itertools.islice(self.values, self.up_to(self.most[row] - start)))
        put(self.pool, row, new, start)
        values[start : start + len(new)] = new

    def cut(self, row: int) -> None:
        stay = [self.rng.random() < self.rng.choice((0.5, 1)) for _ in self.rows[row]]
        self.pool.cut(row, np.flatnonzero(stay))
        self.rows[row] = [*itertools.compress(self.rows[row], stay)]

    def shorten(self, row: int) -> None:
        del self.rows[row][self.up_to(len(self.rows[row])) :]
        self.pool.shorten(row, len(self.rows[row]))

    def hand_over(self, row: int) -> None:
        self.kept.append((self.pool.hand_over(row), self.rows.pop(row)))
        del self.most[row]

    def end(self, row: int) -> None:
        self.pool.end(row)
        del self.rows[row], self.most[row]

    def release(self) -> None:
        self.pool.release(self.kept.pop(self.rng.randrange(len(self.kept)))[0])

    def step(self) -> None:
        if len(self.rows) < NUM_ROWS and self.rng.random() < 0.4:
            self.begin()
        elif self.kept and self.rng.random() < 0.1:
            self.release()
        elif self.rows:
            act = self.rng.choice([self.write] * 4 + [self.cut, self.shorten, self.hand_over, self.hand_over, self.end])
            act(self.rng.choice(sorted(self.rows)))

    def check(self) -> None:
        """Each page is free, or held by just its holders, as many as their tokens fill."""
        holdings = [*(self.pool.pages_of(row) for row in self.rows), *(holding.pages for holding, _ in self.kept)]
        holders = collections.Counter(page for pages in holdings for page in pages)
        assert self.pool._holders == [holders]
        assert sorted(self.pool._free[0]) == sorted(set(range(self.num_pages)) - set(holders))
        assert self.pool.num_held == len(holders)
        for pages, values in zip(holdings, [*self.rows.values(), *(values for _, values in self.kept)], strict=True):
            assert len(set(pages)) == len(pages) == -(-len(values) // PAGE)
            np.testing.assert_array_equal(held(self.pool, pages)[: len(values)], values)


@pytest.mark.parametrize("num_pages", [5, 6, 9])  # A window's, and of several jobs.
@pytest.mark.parametrize("seed", range(4))
def test_whatever_contexts_do_none_loses_a_page_or_what_is_in_it(seed, num_pages):
    campaign = Campaign(seed, num_pages)
    for _ in range(300):
        campaign.step()
        campaign.check()
    assert campaign.num_evicted > 5
    for row in tuple(campaign.rows):
        campaign.end(row)
    while campaign.kept:
        campaign.release()
    assert sorted(campaign.pool._free[0]) == list(range(num_pages)), "pages were lost"
