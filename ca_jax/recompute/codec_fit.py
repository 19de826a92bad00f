"""Making a codec of KV for a model: what its numbers are like, and what an error in each of them costs.

Text is fed in windows. Of the first half of each the unrotated KV is an explicit history; the second half is computed
over it, and the gradient of how likely answers are, with tokens drawn from the model itself, is taken with respect to
that history. Two moments of each bundle of heads are kept: of the numbers, S, and of the gradients, F (the Fisher
information). In the basis that diagonalises both, numbers do not go together and an error of one step costs the same in
all of them; rounding all with one step is what loses least at a given size.

Three things matter as much as the basis. The first token of a context has four fifths of all importance in SmolLM2 and
is left out: a codec keeps such tokens apart. F is of few windows: no token counts for more than 20 times the mean, and
F is drawn by a third to what costs the same in all directions of a head's keys, or values. And keys and values of
several heads share much: together they take half a bit a number less than each head alone.

Not here: coding (storage.codec), what it costs in quality (tools.kv_codec).

Source: the rate and the loss of transform coding are textbook (reverse water-filling); the Fisher information as what
weights cost, Optimal Brain Surgeon's (Hassibi and Stork, 1993).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ca_jax.device.steps import Params
from ca_jax.device.transfer import to_device, to_host
from ca_jax.errors import check
from ca_jax.models import kv
from ca_jax.models.config import ModelConfig
from ca_jax.pretrained import LoadedModel, check_token_ids
from ca_jax.storage.codec import GroupCodec, KVCodec
from ca_jax.storage.layout import KVLayout, LayerGroup

HISTORY_TOKENS = 512
"""Of half a window, by default."""
_NUM_FIRST = 1  # Tokens at a context's beginning that are like no others.
_MOST_WEIGHT = 20.0  # Times the mean that a token counts for at most.
_SHRINKS = 0.3  # How far F is drawn to a multiple of one.
_SAMPLE_BLOCKS = 6  # By which the step is found.
_FILLS = 0.97  # Of a block's room, in the mean.
_LEAST_EIGENVALUE = 1e-6  # Of the largest.
_MOST_WIDTH = 512  # Numbers of a bundle: a matrix is as wide, and coding a token takes as many operations a number.


@dataclasses.dataclass(frozen=True)
class _Moments:
    """Of a group of layers l with bundles R of D numbers, sums over tokens."""

    total: np.ndarray
    """`[l, R, D]`."""
    squares: np.ndarray
    """`[l, R, D, D]`."""
    fisher: np.ndarray
    """`[l, R, D, D]`."""


def fit_codecs(
    model: LoadedModel,
    token_ids: Sequence[int],
    *,
    bits: Sequence[float],
    block_tokens: int = 128,
    history_tokens: int = HISTORY_TOKENS,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> tuple[KVCodec, ...]:
    """Makes codecs of a model.

    Args:
      model: whose; its layers have KV, not states.
      token_ids: of any text, best one like those that are to come; two windows at least, and better twenty.
      bits: most that a number takes on disk, of each codec.
      block_tokens: of the blocks that are to be coded.
      history_tokens: of half a window.
      seed: of what is drawn.
      on_step: called with the number of tokens that are done, each time some are.

    Raises:
      ValueError: a text that is too short, or a model whose layers keep states.
      InvalidRequestError: no tokens, or ids outside the vocabulary.
    """
    check(model.config.recurrence is None, "a model to make a codec for", "of layers with KV", "layers with states")
    check_token_ids(token_ids, model.config.vocab_size)
    window = 2 * history_tokens
    windows = np.fromiter(token_ids, np.int32)[: len(token_ids) // window * window].reshape(-1, window)
    check(len(windows) >= 2, "the text", f"at least {2 * window} tokens", len(token_ids))
    moments: list[_Moments] = []
    sample: list[list[np.ndarray]] = []
    stride = max(1, len(windows) * history_tokens // (_SAMPLE_BLOCKS * block_tokens))
    for number, ids in enumerate(windows):
        first, behind = to_device(ids[None, :history_tokens]), to_device(ids[None, history_tokens:])
        history = _history(model.model, model.params, first)
        slopes = _slopes(model.model, model.params, history, behind, to_device([number + seed], np.uint32))
        found, gradients = (_by_group(model.config, each) for each in (history, slopes))
        sample.append([each[:, :, number % stride :: stride] for each in found])
        added = [_moments_of(*each) for each in zip(found, gradients, strict=True)]
        moments = [_added(*each) for each in zip(moments, added, strict=True)] if moments else added
        if on_step is not None:
            on_step(window)
    num_tokens = len(windows) * (history_tokens - _NUM_FIRST)
    groups = [_transform(each, num_tokens, np.shape(part)) for each, part in zip(moments, found, strict=True)]
    layout = layout_of(model.config, block_tokens)
    tokens = [np.concatenate(parts, axis=2) for parts in zip(*sample, strict=True)]  # [l, P, S, K, H] of each group.
    blocks = [
        layout_block(layout, [each[:, :, start : start + block_tokens] for each in tokens])
        for start in range(0, tokens[0].shape[2] - block_tokens + 1, block_tokens)
    ]
    check(bool(blocks), "the text", f"enough for a block of {block_tokens} tokens", len(token_ids))
    return tuple(_with_step(groups, model.fingerprint, each, layout, blocks) for each in bits)


def layout_block(layout: KVLayout, parts: Sequence[np.ndarray]) -> np.ndarray:
    """A block `[*block_shape]` of numbers `[l, P, block_tokens, K, H]` of each group."""
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0])
    return np.concatenate([each.reshape(-1) for each in parts])


def layout_of(config: ModelConfig, block_tokens: int) -> KVLayout:
    """Of blocks in float32, of all heads."""
    groups = []
    for layers in config.kv_groups:
        num_parts, num_kv, width = config.kv_shape(config.kv_layers[layers[0]])
        groups.append(LayerGroup(layers=layers, num_parts=num_parts, num_kv_heads=num_kv, head_dim=width))
    return KVLayout(groups=tuple(groups), dtype="float32", block_tokens=block_tokens)


@partial(jax.jit, static_argnames=("model",))
def _history(model: nn.Module, params: Params, tokens: jax.Array) -> kv.KVCache:
    history: Any = model.apply(params, tokens, jnp.arange(tokens.shape[1])[None])[1]
    return history


@partial(jax.jit, static_argnames=("model",))
def _slopes(model: nn.Module, params: Params, history: kv.KVCache, tokens: jax.Array, seed: jax.Array) -> kv.KVCache:
    """The gradient of how unlikely tokens are that the model itself draws behind a history, by its KV."""
    positions = tokens.shape[1] + jnp.arange(tokens.shape[1])[None]

    def loss(layers: tuple[kv.LayerKV, ...]) -> jax.Array:
        logits = model.apply(params, tokens, positions, kv.KVCache(layers, history.lengths))[0].astype(jnp.float32)
        drawn = jax.lax.stop_gradient(jax.random.categorical(jax.random.key(seed[0]), logits))
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[..., None], -1).sum()

    return kv.KVCache(jax.grad(loss)(history.layers), history.lengths)


def _by_group(config: ModelConfig, cache: kv.KVCache) -> list[np.ndarray]:
    """A row's KV, f32 `[l, P, S, K, H]` of each group."""
    layers = [np.concatenate([to_host(part) for part in layer.parts]).astype(np.float32) for layer in cache.layers]
    return [np.stack([layers[number] for number in group]) for group in config.kv_groups]


