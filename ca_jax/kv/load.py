"""The way in: stored histories on their way to the device; what of them is loaded, how deep, and from when on.

The first of the waiting jobs has its history opened early (`preload`), while others run; every job has it when its turn
has come (`open`). Measured rates decide how much of it is loaded and how much recomputed.

Not here: staging and copies (layer_loader), arithmetic (costs), what is stored (storage), saving (save).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ca_jax.device.processes import from_first, least
from ca_jax.device.runner import Runner
from ca_jax.device.runtime import Runtime
from ca_jax.device.transfer import to_device
from ca_jax.kv import costs
from ca_jax.kv.chunk_kv import ChunkKV, FusedTicket
from ca_jax.kv.costs import RateMeter
from ca_jax.kv.history import History, SharedLoad
from ca_jax.kv.layer_loader import LayerLoader
from ca_jax.kv.layout import first_seen, kept_window
from ca_jax.kv.resident import ResidentPages
from ca_jax.kv.save import owner_of
from ca_jax.kv.snapshots import Snapshots
from ca_jax.models.kv import KVCache, LayerKV
from ca_jax.session import Job, Session
from ca_jax.storage.config import GIB
from ca_jax.storage.records import MissReason, Residency
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import LoadTicket, TicketState
from ca_jax.turns.text import ChunkSpan

_LOG = logging.getLogger(__name__)
_NO_STALL = 0.02  # Of a prefill: it waited for less than that, so that what it took is compute.
_MIN_GAIN = 0.1  # What recomputing must save to be chosen: rates are measured, and loading leaves the device free.
_RATIO_STEP = 0.05
_MAX_WAIT_S = 0.25  # For KV that was to come in time, where computing what it is for takes less.
_SLACK_LAYERS = 1  # Behind what S_buf says, which leaves out that a first layer has nothing to hide behind.


class Histories:
    """Loads of stored histories. Belongs to the engine's thread."""

    def __init__(
        self,
        store: AttentionStore,
        loader: LayerLoader,
        runner: Runner,
        meter: RateMeter,
        chunks: ChunkKV,
        snapshots: Snapshots,
        runtime: Runtime,
    ) -> None:
        self._chunks = chunks
        self._snapshots = snapshots
        self.resident = ResidentPages(runner.pool, store.queue_position)
        """Contexts whose pages stay on the devices between turns."""
        self._processes = runtime.processes
        self._window = kept_window(store.layout, runtime.config, runner.window) or 0
        self._store = store
        self._loader = loader
        self._runner = runner
        self._layout = store.layout
        self._config = runtime.config
        self._meter = meter
        self._metrics = runtime.metrics
        self._preloaded: tuple[Job, History] | None = None
        self.restored: set[str] = set()
        """Keys of sessions whose KV replicas share, and was brought from there since they loaded last."""

    def is_preloaded(self, job: Job) -> bool:
        """Whether a job's load has begun early."""
        return self._preloaded is not None and self._preloaded[0] is job

    def preload(self, job: Job, session: Session, is_at_hand: Callable[[Job], bool]) -> None:
        """Begins to load the history of the job that comes next, while others run; or goes on with that.

        In place of another job's, which is not next any more.

        Args:
          is_at_hand: whether nothing stands in the way; not asked where nothing is loaded before its job begins.
        """
        if self.is_preloaded(job):
            self.pump()
        elif self._config.read_buffer not in ("off", 0) and is_at_hand(job):
            self.give_up_preloaded()
            self._preloaded = job, self._open(job, session)
            self._metrics.preloads += self._preloaded[1].load is not None

    def open(self, job: Job, session: Session) -> History:
        """A job's turn has come: begins to load its history, unless that has begun already.

        Says in `job` how many tokens' KV is loaded, and from where.
        """
        if self._preloaded is None or self._preloaded[0] is not job:
            self.give_up_preloaded()  # It would hold staging until after this one, whose turn has come first.
            self._preloaded = job, self._open(job, session)
        (_, history), self._preloaded = self._preloaded, None
        job.cached_tokens = history.num_loaded
        comes = any(ticket.coming for ticket in history.tickets)
        is_restored = comes or (history.load is not None and session.key in self.restored)
        job.cached_tier = "objects" if is_restored else history.tier
        self.restored.discard(session.key)
        self._metrics.streamed_restores += comes
        job.missed_chunks = history.missed_chunks
        self._metrics.loaded_chunks += len(history.chunks)
        self._metrics.missed_chunks += history.missed_chunks
        self._metrics.resident_histories += history.num_resident > 0
        self._metrics.loaded_histories += history.load is not None and history.num_loaded == history.num_stored
        self._metrics.mixed_histories += 0 < history.num_loaded < history.num_stored
        self._metrics.recomputed_histories += not history.num_loaded and history.num_stored > 0
        return history

    def complete(self, job: Job, history: History) -> None:
        """All layers were taken: the store's blocks are let go, and the load is counted. Staging stays as it is.

        Raises:
          LoadError, ProcessesError: as `SharedLoad.check`.
        """
        load = history.load
        if load is None:
            return
        if isinstance(history.source, SharedLoad):
            history.source.check(self._processes)
        for ticket in history.tickets:
            self._store.complete_load(ticket)
            if ticket.coming:
                self.restored.discard(ticket.key)  # What has come by itself meanwhile was loaded here.
        times_s = load.layer_times_s
        job.load_s, job.load_stall_s, job.load_span_s = sum(times_s), load.stall_s, load.span_s
        fetches = [ticket.fetch_span_s for ticket in history.tickets if ticket.fetch_span_s is not None]
        if fetches:
            job.fetch_span_s = min(fetches)[0], max(end_s for _, end_s in fetches)
        self._metrics.load_stall_s += load.stall_s
        if not self._loader.device_ahead:  # Elsewhere that is staging alone, and not the way to the device.
            for layer, seconds in enumerate(times_s):
                num_tokens = history.num_loaded - (history.first_seen[layer] if history.first_seen else 0)
                self._meter.add_load(num_tokens * self._layout.layer_token_bytes(layer), seconds)

    def learn(self, history: History | None, num_before: int, num_new: int, seconds: float) -> None:
        """A prompt was computed alone, in one pass: what that took says how fast this engine computes.

        Args:
          history: that it was computed over, as it is stored; None: none is of a session.
          num_before: tokens of it.
        """
        if history is None or history.load is None or history.load.stall_s < _NO_STALL * seconds:
            self._meter.add_prefill(*self._runner.padded(num_before, num_new), seconds)
        if history is not None and history.predicted_s is not None:
            self._metrics.prediction_errors.append(history.predicted_s / seconds - 1)

    def release(self, history: History, reason: MissReason = MissReason.ABORTED) -> None:
        """Lets go of staging, and of pages that no row has taken. A load that was not completed is given up."""
        if history.resident is not None:
            self._runner.pool.release(history.resident)
            history.resident = None
        if history.snapshot is not None:
            history.snapshot.give_up()
        if history.load is not None:
            history.load.release()
            self._abort(history.tickets, reason)

    def give_up_preloaded(self, key: str | None = None) -> None:
        """Ends a load that was begun early, of one stored key or of any: its job begins anew."""
        if self._preloaded is None or not (key is None or key in self._preloaded[1].keys):
            return
        (_, history), self._preloaded = self._preloaded, None
        self.release(history, MissReason.CANCELLED)

    def pump(self) -> bool:
        """Has the loader go on while the device is waited for; whether the preloaded history has more to begin."""
        self._loader.pump()
        load = None if self._preloaded is None else self._preloaded[1].load
        return load is not None and load.num_issued < min(load.depth, load.num_layers)

    def recompute_ratio(self, num_context: int, num_history: int, num_new: int) -> float:
        """Share of chunks' tokens to compute anew: what is asked for, or what measured rates say that loading hides.

        In steps, since for each number of tokens functions are compiled.
        """
        blend, rates = self._config.blend, self._meter.rates
        if blend.mode == "reuse":
            return 0.0
        if blend.recompute_ratio is not None:
            return blend.recompute_ratio
        if rates is None:
            return blend.min_recompute_ratio
        ratio = costs.choose_ratio(rates, num_context, num_new, blend.min_recompute_ratio, history_tokens=num_history)
        return min(max(math.ceil(ratio / _RATIO_STEP) * _RATIO_STEP, blend.min_recompute_ratio), 1.0)

    def layer_compute_s(self, num_history: int, num_new: int) -> float | None:
        """Seconds that a layer takes of a prefill's first pass, over a history on the device; None without rates."""
        rates, num_new = self._meter.rates, min(num_new, self._runner.chunk_tokens)
        return None if rates is None else costs.layer_compute_s(rates, *self._runner.padded(num_history, num_new))

    def measure(self, ticket: LoadTicket) -> None:
        """Loads what a ticket says, with nothing beside it, for its rate, and completes it.

        A load that breaks is counted, and says nothing.
        """
        started_s = time.perf_counter()
        load = self._loader.open(FusedTicket([(ticket, 0)]), ticket.num_tokens, self._layout.num_layers)
        arrays: list[jax.Array] = []
        try:
            for layer in range(load.num_layers):
                arrays.append(load.layer(layer))
                load.computed(layer, arrays[-1])  # Nothing reads it: where staging is short its place is free at once.
            jax.block_until_ready(arrays)
        except Exception:
            _LOG.warning("a load broke while it was measured", exc_info=True)
            load.release()
            self._store.abort_load(ticket)
            self._metrics.failed_loads += 1
            return
        seconds = (time.perf_counter() - started_s) / load.num_layers
        self._meter.add_load(ticket.num_tokens * self._layout.token_bytes // load.num_layers, seconds)
        load.release()
        self._store.complete_load(ticket)

    def read(self, session: Session, token_ids: list[int]) -> KVCache:
        """A session's stored KV, unrotated, as one pytree; for those who look at it. Waits for the copy.

        Args:
          token_ids: of its context, with those of a turn that runs.

        Returns:
          `[1, S, K, H]` a layer, S as many as there are tokens; `lengths [1]` says of how many the KV is in DRAM.
        """
        layout = self._layout
        shapes = (layout.layer_shape(layer, len(token_ids)) for layer in range(layout.num_layers))
        layers = [np.zeros(shape, layout.numpy_dtype) for shape in shapes]
        ticket = self._store.prepare_load(session.key, token_ids, num_dropped=session.conversation.kv_lineage)
        if ticket is not None:
            for read in [ticket.read(layer, kv) for layer, kv in enumerate(layers)]:
                read.result()
            self._store.abort_load(ticket, MissReason.CANCELLED)
        lengths = np.array([0 if ticket is None else ticket.num_tokens], np.int32)
        arrays = (LayerKV.of(kv) for kv in (self._runner.unpacked(to_device(kv)) for kv in layers))
        return KVCache(tuple(arrays), to_device(lengths))

    def may_share(self, job: Job, session: Session) -> bool:
        """Whether a turn is of a session of which nothing is stored, and may begin with the KV of another."""
        if not self._config.share_prefixes or session.conversation.num_slid:
            return False
        if self._store.residency(session.key) is not Residency.ABSENT:
            return False
        if not (self._snapshots.are_none or session.conversation.states):
            return False  # There is no turn's end to go on from.
        has_first = len(sharable(job)) > 0
        return has_first and (not job.context_tokens or self._config.blend.mode == "prefix")

    def _share_prefix(self, job: Job, session: Session) -> None:
        """Has a session of which nothing is stored share the KV of the one in DRAM that begins like it for longest.

        That is the one that its turn was announced with, or one that got further meanwhile: its turn may run still.
        """
        shared, lineage = sharable(job), session.conversation.kv_lineage
        source = self._store.find_prefix(owner_of(session).domain, shared, in_dram=True)
        if source is not None:
            self._store.copy_prefix(source, session.key, shared, owner_of(session), num_dropped=lineage)
            self._snapshots.share(source, session.key, session.conversation, shared, owner_of(session))

    def _open(self, job: Job, session: Session) -> History:
        """Begins to load as much of what is stored of a prompt as is worth it: its first tokens, and chunks behind.

        Its last token is never part of it, for its logits are wanted. Where first tokens are not kept, since no
        layer looks back to them, all that a layer does look back to is loaded, or nothing.
        """
        if shares := self.may_share(job, session):
            self._share_prefix(job, session)
        key, kept = session.key, session.conversation
        packed, num_slid, lineage = packed_prompt(job), kept.num_slid, kept.kv_lineage
        prompt_ids, spans = packed[num_slid:], self._worth_loading(job)
        own_ids = prompt_ids[: spans[0].start - num_slid] if spans else job.params.cacheable(packed)[num_slid:]
        held: list[LoadTicket | None] = [self._hold(own_ids, key, lineage)]
        found, snapshot = 0 if held[0] is None else held[0].num_tokens, None
        try:
            snapshot = self._snapshots.open(key, kept, prompt_ids, found)
            reach = found if self._snapshots.are_none else 0 if snapshot is None else snapshot.num_tokens
            holder = None if spans else self._holder(job, session, own_ids, reach, shares=shares)
            comes = held[0] is not None and bool(held[0].coming)
            takes_all = num_slid or spans or holder is not None or snapshot is not None or comes
            wanted = reach if takes_all else self._num_worth_loading(reach, len(prompt_ids) - reach)
            held += [self._chunks.hold(span, job.prompt_ids[span.start : span.stop]) for span in spans]
            counts = (reach, wanted, int(holder is not None), *(int(ticket is not None) for ticket in held[1:]))
            num_stored, num_loaded, is_resident, *are_there = least(self._processes, "what is loaded", counts)
            if num_slid and num_stored < self._window - 1:
                num_stored = num_loaded = num_slid = 0
            if held[0] is not None and num_stored < found:
                self._store.abort_load(held[0], MissReason.OTHER_SHARD)
                held[0] = self._hold(own_ids[:num_stored], key, lineage)
            for index, (ticket, is_there) in enumerate(zip(held[1:], are_there, strict=True), start=1):
                if ticket is not None and not is_there:
                    self._store.abort_load(ticket, MissReason.OTHER_SHARD)
                    held[index] = None
            if held[0] is None and self._store.residency(key) is Residency.DRAM:
                self._store.drop(key)  # Other tokens than these: what is saved now begins anew.
            if is_resident and holder is not None and held[0] is not None and num_stored:
                history = self._go_on(job, session, holder, held[0], num_slid)
            else:
                self.resident.drop(key)
                history = self._begin(job, session, held, spans, num_loaded, num_slid)
            history.snapshot = snapshot
            return history
        except Exception:
            if snapshot is not None:
                snapshot.give_up()
            self._abort(ticket for ticket in held if ticket is not None)
            raise

    def _holder(
        self, job: Job, session: Session, token_ids: np.ndarray, num_stored: int, *, shares: bool
    ) -> str | None:
        """The key of the session whose pages have all that is stored of a history as its prefill reads it, if any has.

        Args:
          token_ids: of the history.
          shares: whether that may be another session.
        """
        state = session.conversation
        if not num_stored or state.num_to_repair or not self._config.keep_pages:
            return None
        key, wanted = session.key, (state.lineage, state.num_slid)
        if shares:
            key, wanted = self.resident.like(owner_of(session).domain, token_ids) or key, (0, 0)
        has_all = self.resident.num_tokens(key, token_ids, wanted) >= num_stored
        is_near = has_all and self.resident.is_near(key, job.slot)
        return key if is_near and self.resident.has_seen(key, self._first_seen(num_stored)) else None

    def _go_on(self, job: Job, session: Session, holder: str, ticket: LoadTicket, num_slid: int) -> History:
        """A history whose pages a session has, all that a ticket says: its own, or those of one that it begins like."""
        num_tokens, rates = ticket.num_tokens, self._meter.rates
        self._store.complete_load(ticket, was_read=False)
        take = self.resident.take if holder == session.key else self.resident.share
        held = take(holder, num_tokens)
        num_new = len(job.prompt_ids) - num_slid - num_tokens
        compute_s = None
        if rates is not None:
            compute_s = rates.num_layers * costs.layer_compute_s(rates, *self._runner.padded(num_tokens, num_new))
        return History(
            key=session.key,
            load=None,
            source=None,
            num_stored=num_tokens,
            num_slid=num_slid,
            predicted_s=compute_s,
            num_resident=num_tokens,
            resident=held,
            first_seen=held.first_seen,
        )

    def _first_seen(self, num_tokens: int) -> tuple[int, ...]:
        return first_seen(self._layout, num_tokens, self._runner.pool.size.page_tokens)

    def _abort(self, tickets: Iterable[LoadTicket], reason: MissReason = MissReason.ABORTED) -> None:
        for ticket in tickets:
            if ticket.state is TicketState.OPEN:
                self._store.abort_load(ticket, reason)

    def _worth_loading(self, job: Job) -> tuple[ChunkSpan, ...]:
        """Chunks of a prompt that are loaded if they are stored: none where computing all of it is as fast."""
        job.recompute_ratio = 0.0
        if not job.spans:
            return ()
        first, last = job.spans[0], job.spans[-1]
        num_new = len(job.prompt_ids) - last.stop
        ratio = self.recompute_ratio(last.stop - first.start, first.start, num_new)
        job.recompute_ratio = from_first(self._processes, "the ratio of a context", ratio)
        is_asked_for = self._config.blend.recompute_ratio is not None
        return job.spans if job.recompute_ratio < 1 or is_asked_for else ()

    def _hold(self, token_ids: np.ndarray, key: str, lineage: int) -> LoadTicket | None:
        """What of the KV of these tokens is stored or comes, to be read; what is stored behind them is forgotten."""
        if not len(token_ids):
            return None
        return self._store.prepare_load(key, token_ids, truncate=True, num_dropped=lineage, with_coming=True)

    def _begin(
        self,
        job: Job,
        session: Session,
        held: Sequence[LoadTicket | None],
        spans: Sequence[ChunkSpan],
        num_loaded: int,
        num_slid: int,
    ) -> History:
        """Begins to load first tokens of what is stored of a session, and chunks, each to its place; all in `held`."""
        own, *chunks = held
        found = [(part, span.shifted(-num_slid)) for part, span in zip(chunks, spans, strict=True) if part is not None]
        num_stored = 0 if own is None else own.num_tokens
        if own is not None and not num_loaded:
            self._store.abort_load(own, MissReason.RECOMPUTED)
            own = None
        elif own is not None and num_loaded < num_stored:
            own.shorten(num_loaded)
        parts = ([] if own is None else [(own, 0)]) + [(part, span.start) for part, span in found]
        ticket = FusedTicket(parts) if parts else None
        num_places = 0 if ticket is None else ticket.num_tokens
        num_new = len(job.prompt_ids) - num_slid - num_places
        depth, load, firsts = self._depth(num_places, num_new), None, tuple[int, ...]()
        if ticket is not None:
            pad = self._runner.padded_history
            options: dict[str, Any] = {"all_at_once": self._config.read_buffer == "off"}
            state = session.conversation
            # More may come to be read than tokens behind it see: as it is repaired, or cut while the job runs.
            may_read_all = state.num_to_repair or state.to_drift or job.most_tokens > self._runner.window
            if not found and not may_read_all:
                firsts = self._first_seen(num_places)
            reads = [(first, pad(num_places - first)) for first in firsts]
            layer_s = self.layer_compute_s(num_places, num_new)
            options["max_wait_s"] = max(_MAX_WAIT_S, 0.0 if layer_s is None else layer_s * self._layout.num_layers)
            load = self._loader.open(ticket, pad(num_places), depth, job=job.job_id, reads=reads, **options)
        return History(
            key=session.key,
            first_seen=firsts,
            load=load,
            source=load if load is None or self._processes.count == 1 else SharedLoad(load, self._runner),
            num_stored=num_stored,
            num_slid=num_slid,
            predicted_s=None if found else self._predict(num_places, num_new, depth),
            chunks=tuple(span for _, span in found),
            missed_chunks=len(chunks) - len(found),
        )

    def _num_worth_loading(self, num_stored: int, num_new: int) -> int:
        """How many tokens of a stored history are loaded: all of them, where no rates say otherwise."""
        rates = self._meter.rates if self._config.recompute_if_faster else None
        if rates is None or not num_stored:
            return num_stored
        return costs.choose_history(
            rates,
            num_stored,
            num_new,
            block_tokens=self._layout.block_tokens,
            depth=self._depth(num_stored, num_new),
            head_start_s=0.0,
            min_gain=_MIN_GAIN,
            padded=self._runner.padded,
        )

    def _depth(self, num_history: int, num_new: int) -> int:
        """Layers of the read buffer for a load."""
        wanted, num_layers = self._config.read_buffer, self._layout.num_layers
        if isinstance(wanted, int):
            return min(wanted, num_layers)
        rates = self._meter.rates
        if wanted != "auto" or self._config.read_buffer_gib is None or rates is None or not num_history:
            return num_layers  # Where there is room for all of it anyway, no layer waits for another's compute.
        depth = costs.read_buffer_layers(
            rates,
            num_history,
            num_new,
            max_buffer_bytes=int(self._config.read_buffer_gib * GIB),
            padded=self._runner.padded,
        )
        return min(max(depth, 1) + _SLACK_LAYERS, num_layers)

    def _predict(self, num_history: int, num_new: int, depth: int) -> float | None:
        """Seconds of prefilling new tokens over a history that is loaded from when the device is free on."""
        rates = self._meter.rates
        if rates is None:
            return None
        compute_s = costs.layer_compute_s(rates, *self._runner.padded(num_history, num_new))
        load_s = costs.layer_load_s(rates, num_history)
        if self._config.read_buffer == "off":
            return costs.blocking_s(load_s, compute_s, rates.num_layers)
        return costs.pipeline_s(load_s, compute_s, rates.num_layers, depth, head_start_s=0.0)


def packed_prompt(job: Job) -> np.ndarray:
    """A job's prompt, int32 `[T]`: only what is new in it is looked at one by one."""
    known = np.zeros(0, np.int32) if job.session is None else job.session.packed_ids
    return np.concatenate([known, np.fromiter(job.prompt_ids[len(known) :], np.int32)])


def sharable(job: Job) -> np.ndarray:
    """First tokens of a job's prompt that KV of a session which begins alike may serve: those before its chunks."""
    token_ids = job.params.cacheable(packed_prompt(job))
    return token_ids[: job.spans[0].start] if job.spans else token_ids
