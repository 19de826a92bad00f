"""The simulated server, held against what follows from its workload alone."""

import dataclasses

import numpy as np
import pytest

from ca_jax.overflow.config import OverflowConfig
from ca_jax.simulate.clock import Clock, Link
from ca_jax.simulate.config import ServerConfig, StoreSizes
from ca_jax.simulate.machine import DEVICES, MODELS, RooflineCost, SimModel
from ca_jax.simulate.simulator import Server
from ca_jax.simulate.workload import SimSession, SimTurn, num_turns, poisson_sessions
from ca_jax.storage.placement.policy import EVICTION_POLICIES

MODEL = SimModel(name="small", num_params=1e9, num_layers=8, num_heads=8, num_kv_heads=8, head_dim=64, window=1 << 20)
BLOCK_BYTES = MODEL.token_bytes * 128
COST = RooflineCost(model=MODEL, device=DEVICES["a100-40"], num_devices=1, flops_share=0.01)


def server(store=None, model=MODEL, **changes):
    config = ServerConfig(model=model, cost=COST, link_bytes_per_s=26e9, store=store, max_batch_size=4)
    return Server(dataclasses.replace(config, **changes))


@pytest.fixture(scope="module")
def sessions():
    rng = np.random.default_rng(5)
    lengths = [
        [(int(rng.integers(1, 300)), int(rng.integers(1, 200))) for _ in range(rng.integers(1, 8))] for _ in range(40)
    ]
    return list(poisson_sessions(lengths, num_sessions=60, arrival_rate=5.0, think_s=2.0, seed=1))


def prompts_of(session):
    """History and prompt of each turn of a session that never overflows."""
    num_tokens = 0
    for turn in session.turns:
        yield num_tokens, num_tokens + turn.user_tokens
        num_tokens += turn.user_tokens + turn.answer_tokens


def all_prompts(sessions):
    return [prompt for session in sessions for prompt in prompts_of(session)]


def test_what_is_due_happens_in_order():
    clock, seen = Clock(), []
    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (5.0, "late")):
        clock.at(time_s, lambda name=name: seen.append((name, clock.now_s)))
    clock.at(1.5, lambda: clock.at(1.75, lambda: seen.append(("made on the way", clock.now_s))))
    clock.run_until(3.0)
    assert seen == [("a", 1.0), ("b", 1.0), ("made on the way", 1.75), ("c", 2.0)]
    assert (clock.now_s, clock.next_s) == (3.0, 5.0)
    with pytest.raises(ValueError, match=r"at least 3\.0 s, got 2\.0"):
        clock.at(2.0, lambda: None)


def test_a_link_moves_one_thing_after_the_other():
    clock, seen = Clock(), []
    link = Link(clock, 10.0)
    assert link.move(20, lambda: seen.append(clock.now_s)) == 2.0
    assert link.move(5, lambda: seen.append(clock.now_s)) == 2.5
    clock.run_until(4.0)
    assert link.move(10, lambda: seen.append(clock.now_s)) == 5.0
    clock.run_until(9.0)
    assert seen == [2.0, 2.5, 5.0]


def test_recomputing_prefills_every_prompt_whole(sessions):
    counts = server().serve(sessions)
    prompts = all_prompts(sessions)
    assert counts.num_turns == num_turns(sessions)
    assert counts.prompt_tokens == sum(prompt for _, prompt in prompts)
    assert counts.prefill_s == pytest.approx(sum(COST.prefill_s(0, prompt) for _, prompt in prompts))
    assert (counts.hit_rate, counts.cached_tokens, counts.stall_s) == (0.0, 0, 0.0)
    answers = [turn.answer_tokens for session in sessions for turn in session.turns]
    assert counts.output_tokens == sum(answers) - len(answers)  # Prefill gives the first token.


def test_with_room_for_all_every_history_is_loaded(sessions):
    counts = server(StoreSizes(dram_bytes=5000 * BLOCK_BYTES)).serve(sessions)
    histories = [history for history, _ in all_prompts(sessions)]
    assert counts.num_returning == sum(history > 0 for history in histories)
    assert (counts.hit_rate, counts.ssd_hits) == (1.0, 0)
    assert counts.cached_tokens == sum(history - 1 for history in histories if history)  # The last has no KV.


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_what_dram_has_no_room_for_comes_from_ssd(sessions, policy):
    sizes = StoreSizes(dram_bytes=200 * BLOCK_BYTES, ssd_bytes=5000 * BLOCK_BYTES, eviction_policy=policy)
    counts = server(sizes).serve(sessions)
    histories = [history for history, _ in all_prompts(sessions)]
    assert counts.hit_rate == 1.0
    assert counts.cached_tokens == sum(history - 1 for history in histories if history)  # The last has no KV.
    blind = server(dataclasses.replace(sizes, looks_ahead=False)).serve(sessions)
    assert blind.hit_rate == 1.0
    assert blind.ssd_hits > counts.ssd_hits


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_store_that_is_too_small_hits_less(sessions, policy):
    counts = server(StoreSizes(dram_bytes=60 * BLOCK_BYTES, eviction_policy=policy)).serve(sessions)
    assert 0 < counts.hit_rate < 1
    assert counts.prompt_tokens == sum(prompt for _, prompt in all_prompts(sessions))


