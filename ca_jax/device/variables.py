"""A model's variables as steps are given them: parameters, and collections of others beside these.

Not here: the parameter tree (models.weights), what lies beside it and why (models.cpu_kernels, device.adapters).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ca_jax.models.config import ModelConfig

Params = Any
"""A tree of linen variables."""

BESIDE = ("packed", "adapters", "places")
"""Collections of variables beside the parameters: weights packed for a CPU, matrices of adapters, layers' numbers."""


def apply(module: nn.Module, variables: Params, *args: Any, method: Any = None) -> Any:
    """`module.apply`, typed as it is used here."""
    return module.apply(variables, *args, method=method)


def variables_of(layer_params: Params, adapters: jax.Array | None = None) -> Params:
    """A layer's variables, from its parameters and, under `packed` and `adapters`, those that lie beside them.

    Args:
      adapters: i32 `[D, T]`, the adapter slot of each token that is computed, -1 for none; None: there are no slots.
    """
    params = dict(layer_params)
    beside = {kind: params.pop(kind) for kind in BESIDE if kind in params}
    if adapters is None:
        beside.pop("adapters", None)
    elif "adapters" in beside:
        of_queries = beside["adapters"]["attn"]["wq_b"]
        chosen = (adapters[..., None] == jnp.arange(len(of_queries)))[..., None].astype(of_queries.dtype)
        beside["adapters"] = {module: {**arrays, "chosen": chosen} for module, arrays in beside["adapters"].items()}
    return {"params": params, **beside}


def with_places(config: ModelConfig, variables: Params, to_device: Callable[..., jax.Array]) -> Params:
    """A model's variables with each layer's number among them, where layers are given something by it."""
    if not config.layer_input_dim:
        return variables
    return {**variables, "places": {f"layer_{i}": {"number": to_device(i, "int32")} for i in range(config.num_layers)}}


def layer_of(variables: Params, layer: int) -> Params:
    """The parameters of one layer, with what lies beside them."""
    name = f"layer_{layer}"
    beside = {kind: variables[kind][name] for kind in BESIDE if name in variables.get(kind, {})}
    return {**variables["params"][name], **beside}
