"""Whether what is stored is sound: reads blocks back and holds them against their checksums and the catalog.

    with StoreInspector(directory) as inspector:
        damaged = [verdict for verdict in verify(inspector) if not verdict.ok]

A session that an engine changes in the midst of it is read again.

Not here: what is stored (inspector), forgetting what is damaged (collect).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator

import numpy as np

from ca_jax.errors import CaJaxError
from ca_jax.storage.catalog.catalog import CatalogReader
from ca_jax.storage.catalog.records import Contents, DamagedRecordError, Namespace, Problem, SessionRecord
from ca_jax.storage.inspector import StoreDirectoryError, StoredSession, StoreInspector
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.disk import DiskTier
from ca_jax.storage.tiers.dram import host_array

_READ_BLOCKS = 8  # Blocks that are read at once.


class DamagedSessionError(CaJaxError):
    """A session that cannot be read; the message says why."""


class DamageReason(enum.StrEnum):
    """What is wrong with a session or a block of it."""

    CORRUPT = "corrupt"
    """It has other bytes than were written, or another number of them."""
    MISSING = "missing"
    """Nothing is on disk for the block."""
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
    found = _examine(inspector, session, None)
    if found is None:
        return None
    now, _, damages = found
    return Verdict(namespace=now.namespace, key=now.record.key, session=now, damages=tuple(damages))


def read_session(inspector: StoreInspector, session: StoredSession) -> SessionKV | None:
    """Reads and verifies a session's tokens and KV; None if it is not stored any more.

    Raises:
      DamagedSessionError: it is not sound.
      CatalogError, StoreDirectoryError: as `verify`.
    """
    layout = session.namespace.layout
    kv: list[np.ndarray] = []

    def memory_for(record: SessionRecord) -> np.ndarray:
        shape = (layout.num_layers, 2, record.num_tokens, layout.num_kv_heads, layout.head_dim)
        kv[:] = [host_array(shape, layout.numpy_dtype)]
        return kv[0]

    found = _examine(inspector, session, memory_for)
    if found is None:
        return None
    now, contents, damages = found
    if damages or contents is None:
        raise DamagedSessionError(f"session {now.record.session_id!r}: {damages[0].found} ({damages[0].reason})")
    return SessionKV(session=now, token_ids=contents.token_ids, kv=kv[0])


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


def _examine(
    inspector: StoreInspector, session: StoredSession, memory_for: Callable[[SessionRecord], np.ndarray] | None
) -> tuple[StoredSession, Contents | None, list[Damage]] | None:
    """Reads a session until it stands still: an engine may change it, and then reuse its blocks.

    Args:
      inspector: of the store.
      session: which.
      memory_for: gives memory for its KV, `[L, 2, T, K, H]`; None: it is not kept.

    Returns:
      The session as it was read, what the catalog keeps with it if that is sound, and what is wrong; None: it is gone.
    """
    reader, key = inspector.reader(session.namespace), session.record.key
    while True:
        try:
            found = reader.load(key)
        except DamagedRecordError as error:
            return session, None, [Damage(reason=DamageReason.CATALOG, found=str(error))]
        if found is None:
            return None
        record, contents = found
        now = StoredSession(namespace=session.namespace, record=record)
        damages = _examine_blocks(inspector, now, contents.sums, memory_for(record) if memory_for else None)
        if _stands(reader, record):
            return now, contents, damages


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


def _examine_blocks(
    inspector: StoreInspector, session: StoredSession, sums: np.ndarray, kv: np.ndarray | None
) -> list[Damage]:
    """Reads and verifies the blocks of a session, and keeps their KV if there is room for it; what is wrong."""
    record, layout = session.record, session.namespace.layout
    try:
        tier = inspector.open_blocks(session.namespace, int(record.block_ids.max()) + 1)
    except StoreDirectoryError:
        raise
    except ValueError as error:
        return [Damage(reason=DamageReason.CORRUPT, found=str(error))]
    if tier is None:
        location = inspector.block_location(session.namespace)
        return [Damage(reason=DamageReason.MISSING, found=f"{location} must hold its blocks, got none")]
    damages = []
    rows_of = {rows.index: rows for rows in record.places.by_block(layout.block_tokens)}
    for index, (block_id, block, failure) in enumerate(_read_each(tier, record.block_ids.tolist(), sums)):
        if failure is not None:
            reason = _REASONS.get(failure.reason, DamageReason.UNREADABLE)
            damages.append(Damage(reason=reason, found=str(failure), index=index, block_id=block_id))
        elif kv is not None and index in rows_of:
            rows = rows_of[index]
            kv[:, :, rows.first_token : rows.first_token + rows.num_tokens] = block[:, :, rows.rows]
    return damages


def _read_each(
    tier: DiskTier, block_ids: list[int], sums: np.ndarray
) -> Iterator[tuple[int, np.ndarray, BlockIoError | None]]:
    """Reads blocks, a few at once, and gives each one's id, bytes (of use until the next) and error."""
    memory = [_block_of(tier.layout) for _ in block_ids[:_READ_BLOCKS]]
    for first in range(0, len(block_ids), _READ_BLOCKS):
        ids = block_ids[first : first + _READ_BLOCKS]
        handles = [
            tier.read_blocks([block_id], [memory[slot]], sums[first + slot : first + slot + 1])
            for slot, block_id in enumerate(ids)
        ]
        for slot, handle in enumerate(handles):
            handle.wait()
            yield ids[slot], memory[slot], handle.error
            if not handle.settled:  # It may write there yet.
                memory[slot] = _block_of(tier.layout)


def _block_of(layout: KVLayout) -> np.ndarray:
    return host_array(layout.block_shape, layout.numpy_dtype)
