"""Products with weights in 4 bits, which a kernel of our own makes floats of: nothing wider is ever in memory.

    GPU   (Triton) a program takes some outputs, a share of the groups and up to 128 rows; shares are added behind it
    TPU   (Mosaic) a step takes some outputs and 1,024 inputs and adds to what the steps before it made

Both make the same numbers of codes, rounded to x's dtype, and add products in float32. Elsewhere XLA does, which writes
the matrix out. Whether the device at hand takes its kernel is tried once, on small arrays: `kernel_is_served`.

Shapes: R rows, I inputs, G groups of 32 inputs, O outputs, E experts.

Not here: what weights are rounded to (small_weights).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ca_jax import backend
from ca_jax.models.attention import matmul_precision
from ca_jax.models.small_weights import GROUP, Int4Matrix

NAME = "int4_product"
"""Of the kernels, in compiled programs."""
_HALF = GROUP // 2
_HALVES = {"triton": (jnp.bfloat16, jnp.float16), "mosaic": (jnp.bfloat16,)}  # What each kernel is for.
_LEAST_ROWS = 16  # Of a tile: fewer no tensor core takes, and of 16-bit floats no TPU.
# None of these was timed on a device.
_GPU_ROWS, _GPU_OUTPUTS, _GPU_GROUPS = 128, 64, 4
_GPU_PROGRAMS, _GPU_SPLITS, _GPU_LEAST_GROUPS = 512, 16, 8
_TPU_ROWS, _TPU_OUTPUTS, _TPU_GROUPS, _TPU_LEAST_GROUPS = 640, 1024, 32, 16
_LANES = 128  # Of a TPU's vectors.


def product(x: jax.Array, weights: Int4Matrix, expert: jax.Array | None = None, *, dtype: Any = None) -> jax.Array:
    """Rows times a matrix in 4 bits, by the device's kernel where it serves.

    On a mesh each device multiplies by what it has of the matrix, and what it lacks of the inputs is added up.

    Args:
      x: `[R, I]`, any float.
      weights: one matrix, or those of experts.
      expert: i32, which; None where it is one.
      dtype: of the result; None: x's.

    Returns:
      `[R, O]`.
    """
    kernel = backend.here().kernel
    is_fit = kernel in _HALVES and x.dtype in _HALVES[kernel]
    is_fit &= kernel != "mosaic" or weights.scales.shape[-2] >= _TPU_LEAST_GROUPS
    if not (is_fit and kernel is not None and kernel_is_served(kernel, x.dtype)):
        return by_xla(x, weights, expert, dtype=dtype)
    chosen = jnp.zeros(1, jnp.int32) if expert is None else expert.astype(jnp.int32)[None]
    stacked = weights if expert is not None else (each[None] for each in weights)
    return _on_mesh(kernel, jnp.dtype(dtype or x.dtype).name)(chosen, x, *stacked)


def by_xla(x: jax.Array, weights: Int4Matrix, expert: jax.Array | None = None, *, dtype: Any = None) -> jax.Array:
    """What `product` gives, on any device; see there."""
    if expert is not None:
        weights = Int4Matrix(*(lax.dynamic_index_in_dim(each, expert, keepdims=False) for each in weights))
    out = jnp.dot(x, spelled_out(weights, x.dtype), precision=matmul_precision(x), preferred_element_type=jnp.float32)
    return out.astype(dtype or x.dtype)


def spelled_out(weights: Int4Matrix, dtype: Any) -> jax.Array:
    """A matrix as it is computed with, `[I, O]`."""
    num_groups, num_outputs = weights.scales.shape
    packed = weights.numbers.reshape(num_groups, _HALF, num_outputs)
    codes = jnp.concatenate([packed & 15, packed >> 4], axis=1).astype(jnp.float32)
    scales, offsets = (each.astype(jnp.float32)[:, None] for each in weights[1:])
    return (codes * scales + offsets).astype(dtype).reshape(-1, num_outputs)


@functools.cache
def _on_mesh(kernel: str, dtype: str) -> Any:
    """The kernel, as the compiler divides it among devices: by rows, outputs, or groups of inputs."""
    of_kernel = {"triton": gpu_product, "mosaic": tpu_product}[kernel]

    def whole(chosen: jax.Array, x: jax.Array, *weights: jax.Array) -> jax.Array:
        return of_kernel(chosen, x, Int4Matrix(*weights), dtype=dtype)

    def axes_of(arguments: Any) -> list[Any]:
        """Along which rows, groups and outputs are divided: as x's rows and the scales are."""
        rows, scales = ((*arguments[i].sharding.spec, None, None, None) for i in (1, 3))
        return [rows[0], *scales[1:3]]

    def placed(mesh: Mesh, *axes: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    def partition(mesh: Mesh, arguments: Any, _: Any) -> Any:
        rows, groups, outputs = axes_of(arguments)

        def summed(chosen: jax.Array, x: jax.Array, *weights: jax.Array) -> jax.Array:
            out = of_kernel(chosen, x, Int4Matrix(*weights), dtype="float32")
            return lax.psum(out, groups).astype(dtype)

        of_arguments = (placed(mesh), placed(mesh, rows, groups), *[placed(mesh, None, groups, outputs)] * 3)
        return mesh, whole if groups is None else summed, placed(mesh, rows, outputs), of_arguments

    def infer(mesh: Mesh, arguments: Any, _: Any) -> Any:
        rows, _, outputs = axes_of(arguments)
        return placed(mesh, rows, outputs)

    found = custom_partitioning(whole)
    found.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule="one, rows (groups own), e (groups half) out, e groups out, e groups out -> rows out",
        **{"own": GROUP, "half": _HALF, "reduction_factors": ("groups",)},
        need_replication_factors=("one", "own", "e", "half"),
    )
    return found


