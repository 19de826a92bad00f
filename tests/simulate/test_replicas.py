"""Many replicas: cases worked out by hand, what must be conserved, and one replica against the simulation of a server.

A token is 1,000 bytes here, takes 1 ms to prefill, and a decode step 10 ms; DRAM is read at a million tokens a second.
"""

import dataclasses
import itertools

import pytest

from ca_jax.kv.costs import PrefillRate
from ca_jax.overflow.config import OverflowConfig
from ca_jax.simulate.config import DEVICES, MODELS, FittedCost, RooflineCost, ServerConfig, SimModel, StoreSizes
from ca_jax.simulate.fleet import MIB, OBJECTS_WRITES, TIERS, FleetConfig, ObjectsConfig, Restore, least_new_tokens
from ca_jax.simulate.replicas import ROUTINGS, Fleet, FleetView, HashRing
from ca_jax.simulate.server import Server
from ca_jax.simulate.traces.requests import Request
from ca_jax.simulate.workload import Coming, coming_sessions, plan_conversation, plan_requests, poisson_sessions

MODEL = SimModel(
    name="m", num_params=1.0, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=250, window=1000, dtype_bytes=2
)
COST = FittedCost(prefill=PrefillRate(token_s=1e-3), decode_step_s=1e-2, decode_job_s=0.0, decode_token_s=0.0)
STORE = StoreSizes(dram_bytes=1e6, ssd_bytes=1e9, ssd_read_bytes_per_s=1e6)
SERVER = ServerConfig(model=MODEL, cost=COST, link_bytes_per_s=1e9, store=STORE)
OVERFLOW = OverflowConfig(keep_first_tokens=0)
LENGTHS = [((30 + 40 * (i % 7), 60 + 90 * (i % 5)),) * (1 + i % 8) for i in range(12)]
PLANS = [plan_conversation(lengths, MODEL.window, OVERFLOW) for lengths in LENGTHS]


def fleet_config(**others):
    objects = ObjectsConfig(objects_latency_ms=10.0)
    values = {"num_replicas": 2, "duration_s": 20_000.0, "warmup_s": 0.0, "objects": objects, "network_gb_per_s": 1e-3}
    return FleetConfig(**{**values, **others})


def coming(name, arrival_s, *lengths, think_s=1.0):
    plan = plan_conversation(lengths, MODEL.window, OVERFLOW)
    return Coming(session_id=name, arrival_s=arrival_s, plan=plan, think_s=(think_s,) * len(lengths))


def names_of(replica, count):
    """Sessions that the ring of two replicas gives one of them."""
    ring = HashRing([0, 1])
    return list(itertools.islice((f"s{i}" for i in itertools.count() if ring.owner(f"s{i}") == replica), count))


def run(sessions, routing="hash", seed=0, server=SERVER, **others):
    fleet = Fleet(fleet_config(**others), server, routing, seed)
    counts = fleet.run(iter(sessions))
    return counts, fleet.row()


def test_three_sessions_at_two_replicas_take_what_is_worked_out_by_hand():
    (a, b), (c,) = names_of(0, 2), names_of(1, 1)
    sessions = [coming(a, 0.0, (100, 10), (50, 10)), coming(b, 0.05, (30, 1)), coming(c, 0.06, (200, 5))]
    counts, row = run(sessions)
    # Replica 0: a is prefilled from 0 to 0.1, b until 0.13, and then a decodes 9 steps until 0.22. The second
    # turn of a comes at 1.22; 110 tokens are loaded before its 50 new ones. Replica 1 has nothing but c.
    assert list(counts.ttft_s) == pytest.approx([0.1, 0.13 - 0.05, 0.2, 110e-6 + 0.05])
    assert dict(counts.turns_of) == {0: 3, 1: 1}
    assert counts.busy_s == pytest.approx({0: 0.22 + 110e-6 + 0.05 + 0.09, 1: 0.2 + 0.04})
    wanted = {"history": 110, "dram": 110, "ssd": 0, "objects": 0, "recomputed": 0, "new": 380, "answer": 26}
    assert row["tokens"] == wanted
    assert row["most_turns_over_mean"] == 3 / 2
    assert (row["num_gets"], row["num_puts"]) == (0, 8), "an object and a manifest for each turn"
    assert row["written_bytes"] == 1000 * (110 + 60 + 31 + 205)


