"""Where a model's arrays lie on a mesh of devices: names of axes mapped to axes of the mesh by one table.

    mesh axis   devices that differ along it have other
    data        running jobs, the pages of their KV and their states
    tensor      KV heads, query heads, heads of states, and parts of the feed-forward block and of the vocabulary
    copy        query heads of the same KV head, which each has; 1 device unless there are fewer KV heads than shards

A model on one device has no `ModelSharding` at all: what takes one does without it what it always did, on arrays that
belong to no mesh.

Not here: crossing to devices (transfer), which leaves a model has (weights), what is computed (steps).
Source: tensor parallelism is Megatron-LM's (Shoeybi et al., 2019): two sums over the devices a layer.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.traverse_util
import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ca_jax.models.config import ModelConfig
from ca_jax.models.small_weights import Int4Matrix, Int8Matrix, SmallMatrix, parts_of
from ca_jax.models.weights import Slot, parameter_slots

_LOG = logging.getLogger(__name__)

RULES = {
    "batch": ("data",),
    "kv_heads": ("tensor",),
    "heads": ("tensor", "copy"),
    "mlp": ("tensor", "copy"),
    "channels": ("tensor", "copy"),
    "vocab": ("tensor", "copy"),
}
"""Which axes of the mesh an axis of an array is divided over. One without a rule is whole on each device (experts are:
each device has its part of every one, by `mlp`), and so is a weight's whose size the devices do not divide."""

MESH_AXES = ("data", "tensor", "copy")
"""Of every mesh, in this order."""

Axes = tuple[str | None, ...]
"""A name for each axis of an array; None where it has none."""


@dataclasses.dataclass(frozen=True)
class ModelSharding:
    """A mesh, and where each array of a model lies on it. Made by `model_sharding`."""

    mesh: Mesh | AbstractMesh
    """Of the axes `MESH_AXES`. An abstract one has no devices: it says shapes and bytes alone."""

    @property
    def num_data(self) -> int:
        """Parts that running jobs are in."""
        return self.mesh.shape["data"]

    @property
    def num_tensor(self) -> int:
        """Parts that query heads are in: the size of tensor parallelism."""
        return self.mesh.shape["tensor"] * self.mesh.shape["copy"]

    @property
    def num_kv(self) -> int:
        """Parts that KV is in by its heads."""
        return self.mesh.shape["tensor"]

    @property
    def shares_rows(self) -> bool:
        """Whether the parts of running jobs are other processes': each saves all of its heads, and needs all rows."""
        if isinstance(self.mesh, AbstractMesh):
            return False
        return any(
            len({device.process_index for device in column}) > 1
            for column in self.mesh.devices.T.reshape(-1, self.num_data)
        )

    @property
    def replicated(self) -> NamedSharding:
        """Of what is whole on each device: activations of a prefill, tokens, lengths, logits."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def kv(self) -> NamedSharding:
        """Of a layer's unrotated KV `[2, T, K, H]`, history or new: by heads, the same on all of `data`."""
        return self.of((None, None, "kv_heads", None))

    @property
    def pages(self) -> NamedSharding:
        """Of a layer's pages `[P, 2, K, page, H]`: by pages and heads."""
        return self.of(("batch", None, "kv_heads", None, None))

    def of_slot(self, slot: Slot) -> NamedSharding:
        """Of a leaf of the parameter tree."""
        return self.of(slot.axes, slot.shape)

    def of_small(self, slot: Slot, form: type[Int8Matrix] | type[Int4Matrix]) -> tuple[NamedSharding, ...]:
        """Of the arrays of a leaf that is held so."""
        return tuple(self.of(part.axes, part.units) for part in parts_of(slot, form))

    def of_params(self, config: ModelConfig, params: Mapping[str, Any]) -> Any:
        """Of all of a model's parameters: a tree like theirs."""
        held = flax.traverse_util.flatten_dict(params)
        leaves = {}
        for slot in parameter_slots(config):
            path = "params", *slot.path
            leaf = held[path]
            is_small = isinstance(leaf, SmallMatrix)
            leaves[path] = type(leaf)(*self.of_small(slot, type(leaf))) if is_small else self.of_slot(slot)
        return flax.traverse_util.unflatten_dict(leaves)

    def of(self, axes: Axes, shape: Sequence[int] | None = None) -> NamedSharding:
        """Of an array by the names of its axes.

        Args:
          axes: the names.
          shape: of the array: where its devices do not divide an axis, that is whole on each. None: they do.
        """
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def spec(self, axes: Axes, shape: Sequence[int] | None = None) -> PartitionSpec:
        """The axes of the mesh for those of an array; see `of`. Equal where the placement is."""
        parts: list[str | tuple[str, ...] | None] = []
        for name in axes if shape is None else self.divided(axes, shape):
            over = self._over(name)
            parts.append(over[0] if len(over) == 1 else over or None)
        while parts and parts[-1] is None:
            parts.pop()
        return PartitionSpec(*parts)

    def divided(self, axes: Axes, shape: Sequence[int]) -> Axes:
        """The names of an array's axes, but None for each that its devices do not divide."""
        parts = (math.prod(self.mesh.shape[each] for each in self._over(name)) for name in axes)
        return tuple(name if size % of == 0 else None for name, size, of in zip(axes, shape, parts, strict=False))

    def _over(self, name: str | None) -> tuple[str, ...]:
        return tuple(each for each in RULES.get(name or "", ()) if self.mesh.shape[each] > 1)


