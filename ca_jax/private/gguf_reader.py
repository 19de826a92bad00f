"""The reader of the `gguf` package, made faster and stricter in two of its steps, which are not public.

Private: `GGUFReader._get_field_parts` and `._build_tensors`, which are overridden, and `._get`. gguf 0.17 to 0.19 have
them, and `pyproject.toml` allows no other. Without the first a vocabulary of 50,000 strings takes seconds to open: the
package makes three numpy views of each. Without the second a file that is cut off, or has a type of tensor that the
package does not know, is refused without saying which tensor it is.

Not here: what the metadata means (`models.gguf`).
"""

from __future__ import annotations

import struct
from typing import Any

import gguf
import numpy as np

from ca_jax.errors import UnsupportedQuantizationError


class Reader(gguf.GGUFReader):
    """The package's reader: it finds the same, in one pass over the bytes of an array.

    Raises:
      OSError: the file cannot be read.
      UnsupportedQuantizationError: a tensor's type is unknown to the package.
      ValueError, IndexError, KeyError, OverflowError, struct.error: it is not a whole GGUF file.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        mapped = self.data.data
        raw_item_type, length = struct.unpack_from("<IQ", mapped, orig_offs)
        item_type = gguf.GGUFValueType(raw_item_type)
        types = [gguf.GGUFValueType.ARRAY, item_type]
        offset = orig_offs + 12
        if item_type in self.gguf_scalar_to_np:
            values = self._get(offset, self.gguf_scalar_to_np[item_type], length)
            if len(values) < length:
                raise ValueError(f"the metadata must have an array of {length} values, got the file's end")
            return 12 + values.nbytes, [values], [0], types
        if item_type != gguf.GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        strings = []
        for _ in range(length):
            (num_bytes,) = struct.unpack_from("<Q", mapped, offset)
            strings.append(mapped[offset + 8 : offset + 8 + num_bytes])
            offset += 8 + num_bytes
        return offset - orig_offs, strings, list(range(length)), types

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        for field in fields:
            _, name_data, _, dims, raw_type, offset = field.parts
            name = bytes(name_data).decode()
            try:
                block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(raw_type[0])]
            except (ValueError, KeyError) as error:
                raise UnsupportedQuantizationError(
                    f"tensor {name}: type {raw_type[0]} is unknown to gguf, so it cannot be dequantised"
                ) from error
            end = start_offs + int(offset[0]) + int(np.prod(dims)) * block_bytes // block_elements
            if end > self.data.nbytes:
                raise ValueError(
                    f"tensor {name}: the file must have bytes up to {end}, got a file of {self.data.nbytes}"
                )
        super()._build_tensors(start_offs, fields)
