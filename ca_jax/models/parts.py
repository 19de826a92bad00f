"""What layers are made of: products of matrices, as the backend does them best, and norms.

Shapes: B batch, T new tokens, F embed.

Not here: attention and layers (transformer), feed-forward blocks (feed_forward).
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from ca_jax import backend
from ca_jax.models import cpu_kernels, int4_product
from ca_jax.models.attention import matmul_precision
from ca_jax.models.config import ModelConfig
from ca_jax.models.small_weights import Int4Matrix, Int8Matrix, SmallMatrix
from ca_jax.models.tpu_attention import LANES

INIT = nn.initializers.normal(0.02)
"""Of matrices, where parameters are made by linen."""
_STEP_ROWS = 128  # Most tokens of a step that decodes, drafts too.
_FEW_ROWS = 16  # Cut out one by one; a function with so many cuts compiles in seconds.


def look_up(table: jax.Array | Int8Matrix, ids: jax.Array, dtype: Any) -> jax.Array:
    """Rows of a table `[V, F]`, by their numbers: i32 `[B, T]` below V to `[B, T, F]` in that dtype, the model's.

    On a TPU a table lies with V on the lanes where F does not fill them, and XLA would lay out all of it anew, at each
    step, to gather from it. There few rows are cut out, and many come of a product, which may have it as it is. So do
    those of a step that decodes from a table in 8 bits of any width, which is also that of logits.
    """
    if isinstance(table, Int8Matrix):
        rows = look_up(table.numbers, ids, dtype).astype(jnp.float32)
        return (rows * jnp.take(table.scales, ids)[..., None]).astype(dtype)
    flat, fills_lanes = ids.reshape(-1), table.shape[1] % LANES == 0
    is_product = table.dtype == jnp.int8 and len(flat) <= _STEP_ROWS
    if backend.here().kernel != "mosaic" or (fills_lanes and not is_product):
        return jnp.take(table, ids, axis=0)
    if len(flat) <= _FEW_ROWS and not fills_lanes:
        rows = jnp.concatenate([lax.dynamic_slice_in_dim(table, number, 1) for number in flat])
    else:
        chosen = jax.nn.one_hot(flat, len(table), dtype=dtype)
        rows = jnp.dot(chosen, table.astype(dtype), precision=matmul_precision(chosen))
    return rows.reshape(*ids.shape, -1)


def matrix(module: nn.Module, name: str, shape: tuple[int, ...]) -> jax.Array | SmallMatrix:
    """A matrix of a module's parameters, as it is held; linen checks the shape of one that is not in 4 bits."""
    held: Any = module.get_variable("params", name)
    return held if isinstance(held, Int4Matrix) else module.param(name, INIT, shape)


def project(
    x: jax.Array, weights: jax.Array | SmallMatrix, num_inputs: int = 1, expert: jax.Array | None = None
) -> jax.Array:
    """Contracts the last `num_inputs` axes of x with the first of the weights, as one plain matrix product.

    Of the weights of experts, which one's it says; the result of weights in 4 bits has one axis of outputs.

    Written out as 2-D because the CPU backend has a fast path for that alone: 30 layers at one token took 20 ms so,
    31 ms as an einsum over `[B, T, F] [F, N, H]`.
    """
    if isinstance(weights, Int4Matrix):
        leading = x.shape[: x.ndim - num_inputs]
        return int4_product.product(x.reshape(math.prod(leading), -1), weights, expert).reshape(*leading, -1)
    if expert is not None:
        own: Any = jax.tree.map(lambda each: lax.dynamic_index_in_dim(each, expert, keepdims=False), weights)
        return project(x, own, num_inputs)
    if isinstance(weights, Int8Matrix):
        if backend.here().kernel == "triton":
            # Of several products of the same x XLA for GPUs makes one, and writes weights out in bfloat16 for that.
            x = lax.optimization_barrier(x)
        out = project(x, weights.numbers.astype(x.dtype), num_inputs)
        return (out.astype(jnp.float32) * weights.scales).astype(x.dtype)
    split = x.ndim - num_inputs
    leading, trailing = x.shape[:split], weights.shape[num_inputs:]
    rows = math.prod(leading)
    flat = jnp.dot(
        x.reshape(rows, -1), weights.reshape(math.prod(weights.shape[:num_inputs]), -1), precision=matmul_precision(x)
    )
    return flat.reshape(*leading, *trailing)


