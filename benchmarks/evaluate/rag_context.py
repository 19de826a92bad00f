"""A context of text chunks on the pure model: its KV computed at once, or chunk by chunk and put together.

Behind it a question sees the distribution of its next tokens and its forward attention matrix, and is answered
greedily. One capacity serves all contexts, so that each function is compiled once for them.

Shapes: S places of the context (padded), T tokens of the question (padded), L layers, N query heads, K KV heads, H head
dim, F embed, V vocab.

Not here: which tokens are computed anew (`ca_jax.recompute.fusion`), what is compared (`benchmarks.evaluate`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.evaluate.by_layer import LayerByLayer, as_pages, from_pages
from benchmarks.evaluate.items import RagPrompt
from benchmarks.evaluate.statistics import log_softmax
from ca_jax.config import BlendConfig, EngineConfig
from ca_jax.device import page_steps, steps
from ca_jax.device.steps import Params, apply, variables_of
from ca_jax.device.transfer import to_device, to_host
from ca_jax.models import rope
from ca_jax.models.attention import MASKED, dot, seen_keys
from ca_jax.models.config import LayerKind, ModelConfig
from ca_jax.models.kv import LayerKV
from ca_jax.models.paged_attention import Rows
from ca_jax.models.transformer import Layer, Learned, scale_queries
from ca_jax.pretrained import LoadedModel
from ca_jax.recompute.plan import Plan, TokenKind, blend_plan, kinds_of
from ca_jax.turns.text import ChunkSpan

_CAPACITY_STEP = 256  # Contexts have a multiple of so many places.
_CHUNK_STEP = 32  # Chunks are padded to a multiple of it,
_QUESTION_STEP = 32  # and questions to one of it: each length is compiled for.


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a question behind a context sees."""

    logprobs: np.ndarray
    """Of the next token behind each of its last tokens, f64 `[positions, V]`."""
    kv: list[jax.Array]
    """The question's own unrotated KV, `[2, T, K, H]` for each layer."""
    attention: list[jax.Array]
    """The forward attention matrix, f32 `[N, T, S]` for each layer: what its tokens give to those of the context."""


class ContextModel:
    """Computes contexts of one model, as long as prompts want them, with `num_more` tokens behind their questions."""

    def __init__(self, model: LoadedModel, prompts: Sequence[RagPrompt], num_more: int) -> None:
        self.model = model
        self.config: ModelConfig = model.config
        self.capacity = _padded(max(len(prompt.context_ids) for prompt in prompts), _CAPACITY_STEP)
        """S, of every context."""
        self.question_capacity = _padded(max(len(prompt.question_ids) for prompt in prompts), _QUESTION_STEP)
        """Most T."""
        num_positions = self.capacity + self.question_capacity + _padded(num_more, _QUESTION_STEP)
        self.window = min(num_positions, model.config.max_positions)
        """How long a text may become, tokens; `dynamic` rope asks for it."""
        self.by_layer = LayerByLayer(model, num_positions, self.window)

    def prefill(self, token_ids: Sequence[int], padded: int | None = None) -> list[jax.Array]:
        """KV of tokens with nothing before them, computed at once; padded to S unless told otherwise.

        Unrotated `[2, padded, K, H]` for each layer; zeros behind the tokens.
        """
        by_layer, found = self.by_layer, []
        x = by_layer.embedded(token_ids, padded or self.capacity)
        for i in range(self.config.num_layers):
            x, _, pages = by_layer.layer(i, x, by_layer.empty(x.shape[1]), 0, len(token_ids))
            found.append(from_pages(pages))
        return found

    def stored(self, chunk: Sequence[int], head: Sequence[int] = ()) -> np.ndarray:
        """KV of a chunk computed behind a head, which is left out: unrotated, `[L, 2, T, K, H]`, T tokens."""
        token_ids = [*head, *chunk]
        found = self.prefill(token_ids, _padded(len(token_ids), _CHUNK_STEP))
        return np.stack([to_host(kv)[:, len(head) : len(token_ids)] for kv in found])

    def joined(self, chunks: Sequence[np.ndarray], start: int) -> list[jax.Array]:
        """Chunks' KV one behind the other, from place `start` on: full reuse, but for what is before `start`.

        Keys are unrotated: where they lie is their position. `[2, S, K, H]` for each layer, zeros where no chunk lies.
        """
        num_layers, _, _, num_kv, head_dim = chunks[0].shape
        place = start
        kv = np.zeros((num_layers, 2, self.capacity, num_kv, head_dim), chunks[0].dtype)
        for chunk in chunks:
            kv[:, :, place : place + chunk.shape[2]] = chunk
            place += chunk.shape[2]
        return [to_device(layer) for layer in kv]

    def fused(self, plan: Plan, token_ids: Sequence[int], kv: Sequence[jax.Array]) -> list[jax.Array]:
        """A context, of these tokens and KV as `joined` gives it, of which some tokens are computed anew."""
        if not plan.num_tokens:
            return list(kv)
        return list(map(from_pages, self.by_layer.recomputed(plan, token_ids, list(map(as_pages, kv)))))

    def ask(self, kv: Sequence[jax.Array], num_tokens: int, question: Sequence[int], positions: int) -> Asked:
        """Puts a question behind a context of so many tokens, KV `[2, S, K, H]` for each layer.

        Next tokens are told of its last `positions`, or of all where it has fewer.
        """
        by_layer, (new, attention) = self.by_layer, ([], [])
        x = by_layer.embedded(question, _padded(len(question), _QUESTION_STEP))
        length, count = to_device(num_tokens, np.int32), to_device(len(question), np.int32)
        for i, (params, history) in enumerate(zip(by_layer.layers, kv, strict=True)):
            kind = self.config.kind_of(i)
            given = x, history, length, count, by_layer.tables[kind.rope]
            attention.append(forward_attention(self.config, params, *given, kind))
            room = as_pages(jnp.pad(history, ((0, 0), (0, x.shape[1]), (0, 0), (0, 0))))
            x, own, *_ = by_layer.layer(i, x, room, num_tokens, len(question))
            new.append(own)
        last = x[:, max(0, len(question) - positions) : len(question)]
        return Asked(log_softmax(to_host(steps.all_logits(self.config, by_layer.outer, last))[0]), new, attention)


