"""Turns a minute of a continuous batch of conversations, with stored KV and with none.

Two engines of one process serve the same conversations, round for round; each round begins with the other one. Both
are warmed up, and serve everybody's first turn for nothing. A conversation's first turn has nothing to load in either:
it counts in both, and dilutes the speed-up rather than being one.

Not here: serving (`conversations`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks import conversations, harness
from benchmarks.conversations import ServedRound
from benchmarks.engines import make_engine, sized_config
from benchmarks.harness import Row, Run, Sample
from benchmarks.recording import Recorder
from benchmarks.replay.workload import LEAST_ANSWER_TOKENS, Exchange, Script, num_tokens, recorded_script
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.pretrained import LoadedModel
from ca_jax.simulate.traces.sharegpt import Conversation

MODES = ("store", "recompute")
"""How conversations are served: KV of earlier turns is loaded, or all of a conversation is prefilled at every turn."""

_LEAST_TURN_TOKENS = 8
_RANDOM_MESSAGE_SHARE = 0.2  # Of a random turn at most, the rest is the answer: about as in ShareGPT.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputConfig(harness.ServingConfig):
    """Conversations that are served together, by an engine with a store and by one without."""

    concurrent_sessions: int = 8
    """Conversations that go on together; each sends its next message as soon as its answer has ended."""
    num_turns: int = 8
    """Turns of each conversation."""
    answer_tokens: int = 64
    """Most tokens generated for an answer. Each has as many as were recorded, up to this; the rest of a longer one is
    prefilled with the next message."""
    context_window: int = 2048
    """Most tokens of a conversation; longer ones are not taken."""
    repeats: int = 3
    """Samples that a median is of."""

    def __post_init__(self) -> None:
        super().__post_init__()
        harness.require(
            self.answer_tokens >= 2, "answer_tokens", "at least 2, to have a time between them", self.answer_tokens
        )
        room = f"room for {self.num_turns} turns of at least {_LEAST_TURN_TOKENS} tokens"
        harness.require(self.turn_tokens >= _LEAST_TURN_TOKENS, "context_window", room, self.context_window)

    @property
    def turn_tokens(self) -> int:
        """Tokens of a turn, answer included, where all are alike and fill the window."""
        return (self.context_window - 1) // self.num_turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputRow(Row):
    """All conversations served in one way; numbers are of a round, medians of the rounds'."""

    mode: str
    """One of `MODES`."""
    concurrent_sessions: int
    turns: int
    turns_per_minute: float
    """Completed, from the first message sent to the last answer ended."""
    prompt_tokens: int
    """Of all turns, history and new ones."""
    prefill_tokens: int
    """Of those, computed."""
    hit_share: float
    """Of the history tokens of all turns, those whose KV was loaded. Each answer's last token never is: nothing was
    computed from it."""
    ttft_p50_s: float
    """From sending to the first token, median of the turns."""
    ttft_p99_s: float
    """Of a hundred turns one waits longer."""
    tpot_p50_s: float
    """Between two tokens of an answer, median of all such times."""
    tpot_p99_s: float
    """Of a hundred such times one is longer."""


def make_scripts(model: LoadedModel, config: ThroughputConfig) -> conversations.Scripts:
    """The first conversations of ShareGPT that have enough turns and fit in the window, cut off after those turns."""
    return conversations.recorded_or_random(
        model,
        config.concurrent_sessions,
        partial(fitting_scripts, model, config),
        partial(_random_script, model, config),
        min_turns=config.num_turns,
        wanted=f"of {config.num_turns} turns that fit in a window of {config.context_window} tokens",
        seed=config.seed,
    )


def fitting_scripts(model: LoadedModel, config: ThroughputConfig, recorded: Iterable[Conversation]) -> Iterator[Script]:
    """Scripts of those conversations that have enough turns that were answered, and stay within the window."""
    for each in recorded:
        script = recorded_script(model, each.exchanges[: config.num_turns], config.answer_tokens)
        if len(script) == config.num_turns and num_tokens(script) < config.context_window:
            yield script


