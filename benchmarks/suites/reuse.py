"""Reuse against recompute, prefill and decode of one engine, and of a peer beside it.

Every sample is of work that was run once before, so that nothing in it is compiled or first touched. Ours and the
peer's samples take turns, never at once.

Not here: the tiers of the store (`suites.tiers`), other engines (`peers`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from benchmarks import harness
from benchmarks.engines import (
    SETTLING_STEPS,
    answer_of,
    check_source,
    random_ids,
    send_turn,
    settle,
    start_engine,
    store_session,
)
from benchmarks.harness import BenchError, Row, Run, Sample, ServingConfig, Ways
from benchmarks.peers import TransformersPeer
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.session import Session
from ca_jax.storage.config import StoreConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneEngineConfig(ServingConfig):
    """What to measure of one engine, whose sizes are the longest row's. Stored histories are always loaded."""

    settled: ClassVar = ("max_batch_size", "recompute_if_faster")
    may_be_zero: ClassVar = frozenset({"seed", "dram_gib"})

    dram_gib: float = StoreConfig.dram_gib
    """Cap of the DRAM tier, GiB."""

    def sized(self, context_window: int, max_batch_size: int = 1) -> EngineConfig:
        """The engine of that size."""
        return dataclasses.replace(
            self.engine,
            context_window=context_window,
            max_batch_size=max_batch_size,
            recompute_if_faster=False,
            store=StoreConfig(dram_gib=self.dram_gib),
        )


def started(run: Run[OneEngineConfig], config: EngineConfig) -> Engine:
    """The suite's engine, ready, with what its start took told."""
    started_s = time.perf_counter()
    engine = start_engine(run.model, config)
    run.startup["engine_start_s"] = run.model.load_s + time.perf_counter() - started_s
    engine.wait_until_ready()
    run.startup["first_touch_s"] = engine.metrics.first_touch_s
    return engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryConfig(ServingConfig):
    """A turn over a stored history. Every pair of lengths is a row; the engine is as large as the longest."""

    settled: ClassVar = OneEngineConfig.settled

    history_tokens: tuple[int, ...] = (2000,)
    """Tokens whose KV is stored."""
    new_tokens: tuple[int, ...] = (100,)
    """Tokens of the turn over them."""

    @property
    def cells(self) -> list[tuple[int, int]]:
        """History and new tokens of each row."""
        return list(itertools.product(self.history_tokens, self.new_tokens))

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest row whose KV is stored."""
        return max(self.history_tokens) + max(self.new_tokens)

    def engine_config(self) -> EngineConfig:
        """The engine of one slot with a window for the longest row; the sizes of its store are still to be set."""
        return dataclasses.replace(
            self.engine, context_window=self.max_tokens + 1, max_batch_size=1, recompute_if_faster=False
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskHistoryConfig(HistoryConfig):
    """A turn over a stored history that may be on SSD."""

    ssd_dir: str | None = None
    """Directory on the disk to measure; by default where temporary files are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryRow(Row):
    """What most rows of a turn over a stored history say."""

    history_tokens: int
    """Tokens whose KV is stored, exactly."""
    new_tokens: int
    same_tokens: bool
    """Whether all ways gave the same first token in every round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReuseConfig(HistoryConfig, OneEngineConfig):
    """A turn over a stored history, and the same turn recomputed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReuseRow(HistoryRow):
    """Time to the first token (TTFT) of a turn whose history is stored, against computing it all again."""

    ttft_recompute_s: float
    """Of the same turn with nothing stored, as the caller sees it: from sending to the first token."""
    ttft_reuse_s: float
    """Of the turn over its stored history."""
    ttft_peer_recompute_s: float | None
    """Of the peer, all tokens from scratch; None without a peer."""
    speedup: float
    """The faster recompute, ours or the peer's, over the reuse."""
    load_s: float
    """Of the reuse, seconds in which KV was being copied from the store; they overlap compute."""
    load_share: float
    """`load_s` as a share of the reuse TTFT, median of the samples' shares."""
    load_stall_s: float
    """Of the reuse, seconds in which compute waited for KV."""


def _reuse_summary(rows: Sequence[ReuseRow]) -> dict[str, Any]:
    best = harness.extremes("speedup", (row.speedup for row in rows))
    return {**best, "worst_load_share": max(row.load_share for row in rows), **harness.checks(rows)}


@harness.suite(ReuseConfig, summary=_reuse_summary, has_peer=True)
def reuse(run: Run[ReuseConfig]) -> Iterator[ReuseRow]:
    """A turn over a stored history, and the same turn recomputed, by us and by the peer."""
    config, rng = run.config, run.rng()
    with started(run, config.sized(config.max_tokens + 1)) as engine:
        for num_history, num_new in config.cells:
            yield _reuse_row(run, engine, store_session(engine, random_ids(rng, run.model, num_history)), num_new)