def spans_of(prompt: RagPrompt, head: Sequence[int] = ()) -> list[ChunkSpan]:
    """Where a prompt's chunks lie that were computed behind a head; the prompt may begin with that."""
    is_exact = list(prompt.head) == list(head)
    starts = enumerate(zip(prompt.chunk_starts, prompt.chunks, strict=True))
    return [ChunkSpan("", start, len(chunk), is_exact and not number) for number, (start, chunk) in starts]


def plan_of(
    model: ModelConfig,
    prompt: RagPrompt,
    *,
    head: Sequence[int] = (),
    ratio: float,
    selection: str = "hkvd",
    check_layers: int = 1,
    seed: int = 0,
    attention: np.ndarray | None = None,
) -> Plan:
    """How a prompt's context is blended: its own head is computed.

    Args:
      head: what chunks were computed behind.
      seed: of the selection `random`.
      attention: what places received from the question, for the selection `query`: f32 `[context tokens]`.
    """
    spans, num_places, order = spans_of(prompt, head), len(prompt.context_ids), None
    if selection == "random":
        num_stored = int((kinds_of(num_places, 0, spans) == TokenKind.STORED).sum())
        selection, order = "first", np.random.default_rng(seed).permutation(num_stored)
    config = BlendConfig(check_layers=check_layers, selection=selection)  # type: ignore[arg-type]
    return blend_plan(config, model.num_layers, num_places, 0, spans, ratio, attention, order)


@partial(jax.jit, static_argnames=("config", "kind"))
def forward_attention(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    history: jax.Array,
    history_length: jax.Array,
    num_new: jax.Array,
    table: rope.Rotation,
    kind: LayerKind,
) -> jax.Array:
    """The attention that new tokens give to those of their history in one layer.

    Args:
      config: static.
      layer_params: of the layer.
      x: `[1, T, F]`, what goes into it.
      history: its unrotated KV `[2, S, K, H]`.
      history_length: i32 scalar, tokens of history that count.
      num_new: i32 scalar, new tokens that count.
      table: the layer's rotations of all positions.
      kind: static, of the layer: `config.kind_of`.

    Returns:
      f32 `[N, T, S]`; 0 for tokens and places that do not count. A row's sum is 1 less what it gives to new tokens.

    Source: the forward attention matrix, CacheBlend (Yao et al., EuroSys 2025), sections 2 and 4.1.
    """
    num_places, num_tokens = history.shape[1], x.shape[1]

    def attend_fn(q: jax.Array, new: LayerKV, learned: Learned) -> tuple[jax.Array, jax.Array]:
        q = scale_queries(config, q, history_length + jnp.arange(num_tokens)[None])
        rotation = rope.Rotation(*(lax.dynamic_slice_in_dim(part, history_length, num_tokens)[None] for part in table))
        old = rope.rotate(history[0], rope.Rotation(*(part[:num_places] for part in table)))
        keys = jnp.concatenate([old, rope.rotate(new.k, rotation)[0]]).transpose(1, 0, 2)  # [K, S + T, H]
        scaled = rope.rotate(q, rotation)[0].astype(jnp.float32) / math.sqrt(config.head_dim)
        rows = scaled.astype(q.dtype).reshape(num_tokens, config.num_kv_heads, -1, config.head_dim)
        scores = dot(rows.transpose(1, 2, 0, 3), keys[:, None].repeat(rows.shape[2], 1), (3, 3), 2)  # [K, G, T, S + T]
        query_index = jnp.arange(num_tokens)[:, None]
        key_index = jnp.arange(num_places + num_tokens)[None]
        seen = seen_keys(key_index, query_index, history_length, num_places, kind.window)
        if config.score_cap is not None:
            scores = config.score_cap * jnp.tanh(scores / config.score_cap)
        scores = jnp.where(seen, scores, MASKED)
        if learned.sinks is not None:
            of_heads = learned.sinks.reshape(config.num_kv_heads, -1, 1, 1)
            scores = jnp.concatenate([scores, jnp.broadcast_to(of_heads, (*scores.shape[:3], 1))], axis=-1)
        given = jnp.where(seen[..., :num_places], jax.nn.softmax(scores, axis=-1)[..., :num_places], 0)
        given = jnp.where(query_index < num_new, given, 0)
        return jnp.zeros_like(q), given.reshape(-1, num_tokens, num_places)

    return apply(Layer(config, kind), variables_of(layer_params), x, attend_fn)[1]


