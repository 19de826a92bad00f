"""Figures of deviation on the tiny model: against KV of full passes, and what must hold at both ends."""

import numpy as np
import pytest
import scipy.stats

from benchmarks.evaluate.rag import RagConfig
from benchmarks.evaluate.rag_context import ContextModel
from benchmarks.evaluate.rag_deviation import ORACLE, run_deviation, true_kv
from benchmarks.evaluate.rag_methods import Blends, PromptContexts
from tests import engine_kit as kit
from tests.evaluation.rag_kit import ITEMS, chunking, ignore, prompts, write


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("rag") / "items.json", ITEMS)


@pytest.fixture(scope="module")
def deviations(path) -> list[np.ndarray]:
    """KV deviation of each item's tokens behind its first chunk, `[L, n]`, from full passes."""
    found = []
    for prompt in prompts(path):
        start = len(prompt.chunks[0])
        full = kit.full_pass(prompt.context_ids)[1][:, :, start:]
        alone = np.concatenate([kit.full_pass(list(chunk))[1] for chunk in prompt.chunks], axis=2)[:, :, start:]
        found.append(np.sqrt(((full - alone) ** 2).sum((1, 3, 4))))
    return found


def run(path, figure: int, **blends):
    config = RagConfig(chunking=chunking(path), blends=Blends(**blends), figure=figure)
    return run_deviation(kit.tiny_model(), config, ignore).rows


def test_figure_6_goes_from_full_reuse_to_nothing(path):
    rows = {(row.selection, row.ratio): row for row in run(path, 6, ratios=(1.0, 0.5))}
    assert list(rows) == [(name, ratio) for name in (ORACLE, "hkvd") for ratio in (0, 0.5, 1)]
    reuse = rows["hkvd", 0]
    for name in (ORACLE, "hkvd"):
        assert rows[name, 0].attention_deviation == reuse.attention_deviation
        assert (rows[name, 0].share, rows[name, 0].num_items) == (1, 3)
        assert rows[name, 1].attention_deviation == pytest.approx(0, abs=1e-3)
        assert rows[name, 1].mean_kl == pytest.approx(0, abs=1e-7)
    assert 0 < rows[ORACLE, 0.5].attention_deviation < reuse.attention_deviation
    assert rows["hkvd", 0.5].share == pytest.approx(rows["hkvd", 0.5].attention_deviation / reuse.attention_deviation)
    assert reuse.attention_deviation == pytest.approx(np.mean(reuse.layer_deviations))
    assert reuse.interval[0] <= reuse.attention_deviation <= reuse.interval[1]


def test_the_oracle_has_the_true_kv_of_the_tokens_that_deviate_most(path, deviations):
    asked = prompts(path)
    of = PromptContexts(ContextModel(kit.tiny_model(), asked, 0), asked[0], Blends())
    places = of.stored_places()
    count = round(0.25 * len(places))
    for layer, kv in enumerate(true_kv(of, 0.25)):
        is_true = (np.asarray(kv) == np.asarray(of.full[layer])).all((0, 2, 3))
        is_stored = (np.asarray(kv) == np.asarray(of.stored[layer])).all((0, 2, 3))
        assert is_true[: places[0]].all()
        if layer:  # The first layer's KV never deviates, but for rounding.
            chosen = np.sort(np.argsort(-deviations[0][layer])[:count])
            np.testing.assert_array_equal(np.flatnonzero(is_true[places]), chosen)
            assert is_stored[places].sum() == len(places) - count


def test_figure_7_is_the_distribution_over_all_items(path, deviations):
    rows = run(path, 7)
    assert [row.layer for row in rows] == [1, 2], "of three layers the second is the early and the middle one"
    together = np.concatenate(deviations, axis=1)
    for row in rows:
        values = np.sort(together[row.layer])
        np.testing.assert_allclose(row.percentiles, np.percentile(values, np.arange(101)), atol=1e-3)
        assert row.num_tokens == len(values)
        assert row.top_10_share == pytest.approx(values[-round(0.1 * len(values)) :].sum() / values.sum(), abs=1e-3)
        assert row.top_10_share < row.top_15_share < 1


def test_figure_8_is_spearmans_correlation_of_neighbouring_layers(path, deviations):
    (row,) = run(path, 8)
    expected = [scipy.stats.spearmanr(each[1], each[2]).statistic for each in deviations]
    assert (row.layer, row.num_items) == (1, 3)
    assert row.correlation == pytest.approx(np.mean(expected), abs=5e-3)
    assert row.interval[0] <= row.correlation <= row.interval[1]
