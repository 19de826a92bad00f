"""The bookkeeping of a truncation: tokens leave stores and conversations, and no KV is touched.

Not here: truncations of an engine (`overflow_costs`), what rows hold (`overflow_rows`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import harness
from benchmarks.disk import scratch_directory
from benchmarks.harness import BenchError, Run
from benchmarks.overflow_rows import TIERS, BookkeepingRow, OverflowBenchConfig
from ca_jax.overflow.config import OverflowConfig, oldest_first
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import BlockIoError
from ca_jax.storage.store import AttentionStore
from ca_jax.turns.conversations import Conversation

LAYOUT = KVLayout.uniform(
    num_layers=1, num_kv_heads=1, head_dim=2, dtype="float16", block_tokens=StoreConfig.block_tokens
)
"""Of the smallest blocks there are: bookkeeping does not depend on their size."""
_STORED_BLOCK_BYTES = 8192  # On SSD, whatever a driver adds to a block.
_STORE_SESSIONS = 4  # That the store has room for, one of which is there.
_KEEP_FIRST = OverflowConfig.keep_first_tokens


def measure_bookkeeping(run: Run[OverflowBenchConfig]) -> Iterator[BookkeepingRow]:
    """Times discards of stores without an engine, with KV in DRAM alone and on SSD too."""
    config = run.config
    for tier in TIERS:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(scratch_directory(config.ssd_dir)) if tier == "ssd" else None
            try:
                store = AttentionStore(LAYOUT, _store_config(config, directory), weights="benchmark")
                stack.callback(store.close)
                row = _bookkeeping_row(run, store, tier)
            except (OSError, ValueError, BlockIoError) as error:
                raise BenchError(f"no store of {config.bookkeeping_blocks} blocks in {directory}: {error}") from error
            yield row


def _store_config(config: OverflowBenchConfig, directory: Path | None) -> StoreConfig:
    num_blocks = _STORE_SESSIONS * (config.bookkeeping_blocks + 1)
    dram_gib = num_blocks * LAYOUT.block_bytes / GIB
    store = StoreConfig(dram_gib=dram_gib, block_tokens=LAYOUT.block_tokens, ssd_free_floor_gib=0.0)
    if directory is None:
        return store
    ssd_gib = num_blocks * _STORED_BLOCK_BYTES / GIB
    return dataclasses.replace(store, ssd_dir=str(directory), ssd_gib=ssd_gib, ssd_driver=config.ssd_driver)


def _bookkeeping_row(run: Run[OverflowBenchConfig], store: AttentionStore, tier: str) -> BookkeepingRow:
    """Cuts sessions one after the other, each stored just before and forgotten then."""
    config = run.config
    num_tokens = config.bookkeeping_blocks * LAYOUT.block_tokens
    discarded = oldest_first(num_tokens, num_tokens // 2, _KEEP_FIRST)
    num_kept = int(num_tokens - discarded.sum())
    rng, taken, kept_blocks = run.rng(), [], 0
    for index in harness.ticked(run.progress, f"bookkeeping, {tier}", range(config.bookkeeping_sessions)):
        key = f"{index:064x}"
        token_ids = rng.integers(np.iinfo(np.uint16).max, size=num_tokens).astype(np.int32)
        _store_session(store, key, token_ids, is_on_ssd=tier == "ssd")
        conversation = Conversation(token_ids=token_ids.tolist(), messages=[], turn_starts=[(0, 0)])
        started_s = time.perf_counter()
        note = conversation.cut(discarded).to_bytes()
        cut_s = time.perf_counter()
        found = store.discard(key, discarded, note=note)
        taken.append({"discard_s": time.perf_counter() - cut_s, "conversation_s": cut_s - started_s})
        (info,) = store.list()
        if found != num_kept:
            raise BenchError(f"a discard must leave {num_kept} tokens of {num_tokens}, got {found}")
        kept_blocks = info.num_blocks
        store.settle()
        store.drop(key)
    return harness.make_row(
        BookkeepingRow,
        taken,
        tier=tier,
        blocks=config.bookkeeping_blocks,
        kept_blocks=kept_blocks,
        tokens=num_tokens,
        sessions=config.bookkeeping_sessions,
        **harness.percentiles("discard_p{}_s", [sample["discard_s"] for sample in taken], 99),
    )


def save_tokens(store: AttentionStore, key: str, start_token: int, token_ids: np.ndarray) -> None:
    """Stores KV of tokens behind a session's first ones, in blocks of `LAYOUT`'s shape. BenchError: no room."""
    ticket = store.prepare_save(key, start_token, token_ids)
    if ticket is None:
        raise BenchError(f"DRAM must have room for {len(token_ids)} tokens, got none")
    shape = (LAYOUT.num_layers, 2, len(token_ids), LAYOUT.groups[0].num_kv_heads, LAYOUT.groups[0].head_dim)
    ticket.write_all(np.zeros(shape, LAYOUT.numpy_dtype))
    store.complete_save(ticket)


def _store_session(store: AttentionStore, key: str, token_ids: np.ndarray, *, is_on_ssd: bool) -> None:
    save_tokens(store, key, 0, token_ids)
    store.settle()
    (info,) = store.list()
    if (found := info.ssd_tokens) != len(token_ids) * is_on_ssd:
        raise BenchError(f"the SSD must have {len(token_ids) * is_on_ssd} tokens, got {found}")
