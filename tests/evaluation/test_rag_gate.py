"""The quality gate: rows from known divergences, and the tiny model, which no ratio under 1 keeps close."""

import numpy as np
import pytest

from ca_jax.evaluation.comparison import EvaluationError
from ca_jax.evaluation.rag_gate import gate_row, run_gate
from ca_jax.evaluation.rag_methods import Compared
from ca_jax.evaluation.rag_schema import Blends, GateConfig
from ca_jax.evaluation.statistics import paired_interval
from tests import engine_kit as kit
from tests.evaluation.rag_kit import ITEMS, chunking, ignore, write

REUSE_KL = np.array([1.0, 2.0, 3.0, 4.0])


def row_of(kl, **bounds):
    found = [Compared(kl=each, same_top1=0.5, deviations=np.zeros(2)) for each in kl]
    return gate_row(GateConfig(**bounds), 0.15, "hkvd", found, REUSE_KL, [10.0, 20.0, 30.0, 40.0])


def test_a_share_is_held_against_the_upper_bound_of_paired_differences():
    row = row_of(REUSE_KL / 2, max_kl_share=0.5)
    assert row.share_excess == pytest.approx(0)
    assert (row.passes, row.kl_share, row.mean_kl, row.computed_tokens, row.same_top1) == (True, 0.5, 1.25, 25, 0.5)
    assert row.kl_excess is None
    uneven = np.array([0.0, 0.0, 0.0, 4.8])  # In the mean 0.48 of full reuse's, but who knows of other items.
    row = row_of(uneven, max_kl_share=0.5)
    assert row.share_excess == pytest.approx(paired_interval((uneven - REUSE_KL / 2).tolist(), range(4))[1])
    assert (row.kl_share, row.passes) == (0.48, False)


def test_a_bound_in_nats_is_held_against_the_interval():
    row = row_of([0.1, 0.2, 0.1, 0.2], max_kl=0.21, max_kl_share=None)
    assert row.kl_interval == paired_interval([0.1, 0.2, 0.1, 0.2], range(4))
    assert row.kl_excess == row.kl_interval[1] - 0.21
    assert (row.passes, row.share_excess) == (True, None)
    assert not row_of([0.1, 0.2, 0.1, 0.2], max_kl=0.16, max_kl_share=None).passes, (
        "0.15 is within it, its bound is not"
    )
    assert not row_of([0.1, 0.2, 0.1, 0.2], max_kl=0.16).passes, "both bounds hold"
    assert not row_of(REUSE_KL, max_kl=9.0).passes


def test_ratios_are_tried_from_full_reuse_to_the_largest(tmp_path):
    path = write(tmp_path / "a.json", ITEMS)
    told = []
    config = GateConfig(chunking=chunking(path), blends=Blends(ratios=(1.0, 0.5)), max_kl_share=0.01)
    evaluation = run_gate(kit.tiny_model(), config, lambda *call: told.append(call))
    assert [(row.ratio, row.passes) for row in evaluation.rows] == [(0, False), (0.5, False), (1, True)]
    assert evaluation.rows[0].kl_share == 1
    assert [row.mean_kl for row in evaluation.rows] == [
        pytest.approx(np.mean([item["kl"][name] for item in evaluation.items]))
        for name in ("full reuse", "hkvd 50%", "hkvd 100%")
    ]
    assert told == [("blend_gate", done, 3) for done in range(4)]
    easy = GateConfig(chunking=chunking(path), blends=Blends(ratios=(1.0,)), max_kl=1e3, max_kl_share=None)
    assert [row.passes for row in run_gate(kit.tiny_model(), easy, ignore).rows] == [True, True]


def test_what_a_gate_cannot_judge_is_refused(tmp_path):
    path = write(tmp_path / "a.json", ITEMS)
    with pytest.raises(EvaluationError, match="at least 2 items to say how sure a mean is, got 1"):
        run_gate(kit.tiny_model(), GateConfig(chunking=chunking(path, max_items=1)), ignore)
    with pytest.raises(EvaluationError, match=r"at least 2 chunks, got 1 in a\.json:0"):
        run_gate(kit.tiny_model(), GateConfig(chunking=chunking(path, num_chunks=1)), ignore)
    with pytest.raises(ValueError, match="got neither"):
        GateConfig(max_kl_share=None)
    with pytest.raises(ValueError, match="max_kl must be a bound above 0, got 0"):
        GateConfig(max_kl=0)
    with pytest.raises(ValueError, match="one selection, got hkvd, first"):
        GateConfig(blends=Blends(selections=("hkvd", "first")))
