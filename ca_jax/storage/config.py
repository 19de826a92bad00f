"""What a user may say about the AttentionStore.

Not here: the shape of KV (`KVLayout`), which follows from the model.
"""

from __future__ import annotations

import dataclasses
import math

from ca_jax.storage.policy import EVICTION_POLICIES

GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Sizes and policy of the AttentionStore.

    Raises:
      ValueError: a cap that is negative or not finite, a block of no tokens, an unknown policy.
    """

    dram_gib: float = 2.0
    """Cap of the DRAM tier, GiB; a hard one, allocated at start. 0 turns the store off: all saves are skipped."""
    block_tokens: int = 128
    """Tokens in a block. Measured on 2 CPU cores, 2,048 tokens of 30 layers x 3 KV heads x 64, fp32: loads ran at
    23 / 25 / 27 / 27 GB/s with blocks of 32 / 64 / 128 / 256 tokens, so 128 is where speed ends to grow; a session
    wastes half a block on average, which is 3 MB then and 6 MB at 256."""
    eviction_policy: str = "lru"
    """Who goes when a tier is full: `scheduler_aware` (whose next job is last), `lru` (least recently used) or `fifo`
    (first stored)."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.dram_gib) and self.dram_gib >= 0):
            raise ValueError(f"dram_gib must be 0 (store off) or a positive number of GiB, found {self.dram_gib}")
        if self.block_tokens <= 0:
            raise ValueError(f"block_tokens must be positive, found {self.block_tokens}")
        if self.eviction_policy not in EVICTION_POLICIES:
            wanted = ", ".join(EVICTION_POLICIES)
            raise ValueError(f"eviction_policy wanted one of {wanted}; found {self.eviction_policy!r}")

    @property
    def dram_bytes(self) -> int:
        """Cap of the DRAM tier, bytes."""
        return int(self.dram_gib * GIB)
