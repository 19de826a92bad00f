"""The suites that need no engine measure what their rows say, at a tiny size. No speed is judged here."""

import os
from pathlib import Path

import numpy as np
import pytest

import benchmarks.disk
from benchmarks.disk import PlainDisk, block_extents, cached_share, drop_cached, is_dropped
from benchmarks.harness import BenchError
from benchmarks.host_turns import TurnRow
from benchmarks.suites.policy import DecisionRow, LoopRow, PolicyBenchConfig, PrefixRow, StartupRow
from benchmarks.suites.store import StoreBenchConfig
from ca_jax.errors import CaJaxError
from ca_jax.storage.config import GIB
from ca_jax.storage.tiers.formats import FORMATS, RawTier
from tests.benchmarks.conftest import check_spread, steps

STORE_SIZES = {
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 16,
    "block_tokens": 32,  # Blocks of 24 KiB.
    "session_tokens": 70,
    "store_gib": 5.5 * 24 * 1024 / GIB,
    "repeats": 2,
}
POLICY_SIZES = {
    "num_sessions": 60,
    "num_jobs": 10,
    "num_steps": 20,
    "loop_sessions": 42,
    "queue_depth": 0.75,
    "repeats": 2,
}
MEASURED = ["ssd_read_cold", "ssd_read_warm", "ssd_write"]


def sized(disk: Path, **changes: object) -> StoreBenchConfig:
    return StoreBenchConfig(ssd_dir=str(disk), **(STORE_SIZES | changes))


# store


def test_store_measures_every_move_of_every_driver_and_leaves_nothing(measure, disk: Path) -> None:
    config = sized(disk)
    found = measure("store", config, cores=2)
    rows = found.rows
    assert [(row.measured, row.driver) for row in rows] == [
        ("dram_load", None),
        *((measured, driver) for driver in ("zarr3", "raw") for measured in MEASURED),
        ("crc32c", None),
    ]
    assert list(disk.iterdir()) == []
    assert all(found.told(what) == steps(3) for what in ("dram", "zarr3", "raw", "crc32c"))
    assert [row.num_bytes for row in rows[:-1]] == [70 * config.layout.token_bytes] + 6 * [5 * 24 * 1024]
    plain = {row.measured: {way.split(",")[0] for way in row.plain_gb_per_s_of} for row in rows}
    assert plain["dram_load"] == {"np.copyto"}
    assert plain["ssd_read_cold"] == plain["ssd_read_warm"] == {"preadv"}
    assert plain["ssd_write"] == {"pwritev"}
    assert plain["crc32c"] == set()
    for row in rows:
        assert row.gb_per_s > 0
        assert row.cpu_s_per_gb >= 0
        if row.plain is None:
            assert row.measured == "crc32c"
            continue
        assert row.plain_gb_per_s == row.plain_gb_per_s_of[row.plain]
        assert row.ratio == pytest.approx(row.gb_per_s / row.plain_gb_per_s)
        if row.driver:
            assert row.plain_gb_per_s == max(row.plain_gb_per_s_of.values())
            assert len(row.plain_gb_per_s_of) == 2
        check_spread(row)
    dram, *ssd, crc32c = rows
    zarr3, raw = ({row.measured: row for row in ssd if row.driver == driver} for driver in ("zarr3", "raw"))
    beside = {"ssd_read_cold": "preadv", "ssd_read_warm": "preadv", "ssd_write": "plain"}
    assert found.summary == {
        "dram_vs_memcpy": dram.ratio,
        "dram_vs_parallel_memcpy": dram.gb_per_s / max(dram.plain_gb_per_s_of.values()),
        **{f"{name}_vs_{plain}": zarr3[name].ratio for name, plain in beside.items()},
        **{f"raw_{name}_vs_{plain}": raw[name].ratio for name, plain in beside.items()},
        **{f"raw_vs_zarr3_{name}": raw[name].gb_per_s / zarr3[name].gb_per_s for name in beside},
        "crc32c_cpu_s_per_gb": crc32c.cpu_s_per_gb,
    }


