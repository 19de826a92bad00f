"""Every architecture through the engine: with reuse across turns, past the end of its window, and over a restart.

Turns that fit are held against `transformers`, each token by a full pass; turns that overflow against the same cache
sliced in memory, or against `transformers` where no layer looks back to what has left. Prompts are longer than the
sliding windows, and of lengths that few functions are compiled for.
"""

from __future__ import annotations

import pytest

from ca_jax.config import BlendConfig
from tests import engine_kit as kit
from tests import families_kit
from tests import overflow_kit as ok

WINDOW = 128
CONFIG = {"context_window": WINDOW, "max_batch_size": 1, "overflow": ok.config(ratio=0.25)}
NAMES = (
    "yarn_rope",
    "dynamic_rope",
    "mistral",
    "mixtral",
    "qwen2_sliding",
    "qwen3",
    "falcon_7b",
    "falcon_40b",
    "neox",
    "phi3_long",
    "smollm3",
    "granite",
    "ministral3",
    "olmo2",
    "olmo3",
    "cohere2",
    "qwen2_moe",
    "qwen3_moe",
    "glm4",
    "glm4_moe",
    "minimax_m2",
    "deepseek_v2",
    "deepseek_v3",
    "mistral4",
    "gemma2",
    "gemma3_scaled_rope",
    "gemma4",
    "gemma4_keys_are_values",
    "gemma4_experts",
    "gpt_oss",
)


def overflows_unseen(pair, store):
    """Where all layers slide, what leaves is what none looks back to: answers are as if no context were full."""
    everything: list[int] = []
    for turns in ((56, 14, 2, 40), (14,)):
        with kit.small_engine(pair.model, store=store, **CONFIG) as engine:
            session = engine.session(session_id="one")
            for num_tokens in turns:
                prompt = families_kit.prompt(num_tokens, seed=len(everything))
                expected = pair.their_answer([*everything, *prompt], 12)
                assert ok.say(session, prompt, 12) == expected
                if not session.num_dropped:
                    assert session.usage.num_cached_tokens == max(len(everything) - 1, 0)
                everything += [*prompt, *expected]
                engine.wait_for_saves()
            assert session.usage.num_cached_tokens > 0
    assert session.num_dropped > 0
    assert session.token_ids == everything[-len(session.token_ids) :]


LONG = (
    *("mixtral", "qwen2_moe", "glm4_moe", "deepseek_v2", "mistral4", "gemma4", "qwen3_moe", "olmo2", "qwen2_sliding"),
    *("ministral3", "phi3_long", "glm4"),
)
"""What is new in these is in others, too."""


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in LONG)) for each in NAMES])
def test_three_turns_three_overflows_and_a_restart(name, tmp_path):
    pair, store, reference, turn = families_kit.pair(name), kit.ssd_store(tmp_path), None, 0
    if (config := pair.model.config).sliding_window is not None and not config.full_layers:
        overflows_unseen(pair, store)
        return
    for turns in ([(56, 4), (14, 4), (2, 4), (50, 12)], [(14, 40)]):
        with kit.small_engine(pair.model, store=store, **CONFIG) as engine:
            both = ok.Pair(engine, engine.session(session_id="one"), reference)
            for num_tokens, max_tokens in turns:
                prompt = families_kit.prompt(num_tokens, seed=turn)
                prompt_ids = [*both.session.token_ids, *prompt]
                both.turn(prompt, max_tokens)
                if turn < 3:
                    assert both.session.token_ids == prompt_ids + pair.their_answer(prompt_ids, max_tokens)
                turn += 1
            both.expect_stored_kv()
            reference = both.reference
            if turn == 4:
                assert both.session.num_dropped == WINDOW // 4, "before the last prompt"
    assert both.session.usage.cached_tokens.keys() == {"ssd"}
    assert reference.num_dropped == 3 * WINDOW // 4, "before the last two prompts, and in the last answer"


BLENDED = ("deepseek_v3", "gemma3_scaled_rope", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[11:]))


@pytest.mark.parametrize("name", BLENDED)
def test_chunks_that_are_blended_and_computed_anew_whole_answer_as_without_a_store(name):
    pair = families_kit.pair(name)
    with kit.small_engine(pair.model, context_window=WINDOW, blend=BlendConfig(recompute_ratio=1.0)) as engine:
        session, chunks = engine.session(), [families_kit.prompt(40, seed=1), families_kit.prompt(33, seed=2)]
        kit.drain(session.send_ids(families_kit.prompt(9, seed=3), context=chunks, max_tokens=6))
        prompt, answer = session.token_ids[:-6], session.token_ids[-6:]
        assert session.usage.recompute_ratio == 1.0
        assert answer == pair.their_answer(prompt, 6)
