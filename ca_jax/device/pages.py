"""The pool of pages: KV on the device, unrotated, in pages that contexts take as they grow.

Who holds pages has a `Holding`: a job that runs, in one of the pool's rows, or a context that is kept between turns. A
page may be held by several, whose contexts begin alike; who writes to one that others hold takes a copy of it first.

    promised    pages that running jobs may come to need; none begins whose promise does not fit beside the others'
    kept        the rest, until a running job needs it: `evict` says what goes

Nothing here waits for the device, unless something broke.

Not here: jitted code (steps), what is computed (runner), which contexts are kept (kv.resident).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from ca_jax.device import page_steps
from ca_jax.device.transfer import to_device
from ca_jax.errors import check
from ca_jax.models.config import ModelConfig
from ca_jax.models.paged_attention import Rows
from ca_jax.models.sharding import ModelSharding, bytes_per_device, replicated


class PoolFullError(RuntimeError):
    """A page was wanted, and running jobs hold all of them."""


@dataclasses.dataclass(frozen=True)
class PoolSize:
    """How large a pool is."""

    num_pages: int
    """In each part."""
    page_tokens: int
    """Tokens of a page."""
    max_tokens: int
    """Most tokens of a context."""
    num_rows: int
    """Running jobs at most, of all parts."""
    num_parts: int = 1
    """Parts, each on devices of its own."""

    def __post_init__(self) -> None:
        most = self.most_pages
        check(self.num_pages >= most, "the pool's pages", f"at least {most}, for one window", self.num_pages)

    @classmethod
    def for_window(
        cls, window: int, num_rows: int, num_parts: int, page_tokens: int, max_pages: int | None = None
    ) -> PoolSize:
        """Of as many pages as all jobs may come to need, or of `max_pages` in all."""
        pages = -(-window // page_tokens) * num_rows
        pages = pages if max_pages is None else min(pages, max_pages)
        return cls(pages // num_parts, page_tokens, window, num_rows, num_parts)

    @property
    def most_pages(self) -> int:
        """M, pages of a context at most."""
        return self.pages_of(self.max_tokens)

    def pages_of(self, num_tokens: int) -> int:
        """Pages that so many tokens fill, the last one in part."""
        return -(-num_tokens // self.page_tokens)

    def part_of(self, row: int) -> int:
        """Which part a row is in."""
        return row // (self.num_rows // self.num_parts)


@dataclasses.dataclass(eq=False)
class Holding:
    """Pages that are held, in the order of their tokens."""

    part: int
    """They are in."""
    pages: list[int]
    """Their numbers there."""
    generation: int = 0
    """Of the pool's buffers that they are in; they are nothing in others."""


