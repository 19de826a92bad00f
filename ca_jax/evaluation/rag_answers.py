"""Greedy answers behind contexts, some of them at once.

Not here: the contexts' KV (rag_context), how good answers are (rag_metrics).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import jax
import numpy as np

from ca_jax.device import steps
from ca_jax.device.transfer import to_device, to_host
from ca_jax.evaluation.rag_context import Asked, ContextModel
from ca_jax.evaluation.statistics import log_softmax
from ca_jax.models.attention import SLOT_BLOCK


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model said."""

    token_ids: list[int]
    """Without the token that ended it."""
    mean_logprob: float
    """Of its tokens, the one that ended it among them, nats: how sure the model is."""


@dataclasses.dataclass(frozen=True)
class Behind:
    """A context with a question behind it."""

    kv: Sequence[jax.Array]
    """The context's, `[2, S, K, H]` for each layer."""
    num_tokens: int
    """Of the context."""
    asked: Asked
    """The question's."""
    num_asked: int
    """Tokens of the question."""


class Answerer:
    """Goes on behind contexts, greedily.

    Args:
      contexts: computes them.
      num_rows: how many at once at most.
      max_tokens: most tokens of an answer.
      capacity: S of the contexts.
    """

    def __init__(self, contexts: ContextModel, *, num_rows: int, max_tokens: int, capacity: int) -> None:
        self._contexts = contexts
        self._max_tokens = max_tokens
        most = capacity + contexts.question_capacity + max_tokens
        self._capacity = -(-most // SLOT_BLOCK) * SLOT_BLOCK
        self._slots = steps.make_slots(contexts.config, num_rows, self._capacity, contexts.model.dtype)
        self._table = steps.rotation_table(contexts.config, self._capacity, contexts.window)

    def answer(self, rows: Sequence[Behind], stop_ids: Collection[int] = ()) -> list[Answer]:
        """Answers as many questions as there are rows, at once.

        Args:
          rows: at most as many as it was made for.
          stop_ids: tokens that end an answer.
        """
        for nth, row in enumerate(rows):
            self._insert(nth, row)
        lengths = np.array([row.num_tokens + row.num_asked for row in rows], np.int32)
        logprobs = np.stack([row.asked.logprobs[-1] for row in rows])
        found: list[list[int]] = [[] for _ in rows]
        sums, counts, ended = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows), bool)
        for step in range(self._max_tokens):
            tokens = logprobs.argmax(-1)
            for nth in map(int, np.flatnonzero(~ended)):
                sums[nth] += logprobs[nth, tokens[nth]]
                counts[nth] += 1
                if int(tokens[nth]) in stop_ids:
                    ended[nth] = True
                else:
                    found[nth].append(int(tokens[nth]))
            if ended.all() or step == self._max_tokens - 1:
                break
            logits, _, self._slots = steps.decode(
                self._contexts.config,
                self._contexts.model.params,
                self._slots,
                to_device(tokens, np.int32),
                to_device(lengths),
                self._table,
            )
            logprobs = np.stack([log_softmax(row) for row in to_host(logits)])
            lengths = lengths + 1
        return [Answer(ids, float(total / count)) for ids, total, count in zip(found, sums, counts, strict=True)]

    def _insert(self, nth: int, row: Behind) -> None:
        """Puts a context and its question into a slot, the question's first token behind the context's last."""
        slot = to_device(nth, np.int32)
        zero, length = to_device(0, np.int32), to_device(row.num_tokens, np.int32)
        for i, (context, own) in enumerate(zip(row.kv, row.asked.kv, strict=True)):
            for kv, start in ((context, zero), (own, length)):
                self._slots.keys[i], self._slots.values[i], _ = steps.insert_slot(
                    self._slots.keys[i], self._slots.values[i], kv, slot, start, self._table
                )
