"""Attention and matrix products as a CPU is best at them: a small C++ library behind `jax.ffi`.

XLA computes attention as products with arrays of scores between them, and reads float32 weights whatever a checkpoint
had. The library reads each key and value once, where it is, and weights in as few bits as their file packed them in.
Both are float32 arithmetic: results differ from XLA's by rounding alone. It is built with the package where there is a
C++ compiler; without it everything is computed by XLA.

Not here: who uses which (attention, transformer), the forms that they replace (attention, transformer).
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ca_jax import backend, native
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import LayerKV

_MAX_PACKED_ROWS = 32

KINDS = {"q4": 320, "q8": 544, "bf16": 1024}
"""Ways to pack weights, smallest first, and the bytes of 32 inputs times 16 outputs: 4 bits with a scale and an offset
for each 32 (GGUF's Q4_0 and Q4_1), 8 bits with a scale (Q8_0), bfloat16."""

_INPUTS, _OUTPUTS = 32, 16  # Of a block of packed weights.
_TARGETS = ("ca_attend_pages", "ca_write_pages", "ca_packed_dot")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, its functions known to XLA; None where it was not built or is not wanted."""
    if (found := native.library()) is None:
        return None
    for name in _TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(found, name)), platform="cpu")
    found.ca_kind.restype = ctypes.c_char_p
    found.ca_pack.restype = ctypes.c_int
    found.ca_pack.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 5, ctypes.c_void_p]
    return found


def kind() -> str | None:
    """What the library's inner loops were compiled for, as the machine takes them: `amx`, `avx512_bf16`, `avx512`,
    `avx2` or `plain`.

    None: everything is computed by XLA.
    """
    lib = library()
    return None if lib is None or backend.here().kernel != "cpu" else lib.ca_kind().decode()


def serves_rows(num_rows: int) -> bool:
    """Whether a product of so many rows is fastest with packed weights.

    Of few, because reading weights is what takes long; of any number where the machine multiplies tiles of bfloat16.
    """
    return num_rows <= _MAX_PACKED_ROWS or kind() == "amx"


def serves_attention(dtype: Any, head_dim: int) -> bool:
    """Whether attention over heads of this kind is computed by the library on the default backend."""
    return head_dim % 4 == 0 and dtype == jnp.float32 and backend.here().kernel == "cpu" and library() is not None


def attend_pages(
    q: jax.Array,
    new: LayerKV | None,
    pages: jax.Array,
    rows: tuple[jax.Array, ...],
    rotation: tuple[jax.Array, jax.Array],
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `paged_attention.attend_pages`."""
    results = jax.ShapeDtypeStruct((1, *q.shape), jnp.float32), jax.ShapeDtypeStruct(pages.shape, jnp.float32)
    call = _function("ca_attend_pages", results, {3: 1})
    nothing = jnp.zeros((1, 0, *pages.shape[2:5:2]), jnp.float32)  # Of no tokens: nothing is written.
    keys, values = (nothing, nothing) if new is None else (new.k, new.v)
    out, pages = call(q[None], keys, values, pages, *rows, *rotation, **_attributes(q, window))
    return out[0], pages


def write_pages(kv: jax.Array, pages: jax.Array, table: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """As `paged_attention.write_places`."""
    call = _function("ca_write_pages", jax.ShapeDtypeStruct(pages.shape, jnp.float32), {1: 0})
    return call(kv, pages, table[None], start[None], count[None])


def _function(name: str, results: Any, aliases: dict[int, int] | None = None) -> Callable[..., Any]:
    """A function of the library; `aliases` says which arguments are written to and come out as which results."""
    if library() is None:
        raise RuntimeError("the package must be built with its CPU kernels for this, and is not")
    return jax.ffi.ffi_call(name, results, input_output_aliases=aliases)


def _attributes(q: jax.Array, window: int | None) -> dict[str, Any]:
    return {"window": np.int64(window or 0), "scale": np.float32(1 / math.sqrt(q.shape[-1]))}


# Packed weights.


def packed_dot(x: jax.Array, packed: jax.Array, num_outputs: int) -> jax.Array:
    """The product of rows `[R, inputs]` with packed weights, f32 `[R, outputs]`."""
    num_blocks = x.shape[1] // _INPUTS * (num_outputs // _OUTPUTS)
    kind = list(KINDS.values()).index(packed.shape[0] // num_blocks)
    call = _function("ca_packed_dot", jax.ShapeDtypeStruct((x.shape[0], num_outputs), jnp.float32))
    return call(x, packed, kind=np.int64(kind))


def pack(weights: Sequence[np.ndarray]) -> np.ndarray | None:
    """Packs matrices `[inputs, outputs]` of the same inputs, their outputs one behind the other.

    Args:
      weights: f32, in any strides.

    Returns:
      u8 `[bytes]`, in the smallest of `KINDS` by which all of them are what they are, to float32's rounding; None where
      there is none, or a size does not fit.
    """
    lib = library()
    sizes = [matrix.shape for matrix in weights]
    if lib is None or any(inputs % _INPUTS or outputs % _OUTPUTS for inputs, outputs in sizes):
        return None
    for kind, block_bytes in enumerate(KINDS.values()):
        parts = []
        for matrix, (inputs, outputs) in zip(weights, sizes, strict=True):
            part = np.empty(inputs // _INPUTS * (outputs // _OUTPUTS) * block_bytes, np.uint8)
            steps = [stride // matrix.itemsize for stride in matrix.strides]
            if not lib.ca_pack(matrix.ctypes.data, inputs, outputs, *steps, kind, part.ctypes.data):
                break
            parts.append(part)
        else:
            return np.concatenate(parts)
    return None


def pack_params(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """Packs what of a model's weights can be: a tree beside its parameters, which `Transformer` reads as `packed`.

    Args:
      params: the tree of parameters, without "params", on the device.

    Returns:
      Leaves u8 `[bytes]` on the host: of each layer `attn.qkv`, `attn.out`, `mlp.wide` and `mlp.down`, and `unembed`.
      What cannot be packed is not there; nothing is on another backend, in another dtype, on a mesh, or where weights
      are held in 8 bits already.
    """
    leaves, is_float = jax.tree.leaves(params), {jnp.dtype(jnp.float32)}
    is_plain = len(leaves[0].sharding.device_set) == 1 and {leaf.dtype for leaf in leaves} <= is_float
    if not is_plain or backend.here().kernel != "cpu" or library() is None:
        return {}
    host = np.asarray
    wanted: dict[tuple[str, ...], list[np.ndarray]] = {}
    for i in range(config.num_layers):
        layer = params[f"layer_{i}"]
        attn, mlp = layer.get("attn"), layer["mlp"]
        if attn is not None and not config.latent_dim:
            matrices = (host(attn[name]) for name in ("wq", "wk", "wv") if name in attn)
            wanted[f"layer_{i}", "attn", "qkv"] = [each.reshape(config.embed_dim, -1) for each in matrices]
            wanted[f"layer_{i}", "attn", "out"] = [host(attn["wo"]).reshape(-1, config.embed_dim)]
        if not config.kind_of(i).has_experts:
            wide = [name for name in ("w_gate", "w_up") if name in mlp]
            wanted[f"layer_{i}", "mlp", "wide"] = [host(mlp[name]) for name in wide]
            wanted[f"layer_{i}", "mlp", "down"] = [host(mlp["w_down"])]
    head = host(params["embed"]["embedding"]).T if config.tie_embeddings else host(params["head"]["kernel"])
    wanted[("unembed",)] = [head]
    found: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, packed in zip(wanted, pool.map(pack, wanted.values()), strict=True):
            if packed is not None:
                place = found
                for key in path[:-1]:
                    place = place.setdefault(key, {})
                place[path[-1]] = packed
    return found
