"""Measures the device with nothing of ours in the way: matrix products, its memory, and the link to the host.

What the engine reaches is judged by these, from the same run. Every probe is run once before it is timed. Rates are of
the fastest sample: what the hardware can do, not what it does on average.

Not here: the engine (`model`, `ttft`, `paper`).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.rows import Findings, GpuBenchConfig, Probes
from benchmarks.harness import timed
from ca_jax import backend
from ca_jax.device import transfer
from ca_jax.models.attention import matmul_precision
from ca_jax.storage.tiers.dram import host_array, touch

_MIB = 1 << 20
_MATMULS = 8  # In one sample: far more than it takes to dispatch one.
_PASSES = 4
_COPIES = 4  # On their way at once.
_MOST_THREADS = 16


def measure_probes(config: GpuBenchConfig) -> Probes:
    """Runs every probe on the default device. Blocks."""
    return Probes(
        matmul_flops_per_s=_matmul_flops_per_s(config),
        host_copy_bytes_per_s=_host_copy_bytes_per_s(config),
        **_memory_rates(config),
        **_pinned_rates(config),
        **_plain_rates(config),
    )


def probe_findings(probes: Probes, config: GpuBenchConfig) -> Findings:
    """The probes as rows."""
    unit = {"matmul_flops_per_s": ("TFLOP/s", 1e12)}
    rows = []
    for name, value in dataclasses.asdict(probes).items():
        label, scale = unit.get(name, ("GB/s", 1e9))
        what = name.removesuffix("_per_s").removesuffix("_bytes").removesuffix("_flops").replace("_", " ")
        rows.append({"probe": what, "rate": None if value is None else value / scale, "unit": label})
    notes = [
        f"matmul: {config.matmul_size} x {config.matmul_size} in {config.dtype}; memory: {config.memory_mib} MiB; "
        f"link: {_COPIES} copies of {config.transfer_mib} MiB at once"
    ]
    notes += [f"memory: {name} {value}" for name, value in device_memory().items()]
    return Findings(rows=rows, notes=notes)


def device_memory() -> dict[str, str]:
    """What the default device says of its memory; empty where it says nothing."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return {name: f"{stats[name] / (1 << 30):.1f} GiB" for name in ("bytes_limit", "bytes_in_use") if name in stats}


def _fastest_s(repeats: int, run: Callable[[], Any]) -> float:
    """Seconds of the fastest of some runs, after one that does not count."""
    runs = [timed("s", lambda: jax.block_until_ready(run()))["s"] for _ in range(1 + repeats)]
    return min(runs[1:])


def _normal(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Numbers whose products stay of order one; made on the device."""
    make = jax.jit(lambda: (jax.random.normal(jax.random.key(0), shape) / np.sqrt(shape[-1])).astype(dtype))
    return jax.block_until_ready(make())


def _matmul_flops_per_s(config: GpuBenchConfig) -> float:
    size = config.matmul_size
    left, right = (_normal((size, size), config.dtype) for _ in range(2))
    multiply = jax.jit(lambda a, b: jnp.dot(a, b, precision=matmul_precision(a)))

    def run() -> jax.Array:
        product = left
        for _ in range(_MATMULS):
            product = multiply(product, right)
        return product

    return _MATMULS * 2 * size**3 / _fastest_s(config.repeats, run)


def _memory_rates(config: GpuBenchConfig) -> dict[str, float]:
    numbers = jax.block_until_ready(jnp.ones((config.memory_mib * _MIB // 4,), jnp.float32))
    total, plus_one = jax.jit(jnp.sum), jax.jit(lambda x: x + 1)
    read_s = _fastest_s(config.repeats, lambda: [total(numbers) for _ in range(_PASSES)])

    def copy() -> jax.Array:
        out = numbers
        for _ in range(_PASSES):
            out = plus_one(out)
        return out

    copy_s = _fastest_s(config.repeats, copy)
    num_bytes = _PASSES * numbers.nbytes
    return {"memory_read_bytes_per_s": num_bytes / read_s, "memory_copy_bytes_per_s": 2 * num_bytes / copy_s}


def _pinned_rates(config: GpuBenchConfig) -> dict[str, float]:
    """Between the device and memory of the kind `pinned_host`, which every backend of today has."""
    arrays = _device_arrays(config)
    device = arrays[0].sharding
    pinned = jax.block_until_ready([transfer.to_host_memory(each, transfer.PINNED_HOST) for each in arrays])
    num_bytes = sum(each.nbytes for each in arrays)
    there_s = _fastest_s(config.repeats, lambda: jax.device_put(pinned, device))
    back_s = _fastest_s(
        config.repeats, lambda: [transfer.to_host_memory(each, transfer.PINNED_HOST) for each in arrays]
    )
    return {"to_device_bytes_per_s": num_bytes / there_s, "to_host_bytes_per_s": num_bytes / back_s}


def _plain_rates(config: GpuBenchConfig) -> dict[str, Any]:
    """Between the device and arrays of numpy, mapped for DMA and not. None where there is no such copy."""
    names = ("to_device_mapped_bytes_per_s", "to_device_pageable_bytes_per_s", "to_host_pageable_bytes_per_s")
    rates: dict[str, Any] = dict.fromkeys(names)
    if backend.here().shares_memory:
        return rates
    memory = _host_memory(config)

    def put() -> list[jax.Array]:
        return [transfer.staging_to_device(part) for part in memory]

    # Fresh arrays each time: jax keeps what it has fetched.
    to_host_s = [timed("s", jax.device_get, _device_arrays(config))["s"] for _ in range(1 + config.repeats)]
    rates["to_device_pageable_bytes_per_s"] = memory.nbytes / _fastest_s(config.repeats, put)
    rates["to_host_pageable_bytes_per_s"] = memory.nbytes / min(to_host_s[1:])
    if transfer.pin_host_memory(memory):
        try:
            rates["to_device_mapped_bytes_per_s"] = memory.nbytes / _fastest_s(config.repeats, put)
        finally:
            transfer.unpin_host_memory(memory)
    return rates


def _device_arrays(config: GpuBenchConfig) -> list[jax.Array]:
    size = config.transfer_mib * _MIB
    return jax.block_until_ready([jnp.full((size,), i, jnp.uint8) for i in range(_COPIES)])


def _host_memory(config: GpuBenchConfig) -> np.ndarray:
    memory = host_array((_COPIES, config.transfer_mib * _MIB), np.uint8)
    touch(memory)
    return memory


def _host_copy_bytes_per_s(config: GpuBenchConfig) -> float:
    """Of a copy that the cores share."""
    source, target = (_host_memory(config).reshape(-1) for _ in range(2))
    num_threads = min(os.cpu_count() or 1, _MOST_THREADS)
    parts = list(zip(np.array_split(target, num_threads), np.array_split(source, num_threads), strict=True))
    with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
        copy_s = _fastest_s(config.repeats, lambda: list(threads.map(lambda pair: np.copyto(*pair), parts)))
    return source.nbytes / copy_s
