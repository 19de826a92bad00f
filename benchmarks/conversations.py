"""What suites serve: conversations, and questions behind chunks of texts; and the loop that serves conversations.

They are ShareGPT's, or of questions with retrieved texts where there is a file of them; of random tokens where the data
set is not installed, or the model has no tokenizer. All chunks have the same number of tokens, and no two are the same,
so that samples are of equal work.

Not here: a recorded conversation as turns (`benchmarks.replay.workload`), reading files (`evaluate.items`), which
conversations or chunks a suite takes (`suites`).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.engines import answer_of, random_ids
from benchmarks.evaluate.items import QUESTION_TOKENS, Chunking, RagPrompt, conversation_prompts, prompts_of, read_items
from benchmarks.harness import BenchError
from benchmarks.replay.workload import Script
from ca_jax.engine import Engine
from ca_jax.pretrained import LoadedModel
from ca_jax.session import Job
from ca_jax.simulate.traces.sharegpt import Conversation, dataset_path, load_sharegpt
from ca_jax.turns.requests import Usage

_MOST_CHUNKS = 1 << 20  # Of one item: all of them.


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


# Contexts of chunks.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contexts:
    """Chunks, and questions to be asked behind any of them."""

    source: str
    """`data`, `sharegpt` or `random`."""
    chunks: tuple[tuple[int, ...], ...]
    """Token ids, all of one length and no two the same; those that were found together are side by side."""
    questions: tuple[tuple[int, ...], ...]
    """Token ids, at least one question."""


def make_contexts(model: LoadedModel, num_chunks: int, chunk_tokens: int, *, data: str | None, seed: int) -> Contexts:
    """So many chunks of so many tokens, the first that are to be had: each is the first tokens of a longer text.

    `data` is a file or folder of questions behind texts; None: conversations. Too few texts are a BenchError.
    """
    if data is not None:
        chunking = Chunking(data=data, num_chunks=_MOST_CHUNKS, chunk_tokens=chunk_tokens)
        prompts = prompts_of(model, read_items(Path(data).expanduser()), chunking)
        return _first("data", prompts, num_chunks, chunk_tokens)
    if model.tokenizer is None or not is_installed():
        rng = np.random.default_rng(seed)
        return Contexts(
            source="random",
            chunks=tuple(tuple(random_ids(rng, model, chunk_tokens)) for _ in range(num_chunks)),
            questions=(tuple(random_ids(rng, model, QUESTION_TOKENS)),),
        )
    made = conversation_prompts(model, Chunking(num_chunks=1, chunk_tokens=chunk_tokens, max_items=2 * num_chunks))
    return _first("sharegpt", made, num_chunks, chunk_tokens)  # Some begin alike.


def _first(source: str, prompts: Iterable[RagPrompt], num_chunks: int, chunk_tokens: int) -> Contexts:
    chunks: dict[tuple[int, ...], None] = {}
    questions: dict[tuple[int, ...], None] = {}
    for prompt in prompts:
        whole = [chunk for chunk in prompt.chunks if len(chunk) == chunk_tokens]
        chunks.update(dict.fromkeys(whole))
        if whole:
            questions[prompt.question_ids] = None
        if len(chunks) >= num_chunks:
            return Contexts(
                source=source, chunks=tuple(itertools.islice(chunks, num_chunks)), questions=tuple(questions)
            )
    raise BenchError(f"texts must have {num_chunks} chunks of {chunk_tokens} tokens, got {len(chunks)}")


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

    Each sends its next message as soon as its answer has ended; one thread drives all by the engine's steps. The engine
    is idle before and afterwards. What broke a turn is raised.
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
