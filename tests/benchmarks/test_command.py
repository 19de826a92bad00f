"""The commands of the benchmarks write what they promise, with the fields of their rows, and say what is wrong."""

import dataclasses
import json
import os
import subprocess
import sys

import matplotlib.image
import pytest

import ca_jax
from benchmarks.suites import ttft
from benchmarks.suites.reuse import DecodeConfig, DecodeRow
from benchmarks.suites.ttft import TtftConfig, TtftRow
from ca_jax.testing import tiny
from tests.scripts_kit import Ended

_OF_LAYERS = ("load", "compute")


def names(kind):
    return {field.name for field in dataclasses.fields(kind)}


def run(command, suite, directory, *arguments):
    """The report of a run that succeeds, and what it printed."""
    out = directory / "new" / f"{suite}.json"
    done = command(f"--suite={suite}", f"--json_out={out}", *arguments)
    assert done.code == 0, done.err
    assert f"{out}" in done.out.replace("\n", "")
    return json.loads(out.read_text(encoding="utf-8")), done.out


def in_process_of_its_own(*arguments):
    line = [sys.executable, "-m", "ca_jax.launch.bench", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return Ended(done.returncode, done.stdout, done.stderr)


def test_decode_leaves_json_and_a_table(tiny_model, tmp_path):
    sizes = ["--batch_sizes=1,2", "--context_tokens=20", "--decode_steps=2", "--repeats=2", "--dram_gib=0.004"]
    report, text = run(in_process_of_its_own, "decode", tmp_path, f"--model={tiny_model}", "--dtype=float32", *sizes)
    assert report.keys() == {
        *("suite", "model", "dtype", "machine", "versions", "command", "config", "peer", "rows", "startup", "summary")
    }
    assert report["config"].keys() == names(DecodeConfig)
    assert (report["suite"], report["model"], report["dtype"]) == ("decode", tiny_model.name, "float32")
    assert report["machine"]["cores"] >= 1
    assert {"jax", "jaxlib"} <= report["versions"].keys()
    assert "--batch_sizes=1,2" in report["command"]
    assert [row["batch_size"] for row in report["rows"]] == [1, 2]
    assert all(row.keys() == names(DecodeRow) for row in report["rows"])
    startup = report["startup"]
    assert min(startup["compiles"], startup["compile_s"], startup["first_touch_s"]) > 0
    assert startup["engine_start_s"] >= startup["model_load_s"] > 0
    assert report["summary"]["recompiles"] == 0
    for part in ("tokens per s", "medians of 2", report["machine"]["cpu"]):
        assert part in text


def test_ttft_shows_one_turn_of_a_round_that_does_not_count(command, tiny_model, tmp_path, monkeypatch):
    rounds, ways = [], ttft._Bench._ways
    monkeypatch.setattr(ttft._Bench, "_ways", lambda *arguments: (rounds.append(arguments), ways(*arguments))[1])
    trace, plot = tmp_path / "new" / "trace.json", tmp_path / "new" / "turn.png"
    sizes = ["--history_tokens=150", "--new_tokens=9", "--repeats=1", "--read_buffer=1"]
    files = [f"--trace_out={trace}", f"--plot_out={plot}"]
    report, text = run(command, "ttft", tmp_path, f"--model={tiny_model}", *sizes, *files)
    assert report["config"].keys() == names(TtftConfig)
    assert report["config"]["engine"]["read_buffer"] == 1
    (row,) = report["rows"]
    assert row.keys() == names(TtftRow)
    assert report["summary"].keys() == {"ratio_dram", "ratio_ssd", "ratio_ideal", "same_tokens", "recompiles"}
    assert report["startup"]["engine_start_s"] is None
    assert "ratio_ideal" in text
    assert len(rounds) == 1 + 1 + 1, "for nothing, measured, recorded"
    events = [event for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if event["ph"] == "X"]
    turns = [event for event in events if "tokens over" in event["name"]]
    assert [turn["name"] for turn in turns] == ["9 tokens over 150 from dram", "9 tokens over 150 from ssd_warm"]
    layers = list(range(tiny.tiny_config().num_layers))
    for turn, num_fetches in zip(turns, (0, 1), strict=True):
        begin, end = turn["ts"], turn["ts"] + turn["dur"]
        within = [event for event in events if begin <= event["ts"] and event["ts"] + event["dur"] <= end + 1]
        by_track = {track: [each["args"]["layer"] for each in within if each["cat"] == track] for track in _OF_LAYERS}
        assert (sorted(by_track["load"]), sorted(set(by_track["compute"]))) == (layers, layers)
        assert sum(each["cat"] == "fetch" for each in within) == num_fetches
    assert matplotlib.image.imread(plot).ndim == 3


def test_a_suite_without_a_model_is_run(command, tmp_path, disk):
    sizes = ["--num_layers=3", "--store_gib=0.0002", "--session_tokens=70", "--num_kv_heads=2", "--head_dim=16"]
    sizes += ["--block_tokens=32", "--repeats=2", f"--ssd_dir={disk}"]
    report, text = run(command, "store", tmp_path, *sizes)
    assert report.keys() == {
        *("suite", "machine", "versions", "command", "config", "rows", "summary", "other_load_share")
    }
    assert report["summary"]["ssd_write_vs_plain"] > 0
    assert report["machine"]["cpu"] in text
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite=tiers", "--ssd_dir=/dev/null/below"], "ssd_dir must be a directory"),
        (["--suite=tiers", "--peer=transformers"], "peer must go with one of the suites reuse, prefill, decode, got"),
        (["--suite=reuse", "--history-tokens=9,x"], "history_tokens must be whole numbers"),
        (["--suite=reuse", "--history_tokens=9000"], "no engine for reuse at this size"),
        (["--suite=reuse", "--trace_out=t.json"], "trace_out must go with one of the suites throughput, ttft, got"),
        (["--suite=ttft", "--model_preset=llama2-7b"], "model and model_preset must not both be given"),
        (["--suite=ttft", "--plot_out=."], "plot_out "),
        (["--suite=overflow", "--num_sessions=0", "--plot_out=o.png"], "plot_out must have num_sessions"),
    ],
)
def test_command_says_what_was_wrong(command, tiny_model, tmp_path, arguments, message):
    out = tmp_path / "out.json"
    done = command(f"--json_out={out}", f"--model={tiny_model}", *arguments)
    assert done.code == 1
    assert f"error: {message}" in done.err
    assert "Traceback" not in done.err
    assert not out.exists()


@pytest.mark.parametrize("module", ["bench", "demo", "evaluate", "gpu_bench", "replay"])
def test_a_package_without_its_checkout_says_where_benchmarks_are(command, tmp_path, monkeypatch, module):
    monkeypatch.setattr(ca_jax, "__file__", str(tmp_path / "ca_jax" / "__init__.py"))
    done = command(module=module)
    assert done.code == 1
    assert done.err.startswith("error: the benchmarks are not part of the installed package: clone its repository")
    assert len(done.err.splitlines()) == 1
