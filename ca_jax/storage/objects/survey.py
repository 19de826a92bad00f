"""What is at a URL: all objects by kind, all manifests, and whether the KV that these name is sound. Changes nothing.

    for verdict in verify(ObjectStore(url, deadline_s)):
        print(verdict.session.key, verdict.damages)

Not here: deleting any of it (collector).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ca_jax.storage.objects import parts
from ca_jax.storage.objects.manifest import Manifest, ManifestDamagedError, ManifestError, PartRef, manifest_name
from ca_jax.storage.objects.parts import PartError, PartMissingError
from ca_jax.storage.objects.store import ObjectStore
from ca_jax.storage.records import IoFailure

ROOT = "v1/"
PROBES = "v1/probes/"
_KINDS = ("sessions", "kv", "chains", "doomed")

Mapper = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""Calls a function for each of some values, as `map` does, or several at once."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A manifest as it was read."""

    name: str
    """Of the object."""
    generation: bytes
    manifest: Manifest | None
    """Without the conversation: empty bytes stand for it. None: it cannot be read."""
    damage: str = ""
    """Why not."""
    is_damaged: bool = False
    """Whether it does not pass its checksum; one that does and cannot be read is of another version."""

    @property
    def key(self) -> str:
        """Of the session, as the object's name says."""
        return self.name.rpartition("/")[2]

    @property
    def space(self) -> str:
        """The beginning of its namespace, as the object's name says."""
        return self.name.split("/")[1]

    @property
    def alive(self) -> Manifest | None:
        """The manifest; None where it cannot be read, or is what is left of a session that was forgotten."""
        return None if self.manifest is None or self.manifest.conversation is None else self.manifest

    @property
    def expires_s(self) -> float | None:
        """When its time to live is over, seconds since the epoch; None: never."""
        manifest = self.manifest
        if manifest is None or manifest.pinned or manifest.ttl_s is None:
            return None
        return manifest.used_s + manifest.ttl_s

    def expired(self, now_s: float) -> bool:
        """Whether its time to live is over at `now_s`, seconds since the epoch. A pinned session never expires."""
        return self.expires_s is not None and self.expires_s < now_s


@dataclasses.dataclass
class Space:
    """What there is of one namespace: names of objects by kind, and its manifests by their names."""

    sessions: list[str] = dataclasses.field(default_factory=list)
    kv: list[str] = dataclasses.field(default_factory=list)
    chains: list[str] = dataclasses.field(default_factory=list)
    doomed: list[str] = dataclasses.field(default_factory=list)
    """Marks on KV objects, see `parts.doomed_name`."""
    stored: dict[str, Stored] = dataclasses.field(default_factory=dict)

    def alive(self) -> Iterator[tuple[Stored, Manifest]]:
        """Manifests of sessions that were not forgotten."""
        for each in self.stored.values():
            if (manifest := each.alive) is not None:
                yield each, manifest


@dataclasses.dataclass(frozen=True)
class Survey:
    """What there is at a URL."""

    spaces: dict[str, Space]
    """By the beginning of their namespace."""
    probes: list[str]

    def stored(self) -> Iterator[Stored]:
        """All manifests."""
        for space in self.spaces.values():
            yield from space.stored.values()

    def alive(self) -> Iterator[tuple[Stored, Manifest]]:
        """Those of sessions that were not forgotten."""
        for space in self.spaces.values():
            yield from space.alive()


@dataclasses.dataclass(frozen=True)
class PartDamage:
    """One object that is not what a session says of it."""

    name: str
    """Of the object."""
    reason: IoFailure
    """`CATALOG` where it is the manifest."""
    found: str
    """What was wanted and what was found."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether one session is sound."""

    session: Stored
    num_bytes: int = 0
    """Of KV that was read for it; what sessions share is read once."""
    damages: tuple[PartDamage, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.damages


def survey(objects: ObjectStore, each: Mapper = map) -> Survey:
    """Lists all objects and reads all manifests.

    Args:
      each: does the reading.

    Raises:
      ObjectsError: they cannot be listed or read.
    """
    spaces: dict[str, Space] = collections.defaultdict(Space)
    probes = []
    for name in objects.names(ROOT):
        of, _, rest = name.removeprefix(ROOT).partition("/")
        kind = rest.partition("/")[0]
        if name.startswith(PROBES):
            probes.append(name)
        elif kind in _KINDS:
            getattr(spaces[of], kind).append(name)
    for space in spaces.values():
        found = each(lambda name: read_stored(objects, name), space.sessions)
        space.stored = {stored.name: stored for stored in found if stored is not None}
    return Survey(dict(spaces), probes)


def read_stored(objects: ObjectStore, name: str) -> Stored | None:
    """A manifest as it is now; None: it is gone.

    Raises:
      ObjectsError: it cannot be read.
    """
    found = objects.read(name)
    if found.value is None:
        return None
    try:
        manifest = Manifest.from_bytes(found.value)
        if manifest_name(manifest.namespace, manifest.key) != name:
            raise ManifestError(f"{name} must be the manifest of its session, got that of {manifest.key}")
    except ManifestError as error:
        return Stored(name, found.generation, None, str(error), isinstance(error, ManifestDamagedError))
    if manifest.conversation is not None:
        manifest = dataclasses.replace(manifest, conversation=b"")
    return Stored(name, found.generation, manifest)


def verify(objects: ObjectStore, tenant: str | None = None) -> Iterator[Verdict]:
    """Reads every object of KV that sessions name, or one tenant's. A session that was forgotten has no verdict.

    One that changes while its objects are read is read again. Waits, for as long as the store takes.

    Raises:
      ObjectsError: objects cannot be listed or read.
    """
    known: dict[tuple[str, PartRef], PartDamage | None] = {}
    for stored in survey(objects).stored():
        if stored.manifest is None:
            if tenant is None:  # Whose it is is not known.
                yield Verdict(stored, damages=(PartDamage(stored.name, IoFailure.CATALOG, stored.damage),))
            continue
        now: Stored | None = stored
        while now is not None and (manifest := now.alive) is not None and tenant in (None, manifest.tenant):
            verdict = _verified(objects, now, manifest, known)
            before, now = now, read_stored(objects, now.name) if verdict.damages else now
            if now is not None and now.generation == before.generation:
                yield verdict
                break


def _verified(
    objects: ObjectStore, stored: Stored, manifest: Manifest, known: dict[tuple[str, PartRef], PartDamage | None]
) -> Verdict:
    """What is wrong with a session's objects, none of which is read twice."""
    damages, num_bytes = [], 0
    for part in manifest.parts:
        of = manifest.namespace, part
        if of not in known:
            num_bytes += part.num_bytes(manifest.token_bytes)
            known[of] = None
            try:
                parts.check_part(objects, part, manifest.namespace)
            except PartError as error:
                reason = IoFailure.MISSING if isinstance(error, PartMissingError) else IoFailure.CORRUPT
                known[of] = PartDamage(part.name, reason, str(error))
        if (damage := known[of]) is not None:
            damages.append(damage)
    return Verdict(stored, num_bytes, tuple(damages))