def _tile_of(num_rows: int, most: int) -> int:
    return min(max(_LEAST_ROWS, 1 << (num_rows - 1).bit_length()), most)


# On a GPU.


def gpu_product(
    chosen: jax.Array, x: jax.Array, weights: Int4Matrix, *, dtype: Any, interpret: bool = False
) -> jax.Array:
    """Rows `[R, I]` times the chosen one (i32 `[1]`) of matrices `[E, …]`: `[R, O]`; interpreted on any backend."""
    from jax.experimental import pallas as pl  # Here: a jax without it serves all the same, by XLA.
    from jax.experimental.pallas import triton

    num_rows, (_, num_groups, num_outputs) = len(x), weights.scales.shape
    rows = _tile_of(num_rows, _GPU_ROWS)
    width, num_programs = _GPU_OUTPUTS, _GPU_PROGRAMS // (1 if rows == _LEAST_ROWS else 2)
    grid = -(-num_outputs // width), -(-num_rows // rows)
    wanted = min(-(-num_programs // (grid[0] * grid[1])), num_groups // _GPU_LEAST_GROUPS, _GPU_SPLITS)
    num_splits = 1 << (max(wanted, 1).bit_length() - 1)
    out = pl.pallas_call(
        functools.partial(
            _gpu_kernel,
            num_rows=rows,
            width=width,
            at_once=_GPU_GROUPS,
            num_splits=num_splits,
            made=_gpu_made if x.dtype == jnp.bfloat16 and not interpret else _made,
        ),
        grid=(*grid, num_splits),
        out_shape=jax.ShapeDtypeStruct((num_splits, num_rows, num_outputs), dtype if num_splits == 1 else jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=8 if rows > 64 else 4, num_stages=5),
        interpret=interpret,
        name=NAME,
    )(chosen, x, *weights)
    return out[0] if num_splits == 1 else out.sum(0).astype(dtype)


def _gpu_kernel(
    chosen: Any,
    x: Any,
    numbers: Any,
    scales: Any,
    offsets: Any,
    out: Any,
    *,
    num_rows: int,
    width: int,
    at_once: int,
    num_splits: int,
    made: Callable[..., tuple[jax.Array, jax.Array]],
) -> None:
    """So many rows and outputs over a share of the groups: `out [S, R, O]`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    num_groups, num_outputs = scales.shape[1:]
    expert, split = chosen[0], pl.program_id(2)
    column, row = pl.program_id(0) * width + jnp.arange(width), pl.program_id(1) * num_rows + jnp.arange(num_rows)
    row, is_output, is_row = row[:, None], column < num_outputs, (row < x.shape[0])[:, None]
    group, within = jnp.arange(at_once)[:, None, None], jnp.arange(_HALF)[None, :, None]
    place = jnp.arange(at_once * _HALF)
    in_halves = place // _HALF * GROUP + place % _HALF

    def of_groups(step: jax.Array, ref: Any, num_each: int = 1, within: Any = 0) -> jax.Array:
        """What some groups have in an array, of so many rows each; 0 behind the last one."""
        at = expert, (step * at_once + group) * num_each + within, column[None, None, :]
        return triton.load(ref.at[at], mask=(step * at_once + group < num_groups) & is_output, other=0)

    def body(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, *of_step = carry
        following = [
            of_groups(step + 1, each) for each in (scales, offsets)
        ]  # What is so small is not read ahead else.
        halves = made(of_groups(step, numbers, _HALF, within), *of_step, x.dtype)
        for i, weights in enumerate(halves):
            place = step * at_once * GROUP + i * _HALF + in_halves
            rows = triton.load(x.at[row, place[None, :]], mask=is_row & (place < x.shape[1])[None, :], other=0)
            total += triton.dot(rows, weights.reshape(at_once * _HALF, width))
        return total, *following

    num_steps = (num_groups + at_once - 1) // at_once
    share = (num_steps + num_splits - 1) // num_splits
    stop = jnp.minimum((split + 1) * share, num_steps)
    first = split * share
    begun = jnp.zeros((num_rows, width), jnp.float32), *(of_groups(first, each) for each in (scales, offsets))
    total, *_ = lax.fori_loop(first, stop, body, begun)
    column, is_output = column[None, :], is_output[None, :]
    triton.store(out.at[split, row, column], total.astype(out.dtype), mask=is_row & is_output)


def _made(packed: jax.Array, scale: jax.Array, offset: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Weights of packed numbers: of their low halves and of their high ones."""
    wide = packed.astype(jnp.int32)
    scale, offset = (each.astype(jnp.float32) for each in (scale, offset))
    low, high = ((codes.astype(jnp.float32) * scale + offset).astype(dtype) for codes in (wide & 15, wide >> 4))
    return low, high


_ASM = """{
.reg .b32 codes, one, less;
shr.b32 codes, $2, %d;
and.b32 codes, codes, 0x0f0f0f0f;
mov.b32 one, 0x3f803f80;
mov.b32 less, 0xc300c300;
prmt.b32 $0, codes, 0x43434343, 0x5140;
prmt.b32 $1, codes, 0x43434343, 0x7362;
fma.rn.bf16x2 $0, $0, one, less;
fma.rn.bf16x2 $1, $1, one, less;
fma.rn.bf16x2 $0, $0, $3, $5;
fma.rn.bf16x2 $1, $1, $4, $6;
}"""
"""Of four bytes, and the scales and offsets of four weights in two registers each: a byte 0x43 in front of a code makes
128 more than it, in bfloat16. Two instructions a weight; as `_made` says it they are seven, and an H100 would wait for
them."""


def _gpu_made(packed: jax.Array, scale: jax.Array, offset: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """What `_made` gives, in bfloat16."""
    from jax.experimental.pallas import triton

    wide = [jnp.broadcast_to(each, packed.shape) for each in (scale, offset)]

    def half(shift: int) -> jax.Array:
        [found] = triton.elementwise_inline_asm(
            _ASM % shift,
            args=[packed, *wide],
            constraints="=&r,=&r,r,r,r,r,r",
            pack=4,
            result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, dtype)],
        )
        return found

    return half(0), half(4)


# On a TPU.

_CHUNK = 4
"""Groups whose inputs fill the lanes of a vector, 128."""


def _in_planes(dtype: Any) -> jax.Array:
    """What puts a chunk's inputs, by a product, in the order in which the kernel makes rows of its matrix.

    That is by planes of 4 bits of words, and in a plane by groups. Bits of a row's number and of its input's:

        row    plane's byte, plane's half, group (2), word (2), byte of two
        input  group (2), half, word (2), byte of two, plane's byte
    """
    row = jnp.arange(_CHUNK * GROUP)
    word, byte = row >> 1 & 3, (row & 1) * 2 + (row >> 6)
    own = (row >> 3 & 3) * GROUP + (row >> 5 & 1) * _HALF + word * 4 + byte
    return (row[:, None] == own).astype(dtype)


def tpu_product(
    chosen: jax.Array, x: jax.Array, weights: Int4Matrix, *, dtype: Any, interpret: Any = False
) -> jax.Array:
    """As `gpu_product`, of bfloat16; to be interpreted it takes a `pltpu.InterpretParams`."""
    from jax.experimental import pallas as pl  # Here: a jax without it serves all the same, by XLA.
    from jax.experimental.pallas import tpu as pltpu

    num_rows, (_, num_groups, num_outputs) = len(x), weights.scales.shape
    padded = -(-num_rows // _LEAST_ROWS) * _LEAST_ROWS
    rows = min(padded, _TPU_ROWS)
    width = min(num_outputs, _TPU_OUTPUTS if rows <= _LANES else _TPU_OUTPUTS // 2)
    groups = min(num_groups // _TPU_LEAST_GROUPS * _TPU_LEAST_GROUPS, _TPU_GROUPS)
    in_planes = _in_planes(x.dtype)
    if not interpret:  # XLA would copy what fits to the memory beside the cores first, and read it twice.
        weights = Int4Matrix(*(pltpu.with_memory_space_constraint(each, pltpu.HBM) for each in weights))
    grid = -(-padded // rows), -(-num_outputs // width), -(-num_groups // groups)

    def of_weights(num_each: int) -> Any:
        """Of an array that has so many rows a group."""
        return pl.BlockSpec((None, groups * num_each, width), lambda r, o, g, chosen: (chosen[0], g, o))

    out = pl.pallas_call(
        functools.partial(_tpu_kernel, num_groups=num_groups),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[
                pl.BlockSpec((rows, groups * GROUP), lambda r, o, g, chosen: (r, g)),
                pl.BlockSpec(in_planes.shape, lambda r, o, g, chosen: (0, 0)),
                *(of_weights(num_each) for num_each in (_HALF, 1, 1)),
            ],
            out_specs=pl.BlockSpec((rows, width), lambda r, o, g, chosen: (r, o)),
            scratch_shapes=[pltpu.VMEM((rows, width), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((padded, num_outputs), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * padded * num_groups * GROUP * num_outputs,
            transcendentals=0,
            bytes_accessed=grid[0] * num_groups * num_outputs * (_HALF + 4) + x.nbytes + 2 * padded * num_outputs,
        ),
        interpret=interpret,
        name=NAME,
    )(chosen, jnp.pad(x, ((0, padded - num_rows), (0, 0))), in_planes, *weights)
    return out[:num_rows]


def _tpu_kernel(
    _: Any, x: Any, order: Any, numbers: Any, scales: Any, offsets: Any, out: Any, total: Any, *, num_groups: int
) -> None:
    """A block of rows and outputs and some groups, of which the last ones may not be there.

    A word has the halves of 4 rows of bytes. Two of a plane's 4 bits behind a byte 0x43 each are 128 more than these
    codes, in bfloat16: rows of a matrix as it lies in registers, 8 of them a group.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    step, (of_step, width) = pl.program_id(2), scales.shape

    @pl.when(step == 0)
    def begin() -> None:
        total[...] = jnp.zeros(total.shape, jnp.float32)

    own, of_groups = x[...], [each[...].astype(jnp.float32) for each in (scales, offsets)]
    if num_groups % of_step:  # What is read from behind an array may be NaN.
        left = num_groups - step * of_step
        group = lax.broadcasted_iota(jnp.int32, (of_step, width), 0)
        of_groups = [jnp.where(group < left, each, 0) for each in of_groups]
        own = jnp.where(lax.broadcasted_iota(jnp.int32, own.shape, 1) < left * GROUP, own, jnp.zeros_like(own))
    chunks = jnp.split(own, of_step // _CHUNK, axis=1)
    in_order = [jnp.dot(chunk, order[...], preferred_element_type=jnp.float32).astype(own.dtype) for chunk in chunks]
    own = jnp.concatenate(in_order, axis=1)

    is_first = lax.broadcasted_iota(jnp.int32, (8, width), 0) < 4

    def in_rows(of_group: jax.Array) -> jax.Array:
        """A number for each of a group's 8 rows of a plane: of 4 words, in both halves."""
        bits = lax.bitcast_convert_type(of_group, jnp.int32)
        rows = jnp.split(bits | lax.shift_right_logical(bits, 16), of_step)
        pairs = [jnp.where(is_first, *pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
        return pltpu.bitcast(jnp.concatenate(pairs), jnp.bfloat16)

    scale, offset = map(in_rows, of_groups)
    words, planes = pltpu.bitcast(numbers[...], jnp.int32), []
    for plane in range(4):
        codes = pltpu.bitcast((words >> 4 * plane) & 0x000F000F | 0x43004300, jnp.bfloat16) - 128
        planes.append((codes * scale + offset).reshape(-1, _CHUNK * 8, width))
    matrix = jnp.concatenate(planes, axis=1).reshape(of_step * GROUP, width)
    total[...] += jnp.dot(own, matrix, preferred_element_type=jnp.float32)

    @pl.when(step == pl.num_programs(2) - 1)
    def end() -> None:
        out[...] = total[...].astype(out.dtype)


# What the device at hand takes.


@functools.cache
def kernel_is_served(kernel: str, dtype: Any) -> bool:
    """Whether the kernel runs on the default device and computes what it should. The first call compiles it.

    May be called while a function is traced. A warning says why it is not.
    """
    of_kernel = {"triton": gpu_product, "mosaic": tpu_product}[kernel]

    def error() -> jax.Array:
        keys = jax.random.split(jax.random.key(0), 3)
        x = (jax.random.normal(keys[0], (3, 40 * GROUP)) / 64).astype(dtype)
        numbers = jax.random.bits(keys[1], (2, 40 * _HALF, 200), jnp.uint8)
        scales, offsets = jax.random.normal(keys[2], (2, 2, 40, 200)).astype(jnp.bfloat16)
        weights, chosen = Int4Matrix(numbers, scales / 8, offsets), jnp.ones(1, jnp.int32)
        found = of_kernel(chosen, x, weights, dtype=jnp.float32)
        return jnp.abs(found - by_xla(x, weights, chosen[0], dtype=jnp.float32)).max()

    return backend.passes_trial("the kernel for weights in 4 bits", error)
