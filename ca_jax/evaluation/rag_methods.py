"""Ways to use the stored KV of chunks, each giving the KV of a prompt's context; and what each gave, item by item.

Not here: computing contexts (rag_context), asking of summaries and of single chunks (rag_map), rows (rag).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from ca_jax.device.transfer import to_host
from ca_jax.evaluation.rag_context import Asked, ContextModel, attention_deviations, kv_deviations, plan_of
from ca_jax.evaluation.rag_items import RagPrompt
from ca_jax.evaluation.rag_schema import Blends
from ca_jax.evaluation.statistics import kl_divergence
from ca_jax.recompute.plan import Plan

_NAMES = {
    "recompute": "full recompute",
    "prefix": "prefix caching",
    "reuse": "full reuse",
    "mapreduce": "MapReduce",
    "maprerank": "MapRerank",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One way to answer behind chunks."""

    kind: str
    """`recompute`, one of `rag_schema.BASELINES`, or `blend`."""
    ratio: float | None = None
    """Of `blend`."""
    selection: str | None = None
    """Of `blend`."""

    @property
    def name(self) -> str:
        """In words."""
        if self.ratio is None:
            return _NAMES[self.kind]
        return f"{self.selection} {100 * self.ratio:.4g}%"

    @property
    def fuses(self) -> bool:
        """Whether it puts stored KV together."""
        return self.kind in ("reuse", "blend")


RECOMPUTE = Method(kind="recompute")
"""What the others are held against."""
REUSE = Method(kind="reuse")
"""Full reuse."""


def methods_of(blends: Blends, baselines: Sequence[str]) -> list[Method]:
    """Full recompute, the baselines, and every selection at each of its ratios."""
    blended = [Method(kind="blend", ratio=ratio, selection=selection) for selection, ratio in blends.points]
    return [RECOMPUTE, *(Method(kind=kind) for kind in baselines), *blended]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """How a method's next tokens and attention differ from full recompute's, on one item."""

    kl: float
    """KL(full recompute || method), nats, mean over the last positions."""
    same_top1: float
    """Share of these with the same likeliest token."""
    deviations: np.ndarray
    """Attention deviation of each layer, f32 `[L]`."""


class PromptContexts:
    """The contexts of one prompt: chunks are computed once, and so is full recompute.

    Args:
      contexts: computes.
      prompt: whose.
      blends: what is blended, and what is told.
    """

    def __init__(self, contexts: ContextModel, prompt: RagPrompt, blends: Blends) -> None:
        self.prompt = prompt
        """Whose."""
        self.chunks = [contexts.alone(chunk) for chunk in prompt.chunks]
        """KV of each chunk alone, `[L, 2, T, K, H]`."""
        self.full = contexts.prefill(prompt.context_ids)
        """KV of full recompute, `[2, S, K, H]` for each layer."""
        self.stored = contexts.joined(self.chunks, len(prompt.head))
        """The chunks' KV one behind the other; a head has none."""
        self._contexts = contexts
        self._blends = blends
        self.num_tokens = len(prompt.context_ids)
        """Of the context."""
        self.asked = self.ask(self.full)
        """What the question sees with full recompute."""

    def kv(self, method: Method) -> list[jax.Array]:
        """KV of the context as a method that `fuses` has it."""
        return self._contexts.fused(self._plan(method), self.prompt.context_ids, self.stored)

    def ask(self, kv: Sequence[jax.Array]) -> Asked:
        """What the question sees behind the context."""
        return self._contexts.ask(kv, self.num_tokens, self.prompt.question_ids, self._blends.positions)

    def compared(self, asked: Asked) -> Compared:
        """How that differs from full recompute."""
        pairs = list(zip(self.asked.logprobs, asked.logprobs, strict=True))
        return Compared(
            kl=float(np.mean([kl_divergence(full, found) for full, found in pairs])),
            same_top1=float(np.mean([full.argmax() == found.argmax() for full, found in pairs])),
            deviations=to_host(attention_deviations(asked.attention, self.asked.attention)),
        )

    def computed_tokens(self, method: Method) -> float:
        """Tokens that `recompute`, `prefix` or a method that `fuses` computes before the answer begins."""
        num_asked = len(self.prompt.question_ids)
        if method.fuses:
            plan = self._plan(method)
            return plan.num_recomputed + plan.num_new + num_asked
        num_cached = len(self.prompt.chunks[0]) if method.kind == "prefix" and not self.prompt.head else 0
        return self.num_tokens - num_cached + num_asked

    def stored_places(self) -> np.ndarray:
        """Places of tokens that were computed without what is before them, i32."""
        start = len(self.prompt.head) or len(self.prompt.chunks[0])
        return np.arange(start, self.num_tokens)

    def kv_deviations(self, kv: Sequence[jax.Array]) -> np.ndarray:
        """KV deviation of the tokens at `stored_places`, f32 `[L, n]`; see `rag_context.kv_deviations`."""
        return to_host(kv_deviations(list(kv), self.full))[:, self.stored_places()]

    def _plan(self, method: Method) -> Plan:
        blends = self._blends
        return plan_of(
            self._contexts.config,
            self.prompt,
            ratio=method.ratio or 0.0,
            selection=method.selection or "hkvd",
            check_layers=blends.check_layers,
            seed=blends.seed,
        )
