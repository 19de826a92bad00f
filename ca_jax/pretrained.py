"""A model ready for research code: pure `apply`, its parameters on the device, its tokenizer.

Not here: serving (engine), reading files (models.checkpoint), drawing weights (models.random_weights).
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ca_jax import backend
from ca_jax.config import WEIGHT_DTYPES
from ca_jax.device.steps import Params
from ca_jax.device.transfer import leaf_to_device, params_to_device, to_device, to_host
from ca_jax.errors import InvalidRequestError, UnknownModelError, check
from ca_jax.models.checkpoint import load_checkpoint
from ca_jax.models.config import ModelConfig
from ca_jax.models.presets import PRESETS
from ca_jax.models.random_weights import random_fingerprint, random_params
from ca_jax.models.sharding import ModelSharding
from ca_jax.models.small_weights import SmallMatrix, as_small, dtype_of, form_of, round_in_place
from ca_jax.models.transformer import Transformer
from ca_jax.models.weights import Checkpoint, Destination, Leaf

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done and how much there is."""

Layout = Callable[[ModelConfig], ModelSharding | None]
"""Lays a model out on devices, given its architecture: `functools.partial(model_sharding, tensor_parallel_size=2)`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel(Checkpoint):
    """A checkpoint on the device. `model.apply(params, tokens, positions, history)` is the pure form."""

    model: nn.Module
    """The linen module."""
    load_s: float = 0.0
    """Seconds it took to load."""
    weight_dtype: str = "model"
    """What its weights were rounded to, as `load_model` says."""
    sharding: ModelSharding | None = None
    """Of the parameters; None: they are on one device."""

    @property
    def dtype(self) -> str:
        """Of the weights."""
        return str(dtype_of(self.params))

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every token without any cache, f32 `[T, V]`. Compiles once per length.

        Raises:
          InvalidRequestError: no tokens, more than the model has positions for, or an id outside the vocabulary.
        """
        check_token_ids(token_ids, self.config.vocab_size)
        if len(token_ids) > self.config.max_positions:
            raise InvalidRequestError(
                f"a prompt must be at most {self.config.max_positions} tokens, got {len(token_ids)}"
            )
        return to_host(_logits(self.model, self.params, to_device([list(token_ids)], np.int32)))[0]

    def laid_out(self, layout: Layout) -> LoadedModel:
        """The same model on the devices that `layout` says. What is there is not copied.

        Raises:
          ValueError: it is on a mesh already, and on another one.
        """
        sharding = layout(self.config)
        if sharding == self.sharding:
            return self
        if self.sharding is not None:
            wanted = "one device" if sharding is None else dict(sharding.mesh.shape)
            raise ValueError(f"the model must be on {wanted}, got one on {dict(self.sharding.mesh.shape)}")
        where = None if sharding is None else sharding.of_params(self.config, self.params)
        return dataclasses.replace(self, params=params_to_device(self.params, where), sharding=sharding)


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequestError for an empty list or an id outside the vocabulary."""
    if not len(token_ids):
        raise InvalidRequestError("there must be at least one token, got none")
    wrong = next((i for i in token_ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(f"token ids must be in [0, {vocab_size}), got {wrong}")


@partial(jax.jit, static_argnames=("model",))
def _logits(model: nn.Module, params: Params, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1])[None]
    return model.apply(params, tokens, positions)[0]


def load_model(
    model: str,
    *,
    dtype: str | None = None,
    weight_dtype: str = "model",
    progress: Progress | None = None,
    layout: Layout | None = None,
) -> LoadedModel:
    """Loads a model by preset name, GGUF file, Hugging Face directory or hub name, or converted checkpoint.

    Each weight goes to its devices as it is read: the host holds no more of them than the largest one takes.

    Args:
      model: which.
      dtype: of the weights; None takes float32 on CPU, where bfloat16 is slower, else bfloat16.
      weight_dtype: one of `WEIGHT_DTYPES`: `model`, what the files hold; `int8` and `int4`, rounded to that, and held
        in it where `dtype` is not float32.
      progress: told how far it is.
      layout: says where its weights go; None: the default device.

    Raises:
      ValueError: its heads cannot be divided as `layout` would, or an unknown `weight_dtype`.
      UnknownModelError: nothing of that name can be had.
      CheckpointError: its files are damaged or do not fit together.
      UnsupportedArchitectureError: it cannot be served; the message says why.
      UnsupportedQuantizationError: a tensor's type cannot be read.
    """
    started_s = time.perf_counter()
    sharding = None
    dtype = dtype or backend.here().dtype
    check(weight_dtype in WEIGHT_DTYPES, "weight_dtype", " or ".join(WEIGHT_DTYPES), weight_dtype)

    def destinations(config: ModelConfig) -> Destination:
        nonlocal sharding
        sharding = None if layout is None else layout(config)

        def put(leaf: Leaf) -> jax.Array | SmallMatrix:
            read, slot = leaf.read(), leaf.slot
            if (form := form_of(config, slot, weight_dtype, dtype)) is not None:
                parts = as_small(slot, read, form)
                where = [None] * len(parts) if sharding is None else sharding.of_small(slot, form)
                return form(*map(leaf_to_device, parts, where))
            if weight_dtype != "model" and dtype == "float32":
                read = round_in_place(config, slot, read, weight_dtype)
            return leaf_to_device(read, None if sharding is None else sharding.of_slot(slot))

        return put

    checkpoint = load_checkpoint(model, dtype=dtype, progress=progress, destinations=destinations)
    if weight_dtype != "model":  # KV is of what is computed with.
        known_by = hashlib.sha256(f"{checkpoint.fingerprint} {weight_dtype}".encode()).hexdigest()
        checkpoint = dataclasses.replace(checkpoint, fingerprint=known_by)
    load_s = time.perf_counter() - started_s
    return LoadedModel(
        **vars(checkpoint),
        model=Transformer(checkpoint.config),
        load_s=load_s,
        sharding=sharding,
        weight_dtype=weight_dtype,
    )


def random_model(preset: str, *, dtype: str | None = None, seed: int = 0, layout: Layout | None = None) -> LoadedModel:
    """Makes a model of a published architecture with random weights: as fast as the real one, and as large.

    Nothing is downloaded and no weight is ever on the host: they are drawn on the device. The model has no tokenizer
    and no stop tokens, it takes and gives token ids. Waits until the weights are there.

    Args:
      preset: one of `models.presets.PRESETS`.
      dtype: of the weights; None as for `load_model`.
      seed: of the weights, in [0, 2^32).
      layout: says where the weights are drawn; None: on the default device.

    Raises:
      UnknownModelError: there is no such preset.
      ValueError: an unknown dtype, a seed out of range, or heads that cannot be divided as `layout` would.
    """
    started_s = time.perf_counter()
    if preset not in PRESETS:
        raise UnknownModelError(f"the preset must be one of {', '.join(sorted(PRESETS))}; got {preset!r}")
    config = PRESETS[preset]
    dtype = dtype or backend.here().dtype
    sharding = None if layout is None else layout(config)
    params = jax.block_until_ready(random_params(config, dtype=dtype, seed=seed, sharding=sharding))
    return LoadedModel(
        name=f"{preset} (random weights)",
        config=config,
        model=Transformer(config),
        params=params,
        tokenizer=None,
        fingerprint=random_fingerprint(config, dtype=dtype, seed=seed),
        load_s=time.perf_counter() - started_s,
        sharding=sharding,
    )
