"""Where tokens lie after any of them were forgotten, against a list of the tokens in each block; and lineages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ca_jax.storage.tokens import PLAIN, Lineage, SsdCopy, TokenPlaces

BLOCK_TOKENS = st.integers(1, 5)
# What happens to a session: so many tokens more, so many left, or which of them stay.
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 9)),
        st.tuples(st.just("take"), st.integers(0, 30)),
        st.tuples(st.just("keep"), st.lists(st.booleans(), min_size=30, max_size=30)),
        st.tuples(st.just("keep_oldest"), st.integers(0, 9), st.integers(0, 9)),
    ),
    max_size=8,
)


class Table:
    """Blocks as lists of rows, each a token or None: the model."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.blocks: list[list[int | None]] = []
        self.next_token = 0

    @property
    def tokens(self) -> list[int]:
        return [token for block in self.blocks for token in block if token is not None]

    @property
    def places(self) -> list[int]:
        """Of each token, its row counted over all blocks."""
        size = self.block_tokens
        return [
            i * size + row
            for i, block in enumerate(self.blocks)
            for row, token in enumerate(block)
            if token is not None
        ]

    def append(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            if not self.blocks or len(self.blocks[-1]) == self.block_tokens:
                self.blocks.append([])
            self.blocks[-1].append(self.next_token)
            self.next_token += 1

    def forget(self, tokens: set[int]) -> list[int]:
        """Which blocks are left."""
        blocks = [[None if token in tokens else token for token in block] for block in self.blocks]
        left = [i for i, block in enumerate(blocks) if any(token is not None for token in block)]
        self.blocks = [blocks[i] for i in left]
        while self.blocks and self.blocks[-1][-1] is None:  # Rows behind the last token are used again.
            self.blocks[-1].pop()
        return left


def as_kept(operation: tuple, num_tokens: int) -> np.ndarray:
    if operation[0] == "take":
        return np.arange(num_tokens) < operation[1]
    if operation[0] == "keep_oldest":
        first, num_dropped = operation[1:]
        return (np.arange(num_tokens) < first) | (np.arange(num_tokens) >= first + num_dropped)
    return np.resize(np.array(operation[1]), num_tokens)


@given(BLOCK_TOKENS, OPERATIONS)
def test_places_are_those_of_a_table_of_rows(block_tokens, operations):
    table, places = Table(block_tokens), TokenPlaces()
    for operation in operations:
        if operation[0] == "append":
            table.append(operation[1])
            places = places.append(operation[1])
        else:
            kept = as_kept(operation, places.num_tokens)
            left = table.forget({token for token, stays in zip(table.tokens, kept, strict=True) if not stays})
            before = places
            places, found = places.keep(kept, block_tokens)
            assert found.tolist() == left
            if operation[0] == "take":
                assert before.take(operation[1]) == places
        assert places.to_array().tolist() == table.places
        assert places.num_tokens == len(table.tokens)
        assert places.num_places == max(table.places, default=-1) + 1
        assert places.is_dense == (table.places == list(range(len(table.places))))
        assert TokenPlaces.of(places.to_array()) == places
        assert TokenPlaces.from_bytes(places.to_bytes()) == places
        by_block = places.by_block(block_tokens)
        assert [rows.index for rows in by_block] == list(range(len(table.blocks))), "no block without a token"
        seen = 0
        for rows, block in zip(by_block, table.blocks, strict=True):
            in_use = [row for row, token in enumerate(block) if token is not None]
            assert (rows.first_token, rows.num_tokens) == (seen, len(in_use))
            assert np.arange(block_tokens)[rows.rows].tolist() == in_use
            assert isinstance(rows.rows, slice) == (in_use == list(range(in_use[0], in_use[-1] + 1)))
            seen += len(in_use)
        stretches, parts = places.stretches(block_tokens)
        whole = [(token + i * block_tokens, first + i, block_tokens) for token, first, n in stretches for i in range(n)]
        split = [(rows.first_token, rows.index, rows.num_tokens) for rows in parts]
        assert sorted(whole + split) == [(rows.first_token, rows.index, rows.num_tokens) for rows in by_block]
        for rows in parts:
            assert rows.num_tokens < block_tokens
            assert np.array_equal(
                np.arange(block_tokens)[rows.rows], np.arange(block_tokens)[by_block[rows.index].rows]
            )


@given(st.sets(st.integers(0, 12)), st.sets(st.integers(0, 12)), st.integers(0, 14))
def test_leading_rows_are_the_same_as_far_as_tokens_lie_at_the_same_places(one, other, num_tokens):
    alike = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(sorted(one), sorted(other), strict=False)))
    expected = [place + 1 for place, _ in alike[:num_tokens]]
    places = [TokenPlaces.of(np.array(sorted(each), np.int64)) for each in (one, other)]
    assert places[0].num_same_rows(places[1], num_tokens) == (expected[-1] if expected else 0)


