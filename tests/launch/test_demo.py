"""The demo: a conversation served with reuse and with recomputation, on a tiny model, and what is written of it."""

import dataclasses
import io
import itertools
import json
import subprocess
import sys

import pytest
import rich.console

from ca_jax.launch import demo, demo_report
from ca_jax.launch.plots import plot_turns
from ca_jax.launch.terminal import decode_rate
from ca_jax.session import Usage

MESSAGES = ("I plan a trip.", "To Rome, say. How?", "And [then]?", "Thanks! One more thing.")
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharegpt") / "sharegpt.json"
    spoken = [
        {"from": who, "value": text} for said in MESSAGES for who, text in (("human", said), ("gpt", "As you like."))
    ]
    silent = [{"from": "gpt", "value": "Nobody asked."}]
    pieces = [{"id": "trip_0", "conversations": spoken}, {"id": "silent_0", "conversations": silent}]
    path.write_text(json.dumps(pieces))
    return path


@pytest.fixture(scope="module")
def config(tiny_model, recording, tmp_path_factory):
    return demo.DemoConfig(
        model=str(tiny_model),
        conversation_id="trip",
        sharegpt_file=str(recording),
        max_tokens=MAX_TOKENS,
        dram_gib=1 / 64,
        results_dir=str(tmp_path_factory.mktemp("out") / "results"),
    )


@pytest.fixture(scope="module")
def ran(config):
    output = io.StringIO()
    report = demo.run(config, rich.console.Console(file=output, width=100), "demo --as=tested")
    return report, output.getvalue()


def test_reuse_prefills_only_what_is_new_and_says_the_same(ran):
    rows = ran[0]["rows"]
    assert [row["turn"] for row in rows] == [1, 2, 3, 4]
    assert all(row["same_tokens"] for row in rows)
    assert [row["answer_tokens"] for row in rows] == [MAX_TOKENS] * 4
    assert [row["cached_tokens"] for row in rows] == [0, *(row["history_tokens"] - 1 for row in rows[1:])]
    for before, after in itertools.pairwise(rows):
        assert after["history_tokens"] == before["history_tokens"] + before["new_tokens"] + before["answer_tokens"]
    assert all(row["new_tokens"] > len(said) for row, said in zip(rows, MESSAGES, strict=True))  # a byte is a token
    demo_report.check_same(ran[0])


def test_nothing_is_compiled_while_a_turn_is_measured(ran):
    report, output = ran
    assert [row["compiles"] for row in report["rows"]] == [0] * 4
    assert report["startup"]["compiles"] > 0
    assert "of no use" not in output


def test_the_recompute_run_has_no_cached_tokens(engine):
    console = rich.console.Console(file=io.StringIO())
    reused = demo.serve(engine, MESSAGES[:3], reuse=True, max_tokens=4, console=console)
    recomputed = demo.serve(engine, MESSAGES[:3], reuse=False, max_tokens=4, console=console)
    assert [turn.usage.num_cached_tokens for turn in recomputed] == [0, 0, 0]
    assert all(turn.usage.num_cached_tokens > 0 for turn in reused[1:])
    assert [turn.answer_ids for turn in recomputed] == [turn.answer_ids for turn in reused]
    assert [len(turn.answer_ids) for turn in reused] == [4, 4, 4]


def test_answers_table_and_costs_are_shown(ran):
    report, output = ran
    assert all(output.count(f"{turn}. {said}\n") == 2 for turn, said in enumerate(MESSAGES, 1))
    assert output.count("TTFT ") >= 8
    table = [line.split() for line in output.splitlines() if line.strip().endswith("yes")]
    assert [(int(cells[0]), int(cells[1])) for cells in table] == [
        (row["turn"], row["history_tokens"]) for row in report["rows"]
    ]
    assert f"ends at {report['conversation_tokens']} tokens" in output
    assert "Model load" in output
    assert all(f"{step} " in output for step in ("reading ShareGPT", "reading weights", "compile", "touching memory"))


def test_json_and_figure_are_written(ran, config):
    directory = demo.Path(config.results_dir)
    written = json.loads((directory / "demo.json").read_text())
    assert written == ran[0]
    assert written["command"] == "demo --as=tested"
    assert written["engine_config"]["dtype"] == "float32"
    assert written["config"]["max_tokens"] == MAX_TOKENS
    assert {"machine", "versions", "startup"} <= set(written)
    assert (directory / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")


def served(answer_ids, ttft_s, cached, compiles=0):
    usage = Usage(
        prompt_tokens=100,
        cached_tokens={"dram": cached},
        completion_tokens=len(answer_ids),
        ttft_s=ttft_s,
        queued_s=0.0,
        load_s=0.0,
        load_stall_s=0.0,
        decode_s=0.5,
    )
    return demo_report.ServedTurn(history_tokens=80, answer_ids=answer_ids, usage=usage, compiles=compiles)


def test_an_answer_that_differs_is_told_and_ends_the_demo():
    recomputed = [served([1, 2, 3], 2.0, 0), served([4, 5], 2.0, 0, compiles=2)]
    reused = [served([1, 2, 3], 0.25, 79), served([4, 6], 0.5, 79, compiles=1)]
    good, bad = demo_report.compare(recomputed, reused)
    assert (good.same_tokens, bad.same_tokens) == (True, False)
    assert (good.ratio, bad.ratio) == (8.0, 4.0)
    assert (good.new_tokens, good.cached_tokens, good.compiles, bad.compiles) == (20, 79, 0, 3)
    assert good.decode_tokens_per_s == decode_rate(reused[0].usage) == 4.0
    report = {"rows": [dataclasses.asdict(row) for row in (good, bad)]}
    with pytest.raises(demo_report.DemoError, match=r"found others in turns \[2\]"):
        demo_report.check_same(report)


def test_turns_measured_while_compiling_are_told(ran):
    report = ran[0] | {"rows": [ran[0]["rows"][0] | {"compiles": 1, "same_tokens": False}]}
    output = io.StringIO()
    demo_report.print_report(report, rich.console.Console(file=output, width=100))
    assert "while turns [1] were measured" in output.getvalue()
    assert " NO " in output.getvalue()


def test_a_conversation_without_user_turns_is_refused(config):
    with pytest.raises(demo_report.DemoError, match="wanted user turns in conversation 'silent'"):
        demo.run(
            dataclasses.replace(config, conversation_id="silent"), rich.console.Console(file=io.StringIO()), "demo"
        )


@pytest.mark.parametrize("field", ["turns", "max_tokens"])
def test_counts_below_one_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, found 0"):
        demo.DemoConfig(**{field: 0})


def test_a_figure_wants_one_value_per_turn(tmp_path):
    with pytest.raises(ValueError, match=r"found lengths \[1, 2\]"):
        plot_turns(
            tmp_path / "x.png",
            ttft_recompute_s=[1.0, 2.0],
            ttft_reuse_s=[1.0],
            history_tokens=[1],
            new_tokens=[1],
            title="",
            caption="",
        )


def test_the_program_says_what_it_lacks(recording):
    command = [sys.executable, "-m", "ca_jax.launch.demo", f"--sharegpt_file={recording}", "--conversation_id=nonesuch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "no conversation 'nonesuch'" in done.stderr
    assert "Traceback" not in done.stderr
