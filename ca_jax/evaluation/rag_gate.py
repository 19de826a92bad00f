"""The quality gate: what share of the chunks' tokens must be computed anew to keep a model close to full recompute.

Not here: what blending is compared with otherwise (rag), what a gate's exit says (launch).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ca_jax.evaluation.comparison import EvaluationError
from ca_jax.evaluation.rag import read_prompts
from ca_jax.evaluation.rag_context import ContextModel
from ca_jax.evaluation.rag_methods import REUSE, Compared, Method, PromptContexts
from ca_jax.evaluation.rag_rows import GateRow
from ca_jax.evaluation.rag_schema import GateConfig
from ca_jax.evaluation.schema import Evaluation
from ca_jax.evaluation.statistics import paired_interval
from ca_jax.pretrained import LoadedModel, Progress

_LEAST_ITEMS = 2  # Of one alone nothing is known of how sure a mean is.


def run_gate(model: LoadedModel, config: GateConfig, progress: Progress) -> Evaluation:
    """Measures full reuse and every ratio, and holds each against the bounds.

    Args:
      model: that is asked.
      config: what is tried and what is wanted.
      progress: told of items as they are done.

    Raises:
      EvaluationError: fewer than two items, prompts of fewer than two chunks, or longer than the model's window.
    """
    prompts = read_prompts(model, config.chunking)
    if len(prompts) < _LEAST_ITEMS:
        raise EvaluationError(
            f"there must be at least {_LEAST_ITEMS} items to say how sure a mean is, got {len(prompts)}"
        )
    alone = next((prompt for prompt in prompts if len(prompt.chunks) < 2), None)
    if alone is not None:
        raise EvaluationError(f"there must be prompts of at least 2 chunks, got {len(alone.chunks)} in {alone.source}")
    (selection,) = config.blends.selections
    blended = [Method(kind="blend", ratio=ratio, selection=selection) for ratio in sorted(config.blends.ratios)]
    found: dict[Method, list[Compared]] = {method: [] for method in (REUSE, *blended)}
    computed: dict[Method, list[float]] = {method: [] for method in found}
    contexts = ContextModel(model, prompts, 0)
    items = []
    progress("blend_gate", 0, len(prompts))
    for prompt in prompts:
        of = PromptContexts(contexts, prompt, config.blends)
        for method, each in found.items():
            each.append(of.compared(of.ask(of.kv(method))))
            computed[method].append(of.computed_tokens(method))
        items.append(
            {
                "source": prompt.source,
                "context_tokens": of.num_tokens,
                "kl": {method.name: each[-1].kl for method, each in found.items()},
            }
        )
        progress("blend_gate", len(items), len(prompts))
    reuse_kl = np.array([each.kl for each in found[REUSE]])
    rows = [
        gate_row(config, method.ratio or 0.0, selection, each, reuse_kl, computed[method])
        for method, each in found.items()
    ]
    return Evaluation(rows=rows, items=items)


def gate_row(
    config: GateConfig,
    ratio: float,
    selection: str,
    found: Sequence[Compared],
    reuse_kl: np.ndarray,
    computed_tokens: Sequence[float],
) -> GateRow:
    """One ratio held against the bounds.

    Args:
      config: has the bounds.
      ratio: see `GateRow`.
      selection: see `GateRow`.
      found: of each item.
      reuse_kl: of full reuse, each item's.
      computed_tokens: of each item.
    """
    kl, clusters = np.array([each.kl for each in found]), range(len(found))
    interval = paired_interval(kl.tolist(), clusters)
    share_excess = kl_excess = None
    if config.max_kl_share is not None:
        share_excess = paired_interval((kl - config.max_kl_share * reuse_kl).tolist(), clusters)[1]
    if config.max_kl is not None:
        kl_excess = interval[1] - config.max_kl
    return GateRow(
        ratio=ratio,
        selection=selection,
        num_items=len(found),
        computed_tokens=float(np.mean(computed_tokens)),
        mean_kl=float(kl.mean()),
        kl_interval=interval,
        kl_share=float(kl.mean() / reuse_kl.mean()) if reuse_kl.any() else None,
        same_top1=float(np.mean([each.same_top1 for each in found])),
        share_excess=share_excess,
        kl_excess=kl_excess,
        passes=all(excess is None or excess <= 0 for excess in (share_excess, kl_excess)),
    )
