"""The quality gate: what share of the chunks' tokens must be computed anew to keep a model close to full recompute.

Not here: measuring (rag), a gate's exit code (main).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.evaluate.items import Chunking
from benchmarks.evaluate.rag import RagConfig, run_rag
from benchmarks.evaluate.rag_methods import REUSE, Blends
from benchmarks.evaluate.rows import Evaluation
from benchmarks.evaluate.statistics import Interval, mean_interval
from ca_jax.evaluation.texts import EvaluationError
from ca_jax.pretrained import LoadedModel, Progress

MAX_TOP1_LOSS = 0.1
"""The bound where none is given: one next token in ten may be another one than full recompute's. It is stated, not
derived from what the model reaches."""

_LEAST_ITEMS = 2  # One alone says nothing of how sure a mean is.


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateConfig:
    """`blend_gate`: the smallest ratio that keeps a model's next tokens close enough to full recompute.

    Bounds that are given hold together. How large a divergence matters differs from model to model, since it grows with
    how sure a model is of its tokens and with its vocabulary; the share of next tokens that change does not.

    Raises:
      ValueError: a bound that is not above 0, or several selections.
    """

    chunking: Chunking = dataclasses.field(default_factory=Chunking)
    """What prompts are made of."""
    blends: Blends = dataclasses.field(default_factory=Blends)
    """What is tried; one selection."""
    max_top1_loss: float | None = None
    """Most of the next tokens that may be others than full recompute's likeliest, a share; None: 0.1 where no other
    bound is given, else any."""
    max_kl_share: float | None = None
    """Most of full reuse's divergence that is taken, a share of it; None: any."""
    max_kl: float | None = None
    """Most divergence that is taken, nats; None: any."""

    def __post_init__(self) -> None:
        for name in ("max_top1_loss", "max_kl_share", "max_kl"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be a bound above 0, got {value}")
        if len(self.blends.selections) != 1:
            raise ValueError(f"selections must be one, got {', '.join(self.blends.selections)}")

    @property
    def top1_bound(self) -> float | None:
        """`max_top1_loss`, or the default where there is no other bound."""
        if self.max_top1_loss is None and self.max_kl_share is None and self.max_kl is None:
            return MAX_TOP1_LOSS
        return self.max_top1_loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateRow:
    """One ratio, held against the bounds."""

    ratio: float
    """As it was asked for; 0 is full reuse."""
    selection: str
    """Which tokens."""
    num_items: int
    """Prompts."""
    computed_tokens: float
    """See `rag.RagRow`."""
    mean_kl: float
    """See `rag.RagRow`."""
    kl_interval: Interval
    """See `rag.RagRow`."""
    kl_share: float | None
    """Of full reuse's; None where that has none."""
    same_top1: float
    """See `rag.RagRow`."""
    top1_excess: float | None
    """Upper end of the interval of the share of next tokens that differ, less its bound; None without that bound."""
    share_excess: float | None
    """Upper end of the interval of `kl - max_kl_share * kl of full reuse`, nats, paired; None without that bound."""
    kl_excess: float | None
    """Upper end of the interval less `max_kl`, nats; None without that bound."""
    passes: bool
    """Whether no excess is above 0."""


def run_gate(model: LoadedModel, config: GateConfig, progress: Progress) -> Evaluation:
    """Measures full reuse and every ratio, and holds each against the bounds.

    Args:
      model: that is asked.
      config: what is tried and what is wanted.
      progress: told of items as they are done.

    Raises:
      EvaluationError: fewer than two items, prompts of fewer than two chunks, or longer than the model's window.
    """
    asked = RagConfig(chunking=config.chunking, blends=config.blends, baselines=(REUSE.kind,), answer_tokens=0)
    done = run_rag(model, asked, progress, least_chunks=2)
    if len(done.items) < _LEAST_ITEMS:
        raise EvaluationError(f"items must be at least {_LEAST_ITEMS} to say how sure a mean is, got {len(done.items)}")
    (selection,) = config.blends.selections

    def of(name: str, values: str) -> list[float]:
        return [item[values][name] for item in done.items]

    rows = [
        gate_row(
            config,
            {"ratio": row.ratio or 0.0, "selection": selection, "computed_tokens": row.computed_tokens},
            kl=of(row.name, "kl"),
            same_top1=of(row.name, "same_top1"),
            reuse_kl=of(REUSE.name, "kl"),
        )
        for row in sorted(done.rows, key=lambda row: row.ratio or 0.0)
        if row.method in (REUSE.kind, "blend")
    ]
    return Evaluation(rows=rows, items=done.items)


def gate_row(
    config: GateConfig,
    of: dict[str, Any],
    *,
    kl: Sequence[float],
    same_top1: Sequence[float],
    reuse_kl: Sequence[float],
) -> GateRow:
    """One ratio held against the bounds.

    Args:
      config: has the bounds.
      of: `ratio`, `selection` and `computed_tokens` of the row.
      kl: of each item.
      same_top1: of each item.
      reuse_kl: of each item, with full reuse.
    """
    interval = mean_interval(kl)
    excesses: dict[str, Any] = {"top1_excess": None, "share_excess": None, "kl_excess": None}
    if config.top1_bound is not None:
        excesses["top1_excess"] = mean_interval([1 - same for same in same_top1])[1] - config.top1_bound
    if config.max_kl_share is not None:
        share = config.max_kl_share
        excesses["share_excess"] = mean_interval([k - share * r for k, r in zip(kl, reuse_kl, strict=True)])[1]
    if config.max_kl is not None:
        excesses["kl_excess"] = interval[1] - config.max_kl
    return GateRow(
        **of,
        num_items=len(kl),
        mean_kl=float(np.mean(kl)),
        kl_interval=interval,
        kl_share=float(np.mean(kl) / np.mean(reuse_kl)) if any(reuse_kl) else None,
        same_top1=float(np.mean(same_top1)),
        **excesses,
        passes=all(excess is None or excess <= 0 for excess in excesses.values()),
    )
