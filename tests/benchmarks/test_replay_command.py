"""Replay from the command line: tables, JSON, figure, progress, and what is said of bad input."""

import dataclasses
import io
import json

import pytest
import rich.console

from benchmarks.replay import main as script
from benchmarks.replay.running import ReplayConfig
from benchmarks.replay.serving import Sample
from benchmarks.replay.workload import WorkloadConfig
from ca_jax.simulate.traces.requests import TraceConfig
from tests import engine_kit as kit
from tests.benchmarks.traces_kit import lines_file, sharegpt_file, talk, workload


@pytest.fixture
def sharegpt(tmp_path):
    return sharegpt_file(tmp_path / "sharegpt.json", *(talk(3, seed) for seed in range(4)))


def test_a_replay_leaves_tables_json_and_a_figure(sharegpt, tmp_path):
    config = ReplayConfig(
        trace=TraceConfig(trace=str(sharegpt)),
        workload=WorkloadConfig(num_sessions=4, max_answer_tokens=6),
        engine=dataclasses.replace(kit.SMALL, share_prefixes=False),
        recompute=True,
        simulate=True,
    )
    output = io.StringIO()
    json_out, plot_out = tmp_path / "made" / "replay.json", tmp_path / "made" / "replay.png"
    result = script.run(
        config,
        lambda progress: kit.tiny_model(),
        rich.console.Console(file=output, width=180),
        command="python -m it",
        json_out=json_out,
        plot_out=plot_out,
    )
    report = json.loads(json_out.read_text())
    assert report["config"]["workload"] == dataclasses.asdict(config.workload)
    assert report["workload"]["turns"] == 12
    for run, found in zip(report["runs"], result.runs, strict=True):
        turns = [dict(zip(report["turn_columns"], row, strict=True)) for row in run["turns"]]
        assert len(turns) == run["summary"]["turns"] == 12
        assert sum(each["answer_tokens"] for each in turns) == run["summary"]["output_tokens"]
        assert run["summary"]["hit_rate"] == found.summary.hit_rate
        assert len(run["samples"][0]) == len(report["sample_columns"])
    assert report["comparison"]["same_answers"] == 12
    assert report["agreement"]["simulated_hit_rate"] == 1.0
    assert plot_out.read_bytes().startswith(b"\x89PNG")
    said = output.getvalue()
    for wanted in (
        "4 conversations, 12 turns",
        "hit rate",
        "100.0%",
        "the same answer in 12 of 12",
        "simulated: hit rate",
    ):
        assert wanted in said


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_says_what_goes_on(sharegpt, is_terminal):
    made = workload(TraceConfig(trace=str(sharegpt)), num_sessions=4)
    sample = Sample(
        time_s=20.0,
        ended=5,
        running=2,
        waiting=3,
        returning=4,
        hits=3,
        output_tokens=40,
        prompt_tokens=160,
        dram_share=0.5,
        ssd_share=0.25,
    )
    output = io.StringIO()
    console = rich.console.Console(file=output, force_terminal=is_terminal, width=160)
    with script.replay_progress(console) as (progress, on_sample):
        progress("compiling", 1, 1)
        on_sample("store", made, dataclasses.replace(sample, time_s=10.0, output_tokens=0, prompt_tokens=0))
        on_sample("store", made, sample)
    said = output.getvalue()
    assert "running 2 waiting 3 · hits 75% · DRAM 50% SSD 25% · 20 tokens/s" in said
    assert "5/12" in said
    assert ("compiling" in said) == is_terminal


def test_bad_input_is_one_line_and_no_traceback(command, tiny_model, tmp_path):
    rows = [{"timestamp": 5, "input_length": 9, "output_length": 2, "hash_ids": [1]}]
    rows.append({**rows[0], "timestamp": 1})
    path = lines_file(tmp_path / "unsorted.jsonl", *rows)
    flags = ("--trace_format=mooncake", f"--trace={path}", f"--model={tiny_model}", "--num_sessions=2")
    ended = command(*flags, module="replay")
    assert ended.code == 1
    assert "unsorted.jsonl, line 2: `timestamp`" in ended.err
