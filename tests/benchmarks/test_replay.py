"""Workloads through the real engine: the same answers however they are served, counts that add up, times that hold;
a replay beside its simulation; and its command: tables, JSON, figure, progress, and what is said of bad input."""

import dataclasses
import io
import json

import numpy as np
import pytest
import rich.console

from benchmarks.replay import main as script
from benchmarks.replay import serving
from benchmarks.replay.running import ReplayConfig, agreement, check_simulable, replay, simulate, taking
from benchmarks.replay.serving import Sample, compare, serve, summarize
from benchmarks.replay.workload import Exchange, ReplayedTrace, ReplayError, ReplaySession, Workload, WorkloadConfig
from ca_jax.config import EngineConfig
from ca_jax.kv.costs import PrefillSample
from ca_jax.overflow.config import OverflowConfig
from ca_jax.simulate.config import DecodeSample, FittedCost
from tests import engine_kit as kit
from tests.benchmarks.traces_kit import lines_file, sharegpt_file, talk, workload


def turn(num_tokens, answer_tokens, *, seed, not_before_s=0.0, think_s=0.0):
    message = tuple(kit.prompt(num_tokens, seed))
    return Exchange(message, answer_tokens, not_before_s, think_s)


def made(*sessions, window=kit.WINDOW):
    named = tuple(ReplaySession(session_id=f"s{i}", turns=tuple(turns)) for i, turns in enumerate(sessions))
    nothing_left_out = {"cut_turns": 0, "cut_tokens": 0, "left_out_turns": 0, "skipped_rows": 0, "first_skipped": None}
    return Workload(sessions=named, window=window, **nothing_left_out)


def crowd(num_sessions=20, num_turns=3):
    """Conversations of different lengths, all at once, none of which fills the window."""
    rng = np.random.default_rng(3)
    return made(
        *(
            [turn(int(rng.integers(20, 90)), int(rng.integers(2, 9)), seed=10 * i + j) for j in range(num_turns)]
            for i in range(num_sessions)
        )
    )


CROWD = crowd()
LITTLE_ROOM = dataclasses.replace(kit.store_of(100), dram_free_fraction=0.0)


@pytest.fixture(scope="module")
def recomputed():
    with kit.small_engine(store=kit.STORE_OFF) as engine:
        return serve(engine, CROWD)


@pytest.fixture(scope="module", params=["dram", "small dram", "ssd"])
def stored(request, tmp_path_factory):
    store = kit.SMALL.store if request.param == "dram" else LITTLE_ROOM
    if request.param == "ssd":
        directory = str(tmp_path_factory.mktemp("ssd"))
        store = dataclasses.replace(store, ssd_dir=directory, ssd_gib=0.1, ssd_free_floor_gib=0.0)
    # By arrival: else those go on that are in DRAM, before they leave it.
    sized = {"store": store, "queue_order": "arrival"}
    with kit.small_engine(**sized) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "SAMPLE_S", 0.0)  # SSD has what has ended before another step: so DRAM can let go of it.
        return request.param, serve(engine, CROWD, on_sample=lambda _: engine.wait_for_saves())


def history(session, index):
    return sum(each.num_tokens for each in CROWD.sessions[session].turns[:index])


def test_store_and_recompute_do_the_same_work_and_what_is_counted_adds_up(stored, recomputed):
    kind, served = stored
    assert served.answers == recomputed.answers
    for run in (served, recomputed):
        assert len(run.turns) == CROWD.num_turns
        for each in run.turns:
            exchange = CROWD.sessions[each.session].turns[each.turn]
            lengths = (history(each.session, each.turn), len(exchange.message), exchange.answer_tokens)
            assert (each.history_tokens, each.message_tokens, each.answer_tokens) == lengths
    found = compare(served, recomputed)
    assert (found["same_answers"], found["comparable_answers"]) == (CROWD.num_turns, CROWD.num_turns)
    summary, nothing, totals = summarize(served), summarize(recomputed), served.totals
    assert (summary.turns, summary.returning_turns) == (60, 40)
    assert summary.dram_hits + summary.ssd_hits + summary.misses == 40
    assert summary.loaded_tokens + summary.recomputed_tokens == summary.history_tokens
    assert summary.prefill_tokens == summary.prompt_tokens - summary.loaded_tokens
    assert summary.output_tokens == sum(each.answer_tokens for s in CROWD.sessions for each in s.turns)
    assert totals["failed_loads"] == totals["failed_saves"] == 0
    if kind == "small dram":
        assert 0 < summary.misses < 40
    elif kind == "dram":
        assert (summary.misses, summary.hit_rate) == (0, 1.0)
        assert summary.recomputed_tokens == 40  # The last token of every answer.
    assert (summary.ssd_hits > 0) == (totals["fetched_bytes"] > 0) == (kind == "ssd")
    assert totals["loaded_bytes"] == summary.loaded_tokens * kit.TOKEN_BYTES
    assert (nothing.hit_rate, nothing.loaded_tokens, nothing.misses) == (0.0, 0, 40)
    assert nothing.totals["saved_bytes"] == nothing.totals["loaded_bytes"] == 0
    for each in served.turns:
        assert each.due_s <= each.started_s
        assert 0 < each.prefill_s <= each.ttft_s <= each.latency_s == pytest.approx(each.ttft_s + each.decode_s)
    for name in ("prefill_s", "load_stall_s"):
        assert sum(getattr(each, name) for each in served.turns) == pytest.approx(totals[name])
    assert totals["prefill_s"] + totals["decode_s"] <= totals["elapsed_s"], "passes that decodes wait for count once"


