"""The benchmark measures what its rows say, on a tiny model, and writes what it promises. No number is judged here."""

import dataclasses
import importlib.util
import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import rich.console

from ca_jax.engine import Engine
from ca_jax.launch import bench_engines, bench_run
from ca_jax.launch.bench_disk import can_drop, drop_cached, fill_cached, scratch_on_disk
from ca_jax.launch.bench_overflow_schema import OverflowBenchConfig
from ca_jax.launch.bench_overlap_schema import PreloadBenchConfig, SaveBenchConfig
from ca_jax.launch.bench_peers import PeerUnavailableError, make_peer
from ca_jax.launch.bench_recording import Recorder
from ca_jax.launch.bench_report import summarize
from ca_jax.launch.bench_schema import (
    PEER_SUITES,
    SOURCES,
    BenchConfig,
    BenchError,
    DecodeRow,
    PrefillRow,
    ReuseRow,
    SourceTimes,
    TiersRow,
)
from ca_jax.launch.bench_serving_schema import ThroughputBenchConfig, TtftBenchConfig, TtftRow
from ca_jax.launch.bench_suites import run_suite
from ca_jax.launch.bench_tiers import run_tiers_suite, tiers_engine_config
from ca_jax.models.presets import PRESETS
from ca_jax.models.random_weights import random_fingerprint
from ca_jax.pretrained import LoadedModel, load_model
from ca_jax.session import Session
from ca_jax.storage.config import SSD_DRIVERS
from ca_jax.testing import tiny

ROW_TYPES = {"reuse": ReuseRow, "prefill": PrefillRow, "decode": DecodeRow}
SIZES = {
    "history_tokens": (150, 40),
    "new_tokens": (9,),
    "prefill_tokens": (70,),
    "batch_sizes": (3, 1),
    "context_tokens": (20,),
    "decode_steps": 2,
    "repeats": 3,
    "dram_gib": 0.004,
    "dtype": "float32",
}
TINY_ROW = PrefillRow(
    tokens=1,
    prefill_s=1.0,
    tokens_per_s=1.0,
    peer_prefill_s=None,
    peer_tokens_per_s=None,
    ratio=None,
    same_tokens=True,
    recompiles=0,
    spread={},
)
has_torch = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None
wants_torch = pytest.mark.skipif(not has_torch, reason="wants torch and transformers: make setup-parity")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.tiny_config()
    return tiny.write_tiny_hf(tmp_path_factory.mktemp("model"), config, tiny.tiny_params(config))


@pytest.fixture(scope="module")
def model(model_dir: Path) -> LoadedModel:
    return load_model(str(model_dir), dtype="float32")


def make_engine(model: LoadedModel, config: BenchConfig) -> Engine:
    return Engine(model, dataclasses.replace(config.engine_config(), compile_cache_dir=None))


class RecordingPeer:
    """A peer of known speed that draws what the real model would, and notes what it was asked."""

    name = "recording"

    def __init__(self, model: LoadedModel, wrong_tokens: bool = False) -> None:
        self._model = model
        self._wrong = wrong_tokens
        self.prompts: list[list[int]] = []
        self.decoded: list[tuple[int, int, int]] = []  # batch size, context, steps
        self._batch = (0, 0)

    def prefill(self, token_ids):
        self.prompts.append(list(token_ids))
        token = int(np.argmax(self._model.logits(token_ids)[-1]))
        return (token + 1 if self._wrong else token), 1e-9

    def start_decode(self, prompts):
        self._batch = (len(prompts), len(prompts[0]))

    def decode(self, num_steps):
        self.decoded.append((*self._batch, num_steps))
        return 1e-9

    def end_decode(self):
        self._batch = (0, 0)


@pytest.mark.parametrize("suite", PEER_SUITES)
def test_every_cell_is_a_row_without_recompiles(model: LoadedModel, suite: str) -> None:
    config = BenchConfig(suite=suite, **SIZES)
    calls = []
    with make_engine(model, config) as engine:
        rows = run_suite(engine, config, None, lambda *call: calls.append(call))
        assert engine.sessions == ()
    cells = {"reuse": [(150, 9), (40, 9)], "prefill": [(70,)], "decode": [(3, 20), (1, 20)]}[suite]
    assert [type(row) for row in rows] == [ROW_TYPES[suite]] * len(cells)
    assert [dataclasses.astuple(row)[: len(cells[0])] for row in rows] == cells
    assert [row.recompiles for row in rows] == [0] * len(cells)
    total = len(cells) * (1 + config.repeats)
    assert calls == [(suite, done, total) for done in range(total + 1)]
    for row in rows:
        for name, (least, largest) in row.spread.items():
            assert 0 <= least <= largest
            if hasattr(row, name):
                assert least <= getattr(row, name) <= largest


