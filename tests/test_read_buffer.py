"""The ring that layers are staged in, against a map of its bytes."""

from __future__ import annotations

import collections
import itertools

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from ca_jax.kv.load import ReadBuffer

UNIT = 128  # What sizes are rounded up to.
SIZE = 8 * UNIT
STEPS = st.lists(st.one_of(st.none(), st.integers(1, SIZE)), max_size=40)
"""None gives the oldest piece back, a number takes one of that size."""


def place_for(is_taken: np.ndarray, behind: int, size: int) -> int | None:
    """Where a piece must go: right behind the newest, or at the beginning; None where bytes of both are taken."""
    for start in (behind, 0):
        if start + size <= SIZE and not is_taken[start : start + size].any():
            return start
    return None


@hypothesis.given(STEPS)
@hypothesis.settings(max_examples=300, deadline=None)
def test_pieces_are_where_a_map_of_the_bytes_says(steps):
    buffer, is_taken = ReadBuffer(SIZE), np.zeros(SIZE, bool)
    held = collections.deque()
    for num_bytes in steps:
        if num_bytes is None:
            for later in itertools.islice(held, 1, 2):
                with pytest.raises(ValueError, match=r"the oldest piece must be given back first, got \["):
                    buffer.give_back(later)
            if held:
                oldest = held.popleft()
                buffer.give_back(oldest)
                is_taken[oldest.start : oldest.stop] = False
            continue
        size = -(-num_bytes // UNIT) * UNIT
        start = place_for(is_taken, held[-1].stop if held else 0, size)
        piece = buffer.take(num_bytes)
        if start is None:
            assert piece is None
            continue
        assert (piece.start, piece.stop) == (start, start + size)
        is_taken[start : start + size] = True
        held.append(piece)
    for piece in held:
        buffer.give_back(piece)
    piece = buffer.take(SIZE)
    assert piece is not None, "all was given back, and all is not free"
    buffer.give_back(piece)
    with pytest.raises(ValueError, match="the oldest piece"):
        buffer.give_back(piece)


def test_more_than_there_is_is_refused_and_takes_nothing():
    buffer = ReadBuffer(SIZE)
    with pytest.raises(ValueError, match=f"at most the {SIZE} bytes of the read buffer, got {SIZE + UNIT}"):
        buffer.take(SIZE + 1)
    assert buffer.take(SIZE - 1) is not None
    assert buffer.take(1) is None


def test_a_view_is_the_memory_itself_aligned_as_the_device_wants_it():
    buffer, dtype = ReadBuffer(SIZE), np.dtype(ml_dtypes.bfloat16)
    buffer.take(3)
    piece = buffer.take(200)
    view = buffer.view(piece, (2, 5, 3), dtype)
    assert (view.shape, view.dtype) == ((2, 5, 3), dtype)
    assert view.ctypes.data % UNIT == 0
    assert view.ctypes.data == buffer.memory.ctypes.data + piece.start
    view[...] = 1
    assert (buffer.memory[piece.start : piece.start + view.nbytes].view(dtype) == 1).all()
