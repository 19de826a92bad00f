"""Which conversations `overflow` serves: ShareGPT's that outgrow the window, or random tokens where there are none.

Not here: a recorded conversation as turns (`ca_jax.replay.scripts`), serving (`bench_overflow`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ca_jax.launch.bench_overflow_schema import OverflowBenchConfig
from ca_jax.launch.bench_scripts import Scripts, recorded_or_random
from ca_jax.pretrained import LoadedModel
from ca_jax.replay.scripts import Exchange, Script, recorded_script
from ca_jax.traces.sharegpt import Turn

_RANDOM_TURNS_PER_WINDOW = 3  # About as in ShareGPT under a window of 1,024 tokens.


def make_overflow_scripts(model: LoadedModel, config: OverflowBenchConfig) -> Scripts:
    """The first conversations of ShareGPT that outgrow the window, cut off before `conversation_tokens`.

    Random tokens of random lengths instead where the data set is not installed or the model has no tokenizer.

    Args:
      model: who answers.
      config: how many of what length.

    Raises:
      BenchError: the data set has too few such conversations.
    """
    return recorded_or_random(
        model,
        config.num_sessions,
        lambda recorded: overflowing_scripts(model, config, recorded),
        lambda rng: _random_script(model, config, rng),
        min_turns=2,
        wanted=f"that outgrow a window of {config.context_window} tokens",
        seed=config.seed,
    )


def overflowing_scripts(
    model: LoadedModel, config: OverflowBenchConfig, conversations: Iterable[Sequence[Turn]]
) -> Iterator[Script]:
    """Scripts of those conversations that outgrow the window within their first turns.

    Turns that were answered are taken, at most `max_turns`, up to the first that would make more than
    `conversation_tokens` or does not fit in a window by itself.

    Args:
      model: whose tokenizer and chat template count.
      config: window, most tokens and turns, and the cap of answers.
      conversations: as recorded.

    Raises:
      ValueError: the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(f"wanted a model with a tokenizer, found {model.name}")
    for turns in conversations:
        texts: list[tuple[str, str]] = []
        for said, answered in itertools.pairwise(turns):
            if (said.role, answered.role) == ("user", "assistant"):
                texts.append((said.text, answered.text))
            if len(texts) == config.max_turns:
                break
        script = _beginning(config, recorded_script(model, model.tokenizer, texts, config.max_answer_tokens))
        if _num_tokens(script) > config.context_window:
            yield script


def _beginning(config: OverflowBenchConfig, script: Script) -> Script:
    """The first turns of a conversation, as far as they are to be served."""
    taken: list[Exchange] = []
    room = config.conversation_tokens
    for turn in script:
        room -= turn.num_tokens
        if room < 0 or turn.num_tokens > config.context_window:
            break
        taken.append(turn)
    return tuple(taken)


def _num_tokens(script: Iterable[Exchange]) -> int:
    return sum(turn.num_tokens for turn in script)


def _random_script(model: LoadedModel, config: OverflowBenchConfig, rng: np.random.Generator) -> Script:
    answer_tokens = config.max_answer_tokens
    most = 2 * config.context_window // _RANDOM_TURNS_PER_WINDOW - answer_tokens
    script: list[Exchange] = []
    while (num_tokens := _num_tokens(script)) <= config.context_window:
        size = min(int(rng.integers(1, most, endpoint=True)), config.conversation_tokens - num_tokens - answer_tokens)
        script.append(Exchange(tuple(rng.integers(model.config.vocab_size, size=size).tolist()), answer_tokens))
    return tuple(script)
