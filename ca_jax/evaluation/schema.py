"""What evaluations are asked and what they answer: a config and a row for each task; their fields are the JSON's.

Not here: measuring (perplexity, longeval, mmlu, agreement), what is compared (comparison), prompts made of chunks
(rag_schema, rag_rows).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ca_jax.evaluation.comparison import Comparison
from ca_jax.evaluation.rag_rows import AttentionRow, CorrelationRow, DistributionRow, GateRow, RagRow, TimedRow
from ca_jax.evaluation.rag_schema import GateConfig, RagConfig
from ca_jax.evaluation.statistics import Interval

LONGEVAL_FORMS = ("continue", "chat")
"""How `longeval` asks. `continue`: what is asked for is begun again behind the record, and the model goes on with it
to the end of the line; that is what a small model can do. `chat`: as LongEval does, to be answered in own words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerplexityConfig:
    """`ppl`: how well a model predicts one long text.

    Raises:
      ValueError: fewer than two tokens.
    """

    comparison: Comparison
    """What is compared."""
    data: str
    """A .txt file, or a .jsonl file whose rows have `text`."""
    max_tokens: int = 16_384
    """Tokens of it, from its beginning."""

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2, one to predict behind the other; got {self.max_tokens}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongevalConfig:
    """`longeval`: asking for what stood in a record that has overflowed the window.

    Raises:
      ValueError: a number below 1.
    """

    comparison: Comparison
    """What is compared."""
    data: str
    """A .jsonl file of LongEval: lines or topics."""
    num_lines: int | None = None
    """Lines of a record, or earlier conversations and the one asked for; None: just as many as overflow the window."""
    asked_depth: int = 256
    """Most tokens between what is asked for and the end of the record, its own included."""
    questions_per_record: int = 4
    """Lines asked for of one record, each for itself; of topics it is one."""
    max_items: int | None = None
    """Most questions; None: those of all records."""
    max_tokens: int | None = None
    """Tokens of all records together, from which on no more are fed; None: all records."""
    form: str = "continue"
    """How it is asked, one of `LONGEVAL_FORMS`."""
    answer_tokens: int | None = None
    """Most tokens of an answer; None: 12 of one that goes on, 32 of one in chat."""
    seed: int = 0
    """Of which lines are in a record, and which are asked for."""

    def __post_init__(self) -> None:
        if self.form not in LONGEVAL_FORMS:
            raise ValueError(f"form must be one of {', '.join(LONGEVAL_FORMS)}, got {self.form!r}")
        _check_positive(
            self, ("num_lines", "asked_depth", "questions_per_record", "max_items", "max_tokens", "answer_tokens")
        )

    @property
    def max_answer_tokens(self) -> int:
        """Most tokens of an answer."""
        if self.answer_tokens is not None:
            return self.answer_tokens
        return 12 if self.form == "continue" else 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class MmluConfig:
    """`mmlu`: multiple-choice questions behind a long text that has overflowed the window.

    Raises:
      ValueError: a number out of range.
    """

    comparison: Comparison
    """What is compared."""
    data: str
    """A directory of *_dev.csv files."""
    preamble: str | None = None
    """The long text, as for `ppl`; None: the first wikitext*.txt beside the directory."""
    max_tokens: int | None = None
    """Tokens of the preamble; None: twice the window and a step."""
    num_shots: int = 2
    """Other questions of the same subject that stand, with their answers, before each question."""
    max_items: int | None = None
    """Most questions, drawn from all; None: all."""
    seed: int = 0
    """Of which questions are drawn."""

    def __post_init__(self) -> None:
        _check_positive(self, ("max_tokens", "max_items"))
        if self.num_shots < 0:
            raise ValueError(f"num_shots must be at least 0, got {self.num_shots}")

    @property
    def preamble_tokens(self) -> int:
        """Tokens of the preamble."""
        if self.max_tokens is not None:
            return self.max_tokens
        return 2 * self.comparison.window + self.comparison.step_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgreementConfig:
    """`agreement`: how often a method goes on with a text as `tt` does.

    Raises:
      ValueError: no `tt` to agree with, or a number out of range.
    """

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
        _check_positive(self, ("max_tokens", "every", "answer_tokens"))
        if self.every % self.comparison.step_tokens:
            raise ValueError(
                f"every must be a multiple of step_tokens, {self.comparison.step_tokens}; got {self.every}"
            )
        if self.comparison.baseline is None or len(self.comparison.methods) < 2:
            raise ValueError(
                f"agreement must have tt and a method to hold against it, got {', '.join(self.comparison.by_name)}"
            )


TaskConfig = PerplexityConfig | LongevalConfig | MmluConfig | AgreementConfig | RagConfig | GateConfig
"""What a task is asked by."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurveBin:
    """Loss of tokens at one distance from a truncation, over all of them."""

    offset: int
    """First position of the bin, in tokens behind the truncation; negative before it."""
    loss: float
    """Mean, nats."""
    loss_stderr: float | None
    """Of the mean, over truncations; None of one."""
    gap: float | None
    """Mean loss less that of `tt` at the same tokens; None without one."""
    gap_stderr: float | None
    """Of the gap, likewise."""


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
class PerplexityRow(MethodRow):
    """One method over one text. Errors are over blocks of step_tokens, see `block_estimate`."""

    text: str
    """Name of the file."""
    perplexity: float
    """Of all tokens but the first."""
    perplexity_after_overflow: float | None
    """Of the tokens fed after the first overflow; None where nothing overflowed."""
    stderr: float | None
    """Of `perplexity_after_overflow`, of `perplexity` where that is None; None of fewer than two blocks."""
    gap_to_tt: float | None
    """How far the perplexity is above that of `tt` on the same tokens, a share of it: `ratio_to_tt` - 1; of those after
    the first overflow if any. None without `tt`."""
    gap_stderr: float | None
    """Of the gap, from paired differences; None likewise."""
    ratio_to_tt: float | None
    """The perplexity over that of `tt`."""
    tokens: int
    """Fed."""
    mean_kept_tokens: float | None
    """Tokens that stayed at an overflow, mean; None where there was none."""
    recomputed_tokens: float
    """Tokens computed anew at all overflows together; in some layers only, times their share of the layers."""
    tokens_per_s: float
    """Tokens over them."""
    curve: Sequence[CurveBin]
    """Loss around truncations; none without."""


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
    """Of the accuracy, Wilson's; it takes questions for independent."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgreementRow(MethodRow):
    """How one method goes on with a text, against `tt`. Intervals are of 95 %."""

    text: str
    """Name of the file."""
    num_places: int
    """Places where it went on by itself."""
    answer_tokens: int
    """Tokens it went on for."""
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


Row = (
    PerplexityRow
    | AccuracyRow
    | AgreementRow
    | RagRow
    | GateRow
    | AttentionRow
    | DistributionRow
    | CorrelationRow
    | TimedRow
)
"""What a task answers: one a method, ratio or layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a task leaves."""

    rows: Sequence[Row]
    """One for each method, in their order."""
    items: Sequence[dict[str, Any]]
    """What each question or place gave, by method; JSON types. None of `ppl`."""


def _check_positive(config: Any, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
