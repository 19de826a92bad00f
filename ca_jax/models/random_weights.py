"""Weights that were never trained, made where they are used: for measuring a model's shapes without having the model.

Every matrix is normal with variance 1 / inputs, and what is added to the residual stream is scaled down by the number
of additions, so that activations and logits are of order one however many layers there are, in every dtype served.
Biases are small, and norms scale by 1.

Not here: the shapes themselves (`presets.PRESETS`, `weights.parameter_slots`), trained weights (`checkpoint`).
"""

from __future__ import annotations

import hashlib
import math
from functools import partial

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ca_jax.errors import check
from ca_jax.models.config import ModelConfig
from ca_jax.models.sharding import ModelSharding
from ca_jax.models.weights import Params, Slot, fingerprint, parameter_slots, resolve_dtype

_GENERATOR = "threefry2x32"  # The same numbers on every backend, whatever jax's default is.
_SCHEME = "scaled normals, 1"  # Part of the fingerprint: to be changed with whatever changes the numbers.
_INTO_RESIDUAL = frozenset(
    ("attn.wo", "attn.bo", "mlp.w_down", "mlp.b_down", "experts.w_down", "experts.b_down", "shared.w_down")
)
_BIAS_DEVIATION = 0.1
_MAX_SEED = 2**32


def random_params(config: ModelConfig, *, dtype: str, seed: int = 0, sharding: ModelSharding | None = None) -> Params:
    """Makes random parameters on the device, without a copy on the host. Does not wait.

    Compiles one function for each shape of `config`, whatever the number of layers.

    Args:
      config: the architecture.
      dtype: of the weights: float32, bfloat16 or float16. The narrow ones are those of float32, rounded.
      seed: of all numbers, in [0, 2^32).
      sharding: where each goes, of which each device makes its part; None: the default device. The numbers are the
        same.

    Returns:
      The tree a checkpoint of `config` has, of device arrays.

    Raises:
      ValueError: an unknown dtype, or a seed out of range.
    """
    numpy_dtype = resolve_dtype(dtype)
    check(0 <= seed < _MAX_SEED, "seed", f"in [0, {_MAX_SEED})", seed)
    leaves = {}
    for index, slot in enumerate(parameter_slots(config)):
        place = None if sharding is None else sharding.of_slot(slot)
        if slot.key.endswith(("norm.scale", "out_scale", "router_scale", "share_scale")):
            offset = config.norm_offset if slot.key.endswith("norm.scale") else 0
            leaves[slot.path] = jnp.full(slot.shape, 1 - offset, numpy_dtype, device=place)
        else:
            deviation = np.float32(_deviation(slot, config.num_layers))
            leaves[slot.path] = _normal(np.uint32(seed), np.uint32(index), deviation, slot.shape, numpy_dtype, place)
    return {"params": flax.traverse_util.unflatten_dict(leaves)}


def random_fingerprint(config: ModelConfig, *, dtype: str, seed: int = 0) -> str:
    """What `Checkpoint.fingerprint` is, for `random_params` of the same arguments.

    Raises:
      ValueError: an unknown dtype, or a seed out of range.
    """
    check(0 <= seed < _MAX_SEED, "seed", f"in [0, {_MAX_SEED})", seed)
    content = hashlib.sha256(f"random weights, {_SCHEME}, seed {seed}".encode()).hexdigest()
    return fingerprint(content, config, resolve_dtype(dtype))


def _deviation(slot: Slot, num_layers: int) -> float:
    """Standard deviation of a matrix or bias. A layer adds to the residual stream twice."""
    num_additions = 2 * num_layers if slot.key in _INTO_RESIDUAL else 1
    if len(slot.stored_shape) == 1:
        return _BIAS_DEVIATION / math.sqrt(num_additions)
    num_inputs = slot.stored_shape[1]  # The embedding table is `[V, F]`, and may be the head: F inputs as well.
    return 1 / math.sqrt(num_inputs * num_additions)


@partial(jax.jit, static_argnames=("shape", "dtype", "place"))
def _normal(
    seed: jax.Array,
    index: jax.Array,
    deviation: jax.Array,
    shape: tuple[int, ...],
    dtype: np.dtype,
    place: jax.sharding.NamedSharding | None,
) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed, impl=_GENERATOR), index)
    numbers = (jax.random.normal(key, shape, jnp.float32) * deviation).astype(dtype)
    return numbers if place is None else lax.with_sharding_constraint(numbers, place)
