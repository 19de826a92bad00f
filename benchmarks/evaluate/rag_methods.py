"""Ways to use the stored KV of chunks, each giving a context's KV, and how far each is from full recompute.

Two ways put no chunks together. MapReduce has each chunk summarised and asks the question of the summaries. MapRerank
asks it of each chunk alone and takes the answer that the model is surest of. Both read chunks that were computed alone:
each stands at the beginning of a prompt.

Not here: computing contexts (rag_context), rows (`benchmarks.evaluate`).
Source: CacheBlend (Yao et al., EuroSys 2025), section 7.1; MapReduce and MapRerank are chains of LangChain's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from benchmarks.evaluate.items import Chunking, RagPrompt
from benchmarks.evaluate.rag_context import (
    Answer,
    Answerer,
    Asked,
    Behind,
    ContextModel,
    attention_deviations,
    kv_deviations,
    plan_of,
    spans_of,
)
from benchmarks.evaluate.statistics import f1_score, first_line, has_answer, kl_divergence, rouge_l
from benchmarks.harness import Checked, require
from ca_jax import config
from ca_jax.device.transfer import to_device, to_host
from ca_jax.launch.texts import tokenizer_of
from ca_jax.recompute import plan
from ca_jax.recompute.plan import Plan, TokenKind, kinds_of
from ca_jax.serving.prompts import chunk_head

SELECTIONS: tuple[str, ...] = (*config.SELECTIONS, "random")
"""Ways to choose the tokens that are computed anew: those of `config.Selection`, and any, to compare with."""
BASELINES = ("prefix", "reuse", "mapreduce", "maprerank")
"""What blending is compared with, beside full recompute, with which all are. `prefix`: the KV of the first chunk alone
is reused. `reuse`: that of all, and nothing is computed anew. `mapreduce`: each chunk is summarised, and the question
is asked of the summaries. `maprerank`: each chunk is asked, and the answer of highest mean log probability taken."""
SUMMARIZE = "\n\nSummarize the passage above in one sentence.\nSummary:"
"""What stands behind a chunk that is to be summarised."""

_NAMES = {
    "recompute": "full recompute",
    "prefix": "prefix caching",
    "reuse": "full reuse",
    "mapreduce": "MapReduce",
    "maprerank": "MapRerank",
}
_BETWEEN_SUMMARIES = "\n\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blends(Checked):
    """Which ways to blend are measured, and where."""

    may_be_empty: ClassVar = frozenset({"other_ratios"})
    shares: ClassVar = frozenset({"ratios", "other_ratios"})
    choices: ClassVar = {"selections": SELECTIONS}

    ratios: tuple[float, ...] = (0.05, 0.15, 0.3, 0.5)
    """Shares of the chunks' tokens that are computed anew, in the mean of the layers behind the check layers."""
    selections: tuple[str, ...] = (config.BlendConfig.selection,)
    """Which tokens, of `SELECTIONS`."""
    other_ratios: tuple[float, ...] | None = None
    """Ratios of the selections behind the first one; None: the same as its."""
    chunk_head: config.ChunkHead = config.BlendConfig.chunk_head
    """What chunks are computed behind, see `BlendConfig`."""
    check_layers: int = 1
    """Layers of which all tokens are computed, see `Plan`."""
    positions: int = 8
    """Last positions of a prompt whose next tokens are compared."""
    seed: int = 0
    """Of the selection `random`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(set(self.ratios)) == len(self.ratios), "ratios", "all different", self.ratios)

    @property
    def points(self) -> list[tuple[str, float]]:
        """Each selection with each of its ratios."""
        first, *others = self.selections
        other_ratios = self.ratios if self.other_ratios is None else self.other_ratios
        return [(first, ratio) for ratio in self.ratios] + [(each, ratio) for each in others for ratio in other_ratios]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One way to answer behind chunks."""

    kind: str
    """`recompute`, one of `BASELINES`, or `blend`."""
    ratio: float | None = None
    """Of `blend`."""
    selection: str | None = None

    @property
    def name(self) -> str:
        """In words."""
        if self.ratio is None:
            return _NAMES[self.kind]
        return f"{self.selection} {100 * self.ratio:.4g}%"

    @property
    def maps(self) -> bool:
        """Whether it asks of chunks one by one: it gives answers, and nothing to compare next tokens of."""
        return self.kind in ("mapreduce", "maprerank")

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
    """The contexts of one prompt: chunks are computed once, and so is full recompute."""

    def __init__(self, contexts: ContextModel, prompt: RagPrompt, blends: Blends) -> None:
        self.prompt = prompt
        self.head = chunk_head(contexts.model, blends.chunk_head)
        """What each chunk is computed behind."""
        self.chunks = [contexts.stored(chunk, self.head) for chunk in prompt.chunks]
        """KV of each chunk, `[L, 2, T, K, H]`."""
        self.full = contexts.prefill(prompt.context_ids)
        """KV of full recompute, `[2, S, K, H]` for each layer."""
        self.stored = contexts.joined(self.chunks, len(prompt.head))
        """The chunks' KV one behind the other; a head has none."""
        self._contexts = contexts
        self._blends = blends
        self._attention: np.ndarray | None = None
        self.num_tokens = len(prompt.context_ids)
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

    def attention(self) -> np.ndarray:
        """What places receive from the question with full reuse, in the layers that are asked: f32 `[num_tokens]`."""
        if self._attention is None:
            num_asking = plan.num_asking(self._contexts.config.num_layers)
            layers = self.ask(self.kv(REUSE)).attention[:num_asking]
            self._attention = np.sum([to_host(each) for each in layers], axis=(0, 1, 2))[: self.num_tokens]
        return self._attention

    def computed_tokens(self, method: Method) -> float:
        """Tokens that `recompute`, `prefix` or a method that `fuses` computes before the answer begins."""
        num_asked = len(self.prompt.question_ids)
        if method.fuses:
            chosen = self._plan(method)
            return chosen.num_recomputed + chosen.num_new + num_asked
        num_cached = len(self.prompt.chunks[0]) if method.kind == "prefix" and not self.prompt.head else 0
        return self.num_tokens - num_cached + num_asked

    def stored_places(self) -> np.ndarray:
        """Places of tokens that were computed without what is before them, i32."""
        kinds = kinds_of(self.num_tokens, 0, spans_of(self.prompt, self.head))
        return np.flatnonzero(kinds == TokenKind.STORED).astype(np.int32)

    def kv_deviations(self, kv: Sequence[jax.Array]) -> np.ndarray:
        """KV deviation of the tokens at `stored_places`, f32 `[L, n]`; see `rag_context.kv_deviations`."""
        return to_host(kv_deviations(list(kv), self.full))[:, self.stored_places()]

    def _plan(self, method: Method) -> Plan:
        blends = self._blends
        attention = self.attention() if method.selection == "query" else None
        return plan_of(
            self._contexts.config,
            self.prompt,
            head=self.head,
            ratio=method.ratio or 0.0,
            selection=method.selection or "hkvd",
            check_layers=blends.check_layers,
            seed=blends.seed,
            attention=attention,
        )


