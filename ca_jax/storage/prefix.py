"""Names for token prefixes: a chain of hashes, one for each full block, so that equal prefixes are found by equality.

Not here: where the names are kept (catalog).
"""

from __future__ import annotations

import hashlib

import numpy as np

HASH_BYTES = 16
"""Kept of each SHA-256: 128 bits. A match is a hint; loads compare the tokens themselves."""


def prefix_hashes(tenant: str, namespace: str, token_ids: np.ndarray, block_tokens: int) -> tuple[bytes, ...]:
    """Hashes of the first 1, 2, … full blocks of a sequence.

    Each is SHA-256 over the whole hash before it and its block's tokens, the first over tenant and namespace: sequences
    of different tenants, weights or layouts never share one, and equal n-th hashes mean n equal blocks.

    Args:
      tenant: whose sequence it is.
      namespace: fingerprint of weights and layout.
      token_ids: `[T]`, integers that fit int32.
      block_tokens: tokens in a block.

    Returns:
      `T // block_tokens` hashes of `HASH_BYTES` bytes.
    """
    tokens = np.ascontiguousarray(token_ids, "<i4")
    chain = hashlib.sha256(f"{len(tenant)}:{tenant}{namespace}".encode("utf-8", "surrogatepass")).digest()
    hashes = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        chain = hashlib.sha256(chain + tokens[start : start + block_tokens].tobytes()).digest()
        hashes.append(chain[:HASH_BYTES])
    return tuple(hashes)
