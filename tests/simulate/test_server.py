"""The simulated server, held against what follows from its workload alone; policies beside each other; fitted costs."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from ca_jax.overflow.config import OverflowConfig
from ca_jax.simulate.clock import Clock, Link
from ca_jax.simulate.config import (
    DEVICES,
    MODELS,
    FittedCost,
    RooflineCost,
    ServerConfig,
    SimModel,
    StoreSizes,
)
from ca_jax.simulate.server import RECOMPUTE, Server, check_capacity, compare_policies, working_set_bytes
from ca_jax.simulate.traces.requests import Request
from ca_jax.simulate.workload import (
    SimSession,
    SimTurn,
    num_turns,
    poisson_sessions,
    recorded_sessions,
    stored_tokens,
    trace_sessions,
)
from ca_jax.storage.placement.policy import EVICTION_POLICIES

MODEL = SimModel(name="small", num_params=1e9, num_layers=8, num_heads=8, num_kv_heads=8, head_dim=64, window=1 << 20)
BLOCK_BYTES = MODEL.token_bytes * 128
COST = RooflineCost(model=MODEL, device=DEVICES["a100-40"], num_devices=1, flops_share=0.01)
CONFIG = ServerConfig(model=MODEL, cost=COST, link_bytes_per_s=26e9, max_batch_size=4)


def server(store=None, model=MODEL, **changes):
    return Server(dataclasses.replace(CONFIG, store=store, model=model, **changes))


def store(num_blocks, **changes):
    return StoreSizes(dram_bytes=num_blocks * BLOCK_BYTES, **changes)


def session(*turns, session_id="a"):
    return SimSession(session_id=session_id, arrival_s=0.0, turns=turns)


def turn(user_tokens=100, answer_tokens=10, **changes):
    return SimTurn(user_tokens=user_tokens, answer_tokens=answer_tokens, **changes)


@pytest.fixture(scope="module")
def sessions():
    rng = np.random.default_rng(5)
    lengths = [
        [(int(rng.integers(1, 300)), int(rng.integers(1, 200))) for _ in range(rng.integers(1, 8))] for _ in range(40)
    ]
    return list(poisson_sessions(lengths, num_sessions=30, arrival_rate=5.0, think_s=2.0, seed=1))


def histories_and_prompts(sessions):
    """Of each turn of sessions that never overflow."""
    found = []
    for each in sessions:
        num_tokens = 0
        for asked in each.turns:
            found.append((num_tokens, num_tokens + asked.user_tokens))
            num_tokens += asked.user_tokens + asked.answer_tokens
    return found


def findable(sessions):
    """Tokens of all histories but for the last of each, which has no KV."""
    return sum(history - 1 for history, _ in histories_and_prompts(sessions) if history)


def test_actions_run_in_order_of_their_time_and_a_link_moves_one_transfer_after_the_other():
    clock, seen = Clock(), []
    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (5.0, "late")):
        clock.at(time_s, lambda name=name: seen.append((name, clock.now_s)))
    clock.at(1.5, lambda: clock.at(1.75, lambda: seen.append(("made on the way", clock.now_s))))
    clock.run_until(3.0)
    assert seen == [("a", 1.0), ("b", 1.0), ("made on the way", 1.75), ("c", 2.0)]
    assert (clock.now_s, clock.next_s) == (3.0, 5.0)
    with pytest.raises(ValueError, match=r"at least 3\.0 s, got 2\.0"):
        clock.at(2.0, lambda: None)
    link, moved = Link(clock, 10.0), []
    assert [link.move(num_bytes, lambda: moved.append(clock.now_s)) for num_bytes in (20, 5)] == [5.0, 5.5]
    clock.run_until(7.0)
    assert link.move(10, lambda: moved.append(clock.now_s)) == 8.0
    clock.run_until(9.0)
    assert moved == [5.0, 5.5, 8.0]


def test_recomputing_prefills_every_prompt_whole(sessions):
    counts = server().serve(sessions)
    prompts = [prompt for _, prompt in histories_and_prompts(sessions)]
    assert counts.num_turns == num_turns(sessions)
    assert counts.prompt_tokens == sum(prompts)
    assert counts.prefill_s == pytest.approx(sum(COST.prefill_s(0, prompt) for prompt in prompts))
    assert (counts.hit_rate, counts.cached_tokens, counts.stall_s) == (0.0, 0, 0.0)
    answers = [asked.answer_tokens for each in sessions for asked in each.turns]
    assert counts.output_tokens == sum(answers) - len(answers)  # Prefill gives the first token.


def test_with_room_for_all_every_history_is_loaded(sessions):
    counts = server(store(5000)).serve(sessions)
    histories = [history for history, _ in histories_and_prompts(sessions)]
    assert counts.num_returning == sum(history > 0 for history in histories)
    assert (counts.hit_rate, counts.ssd_hits) == (1.0, 0)
    assert counts.cached_tokens == findable(sessions)
    assert counts.cached_share == findable(sessions) / sum(histories)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_what_dram_has_no_room_for_comes_from_ssd_or_is_recomputed(sessions, policy):
    sizes = store(200, ssd_bytes=5000 * BLOCK_BYTES, eviction_policy=policy)
    counts = server(sizes).serve(sessions)
    assert (counts.hit_rate, counts.cached_tokens) == (1.0, findable(sessions))
    blind = server(dataclasses.replace(sizes, looks_ahead=False)).serve(sessions)
    assert blind.hit_rate == 1.0
    assert blind.ssd_hits > counts.ssd_hits
    small = server(store(60, eviction_policy=policy)).serve(sessions)
    assert 0 < small.cached_share < small.hit_rate < 1, "tokens are found less often than anything of a history is"
    assert small.prompt_tokens == counts.prompt_tokens


def test_where_prefills_do_not_block_answers_go_on_between_them():
    sessions = [session(turn(1000, 6), session_id=name) for name in "abcd"]
    blocked, mixed = (server(prefills_block=block).serve(sessions) for block in (True, False))
    assert (blocked.prefill_s, blocked.output_tokens) == (mixed.prefill_s, mixed.output_tokens)
    for step, (early, late) in enumerate(zip(blocked.prefills, mixed.prefills, strict=True)):
        # Before each prefill those that were prefilled got a token.
        wanted = sum(COST.decode_s(n, 1002 * n) for n in range(1, step + 1))
        assert late.ttft_s - early.ttft_s == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(("ttl_s", "hits"), [(200.0, 1), (50.0, 0)])
def test_a_session_that_outlived_its_time_to_live_is_forgotten(ttl_s, hits):
    assert server(store(60, ttl_s=ttl_s)).serve([session(turn(), turn(think_s=100.0))]).dram_hits == hits


def test_what_a_message_pushes_out_of_a_full_context_is_not_kept_while_its_turn_waits():
    """There is room for what stays of all sessions behind their next message, not for what they held before it."""
    model = dataclasses.replace(MODEL, window=256)
    sessions = [session(turn(200, 40), turn(60, 40), session_id=str(i)) for i in range(12)]
    assert 36 * 64 < 12 * 240
    sizes = store(18, eviction_policy="fifo", block_tokens=64)
    assert server(sizes, model).serve(sessions).hit_rate == 1.0


@pytest.mark.parametrize("ssd_blocks", [0, 5000])
def test_cut_kv_is_hit_and_kv_with_positions_is_lost(sessions, ssd_blocks):
    model = dataclasses.replace(MODEL, window=600)
    sizes = store(5000, ssd_bytes=ssd_blocks * BLOCK_BYTES)

    def serve(method, store=sizes):
        return server(store, model, overflow=OverflowConfig(method=method, keep_first_tokens=4)).serve(sessions)

    cut, lost, recomputed = serve("ca"), serve("of"), serve("tt", None)
    assert cut.hit_rate == 1.0
    assert cut.prompt_tokens == lost.prompt_tokens == recomputed.prompt_tokens
    assert cut.overflow_s == 0 < lost.overflow_s
    assert 0.2 < lost.hit_rate < 0.9
    assert cut.prefill_s < lost.prefill_s < recomputed.prefill_s


def test_the_warm_up_is_served_and_not_counted_and_the_same_seed_is_the_same_simulation(sessions):
    whole, rest, again = (server(store(5000), warmup_turns=count).serve(iter(sessions)) for count in (0, 25, 0))
    assert again == whole
    assert rest.num_turns == whole.num_turns - 25
    assert rest.prefills == whole.prefills[25:]
    assert rest.begin_s > whole.begin_s


def test_a_llama_s_kv_is_as_large_as_the_paper_says():
    """Section 2.3: 2,048 tokens of LLaMA-65B are 5 GB; section 4.1: megabytes of a token."""
    assert 2048 * MODELS["llama-65b"].token_bytes / 1e9 == pytest.approx(5.0, rel=0.1)
    megabytes = {"llama-13b": 0.78, "llama-65b": 2.5, "llama-70b": 0.31, "falcon-40b": 0.12}
    for name, wanted in megabytes.items():
        assert MODELS[name].token_bytes / 2**20 == pytest.approx(wanted, rel=0.03), name
    cost = RooflineCost(model=MODELS["llama-65b"], device=DEVICES["a100-80"], num_devices=4)
    assert cost.prefill_s(0, 2048) == pytest.approx(0.36, rel=0.05)


# Traces and policies.


def request(session_id, arrival_s, input_tokens, shared_tokens=0):
    return Request(
        session_id=session_id,
        arrival_s=arrival_s,
        input_tokens=input_tokens,
        output_tokens=10,
        shared_tokens=shared_tokens,
    )


def test_requests_of_a_trace_are_turns_of_sessions():
    requests = [request("a", 0.0, 100), request("b", 1.0, 50), request("a", 2.0, 180, 100), request("a", 3.0, 60, 60)]
    first, second = trace_sessions(requests)
    assert [(each.user_tokens, each.kept_tokens, each.arrival_s) for each in first.turns] == [
        (100, 0, 0.0),
        (80, 100, 2.0),
        (1, 59, 3.0),  # All of it is known, and its last token still has to be computed.
    ]
    assert (second.session_id, second.arrival_s, len(second.turns)) == ("b", 1.0, 1)
    assert stored_tokens(first) == 190
    with pytest.raises(ValueError, match=r"in order of arrival, got one of 1\.0 after 2\.0 s"):
        trace_sessions([request("a", 2.0, 9), request("a", 1.0, 9)])


def test_recorded_sessions_come_at_random_and_think_as_recorded():
    """Each once and then again, whole; in simulated time a turn comes its pause after the answer before it."""
    asked = [("a", 5.0, 100, 0, 0.0), ("b", 0.0, 50, 0, 0.0), ("a", 9.0, 180, 110, 3.0), ("a", 99.0, 300, 190, 80.0)]
    requests = [
        dataclasses.replace(request(name, arrival_s, size, shared), think_s=think_s)
        for name, arrival_s, size, shared, think_s in asked
    ]
    drawn = list(recorded_sessions(requests, num_sessions=4, arrival_rate=0.01, seed=3))
    assert sorted(len(each.turns) for each in drawn[:2]) == sorted(len(each.turns) for each in drawn[2:]) == [1, 3]
    long = next(each for each in drawn if len(each.turns) == 3)
    assert [(each.user_tokens, each.kept_tokens, each.think_s) for each in long.turns] == [
        (100, 0, 0.0),
        (70, 110, 3.0),
        (110, 190, 80.0),
    ]
    assert all(before.arrival_s < after.arrival_s for before, after in itertools.pairwise(drawn))
    assert list(recorded_sessions(requests, num_sessions=4, arrival_rate=0.01, seed=4)) != drawn
    served = server()
    served.serve([dataclasses.replace(long, arrival_s=0.0)])
    assert served.counts.elapsed_s == pytest.approx(83.0, abs=1.0)  # Its pauses; computing takes the rest.

    by_time = recorded_sessions(requests, arrival_rate=0.01, waits_for_answers=False)
    long = next(each for each in by_time if len(each.turns) == 3)
    assert [each.arrival_s - long.arrival_s for each in long.turns] == pytest.approx([0.0, 4.0, 94.0])
    with pytest.raises(ValueError, match="requests must be at least one, got 0"):
        list(recorded_sessions([], arrival_rate=1.0))


def test_what_a_prompt_shares_with_the_one_before_is_loaded_and_the_rest_is_not():
    requests = [request("a", 0.0, 100), request("a", 50.0, 180, 100), request("a", 100.0, 200, 40)]
    config = dataclasses.replace(CONFIG, link_bytes_per_s=1e15)
    _, result = compare_policies(config, store(100), ["lru"], trace_sessions(requests))
    row = result.row()
    assert (row["hit_rate"], row["hit_rate_of_all"], row["cached_share"]) == (1.0, pytest.approx(2 / 3), 1.0)
    prefills_s = [COST.prefill_s(shared, new) for shared, new in ((0, 100), (100, 80), (40, 160))]
    assert row["prefill_s"] == pytest.approx(sum(prefills_s), rel=1e-3)


def test_turns_with_times_of_their_own_are_served_in_order_though_they_come_early():
    early = session(*(turn(200, 50, arrival_s=0.001 * index) for index in range(4)))
    waiting = session(*(turn(200, 50) for _ in range(4)))
    found, other = (compare_policies(CONFIG, store(100), ["lru"], [each])[1].counts for each in (early, waiting))
    assert found.hit_rate == 1.0
    assert other.prefill_s == pytest.approx(found.prefill_s, rel=1e-3)
    assert other.ttft_mean_s < found.ttft_mean_s  # A turn that comes early waits.


def test_belady_finds_no_less_than_recency_and_order_of_arrival(sessions):
    names = ["belady", "scheduler_aware", "lru", "fifo"]
    recompute, belady, *others = compare_policies(CONFIG, store(60), names, sessions)
    assert [recompute.policy, belady.policy, *(each.policy for each in others)] == [RECOMPUTE, *names]
    assert (recompute.counts.hit_rate, recompute.prefill_saved) == (0.0, 0.0)
    for other in others:
        assert 0 < other.counts.hit_rate <= belady.counts.hit_rate
        assert other.policy == "scheduler_aware" or other.counts.hit_rate < belady.counts.hit_rate
        assert other.prefill_saved == 1 - other.counts.prefill_s / recompute.counts.prefill_s > 0


def test_a_comparison_that_cannot_be_is_refused(sessions):
    largest = max(map(stored_tokens, sessions))
    with pytest.raises(ValueError, match=rf"dram_bytes must be at least .* the {largest} tokens of session"):
        check_capacity(CONFIG, store((largest - 1) / 128), sessions)
    check_capacity(CONFIG, store(largest / 128), sessions)
    assert working_set_bytes(CONFIG, sessions) == sum(map(stored_tokens, sessions)) * MODEL.token_bytes
    with pytest.raises(ValueError, match="dram_bytes must be at least a block of"):
        server(store(0.5))
    for change in ({"dram_bytes": 0}, {"ssd_bytes": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} must be a number"):
            StoreSizes(**{"dram_bytes": 1e9, **change})
    with pytest.raises(ValueError, match=r"policy must be one of scheduler_aware, .*, belady; got 'best'"):
        compare_policies(CONFIG, store(60), ["lru", "best"], sessions)
    with pytest.raises(ValueError, match="at least one session"):
        compare_policies(CONFIG, store(60), ["lru"], [])


# Costs fitted to measurements.


def bench(tmp_path, suite, *rows, model="m"):
    path = tmp_path / f"{suite}_{model}.json"
    path.write_text(json.dumps({"suite": suite, "model": model, "dtype": "float32", "rows": rows}))
    return path


def test_costs_are_what_was_measured(tmp_path):
    def prefill_s(history, new):
        return 1e-3 * new + 1e-7 * new * (history + new / 2)

    reuse = {"history_tokens": 2000, "new_tokens": 100, "ttft_recompute_s": prefill_s(0, 2100), "load_stall_s": 0.5}
    decodes = [
        {"batch_size": n, "context_tokens": length, "tokens_per_s": n / (0.01 + 0.002 * n + 1e-6 * n * length)}
        for n, length in ((1, 1000), (8, 1000), (8, 4000), (2, 50))
    ]
    paths = [
        bench(tmp_path, "prefill", *({"tokens": n, "prefill_s": prefill_s(0, n)} for n in (100, 1000, 4000))),
        bench(tmp_path, "reuse", {**reuse, "ttft_reuse_s": prefill_s(2000, 100) + 0.5}),
        bench(tmp_path, "ttft", {"history_tokens": 900, "new_tokens": 50, "compute_s": prefill_s(900, 50)}),
        bench(tmp_path, "decode", *decodes),
    ]
    cost = FittedCost.from_bench(paths)
    assert cost.prefill_s(1500, 300) == pytest.approx(prefill_s(1500, 300))
    assert cost.decode_s(4, 8000) == pytest.approx(0.01 + 0.008 + 0.008)


def test_benches_that_do_not_tell_are_refused(tmp_path):
    prefill = bench(tmp_path, "prefill", {"tokens": 10, "prefill_s": 0.1})
    decode = bench(tmp_path, "decode", {"batch_size": 1, "context_tokens": 10, "tokens_per_s": 5.0})
    other = bench(tmp_path, "decode", model="other")
    (text := tmp_path / "text.json").write_text("no JSON")
    bad_row = bench(tmp_path, "ttft", {"history_tokens": 5})
    for paths, message in (
        ([prefill], r"a bench of decode steps \(suite decode\), got none"),
        ([decode], "a bench of prefills"),
        ([prefill, other], "of one model, got m float32, other float32"),
        ([bench(tmp_path, "save")], r"save_m\.json: the file .* of a bench of prefill, reuse, ttft, decode; got save"),
        ([bad_row], "rows must be as bench writes them, got KeyError"),
        ([text], r"text\.json: the file must be the JSON of a bench"),
    ):
        with pytest.raises(ValueError, match=message):
            FittedCost.from_bench(paths)
    with pytest.raises(FileNotFoundError):
        FittedCost.from_bench([tmp_path / "nothing.json"])
