"""What an engine's steps take to serve a model on a chip: shapes in place of arrays, each where it would lie.

They are those of `Runner` and `PagePool`, and come from the same functions: buckets, pool, mesh.

Not here: the steps themselves (serving).
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property, partial
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

from ca_jax.config import EngineConfig
from ca_jax.device import state_steps, steps
from ca_jax.device.adapters import AdapterSizes
from ca_jax.device.buckets import batch_buckets, history_buckets
from ca_jax.device.pages import PoolSize
from ca_jax.kv.layout import pool_bytes, pool_size
from ca_jax.models.adapters import places_of
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import SCALE_BYTES, State, no_states
from ca_jax.models.paged_attention import Rows
from ca_jax.models.recurrent import CELLS
from ca_jax.models.sharding import Axes, ModelSharding, model_sharding
from ca_jax.models.small_weights import Int4Matrix, SmallMatrix, form_of, parts_of
from ca_jax.models.weights import parameter_slots, resolve_dtype
from ca_jax.serving.core import DEFAULT_WINDOW_TOKENS
from tests.accelerators.chips import Chip
from tests.accelerators.models import MODELS

DTYPE = "bfloat16"
"""Of weights and KV as it is computed."""
ADAPTERS = AdapterSizes(num_slots=4, rank=16)
"""Room for adapters, where there is any."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A model on a chip, or on four: all that its steps take."""

    chip: Chip
    preset: str
    num_devices: int = 1
    weight_dtype: str = "model"

    def __str__(self) -> str:
        held = "" if self.weight_dtype == "model" else f", weights in {self.weight_dtype},"
        return f"{self.preset}{held} on {self.num_devices if self.num_devices > 1 else 'one'} {self.chip.name}"

    @property
    def model(self) -> ModelConfig:
        """Its architecture."""
        return MODELS[self.preset]

    @property
    def engine(self) -> EngineConfig:
        """By default, but for the mesh."""
        sizes = {"tensor_parallel_size": self.num_devices, "context_window": self.window}
        return EngineConfig(weight_dtype=self.weight_dtype, overflow=None, **sizes)

    @property
    def window(self) -> int:
        """Of an engine that is asked for none."""
        return min(self.model.steady_positions, DEFAULT_WINDOW_TOKENS)

    @cached_property
    def sharding(self) -> ModelSharding | None:
        """As `model_sharding` has it, over devices that are not there."""
        paper = model_sharding(self.model, tensor_parallel_size=self.num_devices, on_paper=True)
        if paper is None:
            return None
        devices = np.array(self.chip.devices(self.num_devices)).reshape(paper.mesh.axis_sizes)
        auto = (AxisType.Auto,) * len(paper.mesh.axis_names)
        return ModelSharding(Mesh(devices, paper.mesh.axis_names, axis_types=auto))

    @cached_property
    def pool(self) -> PoolSize:
        """Of all that running jobs may come to need."""
        return pool_size(self.model, DTYPE, self.engine, self.window)

    def has_kernel(self, layer: int) -> bool:
        """Whether a layer's attention over its pages is by a kernel of ours.

        On a GPU not where they hold no values, and not of heads of more than 256 numbers.
        """
        if self.model.is_recurrent(layer):
            return False
        _, parts, *_, head_dim = self.pages_of(layer).shape
        return self.chip.platform == "tpu" or (parts == 2 and head_dim <= 256)

    @property
    def num_kernels(self) -> int:
        """Of all layers."""
        return sum(map(self.has_kernel, range(self.model.num_layers)))

    @property
    def num_places(self) -> int:
        """Of a row's pages."""
        return self.pool.most_pages * self.pool.page_tokens

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Rows that decode together."""
        return batch_buckets(self.engine.max_batch_size, self.chip.served_as.least_rows)

    @property
    def kinds(self) -> dict[str, int]:
        """The first layer of each kind, by what steps of it are called beside their names."""
        first = {self.model.kind_of(layer): layer for layer in reversed(range(self.model.num_layers))}
        return {f", layer {layer}" if layer else "": layer for layer in sorted(first.values())}

    @property
    def pool_bytes(self) -> int:
        """Of each device."""
        return pool_bytes(self.model, DTYPE, self.pool, self.sharding)

    @cached_property
    def weight_bytes(self) -> int:
        """Of each device."""
        return self.bytes_of(self.params)

    def bytes_of(self, tree: Any) -> int:
        """What a tree of shapes takes of each device."""
        leaves = jax.tree.leaves(tree)
        return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)

    # Shapes.

    def shape(self, *sizes: int, dtype: Any = jnp.int32, axes: Axes = ()) -> jax.ShapeDtypeStruct:
        """Of an array where it would lie."""
        return self._placed(sizes, dtype, None if self.sharding is None else self.sharding.of(axes, sizes))

    def _placed(self, sizes: tuple[int, ...], dtype: Any, place: NamedSharding | None) -> jax.ShapeDtypeStruct:
        """There; None: on the one device."""
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=self._device if place is None else place)

    @cached_property
    def _device(self) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.chip.devices(1)[0])

    @cached_property
    def params(self) -> steps.Params:
        """Of the whole model."""
        leaves: dict[tuple[str, ...], Any] = {}
        for slot in parameter_slots(self.model):
            form = form_of(self.model, slot, self.weight_dtype, DTYPE)
            if form is None:
                leaf: Any = self.shape(*slot.shape, dtype=resolve_dtype(DTYPE), axes=slot.axes)
            else:
                places = [None] * 3 if self.sharding is None else self.sharding.of_small(slot, form)
                parts = zip(parts_of(slot, form), places, strict=False)
                leaf = form(*(self._placed(part.shape, part.dtype, place) for part, place in parts))
            leaves["params", *slot.path] = leaf
        return flax.traverse_util.unflatten_dict(leaves)

    @cached_property
    def small_shapes(self) -> set[tuple[int, ...]]:
        """Of what is held small on each device, as it is and as a plain matrix; of experts, all of them and one."""
        leaves, found = flax.traverse_util.flatten_dict(self.params["params"]), set()
        for slot in parameter_slots(self.model):
            if isinstance(leaves[slot.path], SmallMatrix):
                shape = slot.shape if self.sharding is None else self.sharding.of_slot(slot).shard_shape(slot.shape)
                matrix = shape if slot.num_stacked is None else shape[1:]
                num_inputs = math.prod(matrix[: slot.num_inputs])
                found |= {shape, matrix, (num_inputs, math.prod(matrix) // num_inputs), matrix[::-1]}
        return found

    @cached_property
    def variables(self) -> steps.Params:
        """These, and what layers are given by their numbers."""
        return steps.with_places(self.model, self.params, lambda value, dtype: self.shape(dtype=dtype))

    @property
    def outer(self) -> steps.Params:
        """What is outside the layers."""
        return {
            kind: {name: part for name, part in tree.items() if not name.startswith("layer_")}
            for kind, tree in self.variables.items()
        }

    @cached_property
    def with_adapters(self) -> steps.Params:
        """What the model is with room for adapters."""
        tree: dict[tuple[str, ...], jax.ShapeDtypeStruct] = {}
        for place in places_of(self.model):
            for part, (sizes, axes) in zip("ab", place.arrays(ADAPTERS.num_slots, ADAPTERS.rank), strict=True):
                *module, name = place.slot.path
                tree[*module, f"{name}_{part}"] = self.shape(*sizes, dtype=resolve_dtype(DTYPE), axes=axes)
        return {**self.variables, "adapters": flax.traverse_util.unflatten_dict(tree)}

    @cached_property
    def all_pages(self) -> list[jax.ShapeDtypeStruct]:
        """Of each layer that has KV."""
        size = self.pool
        return [
            self.shape(size.num_pages, parts, num_kv, size.page_tokens, width, dtype=jnp.bfloat16, axes=steps.PAGES)
            for parts, num_kv, width in self.model.kv_shapes
        ]

    def pages_of(self, layer: int) -> jax.ShapeDtypeStruct:
        """Those that a layer reads."""
        return self.all_pages[self.model.kv_number(layer)]

    @property
    def own_shapes(self) -> dict[str, int]:
        """The first layer of each shape of KV, by its number among those that have some, as `kinds` has them."""
        first = {shape: number for number, shape in reversed(list(enumerate(self.model.kv_shapes)))}
        return {f", KV {number}" if number else "": number for number in sorted(first.values())}

    @cached_property
    def states(self) -> list[State]:
        """Of each layer that keeps one, all cells."""
        of_layer = jax.eval_shape(partial(no_states, self.model, 2 * self.pool.num_rows, DTYPE))
        places = zip(of_layer, CELLS[: len(of_layer)], strict=True)
        own = tuple(self.shape(*part.shape, dtype=part.dtype, axes=axes) for part, axes in places)
        return [own] * self.model.num_states

    @property
    def one_state(self) -> State:
        """Of all layers that keep one, as a turn's end had it."""
        places = zip(self.states[0], CELLS[: len(self.states[0])], strict=True)
        sizes = ((len(self.states), *part.shape[1:]) for part in self.states[0])
        return tuple(
            self.shape(*size, dtype=part.dtype, axes=(None, *axes[1:]))
            for size, (part, axes) in zip(sizes, places, strict=True)
        )

    def cells(self, count: int) -> state_steps.Cells:
        """Of so many rows."""
        return state_steps.Cells(self.shape(count), self.shape(count))

    @cached_property
    def tables(self) -> Any:
        """Of the rotations of all places, of each of the model's ropes."""
        num_places = max(history_buckets(self.window)[-1], self.num_places)
        rotations = jax.eval_shape(partial(steps.rotation_tables, self.model, num_places))
        return jax.tree.map(lambda part: self.shape(*part.shape, dtype=part.dtype), rotations)

    def rows(self, count: int, num_tokens: int) -> Rows:
        """So many rows of a step, with places for so many tokens."""
        return Rows(self.shape(count, self.pool.most_pages), self.shape(count + 1), self.shape(num_tokens))

    def kv(
        self, num_tokens: int, number: int = 0, *, packed: bool = False, axes: Axes = steps.KV_HEADS
    ) -> jax.ShapeDtypeStruct:
        """One layer's, on its way to pages or from them."""
        parts, num_kv, width = self.model.kv_shapes[number]
        sizes = (parts, num_tokens, num_kv, width + (SCALE_BYTES if packed else 0))
        return self.shape(*sizes, dtype=jnp.int8 if packed else jnp.bfloat16, axes=axes)

    @cached_property
    def x(self) -> jax.ShapeDtypeStruct:
        """What goes into a layer of a pass."""
        width = self.engine.max_num_batched_tokens + self.engine.max_batch_size
        given = jax.eval_shape(partial(steps.embed, self.model), self.outer, jax.ShapeDtypeStruct((1, width), "int32"))
        return self.shape(*given.shape, dtype=given.dtype, axes=steps.ROWS)

    # Least that must be.

    def activations(self, num_tokens: int) -> int:
        """Of one tensor of the residual stream, in float32."""
        return 4 * num_tokens * self.model.embed_dim

    def num_sums(self, layer: int) -> int:
        """Over devices, of a layer: behind attention and the feed-forward block, and of a block beside experts."""
        return 2 + (self.model.kind_of(layer).has_experts and self.model.shared_mlp_dim > 0)

    def channels(self, num_tokens: int) -> int:
        """Of what layers with states convolve, in float32."""
        recurrence = self.model.recurrence
        return 0 if recurrence is None else 4 * num_tokens * recurrence.conv_dim(self.model.embed_dim)

    def logits(self, count: int) -> int:
        return 4 * count * self.model.vocab_size

    def work(self, params: Any, num_tokens: int) -> dict[str, float]:
        """Of the matrices in them, but for embeddings that are only looked up: of experts those that tokens choose."""
        num_experts, own = self.model.num_experts, self.params["params"]
        tables = [own[name]["embedding"] for name in ("embed", "inputs") if name in own]
        looked_up = tables[1:] if self.model.tie_embeddings else tables
        flops = read_bytes = product_bytes = 0.0
        for held in jax.tree.leaves(params, is_leaf=lambda held: isinstance(held, SmallMatrix)):
            leaf = held.numbers if isinstance(held, SmallMatrix) else held
            if leaf.ndim < 2 or leaf.dtype == jnp.float32 or any(leaf is table for table in looked_up):
                continue
            size = self.bytes_of(leaf) / leaf.dtype.itemsize * (2 if isinstance(held, Int4Matrix) else 1)
            is_of_experts = num_experts and leaf.ndim == 3 and leaf.shape[0] == num_experts
            chosen = self.model.num_experts_per_token / num_experts if is_of_experts else 1.0
            flops += 2 * size * chosen * num_tokens
            read_bytes += self.bytes_of(held) * min(chosen * num_tokens, 1)
            width, of_each = self.model.embed_dim, num_experts if is_of_experts else 1
            ends = width + size / of_each / width  # Of a product: all have the residual stream at one end.
            product_bytes += ends * resolve_dtype(DTYPE).itemsize * num_tokens * of_each * chosen
        return {"flops": flops, "read_bytes": read_bytes, "product_bytes": read_bytes + product_bytes}
