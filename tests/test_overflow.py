"""How many tokens leave and which: shares of the window, first tokens, whole turns; and what discarders choose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ca_jax.errors import InvalidRequestError
from ca_jax.models import kv
from ca_jax.overflow.config import (
    DiscardContext,
    HeavyHitters,
    OldestFirst,
    OverflowConfig,
    check_discarded,
    num_leaving,
    oldest_first,
)
from ca_jax.testing.tiny import tiny_config


def leaving(window: int, num_tokens: int, num_wanted: int, **config: object) -> int:
    return num_leaving(OverflowConfig(**config), window=window, num_tokens=num_tokens, num_wanted=num_wanted)


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


@given(
    num_tokens=st.integers(1, 120),
    count=st.integers(1, 120),
    keep_first=st.integers(0, 10),
    turn_starts=st.lists(st.integers(0, 120), max_size=6).map(sorted),
    num_needed=st.integers(0, 120),
)
def test_first_tokens_never_leave_and_whole_turns_up_to_the_nearest_that_makes_room(
    num_tokens, count, keep_first, turn_starts, num_needed
):
    turn_starts = [start for start in turn_starts if start <= num_tokens]
    gone = np.flatnonzero(oldest_first(num_tokens, count, keep_first, turn_starts, num_needed))
    assert gone.tolist() == list(range(keep_first, keep_first + len(gone)))
    stop, wanted = keep_first + len(gone), min(keep_first + count, num_tokens)
    fitting = [start for start in turn_starts if start - keep_first >= max(num_needed, 1)]
    if fitting:
        assert stop in fitting
        assert (abs(stop - wanted), stop) == min((abs(start - wanted), start) for start in fitting), (
            "of equals the fewer"
        )
    else:
        assert stop == max(keep_first, wanted)


# Discarders.


@st.composite
def contexts(draw) -> DiscardContext:
    num_tokens = draw(st.integers(0, 40))
    scores = draw(st.lists(st.integers(0, 6), min_size=num_tokens, max_size=num_tokens))  # Few values: many ties.
    return DiscardContext(
        num_tokens=num_tokens,
        num_leaving=draw(st.integers(0, num_tokens)),
        keep_first=draw(st.integers(0, num_tokens + 3)),
        attention=np.array(scores, np.float32) / 4,
    )


def one_by_one(context: DiscardContext, first: int, recent: int) -> list[int]:
    """Which leave where, of those neither first nor recent, whoever received least goes first, of equals the oldest."""
    left = list(range(first, context.num_tokens - recent))
    leaving: list[int] = []
    while left and len(leaving) < context.num_leaving:
        gone = left[0]
        for place in left:
            if context.attention[place] < context.attention[gone]:
                gone = place
        left.remove(gone)
        leaving.append(gone)
    return sorted(leaving)


@given(context=contexts(), num_sinks=st.integers(0, 6))
def test_oldest_leave_behind_those_kept_and_behind_sinks(context, num_sinks):
    by_age = [place for place in range(context.num_tokens) if place >= context.keep_first]
    # Sinks are taken last, the last of them first; with those kept set aside.
    in_order = [place for place in by_age if place >= num_sinks]
    in_order += [place for place in reversed(by_age) if place < num_sinks]
    expected = sorted(in_order[: context.num_leaving])
    leaving = OldestFirst(num_sinks=num_sinks).choose(context)
    assert (leaving.tolist(), leaving.dtype) == (expected, np.int64)


@settings(max_examples=200)
@given(context=contexts(), ratio=st.sampled_from([0.0, 0.25, 0.5, 1.0]), num_sinks=st.integers(0, 6))
def test_heavy_hitters_leave_by_attention_one_by_one(context, ratio, num_sinks):
    num_staying = context.num_tokens - context.num_leaving
    first = max(context.keep_first, min(num_sinks, num_staying))
    recent = max(0, min(round(ratio * num_staying), num_staying - first))
    leaving = HeavyHitters(recent_ratio=ratio, num_sinks=num_sinks).choose(context)
    assert (leaving.tolist(), leaving.dtype) == (one_by_one(context, first, recent), np.int64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda fields=fields: DiscardContext(**{"num_tokens": 5, "num_leaving": 2, **fields}), message)
            for fields, message in (
                ({"num_leaving": 6}, "num_leaving .*got 6"),
                ({"keep_first": -1}, "keep_first .*got -1"),
                ({"attention": np.zeros(4)}, r"attention .*\(5,\), got \(4,\)"),
                ({"attention": np.array([0, 1, np.nan, 0, 0])}, "attention .*nan"),
                ({"kv": kv.empty(tiny_config(), 1, 4)}, r"room of kv .*got \(\(1,\), 4\)"),
            )
        ),
        (lambda: OldestFirst(num_sinks=-1), "num_sinks .*got -1"),
        (lambda: HeavyHitters(recent_ratio=1.5), "recent_ratio .*got 1.5"),
        (lambda: HeavyHitters().choose(DiscardContext(num_tokens=5, num_leaving=2)), "heavy_hitters .*attention"),
    ],
)
def test_what_cannot_be_chosen_from_or_by_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@given(
    mask=st.lists(st.booleans(), max_size=30).filter(lambda mask: not mask or not all(mask)), seed=st.integers(0, 99)
)
def test_a_mask_and_its_positions_in_any_order_name_the_same(mask, seed):
    positions = np.random.default_rng(seed).permutation(np.flatnonzero(mask))
    for named in (positions, positions.astype(np.uint16), positions.tolist(), np.array(mask, bool)):
        found = check_discarded(named, len(mask))
        assert found.dtype == bool
        assert found.tolist() == mask


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([0, 5], "5 tokens, got 5$"),
        ([-1, 2], "5 tokens, got -1$"),
        (list(range(3, 12)), "5, 6, 7, 8, 9 and 2 more$"),
        ([3, 1, 3], "once, .* 3$"),
        ([0, 1, 2, 3, 4], "all 5$"),
        ([True] * 4, "5 tokens, .* 4$"),
        ([0.0, 1.0], r"shape \(2,\) and dtype float64$"),
        (np.zeros((2, 5), bool), r"shape \(2, 5\) and dtype bool$"),
        ({1, 2}, r"shape \(\) and dtype object$"),
        ([[1], [2, 3]], "makes no array"),
    ],
)
def test_what_cannot_be_discarded_is_refused(named, message):
    with pytest.raises(InvalidRequestError, match=message):
        check_discarded(named, 5)
