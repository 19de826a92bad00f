"""MapReduce and MapRerank: what is done with retrieved texts instead of putting all in front of one question.

MapReduce has each chunk summarised and asks the question of the summaries. MapRerank asks it of each chunk alone and
takes the answer that the model is surest of. Both reuse the chunks' KV: each stands at the beginning of a prompt.

Not here: what they are compared with (rag_methods).
Source: LangChain's chains of these names, as CacheBlend (Yao et al., EuroSys 2025) has them in section 7.1.
"""

from __future__ import annotations

import dataclasses

from ca_jax.device.transfer import to_device
from ca_jax.evaluation.rag_answers import Answer, Answerer, Behind
from ca_jax.evaluation.rag_context import ContextModel
from ca_jax.evaluation.rag_methods import PromptContexts
from ca_jax.evaluation.texts import tokenizer_of

SUMMARIZE = "\n\nSummarize the passage above in one sentence.\nSummary:"
"""What stands behind a chunk that is to be summarised."""
_BETWEEN = "\n\n"


@dataclasses.dataclass(frozen=True)
class Mapped:
    """What one of the two gave."""

    answer: Answer
    """To the question."""
    computed_tokens: int
    """Tokens of prompts that were computed, and of what was generated for the answer to begin."""


class Mapper:
    """Asks chunks one by one.

    Args:
      contexts: computes.
      summary_tokens: most tokens of a summary.
      answer_tokens: most tokens of an answer.
      num_chunks: most chunks of a prompt.
      chunk_tokens: most tokens of a chunk.
    """

    def __init__(
        self, contexts: ContextModel, *, summary_tokens: int, answer_tokens: int, num_chunks: int, chunk_tokens: int
    ) -> None:
        self._contexts = contexts
        self._stop_ids = contexts.model.stop_token_ids
        tokenizer = tokenizer_of(contexts.model)
        self._tokenizer = tokenizer
        self._summarize = tokenizer.encode(SUMMARIZE, add_bos=False)
        self._summary_answerer, self._answerer = (
            Answerer(contexts, num_rows=num_chunks, max_tokens=max_tokens, capacity=chunk_tokens)
            for max_tokens in (summary_tokens, answer_tokens)
        )
        # Summaries are read again: their tokens may be a few more or less than those that were generated.
        self._summary_capacity = -(-num_chunks * (summary_tokens + 8) // 64) * 64
        self._final = Answerer(contexts, num_rows=1, max_tokens=answer_tokens, capacity=self._summary_capacity)

    def reduce(self, of: PromptContexts) -> Mapped:
        """Answers the question of summaries of the chunks."""
        rows = self._rows(of, self._summarize)
        summaries = self._summary_answerer.answer(rows, self._stop_ids)
        ids = list(of.prompt.head)
        for summary in summaries:
            text = " ".join(self._tokenizer.decode(summary.token_ids).split())
            ids += self._tokenizer.encode(text + _BETWEEN, add_bos=False)
        ids = ids[: self._summary_capacity]
        question = of.prompt.question_ids
        kv = self._contexts.prefill(ids, self._summary_capacity)
        asked = self._contexts.ask(kv, len(ids), question, 1)
        (answer,) = self._final.answer([Behind(kv, len(ids), asked, len(question))], self._stop_ids)
        generated = sum(len(summary.token_ids) for summary in summaries)
        return Mapped(answer, len(rows) * len(self._summarize) + generated + len(ids) + len(question))

    def rerank(self, of: PromptContexts) -> Mapped:
        """Answers the question of each chunk, and takes the answer of the highest mean log probability."""
        question = list(of.prompt.question_ids)
        rows = self._rows(of, question)
        answers = self._answerer.answer(rows, self._stop_ids)
        generated = sum(len(answer.token_ids) for answer in answers)
        best = max(answers, key=lambda answer: answer.mean_logprob)
        return Mapped(best, len(rows) * len(question) + generated)

    def _rows(self, of: PromptContexts, question: list[int]) -> list[Behind]:
        """Each chunk, its KV as it is stored, with something asked behind it."""
        rows = []
        for ids, chunk in zip(of.prompt.chunks, of.chunks, strict=True):
            kv = [to_device(layer) for layer in chunk]
            rows.append(Behind(kv, len(ids), self._contexts.ask(kv, len(ids), question, 1), len(question)))
        return rows
