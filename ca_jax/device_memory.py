"""What the engine's buffers take of the device, and whether that fits.

Not here: the buffers themselves (layer_loader, write_buffer, runner).
"""

from __future__ import annotations

from ca_jax.config import EngineConfig
from ca_jax.runner import Runner
from ca_jax.storage.config import GIB
from ca_jax.storage.layout import KVLayout
from ca_jax.transfer import device_memory_bytes

_EXECUTION_REGIONS = 2  # Of the read buffer's memory, behind its cap.


def staging_bytes(layout: KVLayout, config: EngineConfig, max_tokens: int) -> int:
    """Bytes of staging: the read buffer under its cap, and the execution regions behind it."""
    layer_bytes = layout.token_bytes // layout.num_layers * max_tokens
    everything = layout.num_layers * layer_bytes
    if config.read_buffer_gib is None:
        return everything
    return min(int(config.read_buffer_gib * GIB) + _EXECUTION_REGIONS * layer_bytes, everything)


def check_buffers(config: EngineConfig, layout: KVLayout, runner: Runner) -> None:
    """Checks that the read and the write buffer fit beside the weights and the decode slots, on each device.

    Raises:
      ValueError: they do not, or the cap of one is more than there is, however much of it would be used.
    """
    capacity = device_memory_bytes()
    if capacity is None:
        return
    num_parts = 1 if runner.sharding is None else runner.sharding.num_kv
    for name, cap_gib in (("read_buffer_gib", config.read_buffer_gib), ("write_buffer_gib", config.write_buffer_gib)):
        if cap_gib is not None and cap_gib / num_parts * GIB > capacity:
            whose = "the device's" if num_parts == 1 else f"{num_parts} times a device's"
            raise ValueError(f"{name} wanted at most {whose} {capacity / GIB:.2f} GiB of memory, found {cap_gib}")
    read_bytes = staging_bytes(layout, config, runner.history_buckets[-1])
    wanted = {
        "the read buffer": read_bytes // num_parts,
        "write_buffer_gib": int(config.write_buffer_gib * GIB) // num_parts,
        "the weights": runner.param_bytes,
        "the decode slots": runner.slots.num_bytes,
    }
    if sum(wanted.values()) > capacity:
        parts = ", ".join(f"{num_bytes / GIB:.2f} for {name}" for name, num_bytes in wanted.items())
        raise ValueError(f"wanted at most the device's {capacity / GIB:.2f} GiB of memory, found {parts}")
