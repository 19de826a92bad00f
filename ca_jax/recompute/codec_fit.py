"""Making a codec of KV for a model: what its numbers are like, and what an error in each of them costs.

Text is fed in windows. Of the first half of each the unrotated KV is an explicit history; the second half is computed
over it, and the gradient of how likely answers are, with tokens drawn from the model itself, is taken with respect to
that history. Two moments of each bundle of heads are kept: of the numbers, S, and of the gradients, F (the Fisher
information). In the basis that diagonalises both, numbers do not go together and an error of one step costs the same in
all of them; rounding all with one step is what loses least at a given size.

Moments with the same bundle of the layers before say how these predict a layer, by least squares. What is left of it is
diagonalised once more, by a rotation, so that an error of one step still costs the same in all directions. Rounding is
noise of a twelfth of a square step in what predicts; and each number that predicts is taken to vary by a fiftieth more
than it does, so that few tokens do not give matrices that hold for these alone. How far numbers spread is said by every
fourth window, of which no matrix is made: what fits its own text spreads less there than elsewhere.

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
from ca_jax.storage.codec import KVCodec
from ca_jax.storage.layout import KVLayout, LayerGroup
from ca_jax.storage.transform import LEAST_SPREAD, GroupCodec

HISTORY_TOKENS = 512
"""Of half a window, by default."""
NUM_EARLIER = 2
"""Layers before one that predict it, by default: the first takes 19 % of the bytes away, the second 7 %."""
_NUM_FIRST = 1  # Tokens at a context's beginning that are like no others.
_MOST_WEIGHT = 20.0  # Times the mean that a token counts for at most.
_SHRINKS = 0.3  # How far F is drawn to a multiple of one.
_SAMPLE_BLOCKS = 6  # By which the step is found.
_FILLS = 0.97  # Of a block's room, in the mean.
_LEAST_EIGENVALUE = 1e-6  # Of the largest.
_RIDGE = 0.02  # Of the variance of each number that predicts, added to it.
_MOST_STEPS = 24  # That are tried.
_NEAR = 0.005  # Of the bits asked for, within which what blocks take is near enough.
_ROUNDING = 1 / 12  # The variance of what rounding adds, square steps.
_APART = 4  # One window in so many says how far numbers spread and what blocks take, and nothing else of numbers.
_MOST_WIDTH = 512  # Numbers of a bundle: a matrix is as wide, and coding a token takes as many operations a number.


@dataclasses.dataclass(frozen=True)
class _Moments:
    """Of a group of layers l with bundles R of D numbers, sums over tokens."""

    total: np.ndarray
    """`[l, R, D]`."""
    products: np.ndarray
    """`[l, 1 + J, R, D, D]`: of numbers of the layers 0 to J before with a layer's; 0 of layers that are not there."""
    num_tokens: int
    """Of numbers."""
    fisher: np.ndarray
    """`[l, R, D, D]`."""


@dataclasses.dataclass(frozen=True)
class _Basis:
    """In which S and F of a group are diagonal, and F is one."""

    codec: GroupCodec
    """With which nothing is predicted."""
    products: np.ndarray
    """f64 `[l, 1 + J, R, D, D]`, covariances in that basis."""
    sample: np.ndarray
    """f32 `[l, R, D, n]`, tokens in that basis."""


