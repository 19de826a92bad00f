"""The KV of sessions between turns: store, loader and saver as one thing, so that the engine says what and not how.

A turn's history is opened (`open_history`, or before that `preload`), loaded layer by layer while it is prefilled, and
its new KV is handed back as it comes (`TurnSaver`). A saved length moves only when `collect` finds the bytes in place.
Any failure shortens what is stored and is counted.

Not here: copies (layer_loader, async_saver), blocks and books (storage), computing (runner, prefilling).
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
import time
from collections.abc import Callable

import jax
import numpy as np

from ca_jax import costs
from ca_jax.async_saver import AsyncSaver, LayerPart, SaveAbandonedError
from ca_jax.config import EngineConfig
from ca_jax.conversations import Conversation
from ca_jax.errors import TenantError
from ca_jax.layer_loader import LayerLoad, LayerLoader
from ca_jax.metrics import EngineMetrics
from ca_jax.rate_meter import RateMeter
from ca_jax.runner import Runner
from ca_jax.session import Job, Session
from ca_jax.storage.attention_store import AttentionStore
from ca_jax.storage.config import GIB
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import EntryInfo, MissReason, Owner, Residency, StoreStats
from ca_jax.storage.tickets import LoadTicket, TicketState
from ca_jax.timeline import NO_TIMELINE, Timeline
from ca_jax.transfer import device_memory_bytes
from ca_jax.turn_saver import TurnSaver

_LOG = logging.getLogger(__name__)
_EXECUTION_REGIONS = 2  # Of the read buffer's memory, behind its cap.
_MIN_GAIN = 0.1  # What recomputing must save to be chosen: rates are measured, and loading leaves the device free.
_MEASURED_TOKENS = 1024  # Tokens of KV that rates are measured with.
_SLACK_LAYERS = 1  # Behind what S_buf says, which leaves out that a first layer has nothing to hide behind.


@dataclasses.dataclass(eq=False)
class OpenHistory:
    """What of a turn's history is loaded."""

    load: LayerLoad | None
    """On its way; None where nothing is loaded."""
    num_loaded: int
    """Tokens whose KV is loaded: the first ones."""
    num_stored: int
    """Tokens whose KV is stored, and need not be saved again."""
    predicted_s: float | None
    """What prefilling over it is predicted to take; None without rates."""

    @property
    def ticket(self) -> LoadTicket | None:
        """Of the load."""
        return None if self.load is None else self.load.ticket


