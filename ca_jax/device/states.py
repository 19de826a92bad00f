"""The states of running jobs' rows, of models whose layers keep such in place of KV.

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
from ca_jax.device.passes import Step
from ca_jax.device.state_steps import Cells
from ca_jax.device.transfer import to_device
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import State
from ca_jax.models.paged_attention import Rows
from ca_jax.models.rope import Rotation
from ca_jax.models.sharding import bytes_per_device


class StatePool:
    """Owner of the cells that states are in, and of the books. Belongs to the engine's thread.

    Args:
      config: of the model.
      dtype: of its weights.
      num_rows: of the pool of pages.
    """

    def __init__(self, config: ModelConfig, dtype: str, num_rows: int) -> None:
        self._config = config
        self._place = (
            {} if config.recurrence is None else {layer: i for i, layer in enumerate(config.recurrence.layers)}
        )
        self.are_none = not config.num_states
        """Whether no layer of the model keeps a state."""
        self._num_cells = 2 * num_rows
        self._make = partial(state_steps.make_states, config, self._num_cells, dtype)
        self.buffers: list[State] = [] if self.are_none else self._make()
        """Of each layer with a state `[c, *shape]`; donated by every call."""
        self._stands: dict[int, tuple[int, int]] = {}  # By row, the cell that it stands in and behind how many tokens.

    @property
    def num_bytes(self) -> int:
        """Of all cells."""
        return bytes_per_device(self.buffers)

    def cells(self, rows: Sequence[int | None]) -> Cells | None:
        """Where rows of a step, or padding, stand, and where they will; None: no layer keeps a state."""
        if self.are_none:
            return None
        read = [0 if row is None else self._cell(row) for row in rows]
        write = [self._num_cells if row is None else self._cell(row) ^ 1 for row in rows]
        return Cells(to_device(read, np.int32), to_device(write, np.int32))

    def layer_step(self, layer: int, layer_params: steps.Params, x: jax.Array, step: Step) -> jax.Array:
        """Dispatches a layer of a pass, and gives what goes into the next; see `state_steps.layer_step`."""
        at, kind = self._place[layer], self._config.kind_of(layer)
        given = layer_params, x, self.buffers[at], step.cells, step.rows, step.num_tokens, kind
        x, self.buffers[at] = state_steps.layer_step(self._config, *given)
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
        *found, self.buffers = state_steps.decode(self._config, *given, packs=packs)
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
        return state_steps.read_state(self.buffers, to_device(cell, np.int32))

    def restore(self, row: int, state: State, num_tokens: int) -> None:
        """Has a row stand at what `state` gave, behind so many tokens."""
        cell = self._cell(row)
        self.buffers = state_steps.write_state(self.buffers, to_device(cell, np.int32), state)
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
        return self._stands.get(row, (2 * row, 0))[0]
