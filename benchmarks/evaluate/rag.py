"""Answers to questions behind text chunks, by each way to use the chunks' stored KV, against full recompute.

The quality gate is made of it: what share of the chunks' tokens must be computed anew to keep a model close to that.

Not here: reading items and the ways themselves (`items`, `rag_methods`), the paper's figures of deviation
(rag_deviation), times to the first token (timing).
Source: CacheBlend (Yao et al., EuroSys 2025), section 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from benchmarks.evaluate.comparison import Evaluation
from benchmarks.evaluate.items import Chunking, read_prompts
from benchmarks.evaluate.rag_context import ContextModel
from benchmarks.evaluate.rag_methods import (
    BASELINES,
    RECOMPUTE,
    REUSE,
    Asker,
    Blends,
    Method,
    PromptContexts,
    methods_of,
)
from benchmarks.evaluate.statistics import Interval, mean_interval
from benchmarks.harness import Checked, ticked
from ca_jax.launch.texts import EvaluationError
from ca_jax.pretrained import LoadedModel, Progress

DEVIATION_FIGURES = (6, 7, 8)
"""Figures of the paper that the pure model gives."""
TIMED_FIGURES = (12, 15, 16, 17)
"""Figures that an engine is timed for. 12: quality and TTFT of the methods; 15: TTFT against number and length of
chunks; 16: quality and TTFT against the ratio; 17: TTFT against the speed of the storage of the chunks' KV."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RagConfig(Checked):
    """`rag`: answers to questions behind chunks, by each way to use the chunks' KV."""

    may_be_zero: ClassVar = frozenset({"answer_tokens"})
    may_be_empty: ClassVar = frozenset({"baselines"})
    choices: ClassVar = {"baselines": BASELINES}

    chunking: Chunking = dataclasses.field(default_factory=Chunking)
    """What prompts are made of."""
    blends: Blends = dataclasses.field(default_factory=Blends)
    """What is blended."""
    baselines: tuple[str, ...] = BASELINES
    """What it is compared with, of `BASELINES`."""
    answer_tokens: int = 16
    """Most tokens of an answer, greedily; 0 asks for none."""
    summary_tokens: int = 48
    """Most tokens of a summary, for `mapreduce`."""
    figure: int | None = None
    """Of the paper, to be measured instead of the table of methods."""
    timed_items: int = 3
    """Figures of times to first token (TTFT): items, the first ones, that turns are timed of."""
    repeats: int = 3
    """Turns that count of each item and method; one more, the first, does not."""
    chunk_counts: tuple[int, ...] = (3, 6, 9)
    """Figure 15: numbers of chunks, each of `chunk_tokens`."""
    chunk_lengths: tuple[int, ...] = (128, 256, 512)
    """Figure 15: tokens of a chunk, `num_chunks` of them."""
    storage_gb_s: tuple[float, ...] = (0.5, 0.1, 0.05)
    """Figure 17: speeds of storages that loads are paced to, 1e9 bytes/s, beside DRAM and SSD as they are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RagRow:
    """One way to use the chunks' KV, over all items. Intervals are of 95 %, by the bootstrap over items; paired where
    two methods are compared. What a method does not give is None."""

    name: str
    method: str
    """`recompute`, one of `rag_methods.BASELINES`, or `blend`."""
    ratio: float | None
    """Of `blend`: as it was asked for."""
    selection: str | None
    """Of `blend`."""
    num_items: int
    context_tokens: float
    """Tokens of chunks, mean."""
    computed_tokens: float
    """Tokens that are computed before the answer begins, mean: of some layers alone, times their share of the layers.
    Of `mapreduce` and `maprerank` also what they generate for it; the chunks' own KV is stored in any case."""
    mean_kl: float | None
    """KL(full recompute || method) of the next token's distribution, nats, mean over the last positions."""
    kl_interval: Interval | None
    kl_share: float | None
    """Of full reuse's; None without that."""
    kl_above_hkvd: float | None
    """How far it is above that of `hkvd` of the same ratio, nats; None of itself, or where that was not measured."""
    kl_above_hkvd_interval: Interval | None
    same_top1: float | None
    """Share of those positions with the same likeliest token as full recompute."""
    same_top1_interval: Interval | None
    attention_deviation: float | None
    """L2 norm of the difference of the forward attention matrix, all heads', of the question's tokens to the context's,
    from that of full recompute: mean over layers. Source: CacheBlend, section 4.1."""
    layer_deviations: Sequence[float]
    """The same of each layer; none where `attention_deviation` is None."""
    f1: float | None
    """Of the answers, mean over the items that have right ones; None where there are none."""
    f1_interval: Interval | None
    f1_above_recompute_interval: Interval | None
    """Of its difference to full recompute's."""
    rouge_l: float | None
    """Likewise."""
    rouge_l_interval: Interval | None
    has_answer: float | None
    """Share of those answers that have the words of a right one."""
    has_answer_interval: Interval | None
    has_answer_above_recompute_interval: Interval | None
    """Of its difference to full recompute's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Result:
    """Of one method on one item; None is what it does not give."""

    computed_tokens: float
    kl: float | None = None
    same_top1: float | None = None
    deviations: np.ndarray | None = None
    answer: str | None = None
    f1: float | None = None
    rouge_l: float | None = None
    has_answer: float | None = None


def run_rag(model: LoadedModel, config: RagConfig, progress: Progress, *, least_chunks: int = 1) -> Evaluation:
    """Asks each question with each method."""
    prompts = read_prompts(model, config.chunking, answer_tokens=config.answer_tokens, least_chunks=least_chunks)
    asks = config.answer_tokens > 0
    methods = [method for method in methods_of(config.blends, config.baselines) if asks or not method.maps]
    contexts = ContextModel(model, prompts, config.answer_tokens)
    lengths = {"summary_tokens": config.summary_tokens, "answer_tokens": config.answer_tokens}
    asker = Asker(contexts, config.chunking, **lengths) if asks else None
    found: list[dict[Method, _Result]] = []
    items: list[dict[str, Any]] = []
    for prompt in ticked(progress, "rag", prompts):
        of = PromptContexts(contexts, prompt, config.blends)
        results = _compared(of, [method for method in methods if method == RECOMPUTE or method.fuses], asker)
        for method in methods:
            if method.kind == "prefix":  # It computes what full recompute does: the first chunk's KV is the same.
                results[method] = dataclasses.replace(results[RECOMPUTE], computed_tokens=of.computed_tokens(method))
            elif method.maps and asker is not None:
                answer, computed_tokens = asker.reduce(of) if method.kind == "mapreduce" else asker.rerank(of)
                results[method] = _Result(computed_tokens=computed_tokens, **asker.scored(prompt, answer))
        found.append(results)
        items.append(_item(of, results))
    return Evaluation(rows=_rows(methods, found, [item["context_tokens"] for item in items]), items=items)


def _compared(of: PromptContexts, methods: Sequence[Method], asker: Asker | None) -> dict[Method, _Result]:
    """What methods give that have KV of all of the context."""
    kv = [of.kv(method) if method.fuses else of.full for method in methods]
    asked = [of.ask(each) if method.fuses else of.asked for method, each in zip(methods, kv, strict=True)]
    scored: list[dict[str, Any]] = [{} for _ in methods]
    if asker is not None:
        scored = [asker.scored(of.prompt, answer) for answer in asker.answers(of, list(zip(kv, asked, strict=True)))]
    return {
        method: _Result(computed_tokens=of.computed_tokens(method), **vars(of.compared(seen)), **score)
        for method, seen, score in zip(methods, asked, scored, strict=True)
    }


def _item(of: PromptContexts, results: dict[Method, _Result]) -> dict[str, Any]:
    """What an item gave, by method; values that a method does not give are left out."""

    def by_method(field: str) -> dict[str, Any]:
        values = {method.name: getattr(result, field) for method, result in results.items()}
        return {name: value for name, value in values.items() if value is not None}

    return {
        "source": of.prompt.source,
        "context_tokens": of.num_tokens,
        "question_tokens": len(of.prompt.question_ids),
        "right_answers": list(of.prompt.answers),
        "answers": by_method("answer"),
        **{field: by_method(field) for field in ("f1", "has_answer", "kl", "same_top1")},
    }


def _rows(
    methods: Sequence[Method], found: Sequence[dict[Method, _Result]], context_tokens: Sequence[int]
) -> list[RagRow]:
    """A row for each method, of the results of each item."""

    def values(method: Method, field: str) -> np.ndarray:
        given = [getattr(results[method], field) for results in found if method in results]
        return np.array([value for value in given if value is not None])

    def scored(method: Method, field: str) -> dict[str, Any]:
        """A score of answers, and how far it is above full recompute's."""
        own = values(method, field)
        above = None if method == RECOMPUTE else _interval(own - values(RECOMPUTE, field))
        return {**_estimated(field, own), f"{field}_above_recompute_interval": above}

    rows = []
    for method in methods:
        kl = values(method, "kl")
        reuse_kl = values(REUSE, "kl")
        hkvd = Method(kind="blend", ratio=method.ratio, selection="hkvd")
        above = np.zeros(0)
        if method.selection not in (None, "hkvd") and len(values(hkvd, "kl")):
            above = kl - values(hkvd, "kl")
        layers = np.mean(values(method, "deviations"), axis=0) if len(kl) else np.zeros(0)
        share = kl.mean() / reuse_kl.mean() if len(kl) and reuse_kl.any() else None  # Of one chunk nothing is reused.
        rows.append(
            RagRow(
                name=method.name,
                method=method.kind,
                ratio=method.ratio,
                selection=method.selection,
                num_items=len(found),
                context_tokens=float(np.mean(context_tokens)),
                computed_tokens=float(values(method, "computed_tokens").mean()),
                mean_kl=_mean(kl),
                kl_interval=_interval(kl),
                kl_share=None if share is None else float(share),
                **_estimated("kl_above_hkvd", above),
                **_estimated("same_top1", values(method, "same_top1")),
                attention_deviation=_mean(layers),
                layer_deviations=layers.tolist(),
                **_estimated("rouge_l", values(method, "rouge_l")),
                **scored(method, "f1"),
                **scored(method, "has_answer"),
            )
        )
    return rows


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _estimated(name: str, values: np.ndarray) -> dict[str, Any]:
    return {name: _mean(values), f"{name}_interval": _interval(values)}


