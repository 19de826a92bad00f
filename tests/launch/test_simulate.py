"""Simulations from the command line: figures, traces, and what is said of bad input."""

import json

import pytest

from benchmarks.paper_figures import FIGURES, PaperRuns, figure_rows
from ca_jax.launch.simulate import SimulateConfig
from tests.benchmarks.traces_kit import lines_file, sharegpt_file, talk
from tests.scripts_kit import run_script

LENGTHS = [((30 + 40 * (i % 7), 60 + 90 * (i % 11)),) * (1 + i % 8) for i in range(12)]


@pytest.fixture
def run():
    def run(*arguments, code=0):
        done = run_script("simulate", *arguments)
        assert done.code == code, done.err
        return done

    return run


@pytest.fixture
def sharegpt(tmp_path):
    return sharegpt_file(tmp_path / "sharegpt.json", *(talk(1 + index, index) for index in range(5)))


@pytest.fixture
def mooncake(tmp_path):
    def row(second, *hash_ids):
        size = 512 * len(hash_ids)
        return {"timestamp": 1000 * second, "input_length": size, "output_length": 9, "hash_ids": hash_ids}

    rows = [row(0, 1), row(1, 2), row(20, 1, 3), row(21, 2, 4), row(40, 1, 3, 5)]
    return lines_file(tmp_path / "trace.jsonl", *rows)


@pytest.fixture(scope="module")
def runs():
    return PaperRuns(SimulateConfig(num_sessions=12, arrival_rate=20.0), LENGTHS)


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_has_rows_with_the_paper_s_numbers_beside_ours(runs, figure):
    rows = figure_rows(figure, runs)
    assert {row.figure for row in rows} == {figure}
    assert any(row.paper for row in rows) == (figure != "18"), "the paper prints no number of figure 18"
    for row in rows:
        assert row.unit in ("%", "points", "x", "s", "h", "tokens/s", "layers")
        assert row.ratio is None or row.ratio == pytest.approx(row.ours / row.paper)
        if row.unit == "%":
            assert -1 <= row.ours <= 1