@given(
    BLOCK_TOKENS,
    st.integers(1, 30),
    st.lists(st.lists(st.booleans(), min_size=30, max_size=30), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_a_copy_that_was_cut_is_found_in_every_state_before(block_tokens, num_tokens, masks, since):
    """Tokens and checksums of an older state are those of the same rows and blocks."""
    copy = SsdCopy(places=TokenPlaces.dense(num_tokens), block_ids=np.arange(-(-num_tokens // block_tokens)) * 7 + 3)
    token_ids = np.arange(num_tokens) + 100
    states = [(copy, token_ids)]
    for mask in masks:
        kept = np.resize(np.array(mask), copy.num_tokens)
        if not kept.any():
            break
        copy, table = copy.keep(kept, PLAIN, block_tokens)
        assert copy.block_ids.tolist() == states[-1][0].block_ids[table].tolist()
        token_ids = token_ids[kept]
        states.append((copy, token_ids))
    before, tokens_before = states[min(since, len(states) - 1)]
    tokens, blocks = copy.find_in(before, block_tokens)
    assert tokens_before[tokens].tolist() == token_ids.tolist()
    assert before.block_ids[blocks].tolist() == copy.block_ids.tolist()


def test_a_copy_is_not_found_in_what_it_was_not_cut_from():
    copy = SsdCopy(places=TokenPlaces.dense(6), block_ids=np.array([1, 2]))
    assert copy.find_in(SsdCopy(places=TokenPlaces.dense(6), block_ids=np.array([1, 3])), 4) is None
    assert copy.find_in(SsdCopy(places=TokenPlaces.dense(5), block_ids=np.array([1, 2])), 4) is None
    cut, _ = copy.keep(np.arange(6) != 1, PLAIN, 4)
    assert copy.find_in(cut, 4) is None


# Lineages.


@pytest.mark.parametrize(
    ("discarded", "num_stored", "expected"),
    [
        ([0, 0, 1, 1, 0], 5, Lineage(2, 2)),
        ([1, 0, 1, 0, 1], 5, Lineage(2, 0)),  # What goes from the end does not count.
        ([0, 0, 0, 1, 1], 5, PLAIN),
        ([0, 0, 0, 1, 1], 6, Lineage(2, 3)),  # It is not the end.
        ([0, 0, 0, 1, 1], 2, PLAIN),
        ([0, 0, 0, 1, 0], 2, Lineage(1, 3)),  # What was not stored was dropped nevertheless.
        ([0, 0, 0, 0, 0], 5, PLAIN),
        ([1, 1, 1, 1, 1], 5, PLAIN),
        ([], 5, PLAIN),
    ],
)
def test_what_was_dropped_is_counted_if_something_is_left_behind(discarded, num_stored, expected):
    assert PLAIN.after(np.array(discarded, bool), num_stored) == expected


def test_a_session_is_plain_up_to_the_first_of_all_cuts():
    lineage = PLAIN.after(np.arange(10) == 5, 10)
    assert lineage == Lineage(1, 5)
    assert lineage.after(np.arange(9) == 7, 9) == Lineage(2, 5)
    assert lineage.after(np.arange(9) == 3, 9) == Lineage(2, 3)
    assert [lineage.plain_tokens(n) for n in (0, 4, 5, 9)] == [0, 4, 5, 5]
    assert PLAIN.plain_tokens(9) == 9
    assert Lineage(4).after(np.arange(9) == 3, 9) == Lineage(5, 3)
