"""What the tests of reliability share: small stores, answers checked without a store, books held against the disk.

Everything here belongs to tests that see an engine from within: its store, tier and catalog are looked at directly.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ca_jax.engine import Engine
from ca_jax.storage.catalog.catalog import CatalogReader
from ca_jax.storage.catalog.file import CATALOG_NAME
from ca_jax.storage.catalog.notes import LOG_NAME
from ca_jax.storage.catalog.records import Contents, SessionRecord
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.ssd import SsdIndex
from tests import engine_kit as kit
from tests.chunk_kit import stored
from tests.storage.store_reference import check_books as check_blocks

DRIVERS = ("zarr3", "raw")
CHUNKS = tuple(tuple(kit.prompt(num_tokens, seed=9)) for num_tokens in (33, 16, 40, 25, 32, 19))
"""What contexts are made of, where there are any."""
_PATIENCE_S = 60.0  # How long a test waits for another thread before it fails.
_STORED_BLOCK_BYTES = kit.BLOCK_TOKENS * kit.TOKEN_BYTES  # Whole pages.
_KNOWN_FILES = re.compile(
    rf"{re.escape(CATALOG_NAME)}(-wal|-shm|\.corrupt-.*)?|catalog\.lock"
    rf"|{re.escape(LOG_NAME)}(-wal|-shm)?"
    r"|blocks-[0-9a-f]{16}/(zarr3/\d{6}/(zarr\.json|c\.\d+(\.0){5})|raw/(layout\.json|blocks))"
)


def ssd_store(directory: Path, driver: str, *, dram_blocks: int, ssd_blocks: int, **changes: object) -> StoreConfig:
    """A store of so many blocks in each tier."""
    return dataclasses.replace(
        kit.SMALL.store,
        dram_gib=dram_blocks * kit.BLOCK_TOKENS * kit.TOKEN_BYTES / GIB,
        ssd_dir=str(directory),
        ssd_gib=ssd_blocks * _STORED_BLOCK_BYTES / GIB,
        ssd_driver=driver,
        ssd_free_floor_gib=0.0,
        **changes,
    )


def ssd_of(engine: Engine) -> SsdIndex:
    """Its SSD tier's books."""
    ssd = engine._kv.store._ssd
    assert ssd is not None
    return ssd


def reader_of(engine: Engine, directory: Path) -> CatalogReader:
    """Another reader of the engine's catalog."""
    return CatalogReader(directory, ssd_of(engine)._mover._reader.namespace)


def wait_until_nothing_moves(engine: Engine) -> None:
    """Returns when all moves have settled, those too that were given up as late, which nobody else waits for."""
    give_up_s = time.monotonic() + _PATIENCE_S
    while _is_busy(engine):
        assert time.monotonic() < give_up_s, "there must be the SSD tier to come to rest, got it busy"
        engine.wait_for_saves()
        engine._wakeup.wait(engine._wakeup.count, 0.05)


def _is_busy(engine: Engine) -> bool:
    with engine._lock:  # Its keeper steps the store, too.
        return engine._kv.store._placement.busy


def is_whole(engine: Engine, chunk: Sequence[int]) -> bool:
    """Whether the store serves a chunk; checks that it is the KV of these tokens behind the head, all of it or nothing.

    The model is `kit.tiny_model`.
    """
    store, key = engine._kv.store, engine._kv.chunks.key(chunk, "")
    give_up_s = time.monotonic() + _PATIENCE_S
    with engine._lock:  # Its keeper steps the store, too.
        while store.request(key):
            assert time.monotonic() < give_up_s, "there must be a chunk to be fetched, or missed, got it on its way"
            engine._wakeup.wait(engine._wakeup.count, 0.05)
            store.poll()
        ticket = store.prepare_load(key, chunk)
        if ticket is None:
            return False
        assert ticket.num_tokens == len(chunk), f"there must be {len(chunk)} tokens of a chunk, got {ticket.num_tokens}"
        found = kit.loaded(store, ticket)
    np.testing.assert_allclose(found, stored(chunk), atol=1e-4)
    return True


def check_books(engine: Engine, directory: Path, *, fresh: bool = False) -> None:
    """Checks that sizes, free lists, catalog and, after a start, the files say the same. The engine must be idle.

    Args:
      engine: whose.
      directory: of its SSD tier.
      fresh: whether nothing was written since the start: then there are no bytes of nobody either, unless the catalog
        knows no session.
    """
    engine.wait_for_saves()
    ssd_of(engine)._mover._prepared.result(_PATIENCE_S)  # What an earlier process left behind is removed.
    wait_until_nothing_moves(engine)
    store, ssd = engine._kv.store, ssd_of(engine)
    tier, stats, infos = ssd._mover._tier, store.stats(), store.list()
    with reader_of(engine, directory) as reader:
        problems = reader.integrity_check()
        assert problems == (), problems
        records = list(reader.load_all(lambda key, reason: None))
    holders = collections.Counter(block for record in records for block in record.block_ids.tolist())
    held = sorted(holders)
    check_blocks(ssd._blocks, [(record.tenant, record.block_ids.tolist()) for record in records])
    assert stats.ssd is not None
    assert stats.ssd.used_bytes == len(held) * tier.stored_block_bytes
    assert sum(info.ssd_bytes for info in infos) == holders.total() * tier.stored_block_bytes
    in_dram = {block for entry in store._entries for block in entry.block_ids}
    assert stats.used_bytes == len(in_dram) * store.layout.block_bytes
    assert stats.ssd.num_sessions == len(records)
    strange = strange_files(directory)
    assert strange == [], f"there must be only files of the store, got {strange}"
    stored = tier.stored_block_ids()
    assert set(held) <= set(stored), f"there must be bytes of blocks {held}, got {stored}"
    if fresh and records:  # A catalog that knows nothing says nothing of whose blocks are.
        assert stored == held, f"there must be bytes of blocks {held} alone, got {stored}"


def strange_files(directory: Path) -> list[str]:
    """Files in a store's directory that it has no use for: leftovers."""
    files = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
    return sorted(name for name in files if not _KNOWN_FILES.fullmatch(name))


def digest(record: SessionRecord, contents: Contents) -> str:
    """Of all that a catalog says of a session's KV and conversation."""
    parts = (record.block_ids.astype("<i8"), contents.token_ids.astype("<i4"), contents.sums.astype("<u4"))
    where = repr((record.places.runs, record.lineage)).encode()
    data = [np.ascontiguousarray(part).tobytes() for part in parts] + [where, contents.note]
    return hashlib.sha256(b"|".join(data)).hexdigest()[:16]
