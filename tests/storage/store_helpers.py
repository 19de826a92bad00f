"""Small stores for the tests of `ca_jax.storage`: four blocks of four tokens, to be followed by hand."""

from __future__ import annotations

import dataclasses

import numpy as np

from ca_jax.storage import AttentionStore, EvictionPolicy, KVLayout, StoreConfig
from ca_jax.storage.config import GIB

BLOCK_TOKENS = 4
BITS = {2: np.uint16, 4: np.uint32}


@dataclasses.dataclass
class FakeClock:
    """A clock that a test sets."""

    now_s: float = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def make_layout(dtype: str = "float32", block_tokens: int = BLOCK_TOKENS) -> KVLayout:
    return KVLayout(num_layers=3, num_kv_heads=2, head_dim=5, dtype=dtype, block_tokens=block_tokens)


def make_store(
    num_blocks: int = 4, *, dtype: str = "float32", policy: EvictionPolicy | None = None, eviction_policy: str = "lru"
) -> AttentionStore:
    """A store of `num_blocks` blocks, each full of NaN: what nobody wrote must never show."""
    layout = make_layout(dtype)
    config = StoreConfig(
        dram_gib=num_blocks * layout.block_bytes / GIB, block_tokens=BLOCK_TOKENS, eviction_policy=eviction_policy
    )
    store = AttentionStore(layout, config, policy, clock=FakeClock())
    fill_blocks_with_nan(store)
    return store


def fill_blocks_with_nan(store: AttentionStore) -> None:
    if store.stats().capacity_bytes:
        store._dram.slab[...] = np.nan


def make_kv(layout: KVLayout, num_tokens: int, seed: int = 0) -> np.ndarray:
    """`[L, 2, T, K, H]` of random bits: every pattern a dtype has, NaNs with payload and subnormals among them."""
    bits = BITS[layout.numpy_dtype.itemsize]
    shape = (layout.num_layers, 2, num_tokens, layout.num_kv_heads, layout.head_dim)
    return (
        np.random.default_rng(seed).integers(0, np.iinfo(bits).max, shape, bits, endpoint=True).view(layout.numpy_dtype)
    )


def as_bits(array: np.ndarray) -> np.ndarray:
    """The array as integers, so that NaNs compare by their bits."""
    return np.ascontiguousarray(array).view(BITS[array.dtype.itemsize])


def save(store: AttentionStore, key: str, token_ids, kv: np.ndarray, start_token: int = 0) -> bool:
    """Saves `token_ids` in one go; False where the save was skipped."""
    ticket = store.prepare_save(key, start_token, token_ids)
    if ticket is None:
        return False
    ticket.write_all(kv)
    return store.complete_save(ticket)


def load(store: AttentionStore, key: str, token_ids) -> np.ndarray | None:
    """Loads the longest stored prefix of `token_ids`, `[L, 2, T, K, H]`; None for a miss."""
    ticket = store.prepare_load(key, token_ids)
    if ticket is None:
        return None
    layout = store.layout
    staging = np.empty((2, ticket.num_tokens + 3, layout.num_kv_heads, layout.head_dim), layout.numpy_dtype)
    layers = []
    for layer in range(layout.num_layers):
        as_int = staging.view(BITS[staging.itemsize])
        as_int[...] = 12345
        ticket.read(layer, staging).result()
        assert np.all(as_int[:, ticket.num_tokens :] == 12345), "a load wrote past its tokens"
        layers.append(staging[:, : ticket.num_tokens].copy())
    store.complete_load(ticket)
    return np.stack(layers)
