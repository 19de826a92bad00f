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
    """The drift of one model. L layers, K KV heads, H head dim.

    Raises:
      ValueError: values of another shape, or that are no numbers.
    """

    values: np.ndarray
    """f32 `[L, 2, K, H]`: of unrotated keys, then of values."""
    fingerprint: str
    """Of the weights."""
    window: int
    """Context window that it was measured with, tokens."""
    truncation_ratio: float
    """Share of the window that left."""
    num_tokens: int
    """Tokens that it is the mean of."""

    def __post_init__(self) -> None:
        if self.values.ndim != 4 or self.values.shape[1] != 2 or not np.isfinite(self.values).all():
            raise ValueError(f"drift must be numbers [L, 2, K, H], got {self.values.dtype}{list(self.values.shape)}")

    def check_model(self, config: ModelConfig, fingerprint: str) -> None:
        """Refuses the drift of another model.

        Raises:
          ValueError: it is another's.
        """
        wanted = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
        if self.values.shape != wanted or self.fingerprint != fingerprint:
            raise ValueError(
                f"drift must be {list(wanted)} of the model with fingerprint {fingerprint[:12]}, "
                f"got {list(self.values.shape)} of {self.fingerprint[:12]}"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a .npz file."""
        with Path(path).expanduser().open("wb") as file:  # By a path numpy would give the name an ending.
            np.savez(file, **dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Drift:
        """Reads what `save` wrote.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file is another.
        """
        try:
            with np.load(Path(path).expanduser(), allow_pickle=False) as arrays:
                return cls(
                    values=arrays["values"].astype(np.float32),
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
    total, num_tokens, cache = np.zeros(0), 0, nothing
    text = np.fromiter(token_ids, np.int32)
    context, rest = text[:0], text
    while len(rest):
        part, rest = np.split(rest, [window - len(context)])
        context, cache = np.concatenate([context, part]), _extended(model, cache, part, window)
        if on_step is not None:
            on_step(len(part))
        if len(context) < window or window - count <= settled:
            break
        context, stale = context[~discarded], _on_host(cache)[:, :, :window][:, :, ~discarded]
        cache = _extended(model, nothing, context, window)
        fresh = _on_host(cache)[:, :, : window - count]
        moved = (fresh.astype(np.float64) - stale)[:, :, settled:]
        total = total + moved.sum(2) if num_tokens else moved.sum(2)
        num_tokens += moved.shape[2]
    if not num_tokens:
        raise ValueError(
            f"the text must have at least {window} tokens, and more than {settled} of them must stay; "
            f"got {len(token_ids)}, of which {window - count} would"
        )
    return Drift(
        values=(total / num_tokens).astype(np.float32),
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


def _on_host(cache: kv.KVCache) -> np.ndarray:
    """Unrotated KV of its one row, `[L, 2, S, K, H]`."""
    return np.stack([np.concatenate([to_host(part) for part in layer.parts]) for layer in cache.layers])
