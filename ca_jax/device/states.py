"""The states of running jobs' rows, of models whose layers keep such in place of KV.

    cells       0 1 2 3 | 0 1 2 3       of two parts of the rows, each on devices of its own
    of rows     0 0 1 1 | 2 2 3 3       a row's two, see `state_steps`

A row stands behind some of its tokens. What a step writes counts once `stands` says so; what it wrote before that is
written over. `state` gives what a row stands at, to be kept; `restore` has a row go on from there.

Not here: jitted code (state_steps), what is kept where between turns (kv.snapshots).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import numpy as np

from ca_jax.device import state_steps, steps
from ca_jax.device.pages import PoolSize
from ca_jax.device.passes import Step
from ca_jax.device.state_steps import Cells
from ca_jax.device.transfer import part_of, staging_to_device, to_device
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import State
from ca_jax.models.paged_attention import Rows
from ca_jax.models.rope import Rotation
from ca_jax.models.sharding import Axes, ModelSharding, bytes_per_device, replicated


class StatePool:
    """Owner of the cells that states are in, and of the books. Belongs to the engine's thread.

    Args:
      config: of the model.
      dtype: of its weights.
      size: of the pool of pages: rows are as there.
    """

    def __init__(self, config: ModelConfig, dtype: str, size: PoolSize, sharding: ModelSharding | None = None) -> None:
        self._config = config
        self._size = size
        self._sharding = sharding
        self._to_device = partial(to_device, dtype=np.int32, sharding=replicated(sharding))
        self._place = (
            {} if config.recurrence is None else {layer: i for i, layer in enumerate(config.recurrence.layers)}
        )
        self.are_none = not config.num_states
        """Whether no layer of the model keeps a state."""
        self._part_cells = 2 * size.num_rows // size.num_parts
        self._make = partial(state_steps.make_states, config, 2 * size.num_rows, dtype, sharding)
        self.buffers: list[State] = [] if self.are_none else self._make()
        """Of each layer with a state `[c, *shape]`; donated by every call."""
        self._stands: dict[int, tuple[int, int]] = {}  # By row, the cell that it stands in and behind how many tokens.

    @property
    def num_bytes(self) -> int:
        """Of all cells, on each device."""
        return bytes_per_device(self.buffers)

    @property
    def restored_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """How what `restore` is given comes to the device: `[l, *shape]`, the same on all parts."""
        num_layers, first, sharding = len(self.buffers), self.buffers[0], self._sharding

        def of(cells: jax.Array, axes: Axes) -> jax.ShapeDtypeStruct:
            place = None if sharding is None else sharding.of((None, *axes[1:]))
            return jax.ShapeDtypeStruct((num_layers, *cells.shape[1:]), cells.dtype, sharding=place)

        return tuple(map(of, first, state_steps.axes_of(first, sharding)))

    def cells(self, rows: Sequence[int | None]) -> Cells | None:
        """Where rows of a step, or padding, stand, and where they will; None: no layer keeps a state."""
        if self.are_none:
            return None
        read = [0 if row is None else self._place_of(self._cell(row)) for row in rows]
        write = [self._part_cells if row is None else self._place_of(self._cell(row) ^ 1) for row in rows]
        return Cells(self._to_device(read), self._to_device(write))

    def layer_step(self, layer: int, layer_params: steps.Params, x: jax.Array, step: Step) -> jax.Array:
        """Dispatches a layer of a pass, and gives what goes into the next; see `state_steps.layer_step`."""
        at, kind = self._place[layer], self._config.kind_of(layer)
        given = layer_params, x, self.buffers[at], step.cells, step.rows, step.num_tokens, kind
        x, self.buffers[at] = state_steps.layer_step(self._config, *given, sharding=self._sharding)
        return x

    def decode(
        self,
        slots: Sequence[int | None],
        params: steps.Params,
        pages: Sequence[jax.Array],
        tokens: jax.Array,
        rows: Rows,
        tables: tuple[Rotation, ...],
        *,
        packs: bool,
    ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...], list[jax.Array]]:
        """Dispatches a decode step of rows of the pool, and gives all but the states; see `state_steps.decode`."""
        given = params, pages, self.buffers, self.cells(slots), tokens, rows, tables
        *found, self.buffers = state_steps.decode(self._config, *given, packs=packs, sharding=self._sharding)
        logits, likeliest, kv, pages = found
        return logits, likeliest, kv, list(pages)

    def stands(self, rows: Mapping[int, int]) -> None:
        """Rows stand in what the last step has written for them, behind so many tokens each."""
        if not self.are_none:
            self._stands |= {row: (self._cell(row) ^ 1, num_tokens) for row, num_tokens in rows.items()}

    def state(self, row: int, num_tokens: int) -> State | None:
        """What a row stands at, `[l, *shape]` of all layers, fresh; None where it is not behind so many tokens."""
        cell, behind = self._stands.get(row, (2 * row, 0))
        if self.are_none or not behind or behind != num_tokens:
            return None
        place = self._to_device(self._place_of(cell))
        found = state_steps.read_state(self.buffers, place, sharding=self._sharding)
        part = self._size.part_of(row)
        return found if self._sharding is None else tuple(part_of(each, part) for each in found)

    def restore(self, row: int, state: Sequence[np.ndarray], num_tokens: int) -> None:
        """Has a row stand at what `state` gave, behind so many tokens.

        Args:
          state: on the host; it is not written to from now on.
        """
        cell, shapes = self._cell(row), self.restored_shapes
        put = tuple(staging_to_device(each, to.sharding) for each, to in zip(state, shapes, strict=True))
        part = None if self._sharding is None else self._to_device(self._size.part_of(row))
        place = self._to_device(self._place_of(cell))
        self.buffers = state_steps.write_state(self.buffers, place, put, part, sharding=self._sharding)
        self._stands[row] = cell, num_tokens

    def remake_if_broken(self) -> bool:
        """Makes the cells anew, empty, where a call that took them broke; whether one had. Waits."""
        try:
            jax.block_until_ready(self.buffers)
        except RuntimeError:
            self.buffers = self._make()
            self._stands.clear()
            return True
        return False

    def _cell(self, row: int) -> int:
        """Among all."""
        return self._stands.get(row, (2 * row, 0))[0]

    def _place_of(self, cell: int) -> int:
        """Which of its part's it is."""
        return cell % self._part_cells
