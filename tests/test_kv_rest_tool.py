"""What the tool that measures int8 KV at rest tells, on the tiny model."""

from __future__ import annotations

import pytest

from tests import engine_kit as kit
from tools import kv_rest

MODEL = kit.tiny_model()


def test_perplexity_is_told_with_and_without_rounding():
    found = kv_rest.perplexity(MODEL, kit.prompt(192), window=96, step_tokens=32)
    assert found["tokens"] == 2 * 95
    plain = kv_rest.perplexity(MODEL, kit.prompt(192), window=96, step_tokens=96)
    assert plain["change"] == 0, "nothing is behind a step of a whole context"
    assert 0 < abs(found["change"]) < 0.05
    assert found["change"] == pytest.approx(found["perplexity_int8"] / found["perplexity"] - 1, rel=1e-3)


def test_answers_over_loaded_history_are_compared():
    found = kv_rest.agreement(MODEL, kit.prompt(300), window=128, num_answers=2, answer_tokens=16)
    assert (found["answers"], found["history_tokens"]) == (2, 56)
    assert 0 <= found["same_answers"] <= found["same_first_tokens"] <= 2
    assert 0 <= found["mean_tokens_before_they_differ"] <= 16


def test_half_the_bytes_of_bfloat16_at_wide_heads():
    rows = kv_rest.token_bytes(MODEL)
    ratios = {(row["head_dim"], row["dtype"]): row["ratio"] for row in rows}
    assert ratios[128, "bfloat16"] == pytest.approx(0.508, abs=1e-3)
    assert ratios[16, "bfloat16"] == (16 + 2) / 32
