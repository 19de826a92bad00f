"""The suites that need no engine measure what their rows say, at a tiny size. No speed is judged here."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ca_jax.launch import bench_disk
from ca_jax.launch.bench_disk import PlainDisk, block_extents, cached_share, can_drop, drop_cached, is_dropped
from ca_jax.launch.bench_policy import run_policy_suite
from ca_jax.launch.bench_report import summarize_policy, summarize_store
from ca_jax.launch.bench_schema import BenchConfig, BenchError
from ca_jax.launch.bench_storage import DRIVERS, run_store_suite
from ca_jax.launch.bench_storage_schema import (
    DecisionRow,
    LoopRow,
    PolicyBenchConfig,
    PrefixRow,
    StartupRow,
    StoreBenchConfig,
    StoreRow,
    TurnRow,
)
from ca_jax.storage.config import GIB
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tiers.raw import RawSsdTier
from ca_jax.storage.tiers.zarr3 import SsdTier

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


def ignore(*_: object) -> None:
    """No progress is shown."""


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory whose files can be dropped from memory."""
    if not can_drop(tmp_path):
        pytest.skip("wants temporary files on a disk, not in memory")
    return tmp_path


# store


def test_store_measures_every_move_of_every_driver_and_leaves_nothing(disk: Path) -> None:
    config = StoreBenchConfig(ssd_dir=str(disk / "new"), **STORE_SIZES)
    calls = []
    rows = run_store_suite(config, 2, lambda *call: calls.append(call))
    assert [(row.measured, row.driver) for row in rows] == [
        ("dram_load", None),
        *((measured, driver) for driver in ("zarr3", "raw") for measured in MEASURED),
        ("crc32c", None),
    ]
    assert list((disk / "new").iterdir()) == []
    assert calls == [(what, done, 3) for what in ("dram", "zarr3", "raw", "crc32c") for done in range(4)]
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
        for name, (least, largest) in row.spread.items():
            assert 0 <= least <= getattr(row, name) <= largest


def test_a_parallel_copy_is_tried_but_a_load_is_held_against_the_simple_one(disk: Path) -> None:
    config = StoreBenchConfig(ssd_dir=str(disk), **STORE_SIZES)
    alone = run_store_suite(config, 1, ignore)[0]
    beside = run_store_suite(config, 3, ignore)[0]
    assert list(alone.plain_gb_per_s_of) == ["np.copyto, 1 thread"]
    assert list(beside.plain_gb_per_s_of) == ["np.copyto, 1 thread", "np.copyto, 3 threads"]
    assert beside.plain == alone.plain == "np.copyto, 1 thread"


def make_row(measured: str, driver: str | None, gb_per_s: float, **plain_gb_per_s_of: float) -> StoreRow:
    plain = next(iter(plain_gb_per_s_of), None)
    return StoreRow(
        measured=measured,
        driver=driver,
        num_bytes=1,
        gb_per_s=gb_per_s,
        cpu_s_per_gb=0.125,
        plain=plain,
        plain_gb_per_s=plain_gb_per_s_of.get(plain),
        plain_cpu_s_per_gb=None,
        plain_gb_per_s_of=plain_gb_per_s_of,
        ratio=None if plain is None else gb_per_s / plain_gb_per_s_of[plain],
        spread={},
    )


def test_store_summary_has_ratios_of_the_default_driver_and_of_the_other_one() -> None:
    rows = [
        make_row("dram_load", None, 6.0, one=8.0, two=12.0),
        *(make_row(measured, "zarr3", 1.0, one=2.0) for measured in MEASURED),
        *(make_row(measured, "raw", 3.0, one=4.0) for measured in MEASURED),
        make_row("crc32c", None, 9.0),
    ]
    assert summarize_store(rows) == {
        "dram_vs_memcpy": 0.75,
        "dram_vs_parallel_memcpy": 0.5,
        "ssd_read_cold_vs_preadv": 0.5,
        "ssd_read_warm_vs_preadv": 0.5,
        "ssd_write_vs_plain": 0.5,
        "raw_ssd_read_cold_vs_preadv": 0.75,
        "raw_ssd_read_warm_vs_preadv": 0.75,
        "raw_ssd_write_vs_plain": 0.75,
        "raw_vs_zarr3_ssd_read_cold": 3.0,
        "raw_vs_zarr3_ssd_read_warm": 3.0,
        "raw_vs_zarr3_ssd_write": 3.0,
        "crc32c_cpu_s_per_gb": 0.125,
    }


