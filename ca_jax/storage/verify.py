"""Whether what is stored is sound: reads blocks back and holds them against their checksums, seals and catalog.

    with StoreInspector(directory) as inspector:
        damaged = [verdict for verdict in verify(inspector) if not verdict.ok]

A session that an engine changes in the midst of it is read again.

Not here: what is stored (inspector), forgetting what is damaged (collect).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

import numpy as np

from ca_jax.errors import CaJaxError
from ca_jax.storage.catalog.reader import CatalogReader
from ca_jax.storage.catalog.records import Contents, DamagedRecordError, Namespace, Problem, SessionRecord
from ca_jax.storage.inspector import StoreDirectoryError, StoredSession, StoreInspector
from ca_jax.storage.layout import KVLayout, verify_block
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.disk import DiskTier
from ca_jax.storage.tiers.dram import host_array

_READ_BLOCKS = 8  # Blocks that are read at once.


class DamagedSessionError(CaJaxError):
    """A session that cannot be read; the message says why."""


class DamageReason(enum.StrEnum):
    """What is wrong with a session or a block of it."""

    CORRUPT = "corrupt"
    """A checksum, a length or a label on disk is wrong."""
    MISSING = "missing"
    """Nothing is on disk for the block."""
    SEAL = "seal"
    """The block is intact and another one than was meant."""
    UNREADABLE = "unreadable"
    """The device reports an error, or makes no progress."""
    CATALOG = "catalog"
    """What the catalog says about it does not pass its checksum."""


_REASONS = {IoFailure.CORRUPT: DamageReason.CORRUPT, IoFailure.MISSING: DamageReason.MISSING}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """One thing that is wrong with a session."""

    reason: DamageReason
    """Its kind."""
    found: str
    """What was wanted and what was found."""
    index: int | None = None
    """Which of the session's blocks, counted from its first; None where it is none of them."""
    block_id: int | None = None
    """Where this block is on disk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether one session is sound."""

    namespace: Namespace
    """Whose weights and layout."""
    key: str
    """Of the session."""
    session: StoredSession | None
    """The session; None where its row in the catalog is damaged."""
    damages: tuple[Damage, ...] = ()
    """What is wrong with it."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.damages


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SessionKV:
    """A session, read and verified."""

    session: StoredSession
    """As it was when it was read."""
    token_ids: np.ndarray
    """int32 `[T]`."""
    kv: np.ndarray
    """`[L, 2, T, K, H]`, keys (as they are stored, unrotated) before values."""


def verify(inspector: StoreInspector, tenant: str | None = None) -> Iterator[Verdict]:
    """Reads every block of every session, or of one tenant's. Blocks, for as long as the disk takes.

    A session that is forgotten meanwhile has no verdict.

    Raises:
      CatalogError: the catalog cannot be read.
      StoreDirectoryError: a namespace has blocks of both drivers, and which to read was not said.
    """
    for info in inspector.namespaces():
        listing = inspector.sessions_of(info.namespace, tenant)
        for row in listing.damaged:
            damage = Damage(reason=DamageReason.CATALOG, found=row.found)
            yield Verdict(namespace=row.namespace, key=row.key, session=None, damages=(damage,))
        for session in listing.sound:
            verdict = verify_session(inspector, session)
            if verdict is not None:
                yield verdict


def verify_session(inspector: StoreInspector, session: StoredSession) -> Verdict | None:
    """Reads every block of one session; None if it is not stored any more. Raises as `verify` does."""
    examined = _examine(inspector, session, with_kv=False)
    if examined is None:
        return None
    now = examined.session
    return Verdict(namespace=now.namespace, key=now.record.key, session=now, damages=tuple(examined.damages))


def read_session(inspector: StoreInspector, session: StoredSession) -> SessionKV | None:
    """Reads and verifies a session's tokens and KV; None if it is not stored any more.

    Raises:
      DamagedSessionError: it is not sound.
      CatalogError, StoreDirectoryError: as `verify`.
    """
    examined = _examine(inspector, session, with_kv=True)
    if examined is None:
        return None
    now = examined.session
    if examined.damages or examined.contents is None or examined.kv is None:
        first = examined.damages[0]
        raise DamagedSessionError(f"session {now.record.session_id!r}: {first.found} ({first.reason})")
    return SessionKV(session=now, token_ids=examined.contents.token_ids, kv=examined.kv)


def catalog_problems(inspector: StoreInspector) -> tuple[Problem, ...]:
    """Reads the whole catalog and says what is wrong with it: in the file, in its rows, and between them.

    Raises:
      CatalogCorruptError: too damaged to be read to the end.
    """
    problems: dict[Problem, None] = {}
    for info in inspector.namespaces():
        reader = inspector.reader(info.namespace)
        found = reader.integrity_check()
        if found:  # Twice, since an engine that works changes a session between two looks at it.
            again = set(reader.integrity_check())
            problems.update(dict.fromkeys(problem for problem in found if problem in again))
    return tuple(problems)


@dataclasses.dataclass(kw_only=True, eq=False)
class _Examined:
    """What was found of a session."""

    session: StoredSession
    contents: Contents | None
    damages: list[Damage]
    kv: np.ndarray | None


def _examine(inspector: StoreInspector, session: StoredSession, *, with_kv: bool) -> _Examined | None:
    """Reads a session until it stands still: an engine may change it, and then reuse its blocks. None: it is gone."""
    reader, key = inspector.reader(session.namespace), session.record.key
    while True:
        try:
            record = reader.get(key)
            if record is None:
                return None
            contents = reader.contents(key)
        except DamagedRecordError as error:
            damage = Damage(reason=DamageReason.CATALOG, found=str(error))
            return _Examined(session=session, contents=None, damages=[damage], kv=None)
        if contents is None or len(contents.token_ids) != record.num_tokens:
            continue  # Changed between the two.
        examined = _Examined(
            session=StoredSession(namespace=session.namespace, record=record),
            contents=contents,
            damages=[],
            kv=_kv_of(session.namespace.layout, record.num_tokens) if with_kv else None,
        )
        _examine_blocks(inspector, examined, contents)
        if _stands(reader, record):
            return examined


def _stands(reader: CatalogReader, record: SessionRecord) -> bool:
    """Whether a session is still what it was."""
    try:
        now = reader.get(record.key)
    except DamagedRecordError:
        return False
    return (
        now is not None
        and (now.generation, now.created_s) == (record.generation, record.created_s)
        and np.array_equal(now.block_ids, record.block_ids)
    )


def _examine_blocks(inspector: StoreInspector, examined: _Examined, contents: Contents) -> None:
    """Reads and verifies the blocks of a session, and keeps their KV if there is room for it."""
    session, kv = examined.session, examined.kv
    record, layout = session.record, session.namespace.layout

    def report(reason: DamageReason, found: str, index: int | None = None, block_id: int | None = None) -> None:
        examined.damages.append(Damage(reason=reason, found=found, index=index, block_id=block_id))

    try:
        tier = inspector.open_blocks(session.namespace, int(record.block_ids.max()) + 1)
    except StoreDirectoryError:
        raise
    except ValueError as error:
        report(DamageReason.CORRUPT, str(error))
        return
    if tier is None:
        report(DamageReason.MISSING, f"there must be blocks in {inspector.block_location(session.namespace)}, got none")
        return
    rows_of = {rows.index: rows for rows in record.copy.places.by_block(layout.block_tokens)}
    for index, block_id, block, failure in _read_each(tier, record.block_ids.tolist()):
        num_rows = layout.tokens_in_block(index, record.num_rows)
        if failure is not None:
            report(_REASONS.get(failure.reason, DamageReason.UNREADABLE), str(failure), index, block_id)
        elif num_rows > 0:
            if not verify_block(block, num_rows, contents.seals[index]):
                report(
                    DamageReason.SEAL,
                    "the block must hold the bytes of its seal, got an intact block of others",
                    index,
                    block_id,
                )
            elif kv is not None and index in rows_of:
                rows = rows_of[index]
                kv[:, :, rows.first_token : rows.first_token + rows.num_tokens] = block[:, :, rows.rows]


def _read_each(tier: DiskTier, block_ids: list[int]) -> Iterator[tuple[int, int, np.ndarray, BlockIoError | None]]:
    """Reads blocks, a few at once, and gives each one's index, id, bytes (of use until the next) and error."""
    memory = [_block_of(tier.layout) for _ in block_ids[:_READ_BLOCKS]]
    for first in range(0, len(block_ids), _READ_BLOCKS):
        ids = block_ids[first : first + _READ_BLOCKS]
        handles = [tier.read_blocks([block_id], [memory[slot]]) for slot, block_id in enumerate(ids)]
        for slot, handle in enumerate(handles):
            handle.wait()
            yield first + slot, ids[slot], memory[slot], handle.error
            if not handle.settled:  # It may write there yet.
                memory[slot] = _block_of(tier.layout)


def _block_of(layout: KVLayout) -> np.ndarray:
    return host_array(layout.block_shape, layout.numpy_dtype)


def _kv_of(layout: KVLayout, num_tokens: int) -> np.ndarray:
    return host_array((layout.num_layers, 2, num_tokens, layout.num_kv_heads, layout.head_dim), layout.numpy_dtype)
