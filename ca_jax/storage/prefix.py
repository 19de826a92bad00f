"""Names for token prefixes: a chain of hashes, one for each full block, so that equal prefixes are found by equality.

Not here: where the names are kept (ssd_copy, catalog_rows) and looked for (prefix_index).
"""

from __future__ import annotations

import hashlib

import numpy as np

HASH_BYTES = 8
"""Kept of each SHA-256, and chained. A match is a hint: loads compare the tokens themselves."""


def prefix_hashes(token_ids: np.ndarray, block_tokens: int, known: bytes = b"") -> bytes:
    """Hashes of the first 1, 2, … full blocks of a sequence, joined.

    Each is of the hash before it and its block's tokens: equal n-th hashes mean n equal blocks.

    Args:
      token_ids: `[T]`, integers that fit int32.
      block_tokens: tokens in a block.
      known: hashes of leading blocks that are known already; only the blocks behind them are read.

    Returns:
      `T // block_tokens` hashes of `HASH_BYTES` bytes.
    """
    hashes = bytearray(known)
    for start in range(len(known) // HASH_BYTES * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        block = np.ascontiguousarray(token_ids[start : start + block_tokens], "<i4").tobytes()
        hashes += hashlib.sha256(hashes[-HASH_BYTES:] + block).digest()[:HASH_BYTES]
    return bytes(hashes)
