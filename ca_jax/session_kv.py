"""The KV of sessions between turns: store, loader and saver as one thing, so that the engine says what and not how.

A turn asks for its history (`find`), has it loaded layer by layer, and hands its new KV back as it comes (`TurnSaver`).
A saved length moves only when `collect` finds the bytes in place. Any failure shortens what is stored and is counted.

Not here: copies (transfer), blocks and books (storage), computing (runner).
"""

from __future__ import annotations

import hashlib
import threading

import jax

from ca_jax.metrics import EngineMetrics
from ca_jax.runner import Prefill, PrefillChunk, Runner
from ca_jax.storage.attention_store import AttentionStore
from ca_jax.storage.config import StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import StoreStats
from ca_jax.storage.tickets import LoadTicket
from ca_jax.transfer import AsyncSaver, DecodedPart, LayerLoader, LayerPart


class SessionKV:
    """Stored KV of one model's sessions. Belongs to the engine's thread.

    Args:
      layout: of a block.
      config: of the store.
      fingerprint: of the weights: KV of others is never found.
      max_tokens: longest padded history.
      group_tokens: decoded tokens that are saved together.
      metrics: where failures are counted.
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
    ) -> None:
        self._store = AttentionStore(layout, config)
        self._loader = LayerLoader(layout, max_tokens)
        self._saver = AsyncSaver()
        self._group_tokens = group_tokens
        self._metrics = metrics
        self._turns: dict[str, TurnSaver] = {}
        self._salt = hashlib.sha256(f"{fingerprint}|{layout}|unrotated|".encode()).digest()
        self._toucher = threading.Thread(target=self._touch, name="ca_jax-first-touch", daemon=True)
        self._toucher.start()

    def wait_until_resident(self) -> None:
        """Returns when all host memory has had its first touch. Any thread may call it."""
        self._toucher.join()

    def key(self, session_id: str) -> str:
        """The store's key: other weights, layouts and position encodings never meet."""
        return hashlib.sha256(self._salt + session_id.encode()).hexdigest()

    def prefill(self, runner: Runner, session_id: str, prompt_ids: list[int]) -> tuple[Prefill, int, float, float]:
        """Prefills a turn over whatever of its history is stored; everything, if nothing is or the load breaks.

        Returns:
          The prefill, tokens whose KV was loaded, seconds in which copies ran, seconds compute waited for them.
        """
        ticket = self._find(session_id, prompt_ids)
        if ticket is None:
            return runner.prefill(prompt_ids, 0, None), 0, 0.0, 0.0
        try:
            self._loader.start(ticket, runner.padded_history(ticket.num_tokens))
            prefill = runner.prefill(prompt_ids[ticket.num_tokens :], ticket.num_tokens, self._loader.layer)
        except Exception:  # A load that breaks is a miss and a recompute, never a failed turn.
            self._loader.release()
            self._store.abort_load(ticket)
            self._store.drop(ticket.key)
            self._metrics.failed_loads += 1
            return runner.prefill(prompt_ids, 0, None), 0, 0.0, 0.0
        self._store.complete_load(ticket)
        self._store.truncate(ticket.key, ticket.num_tokens)  # What is stored behind them belongs to other tokens.
        return prefill, ticket.num_tokens, self._loader.load_s, self._loader.stall_s

    def release_staging(self) -> None:
        """Frees the loader for the next turn. Everything computed from the last load must be done."""
        self._loader.release()

    def begin_saving(self, session_id: str, start_token: int) -> TurnSaver:
        """Opens the saving of a turn, behind the session's first `start_token` tokens, which are stored."""
        key = self.key(session_id)
        saver = TurnSaver(self._store, self._saver, key, start_token, self._group_tokens)
        self._store.pin(key)  # What this turn builds on must not be evicted under it.
        self._turns[key] = saver
        return saver

    def end_saving(self, saver: TurnSaver) -> None:
        """Submits what is left of a turn."""
        saver.flush()
        self._store.unpin(saver.key)
        del self._turns[saver.key]

    def collect(self, wait: bool = False) -> None:
        """Publishes the saves that are done and gives up those that failed; with `wait`, all that were submitted."""
        for result in self._saver.poll(wait):
            if result.error is None:
                self._store.complete_save(result.ticket)
                continue
            self._store.abort_save(result.ticket)
            self._metrics.failed_saves += 1
            if result.ticket.key in self._turns:
                self._turns[result.ticket.key].give_up()

    def truncate(self, session_id: str, num_tokens: int) -> None:
        """Forgets a session's KV behind its first `num_tokens` tokens. No turn of it may run."""
        self.collect(wait=True)
        self._store.truncate(self.key(session_id), num_tokens)

    def stats(self) -> StoreStats:
        """What the store holds and has done."""
        return self._store.stats()

    def close(self) -> None:
        """Finishes what was submitted and lets go of memory."""
        self.collect(wait=True)
        self._saver.close()
        self._store.close()

    def _find(self, session_id: str, prompt_ids: list[int]) -> LoadTicket | None:
        """The stored prefix of a prompt; its last token is never part of it, since its logits are wanted."""
        if len(prompt_ids) < 2:
            return None
        self.collect(wait=True)
        key = self.key(session_id)
        ticket = self._store.prepare_load(key, prompt_ids[:-1])
        if ticket is None:
            self._store.drop(key)
        return ticket

    def _touch(self) -> None:
        """Makes host memory resident in the background, so that no load or save pays for its first touch."""
        self._metrics.first_touch_s = self._loader.touch() + self._store.touch()


class TurnSaver:
    """What of one turn's KV is still to be saved, from prefill to the last decoded token.

    KV leaves in order and without gaps: what the store has no room for ends the saving of this turn, and the next turn
    prefills from there.

    Args:
      store: where to.
      saver: who copies.
      key: of the session.
      start_token: tokens of the session that are stored already.
      group_tokens: decoded tokens that are saved together.
    """

    def __init__(self, store: AttentionStore, saver: AsyncSaver, key: str, start_token: int, group_tokens: int) -> None:
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

    def add_prefill(self, token_ids: list[int], chunks: list[PrefillChunk]) -> None:
        """Submits the KV of the prefilled tokens."""
        first = self._next_token
        parts = [
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

    def _submit(self, token_ids: list[int], parts: list[LayerPart] | list[DecodedPart]) -> None:
        if not self._active:
            return
        ticket = self._store.prepare_save(self.key, self._next_token, token_ids)
        if ticket is None:
            self._active = False
            return
        self._next_token += len(token_ids)
        self._saver.submit(ticket, parts)
