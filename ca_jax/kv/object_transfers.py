"""What threads do for sessions that replicas share: copy KV out of DRAM into objects, and objects into DRAM.

Each function moves one session and waits for the store of objects. None touches the store's books: tickets are closed
by the engine's thread, and what a closed ticket refuses ends the move.

Not here: when something moves (shared_sessions), what objects are (storage.objects), coding (object_coding).
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ca_jax.kv.object_coding import Decoding, ObjectCoding
from ca_jax.storage.codec import CodecError
from ca_jax.storage.layout import KVLayout, as_bytes
from ca_jax.storage.objects import ownership, parts
from ca_jax.storage.objects.manifest import Manifest, ManifestError, PartRef, hint_name, manifest_name
from ca_jax.storage.objects.ownership import Held, NotOwnerError
from ca_jax.storage.objects.parts import PartError
from ca_jax.storage.objects.store import ObjectsError, ObjectStore
from ca_jax.storage.tickets import LoadTicket, SaveTicket

_LOG = logging.getLogger(__name__)
_COPY_BYTES = 256 << 20  # Copied for one publish at most; what is behind it goes with the next.
_READ_BYTES = 2 << 20  # In one request, in whole layers.
_READS_AHEAD = 16  # Requests in flight, while the parts that have arrived are checked and copied.
_SAFETY = 0.8  # Of the rate that bytes came with so far: the one that is counted on.
_CODED_SAFETY = 0.4  # The same where cores decode them that the turn may compute on from then on.


class StoppedError(Exception):
    """The KV that was to be copied is about to change: its session goes on, or is cut."""


@dataclasses.dataclass
class Source:
    """KV in DRAM that is to be published. The engine's thread lets go of the ticket as soon as it `is_copied`."""

    ticket: LoadTicket
    is_copied: threading.Event = dataclasses.field(default_factory=threading.Event)


@dataclasses.dataclass(frozen=True)
class Published:
    """What became of a publish."""

    held: Held
    is_whole: bool
    """Whether all KV that was there is named."""
    num_bytes: int
    """That were written."""


class Arrival:
    """How far KV has come that is read from objects: the first layers of all of them, then the next.

    One thread reports what arrived; any thread may ask.

    Args:
      layer_bytes: of all objects, each layer's bytes of KV, `[L]`.
      clock: seconds.
      is_coded: whether they are decoded here.
    """

    def __init__(
        self, layer_bytes: Sequence[int], clock: Callable[[], float] = time.perf_counter, *, is_coded: bool = False
    ) -> None:
        self.error: RestoreError | None = None
        """The first object that could not be read, and why; those before it are served all the same."""
        self._until = np.cumsum(layer_bytes)  # Bytes up to each layer, that one included.
        self._num_bytes = 0
        self._safety = _CODED_SAFETY if is_coded else _SAFETY
        self._clock = clock
        self._begun_s = clock()

    def came(self, num_bytes: int) -> None:
        """So many more bytes have come, were found to be right, and are written."""
        self._num_bytes += num_bytes

    def is_in_time(self, layer_compute_s: float) -> bool:
        """Whether layers that take so many seconds each would wait for none, if they were computed from now on.

        As far as the rate tells at which bytes came so far. The first layer has to be there.
        """
        missing = self._until - self._num_bytes
        if missing[0] > 0 or self.error is not None:
            return False
        rate = self._safety * self._num_bytes / (self._clock() - self._begun_s)
        return bool((missing <= rate * layer_compute_s * np.arange(len(missing))).all())


