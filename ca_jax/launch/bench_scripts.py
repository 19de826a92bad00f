"""What conversations that are served are made of: ShareGPT's, or random tokens where they are not to be had.

Not here: a recorded conversation as turns (`ca_jax.replay.scripts`), reading the data set (`traces.sharegpt`), which
conversations `overflow` takes (`bench_overflow_scripts`),
serving (`bench_throughput`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ca_jax.launch.bench_schema import BenchError
from ca_jax.launch.bench_serving_schema import ThroughputBenchConfig
from ca_jax.pretrained import LoadedModel
from ca_jax.replay.scripts import LEAST_ANSWER_TOKENS, Exchange, Script, recorded_script
from ca_jax.traces.sharegpt import Turn, dataset_path, load_sharegpt

_RANDOM_MESSAGE_SHARE = 0.2  # Of a random turn at most, the rest is the answer: about as in ShareGPT.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripts:
    """All conversations."""

    source: str
    """`sharegpt` or `random`."""
    each: tuple[Script, ...]
    """Of as many turns each."""


def make_scripts(model: LoadedModel, config: ThroughputBenchConfig) -> Scripts:
    """The first conversations of ShareGPT that have enough turns and fit in the window, cut off after those turns.

    Random tokens of random lengths instead where the data set is not installed or the model has no tokenizer.

    Args:
      model: who answers.
      config: how many of what length.

    Raises:
      BenchError: the data set has too few such conversations.
    """
    return recorded_or_random(
        model,
        config.concurrent_sessions,
        lambda recorded: fitting_scripts(model, config, recorded),
        lambda rng: _random_script(model, config, rng),
        min_turns=config.num_turns,
        wanted=f"of {config.num_turns} turns that fit in a window of {config.context_window} tokens",
        seed=config.seed,
    )


def recorded_or_random(
    model: LoadedModel,
    num_scripts: int,
    choose: Callable[[Iterable[Sequence[Turn]]], Iterator[Script]],
    make: Callable[[np.random.Generator], Script],
    *,
    min_turns: int,
    wanted: str,
    seed: int,
) -> Scripts:
    """The first conversations of ShareGPT that are chosen; made ones where it is not installed, or not to be tokenised.

    Args:
      model: who answers.
      num_scripts: how many.
      choose: gives the scripts of those recorded conversations that will do.
      make: gives one of random tokens.
      min_turns: of a recorded conversation that is looked at.
      wanted: what they are to be, for the error.
      seed: of random tokens.

    Raises:
      BenchError: the data set has too few such conversations.
    """
    if model.tokenizer is None or not is_installed():
        rng = np.random.default_rng(seed)
        return Scripts(source="random", each=tuple(make(rng) for _ in range(num_scripts)))
    recorded = (conversation.turns for conversation in load_sharegpt(min_turns=min_turns))
    found = tuple(itertools.islice(choose(recorded), num_scripts))
    if len(found) < num_scripts:
        raise BenchError(f"wanted {num_scripts} conversations {wanted}, found {len(found)} in ShareGPT")
    return Scripts(source="sharegpt", each=found)


def fitting_scripts(
    model: LoadedModel, config: ThroughputBenchConfig, conversations: Iterable[Sequence[Turn]]
) -> Iterator[Script]:
    """Scripts of those conversations that have enough turns that were answered, and stay within the window.

    Args:
      model: whose tokenizer and chat template count.
      config: turns, the cap of answers, and the window.
      conversations: as recorded.

    Raises:
      ValueError: the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(f"wanted a model with a tokenizer, found {model.name}")
    for turns in conversations:
        pairs = [pair for pair in itertools.pairwise(turns) if (pair[0].role, pair[1].role) == ("user", "assistant")]
        texts = [(said.text, answered.text) for said, answered in pairs[: config.num_turns]]
        script = recorded_script(model, model.tokenizer, texts, config.answer_tokens)
        if len(script) == config.num_turns and sum(turn.num_tokens for turn in script) < config.context_window:
            yield script


def _random_script(model: LoadedModel, config: ThroughputBenchConfig, rng: np.random.Generator) -> Script:
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


def is_installed() -> bool:
    """Whether ShareGPT is there."""
    try:
        dataset_path()
    except FileNotFoundError:
        return False
    return True