def test_figures_are_written_as_table_json_and_plots(run, sharegpt, tmp_path):
    out = tmp_path / "out.json"
    arguments = "--figure=13", "--figure=17", "--num_sessions=8", f"--trace={sharegpt}", "--arrival_rate=5"
    done = run(*arguments, f"--json_out={out}", f"--plot_dir={tmp_path / 'plots'}")
    assert "llama-65b" in done.out
    report = json.loads(out.read_text())
    assert [row["figure"] for row in report["rows"]] == ["13"] * 8 + ["17"] * 4
    assert report["config"]["num_sessions"] == 8
    assert {"machine", "versions", "command", "num_turns", "elapsed_s"} <= report.keys()
    plots = sorted((tmp_path / "plots").iterdir())
    assert [path.name for path in plots] == ["figure_13.png", "figure_17.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)


def test_figures_of_one_turn_read_no_conversations(run, tmp_path):
    out = tmp_path / "out.json"
    done = run("--figure=20", "--device=h100", f"--trace={tmp_path / 'none.json'}", f"--json_out={out}")
    assert "1,600 tokens" in done.out
    assert "turns simulated" not in done.out
    report = json.loads(out.read_text())
    assert {row["figure"] for row in report["rows"]} == {"20"}
    assert (report["config"]["device"], report["num_turns"]) == ("h100", 0)


def test_a_trace_is_served_under_every_policy_and_bad_rows_are_counted(run, mooncake, tmp_path):
    with mooncake.open("a") as file:
        file.write('{"timestamp": 50000, "input_length": -1, "output_length": 1, "hash_ids": []}\n')
    out = tmp_path / "out.json"
    arguments = "--trace_format=mooncake", f"--trace={mooncake}", "--capacity_share=1.2", "--model=smollm2-135m"
    done = run(*arguments, "--policy=lru", "--policy=belady", "--skip_bad_rows", f"--json_out={out}")
    assert "leading blocks that were seen before: 0.444" in done.out  # 4 of 9.
    assert "1 rows skipped, the first: " in done.out
    report = json.loads(out.read_text())
    assert [row["policy"] for row in report["rows"]] == ["recompute", "lru", "belady"]
    assert [row["hit_rate"] for row in report["rows"]] == [0.0, 1.0, 1.0]
    assert (report["num_sessions"], report["num_turns"], report["skipped_rows"]) == (2, 5, 1)


BAD = {
    "a negative length": (["--trace_format=mooncake", "--capacity_share=1"], "line 6: `input_length`"),
    "a store under one session": (["--trace_format=mooncake", "--skip_bad_rows", "--dram_gb=0.1"], "dram_bytes"),
    "too few devices": (
        ["--trace_format=mooncake", "--skip_bad_rows", "--model=llama-70b", "--num_devices=1"],
        "num_devices must be as many a100-80 as hold the 138 GB of weights of llama-70b, got 1",
    ),
    "a flag of figures alone": (["--trace_format=mooncake", "--price_device=3"], "--price_device must be left out of"),
    "a flag of traces alone": (["--figure=13", "--policy=lru"], "--policy must be left out of figures"),
    "no such figure": (["--figure=99"], "figure must be one of 13, 14, 15, 16, 17, 18,"),
    "a flag of ShareGPT alone": (["--trace_format=mooncake", "--max_turns=3"], "--max_turns must be left out of"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_said_in_a_line(run, mooncake, arguments, message):
    with mooncake.open("a") as file:
        file.write('{"timestamp": 50000, "input_length": -1, "output_length": 1, "hash_ids": []}\n')
    done = run(*arguments, f"--trace={mooncake}", code=1)
    assert done.err.strip().splitlines()[-1].startswith("error: ")
    assert message in done.err


def test_many_replicas_leave_a_table_and_json(run, tmp_path):
    def request(begin_s, *hash_ids):
        return {"t": begin_s, "api_time": 1.0, "in": 64 * len(hash_ids), "out": 9, "hash_ids": hash_ids}

    requests = [request(0.0, 1, 2), request(9.0, 1, 2, 3), request(20.0, 1, 2, 3, 4)]
    trace = lines_file(tmp_path / "t.jsonl", {"id": "a", "block_size": 64, "tool_tokens": 64, "requests": requests})
    out = tmp_path / "out.json"
    of_fleet = "--num_replicas=3", "--duration_s=600", "--warmup_s=60", "--scale=100:1,300:-1", "--mtbf_hours=0.1"
    done = run(*of_fleet, f"--trace={trace}", "--trace_format=agent_sessions", "--routing=hash", f"--json_out={out}")
    assert "1 recorded sessions of 3 turns" in done.out
    report = json.loads(out.read_text())
    assert [row["routing"] for row in report["rows"]] == ["hash"]
    assert report["rows"][0]["num_turns"] > 100
    assert report["config"]["trace"] == "t.jsonl"
    assert report["fleet"]["scale"] == ["100:1", "300:-1"]
    assert {(row["object_mib"], row["new_tokens"]) for row in report["restores"]} >= {(16, 64), (64, 8192)}
    assert {"machine", "versions", "command", "elapsed_s"} <= report.keys()


def test_flags_of_the_other_simulation_are_refused(run, sharegpt, mooncake):
    refused = (
        (("--num_replicas=2", "--policy=lru", f"--trace={sharegpt}"), "--policy must be left out of many replicas"),
        (("--mtbf_hours=2", f"--trace={sharegpt}"), "--mtbf_hours must be left out of one server"),
        (("--routing=hash", f"--trace={sharegpt}"), "--routing must be left out of one server"),
        (("--num_replicas=2", "--trace_format=mooncake", f"--trace={mooncake}"), "trace_format must be sharegpt or"),
        (("--num_replicas=2", "--scale=3", f"--trace={sharegpt}"), "scale must be TIME:COUNT"),
    )
    for arguments, message in refused:
        assert message in run(*arguments, code=1).err
