"""Sessions that outlive their machine: published to objects that replicas share, claimed and restored by any of them.

    turn ends    DRAM ── copy ── objects of what is new ── manifest (compare-and-swap)         publish
    elsewhere    manifest: epoch + 1 ── conversation ── objects ── saves into DRAM             claim, restore

What a turn computed is published with its conversation, both of one state, by threads. The first turn of a session that
another replica had waits for its KV as for a save under way. A publish that is refused says that another replica owns
the session: `take_lost` names it, and all that this replica has of it is to be dropped.

No turn ends for the store of objects: what cannot be read is computed, what cannot be written is counted, and tried
again.

Methods are for the engine's thread unless they say otherwise.

Not here: the protocol (storage.objects.ownership), what the threads do (object_transfers), the local tiers (storage).
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from ca_jax.device.runtime import Runtime
from ca_jax.kv.object_coding import ObjectCoding
from ca_jax.kv.object_transfers import Arrival, Published, SharedKV, Source, StoppedError
from ca_jax.kv.threads import Threads
from ca_jax.session import Session
from ca_jax.storage.objects import ownership, parts
from ca_jax.storage.objects.manifest import Manifest, ManifestError, PartRef
from ca_jax.storage.objects.store import ObjectStore
from ca_jax.storage.records import Owner, Residency
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import SaveTicket, TicketState
from ca_jax.turns.conversations import Conversation

_LOG = logging.getLogger(__name__)
_THREADS = 4  # Sessions that move at a time.
_MAX_PUBLISHING = 2  # Of these, at most so many are published: what is copied of one is memory beside the tiers.
_LOOKED_AT = 8  # Sessions that have something to publish, in one `collect`.
_IDLE_S = 30.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0  # Before a publish that failed is tried again.
_TRIES = 3  # Of each session while the engine is closed.


@dataclasses.dataclass
class _Publishing:
    held: ownership.Held | None
    conversation: Conversation
    source: Source | None  # While the store holds it for this.
    done: Future[Published]


@dataclasses.dataclass
class _Restoring:
    tickets: list[SaveTicket]
    arrival: Arrival
    done: Future[int]


@dataclasses.dataclass
class _Finding:
    """Tokens whose KV is there, or may be."""

    owner: Owner
    token_ids: np.ndarray
    done: Future[list[PartRef]]
    lineage: int = 0
    num_plain: int | None = None


@dataclasses.dataclass
class _Shared:
    """What is known of one session."""

    session: Session | None = None  # Open here, with a turn that may not be published.
    held: ownership.Held | None = None
    published: Conversation | None = None  # The state that the manifest has, with all KV that is here.
    is_told_anew: bool = False  # The same state is to be published again: something else is said of it.
    to_restore: Manifest | None = None
    publishing: _Publishing | None = None
    restoring: _Restoring | None = None
    finding: _Finding | None = None
    damaged: set[str] = dataclasses.field(default_factory=set)  # Names of objects that are not what they should be.
    is_closed: bool = False
    changed_s: float = 0.0
    not_before_s: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    num_failed: int = 0  # Publishes, since it was to be drained.


class SharedSessions:
    """The tier of objects, as one engine sees it.

    Args:
      runtime: the engine's; it is woken when `collect` has something to do.
      objects: where sessions are shared.
      namespace: names weights, layout, positions and coding of the KV; replicas with others never meet.
      coding: how objects are coded; None: they hold KV as it is computed. Whoever made it closes it.
      pack: a session's conversation as bytes, by its key.
      is_quiet: whether no turn of a session is queued or runs, and none of its KV is on its way to the store.
      is_unsaved: whether KV of turns of a session that have ended is on its way there.
      restored: gets the keys of sessions whose KV was brought.
    """

    def __init__(
        self,
        runtime: Runtime,
        store: AttentionStore,
        objects: ObjectStore,
        namespace: str,
        coding: ObjectCoding | None,
        *,
        pack: Callable[[str, Conversation], bytes],
        is_quiet: Callable[[str], bool],
        is_unsaved: Callable[[str], bool],
        restored: set[str],
    ) -> None:
        config = runtime.config.store
        self.objects = objects
        replica = ownership.replica_name(config.ssd_directory)
        self.kv = SharedKV(self.objects, store.layout, namespace, replica, coding)
        self.policy = config.objects_write
        self._store = store
        self._pack, self._is_quiet, self._is_unsaved, self._restored = pack, is_quiet, is_unsaved, restored
        self._metrics, self._wake = runtime.metrics, runtime.wake
        self._shared: dict[str, _Shared] = collections.defaultdict(_Shared)
        self._moving: dict[str, None] = {}  # Keys of those that are published, restored or looked for now.
        self._unpublished = collections.OrderedDict[str, None]()  # Keys, the first to have changed first.
        self._fetched: str | None = None  # Key of the one that was fetched from SSD to be drained.
        self._lost: list[str] = []
        self._lock = threading.Lock()  # Of the two that follow.
        self._claims: dict[str, ownership.Held] = {}  # Not looked at by `taken` yet.
        self._forgetting: dict[str, Future[None]] = {}  # By key, of sessions that are being forgotten there.
        self._threads = Threads(_THREADS, "ca_jax-objects", self._wake)
        self._is_draining = False

    # Whose a session is.

    def claim(self, key: str) -> None:
        """Has this replica own a session, if any replica has published it; `taken` then has it. Waits. Any thread may.

        One of that name which is being forgotten is gone by then.

        Raises:
          ObjectsError: it is not known whether one has.
        """
        with self._lock:
            forgetting = self._forgetting.get(key)
        if forgetting is not None:
            concurrent.futures.wait([forgetting])
        try:
            held = self.kv.objects.run(ownership.claim(self.kv.namespace, key, self.kv.replica))
        except ManifestError as error:
            self._failed(f"the manifest of session {key} is not used: {error}")
            return
        with self._lock:
            self._claims[key] = held

    def theirs(self, key: str) -> Manifest | None:
        """The manifest of a session, if this process does not hold it, or None. Waits and raises as `claim`."""
        try:
            manifest = self.kv.objects.run(ownership.look(self.kv.namespace, key))
        except ManifestError:  # `claim` says so.
            return None
        is_held = (shared := self._shared.get(key)) is not None and shared.held is not None
        return None if manifest is not None and manifest.owner == self.kv.replica and is_held else manifest

    def taken(self, key: str, known: Conversation | None) -> Conversation | None:
        """The conversation that a session which was claimed goes on with; None: with what is known of it here.

        Args:
          known: what is.
        """
        with self._lock:
            held = self._claims.pop(key, None)
        shared = self._shared[key] if held is not None else None
        if held is None or shared is None or (not held.is_taken and shared.held is not None):
            return None
        before = None if shared.held is None else shared.held.manifest
        shared.held, manifest = held, held.manifest
        if manifest is None or manifest.conversation is None:
            return None
        try:
            theirs = Conversation.from_bytes(manifest.conversation)
        except ValueError as error:
            self._failed(f"the conversation of session {key} is not used: {error}")
            return None
        if known is not None:
            if held.is_taken:
                is_ours = before is not None and before.conversation == manifest.conversation
            else:
                is_ours = known.generation >= theirs.generation
            if is_ours or known == theirs:
                return None  # What was published is here, and perhaps more.
            if known.kv_lineage or theirs.kv_lineage:  # KV of one mark may have seen other tokens than that of another.
                self._store.drop(key)
        self._metrics.takeovers += held.is_taken
        shared.published, shared.to_restore = theirs, manifest
        return theirs

    def begin_with(self, key: str, manifest: Manifest) -> None:
        """A new session begins like one of another replica: what is plain of its KV is brought to the first turn."""
        plain = [part for part in manifest.parts if manifest.num_plain is None or part.stop <= manifest.num_plain]
        self._shared[key].to_restore = dataclasses.replace(manifest, parts=tuple(plain), lineage=0, num_plain=None)

    def take_lost(self) -> list[str]:
        """Keys of sessions that other replicas own by now, each once: what is here of them is to be dropped."""
        lost, self._lost = self._lost, []
        return lost

    def closed(self, key: str) -> None:
        """A session is open here no more; what is not published still will be."""
        if (shared := self._shared.get(key)) is not None:
            shared.is_closed = True
            self._let_rest(key, shared)

    def lose(self, key: str) -> None:
        """Forgets what is known here of a session that another replica owns."""
        self.stop(key)
        self._unpublished.pop(key, None)
        self._moving.pop(key, None)
        self._shared.pop(key, None)

    # Publishing.

    def changed(self, session: Session, *, is_told_anew: bool = False) -> None:
        """A session's turn has ended, or tokens have left it, or (`is_told_anew`) something else is said of it."""
        shared = self._shared[session.key]
        shared.is_told_anew |= is_told_anew
        shared.session, shared.changed_s, shared.is_closed = session, time.monotonic(), False
        self._unpublished[session.key] = None
        self._unpublished.move_to_end(session.key)

    def publish_now(self, key: str) -> Future[Published] | None:
        """Begins to publish a session that has changed, whenever it would be otherwise; None: it is, or cannot be."""
        shared = self._shared[key]
        if key in self._unpublished:
            self._publish(key, shared, at_once=True)
        return None if shared.publishing is None else shared.publishing.done

    def forget(self, key: str) -> None:
        """Has a session forgotten there too, behind a publish of it that is under way."""
        shared = self._shared.get(key)
        publishing = None if shared is None or shared.publishing is None else shared.publishing.done
        self.lose(key)
        with self._lock:
            self._claims.pop(key, None)
            self._forgetting = {each: done for each, done in self._forgetting.items() if not done.done()}
            self._forgetting[key] = self._threads.submit(self.kv.forget, key, publishing)

    def stop(self, key: str) -> None:
        """Has nothing hold a session's KV, which is about to change; what is not copied by then is published later."""
        shared = self._shared.get(key)
        if shared is None:
            return
        if shared.publishing is not None and shared.publishing.source is not None:
            self._store.let_go(shared.publishing.source.ticket)
            shared.publishing.source = None
        if shared.restoring is not None:
            open_ones = [each for each in shared.restoring.tickets if each.state is TicketState.OPEN]
            if open_ones:  # Else what is on its way is of a turn that has read all of them, and stays.
                self._store.abort_save(open_ones[0])
            self._learn(key, shared, shared.restoring)
            shared.restoring = None
        shared.finding = None

    def collect(self) -> None:
        """Takes in what has moved, and begins what is due. Never waits."""
        for key in tuple(self._moving):
            self._take_in(key, self._shared[key])
        if self.policy == "drain" and not self._is_draining:
            return
        for key in tuple(itertools.islice(self._unpublished, _LOOKED_AT)):
            if sum(self._shared[each].publishing is not None for each in self._moving) >= _MAX_PUBLISHING:
                return
            self._publish(key, self._shared[key])

    def drain(self, timeout_s: float) -> bool:
        """Publishes all that is not, for so many seconds at most; whether all is."""
        self._is_draining = True
        give_up_s = time.monotonic() + timeout_s
        for key in self._unpublished:
            self._shared[key].not_before_s, self._shared[key].num_failed = 0.0, 0
        while time.monotonic() < give_up_s:
            if not self._moving and all(self._shared[key].num_failed >= _TRIES for key in self._unpublished):
                break
            self._store.poll()
            self.collect()
            time.sleep(0.005)
        if self._unpublished:
            _LOG.warning("%d sessions are not published, and stay on this machine alone", len(self._unpublished))
        return not self._unpublished

    # Restoring.

    def bring(self, key: str, owner: Owner, conversation: Conversation, prompt_ids: np.ndarray, num_here: int) -> None:
        """Brings to DRAM what is published of a turn's history, where it is more than the local tiers have.

        Args:
          conversation: that the turn goes on with.
          prompt_ids: int32 `[T]`, of the turn, without the last token.
          num_here: how many of them the local tiers have, of this session or of another that begins alike.
        """
        if (shared := self._shared.get(key)) is not None and (manifest := shared.to_restore) is not None:
            shared.to_restore = None
            if manifest.lineage != conversation.kv_lineage:
                return
            token_ids = np.array(conversation.token_ids[conversation.num_slid :], np.int32)
            done: Future[list[PartRef]] = Future()
            done.set_result(parts.fitting(manifest.parts, token_ids))
            shared.finding = _Finding(owner, token_ids, done, manifest.lineage, manifest.num_plain)
            self._take_in(key, shared)
        elif not conversation.kv_lineage and num_here < parts.run_tokens(self.kv.layout) <= len(prompt_ids):
            done = self._threads.submit(self.kv.find_runs, owner.tenant, prompt_ids)
            self._shared[key].finding = _Finding(owner, prompt_ids, done)
            self._moving[key] = None

    def is_coming(self, key: str) -> bool:
        """Whether KV of a session is on its way from there, or may be."""
        shared = self._shared.get(key)
        return shared is not None and (shared.restoring is not None or shared.finding is not None)

    def in_time(self, key: str, layer_compute_s: Callable[[int], float | None]) -> bool:
        """Whether a turn may begin whose KV is on its way from there: no layer that it takes is one to wait for.

        Args:
          layer_compute_s: seconds that a layer of the turn takes, by how many tokens of the session are stored once all
            is here; None: that is not known.
        """
        shared = self._shared.get(key)
        if shared is None or shared.restoring is None or shared.finding is not None:
            return False
        compute_s = layer_compute_s(shared.restoring.tickets[-1].stop_token)
        return compute_s is not None and shared.restoring.arrival.is_in_time(compute_s)

    def close(self) -> None:
        """Ends it; what a thread does now is waited for."""
        for key in tuple(self._moving):
            self.stop(key)
        self._threads.close()

    def _let_rest(self, key: str, shared: _Shared) -> None:
        """Forgets what is known of a session that is open no more, once it is published."""
        if shared.is_closed and key not in self._unpublished and key not in self._moving:
            self._shared.pop(key, None)

    def _publish(self, key: str, shared: _Shared, at_once: bool = False) -> None:
        """Begins to publish a session, if it is time to."""
        now_s, session = time.monotonic(), shared.session
        is_idle = self.policy != "idle" or self._is_draining or shared.is_closed or at_once
        is_idle = is_idle or now_s >= shared.changed_s + _IDLE_S
        forgetting = self._forgetting.get(key)  # One of the same name.
        is_held_up = shared.publishing is not None or (forgetting is not None and not forgetting.done())
        if session is None or is_held_up or now_s < shared.not_before_s or not is_idle:
            return
        comes = self._is_draining and self._store.residency(key) is not Residency.DRAM
        if comes and self._fetched in (None, key):  # One at a time: DRAM may have no room for more.
            comes = self._store.request(key)
            self._fetched = key if comes else None
        if comes or not self._is_quiet(key):
            self._unpublished.move_to_end(key)
            return
        del self._unpublished[key]
        conversation = session.conversation
        if shared.published is conversation and not shared.is_told_anew:
            return
        shared.published, shared.is_told_anew = None, False
        token_ids = session.packed_ids[conversation.num_slid :]
        ticket = self._store.hold(key, token_ids, num_dropped=conversation.kv_lineage) if len(token_ids) else None
        source = None if ticket is None else Source(ticket)
        info = next((each for each in self._store.of_name(session.session_id) if each.key == key), None)
        state = {
            "tenant": session.tenant,
            "session_id": session.session_id,
            "conversation": self._pack(key, conversation),
            "chain": conversation.chain,
            "lineage": conversation.kv_lineage,
            "num_plain": source.ticket.num_plain if source is not None and conversation.kv_lineage else None,
            "is_to_repair": conversation.num_to_repair > 0,
            "token_bytes": self.kv.layout.token_bytes,
            "used_s": time.time(),
            "ttl_s": session.ttl_s if info is None else info.ttl_s,
            "pinned": info is not None and info.pinned,
        }
        damaged = frozenset(shared.damaged)
        done = self._threads.submit(self.kv.publish, key, shared.held, state, token_ids, source, damaged, self._wake)
        shared.publishing = _Publishing(shared.held, conversation, source, done)
        self._moving[key] = None

    def _begin_restore(self, key: str, shared: _Shared, finding: _Finding, found: Sequence[PartRef]) -> None:
        """Begins to bring KV of objects to DRAM, behind what is there of the same tokens."""
        token_ids, lineage = finding.token_ids, finding.lineage
        same = self._store.hold(key, token_ids, num_dropped=lineage)
        start = 0 if same is None else same.num_tokens
        if same is not None:
            self._store.let_go(same)
        self._store.truncate(key, start)  # What is of other tokens, or on SSD alone.
        moves: list[tuple[SaveTicket, PartRef]] = []
        for part in [each for each in found if each.stop > start]:
            new_ids = token_ids[start : part.stop]
            ticket = self._store.prepare_save(
                key, start, new_ids, finding.owner, num_dropped=lineage, num_plain=finding.num_plain, may_be_read=True
            )
            if ticket is None:  # No room for more.
                break
            moves.append((ticket, part))
            start = part.stop
        if moves:
            arrival = self.kv.arrival([part for _, part in moves])
            done = self._threads.submit(self.kv.restore, moves, arrival, self._wake)
            shared.restoring = _Restoring([ticket for ticket, _ in moves], arrival, done)

    def _take_in(self, key: str, shared: _Shared) -> None:
        """Takes in what has ended of a session that moves."""
        publishing, restoring, finding = shared.publishing, shared.restoring, shared.finding
        if publishing is not None:
            if publishing.source is not None and (publishing.source.is_copied.is_set() or publishing.done.done()):
                self._store.let_go(publishing.source.ticket)
                publishing.source = None
            if publishing.done.done():
                shared.publishing = None
                self._end_publish(key, shared, publishing)
        if restoring is not None and restoring.done.done():
            shared.restoring = None
            self._end_restore(key, shared, restoring)
        if finding is not None and finding.done.done() and not self._is_unsaved(key):
            shared.finding = None
            if (error := finding.done.exception()) is not None:
                self._failed(f"what is stored of a prompt could not be found: {error}")
            elif (found := finding.done.result()) and found[-1].stop > self._store.num_readable(key):
                self._begin_restore(key, shared, finding, found)
        if shared.publishing is None and shared.restoring is None and shared.finding is None:
            self._moving.pop(key, None)
            self._let_rest(key, shared)
        else:
            self._moving[key] = None

    def _end_publish(self, key: str, shared: _Shared, publishing: _Publishing) -> None:
        if key == self._fetched:
            self._fetched = None
            self._store.leave_dram(key)
        if shared.held is not publishing.held:  # It was claimed anew since: what became of this is of before.
            self._unpublished.setdefault(key)
            return
        try:
            published = publishing.done.result()
        except ownership.NotOwnerError:
            self._metrics.refused_publishes += 1
            self._lost.append(key)
        except StoppedError:
            self._unpublished.setdefault(key)
        except Exception as error:  # Whatever it was: the turn has ended well, and the session stays here.
            self._metrics.failed_publishes += 1
            shared.num_failed += 1
            _LOG.warning("session %s could not be published, and will be later: %s", key, error)
            shared.not_before_s = time.monotonic() + shared.pause_s
            shared.pause_s = min(2 * shared.pause_s, _MAX_PAUSE_S)
            self._unpublished.setdefault(key)
        else:
            self._metrics.publishes += 1
            self._metrics.published_bytes += published.num_bytes
            shared.held, shared.pause_s = published.held, _FIRST_PAUSE_S
            shared.damaged.clear()
            if published.is_whole:
                shared.published = publishing.conversation
            else:
                self._unpublished.setdefault(key)

    def _end_restore(self, key: str, shared: _Shared, restoring: _Restoring) -> None:
        num_done = restoring.done.result()
        self._learn(key, shared, restoring)
        for ticket in restoring.tickets[:num_done]:
            was_read = ticket.state is TicketState.DONE  # By a turn, which has said so.
            if was_read or self._store.complete_save(ticket):
                self._metrics.restored_tokens += ticket.num_tokens
            if not was_read and ticket.state is TicketState.DONE:
                self._restored.add(key)
        if num_done < len(restoring.tickets):
            self._store.abort_save(restoring.tickets[num_done])

    def _learn(self, key: str, shared: _Shared, restoring: _Restoring) -> None:
        """What could not be read is written anew with the next publish, if it is not what it should be."""
        if (error := restoring.arrival.error) is not None:
            if isinstance(error.error, parts.PartError):
                shared.damaged.add(error.name)
                shared.published = None
            self._failed(f"stored KV of session {key} is computed: {error}")

    def _failed(self, message: str) -> None:
        self._metrics.failed_restores += 1
        _LOG.warning("%s", message)
