"""Collects what replicas share: sessions whose time is over or that are over a cap, and objects that no manifest names.

    first look    forgets sessions ── lists what is nameless ── marks it        a publish that finds a mark writes anew
    grace         a publish under way comes to name what it has found or written
    second look   deletes what is nameless still, and as it was

A session is forgotten by a write on the manifest that was read, which keeps its owner and epoch: an owner that is alive
publishes it again with its next turn, and is refused nothing. No engine is stopped for a collection. It may end at any
moment; the next one goes on from what there is.

The grace must be longer than any publish takes. Should one take longer, it may name an object that is gone: its tokens
are computed again. A store that deletes without looking at the condition in the same moment (TensorStore's S3: a HEAD,
then the DELETE) can do the same to a publish that comes in between.

Not here: who collects (lease), what there is (survey), who publishes (kv.shared_sessions).
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import enum
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ca_jax.storage.objects import parts
from ca_jax.storage.objects.lease import HeldLease
from ca_jax.storage.objects.manifest import Manifest, hint_name
from ca_jax.storage.objects.store import ObjectStore
from ca_jax.storage.objects.survey import Stored, Survey, survey

LEASE_S = 60.0
TOMBSTONE_S = 7 * 24 * 3600.0
_THREADS = 16  # Requests at a time.
_BATCH = 64  # Objects between two renewals of the lease.


class Reason(enum.StrEnum):
    """Why a session is forgotten."""

    EXPIRED = "expired"
    """Its time to live is over."""
    QUOTA = "quota"
    """Its tenant holds more than it may."""
    CAP = "cap"
    """All sessions hold more than they may."""


@dataclasses.dataclass(frozen=True)
class Forgotten:
    """A session that is forgotten."""

    session: Stored
    reason: Reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collected:
    """What was collected, or would be."""

    forgotten: tuple[Forgotten, ...] = ()
    unreadable: tuple[Stored, ...] = ()
    """Manifests that cannot be read, and are left as they are."""
    num_objects: int = 0
    """Objects of KV that were deleted."""
    num_bytes: int = 0
    """What these took, as their headers say."""
    num_rescued: int = 0
    """Objects of KV that were nameless at the first look and not at the second, or had changed."""
    num_hints: int = 0
    num_probes: int = 0
    num_tombstones: int = 0
    """Manifests of forgotten sessions that were deleted."""
    num_sessions: int = 0
    """Sessions that stay."""
    kept_bytes: int = 0
    """KV that these name, each object once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What sessions may hold, bytes; what several of them name counts once, of a tenant once."""

    max_bytes: int | None = None
    tenant_quota_bytes: int | None = None
    tenant_quotas: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """By tenant, in place of `tenant_quota_bytes`."""

    def of(self, tenant: str | None) -> float:
        """Most that a tenant may hold; None: all of them."""
        limit = self.max_bytes if tenant is None else self.tenant_quotas.get(tenant, self.tenant_quota_bytes)
        return math.inf if limit is None else limit


def collect(
    objects: ObjectStore,
    *,
    max_bytes: int | None = None,
    tenant_quota_bytes: int | None = None,
    tenant_quotas: Mapping[str, int] | None = None,
    tenant: str | None = None,
    grace_s: float = 600.0,
    dry_run: bool = False,
    now_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    tombstone_s: float = TOMBSTONE_S,
    lease_s: float = LEASE_S,
) -> Collected:
    """Forgets sessions that are due and deletes what no manifest names. Waits, for longer than the grace.

    Args:
      max_bytes: most KV that all sessions may name; over it the least recently used go that are not pinned.
      tenant_quota_bytes, tenant_quotas: the same of each tenant, and of tenants by name in place of it.
      tenant: forget sessions of this one only.
      grace_s: between the two looks, seconds; longer than any publish takes.
      dry_run: look once, and only say what would go if nobody published meanwhile.
      now_s: seconds since the epoch; None: what the system says.
      sleep: waits for so many seconds; called several times.
      clock: monotonic, seconds; of the lease.
      tombstone_s: how long after its last turn a forgotten session's manifest is kept, seconds.
      lease_s: how long the lease holds between two renewals, seconds.

    Raises:
      LeaseHeldError: another collector is at work.
      LeaseLostError: another collector has taken over; nothing was deleted since.
      ObjectsError: the store cannot be reached; what was done until then stays.
    """
    if not (math.isfinite(grace_s) and grace_s >= 0):
        raise ValueError(f"grace_s must be seconds >= 0, got {grace_s}")
    limits = Limits(max_bytes=max_bytes, tenant_quota_bytes=tenant_quota_bytes, tenant_quotas=tenant_quotas or {})
    now_s = time.time() if now_s is None else now_s
    with contextlib.ExitStack() as opened:
        lease = None if dry_run else opened.enter_context(HeldLease(objects, lease_s, clock, sleep))
        threads = opened.enter_context(concurrent.futures.ThreadPoolExecutor(_THREADS))  # Ends before the lease does.
        collection = _Collection(objects, lease, threads)
        if lease is None:
            return collection.tell(limits, tenant, now_s, tombstone_s)
        return collection.run(limits, tenant, now_s, tombstone_s, lambda: lease.wait(grace_s))


class _Collection:
    """One collection, under a lease, or with none to look only."""

    def __init__(
        self, objects: ObjectStore, lease: HeldLease | None, threads: concurrent.futures.ThreadPoolExecutor
    ) -> None:
        self._objects, self._lease, self._threads = objects, lease, threads

    def tell(self, limits: Limits, tenant: str | None, now_s: float, tombstone_s: float) -> Collected:
        """What a collection would do."""
        look = survey(self._objects, self._each)
        going = _going(look, limits, tenant, now_s)
        _take_out(look, going)
        measured = self._each(lambda name: parts.measure_part(self._objects, name), _nameless_kv(look))
        sizes = [num_bytes for _, num_bytes in filter(None, measured)]
        return dataclasses.replace(
            _kept(look),
            forgotten=tuple(going),
            num_objects=len(sizes),
            num_bytes=sum(sizes),
            num_hints=len(self._nameless_hints(look)),
            num_probes=len(look.probes),
            num_tombstones=len(_tombstones(look, now_s - tombstone_s)),
        )

    def run(
        self, limits: Limits, tenant: str | None, now_s: float, tombstone_s: float, wait: Callable[[], None]
    ) -> Collected:
        """Does it."""
        first = survey(self._objects, self._each)
        tombstones = _tombstones(first, now_s - tombstone_s)
        due = _going(first, limits, tenant, now_s)
        forgotten = [each for each, is_done in zip(due, self._each(self._forget, due), strict=True) if is_done]
        _take_out(first, forgotten)
        doomed = {each[0]: each[1:] for each in self._each(self._doom, _nameless_kv(first)) if each is not None}
        hints = self._nameless_hints(first)
        wait()
        second = survey(self._objects, self._each)
        going = [name for name in _nameless_kv(second) if name in doomed]
        deleted = self._deleted([(name, doomed[name][0]) for name in going])
        found_hints = self._nameless_hints(second, among=hints)
        same = [each.name for each in second.stored() if tombstones.get(each.name) == each.generation]
        probes = set(first.probes).intersection(second.probes)
        told = dataclasses.replace(
            _kept(second),
            forgotten=tuple(forgotten),
            num_objects=len(deleted),
            num_bytes=sum(doomed[name][1] for name in deleted),
            num_rescued=len(doomed) - len(deleted),
            num_hints=len(self._deleted([(name, found_hints[name]) for name in found_hints])),
            num_probes=len(self._deleted([(name, None) for name in probes])),
            num_tombstones=len(self._deleted([(name, tombstones[name]) for name in same])),
        )
        self._deleted([(name, None) for space in second.spaces.values() for name in space.doomed])
        return told

    def _each(self, function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
        """A function's results, several at a time, and the lease renewed before each batch."""
        pending = list(values)
        found: list[Any] = []
        for at in range(0, len(pending), _BATCH):
            if self._lease is not None:
                self._lease.renew()
            found += self._threads.map(function, pending[at : at + _BATCH])
        return found

    def _forget(self, due: Forgotten) -> bool:
        """Has a manifest say that its session is forgotten; False: it is another one by now."""
        stored = due.session
        if stored.manifest is None or self._lease is None:
            return False
        self._lease.check()
        after = stored.manifest.written(uuid.uuid4().hex, conversation=None, parts=())
        return self._objects.write(stored.name, after.to_bytes(), replaces=stored.generation) is not None

    def _doom(self, name: str) -> tuple[str, bytes, int] | None:
        """Marks an object that others may come to name; its name, generation and bytes. None: it is gone.

        What is read of it is read before it is marked: who finds the mark writes another generation.
        """
        measured = parts.measure_part(self._objects, name)
        if measured is not None and parts.is_plain_name(name):
            self._objects.write(parts.doomed_name(name), b"")
        return None if measured is None else (name, *measured)

    def _deleted(self, going: Sequence[tuple[str, bytes | None]]) -> list[str]:
        """Deletes objects that are of a generation still, or of any (None); the names of those that were."""

        def delete(each: tuple[str, bytes | None]) -> str | None:
            if self._lease is None:
                return None
            self._lease.check()
            name, generation = each
            return name if self._objects.write(name, None, replaces=generation) is not None else None

        return [name for name in self._each(delete, going) if name is not None]

    def _nameless_hints(self, look: Survey, among: Iterable[str] | None = None) -> dict[str, bytes]:
        """Hints that lead to no session, by their names the generations that they were read in."""

        def read(name: str) -> tuple[str, bytes, str] | None:
            found = self._objects.read(name)
            return None if found.value is None else (name, found.generation, found.value.decode(errors="replace"))

        nameless = {}
        allowed = None if among is None else set(among)
        for space in look.spaces.values():
            named = {hint_name(each.namespace, each.tenant, each.chain) for _, each in space.alive()}
            leads = [name for name in space.chains if name not in named and (allowed is None or name in allowed)]
            keys = {each.key for each in space.stored.values() if each.alive or each.manifest is None}
            for name, generation, key in filter(None, self._each(read, leads)):
                if key not in keys:
                    nameless[name] = generation
        return nameless


