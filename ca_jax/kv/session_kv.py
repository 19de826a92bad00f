"""The KV of sessions between turns: its keys, the queue of turns that the store looks at, and what is forgotten.

Also forgotten is what no layer looks back to, where all layers of a model slide. What is left then is exactly what the
next token sees. A saved length moves only when `collect` finds the bytes in place.

Not here: loads (load), saves (save), blocks and books (storage), computing (runner).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np

from ca_jax.device.processes import Processes, all_agree, least
from ca_jax.device.runner import Runner
from ca_jax.device.runtime import Runtime
from ca_jax.device.transfer import held_heads
from ca_jax.errors import check
from ca_jax.kv import costs
from ca_jax.kv.async_saver import AsyncSaver
from ca_jax.kv.chunk_kv import ChunkKV, distinct_keys
from ca_jax.kv.costs import RateMeter
from ca_jax.kv.kept_conversations import KeptConversations
from ca_jax.kv.layer_loader import LayerLoader
from ca_jax.kv.layout import kept_window, staging_bytes
from ca_jax.kv.load import Histories, packed_prompt, sharable
from ca_jax.kv.object_coding import ObjectCoding
from ca_jax.kv.save import WriteBuffer, owner_of
from ca_jax.kv.shared_sessions import SharedSessions
from ca_jax.kv.snapshots import Snapshots, StateForm
from ca_jax.session import Job, Session
from ca_jax.storage.catalog.notes import NoteLog, log_bytes
from ca_jax.storage.config import StoreConfig, shard_config
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.objects.store import ObjectStore
from ca_jax.storage.records import Residency, StoreRuntime
from ca_jax.storage.store import AttentionStore
from ca_jax.turns.conversations import Conversation

_LOG = logging.getLogger(__name__)
_DRAIN_S = 60.0  # Longest that an engine which is closed waits for what is to be published.


@dataclasses.dataclass(frozen=True)
class QueuedKV:
    """What a turn that waits will load."""

    residency: Residency
    """Where that is."""
    position: int | None
    """Where its job stands in the queue that the look-ahead windows count."""


class SessionKV:
    """Stored KV of one model's sessions. Belongs to the engine's thread.

    Args:
      runtime: the engine's; it is woken when `collect` has something to do.
      fingerprint: of the weights: KV of others is never found.
      chunk_head: token ids that chunks are computed behind.
      store_wrapper: given the store, returns what is used in its place.

    Raises:
      ValueError: a size that does not fit machine or disk, or a codec that is not the model's.
      NotADirectoryError, PermissionError, CatalogError: the store's directory cannot be used.
      ObjectsUnfitError: the objects' URL cannot be used.
    """

    def __init__(
        self,
        layout: KVLayout,
        runner: Runner,
        runtime: Runtime,
        *,
        fingerprint: str,
        chunk_head: Sequence[int] = (),
        store_wrapper: Callable[[AttentionStore], AttentionStore] | None = None,
    ) -> None:
        config, processes, timeline = runtime.config, runtime.processes, runtime.timeline
        max_tokens = runner.history_buckets[-1]
        shard = shard_config(config.store, processes.index, processes.count)
        kv_sharding = None if runner.sharding is None else runner.sharding.kv
        heads = [held_heads(kv_sharding, num_kv_heads) for _, num_kv_heads, _ in runner.config.kv_shapes]
        weights = " ".join([fingerprint, *(str(each) for each in dict.fromkeys(heads) if each is not None)])
        self.meter = RateMeter(layout.num_layers, layout.token_bytes // layout.num_layers)
        objects = self._open_objects(config.store, processes)
        of_store = StoreRuntime(on_progress=runtime.wake, on_fetch=self.meter.add_fetch, timeline=timeline)
        with contextlib.ExitStack() as opened:
            store = AttentionStore(layout, shard, weights=weights, runtime=of_store)
            opened.callback(store.close)
            codec, directory = config.store.objects_codec, shard.ssd_directory
            self._coding = None if codec is None else ObjectCoding.load(codec, layout, weights)
            if self._coding is not None:
                opened.callback(self._coding.close)
            log = None if directory is None else NoteLog(directory, max_bytes=log_bytes(shard.ssd_bytes))
            opened.pop_all()
        self.store = store if store_wrapper is None else store_wrapper(store)
        self._metrics = runtime.metrics
        self._processes = processes
        self._warn_of_small_caps(layout, max_tokens)
        self._loader = LayerLoader(
            layout, staging_bytes(layout, config, max_tokens), sharding=kv_sharding, heads=heads, timeline=timeline
        )
        self._saver = AsyncSaver(runtime.wake, on_sample=self.meter.add_save, timeline=timeline)
        self.write_buffer = WriteBuffer(self.store, self._saver, config, runtime.metrics)
        self._salt = hashlib.sha256(f"{weights}|{layout}|unrotated|".encode()).digest()
        self.chunks = ChunkKV(self.store, self.write_buffer, self._salt, chunk_head, runner.window - 1)
        form = StateForm.of(runner.config, runner.dtype, layout)
        self.snapshots = Snapshots(self.store, self.write_buffer, form, self._salt)
        """States of turns' ends, of models whose layers keep such."""
        parts = self._loader, runner, self.meter, self.chunks, self.snapshots
        self.histories = Histories(self.store, *parts, runtime)
        self.resident = self.histories.resident
        self.conversations = KeptConversations(self.store, log, processes, config.store.ttl_s, runtime.metrics)
        self.shared = None if objects is None else self._share(objects, runtime)
        """What replicas share; None: this engine shares nothing."""
        # How far all layers look back, tokens, the one that looks among them; None: nothing is ever left behind.
        self._window = kept_window(layout, config, runner.window)
        self._to_slide: dict[str, Session] = {}  # By key, those with turns since they were looked at.
        # Of waiting jobs the key of the session, and of what they will load: what that begins with, and chunks.
        self._queued: dict[Job, tuple[str, tuple[str, ...]]] = {}
        self.ahead: dict[str, str] = {}
        """By the key of a session, that of KV computed for its next cut, forgotten once any of the session's own is."""
        self._closing = closing = threading.Event()
        metrics, loader = runtime.metrics, self._loader

        def touch() -> None:  # It does not hold this: no thread may be the last that has arrays of the device.
            metrics.first_touch_s = loader.touch() + store.touch(closing.is_set)

        self._toucher = threading.Thread(target=touch, name="ca_jax-first-touch", daemon=True)
        self._toucher.start()

    def wait_until_resident(self) -> None:
        """Returns when all host memory has had its first touch, or it is closed. Any thread may call it."""
        self._toucher.join()

    def key(self, session_id: str, tenant: str = "", variant: str = "") -> str:
        """The store's key: other tenants, weights, adapters (`Owner.variant`) and layouts never meet."""
        of = f"adapter {variant} " if variant else ""
        name = f"{of}{len(tenant)}:{tenant}{session_id}"
        return hashlib.sha256(self._salt + name.encode("utf-8", "surrogatepass")).hexdigest()

    def ahead_key(self, key: str) -> str:
        """The key of KV computed for a session's next cut. A restart knows it, too: to forget what is on SSD."""
        return hashlib.sha256(self._salt + f"ahead of {key}".encode()).hexdigest()

    def known_key(self, session_id: str, tenant: str) -> str:
        """The key of what is kept by a name, whichever adapter that is held with; of nothing that without one."""
        plain, kept = self.key(session_id, tenant), self.conversations.of_name(session_id)
        wanted = [plain, *(self.key(session_id, tenant, owner.variant) for owner in kept.values())]
        return next((key for key in wanted if key in kept), plain)

    # The queue.

    def announce(self, job: Job, session: Session) -> None:
        """A turn is queued: from here on its KV is fetched early and evicted late.

        A session of which nothing is stored may begin like one that is: then it will share that one's KV.
        """
        source = session.key
        if self.shared is not None and not self.write_buffer.is_running(source):
            self.shared.stop(source)
        self._slide(session)
        cacheable = job.params.cacheable(packed_prompt(job))
        if self.histories.may_share(job, session):
            source = self.store.find_prefix(owner_of(session).domain, sharable(job)) or source
        if self.shared is not None and session.is_kept:
            num_here = self.store.num_readable(source)
            self.shared.bring(session.key, owner_of(session), session.conversation, cacheable, num_here)
        states = self.snapshots.wanted(source, session.conversation)
        loaded = tuple(dict.fromkeys((source, *states, *distinct_keys(job.spans))))
        self._queued[job] = session.key, loaded
        for key in loaded:
            self.store.enqueue((job, key), key, job.priority)
        self.store.poll()

    def ready(self, job: Job, is_next: bool) -> bool:
        """Whether a queued turn would not wait for SSD, nor for what the turn before it computed to be saved.

        For the next one its KV is brought, at the cost of others'. Of a session that it begins like, what a turn has
        computed that has ended; a turn that runs is not waited for. What replicas share is read while the turn
        computes, once it comes in time.
        """
        if job not in self._queued:
            return True
        key, loaded = self._queued[job]
        coming = {each for each in (key, *loaded) if self.is_being_saved(each)}
        if coming == {key} and self._comes_in_time(job, key):
            coming.clear()
        found = [self.store.ready(each, is_next) for each in loaded if each not in coming]  # Not up to the first alone.
        return all_agree(self._processes, "ready", not coming and all(found))

    def work(self, job: Job) -> float:
        """About what a queued job takes up to its first token: seconds; tokens to compute, where none are measured."""
        _, loaded = self._queued.get(job, ("", ()))
        num_tokens, num_stored = len(job.prompt_ids), sum(map(self.store.num_readable, loaded))
        num_stored = min(num_stored, num_tokens - 1)
        rates = self.meter.rates
        if rates is None:
            return num_tokens - num_stored
        load_s = rates.num_layers * costs.layer_load_s(rates, num_stored)
        return max(rates.prefill.seconds(num_stored, num_tokens - num_stored), load_s)

    def queued(self, job: Job) -> QueuedKV | None:
        """Of a queued turn, where the KV is that it will load; None of a job that loads none."""
        if job not in self._queued:
            return None
        _, (source, *_) = self._queued[job]
        return QueuedKV(self.store.residency(source), self.store.queue_position(source))

    def withdraw(self, job: Job) -> None:
        """A turn is not queued any more, if it was."""
        if self.histories.is_preloaded(job):
            self.histories.give_up_preloaded()
        _, loaded = self._queued.pop(job, ("", ()))
        for key in loaded:
            self.store.dequeue((job, key))

    def orphans(self, job: Job) -> list[Job]:
        """Jobs that compute chunks of a job that was given up, which nobody else wants."""
        wanted = {key for _, loaded in self._queued.values() for key in loaded}
        coming = (self.chunks.unasked(key) for key in distinct_keys(job.spans) if key not in wanted)
        return [job for job in coming if job is not None]

    def is_at_hand(self, job: Job) -> bool:
        """Whether the KV of a queued turn is in DRAM and nothing of it is on its way, so that its load may begin.

        Where the pages of what it begins with are on the device there is nothing to load.
        """
        key, loaded = self._queued.get(job, ("", ()))
        places = [self.store.residency(each) for each in loaded]
        is_there = (Residency.DRAM in places[:1] and loaded[0] not in self.resident) or bool(job.spans)
        is_there = is_there and not any(place in (Residency.PENDING, Residency.SSD) for place in places)
        is_busy = self.write_buffer.is_running(key) or any(self.is_being_saved(each) for each in (key, *loaded))
        return all_agree(self._processes, "preload", is_there and not is_busy)

    def collect(self) -> None:
        """Publishes the saves that are done and gives up those that failed. Keeps the store's tiers going too."""
        self.write_buffer.collect()
        self._slide_all()
        self.chunks.collect()
        self.store.poll()
        self.conversations.collect()
        if self.shared is not None:
            self.shared.collect()

    def recall(self, session_id: str, tenant: str, opened: Session | None = None) -> Conversation | None:
        """The conversation that a session goes on with: what was kept of it here, or by a replica since.

        Args:
          opened: the session, where it is open: what it knows is what is known here.

        Returns:
          None: there is none, or `opened` knows it.

        Raises:
          TenantError: that name is another tenant's.
        """
        key = self.known_key(session_id, tenant) if opened is None else opened.key
        known = self.conversations.recall(key, session_id, tenant) if opened is None else opened.conversation
        taken = None if self.shared is None else self.shared.taken(key, known)
        if taken is not None:
            self.resident.drop(key)
            self.histories.give_up_preloaded(key)
            return taken
        return known if opened is None else None

    def remember(self, session: Session) -> None:
        """Has a conversation kept with its KV, as it is now; or what was loaded for it forgotten, if it is not kept."""
        if not session.is_kept:
            self.drop(session.key)
            return
        if session.is_noted:
            self.conversations.remember(session.key, session)
            if self.shared is not None:
                self.shared.changed(session)
        if self._window is not None:
            self._to_slide[session.key] = session

    def note(self, session: Session) -> None:
        """Has a conversation known as it is now, after a restart and to replicas; its KV was changed with it."""
        self.conversations.note(session.key, session)
        self.describe(session)

    def describe(self, session: Session) -> None:
        """Has replicas know what is said of a conversation, as it is now: its text, how long it is kept."""
        if self.shared is not None and session.is_kept:
            self.shared.changed(session, is_told_anew=True)

    # What is stored.

    def truncate(
        self, session: Session, num_tokens: int, left: Conversation | None = None, *, keeps_ahead: bool = False
    ) -> None:
        """Forgets a session's KV behind its first `num_tokens` tokens. No turn of it may run.

        On SSD it is kept with what is `left` of the conversation, both at once; None: with what it was kept with.
        Where KV is on its way to the store, that happens once it is there, and the session's next turn waits for it.

        Args:
          keeps_ahead: whether what was computed for its next cut stays: this is that cut.
        """
        key, num_slid = session.key, session.conversation.num_slid
        self._let_go(key, keeps_ahead=keeps_ahead or num_tokens == len(session.token_ids))
        self._to_slide.pop(key, None)
        num_stored = max(num_tokens - num_slid, 0)
        if num_slid and num_stored < (self._window or 0) - 1:
            num_stored = 0  # The next token looks back to what is not there.
        if not num_stored:
            self.drop(key, keeps_ahead=keeps_ahead)
            return
        note = None if left is None else self.conversations.pack(key, left)
        self.histories.give_up_preloaded(key)
        self.write_buffer.when_saved(key, lambda: self.store.truncate(key, num_stored, note=note))

    def discard(self, session: Session, discarded: np.ndarray, left: Conversation) -> None:
        """Forgets the KV of some of a session's tokens, bool `[T]`. No turn of it may run.

        On SSD it is kept with what is `left` of the conversation from then on, both at once. As in `truncate` it waits
        for what is on its way.
        """
        key = session.key
        self._let_go(key)
        self.histories.give_up_preloaded(key)
        self._to_slide.pop(key, None)
        stored = discarded[session.conversation.num_slid :]
        note = self.conversations.pack(key, left) if session.is_kept else None
        self.write_buffer.when_saved(key, lambda: self.store.discard(key, stored, note=note))

    def drop(self, key: str, *, keeps_ahead: bool = False) -> None:
        """Forgets all of a session, what is on its way to the store too; as in `truncate`. No turn of it may run."""
        self._let_go(key, keeps_ahead=keeps_ahead)
        self.histories.give_up_preloaded(key)
        self.write_buffer.give_up(key)
        self.store.drop(key)
        self.snapshots.drop(key)

    def forget(self, key: str, *, is_noted: bool = True) -> None:
        """Forgets a session and its conversation, everywhere. No turn of it may run.

        Args:
          is_noted: whether anything else than its KV was ever kept of it.
        """
        self.drop(key)
        self.conversations.forget(key)
        if self.shared is not None:
            (self.shared.forget if is_noted else self.shared.lose)(key)

    def closed(self, key: str) -> None:
        """A conversation is open no more, and may be gone on with."""
        self.conversations.closed(key)
        if self.shared is not None:
            self.shared.closed(key)

    def take_lost(self) -> list[str]:
        """Keys of sessions that another replica owns by now."""
        return [] if self.shared is None else self.shared.take_lost()

    def lose(self, key: str) -> None:
        """Drops what is here of a session that another replica owns."""
        self.drop(key)
        self.conversations.forget(key)
        if self.shared is not None:
            self.shared.lose(key)

    def settle(self) -> bool:
        """Waits until the KV of turns that have ended is where it is to be, on SSD if there is one; whether it is."""
        self.write_buffer.settle()
        self._slide_all()
        return self.store.settle()

    def close(self) -> None:
        """Finishes what was submitted and lets go of memory."""
        self.histories.give_up_preloaded()
        self._closing.set()
        self.settle()
        if self.shared is not None:
            self.shared.drain(_DRAIN_S)
            self.shared.close()
        if self._coding is not None:
            self._coding.close()
        self.conversations.close()
        self._saver.close()
        self._loader.close()
        self.store.close()

    @staticmethod
    def _open_objects(config: StoreConfig, processes: Processes) -> ObjectStore | None:
        """Where replicas share sessions; None: nowhere."""
        if config.objects_url is None:
            return None
        check(processes.count == 1, "the processes of an engine with an objects_url", "one", processes.count)
        objects = ObjectStore(config.objects_url, config.objects_deadline_s)
        objects.probe()
        return objects

    def _share(self, objects: ObjectStore, runtime: Runtime) -> SharedSessions:
        def is_quiet(key: str) -> bool:
            is_queued = any(key == queued for queued, _ in self._queued.values())
            return not (is_queued or self.write_buffer.is_running(key) or self.is_being_saved(key))

        return SharedSessions(
            runtime,
            self.store,
            objects,
            self._salt.hex() if self._coding is None else self._coding.namespace(self._salt),
            self._coding,
            pack=self.conversations.pack,
            is_quiet=is_quiet,
            is_unsaved=self.write_buffer.is_unsaved,
            restored=self.histories.restored,
        )

    def _let_go(self, key: str, *, keeps_ahead: bool = False) -> None:
        """Has nothing else hold a session's KV, which is about to change."""
        self.resident.drop(key)
        if self.shared is not None:
            self.shared.stop(key)
        if not keeps_ahead:
            self.drop_ahead(key)

    def drop_ahead(self, key: str) -> None:
        """Forgets what was computed for a session's next cut."""
        ahead = self.ahead_key(key)
        if self.ahead.pop(key, None) is not None or self.store.residency(ahead) is not Residency.ABSENT:
            self.drop(ahead)

    def is_being_saved(self, key: str) -> bool:
        """Whether KV is on its way to the store that a turn builds on: a chunk's, or that of turns that have ended."""
        if self.chunks.is_coming(key) or (self.shared is not None and self.shared.is_coming(key)):
            return True
        return self.write_buffer.is_unsaved(key) and not self.write_buffer.is_running(key)

    def _comes_in_time(self, job: Job, key: str) -> bool:
        """Whether what is on its way of a turn's KV is what replicas share, all of which it reads, and in time.

        Where pages, chunks, states or repairs are part of its history, all of it is waited for.
        """
        if self.shared is None or job.session is None or job.spans or key in self.resident:
            return False
        kept = job.session.conversation
        if not self.snapshots.are_none or kept.num_slid or kept.num_to_repair or kept.to_drift:
            return False
        if self.write_buffer.is_unsaved(key) or self.chunks.is_coming(key):
            return False
        num_prompt = len(job.prompt_ids)
        if not self.shared.in_time(key, lambda count: self.histories.layer_compute_s(count, num_prompt - count)):
            return False
        token_ids = job.params.cacheable(packed_prompt(job))
        return self.store.serves_coming(key, token_ids, num_dropped=kept.kv_lineage)

    def _slide_all(self) -> None:
        """Looks at all sessions whose turns have ended, but for those that have another one queued.

        Where several processes serve as one this waits for the next turn, which all are given.
        """
        if self._processes.count == 1 and self._to_slide:
            queued = {key for key, _ in self._queued.values()}
            for key, session in tuple(self._to_slide.items()):
                if key not in queued:
                    self._slide(session)

    def _slide(self, session: Session) -> None:
        """Forgets what no layer looks back to of a session, if that is a block or more and nothing is on its way."""
        if self._window is None:
            return
        key, num_leaving = session.key, 0
        if not self.write_buffer.is_running(key) and not self.write_buffer.is_unsaved(key):
            least_kept = max(self._window - 1, 1)  # One at least: a conversation is kept with its KV.
            num_leaving = max(self.store.num_readable(key) - least_kept, 0)
            self._to_slide.pop(key, None)
        [num_leaving] = least(self._processes, "what slides", [num_leaving])
        if num_leaving < self.store.layout.block_tokens:
            return
        if self.shared is not None:
            self.shared.stop(key)
        left = session.conversation.slid(session.conversation.num_slid + num_leaving)
        self.store.discard(key, np.ones(num_leaving, bool), note=self.conversations.pack(key, left))
        session.resume(left)

    def _warn_of_small_caps(self, layout: KVLayout, max_tokens: int) -> None:
        stats = self.store.stats()
        caps = {"dram_gib": stats.capacity_bytes // layout.block_bytes}
        if stats.ssd is not None:
            caps["ssd_gib"] = stats.ssd.capacity_bytes // layout.block_bytes
        for name, num_blocks in caps.items():
            if 0 < num_blocks < layout.num_blocks(max_tokens):
                _LOG.warning(
                    "%s holds %d tokens, of a context window of %d: longer conversations are not kept whole",
                    name,
                    num_blocks * layout.block_tokens,
                    max_tokens,
                )
