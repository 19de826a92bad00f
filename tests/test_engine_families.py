"""Every architecture through the engine: with reuse across turns, and past the end of its window.

Turns that fit are held against `transformers`, each token by a full pass; turns that overflow against the same cache
sliced in memory, or against `transformers` where no layer looks back to what has left. Prompts are longer than the
sliding windows, and of lengths that few functions are compiled for.
"""

from __future__ import annotations

import pytest

from benchmarks.compiles import CompileCounter
from ca_jax.device.pages import PoolSize
from ca_jax.device.passes import PassPart, Prefill
from ca_jax.device.runner import Runner, RunnerSizes
from ca_jax.device.warmup import Shapes, compile_all, functions_of
from ca_jax.session import Job
from ca_jax.turns.requests import SamplingParams
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
)


def overflows_unseen(engine, pair):
    """Where all layers slide, what leaves is what none looks back to: answers are as if no context were full."""
    session, everything = engine.session(), []
    for turn, num_tokens in enumerate((56, 14, 2, 40, 14)):
        prompt = families_kit.prompt(num_tokens, seed=turn)
        expected = pair.their_answer([*everything, *prompt], 12)
        assert ok.say(session, prompt, 12) == expected
        if not session.num_dropped:
            assert session.usage.num_cached_tokens == max(len(everything) - 1, 0)
        everything += [*prompt, *expected]
        engine.wait_for_saves()
    assert session.num_dropped > 0
    assert session.token_ids == everything[session.num_dropped :]


@pytest.mark.parametrize("name", NAMES)
def test_three_turns_and_an_overflow(name):
    pair = families_kit.pair(name)
    with kit.small_engine(pair.model, **CONFIG) as engine:
        if pair.model.config.kv_window is not None:
            overflows_unseen(engine, pair)
            return
        both = ok.Pair(engine)
        for turn, (num_tokens, max_tokens) in enumerate([(56, 4), (14, 4), (2, 4), (50, 12), (14, 40)]):
            prompt = families_kit.prompt(num_tokens, seed=turn)
            prompt_ids = [*both.session.token_ids, *prompt]
            both.turn(prompt, max_tokens)
            if turn < 3:
                assert both.session.token_ids == prompt_ids + pair.their_answer(prompt_ids, max_tokens)
        assert both.session.num_dropped == 3 * WINDOW // 4, "before the last two prompts, and in the last answer"
        both.expect_stored_kv()


def test_layers_of_each_window_are_compiled_once_and_by_the_warm_up():
    model = kit.model_of(num_layers=4, sliding_window=20, full_layers=(0, 3))
    pool = PoolSize.for_window(WINDOW, num_rows=1, num_parts=1, page_tokens=kit.BLOCK_TOKENS)
    runner, plain_runner = (
        Runner(each.config, each.params, RunnerSizes(pool=pool, chunk_tokens=64))
        for each in (model, kit.model_of(num_layers=4))
    )
    functions = functions_of(Shapes(runner), max_new=8)
    assert len(functions) == len(functions_of(Shapes(plain_runner), max_new=8)) + 1
    compile_all(functions)
    job = Job([1, 2, 3], SamplingParams(), output=None, stop_ids=frozenset(), slot=0)
    runner.pool.begin(0, WINDOW)
    with CompileCounter() as counter:
        runner.run_pass([PassPart(Prefill(0, job.prompt_ids, 0), 3, draws_behind=3)])
        job.add(4)
        runner.decode([job], run_ahead=True)
    assert counter.count == 0
