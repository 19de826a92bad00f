"""The quality gate: rows from known divergences, and the tiny model, which no ratio under 1 keeps close."""

import numpy as np
import pytest

from benchmarks.evaluate.rag import MAX_TOP1_LOSS, GateConfig, gate_row, run_gate
from benchmarks.evaluate.rag_methods import Blends
from benchmarks.evaluate.statistics import mean_interval
from ca_jax.evaluation.texts import EvaluationError
from tests import engine_kit as kit
from tests.evaluation.rag_kit import ITEMS, chunking, ignore, write

REUSE_KL = [1.0, 2.0, 3.0, 4.0]


def row_of(kl=REUSE_KL, same_top1=(0.5,) * 4, **bounds):
    of = {"ratio": 0.15, "selection": "hkvd", "computed_tokens": 25.0}
    return gate_row(GateConfig(**bounds), of, kl=list(kl), same_top1=same_top1, reuse_kl=REUSE_KL)


def test_next_tokens_that_are_lost_are_held_against_the_interval():
    row = row_of(same_top1=(1.0, 0.75, 1.0, 1.0))
    lost = mean_interval([0.0, 0.25, 0.0, 0.0])
    assert (row.same_top1, row.top1_excess) == (0.9375, lost[1] - MAX_TOP1_LOSS)
    assert not row.passes, "0.0625 is within the bound, the interval is not"
    assert row_of(same_top1=(1.0, 0.75, 1.0, 1.0), max_top1_loss=lost[1]).passes
    assert (row.share_excess, row.kl_excess) == (None, None)
    assert row_of(same_top1=(1.0,) * 4).passes


def test_a_share_is_held_against_the_upper_bound_of_paired_differences():
    row = row_of([each / 2 for each in REUSE_KL], max_kl_share=0.5)
    assert row.share_excess == pytest.approx(0)
    assert (row.passes, row.kl_share, row.mean_kl, row.computed_tokens, row.same_top1) == (True, 0.5, 1.25, 25, 0.5)
    assert (row.kl_excess, row.top1_excess) == (None, None)
    uneven = np.array([0.0, 0.0, 0.0, 4.8])  # In the mean 0.48 of full reuse's, but who knows of other items.
    row = row_of(uneven, max_kl_share=0.5)
    assert row.share_excess == pytest.approx(mean_interval((uneven - np.array(REUSE_KL) / 2).tolist())[1])
    assert (row.kl_share, row.passes) == (pytest.approx(0.48), False)


def test_a_bound_in_nats_is_held_against_the_interval():
    kl = [0.1, 0.2, 0.1, 0.2]
    row = row_of(kl, max_kl=0.21)
    assert row.kl_interval == mean_interval(kl)
    assert row.kl_excess == row.kl_interval[1] - 0.21
    assert (row.passes, row.share_excess) == (True, None)
    assert not row_of(kl, max_kl=0.16).passes, "0.15 is within it, its bound is not"
    assert not row_of(kl, max_kl=0.21, max_kl_share=0.01).passes, "both bounds hold"


def test_ratios_are_tried_from_full_reuse_to_the_largest(tmp_path):
    path = write(tmp_path / "a.json", ITEMS)
    config = GateConfig(chunking=chunking(path), blends=Blends(ratios=(1.0, 0.5)), max_kl_share=0.01)
    evaluation = run_gate(kit.tiny_model(), config, ignore)
    assert [(row.ratio, row.passes) for row in evaluation.rows] == [(0, False), (0.5, False), (1, True)]
    assert evaluation.rows[0].kl_share == 1
    assert [row.mean_kl for row in evaluation.rows] == [
        pytest.approx(np.mean([item["kl"][name] for item in evaluation.items]))
        for name in ("full reuse", "hkvd 50%", "hkvd 100%")
    ]
    easy = GateConfig(chunking=chunking(path), blends=Blends(ratios=(1.0,)), max_kl=1e3)
    assert [row.passes for row in run_gate(kit.tiny_model(), easy, ignore).rows] == [True, True]


def test_what_a_gate_cannot_judge_is_refused(tmp_path):
    path = write(tmp_path / "a.json", ITEMS)
    with pytest.raises(EvaluationError, match="items must be at least 2 to say how sure a mean is, got 1"):
        run_gate(kit.tiny_model(), GateConfig(chunking=chunking(path, max_items=1)), ignore)
    with pytest.raises(EvaluationError, match=r"at least 2 chunks, got 1 in a\.json:0"):
        run_gate(kit.tiny_model(), GateConfig(chunking=chunking(path, num_chunks=1)), ignore)
    with pytest.raises(ValueError, match="max_kl must be a bound above 0, got 0"):
        GateConfig(max_kl=0)
    with pytest.raises(ValueError, match="selections must be one, got hkvd, first"):
        GateConfig(blends=Blends(selections=("hkvd", "first")))
