"""What of a session is on SSD: its blocks, where its tokens lie in them, and what cutting leaves of that.

A seal is of the rows that were written in a block, and stays valid when tokens of it are forgotten: how many rows were
written is therefore kept apart from where the tokens lie.

Not here: tokens, seals and notes, which are read when they are needed (catalog_rows), who cuts what (cutting).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ca_jax.storage.lineage import PLAIN, Lineage
from ca_jax.storage.places import TokenPlaces
from ca_jax.storage.prefix import HASH_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """How a session on SSD differs from one that was never cut: its tokens dense, all rows theirs, nothing dropped."""

    places: TokenPlaces
    """Where its tokens lie in its blocks."""
    num_rows: int
    """Rows that were written: all of its blocks but the last, and so many of that. A row may have lost its token."""
    lineage: Lineage = PLAIN
    """What was dropped from it."""

    @classmethod
    def of(cls, places: TokenPlaces, num_rows: int, lineage: Lineage) -> Cuts | None:
        """The same; None where there is no difference."""
        if places.is_dense and num_rows == places.num_places and lineage == PLAIN:
            return None
        return cls(places=places, num_rows=num_rows, lineage=lineage)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SsdCopy:
    """What of a session is on SSD, published in the catalog. Immutable."""

    num_tokens: int
    """Tokens whose KV it is."""
    block_ids: np.ndarray
    """The block table: int64 `[num_blocks]`, in token order."""
    cuts: Cuts | None = None
    """What cutting has left of it; None if it was never cut."""
    prefixes: bytes = b""
    """`prefix_hashes` of its leading tokens that others may have the KV of: what it is found by."""

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return len(self.block_ids)

    @property
    def places(self) -> TokenPlaces:
        """Where the tokens lie in the blocks."""
        return TokenPlaces.dense(self.num_tokens) if self.cuts is None else self.cuts.places

    @property
    def num_rows(self) -> int:
        """Rows that were written in the blocks, up to the last one."""
        return self.num_tokens if self.cuts is None else self.cuts.num_rows

    @property
    def lineage(self) -> Lineage:
        """What was dropped from the session."""
        return PLAIN if self.cuts is None else self.cuts.lineage

    def keep(self, kept: np.ndarray, lineage: Lineage, block_tokens: int) -> tuple[SsdCopy, np.ndarray]:
        """Forgets tokens, and the blocks that have none left.

        Args:
          kept: bool `[num_tokens]`, which tokens stay.
          lineage: what has been dropped then.
          block_tokens: tokens in a block.

        Returns:
          What stays, and which blocks these are: int64 `[n]`, ascending.

        Raises:
          ValueError: the mask is of another length.
        """
        places, table = self.places.keep(kept, block_tokens)
        num_rows = rows_left(self.num_rows, table, block_tokens)
        num_plain = lineage.plain_tokens(len(kept) if kept.all() else int(np.argmin(kept)))
        return SsdCopy(
            num_tokens=places.num_tokens,
            block_ids=self.block_ids[table],
            cuts=Cuts.of(places, num_rows, lineage),
            prefixes=self.prefixes[: num_plain // block_tokens * HASH_BYTES],
        ), table

    def find_in(self, before: SsdCopy, block_tokens: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Which tokens and blocks of an earlier state these are; None if they are none of it.

        A block and a row say which token it is, as long as the session is only cut.

        Args:
          before: the state.
          block_tokens: tokens in a block.

        Returns:
          Which tokens of `before`, int64 `[num_tokens]`, and which of its blocks, int64 `[num_blocks]`.
        """
        index_of = {block: index for index, block in enumerate(before.block_ids.tolist())}
        if not index_of.keys() >= set(self.block_ids.tolist()):
            return None
        blocks = np.array([index_of[block] for block in self.block_ids.tolist()], np.int64)
        places, places_before = self.places.to_array(), before.places.to_array()
        wanted = blocks[places // block_tokens] * block_tokens + places % block_tokens
        tokens = np.searchsorted(places_before, wanted)
        if (tokens >= len(places_before)).any() or not np.array_equal(places_before[tokens], wanted):
            return None
        return tokens, blocks


def rows_left(num_rows: int, kept_blocks: np.ndarray, block_tokens: int) -> int:
    """How many of the first `num_rows` rows of a block table are leading rows of what stays of it.

    Args:
      num_rows: leading rows of the table.
      kept_blocks: int64 `[n]`, which of its blocks stay, ascending.
      block_tokens: rows in a block.
    """
    num_full, rest = divmod(num_rows, block_tokens)
    num_kept = int(np.searchsorted(kept_blocks, num_full))
    has_part = num_kept < len(kept_blocks) and kept_blocks[num_kept] == num_full
    return num_kept * block_tokens + (rest if has_part else 0)