def test_reuse_speedup_is_against_the_faster_recompute(model: LoadedModel) -> None:
    config = BenchConfig(suite="reuse", **SIZES)
    peer = RecordingPeer(model)
    with make_engine(model, config) as engine:
        alone = run_suite(engine, config, None, lambda *_: None)
        beside = run_suite(engine, config, peer, lambda *_: None)
    for row in alone:
        assert row.ttft_peer_recompute_s is None
        assert row.speedup == pytest.approx(row.ttft_recompute_s / row.ttft_reuse_s)
    for row in beside:
        assert row.ttft_peer_recompute_s == 1e-9
        assert row.speedup == pytest.approx(1e-9 / row.ttft_reuse_s)
        assert row.same_tokens
    assert [len(prompt) for prompt in peer.prompts] == [159] * 4 + [49] * 4
    first = peer.prompts[0]
    assert all(prompt[:150] == first[:150] for prompt in peer.prompts[:4])
    assert len({prompt[150] for prompt in peer.prompts[:4]}) == 4


@pytest.mark.parametrize("suite", ["reuse", "prefill"])
def test_a_peer_that_draws_other_tokens_shows(model: LoadedModel, suite: str) -> None:
    config = BenchConfig(suite=suite, **SIZES)
    with make_engine(model, config) as engine:
        rows = run_suite(engine, config, RecordingPeer(model, wrong_tokens=True), lambda *_: None)
    assert [row.same_tokens for row in rows] == [False] * len(rows)
    assert summarize(rows)["same_tokens"] is False


def test_decode_gives_the_peer_the_same_batches(model: LoadedModel) -> None:
    config = BenchConfig(suite="decode", **SIZES)
    peer = RecordingPeer(model)
    with make_engine(model, config) as engine:
        rows = run_suite(engine, config, peer, lambda *_: None)
    assert peer.decoded == [(3, 20, 2)] * 4 + [(1, 20, 2)] * 4
    for row in rows:
        assert row.peer_tokens_per_s == pytest.approx(row.batch_size * 2 / 1e-9)
        assert row.speedup_vs_peer == pytest.approx(row.tokens_per_s / row.peer_tokens_per_s)
        assert row.tokens_per_s_per_slot == pytest.approx(row.tokens_per_s / row.batch_size)
    (scaling,) = summarize(rows)["batch_scaling"]
    assert scaling["batch_sizes"] == [1, 3]
    assert scaling["ratio"] == pytest.approx(rows[0].tokens_per_s / rows[1].tokens_per_s)


