"""A replay beside its simulation, on the tiny model."""

import dataclasses

import pytest

from ca_jax.config import EngineConfig
from ca_jax.kv.rates import PrefillRate
from ca_jax.overflow.config import OverflowConfig
from ca_jax.replay.running import ReplayConfig, replay
from ca_jax.replay.serving import serve
from ca_jax.replay.simulated import agreement, check_simulable, measured_cost, sim_sessions, simulate
from ca_jax.replay.summary import summarize
from ca_jax.replay.trace_scripts import ReplayError, TraceConfig
from ca_jax.replay.workload import WorkloadConfig
from ca_jax.simulate.fitted import DecodeSample
from tests import engine_kit as kit
from tests.replay.traces_kit import lines_file, sharegpt_file, talk, workload


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "sharegpt.json"
    return TraceConfig(trace=str(sharegpt_file(path, *(talk(3, seed) for seed in range(20)))))


@pytest.fixture(scope="module")
def made(trace):
    return workload(trace, num_sessions=20, max_answer_tokens=6)


@pytest.mark.parametrize("policy", ["scheduler_aware", "lru", "fifo"])
@pytest.mark.parametrize("num_blocks", [100, 2000])
def test_a_simulation_does_what_the_engine_does(made, policy, num_blocks):
    store = dataclasses.replace(kit.store_of(num_blocks), eviction_policy=policy)
    with kit.small_engine(store=store, share_prefixes=False) as engine:
        served = serve(engine, made)
        counts = simulate(engine, made, served)
    summary = summarize(served)
    found = agreement(summary, counts)
    assert (counts.num_turns, counts.num_returning) == (summary.turns, summary.returning_turns)
    assert found.simulated_prompt_tokens == found.engine_prompt_tokens
    if num_blocks == 2000:
        assert found.engine_hit_rate == found.simulated_hit_rate == 1.0
        assert found.engine_prefill_tokens == found.simulated_prefill_tokens
    else:
        assert found.engine_hit_rate < 1.0 > found.simulated_hit_rate


def test_costs_are_fitted_to_what_was_measured(made):
    with kit.small_engine(share_prefixes=False) as engine:
        served = serve(engine, made)
    rate = PrefillRate(token_s=0.002, fixed_s=0.1)
    turns = tuple(
        dataclasses.replace(
            each, prefill_s=rate.seconds(each.cached_tokens, each.prefill_tokens) + 0.5, load_stall_s=0.5
        )
        for each in served.turns
    )
    decodes = tuple(
        DecodeSample(num_jobs=jobs, context_tokens=tokens, seconds=0.01 + 0.002 * jobs + 1e-5 * tokens)
        for jobs in (1, 2, 5)
        for tokens in (100, 700)
    )
    found = measured_cost(dataclasses.replace(served, turns=turns, decode_samples=decodes))
    assert found.prefill_s(0, 100) == pytest.approx(0.3, rel=1e-3)
    assert found.decode_s(3, 400) == pytest.approx(0.02, rel=1e-3)


def test_costs_come_to_what_all_took_though_some_took_far_longer_than_others_like_them(made):
    with kit.small_engine(share_prefixes=False) as engine:
        served = serve(engine, made)
    slow = [
        dataclasses.replace(each, load_stall_s=0.0, prefill_s=5.0 if i % 9 == 0 else 0.3)
        for i, each in enumerate(served.turns)
    ]
    decodes = tuple(DecodeSample(num_jobs=1, context_tokens=100, seconds=4.0 if i == 7 else 0.02) for i in range(50))
    found = measured_cost(dataclasses.replace(served, turns=tuple(slow), decode_samples=decodes))
    assert sum(found.prefill_s(each.cached_tokens, each.prefill_tokens) for each in slow) == pytest.approx(
        sum(each.prefill_s for each in slow)
    )
    assert 50 * found.decode_s(1, 100) == pytest.approx(sum(each.seconds for each in decodes))


