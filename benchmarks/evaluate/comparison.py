"""Ways to overflow that are compared: on one model, under one window, fed the same tokens in the same steps.

And the rows of each; for tasks that ask questions with accuracy and its difference from that of `tt`.

Not here: asking (perplexity, longeval, mmlu, agreement), rows of chunks (rag, rag_deviation, timing), what happens at
an overflow (stream).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evaluate.statistics import Interval, mcnemar_p, mean_interval, share_interval
from benchmarks.evaluate.stream import ContextStream
from ca_jax.launch.texts import EvaluationError
from ca_jax.overflow.config import OverflowConfig, num_leaving, oldest_first
from ca_jax.pretrained import LoadedModel

_REPAIR = {"deviating": "repair", "spread": "spread repair"}  # In names.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared.

    Raises:
      ValueError: no methods, the same one twice, sizes that do not fit; the message says what was wanted.
    """

    methods: tuple[OverflowConfig, ...]
    """Ways to overflow. The first `tt` is what the others are held against."""
    window: int = 1024
    """Most tokens of a context."""
    step_tokens: int = 128
    """Tokens that are fed at once; a context overflows between steps."""

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("methods must be at least one, got none")
        names = [name_of(overflow) for overflow in self.methods]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"methods must differ, got {twice!r} more than once")
        if not 0 < self.step_tokens <= self.window:
            raise ValueError(
                f"step_tokens must be in (0, window], got step_tokens={self.step_tokens} and window={self.window}"
            )
        for overflow in self.methods:
            overflow.check_window(self.window)
            if overflow.keep_first_tokens + self.step_tokens > self.window:
                raise ValueError(
                    f"keep_first_tokens + step_tokens must be at most the window of {self.window}, got "
                    f"{overflow.keep_first_tokens} and {self.step_tokens}"
                )

    @property
    def by_name(self) -> dict[str, OverflowConfig]:
        """The methods by their names."""
        return {name_of(overflow): overflow for overflow in self.methods}

    @property
    def baseline(self) -> str | None:
        """The name of the method that others are held against; None where no method is `tt`."""
        return next((name_of(overflow) for overflow in self.methods if overflow.method == "tt"), None)

    def check_bound(self, max_loss: float | None) -> None:
        """Refuses (ValueError) a bound that nothing can be held against."""
        if max_loss is not None and (not max_loss > 0 or self.baseline is None):
            raise ValueError(f"max_loss must be above 0, beside a method tt; got {max_loss} and {list(self.by_name)}")

    def streams(self, model: LoadedModel) -> dict[str, ContextStream]:
        """An empty context for each method, by its name.

        Raises:
          EvaluationError: the window is above the model's, or a drift is not the model's.
        """
        try:
            return {
                name: ContextStream(model, overflow, window=self.window, step_tokens=self.step_tokens)
                for name, overflow in self.by_name.items()
            }
        except (OSError, ValueError) as error:
            raise EvaluationError(str(error)) from error

    def setting(self, name: str) -> dict[str, Any]:
        """What a method's row says of it, by the names of the row's fields."""
        overflow = self.by_name[name]
        recomputes, is_ca = overflow.recomputes, overflow.method == "ca"  # The others have no use for what follows.
        return {
            "name": name,
            "method": overflow.method,
            "window": self.window,
            "truncation_ratio": overflow.truncation_ratio,
            "keep_first_tokens": overflow.keep_first_tokens,
            "anchor_tokens": overflow.anchor_tokens if recomputes else 0,
            "repair_ratio": overflow.repair_ratio if recomputes else 0.0,
            "repair": overflow.repair if recomputes and overflow.repair_ratio else None,
            "drift": overflow.drift if is_ca else None,
            "discarder": overflow.token_discarder.name,
        }

    def surviving(self, num_tokens: int) -> np.ndarray:
        """Which tokens are left in every context, and were there before its last overflow, if the oldest leave.

        Bool `[num_tokens]`, of so many that are fed at once; none where nothing overflows.
        """
        common = np.ones(num_tokens, bool)
        for overflow in self.methods:
            common &= _surviving(overflow, self.window, self.step_tokens, num_tokens)
        return common


