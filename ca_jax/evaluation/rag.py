"""Answers to questions behind text chunks, by each way to use the chunks' stored KV, against full recompute.

Not here: reading items (rag_items, rag_texts), the ways (rag_methods, rag_map), the paper's figures of deviation
(rag_deviation), what serving takes (launch).
Source: CacheBlend (Yao et al., EuroSys 2025), section 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ca_jax.evaluation.rag_answers import Answer, Answerer, Behind
from ca_jax.evaluation.rag_context import ContextModel
from ca_jax.evaluation.rag_items import RagPrompt, check_window, prompts_of, read_items
from ca_jax.evaluation.rag_map import Mapper
from ca_jax.evaluation.rag_methods import RECOMPUTE, Compared, Method, PromptContexts, methods_of
from ca_jax.evaluation.rag_metrics import f1_score, first_line, rouge_l
from ca_jax.evaluation.rag_rows import RagRow
from ca_jax.evaluation.rag_schema import Chunking, RagConfig
from ca_jax.evaluation.rag_texts import conversation_prompts
from ca_jax.evaluation.schema import Evaluation
from ca_jax.evaluation.statistics import Interval, paired_interval
from ca_jax.evaluation.texts import tokenizer_of
from ca_jax.pretrained import LoadedModel, Progress


@dataclasses.dataclass
class _Found:
    """What one method gave, an entry for each item."""

    computed_tokens: list[float] = dataclasses.field(default_factory=list)
    compared: list[Compared] = dataclasses.field(default_factory=list)
    answers: list[str] = dataclasses.field(default_factory=list)
    f1: list[float] = dataclasses.field(default_factory=list)
    rouge_l: list[float] = dataclasses.field(default_factory=list)

    @property
    def kl(self) -> np.ndarray:
        """Of each item."""
        return np.array([each.kl for each in self.compared])


def read_prompts(model: LoadedModel, chunking: Chunking, answer_tokens: int = 0) -> list[RagPrompt]:
    """The prompts that a chunking asks for.

    Raises:
      EvaluationError: no items where they should be, or prompts that are longer than the model's window.
    """
    if chunking.data is None:
        prompts = conversation_prompts(model, chunking)
    else:
        prompts = prompts_of(model, read_items(Path(chunking.data))[: chunking.max_items], chunking)
    check_window(model, prompts, answer_tokens)
    return prompts


def run_rag(model: LoadedModel, config: RagConfig, progress: Progress) -> Evaluation:
    """Asks each question with each method.

    Args:
      model: that answers.
      config: what is asked.
      progress: told of items as they are done.

    Raises:
      EvaluationError: no items, or prompts that are longer than the model's window.
    """
    prompts = read_prompts(model, config.chunking, config.answer_tokens)
    asks = config.answer_tokens > 0
    methods = [
        method
        for method in methods_of(config.blends, config.baselines)
        if asks or method.kind not in ("mapreduce", "maprerank")  # Of these there is nothing but answers.
    ]
    found = {method: _Found() for method in methods}
    contexts = ContextModel(model, prompts, config.answer_tokens)
    asker = _Asker(contexts, config, methods) if asks else None
    items: list[dict[str, Any]] = []
    progress("rag", 0, len(prompts))
    for prompt in prompts:
        of = PromptContexts(contexts, prompt, config.blends)
        for method, each in found.items():
            if method.kind in ("mapreduce", "maprerank"):
                if asker is not None:
                    asker.ask_mapped(of, method, each)
                continue
            each.computed_tokens.append(of.computed_tokens(method))
            kv = of.kv(method) if method.fuses else of.full
            asked = of.ask(kv) if method.fuses else of.asked
            each.compared.append(of.compared(asked))
            if asker is None:
                continue
            if method.kind == "prefix":  # It computes what full recompute does: the first chunk's KV is the same.
                asker.repeat(found[RECOMPUTE], each, prompt)
            else:
                asker.ask(of, Behind(kv, of.num_tokens, asked, len(prompt.question_ids)), each)
        items.append(_item(prompt, of.num_tokens, found))
        progress("rag", len(items), len(prompts))
    return Evaluation(rows=rag_rows(found, [item["context_tokens"] for item in items]), items=items)


class _Asker:
    """Takes answers and says how good they are."""

    def __init__(self, contexts: ContextModel, config: RagConfig, methods: Sequence[Method]) -> None:
        self._tokenizer = tokenizer_of(contexts.model)
        self._stop_ids = contexts.model.stop_token_ids
        self._answerer = Answerer(contexts, num_rows=1, max_tokens=config.answer_tokens, capacity=contexts.capacity)
        self._mapper: Mapper | None = None
        if any(method.kind in ("mapreduce", "maprerank") for method in methods):
            self._mapper = Mapper(
                contexts,
                summary_tokens=config.summary_tokens,
                answer_tokens=config.answer_tokens,
                num_chunks=config.chunking.num_chunks,
                chunk_tokens=config.chunking.chunk_tokens,
            )

    def ask(self, of: PromptContexts, behind: Behind, found: _Found) -> None:
        (answer,) = self._answerer.answer([behind], self._stop_ids)
        self._score(answer, of.prompt, found)

    def ask_mapped(self, of: PromptContexts, method: Method, found: _Found) -> None:
        if self._mapper is None:
            raise RuntimeError(f"{method.name} was to be asked, and is not among the methods")
        mapped = self._mapper.reduce(of) if method.kind == "mapreduce" else self._mapper.rerank(of)
        found.computed_tokens.append(mapped.computed_tokens)
        self._score(mapped.answer, of.prompt, found)

    @staticmethod
    def repeat(of: _Found, found: _Found, prompt: RagPrompt) -> None:
        """Takes another method's answer to the last item."""
        found.answers.append(of.answers[-1])
        if prompt.answers:
            found.f1.append(of.f1[-1])
            found.rouge_l.append(of.rouge_l[-1])

    def _score(self, answer: Answer, prompt: RagPrompt, found: _Found) -> None:
        text = first_line(self._tokenizer.decode(answer.token_ids))
        found.answers.append(text)
        if prompt.answers:
            found.f1.append(f1_score(text, prompt.answers))
            found.rouge_l.append(rouge_l(text, prompt.answers))


