"""Measures an engine: each suite drives the real one, and the peer beside it, and gives rows.

Every sample is of work that was run once before, so that nothing in it is compiled or first touched; rows count
compiles to show that. Ours and the peer's samples take turns (A B C A B C ...), never at once, so that a machine that
slows down slows all alike. Numbers are medians; `spread` has the least and the largest sample.

Not here: what rows hold (`bench_schema`), the suite that goes through the tiers of the store (`bench_tiers`), flags and
main (`bench`), other engines (`bench_peers`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

from ca_jax.engine import Engine
from ca_jax.launch.bench_peers import Peer
from ca_jax.launch.bench_schema import (
    SETTLING_STEPS,
    BenchConfig,
    BenchError,
    DecodeRow,
    PrefillRow,
    ReuseRow,
    Row,
    Samples,
)
from ca_jax.pretrained import Progress
from ca_jax.session import Session
from ca_jax.telemetry.metrics import CompileCounter
from ca_jax.turns.requests import SamplingParams


def run_suite(engine: Engine, config: BenchConfig, peer: Peer | None, progress: Progress) -> list[Row]:
    """Measures every row of one of `PEER_SUITES`. Blocks; the engine must be idle and is idle again afterwards.

    Args:
      engine: made with `config.engine_config()`.
      config: what to measure.
      peer: what to measure beside ours, on the same weights; None for nothing.
      progress: told of every sample.

    Raises:
      BenchError: the engine did other work than a row would say it did.
    """
    cells = config.cells()
    total, done = len(cells) * (1 + config.repeats), 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(config.suite, done, total)

    progress(config.suite, 0, total)
    engine.wait_until_ready()  # First touch would share the memory bus with the samples.
    bench = _Bench(engine, config, peer, np.random.default_rng(config.seed), step)
    measures: dict[str, Callable[..., Row]] = {"reuse": bench.reuse, "prefill": bench.prefill, "decode": bench.decode}
    return [measures[config.suite](*cell) for cell in cells]


def send_turn(
    engine: Engine, session: Session, new_ids: list[int], context: Sequence[Sequence[int]] | None = None
) -> tuple[int, float]:
    """A turn of one answer token, on an idle engine: that token, and seconds from sending until the caller has it.

    On return its KV is stored. Chunks of a `context` come before the new tokens, see `Session.send`.
    """
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    started_s = time.perf_counter()
    collections.deque(session.send_ids(new_ids, context=context, sampling=params), maxlen=0)
    elapsed_s = time.perf_counter() - started_s
    _settle(engine)
    return session.token_ids[-1], elapsed_s


@dataclasses.dataclass(frozen=True)
class _Bench:
    """Measures one row at a time."""

    engine: Engine
    config: BenchConfig
    peer: Peer | None
    rng: np.random.Generator
    step: Callable[[], None]  # to be called after each sample

    def reuse(self, num_history: int, num_new: int) -> ReuseRow:
        """A turn over a stored history, and the same turn recomputed."""
        session = self.engine.session()
        self._send(session, self._random_ids(num_history))  # Saves the history's KV.
        session.rewind(num_history)
        # Turns that begin with different tokens share the history and no more, whatever else the store still holds.
        first_ids = itertools.cycle(self.rng.permutation(self.engine.model.config.vocab_size).tolist())

        def sample(samples: Samples) -> bool:
            return self._sample_reuse(session, [next(first_ids), *self._random_ids(num_new - 1)], samples)

        samples, same_tokens, recompiles = self._repeat(sample)
        session.close()
        reuse_s, recompute_s = samples.median("ttft_reuse_s"), samples.median("ttft_recompute_s")
        peer_s = samples.median_or_none("ttft_peer_recompute_s")
        return ReuseRow(
            history_tokens=num_history,
            new_tokens=num_new,
            ttft_recompute_s=recompute_s,
            ttft_reuse_s=reuse_s,
            ttft_peer_recompute_s=peer_s,
            speedup=(recompute_s if peer_s is None else min(recompute_s, peer_s)) / reuse_s,
            load_s=samples.median("load_s"),
            load_share=samples.median("load_share"),
            load_stall_s=samples.median("load_stall_s"),
            same_tokens=same_tokens,
            recompiles=recompiles,
            spread=samples.spread(),
        )

    def prefill(self, num_tokens: int) -> PrefillRow:
        """A first turn of so many tokens."""

        def sample(samples: Samples) -> bool:
            prompt = self._random_ids(num_tokens)
            session = self.engine.session()
            token, ours_s = self._send(session, prompt)
            session.close()
            tokens = {token}
            samples.add(prefill_s=ours_s, tokens_per_s=num_tokens / ours_s)
            if self.peer is not None:
                token, peer_s = self.peer.prefill(prompt)
                tokens.add(token)
                samples.add(peer_prefill_s=peer_s, peer_tokens_per_s=num_tokens / peer_s)
            return len(tokens) == 1

        samples, same_tokens, recompiles = self._repeat(sample)
        ours, peers = samples.median("tokens_per_s"), samples.median_or_none("peer_tokens_per_s")
        return PrefillRow(
            tokens=num_tokens,
            prefill_s=samples.median("prefill_s"),
            tokens_per_s=ours,
            peer_prefill_s=samples.median_or_none("peer_prefill_s"),
            peer_tokens_per_s=peers,
            ratio=None if peers is None else ours / peers,
            same_tokens=same_tokens,
            recompiles=recompiles,
            spread=samples.spread(),
        )

    def decode(self, batch_size: int, num_context: int) -> DecodeRow:
        """Answers of a full batch, each behind a context of so many tokens."""
        engine, peer = self.engine, self.peer
        params = SamplingParams(max_tokens=self.config.max_answer_tokens, ignore_eos=True)
        prompts = [self._random_ids(num_context) for _ in range(batch_size)]
        sessions = [engine.session() for _ in prompts]
        answers = [session.send_ids(prompt, sampling=params) for session, prompt in zip(sessions, prompts, strict=True)]
        for _ in range(batch_size + SETTLING_STEPS):  # The engine prefills one session a step, while others decode.
            engine.step()
        if peer is not None:
            peer.start_decode(prompts)

        def sample(samples: Samples) -> bool:
            steps_before, started_s = engine.metrics.decode_steps, time.perf_counter()
            for _ in range(self.config.decode_steps):
                engine.step()
            elapsed_s = time.perf_counter() - started_s
            samples.add(tokens_per_s=batch_size * (engine.metrics.decode_steps - steps_before) / elapsed_s)
            if peer is not None:
                engine.wait_for_saves()
                peer_s = peer.decode(self.config.decode_steps)
                samples.add(peer_tokens_per_s=batch_size * self.config.decode_steps / peer_s)
            return all(session.finish_reason is None for session in sessions)  # Answers that are let go of end.

        samples, all_decoding, recompiles = self._repeat(sample)
        for answer, session in zip(answers, sessions, strict=True):
            answer.close()
            session.close()
        _settle(engine)
        if peer is not None:
            peer.end_decode()
        if not all_decoding:
            raise BenchError(f"wanted {batch_size} sessions that decode to the end, found some that ended early")
        ours, peers = samples.median("tokens_per_s"), samples.median_or_none("peer_tokens_per_s")
        return DecodeRow(
            batch_size=batch_size,
            context_tokens=num_context,
            tokens_per_s=ours,
            tokens_per_s_per_slot=ours / batch_size,
            peer_tokens_per_s=peers,
            speedup_vs_peer=None if peers is None else ours / peers,
            recompiles=recompiles,
            spread=samples.spread(),
        )

    def _repeat(self, sample: Callable[[Samples], bool]) -> tuple[Samples, bool, int]:
        """Takes one sample for nothing, then those that count; them, whether all were good, and functions compiled."""
        sample(Samples())
        self.step()
        samples, all_good = Samples(), True
        with CompileCounter() as compiles:
            for _ in range(self.config.repeats):
                all_good &= sample(samples)
                self.step()
        return samples, all_good, compiles.count

    def _sample_reuse(self, session: Session, new_ids: list[int], samples: Samples) -> bool:
        """One turn by reuse, by recompute and by the peer; whether all drew the same token. Rewinds the session."""
        history_ids = session.token_ids
        tokens = set()
        for name, num_stored in (("ttft_reuse_s", len(history_ids)), ("ttft_recompute_s", 0)):
            if not num_stored:
                self.engine.drop_stored(session)
            token, ttft_s = self._send(session, new_ids)
            session.rewind(len(history_ids))
            usage = session.usage
            if usage is None or usage.num_cached_tokens != num_stored:
                raise BenchError(
                    f"{name} of {len(history_ids)} + {len(new_ids)} tokens wanted {num_stored} from the store, found "
                    f"{usage and usage.num_cached_tokens}; its room is {self.engine.config.store.dram_gib} GiB of DRAM"
                )
            tokens.add(token)
            samples.add(**{name: ttft_s})
            if num_stored:
                samples.add(load_s=usage.load_s, load_stall_s=usage.load_stall_s, load_share=usage.load_s / ttft_s)
        if self.peer is not None:
            token, ttft_s = self.peer.prefill([*history_ids, *new_ids])
            tokens.add(token)
            samples.add(ttft_peer_recompute_s=ttft_s)
        return len(tokens) == 1

    def _send(self, session: Session, new_ids: list[int]) -> tuple[int, float]:
        return send_turn(self.engine, session, new_ids)

    def _random_ids(self, num_tokens: int) -> list[int]:
        return self.rng.integers(self.engine.model.config.vocab_size, size=num_tokens).tolist()


def _settle(engine: Engine) -> None:
    """Has the engine do what it put off until after a first token, so that no sample waits for the one before it."""
    engine.step()
    engine.wait_for_saves()