def test_a_tier_that_gives_other_bytes_is_no_row(measure, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_something_else(self, block_ids, blocks, sums):
        return write_blocks(self, block_ids, [block + 1 for block in blocks], sums)

    write_blocks = RawTier.write_blocks
    monkeypatch.setattr(RawTier, "write_blocks", write_something_else)
    with pytest.raises(BenchError, match="a read of raw must give the bytes that were written"):
        measure("store", sized(disk))
    assert list(disk.iterdir()) == []


def test_a_directory_in_memory_is_refused(measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.disk, "cached_share", lambda path: 1.0)
    with pytest.raises(BenchError, match=f"whose page cache can be emptied, got {tmp_path}"):
        measure("store", sized(tmp_path))
    assert list(tmp_path.iterdir()) == []


# The plain ways.


@pytest.mark.parametrize("driver", FORMATS)
def test_plain_reads_give_what_the_tier_wrote(tmp_path: Path, driver: str) -> None:
    layout = StoreBenchConfig(**STORE_SIZES).layout
    tier = FORMATS[driver](layout, tmp_path, 12 * layout.stored_block_bytes)
    blocks = np.random.default_rng(0).standard_normal((11, *layout.block_shape)).astype(np.float32)
    tier.write_blocks(range(11), blocks).result()
    extents = block_extents(tmp_path, layout.block_bytes, tier.stored_block_bytes, 11)
    into = np.zeros((11, layout.block_bytes), np.uint8)
    PlainDisk(3).read(extents, into)
    tier.close()
    assert into.tobytes() == blocks.tobytes()
    with pytest.raises(BenchError, match="must hold 99 blocks, got"):
        block_extents(tmp_path, layout.block_bytes, tier.stored_block_bytes, 99)


def test_what_is_in_memory_is_told_and_dropped(disk: Path) -> None:
    disk.mkdir()
    path = disk / "file"
    path.write_bytes(bytes(1 << 20))
    assert cached_share(path) == 1.0
    assert not is_dropped([path])
    drop_cached([path])
    assert cached_share(path) == 0.0
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # No more than is asked for.
        os.pread(file.fileno(), 4096, 8192)
    assert 0 < cached_share(path) < 0.5
    (disk / "empty").touch()
    assert cached_share(disk / "empty") == 0.0


# policy


def test_policy_measures_choices_start_up_and_loop(measure, tmp_path: Path) -> None:
    config = PolicyBenchConfig(ssd_dir=str(tmp_path), **POLICY_SIZES)
    found = measure("policy", config)
    rows = found.rows
    assert list(tmp_path.iterdir()) == []
    decisions = [row for row in rows if isinstance(row, DecisionRow)]
    assert [row.policy for row in decisions] == ["scheduler_aware", "return_aware", "lru", "fifo"]
    for row in decisions:
        assert (row.num_sessions, row.num_jobs) == (60, 10)
        assert 0 < row.p50_ms <= row.p99_ms <= row.max_ms
        assert 0 < row.fetches_per_plan <= 8
        assert row.p50_ms_of.keys() == {"queue", "lookup", "plan", "victims"}
    (startup,) = [row for row in rows if isinstance(row, StartupRow)]
    assert startup.num_sessions == 60
    assert 60 < startup.num_blocks <= 60 * 31
    assert startup.catalog_bytes > startup.num_blocks * 128 * 4, "token ids are in it"
    (prefix,) = [row for row in rows if isinstance(row, PrefixRow)]
    assert (prefix.num_sessions, prefix.shared_tokens, prefix.prompt_tokens) == (60, 512, 2048)
    assert 0 < prefix.p50_ms <= prefix.p99_ms <= prefix.max_ms
    turns = [row for row in rows if isinstance(row, TurnRow)]
    assert [(row.history_tokens, row.new_tokens) for row in turns] == [(1_000, 100), (100_000, 100)]
    for row in turns:
        assert row.ms_of.keys() == {"render", "queue", "load", "save", "adopt", "keep"}
    loop = {(row.policy, row.queue_depth): row for row in rows if isinstance(row, LoopRow)}
    assert list(loop) == [
        ("belady", None),
        *(("scheduler_aware", depth) for depth in (0.1, 0.25, 0.5, 0.75, 1.0)),
        ("lru", 0.75),
        ("fifo", 0.75),
    ]
    for row in loop.values():
        assert (row.num_sessions, row.over_capacity) == (42, pytest.approx(0.05))
        assert 0 <= row.hit_rate <= loop["belady", None].hit_rate < 1
        assert row.vs_belady == pytest.approx(row.hit_rate / loop["belady", None].hit_rate)
    # What is no measurement is the same everywhere: 40 of 42 fit, and who knows all jobs does as well as can be.
    assert loop["belady", None].hit_rate == pytest.approx(40 / 42, abs=0.03)
    assert loop["scheduler_aware", 1.0].vs_belady > 0.97
    assert loop["lru", 0.75].hit_rate == 0
    assert found.summary == {
        "p50_ms": decisions[0].p50_ms,
        "p99_ms": decisions[0].p99_ms,
        "startup_100k_s": startup.startup_s,
        "startup_100k_cold_s": startup.cold_startup_s,
        "prefix_p99_ms": prefix.p99_ms,
        "loop_vs_belady": loop["scheduler_aware", 0.75].vs_belady,
        "loop_lru": 0.0,
        "turn_100k_ms": turns[1].total_ms,
    }


@pytest.mark.parametrize("below", ["file", "file/below"])
def test_a_file_for_a_directory_is_refused(measure, below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CaJaxError, match="ssd_dir must be a directory, got the file"):
        measure("store", sized(tmp_path / below))