class PagePool:
    """Owner of the pages' buffers and books. Belongs to the engine's thread.

    Args:
      evict: has pages of a part given back that no running job holds; whether any were.
    """

    def __init__(self, config: ModelConfig, dtype: str, size: PoolSize, sharding: ModelSharding | None = None) -> None:
        self.size = size
        self.evict: Callable[[int], bool] = lambda part: False
        total = size.num_pages * size.num_parts
        self._make = partial(page_steps.make_pages, config, total, size.page_tokens, dtype, sharding)
        self.buffers = self._make()
        """Per layer `[P, 2, K, page, H]`; donated by every call."""
        self.generation = 0
        """How often the buffers were made anew: what was held before is nothing."""
        self._sharding = sharding
        self._to_device = partial(to_device, sharding=replicated(sharding))
        self._free: list[list[int]] = []
        self._holders: list[collections.Counter[int]] = []
        self._rows: dict[int, Holding] = {}
        self._promised: dict[int, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._free = [list(range(self.size.num_pages - 1, -1, -1)) for _ in range(self.size.num_parts)]
        self._holders = [collections.Counter() for _ in range(self.size.num_parts)]
        self._rows.clear()

    @property
    def num_bytes(self) -> int:
        """Of all pages, on each device."""
        return bytes_per_device(self.buffers)

    @property
    def num_held(self) -> int:
        """Pages that anyone holds, of all parts."""
        return sum(len(holders) for holders in self._holders)

    @property
    def usage(self) -> float:
        """Share of all pages that running jobs hold, each counted once."""
        used = {(holding.part, page) for holding in self._rows.values() for page in holding.pages}
        return len(used) / (self.size.num_pages * self.size.num_parts)

    def remake_if_broken(self) -> bool:
        """Makes the pages anew, empty and nobody's, where a call that took them broke; whether one had. Waits."""
        try:
            jax.block_until_ready(self.buffers)
        except RuntimeError:
            self.buffers = self._make()
            self.generation += 1
            self._begin()
            return True
        return False

    # Rows.

    def admits(self, row: int, max_tokens: int) -> bool:
        """Whether a job of so many tokens at most may begin in a row, beside what the others there may come to need."""
        part = self.size.part_of(row)
        promised = sum(pages for other, pages in self._promised.items() if self.size.part_of(other) == part)
        return promised + self._promise(max_tokens) <= self.size.num_pages

    def begin(self, row: int, max_tokens: int) -> None:
        """Gives a row to a job of so many tokens at most. It holds nothing yet."""
        self._promised[row] = self._promise(max_tokens)
        self._rows[row] = Holding(self.size.part_of(row), [], self.generation)

    def take(self, row: int, holding: Holding) -> None:
        """Has a row go on with pages that are held in its part; it is their holder from now on."""
        self._release(self._rows[row])
        self._rows[row] = holding

    def end(self, row: int) -> None:
        """Gives a row back, with what it holds."""
        self._promised.pop(row, None)
        if (holding := self._rows.pop(row, None)) is not None:
            self._release(holding)

    def hand_over(self, row: int) -> Holding | None:
        """Gives a row back, but not what it holds; None where it holds nothing any more."""
        self._promised.pop(row, None)
        return self._rows.pop(row, None)

    def make_room(self, row: int, num_tokens: int, start: int) -> None:
        """Sees to it that a row has pages of its own for its tokens from `start` up to `num_tokens`.

        Raises:
          PoolFullError: there are none.
        """
        holding, size = self._rows[row], self.size
        holders = self._holders[holding.part]
        for index in range(start // size.page_tokens, min(size.pages_of(num_tokens), len(holding.pages))):
            shared = holding.pages[index]
            while holders[shared] > 1 and not self._free[holding.part] and self.evict(holding.part):
                pass  # It may be its own then.
            if holders[shared] > 1:
                holding.pages[index] = self._new_page(holding.part)
                self._copy(holding.part, shared, holding.pages[index])
                self._release(Holding(holding.part, [shared], holding.generation))
        while len(holding.pages) < size.pages_of(num_tokens):
            holding.pages.append(self._new_page(holding.part))

    def shorten(self, row: int, num_tokens: int) -> None:
        """Gives back the pages of a row that are behind so many tokens."""
        holding, kept = self._rows[row], self.size.pages_of(num_tokens)
        holding.pages, rest = holding.pages[:kept], holding.pages[kept:]
        self._release(Holding(holding.part, rest, holding.generation))

    def pages_of(self, row: int) -> tuple[int, ...]:
        """Numbers of the pages that a row holds."""
        return tuple(self._rows[row].pages)

    # What is held by no row.

    def share(self, holding: Holding, num_tokens: int) -> Holding:
        """Holds the pages of its first tokens once more."""
        shared = Holding(holding.part, holding.pages[: self.size.pages_of(num_tokens)], holding.generation)
        self._holders[shared.part].update(shared.pages)
        return shared

    def release(self, holding: Holding) -> None:
        """Gives held pages back."""
        self._release(holding)

    # On the device.

    def rows(self, spans: list[tuple[int, int, int] | None], num_tokens: int) -> Rows:
        """What a step computes.

        Args:
          spans: for each of the step's rows, those of a part one behind the other, whose pages it has, the place of its
            first token and how many it has; None: it has none.
          num_tokens: places for tokens of each part.
        """
        num_parts = self.size.num_parts
        table = np.zeros((len(spans), self.size.most_pages), np.int32)
        places = np.zeros((num_parts, num_tokens), np.int32)
        starts = np.zeros((num_parts, len(spans) // num_parts + 1), np.int32)
        for index, span in enumerate(spans):
            part, row = divmod(index, len(spans) // num_parts)
            start, count = starts[part, row], 0
            if span is not None:
                slot, first, count = span
                table[index] = self._numbers(slot)
                places[part, start : start + count] = np.arange(first, first + count)
            starts[part, row + 1] = start + count
        return Rows(*map(self._to_device, (table, starts.ravel(), places.ravel())))

    def place(self, row: int) -> tuple[int, np.ndarray]:
        """Which part a row is in, and a table of one row a part, i32 `[D, M]`, its pages in that."""
        part = self.size.part_of(row)
        table = np.zeros((self.size.num_parts, self.size.most_pages), np.int32)
        table[part] = self._numbers(row)
        return part, table

    def read(self, row: int, layer: int, start: int, num_tokens: int, *, packs: bool) -> jax.Array:
        """A layer's KV of places of a row; see `page_steps.read_pages`."""
        number = self._to_device(start, np.int32)
        table = self._to_device(self._numbers(row))
        return page_steps.read_pages(self.buffers[layer], table, number, num_tokens, packs, self._sharding)

    def fill(self, row: int, layer: int, kv: jax.Array, start: int, count: int) -> jax.Array:
        """Puts a layer's unrotated KV `[2, S, K, H]`, or int8, into a row's pages; see `page_steps.fill_pages`.

        Returns:
          A scalar that is ready when that is done.
        """
        numbers = map(partial(self._to_device, dtype=np.int32), (self._rows[row].part, start, count))
        self.buffers[layer], done = page_steps.fill_pages(
            self.buffers[layer], kv, self._to_device(self._numbers(row)), *numbers, self._sharding
        )
        return done

    def cut(self, row: int, kept: np.ndarray, *, drift: np.ndarray | None = None, drifts_from: int = 0) -> None:
        """Moves the tokens of a row that stay to its beginning.

        Args:
          row: which.
          kept: i64 `[T]`, increasing: the places of the tokens that stay.
          drift: f32 `[L, 2, K, H]`, added to their KV; None adds nothing.
          drifts_from: the first of the tokens that stay which drift.
        """
        holding, before = self._rows[row], self._numbers(row)
        old, wanted, own = holding.pages, self.size.pages_of(len(kept)), self._own(holding)
        while wanted - len(own) > len(self._free[holding.part]) and self.evict(holding.part):
            own = self._own(holding)
        holding.pages = own[:wanted]  # The others' stay as they are, and are read from all the same.
        while len(holding.pages) < wanted:
            holding.pages.append(self._new_page(holding.part))
        places = np.zeros(self.size.most_pages * self.size.page_tokens, np.int32)
        places[: len(kept)] = kept
        self.buffers = page_steps.cut_pages(
            self.buffers,
            self._to_device(np.stack([before, self._numbers(row)])),
            self._to_device(holding.part, np.int32),
            self._to_device(places),
            self._to_device(len(kept), np.int32),
            None if drift is None else self._to_device(drift),
            None if drift is None else self._to_device(drifts_from, np.int32),
            self._sharding,
        )
        left = [page for page in old if page not in own[:wanted]]
        self._release(Holding(holding.part, left, holding.generation))

    def _own(self, holding: Holding) -> list[int]:
        """Pages that nobody else holds."""
        return [page for page in holding.pages if self._holders[holding.part][page] == 1]

    def _numbers(self, row: int) -> np.ndarray:
        """Its pages, i32 `[M]`."""
        numbers, pages = np.zeros(self.size.most_pages, np.int32), self._rows[row].pages
        numbers[: len(pages)] = pages
        return numbers

    def _promise(self, max_tokens: int) -> int:
        return self.size.pages_of(min(max_tokens, self.size.max_tokens))

    def _copy(self, part: int, source: int, target: int) -> None:
        numbers = map(partial(self._to_device, dtype=np.int32), (part, source, target))
        self.buffers = page_steps.copy_page(self.buffers, *numbers, self._sharding)

    def _new_page(self, part: int) -> int:
        while not self._free[part]:
            if not self.evict(part):
                raise PoolFullError(f"a page must be free, and running jobs hold all {self.size.num_pages} of the pool")
        page = self._free[part].pop()
        self._holders[part][page] = 1
        return page

    def _release(self, holding: Holding) -> None:
        if holding.generation != self.generation:
            return
        holders = self._holders[holding.part]
        for page in holding.pages:
            holders[page] -= 1
            if holders[page] <= 0:
                del holders[page]
                self._free[holding.part].append(page)
