"""What a store should hold, told by a dict: tokens whose KV is known, sessions of them, and books of their blocks.

KV is a function of the tokens before it, of those too that were discarded since, so that whatever is loaded can be held
against what it must be. The reference knows tokens, and not blocks or threads.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
from typing import NamedTuple

import numpy as np

from ca_jax.storage.layout import KVLayout
from ca_jax.storage.placement.blocks import ChargedBlocks
from ca_jax.storage.tickets import LoadTicket, SaveTicket
from ca_jax.storage.tiers.mover import FlushTask
from ca_jax.storage.tokens import PLAIN, Lineage, SsdCopy, TokenPlaces

from . import store_helpers as kit

NOWHERE = TokenPlaces()


class Token(NamedTuple):
    """A token whose KV is known."""

    token_id: int
    seen: bytes
    """A digest of all that its KV was computed behind, and of itself."""


def tokens_of(token_ids: list[int], behind: list[Token]) -> list[Token]:
    """Tokens that are computed behind others."""
    seen, tokens = behind[-1].seen if behind else b"", []
    for token_id in token_ids:
        seen = hashlib.shake_128(seen + token_id.to_bytes(4, "little", signed=True)).digest(16)
        tokens.append(Token(token_id, seen))
    return tokens


def ids_of(tokens: list[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def kv_of(layout: KVLayout, tokens: list[Token]) -> np.ndarray:
    """Their KV, `[L, 2, T, K, H]`: any bits."""
    return np.stack([row_of(layout, token.seen) for token in tokens], axis=2)


@functools.lru_cache(maxsize=1 << 14)
def row_of(layout: KVLayout, seen: bytes) -> np.ndarray:
    """KV of one token, `[L, 2, K, H]`."""
    shape = (layout.num_layers, 2, layout.groups[0].num_kv_heads, layout.groups[0].head_dim)
    num_bytes = int(np.prod(shape)) * layout.numpy_dtype.itemsize
    return np.frombuffer(hashlib.shake_128(seen).digest(num_bytes), layout.numpy_dtype).reshape(shape)


def lineage_after(lineage: Lineage, mask: list[bool], num_stored: int) -> Lineage:
    """What has been dropped once a mask was."""
    stays = [i for i, gone in enumerate(mask) if not gone] + list(range(len(mask), num_stored))
    dropped = [i for i, gone in enumerate(mask) if gone and stays and i < stays[-1]]
    if not dropped:
        return lineage
    num_plain = dropped[0] if lineage.num_plain is None else min(dropped[0], lineage.num_plain)
    return Lineage(lineage.num_dropped + len(dropped), num_plain)


def num_common(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def num_blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // kit.BLOCK_TOKENS)


@dataclasses.dataclass
class Reference:
    """What should be known of one session."""

    tokens: list[Token] = dataclasses.field(default_factory=list)
    """Published in DRAM."""
    places: TokenPlaces = NOWHERE
    """Where they lie."""
    lineage: Lineage = PLAIN
    ssd: list[Token] | None = None
    ssd_blocks: tuple[int, ...] = ()
    ssd_copy: SsdCopy | None = None
    """The books' own, when it was looked at last: another one after each flush, even into the same blocks."""
    num_flushes: int = 0
    """Of all sessions, by then: a cut makes another copy too."""
    ssd_lineage: Lineage = PLAIN
    flush: FlushTask | None = None
    """Under way when it was looked at last."""
    flushed: list[Token] = dataclasses.field(default_factory=list)
    """What it writes."""
    flushed_left: list[Token] = dataclasses.field(default_factory=list)
    """What is left of it by now."""
    flushed_lineage: Lineage = PLAIN
    has_left: bool = False
    """Whether it is another state than what is in DRAM."""
    is_cut_after_flush: bool = False
    """Whether a flush was under way when tokens left: SSD forgets them when it has ended."""
    saves: list[tuple[SaveTicket, list[Token]]] = dataclasses.field(default_factory=list)
    loads: list[LoadTicket] = dataclasses.field(default_factory=list)
    is_borrowed: bool = False
    """Whether it has nothing but what it began with, which was another's: SSD does not get that."""
    note: bytes = b""
    pinned: bool = False
    ttl_s: float | None = None
    deferred_s: float = -1.0
    """When its time was over last while it had to stay."""

    @property
    def stop(self) -> int:
        return self.saves[-1][0].stop_token if self.saves else len(self.tokens)

    @property
    def stop_place(self) -> int:
        return self.places.num_places + sum(len(tokens) for _, tokens in self.saves)

    @property
    def in_use(self) -> bool:
        return bool(self.saves or self.loads)

    def readable(self) -> tuple[list[Token], Lineage]:
        """What can be loaded, perhaps after a fetch."""
        return (self.tokens, self.lineage) if self.tokens else (self.ssd or [], self.ssd_lineage)


def check_books(blocks: ChargedBlocks, tables: list[tuple[str, list[int]]]) -> int:
    """Blocks are taken, counted and charged as tenants' tables hold them; how many."""
    held = collections.Counter(block for _, table in tables for block in table)
    taken = {block for block, is_taken in enumerate(blocks._taken) if is_taken}
    assert taken == held.keys()
    assert blocks.num_free + len(held) == blocks.num_blocks
    assert blocks._others == {block: number - 1 for block, number in held.items() if number > 1}
    holders = {(tenant, block) for tenant, table in tables for block in table}
    assert len(holders) == len(held), "no two tenants hold a block"
    assert collections.Counter(tenant for tenant, _ in holders) == collections.Counter(blocks._used)
    return len(held)