def _reuse_row(run: Run[ReuseConfig], engine: Engine, session: Session, num_new: int) -> ReuseRow:
    history_ids = list(session.token_ids)
    rng = run.rng()
    # Turns that begin with different tokens share the history and no more, whatever else is stored.
    first_ids = itertools.cycle(rng.permutation(run.model.config.vocab_size).tolist())

    def turn(name: str, num_stored: int, new_ids: list[int]) -> Sample:
        if not num_stored:
            engine.drop_stored(session)
        token, ttft_s = send_turn(engine, session, new_ids)
        usage = check_source(name, session, num_new, {"dram": num_stored} if num_stored else {})
        session.rewind(len(history_ids))
        loads = {"load_s": usage.load_s, "load_stall_s": usage.load_stall_s, "load_share": usage.load_s / ttft_s}
        return {"token": token, name: ttft_s, **(loads if num_stored else {})}

    def peers(peer: TransformersPeer, prompt: list[int]) -> Sample:
        token, elapsed_s = peer.prefill(prompt)
        return {"token": token, "ttft_peer_recompute_s": elapsed_s}

    def ways() -> Ways:
        new_ids = [next(first_ids), *random_ids(rng, run.model, num_new - 1)]
        found: dict[str, Callable[[], Sample]] = {
            "reuse": lambda: turn("ttft_reuse_s", len(history_ids), new_ids),
            "recompute": lambda: turn("ttft_recompute_s", 0, new_ids),
        }
        if (peer := run.peer) is not None:
            found["peer"] = partial(peers, peer, [*history_ids, *new_ids])
        return found

    rounds = run.rounds(ways)
    session.close()
    samples = harness.samples(rounds)
    recomputes = [harness.median(samples, name) for name in ("ttft_recompute_s", "ttft_peer_recompute_s")]
    return harness.make_row(
        ReuseRow,
        samples,
        history_tokens=len(history_ids),
        new_tokens=num_new,
        speedup=min(each for each in recomputes if each is not None) / harness.must_median(samples, "ttft_reuse_s"),
        same_tokens=harness.same(rounds, "token"),
    )


# Prefill.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillConfig(OneEngineConfig):
    """A prompt computed from scratch."""

    prefill_tokens: tuple[int, ...] = (1024,)
    """Tokens of the prompts, a row each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillRow(Row):
    """A prompt computed from scratch, to its first token."""

    tokens: int
    prefill_s: float
    tokens_per_s: float
    peer_prefill_s: float | None
    """Of the peer; None without one."""
    peer_tokens_per_s: float | None
    ratio: float | None
    """Our tokens per second over the peer's."""
    same_tokens: bool
    """Whether ours and the peer's first tokens were the same in every sample."""


def _prefill_summary(rows: Sequence[PrefillRow]) -> dict[str, Any]:
    return {**harness.extremes("ratio", (row.ratio for row in rows)), **harness.checks(rows)}


@harness.suite(PrefillConfig, summary=_prefill_summary, has_peer=True)
def prefill(run: Run[PrefillConfig]) -> Iterator[PrefillRow]:
    """A session's first turn, of so many tokens."""
    config = run.config
    with started(run, config.sized(max(config.prefill_tokens) + 1)) as engine:
        for num_tokens in config.prefill_tokens:
            yield _prefill_row(run, engine, num_tokens)


def _prefill_row(run: Run[PrefillConfig], engine: Engine, num_tokens: int) -> PrefillRow:
    rng = run.rng()

    def ours(prompt: list[int]) -> Sample:
        with contextlib.closing(engine.session()) as session:
            token, elapsed_s = send_turn(engine, session, prompt)
        return {"token": token, "prefill_s": elapsed_s, "tokens_per_s": num_tokens / elapsed_s}

    def peers(peer: TransformersPeer, prompt: list[int]) -> Sample:
        token, elapsed_s = peer.prefill(prompt)
        return {"token": token, "peer_prefill_s": elapsed_s, "peer_tokens_per_s": num_tokens / elapsed_s}

    def ways() -> Ways:
        prompt = random_ids(rng, run.model, num_tokens)
        beside = {} if run.peer is None else {"peer": partial(peers, run.peer, prompt)}
        return {"ours": partial(ours, prompt), **beside}

    rounds = run.rounds(ways)
    samples = harness.samples(rounds)
    ratio = harness.ratio(samples, "tokens_per_s", "peer_tokens_per_s")
    same_tokens = harness.same(rounds, "token")
    return harness.make_row(PrefillRow, samples, tokens=num_tokens, ratio=ratio, same_tokens=same_tokens)


