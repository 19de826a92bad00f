"""Drift: how the KV of a model moves, in the mean, when tokens before it are dropped and it is computed anew.

What stays of a truncated context has seen the tokens that left, and stands where other KV stood. The difference to KV
that was computed without them has a part that is the same for all texts: a vector for each layer and head. It is
measured once per model and added to what stays, at no cost to speak of: contexts of a text are truncated again and
again, and what stays is computed anew each time.

Not here: when it is added (repair, truncator).
"""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
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
from ca_jax.overflow.config import OverflowConfig, num_leaving, oldest_first
from ca_jax.pretrained import LoadedModel, check_token_ids

# What numpy raises where a file is another.
_UNREADABLE = (AttributeError, EOFError, KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile)
_UNSETTLED = 0.1  # Share of the window behind the cut whose KV moves in a way of its own: those tokens lose most.
_PASS_TOKENS = 128  # Computed at once while drift is measured.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Drift:
    """The drift of one model. L layers with KV of their own, K KV heads, H head dim, which layers may differ in.

    Raises:
      ValueError: values of another shape, or that are no numbers.
    """

    values: tuple[np.ndarray, ...]
    """Of each layer f32 `[2, K, H]`: of unrotated keys, then of values."""
    fingerprint: str
    """Of the weights."""
    window: int
    """Context window that it was measured with, tokens."""
    truncation_ratio: float
    """Share of the window that left."""
    num_tokens: int
    """Tokens that it is the mean of."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(map(np.asarray, self.values)))
        for layer, each in enumerate(self.values):
            if each.ndim != 3 or each.shape[0] != 2 or not np.isfinite(each).all():
                raise ValueError(
                    f"drift of layer {layer} must be numbers [2, K, H], got {each.dtype}{list(each.shape)}"
                )

    def check_model(self, config: ModelConfig, fingerprint: str) -> None:
        """Refuses the drift of another model.

        Raises:
          ValueError: it is another's.
        """
        wanted, found = list(config.kv_shapes), [*map(np.shape, self.values)]
        if found != wanted or self.fingerprint != fingerprint:
            raise ValueError(
                f"drift must be {_shape_of(wanted)} of the model with fingerprint {fingerprint[:12]}, "
                f"got {_shape_of(found)} of {self.fingerprint[:12]}"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a .npz file: `values` of layers of one shape as one array, else each as `values_0` and so on."""
        fields = dataclasses.asdict(self)
        if len({*map(np.shape, self.values)}) > 1:
            fields |= {f"values_{layer}": each for layer, each in enumerate(fields.pop("values"))}
        with Path(path).expanduser().open("wb") as file:  # By a path numpy would give the name an ending.
            np.savez(file, **fields)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Drift:
        """Reads what `save` wrote.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file is another.
        """
        try:
            with np.load(Path(path).expanduser(), allow_pickle=False) as arrays:
                names = [f"values_{layer}" for layer in range(len(arrays.files)) if f"values_{layer}" in arrays.files]
                values = [arrays[name] for name in names] or arrays["values"]
                return cls(
                    values=tuple(each.astype(np.float32) for each in values),
                    fingerprint=str(arrays["fingerprint"]),
                    window=int(arrays["window"]),
                    truncation_ratio=float(arrays["truncation_ratio"]),
                    num_tokens=int(arrays["num_tokens"]),
                )
        except FileNotFoundError:
            raise
        except _UNREADABLE as error:
            raise ValueError(f"the file must be of drift, got {os.fspath(path)}: {error}") from error


