"""Policies as what they are: pure choices over a view."""

from __future__ import annotations

import pytest

from ca_jax.storage import FifoPolicy, LruPolicy, StoredEntry, StoreView, make_policy


def view(*entries: tuple[str, int, bool, float]) -> StoreView:
    """A view of (key, blocks, pinned, last used), created in the order given."""
    stored = [
        StoredEntry(key=key, num_blocks=blocks, pinned=pinned, last_used_s=used, created_s=float(i))
        for i, (key, blocks, pinned, used) in enumerate(entries)
    ]
    return StoreView(by_last_used=tuple(sorted(stored, key=lambda entry: entry.last_used_s)), by_created=tuple(stored))


def test_lru_takes_the_least_recently_used_and_no_more_than_needed():
    stored = view(("a", 2, False, 30), ("b", 1, False, 10), ("c", 2, False, 20))
    assert LruPolicy().choose_victims(stored, 1) == ("b",)
    assert LruPolicy().choose_victims(stored, 3) == ("b", "c")
    assert LruPolicy().choose_victims(stored, 5) == ("b", "c", "a")


def test_fifo_takes_the_oldest_used_since_or_not():
    stored = view(("a", 2, False, 30), ("b", 1, False, 10), ("c", 2, False, 20))
    assert FifoPolicy().choose_victims(stored, 3) == ("a", "b")


@pytest.mark.parametrize("name", ["lru", "fifo"])
def test_the_choice_is_all_the_room_or_none_and_never_what_is_pinned(name):
    stored = view(("a", 2, True, 1), ("b", 1, False, 2), ("c", 2, False, 3))
    assert make_policy(name).choose_victims(stored, 3) == ("b", "c")
    assert make_policy(name).choose_victims(stored, 4) == ()


def test_an_entry_that_holds_nothing_is_no_victim():
    assert LruPolicy().choose_victims(view(("a", 0, False, 1), ("b", 1, False, 2)), 1) == ("b",)


def test_an_unknown_policy_is_named():
    with pytest.raises(ValueError, match="one of lru, fifo; found 'best'"):
        make_policy("best")