def model_sharding(
    config: ModelConfig, *, data_parallel_size: int = 1, tensor_parallel_size: int = 1, on_paper: bool = False
) -> ModelSharding | None:
    """Lays a model out on the first devices there are.

    Args:
      config: of the model.
      data_parallel_size: parts that running jobs are in.
      tensor_parallel_size: parts of the heads.
      on_paper: without devices, for sizes alone.

    Returns:
      The mesh and where everything lies; None for one device.

    Raises:
      ValueError: heads that cannot be divided so, or a mesh larger than there are devices.
    """
    num_heads = config.num_heads
    of_groups = sorted({num_kv for _, num_kv, _ in config.kv_shapes})
    if not _divides_heads(tensor_parallel_size, num_heads, of_groups):
        possible = [size for size in range(1, num_heads + 1) if _divides_heads(size, num_heads, of_groups)]
        raise ValueError(
            f"tensor_parallel_size must be one of {', '.join(map(str, possible))}, for {num_heads} query heads on "
            f"{' and '.join(map(str, of_groups))} KV heads; got {tensor_parallel_size}"
        )
    num_devices = data_parallel_size * tensor_parallel_size
    if not on_paper and jax.process_count() > 1 and num_devices != jax.device_count():
        raise ValueError(
            f"{jax.process_count()} processes must have a mesh of all their {jax.device_count()} devices, got "
            f"data_parallel_size={data_parallel_size} times tensor_parallel_size={tensor_parallel_size}"
        )
    if num_devices == 1:
        return None
    over_kv = min(tensor_parallel_size, of_groups[0])
    sizes = (data_parallel_size, over_kv, tensor_parallel_size // over_kv)
    if on_paper:
        return ModelSharding(AbstractMesh(sizes, MESH_AXES))
    devices = jax.devices()
    if num_devices > len(devices):
        raise ValueError(
            f"a mesh of data_parallel_size={data_parallel_size} times tensor_parallel_size={tensor_parallel_size} "
            f"there must be {num_devices} devices, got {len(devices)}"
        )
    sizes_of = {"mlp_dim": config.mlp_dim, "vocab_size": config.vocab_size}
    if config.recurrence is not None and config.recurrence.kind != "short_conv":
        sizes_of["recurrence num_value_heads"] = config.recurrence.num_value_heads
    for name, size in sizes_of.items():
        if size % tensor_parallel_size:
            _LOG.warning(
                "%s of %d is not divisible by tensor_parallel_size=%d: each device holds all of those weights",
                name,
                size,
                tensor_parallel_size,
            )
    auto = (AxisType.Auto,) * len(MESH_AXES)
    return ModelSharding(jax.make_mesh(sizes, MESH_AXES, axis_types=auto, devices=devices[:num_devices]))


def _divides_heads(size: int, num_heads: int, of_groups: Sequence[int]) -> bool:
    """Whether each of so many shards has query heads and the KV heads that these read.

    Fewer KV heads than shards are copied, where all groups of layers have as many.
    """
    is_copied = len(of_groups) == 1 and size % of_groups[0] == 0
    return num_heads % size == 0 and (is_copied or all(num_kv % size == 0 for num_kv in of_groups))


def replicated(sharding: ModelSharding | None) -> NamedSharding | None:
    """Where what all devices have lies; None without a mesh."""
    return None if sharding is None else sharding.replicated


def bytes_per_device(arrays: Any) -> int:
    """What a tree of device arrays takes on each device that has part of it."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays)
    )


# Within jitted functions.


def held_axes(weights: jax.Array | SmallMatrix, axes: Axes, of_scales: Axes) -> Any:
    """For `by_device`, of weights that may be held small: names of axes, and of scales' where these are of outputs."""
    if isinstance(weights, Int4Matrix):
        return Int4Matrix(*[axes] * 3)
    return Int8Matrix(axes, of_scales) if isinstance(weights, Int8Matrix) else axes


def constrain(x: jax.Array, sharding: ModelSharding | None, axes: Axes = ()) -> jax.Array:
    """Has an array lie as the names of its axes say; no names: whole on each device. Without a mesh nothing is done."""
    return x if sharding is None else lax.with_sharding_constraint(x, sharding.of(axes, x.shape))


def by_device(
    function: Callable[..., Any], sharding: ModelSharding | None, in_axes: tuple[Any, ...], out_axes: Any
) -> Callable[..., Any]:
    """A function that each device runs over its part of the arguments, which needs nothing of the others' parts.

    Args:
      function: of arrays, or trees of arrays; all that it reads is handed to it.
      sharding: None: the function as it is, over all.
      in_axes: for each argument the names of its axes; of a tree's arrays those of each.
      out_axes: of the result likewise; a tuple of them for a tuple. What is named along no axis of the mesh must be the
        same on all devices.
    """
    if sharding is None:
        return function

    def is_axes(axes: Any) -> bool:
        return all(name is None or isinstance(name, str) for name in axes)

    in_specs, out_specs = jax.tree.map(sharding.spec, (in_axes, out_axes), is_leaf=is_axes)
    # Unchecked: loops here begin with constants, which are the same on all devices, and go on with what is not.
    return jax.shard_map(function, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