def fit_codecs(
    model: LoadedModel,
    token_ids: Sequence[int],
    *,
    bits: Sequence[float],
    block_tokens: int = 128,
    history_tokens: int = HISTORY_TOKENS,
    num_earlier: int = NUM_EARLIER,
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
      num_earlier: layers before one that predict it, J; each takes as much time to decode as a layer alone.
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
    for number, ids in enumerate(windows):
        first, behind = to_device(ids[None, :history_tokens]), to_device(ids[None, history_tokens:])
        history = _history(model.model, model.params, first)
        slopes = _slopes(model.model, model.params, history, behind, to_device([number + seed], np.uint32))
        whole = _by_group(model.config, _history(model.model, model.params, to_device(ids[None])))
        is_apart = number % _APART == 1
        if is_apart:
            sample.append([each[:, :, _NUM_FIRST:] for each in whole])
        added = [
            _moments_of(*each, is_apart, num_earlier)
            for each in zip(whole, _by_group(model.config, slopes), strict=True)
        ]
        moments = [_added(*each) for each in zip(moments, added, strict=True)] if moments else added
        if on_step is not None:
            on_step(window)
    tokens = [np.concatenate(parts, axis=2) for parts in zip(*sample, strict=True)]  # [l, P, S, K, H] of each group.
    stride = max(1, tokens[0].shape[2] // (_SAMPLE_BLOCKS * block_tokens))
    tokens = [each[:, :, ::stride] for each in tokens]
    layout = layout_of(model.config, block_tokens)
    blocks = [
        layout_block(layout, [each[:, :, start : start + block_tokens] for each in tokens])
        for start in range(0, tokens[0].shape[2] - block_tokens + 1, block_tokens)
    ]
    check(bool(blocks), "the text", f"enough for a block of {block_tokens} tokens", len(token_ids))
    num_tokens = len(windows) * (history_tokens - _NUM_FIRST)
    bases = [_basis(each, num_tokens, part) for each, part in zip(moments, tokens, strict=True)]
    return tuple(_with_step(bases, model.fingerprint, each, layout, blocks) for each in bits)


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


def _moments_of(numbers: np.ndarray, slopes: np.ndarray, is_apart: bool, num_earlier: int) -> _Moments:
    """Of one window `[l, P, S, K, H]`; of one that is kept apart the slopes alone."""
    slopes = slopes[:, :, _NUM_FIRST:].astype(np.float64)
    weight = np.square(slopes).sum(-1, keepdims=True)
    most = _MOST_WEIGHT * weight.mean(2, keepdims=True)
    slopes *= np.sqrt(np.minimum(1, most / np.maximum(weight, np.finfo(np.float64).tiny)))
    slopes = _bundled(slopes)
    bundles = _bundled(numbers[:, :, _NUM_FIRST:].astype(np.float64))[..., : 0 if is_apart else None]
    products = np.zeros((len(bundles), 1 + num_earlier, *slopes.shape[1:3], slopes.shape[2]))
    for back in range(min(len(bundles), 1 + num_earlier)):
        products[back:, back] = bundles[: len(bundles) - back] @ np.swapaxes(bundles[back:], -1, -2)
    return _Moments(bundles.sum(3), products, bundles.shape[3], slopes @ np.swapaxes(slopes, -1, -2))


def _bundled(part: np.ndarray) -> np.ndarray:
    """`[l, P, S, K, H]` as bundles `[l, R, D, S]` of as many KV heads as fit."""
    num_layers, num_parts, num_tokens, num_heads, width = part.shape
    fit = [each for each in range(1, num_heads + 1) if num_heads % each == 0]
    most = max([each for each in fit if each * num_parts * width <= _MOST_WIDTH], default=1)
    return part.transpose(0, 3, 1, 4, 2).reshape(num_layers, num_heads // most, -1, num_tokens)


def _added(a: _Moments, b: _Moments) -> _Moments:
    return _Moments(a.total + b.total, a.products + b.products, a.num_tokens + b.num_tokens, a.fisher + b.fisher)


def _basis(moments: _Moments, num_slopes: int, sample: np.ndarray) -> _Basis:
    """The basis in which S and F are diagonal, F is one, and numbers are in units of what an error costs.

    Args:
      moments: of all windows.
      num_slopes: tokens that F is of.
      sample: `[l, P, n, K, H]`, tokens that S is not of.
    """
    means = moments.total / moments.num_tokens
    products = moments.products / moments.num_tokens
    for back in range(min(len(means), products.shape[1])):
        products[back:, back] -= means[: len(means) - back, ..., None] * means[back:, ..., None, :]
    fisher = moments.fisher / num_slopes
    num_layers, num_parts, _, num_heads, width = sample.shape
    costs = np.diagonal(fisher, axis1=-2, axis2=-1)
    costs = costs.reshape(*costs.shape[:-1], -1, width).mean(-1, keepdims=True)  # Of a head's keys, or of its values.
    costs = np.broadcast_to(costs, (*costs.shape[:-1], width)).reshape(means.shape)
    # Numbers that nothing looks at cost nothing by this measure: a little, so that they come back as they were.
    costs = np.maximum(costs, _LEAST_EIGENVALUE * costs.max())
    fisher = (1 - _SHRINKS) * fisher + _SHRINKS * costs[..., None] * np.eye(means.shape[-1])
    values, vectors = np.linalg.eigh(fisher)
    root = np.sqrt(np.maximum(values, _LEAST_EIGENVALUE * values.max(-1, keepdims=True)))[..., None, :]
    half = (vectors * root) @ np.swapaxes(vectors, -1, -2)
    variances, basis = np.linalg.eigh(half @ products[:, 0] @ half)
    forward = half @ basis
    for back in range(min(len(means), products.shape[1])):
        earlier = np.swapaxes(forward[: len(means) - back], -1, -2)
        products[back:, back] = earlier @ products[back:, back] @ forward[back:]
    codec = GroupCodec(
        means=means.reshape(num_layers, num_heads, num_parts, width).swapaxes(1, 2).astype(np.float32),
        forward=forward.astype(np.float32),
        spread=np.sqrt(np.maximum(variances, _LEAST_EIGENVALUE * variances.max())).astype(np.float32),
    )
    return _Basis(codec, products, codec.coded(sample))


def _predicting(basis: _Basis, step: float) -> GroupCodec:
    """The codec of a group with that step, whose layers predict others; what is left of each is diagonalised again.

    A layer of which other text has no less left is not predicted.
    """
    num_layers, most, num_bundles, width = basis.products.shape[:4]
    products = basis.products / step**2
    sample = basis.sample / np.float32(step)
    earlier = np.zeros((num_layers, most - 1, num_bundles, width, width))
    turns = np.broadcast_to(np.eye(width), (num_layers, num_bundles, width, width)).copy()
    spread = np.sqrt(np.square(sample).mean(-1))
    decoded = [np.rint(sample[0]) * (spread[0] > LEAST_SPREAD)[..., None]]
    for layer in range(1, num_layers if most > 1 else 0):
        matrices, turn = _least_squares(products, layer, min(layer, most - 1))
        matrices = [np.swapaxes(turns[layer - 1 - i], -1, -2) @ each @ turn for i, each in enumerate(matrices)]
        # Half as much to read where tiles of bfloat16 are multiplied, and no more bits to what is left.
        matrices = [each.astype(jnp.bfloat16).astype(np.float64) for each in matrices]
        left = np.swapaxes(turn, -1, -2) @ sample[layer]
        for each, before in zip(matrices, decoded[::-1], strict=False):
            left -= np.swapaxes(each, -1, -2) @ before
        found = np.sqrt(np.square(left).mean(-1))
        if np.log(np.square(found) + _ROUNDING).sum() < np.log(np.square(spread[layer]) + _ROUNDING).sum():
            earlier[layer, : len(matrices)] = matrices
            turns[layer], spread[layer] = turn, found
        else:
            left = sample[layer]
        # What rounding takes, and all of numbers that are left out: with them what is left grows from layer to layer.
        lost = left - np.rint(left) * (spread[layer] > LEAST_SPREAD)[..., None]
        decoded.append(np.swapaxes(turns[layer], -1, -2) @ sample[layer] - lost)
    return GroupCodec(
        means=basis.codec.means,
        forward=basis.codec.forward.astype(np.float64) / step @ turns,
        spread=np.maximum(spread, _LEAST_EIGENVALUE * spread.max()),
        earlier=earlier,
        energy=np.trace(products[:, 0], axis1=-2, axis2=-1),
    )


def _least_squares(products: np.ndarray, layer: int, num_earlier: int) -> tuple[list[np.ndarray], np.ndarray]:
    """What a layer's numbers are by those of each layer before, nearest first, `[R, D, D]`, and the basis of the rest.

    Args:
      products: f64 `[l, 1 + J, R, D, D]`, covariances in steps.
      layer: which.
      num_earlier: layers before that predict it, one at least.
    """
    lags = range(1, num_earlier + 1)
    with_layer = np.concatenate([products[layer, back] for back in lags], axis=-2)  # [R, lags * D, D]
    among = np.block([[_product(products, layer - a, layer - b) for b in lags] for a in lags])
    variances = np.diagonal(among, axis1=-2, axis2=-1)
    among += (_ROUNDING + _RIDGE * variances)[..., None] * np.eye(variances.shape[-1])
    matrix = np.linalg.solve(among, with_layer)
    left = products[layer, 0] - np.swapaxes(with_layer, -1, -2) @ matrix
    return np.split(matrix, num_earlier, axis=-2), np.linalg.eigh(left)[1]


def _product(products: np.ndarray, a: int, b: int) -> np.ndarray:
    """Covariances of layer a's numbers with layer b's, `[R, D, D]`."""
    return products[b, b - a] if a <= b else np.swapaxes(products[a, a - b], -1, -2)


def _with_step(
    bases: Sequence[_Basis], fingerprint: str, bits: float, layout: KVLayout, blocks: Sequence[np.ndarray]
) -> KVCodec:
    """The codec with the step with which blocks take what they may."""
    step = float(np.median(np.concatenate([each.codec.spread.reshape(-1) for each in bases])))
    for _ in range(_MOST_STEPS):
        groups = tuple(_predicting(each, step) for each in bases)
        codec = KVCodec(groups=groups, fingerprint=fingerprint, bits=32.0)  # Nothing is rounded more coarsely.
        takes = 8 * float(np.mean([len(codec.encode(block, layout)[0]) for block in blocks])) / blocks[0].size
        over = takes - _FILLS * bits
        if abs(over) < _NEAR * bits:
            break
        step *= 2**over  # A number takes at most a bit less with twice the step.
    return dataclasses.replace(codec, bits=bits)
