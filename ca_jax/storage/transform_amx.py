"""The transform where the machine multiplies tiles of bfloat16 (AMX): by a function of the C++ library.

All layers of a block are computed in one call, which takes one thread and does not hold Python's lock. A number is the
sum of two bfloat16 there, and results differ from numpy's by a few 10,000ths of a step: a block that was coded here is
decoded anywhere, and the other way round.

Not here: what is computed (storage.transform), how (ca_jax/models/cpu/transform.h).
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from ca_jax import native

_SIDE = 32  # Inputs and outputs of a block of a packed matrix.
_LINE = 64  # Bytes of a line of the cache: tiles that straddle two load at a third of the speed.
_CODE, _ROUND, _DECODE = range(3)


class _Call(ctypes.Structure):
    """`Transform` of calls.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("what", "layers", "parts", "heads", "dim", "bundles", "width", "tokens")),
        *((name, ctypes.c_int64) for name in ("earlier", "has_rest", "is_half", "first", "stop")),
        *((name, ctypes.c_void_p) for name in ("matrices", "predicting", "means", "kept", "source", "to", "columns")),
        ("unit", ctypes.c_float),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    if (found := native.library()) is not None:
        found.ca_transform.argtypes = [ctypes.POINTER(_Call)]
        found.ca_pack_transform.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
        found.ca_pack_transform.restype = None
    return found


def is_served() -> bool:
    """Whether the library is there, and for this machine."""
    library = _library()
    return library is not None and bool(library.ca_has_transform())


class PackedTransform:
    """The matrices of a group of layers, packed; for machines that are served. Letters are those of a `GroupCodec`.

    Args:
      means: f32 `[l, P, K, H]`.
      kept: `[l, R, D]`, whether a step is kept.
      forward, inverse: f32 `[l, R, D, D]`.
      earlier: f32 `[l, J, R, D, D]`.
    """

    def __init__(
        self, *, means: np.ndarray, kept: np.ndarray, forward: np.ndarray, inverse: np.ndarray, earlier: np.ndarray
    ) -> None:
        self._means, self._kept = np.ascontiguousarray(means), np.ascontiguousarray(kept, np.float32)
        self._forward, self._inverse = _packed(forward), _packed(inverse)
        self._has_rest = bool((earlier.view(np.uint32) & 0xFFFF).any())
        self._earlier, self._num_earlier = _packed(earlier, self._has_rest), earlier.shape[1]

    def coded(self, part: np.ndarray) -> np.ndarray:
        """As that of a `GroupCodec`."""
        part = np.ascontiguousarray(part, np.float32)
        found = np.empty((*self._kept.shape, part.shape[2]), np.float32)
        self._call(_CODE, part, found, part.shape[2])
        return found

    def rounded(self, steps: np.ndarray, unit: float) -> np.ndarray:
        """As that of a `GroupCodec`."""
        steps = np.ascontiguousarray(steps, np.float32)
        codes = np.empty(steps.shape, np.int16)
        self._call(_ROUND, steps, codes, steps.shape[-1], unit)
        return codes

    def columns(self, num_tokens: int) -> np.ndarray:
        """Memory for decoded steps between calls of `decode` for some layers each, u8 `[bytes]`."""
        num_bundles, width = self._kept.shape[1:]
        of_bundle = -(-num_tokens // _SIDE) * _SIDE * -(-width // _SIDE) * _SIDE * 4
        return _in_lines(num_bundles * (self._num_earlier + 1) * of_bundle)

    def decode(
        self, codes: np.ndarray, unit: float, into: np.ndarray, first: int = 0, columns: np.ndarray | None = None
    ) -> None:
        """As that of a `GroupCodec`, of layers from `first` on: those before were decoded with the same columns."""
        codes, is_half = np.ascontiguousarray(codes, np.int16), into.dtype.name == "bfloat16"
        is_written = into.flags.c_contiguous and (is_half or into.dtype == np.float32)
        found = into if is_written else np.empty(into.shape, np.float32)
        self._call(_DECODE, codes, found, codes.shape[-1], unit, is_half and is_written, first, columns)
        if found is not into:
            np.copyto(into, found, casting="unsafe")

    def _call(
        self,
        what: int,
        source: np.ndarray,
        to: np.ndarray,
        num_tokens: int,
        unit: float = 1.0,
        is_half: bool = False,
        first: int = 0,
        columns: np.ndarray | None = None,
    ) -> None:
        matrices = self._forward if what == _CODE else self._inverse
        arrays = (each.ctypes.data for each in (matrices, self._earlier, self._means, self._kept, source, to))
        sizes = (*self._means.shape, *self._kept.shape[1:], num_tokens, self._num_earlier, self._has_rest, is_half)
        library, kept = _library(), None if columns is None else columns.ctypes.data
        call = _Call(what, *sizes, first, first + len(source), *arrays, kept, unit)
        if library is None or not library.ca_transform(call):
            raise RuntimeError("the machine must multiply tiles of bfloat16 for this, and does not")


def _packed(matrices: np.ndarray, has_rest: bool = True) -> np.ndarray:
    """Matrices f32 `[..., D, D]` as the library has them, u8: 4 bytes a number, or 2 where bfloat16 leaves nothing."""
    matrices = np.ascontiguousarray(matrices)
    *many, _, width = matrices.shape
    size = int(np.prod(many)) * (-(-width // _SIDE) * _SIDE) ** 2 * (4 if has_rest else 2)
    packed, library = _in_lines(size), _library()
    if library is not None:
        library.ca_pack_transform(matrices.ctypes.data, int(np.prod(many)), width, has_rest, packed.ctypes.data)
    return packed


def _in_lines(num_bytes: int) -> np.ndarray:
    """Fresh memory that begins with a line of the cache, u8 `[num_bytes]`."""
    memory = np.empty(num_bytes + _LINE, np.uint8)
    return memory[-memory.ctypes.data % _LINE :][:num_bytes]
