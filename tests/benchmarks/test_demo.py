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
from tests import engine_kit as kit
from tests.benchmarks.traces_kit import sharegpt_file
from tests.launch.conftest import usage

MESSAGES = ("I plan a trip.", "To Rome, say. How?", "And [then]?", "Thanks! One more thing.")
MAX_TOKENS = 20


def test_the_program_reuses_goes_on_after_its_restart_and_leaves_a_report(tmp_path):
    kit.write_tiny_model(tmp_path / "tiny")  # Of a short window: little is compiled.
    recording = sharegpt_file(tmp_path / "sharegpt.json", [(said, "As you like.") for said in MESSAGES])
    flags = [f"--model={tmp_path / 'tiny'}", f"--sharegpt_file={recording}", "--conversation_id=c0"]
    flags += [f"--max_tokens={MAX_TOKENS}", f"--results_dir={tmp_path / 'results'}"]
    flags += ["--dram_gib=0.016", "--ssd_gib=0.016", "--ssd_free_floor_gib=0"]
    done = subprocess.run(
        [sys.executable, "-m", "ca_jax.launch.demo", *flags],
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONUTF8": "1", "COLUMNS": "100"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "results" / "demo.json").read_text())
    rows, resume, output = report["rows"], report["resume"], done.stdout
    assert report["startup"]["compiles"] > 0
    assert [(row["compiles"], row["same_tokens"], row["answer_tokens"]) for row in (*rows, resume)] == [
        (0, True, MAX_TOKENS)
    ] * 4
    assert "of no use" not in output
    assert [row["cached_tokens"] for row in rows] == [{}, *({"dram": row["history_tokens"] - 1} for row in rows[1:])]
    for before, after in itertools.pairwise([*rows, resume]):
        assert after["history_tokens"] == before["history_tokens"] + before["new_tokens"] + before["answer_tokens"]
    assert all(row["new_tokens"] > len(said) for row, said in zip(rows, MESSAGES, strict=False))  # a byte is a token
    assert (resume["turn"], resume["session_id"], resume["num_messages"]) == (4, "demo-c0", 6)
    assert resume["cached_tokens"] == {"ssd": resume["history_tokens"] - 1}
    assert resume["ratio"] == resume["ttft_recompute_s"] / resume["ttft_ssd_s"]
    assert report["conversation_tokens"] == resume["history_tokens"] + resume["new_tokens"] + MAX_TOKENS
    assert f"session demo-c0 goes on: {resume['history_tokens']} tokens, 6 messages" in output
    assert [output.count(f"{turn}. {said}\n") for turn, said in enumerate(MESSAGES, 1)] == [2, 2, 2, 1]
    table = [line.split() for line in output.splitlines() if line.strip().endswith("yes")]
    assert [(int(cells[0]), int(cells[1])) for cells in table] == [
        (row["turn"], row["history_tokens"]) for row in (*rows, resume)
    ]
    assert (report["engine_config"]["dtype"], report["config"]["max_tokens"]) == ("float32", MAX_TOKENS)
    assert (tmp_path / "results" / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"demo.json", "demo.png"}, "its store is gone"


def act(tiny_model, directory):
    store = StoreConfig(dram_gib=1 / 64, ssd_dir=str(directory), ssd_gib=1 / 64, ssd_free_floor_gib=0.0)
    config = EngineConfig(
        context_window=512, max_batch_size=1, recompute_if_faster=False, compile_cache_dir=None, store=store
    )
    return {"model": str(tiny_model), "engine_config": config, "session_id": "demo", "max_tokens": 4}


def test_only_the_reused_conversation_is_stored_and_a_second_demo_begins_anew(tiny_model, tmp_path):
    arguments = act(tiny_model, tmp_path)
    with pytest.raises(demo_acts.DemoError, match="must have the conversation of session 'demo'"):
        demo_acts.go_on(message="And now?", started_s=0.0, page_cache_dropped=False, **arguments)
    for _ in range(2):
        first = demo_acts.serve_with_and_without(messages=MESSAGES[:2], **arguments)
        assert [row.cached_tokens for row in first.rows] == [{}, {"dram": first.rows[1].history_tokens - 1}]
    with Engine.from_pretrained(arguments["model"], arguments["engine_config"], warm=False) as engine:
        stored = engine.stored.list()
        assert [(info.session_id, info.residency) for info in stored] == [("demo", Residency.SSD)]
        known = engine.session(session_id="demo").token_ids
    assert stored[0].ssd_tokens == len(known) - 1
    assert len(known) == first.rows[1].history_tokens + first.rows[1].new_tokens + 4


def served(answer_ids, ttft_s, cached, compiles=0, tier="dram"):
    tokens = {"prompt_tokens": 100, "cached_tokens": {"ssd": 0, tier: cached}, "completion_tokens": len(answer_ids)}
    took = usage(**tokens, ttft_s=ttft_s, decode_s=0.5)
    return demo_acts.ServedTurn(history_tokens=80, answer_ids=answer_ids, usage=took, compiles=compiles)


def resumed(answer_ids=(1, 2), cached=79, tier="ssd"):
    return demo_acts.compared(3, served([1, 2], 2.0, 0, compiles=1), served(list(answer_ids), 0.5, cached, tier=tier))


def test_an_answer_that_differs_or_a_restart_that_found_less_ends_the_demo():
    good = demo_acts.compared(1, served([1, 2, 3], 2.0, 0), served([1, 2, 3], 0.25, 79))
    bad = demo_acts.compared(2, served([4, 5], 2.0, 0, compiles=2), served([4, 6], 0.5, 79, compiles=1))
    told = [(row["same_tokens"], row["ratio"], row["compiles"]) for row in (good, bad)]
    assert told == [(True, 8.0, 0), (False, 4.0, 3)]
    assert (good["new_tokens"], good["answer_tokens"], good["cached_tokens"]) == (20, 3, {"dram": 79})
    demo.check({"rows": [good], "resume": resumed()})
    for rows, resume, message in (
        ([good, bad], resumed(answer_ids=(1, 3)), r"got others in turns \[2, 3\]"),
        ([], resumed(cached=0), "must be of ssd 79 tokens, got none"),
        ([], resumed(cached=64), "must be of ssd 79 tokens, got ssd 64"),
        ([], resumed(tier="dram"), "must be of ssd 79 tokens, got dram 79"),
    ):
        with pytest.raises(demo_acts.DemoError, match=message):
            demo.check({"rows": rows, "resume": resume})