def test_a_history_the_store_has_no_room_for_is_no_row(model: LoadedModel) -> None:
    config = BenchConfig(suite="reuse", **(SIZES | {"dram_gib": 0.0}))
    with make_engine(model, config) as engine, pytest.raises(BenchError, match="wanted 150 from the store, found 0"):
        run_suite(engine, config, None, lambda *_: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suite": "speed"}, "suite wanted one of reuse, prefill, decode, tiers, found 'speed'"),
        ({"suite": "reuse", "history_tokens": ()}, "history_tokens wanted one or more"),
        ({"suite": "decode", "batch_sizes": (1, 0)}, "batch_sizes wanted one or more"),
        ({"suite": "reuse", "repeats": 0}, "repeats wanted at least 1, found 0"),
    ],
)
def test_config_refuses_what_cannot_be_measured(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchConfig(**changes)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    if not can_drop(tmp_path):
        pytest.skip("wants temporary files on a disk whose page cache can be emptied")
    return tmp_path / "disk"


def make_tiers_engine(model: LoadedModel, config: BenchConfig, directory: Path, **store_changes: object) -> Engine:
    engine_config = tiers_engine_config(config, model, directory)
    store = dataclasses.replace(engine_config.store, **store_changes)
    return Engine(model, dataclasses.replace(engine_config, compile_cache_dir=None, store=store))


@pytest.mark.parametrize("driver", SSD_DRIVERS)
def test_tiers_are_what_the_history_came_from(model: LoadedModel, disk: Path, driver: str) -> None:
    config = BenchConfig(suite="tiers", **(SIZES | {"repeats": 2, "ssd_driver": driver}))
    calls = []
    engine = make_tiers_engine(model, config, disk)
    rows = run_tiers_suite(engine, config, lambda *call: calls.append(call))
    assert [(row.history_tokens, row.new_tokens, row.ssd_driver) for row in rows] == [(150, 9, driver), (40, 9, driver)]
    assert calls == [("tiers", done, 6) for done in range(7)]
    block_bytes = 128 * model.config.kv_bytes_per_token(itemsize=4)
    assert [row.kv_bytes for row in rows] == [2 * block_bytes, block_bytes]
    for row in rows:
        assert (row.recompiles, row.same_tokens) == (0, True)
        assert {source: times.cached_tokens for source, times in row.sources.items()} == {
            "dram": {"dram": row.history_tokens},
            "ssd_warm": {"ssd": row.history_tokens},
            "ssd": {"ssd": row.history_tokens},
            "ssd_restart": {"ssd": row.history_tokens},
            "recompute": {},
        }
        for times in row.sources.values():
            assert times.speedup == pytest.approx(row.sources["recompute"].ttft_s / times.ttft_s)
            assert times.spread.keys() == {"ttft_s", "fetch_s", "load_s", "load_stall_s"}
            for name, (least, largest) in times.spread.items():
                assert 0 <= least <= getattr(times, name) <= largest
        assert row.sources["recompute"].speedup == 1
        assert row.sources["recompute"].load_s == 0 < row.sources["dram"].load_s
    first = rows[0].sources
    assert summarize(rows) == {
        "recompiles": 0,
        "same_tokens": True,
        "ttft_dram_vs_recompute": first["dram"].speedup,
        "ttft_ssd_warm_vs_recompute": first["ssd_warm"].speedup,
        "ttft_ssd_vs_recompute": first["ssd"].speedup,
        "ttft_ssd_restart_vs_recompute": first["ssd_restart"].speedup,
    }


ONE_ROW = SIZES | {"history_tokens": (150,), "repeats": 1}


@pytest.mark.parametrize(
    ("store_changes", "message"),
    [
        ({"dram_gib": 0.01}, "ssd_warm of 150 .* wanted 150 tokens from ssd, found 150 tokens from dram"),
        ({"dram_gib": 0.0001}, "dram of 150 .* wanted 150 tokens from dram, found no tokens from the store"),
        ({"ssd_dir": None}, "wanted an engine with an SSD tier"),
    ],
    ids=["too much DRAM", "too little DRAM", "no SSD"],
)
def test_a_sample_from_another_tier_is_no_row(
    model: LoadedModel, disk: Path, store_changes: dict, message: str
) -> None:
    config = BenchConfig(suite="tiers", **ONE_ROW)
    engine = make_tiers_engine(model, config, disk, **store_changes)
    with pytest.raises(BenchError, match=message):
        run_tiers_suite(engine, config, lambda *_: None)
    assert not engine.keep(), "it is closed"


@pytest.mark.parametrize(
    ("name", "instead", "message"),
    [
        ("drop_cached", fill_cached, "ssd wanted the page cache without stored KV"),
        ("fill_cached", drop_cached, "ssd_warm wanted stored KV in the page cache"),
    ],
)
def test_a_page_cache_of_the_other_kind_is_no_row(
    model: LoadedModel, disk: Path, monkeypatch: pytest.MonkeyPatch, name: str, instead, message: str
) -> None:
    config = BenchConfig(suite="tiers", **ONE_ROW)
    monkeypatch.setattr(bench_engines, name, instead)
    with pytest.raises(BenchError, match=message):
        run_tiers_suite(make_tiers_engine(model, config, disk), config, lambda *_: None)


def test_a_conversation_that_a_restart_loses_is_no_row(
    model: LoadedModel, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BenchConfig(suite="tiers", **ONE_ROW)
    find, engine = Engine.session, make_tiers_engine(model, config, disk)

    def find_nothing(found_by: Engine, *, session_id: str | None = None) -> Session:
        return find(found_by, session_id=session_id if found_by is engine else None)

    monkeypatch.setattr(Engine, "session", find_nothing)
    with pytest.raises(BenchError, match="ssd_restart wanted a conversation of 150 tokens in the store, found 0"):
        run_tiers_suite(engine, config, lambda *_: None)


def test_a_recompute_that_finds_kv_is_no_row(model: LoadedModel, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BenchConfig(suite="tiers", **ONE_ROW)
    monkeypatch.setattr(Engine, "drop_stored", lambda *_: None)
    with pytest.raises(BenchError, match=r"recompute of 150 .* wanted no tokens from the store, found 150 tokens"):
        run_tiers_suite(make_tiers_engine(model, config, disk), config, lambda *_: None)


@wants_torch
@pytest.mark.parametrize("overrides", [{}, {"tie_embeddings": True, "num_kv_heads": 4}], ids=["untied", "tied"])
def test_transformers_peer_is_the_same_model(tmp_path: Path, overrides: dict) -> None:
    config = tiny.tiny_config(**overrides)
    tiny.write_tiny_hf(tmp_path, config, tiny.tiny_params(config, seed=3))
    model = load_model(str(tmp_path), dtype="float32")
    peer = make_peer("transformers", model)
    rng = np.random.default_rng(0)
    for length in (1, 30, 90):
        prompt = rng.integers(config.vocab_size, size=length).tolist()
        token, elapsed_s = peer.prefill(prompt)
        assert token == int(np.argmax(model.logits(prompt)[-1]))
        assert elapsed_s > 0
    with pytest.raises(RuntimeError, match="start_decode"):
        peer.decode(1)
    peer.start_decode(rng.integers(config.vocab_size, size=(2, 20)).tolist())
    assert peer.decode(3) > 0
    peer.end_decode()


@pytest.mark.skipif(has_torch, reason="torch is installed")
def test_absent_peer_says_how_to_get_it(model: LoadedModel) -> None:
    with pytest.raises(PeerUnavailableError, match="make setup-parity"):
        make_peer("transformers", model)


def test_unknown_peer(model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="peer wanted one of transformers, found 'vllm'"):
        make_peer("vllm", model)


def bench(model_dir: Path, cache_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command itself: flags of two launch modules cannot be defined in one process."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache_dir), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "ca_jax.launch.bench", f"--model={model_dir}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_command_writes_json_and_prints_a_table(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "decode.json"
    arguments = [
        "--suite=decode",
        "--batch_sizes=1,2",
        "--context_tokens=20",
        "--decode_steps=2",
        "--repeats=2",
        "--dram_gib=0.004",
        f"--json_out={out}",
    ] + (["--peer=transformers"] if has_torch else [])
    done = bench(model_dir, tmp_path / "cache", *arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert list(report) == [
        *("suite", "model", "dtype", "machine", "versions", "command", "config", "peer", "rows", "startup", "summary")
    ]
    assert report["config"].keys() == {field.name for field in dataclasses.fields(BenchConfig)}
    assert report["suite"] == "decode"
    assert report["model"] == model_dir.name
    assert report["dtype"] == "float32"
    assert report["machine"]["cores"] >= 1
    assert {"jax", "jaxlib"} <= report["versions"].keys()
    assert "--batch_sizes=1,2" in report["command"]
    assert report["config"]["repeats"] == 2
    assert [row["batch_size"] for row in report["rows"]] == [1, 2]
    assert [row["recompiles"] for row in report["rows"]] == [0, 0]
    assert [row.keys() for row in report["rows"]] == [
        {field.name: None for field in dataclasses.fields(DecodeRow)}.keys()
    ] * 2
    startup = report["startup"]
    assert startup["compiles"] > 0
    assert startup["compile_s"] > 0
    assert startup["engine_start_s"] >= startup["model_load_s"] > 0
    assert startup["first_touch_s"] > 0
    assert report["summary"]["recompiles"] == 0
    if has_torch:
        assert report["peer"] == "transformers"
        assert "torch" in report["versions"]
        assert all(row["peer_tokens_per_s"] > 0 for row in report["rows"])
    assert "tokens/s" in done.stdout
    assert "medians of 2" in done.stdout
    assert report["machine"]["cpu"] in done.stdout


def test_command_measures_tiers_and_removes_what_it_wrote(model_dir: Path, tmp_path: Path, disk: Path) -> None:
    out = tmp_path / "tiers.json"
    arguments = ["--suite=tiers", "--history_tokens=150", "--new_tokens=9", "--repeats=1", "--ssd_driver=raw"]
    done = bench(model_dir, tmp_path / "cache", *arguments, f"--ssd_dir={disk}", f"--json_out={out}")
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["config"].keys() == {field.name for field in dataclasses.fields(BenchConfig)}
    assert (report["config"]["ssd_driver"], report["config"]["ssd_dir"]) == ("raw", str(disk))
    (row,) = report["rows"]
    assert row.keys() == {field.name for field in dataclasses.fields(TiersRow)}
    assert list(row["sources"]) == list(SOURCES)
    for times in row["sources"].values():
        assert times.keys() == {field.name for field in dataclasses.fields(SourceTimes)}
    summary = {"ttft_ssd_vs_recompute", "ttft_ssd_restart_vs_recompute", "ttft_dram_vs_recompute"}
    assert all(report["summary"][name] > 0 for name in summary)
    assert (report["summary"]["recompiles"], report["peer"]) == (0, None)
    assert "150 ssd" in done.stdout
    assert "ssd_restart" in done.stdout
    assert list(disk.iterdir()) == []


def test_command_measures_ttft_and_shows_one_turn(model_dir: Path, tmp_path: Path) -> None:
    out, trace, plot = (tmp_path / "new" / name for name in ("ttft.json", "trace.json", "turn.png"))
    arguments = ["--suite=ttft", "--history_tokens=150", "--new_tokens=9", "--repeats=1", "--read_buffer=1"]
    written = [f"--json_out={out}", f"--trace_out={trace}", f"--plot_out={plot}"]
    done = bench(model_dir, tmp_path / "cache", *arguments, *written)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["config"].keys() == {field.name for field in dataclasses.fields(TtftBenchConfig)}
    assert report["config"]["engine"]["read_buffer"] == 1
    (row,) = report["rows"]
    assert row.keys() == {field.name for field in dataclasses.fields(TtftRow)}
    assert report["summary"].keys() == {"ratio_dram", "ratio_ssd", "ratio_ideal", "same_tokens", "recompiles"}
    assert (report["startup"]["engine_start_s"], report["startup"]["compiles"] > 0) == (None, True)
    assert "ratio_ideal" in done.stdout
    assert f"written to {out}, {trace}, {plot}" in done.stdout.replace("\n", "")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def run(config: object, model: LoadedModel) -> dict:
    quiet = rich.console.Console(file=io.StringIO())
    return bench_run.run(config, lambda _: model, peer_name=None, recorder=Recorder(), command="python", console=quiet)


@pytest.mark.parametrize(
    ("suite", "config"),
    [
        ("ttft", TtftBenchConfig()),
        ("throughput", ThroughputBenchConfig()),
        ("preload", PreloadBenchConfig()),
        ("save", SaveBenchConfig()),
        ("overflow", OverflowBenchConfig()),
    ],
)
def test_every_suite_of_a_model_is_run(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, suite: str, config: object
) -> None:
    def run_fake(of_model: LoadedModel, asked: object, progress: object, *_: object) -> types.SimpleNamespace:
        assert (of_model, asked) == (model, config)
        return types.SimpleNamespace(rows=[TINY_ROW], summary={"speedup": 2.0})

    monkeypatch.setattr(bench_run, f"run_{suite}_suite", run_fake)
    report = run(config, model)
    assert (report["suite"], report["model"], report["summary"]) == (suite, model.name, {"speedup": 2.0})
    assert report["rows"] == [dataclasses.asdict(TINY_ROW)]


def test_a_model_is_loaded_or_a_preset_drawn(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "tiny", tiny.tiny_config())
    loaded = bench_run.model_loader(str(model_dir), None, dtype="float32", seed=3)(lambda *_: None)
    drawn = bench_run.model_loader(str(model_dir), "tiny", dtype="bfloat16", seed=3)(lambda *_: None)
    assert (loaded.name, loaded.dtype) == (model_dir.name, "float32")
    assert (drawn.name, drawn.dtype, drawn.tokenizer) == ("tiny (random weights)", "bfloat16", None)
    assert drawn.fingerprint == random_fingerprint(tiny.tiny_config(), dtype="bfloat16", seed=3)


def test_tiers_in_memory_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ca_jax.launch.bench_disk.cached_share", lambda path: 1.0)
    with pytest.raises(BenchError, match="ssd_dir wanted a disk"), scratch_on_disk(str(tmp_path)):
        pytest.fail("wanted no directory")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite=tiers", "--ssd_dir=/dev/null/below"], "ssd_dir wanted a directory"),
        (
            ["--suite=tiers", "--peer=transformers"],
            "a peer wanted one of the suites reuse, prefill, decode, found tiers",
        ),
        (["--suite=reuse", "--history_tokens=9,x"], "history_tokens wanted integers"),
        (["--suite=reuse", "--history_tokens=9000"], "no engine for reuse at this size"),
        (
            ["--suite=store", "--peer=transformers"],
            "a peer wanted one of the suites reuse, prefill, decode, found store",
        ),
        (["--suite=reuse", "--trace_out=t.json"], "trace_out wanted one of the suites ttft, throughput, found reuse"),
        (
            ["--suite=throughput", "--plot_out=t.png"],
            "plot_out wanted one of the suites ttft, overflow, blend, blend_throughput, found throughput",
        ),
        (["--suite=ttft", "--model_preset=llama2-7b"], "wanted model or model_preset, found"),
        (["--suite=ttft", "--plot_out=."], "plot_out wanted a file, found the directory ."),
    ],
)
def test_command_says_what_was_wrong(model_dir: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    out = tmp_path / "out.json"
    done = bench(model_dir, tmp_path / "cache", f"--json_out={out}", *arguments)
    assert done.returncode == 1
    assert f"error: {message}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()
