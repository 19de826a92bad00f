"""The conversations that suites serve, ShareGPT's or random tokens where it is not installed, and the loop that serves.

Not here: a recorded conversation as turns (`benchmarks.replay.workload`), reading the data set,
which conversations a suite takes (`suites.throughput`, `suites.overflow`).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from benchmarks.engines import answer_of
from benchmarks.harness import BenchError
from benchmarks.replay.workload import Script
from ca_jax.engine import Engine
from ca_jax.pretrained import LoadedModel
from ca_jax.session import Job
from ca_jax.simulate.traces.sharegpt import Conversation, dataset_path, load_sharegpt
from ca_jax.turns.requests import Usage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripts:
    """All conversations."""

    source: str
    """`sharegpt` or `random`."""
    each: tuple[Script, ...]
    """What is said, and how long answers are."""


def recorded_or_random(
    model: LoadedModel,
    num_scripts: int,
    choose: Callable[[Iterable[Conversation]], Iterator[Script]],
    make: Callable[[np.random.Generator], Script],
    *,
    min_turns: int,
    wanted: str,
    seed: int,
) -> Scripts:
    """The first conversations of ShareGPT that are chosen; made ones without the data set, or without a tokenizer.

    `choose` gives the scripts of those recorded conversations, of at least `min_turns`, that will do. Too few are a
    BenchError, which says what is `wanted`; so many that `make` makes are of random tokens.
    """
    if model.tokenizer is None or not is_installed():
        rng = np.random.default_rng(seed)
        return Scripts(source="random", each=tuple(make(rng) for _ in range(num_scripts)))
    recorded = (each for each in load_sharegpt() if len(each.user_texts) >= min_turns)
    found = tuple(itertools.islice(choose(recorded), num_scripts))
    if len(found) < num_scripts:
        raise BenchError(f"ShareGPT must have {num_scripts} conversations {wanted}, got {len(found)}")
    return Scripts(source="sharegpt", each=found)


def is_installed() -> bool:
    """Whether ShareGPT is there."""
    try:
        dataset_path()
    except FileNotFoundError:
        return False
    return True


# Serving.


@dataclasses.dataclass(frozen=True)
class ServedTurn:
    """One turn that has ended."""

    history_tokens: int
    """Of the conversation before it."""
    answer_ids: tuple[int, ...]
    usage: Usage
    compiles: int = 0
    """Functions compiled while it was measured, if that was asked; 0, or its TTFT is of no use."""


@dataclasses.dataclass(frozen=True)
class ServedRound:
    """All conversations, served once."""

    elapsed_s: float
    """From the first message sent to the last answer ended."""
    conversations: tuple[tuple[ServedTurn, ...], ...]

    @property
    def turns(self) -> list[ServedTurn]:
        """Of all conversations, one behind the other."""
        return list(itertools.chain.from_iterable(self.conversations))


def serve(engine: Engine, scripts: Sequence[Script]) -> ServedRound:
    """Serves conversations to their end in a closed loop, each in a session of its own that is forgotten then.

    Each sends its next message as soon as its answer has ended; one thread drives all by the engine's steps, which is
    idle before and afterwards. What broke a turn is raised.
    """
    sessions = [engine.session() for _ in scripts]
    to_come = [iter(script) for script in scripts]
    turns: list[list[ServedTurn]] = [[] for _ in scripts]
    history_tokens = [0] * len(scripts)
    running: dict[int, Job] = {}

    def send(indices: Iterable[int]) -> None:
        for index in indices:
            if (exchange := next(to_come[index], None)) is not None:
                history_tokens[index] = len(sessions[index].token_ids)
                params = answer_of(exchange.answer_tokens)
                running[index] = sessions[index].submit(exchange.message, sampling=params)

    started_s = time.perf_counter()
    send(range(len(scripts)))
    while running:
        engine.step()
        ended = [index for index, job in running.items() if job.done]
        for index in ended:
            job = running.pop(index)
            if job.error is not None:
                raise job.error
            turns[index].append(ServedTurn(history_tokens[index], tuple(job.output_ids), job.usage()))
        send(ended)
    elapsed_s = time.perf_counter() - started_s
    engine.wait_for_saves()
    for session in sessions:
        session.close()
    return ServedRound(elapsed_s, tuple(map(tuple, turns)))
