"""How often a method goes on with a text as `tt` does: the same greedy tokens, the same distribution of the next one.

Not here: reading texts (`ca_jax.launch.texts`), intervals (`benchmarks.evaluate.statistics`).
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from benchmarks.evaluate.comparison import Comparison, Evaluation, MethodRow, check_overflows
from benchmarks.evaluate.statistics import Interval, block_estimate, kl_divergence, log_softmax, wilson_interval
from benchmarks.harness import Checked, ticked
from ca_jax.launch.texts import EvaluationError, read_ids
from ca_jax.pretrained import LoadedModel, Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgreementConfig(Checked):
    """`agreement`: how often a method goes on with a text as `tt` does."""

    comparison: Comparison
    """What is compared."""
    data: str
    """A text, as for `ppl`."""
    max_tokens: int = 8_192
    """Tokens of it, from its beginning."""
    every: int = 256
    """Tokens from one place where methods go on by themselves to the next, a multiple of step_tokens."""
    answer_tokens: int = 16
    """Tokens they go on for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every % self.comparison.step_tokens:
            raise ValueError(
                f"every must be a multiple of step_tokens, {self.comparison.step_tokens}; got {self.every}"
            )
        if self.comparison.baseline is None or len(self.comparison.methods) < 2:
            raise ValueError(
                f"agreement must have tt and a method to hold against it, got {', '.join(self.comparison.by_name)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgreementRow(MethodRow):
    """How one method goes on with a text, against `tt`. Intervals are of 95 %."""

    text: str
    num_places: int
    """Places where it went on by itself."""
    answer_tokens: int
    same_first: float
    """Share of places with the same first token."""
    same_first_interval: Interval
    """Of it, Wilson's."""
    same_answer: float
    """Share of places where all tokens are the same."""
    same_answer_interval: Interval
    """Of it, Wilson's."""
    mean_same_prefix: float
    """Tokens until the first one that differs, mean, as a share of the answer."""
    mean_kl: float
    """Of the next token's distribution: how much `tt`'s diverges from it, KL(tt || method), nats, mean over places."""
    kl_stderr: float | None
    """Of the mean; None of one place."""


@dataclasses.dataclass
class _Found:
    """What one method gave, an entry for each place."""

    answers: list[list[int]] = dataclasses.field(default_factory=list)
    kl: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def run_agreement(model: LoadedModel, config: AgreementConfig, progress: Progress) -> Evaluation:
    """Feeds one text to a context of each method; at places behind the first overflow, copies go on by themselves."""
    comparison, path = config.comparison, Path(config.data)
    streams = comparison.streams(model)
    token_ids = read_ids(model, path, config.max_tokens)
    check_overflows(len(token_ids), window=comparison.window, path=path, max_tokens=config.max_tokens)
    baseline = comparison.baseline
    if baseline is None:
        raise EvaluationError("methods must have a tt to hold the others against, got none")
    found = {name: _Found() for name in streams}
    items = []
    for start in ticked(progress, "agreement", range(0, len(token_ids), config.every)):
        part = token_ids[start : start + config.every]
        logprobs = {}
        for name, stream in streams.items():
            started_s = time.perf_counter()
            stream.extend(part)
            if stream.truncations:
                logprobs[name] = log_softmax(stream.logits())
                found[name].answers.append(stream.fork().generate(config.answer_tokens))
            found[name].seconds += time.perf_counter() - started_s
        if logprobs:  # A window overflows at the same place whatever becomes of its tokens.
            for name, each in logprobs.items():
                found[name].kl.append(kl_divergence(logprobs[baseline], each))
            items.append(
                {
                    "num_fed": start + len(part),
                    "answers": {name: each.answers[-1] for name, each in found.items()},
                    "kl": {name: each.kl[-1] for name, each in found.items() if name != baseline},
                }
            )
    rows = [
        _row(path.name, comparison.setting(name), each, found[baseline], len(streams[name].truncations))
        for name, each in found.items()
        if name != baseline
    ]
    return Evaluation(rows=rows, items=items)


def same_prefix(first: list[int], second: list[int]) -> int:
    """How many tokens two answers begin with alike."""
    return next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))


def _row(text: str, setting: dict[str, Any], each: _Found, base: _Found, num_truncations: int) -> AgreementRow:
    num, length = len(each.answers), len(each.answers[0])
    prefixes = [same_prefix(*pair) for pair in zip(each.answers, base.answers, strict=True)]
    num_first, num_whole = sum(prefix > 0 for prefix in prefixes), sum(prefix == length for prefix in prefixes)
    kl = block_estimate(each.kl, 1)
    return AgreementRow(
        text=text,
        **setting,
        num_places=num,
        answer_tokens=length,
        same_first=num_first / num,
        same_first_interval=wilson_interval(num_first, num),
        same_answer=num_whole / num,
        same_answer_interval=wilson_interval(num_whole, num),
        mean_same_prefix=sum(prefixes) / (num * length),
        mean_kl=kl.mean,
        kl_stderr=kl.stderr,
        num_truncations=num_truncations,
        seconds=each.seconds,
    )
