"""How fast the tiers move bytes, each beside the plain way to move as many in the same run. No model is needed.

Samples of ours and of the plain ways take turns, never at once; the first of each is for nothing. What is read is
compared with what was written once. Reads from disk are cold, with a page cache that was seen to be empty, and warm.
The plain reader and writer are measured with one thread and with as many as the tier moves blocks at once, and the
faster of the two is what a tier is held against; neither computes checksums.

Not here: the plain ways (`disk`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import crc32c
import numpy as np

from benchmarks import harness
from benchmarks.disk import Extent, PlainDisk, block_extents, drop_cached, is_dropped, scratch_on_disk
from benchmarks.harness import BenchError, Rounds, Run, Sample, Spread
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import BlockIoError
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tiers.disk import MAX_READS, MAX_WRITES, DiskTier
from ca_jax.storage.tiers.dram import host_array, touch
from ca_jax.storage.tiers.formats import FORMATS as DRIVERS

_GB = 1e9
_NUM_SOURCE_BLOCKS = 16  # Different blocks that are written, again and again: more would only take memory.
_OURS = "ours"
_COPY = "np.copyto, 1 thread"
_AGAINST = {"ssd_read_cold": "preadv", "ssd_read_warm": "preadv", "ssd_write": "plain"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreBenchConfig(harness.Config):
    """How fast the tiers move bytes. The layout is SmolLM2-135M's by default."""

    may_be_zero: ClassVar = frozenset({"seed", "store_gib"})

    num_layers: int = 30
    """Layers of a block."""
    num_kv_heads: int = 3
    """KV heads of a block."""
    head_dim: int = 64
    """Size of a head."""
    dtype: str | None = None
    """Of KV; None: float32."""
    block_tokens: int = 128
    """Tokens in a block."""
    session_tokens: int = 2048
    """Tokens of the session that is loaded from DRAM."""
    store_gib: float = 1.0
    """Blocks that are written to disk and read from it in one sample, GiB. In memory once more."""
    ssd_dir: str | None = None
    """Directory on the disk to measure; by default where temporary files are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        num_bytes, least = int(self.store_gib * GIB), self.layout.block_bytes
        harness.require(num_bytes >= least, "store_gib", f"room for at least one block of {least} bytes", num_bytes)

    @property
    def layout(self) -> KVLayout:
        """The shape of a block."""
        return KVLayout.uniform(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype or "float32",
            block_tokens=self.block_tokens,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreRow:
    """Bytes moved, against the plain way to move as many. GB is 1e9 bytes."""

    measured: str
    """`dram_load`: all layers of a session into staging. `ssd_read_cold`, `ssd_read_warm`: from disk into memory that
    is reused, with an empty and with a full page cache. `ssd_write`: durably. `crc32c`: the checksum, by one thread."""
    driver: str | None
    """Of the SSD tier; None where no disk is concerned."""
    num_bytes: int
    """In one sample."""
    gb_per_s: float
    """Ours."""
    cpu_s_per_gb: float
    """CPU time of all threads of the process; of a load, copies are all there is."""
    plain: str | None
    """What it is compared with: the fastest of `plain_gb_per_s_of`, but a copy by one thread for `dram_load`."""
    plain_gb_per_s: float | None
    plain_cpu_s_per_gb: float | None
    plain_gb_per_s_of: dict[str, float]
    """Of all plain ways that were tried."""
    ratio: float | None
    spread: Spread


def summarize(rows: Sequence[StoreRow]) -> dict[str, float]:
    """Ratios to the plain ways, of each driver, and what the checksum costs.

    `dram_vs_memcpy`, `ssd_read_cold_vs_preadv`, `ssd_read_warm_vs_preadv`, `ssd_write_vs_plain`; the SSD's of the
    default driver, with `raw_` in front those of the other one, with `raw_vs_zarr3_` the one's speed over the other's.
    `dram_vs_parallel_memcpy` is against a copy by all cores, if that is faster.
    """
    summary: dict[str, float] = {}
    speeds: dict[tuple[str | None, str], float] = {}
    for row in rows:
        speeds[row.driver, row.measured] = row.gb_per_s
        if row.measured == "crc32c":
            summary["crc32c_cpu_s_per_gb"] = row.cpu_s_per_gb
        elif row.measured == "dram_load":
            summary["dram_vs_memcpy"] = row.ratio or 0.0
            summary["dram_vs_parallel_memcpy"] = row.gb_per_s / max(row.plain_gb_per_s_of.values())
        else:
            prefix = "" if row.driver == "zarr3" else f"{row.driver}_"
            summary[f"{prefix}{row.measured}_vs_{_AGAINST[row.measured]}"] = row.ratio or 0.0
    return summary | {
        f"raw_vs_zarr3_{measured}": speeds["raw", measured] / speeds["zarr3", measured] for measured in _AGAINST
    }


@harness.suite(StoreBenchConfig, summary=summarize)
def store(run: Run[StoreBenchConfig]) -> Iterator[StoreRow]:
    """How fast the store's tiers move bytes: loads from DRAM, reads and writes of every SSD tier, the checksum."""
    config = run.config
    with scratch_on_disk(config.ssd_dir) as directory:
        try:
            yield _measure_dram(run)
            for driver in DRIVERS:
                yield from _measure_driver(run, driver, directory / driver)
            data = _random(config, (_NUM_SOURCE_BLOCKS, *config.layout.block_shape))
            work = functools.partial(crc32c.crc32c, _as_bytes(data).data)
            yield _make_row("crc32c", None, data.nbytes, _rounds(run, data.nbytes, {_OURS: work}))
        except (OSError, ValueError, MemoryError, BlockIoError) as error:
            raise BenchError(f"no measurement at this size in {directory.parent}: {error}") from error


