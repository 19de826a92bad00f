"""How a model's KV lies at rest, by what the engine's config says, and what the engine's buffers take of the device.

Not here: blocks and tokens in them (storage.layout), packing (models.kv), the buffers (layer_loader, save, pages).
"""

from __future__ import annotations

import dataclasses
import math

from ca_jax.config import EngineConfig
from ca_jax.device.pages import PoolSize
from ca_jax.device.runner import Runner
from ca_jax.device.transfer import device_memory_bytes, held_heads
from ca_jax.errors import check
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import SCALE_BYTES
from ca_jax.models.recurrent import CELLS
from ca_jax.models.sharding import ModelSharding
from ca_jax.models.weights import resolve_dtype
from ca_jax.pretrained import LoadedModel
from ca_jax.storage.config import GIB
from ca_jax.storage.layout import KVLayout, LayerGroup

EXECUTION_REGIONS = 2
"""Of staging, behind the read buffer: one layer that is computed on, one that is filled."""


def rest_layout(model: ModelConfig, dtype: str, config: EngineConfig) -> KVLayout:
    """The shape of the blocks that an engine of that config keeps KV in, of a model that computes it in `dtype`."""
    is_packed, groups = config.kv_rest_dtype == "int8", []
    for layers in model.kv_groups:
        first = model.kv_layers[layers[0]]
        num_parts, num_kv, width = model.kv_shape(first)
        groups.append(
            LayerGroup(
                layers=layers,
                num_parts=num_parts,
                num_kv_heads=num_kv,
                head_dim=width + (SCALE_BYTES if is_packed else 0),
                window=model.window_of(first),
            )
        )
    return KVLayout(groups=tuple(groups), dtype="int8" if is_packed else dtype, block_tokens=config.store.block_tokens)


def kept_window(layout: KVLayout, config: EngineConfig, window: int) -> int | None:
    """How many last tokens of a session have KV that is needed: as far as any layer looks back. None: all of them."""
    windows = [group.window for group in layout.groups if group.window is not None]
    slides = len(windows) == len(layout.groups) and max(windows) < window
    return max(windows) if slides and not (config.overflow and config.overflow.needs_everything) else None


def first_seen(layout: KVLayout, num_tokens: int, page_tokens: int) -> tuple[int, ...]:
    """Of each layer, the first of a history's tokens that tokens behind it see, or where its page begins."""
    of_groups = [0 if each.window is None else max(num_tokens - each.window + 1, 0) for each in layout.groups]
    places = (layout.place(layer)[0] for layer in range(layout.num_layers))
    return tuple(of_groups[group] // page_tokens * page_tokens for group in places)


def kv_layout(model: LoadedModel, config: EngineConfig) -> KVLayout:
    """As `rest_layout`, of a model that is loaded: of the heads that this process has."""
    layout = rest_layout(model.config, model.dtype, config)
    sharding = None if model.sharding is None else model.sharding.kv
    held = []
    for group in layout.groups:
        heads = held_heads(sharding, group.num_kv_heads)
        num_heads = group.num_kv_heads if heads is None else heads.stop - heads.start
        held.append(dataclasses.replace(group, num_kv_heads=num_heads))
    return dataclasses.replace(layout, groups=tuple(held))


def pool_size(
    model: ModelConfig, dtype: str, config: EngineConfig, window: int, most_bytes: int | None = None
) -> PoolSize:
    """How many pages of KV an engine of that config has on its devices.

    Args:
      dtype: of KV as it is computed.
      most_bytes: that it takes where nothing is asked for, if that is enough for a window; None: no matter.

    Raises:
      ValueError: what is asked for holds no window.
    """
    page_tokens, num_parts = config.page_tokens, config.data_parallel_size
    page_bytes = page_tokens * model.kv_bytes_per_token(resolve_dtype(dtype).itemsize)
    least = -(-window // page_tokens) * num_parts
    if config.kv_pool_gib is not None:
        most: int | None = int(config.kv_pool_gib * GIB / page_bytes)
        wanted = f"at least {least * page_bytes / GIB:.3g}, for one context window of {window} tokens on each part"
        check(most is not None and most >= least, "kv_pool_gib", wanted, config.kv_pool_gib)
    else:
        most = None if most_bytes is None else max(most_bytes // page_bytes, least)
    return PoolSize.for_window(window, config.max_batch_size, num_parts, page_tokens, most)


def pool_bytes(model: ModelConfig, dtype: str, size: PoolSize, sharding: ModelSharding | None) -> int:
    """Bytes of a pool on each device."""
    numbers = 0
    for parts, num_kv, width in model.kv_shapes:
        shape: tuple[int, ...] = (size.num_pages * size.num_parts, parts, num_kv, size.page_tokens, width)
        numbers += math.prod(shape if sharding is None else sharding.pages.shard_shape(shape))
    return numbers * resolve_dtype(dtype).itemsize


def state_bytes(model: ModelConfig, dtype: str, size: PoolSize, sharding: ModelSharding | None) -> int:
    """Bytes of the cells that states of a pool's rows are in, on each device: two of each row."""
    if model.recurrence is None:
        return 0
    num_bytes = 0
    for (shape, own), axes in zip(model.recurrence.state_shapes(model.embed_dim), CELLS, strict=False):
        cells = (2 * size.num_rows, *shape)
        held = cells if sharding is None else sharding.of(axes, cells).shard_shape(cells)
        num_bytes += math.prod(held) * resolve_dtype(own or dtype).itemsize
    return model.num_states * num_bytes


def staging_bytes(layout: KVLayout, config: EngineConfig, max_tokens: int) -> int:
    """Bytes of staging: the read buffer under its cap, and the execution regions behind it."""
    numbers = max(group.token_numbers for group in layout.groups)
    layer_bytes = numbers * layout.numpy_dtype.itemsize * max_tokens
    everything = layout.token_bytes * max_tokens
    if config.read_buffer_gib is None:
        return everything
    return min(int(config.read_buffer_gib * GIB) + EXECUTION_REGIONS * layer_bytes, everything)


def wanted_bytes(
    config: EngineConfig,
    layout: KVLayout,
    *,
    max_tokens: int,
    num_parts: int,
    param_bytes: int,
    pool_bytes: int,
) -> dict[str, int]:
    """What an engine takes of each device, by what it is for; activations and what is compiled come on top."""
    return {
        "the read buffer": staging_bytes(layout, config, max_tokens) // num_parts,
        "write_buffer_gib": int(config.write_buffer_gib * GIB) // num_parts,
        "the weights": param_bytes,
        "the pool of KV": pool_bytes,
    }


def check_buffers(config: EngineConfig, layout: KVLayout, runner: Runner, draft_bytes: int = 0) -> None:
    """Checks that the read and the write buffer fit beside the weights and the pool of KV, on each device, and beside
    a draft model of so many bytes.

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
        pool_bytes=runner.pool.num_bytes + runner.states.num_bytes,
    )
    if draft_bytes:
        wanted["the draft model"] = draft_bytes
    if sum(wanted.values()) > capacity:
        parts = ", ".join(f"{num_bytes / GIB:.2f} for {name}" for name, num_bytes in wanted.items())
        raise ValueError(
            f"the sizes must be at most the device's {capacity / GIB:.2f} GiB of memory together, got {parts}"
        )
