"""The lengths that functions are compiled for."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ca_jax.device.buckets import batch_buckets, history_buckets, new_token_buckets, pad_to


@given(st.integers(1, 32).map(lambda n: 64 * n))
def test_new_tokens_are_padded_by_little_and_at_most_to_the_chunk(chunk):
    buckets = new_token_buckets(chunk)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == chunk
    for size in range(1, chunk + 1):
        padded = pad_to(buckets, size)
        allowed = 8 if size <= 8 else 16 if size <= 128 else 32 if size <= 256 else 64
        assert size <= padded < size + allowed


@given(st.integers(1, 40_000))
def test_history_is_padded_by_little_and_holds_the_window(window):
    buckets = history_buckets(window)
    assert buckets[0] == 0
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-2] < window <= buckets[-1]
    steps = {(low, high - low) for low, high in itertools.pairwise(buckets)}
    assert all(step == (256 if low < 1024 else 512 if low < 4096 else 1024) for low, step in steps)


@given(st.integers(1, 300))
def test_batches_are_powers_of_two_and_the_maximum(max_batch_size):
    buckets = batch_buckets(max_batch_size)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == max_batch_size
    assert set(buckets) - {max_batch_size} == {1 << i for i in range(9) if 1 << i < max_batch_size}


@given(st.lists(st.integers(0, 50), min_size=1, unique=True).map(sorted), st.integers(0, 60))
def test_padding_takes_the_smallest_that_holds(buckets, size):
    if size > buckets[-1]:
        with pytest.raises(ValueError, match=f"the size must be at most {buckets[-1]}, got {size}"):
            pad_to(tuple(buckets), size)
    else:
        assert pad_to(tuple(buckets), size) == min(bucket for bucket in buckets if bucket >= size)