@dataclasses.dataclass(frozen=True)
class SharedKV:
    """Where KV of one model and layout is shared."""

    objects: ObjectStore
    layout: KVLayout
    namespace: str
    replica: str
    """Names this engine as an owner. One with an SSD is the same after a restart."""
    coding: ObjectCoding | None = None
    """How objects are coded; None: they hold KV as it is computed. The namespace says which."""

    def publish(
        self,
        key: str,
        held: Held | None,
        state: dict[str, Any],
        token_ids: np.ndarray,
        source: Source | None,
        damaged: Collection[str],
        wake: Callable[[], None],
    ) -> Published:
        """Writes what objects lack of a session's KV, then its manifest.

        Args:
          held: None: it was begun here and never published.
          state: fields of the manifest, but for its parts.
          token_ids: int32 `[T]`, of the tokens that its KV is kept of.
          source: KV of the first of them; None: there is none here. What is named and not here stays named.
          damaged: names of objects that must be written anew.
          wake: called when the source is copied.

        Raises:
          StoppedError: the source was let go of before it was copied.
          NotOwnerError, ObjectsError, ManifestError: see `ownership.publish`.
        """
        if held is None:
            held = self.objects.run(ownership.begin(self.namespace, key, self.replica))
        named: list[PartRef] = []
        is_whole, num_bytes = True, 0
        known = self._known(held, state, source, damaged)
        fitting = parts.fitting(known, token_ids)
        if source is None or (fitting and fitting[-1].stop > source.ticket.num_tokens):
            named = fitting
            if held.manifest is not None and fitting:
                state = state | {"num_plain": held.manifest.num_plain}
        else:
            epoch = 1 if held.manifest is None else held.manifest.epoch
            divided = parts.divide(
                token_ids[: source.ticket.num_tokens],
                source.ticket.num_plain,
                self.layout,
                known,
                namespace=self.namespace,
                tenant=state["tenant"],
                key=key,
                mark=f"{epoch}-{uuid.uuid4().hex}",
            )
            copied, is_whole = self._copied(source, divided)
            source.is_copied.set()
            wake()
            for each in divided[: len(copied)]:
                layers = copied.pop(0)
                if isinstance(each, PartRef):
                    named.append(each)
                    continue
                part, written = parts.write_part(
                    self.objects,
                    each,
                    functools.partial(self._stored, layers),
                    self.layout,
                    self.namespace,
                    is_damaged=each.name in damaged,
                )
                named.append(part)
                num_bytes += written
        held = self.objects.run(ownership.publish(held, **state, parts=tuple(named)))
        with contextlib.suppress(ObjectsError):  # Without it the session is found by its name alone.
            self.objects.write(hint_name(self.namespace, state["tenant"], state["chain"]), key.encode())
        return Published(held, is_whole, num_bytes)

    def forget(self, key: str, publishing: Future[Published] | None) -> None:
        """Has the manifest of a session say that it is forgotten, if there is one, and that can be.

        Args:
          publishing: a publish of it, which ends before.
        """
        if publishing is not None:
            concurrent.futures.wait([publishing])
        try:
            held = self.objects.run(ownership.begin(self.namespace, key, self.replica))
            if held.manifest is not None and held.manifest.conversation is not None:
                self.objects.run(ownership.publish(held, conversation=None, parts=(), used_s=time.time()))
        except (NotOwnerError, ObjectsError, ManifestError) as error:
            _LOG.warning("session %s could not be forgotten: %s", key, error)

    def look_up(self, tenant: str, chain: str) -> Manifest | None:
        """A tenant's session that stood where a chain says, as it is now; None: none is known. Not a claim.

        Raises:
          ObjectsError: that cannot be found out.
        """
        key = self.objects.read(hint_name(self.namespace, tenant, chain)).value
        found = None if key is None else self.objects.read(manifest_name(self.namespace, key.decode())).value
        try:
            manifest = None if found is None else Manifest.from_bytes(found, namespace=self.namespace)
        except ManifestError:
            return None
        return manifest if manifest is not None and manifest.tenant == tenant else None

    def arrival(self, wanted: Sequence[PartRef]) -> Arrival:
        """Of what `restore` is about to bring."""
        sizes = [parts.layer_bytes(self.layout, part.num_tokens) for part in wanted]
        return Arrival(np.sum(sizes, axis=0).tolist(), is_coded=self.coding is not None)

    def restore(
        self, moves: Sequence[tuple[SaveTicket, PartRef]], arrival: Arrival, wake: Callable[[], None] = lambda: None
    ) -> int:
        """Writes KV of objects to DRAM, each to a ticket for its tokens, or for the last of them: layer after layer.

        One that cannot be read is said in `arrival`; its ticket and those behind it are broken off.

        Args:
          wake: called when some has come.

        Returns:
          How many of them are written, from the first on.
        """
        num_left = len(moves)
        decoding = [None if self.coding is None else Decoding(self.coding, part.num_tokens) for _, part in moves]
        wanted = (
            (number, self._begin_restore(*moves[number], first, stop, decoding[number]))
            for first, stop in self._spans([part for _, part in moves])
            for number in range(len(moves))
            if number < num_left
        )
        coming: collections.deque[tuple[int, Callable[[], int | None]]] = collections.deque()
        while True:
            coming.extend(itertools.islice(wanted, _READS_AHEAD - len(coming)))
            if not coming:
                return num_left
            number, wait = coming.popleft()
            if number >= num_left:
                continue
            try:
                num_bytes = wait()
                if num_bytes is None:
                    num_left = number
                else:
                    arrival.came(num_bytes)
                wake()
            except Exception as error:
                num_left = number
                arrival.error = RestoreError(moves[number][1].name, error)
                for broken, _ in moves[number:]:
                    broken.break_off(error)

    def find_runs(self, tenant: str, token_ids: np.ndarray) -> list[PartRef]:
        """The objects that are there of a prompt's first full runs.

        Raises:
          ObjectsError: that cannot be found out.
        """
        found: list[PartRef] = []
        whole = len(token_ids) // parts.run_tokens(self.layout) * parts.run_tokens(self.layout)
        runs = parts.divide(
            token_ids[:whole], whole, self.layout, namespace=self.namespace, tenant=tenant, key="", mark=""
        )
        for each in (run for run in runs if isinstance(run, parts.Wanted)):
            part = parts.find_part(self.objects, each, self.layout, self.namespace)
            if part is None:
                break
            found.append(part)
        return found

    def _known(
        self, held: Held, state: dict[str, Any], source: Source | None, damaged: Collection[str]
    ) -> Sequence[PartRef]:
        """What a manifest names that is KV of the state that is to be published, as far as its tokens are the same."""
        before = held.manifest
        if before is None or before.lineage != state["lineage"]:
            return ()
        if self.objects.read(held.name).generation != held.generation:
            return ()  # A collector may have forgotten it, and its objects be gone.
        num_same = before.num_tokens
        if before.is_to_repair and source is not None:
            num_same = source.ticket.num_plain
        elif before.is_to_repair and not state["is_to_repair"]:
            num_same = before.num_plain or 0
        return [part for part in before.parts if part.name not in damaged and part.stop <= num_same]

    def _copied(self, source: Source, divided: Sequence[PartRef | parts.Wanted]) -> tuple[list[list[np.ndarray]], bool]:
        """Copies of the layers of those that are to be written, none of those that are there; and whether of all."""
        copied: list[list[np.ndarray]] = []
        room = _COPY_BYTES
        for each in divided:
            layers: list[np.ndarray] = []
            if isinstance(each, parts.Wanted):
                room -= each.num_tokens * self.layout.token_bytes
                if room < 0 and len(copied):
                    return copied, False
                for layer in range(self.layout.num_layers):
                    into = np.empty(self.layout.layer_shape(layer, each.num_tokens), self.layout.numpy_dtype)
                    if not source.ticket.copy(layer, each.first, into):
                        raise StoppedError
                    layers.append(into)
            copied.append(layers)
        return copied, True

    def _stored(self, layers: Sequence[np.ndarray]) -> Sequence[bytes | memoryview]:
        """Layers as an object has them."""
        return [as_bytes(layer) for layer in layers] if self.coding is None else self.coding.encode(layers)

    def _begin_restore(
        self, ticket: SaveTicket, part: PartRef, first: int, stop: int, decoding: Decoding | None
    ) -> Callable[[], int | None]:
        """Begins to read layers of an object, and does not wait.

        Returns:
          What waits until they are written to the ticket: how many bytes of KV they are; None: it takes no more.
        """
        read = parts.read_layers(self.objects, part, self.layout, first, stop)

        def bring() -> int | None:
            num_bytes = 0
            for layer, data in enumerate(read(), first):
                if decoding is None:
                    kv = parts.as_layer(data, part, self.layout, layer)
                else:
                    try:
                        kv = decoding.decode(layer, data)
                    except CodecError as error:
                        raise PartError(f"{part.name} must hold what its codec coded: {error}") from error
                if not ticket.write(layer, kv[:, part.num_tokens - ticket.num_tokens :]):
                    return None
                num_bytes += kv.nbytes
            return num_bytes

        return bring if decoding is None else decoding.begin(bring)

    def _spans(self, wanted: Sequence[PartRef]) -> Iterator[tuple[int, int]]:
        """Layers, as many at a time as one request reads of the largest object: first, and one past the last."""
        sizes = parts.layer_bytes(self.layout, max((part.num_tokens for part in wanted), default=0))
        first = 0
        while first < len(sizes):
            stop, num_bytes = first + 1, sizes[first]
            while stop < len(sizes) and num_bytes + sizes[stop] <= _READ_BYTES:
                num_bytes += sizes[stop]
                stop += 1
            yield first, stop
            first = stop


class RestoreError(Exception):
    """An object could not be read: which, and why."""

    def __init__(self, name: str, error: Exception):
        super().__init__(str(error))
        self.name = name
        self.error = error