@jax.jit
def add_drift(layer_kv: jax.Array, drift: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
    """Adds a layer's drift to some of its tokens.

    Returns:
      A fresh buffer like `layer_kv`.
    """
    places = jnp.arange(layer_kv.shape[1])
    moves = ((places >= start) & (places < stop))[None, :, None, None]
    return jnp.where(moves, layer_kv + drift[:, None].astype(layer_kv.dtype), layer_kv)


def measure_drift(
    model: LoadedModel,
    token_ids: Sequence[int],
    overflow: OverflowConfig,
    *,
    window: int,
    on_step: Callable[[int], None] | None = None,
) -> Drift:
    """Measures the drift of a model.

    Args:
      model: whose.
      token_ids: of any text; two windows long at least, and better ten.
      overflow: how much leaves, and how many first tokens stay.
      window: most tokens of the context.
      on_step: called with the number of tokens of the text that are done, each time some are.

    Raises:
      ValueError: a window above what the model was trained for, or that `overflow` does not fit; a text that is too
        short to overflow it.
      InvalidRequestError: no tokens, or ids outside the vocabulary.
    """
    overflow.check_window(window)
    check(window <= model.config.max_positions, "window", f"at most {model.config.max_positions} tokens", window)
    check_token_ids(token_ids, model.config.vocab_size)
    count = num_leaving(overflow, window=window, num_tokens=window, num_wanted=1)
    discarded = oldest_first(window, count, overflow.keep_first_tokens)
    settled = overflow.keep_first_tokens + round(_UNSETTLED * window)
    nothing = kv.empty(model.config, 1, window + _PASS_TOKENS, model.dtype)
    total, num_tokens, cache = list[np.ndarray](), 0, nothing
    text = np.fromiter(token_ids, np.int32)
    context, rest = text[:0], text
    while len(rest):
        part, rest = np.split(rest, [window - len(context)])
        context, cache = np.concatenate([context, part]), _extended(model, cache, part, window)
        if on_step is not None:
            on_step(len(part))
        if len(context) < window or window - count <= settled:
            break
        context, stale = context[~discarded], [kv[:, :window][:, ~discarded] for kv in _on_host(cache)]
        cache = _extended(model, nothing, context, window)
        fresh = [each[:, : window - count].astype(np.float64) for each in _on_host(cache)]
        moved = [(now - before)[:, settled:].sum(1) for now, before in zip(fresh, stale, strict=True)]
        total = [before + now for before, now in zip(total, moved, strict=True)] if num_tokens else moved
        num_tokens += window - count - settled
    if not num_tokens:
        raise ValueError(
            f"the text must have at least {window} tokens, and more than {settled} of them must stay; "
            f"got {len(token_ids)}, of which {window - count} would"
        )
    return Drift(
        values=tuple((each / num_tokens).astype(np.float32) for each in total),
        fingerprint=model.fingerprint,
        window=window,
        truncation_ratio=overflow.truncation_ratio,
        num_tokens=num_tokens,
    )


def _extended(model: LoadedModel, cache: kv.KVCache, token_ids: np.ndarray, window: int) -> kv.KVCache:
    """A cache with more tokens behind those that it has; the one before stays as it is."""
    for start in range(0, len(token_ids), _PASS_TOKENS):
        part = token_ids[start : start + _PASS_TOKENS]
        padded = np.pad(part, (0, _PASS_TOKENS - len(part)))[None]
        num_new = to_device([len(part)], np.int32)
        cache = _extend(model.model, model.params, cache, to_device(padded), num_new, window)
    return cache


@partial(jax.jit, static_argnames=("model", "window"))
def _extend(
    model: nn.Module, params: Params, cache: kv.KVCache, tokens: jax.Array, num_new: jax.Array, window: int
) -> kv.KVCache:
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
    new: Any = model.apply(params, tokens, positions, cache, window)[1]
    grown = kv.append(cache, kv.KVCache(new.layers, num_new))
    return kv.take(grown, cache.capacity)


def _on_host(cache: kv.KVCache) -> list[np.ndarray]:
    """Unrotated KV of its one row, of each layer `[2, S, K, H]`."""
    return [np.concatenate([to_host(part) for part in layer.parts]) for layer in cache.layers]


def _shape_of(layers: Sequence[Sequence[int]]) -> str:
    """The shapes of layers, as one where they are alike."""
    if len({*map(tuple, layers)}) == 1:
        return str([len(layers), *layers[0]])
    return ", ".join(str(list(each)) for each in layers)