def test_turns_come_when_they_are_due_and_not_before():
    asked = made(
        [turn(20, 3, seed=1, not_before_s=7.0), turn(20, 3, seed=2, not_before_s=7.0, think_s=30.0)],
        [turn(20, 3, seed=3, not_before_s=0.0), turn(20, 3, seed=4, not_before_s=50.0, think_s=10.0)],
        [turn(20, 3, seed=5, not_before_s=7.0)],
    )
    slept_s = []  # Time passes only while the loop sleeps.
    with kit.small_engine(store=kit.STORE_OFF) as engine:
        served = serve(engine, asked, clock=lambda: sum(slept_s), sleep=slept_s.append)
    wanted = [(1, 0, 0.0), (0, 0, 7.0), (2, 0, 7.0), (0, 1, 37.0), (1, 1, 50.0)]
    assert [(each.session, each.turn, each.due_s) for each in served.turns] == wanted
    assert slept_s == [7.0, 30.0, 13.0]
    assert served.totals["elapsed_s"] == 50.0
    with pytest.raises(ValueError, match="warmup_turns must be fewer than the 5 turns"):
        summarize(dataclasses.replace(served, turns=[dataclasses.replace(t, is_counted=False) for t in served.turns]))


def test_a_context_that_overflows_goes_on():
    with kit.small_engine() as engine:
        served = serve(engine, made([turn(180, 40, seed=each) for each in range(5)]))
        with pytest.raises(ValueError, match="window must be the workload's 256 tokens, got"):
            serve(engine, made([turn(9, 2, seed=0)], window=256))
    assert [each.answer_tokens for each in served.turns] == [40] * 5
    assert max(each.history_tokens + each.message_tokens for each in served.turns) < kit.WINDOW
    assert served.turns[-1].dropped_tokens > 0
    assert served.totals["truncations"] > 0
    assert summarize(served).hit_rate == 1.0


# Beside its simulation.


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "sharegpt.json"
    return ReplayedTrace(trace=str(sharegpt_file(path, *(talk(3, seed) for seed in range(20)))))


@pytest.fixture(scope="module")
def talks(trace):
    return workload(trace, num_sessions=20, max_answer_tokens=6)


@pytest.mark.parametrize(("policy", "num_blocks"), [("scheduler_aware", 100), ("lru", 100), ("scheduler_aware", 2000)])
def test_a_simulation_does_what_the_engine_does(talks, policy, num_blocks):
    store = dataclasses.replace(kit.store_of(num_blocks), eviction_policy=policy)
    with kit.small_engine(store=store, share_prefixes=False) as engine:
        served = serve(engine, talks)
        counts = simulate(engine, talks, served)
    summary = summarize(served)
    found = agreement(summary, counts)
    assert (counts.num_turns, counts.num_returning) == (summary.turns, summary.returning_turns)
    assert found["simulated_prompt_tokens"] == found["engine_prompt_tokens"]
    if num_blocks == 2000:
        assert found["engine_hit_rate"] == found["simulated_hit_rate"] == 1.0
        assert found["engine_prefill_tokens"] == found["simulated_prefill_tokens"]
    else:
        assert found["engine_hit_rate"] < 1.0 > found["simulated_hit_rate"]