class SessionKV:
    """Stored KV of one model's sessions. Belongs to the engine's thread.

    Args:
      layout: of a block.
      config: the engine's, its store's included.
      runner: whose padding, and whose prefills.
      fingerprint: of the weights: KV of others is never found.
      metrics: where failures are counted.
      on_progress: called from any thread when `collect` has something to do.
      timeline: told of transfers.
      store_wrapper: given the store, returns what is used in its place.

    Raises:
      ValueError: a size that does not fit machine or disk.
      NotADirectoryError, PermissionError, CatalogError: the store's directory cannot be used.
    """

    def __init__(
        self,
        layout: KVLayout,
        config: EngineConfig,
        runner: Runner,
        *,
        fingerprint: str,
        metrics: EngineMetrics,
        on_progress: Callable[[], None],
        timeline: Timeline = NO_TIMELINE,
        store_wrapper: Callable[[AttentionStore], AttentionStore] | None = None,
    ) -> None:
        max_tokens = runner.history_buckets[-1]
        store = AttentionStore(layout, config.store, weights=fingerprint, on_progress=on_progress, timeline=timeline)
        self._store = store if store_wrapper is None else store_wrapper(store)
        self._config = config
        self._layout = layout
        self._runner = runner
        self._metrics = metrics
        self._warn_of_small_caps(layout, max_tokens)
        self.meter = RateMeter(layout.num_layers, layout.token_bytes // layout.num_layers)
        self._loader = LayerLoader(layout, read_buffer_bytes(layout, config, max_tokens), timeline=timeline)
        self._saver = AsyncSaver(on_progress, on_sample=self.meter.add_save, timeline=timeline)
        self._write_buffer_bytes = int(config.write_buffer_gib * GIB)
        self._turns: dict[str, TurnSaver] = {}
        self._held: dict[str, TurnSaver] = {}  # Of turns that ended before the store had room for all of their KV.
        self._queued: dict[Job, tuple[str, str]] = {}  # Keys of waiting jobs' sessions and of the KV they will load.
        self._preloaded: tuple[Job, str, OpenHistory] | None = None
        self._salt = hashlib.sha256(f"{fingerprint}|{layout}|unrotated|".encode()).digest()
        self._toucher = threading.Thread(target=self._touch, name="ca_jax-first-touch", daemon=True)
        self._toucher.start()

    def wait_until_resident(self) -> None:
        """Returns when all host memory has had its first touch. Any thread may call it."""
        self._toucher.join()

    def key(self, session_id: str, tenant: str = "") -> str:
        """The store's key: other tenants, weights, layouts and position encodings never meet."""
        name = f"{len(tenant)}:{tenant}{session_id}"
        return hashlib.sha256(self._salt + name.encode("utf-8", "surrogatepass")).hexdigest()

    # A turn, in order.

    def announce(self, job: Job, session: Session) -> None:
        """A turn is queued: from here on its KV is fetched early and evicted late.

        A session of which nothing is stored may begin like one that is: then it will begin with a copy of that KV.
        """
        key = source = self.key(session.session_id, session.tenant)
        if self._store.residency(key) is Residency.ABSENT and len(job.prompt_ids) > 1:
            source = self._store.find_prefix(session.tenant, job.prompt_ids[:-1]) or key
        self._queued[job] = key, source
        self._store.enqueue(job, source, job.priority)
        self._store.poll()

    def ready(self, job: Job, is_next: bool) -> bool:
        """Whether a queued turn would not wait for SSD, nor for room to save what the turn before it computed.

        For the next one its KV is brought, at the cost of others'.
        """
        if job not in self._queued:
            return True
        key, source = self._queued[job]
        if key in self._held:
            return False
        if not is_next and self._store.residency(source) in (Residency.SSD, Residency.PENDING):
            return False
        return not self._store.request(source)  # One that runs now is held too: it must not be evicted before it loads.

    def withdraw(self, job: Job) -> None:
        """A turn is not queued any more, if it was."""
        if self._preloaded is not None and self._preloaded[0] is job:
            self._give_up_preloaded()
        if self._queued.pop(job, None) is not None:
            self._store.dequeue(job)

    # Loads.

    def preload(self, job: Job, session: Session) -> None:
        """Begins to load the history of the job that comes next, while others run, if nothing stands in the way."""
        if self._preloaded is not None and self._preloaded[0] is job:
            self._loader.pump()
            return
        key = self.key(session.session_id, session.tenant)
        _, source = self._queued.get(job, (key, key))
        is_off = self._config.read_buffer in ("off", 0)
        if is_off or key in self._turns or self._store.residency(source) is not Residency.DRAM:
            return
        self._give_up_preloaded()  # Another one is next now.
        self._preloaded = job, key, self._open(job, session)
        self._metrics.preloads += self._preloaded[2].load is not None

    def open_history(self, job: Job, session: Session) -> OpenHistory:
        """Begins to load what of a turn's history is stored, unless that has begun already. Its turn has come.

        Says in `job` how many tokens' KV is loaded, and from where.
        """
        if self._preloaded is not None and self._preloaded[0] is job:
            _, _, history = self._preloaded
            self._preloaded = None
        else:
            self._give_up_preloaded()  # It would hold staging until after this one, whose turn has come first.
            history = self._open(job, session)
        self.withdraw(job)
        ticket = history.ticket
        job.cached_tokens = history.num_loaded
        job.cached_tier = "ssd" if ticket is not None and ticket.from_ssd else "dram"
        return history

    def complete_history(self, job: Job, history: OpenHistory) -> None:
        """All layers were taken: the store's blocks are let go, and the load is counted. Staging stays as it is."""
        load = history.load
        if load is None:
            return
        self._store.complete_load(load.ticket)
        job.load_s, job.load_stall_s = load.load_s, load.stall_s
        self._metrics.load_stall_s += load.stall_s
        if not self._loader.device_ahead:  # Elsewhere that is staging alone, and not the way to the device.
            for seconds in load.layer_times_s:
                self.meter.add_load(load.layer_bytes, seconds)

    def fail_history(self, key: str, history: OpenHistory) -> None:
        """A load broke: what is stored of its session is forgotten, and its staging is free."""
        if history.load is not None:
            history.load.release()
            self._store.abort_load(history.load.ticket)
        self.drop(key)
        self._metrics.failed_loads += 1

    def release_history(self, history: OpenHistory) -> None:
        """Lets go of staging. A load that was not completed is given up."""
        if history.load is not None:
            history.load.release()
            if history.load.ticket.state is TicketState.OPEN:
                self._store.abort_load(history.load.ticket)

    def pump(self) -> None:
        """Has the loader go on; for whoever waits for the device."""
        self._loader.pump()

    @property
    def is_preloading(self) -> bool:
        """Whether a load that was begun early has layers left to begin."""
        load = None if self._preloaded is None else self._preloaded[2].load
        return load is not None and load.num_issued < min(load.depth, load.num_layers)

    # Saves.

    def begin_saving(self, session: Session, start_token: int) -> TurnSaver:
        """Opens the saving of a turn, behind the session's first `start_token` tokens, which are stored."""
        key = self.key(session.session_id, session.tenant)
        owner = Owner(tenant=session.tenant, session_id=session.session_id, ttl_s=session.ttl_s)
        saver = TurnSaver(
            self._store,
            self._saver,
            key,
            owner,
            start_token,
            self._config.save_group_tokens,
            at_end=not self._config.async_save,
        )
        self._store.pin(key)  # What this turn builds on must not be evicted under it.
        self._turns[key] = saver
        return saver

    def end_saving(self, saver: TurnSaver) -> None:
        """Submits what is left of a turn, or holds it until the store has room. Blocking saves are waited for."""
        saver.end()
        if saver.is_held:
            self._held[saver.key] = saver
        else:
            self._close_saver(saver)
        if not self._config.async_save:
            self.collect(wait=True)

    def admits(self, num_tokens: int) -> bool:
        """Whether the write buffer has room for the KV of so many more tokens, or is empty."""
        pending = self._saver.pending_bytes + self._held_bytes
        return not pending or pending + num_tokens * self._layout.token_bytes <= self._write_buffer_bytes

    def make_room_to_save(self, num_tokens: int) -> None:
        """Waits until the write buffer has room for so many more tokens, or is empty.

        What waits for room in the store is given up, oldest first, where nothing else is left.
        """
        if self.admits(num_tokens) or not self._config.async_save:
            return
        started_s = time.perf_counter()
        self.collect()  # What waits for room in the store may have some now.
        wanted = self._write_buffer_bytes - num_tokens * self._layout.token_bytes - self._held_bytes
        self._saver.wait_until_pending(max(wanted, 0))
        for saver in tuple(self._held.values()):
            if not self.admits(num_tokens):
                saver.give_up()
                self._close_saver(saver)
        self._metrics.write_stall_s += time.perf_counter() - started_s

    @property
    def _held_bytes(self) -> int:
        return sum(saver.held_bytes for saver in self._turns.values())

    def collect(self, wait: bool = False, key: str | None = None) -> None:
        """Publishes the saves that are done and gives up those that failed. Keeps the store's tiers going too.

        Args:
          wait: for all that were submitted.
          key: with `wait`, for those of this session only.
        """
        for saver in tuple(self._held.values()):
            saver.submit_held()
            if not saver.is_held:
                self._close_saver(saver)
        for result in self._saver.poll(wait, key):
            if result.error is None:
                self._store.complete_save(result.ticket)
                continue
            self._store.abort_save(result.ticket)
            self._metrics.failed_saves += not isinstance(result.error, SaveAbandonedError)
            if result.ticket.key in self._turns:
                self._turns[result.ticket.key].give_up()
        self._store.poll()

    def remember(self, session: Session) -> None:
        """Has a conversation kept with its KV, as it is now."""
        self._store.set_note(self.key(session.session_id, session.tenant), session.conversation.to_bytes())

    def recall(self, session_id: str, tenant: str) -> Conversation | None:
        """The conversation that was kept with stored KV; None if there is none.

        Raises:
          TenantError: that name is another tenant's.
        """
        key = self.key(session_id, tenant)
        infos = self._store.of_name(session_id)
        if infos and key not in {info.key for info in infos}:
            raise TenantError(f"session {session_id!r} wanted its own tenant, found {tenant!r}")
        note = self._store.note(key) if infos else b""
        try:
            return Conversation.from_bytes(note) if note else None
        except ValueError:
            _LOG.warning("what was kept of session %r cannot be read: it begins anew", session_id)
            return None

    # What is stored.

    def truncate(self, session: Session, num_tokens: int) -> None:
        """Forgets a session's KV behind its first `num_tokens` tokens. No turn of it may run."""
        key = self.key(session.session_id, session.tenant)
        self._give_up_preloaded(key)
        self._settle_session(key)
        self._store.truncate(key, num_tokens)

    def drop(self, key: str) -> None:
        """Forgets all of a session. No turn of it may run."""
        self._give_up_preloaded(key)
        self._settle_session(key)
        self._store.drop(key)

    def is_running(self, key: str) -> bool:
        """Whether a turn of a session runs."""
        return key in self._turns and key not in self._held

    def list(self) -> tuple[EntryInfo, ...]:
        """What is stored, or being stored."""
        return self._store.list()

    def of_name(self, session_id: str) -> tuple[EntryInfo, ...]:
        """The same, of one session id, whatever its tenant."""
        return self._store.of_name(session_id)

    def set_pinned(self, key: str, pinned: bool) -> None:
        """Keeps a session in the store, or lets it go like others."""
        self._store.set_pinned(key, pinned)

    def set_ttl(self, key: str, ttl_s: float | None) -> None:
        """Says how long a session is kept after its last use."""
        self._store.set_ttl(key, ttl_s)

    def settle(self) -> bool:
        """Waits until the KV of turns that have ended is where it is to be, on SSD if there is one; whether it is."""
        self.collect(wait=True)
        for key in tuple(self._held):
            self._settle_session(key)
        return self._store.settle()

    def stats(self) -> StoreStats:
        """What the store holds and has done."""
        return self._store.stats()

    def close(self) -> None:
        """Finishes what was submitted and lets go of memory."""
        self._give_up_preloaded()
        self._toucher.join()
        self.settle()
        self._saver.close()
        self._loader.close()
        self._store.close()

    def measure(self) -> None:
        """Saves, loads and forgets made-up KV of two lengths, so that there are rates before there are turns."""
        key = self.key("", "rates are measured with this")
        longest = min(_MEASURED_TOKENS, self._runner.history_buckets[-1])
        for num_tokens in (longest // 4, longest):
            ticket = self._store.prepare_save(key, 0, np.zeros(num_tokens, np.int32)) if num_tokens else None
            if ticket is None:
                return
            for layer in range(self._layout.num_layers):
                self._saver.add(ticket, LayerPart(layer, self._runner.empty_kv(num_tokens), num_tokens, 0))
            self._saver.end(ticket)
            self.collect(wait=True, key=key)
            loaded = self._store.prepare_load(key, ticket.token_ids)
            if loaded is not None:
                started_s = time.perf_counter()
                load = self._loader.open(loaded, num_tokens, self._layout.num_layers)
                jax.block_until_ready([load.layer(layer) for layer in range(load.num_layers)])
                self.meter.add_load(load.layer_bytes, (time.perf_counter() - started_s) / load.num_layers)
                load.release()
                self._store.complete_load(loaded)
            self._store.drop(key)

    def _open(self, job: Job, session: Session) -> OpenHistory:
        """Finds the stored prefix of a prompt, and begins to load as much of it as is worth it.

        Its last token is never part of it, since its logits are wanted.
        """
        nothing = OpenHistory(load=None, num_loaded=0, num_stored=0, predicted_s=self._predict(0, len(job.prompt_ids)))
        if len(job.prompt_ids) < 2:
            return nothing
        key = self.key(session.session_id, session.tenant)
        self._settle_session(key)
        wanted = job.prompt_ids[:-1]
        _, source = self._queued.get(job, (key, key))
        if source != key and self._store.residency(key) is Residency.ABSENT:
            owner = Owner(tenant=session.tenant, session_id=session.session_id, ttl_s=session.ttl_s)
            self._store.copy_prefix(source, key, wanted, owner)
        ticket = self._store.prepare_load(key, wanted, truncate=True)
        if ticket is None:
            if self._store.residency(key) is Residency.DRAM:
                self._store.drop(key)  # Other tokens than these: what is saved now begins anew.
            return nothing
        num_stored = ticket.num_tokens
        plan = self._plan(num_stored, len(job.prompt_ids) - num_stored)
        if plan is not None and not plan.load_tokens:
            self._store.abort_load(ticket, MissReason.RECOMPUTED)
            self._metrics.recomputed_histories += 1
            return dataclasses.replace(nothing, num_stored=num_stored)
        if plan is not None and plan.recompute_tokens:
            ticket.shorten(plan.load_tokens)
            self._metrics.mixed_histories += 1
        else:
            self._metrics.loaded_histories += 1
        num_new = len(job.prompt_ids) - ticket.num_tokens
        load = self._loader.open(
            ticket,
            self._runner.padded_history(ticket.num_tokens),
            self._depth(ticket.num_tokens, num_new),
            all_at_once=self._config.read_buffer == "off",
            job=job.job_id,
        )
        return OpenHistory(
            load=load,
            num_loaded=ticket.num_tokens,
            num_stored=num_stored,
            predicted_s=self._predict(ticket.num_tokens, num_new),
        )

    def _plan(self, num_stored: int, num_new: int) -> costs.HistoryPlan | None:
        """What of a stored history is loaded; None: all of it."""
        rates = self.meter.rates if self._config.recompute_if_faster else None
        if rates is None:
            return None
        return costs.choose_history(
            rates,
            num_stored,
            num_new,
            block_tokens=self._layout.block_tokens,
            depth=self._layout.num_layers,
            head_start_s=0.0,
            min_gain=_MIN_GAIN,
            padded=self._runner.padded,
        )

    def _depth(self, num_history: int, num_new: int) -> int:
        """Layers of the read buffer for a load."""
        wanted, num_layers = self._config.read_buffer, self._layout.num_layers
        if isinstance(wanted, int):
            return min(wanted, num_layers)
        rates = self.meter.rates
        if wanted != "auto" or rates is None:
            return num_layers
        depth = costs.read_buffer_layers(rates, *self._runner.padded(num_history, num_new))
        return min(max(depth, 1) + _SLACK_LAYERS, num_layers)

    def _predict(self, num_history: int, num_new: int) -> float | None:
        """Seconds of prefilling new tokens over a history that is loaded from when the device is free on."""
        rates = self.meter.rates
        if rates is None:
            return None
        compute_s = costs.layer_compute_s(rates, *self._runner.padded(num_history, num_new))
        load_s = costs.layer_load_s(rates, num_history)
        depth = self._depth(num_history, num_new)
        return costs.pipeline_s(load_s, compute_s, rates.num_layers, depth, head_start_s=0.0)

    def _give_up_preloaded(self, key: str | None = None) -> None:
        """Ends a load that was begun early, of one session or of any: its job begins anew."""
        if self._preloaded is None or key not in (None, self._preloaded[1]):
            return
        (_, _, history), self._preloaded = self._preloaded, None
        if history.load is not None:
            history.load.release()
            self._store.abort_load(history.load.ticket, MissReason.CANCELLED)

    def _warn_of_small_caps(self, layout: KVLayout, max_tokens: int) -> None:
        stats = self._store.stats()
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

    def _close_saver(self, saver: TurnSaver) -> None:
        self._held.pop(saver.key, None)
        self._store.unpin(saver.key)
        del self._turns[saver.key]

    def _settle_session(self, key: str) -> None:
        """Has all saves of a session published or given up, those included that wait for room."""
        self.collect(wait=True, key=key)
        while key in self._held and self._store.settle():  # Others get to SSD, and make room.
            self.collect(wait=True)
        if key in self._held:
            self._held[key].give_up()
            self._close_saver(self._held[key])

    def _touch(self) -> None:
        """Makes host memory resident in the background, so that no load or save pays for its first touch."""
        self._metrics.first_touch_s = self._loader.touch() + self._store.touch()


def read_buffer_bytes(layout: KVLayout, config: EngineConfig, max_tokens: int) -> int:
    """Bytes of staging: the read buffer under its cap, and the execution regions behind it."""
    layer_bytes = layout.token_bytes // layout.num_layers * max_tokens
    everything = layout.num_layers * layer_bytes
    if config.read_buffer_gib is None:
        return everything
    return min(int(config.read_buffer_gib * GIB) + _EXECUTION_REGIONS * layer_bytes, everything)


def check_buffers(config: EngineConfig, layout: KVLayout, runner: Runner) -> None:
    """Checks that the read and the write buffer fit beside the weights and the decode slots.

    Raises:
      ValueError: they do not.
    """
    read_bytes = read_buffer_bytes(layout, config, runner.history_buckets[-1])
    wanted = {
        "the read buffer": read_bytes,
        "write_buffer_gib": int(config.write_buffer_gib * GIB),
        "the weights": runner.param_bytes,
        "the decode slots": runner.slot_bytes,
    }
    capacity = device_memory_bytes()
    if capacity is not None and sum(wanted.values()) > capacity:
        parts = ", ".join(f"{num_bytes / GIB:.2f} for {name}" for name, num_bytes in wanted.items())
        raise ValueError(f"wanted at most the device's {capacity / GIB:.2f} GiB of memory, found {parts}")
