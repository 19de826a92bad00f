"""Looking at a store's directory, beside an engine or after one: what is stored there, and whether it is sound.

    with StoreInspector("/var/lib/kv") as inspector:
        for session in inspector.sessions().sound:
            print(session.record.session_id, session.num_bytes)
        damaged = [verdict for verdict in verify(inspector) if not verdict.ok]

Takes no lock and changes nothing. A session that an engine changes while its blocks are read is read again.

Not here: changing what is stored, forgetting what is damaged (collect).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ca_jax.errors import CaJaxError
from ca_jax.storage.catalog.catalog import CatalogReader, namespaces
from ca_jax.storage.catalog.file import CATALOG_NAME
from ca_jax.storage.catalog.notes import LOG_NAME
from ca_jax.storage.catalog.records import DamagedRecordError, Namespace, Problem, SessionRecord
from ca_jax.storage.codec import kept_codec
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.disk import DiskTier
from ca_jax.storage.tiers.dram import host_array
from ca_jax.storage.tiers.formats import FORMATS, GROUP_BLOCKS

_BLOCKS_NAME = re.compile(r"blocks-[0-9a-f]{16}")  # As Namespace.directory_name gives them.
_READ_BLOCKS = 8  # Blocks that are read at once.


class StoreDirectoryError(CaJaxError, ValueError):
    """A directory that is not there, is a file, or holds blocks in a way that was not said."""


class StoredNameError(CaJaxError, ValueError):
    """A name that no stored session or namespace has, or that several have; the message lists them."""


class DamagedSessionError(CaJaxError):
    """A session that cannot be read; the message says why."""


@dataclasses.dataclass(frozen=True)
class StoredSession:
    """A session that the catalog tells of."""

    namespace: Namespace
    record: SessionRecord

    @property
    def num_bytes(self) -> int:
        """Bytes of its blocks, not rounded up to pages."""
        return self.record.num_blocks * self.namespace.layout.block_bytes

    def expired(self, now_s: float) -> bool:
        """Whether its time to live is over at `now_s`, seconds since the epoch. A pinned session never expires."""
        expires_s = self.record.expires_s
        return not self.record.pinned and expires_s is not None and expires_s <= now_s


@dataclasses.dataclass(frozen=True)
class Damage:
    """One thing that is wrong with a session."""

    reason: IoFailure
    """`CATALOG` where what the catalog says about it does not pass its checksum."""
    found: str
    """What was wanted and what was found."""
    index: int | None = None
    """Which of the session's blocks, counted from its first; None where it is none of them."""
    block_id: int | None = None
    """Where this block is on disk."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether one session is sound."""

    namespace: Namespace
    key: str
    """Of the session, as it stands in its row."""
    session: StoredSession | None
    """None where its row in the catalog does not pass its checksum: then any part of it may be wrong, the key too."""
    damages: tuple[Damage, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.damages


@dataclasses.dataclass(frozen=True)
class Listing:
    """What the catalog tells of."""

    sound: tuple[StoredSession, ...]
    """Sessions, the last used one last."""
    damaged: tuple[Verdict, ...]
    """Of damaged rows; none where one tenant's were asked for, since whose they are is not certain."""


@dataclasses.dataclass(frozen=True, eq=False)
class SessionKV:
    """A session, read and verified."""

    session: StoredSession
    """As it was when it was read."""
    token_ids: np.ndarray
    """int32 `[T]`."""
    groups: tuple[np.ndarray, ...]
    """Of each layer group `[l, P, T, K, H]`, keys (as they are stored, unrotated) before values."""


@dataclasses.dataclass(frozen=True)
class DiskUse:
    """What something takes on disk."""

    num_files: int = 0
    """Files, directories not counted."""
    num_bytes: int = 0
    """What they take, as the file system counts: holes are free, the ends of pages are not."""


@dataclasses.dataclass(frozen=True)
class StoreDiskUse:
    """What a store takes on disk. Blocks at a URL are not counted."""

    catalog: DiskUse
    """The catalog and the notes of open sessions, with their logs and indexes."""
    blocks: Mapping[Namespace, DiskUse]
    """Blocks of each namespace, those too that no session holds."""
    unknown: Mapping[str, DiskUse]
    """By name, directories of blocks of no namespace, and catalogs that were moved aside."""
    free_bytes: int
    total_bytes: int
    """Free space and size of the disk that the directory is on."""


class StoreInspector:
    """Reads a store's directory. Belongs to one thread; calls block.

    Args:
      directory: the store's.
      url: where the blocks are, if not in the directory, as a TensorStore URL.
      driver: how blocks are kept, `zarr3` or `raw`; needed only where a namespace has blocks of both kinds.

    Raises:
      StoreDirectoryError: there is no such directory, or it is a file.
      CatalogError: there is no catalog in it, or it cannot be read; the kind says why.
    """

    def __init__(self, directory: str | os.PathLike[str], *, url: str | None = None, driver: str | None = None):
        self.directory, self.url = Path(directory), url
        if not self.directory.is_dir():
            found = "a file" if self.directory.exists() else "nothing there"
            raise StoreDirectoryError(f"{self.directory} must be a store's directory, got {found}")
        self._driver = driver
        self._tiers: dict[Namespace, DiskTier] = {}
        self._readers: dict[Namespace, CatalogReader] = {}
        self._opened = contextlib.ExitStack()
        self.namespaces()

    def __enter__(self) -> StoreInspector:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def namespaces(self) -> Mapping[Namespace, float]:
        """All namespaces, oldest first, and when each was first opened, seconds since the epoch."""
        return namespaces(self.directory)

    def sessions(self, tenant: str | None = None, namespace: Namespace | None = None) -> Listing:
        """All sessions, or one tenant's, of all namespaces or of one."""
        sound: list[StoredSession] = []
        damaged: list[Verdict] = []
        for each in self.namespaces() if namespace is None else [namespace]:
            rows: list[tuple[str, str]] = []
            records = self.reader(each).load_all(lambda *row, rows=rows: rows.append(row))
            sound += [StoredSession(each, record) for record in records if tenant in (None, record.tenant)]
            damaged += [Verdict(each, key, None, (Damage(IoFailure.CATALOG, found),)) for key, found in rows]
        sound.sort(key=lambda each: each.record.last_used_s)
        return Listing(tuple(sound), tuple(damaged) if tenant is None else ())

    def find(self, name: str, tenant: str | None = None) -> StoredSession:
        """The session that has this id or key, or else the one whose key begins so.

        Raises:
          StoredNameError: there is none, or there are several.
        """
        sessions = self.sessions(tenant).sound
        found = [each for each in sessions if name in (each.record.session_id, each.record.key)]
        found = found or [each for each in sessions if name and each.record.key.startswith(name)]
        if len(found) != 1:
            of = "" if tenant is None else f" of tenant {tenant!r}"
            records = [each.record for each in found]
            candidates = "".join(f"\n  {r.key}  session {r.session_id!r} of tenant {r.tenant!r}" for r in records)
            raise StoredNameError(
                f"the name must be the id or the beginning of the key of one of {len(sessions)} sessions{of}, "
                f"got {len(found)} for {name!r}{candidates}"
            )
        return found[0]

    def disk_use(self) -> StoreDiskUse:
        """What the store takes on disk. Looks at every file: seconds at a million."""
        known = {namespace.directory_name: namespace for namespace in self.namespaces()}
        blocks = dict.fromkeys(known.values(), DiskUse())
        unknown: dict[str, DiskUse] = {}
        for path in sorted(self.directory.iterdir()):
            if path.name in known:
                blocks[known[path.name]] = measure(path)
            elif _BLOCKS_NAME.fullmatch(path.name) or path.name.startswith(f"{CATALOG_NAME}.corrupt-"):
                unknown[path.name] = measure(path)
        files = [self.directory / f"{name}{end}" for name in (CATALOG_NAME, LOG_NAME) for end in ("", "-wal", "-shm")]
        disk = shutil.disk_usage(self.directory)
        return StoreDiskUse(measure(*files), blocks, unknown, disk.free, disk.total)

    def reader(self, namespace: Namespace) -> CatalogReader:
        """The catalog of one namespace. The inspector closes it."""
        if namespace not in self._readers:
            self._readers[namespace] = self._opened.enter_context(CatalogReader(self.directory, namespace))
        return self._readers[namespace]

    def open_blocks(self, namespace: Namespace, num_blocks: int = 1) -> DiskTier | None:
        """The blocks of a namespace, to be read and deleted, with ids below `num_blocks`; None where there are none.

        The inspector closes them.

        Raises:
          StoreDirectoryError: there are blocks of both drivers, and which to read was not said.
          ValueError: the blocks have another layout than the catalog says, or their codec is not beside them.
        """
        opened = self._tiers.get(namespace)
        if opened is not None and opened.num_blocks >= num_blocks:
            return opened
        driver = self._driver_of(namespace)
        if driver is None:
            return None
        layout, ids = namespace.layout, -(-num_blocks // GROUP_BLOCKS) * GROUP_BLOCKS  # In steps: it is rarely opened.
        codec = kept_codec(self.directory / namespace.directory_name, namespace.codec)
        block_bytes = layout.stored_block_bytes if codec is None else codec.stored_bytes(layout)
        tier = FORMATS[driver](
            layout, self.block_location(namespace), ids * block_bytes, only_existing=True, codec=codec
        )
        self._opened.callback(tier.close)
        self._tiers[namespace] = tier
        return tier

    def block_location(self, namespace: Namespace) -> str:
        """The directory or URL of a namespace's blocks."""
        parent = str(self.directory) if self.url is None else self.url.rstrip("/")
        return f"{parent}/{namespace.directory_name}"

    def close(self) -> None:
        """Closes what was opened. May be called again."""
        self._opened.close()
        self._tiers.clear()
        self._readers.clear()

    def _driver_of(self, namespace: Namespace) -> str | None:
        """How a namespace's blocks are kept; None where it has none."""
        if self.url is not None:
            return "zarr3"
        location = Path(self.block_location(namespace))
        kept = {"zarr3": location / "zarr3", "raw": location / "raw" / "blocks"}
        found = [driver for driver, path in kept.items() if path.exists() and self._driver in (None, driver)]
        if len(found) > 1:
            raise StoreDirectoryError(
                f"{location} has blocks of both drivers: the driver must be given, one of {found}"
            )
        return found[0] if found else None


def measure(*paths: Path) -> DiskUse:
    """What files, and all that is in directories, take on disk. What is gone meanwhile takes nothing."""
    num_files = num_bytes = 0
    for path in paths:
        in_it = (Path(root, name) for root, _, names in os.walk(path) for name in names)
        for name in in_it if path.is_dir() else [path]:
            with contextlib.suppress(FileNotFoundError):
                num_bytes += name.lstat().st_blocks * 512
                num_files += 1
    return DiskUse(num_files, num_bytes)


# Whether it is sound.


def verify(inspector: StoreInspector, tenant: str | None = None) -> Iterator[Verdict]:
    """Reads every block of every session, or of one tenant's. Blocks, for as long as the disk takes.

    A session that is forgotten meanwhile has no verdict.

    Raises:
      CatalogError: the catalog cannot be read.
      StoreDirectoryError: a namespace has blocks of both drivers, and which to read was not said.
    """
    for namespace in inspector.namespaces():
        listing = inspector.sessions(tenant, namespace)
        yield from listing.damaged
        yield from filter(None, (verify_session(inspector, session) for session in listing.sound))


def verify_session(inspector: StoreInspector, session: StoredSession) -> Verdict | None:
    """Reads every block of one session; None if it is not stored any more. Raises as `verify` does."""
    return _read(inspector, session, keep=False)[0]


def read_session(inspector: StoreInspector, session: StoredSession) -> SessionKV | None:
    """Reads and verifies a session's tokens and KV; None if it is not stored any more.

    Raises:
      DamagedSessionError: it is not sound.
      CatalogError, StoreDirectoryError: as `verify`.
    """
    verdict, read = _read(inspector, session, keep=True)
    for damage in () if verdict is None else verdict.damages:
        raise DamagedSessionError(f"session {session.record.session_id!r}: {damage.found} ({damage.reason})")
    return read


def catalog_problems(inspector: StoreInspector) -> tuple[Problem, ...]:
    """Reads the whole catalog and says what is wrong with it: in the file, in its rows, and between them.

    Raises:
      CatalogCorruptError: too damaged to be read to the end.
    """
    problems: dict[Problem, None] = {}
    for reader in map(inspector.reader, inspector.namespaces()):
        found = reader.integrity_check()
        if found:  # Twice, since an engine that works changes a session between two looks at it.
            again = set(reader.integrity_check())
            problems.update(dict.fromkeys(problem for problem in found if problem in again))
    return tuple(problems)


def _read(inspector: StoreInspector, session: StoredSession, *, keep: bool) -> tuple[Verdict | None, SessionKV | None]:
    """Reads a session until it stands still: an engine may change it, and then reuse its blocks.

    Returns:
      What is wrong with it and, to `keep`, what was read; None: it is gone.
    """
    reader, namespace, layout = inspector.reader(session.namespace), session.namespace, session.namespace.layout
    key, read, damages = session.record.key, None, []
    try:
        found = reader.load(key)
        while found is not None:
            record, contents = found
            session = StoredSession(namespace, record)
            groups: tuple[np.ndarray, ...] = ()
            if keep:
                shapes = [(len(group.layers), *group.shape(record.num_tokens)) for group in layout.groups]
                groups = tuple(host_array(shape, layout.numpy_dtype) for shape in shapes)
                read = SessionKV(session, contents.token_ids, groups)
            damages = _read_blocks(inspector, session, contents.sums, groups)
            found = reader.load(key)
            if found is not None and _state(found[0]) == _state(record):
                break
        else:
            return None, None
    except DamagedRecordError as error:
        damages = [Damage(IoFailure.CATALOG, str(error))]
    return Verdict(namespace, key, session, tuple(damages)), read


def _state(record: SessionRecord) -> tuple[object, ...]:
    """What changes with a session."""
    return record.generation, record.created_s, record.block_ids.tolist()


def _read_blocks(
    inspector: StoreInspector, session: StoredSession, sums: np.ndarray, groups: Sequence[np.ndarray]
) -> list[Damage]:
    """Reads and verifies the blocks of a session, and keeps their KV if there are groups for it; what is wrong."""
    record, layout = session.record, session.namespace.layout
    try:
        tier = inspector.open_blocks(session.namespace, int(record.block_ids.max()) + 1)
    except StoreDirectoryError:
        raise
    except ValueError as error:
        return [Damage(IoFailure.CORRUPT, str(error))]
    if tier is None:
        location = inspector.block_location(session.namespace)
        return [Damage(IoFailure.MISSING, f"{location} must hold its blocks, got none")]
    block_ids = record.block_ids.tolist()
    rows_of = {rows.index: rows for rows in record.places.by_block(layout.block_tokens)}
    memory = list(host_array((min(_READ_BLOCKS, len(block_ids)), *layout.block_shape), layout.numpy_dtype))

    def read(index: int) -> Damage | None:
        block = memory.pop()
        try:
            tier.read_blocks([block_ids[index]], [block], sums[index : index + 1])
            if index in rows_of:
                rows = rows_of[index]
                for kv, part in zip(groups, layout.by_group(block) if groups else (), strict=True):
                    kv[:, :, rows.first_token : rows.first_token + rows.num_tokens] = part[:, :, rows.rows]
        except BlockIoError as error:
            return Damage(error.reason, str(error), index, block_ids[index])
        finally:
            memory.append(block)
        return None

    with concurrent.futures.ThreadPoolExecutor(len(memory)) as threads:
        return list(filter(None, threads.map(read, range(len(block_ids)))))