def test_a_tier_that_gives_other_bytes_is_no_row(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_something_else(self, block_ids, blocks):
        return write_blocks(self, block_ids, [block + 1 for block in blocks])

    write_blocks = RawSsdTier.write_blocks
    monkeypatch.setattr(RawSsdTier, "write_blocks", write_something_else)
    with pytest.raises(BenchError, match="a read of raw wanted the bytes that were written"):
        run_store_suite(StoreBenchConfig(ssd_dir=str(disk), **STORE_SIZES), 1, ignore)
    assert list(disk.iterdir()) == []


def test_a_page_cache_that_stays_full_is_no_cold_read(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ca_jax.launch.bench_storage.drop_cached", lambda paths: [p.read_bytes() for p in paths])
    with pytest.raises(BenchError, match="page cache without the files of zarr3, found them there"):
        run_store_suite(StoreBenchConfig(ssd_dir=str(disk), **STORE_SIZES), 1, ignore)


def test_a_directory_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_disk, "cached_share", lambda path: 1.0)
    with pytest.raises(BenchError, match=f"whose page cache can be emptied; found {tmp_path}"):
        run_store_suite(StoreBenchConfig(ssd_dir=str(tmp_path), **STORE_SIZES), 1, ignore)


def test_a_disk_without_room_is_told_of(disk: Path) -> None:
    sizes = STORE_SIZES | {"store_gib": 1e-3}
    config = StoreBenchConfig(ssd_dir=str(disk), **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ca_jax.storage.tiers.disk.DiskSpace._free_bytes", lambda self: 1000)
        with pytest.raises(BenchError, match=r"no measurement at this size in .*SSD capacity"):
            run_store_suite(config, 1, ignore)


# The plain ways.


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("driver", DRIVERS)
def test_plain_reads_give_what_the_tier_wrote(tmp_path: Path, driver: str, num_threads: int) -> None:
    layout = StoreBenchConfig(**STORE_SIZES).layout
    tier: SsdTier | RawSsdTier = DRIVERS[driver](layout, tmp_path, 12 * (layout.block_bytes + 16384))
    blocks = np.random.default_rng(0).standard_normal((11, *layout.block_shape)).astype(np.float32)
    tier.write_blocks(range(11), blocks).result()
    extents = block_extents(tmp_path, layout.block_bytes, tier.stored_block_bytes, 11)
    into = np.zeros((11, layout.block_bytes), np.uint8)
    PlainDisk(num_threads).read(extents, into)
    tier.close()
    gap = {"zarr3": 4, "raw": 0}[driver]  # A checksum behind each layer, or all behind the block.
    for layer in range(layout.num_layers - 1):
        start = layer * (layout.layer_block_bytes + gap)
        found = into[:, start : start + layout.layer_block_bytes]
        assert found.tobytes() == blocks[:, layer].tobytes()
    with pytest.raises(BenchError, match="wanted 99 blocks in"):
        block_extents(tmp_path, layout.block_bytes, tier.stored_block_bytes, 99)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_plain_writes_are_read_back(tmp_path: Path, num_threads: int) -> None:
    blocks = np.random.default_rng(0).integers(256, size=(7, 5000), dtype=np.uint8)
    disk = PlainDisk(num_threads)
    for seed in (1, 0):  # The second call replaces what the first one wrote.
        disk.write_files(tmp_path, np.roll(blocks, seed, axis=0))
        disk.write_slots(tmp_path / "slots", np.roll(blocks, seed, axis=0))
    assert (tmp_path / "slots").read_bytes() == blocks.tobytes()
    assert {path.name for path in tmp_path.iterdir()} == {*map(str, range(7)), "slots"}
    assert [(tmp_path / str(i)).read_bytes() for i in range(7)] == [block.tobytes() for block in blocks]


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(bytes(100))
    extents = block_extents(tmp_path, 100, 4096, 1)
    with pytest.raises(OSError, match="wanted 28 more bytes at 100, found the end"):
        PlainDisk(2).read(extents, np.zeros((1, 128), np.uint8))


def test_what_is_in_memory_is_told_and_dropped(disk: Path) -> None:
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


def test_files_in_memory_cannot_be_dropped() -> None:
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        pytest.skip("wants a /dev/shm")
    assert not can_drop(memory)


# policy


def test_policy_measures_choices_start_up_and_loop(tmp_path: Path) -> None:
    config = PolicyBenchConfig(ssd_dir=str(tmp_path), **POLICY_SIZES)
    rows = run_policy_suite(config, ignore)
    assert list(tmp_path.iterdir()) == []
    decisions = [row for row in rows if isinstance(row, DecisionRow)]
    assert [row.policy for row in decisions] == ["scheduler_aware", "return_aware", "lru", "fifo"]
    for row in decisions:
        assert (row.num_sessions, row.num_jobs) == (60, 10)
        assert 0 < row.p50_ms <= row.p99_ms <= row.max_ms
        assert 0 < row.fetches_per_plan <= 8
        assert row.p50_ms_of.keys() == {"queue", "lookup", "plan", "victims"}
        assert all(part_ms > 0 for part_ms in row.p50_ms_of.values())
    (startup,) = [row for row in rows if isinstance(row, StartupRow)]
    assert startup.num_sessions == 60
    assert 60 < startup.num_blocks <= 60 * 31
    assert startup.catalog_bytes > startup.num_blocks * 128 * 4, "token ids are in it"
    for name, (least, largest) in startup.spread.items():
        assert 0 < least <= getattr(startup, name) <= largest
    assert "startup_s" in startup.spread
    assert startup.store_bytes is None or startup.store_bytes >= 0
    (prefix,) = [row for row in rows if isinstance(row, PrefixRow)]
    assert (prefix.num_sessions, prefix.shared_tokens, prefix.prompt_tokens) == (60, 512, 2048)
    assert 0 < prefix.p50_ms <= prefix.p99_ms <= prefix.max_ms
    turns = [row for row in rows if isinstance(row, TurnRow)]
    assert [(row.history_tokens, row.new_tokens) for row in turns] == [(1_000, 100), (100_000, 100)]
    for row in turns:
        assert row.ms_of.keys() == {"render", "queue", "load", "save", "adopt", "keep"}
        assert row.total_ms > 0
        assert all(part_ms > 0 for part_ms in row.ms_of.values())
    loop = {(row.policy, row.queue_depth): row for row in rows if isinstance(row, LoopRow)}
    assert list(loop) == [
        ("belady", None),
        *(("scheduler_aware", depth) for depth in (0.1, 0.25, 0.5, 0.75, 1.0)),
        ("lru", 0.75),
        ("fifo", 0.75),
    ]
    for row in loop.values():
        assert row.num_sessions == 42
        assert row.over_capacity == pytest.approx(0.05)
        assert 0 <= row.hit_rate <= loop["belady", None].hit_rate < 1
        assert row.vs_belady == pytest.approx(row.hit_rate / loop["belady", None].hit_rate)
    # What is no measurement is the same everywhere: 40 of 42 fit, and who knows all jobs does as well as can be.
    assert loop["belady", None].hit_rate == pytest.approx(40 / 42, abs=0.03)
    assert loop["scheduler_aware", 1.0].vs_belady > 0.97
    assert loop["lru", 0.75].hit_rate == 0
    summary = summarize_policy(rows)
    assert summary == {
        "p50_ms": decisions[0].p50_ms,
        "p99_ms": decisions[0].p99_ms,
        "startup_100k_s": startup.startup_s,
        "startup_100k_cold_s": startup.cold_startup_s,
        "prefix_p99_ms": prefix.p99_ms,
        "loop_vs_belady": loop["scheduler_aware", 0.75].vs_belady,
        "loop_lru": 0.0,
        "turn_100k_ms": turns[1].total_ms,
    }


def test_a_start_up_that_loses_sessions_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ca_jax.launch.bench_policy.AttentionStore",
        lambda layout, config, weights: AttentionStore(layout, config, weights=f"not {weights}"),
    )
    with pytest.raises(BenchError, match="wanted 60 sessions after a restart, found 0"):
        run_policy_suite(PolicyBenchConfig(ssd_dir=str(tmp_path), **POLICY_SIZES), ignore)
    assert list(tmp_path.iterdir()) == []


# Asking.


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            StoreBenchConfig,
            {"store_gib": 0.0},
            "store_gib wanted room for at least one block of 5898240 bytes, found 0",
        ),
        (StoreBenchConfig, {"num_layers": 0}, "num_layers must be positive, found 0"),
        (StoreBenchConfig, {"session_tokens": 0}, "session_tokens wanted at least 1, found 0"),
        (StoreBenchConfig, {"repeats": 0}, "repeats wanted at least 1, found 0"),
        (StoreBenchConfig, {"dtype": "float64"}, "KV dtype wanted one of"),
        (PolicyBenchConfig, {"num_sessions": 0}, "num_sessions wanted at least 1, found 0"),
        (PolicyBenchConfig, {"num_jobs": 0}, "num_jobs wanted at least 1, found 0"),
        (PolicyBenchConfig, {"queue_depth": 0.0}, r"queue_depth wanted a share in \(0, 1\], found 0.0"),
        (PolicyBenchConfig, {"queue_depth": math.nan}, "queue_depth wanted a share"),
    ],
)
def test_configs_refuse_what_cannot_be_measured(kind: type, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**changes)


