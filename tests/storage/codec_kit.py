"""Codecs of any matrices, and KV with which they are at home or are not, for tests of what codes it."""

from __future__ import annotations

import dataclasses

import numpy as np

from ca_jax.storage.codec import KVCodec
from ca_jax.storage.layout import KVLayout, LayerGroup
from ca_jax.storage.transform import GroupCodec

from .store_helpers import NAMESPACE, make_layout

BLOCK_TOKENS = 32
LAYOUT = make_layout(block_tokens=BLOCK_TOKENS, num_layers=3, num_kv_heads=2, head_dim=8)
DEEP = make_layout(block_tokens=4 * BLOCK_TOKENS, num_layers=12, num_kv_heads=4, head_dim=8)
TWO_SHAPES = KVLayout(
    groups=(
        LayerGroup(layers=(0, 2), num_kv_heads=2, head_dim=8),
        LayerGroup(layers=(1,), num_kv_heads=1, head_dim=12, num_parts=1, window=9),
    ),
    dtype="float16",
    block_tokens=24,
)


def make_codec(layout: KVLayout, bits: float = 8.0, seed: int = 0, step: float = 0.05, **fields: int) -> KVCodec:
    """Of any matrices, with numbers of `make_numbers` in mind. Nothing is predicted."""
    rng, groups = np.random.default_rng(seed), []
    for group in layout.groups:
        shape = (len(group.layers), group.num_parts, group.num_kv_heads, group.head_dim)
        num_bundles = group.num_kv_heads if group.num_kv_heads < 3 else 1
        width = group.token_numbers // num_bundles
        forward = rng.normal(size=(len(group.layers), num_bundles, width, width)) / step / np.sqrt(width)
        spread = np.sqrt(np.square(forward).sum(-2))
        groups.append(GroupCodec(means=rng.normal(size=shape), forward=forward, spread=spread))
    return KVCodec(groups=tuple(groups), fingerprint=NAMESPACE.weights, bits=bits, **fields)


def make_predicting(layout: KVLayout, bits: float = 8.0, left: float = 1.5) -> KVCodec:
    """The same, whose layers are predicted by two before, all but numbers that spread by `left` steps."""
    rng, groups = np.random.default_rng(5), []
    for group in make_codec(layout).groups:
        num_layers, num_bundles, width = group.spread.shape
        turns = np.linalg.qr(rng.normal(size=(num_layers, 2, num_bundles, width, width)))[0]
        gains = np.array([1.0, 0.5])[:, None, None, None]
        spread = np.where(np.arange(num_layers)[:, None, None] == 0, 10 * left, left * np.ones(group.spread.shape))
        energy = np.square(spread).sum(-1)
        for layer in range(1, num_layers):
            energy[layer] += energy[layer - 1] + (0.25 * energy[layer - 2] if layer > 1 else 0)
        groups.append(dataclasses.replace(group, spread=spread, earlier=turns * gains, energy=energy))
    return dataclasses.replace(make_codec(layout, bits), groups=tuple(groups))


def make_correlated(codec: KVCodec, layout: KVLayout, seed: int = 0, outliers: float = 0.0) -> np.ndarray:
    """A block of numbers of which each layer is what those before say, and what nothing says beside."""
    block = np.zeros(layout.block_shape, layout.numpy_dtype)
    rng = np.random.default_rng(seed)
    for group, part in zip(codec.groups, layout.by_group(block), strict=True):
        num_layers, num_bundles, width = group.spread.shape
        _, num_parts, num_heads, head_dim = group.shape
        steps: list[np.ndarray] = []  # [R, T, D]
        for layer in range(num_layers):
            found = rng.normal(size=(num_bundles, layout.block_tokens, width)) * group.spread[layer][:, None]
            is_far = rng.random(found.shape) < outliers * (layer > 0)
            found = np.where(is_far, -24 * group.spread[layer][:, None], found)
            for matrix, each in zip(group.earlier[layer], steps[::-1], strict=False):
                found += each @ matrix
            steps.append(found)
            numbers = found @ np.linalg.inv(group.forward[layer])
            for head in range(num_heads):
                bundle, place = divmod(head, num_heads // num_bundles)
                for which in range(num_parts):
                    at = (place * num_parts + which) * head_dim
                    part[layer, which, :, head] = (
                        numbers[bundle][:, at : at + head_dim] + group.means[layer, which, head]
                    )
    return block


def make_numbers(codec: KVCodec, layout: KVLayout, seed: int = 0) -> np.ndarray:
    """A block of numbers as the codec expects them: normal ones about its means."""
    block = np.zeros(layout.block_shape, layout.numpy_dtype)
    rng = np.random.default_rng(seed)
    for group, part in zip(codec.groups, layout.by_group(block), strict=True):
        part[:] = group.means[:, :, None] + rng.normal(size=part.shape)
    return block


def in_steps(group: GroupCodec, numbers: np.ndarray) -> np.ndarray:
    """Differences `[l, P, T, K, H]` in the codec's steps, by another way than it takes."""
    num_bundles = group.forward.shape[1]
    found = []
    for layer, each in enumerate(numbers):
        for bundle, heads in enumerate(np.split(each, num_bundles, axis=2)):
            rows = [np.concatenate([heads[p, :, k] for k in range(heads.shape[2]) for p in range(len(heads))], axis=-1)]
            found.append(rows[0] @ group.forward[layer, bundle])
    return np.stack(found)


def most_steps(codec: KVCodec, layout: KVLayout, a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two blocks, in the codec's steps, by another way than it takes."""
    worst = 0.0
    for group, *parts in zip(codec.groups, layout.by_group(a), layout.by_group(b), strict=True):
        gap = parts[0].astype(np.float64) - parts[1].astype(np.float64)
        worst = max(worst, float(np.abs(in_steps(group, gap)).max()))
    return worst


def decoded_by_numpy(codec: KVCodec, layers_of: list[np.ndarray]) -> list[np.ndarray]:
    """What is left of numbers `[l, P, T, K, H]` of each group once they were coded, in steps of 1, in float64.

    By another way than the codec's; for tokens that are not kept apart.
    """
    found = []
    for group, part in zip(codec.groups, layers_of, strict=True):
        num_layers, num_bundles, width = group.spread.shape
        _, num_parts, num_heads, head_dim = group.shape
        into, decoded = np.zeros(part.shape), np.zeros((num_layers, num_bundles, part.shape[2], width))
        for layer in range(num_layers):
            for bundle in range(num_bundles):
                at = [
                    (which, head)
                    for head in range(bundle * num_heads // num_bundles, (bundle + 1) * num_heads // num_bundles)
                    for which in range(num_parts)
                ]
                rows = np.concatenate([part[layer, which, :, head].astype(np.float64) for which, head in at], axis=-1)
                means = np.concatenate([group.means[layer, which, head] for which, head in at])
                predicted = np.zeros((part.shape[2], width))
                for back, matrix in enumerate(group.earlier[layer, :, bundle], 1):
                    if layer >= back:
                        predicted += decoded[layer - back, bundle] @ matrix
                codes = np.rint((rows - means) @ group.forward[layer, bundle].astype(np.float64) - predicted)
                decoded[layer, bundle] = predicted + codes * (group.spread[layer, bundle] > 0.2)
                numbers = (
                    decoded[layer, bundle] @ np.linalg.inv(group.forward[layer, bundle].astype(np.float64)) + means
                )
                for number, (which, head) in enumerate(at):
                    into[layer, which, :, head] = numbers[:, number * head_dim : (number + 1) * head_dim]
        found.append(into)
    return found
