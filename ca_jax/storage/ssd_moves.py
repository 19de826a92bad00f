"""What the SSD's books keep of a move while it is under way.

Not here: who begins and ends moves (ssd_books), the moves themselves (ssd_worker).
"""

from __future__ import annotations

import numpy as np

from ca_jax.storage.books import Entry
from ca_jax.storage.lineage import Lineage


class Cut:
    """Tokens that are forgotten: of what SSD has, or will have when the flush that is under way has ended.

    Args:
      kept: bool `[T]`, which of the first T tokens stay.
      lineage: what has been dropped then.
      note: what to keep with the session from then on; None keeps what is kept.
    """

    def __init__(self, kept: np.ndarray, lineage: Lineage, note: bytes | None) -> None:
        self.kept = kept
        self.lineage = lineage
        self.note = note
        self.num_flushed = 0
        """How many of the tokens of that flush are left by this cut and those before."""


class Move:
    """A task under way, what is free only once it has settled, and what happened to its session meanwhile.

    Args:
      entry: of the session.
      dram_blocks: blocks of DRAM that are the move's.
      ssd_blocks: blocks of SSD, likewise.
      read_blocks: blocks of DRAM that it reads, and that are the session's.
    """

    def __init__(
        self, entry: Entry, dram_blocks: list[int], ssd_blocks: list[int], read_blocks: frozenset[int]
    ) -> None:
        self.entry = entry
        self.dram_blocks = dram_blocks
        self.ssd_blocks = ssd_blocks
        self.read_blocks = read_blocks
        self.cuts: list[Cut] = []
        """Of the session meanwhile: what a flush brings to SSD is cut so when it has ended."""
        self.left = False
        """Whether what is in DRAM now is another state of the session."""
        self.ended = False
        """Whether what became of it is taken in."""
        self.late = False
        """Whether it missed its deadline."""