def test_what_left_dram_is_read_from_ssd_and_what_is_elsewhere_from_objects():
    (a, b) = names_of(0, 2)
    sessions = [coming(a, 0.0, (400, 1), (50, 1), think_s=10.0), coming(b, 1.0, (700, 1))]
    counts, row = run(sessions)
    assert (row["tokens"]["ssd"], row["tokens"]["dram"]) == (401, 0), "both are more than DRAM holds"
    assert counts.ttft_s[-1] == pytest.approx(0.401 + 0.05), "its KV is in DRAM by then"
    small = dataclasses.replace(SERVER, store=dataclasses.replace(STORE, ssd_bytes=0.0))
    counts, row = run(sessions, server=small)
    assert row["tokens"]["objects"] == 401
    assert counts.ttft_s[-1] == pytest.approx(0.401 + 0.01 + 0.05), "behind a network of 1 MB/s and 10 ms"
    assert row["read_bytes"] == 401_000
    counts, row = run(sessions, server=small, objects_write="none")
    assert row["tokens"]["recomputed"] == 401
    assert counts.ttft_s[-1] == pytest.approx(0.451)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("write", OBJECTS_WRITES)
def test_every_token_of_a_history_is_of_one_tier_whatever_fails(routing, write):
    sessions = coming_sessions(PLANS, arrival_rate=0.5, think_s=30.0, seed=3)
    others = {"mtbf_hours": 0.2, "restart_s": 60.0, "scale": ("300:2", "600:-3"), "duration_s": 1000.0}
    counts, row = run(itertools.islice(sessions, 200), routing, num_replicas=3, objects_write=write, **others)
    tokens = row["tokens"]
    assert tokens["history"] == sum(tokens[tier] for tier in TIERS)
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert all(tokens[tier] >= 0 for tier in TIERS)
    assert row["num_failures"] > 3
    assert (tokens["objects"] > 0) == (write != "none")
    assert len(counts.ttft_s) >= row["num_turns"] > 400


@pytest.mark.parametrize("routing", ROUTINGS)
def test_histories_are_those_of_the_plans_and_nothing_is_recomputed_while_the_objects_tier_has_it(routing):
    sessions = list(itertools.islice(coming_sessions(PLANS, arrival_rate=0.5, think_s=30.0, seed=1), 48))
    _, row = run(sessions, routing, network_gb_per_s=1.0)
    turns = [turn for each in sessions for turn in each.plan.turns]
    assert row["num_turns"] == len(turns)
    assert row["tokens"]["history"] == sum(turn.history_tokens for turn in turns)
    assert row["tokens"]["new"] == sum(turn.new_tokens for turn in turns)
    assert row["tokens"]["answer"] == sum(turn.answer_tokens for turn in turns)
    assert row["tokens"]["recomputed"] == 0
    assert (row["tokens"]["objects"] > 0) == (row["sessions_moved"] > 0) == (routing == "random")


def test_a_session_stays_where_the_ring_has_it_and_an_added_replica_takes_its_share_of_the_keys_alone():
    keys = [f"session {i}" for i in range(20_000)]
    before, after = HashRing(range(50)), HashRing(range(51))
    moved = [key for key in keys if before.owner(key) != after.owner(key)]
    assert {after.owner(key) for key in moved} == {50}
    assert len(moved) / len(keys) == pytest.approx(1 / 51, rel=0.3)
    assert all(HashRing(reversed(range(50))).owner(key) == before.owner(key) for key in keys[:100])
    without = HashRing(each for each in range(50) if each != 7)
    assert all(without.owner(key) == before.owner(key) for key in keys if before.owner(key) != 7)


def test_the_holder_serves_else_the_least_loaded_else_the_ring():
    ring = HashRing([0, 1, 2])
    view = FleetView([0, 1, 2], ring, {0: 5, 1: 3, 2: 4})
    choose = ROUTINGS["holder"]
    assert choose("s", view, {0: 2, 2: 1}, 0.5) == 0, "it holds more"
    assert choose("s", view, {3: 9}, 0.5) == 1, "the holder takes no turns"
    assert choose("s", view, {}, 0.5) == 1
    equal = FleetView([0, 1, 2], ring, dict.fromkeys(range(3), 1))
    for name in ("a", "b", "c", "d"):
        assert choose(name, equal, {}, 0.0) == ring.owner(name) == ROUTINGS["hash"](name, equal, {}, 0.0)
    assert [ROUTINGS["random"]("s", view, {0: 1}, drawn) for drawn in (0.0, 0.4, 0.99)] == [0, 1, 2]