# Decode.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig(OneEngineConfig):
    """Sessions that decode together. Every pair of sizes is a row."""

    batch_sizes: tuple[int, ...] = (1, 8)
    """Sessions that decode together."""
    context_tokens: tuple[int, ...] = (1000,)
    """Tokens of each session before it decodes."""
    decode_steps: int = 16
    """Steps in one sample."""

    @property
    def max_answer_tokens(self) -> int:
        """Tokens the longest answer may grow to, the steps in which other sessions are prefilled included."""
        of_prompts = self.engine.max_num_batched_tokens - max(self.batch_sizes)  # In a pass, at least.
        num_passes = -(-max(self.batch_sizes) * max(self.context_tokens) // of_prompts)
        return 1 + num_passes + SETTLING_STEPS + (1 + self.repeats) * self.decode_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeRow(Row):
    """Sessions that all decode, their KV being saved as they do."""

    batch_size: int
    context_tokens: int
    """Of each when it begins to decode; samples follow one another, so that contexts grow by their steps."""
    tokens_per_s: float
    tokens_per_s_per_slot: float
    peer_tokens_per_s: float | None
    """Of the peer with the same batch and contexts; None without one."""
    speedup_vs_peer: float | None
    """Our tokens per second over the peer's."""


def _decode_summary(rows: Sequence[DecodeRow]) -> dict[str, Any]:
    """`batch_scaling` has for each context the largest batch's tokens per second over the smallest's."""
    scaling = []
    by_context = sorted(rows, key=lambda row: (row.context_tokens, row.batch_size))
    for context_tokens, group in itertools.groupby(by_context, key=lambda row: row.context_tokens):
        smallest, *_, largest = [*group] * 2
        sizes = [smallest.batch_size, largest.batch_size]
        ratio = largest.tokens_per_s / smallest.tokens_per_s
        scaling.append({"context_tokens": context_tokens, "batch_sizes": sizes, "ratio": ratio})
    best = harness.extremes("speedup_vs_peer", (row.speedup_vs_peer for row in rows))
    return {**best, "batch_scaling": scaling, **harness.checks(rows)}


@harness.suite(DecodeConfig, summary=_decode_summary, has_peer=True)
def decode(run: Run[DecodeConfig]) -> Iterator[DecodeRow]:
    """Answers of a full batch, each behind a context of so many tokens."""
    config = run.config
    window = max(config.context_tokens) + config.max_answer_tokens + 1
    with started(run, config.sized(window, max(config.batch_sizes))) as engine:
        for batch_size, num_context in itertools.product(config.batch_sizes, config.context_tokens):
            yield _decode_row(run, engine, batch_size, num_context)


def _decode_row(run: Run[DecodeConfig], engine: Engine, batch_size: int, num_context: int) -> DecodeRow:
    rng, num_steps = run.rng(), run.config.decode_steps
    params = answer_of(run.config.max_answer_tokens)
    prompts = [random_ids(rng, run.model, num_context) for _ in range(batch_size)]
    sessions = [engine.session() for _ in prompts]
    answers = [session.send_ids(prompt, sampling=params) for session, prompt in zip(sessions, prompts, strict=True)]
    while not all(answer.job.output_ids for answer in answers):  # Sessions decode while others are prefilled.
        engine.step()
    for _ in range(SETTLING_STEPS):
        engine.step()
    if run.peer is not None:
        run.peer.start_decode(prompts)

    def ours() -> Sample:
        steps_before, started_s = engine.metrics.decode_steps, time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        elapsed_s = time.perf_counter() - started_s
        engine.wait_for_saves()  # What is being saved would share the cores with the peer.
        if any(session.finish_reason is not None for session in sessions):  # Answers that are let go of end.
            raise BenchError(f"all {batch_size} sessions must decode to the end, got some that ended early")
        return {"tokens_per_s": batch_size * (engine.metrics.decode_steps - steps_before) / elapsed_s}

    def peers(peer: TransformersPeer) -> Sample:
        return {"peer_tokens_per_s": batch_size * num_steps / peer.decode(num_steps)}

    def ways() -> Ways:
        return {"ours": ours, **({} if run.peer is None else {"peer": partial(peers, run.peer)})}

    samples = harness.samples(run.rounds(ways))
    for answer, session in zip(answers, sessions, strict=True):
        answer.close()
        session.close()
    settle(engine)
    if run.peer is not None:
        run.peer.end_decode()
    return harness.make_row(
        DecodeRow,
        samples,
        batch_size=batch_size,
        context_tokens=num_context,
        tokens_per_s_per_slot=harness.must_median(samples, "tokens_per_s") / batch_size,
        speedup_vs_peer=harness.ratio(samples, "tokens_per_s", "peer_tokens_per_s"),
    )
