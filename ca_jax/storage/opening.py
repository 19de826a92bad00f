"""Opening a store's directory: which of the sessions that an earlier process left there can be served, and which blocks
are free.

A process that died left whole sessions, blocks that no session refers to, and perhaps a catalog that is damaged. After
`open_ssd` the catalog, the free list and `OpenedSsd.records` say the same; after `OpenedSsd.reclaim` the disk does too.
`open_ssd_index` puts the SSD tier together for a store.

Not here: whether the blocks hold what they should, which their checksums say once they are read; serving (ssd).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import logging
from collections.abc import Sequence

import numpy as np

from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.file import CatalogCorruptError, quarantine, set_aside
from ca_jax.storage.catalog.records import Namespace, SessionRecord
from ca_jax.storage.codec import KVCodec, keep_codec
from ca_jax.storage.config import StoreConfig
from ca_jax.storage.records import BlockIoError
from ca_jax.storage.sessions import StoreParts
from ca_jax.storage.ssd import SsdIndex
from ca_jax.storage.tiers.disk import DiskTier
from ca_jax.storage.tiers.formats import FORMATS, Zarr3Tier
from ca_jax.storage.tiers.mover import SsdWorker
from ca_jax.storage.tiers.owner import claim_blocks

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedSsd:
    """A store's directory, opened. Close the tier, then the catalog."""

    catalog: Catalog
    """Locked: no other engine has the directory."""
    tier: DiskTier
    """The blocks: free are all but those of `records`."""
    records: tuple[SessionRecord, ...]
    """The sessions that can be served, the least recently used first."""
    num_lost: int
    """Sessions that cannot be served, and were forgotten."""
    leaves: str | None = None
    """Why blocks of no session are left where they are; None where they are removed."""

    def reclaim(self) -> int:
        """Removes from the disk what no session of `records` refers to, leftovers of cut writes too.

        To be called once, before the first write, on the thread that writes. The free list may meanwhile have given
        such a block to a session that is to be written: it has no bytes of that session yet, so nothing is lost.

        A catalog that knows no session, or took the place of one that was set aside, says nothing of whose the blocks
        are: then they are left, which is logged, until room is needed or `collect_garbage` removes them.

        Blocks for as long as the disk takes. Never raises for what a disk does, which is logged.

        Returns:
          How many blocks were removed; 0 where not all could be.
        """
        try:
            if self.leaves is None:
                self.tier.sweep()
            orphans = self.tier.stored_but(record.block_ids for record in self.records)
        except (OSError, ValueError) as error:  # ValueError: TensorStore's.
            _LOG.warning("what no session refers to stays on disk, since it cannot be listed: %s", error)
            return 0
        if self.leaves is not None:
            if orphans:
                gc_command = "`python -m ca_jax.launch.store gc` removes them"
                _LOG.warning("%d blocks stay on disk, since %s; %s", len(orphans), self.leaves, gc_command)
            return 0
        try:
            self.tier.delete_blocks(orphans)
        except BlockIoError as error:
            _LOG.warning("up to %d blocks that no session refers to stay on disk: %s", len(orphans), error)
            return 0
        return len(orphans)


def open_ssd(config: StoreConfig, namespace: Namespace, codec: KVCodec | None = None) -> OpenedSsd:
    """Opens a store's directory, and finds out which of its sessions can be served.

    The others are forgotten, durably, before their blocks may be used again: sessions whose row is damaged, that cannot
    be, whose blocks lie beyond the cap, or belong to another tenant's session that was published before. A catalog that
    cannot be read is moved aside, and the store starts empty. Both are logged.

    Args:
      config: with an `ssd_dir`, which is made (mode 0700) if it is not there.
      namespace: whose sessions. Others are neither read nor changed, nor are their blocks.
      codec: the namespace's, kept beside its blocks from then on; None: it has none.

    Raises:
      ValueError: no `ssd_dir`, a capacity that does not fit the disk, blocks of another layout.
      NotADirectoryError, PermissionError: the blocks cannot be written to.
      CatalogVersionError: the catalog, and with it the blocks, are of another version. They were left as they were.
      BlocksOwnedError: the blocks at the URL are another directory's.
      CatalogError: the directory cannot be used; the kind says why.
    """
    directory, url = config.ssd_directory, config.ssd_url
    if directory is None:
        raise ValueError("the config must have an ssd_dir, got none")

    def open_all() -> OpenedSsd:
        with contextlib.ExitStack() as on_failure:
            catalog = Catalog(directory, namespace)
            on_failure.callback(catalog.close)
            location = catalog.block_directory if url is None else f"{url.removesuffix('/')}/{namespace.directory_name}"
            tier = FORMATS[config.ssd_driver](
                namespace.layout,
                location,
                config.ssd_bytes,
                free_floor_bytes=config.ssd_free_floor_bytes,
                codec=codec,
            )
            on_failure.callback(tier.close)
            if codec is not None:
                keep_codec(codec, catalog.block_directory)
            if isinstance(tier, Zarr3Tier) and url is not None:
                claim_blocks(tier.kvstore, directory, tier.stored_block_ids, knows_any=catalog.has_sessions)
            records, num_lost = _take_in(catalog, tier)
            on_failure.pop_all()
        leaves = None if records else "the catalog knows no session"
        if aside := set_aside(directory):
            leaves = f"a catalog was set aside: {aside[-1].name}"
        return OpenedSsd(catalog=catalog, tier=tier, records=records, num_lost=num_lost, leaves=leaves)

    try:
        return open_all()
    except CatalogCorruptError as error:
        moved = quarantine(directory)
        _LOG.warning("the store starts empty: its catalog cannot be read, and was moved to %s (%s)", moved, error)
        return open_all()


