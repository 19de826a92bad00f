"""Drift: how the KV of a model moves, in the mean, when tokens before it are dropped and it is computed anew.

What stays of a truncated context has seen the tokens that left, and stands where other KV stood. The difference to KV
that was computed without them has a part that is the same for all texts: a vector for each layer and head. It is
measured once per model and added to what stays, at no cost to speak of.

Not here: measuring it (evaluation.stream), when it is added (repair, truncator).
"""

from __future__ import annotations

import dataclasses
import os
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ca_jax.models.config import ModelConfig

# What numpy raises where a file is another.
_UNREADABLE = (AttributeError, EOFError, KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile)


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
def add_drift(kv: jax.Array, drift: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
    """Adds a layer's drift to some of its tokens.

    Returns:
      A fresh buffer like `kv`.
    """
    places = jnp.arange(kv.shape[1])
    moves = ((places >= start) & (places < stop))[None, :, None, None]
    return jnp.where(moves, kv + drift[:, None].astype(kv.dtype), kv)
