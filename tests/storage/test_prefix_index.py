"""The session in DRAM that begins with the same tokens for longest, against looking at all of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ca_jax.storage.prefix_index import PrefixIndex, Published

TOKEN_IDS = st.lists(st.sampled_from([0, 256]), max_size=6)
MIN_TOKENS = 2


def published(token_ids: list[int], tenant: str = "x", num_plain: int | None = None) -> Published:
    num_plain = len(token_ids) if num_plain is None else num_plain
    return Published(tenant=tenant, token_ids=np.array(token_ids, np.int32), num_plain=num_plain)


def num_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from("abcdef"),
            st.none() | st.tuples(TOKEN_IDS, st.sampled_from("xy"), st.integers(0, 7)),
            st.none() | TOKEN_IDS,
        ),
        max_size=12,
    ),
    wanted=TOKEN_IDS,
)
def test_it_is_the_longest_that_a_scan_finds_of_the_tenants_own(changes, wanted):
    known: dict[str, Published] = {}
    index = PrefixIndex(known.get, MIN_TOKENS)
    for key, change, looked_for in (*changes, ("a", None, wanted)):
        if change is not None:
            token_ids, tenant, num_plain = change
            known[key] = published(token_ids, tenant, min(num_plain, len(token_ids)))
        else:
            known.pop(key, None)
        index.changed(key)
        if looked_for is None:  # Several changes come before a search.
            continue
        common = {
            name: num_common(each.token_ids[: each.num_plain].tolist(), looked_for)
            for name, each in known.items()
            if each.tenant == "x"
        }
        longest = max(common.values(), default=0)
        match = index.find("x", np.array(looked_for, np.int32))
        if longest < MIN_TOKENS:
            assert match is None
        else:
            assert (match.num_tokens, common[match.key]) == (longest, longest)
    assert len(index) == sum(each.num_plain >= MIN_TOKENS for each in known.values())


def test_what_changes_between_searches_is_copied_once():
    looked_up: list[str] = []
    session = published([1, 2, 3])

    def look_up(key: str) -> Published:
        looked_up.append(key)
        return session

    index = PrefixIndex(look_up, MIN_TOKENS)
    for num_tokens in range(3, 100):
        session = published(list(range(num_tokens)))
        index.changed("a")
    assert looked_up == []
    assert index.find("x", np.arange(90)).num_tokens == 90
    assert index.find("x", np.arange(1, 9)) is None
    assert looked_up == ["a"]
