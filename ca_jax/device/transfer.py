"""The only module that crosses host and device: small data in and out, KV to the device from staging and back.

On an accelerator KV goes through pinned memory: staging is registered for DMA once, and what is saved goes to the
`pinned_host` memory of its device by the device's own copy engine. On CPU host and device are one memory: aligned
staging *is* the device array, and what is saved is read where it was computed. The calls are the same.

Sharded arrays move shard by shard; no device sees another's part, and no process that of another's devices.

Not here: staging and what is loaded when (kv.layer_loader), threads and what is saved (kv.save).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding

from ca_jax import backend

PINNED_HOST = "pinned_host"
"""The memory kind that a device reaches by DMA."""


@dataclasses.dataclass(frozen=True)
class HeldHeads:
    """Which KV heads the devices of this process have: some in a row."""

    start: int
    """The first."""
    stop: int
    """One past the last."""
    num_kv_heads: int
    """K, of the model."""

    def within(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """An index into KV `[2, S, K, H]` of all heads as one into that of these."""
        start, stop, _ = index[2].indices(self.num_kv_heads)
        return (*index[:2], slice(start - self.start, stop - self.start), *index[3:])


def held_heads(sharding: jax.sharding.Sharding | None, num_kv_heads: int) -> HeldHeads | None:
    """Which heads of KV `[2, S, K, H]` this process has; None: all.

    Raises:
      ValueError: they are not in a row.
    """
    if sharding is None or sharding.is_fully_addressable:
        return None
    indices = sharding.addressable_devices_indices_map((2, 1, num_kv_heads, 1)).values()
    held = sorted({head for index in indices if index for head in range(*index[2].indices(num_kv_heads))})
    if held != list(range(held[0], held[-1] + 1)):
        raise ValueError(f"the devices of this process must have consecutive KV heads, got heads {held}")
    return HeldHeads(held[0], held[-1] + 1, num_kv_heads)


def to_device(
    value: npt.ArrayLike, dtype: npt.DTypeLike | None = None, sharding: jax.sharding.Sharding | None = None
) -> jax.Array:
    """Copies small host data (tokens, lengths, parameters of the sampler) to the device. Does not wait.

    Args:
      sharding: where to; None: the default device, bound to no mesh. Where it has devices of other processes, these
        are to be given the same value, and each puts it on its own.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(np.array(value, dtype), sharding)
    return staging_to_device(np.array(value, dtype), sharding)


def to_host(array: jax.Array) -> np.ndarray:
    """Waits for a small device array (tokens) and copies it to the host."""
    return np.asarray(jax.device_get(array))


