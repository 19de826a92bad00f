"""The demo: a conversation served with reuse and with recomputation, on a tiny model, and its report."""

import itertools
import json
import os
import subprocess
import sys

import pytest

from benchmarks import demo, demo_acts
from ca_jax import Engine, EngineConfig, StoreConfig
from ca_jax.storage.records import Residency
from ca_jax.turns.requests import Usage

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
def results_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("out") / "results"


@pytest.fixture(scope="module")
def arguments(tiny_model, recording, results_dir):
    return [
        f"--model={tiny_model}",
        f"--sharegpt_file={recording}",
        f"--max_tokens={MAX_TOKENS}",
        f"--results_dir={results_dir}",
        "--dram_gib=0.016",
        "--ssd_gib=0.016",
        "--ssd_free_floor_gib=0",
    ]


@pytest.fixture(scope="module")
def ran(arguments, results_dir):
    """The program, run once: its report and what it printed."""
    environment = os.environ | {"PYTHONUTF8": "1", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-m", "ca_jax.launch.demo", *arguments, "--conversation_id=trip"],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((results_dir / "demo.json").read_text()), done.stdout


def test_reuse_prefills_only_what_is_new_says_the_same_and_compiles_nothing(ran):
    rows = ran[0]["rows"]
    assert [row["compiles"] for row in (*rows, ran[0]["resume"])] == [0] * 4
    assert ran[0]["startup"]["compiles"] > 0
    assert "of no use" not in ran[1]
    assert [row["turn"] for row in rows] == [1, 2, 3]
    assert all(row["same_tokens"] for row in rows)
    assert [row["answer_tokens"] for row in rows] == [MAX_TOKENS] * 3
    assert [row["cached_tokens"] for row in rows] == [{}, *({"dram": row["history_tokens"] - 1} for row in rows[1:])]
    for before, after in itertools.pairwise([*rows, ran[0]["resume"]]):
        assert after["history_tokens"] == before["history_tokens"] + before["new_tokens"] + before["answer_tokens"]
    assert all(row["new_tokens"] > len(said) for row, said in zip(rows, MESSAGES, strict=False))  # a byte is a token


def test_the_last_turn_goes_on_from_ssd_after_the_restart(ran):
    resume = ran[0]["resume"]
    assert (resume["turn"], resume["session_id"], resume["num_messages"]) == (4, "demo-trip", 6)
    assert resume["cached_tokens"] == {"ssd": resume["history_tokens"] - 1}
    assert resume["same_tokens"]
    assert resume["answer_tokens"] == MAX_TOKENS
    assert resume["ratio"] == resume["ttft_recompute_s"] / resume["ttft_ssd_s"]
    assert ran[0]["conversation_tokens"] == resume["history_tokens"] + resume["new_tokens"] + MAX_TOKENS
    assert f"session demo-trip goes on: {resume['history_tokens']} tokens, 6 messages" in ran[1]
    assert f"(ssd {resume['history_tokens'] - 1})" in ran[1]


def act(tiny_model, directory):
    store = StoreConfig(dram_gib=1 / 64, ssd_dir=str(directory), ssd_gib=1 / 64, ssd_free_floor_gib=0.0)
    config = EngineConfig(
        context_window=512, max_batch_size=1, recompute_if_faster=False, compile_cache_dir=None, store=store
    )
    return {"model": str(tiny_model), "engine_config": config, "session_id": "demo", "max_tokens": 4}


def test_only_the_reused_conversation_is_stored_and_a_second_demo_begins_anew(tiny_model, tmp_path):
    arguments = act(tiny_model, tmp_path)
    for _ in range(2):
        first = demo_acts.serve_with_and_without(messages=MESSAGES[:2], **arguments)
        assert [row.cached_tokens for row in first.rows] == [{}, {"dram": first.rows[1].history_tokens - 1}]
        assert [(row.same_tokens, row.answer_tokens) for row in first.rows] == [(True, 4)] * 2
    with Engine.from_pretrained(arguments["model"], arguments["engine_config"]) as engine:
        stored = engine.stored.list()
        assert [(info.session_id, info.residency) for info in stored] == [("demo", Residency.SSD)]
        known = engine.session(session_id="demo").token_ids
    assert stored[0].ssd_tokens == len(known) - 1
    assert len(known) == first.rows[1].history_tokens + first.rows[1].new_tokens + 4


def test_act_two_wants_what_act_one_has_left(tiny_model, tmp_path):
    with pytest.raises(demo_acts.DemoError, match="must have the conversation of session 'demo'"):
        demo_acts.go_on(message="And now?", started_s=0.0, page_cache_dropped=False, **act(tiny_model, tmp_path))


def test_answers_table_and_costs_are_shown(ran):
    report, output = ran
    assert [output.count(f"{turn}. {said}\n") for turn, said in enumerate(MESSAGES, 1)] == [2, 2, 2, 1]
    assert output.count("TTFT ") >= 8
    table = [line.split() for line in output.splitlines() if line.strip().endswith("yes")]
    resume = report["resume"]
    assert [(int(cells[0]), int(cells[1])) for cells in table] == [
        (row["turn"], row["history_tokens"]) for row in (*report["rows"], resume)
    ]
    assert [cells[-3] for cells in table[1:]] == ["dram", "dram", "ssd"]
    assert f"Turn 4 was served by a new process, which found {resume['history_tokens']} tokens and 6 messages" in output
    assert f"ends at {report['conversation_tokens']} tokens" in output
    assert "Model load" in output
    assert all(f"{step} " in output for step in ("reading ShareGPT", "reading weights", "compile", "touching memory"))


def test_json_and_figure_are_written(ran, results_dir):
    report = ran[0]
    assert report["command"].startswith("python -m ca_jax.launch.demo --model=")
    assert report["engine_config"]["dtype"] == "float32"
    assert report["config"]["max_tokens"] == MAX_TOKENS
    assert {"machine", "versions", "startup"} <= set(report)
    assert (results_dir / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert {path.name for path in results_dir.iterdir()} == {"demo.json", "demo.png"}, "its store is gone"


def served(answer_ids, ttft_s, cached, compiles=0, tier="dram"):
    usage = Usage(
        prompt_tokens=100,
        cached_tokens={"ssd": 0, tier: cached},
        completion_tokens=len(answer_ids),
        ttft_s=ttft_s,
        queued_s=0.0,
        load_s=0.0,
        load_stall_s=0.0,
        decode_s=0.5,
    )
    return demo_acts.ServedTurn(history_tokens=80, answer_ids=answer_ids, usage=usage, compiles=compiles)


def resumed(answer_ids=(1, 2), cached=79, tier="ssd"):
    return demo_acts.compared(3, served([1, 2], 2.0, 0, compiles=1), served(list(answer_ids), 0.5, cached, tier=tier))


def test_an_answer_that_differs_is_told_and_ends_the_demo():
    good = demo_acts.compared(1, served([1, 2, 3], 2.0, 0), served([1, 2, 3], 0.25, 79))
    bad = demo_acts.compared(2, served([4, 5], 2.0, 0, compiles=2), served([4, 6], 0.5, 79, compiles=1))
    told = [(row["same_tokens"], row["ratio"], row["compiles"]) for row in (good, bad)]
    assert told == [(True, 8.0, 0), (False, 4.0, 3)]
    assert (good["new_tokens"], good["answer_tokens"], good["cached_tokens"]) == (20, 3, {"dram": 79})
    demo.check({"rows": [good], "resume": resumed()})
    with pytest.raises(demo_acts.DemoError, match=r"got others in turns \[2, 3\]"):
        demo.check({"rows": [good, bad], "resume": resumed(answer_ids=(1, 3))})


@pytest.mark.parametrize(
    ("found", "message"),
    [({"cached": 0}, "got none"), ({"cached": 64}, "got ssd 64"), ({"tier": "dram"}, "got dram 79")],
)
def test_a_restart_that_found_less_than_all_on_ssd_ends_the_demo(found, message):
    with pytest.raises(demo_acts.DemoError, match=f"must be of ssd 79 tokens, {message}"):
        demo.check({"rows": [], "resume": resumed(**found)})


@pytest.mark.parametrize(
    ("name", "message"),
    [("nonesuch", "no conversation 'nonesuch'"), ("silent", "must have at least 2 user turns")],
)
def test_the_program_says_what_it_lacks(command, recording, name, message):
    done = command(f"--sharegpt_file={recording}", f"--conversation_id={name}", module="demo")
    assert done.code == 1
    assert message in done.err
    assert "Traceback" not in done.err