def test_what_cannot_be_simulated_is_refused(tmp_path, talks):
    rows = [
        {"timestamp": time_ms, "input_length": size, "output_length": 4, "hash_ids": list(range(size // 512))}
        for time_ms, size in ((0, 512), (1000, 1024))
    ]
    path = str(lines_file(tmp_path / "mooncake.jsonl", *rows))
    timed = workload(ReplayedTrace(trace_format="mooncake", trace=path, length_scale=0.1), num_sessions=1)
    for asked, changes, message in (
        (timed, {}, "arrival_rate must be above 0 with simulate"),
        (talks, {"overflow": OverflowConfig(method="tt")}, "got tt that drops oldest"),
        (talks, {"overflow": OverflowConfig(whole_turns=True)}, "got ca that drops whole turns"),
        (talks, {"overflow": OverflowConfig(discarder="heavy_hitters")}, "got ca that drops heavy_hitters"),
        (talks, {"share_prefixes": True}, "share_prefixes must be off with simulate"),
    ):
        with pytest.raises(ReplayError, match=message):
            check_simulable(EngineConfig(**{"share_prefixes": False, **changes}), asked)
    check_simulable(EngineConfig(overflow=None, share_prefixes=False), talks)


def replay_config(trace, **changes):
    engine = dataclasses.replace(kit.SMALL, share_prefixes=False, **changes.pop("engine", {}))
    asked = WorkloadConfig(num_sessions=8, max_turns=2, max_answer_tokens=6, **changes.pop("workload", {}))
    return ReplayConfig(trace=trace, workload=asked, engine=engine, **changes)


def test_a_replay_is_served_recomputed_and_simulated_and_leaves_tables_json_and_a_figure(trace, tmp_path):
    config = replay_config(trace, workload={"warmup_turns": 3}, recompute=True, simulate=True)
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
    stored, recomputed = (run.summary for run in result.runs)
    assert [run.name for run in result.runs] == ["store", "recompute"]
    assert stored.prompt_tokens == recomputed.prompt_tokens == result.agreement["simulated_prompt_tokens"]
    assert (stored.hit_rate, recomputed.hit_rate) == (1.0, 0.0)
    assert [run.recompiles for run in result.runs] == [0, 0]
    report = json.loads(json_out.read_text())
    assert report["config"]["workload"] == dataclasses.asdict(config.workload)
    assert report["workload"]["turns"] == 16
    for run, found in zip(report["runs"], result.runs, strict=True):
        turns = [dict(zip(report["turn_columns"], row, strict=True)) for row in run["turns"]]
        assert [each["is_counted"] for each in turns] == [False] * 3 + [True] * 13
        counted, summary = turns[3:], run["summary"]
        assert (summary["turns"], sum(each["answer_tokens"] for each in counted)) == (13, summary["output_tokens"])
        assert sum(each["prefill_s"] for each in counted) == pytest.approx(summary["totals"]["prefill_s"], abs=2e-5)
        assert run["summary"]["hit_rate"] == found.summary.hit_rate
        assert len(run["samples"][0]) == len(report["sample_columns"])
    assert report["comparison"]["same_answers"] == report["comparison"]["comparable_answers"] == 16
    assert report["agreement"]["simulated_hit_rate"] == 1.0
    assert plot_out.read_bytes().startswith(b"\x89PNG")
    assert "the same answer in 16 of 16" in output.getvalue()


def test_a_replay_that_cannot_be_is_refused_before_it_begins(trace, tmp_path):
    ssd = dataclasses.replace(kit.SMALL.store, ssd_dir=str(tmp_path), ssd_gib=1e-6)
    for changes, message in (
        ({"engine": {"store": kit.store_of(1)}}, r"dram_gib must be at least 0\.\d+ GiB, the KV of a conversation of"),
        ({"engine": {"store": kit.STORE_OFF}}, "dram_gib must be at least .*; got 0"),
        ({"engine": {"store": ssd}}, "ssd_gib must be at least"),
        ({"workload": {"warmup_turns": 16}}, "warmup_turns must be fewer than the 16 turns, got 16"),
    ):
        with pytest.raises(ReplayError, match=message):
            replay(kit.tiny_model(), replay_config(trace, **changes), lambda *what: None)


def test_progress_says_what_goes_on(talks):
    counts = {"ended": 5, "running": 2, "waiting": 3, "returning": 4, "hits": 3, "dram_share": 0.5, "ssd_share": 0.25}
    output = io.StringIO()
    with script.replay_progress(rich.console.Console(file=output, width=160)) as (_, on_sample):
        on_sample("store", talks, Sample(time_s=10.0, output_tokens=0, prompt_tokens=0, **counts))
        on_sample("store", talks, Sample(time_s=20.0, output_tokens=40, prompt_tokens=160, **counts))
    assert "running 2 waiting 3 · hits 75% · DRAM 50% SSD 25% · 20 tokens/s" in output.getvalue()


def test_costs_come_to_what_all_took_though_some_took_far_longer_than_others_like_them():
    prefills = [
        PrefillSample(history_tokens=0, new_tokens=100 + i, seconds=5.0 if i % 9 == 0 else 0.3) for i in range(60)
    ]
    decodes = [DecodeSample(num_jobs=1, context_tokens=100, seconds=4.0 if i == 7 else 0.02) for i in range(50)]
    found = taking(FittedCost.fit(prefills, decodes), prefills, decodes)
    assert sum(found.prefill_s(0, each.new_tokens) for each in prefills) == pytest.approx(
        sum(each.seconds for each in prefills)
    )
    assert 50 * found.decode_s(1, 100) == pytest.approx(sum(each.seconds for each in decodes))