class _Books:
    """Bytes of KV that sessions name: of all of them (None), and by tenant."""

    def __init__(self) -> None:
        self.num_bytes: collections.Counter[str | None] = collections.Counter()
        self._uses: collections.Counter[tuple[str | None, str]] = collections.Counter()

    def add(self, manifest: Manifest, sign: int = 1) -> None:
        """A session comes (1) or goes (-1)."""
        for part in manifest.parts:
            for of in (None, manifest.tenant):
                before = self._uses[of, part.name]
                self._uses[of, part.name] = before + sign
                if 0 in (before, before + sign):
                    self.num_bytes[of] += sign * part.num_bytes(manifest.token_bytes)


def _going(look: Survey, limits: Limits, tenant: str | None, now_s: float) -> list[Forgotten]:
    """The sessions that are due: those whose time is over, then of tenants over their quota, then over the cap.

    Of the latter the least recently used go first; one that names no KV frees none, and stays.
    """
    books = _Books()
    going: dict[str, Forgotten] = {}
    for _, manifest in look.alive():
        books.add(manifest)
    may_go = [each for each in look.alive() if not each[1].pinned and tenant in (None, each[1].tenant)]
    may_go.sort(key=lambda each: each[1].used_s)
    for reason in Reason:
        for stored, manifest in may_go:
            of = manifest.tenant if reason is Reason.QUOTA else None
            is_over = bool(manifest.parts) and books.num_bytes[of] > limits.of(of)
            if stored.name not in going and (stored.expired(now_s) if reason is Reason.EXPIRED else is_over):
                going[stored.name] = Forgotten(stored, reason)
                books.add(manifest, -1)
    return list(going.values())