@pytest.mark.parametrize(("write", "tier"), [("none", "recomputed"), ("drain", "recomputed"), ("turn", "objects")])
def test_what_a_failure_takes_is_computed_or_restored(write, tier):
    session = coming("s", 0.0, (100, 10), (50, 10), think_s=7200.0)
    others = {"mtbf_hours": 0.1, "restart_s": 0.0, "objects_write": write}  # 72 s on average: it has failed by then.
    _, row = run([session], **others)
    assert row["num_turns"] == 2
    assert row["tokens"][tier] == row["tokens"]["history"] == 110
    assert (row["failure_turns"], row["failure_tokens"]) == ((0, 0) if write == "turn" else (1, 110))


def test_idle_sessions_are_written_once_they_have_been_idle():
    sessions = [coming("s", 0.0, (100, 10), (50, 10), (50, 10), think_s=20.0)]
    _, row = run(sessions, objects_write="idle", objects_idle_s=30.0)
    assert (row["num_puts"], row["written_bytes"]) == (2, 230_000), "after the last turn alone, all three at once"
    _, row = run(sessions, objects_write="idle", objects_idle_s=10.0)
    assert (row["num_puts"], row["written_bytes"]) == (6, 230_000)


@pytest.mark.parametrize("write", OBJECTS_WRITES)
def test_a_drained_replica_writes_what_is_not_in_the_objects_tier(write):
    (a,), (b,) = names_of(0, 1), names_of(1, 1)
    sessions = [coming(a, 0.0, (100, 10), (50, 10), think_s=60.0), coming(b, 0.0, (200, 10), (50, 10), think_s=60.0)]
    _, row = run(sessions, objects_write=write, objects_idle_s=300.0, scale=("30:-1",), duration_s=100.0)
    tier = "recomputed" if write == "none" else "objects"
    assert (row["tokens"][tier], row["tokens"]["dram"]) == (210, 110), "replica 1 was drained, not 0"
    assert (row["sessions_moved"], row["failure_turns"]) == (1, 0)


def test_a_replica_that_is_drained_ends_its_turns_first():
    (b,) = names_of(1, 1)
    counts, row = run([coming(b, 0.0, (100, 500), (50, 10))], objects_write="drain", scale=("2:-1",))
    assert counts.turns_of == {1: 1, 0: 1}
    assert (row["tokens"]["objects"], row["turns_retried"]) == (600, 0)


def test_added_replicas_take_sessions():
    counts, _ = run(
        itertools.islice(coming_sessions(PLANS, arrival_rate=0.5, think_s=30.0, seed=1), 100), scale=("100:2",)
    )
    assert set(counts.turns_of) == {0, 1, 2, 3}


def test_a_turn_whose_replica_fails_comes_again_and_tells_its_first_token_once():
    counts, row = run([coming("s", 0.0, (100, 800))], seed=1, mtbf_hours=0.001, restart_s=1.0)  # It takes 8 s.
    assert row["turns_retried"] > 0
    assert (row["num_turns"], len(counts.ttft_s)) == (1, 1)
    assert counts.ttft_s[0] == pytest.approx(0.1)


def test_the_same_seed_gives_the_same_row():
    def row_of(seed):
        sessions = coming_sessions(PLANS, arrival_rate=0.5, think_s=30.0, seed=seed)
        return run(itertools.islice(sessions, 100), "random", seed, num_replicas=5, mtbf_hours=0.5)[1]

    assert row_of(1) == row_of(1)
    assert row_of(1) != row_of(2)


def test_a_full_context_drops_its_oldest_tokens_and_old_copies_have_less_of_it():
    plan = plan_conversation([(30, 10)] * 3 + [(10, 90)], 100, OVERFLOW)
    turns = plan.turns
    assert [turn.history_tokens for turn in turns] == [0, 40, 30, 70], "half of the window leaves before the third"
    assert turns[2].found_tokens == (0, 30)
    assert [turn.stored_tokens for turn in turns] == [40, 80, 70, 100]
    assert (turns[3].answer_tokens, turns[3].made_tokens) == (20, 150)