class Asker:
    """Takes answers, greedily. Pages for them are made when they are first wanted, since they take memory.

    Ways that ask chunks one by one also give the tokens of prompts that they compute, and of what they generate before.
    """

    def __init__(self, contexts: ContextModel, chunking: Chunking, *, summary_tokens: int, answer_tokens: int) -> None:
        self._contexts, self._chunking = contexts, chunking
        self._summary_tokens, self._answer_tokens = summary_tokens, answer_tokens
        self._tokenizer = tokenizer_of(contexts.model)
        self._summarize = self._tokenizer.encode(SUMMARIZE, add_bos=False)
        # Summaries are read again: their tokens may be a few more or less than those that were generated.
        self._summary_capacity = -(-chunking.num_chunks * (summary_tokens + 8) // 64) * 64
        self._answerers: dict[tuple[int, ...], Answerer] = {}

    def answers(self, of: PromptContexts, behind: Sequence[tuple[Sequence[jax.Array], Asked]]) -> list[Answer]:
        """Answers the question behind a context, its KV and what the question sees as each of some methods has them."""
        rows = [Behind(kv, of.num_tokens, asked, len(of.prompt.question_ids)) for kv, asked in behind]
        return self._answers(rows, len(rows), self._contexts.capacity, self._answer_tokens)

    def scored(self, prompt: RagPrompt, answer: Answer) -> dict[str, Any]:
        """The answer's text and, where there are right ones, its `f1`, `rouge_l` and `has_answer`."""
        text = first_line(self._tokenizer.decode(answer.token_ids))
        scores = {"f1": f1_score, "rouge_l": rouge_l, "has_answer": has_answer} if prompt.answers else {}
        return {"answer": text, **{name: score(text, prompt.answers) for name, score in scores.items()}}

    def reduce(self, of: PromptContexts) -> tuple[Answer, int]:
        """Answers the question of summaries of the chunks."""
        rows = self._rows(of, self._summarize)
        summaries = self._of_chunks(rows, self._summary_tokens)
        ids = list(of.prompt.head)
        for summary in summaries:
            text = " ".join(self._tokenizer.decode(summary.token_ids).split())
            ids += self._tokenizer.encode(text + _BETWEEN_SUMMARIES, add_bos=False)
        ids = ids[: self._summary_capacity]
        question = of.prompt.question_ids
        kv = self._contexts.prefill(ids, self._summary_capacity)
        asked = self._contexts.ask(kv, len(ids), question, 1)
        behind = Behind(kv, len(ids), asked, len(question))
        (answer,) = self._answers([behind], 1, self._summary_capacity, self._answer_tokens)
        generated = sum(len(summary.token_ids) for summary in summaries)
        return answer, len(rows) * len(self._summarize) + generated + len(ids) + len(question)

    def rerank(self, of: PromptContexts) -> tuple[Answer, int]:
        """Answers the question of each chunk, and takes the answer of the highest mean log probability."""
        question = list(of.prompt.question_ids)
        rows = self._rows(of, question)
        answers = self._of_chunks(rows, self._answer_tokens)
        generated = sum(len(answer.token_ids) for answer in answers)
        best = max(answers, key=lambda answer: answer.mean_logprob)
        return best, len(rows) * len(question) + generated

    def _rows(self, of: PromptContexts, question: list[int]) -> list[Behind]:
        """Each chunk, computed alone, with something asked behind it."""
        rows = []
        for ids in of.prompt.chunks:
            kv = [to_device(layer) for layer in self._contexts.stored(ids)]
            rows.append(Behind(kv, len(ids), self._contexts.ask(kv, len(ids), question, 1), len(question)))
        return rows

    def _of_chunks(self, rows: Sequence[Behind], max_tokens: int) -> list[Answer]:
        return self._answers(rows, self._chunking.num_chunks, self._chunking.chunk_tokens, max_tokens)

    def _answers(self, rows: Sequence[Behind], most_rows: int, capacity: int, max_tokens: int) -> list[Answer]:
        sizes = {"num_rows": most_rows, "max_tokens": max_tokens, "capacity": capacity}
        key = tuple(sizes.values())
        if key not in self._answerers:
            self._answerers[key] = Answerer(self._contexts, **sizes)
        return self._answerers[key].answer(rows, self._contexts.model.stop_token_ids)
