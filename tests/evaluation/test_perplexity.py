"""Perplexity of a tiny model from what its streams lose (see `test_stream`), and curves of known losses."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.evaluate.comparison import Comparison
from benchmarks.evaluate.perplexity import PerplexityConfig, loss_curve, run_perplexity
from benchmarks.evaluate.stream import ComparedOverflow, ContextStream
from ca_jax.launch.texts import EvaluationError
from tests import engine_kit as kit
from tests import overflow_kit as ok
from tests.evaluation.rag_kit import ignore

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on; nobody minds, the fox least of all. " * 3


def overflow(method: str, **changes: object) -> ComparedOverflow:
    return ok.plain(ComparedOverflow, **{"method": method, "keep_first_tokens": 4, **changes})


def ask(path: Path, *methods: ComparedOverflow, window: int = 48, max_tokens: int = 80) -> PerplexityConfig:
    comparison = Comparison(methods=methods, window=window, step_tokens=16)
    return PerplexityConfig(comparison=comparison, data=str(path), max_tokens=max_tokens)


def nats(overflow: ComparedOverflow, token_ids: list[int]) -> np.ndarray:
    """Of each token but the first."""
    return ContextStream(kit.tiny_model(), overflow, window=48, step_tokens=16).feed(token_ids)[1:].astype(np.float64)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_without_an_overflow_it_is_the_models_own(text):
    evaluation = run_perplexity(kit.tiny_model(), ask(text, overflow("ca"), max_tokens=40), ignore)
    (row,) = evaluation.rows
    losses = nats(overflow("ca"), list(TEXT.encode()[:40]))
    assert (row.perplexity, row.tokens) == (pytest.approx(math.exp(losses.mean()), rel=1e-4), 40)
    assert (row.perplexity_after_overflow, row.mean_kept_tokens, row.gap_to_tt, row.curve) == (None, None, None, [])


def test_rows_are_of_what_streams_lose(text):
    ids = list(TEXT.encode()[:80])
    told = []
    config = ask(text, overflow("tt"), overflow("of"), overflow("ca"), overflow("nkvt"))
    rows = run_perplexity(kit.tiny_model(), config, lambda *call: told.append(call)).rows
    losses = nats(overflow("tt"), ids)
    after = losses[47:]  # Tokens 0 to 47 fit.
    tt, of, ca, nkvt = rows
    assert tt.perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-4)
    assert tt.perplexity_after_overflow == pytest.approx(math.exp(after.mean()), rel=1e-4)
    blocks = after.reshape(2, 16).mean(1)
    assert tt.stderr == pytest.approx(tt.perplexity_after_overflow * blocks.std(ddof=1) / math.sqrt(2), rel=1e-3)
    assert (tt.num_truncations, tt.mean_kept_tokens, tt.recomputed_tokens) == (2, (24 + 16) / 2, 40)
    same = {"name": "tt, keep 4", "method": "tt", "gap_to_tt": None, "gap_stderr": None, "ratio_to_tt": None}
    times = {"seconds": tt.seconds, "tokens_per_s": tt.tokens_per_s, "curve": tt.curve}
    assert dataclasses.replace(of, **same, **times) == tt
    assert (of.gap_to_tt, of.gap_stderr, of.ratio_to_tt) == (0, 0, 1)
    assert (ca.recomputed_tokens, nkvt.recomputed_tokens) == (0, 0)
    for row in (ca, nkvt):
        assert row.num_truncations == 2
        assert row.perplexity_after_overflow != tt.perplexity_after_overflow
        assert row.ratio_to_tt == pytest.approx(row.perplexity_after_overflow / tt.perplexity_after_overflow, rel=1e-6)
        assert row.gap_to_tt == pytest.approx(row.ratio_to_tt - 1)
        assert row.gap_stderr > 0
    assert told[:3] == [("tt, keep 4", 0, 5), ("tt, keep 4", 1, 5), ("tt, keep 4", 2, 5)]
    assert told[-1] == ("nkvt, keep 4", 5, 5)


def test_what_is_recomputed_is_told(text):
    variants = [overflow("ca"), overflow("ca", anchor_tokens=3), overflow("ca", repair_ratio=1.0)]
    rows = run_perplexity(kit.tiny_model(), ask(text, overflow("tt"), *variants), ignore).rows
    assert [row.name for row in rows[1:]] == ["ca, keep 4", "ca, keep 4, anchor 3", "ca, keep 4, repair 100%"]
    assert [row.recomputed_tokens for row in (rows[0], rows[1], rows[3])] == [40, 0, 40]
    assert 6 <= rows[2].recomputed_tokens < 40
    assert rows[3].gap_to_tt == pytest.approx(0, abs=1e-4), "all that is kept is computed anew"
    assert abs(rows[1].gap_to_tt) > 1e-3


def test_a_bound_is_kept_by_what_computes_enough_anew(text):
    methods = overflow("tt"), overflow("ca"), overflow("ca", repair_ratio=1.0)
    bounded = dataclasses.replace(ask(text, *methods, max_tokens=200), max_loss=1e-3)
    rows = run_perplexity(kit.tiny_model(), bounded, ignore).rows
    assert [row.passes for row in rows] == [None, False, True]
    above = rows[1].gap_to_tt + 2 * rows[1].gap_stderr
    for bound, passes in ((above + 1e-6, True), (above - 1e-6, False)):
        found = run_perplexity(kit.tiny_model(), dataclasses.replace(bounded, max_loss=bound), ignore).rows
        assert found[1].passes is passes


def test_too_little_text_is_refused_and_said_how_much_is_needed(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(TEXT[:48], encoding="utf-8")
    with pytest.raises(EvaluationError, match=r"at least 49 tokens to overflow a window of 48, got 48 in .*short.txt"):
        run_perplexity(kit.tiny_model(), ask(short, overflow("ca")), ignore)
    short.write_text("x", encoding="utf-8")
    with pytest.raises(EvaluationError, match="at least 2 tokens, got 1"):
        run_perplexity(kit.tiny_model(), ask(short, overflow("ca"), max_tokens=48), ignore)


# Curves.


def test_a_curve_is_the_mean_over_truncations_of_each_bin():
    losses = np.full(200, 5.0)
    losses[64:96], losses[128:160] = 2.0, 4.0  # Behind the truncations at 64 and 128.
    curve = loss_curve(losses, np.full(200, 1.0), [64, 128])
    assert [point.offset for point in curve] == [-64, -32, 0, 32]
    behind = curve[2]
    assert (behind.loss, behind.gap) == (3.0, 2.0)
    assert behind.loss_stderr == behind.gap_stderr == pytest.approx(1.0)  # Of 2 and 4.
    assert [point.loss for point in curve] == [3.5, 5.0, 3.0, 5.0]