def asked(arrival_s, session_id, *hash_ids, tool_tokens=0, think_s=0.0):
    return Request(
        arrival_s=arrival_s,
        session_id=session_id,
        input_tokens=64 * len(hash_ids) + 6,
        output_tokens=7,
        hash_ids=hash_ids,
        think_s=think_s,
        tool_tokens=tool_tokens,
    )


def test_a_prompt_finds_what_any_earlier_prompt_of_its_session_begins_with():
    (plan,) = plan_requests([asked(0, "a", 1, 2, 3), asked(1, "a", 1, 2, 4), asked(2, "a", 1, 2, 3, 5, think_s=9.0)])
    assert [turn.history_tokens for turn in plan.turns] == [0, 128, 192]
    assert [turn.found_tokens for turn in plan.turns] == [(), (128,), (192, 192)]
    assert [turn.stored_tokens for turn in plan.turns] == [192, 256, 320]
    assert plan.turns[2].think_s == 9.0
    assert (plan.turns[2].new_tokens, plan.turns[2].answer_tokens) == (64 + 6, 7)


@pytest.mark.parametrize("write", ["turn", "none"])
def test_tokens_that_several_sessions_have_are_found_where_one_of_them_was(write):
    requests = [asked(0, name, 1, 2, own, tool_tokens=140) for name, own in (("a", 3), ("b", 4), ("c", 5))]
    first, second, third = plan_requests(requests)
    assert (first.shared_key, first.shared_tokens, first.turns[0].stored_tokens) == ("tools-140", 128, 64)
    (a, b), (c,) = names_of(0, 2), names_of(1, 1)
    sessions = [
        Coming(session_id=name, arrival_s=time_s, plan=plan, think_s=(0.0,))
        for name, time_s, plan in ((a, 0.0, first), (b, 10.0, second), (c, 20.0, third))
    ]
    _, row = run(sessions, objects_write=write)
    assert row["tokens"]["history"] == 256, "the first one finds nothing"
    assert (row["tokens"]["dram"], row["tokens"]["objects" if write == "turn" else "recomputed"]) == (128, 128)
    if write == "turn":
        assert row["written_bytes"] == 1000 * (128 + 3 * 64), "what they share is written once"


def test_prices_are_those_of_what_was_counted():
    objects = ObjectsConfig(object_mib=0.05, price_put=1.0, price_get=0.1, price_gb_month=730.0, price_gb=1.0)
    sessions = [coming(names_of(0, 1)[0], 0.0, (100, 10))]
    _, row = run(sessions, objects=objects, duration_s=7200.0)
    wanted = {"puts": 4 / 2, "gets": 0.1 / 2 * 0, "storage": 110e-6 / 2 * 24, "transfer": 110e-6 / 2}
    assert row["prices_per_hour"] == pytest.approx(wanted), "three objects of 52 kB and a manifest in two hours"
    assert row["price_per_million_tokens"] == pytest.approx(2 * row["price_per_hour"] / 110e-6)


def test_one_replica_finds_what_the_engine_s_own_store_finds():
    model = dataclasses.replace(MODELS["llama-13b"], window=1_000_000)
    cost = RooflineCost(model=model, device=DEVICES["a100-80"], num_devices=2)
    lengths = [((40 + 37 * (i % 7), 60 + 90 * (i % 11)),) * (1 + i % 8) for i in range(24)]
    sessions = list(poisson_sessions(lengths, num_sessions=120, arrival_rate=0.1, think_s=60.0))
    plans = {each: plan_conversation(each, model.window, OVERFLOW) for each in set(lengths)}
    for dram_bytes, points in ((20e9, 0.05), (40e9, 0.05), (200e9, 0.005)):
        server = ServerConfig(
            model=model,
            cost=cost,
            link_bytes_per_s=26e9,
            store=StoreSizes(dram_bytes=dram_bytes, eviction_policy="lru"),
        )
        exact = Server(server).serve(sessions)
        come = [
            Coming(
                session_id=each.session_id,
                arrival_s=each.arrival_s,
                plan=plans[tuple((turn.user_tokens, turn.answer_tokens) for turn in each.turns)],
                think_s=tuple(turn.think_s for turn in each.turns),
            )
            for each in sessions
        ]
        _, row = run(come, server=server, num_replicas=1, objects_write="none")
        assert row["num_turns"] == exact.num_turns
        assert row["shares"]["dram"] == pytest.approx(exact.cached_share, abs=points)
        assert row["busy_share"] * 20_000 == pytest.approx(exact.gpu_s, rel=0.05)


