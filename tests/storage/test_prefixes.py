"""The session that begins with the same tokens for longest, in DRAM and on SSD, against looking at all of them."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ca_jax.storage.placement.orders import LookAhead
from ca_jax.storage.records import Owner
from ca_jax.storage.sessions import Entry, SessionIndex
from ca_jax.storage.tokens import Lineage, PrefixIndex, Published, SsdCopy, TokenPlaces, as_units, prefix_hashes

from .store_helpers import StoppedClock
from .store_reference import num_common

TOKEN_IDS = st.lists(st.sampled_from([0, 256]), max_size=6)
MIN_TOKENS = BLOCK_TOKENS = 2


def published(token_ids: list[int], tenant: str = "x", num_plain: int | None = None) -> Published:
    num_plain = len(token_ids) if num_plain is None else num_plain
    return tenant, np.array(token_ids, np.int32), num_plain


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
    index = PrefixIndex(known.get, 4, MIN_TOKENS)
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
            name: num_common(units[:num_units].tolist(), looked_for)
            for name, (tenant, units, num_units) in known.items()
            if tenant == "x"
        }
        longest = max(common.values(), default=0)
        num_tokens, key = index.find("x", as_units(np.array(looked_for)))
        if longest < MIN_TOKENS:
            assert (num_tokens, key) == (0, "")
        else:
            assert (num_tokens, common[key]) == (longest, longest)
    assert len(index._indexed) == sum(num_units >= MIN_TOKENS for _, _, num_units in known.values())


def test_a_session_that_comes_to_share_more_or_less_of_the_same_tokens_is_found_by_as_many():
    known: dict[str, Published] = {}
    index = PrefixIndex(known.get, 4)
    tokens = np.arange(12)
    for num_units in itertools.chain(*itertools.permutations(range(1, 13), 2)):
        known["a"] = ("x", tokens, num_units)
        index.changed("a")
        assert index.find("x", as_units(tokens)) == (num_units, "a")


OWNERS = {"x": Owner(tenant="x"), "y": Owner(tenant="y"), "z": Owner(tenant="x", variant="0f" * 32)}
TOKENS_ON_SSD = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@given(
    sessions=st.lists(st.tuples(TOKENS_ON_SSD, st.sampled_from("xyz"), st.none() | st.integers(0, 9), st.booleans())),
    wanted=st.lists(st.integers(0, 1), max_size=9),
)
def test_in_both_tiers_it_is_the_longest_that_a_scan_finds_on_ssd_by_whole_blocks(sessions, wanted):
    table = SessionIndex(LookAhead(), 99, BLOCK_TOKENS, StoppedClock())
    agreeing: dict[str, tuple[int, bool]] = {}  # Tokens, and of equals that in DRAM.
    with table._prefixes.loading(), table._far_prefixes.loading():
        for number, (tokens, tenant, num_plain, in_dram) in enumerate(sessions):
            lineage = Lineage(0 if num_plain is None else 1, num_plain)
            plain = tokens[: lineage.plain_tokens(len(tokens))]
            entry = Entry(key=str(number), owner=OWNERS[tenant], created_s=0.0, last_used_s=0.0)
            entry.ssd = SsdCopy(
                places=TokenPlaces.dense(len(tokens)),
                block_ids=np.arange(5),
                lineage=lineage,
                prefixes=prefix_hashes(np.array(plain), BLOCK_TOKENS),
            )
            if in_dram:
                entry.token_ids, entry.lineage = np.array(tokens, np.int32), lineage
            if tenant == "x":
                common = min(num_common(plain, wanted), len(plain))
                num_full = common // BLOCK_TOKENS * BLOCK_TOKENS
                agreeing[entry.key] = (common, True) if in_dram and num_full else (num_full, False)
            table.add(entry)
    for in_dram in (False, True) if wanted else ():
        key = table.find_prefix("x", wanted, in_dram=in_dram)
        longest = max((each for each in agreeing.values() if each[1] or not in_dram), default=(0, False))
        assert (key is None, agreeing.get(key, (0, False))) == (not longest[0], longest)


def test_each_hash_is_of_the_one_before_and_its_own_block():
    token_ids = np.arange(1, 12)
    expected, last = b"", b""
    for block in ([1, 2, 3, 4], [5, 6, 7, 8]):  # What is behind the last full block is in none.
        last = hashlib.sha256(last + np.array(block, "<i4").tobytes()).digest()[:8]
        expected += last
    assert prefix_hashes(token_ids, 4) == expected
    assert prefix_hashes(token_ids, 4, known=expected[:8]) == expected
    assert prefix_hashes(token_ids[:8], 4) == expected
    assert prefix_hashes(token_ids[:3], 4) == b""


def test_a_cut_keeps_hashes_of_blocks_before_it_alone():
    prefixes = prefix_hashes(np.arange(12), 4)
    copy = SsdCopy(block_ids=np.array([7, 8, 9]), places=TokenPlaces.dense(12), prefixes=prefixes)
    kept = np.arange(12) != 9
    cut, _ = copy.keep(kept, Lineage().after(~kept, 12), 4)
    assert cut.prefixes == prefixes[:16]


def test_no_tenant_is_named_like_a_variant_of_another():
    variant = "0f" * 32
    assert Owner(tenant="bob", variant=variant).domain != Owner(tenant="bob").domain
    with pytest.raises(ValueError, match="tenant's name must be one that does not end in"):
        Owner(tenant=f"bob+{variant}")
