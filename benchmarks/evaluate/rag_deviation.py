"""How stored KV deviates from full recompute, and what computing some of it anew leaves: figures 6, 7 and 8.

Not here: answers and their quality (rag), the figures as plots (plots).
Source: CacheBlend (Yao et al., EuroSys 2025), section 4.3.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from benchmarks.evaluate.comparison import Evaluation
from benchmarks.evaluate.items import read_prompts
from benchmarks.evaluate.rag import RagConfig
from benchmarks.evaluate.rag_context import ContextModel
from benchmarks.evaluate.rag_methods import REUSE, Compared, Method, PromptContexts
from benchmarks.evaluate.statistics import Interval, mean_interval
from benchmarks.harness import ticked
from ca_jax.device.transfer import to_device
from ca_jax.pretrained import LoadedModel, Progress

ORACLE = "oracle"
"""The selection of figure 6: by the true deviation, which nobody has who wants to save computing it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """Figure 6: what is left of the attention deviation once a share of the tokens is computed anew."""

    selection: str
    """`oracle`: in each layer the tokens of the highest deviation of all have their true KV, as in the paper's figure;
    otherwise one of `rag_methods.SELECTIONS`, with what it computes."""
    ratio: float
    """Share of the chunks' tokens; of `oracle` in each layer, otherwise in the mean over layers."""
    num_items: int
    attention_deviation: float
    """See `rag.RagRow`."""
    interval: Interval
    share: float
    """Of full reuse's."""
    layer_deviations: Sequence[float]
    """See `rag.RagRow`."""
    mean_kl: float
    """See `rag.RagRow`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributionRow:
    """Figure 7: how the KV deviation of a layer is distributed over the tokens of all items."""

    layer: int
    num_items: int
    num_tokens: int
    """Of chunks, whose KV is as it was stored."""
    percentiles: Sequence[float]
    """KV deviation of percentiles 0, 1, ... 100: L2 norm over keys and values, all heads', of the difference to full
    recompute."""
    top_10_share: float
    """Of all deviation, how much the tenth of the tokens has that deviates most."""
    top_15_share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelationRow:
    """Figure 8: Spearman's rank correlation of the tokens' KV deviation between a layer and the next one."""

    layer: int
    """The first of the two. Layer 0 is no such one: its KV never deviates."""
    num_items: int
    correlation: float
    """Mean over items."""
    interval: Interval


def run_deviation(model: LoadedModel, config: RagConfig, progress: Progress) -> Evaluation:
    """Measures the figure that `config.figure` says, 6, 7 or 8."""
    if config.figure not in _MEASURED:
        raise ValueError(f"figure must be one of {', '.join(map(str, _MEASURED))}; got {config.figure}")
    prompts = read_prompts(model, config.chunking, least_chunks=2)
    contexts = ContextModel(model, prompts, 0)

    def prepared() -> Iterator[PromptContexts]:
        for prompt in ticked(progress, f"figure {config.figure}", prompts):
            yield PromptContexts(contexts, prompt, config.blends)

    return Evaluation(rows=_MEASURED[config.figure](config, prepared()), items=[])


def _attention_rows(config: RagConfig, contexts: Iterator[PromptContexts]) -> list[AttentionRow]:
    names = (ORACLE, *config.blends.selections)
    points = [(ORACLE, ratio) for ratio in config.blends.ratios]
    points += [*((name, 0.0) for name in names), *config.blends.points]
    points = sorted(set(points), key=lambda point: (names.index(point[0]), point[1]))
    found: dict[tuple[str, float], list[Compared]] = {point: [] for point in points}
    for of in contexts:
        reused = of.compared(of.ask(of.kv(REUSE)))
        for (selection, ratio), each in found.items():
            if not ratio:
                each.append(reused)
                continue
            if selection == ORACLE:
                kv = true_kv(of, ratio)
            else:
                kv = of.kv(Method(kind="blend", ratio=ratio, selection=selection))
            each.append(of.compared(of.ask(kv)))
    rows = []
    for (selection, ratio), each in found.items():
        layers, reused_layers = (
            np.mean([one.deviations for one in some], axis=0) for some in (each, found[selection, 0.0])
        )
        rows.append(
            AttentionRow(
                selection=selection,
                ratio=ratio,
                num_items=len(each),
                attention_deviation=float(layers.mean()),
                interval=mean_interval([float(one.deviations.mean()) for one in each]),
                share=float(layers.mean() / reused_layers.mean()),
                layer_deviations=[float(each) for each in layers],
                mean_kl=float(np.mean([one.kl for one in each])),
            )
        )
    return rows


def true_kv(of: PromptContexts, ratio: float) -> list[jax.Array]:
    """Stored KV, but that a share of each layer's tokens, those that deviate most, have that of full recompute."""
    deviation, places = of.kv_deviations(of.stored), of.stored_places()
    count = round(ratio * len(places))
    kv = []
    for layer, (stored, full) in enumerate(zip(of.stored, of.full, strict=True)):
        mask = np.zeros(stored.shape[1], bool)
        mask[: places[0]] = True  # What is before them is exact, or computed.
        mask[places[np.argsort(-deviation[layer], kind="stable")[:count]]] = True
        kv.append(jnp.where(to_device(mask)[:, None, None], full, stored))
    return kv


def _distribution_rows(config: RagConfig, contexts: Iterator[PromptContexts]) -> list[DistributionRow]:
    found: list[np.ndarray] = []
    for of in contexts:
        found.append(of.kv_deviations(of.stored))
    deviation = np.concatenate(found, axis=1)  # [L, tokens of all items]
    last = len(deviation) - 1
    rows = []
    for layer in dict.fromkeys((min(1, last), last // 2, last)):
        values = np.sort(deviation[layer])
        rows.append(
            DistributionRow(
                layer=layer,
                num_items=len(found),
                num_tokens=len(values),
                percentiles=[float(each) for each in np.percentile(values, np.arange(101))],
                top_10_share=_top_share(values, 0.1),
                top_15_share=_top_share(values, 0.15),
            )
        )
    return rows


def _correlation_rows(config: RagConfig, contexts: Iterator[PromptContexts]) -> list[CorrelationRow]:
    found: list[list[float]] = []
    for of in contexts:
        deviation = of.kv_deviations(of.stored)
        found.append([float(scipy.stats.spearmanr(*pair).statistic) for pair in itertools.pairwise(deviation[1:])])
    return [
        CorrelationRow(
            layer=layer,
            num_items=len(values),
            correlation=float(np.mean(values)),
            interval=mean_interval(values),
        )
        for layer, values in enumerate(zip(*found, strict=True), 1)
    ]


def _top_share(ascending: Sequence[float] | np.ndarray, share: float) -> float:
    values = np.fromiter(ascending, np.float64)
    total = values.sum()
    return float(values[len(values) - round(share * len(values)) :].sum() / total) if total > 0 else 0.0


_MEASURED: dict[int, Callable[[RagConfig, Iterator[PromptContexts]], Sequence[object]]] = {
    6: _attention_rows,
    7: _distribution_rows,
    8: _correlation_rows,
}
