"""What contexts are made of that are served: chunks of texts, and questions behind them.

All chunks have the same number of tokens, and no two are the same, so that samples are of equal work. They are of
questions with retrieved texts, where there is a file of them; else of ShareGPT's conversations; random tokens where
those are not installed, or the model has no tokenizer.

Not here: reading files and conversations (`evaluate.items`, `conversations`), which chunks a turn has (`suites.blend`,
`suites.blend_throughput`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.conversations import is_installed
from benchmarks.evaluate.items import QUESTION_TOKENS, Chunking, RagPrompt, conversation_prompts, prompts_of, read_items
from benchmarks.harness import BenchError
from ca_jax.pretrained import LoadedModel

_MOST_CHUNKS = 1 << 20  # Of one item: all of them.


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
            chunks=tuple(_random_ids(model, rng, chunk_tokens) for _ in range(num_chunks)),
            questions=(_random_ids(model, rng, QUESTION_TOKENS),),
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


def _random_ids(model: LoadedModel, rng: np.random.Generator, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.integers(model.config.vocab_size, size=num_tokens).tolist())