@jax.jit
def attention_deviations(attention: Sequence[jax.Array], full: Sequence[jax.Array]) -> jax.Array:
    """L2 norm of the difference of two forward attention matrices, see `Asked.attention`, f32 `[L]`."""
    return jnp.stack([jnp.sqrt(((one - other) ** 2).sum()) for one, other in zip(attention, full, strict=True)])


@jax.jit
def kv_deviations(kv: Sequence[jax.Array], full: Sequence[jax.Array]) -> jax.Array:
    """How far each token's KV is from that of full recompute: L2 norm over keys and values, all heads', f32 `[L, S]`.

    Keys are compared unrotated, which is the same as rotated: a rotation changes no distance.
    """
    differences = [one.astype(jnp.float32) - other.astype(jnp.float32) for one, other in zip(kv, full, strict=True)]
    return jnp.stack([jnp.sqrt((each**2).sum((0, 2, 3))) for each in differences])


def _padded(num_tokens: int, step: int) -> int:
    return -(-num_tokens // step) * step


# Answers.


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
    asked: Asked
    num_asked: int


class Answerer:
    """Goes on behind contexts of `capacity` places, greedily: behind `num_rows` of them at once at most."""

    def __init__(self, contexts: ContextModel, *, num_rows: int, max_tokens: int, capacity: int) -> None:
        self._contexts = contexts
        self._max_tokens = max_tokens
        config, size = contexts.config, EngineConfig.page_tokens
        each = -(-(capacity + contexts.question_capacity + max_tokens) // size)
        self._pages = page_steps.make_pages(config, num_rows * each, size, contexts.model.dtype)
        self._numbers = to_device(np.arange(num_rows * each, dtype=np.int32).reshape(num_rows, each))
        self._rotations = steps.rotation_tables(config, each * size, contexts.window)

    def answer(self, rows: Sequence[Behind], stop_ids: Collection[int] = ()) -> list[Answer]:
        """Answers as many questions as there are rows, at once; `stop_ids` end an answer."""
        for nth, row in enumerate(rows):
            self._fill(nth, row)
        starts = to_device(np.arange(len(rows) + 1, dtype=np.int32))
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
            logits, _, _, self._pages, _ = steps.decode(
                self._contexts.config,
                self._contexts.model.params,
                self._pages,
                to_device(tokens, np.int32),
                Rows(self._numbers[: len(rows)], starts, to_device(lengths)),
                self._rotations,
            )
            logprobs = log_softmax(to_host(logits))
            lengths = lengths + 1
        return [Answer(ids, float(total / count)) for ids, total, count in zip(found, sums, counts, strict=True)]

    def _fill(self, nth: int, row: Behind) -> None:
        """Puts a context and its question into a row's pages, the question's first token behind the context's last."""
        zero, length, asked = (to_device(n, np.int32) for n in (0, row.num_tokens, row.num_asked))
        for i, (context, own) in enumerate(zip(row.kv, row.asked.kv, strict=True)):
            for kv, start, count in ((context, zero, length), (own, length, asked)):
                self._pages[i], _ = page_steps.fill_pages(self._pages[i], kv, self._numbers[nth], zero, start, count)
