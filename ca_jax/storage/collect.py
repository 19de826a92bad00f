"""Cleaning a store's directory while no engine uses it: sessions that go, and blocks and files that no session holds.

    with StoreInspector(directory) as inspector:
        garbage = collect_garbage(inspector, now_s=time.time(), dry_run=True)

The catalog forgets first, durably; blocks go afterwards. Cut short at any moment it leaves such blocks for the next
time.

Not here: what a running engine evicts (policy), whether a session is sound (inspector).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import shutil
from collections.abc import Collection, Iterable, Iterator

from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.file import CatalogFullError, lock_directory
from ca_jax.storage.catalog.notes import NoteLog
from ca_jax.storage.catalog.records import DamagedRecordError, Namespace
from ca_jax.storage.inspector import StoredNameError, StoredSession, StoreInspector, verify_session
from ca_jax.storage.tiers.formats import Zarr3Tier
from ca_jax.storage.tiers.owner import claim_blocks


class ForgetReason(enum.StrEnum):
    """Why a session goes."""

    DAMAGED = "damaged"
    """It, or what the catalog says about it, is not sound."""
    EXPIRED = "expired"
    """Its time to live is over."""
    NAMESPACE = "namespace"
    """Its namespace is dropped."""
    NAMED = "named"
    """It was named."""


@dataclasses.dataclass(frozen=True)
class Forgotten:
    """A session that goes."""

    key: str
    session: StoredSession | None
    """None where its row in the catalog is damaged."""
    reason: ForgetReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamespaceGarbage:
    """What goes of one namespace."""

    namespace: Namespace
    dropped: bool = False
    """Whether all of it goes."""
    forgotten: tuple[Forgotten, ...] = ()
    num_blocks: int = 0
    """Blocks on disk: theirs, and those that no session held."""
    num_bytes: int = 0
    """What these take on disk, in whole pages."""
    num_leftovers: int | None = None
    """Files of writes that were cut short; None where they were not looked for."""


@dataclasses.dataclass(frozen=True)
class TakenBlocks:
    """Blocks at a URL that were made a directory's."""

    blocks_at: str
    """Where they are."""
    num_blocks: int
    owner: str | None
    """Whose they were; None where that is not known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Garbage:
    """What goes of a store."""

    namespaces: tuple[NamespaceGarbage, ...]
    files: tuple[str, ...]
    """Directories of blocks of no namespace, and catalogs that were moved aside: names."""
    num_file_bytes: int
    """What these take on disk."""
    catalog_bytes: int
    """What the catalog took before."""
    compacted_bytes: int | None = None
    """What it takes now; None where it was not compacted."""
    not_compacted: str | None = None
    """Why not, where it should have been."""


def find_namespaces(inspector: StoreInspector, names: Collection[str]) -> tuple[Namespace, ...]:
    """The namespaces of these names: of a directory of blocks, or the beginning of a fingerprint, own or of weights.

    Raises:
      StoredNameError: a name is of none, or of several.
    """
    stored = inspector.namespaces()
    found: dict[Namespace, None] = {}
    for name in names:
        matches = []
        for each in stored if name else ():
            if name == each.directory_name or each.fingerprint.startswith(name) or each.weights.startswith(name):
                matches.append(each)
        if len(matches) != 1:
            listed = "".join(f"\n  {each.directory_name}  weights {each.weights}" for each in matches or stored)
            raise StoredNameError(f"{name!r} must be one namespace, got {len(matches)} among:{listed}")
        found[matches[0]] = None
    return tuple(found)


def drop_session(inspector: StoreInspector, session: StoredSession) -> NamespaceGarbage:
    """Forgets one session and deletes its blocks.

    Raises:
      CatalogLockedError: an engine uses the directory.
      CatalogError: the catalog cannot be changed; nothing was.
      BlocksOwnedError: its blocks are at a URL, and another directory's there; nothing was changed.
      BlockIoError: blocks cannot be deleted; the session is forgotten nevertheless.
    """
    namespace, record = session.namespace, session.record
    forgotten = Forgotten(record.key, session, ForgetReason.NAMED)
    garbage = NamespaceGarbage(namespace=namespace, forgotten=(forgotten,))
    with Catalog(inspector.directory, namespace) as catalog:
        _forget(inspector, catalog, garbage.forgotten)
        return _delete_unheld(inspector, garbage, among=set(record.block_ids.tolist()))


def collect_garbage(
    inspector: StoreInspector,
    *,
    now_s: float,
    tenant: str | None = None,
    drop: Collection[Namespace] = (),
    read_blocks: bool = False,
    dry_run: bool = False,
) -> Garbage:
    """Forgets damaged and expired sessions, deletes what no session holds, and compacts the catalog.

    Args:
      inspector: of the store.
      now_s: seconds since the epoch.
      tenant: forget sessions of this one only.
      drop: namespaces of which nothing is to stay.
      read_blocks: also find damaged sessions by reading every block, for as long as the disk takes.
      dry_run: only say what would go.

    Raises:
      ValueError: namespaces are to be dropped, of one tenant only.
      OSError: a file cannot be deleted.
      CatalogError, BlocksOwnedError, BlockIoError: as `drop_session`.
    """
    if drop and tenant is not None:
        raise ValueError(f"drop must be empty with a tenant, got {len(drop)} namespaces and {tenant!r}")
    stored = inspector.namespaces()
    before = inspector.disk_use()
    collected = []
    for namespace in stored:
        with Catalog(inspector.directory, namespace) as catalog:
            if namespace in drop:
                listing = inspector.sessions(None, namespace)
                forgotten = (
                    *(Forgotten(each.key, None, ForgetReason.NAMESPACE) for each in listing.damaged),
                    *(Forgotten(each.record.key, each, ForgetReason.NAMESPACE) for each in listing.sound),
                )
            else:
                forgotten = tuple(_going(inspector, namespace, tenant, now_s, read_blocks))
            if not dry_run:
                _forget(inspector, catalog, forgotten)
            going = NamespaceGarbage(namespace=namespace, dropped=namespace in drop, forgotten=forgotten)
            collected.append(_delete_unheld(inspector, going, dry_run=dry_run))
    garbage = Garbage(
        namespaces=tuple(collected),
        files=tuple(before.unknown),
        num_file_bytes=sum(each.num_bytes for each in before.unknown.values()),
        catalog_bytes=before.catalog.num_bytes,
    )
    if dry_run:
        return garbage
    kept = [namespace for namespace in stored if namespace not in drop] or list(stored)
    with Catalog(inspector.directory, kept[-1]) if kept else lock_directory(inspector.directory) as own:
        for name in (*before.unknown, *(each.directory_name for each in drop)):
            path = inspector.directory / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if isinstance(own, Catalog):
            for namespace in set(drop) - {own.namespace}:  # The last one's name stays, empty.
                own.drop_namespace(namespace)
            try:
                own.compact()
            except CatalogFullError as error:
                return dataclasses.replace(garbage, not_compacted=str(error))
    return dataclasses.replace(garbage, compacted_bytes=inspector.disk_use().catalog.num_bytes)


def take_over_blocks(inspector: StoreInspector) -> list[TakenBlocks]:
    """Makes the blocks at the inspector's URL those of its directory, from any owner. No engine may use them.

    What its catalog does not know of them is removed by the next `collect_garbage`, or written over.

    Raises:
      CatalogLockedError: an engine uses the directory.
    """
    taken = []
    for namespace in inspector.namespaces():
        with Catalog(inspector.directory, namespace) as catalog:
            owner = _claim(inspector, catalog, takes_over=True)
            tier = inspector.open_blocks(namespace)
            num_blocks = 0 if tier is None else len(tier.stored_block_ids())
            taken.append(TakenBlocks(inspector.block_location(namespace), num_blocks, owner))
    return taken


def _claim(inspector: StoreInspector, catalog: Catalog, *, takes_over: bool = False) -> str | None:
    """Makes sure that blocks at a URL are the directory's; see `claim_blocks`."""
    tier = inspector.open_blocks(catalog.namespace) if inspector.url is not None else None
    if not isinstance(tier, Zarr3Tier):
        return None
    return claim_blocks(
        tier.kvstore, inspector.directory, tier.stored_block_ids, knows_any=catalog.has_sessions, takes_over=takes_over
    )


