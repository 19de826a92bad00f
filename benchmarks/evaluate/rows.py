"""What a task gives: rows of methods, and for tasks that ask questions accuracy and its difference from that of `tt`.

Not here: asking (perplexity, longeval, mmlu, agreement), rows of chunks (rag, rag_deviation, rag_gate, timing).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from benchmarks.evaluate.comparison import Comparison
from benchmarks.evaluate.statistics import Interval, mcnemar_p, mean_interval, share_interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a task gives."""

    rows: Sequence[Any]
    """Dataclasses, whose fields are the JSON's: one for each method, ratio or layer, in their order."""
    items: Sequence[dict[str, Any]]
    """Of each question or place, by method; JSON types. None of `ppl`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodRow:
    """What every row says: which method it is of, and what that took."""

    name: str
    """The method with its settings, see `name_of`."""
    method: str
    """One of `METHODS`."""
    window: int
    """Most tokens of the context."""
    truncation_ratio: float
    """See `OverflowConfig`."""
    keep_first_tokens: int
    """See `OverflowConfig`."""
    anchor_tokens: int
    """See `OverflowConfig`."""
    repair_ratio: float
    """See `OverflowConfig`."""
    repair: str | None
    """See `OverflowConfig`; None where no share is repaired."""
    drift: str | None
    """See `OverflowConfig`."""
    discarder: str
    """Its name, see `OverflowConfig`."""
    num_truncations: float
    """Overflows; where questions are asked, before one of them, mean."""
    seconds: float
    """That it took, compilation included."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccuracyRow(MethodRow):
    """One method on one benchmark. Intervals are of 95 %."""

    data: str
    """Name of the file or directory."""
    num_items: int
    """Questions."""
    num_right: int
    """Of them answered rightly."""
    accuracy: float
    """Share of right answers."""
    interval: Interval
    """Of the accuracy, see `share_interval`: the bootstrap over records, where several questions are on one."""
    difference_to_tt: float | None
    """The accuracy less that of `tt`; None without one, and of itself. So are the others below."""
    difference_interval: Interval | None
    """Of the difference, by the paired bootstrap over records."""
    mcnemar_p: float | None
    """How likely a difference as large as this is by chance, two-sided."""
    same_answers: float | None
    """Share of questions with the same answer as `tt`'s, right or wrong."""
    logprob_difference: float | None
    """`mmlu`: mean of how far the log probabilities of A, B, C and D are from those of `tt`, nats."""


@dataclasses.dataclass(kw_only=True)
class Answers:
    """The answers of one method, an entry for each question in the order they were asked."""

    given: list[str] = dataclasses.field(default_factory=list)
    """As text."""
    is_right: list[bool] = dataclasses.field(default_factory=list)
    """Whether they are what was expected."""
    num_truncations: list[int] = dataclasses.field(default_factory=list)
    """Overflows before the question."""
    seconds: float = 0.0
    """That all took."""

    def add(self, given: str, is_right: bool, num_truncations: int) -> None:
        """One more."""
        self.given.append(given)
        self.is_right.append(is_right)
        self.num_truncations.append(num_truncations)


def accuracy_rows(
    data: str,
    comparison: Comparison,
    answers: Mapping[str, Answers],
    clusters: Sequence[Hashable],
    *,
    logprob_differences: Mapping[str, float] | None = None,
) -> list[AccuracyRow]:
    """A row for each method.

    Args:
      data: name of the benchmark.
      comparison: what was compared.
      answers: of each method, by its name.
      clusters: the record that each question is on.
      logprob_differences: by method, where they are known; see `AccuracyRow`.
    """
    base = None if comparison.baseline is None else answers[comparison.baseline]
    rows = []
    for name, each in answers.items():
        num, num_right = len(each.given), sum(each.is_right)
        difference = interval = p = same = None
        if base is not None and each is not base:
            pairs = list(zip(each.is_right, base.is_right, strict=True))
            difference = (num_right - sum(base.is_right)) / num
            interval = mean_interval([int(ours) - int(theirs) for ours, theirs in pairs], clusters)
            p = mcnemar_p(pairs.count((True, False)), pairs.count((False, True)))
            same = sum(map(str.__eq__, each.given, base.given)) / num
        rows.append(
            AccuracyRow(
                data=data,
                **comparison.setting(name),
                num_items=num,
                num_right=num_right,
                accuracy=num_right / num,
                interval=share_interval(each.is_right, clusters),
                difference_to_tt=difference,
                difference_interval=interval,
                mcnemar_p=p,
                same_answers=same,
                logprob_difference=(logprob_differences or {}).get(name),
                num_truncations=sum(each.num_truncations) / num,
                seconds=each.seconds,
            )
        )
    return rows


def check_positive(config: Any, names: Sequence[str]) -> None:
    """Raises ValueError where a field of a config, if it is given, is below 1."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
