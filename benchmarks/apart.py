"""A turn's load and its compute, each without the other: what a turn that does both at once is compared with.

Both go past the engine's scheduling, through the same loader and the same compiled functions as its turns.

Not here: turns (`engines.send_turn`), what is made of the times (`suites.ttft`, `suites.blend`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from benchmarks.harness import BenchError, Sample
from ca_jax.device.passes import LayerSource, PassPart, Prefill
from ca_jax.engine import Engine
from ca_jax.kv.chunk_kv import FusedTicket
from ca_jax.kv.history import History
from ca_jax.kv.layer_loader import LayerLoad, LayerLoader
from ca_jax.recompute.plan import blend_plan
from ca_jax.recompute.recomputer import RecomputedHistory
from ca_jax.session import Session
from ca_jax.storage.tickets import LoadTicket

_SLOT = 0  # An idle engine has all of them free, and gets this one back.


@dataclasses.dataclass(frozen=True)
class HistoryOnDevice:
    """A history that needs no loading; a `passes.LayerSource`."""

    num_tokens: int
    """Of it that count."""
    layers: Sequence[jax.Array]
    """Unrotated KV, per layer `[2, S, K, H]`."""
    load_s: float
    """Seconds from the start of the load until the last layer was on the device."""
    token_ids: Sequence[int] = ()
    """Of chunks: theirs, one chunk behind the other."""
    history: History | None = None
    """Of chunks: what the engine would blend."""

    def layer(self, layer: int) -> jax.Array:
        """A layer's KV."""
        return self.layers[layer]

    def computed(self, layer: int, result: jax.Array) -> None:
        """Nothing waits for it."""


class ApartEngine:
    """Loads and prefills of an idle engine, done one without the other. Blocks; the engine stays as it was.

    Args:
      engine: whose functions and device state are used; nothing else may run it meanwhile.
      max_history_tokens: of the longest history.
    """

    def __init__(self, engine: Engine, *, max_history_tokens: int) -> None:
        self._engine, self._store = engine, engine._kv.store
        padded_tokens = engine._runner.padded_history(max_history_tokens)
        self._loader = LayerLoader(self._store.layout, padded_tokens * self._store.layout.token_bytes)
        self._loader.touch()

    def close(self) -> None:
        """Lets go of memory."""
        self._loader.close()

    @contextlib.contextmanager
    def loaded(self, session: Session) -> Iterator[HistoryOnDevice]:
        """Loads all of a session's KV from DRAM, as fast as it comes, while nothing is computed.

        It is there until the block ends: on CPU it lies in the loader's memory. BenchError: DRAM has not all of it.
        """
        ticket = self._open_load(session)
        with self._on_device(FusedTicket([(ticket, 0)]), [ticket]) as (layers, load_s, _):
            yield HistoryOnDevice(ticket.num_tokens, layers, load_s)

    @contextlib.contextmanager
    def loaded_context(self, chunks: Sequence[Sequence[int]], tenant: str = "") -> Iterator[HistoryOnDevice]:
        """As `loaded`, the KV of chunks, one behind the other."""
        stored = self._engine._kv.chunks
        starts = itertools.accumulate(map(len, chunks), initial=0)
        token_ids = list(itertools.chain.from_iterable(chunks))
        spans = [stored.span(token_ids, start, len(ids), tenant) for ids, start in zip(chunks, starts, strict=False)]
        with self._engine._lock:
            tickets = [stored.hold(span, list(ids)) for span, ids in zip(spans, chunks, strict=True)]
            held = [ticket for ticket in tickets if ticket is not None]
            if len(held) < len(chunks):
                for ticket in held:
                    self._store.abort_load(ticket)
                raise BenchError(f"a load of {len(chunks)} chunks must find all of them in DRAM, got {len(held)}")
        fused = FusedTicket([(part, span.start) for part, span in zip(held, spans, strict=True)])
        with self._on_device(fused, held) as (layers, load_s, load):
            history = History("", load, load, num_stored=0, num_slid=0, predicted_s=None, chunks=tuple(spans))
            yield HistoryOnDevice(fused.num_tokens, layers, load_s, token_ids, history)

    def prefill(self, history: HistoryOnDevice, new_ids: list[int]) -> tuple[int, float]:
        """Computes a turn over a history on the device: the likeliest first token, and seconds until it is known."""
        return self._prefill(lambda: history, history.num_tokens, new_ids)

    def sample(self, session: Session, new_ids: list[int]) -> Sample:
        """The first token of a turn, and seconds of its load and of its compute, each alone."""
        with self.loaded(session) as history:
            token, compute_s = self.prefill(history, new_ids)
        return {"token": token, "compute_s": compute_s, "load_s": history.load_s}

    def blend(self, context: HistoryOnDevice, new_ids: list[int], ratio: float) -> tuple[int, float]:
        """As `prefill`, over chunks of `loaded_context` of which a share is computed anew."""
        if context.history is None:
            raise ValueError("context must be of chunks, got a session's history")
        runner, history = self._engine._runner, context.history

        def blended() -> LayerSource:
            places = history.num_places
            plan = blend_plan(self._engine.config.blend, runner.config.num_layers, places, 0, history.chunks, ratio)
            return RecomputedHistory(context, _SLOT, list(context.token_ids), runner, blend=plan)

        return self._prefill(blended, context.num_tokens, new_ids)

    @contextlib.contextmanager
    def _on_device(
        self, ticket: FusedTicket, held: Sequence[LoadTicket]
    ) -> Iterator[tuple[list[jax.Array], float, LayerLoad]]:
        num_layers = self._store.layout.num_layers
        started_s = time.perf_counter()
        load = self._loader.open(ticket, self._engine._runner.padded_history(ticket.num_tokens), depth=num_layers)
        try:
            layers = jax.block_until_ready([load.layer(layer) for layer in range(num_layers)])
            yield layers, time.perf_counter() - started_s, load
        finally:
            load.release()
            with self._engine._lock:
                for part in held:
                    self._store.complete_load(part)

    def _prefill(self, source: Callable[[], LayerSource], num_tokens: int, new_ids: list[int]) -> tuple[int, float]:
        runner = self._engine._runner
        with self._engine._lock:
            started_s = time.perf_counter()
            history: LayerSource | None = source()
            prefill = Prefill(_SLOT, new_ids, num_tokens)
            runner.pool.begin(_SLOT, num_tokens + len(new_ids))
            try:
                while prefill.num_left:
                    part = PassPart(prefill, min(prefill.num_left, runner.chunk_tokens), history, draws_behind=0)
                    if isinstance(history, RecomputedHistory):
                        part.mend = history.mend
                    passed, history = runner.run_pass([part]), None
                    if part.error is not None:
                        raise part.error
                if passed.draw is None:
                    raise RuntimeError("a prefill of all tokens has ended without a token")
                token = int(passed.draw.wait().tokens[passed.rows[_SLOT]])
                return token, time.perf_counter() - started_s
            finally:
                runner.pool.end(_SLOT)

    def _open_load(self, session: Session) -> LoadTicket:
        num_tokens, num_found = len(session.token_ids), 0
        with self._engine._lock:  # The engine's own thread looks after the store now and then.
            for info in self._store.of_name(session.session_id):
                ticket = self._store.prepare_load(info.key, session.token_ids)
                if ticket is None:
                    continue
                if ticket.num_tokens == num_tokens:
                    return ticket
                num_found = ticket.num_tokens
                self._store.abort_load(ticket)
        raise BenchError(f"a load of {num_tokens} tokens must find all of them in DRAM, got {num_found}")