def test_where_prefills_do_not_block_answers_go_on_between_them():
    turns = (SimTurn(user_tokens=1000, answer_tokens=6),)
    sessions = [SimSession(session_id=name, arrival_s=0.0, turns=turns) for name in "abcd"]
    blocked, mixed = (server(prefills_block=block).serve(sessions) for block in (True, False))
    assert (blocked.prefill_s, blocked.output_tokens) == (mixed.prefill_s, mixed.output_tokens)
    assert blocked.ttft_s[0] == mixed.ttft_s[0]
    for step, (early, late) in enumerate(zip(blocked.ttft_s, mixed.ttft_s, strict=True)):
        # Before each prefill those that were prefilled got a token.
        assert late - early == pytest.approx(sum(COST.decode_s(n, 1002 * n) for n in range(1, step + 1)), rel=0.01)


def test_a_session_that_ended_its_time_to_live_is_forgotten():
    turns = (SimTurn(user_tokens=100, answer_tokens=10), SimTurn(user_tokens=100, answer_tokens=10, think_s=100.0))
    session = SimSession(session_id="a", arrival_s=0.0, turns=turns)
    for ttl_s, hits in ((200.0, 1), (50.0, 0)):
        sizes = StoreSizes(dram_bytes=60 * BLOCK_BYTES, ttl_s=ttl_s)
        assert server(sizes).serve([session]).dram_hits == hits


def test_what_a_message_pushes_out_of_a_full_context_is_not_kept_while_its_turn_waits():
    """There is room for what stays of all sessions behind their next message, not for what they held before it."""
    model = dataclasses.replace(MODEL, window=256)
    turns = (SimTurn(user_tokens=200, answer_tokens=40), SimTurn(user_tokens=60, answer_tokens=40))
    sessions = [SimSession(session_id=str(i), arrival_s=0.0, turns=turns) for i in range(12)]
    num_blocks, block_tokens = 36, 64
    assert num_blocks * block_tokens < 12 * 240
    sizes = StoreSizes(
        dram_bytes=num_blocks * block_tokens * MODEL.token_bytes, eviction_policy="fifo", block_tokens=block_tokens
    )
    assert server(sizes, model).serve(sessions).hit_rate == 1.0


@pytest.mark.parametrize("ssd_blocks", [0, 5000])
def test_cut_kv_is_hit_and_kv_with_positions_is_lost(sessions, ssd_blocks):
    model = dataclasses.replace(MODEL, window=600)
    sizes = StoreSizes(dram_bytes=5000 * BLOCK_BYTES, ssd_bytes=ssd_blocks * BLOCK_BYTES)

    def serve(method, store=sizes):
        return server(store, model, overflow=OverflowConfig(method=method, keep_first_tokens=4)).serve(sessions)

    cut, lost, recomputed = serve("ca"), serve("of"), serve("tt", None)
    assert cut.hit_rate == 1.0
    assert cut.prompt_tokens == lost.prompt_tokens == recomputed.prompt_tokens
    assert cut.overflow_s == 0 < lost.overflow_s
    assert 0.2 < lost.hit_rate < 0.9
    assert cut.prefill_s < lost.prefill_s < recomputed.prefill_s


def test_the_same_workload_gives_the_same_counts(sessions):
    sizes = StoreSizes(dram_bytes=60 * BLOCK_BYTES, ssd_bytes=200 * BLOCK_BYTES)
    assert server(sizes).serve(sessions) == server(sizes).serve(iter(sessions))


def test_the_paper_s_own_figures_follow_from_the_presets():
    """2,048 tokens on four A100 (section 2.3): 360 ms to prefill, 5 GB of KV, 192 ms over one link."""
    model = MODELS["llama-65b"]
    cost = RooflineCost(model=model, device=DEVICES["a100-80"], num_devices=4)
    assert cost.prefill_s(0, 2048) == pytest.approx(0.36, rel=0.05)
    assert 2048 * model.token_bytes / 1e9 == pytest.approx(5.0, rel=0.1)
    megabytes = {"llama-13b": 0.78, "llama-65b": 2.5, "llama-70b": 0.31, "falcon-40b": 0.12}
    for name, wanted in megabytes.items():
        assert MODELS[name].token_bytes / 2**20 == pytest.approx(wanted, rel=0.03), name


@pytest.mark.parametrize("change", [{"dram_bytes": 0}, {"ssd_bytes": -1}, {"ssd_read_bytes_per_s": 0}])
def test_sizes_that_cannot_be_are_refused(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be a number"):
        StoreSizes(**{"dram_bytes": 1e9, **change})


def test_a_store_under_one_block_is_refused():
    with pytest.raises(ValueError, match="dram_bytes must be at least a block of"):
        server(StoreSizes(dram_bytes=BLOCK_BYTES / 2))