@pytest.mark.parametrize("kind", [StoreBenchConfig, PolicyBenchConfig])
def test_flags_that_configs_share_have_one_default(kind: type) -> None:
    shared = {field.name: field.default for field in dataclasses.fields(BenchConfig)}
    for field in dataclasses.fields(kind):
        assert field.default == shared.get(field.name, field.default)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command itself: flags of two launch modules cannot be defined in one process."""
    command = [sys.executable, "-m", "ca_jax.launch.bench", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("suite", ["store", "policy"])
def test_command_writes_json_and_prints_tables(suite: str, disk: Path) -> None:
    out = disk / "out" / "result.json"
    sizes = STORE_SIZES if suite == "store" else POLICY_SIZES
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    done = bench(f"--suite={suite}", f"--ssd_dir={disk / 'ssd'}", f"--json_out={out}", *arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report.keys() == {
        *("suite", "machine", "versions", "command", "config", "other_load_share", "rows", "summary")
    }
    assert report["suite"] == suite
    assert report["machine"]["cores"] >= 1
    assert "tensorstore" in report["versions"]
    assert f"--suite={suite}" in report["command"]
    assert {name: report["config"][name] for name in sizes} == sizes
    wanted = {
        "store": ["dram_vs_memcpy", "ssd_read_cold_vs_preadv", "ssd_read_warm_vs_preadv", "ssd_write_vs_plain"],
        "policy": ["p50_ms", "p99_ms", "startup_100k_s", "loop_vs_belady", "loop_lru"],
    }[suite]
    assert set(wanted) <= report["summary"].keys()
    for name in set(wanted) - {"loop_lru"}:
        assert report["summary"][name] > 0
    if suite == "policy":
        assert 0 <= report["summary"]["loop_lru"] <= report["summary"]["loop_vs_belady"] <= 1
    titles = {"store": ["store: medians of 2"], "policy": ["decision", "startup: medians of 2", "prefix", "loop"]}[
        suite
    ]
    assert all(title in done.stdout for title in [*titles, report["machine"]["cpu"], f"written to {out}"])
    assert list((disk / "ssd").iterdir()) == []


@pytest.mark.parametrize("suite", ["store", "policy"])
def test_a_file_for_a_directory_is_refused(suite: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (str(tmp_path / "file"), str(tmp_path / "file" / "below")):
        runs = {
            "store": lambda path=path: run_store_suite(StoreBenchConfig(ssd_dir=path, **STORE_SIZES), 1, ignore),
            "policy": lambda path=path: run_policy_suite(PolicyBenchConfig(ssd_dir=path, **POLICY_SIZES), ignore),
        }
        with pytest.raises(BenchError, match="ssd_dir wanted a directory, found a file"):
            runs[suite]()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite=store", "--store_gib=0"], "store_gib wanted room for at least one block"),
        (["--suite=policy", "--num_sessions=0"], "num_sessions wanted at least 1"),
        (["--suite=store", "--ssd_dir={file}"], "ssd_dir wanted a directory, found a file"),
    ],
)
def test_command_says_what_was_wrong(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "out.json"
    done = bench(f"--json_out={out}", *(each.format(file=tmp_path / "file") for each in arguments))
    assert done.returncode == 1
    assert f"error: {message}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()
