"""How likely each token was, as answers say it: against the softmax of a full pass, and of `transformers`.

Not here: what was drawn from (test_sampling).
"""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import ca_jax
from ca_jax.device import sampler as sampling
from ca_jax.turns.requests import FinishReason, SamplingParams, TokenLogprob
from tests import engine_kit as kit

ATOL = 2 * kit.ATOL  # A log-probability is a logit less another number of that accuracy.
GREEDY = SamplingParams(max_tokens=24, logprobs=3, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.3, top_k=40, seed=5, logprobs=0, ignore_eos=True)
PENALISED = SamplingParams(
    max_tokens=24, presence_penalty=1.0, repetition_penalty=1.3, logit_bias={0x41: 3.0}, logprobs=20, ignore_eos=True
)
SILENT = SamplingParams(max_tokens=24, ignore_eos=True)


def check(found: list[TokenLogprob], token_ids: list[int], logits: np.ndarray, num_top: int) -> None:
    """Holds what is said of tokens against the logits `[T, V]` that they were drawn from."""
    assert [each.token_id for each in found] == token_ids
    expected = scipy.special.log_softmax(logits.astype(np.float64), axis=-1)
    for each, row in zip(found, expected, strict=True):
        assert each.logprob == pytest.approx(row[each.token_id], abs=ATOL)
        assert len({token for token, _ in each.top}) == len(each.top) == num_top
        np.testing.assert_allclose([p for _, p in each.top], row[[token for token, _ in each.top]], atol=ATOL, rtol=0)
        np.testing.assert_allclose([p for _, p in each.top], np.sort(row)[::-1][:num_top], atol=ATOL, rtol=0)


def check_answer(
    found: list[TokenLogprob] | None, prompt: list[int], answer: list[int], params: SamplingParams
) -> None:
    check(found, answer, kit.full_pass(prompt + answer[:-1])[0][len(prompt) - 1 :], params.logprobs)


def test_they_are_those_of_the_logits_with_the_likeliest_first():
    logits = np.random.default_rng(3).standard_normal((5, 300)).astype(np.float32) * np.array([[0.1, 1, 3, 9, 40]]).T
    logits[2, [7, 9]] = 30.0  # Equals: the lower id is first.
    drawn = np.array([0, 17, 9, 250, 299], np.int32)
    found = sampling.log_probabilities(jnp.asarray(logits, jnp.float32), drawn, 20)
    expected = scipy.special.log_softmax(logits.astype(np.float64), axis=-1)
    np.testing.assert_allclose(found.drawn, expected[np.arange(5), drawn], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.top_ids, np.argsort(-logits, axis=-1, kind="stable")[:, :20])
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, found.top_ids, -1), rtol=1e-5, atol=1e-5)


def test_each_answer_of_a_batch_says_what_it_was_asked_for_of_the_models_own_distribution(engine):
    """Drawn after prefill and decoded, with and without running ahead, greedily and not, whatever was added."""
    prompts = [kit.prompt(20 + 7 * row) for row in range(4)]
    for batch in ([GREEDY, SAMPLED, SILENT], [GREEDY, SAMPLED, SILENT, PENALISED]):
        done = engine.generate(prompts[: len(batch)], batch)
        assert done[2].logprobs is None
        for row, (prompt, each, params) in enumerate(zip(prompts, done, batch, strict=False)):
            if row != 2:
                check_answer(each.logprobs, prompt, each.token_ids, params)
    assert any(each.token_id != each.top[0][0] for each in done[3].logprobs), "penalties must change this answer"


def test_a_step_that_was_dispatched_ahead_has_its_own_and_one_that_is_thrown_away_leaves_none(engine):
    first, second = kit.prompt(33), kit.prompt(12)
    one = engine.session().send_ids(first, sampling=GREEDY)
    for _ in range(5):
        next(one)
    assert engine._batch._decoder._ahead is not None, "there must be a step on its way"
    other = engine.session().send_ids(second, sampling=dataclasses.replace(SAMPLED, max_tokens=6))
    kit.drain(one, other)
    for answer, prompt in ((one, first), (other, second)):
        check_answer(answer.job.token_logprobs, prompt, answer.job.output_ids, answer.job.params)


def test_over_reused_kv_they_are_the_same_and_a_stop_token_has_one_too(engine):
    session = engine.session()
    kit.say(session, kit.prompt(40), 10)
    prompt = [*session.token_ids, *kit.prompt(15)]
    stop = kit.greedy_answer(prompt, 12)[5]
    answer = session.send_ids(kit.prompt(15), sampling=dataclasses.replace(GREEDY, stop_token_ids=(stop,)))
    kit.drain(answer)
    assert session.usage.num_cached_tokens > 0
    assert session.finish_reason is FinishReason.STOP
    assert answer.job.token_logprobs[-1].token_id == stop
    check_answer(answer.job.token_logprobs, prompt, answer.job.output_ids, GREEDY)


def test_nothing_is_computed_for_answers_that_do_not_ask(engine, monkeypatch):
    asked = []

    def log_probabilities(*args, original=sampling.log_probabilities):
        asked.append(args)
        return original(*args)

    monkeypatch.setattr(sampling, "log_probabilities", log_probabilities)
    silent = [SILENT, dataclasses.replace(SAMPLED, logprobs=None)]
    assert [each.logprobs for each in engine.generate([kit.prompt(9)] * 2, silent)] == [None, None]
    assert not asked
    engine.generate([kit.prompt(9)] * 2, [*silent[:1], GREEDY])
    assert asked


def test_they_are_those_of_transformers(recorded_data):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = recorded_data / "llama_gqa_llama3_rope"
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = json.loads((directory / "expected_greedy.json").read_text(encoding="utf-8"))["cases"][2]["prompt"]
    model = ca_jax.load_model(str(directory), dtype="float32")
    with kit.small_engine(model, max_batch_size=1, context_window=256) as engine:
        (done,) = engine.generate([prompt], dataclasses.replace(GREEDY, logprobs=5))
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + done.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    check(done.logprobs, done.token_ids, logits.numpy(), 5)