def name_of(overflow: OverflowConfig) -> str:
    """A way to overflow in words, "ca, keep 4, anchor 16"; half the window is dropped, the oldest, where not said."""
    parts = [overflow.method]
    if overflow.truncation_ratio != 0.5:
        parts.append(f"drop {overflow.truncation_ratio:.4g}")
    if overflow.token_discarder.name != "oldest":
        parts.append(overflow.token_discarder.name)
    if overflow.keep_first_tokens:
        parts.append(f"keep {overflow.keep_first_tokens}")
    if overflow.anchor_tokens and overflow.recomputes:
        parts.append(f"anchor {overflow.anchor_tokens}")
    if overflow.repair_ratio and overflow.recomputes:
        parts.append(f"{_REPAIR[overflow.repair]} {100 * overflow.repair_ratio:.4g}%")
    if overflow.drift is not None and overflow.method == "ca":
        parts.append("drift")
    return ", ".join(parts)


def _surviving(overflow: OverflowConfig, window: int, step_tokens: int, num_tokens: int) -> np.ndarray:
    left, before = np.zeros(0, np.int64), 0
    for start in range(0, num_tokens, step_tokens):
        step = np.arange(start, min(start + step_tokens, num_tokens))
        count = num_leaving(overflow, window=window, num_tokens=len(left), num_wanted=len(step))
        if count:
            left, before = left[~oldest_first(len(left), count, overflow.keep_first_tokens)], start
        left = np.concatenate([left, step])
    mask = np.zeros(num_tokens, bool)
    mask[left[left < before]] = True
    return mask


# Rows.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a task gives."""

    rows: Sequence[Any]
    """Dataclasses, whose fields are the JSON's: one for each method, ratio or layer, in their order."""
    items: Sequence[dict[str, Any]]
    """Of each question or place, by method; JSON types. None of `ppl`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodRow:
    """What every row says: which method it is of, with fields of its `OverflowConfig`, and what that took."""

    name: str
    """The method with its settings, see `name_of`."""
    method: str
    """One of `METHODS`."""
    window: int
    truncation_ratio: float
    keep_first_tokens: int
    anchor_tokens: int
    repair_ratio: float
    repair: str | None
    """See `OverflowConfig`; None where no share is repaired."""
    drift: str | None
    discarder: str
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
    num_right: int
    accuracy: float
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
    passes: bool | None
    """Whether it keeps the bound, at the lower end of the difference's interval; None where there is no bound."""


@dataclasses.dataclass(kw_only=True)
class Answers:
    """The answers of one method, an entry for each question in the order they were asked."""

    given: list[str] = dataclasses.field(default_factory=list)
    is_right: list[bool] = dataclasses.field(default_factory=list)
    """Whether they are what was expected."""
    num_truncations: list[int] = dataclasses.field(default_factory=list)
    """Overflows before the question."""
    seconds: float = 0.0

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
    max_loss: float | None = None,
) -> list[AccuracyRow]:
    """A row for each method; `clusters` are the records that the questions are on.

    Args:
      max_loss: most by which an accuracy may be below that of `tt`; None: there is no bound.
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
                passes=None if max_loss is None or interval is None else interval[0] >= -max_loss,
                num_truncations=sum(each.num_truncations) / num,
                seconds=each.seconds,
            )
        )
    return rows


def check_overflows(num_tokens: int, *, window: int, path: Path, max_tokens: int) -> None:
    """Refuses (EvaluationError) a text that is too short to overflow the window, or asked for in too small a part."""
    if num_tokens > window:
        return
    if max_tokens <= window:
        raise EvaluationError(f"max_tokens must be above the window of {window} to overflow it, got {max_tokens}")
    raise EvaluationError(
        f"a text must have at least {window + 1} tokens to overflow a window of {window}, got {num_tokens} in {path}"
    )