def _random_script(model: LoadedModel, config: ThroughputConfig, rng: np.random.Generator) -> Script:
    most_message_tokens = max(int(_RANDOM_MESSAGE_SHARE * config.turn_tokens), 1)
    script, rest = [], 0
    for _ in range(config.num_turns):
        message_tokens = int(rng.integers(1, most_message_tokens, endpoint=True))
        answer_tokens = int(rng.integers(LEAST_ANSWER_TOKENS, config.turn_tokens - most_message_tokens, endpoint=True))
        num_generated = min(answer_tokens, config.answer_tokens)
        ids = rng.integers(model.config.vocab_size, size=rest + message_tokens).tolist()
        script.append(Exchange(tuple(ids), num_generated))
        rest = answer_tokens - num_generated
    return tuple(script)


@harness.suite(ThroughputConfig, summary=lambda _: {}, is_recorded=True)
def throughput(run: Run[ThroughputConfig]) -> Iterator[ThroughputRow]:
    """Turns a minute of a continuous batch of conversations, with stored KV and with none."""
    config, model, recorder = run.config, run.model, run.recorder or Recorder()
    scripts = make_scripts(model, config)
    sized = dataclasses.replace(config.engine, context_window=config.context_window)
    num_blocks = config.concurrent_sessions * kv_layout(model, sized).num_blocks(config.context_window)
    with contextlib.ExitStack() as stack:
        engines = {}
        for mode in MODES:
            own = sized_config(sized, model, num_blocks if mode == "store" else 0)
            engine = make_engine(model, own, timeline=recorder.timeline)
            engines[mode] = stack.enter_context(engine)
            engine.warmup(progress=run.progress)
        for engine in engines.values():
            conversations.serve(engine, [script[:1] for script in scripts.each])
        ways = {mode: partial(_sample, engine, scripts.each) for mode, engine in engines.items()}
        rounds = run.rounds(lambda: ways, warm_up=0)  # All is compiled by then.
        if recorder.is_wanted:
            with recorder.round():
                for mode, engine in engines.items():
                    with recorder.turn(f"all turns, {mode}"):
                        conversations.serve(engine, scripts.each)
    run.facts.update(_facts(rounds), conversations=scripts.source)
    num_turns = config.concurrent_sessions * config.num_turns
    for mode in MODES:
        taken = harness.of_way(rounds, mode)
        sessions = config.concurrent_sessions
        yield harness.make_row(ThroughputRow, taken, mode=mode, concurrent_sessions=sessions, turns=num_turns)


def _sample(engine: Engine, scripts: Sequence[Script]) -> Sample:
    served = conversations.serve(engine, scripts)
    return {**measure(served), "answers": [turn.answer_ids for turn in served.turns]}


def _facts(rounds: harness.Rounds) -> dict[str, Any]:
    """Ratios of the two are the median of the rounds' own; answers are compared turn by turn."""
    store, recompute = (harness.of_way(rounds, mode) for mode in MODES)
    pairs = list(zip(store, recompute, strict=True))
    same = [a == b for one, other in pairs for a, b in zip(one["answers"], other["answers"], strict=True)]
    return {
        "speedup": float(np.median([one["turns_per_minute"] / other["turns_per_minute"] for one, other in pairs])),
        "tpot_p99_ratio": float(np.median([one["tpot_p99_s"] / other["tpot_p99_s"] for one, other in pairs])),
        "same_tokens": all(same),
        "same_answer_share": sum(same) / len(same),
        "recompiles": harness.recompiles(rounds),
    }


def measure(served: ServedRound) -> dict[str, float]:
    """What a row says of a round: the fields of `ThroughputRow` that are medians. Answers have two tokens or more."""
    usages = [turn.usage for turn in served.turns]
    tpot_s = np.concatenate([np.diff(usage.token_times_s) for usage in usages])
    history_tokens = sum(turn.history_tokens for turn in served.turns)
    hit_tokens = sum(min(turn.usage.num_cached_tokens, turn.history_tokens) for turn in served.turns)
    return {
        "turns_per_minute": 60 * len(usages) / served.elapsed_s,
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "prefill_tokens": sum(usage.new_tokens for usage in usages),
        "hit_share": hit_tokens / max(history_tokens, 1),
        **harness.percentiles("ttft_p{}_s", [usage.ttft_s for usage in usages], 50, 99),
        **harness.percentiles("tpot_p{}_s", tpot_s, 50, 99),
    }
