"""How many tokens leave and which, against what is said of them: shares of the window, first tokens, whole turns."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ca_jax.overflow.config import OverflowConfig, num_leaving, oldest_first


def leaving(window: int, num_tokens: int, num_wanted: int, **config: object) -> int:
    return num_leaving(OverflowConfig(**config), window=window, num_tokens=num_tokens, num_wanted=num_wanted)


@pytest.mark.parametrize(
    ("num_tokens", "num_wanted", "config", "expected"),
    [
        (90, 10, {}, 0),
        (90, 11, {}, 50),
        (100, 1, {}, 50),
        (100, 50, {}, 50),
        (100, 51, {}, 96),  # Two shares, but for the first tokens.
        (100, 51, {"keep_first_tokens": 0}, 100),
        (100, 1, {"truncation_ratio": 0.25}, 25),
        (100, 30, {"truncation_ratio": 0.25}, 50),
        (100, 1, {"truncation_ratio": 1.0, "keep_first_tokens": 0}, 100),
        (100, 1, {"truncation_ratio": 0.001}, 1),  # A share is a token at least.
        (100, 3, {"truncation_ratio": 0.001}, 3),
        (3, 200, {}, 0),  # None but the first, which stay.
        (0, 200, {}, 0),
    ],
)
def test_whole_shares_leave(num_tokens, num_wanted, config, expected):
    assert leaving(100, num_tokens, num_wanted, **config) == expected


@given(
    window=st.integers(1, 300),
    num_tokens=st.integers(0, 400),
    num_wanted=st.integers(0, 400),
    keep_first=st.integers(0, 20),
    ratio=st.floats(0, 1, exclude_min=True),
)
@example(window=100, num_tokens=100, num_wanted=1, keep_first=4, ratio=5e-324)
def test_as_many_leave_as_make_room_and_no_share_more(window, num_tokens, num_wanted, keep_first, ratio):
    count = leaving(window, num_tokens, num_wanted, keep_first_tokens=keep_first, truncation_ratio=ratio)
    may_leave = max(0, num_tokens - keep_first)
    share = max(1, round(ratio * window))
    assert 0 <= count <= may_leave
    assert num_tokens + num_wanted > window or count == 0
    if min(num_tokens, keep_first) + num_wanted <= window:
        assert num_tokens - count + num_wanted <= window, "there was room to make"
    else:
        assert count == may_leave, "as much room as can be"
    if count:
        assert count % share == 0 or count == may_leave
        assert num_tokens - max(0, count - share) + num_wanted > window or count == may_leave % share, "a share less"


@pytest.mark.parametrize(
    ("turn_starts", "num_needed", "stop"),
    [
        ([0, 30, 60, 90], 1, 60),
        ([0, 30, 50, 58, 90], 1, 50),  # As far from 54 as the next one: fewer leave.
        ([0, 30, 60, 90], 57, 90),  # The nearest one makes too little room.
        ([0, 30, 60, 90], 56, 60),
        ([0], 1, 100),  # The end of the history is where the next turn begins.
        ([0, 4], 1, 100),  # Nothing is before the second but what stays.
        ([0, 3], 1, 100),
        ([0, 90], 90, 100),
        ([], 1, 54),
    ],
)
def test_whole_turns_leave_up_to_the_nearest_that_makes_room(turn_starts, num_needed, stop):
    starts = [*turn_starts, 100] if turn_starts else []
    mask = oldest_first(100, 50, 4, starts, num_needed)
    assert np.flatnonzero(mask).tolist() == list(range(4, stop))


@given(
    num_tokens=st.integers(1, 120),
    count=st.integers(1, 120),
    keep_first=st.integers(0, 10),
    turn_starts=st.lists(st.integers(0, 120), max_size=6).map(sorted),
    num_needed=st.integers(0, 120),
)
def test_first_tokens_never_leave_and_the_rest_in_one_piece(num_tokens, count, keep_first, turn_starts, num_needed):
    turn_starts = [start for start in turn_starts if start <= num_tokens]
    gone = np.flatnonzero(oldest_first(num_tokens, count, keep_first, turn_starts, num_needed))
    assert gone.tolist() == list(range(keep_first, keep_first + len(gone)))
    fitting = [start for start in turn_starts if start - keep_first >= max(num_needed, 1)]
    if fitting:
        stop = keep_first + len(gone)
        nearest = min(abs(start - min(keep_first + count, num_tokens)) for start in fitting)
        assert stop in fitting
        assert abs(stop - min(keep_first + count, num_tokens)) == nearest
