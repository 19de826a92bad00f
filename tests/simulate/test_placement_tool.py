"""The table of policies: what each saves beside recency, and how much of its room, against figures made by hand."""

import dataclasses

import numpy as np
import pytest

from ca_jax.simulate.traces.sharegpt import Conversation, Turn
from ca_jax.simulate.workload import num_turns
from tools import goes_on as goes_on_tool
from tools import placement


def row(policy, seed, share, saved):
    return {
        "workload": "w",
        "queue_order": "arrival",
        "resume_error": None,
        "policy": policy,
        "seed": seed,
        "capacity_share": share,
        "saved_of_possible": saved,
        "cached_share": saved / 2,
        "hit_rate": saved,
        "ttft_mean_s": 1.0,
        "ttft_percentiles_s": {"p50": 1.0, "p99": 2.0},
        "device_s": 3.0,
    }


def test_gains_are_of_the_same_draw_and_room_lies_on_the_line_between_sizes():
    everything = [row("everything", seed, 1.05, 1.0) for seed in (0, 1)]
    recency = [row("lru", 0, 0.1, 0.3), row("lru", 1, 0.1, 0.5), row("lru", 0, 0.2, 0.7), row("lru", 1, 0.2, 0.9)]
    own = [row("own", 0, 0.1, 0.5), row("own", 1, 0.1, 0.5), row("own", 0, 0.05, 0.1), row("own", 1, 0.05, 0.3)]
    found = {(each["policy"], each["capacity_share"]): each for each in placement.summary(everything + recency + own)}
    assert found["own", 0.1]["gain_points"] == pytest.approx([10.0, 0.0, 20.0])
    assert found["own", 0.1]["saved_of_possible"] == pytest.approx(0.5)
    # Recency saves 0.4 with a tenth; the line from (0.05, 0.2) to (0.1, 0.5) is there at 0.0833.
    assert found["own", 0.1]["room_of_recency"] == pytest.approx(0.05 * (1 + 2 / 3) / 0.1)
    assert found["lru", 0.1]["room_of_recency"] == pytest.approx(1.0)
    assert found["own", 0.05]["gain_points"] is found["own", 0.05]["room_of_recency"] is None
    assert found["everything", 1.05]["saved_of_possible"] == 1.0


def test_halves_share_no_conversation_and_policies_are_served_the_same():
    halves = [placement.of_sharegpt(placement.config("sharegpt", 0), half) for half in placement.HALVES]
    lengths = [{tuple((t.user_tokens, t.answer_tokens) for t in each.turns) for each in half} for half in halves]
    assert len(halves[0]) == len(halves[1]) == 1000
    shared = lengths[0] & lengths[1]
    assert len(shared) < 0.1 * len(lengths[0]), "but for short ones that are alike by chance"
    again = placement.of_sharegpt(placement.config("sharegpt", 0), "held")
    assert (again, num_turns(again)) == (halves[1], num_turns(halves[1]))
    assert placement.of_sharegpt(placement.config("sharegpt", 1), "held") != again


def test_a_workload_is_served_under_each_policy_with_each_room_and_beside_room_for_all():
    asked = dataclasses.replace(placement.config("sharegpt", 0), num_sessions=60)
    rows = placement.serve("sharegpt", asked, "held", [0.2, 0.5], ["lru", "belady"])
    kinds = [(each["policy"], each["capacity_share"]) for each in rows]
    assert kinds == [("everything", 1.05), *((policy, share) for share in (0.2, 0.5) for policy in ("lru", "belady"))]
    assert len({each["num_turns"] for each in rows}) == 1, "all are asked the same"
    saved = {kind: each["saved_of_possible"] for kind, each in zip(kinds, rows, strict=True)}
    assert saved["everything", 1.05] == 1.0
    assert 0 < saved["lru", 0.2] < saved["belady", 0.2] <= saved["belady", 0.5] <= 1.0
    assert saved["lru", 0.2] < saved["lru", 0.5]


def test_who_goes_on_is_told_by_what_is_known_and_by_chance_without():
    rng = np.random.default_rng(0)
    known = np.column_stack([rng.normal(size=4000), np.ones(4000)])
    goes_on = rng.random(4000) < 1 / (1 + np.exp(-(2 * known[:, 0] + 1)))
    weights = goes_on_tool.fitted(known, goes_on)
    assert weights == pytest.approx([2, 1], abs=0.2)
    likely, auc = goes_on_tool.told(1 / (1 + np.exp(-known @ weights)), goes_on)
    without, chance = goes_on_tool.told(np.full(4000, goes_on.mean()), rng.permutation(goes_on))
    assert likely > without + 0.2
    assert auc > 0.85
    assert chance == pytest.approx(0.5, abs=0.03)
    asked = [("Hello?", "Yes."), ("Thanks", "Bye.")]
    turns = [each for pair in asked for each in pair]
    said = Conversation(
        id="a", turns=tuple(Turn(role=("user", "assistant")[i % 2], text=t) for i, t in enumerate(turns))
    )
    assert [(end.number, end.asked, end.goes_on) for end in goes_on_tool.ends_of(said)] == [
        (1, "Hello?", True),
        (2, "Thanks", False),
    ]