def _moments_of(numbers: np.ndarray, slopes: np.ndarray) -> _Moments:
    """Of one window `[l, P, S, K, H]`."""
    numbers, slopes = (each[:, :, _NUM_FIRST:].astype(np.float64) for each in (numbers, slopes))
    weight = np.square(slopes).sum(-1, keepdims=True)
    most = _MOST_WEIGHT * weight.mean(2, keepdims=True)
    slopes *= np.sqrt(np.minimum(1, most / np.maximum(weight, np.finfo(np.float64).tiny)))
    numbers, slopes = (_bundled(each) for each in (numbers, slopes))
    return _Moments(numbers.sum(3), numbers @ np.swapaxes(numbers, -1, -2), slopes @ np.swapaxes(slopes, -1, -2))


def _bundled(part: np.ndarray) -> np.ndarray:
    """`[l, P, S, K, H]` as bundles `[l, R, D, S]` of as many KV heads as fit."""
    num_layers, num_parts, num_tokens, num_heads, width = part.shape
    fit = [each for each in range(1, num_heads + 1) if num_heads % each == 0]
    most = max([each for each in fit if each * num_parts * width <= _MOST_WIDTH], default=1)
    return part.transpose(0, 3, 1, 4, 2).reshape(num_layers, num_heads // most, -1, num_tokens)


def _added(a: _Moments, b: _Moments) -> _Moments:
    return _Moments(a.total + b.total, a.squares + b.squares, a.fisher + b.fisher)


def _transform(moments: _Moments, num_tokens: int, shape: Sequence[int]) -> GroupCodec:
    """The basis in which S and F are diagonal, F is one, and numbers are in units of what an error costs.

    Args:
      shape: `[l, P, S, K, H]`, of a window.
    """
    means = moments.total / num_tokens
    spread = moments.squares / num_tokens - means[..., None] * means[..., None, :]
    fisher = moments.fisher / num_tokens
    num_layers, num_parts, _, num_heads, width = shape
    costs = np.diagonal(fisher, axis1=-2, axis2=-1)
    costs = costs.reshape(*costs.shape[:-1], -1, width).mean(-1, keepdims=True)  # Of a head's keys, or of its values.
    costs = np.broadcast_to(costs, (*costs.shape[:-1], width)).reshape(means.shape)
    # Numbers that nothing looks at cost nothing by this measure: a little, so that they come back as they were.
    costs = np.maximum(costs, _LEAST_EIGENVALUE * costs.max())
    fisher = (1 - _SHRINKS) * fisher + _SHRINKS * costs[..., None] * np.eye(means.shape[-1])
    values, vectors = np.linalg.eigh(fisher)
    root = np.sqrt(np.maximum(values, _LEAST_EIGENVALUE * values.max(-1, keepdims=True)))[..., None, :]
    half = (vectors * root) @ np.swapaxes(vectors, -1, -2)
    variances, basis = np.linalg.eigh(half @ spread @ half)
    least = _LEAST_EIGENVALUE * variances.max()
    return GroupCodec(
        means=means.reshape(num_layers, num_heads, num_parts, width).swapaxes(1, 2).astype(np.float32),
        forward=(half @ basis).astype(np.float32),
        spread=np.sqrt(np.maximum(variances, least)).astype(np.float32),
    )


def _with_step(
    groups: Sequence[GroupCodec], fingerprint: str, bits: float, layout: KVLayout, blocks: Sequence[np.ndarray]
) -> KVCodec:
    """The codec with the finest step with which blocks take what they may."""
    room = _FILLS * bits / 8 * blocks[0].size

    def coded(step: float) -> KVCodec:
        scaled = [
            GroupCodec(means=each.means, forward=each.forward / step, spread=each.spread / step) for each in groups
        ]
        return KVCodec(groups=tuple(scaled), fingerprint=fingerprint, bits=bits)

    def takes(step: float) -> float:
        codec = dataclasses.replace(coded(step), bits=32.0)  # Nothing is rounded more coarsely.
        return float(np.mean([len(codec.encode(block, layout)[0]) for block in blocks]))

    middle = float(np.median(np.concatenate([each.spread.reshape(-1) for each in groups])))
    low, high = middle / 256, middle * 256
    for _ in range(14):
        between = float(np.sqrt(low * high))
        low, high = (between, high) if takes(between) > room else (low, between)
    return coded(high)