def _take_out(look: Survey, forgotten: Iterable[Forgotten]) -> None:
    """Leaves sessions out of what a look found: what they name is nameless."""
    for each in forgotten:
        look.spaces[each.session.space].stored.pop(each.session.name)


def _kept(look: Survey) -> Collected:
    """The sessions that stay, and manifests that cannot be read."""
    books = _Books()
    for _, manifest in look.alive():
        books.add(manifest)
    unreadable = tuple(each for each in look.stored() if each.manifest is None)
    return Collected(unreadable=unreadable, num_sessions=len(list(look.alive())), kept_bytes=books.num_bytes[None])


def _nameless_kv(look: Survey) -> list[str]:
    """Objects of KV that no manifest names, but for those that one which cannot be read may name."""
    found = []
    for of, space in look.spaces.items():
        named = {part.name for _, manifest in space.alive() for part in manifest.parts}
        unreadable = [each for each in space.stored.values() if each.manifest is None]
        kept = tuple(f"{parts.parts_prefix(of)}own/{each.key}/" for each in unreadable)
        if any(not each.is_damaged for each in unreadable):  # A damaged one is nobody's: its session begins anew.
            kept += (f"{parts.parts_prefix(of)}plain/",)
        found += [name for name in space.kv if name not in named and not name.startswith(kept)]
    return found


def _tombstones(look: Survey, before_s: float) -> dict[str, bytes]:
    """Manifests of forgotten sessions whose last turn was before that, with their generations."""
    readable = ((each, each.manifest) for each in look.stored() if each.manifest is not None)
    return {each.name: each.generation for each, was in readable if not each.alive and was.used_s < before_s}