def params_to_device(params: Any, shardings: Any = None) -> Any:
    """Puts a tree of arrays on the device. On CPU aligned ones are not copied: they must not be written to.

    Args:
      params: arrays of the host, of which each device gets its part and no other; or of other devices.
      shardings: a tree of where each goes; None: the default device.
    """
    if shardings is None:
        return jax.device_put(params)

    def put(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        if isinstance(leaf, jax.Array) and sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        return staging_to_device(np.asarray(leaf), sharding)

    return jax.tree.map(put, params, shardings)


def leaf_to_device(leaf: np.ndarray, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    """Copies one weight to the device and waits: its host memory is free then. On CPU an aligned one is not copied.

    Args:
      leaf: the weight; not written to from now on.
      sharding: where to, each device getting its part and no other; None: the default device, bound to no mesh.
    """
    return jax.block_until_ready(staging_to_device(leaf, sharding))


def staging_to_device(
    view: np.ndarray, sharding: jax.sharding.Sharding | None = None, heads: HeldHeads | None = None
) -> jax.Array:
    """Begins to copy staging memory to the device. Does not wait.

    Args:
      view: what to copy. It must not be written to until everything computed from the array is done: on CPU the array
        is this memory, elsewhere it is read in the background.
      sharding: where to; None: the default device.
      heads: of KV `[2, S, K, H]`, which heads the view has, where other processes have the others; None: it has all.
    """
    if sharding is None:
        return jax.device_put(view)
    shape = view.shape if heads is None else (*view.shape[:2], heads.num_kv_heads, *view.shape[3:])
    parts = [
        jax.device_put(view[index if heads is None or index is None else heads.within(index)], device)
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def own_part(array: jax.Array) -> jax.Array:
    """What this process's devices have of an array, as one of theirs alone. Nothing is copied, nor waited for."""
    if array.is_fully_addressable:
        return array
    sharding: Any = array.sharding
    local = NamedSharding(sharding.mesh.local_mesh, sharding.spec)
    shape = list(array.shape)
    for axis, names in enumerate(sharding.spec):
        for name in () if names is None else (names,) if isinstance(names, str) else names:
            shape[axis] = shape[axis] // sharding.mesh.shape[name] * local.mesh.shape[name]
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    parts = [by_device[device] for device in local.addressable_devices_indices_map(tuple(shape))]
    return jax.make_array_from_single_device_arrays(tuple(shape), local, parts)


def part_of(array: jax.Array, part: int) -> jax.Array:
    """What the devices of one part of `data` have of an array whose first axis that divides, as theirs alone.

    Nothing is copied, nor waited for.
    """
    sharding: Any = array.sharding
    mesh = sharding.mesh
    own = Mesh(mesh.devices[part : part + 1], mesh.axis_names, axis_types=mesh.axis_types)
    shape = (len(array) // mesh.shape["data"], *array.shape[1:])
    place = NamedSharding(own, sharding.spec)
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    parts = [by_device[device] for device in place.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, place, parts)


def to_host_memory(array: jax.Array, memory_kind: str | None = None) -> jax.Array:
    """Begins to copy an array to memory that the host reads without copying. Does not wait.

    Args:
      memory_kind: None: `pinned_host` on an accelerator; on CPU the array stays where it is.

    Returns:
      Of an array that other processes have parts of: this one's part.
    """
    array = own_part(array)
    if memory_kind is None:
        if backend.here().shares_memory or array.sharding.memory_kind == PINNED_HOST:
            return array
        memory_kind = PINNED_HOST
    return jax.device_put(array, array.sharding.with_memory_kind(memory_kind))


def host_view(array: jax.Array) -> np.ndarray:
    """Waits for an array that the host can read, and views it; puts the shards of one together.

    Raises:
      ValueError: some of its shards are another process's.
    """
    if len(array.sharding.device_set) == 1:
        return np.asarray(array)
    if not array.is_fully_addressable:
        raise ValueError(f"all shards of the array must be in this process, got {array.sharding}")
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            whole[shard.index] = np.asarray(shard.data)
    return whole


def is_ready(array: jax.Array) -> bool:
    """Whether an array is computed, without waiting for it."""
    return bool(array.is_ready())  # type: ignore[attr-defined]


def pin_host_memory(memory: np.ndarray) -> bool:
    """Registers host memory for DMA with every local device, so that copies from it need no staging of the driver's.

    Returns:
      Whether it is registered. Where the backend does not offer it (CPU) copies work all the same.
    """
    if not memory.nbytes:
        return False
    pinned: list[Any] = []
    for client in _clients():
        try:
            client.dma_map(memory.ctypes.data, memory.nbytes)
        except (AttributeError, NotImplementedError, RuntimeError):  # RuntimeError: the backend's "not supported".
            for other in pinned:
                other.dma_unmap(memory.ctypes.data)
            return False
        pinned.append(client)
    return True


def unpin_host_memory(memory: np.ndarray) -> None:
    """Undoes `pin_host_memory`. No copy may be under way."""
    for client in _clients():
        client.dma_unmap(memory.ctypes.data)


def device_memory_bytes() -> int | None:
    """Memory of the first local device, or of the machine where the device has none of its own; None if unknown."""
    device = jax.local_devices()[0]
    stats = None if backend.here().shares_memory else device.memory_stats()
    if stats:
        return stats.get("bytes_limit")
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # Not known here.
        return None


def _clients() -> list[Any]:
    return list({id(device.client): device.client for device in jax.local_devices()}.values())
