"""From answers to rows: accuracy of each method, and how it differs from that of `tt` on the same questions.

Not here: asking (longeval, mmlu), the statistics themselves (statistics).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from ca_jax.evaluation.comparison import Comparison
from ca_jax.evaluation.schema import AccuracyRow
from ca_jax.evaluation.statistics import mcnemar_p, paired_interval, wilson_interval


@dataclasses.dataclass(kw_only=True)
class Answers:
    """What one method answered, an entry for each question in the order they were asked."""

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
            interval = paired_interval([int(ours) - int(theirs) for ours, theirs in pairs], clusters)
            p = mcnemar_p(pairs.count((True, False)), pairs.count((False, True)))
            same = sum(map(str.__eq__, each.given, base.given)) / num
        rows.append(
            AccuracyRow(
                data=data,
                **comparison.setting(name),
                num_items=num,
                num_right=num_right,
                accuracy=num_right / num,
                interval=wilson_interval(num_right, num),
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
