"""Putting the SSD tier together: the directory that a config names, opened, and the books of what is stored there.

Not here: what is found there (opening), what becomes of it (ssd_books).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

from ca_jax.storage.books import EntryTable
from ca_jax.storage.catalog_reader import CatalogReader
from ca_jax.storage.catalog_records import Namespace
from ca_jax.storage.config import StoreConfig
from ca_jax.storage.dram import DramTier
from ca_jax.storage.opening import open_ssd
from ca_jax.storage.policy import EvictionPolicy
from ca_jax.storage.quota import ChargedBlocks, TenantQuota
from ca_jax.storage.ssd_books import SsdBooks
from ca_jax.storage.ssd_worker import SsdWorker
from ca_jax.storage.timely_contents import TimelyContents
from ca_jax.telemetry.timeline import Timeline


def open_ssd_books(
    config: StoreConfig,
    namespace: Namespace,
    *,
    table: EntryTable,
    dram: DramTier,
    dram_blocks: ChargedBlocks,
    policy: EvictionPolicy,
    clock: Callable[[], float],
    on_progress: Callable[[], None],
    on_fetch: Callable[[int, float], None],
    timeline: Timeline,
) -> SsdBooks:
    """Opens the directory that the config names, and takes in what is stored there.

    Args:
      config: with an `ssd_dir`.
      namespace: whose sessions.
      table: entries are added for what is stored.
      dram: as for `SsdBooks`; so are the others.
      dram_blocks: likewise.
      policy: likewise.
      clock: likewise.
      on_progress: likewise.
      on_fetch: as for `SsdWorker`.
      timeline: likewise.

    Raises:
      ValueError: the caps do not fit block or disk.
      NotADirectoryError, PermissionError, CatalogError, BlocksOwnedError: the directory cannot be used.
    """
    directory = config.ssd_directory
    if directory is None:
        raise ValueError("wanted a config with an ssd_dir, found none")
    with _garbage_collector_paused():  # It would walk over all sessions again and again: 2 s of 4 for 100,000.
        opened = open_ssd(
            directory,
            namespace,
            capacity_bytes=config.ssd_bytes,
            free_floor_bytes=config.ssd_free_floor_bytes,
            driver=config.ssd_driver,
            blocks_url=config.ssd_url,
            deadline_s=config.ssd_deadline_s,
        )
        quota = TenantQuota.in_bytes(
            config.tenant_quota_bytes, dict(config.tenant_quotas), opened.tier.stored_block_bytes
        )
        mover = SsdWorker(
            opened.tier,
            opened.catalog,
            CatalogReader(directory, namespace),
            prepare=opened.reclaim,
            deadline_s=config.ssd_deadline_s,
            on_progress=on_progress,
            on_fetch=on_fetch,
            timeline=timeline,
        )
        return SsdBooks(
            opened.tier,
            TimelyContents(CatalogReader(directory, namespace), config.ssd_deadline_s),
            mover,
            opened.records,
            opened.num_lost,
            table=table,
            dram=dram,
            dram_blocks=dram_blocks,
            policy=policy,
            quota=quota,
            clock=clock,
        )


@contextlib.contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