def packed_product(module: nn.Module, name: str, x: jax.Array, num_outputs: int) -> jax.Array | None:
    """`x [..., inputs]` times weights that lie packed beside a module's parameters; None where it has none for it.

    They are in the collection `packed`, of `cpu_kernels.pack_params`, and serve as many rows as that says.
    """
    num_rows = math.prod(x.shape[:-1])
    if not cpu_kernels.serves_rows(num_rows) or not module.has_variable("packed", name):
        return None
    packed: jax.Array = module.get_variable("packed", name)
    return cpu_kernels.packed_dot(x.reshape(num_rows, -1), packed, num_outputs).reshape(*x.shape[:-1], num_outputs)


def adapted(module: nn.Module, name: str, x: jax.Array, out: jax.Array, num_inputs: int = 1) -> jax.Array:
    """The product `out` of `x` and a matrix of a module, and what each token's adapter adds to it, if there are any.

    They are in the collection `adapters`: A `[inputs, n, r]` and B `[n, r, outputs]` of n slots, see `models.adapters`,
    and `chosen [..., n, 1]`, 1 at a token's own slot.
    """
    if not module.has_variable("adapters", f"{name}_a"):
        return out
    a: jax.Array = module.get_variable("adapters", f"{name}_a")
    b: jax.Array = module.get_variable("adapters", f"{name}_b")
    chosen: jax.Array = module.get_variable("adapters", "chosen")
    added = project(project(x, a, num_inputs) * chosen, b, num_inputs=2)
    return out + added.reshape(out.shape).astype(out.dtype)


class Norm(nn.Module):
    """Divides by the root mean square over F and scales (Zhang and Sennrich, 2019); f32 inside.

    With `is_layer` it first takes off the mean, and may shift behind (LayerNorm: Ba et al., 2016). It may be over
    several axes, the last ones, and need not scale.
    """

    eps: float
    is_layer: bool = False
    has_bias: bool = False
    offset: float = 0.0
    num_axes: int = 1
    has_scale: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., F]` to the same shape and dtype."""
        shape, axes = x.shape[-self.num_axes :], tuple(range(-self.num_axes, 0))
        full = x.astype(jnp.float32)
        if self.is_layer:
            full = full - jnp.mean(full, axis=axes, keepdims=True)
        full = full * jax.lax.rsqrt(jnp.mean(full * full, axis=axes, keepdims=True) + self.eps)
        if not self.has_scale:
            return full.astype(x.dtype)
        scale = self.param("scale", nn.initializers.constant(1 - self.offset), shape)
        if self.offset:
            scale = scale.astype(jnp.float32) + self.offset
        elif not self.is_layer:
            return full.astype(x.dtype) * scale.astype(x.dtype)
        full = full * scale
        if self.has_bias:
            full = full + self.param("bias", nn.initializers.zeros, shape)
        return full.astype(x.dtype)


class Scale(nn.Module):
    """The scale of a norm by itself."""

    @nn.compact
    def __call__(self, size: int) -> jax.Array:
        """Of so many numbers, f32."""
        scale: jax.Array = self.param("scale", nn.initializers.ones, (size,))
        return scale.astype(jnp.float32)


def norm_of(config: ModelConfig) -> Norm:
    """A norm over the residual stream."""
    is_layer = config.norm == "layer"
    return Norm(config.norm_eps, is_layer, is_layer and config.norm_bias, config.norm_offset)