def _interval(values: np.ndarray) -> Interval | None:
    return mean_interval(values.tolist()) if len(values) else None


# The gate.

MAX_TOP1_LOSS = 0.1
"""The bound where none is given: one next token in ten may be another one than full recompute's. It is stated, not
derived from what the model reaches."""

_LEAST_ITEMS = 2  # One alone says nothing of how sure a mean is.


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateConfig(Checked):
    """`blend_gate`: the smallest ratio that keeps a model's next tokens close enough to full recompute.

    Bounds that are given hold together. How large a divergence matters differs from model to model, since it grows with
    how sure a model is of its tokens and with its vocabulary; the share of next tokens that change does not.
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
        super().__post_init__()
        if len(self.blends.selections) != 1:
            raise ValueError(f"selections must be one, got {', '.join(self.blends.selections)}")

    @property
    def top1_bound(self) -> float | None:
        """`max_top1_loss`, or the default where there is no other bound."""
        if self.max_top1_loss is None and self.max_kl_share is None and self.max_kl is None:
            return MAX_TOP1_LOSS
        return self.max_top1_loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateRow(RagRow):
    """One ratio, held against the bounds; the ratio of full reuse is 0."""

    top1_excess: float | None
    """Upper end of the interval of the share of next tokens that differ, less its bound; None without that bound."""
    share_excess: float | None
    """Upper end of the interval of `kl - max_kl_share * kl of full reuse`, nats, paired; None without that bound."""
    kl_excess: float | None
    """Upper end of the interval less `max_kl`, nats; None without that bound."""
    passes: bool
    """Whether no excess is above 0."""


def run_gate(model: LoadedModel, config: GateConfig, progress: Progress) -> Evaluation:
    """Measures full reuse and every ratio, and holds each against the bounds."""
    asked = RagConfig(chunking=config.chunking, blends=config.blends, baselines=(REUSE.kind,), answer_tokens=0)
    done = run_rag(model, asked, progress, least_chunks=2)
    if len(done.items) < _LEAST_ITEMS:
        raise EvaluationError(f"items must be at least {_LEAST_ITEMS} to say how sure a mean is, got {len(done.items)}")
    (selection,) = config.blends.selections

    def of(name: str, values: str) -> list[float]:
        return [item[values][name] for item in done.items]

    rows = []
    for row in sorted(done.rows, key=lambda row: row.ratio or 0.0):
        if row.method not in (REUSE.kind, "blend"):
            continue
        held = held_against(
            config, kl=of(row.name, "kl"), same_top1=of(row.name, "same_top1"), reuse_kl=of(REUSE.name, "kl")
        )
        rows.append(GateRow(**{**vars(row), "ratio": row.ratio or 0.0, "selection": selection, **held}))
    return Evaluation(rows=rows, items=done.items)


def held_against(
    config: GateConfig, *, kl: Sequence[float], same_top1: Sequence[float], reuse_kl: Sequence[float]
) -> dict[str, Any]:
    """The fields of `GateRow` that say how a ratio does against the bounds, by what each item gave."""
    excesses: dict[str, Any] = {"top1_excess": None, "share_excess": None, "kl_excess": None}
    if config.top1_bound is not None:
        excesses["top1_excess"] = mean_interval([1 - same for same in same_top1])[1] - config.top1_bound
    if config.max_kl_share is not None:
        share = config.max_kl_share
        excesses["share_excess"] = mean_interval([k - share * r for k, r in zip(kl, reuse_kl, strict=True)])[1]
    if config.max_kl is not None:
        excesses["kl_excess"] = mean_interval(kl)[1] - config.max_kl
    return {**excesses, "passes": all(excess is None or excess <= 0 for excess in excesses.values())}
