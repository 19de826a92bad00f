"""KV as it is kept where that is int8: each row of a head with a scale of its own behind it.

A token's keys or values of one head are H numbers; at rest they are H int8 and the two bytes of a bfloat16:

    row     q0 q1 q2 … qH-1 | s s        number i is  qi * s,  s = max |number| / 127, rounded up

so that a block stays one array, and heads an axis that can be sharded. The scale is rounded up, so that no number is
above 127 of it: what comes back is off by at most half of it. A row of zeros is zeros. A row that is not finite comes
back as NaN, and touches no other.

Everything here is pure. Shapes: T tokens, K KV heads, H head dim; `*` is whatever is in front.

Not here: what is packed, and when (runner, decode_slots); where it lies (storage).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

SCALE_BYTES = 2
"""Of a row's scale, behind its numbers."""
_LARGEST = 127
_LOW_BITS = 0xFFFF  # Of a float32, which a bfloat16 has not.


def quantize(kv: jax.Array) -> jax.Array:
    """Packs unrotated KV: `[*, H]` of floats to int8 `[*, H + 2]`."""
    numbers = kv.astype(jnp.float32)
    scale = _rounded_up(jnp.abs(numbers).max(-1, keepdims=True) / _LARGEST)
    wide = scale.astype(jnp.float32)
    quotients = jnp.where(wide > 0, numbers / jnp.where(wide > 0, wide, 1), 0)
    rows = jnp.clip(jnp.round(quotients), -_LARGEST, _LARGEST).astype(jnp.int8)
    return jnp.concatenate([rows, lax.bitcast_convert_type(scale[..., 0], jnp.int8)], axis=-1)


def dequantize(packed: jax.Array, dtype: jnp.dtype | str) -> jax.Array:
    """Unpacks: int8 `[*, H + 2]` to `[*, H]`."""
    # Byte by byte: a bitcast of two numbers to one is not fused with what reads them.
    low, high = (packed[..., place].astype(jnp.uint8).astype(jnp.uint16) for place in (-2, -1))
    scale = lax.bitcast_convert_type(high << 8 | low, jnp.bfloat16).astype(jnp.float32)
    return (packed[..., :-SCALE_BYTES].astype(jnp.float32) * scale[..., None]).astype(dtype)


def unpacked(kv: jax.Array, dtype: jnp.dtype | str) -> jax.Array:
    """KV as models compute with it: what is packed is unpacked, all else is as it was."""
    return dequantize(kv, dtype) if kv.dtype == jnp.int8 else kv


def _rounded_up(scale: jax.Array) -> jax.Array:
    """f32 >= 0 to the next bfloat16 that is not below it; NaN stays NaN."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    up = lax.bitcast_convert_type(((bits + _LOW_BITS) >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(scale), up, jnp.bfloat16(jnp.nan))
