"""Traces through the simulator: sessions of requests, policies beside each other, costs fitted to measurements."""

import dataclasses
import json

import pytest

from ca_jax.kv.rates import PrefillSample
from ca_jax.simulate.comparison import RECOMPUTE, check_capacity, compare_policies, working_set_bytes
from ca_jax.simulate.config import ServerConfig, StoreSizes
from ca_jax.simulate.fitted import DecodeSample, FittedCost
from ca_jax.simulate.machine import SimModel
from ca_jax.simulate.workload import SimSession, SimTurn, poisson_sessions, stored_tokens, trace_sessions
from ca_jax.traces.requests import Request

MODEL = SimModel(name="small", num_params=1e6, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, window=1 << 20)
COST = FittedCost.fit(
    [PrefillSample(history_tokens=0, new_tokens=100, seconds=0.1)],
    [DecodeSample(num_jobs=1, context_tokens=100, seconds=0.01)],
)
CONFIG = ServerConfig(model=MODEL, cost=COST, link_bytes_per_s=1e12, max_batch_size=2)
BLOCK_TOKENS = 16


def store(num_blocks, **changes):
    return StoreSizes(dram_bytes=num_blocks * BLOCK_TOKENS * MODEL.token_bytes, block_tokens=BLOCK_TOKENS, **changes)


def request(session, arrival_s, input_tokens, shared_tokens=0, output_tokens=10):
    return Request(
        session_id=session,
        arrival_s=arrival_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        shared_tokens=shared_tokens,
    )


def test_requests_of_a_trace_are_turns_of_sessions():
    requests = [request("a", 0.0, 100), request("b", 1.0, 50), request("a", 2.0, 180, 100), request("a", 3.0, 60, 60)]
    first, second = trace_sessions(requests)
    assert [(turn.user_tokens, turn.kept_tokens, turn.arrival_s) for turn in first.turns] == [
        (100, 0, 0.0),
        (80, 100, 2.0),
        (1, 59, 3.0),  # All of it is known, and its last token still has to be computed.
    ]
    assert (second.session_id, second.arrival_s, len(second.turns)) == ("b", 1.0, 1)
    assert stored_tokens(first) == 190
    with pytest.raises(ValueError, match=r"in order of arrival, got one of 1\.0 after 2\.0 s"):
        trace_sessions([request("a", 2.0, 9), request("a", 1.0, 9)])


def test_what_a_prompt_shares_with_the_one_before_is_loaded_and_the_rest_is_not():
    requests = [request("a", 0.0, 100), request("a", 50.0, 180, 100), request("a", 100.0, 200, 40)]
    _, result = compare_policies(CONFIG, store(100), ["lru"], trace_sessions(requests))
    assert (result.hit_rate, result.hit_rate_of_all) == (1.0, pytest.approx(2 / 3))
    assert result.cached_share == 1.0
    assert result.prefill_s == pytest.approx(sum(COST.prefill_s(0, new) for new in (100, 80, 160)), rel=1e-6)


def test_turns_with_times_of_their_own_are_served_in_order_though_they_come_early():
    turns = tuple(SimTurn(user_tokens=200, answer_tokens=50, arrival_s=0.001 * index) for index in range(4))
    sessions = [SimSession(session_id="a", arrival_s=0.0, turns=turns)]
    _, result = compare_policies(CONFIG, store(100), ["scheduler_aware"], sessions)
    assert result.hit_rate == 1.0
    waiting = [SimTurn(user_tokens=200, answer_tokens=50) for _ in turns]
    _, other = compare_policies(CONFIG, store(100), ["lru"], [dataclasses.replace(sessions[0], turns=tuple(waiting))])
    assert other.prefill_s == pytest.approx(result.prefill_s)
    assert other.ttft_mean_s < result.ttft_mean_s  # Whoever comes early waits.


@pytest.fixture(scope="module")
def crowd():
    lengths = [[(20 + 7 * (i % 9), 10 + 3 * (i % 5))] * (1 + i % 6) for i in range(60)]
    return list(poisson_sessions(lengths, num_sessions=60, arrival_rate=20.0, think_s=3.0, seed=2))


