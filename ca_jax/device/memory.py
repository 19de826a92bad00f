"""What the engine's buffers take of the device, and whether that fits.

Not here: the buffers themselves (kv.load, kv.write_buffer, runner).
"""

from __future__ import annotations

from ca_jax.config import EngineConfig
from ca_jax.device.runner import Runner
from ca_jax.device.transfer import device_memory_bytes
from ca_jax.storage.config import GIB
from ca_jax.storage.layout import KVLayout

_EXECUTION_REGIONS = 2  # Of the read buffer's memory, behind its cap.


def staging_bytes(layout: KVLayout, config: EngineConfig, max_tokens: int) -> int:
    """Bytes of staging: the read buffer under its cap, and the execution regions behind it."""
    layer_bytes = layout.token_bytes // layout.num_layers * max_tokens
    everything = layout.num_layers * layer_bytes
    if config.read_buffer_gib is None:
        return everything
    return min(int(config.read_buffer_gib * GIB) + _EXECUTION_REGIONS * layer_bytes, everything)


def wanted_bytes(
    config: EngineConfig,
    layout: KVLayout,
    *,
    max_tokens: int,
    num_parts: int,
    param_bytes: int,
    slot_bytes: int,
) -> dict[str, int]:
    """What an engine takes of each device, by what it is for; activations and what is compiled come on top.

    Args:
      config: of the engine.
      layout: of its stored KV.
      max_tokens: the longest history that is staged.
      num_parts: parts that KV is in by its heads, each on devices of its own.
      param_bytes: the weights on each device.
      slot_bytes: the decode slots on each device.
    """
    return {
        "the read buffer": staging_bytes(layout, config, max_tokens) // num_parts,
        "write_buffer_gib": int(config.write_buffer_gib * GIB) // num_parts,
        "the weights": param_bytes,
        "the decode slots": slot_bytes,
    }


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
            raise ValueError(f"{name} must be at most {whose} {capacity / GIB:.2f} GiB of memory, got {cap_gib}")
    wanted = wanted_bytes(
        config,
        layout,
        max_tokens=runner.history_buckets[-1],
        num_parts=num_parts,
        param_bytes=runner.param_bytes,
        slot_bytes=runner.slots.num_bytes,
    )
    if sum(wanted.values()) > capacity:
        parts = ", ".join(f"{num_bytes / GIB:.2f} for {name}" for name, num_bytes in wanted.items())
        raise ValueError(
            f"the sizes must be at most the device's {capacity / GIB:.2f} GiB of memory together, got {parts}"
        )
