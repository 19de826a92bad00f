"""Who owns a session: the protocol by which replicas claim it and publish it, as reads and conditional writes.

    owner A   claim: epoch 1 ── publish ── publish ────────────────── publish: refused, A drops its copy
    owner B                                      claim: epoch 2 ── publish

A manifest is changed by compare-and-swap alone. Whoever takes over raises the epoch, by a write on the state it has
read; from then on every write of the owner before meets another state than it knows, is refused, and stays so: no
clock, lease or message between replicas is part of it. A write that had no answer is looked for by its name.

Each function is a generator that yields what it asks (`store.Steps`), so that a test can run all orders of two owners'
steps over this very code.

Not here: how reads and writes are done (store), what a manifest says (manifest).
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from pathlib import Path
from typing import Any

from ca_jax.storage.objects.manifest import Manifest, ManifestDamagedError, manifest_name
from ca_jax.storage.objects.store import Found, ObjectsError, Read, Steps, Write

_LOG = logging.getLogger(__name__)
_REPLICA_FILE = "replica"
_TRIES = 8  # Of one claim or publish, where others write meanwhile or answers are lost.


class NotOwnerError(Exception):
    """Another replica owns the session by now: what this one has of it is no longer to be served."""


@dataclasses.dataclass(frozen=True)
class Held:
    """What a replica knows of a session that it owns, or that nobody has published yet."""

    namespace: str
    key: str
    owner: str
    """The replica."""
    generation: bytes
    """Of the manifest as it was read or written last."""
    manifest: Manifest | None
    """That state; None: there was none."""
    is_taken: bool = False
    """Whether another replica owned it before."""

    @property
    def name(self) -> str:
        """Of the manifest."""
        return manifest_name(self.namespace, self.key)


def replica_name(directory: Path | None) -> str:
    """The name kept in a store's directory, made up where there is none."""
    if directory is None:
        return uuid.uuid4().hex
    path = directory / _REPLICA_FILE
    if path.is_file() and (name := path.read_text().strip()):
        return name
    name = uuid.uuid4().hex
    path.write_text(name + "\n")
    return name


def claim(namespace: str, key: str, owner: str) -> Steps[Held]:
    """Has a replica own a session, whoever owned it before.

    Raises:
      ObjectsError: it is not known who owns it.
      ManifestError: what is there is no manifest of it.
    """
    name, lost = manifest_name(namespace, key), None
    for _ in range(_TRIES):
        found: Found = yield Read(name)
        manifest = _manifest(found, namespace, key)
        if manifest is None:
            return Held(namespace, key, owner, found.generation, None)
        if manifest.owner == owner:
            return Held(namespace, key, owner, found.generation, manifest, is_taken=manifest.write_id == lost)
        lost = uuid.uuid4().hex
        taken = manifest.written(lost, epoch=manifest.epoch + 1, owner=owner)
        try:
            generation = yield Write(name, taken.to_bytes(), found.generation)
        except ObjectsError:
            continue  # It may have been written: then it is found.
        if generation is not None:
            return Held(namespace, key, owner, generation, taken, is_taken=True)
    raise ObjectsError(f"{name} must be claimed within {_TRIES} writes, and others wrote it each time")


def look(namespace: str, key: str) -> Steps[Manifest | None]:
    """What is published of a session; None: nothing. Raises as `claim`."""
    found: Found = yield Read(manifest_name(namespace, key))
    return _manifest(found, namespace, key)


def begin(namespace: str, key: str, owner: str) -> Steps[Held]:
    """What a replica holds of a session that was begun there.

    Raises:
      NotOwnerError: another replica has one of that name.
      ObjectsError: that is not known.
      ManifestError: what is there is no manifest of it.
    """
    found: Found = yield Read(manifest_name(namespace, key))
    manifest = _manifest(found, namespace, key)
    if manifest is not None and manifest.owner != owner:
        raise NotOwnerError(f"session {key} must be owned by {owner}, got {manifest.owner}")
    return Held(namespace, key, owner, found.generation, manifest)


def publish(held: Held, **state: Any) -> Steps[Held]:
    """Publishes a session's next state, if it is this replica's still.

    Args:
      held: as `claim` or the last `publish` gave it.
      state: fields of `Manifest`; what is not given stays.

    Raises:
      NotOwnerError: it is another replica's by now, or its manifest is damaged.
      ObjectsError: it is not known whether it is published; another `publish` finds out.
    """
    before = held.manifest
    if before is None:
        before = Manifest(
            namespace=held.namespace,
            key=held.key,
            tenant="",
            session_id="",
            epoch=1,
            owner=held.owner,
            write_id="",
            mark="",
            conversation=None,
            chain="",
        )
    manifest = before.written(uuid.uuid4().hex, **state)
    generation, failed = held.generation, None
    for _ in range(_TRIES):
        try:
            written = yield Write(held.name, manifest.to_bytes(), generation)
            if written is not None:
                return dataclasses.replace(held, generation=written, manifest=manifest, is_taken=False)
        except ObjectsError as error:
            failed = error
        found: Found = yield Read(held.name)
        if found.generation == generation:
            if failed is not None:
                raise failed
            continue  # Refused without another state: a write was under way.
        if found.value is None:  # A collector has forgotten the session, and deleted that long ago: it begins again.
            generation = found.generation
            continue
        there = _manifest(found, held.namespace, held.key)
        if there is None or (there.owner, there.epoch) != (manifest.owner, manifest.epoch):
            raise NotOwnerError(f"session {held.key} must be owned by {held.owner}, got another owner, or none")
        generation = found.generation
        if there.write_id == manifest.write_id:
            return dataclasses.replace(held, generation=generation, manifest=manifest, is_taken=False)
    raise failed or ObjectsError(f"{held.name} must be written within {_TRIES} tries, and was not")


def _manifest(found: Found, namespace: str, key: str) -> Manifest | None:
    """What was found, if it is a manifest; None where there is none, or a damaged one, which is nobody's."""
    try:
        return None if found.value is None else Manifest.from_bytes(found.value, namespace=namespace, key=key)
    except ManifestDamagedError as error:
        _LOG.warning("the session begins anew: %s %s", manifest_name(namespace, key), error)
        return None