def _measure_dram(run: Run[StoreBenchConfig]) -> StoreRow:
    """A session into staging as `LayerLoader` does it: all layers are issued, then waited for."""
    layout, num_tokens = run.config.layout, run.config.session_tokens
    kv = _random(
        run.config, (layout.num_layers, 2, num_tokens, layout.groups[0].num_kv_heads, layout.groups[0].head_dim)
    )
    staging = host_array(kv.shape, layout.numpy_dtype)
    touch(staging)
    dram_gib = (layout.num_blocks(num_tokens) + 1) * layout.block_bytes / GIB
    token_ids = np.arange(num_tokens)
    tier = AttentionStore(layout, StoreConfig(dram_gib=dram_gib, block_tokens=layout.block_tokens))
    try:
        tier.touch()
        save = tier.prepare_save("session", 0, token_ids)
        if save is None:
            raise BenchError(f"{dram_gib:.3f} GiB of DRAM must have room for {num_tokens} tokens, got none")
        save.write_all(kv)
        tier.complete_save(save)

        def load() -> None:
            ticket = tier.prepare_load("session", token_ids)
            if ticket is None:
                raise BenchError(f"the store must have the {num_tokens} tokens that were saved, got a miss")
            for future in [ticket.read(layer, staging[layer]) for layer in range(layout.num_layers)]:
                future.result()
            tier.complete_load(ticket)

        def copy_parallel() -> None:
            collections.deque(threads.map(np.copyto, staging, kv), maxlen=0)

        load()
        _check_same(staging, kv, "a load from DRAM")
        with concurrent.futures.ThreadPoolExecutor(run.cores) as threads:
            ways = {_OURS: load, _COPY: lambda: np.copyto(staging, kv)}
            if run.cores > 1:
                ways[f"np.copyto, {run.cores} threads"] = copy_parallel
            rounds = _rounds(run, kv.nbytes, ways)
    finally:
        tier.close()
    return _make_row("dram_load", None, kv.nbytes, rounds, plain=_COPY)


def _measure_driver(run: Run[StoreBenchConfig], driver: str, directory: Path) -> Iterator[StoreRow]:
    layout = run.config.layout
    num_blocks = int(run.config.store_gib * GIB) // layout.block_bytes
    into = host_array((num_blocks, *layout.block_shape), layout.numpy_dtype)
    touch(into)
    source = _random(run.config, (min(num_blocks, _NUM_SOURCE_BLOCKS), *layout.block_shape))
    tier = DRIVERS[driver](layout, directory, num_blocks * layout.stored_block_bytes)
    plain = directory.with_name(f"{directory.name}-plain")
    plain.mkdir()
    try:
        bench = _Disk(tier, driver, directory, into, [source[i % len(source)] for i in range(num_blocks)])
        ways = bench.ways(plain)
        found: dict[str, Rounds] = {measured: [] for measured in ways}
        for nth in harness.ticked(run.progress, driver, range(1 + run.config.repeats)):  # Reads and writes take turns.
            for measured, each in ways.items():
                before = bench.cool_down if measured == "ssd_read_cold" else None
                names = harness.in_turn(list(each), nth)  # What was written before costs what is written next.
                taken = {name: dict(_sample(into.nbytes, each[name], before)) for name in names}
                found[measured] += [taken] if nth else []
    finally:
        tier.close()
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(plain, ignore_errors=True)
    for measured, rounds_of in found.items():
        yield _make_row(measured, driver, into.nbytes, rounds_of)


