"""The KV of sessions between turns: store, loader and saver as one thing, so that the engine says what and not how.

A turn asks for its history (`find`), has it loaded layer by layer, and hands its new KV back as it comes (`TurnSaver`).
A saved length moves only when `collect` finds the bytes in place. Any failure shortens what is stored and is counted.

Not here: copies (transfer), blocks and books (storage), computing (runner).
"""

from __future__ import annotations

import collections
import hashlib
import logging
import threading
from collections.abc import Callable

import jax

from ca_jax.conversations import Conversation
from ca_jax.errors import TenantError
from ca_jax.metrics import EngineMetrics
from ca_jax.runner import Prefill, PrefillChunk, Runner
from ca_jax.session import Job, Session
from ca_jax.storage.attention_store import AttentionStore
from ca_jax.storage.config import StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import EntryInfo, Owner, Residency, StoreStats
from ca_jax.storage.tickets import LoadTicket
from ca_jax.transfer import AsyncSaver, DecodedPart, LayerLoader, LayerPart

_LOG = logging.getLogger(__name__)
Parts = list[LayerPart] | list[DecodedPart]


class SessionKV:
    """Stored KV of one model's sessions. Belongs to the engine's thread.

    Args:
      layout: of a block.
      config: of the store.
      fingerprint: of the weights: KV of others is never found.
      max_tokens: longest padded history.
      group_tokens: decoded tokens that are saved together.
      metrics: where failures are counted.
      on_progress: called from any thread when `collect` has something to do.

    Raises:
      ValueError: a size that does not fit machine or disk.
      NotADirectoryError, PermissionError, CatalogError: the store's directory cannot be used.
    """

    def __init__(
        self,
        layout: KVLayout,
        config: StoreConfig,
        *,
        fingerprint: str,
        max_tokens: int,
        group_tokens: int,
        metrics: EngineMetrics,
        on_progress: Callable[[], None],
    ) -> None:
        self._store = AttentionStore(layout, config, weights=fingerprint, on_progress=on_progress)
        self._warn_of_small_caps(layout, max_tokens)
        self._loader = LayerLoader(layout, max_tokens)
        self._saver = AsyncSaver(on_progress)
        self._group_tokens = group_tokens
        self._metrics = metrics
        self._turns: dict[str, TurnSaver] = {}
        self._held: dict[str, TurnSaver] = {}  # Of turns that ended before the store had room for all of their KV.
        self._queued: dict[Job, tuple[str, str]] = {}  # Keys of waiting jobs' sessions and of the KV they will load.
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
        self._store.enqueue(job, source)
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
        if self._queued.pop(job, None) is not None:
            self._store.dequeue(job)

    def prefill(self, runner: Runner, job: Job, session: Session) -> Prefill:
        """Prefills a turn over whatever of its history is stored; everything, if nothing is or the load breaks.

        Says in `job` how many tokens' KV was loaded, from where, and how long that took.
        """
        ticket = self._find(job, session)
        self.withdraw(job)
        if ticket is None:
            return runner.prefill(job.prompt_ids, 0, None)
        try:
            self._loader.start(ticket, runner.padded_history(ticket.num_tokens))
            prefill = runner.prefill(job.prompt_ids[ticket.num_tokens :], ticket.num_tokens, self._loader.layer)
        except Exception:  # A load that breaks is a miss and a recompute, never a failed turn.
            self._loader.release()
            self._store.abort_load(ticket)
            self._store.drop(ticket.key)
            self._metrics.failed_loads += 1
            return runner.prefill(job.prompt_ids, 0, None)
        self._store.complete_load(ticket)
        self._store.truncate(ticket.key, ticket.num_tokens)  # What is stored behind them belongs to other tokens.
        job.cached_tokens, job.cached_tier = ticket.num_tokens, "ssd" if ticket.from_ssd else "dram"
        job.load_s, job.load_stall_s = self._loader.load_s, self._loader.stall_s
        return prefill

    def release_staging(self) -> None:
        """Frees the loader for the next turn. Everything computed from the last load must be done."""
        self._loader.release()

    def begin_saving(self, session: Session, start_token: int) -> TurnSaver:
        """Opens the saving of a turn, behind the session's first `start_token` tokens, which are stored."""
        key = self.key(session.session_id, session.tenant)
        owner = Owner(tenant=session.tenant, session_id=session.session_id, ttl_s=session.ttl_s)
        saver = TurnSaver(self._store, self._saver, key, owner, start_token, self._group_tokens)
        self._store.pin(key)  # What this turn builds on must not be evicted under it.
        self._turns[key] = saver
        return saver

    def end_saving(self, saver: TurnSaver) -> None:
        """Submits what is left of a turn, or holds it until the store has room."""
        saver.flush()
        if saver.is_held:
            self._held[saver.key] = saver
        else:
            self._close_saver(saver)

    def collect(self, wait: bool = False) -> None:
        """Publishes the saves that are done and gives up those that failed; with `wait`, all that were submitted.

        Keeps the store's tiers going too.
        """
        for saver in tuple(self._held.values()):
            saver.submit_held()
            if not saver.is_held:
                self._close_saver(saver)
        for result in self._saver.poll(wait):
            if result.error is None:
                self._store.complete_save(result.ticket)
                continue
            self._store.abort_save(result.ticket)
            self._metrics.failed_saves += 1
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
        self._settle_session(key)
        self._store.truncate(key, num_tokens)

    def drop(self, key: str) -> None:
        """Forgets all of a session. No turn of it may run."""
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
        self.settle()
        self._saver.close()
        self._store.close()

    def _find(self, job: Job, session: Session) -> LoadTicket | None:
        """The stored prefix of a prompt; its last token is never part of it, since its logits are wanted."""
        if len(job.prompt_ids) < 2:
            return None
        key = self.key(session.session_id, session.tenant)
        self._settle_session(key)
        wanted = job.prompt_ids[:-1]
        _, source = self._queued.get(job, (key, key))
        if source != key and self._store.residency(key) is Residency.ABSENT:
            owner = Owner(tenant=session.tenant, session_id=session.session_id, ttl_s=session.ttl_s)
            self._store.copy_prefix(source, key, wanted, owner)
        ticket = self._store.prepare_load(key, wanted)
        if ticket is None and self._store.residency(key) is Residency.DRAM:
            self._store.drop(key)  # Other tokens than these: what is saved now begins anew.
        return ticket

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
        self.collect(wait=True)
        while key in self._held and self._store.settle():  # Others get to SSD, and make room.
            self.collect(wait=True)
        if key in self._held:
            self._held[key].give_up()
            self._close_saver(self._held[key])

    def _touch(self) -> None:
        """Makes host memory resident in the background, so that no load or save pays for its first touch."""
        self._metrics.first_touch_s = self._loader.touch() + self._store.touch()


