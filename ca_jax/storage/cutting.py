"""Forgetting tokens of a stored session, in place: at its end, its oldest, or any of them, in both tiers.

What stays is not moved: a block goes once no token in it is left, and the rest of a session keeps its rows. Where
scattered tokens went, a session in DRAM is copied together again before it wastes more than two blocks.

Belongs to the thread that keeps the books. Nothing here waits.

Not here: where tokens lie (places), what KV has seen (lineage), blocks and moves of the SSD (ssd_books).

Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.4.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ca_jax.storage.books import Entry
from ca_jax.storage.dram import DramTier
from ca_jax.storage.lineage import Lineage
from ca_jax.storage.placement import Placement
from ca_jax.storage.places import TokenPlaces
from ca_jax.storage.quota import ChargedBlocks
from ca_jax.storage.ssd_books import SsdBooks

_MAX_SPARE_BLOCKS = 2  # Beyond what its tokens need: first tokens that stay take a block, and the oldest block a part.


class Cutting:
    """Cuts sessions that are not in use. See the module.

    Args:
      dram: the blocks.
      blocks: their free list.
      placement: what is told of changes.
      ssd: the SSD tier, if there is one.
    """

    def __init__(self, dram: DramTier, blocks: ChargedBlocks, placement: Placement, ssd: SsdBooks | None) -> None:
        self._dram = dram
        self._layout = dram.layout
        self._blocks = blocks
        self._placement = placement
        self._ssd = ssd

    def shorten(self, entry: Entry, num_tokens: int, note: bytes | None = None) -> None:
        """Keeps only a session's first tokens, > 0, in both tiers and of what is on its way.

        Args:
          entry: of the session.
          num_tokens: how many.
          note: what to keep with it from now on; None keeps what is kept.
        """
        shorter = num_tokens < entry.num_tokens
        if shorter:  # First: a flush may read what is freed.
            entry.token_ids = entry.token_ids[:num_tokens].copy()
            entry.places = entry.places.take(num_tokens)
            self._placement.free_unused(entry)
        self._keep_note(entry, note)
        if self._ssd is not None:
            self._ssd.shorten(entry, num_tokens, note)
        if shorter or note is not None:
            self._placement.changed(entry)
        self._placement.place(entry)

    def discard(self, entry: Entry, discarded: np.ndarray, note: bytes | None = None) -> None:
        """Forgets any of a session's tokens, in both tiers and of what is on its way.

        Args:
          entry: of the session.
          discarded: bool `[T]`, which of the session's first T tokens go. Those behind stay, those it has not do not
            count.
          note: as for `shorten`.
        """
        if not entry.num_readable:
            return
        kept = np.ones(entry.num_readable, bool)
        num_tokens = min(len(kept), len(discarded))
        kept[:num_tokens] = ~discarded[:num_tokens]
        lineage = entry.known_lineage.after(discarded, len(kept))
        if note is None and lineage == entry.known_lineage and kept.all():
            return
        if not kept.any():
            self._placement.forget(entry)
            return
        in_dram = bool(entry.num_tokens)
        if in_dram:
            self._discard_in_dram(entry, kept, lineage)
        self._keep_note(entry, note)
        if self._ssd is not None:
            self._ssd.discard(entry, kept, lineage, note)
        if in_dram:
            self._compact(entry)
            self._placement.changed(entry)
        self._placement.place(entry)

    def adopt(self, entry: Entry, num_dropped: int) -> None:
        """Takes what is in DRAM, all of which has seen no dropped token, for a session that dropped so many."""
        if entry.lineage.num_dropped != num_dropped:
            entry.lineage = Lineage(num_dropped)
            self._placement.changed(entry)

    def _keep_note(self, entry: Entry, note: bytes | None) -> None:
        """Has a note go with the next flush too, should SSD forget the session before it has it."""
        if note is not None and self._ssd is not None:
            entry.note = note

    def _discard_in_dram(self, entry: Entry, kept: np.ndarray, lineage: Lineage) -> None:
        places, table = entry.places.keep(kept, self._layout.block_tokens)
        stays = set(table.tolist())
        gone = [block for index, block in enumerate(entry.block_ids) if index not in stays]
        entry.block_ids = [entry.block_ids[index] for index in table.tolist()]
        entry.token_ids = entry.token_ids[kept]
        entry.places, entry.lineage = places, lineage
        self._placement.free_dram(entry, gone)

    def _compact(self, entry: Entry) -> None:
        """Copies a session that wastes blocks to fresh ones, if there are any: what is published is never written.

        Blocks that it shares are not its to free, and no waste.
        """
        num_blocks = self._layout.num_blocks(entry.num_tokens)
        tenant = entry.owner.tenant
        if self._blocks.frees([entry.block_ids])[0] <= num_blocks + _MAX_SPARE_BLOCKS:
            return
        if self._blocks.lacking(num_blocks) > 0 or self._blocks.excess(tenant, num_blocks) > 0:
            return
        fresh = self._blocks.alloc(tenant, num_blocks)
        if fresh is None:
            raise RuntimeError(f"room for {num_blocks} blocks of {entry.key!r} is there and is not: books are wrong")
        size, slab = self._layout.block_tokens, self._dram.slab
        for part in entry.places.by_block(size):
            block = slab[entry.block_ids[part.index]]
            rows = block[:, :, part.rows]  # [L, 2, n, K, H]
            done = 0
            while done < part.num_tokens:
                index, row = divmod(part.first_token + done, size)
                num_rows = min(size - row, part.num_tokens - done)
                slab[fresh[index]][:, :, row : row + num_rows] = rows[:, :, done : done + num_rows]
                done += num_rows
        old, entry.block_ids = entry.block_ids, list(fresh)
        entry.places = TokenPlaces.dense(entry.num_tokens)
        self._placement.free_dram(entry, old)
        if self._ssd is not None:
            self._ssd.relaid(entry)


def as_mask(discarded: npt.ArrayLike) -> np.ndarray:
    """Which tokens to discard, as bool `[T]`.

    Raises:
      ValueError: it is something else.
    """
    mask = np.asarray(discarded)
    if mask.ndim != 1 or mask.dtype != np.bool_:
        raise ValueError(f"discarded wanted bool[T], found {mask.dtype}{list(mask.shape)}")
    return mask