class _Disk:
    """Reads and writes of one tier, empty at first, and of the plain ways, with the same blocks.

    Blocks are read into memory `[n, L, 2, block_tokens, K, H]`.
    """

    def __init__(
        self, tier: DiskTier, driver: str, directory: Path, into: np.ndarray, blocks: Sequence[np.ndarray]
    ) -> None:
        self._tier, self._driver, self._into, self._blocks = tier, driver, into, blocks
        self._sums = np.zeros((len(blocks), tier.layout.num_layers), np.uint32)
        self._write()
        self._extents: Sequence[Extent] = block_extents(
            directory, tier.layout.block_bytes, tier.stored_block_bytes, len(blocks)
        )
        self._paths = sorted({extent.path for extent in self._extents})
        drop_cached(self._paths)
        into[...] = 0
        self._read()
        for found, wanted in zip(into, blocks, strict=True):
            _check_same(found, wanted, f"a read of {driver}")

    def ways(self, plain: Path) -> dict[str, dict[str, Callable[[], object]]]:
        """The tier's way and the plain ones, by what is measured."""
        blocks = [_as_bytes(block) for block in self._blocks]
        into = _as_bytes(self._into).reshape(len(self._into), -1)

        def write(disk: PlainDisk) -> None:
            if len(self._paths) == 1 < len(blocks):  # As the tier does: into one file, or into a file each.
                disk.write_slots(plain / "blocks", blocks)
            else:
                disk.write_files(plain, blocks)

        reads = self._with_plain(self._read, "preadv", MAX_READS, lambda disk: disk.read(self._extents, into))
        writes = self._with_plain(self._write, "pwritev", MAX_WRITES, write)
        return {"ssd_read_cold": reads, "ssd_read_warm": reads, "ssd_write": writes}

    def cool_down(self) -> None:
        """Empties the page cache of the tier's files; what comes last leaves it full for the warm reads."""
        drop_cached(self._paths)
        if not is_dropped(self._paths):
            raise BenchError(f"the page cache must be without the files of {self._driver}, got them there")

    def _with_plain(
        self, ours: Callable[[], None], call: str, num_moves: int, plain: Callable[[PlainDisk], None]
    ) -> dict[str, Callable[[], object]]:
        ways: dict[str, Callable[[], object]] = {_OURS: ours}
        for num_threads in sorted({1, num_moves}):
            name = f"{call}, {num_threads} thread{'s' * (num_threads > 1)}"
            ways[name] = functools.partial(plain, PlainDisk(num_threads))
        return ways

    def _read(self) -> None:
        self._tier.read_blocks(range(len(self._blocks)), self._into, self._sums)

    def _write(self) -> None:
        self._tier.write_blocks(range(len(self._blocks)), self._blocks, self._sums)


def _rounds(run: Run[StoreBenchConfig], num_bytes: int, ways: Mapping[str, Callable[[], object]]) -> Rounds:
    made = {name: functools.partial(_sample, num_bytes, work) for name, work in ways.items()}
    return run.rounds(lambda: made)


def _sample(num_bytes: int, work: Callable[[], object], before: Callable[[], None] | None = None) -> Sample:
    if before is not None:
        before()
    cpu_started_s, started_s = time.process_time(), time.perf_counter()
    work()
    elapsed_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    return {"gb_per_s": num_bytes / _GB / elapsed_s, "cpu_s_per_gb": cpu_s * _GB / num_bytes}


def _make_row(measured: str, driver: str | None, num_bytes: int, rounds: Rounds, plain: str | None = None) -> StoreRow:
    """Medians; held against `plain`, by default the fastest of the plain ways."""
    names = [name for name in rounds[0] if name != _OURS]
    speeds = {name: harness.must_median(harness.of_way(rounds, name), "gb_per_s") for name in names}
    plain = plain or max(speeds, key=speeds.__getitem__, default=None)
    taken = harness.of_way(rounds, _OURS)
    beside = [] if plain is None else harness.of_way(rounds, plain)
    taken += [{f"plain_{name}": sample[name] for name in ("gb_per_s", "cpu_s_per_gb")} for sample in beside]
    return harness.make_row(
        StoreRow,
        taken,
        measured=measured,
        driver=driver,
        num_bytes=num_bytes,
        plain=plain,
        plain_gb_per_s_of=speeds,
        ratio=harness.ratio(taken, "gb_per_s", "plain_gb_per_s"),
    )


def _random(config: StoreBenchConfig, shape: tuple[int, ...]) -> np.ndarray:
    """An array of the config's dtype in memory of the store's kind; speed does not depend on what is in it."""
    array = host_array(shape, config.layout.numpy_dtype)
    rng = np.random.default_rng(config.seed)
    for part in array:
        part[...] = rng.standard_normal(part.shape, np.float32).astype(array.dtype)
    return array


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, copy=False).view(np.uint8)


def _check_same(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    if not np.array_equal(_as_bytes(found), _as_bytes(wanted)):
        raise BenchError(f"{what} must give the bytes that were written, got others")