class TurnSaver:
    """What of one turn's KV is still to be saved, from prefill to the last decoded token.

    KV leaves in order and without gaps: what the store has no room for ends the saving of this turn, and the next turn
    prefills from there. Where room is coming, since others are on their way to SSD, it waits on the device instead.

    Args:
      store: where to.
      saver: who copies.
      key: of the session.
      owner: whose it is.
      start_token: tokens of the session that are stored already.
      group_tokens: decoded tokens that are saved together.
    """

    def __init__(
        self,
        store: AttentionStore,
        saver: AsyncSaver,
        key: str,
        owner: Owner,
        start_token: int,
        group_tokens: int,
    ) -> None:
        self._owner = owner
        self.key = key
        """Of the session, in the store."""
        self._store = store
        self._saver = saver
        self._next_token = start_token
        self._group_tokens = group_tokens
        self._active = True
        self._tokens: list[int] = []
        self._steps: list[jax.Array] = []
        self._rows: list[int] = []
        self._waiting: collections.deque[tuple[list[int], Parts]] = collections.deque()

    def add_prefill(self, token_ids: list[int], chunks: list[PrefillChunk]) -> None:
        """Submits the KV of the prefilled tokens."""
        first = self._next_token
        parts: Parts = [
            LayerPart(layer, kv, chunk.num_tokens, chunk.start - first)
            for chunk in chunks
            for layer, kv in enumerate(chunk.kv)
        ]
        self._submit(token_ids, parts)

    def add_decoded(self, token_id: int, kv: jax.Array, row: int) -> None:
        """Takes the KV of one decoded token, row `row` of `kv [L, 2, n, K, H]`, and submits it with its group."""
        if not self._active:
            return
        self._tokens.append(token_id)
        self._steps.append(kv)
        self._rows.append(row)
        if len(self._tokens) >= self._group_tokens:
            self.flush()

    def flush(self) -> None:
        """Submits what is held."""
        if self._tokens:
            self._submit(self._tokens, [DecodedPart(tuple(self._steps), tuple(self._rows))])
            self._tokens, self._steps, self._rows = [], [], []

    def give_up(self) -> None:
        """Saves nothing more of this turn: what the store has now would leave a gap."""
        self._active = False
        self._waiting.clear()

    @property
    def is_held(self) -> bool:
        """Whether KV waits for room in the store."""
        return bool(self._waiting)

    def submit_held(self) -> None:
        """Submits what waits for room, as far as there is some."""
        while self._waiting:
            token_ids, parts = self._waiting[0]
            if self._store.room_is_coming(self.key, len(token_ids), self._owner):
                return
            self._waiting.popleft()
            ticket = self._store.prepare_save(self.key, self._next_token, token_ids, self._owner)
            if ticket is None:
                self.give_up()
                return
            self._next_token += len(token_ids)
            self._saver.submit(ticket, parts)

    def _submit(self, token_ids: list[int], parts: Parts) -> None:
        if self._active:
            self._waiting.append((token_ids, parts))
            self.submit_held()
