"""The lengths that functions are compiled for."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ca_jax.device.buckets import batch_buckets, history_buckets, pad_to, token_buckets


@given(st.integers(1, 64).map(lambda n: 64 * n), st.booleans())
def test_steps_are_padded_by_little_and_at_most_to_their_most_tokens(most, coarse):
    buckets = token_buckets(most, coarse)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == most
    for size in range(1, most + 1):
        fine = 16 if size <= 128 else 32 if size <= 256 else 128 if size <= 512 else size
        assert size <= pad_to(buckets, size) < size + (max(size, 16) if coarse else fine)


@given(st.integers(1, 40_000))
def test_history_is_padded_by_little_and_holds_the_window(window):
    buckets = history_buckets(window)
    assert buckets[0] == 0
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-2] < window <= buckets[-1]
    for low, high in itertools.pairwise(buckets):
        assert high <= max(low * (1.5 if 1024 <= low < 4096 else 2), 256)


@given(st.integers(1, 300), st.sampled_from([1, 2, 8]))
def test_batches_are_powers_of_two_and_the_maximum(max_batch_size, least):
    buckets = batch_buckets(max_batch_size, least)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == max_batch_size
    assert set(buckets) - {max_batch_size} == {1 << i for i in range(9) if least <= 1 << i < max_batch_size}


@given(st.lists(st.integers(0, 50), min_size=1, unique=True).map(sorted), st.integers(0, 60))
def test_padding_takes_the_smallest_that_holds(buckets, size):
    if size > buckets[-1]:
        with pytest.raises(ValueError, match=f"the size must be at most {buckets[-1]}, got {size}"):
            pad_to(tuple(buckets), size)
    else:
        assert pad_to(tuple(buckets), size) == min(bucket for bucket in buckets if bucket >= size)