def test_belady_finds_no_less_than_recency_and_order_of_arrival(crowd):
    found = compare_policies(CONFIG, store(60), ["belady", "scheduler_aware", "lru", "fifo"], crowd)
    assert [result.policy for result in found] == [RECOMPUTE, "belady", "scheduler_aware", "lru", "fifo"]
    recompute, belady, *others = found
    assert (recompute.hit_rate, recompute.prefill_saved) == (0.0, 0.0)
    for other in others:
        assert 0 < other.hit_rate <= belady.hit_rate
        assert other.policy == "scheduler_aware" or other.hit_rate < belady.hit_rate
        assert other.prefill_s < recompute.prefill_s
        assert other.prefill_saved == pytest.approx(1 - other.prefill_s / recompute.prefill_s)


def test_a_store_without_room_for_the_largest_session_is_refused(crowd):
    largest = max(map(stored_tokens, crowd))
    with pytest.raises(ValueError, match=rf"dram_bytes must be at least .* the {largest} tokens of session"):
        check_capacity(CONFIG, store((largest - 1) / BLOCK_TOKENS), crowd)
    check_capacity(CONFIG, store(largest / BLOCK_TOKENS), crowd)
    assert working_set_bytes(CONFIG, crowd) == sum(map(stored_tokens, crowd)) * MODEL.token_bytes


def test_unknown_policies_and_no_sessions_are_refused(crowd):
    with pytest.raises(ValueError, match=r"policy must be one of scheduler_aware, .*, belady; got best"):
        compare_policies(CONFIG, store(60), ["lru", "best"], crowd)
    with pytest.raises(ValueError, match="at least one session"):
        compare_policies(CONFIG, store(60), ["lru"], [])


def bench(tmp_path, suite, rows, model="m"):
    path = tmp_path / f"{suite}_{model}.json"
    path.write_text(json.dumps({"suite": suite, "model": model, "dtype": "float32", "rows": rows}))
    return path


def test_costs_are_what_was_measured(tmp_path):
    def prefill_s(history, new):
        return 1e-3 * new + 1e-7 * new * (history + new / 2)

    paths = [
        bench(tmp_path, "prefill", [{"tokens": n, "prefill_s": prefill_s(0, n)} for n in (100, 1000, 4000)]),
        bench(
            tmp_path,
            "reuse",
            [
                {
                    "history_tokens": 2000,
                    "new_tokens": 100,
                    "ttft_recompute_s": prefill_s(0, 2100),
                    "ttft_reuse_s": prefill_s(2000, 100) + 0.5,
                    "load_stall_s": 0.5,
                }
            ],
        ),
        bench(tmp_path, "ttft", [{"history_tokens": 900, "new_tokens": 50, "compute_s": prefill_s(900, 50)}]),
        bench(
            tmp_path,
            "decode",
            [
                {"batch_size": n, "context_tokens": length, "tokens_per_s": n / (0.01 + 0.002 * n + 1e-6 * n * length)}
                for n, length in ((1, 1000), (8, 1000), (8, 4000), (2, 50))
            ],
        ),
    ]
    cost = FittedCost.from_bench(paths)
    assert cost.prefill_s(1500, 300) == pytest.approx(prefill_s(1500, 300))
    assert cost.decode_s(4, 8000) == pytest.approx(0.01 + 0.008 + 0.008)


def test_benches_that_do_not_tell_are_refused(tmp_path):
    prefill = bench(tmp_path, "prefill", [{"tokens": 10, "prefill_s": 0.1}])
    decode = bench(tmp_path, "decode", [{"batch_size": 1, "context_tokens": 10, "tokens_per_s": 5.0}])
    with pytest.raises(ValueError, match=r"a bench of decode steps \(suite decode\), got none"):
        FittedCost.from_bench([prefill])
    with pytest.raises(ValueError, match="a bench of prefills"):
        FittedCost.from_bench([decode])
    with pytest.raises(ValueError, match="of one model, got m float32, other float32"):
        FittedCost.from_bench([prefill, bench(tmp_path, "decode", [], model="other")])
    with pytest.raises(
        ValueError,
        match=r"save_m\.json: the file must be the JSON of a bench of prefill, reuse, ttft, decode; got save",
    ):
        FittedCost.from_bench([bench(tmp_path, "save", [])])
    with pytest.raises(ValueError, match="there must be rows as bench writes them, got KeyError"):
        FittedCost.from_bench([bench(tmp_path, "ttft", [{"history_tokens": 5}])])
    (tmp_path / "text.json").write_text("no JSON")
    with pytest.raises(ValueError, match=r"text\.json: the file must be the JSON of a bench"):
        FittedCost.from_bench([tmp_path / "text.json"])
    with pytest.raises(FileNotFoundError):
        FittedCost.from_bench([tmp_path / "nothing.json"])
