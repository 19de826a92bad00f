"""The only module that crosses host and device: small data in and out, KV to the device from staging and back.

On an accelerator KV goes through pinned memory: staging is registered for DMA once, and what is saved goes to the
`pinned_host` memory of its device by the device's own copy engine. On CPU host and device are one memory: aligned
staging *is* the device array, and what is saved is read where it was computed. The calls are the same.

Sharded arrays move shard by shard; no device sees another's part.

Not here: staging and what is loaded when (layer_loader), threads and what is saved (async_saver).
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

PINNED_HOST = "pinned_host"
"""The memory kind that a device reaches by DMA."""


def to_device(
    value: npt.ArrayLike, dtype: npt.DTypeLike | None = None, sharding: jax.sharding.Sharding | None = None
) -> jax.Array:
    """Copies small host data (tokens, lengths, parameters of the sampler) to the device. Does not wait.

    Args:
      value: what.
      dtype: of the array; None: the value's.
      sharding: where to; None: the default device, bound to no mesh.
    """
    return jax.device_put(np.array(value, dtype), sharding)


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
        return jax.device_put(leaf, sharding) if isinstance(leaf, jax.Array) else staging_to_device(leaf, sharding)

    return jax.tree.map(put, params, shardings)


def staging_to_device(view: np.ndarray, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    """Begins to copy staging memory to the device. Does not wait.

    Args:
      view: what to copy. It must not be written to until everything computed from the array is done: on CPU the array
        is this memory, elsewhere it is read in the background.
      sharding: where to; None: the default device.
    """
    if sharding is None:
        return jax.device_put(view)
    parts = [
        jax.device_put(view[index], device)
        for device, index in sharding.addressable_devices_indices_map(view.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(view.shape, sharding, parts)


def to_host_memory(array: jax.Array, memory_kind: str | None = None) -> jax.Array:
    """Begins to copy an array to memory that the host reads without copying. Does not wait.

    Args:
      array: on a device; not one that will be donated.
      memory_kind: None: `pinned_host` on an accelerator; on CPU the array stays where it is.
    """
    if memory_kind is None:
        if _platform(array) == "cpu" or array.sharding.memory_kind == PINNED_HOST:
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
        raise ValueError(f"wanted all shards of the array in this process, found {array.sharding}")
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
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return stats.get("bytes_limit")
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # Not known here.
        return None


def _clients() -> list[Any]:
    return list({id(device.client): device.client for device in jax.local_devices()}.values())


def _platform(array: jax.Array) -> str:
    device: Any = next(iter(array.sharding.device_set))
    return str(device.platform)
