"""Perplexity over one long stream of text, and loss around each truncation.

Not here: reading texts (`ca_jax.launch.texts`), errors of means (`benchmarks.evaluate.statistics`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evaluate.comparison import Comparison, Evaluation, MethodRow, check_overflows
from benchmarks.evaluate.statistics import Estimate, block_estimate
from benchmarks.evaluate.stream import ContextStream, Truncation
from ca_jax.launch.texts import EvaluationError, read_ids
from ca_jax.pretrained import LoadedModel, Progress

CURVE_BEFORE, CURVE_AFTER, CURVE_BIN = 256, 512, 32
"""Tokens around a truncation whose loss is told, and tokens in a bin."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerplexityConfig:
    """`ppl`: how well a model predicts one long text."""

    comparison: Comparison
    """What is compared."""
    data: str
    """A .txt file, or a .jsonl file whose rows have `text`."""
    max_tokens: int = 16_384
    """Tokens of it, from its beginning."""
    max_loss: float | None = None
    """Most by which perplexity may be above that of `tt`, a share, two standard errors of the gap included; by default
    there is no bound. Where no other method keeps it the script exits with 1."""

    def __post_init__(self) -> None:
        self.comparison.check_bound(self.max_loss)
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2, one to predict behind the other; got {self.max_tokens}")


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
class PerplexityRow(MethodRow):
    """One method over one text. Errors are over blocks of step_tokens, see `block_estimate`."""

    text: str
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
    passes: bool | None
    """Whether it keeps the bound; None where there is no bound."""
    tokens: int
    mean_kept_tokens: float | None
    """Tokens that stayed at an overflow, mean; None where there was none."""
    recomputed_tokens: float
    """Tokens computed anew at all overflows together; in some layers only, times their share of the layers."""
    tokens_per_s: float
    curve: Sequence[CurveBin]
    """Loss around truncations; none without."""


@dataclasses.dataclass(frozen=True)
class _Measured:
    """What a stream gave."""

    losses: np.ndarray  # f32 [T], nats; the first is NaN.
    truncations: Sequence[Truncation]
    seconds: float

    @property
    def first_overflow(self) -> int | None:
        """Tokens fed before the first overflow; None where there was none."""
        return self.truncations[0].num_fed if self.truncations else None


def run_perplexity(model: LoadedModel, config: PerplexityConfig, progress: Progress) -> Evaluation:
    """Feeds one text to a context of each method."""
    comparison, path = config.comparison, Path(config.data)
    streams = comparison.streams(model)
    token_ids = read_ids(model, path, config.max_tokens)
    if len(token_ids) < 2:
        raise EvaluationError(f"a text must have at least 2 tokens, got {len(token_ids)} in {path}")
    if config.max_tokens > comparison.window:  # Else it was asked for without an overflow.
        check_overflows(len(token_ids), window=comparison.window, path=path, max_tokens=config.max_tokens)
    measured = {name: _measure(name, stream, token_ids, progress) for name, stream in streams.items()}
    base = None if comparison.baseline is None else measured[comparison.baseline]
    rows = [
        PerplexityRow(
            text=path.name,
            **comparison.setting(name),
            **_figures(each, None if each is base else base, comparison.step_tokens, config.max_loss),
        )
        for name, each in measured.items()
    ]
    return Evaluation(rows=rows, items=[])


def _measure(name: str, stream: ContextStream, token_ids: Sequence[int], progress: Progress) -> _Measured:
    started_s = time.perf_counter()
    losses = stream.feed(token_ids, progress, name)
    return _Measured(losses, stream.truncations, time.perf_counter() - started_s)


def _figures(each: _Measured, base: _Measured | None, block: int, max_loss: float | None) -> dict[str, Any]:
    """The fields of a row that are measured, and whether they keep the bound."""
    num_tokens, start = len(each.losses), each.first_overflow
    everywhere = block_estimate(each.losses[1:], block).exp()
    after = None if start is None else block_estimate(each.losses[start:], block).exp()
    gap = None
    if base is not None:
        first = 1 if start is None or base.first_overflow is None else max(start, base.first_overflow)
        gap = block_estimate(each.losses[first:] - base.losses[first:], block).exp()
    kept = [truncation.num_kept for truncation in each.truncations]
    return {
        "perplexity": everywhere.mean,
        "perplexity_after_overflow": None if after is None else after.mean,
        "stderr": (after or everywhere).stderr,
        "gap_to_tt": None if gap is None else gap.mean - 1,
        "gap_stderr": None if gap is None else gap.stderr,
        "ratio_to_tt": None if gap is None else gap.mean,
        "passes": None if gap is None or max_loss is None else _upper(gap) - 1 <= max_loss,
        "tokens": num_tokens,
        "num_truncations": len(kept),
        "mean_kept_tokens": sum(kept) / len(kept) if kept else None,
        "recomputed_tokens": sum(truncation.num_recomputed for truncation in each.truncations),
        "seconds": each.seconds,
        "tokens_per_s": num_tokens / each.seconds,
        "curve": loss_curve(
            each.losses, None if base is None else base.losses, [place.num_fed for place in each.truncations]
        ),
    }


def _upper(estimate: Estimate) -> float:
    """Two standard errors above a mean; of one block nobody knows."""
    return math.inf if estimate.stderr is None else estimate.mean + 2 * estimate.stderr


def loss_curve(losses: np.ndarray, base_losses: np.ndarray | None, places: Sequence[int]) -> list[CurveBin]:
    """Loss, nats of each token `[T]`, by distance from a truncation, and how far it is from another method's.

    Told are at most `CURVE_BEFORE` tokens before and `CURVE_AFTER` behind, and no more than lie between two
    truncations, in bins of `CURVE_BIN`. A bin's value is the mean over truncations of the mean over its tokens that
    have a loss. `places` are the tokens fed before each truncation, rising.
    """
    gaps = losses - base_losses if base_losses is not None else None
    nearest = min((second - first for first, second in itertools.pairwise(places)), default=CURVE_AFTER)
    before, after = (min(most, nearest) // CURVE_BIN for most in (CURVE_BEFORE, CURVE_AFTER))
    curve = []
    for nth in range(-before, after):
        offset = nth * CURVE_BIN
        loss = _over_truncations(losses, places, offset)
        if loss is None:
            continue
        gap = None if gaps is None else _over_truncations(gaps, places, offset)
        curve.append(
            CurveBin(
                offset=offset,
                loss=loss[0],
                loss_stderr=loss[1],
                gap=None if gap is None else gap[0],
                gap_stderr=None if gap is None else gap[1],
            )
        )
    return curve


def _over_truncations(values: np.ndarray, places: Sequence[int], offset: int) -> tuple[float, float | None] | None:
    """Mean over truncations and its standard error; None where no token lies there."""
    spans = [values[max(place + offset, 0) : max(place + offset + CURVE_BIN, 0)] for place in places]
    known = [span[~np.isnan(span)] for span in spans]
    means = np.array([span.mean(dtype=np.float64) for span in known if len(span)])
    if not len(means):
        return None
    stderr = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None
    return float(means.mean()), stderr