def test_sessions_are_simulated_with_their_lengths_and_times(trace):
    made = workload(trace, num_sessions=5, arrival_rate=2.0, think_time_s=4.0)
    for ours, simulated in zip(made.sessions, sim_sessions(made), strict=True):
        assert simulated.arrival_s == ours.turns[0].not_before_s
        assert [(turn.user_tokens, turn.answer_tokens, turn.think_s) for turn in simulated.turns] == [
            (len(turn.exchange.message), turn.exchange.answer_tokens, turn.think_s) for turn in ours.turns
        ]


def test_what_cannot_be_simulated_is_refused(tmp_path, made):
    rows = [
        {"timestamp": time_ms, "input_length": size, "output_length": 4, "hash_ids": list(range(size // 512))}
        for time_ms, size in ((0, 512), (1000, 1024))
    ]
    path = str(lines_file(tmp_path / "mooncake.jsonl", *rows))
    timed = workload(TraceConfig(trace_format="mooncake", trace=path, length_scale=0.1), num_sessions=1)
    with pytest.raises(ReplayError, match="got times of the trace's own; give an arrival_rate"):
        check_simulable(EngineConfig(share_prefixes=False), timed)
    for overflow, found in (
        (OverflowConfig(method="tt"), "tt that drops oldest"),
        (OverflowConfig(whole_turns=True), "ca that drops whole turns"),
        (OverflowConfig(discarder="heavy_hitters"), "ca that drops heavy_hitters"),
    ):
        with pytest.raises(ReplayError, match=found):
            check_simulable(EngineConfig(overflow=overflow, share_prefixes=False), made)
    check_simulable(EngineConfig(overflow=None, share_prefixes=False), made)
    with pytest.raises(ReplayError, match="share_prefixes off"):
        check_simulable(EngineConfig(), made)


def test_a_replay_is_served_recomputed_and_simulated(trace):
    config = ReplayConfig(
        trace=trace,
        workload=WorkloadConfig(num_sessions=20, max_turns=2, max_answer_tokens=6, warmup_turns=3),
        engine=dataclasses.replace(kit.SMALL, share_prefixes=False),
        recompute=True,
        simulate=True,
    )
    seen: list[str] = []
    result = replay(kit.tiny_model(), config, lambda *what: None, lambda name, *what: seen.append(name))
    assert [run.name for run in result.runs] == ["store", "recompute"] == sorted(set(seen), reverse=True)
    stored, recomputed = (run.summary for run in result.runs)
    assert stored.prompt_tokens == recomputed.prompt_tokens
    assert (stored.hit_rate, recomputed.hit_rate) == (1.0, 0.0)
    assert [run.recompiles for run in result.runs] == [0, 0]
    assert result.comparison.same_answers == result.comparison.comparable_answers == 40
    assert result.agreement.simulated_prompt_tokens == stored.prompt_tokens


@pytest.mark.parametrize(
    ("changes", "workload_changes", "wanted"),
    [
        (
            {"store": kit.store_of(2)},
            {},
            r"dram_gib must be at least 0\.\d+ GiB, the KV of a conversation of \d+ tokens",
        ),
        ({"store": kit.STORE_OFF}, {}, "dram_gib must be at least .*; got 0"),
        ({}, {"warmup_turns": 60}, "warmup_turns must be fewer than the 60 turns, got 60"),
    ],
)
def test_a_replay_that_cannot_be_is_refused_before_it_begins(trace, changes, workload_changes, wanted):
    config = ReplayConfig(
        trace=trace,
        workload=WorkloadConfig(num_sessions=20, **workload_changes),
        engine=dataclasses.replace(kit.SMALL, share_prefixes=False, **changes),
    )
    with pytest.raises(ReplayError, match=wanted):
        replay(kit.tiny_model(), config, lambda *what: None)


def test_a_small_ssd_is_refused_too(trace, tmp_path):
    store = dataclasses.replace(kit.SMALL.store, ssd_dir=str(tmp_path), ssd_gib=1e-6)
    config = ReplayConfig(
        trace=trace,
        workload=WorkloadConfig(num_sessions=20),
        engine=dataclasses.replace(kit.SMALL, store=store, share_prefixes=False),
    )
    with pytest.raises(ReplayError, match="ssd_gib must be at least"):
        replay(kit.tiny_model(), config, lambda *what: None)