def _forget(inspector: StoreInspector, catalog: Catalog, forgotten: Iterable[Forgotten]) -> None:
    """Has catalog and log forget sessions, after a look at whose the blocks are."""
    _claim(inspector, catalog)
    catalog.forget([each.key for each in forgotten])
    with contextlib.closing(NoteLog(inspector.directory)) as log:
        for each in forgotten:
            if each.reason is not ForgetReason.DAMAGED:  # What was said is sound.
                log.remove(each.key)


def _going(
    inspector: StoreInspector, namespace: Namespace, tenant: str | None, now_s: float, read_blocks: bool
) -> Iterator[Forgotten]:
    """The sessions of a namespace that are damaged or expired."""
    listing = inspector.sessions(tenant, namespace)
    for row in listing.damaged:
        yield Forgotten(row.key, None, ForgetReason.DAMAGED)
    for session in listing.sound:
        is_expired, is_damaged = session.expired(now_s), False
        if read_blocks and not is_expired:
            verdict = verify_session(inspector, session)
            is_damaged = verdict is not None and not verdict.ok
        else:
            try:
                inspector.reader(namespace).contents(session.record.key)
            except DamagedRecordError:
                is_damaged = True
        if is_damaged or is_expired:
            reason = ForgetReason.DAMAGED if is_damaged else ForgetReason.EXPIRED
            yield Forgotten(session.record.key, session, reason)


def _delete_unheld(
    inspector: StoreInspector,
    garbage: NamespaceGarbage,
    *,
    dry_run: bool = False,
    among: Collection[int] | None = None,
) -> NamespaceGarbage:
    """Deletes the blocks that no session holds once those to be forgotten are: all of them, or those among some."""
    tier = inspector.open_blocks(garbage.namespace)
    if tier is None:
        return garbage
    gone = {each.key for each in garbage.forgotten}
    records = (each.record for each in inspector.sessions(None, garbage.namespace).sound)
    unheld = tier.stored_but(record.block_ids for record in records if record.key not in gone)
    unheld = [block for block in unheld if among is None or block in among]
    num_leftovers = None
    if not dry_run:
        tier.delete_blocks(unheld)
        num_leftovers = tier.sweep() if among is None else None
    num_bytes = len(unheld) * tier.stored_block_bytes
    return dataclasses.replace(garbage, num_blocks=len(unheld), num_bytes=num_bytes, num_leftovers=num_leftovers)
