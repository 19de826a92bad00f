"""Matrices of adapters on the device, beside the model's, and which adapter each running job's row has.

What is loaded changes arrays, never their shapes: nothing is compiled anew. Arrays are replaced, not written to, so
that steps that were dispatched go on with those that they were given.

Not here: reading adapters (models.adapters), their names and who uses them (serving.adapters), the sum (models.parts).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ca_jax.device.transfer import leaf_to_device
from ca_jax.models.adapters import Adapter, places_of
from ca_jax.models.config import ModelConfig
from ca_jax.models.sharding import ModelSharding
from ca_jax.models.weights import resolve_dtype

NO_SLOT = -1
"""The slot of rows and tokens without one."""


@dataclasses.dataclass(frozen=True)
class AdapterSizes:
    """Room for adapters."""

    num_slots: int = 0
    """Adapters that may be there at a time; 0: none, and there are no arrays."""
    rank: int = 0
    """That all are padded to."""


def array_bytes(config: ModelConfig, sizes: AdapterSizes, dtype: str, sharding: ModelSharding | None) -> int:
    """What the room for adapters takes on each device; without a mesh, in all."""
    total = 0
    for place in places_of(config) if sizes.num_slots else ():
        for shape, axes in place.arrays(sizes.num_slots, sizes.rank):
            total += math.prod(shape if sharding is None else sharding.of(axes, shape).shard_shape(shape))
    return total * resolve_dtype(dtype).itemsize


class AdapterSlots:
    """Room for some adapters. Belongs to the engine's thread.

    Args:
      config: of the model.
      sizes: of the room.
      dtype: of the arrays.
      num_rows: of the pool.
      sharding: of the model.
    """

    def __init__(
        self, config: ModelConfig, sizes: AdapterSizes, dtype: str, num_rows: int, sharding: ModelSharding | None
    ) -> None:
        self.sizes = sizes
        """Of the room."""
        self._places = places_of(config) if sizes.num_slots else ()
        self._dtype = resolve_dtype(dtype)
        self._sharding = sharding
        self._slots: dict[int, Adapter] = {}
        self._of_rows = np.full(num_rows, NO_SLOT, np.int32)

    @property
    def are_off(self) -> bool:
        """Whether there is no room for any: then steps are given nothing of adapters."""
        return not self.sizes.num_slots

    def put(self, slot: int, adapter: Adapter | None) -> None:
        """Has a slot hold an adapter, or none; `arrays` then gives what steps read."""
        if adapter is None:
            self._slots.pop(slot, None)
        else:
            self._slots[slot] = adapter

    def arrays(self) -> dict[str, Any]:
        """The variables `adapters` of all layers, new arrays on the device. Waits until they are there."""
        tree: dict[str, Any] = {}
        for place in self._places:
            layer, module, name = place.slot.path
            leaves = tree.setdefault(layer, {}).setdefault(module, {})
            both = place.arrays(self.sizes.num_slots, self.sizes.rank)
            split = place.num_input_axes
            for part, (shape, axes) in enumerate(both):
                whole = np.zeros(shape, self._dtype)
                for slot, adapter in self._slots.items():
                    matrices = adapter.matrices.get(place.slot.path)
                    if matrices is None:
                        continue
                    matrix = matrices[part]
                    if part == 0:  # [inputs, r] into [*inputs, n, rank].
                        whole[..., slot, : matrix.shape[1]] = matrix.reshape(*shape[:split], -1)
                    else:  # [r, outputs] into [n, rank, *outputs].
                        whole[slot, : len(matrix)] = matrix.reshape(-1, *shape[2:])
                where = None if self._sharding is None else self._sharding.of(axes, shape)
                leaves[f"{name}_{'ab'[part]}"] = leaf_to_device(whole, where)
        return tree

    def set_row(self, row: int, slot: int) -> None:
        """Says which adapter a row of the pool has from now on; `NO_SLOT`: none."""
        self._of_rows[row] = slot

    def of_row(self, row: int) -> int:
        """The adapter slot of a row of the pool."""
        return int(self._of_rows[row])

    def of_rows(self, rows: Sequence[int | None]) -> np.ndarray:
        """The adapter slots of rows of the pool, i32 `[n]`; None is padding."""
        return np.fromiter((NO_SLOT if row is None else self._of_rows[row] for row in rows), np.int32, len(rows))

    def of_tokens(self, shape: tuple[int, int], spans: Mapping[int, tuple[int, int, int]]) -> np.ndarray:
        """The adapter slots of a step's tokens, i32 `[D, T']`.

        Args:
          shape: of the step.
          spans: by row of the pool, the part that its tokens are in, the first of them there, and how many they are.
        """
        found = np.full(shape, NO_SLOT, np.int32)
        for row, (part, first, count) in spans.items():
            found[part, first : first + count] = self._of_rows[row]
        return found
