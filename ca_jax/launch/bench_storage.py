"""Measures how fast the tiers move bytes, each beside the plain way to move as many in the same run.

Samples of ours and of the plain ways take turns (A B C A B C ...), never at once; the first of each is for nothing.
What is read is compared with what was written once. Reads from disk are cold, with a page cache that was seen to be
empty, and warm. The plain reader and writer are measured with one thread and with as many as the tier moves blocks at
once, and the faster of the two is what a tier is held against; neither computes checksums.

Not here: what rows hold (`bench_storage_schema`), the plain ways (`bench_disk`), flags and main (`bench`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import inspect
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import crc32c
import numpy as np

from ca_jax.launch.bench_disk import (
    Extent,
    PlainDisk,
    block_extents,
    drop_cached,
    is_dropped,
    scratch_on_disk,
)
from ca_jax.launch.bench_schema import BenchError, Samples
from ca_jax.launch.bench_storage_schema import StoreBenchConfig, StoreRow
from ca_jax.pretrained import Progress
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import BlockIoError
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tiers.disk import DiskTier
from ca_jax.storage.tiers.dram import host_array, touch
from ca_jax.storage.tiers.raw import RawSsdTier
from ca_jax.storage.tiers.zarr3 import SsdTier

DRIVERS: dict[str, type[SsdTier] | type[RawSsdTier]] = {"zarr3": SsdTier, "raw": RawSsdTier}
"""The SSD tiers that are measured, the default first."""

_GB = 1e9
_NUM_SOURCE_BLOCKS = 16  # Different blocks that are written, again and again: more would only take memory.
_OURS = "ours"
_COPY = "np.copyto, 1 thread"


def run_store_suite(config: StoreBenchConfig, num_cores: int, progress: Progress) -> list[StoreRow]:
    """Measures loads from DRAM, reads and writes of every SSD tier, and the checksum. Blocks.

    Args:
      config: what to measure.
      num_cores: of the machine: threads that a parallel copy takes.
      progress: told of every sample.

    Raises:
      BenchError: the disk has no room, is memory (tmpfs), or gave other bytes than were written.
    """
    with scratch_on_disk(config.ssd_dir) as directory:
        try:
            rows = [_measure_dram(config, num_cores, progress)]
            for driver in DRIVERS:
                rows += _measure_driver(config, driver, directory / driver, progress)
            return [*rows, _measure_checksum(config, progress)]
        except (OSError, ValueError, MemoryError, BlockIoError) as error:
            raise BenchError(f"no measurement at this size in {directory.parent}: {error}") from error


def _measure_dram(config: StoreBenchConfig, num_cores: int, progress: Progress) -> StoreRow:
    """A session into staging as `LayerLoader` does it: all layers are issued, then waited for."""
    layout, num_tokens = config.layout, config.session_tokens
    shape = (layout.num_layers, 2, num_tokens, layout.num_kv_heads, layout.head_dim)
    kv, staging = (host_array(shape, layout.numpy_dtype) for _ in range(2))
    touch(staging)
    _fill(kv, config.seed)
    dram_gib = (layout.num_blocks(num_tokens) + 1) * layout.block_bytes / GIB
    token_ids = np.arange(num_tokens)
    store = AttentionStore(layout, StoreConfig(dram_gib=dram_gib, block_tokens=layout.block_tokens))
    try:
        store.touch()
        save = store.prepare_save("session", 0, token_ids)
        if save is None:
            raise BenchError(f"wanted room for {num_tokens} tokens in {dram_gib:.3f} GiB of DRAM, found none")
        save.write_all(kv)
        store.complete_save(save)

        def load() -> None:
            ticket = store.prepare_load("session", token_ids)
            if ticket is None:
                raise BenchError(f"wanted the {num_tokens} tokens that were saved, found a miss")
            futures = [ticket.read(layer, staging[layer]) for layer in range(layout.num_layers)]
            for future in futures:
                future.result()
            store.complete_load(ticket)

        def copy_parallel() -> None:
            collections.deque(threads.map(np.copyto, staging, kv), maxlen=0)

        load()
        _check_same(staging, kv, "a load from DRAM")
        with concurrent.futures.ThreadPoolExecutor(num_cores) as threads:
            ways = {_OURS: load, _COPY: lambda: np.copyto(staging, kv)}
            if num_cores > 1:
                ways[f"np.copyto, {num_cores} threads"] = copy_parallel
            samples = Samples()
            for keep in _rounds(config, "dram", progress):
                for name, work in ways.items():
                    _sample(samples if keep else Samples(), name, kv.nbytes, work)
    finally:
        store.close()
    return _make_row("dram_load", None, kv.nbytes, samples, [name for name in ways if name != _OURS], plain=_COPY)


def _measure_driver(config: StoreBenchConfig, driver: str, directory: Path, progress: Progress) -> list[StoreRow]:
    layout, num_blocks = config.layout, config.num_disk_blocks
    into = host_array((num_blocks, *layout.block_shape), layout.numpy_dtype)
    touch(into)
    source = host_array((min(num_blocks, _NUM_SOURCE_BLOCKS), *layout.block_shape), layout.numpy_dtype)
    _fill(source, config.seed)
    # Room for checksums, an index or a trailer, and rounding, whatever the tier needs of it.
    stored_bytes = layout.block_bytes + 64 * layout.num_layers + (4 << 12)
    tier: DiskTier = DRIVERS[driver](layout, directory, num_blocks * stored_bytes)
    try:
        bench = _DiskBench(tier, driver, directory, into, [source[i % len(source)] for i in range(num_blocks)])
        for keep in _rounds(config, driver, progress):
            bench.round(keep)
    finally:
        tier.close()
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(_plain_directory(directory), ignore_errors=True)
    return bench.rows()


class _DiskBench:
    """Rounds of reads and writes of one tier and of the plain ways.

    Args:
      tier: empty.
      driver: what it is called.
      directory: the tier's; its neighbour is for the plain writer.
      into: `[n, L, 2, block_tokens, K, H]`, memory that is read into.
      blocks: n blocks that are written.
    """

    def __init__(
        self, tier: DiskTier, driver: str, directory: Path, into: np.ndarray, blocks: Sequence[np.ndarray]
    ) -> None:
        self._tier = tier
        self._driver = driver
        self._into = into
        self._blocks = blocks
        self._ids = range(len(blocks))
        self._samples: dict[str, Samples] = collections.defaultdict(Samples)
        self._ways: dict[str, dict[str, Callable[[], None]]] = {}
        self._num_rounds = 0
        self._plain = _plain_directory(directory)
        self._plain.mkdir()
        self._write()
        self._extents = self._find(directory)
        self._paths = sorted({extent.path for extent in self._extents})
        drop_cached(self._paths)
        into[...] = 0
        self._read()
        for found, wanted in zip(into, blocks, strict=True):
            _check_same(found, wanted, f"a read of {driver}")
        reads = self._with_plain(self._read, "preadv", "max_reads", self._read_plain)
        self._ways["ssd_read_cold"] = self._ways["ssd_read_warm"] = reads
        self._ways["ssd_write"] = self._with_plain(self._write, "pwritev", "max_writes", self._write_plain)

    def round(self, keep: bool) -> None:
        """Takes one sample of everything; for nothing, unless they are to be kept."""
        for measured, ways in self._ways.items():
            names = list(ways)[self._num_rounds % len(ways) :] + list(ways)[: self._num_rounds % len(ways)]
            for name in names:  # Each has every place in turn: what was written before it costs whoever writes next.
                if measured == "ssd_read_cold":  # Whoever comes last leaves a full cache for the warm reads.
                    drop_cached(self._paths)
                    if not is_dropped(self._paths):
                        raise BenchError(f"wanted the page cache without the files of {self._driver}, found them there")
                samples = self._samples[measured] if keep else Samples()
                _sample(samples, name, self._into.nbytes, ways[name])
        self._num_rounds += 1

    def rows(self) -> list[StoreRow]:
        """What was measured."""
        return [
            _make_row(
                measured,
                self._driver,
                self._into.nbytes,
                self._samples[measured],
                [name for name in ways if name != _OURS],
            )
            for measured, ways in self._ways.items()
        ]

    def _with_plain(
        self, ours: Callable[[], None], call: str, in_flight: str, plain: Callable[[PlainDisk], None]
    ) -> dict[str, Callable[[], None]]:
        """The tier's way and the plain ones, by name."""
        ways = {_OURS: ours}
        num_moves: int = inspect.signature(type(self._tier)).parameters[in_flight].default
        for num_threads in sorted({1, num_moves}):
            disk = PlainDisk(num_threads)
            ways[f"{call}, {num_threads} thread{'s' * (num_threads > 1)}"] = functools.partial(plain, disk)
        return ways

    def _read(self) -> None:
        self._tier.read_blocks(self._ids, self._into).result()

    def _write(self) -> None:
        self._tier.write_blocks(self._ids, self._blocks).result()

    def _read_plain(self, disk: PlainDisk) -> None:
        disk.read(self._extents, _as_bytes(self._into).reshape(len(self._into), -1))

    def _write_plain(self, disk: PlainDisk) -> None:
        blocks = [_as_bytes(block) for block in self._blocks]
        if len(self._paths) == 1 < len(blocks):  # As the tier does: into one file, or into a file each.
            disk.write_slots(self._plain / "blocks", blocks)
        else:
            disk.write_files(self._plain, blocks)

    def _find(self, directory: Path) -> list[Extent]:
        layout: KVLayout = self._tier.layout
        return block_extents(directory, layout.block_bytes, self._tier.stored_block_bytes, len(self._blocks))