# A restore layer by layer.


def restored(**others):
    cost = RooflineCost(model=MODELS["llama3-8b"], device=DEVICES["a100-80"], num_devices=1)
    values = {"history_tokens": 65536, "new_tokens": 4096, "link_bytes_per_s": 26e9}
    return Restore(model=MODELS["llama3-8b"], cost=cost, **{**values, **others})


def object_by_object_s(restore):
    """Time to the first token, one object after the other: over the network, to the device, and then its layers."""
    num_layers, object_bytes = restore.model.num_layers, restore.object_bytes
    of_layers = restore.layer_bytes * restore.group_layers / object_bytes
    assert of_layers == int(of_layers), "whole objects"
    copied_s = computed_s = 0.0
    for index in range(int(num_layers / restore.group_layers * of_layers)):
        arrived_s = restore.latency_s + (index + 1) * object_bytes / restore.objects_bytes_per_s
        copied_s = max(copied_s, arrived_s) + object_bytes / restore.link_bytes_per_s
        if (index + 1) % of_layers == 0:
            computed_s = max(computed_s, copied_s) + restore.compute_s * restore.group_layers / num_layers
    return computed_s


@pytest.mark.parametrize("object_mib", [16, 32, 64])
@pytest.mark.parametrize("new_tokens", [1, 1000, 2500, 4096])
@pytest.mark.parametrize("history_tokens", [4096, 16384, 65536])
def test_a_restore_is_what_its_objects_take_one_by_one(object_mib, new_tokens, history_tokens):
    restore = restored(object_bytes=object_mib * MIB, new_tokens=new_tokens, history_tokens=history_tokens)
    assert restore.from_objects_s == pytest.approx(object_by_object_s(restore), rel=1e-9)
    assert restore.group_layers == max(1, 4096 * object_mib // 16 // history_tokens)


@pytest.mark.parametrize("object_mib", [16, 32, 64])
def test_64k_tokens_from_objects_are_six_percent_late_at_most_once_computing_hides_the_load(object_mib):
    restore = restored(object_bytes=object_mib * MIB)
    assert restore.over_dram <= 1.06
    least = least_new_tokens(restore, 1.06)
    assert dataclasses.replace(restore, new_tokens=least).over_dram <= 1.06
    assert dataclasses.replace(restore, new_tokens=least - 1).over_dram > 1.06
    few = dataclasses.replace(restore, new_tokens=1)
    assert few.over_dram > 26 / 12.5, "nothing hides that the network is slower than the link"
    assert least_new_tokens(dataclasses.replace(restore, network_bytes_per_s=1e8), 1.06) is None


def test_too_few_requests_in_flight_do_not_fill_the_network():
    assert restored(object_bytes=16 * MIB, requests_in_flight=16).objects_bytes_per_s == 12.5e9
    one = restored(object_bytes=16 * MIB, requests_in_flight=1)
    assert one.objects_bytes_per_s == pytest.approx(16 * MIB / (5e-3 + 16 * MIB / 12.5e9))


BAD = [
    ({"num_replicas": 0}, "num_replicas must be at least 1"),
    ({"objects_write": "now"}, "objects_write must be one of turn, idle, drain, none"),
    ({"scale": ("5",)}, "scale must be TIME:COUNT, got '5'"),
    ({"scale": ("-5:1",)}, "scale must be a time of at least 0 s"),
    ({"warmup_s": 20_000.0}, "warmup_s must be less than"),
    ({"mtbf_hours": 0.0}, "mtbf_hours must be a number above 0"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_what_cannot_be_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        fleet_config(**values)
    with pytest.raises(ValueError, match="routing must be one of random, hash, holder"):
        Fleet(fleet_config(), SERVER, "nearest")