def _take_in(catalog: Catalog, tier: DiskTier) -> tuple[tuple[SessionRecord, ...], int]:
    """Takes the blocks of the sessions that can be served, and forgets the others.

    Sessions of one tenant may have blocks in common. That they should is not looked into: checksums tell when they are
    read, and what one session holds is never written for another.

    Returns:
      The sessions, the least recently used first, and how many were forgotten.
    """
    damaged: list[str] = []
    reasons: collections.Counter[str] = collections.Counter()
    refused, sound = [], []
    holders: np.ndarray | None  # By block: the tenant that published it first; -1: none. None: no two say the same.
    holders = np.full(tier.num_blocks, -1, np.int32)
    tenants: dict[str, int] = {}  # Their numbers in `holders`.
    with catalog.batch():
        records = list(catalog.load_all(lambda key, reason: damaged.append(key)))
        if damaged or len({record.key for record in records}) < len(records):
            reasons["their rows in the catalog are damaged"] = catalog.forget_damaged()
            records = list(catalog.load_all(lambda key, reason: None))
        if _are_apart(records, tier.num_blocks):  # Nearly always, and found out at once: the rest is of each alone.
            holders = None
        for record in records:
            tenant = tenants.setdefault(record.tenant, len(tenants))
            reason = _why_refused(record, tier, holders, tenant)
            if reason is None:
                if holders is not None:
                    holders[record.block_ids] = tenant
                sound.append(record)
            else:
                reasons[reason] += 1
                refused.append(record.key)
        catalog.forget(refused)
    num_lost = reasons.total()
    if num_lost:
        found = ", ".join(f"{number} since {reason}" for reason, number in sorted(reasons.items()))
        _LOG.warning("%d stored sessions in %s were forgotten: %s", num_lost, catalog.block_directory, found)
    sound.sort(key=lambda record: record.last_used_s)
    return tuple(sound), num_lost


def _are_apart(records: Sequence[SessionRecord], num_blocks: int) -> bool:
    """Whether all blocks of all sessions are different ones of the tier, as far as their tables can be read."""
    tables = [record.block_ids for record in records]
    if not tables or any(table.ndim != 1 or table.dtype != np.int64 for table in tables):
        return False
    ids = np.concatenate(tables)
    if not len(ids) or ids.min() < 0 or ids.max() >= num_blocks:
        return False
    return bool((np.bincount(ids) <= 1).all())


def _why_refused(record: SessionRecord, tier: DiskTier, holders: np.ndarray | None, tenant: int) -> str | None:
    """Why a session cannot be served, beside those that hold blocks already; None: it can."""
    try:
        record.check(tier.layout, has_own_ids=holders is None)
    except ValueError:
        return "what the catalog says of them cannot be"
    if holders is None:
        return None
    if record.block_ids.max() >= tier.num_blocks:
        return "their blocks lie beyond the cap"
    held_by = holders[record.block_ids]
    if ((held_by != tenant) & (held_by >= 0)).any():
        return "their blocks belong to others"
    return None


def open_ssd_index(
    config: StoreConfig, namespace: Namespace, parts: StoreParts, codec: KVCodec | None = None
) -> SsdIndex:
    """Opens the directory that the config names, as `open_ssd` does, and adds what is there to a store's index."""
    was_enabled = gc.isenabled()
    gc.disable()  # It would walk over all sessions again and again: 2 s of 4 for 100,000.
    try:
        opened = open_ssd(config, namespace, codec)
        mover = SsdWorker(
            opened.tier,
            opened.catalog,
            deadline_s=config.ssd_deadline_s,
            prepare=opened.reclaim,
            runtime=parts.runtime,
        )
        return SsdIndex(mover, opened.records, opened.num_lost, config=config, parts=parts)
    finally:
        if was_enabled:
            gc.enable()