def _measure_checksum(config: StoreBenchConfig, progress: Progress) -> StoreRow:
    layout = config.layout
    block = host_array((_NUM_SOURCE_BLOCKS, *layout.block_shape), layout.numpy_dtype)
    _fill(block, config.seed)
    data = _as_bytes(block).data
    samples = Samples()
    for keep in _rounds(config, "crc32c", progress):
        _sample(samples if keep else Samples(), _OURS, data.nbytes, functools.partial(crc32c.crc32c, data))
    return _make_row("crc32c", None, block.nbytes, samples, [])


def _rounds(config: StoreBenchConfig, what: str, progress: Progress) -> Iterator[bool]:
    """Whether each round counts: all but the first. Tells of them."""
    progress(what, 0, 1 + config.repeats)
    for i in range(1 + config.repeats):
        yield i > 0
        progress(what, i + 1, 1 + config.repeats)


def _sample(samples: Samples, name: str, num_bytes: int, work: Callable[[], object]) -> None:
    cpu_started_s, started_s = time.process_time(), time.perf_counter()
    work()
    elapsed_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    samples.add(**{_speed(name): num_bytes / _GB / elapsed_s, _cpu(name): cpu_s * _GB / num_bytes})


def _make_row(
    measured: str, driver: str | None, num_bytes: int, samples: Samples, plains: Sequence[str], plain: str | None = None
) -> StoreRow:
    """Medians; held against `plain`, by default the fastest of the plain ways."""
    speeds = {name: samples.median(_speed(name)) for name in plains}
    if plain is None and speeds:
        plain = max(speeds, key=speeds.__getitem__)
    ours, spread = samples.median(_speed(_OURS)), samples.spread()
    names = {"gb_per_s": _speed(_OURS), "cpu_s_per_gb": _cpu(_OURS)}
    if plain is not None:
        names |= {"plain_gb_per_s": _speed(plain), "plain_cpu_s_per_gb": _cpu(plain)}
    return StoreRow(
        measured=measured,
        driver=driver,
        num_bytes=num_bytes,
        gb_per_s=ours,
        cpu_s_per_gb=samples.median(_cpu(_OURS)),
        plain=plain,
        plain_gb_per_s=None if plain is None else speeds[plain],
        plain_cpu_s_per_gb=None if plain is None else samples.median(_cpu(plain)),
        plain_gb_per_s_of=speeds,
        ratio=None if plain is None else ours / speeds[plain],
        spread={field: spread[name] for field, name in names.items()},
    )


def _speed(name: str) -> str:
    return f"{name}: GB/s"


def _cpu(name: str) -> str:
    return f"{name}: CPU s/GB"


def _plain_directory(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}-plain")


def _fill(array: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for part in array:
        part[...] = rng.standard_normal(part.shape, np.float32).astype(array.dtype)


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, copy=False).view(np.uint8)


def _check_same(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    if not np.array_equal(_as_bytes(found), _as_bytes(wanted)):
        raise BenchError(f"{what} wanted the bytes that were written, found others")