def rag_rows(found: dict[Method, _Found], context_tokens: Sequence[int]) -> list[RagRow]:
    """A row for each method.

    Args:
      found: what each gave.
      context_tokens: of each item.
    """
    by_method = {(method.kind, method.ratio, method.selection): each for method, each in found.items()}
    reuse, base = by_method.get(("reuse", None, None)), found[RECOMPUTE]
    rows = []
    for method, each in found.items():
        hkvd = by_method.get(("blend", method.ratio, "hkvd")) if method.selection not in (None, "hkvd") else None
        compares = bool(each.compared)
        layers = np.mean([one.deviations for one in each.compared], axis=0) if compares else np.zeros(0)
        same = [one.same_top1 for one in each.compared]
        rows.append(
            RagRow(
                name=method.name,
                method=method.kind,
                ratio=method.ratio,
                selection=method.selection,
                num_items=len(each.computed_tokens),
                context_tokens=float(np.mean(context_tokens)),
                computed_tokens=float(np.mean(each.computed_tokens)),
                mean_kl=_mean(each.kl),
                kl_interval=_interval(each.kl),
                kl_share=None if reuse is None or not compares else _share(each.kl, reuse.kl),
                kl_above_hkvd=None if hkvd is None else _mean(each.kl - hkvd.kl),
                kl_above_hkvd_interval=None if hkvd is None else _interval(each.kl - hkvd.kl),
                same_top1=_mean(same),
                same_top1_interval=_interval(same),
                attention_deviation=_mean(layers),
                layer_deviations=layers.tolist(),
                f1=_mean(each.f1),
                f1_interval=_interval(each.f1),
                f1_above_recompute_interval=None if each is base else _interval(np.subtract(each.f1, base.f1)),
                rouge_l=_mean(each.rouge_l),
                rouge_l_interval=_interval(each.rouge_l),
            )
        )
    return rows


def _item(prompt: RagPrompt, num_tokens: int, found: dict[Method, _Found]) -> dict[str, Any]:
    """What an item gave, by method; numbers that a method does not give are left out."""

    def last(values: Callable[[_Found], Sequence[Any]]) -> dict[str, Any]:
        return {method.name: values(each)[-1] for method, each in found.items() if len(values(each))}

    has_truth = bool(prompt.answers)
    return {
        "source": prompt.source,
        "context_tokens": num_tokens,
        "question_tokens": len(prompt.question_ids),
        "right_answers": list(prompt.answers),
        "answers": last(lambda each: each.answers),
        "f1": last(lambda each: each.f1) if has_truth else {},
        "kl": last(lambda each: [float(one.kl) for one in each.compared[-1:]]),
        "same_top1": last(lambda each: [one.same_top1 for one in each.compared[-1:]]),
    }


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _interval(values: Sequence[float] | np.ndarray) -> Interval | None:
    return paired_interval(list(values), range(len(values))) if len(values) else None


def _share(values: np.ndarray, of: np.ndarray) -> float | None:
    """One mean over another; None where that is 0, as of a prompt with nothing to reuse but its beginning."""
    return float(values.mean() / of.mean()) if of.mean() > 0 else None
