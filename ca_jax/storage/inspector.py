"""Looking at a store's directory, beside an engine that runs or after one: what is stored there, by whom, and where.

    with StoreInspector("/var/lib/kv") as inspector:
        for session in inspector.sessions().sound:
            print(session.record.session_id, session.num_bytes)

Takes no lock and changes nothing.

Not here: whether what is stored is sound (verify), changing it (collect).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from ca_jax.errors import CaJaxError
from ca_jax.storage.catalog.catalog import CatalogReader, namespaces
from ca_jax.storage.catalog.file import CATALOG_NAME
from ca_jax.storage.catalog.notes import LOG_NAME
from ca_jax.storage.catalog.records import Namespace, NamespaceInfo, SessionRecord
from ca_jax.storage.config import SSD_DRIVERS
from ca_jax.storage.tiers.disk import DiskOptions, DiskTier
from ca_jax.storage.tiers.formats import FORMATS, GROUP_BLOCKS

_BLOCKS_NAME = re.compile(r"blocks-[0-9a-f]{16}")  # As Namespace.directory_name gives them.
_CLOSE_TIMEOUT_S = 5.0  # For reads that a deadline has given up.


class StoreDirectoryError(CaJaxError, ValueError):
    """A directory that is not there, is a file, or holds blocks in a way that was not said."""


class UnknownSessionError(CaJaxError, ValueError):
    """A name that no stored session has."""


class AmbiguousSessionError(CaJaxError, ValueError):
    """A name that several stored sessions have; the message lists them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredSession:
    """A session that the catalog tells of."""

    namespace: Namespace
    """Whose weights and layout."""
    record: SessionRecord
    """What the catalog says."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its blocks, not rounded up to pages."""
        return self.record.num_blocks * self.namespace.layout.block_bytes

    def expired(self, now_s: float) -> bool:
        """Whether its time to live is over at `now_s`, seconds since the epoch. A pinned session never expires."""
        expires_s = self.record.expires_s
        return not self.record.pinned and expires_s is not None and expires_s <= now_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class DamagedRow:
    """A row of the catalog that does not pass its checksum: of a session, and any part of it may be wrong."""

    namespace: Namespace
    """Whose weights and layout."""
    key: str
    """As it stands in the row."""
    found: str
    """What was wanted and what was found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """What the catalog tells of."""

    sound: tuple[StoredSession, ...]
    """Sessions, the last used one last."""
    damaged: tuple[DamagedRow, ...]
    """Rows that are damaged; none where one tenant's were asked for, since whose they are is not certain."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskUse:
    """What something takes on disk."""

    num_files: int
    """Files, directories not counted."""
    num_bytes: int
    """What they take, as the file system counts: holes are free, the ends of pages are not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreDiskUse:
    """What a store takes on disk. Blocks at a URL are not counted."""

    catalog: DiskUse
    """The catalog and the notes of open sessions, with their logs and indexes."""
    blocks: Mapping[Namespace, DiskUse]
    """Blocks of each namespace, those too that no session holds."""
    unknown: Mapping[str, DiskUse]
    """By name, directories of blocks of no namespace, and catalogs that were moved aside."""
    free_bytes: int
    """Free space of the disk that the directory is on."""
    total_bytes: int
    """Size of this disk."""


class StoreInspector:
    """Reads a store's directory. Belongs to one thread; calls block.

    Args:
      directory: the store's.
      url: where the blocks are, if not in the directory, as a TensorStore URL.
      driver: how blocks are kept, `zarr3` or `raw`; needed only where a namespace has blocks of both kinds.

    Raises:
      StoreDirectoryError: there is no such directory, or it is a file.
      CatalogError: there is no catalog in it, or it cannot be read; the kind says why.
      ValueError: an unknown driver, or another than `zarr3` at a URL.
    """

    def __init__(self, directory: str | os.PathLike[str], *, url: str | None = None, driver: str | None = None):
        self.directory = Path(directory)
        """The store's."""
        if driver not in (None, *SSD_DRIVERS):
            raise ValueError(f"driver must be one of {', '.join(SSD_DRIVERS)}; got {driver!r}")
        if url is not None and driver not in (None, "zarr3"):
            raise ValueError(f"blocks at a URL must be driver zarr3, got {driver}")
        if not self.directory.exists():
            raise StoreDirectoryError(f"{self.directory} must be a store's directory, got nothing there")
        if not self.directory.is_dir():
            raise StoreDirectoryError(f"{self.directory} must be a store's directory, got a file")
        self.url = url
        """Where the blocks are, if not in the directory."""
        self._driver = driver
        self._tiers: dict[Namespace, DiskTier] = {}
        self._readers: dict[Namespace, CatalogReader] = {}
        self.namespaces()

    def __enter__(self) -> StoreInspector:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def namespaces(self) -> tuple[NamespaceInfo, ...]:
        """All namespaces and their sizes, oldest first."""
        return namespaces(self.directory)

    def sessions(self, tenant: str | None = None) -> Listing:
        """All sessions of all namespaces, or one tenant's."""
        sound: list[StoredSession] = []
        damaged: list[DamagedRow] = []
        for info in self.namespaces():
            in_namespace = self.sessions_of(info.namespace, tenant)
            sound.extend(in_namespace.sound)
            damaged.extend(in_namespace.damaged)
        return Listing(sound=_by_use(sound), damaged=tuple(damaged))

    def sessions_of(self, namespace: Namespace, tenant: str | None = None) -> Listing:
        """All sessions of one namespace, or one tenant's."""
        damaged: list[DamagedRow] = []

        def on_damaged(key: str, found: str) -> None:
            damaged.append(DamagedRow(namespace=namespace, key=key, found=found))

        sound = [
            StoredSession(namespace=namespace, record=record)
            for record in self.reader(namespace).load_all(on_damaged)
            if tenant in (None, record.tenant)
        ]
        return Listing(sound=_by_use(sound), damaged=tuple(damaged) if tenant is None else ())

    def find(self, name: str, tenant: str | None = None) -> StoredSession:
        """The session that has this id or key, or else the one whose key begins so.

        Raises:
          UnknownSessionError: there is none.
          AmbiguousSessionError: there are several.
        """
        sessions = self.sessions(tenant).sound
        found = [each for each in sessions if name in (each.record.session_id, each.record.key)]
        found = found or [each for each in sessions if name and each.record.key.startswith(name)]
        if not found:
            of = "" if tenant is None else f" of tenant {tenant!r}"
            raise UnknownSessionError(
                f"the name must be the id or the beginning of the key of one of {len(sessions)} "
                f"sessions{of}, got {name!r}"
            )
        if len(found) > 1:
            candidates = "".join(
                f"\n  {each.record.key}  session {each.record.session_id!r} of tenant {each.record.tenant!r}"
                for each in found
            )
            raise AmbiguousSessionError(
                f"the name must be that of one session, got {len(found)} for {name!r}:{candidates}"
            )
        return found[0]

    def disk_use(self) -> StoreDiskUse:
        """What the store takes on disk. Looks at every file: seconds at a million."""
        known = {info.namespace.directory_name: info.namespace for info in self.namespaces()}
        blocks = dict.fromkeys(known.values(), DiskUse(num_files=0, num_bytes=0))
        unknown: dict[str, DiskUse] = {}
        for path in sorted(self.directory.iterdir()):
            if path.name in known:
                blocks[known[path.name]] = measure(path)
            elif _BLOCKS_NAME.fullmatch(path.name) or path.name.startswith(f"{CATALOG_NAME}.corrupt-"):
                unknown[path.name] = measure(path)
        disk = shutil.disk_usage(self.directory)
        return StoreDiskUse(
            catalog=measure(
                *(self.directory / f"{name}{end}" for name in (CATALOG_NAME, LOG_NAME) for end in ("", "-wal", "-shm"))
            ),
            blocks=blocks,
            unknown=unknown,
            free_bytes=disk.free,
            total_bytes=disk.total,
        )

    def reader(self, namespace: Namespace) -> CatalogReader:
        """The catalog of one namespace. The inspector closes it."""
        if namespace not in self._readers:
            self._readers[namespace] = CatalogReader(self.directory, namespace)
        return self._readers[namespace]

    def open_blocks(self, namespace: Namespace, num_blocks: int = 1) -> DiskTier | None:
        """The blocks of a namespace, to be read and deleted; None where there are none. The inspector closes them.

        Args:
          namespace: whose.
          num_blocks: ids below this can be read.

        Raises:
          StoreDirectoryError: there are blocks of both drivers, and which to read was not said.
          ValueError: the blocks have another layout than the catalog says.
        """
        opened = self._tiers.get(namespace)
        if opened is not None and opened.num_blocks >= num_blocks:
            return opened
        driver = self._driver_of(namespace)
        if driver is None:
            return None
        if opened is not None:
            opened.close(_CLOSE_TIMEOUT_S)
        ids = -(-num_blocks // GROUP_BLOCKS) * GROUP_BLOCKS  # In steps, so that it is rarely opened again.
        layout, options = namespace.layout, DiskOptions(only_existing=True)
        location = self.block_location(namespace)
        tier = FORMATS[driver](layout, location, ids * layout.stored_block_bytes, options)
        self._tiers[namespace] = tier
        return tier

    def block_location(self, namespace: Namespace) -> str:
        """The directory or URL of a namespace's blocks."""
        parent = str(self.directory) if self.url is None else self.url.rstrip("/")
        return f"{parent}/{namespace.directory_name}"

    def close(self) -> None:
        """Closes what was opened. May be called again."""
        for tier in self._tiers.values():
            tier.close(_CLOSE_TIMEOUT_S)
        for reader in self._readers.values():
            reader.close()
        self._tiers.clear()
        self._readers.clear()

    # How.

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
        names = (
            [path] if not path.is_dir() else (Path(root, name) for root, _, in_it in os.walk(path) for name in in_it)
        )
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                num_bytes += name.lstat().st_blocks * 512
                num_files += 1
    return DiskUse(num_files=num_files, num_bytes=num_bytes)


def _by_use(sessions: list[StoredSession]) -> tuple[StoredSession, ...]:
    return tuple(sorted(sessions, key=lambda each: each.record.last_used_s))
