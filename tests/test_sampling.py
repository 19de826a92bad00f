"""Sampling: the distribution that each parameter leaves, against numpy; seeds; and what the engine makes of them.

And how likely each token was, as answers say it: against the softmax of a full pass.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from ca_jax.device import sampler as sampling
from ca_jax.device.sampler import Sampler
from ca_jax.turns.requests import SamplingParams, TokenLogprob
from tests import engine_kit as kit

VOCAB = 12
LOGITS = np.random.default_rng(4).permutation(np.linspace(-2.0, 2.5, VOCAB)).astype(np.float32)
ROWS, STEPS = 64, 64


def reference(
    logits: np.ndarray, params: SamplingParams, seen: tuple[int, ...] = (), said: Sequence[int] = ()
) -> np.ndarray:
    """The probability of each token, step by step and in float64; `said` are those of `seen` that were generated.

    Presence and frequency penalty are OpenAI's formula: `mu[j] -= c[j] * frequency + (c[j] > 0) * presence`.
    """
    logits = logits.astype(np.float64)
    for token in seen:
        logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token, count in collections.Counter(said).items():
        logits[token] -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
    if params.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    p = np.exp(logits / params.temperature)
    order = np.argsort(-p)
    kept = list(order[: params.top_k or None])
    share = p[kept] / p[kept].sum()
    kept = kept[: 1 + int((np.cumsum(share) < params.top_p).sum())]
    kept = [token for token in kept if p[token] >= params.min_p * p[kept[0]]]
    only = np.zeros_like(p)
    only[kept] = p[kept]
    return only / only.sum()


LIKELIEST = [int(token) for token in np.argsort(-LOGITS)]


def sampled(prompt: tuple[int, ...] = (), said: tuple[int, ...] = (), **params: object):
    return SamplingParams(**{"temperature": 1.0, **params}), prompt, said


BEST = LIKELIEST[0]
SETTINGS = {
    "plain": sampled(),
    "cool": sampled(temperature=0.5),
    "top_k 1": sampled(top_k=1),
    "top_k 3": sampled(top_k=3),
    "top_k above all": sampled(top_k=50),
    "top_p": sampled(top_p=0.7),
    "top_p of almost nothing": sampled(top_p=1e-6),
    "min_p": sampled(min_p=0.2),
    "penalty on likely and unlikely": sampled((0, 3, 7, 8), repetition_penalty=1.8),
    "greedy with penalty": sampled((BEST,), temperature=0.0, repetition_penalty=5.0),
    "presence": sampled((), (BEST, BEST, LIKELIEST[5]), presence_penalty=1.5),
    "frequency": sampled((LIKELIEST[1],), (BEST, BEST, BEST, LIKELIEST[4]), frequency_penalty=0.7),
    "negative": sampled((), (LIKELIEST[6],) * 2, presence_penalty=-1.0, frequency_penalty=-0.5),
    "bias": sampled(logit_bias={BEST: -100, LIKELIEST[7]: 2.5}),
    "all": sampled(
        (LIKELIEST[1], LIKELIEST[-1]),
        (BEST, BEST, LIKELIEST[2]),
        **{"temperature": 0.8, "top_k": 8, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
        **{"presence_penalty": 0.6, "frequency_penalty": 0.4, "logit_bias": {BEST: 1.5, LIKELIEST[2]: -1.0}},
    ),
}


@pytest.mark.parametrize(("params", "prompt", "said"), SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_drawn_from_the_distribution_that_the_parameters_leave(params, prompt, said):
    sampler = Sampler(num_slots=ROWS, vocab_size=VOCAB)
    for slot in range(ROWS):
        sampler.set_slot(slot, dataclasses.replace(params, seed=slot), list(prompt))
        for token in said:
            sampler.mark(slot, token)
    logits, counts = jnp.asarray(np.tile(LOGITS, (ROWS, 1))), np.zeros(VOCAB)
    for position in range(STEPS):
        np.add.at(counts, sampler.start(logits, np.full(ROWS, position), range(ROWS)).wait().tokens, 1)
    expected = reference(LOGITS, params, tuple({*prompt, *said}), said)
    drawn = ROWS * STEPS
    assert not counts[expected == 0].any(), "a token was drawn that the parameters rule out"
    assert counts[drawn * expected > 20].all(), "a token was never drawn that the parameters leave"
    # Five standard deviations of each token's count; the draws are the same in every run.
    assert np.all(np.abs(counts - drawn * expected) <= 5 * np.sqrt(drawn * expected * (1 - expected)) + 1e-9)
    assert sampler.waits_for_marks == any(
        (params.repetition_penalty != 1, params.presence_penalty, params.frequency_penalty)
    ), "it must be known whether a token must be marked before the next is drawn"


@pytest.mark.parametrize("name", SETTINGS)
def test_the_reference_leaves_what_transformers_leaves(name):
    """But for presence and frequency penalty, which `transformers` has not."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    params, prompt, said = SETTINGS[name]
    params = dataclasses.replace(params, presence_penalty=0.0, frequency_penalty=0.0)
    seen = [*prompt, *said]
    steps = [transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    if params.logit_bias:
        biases = {(token,): float(bias) for token, bias in params.logit_bias}
        steps.append(transformers.SequenceBiasLogitsProcessor(biases))
    if params.temperature > 0:
        steps += [
            transformers.TemperatureLogitsWarper(params.temperature),
            transformers.TopKLogitsWarper(params.top_k or VOCAB),
            transformers.TopPLogitsWarper(params.top_p),
            transformers.MinPLogitsWarper(params.min_p),
        ]
    scores = torch.tensor(LOGITS[None])
    for step in steps:
        scores = step(torch.tensor([seen], dtype=torch.long), scores)
    expected = scores.softmax(-1)[0].numpy() if params.temperature > 0 else np.eye(VOCAB)[int(scores[0].argmax())]
    np.testing.assert_allclose(reference(LOGITS, params, tuple({*seen})), expected, atol=1e-6)


def test_what_is_added_is_of_one_slot_and_of_one_answer():
    sampler, logits = Sampler(num_slots=3, vocab_size=VOCAB), jnp.asarray(np.tile(LOGITS, (3, 1)))
    best, second, third = LIKELIEST[:3]
    gap = float(LOGITS[best] - LOGITS[second])

    def drawn(slots: Sequence[int | None] = range(3)) -> list[int]:
        return sampler.start(logits[: len(slots)], np.zeros(len(slots)), slots).wait().tokens.tolist()

    for _ in range(2):  # What the first round has added is forgotten in the second.
        sampler.set_slot(0, SamplingParams(repetition_penalty=50.0), [second])
        sampler.set_slot(1, SamplingParams(frequency_penalty=gap * 0.6), [best, best, best])
        sampler.set_slot(2, SamplingParams(logit_bias={third: 50.0}, presence_penalty=2.0), [])
        assert drawn() == [best, best, third], "only the repetition penalty is of the prompt too"
        for slot in range(3):
            sampler.mark(slot, best)
        assert drawn() == [third, best, third], "once is not enough for this frequency penalty"
        sampler.mark(1, best)
        assert drawn() == [third, second, third]
        assert drawn([1]) == [second]
        assert drawn([1, None, 0])[::2] == [second, third], "rows are of any slots, in any order"
        for slot in range(3):
            sampler.free_slot(slot)
    sampler.set_slot(0, SamplingParams(repetition_penalty=50.0), [best])
    sampler.set_slot(1, SamplingParams(frequency_penalty=gap * 0.6), [])
    sampler.set_slot(2, SamplingParams(), [])
    assert drawn() == [second, best, best], "a slot that adds nothing must add nothing"


def test_equals_stay_or_go_together_and_each_row_by_its_own_parameters():
    logits = np.asarray([2.0, -0.0, 0.0, 1.0, -0.5, 0.0, 1.0, *[-1.0] * (VOCAB - 7)], np.float32)
    kept = [
        (SamplingParams(temperature=1.0, top_k=2), {0, 3, 6}),
        (SamplingParams(temperature=1.0, top_k=4), {0, 1, 2, 3, 5, 6}),
        (SamplingParams(temperature=1.0, top_p=0.6), {0, 3, 6}),
        (SamplingParams(temperature=1.0), set(range(VOCAB))),
    ]
    params = [dataclasses.replace(params, seed=seed) for seed in range(500) for params, _ in kept]
    batch, rows = jnp.asarray(np.tile(logits, (len(params), 1))), sampling.SamplerRows.of(params)
    marks, numbers = np.zeros((1, 2, VOCAB), np.float32), np.zeros(len(params), np.int32)
    masks = np.full((len(params), -(-VOCAB // 32)), sampling.ALL_TOKENS)
    drawn = sampling.sample(batch, rows, marks, masks, numbers, numbers, filters=True)
    assert [set(each) for each in np.asarray(drawn).reshape(-1, len(kept)).T.tolist()] == [left for _, left in kept]


# Through the engine.


@pytest.mark.parametrize(
    ("prompt", "penalties"),
    [
        (kit.prompt(25), {"presence_penalty": 0.8, "frequency_penalty": 0.5, "logit_bias": {0x41: 2.0, 0x20: -100}}),
        (kit.prompt(20, 1), {"repetition_penalty": 1.5}),
    ],
)
def test_the_engine_penalises_what_was_said_as_each_penalty_counts_it(engine, prompt, penalties):
    """Every token, though decode runs ahead; the prompt's for the repetition penalty alone."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, **penalties)

    def answer(of_prompt: bool, late: bool) -> list[int]:
        """By a full pass a token: penalties of the prompt too, or of all but the last token, which are wrong."""
        ids = list(prompt)
        for step in range(params.max_tokens):
            known = ids[:-1] if late and step else ids
            said = known if of_prompt else known[len(prompt) :]
            ids.append(int(reference(kit.full_pass(ids)[0][-1], params, tuple(set(known)), said).argmax()))
        return ids[len(prompt) :]

    expected = answer(of_prompt=False, late=False)
    assert expected != answer(of_prompt=False, late=True), "says too little"
    assert "repetition_penalty" in penalties or expected != answer(of_prompt=True, late=False), "says too little"
    beside = SamplingParams(max_tokens=24, ignore_eos=True)
    done, plain, again = engine.generate([prompt] * 3, [params, beside, params])
    assert done.token_ids == again.token_ids == expected
    assert plain.token_ids == kit.greedy_answer(prompt, 24)


def test_an_answer_as_short_as_it_may_be_stops_where_it_then_would(engine):
    """Stop tokens are barred from the draw and no further; answers beside it are as if alone."""
    prompt, plain = kit.prompt(25), kit.greedy_answer(kit.prompt(25), 14)
    stops = tuple({plain[0], plain[4]})
    params = SamplingParams(max_tokens=14, min_tokens=6, stop_token_ids=stops, logprobs=2, ignore_eos=True)
    expected = list[int]()
    while len(expected) < 14 and not (len(expected) > 6 and expected[-1] in stops):
        logits = kit.full_pass([*prompt, *expected])[0][-1].copy()
        if len(expected) < 6:
            logits[list(stops)] = -np.inf
        expected.append(int(logits.argmax()))
    beside = SamplingParams(max_tokens=14, ignore_eos=True)
    done, other = engine.generate([prompt] * 2, [params, beside])
    assert done.token_ids == expected
    check_answer(done.logprobs, prompt, expected, params)  # The stop token has one too.
    assert other.token_ids == plain
    (at_once,) = engine.generate([prompt], [SamplingParams(max_tokens=14, stop_token_ids=stops, ignore_eos=True)])
    assert len(at_once.token_ids) == 1


def test_a_seeded_answer_is_the_same_alone_in_a_batch_and_over_reused_kv(engine):
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=21, ignore_eos=True)
    prompt = kit.prompt(40)
    (alone,) = engine.generate([prompt], params)
    crowd = [SamplingParams(max_tokens=5 * n, temperature=0.5 * n, seed=n, ignore_eos=True) for n in range(1, 8)]
    answers = engine.generate([kit.prompt(9)] * 5 + [prompt] + [kit.prompt(70)] * 2, [*crowd[:5], params, *crowd[5:]])
    assert answers[5].token_ids == alone.token_ids

    session = engine.session()
    kit.say(session, prompt[:30], 1)
    session.rewind(30)
    kit.say(session, prompt[30:], 16, sampling=params)
    assert session.usage.num_cached_tokens == 30
    assert session.token_ids[40:] == alone.token_ids


# How likely each token was.


ATOL = 2 * kit.ATOL  # A log-probability is a logit less another number of that accuracy.
GREEDY = SamplingParams(max_tokens=24, logprobs=3, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.3, top_k=40, seed=5, logprobs=0, ignore_eos=True)
PENALISED = SamplingParams(
    max_tokens=24, presence_penalty=1.0, repetition_penalty=1.3, logit_bias={0x41: 3.0}, logprobs=20, ignore_eos=True
)
SILENT = SamplingParams(max_tokens=24, ignore_eos=True)


def check_answer(
    found: list[TokenLogprob] | None, prompt: list[int], answer: list[int], params: SamplingParams
) -> None:
    """Holds what is said of an answer's tokens against a full pass."""
    assert [each.token_id for each in found] == answer
    logits = kit.full_pass(prompt + answer[:-1])[0][len(prompt) - 1 :]
    expected = scipy.special.log_softmax(logits.astype(np.float64), axis=-1)
    for each, row in zip(found, expected, strict=True):
        assert each.logprob == pytest.approx(row[each.token_id], abs=ATOL)
        assert len({token for token, _ in each.top}) == len(each.top) == params.logprobs
        np.testing.assert_allclose([p for _, p in each.top], row[[token for token, _ in each.top]], atol=ATOL, rtol=0)
        likeliest = np.sort(row)[::-1][: params.logprobs]
        np.testing.assert_allclose([p for _, p in each.top], likeliest, atol=ATOL, rtol=0)


def test_they_are_those_of_the_logits_with_the_likeliest_first():
    logits = np.random.default_rng(3).standard_normal((5, 300)).astype(np.float32) * np.array([[0.1, 1, 3, 9, 40]]).T
    logits[2, [7, 9]] = 30.0  # Equals: the lower id is first.
    drawn = np.array([0, 17, 9, 250, 299], np.int32)
    found = sampling.log_probabilities(jnp.asarray(logits, jnp.float32), drawn, 20)
    expected = scipy.special.log_softmax(logits.astype(np.float64), axis=-1)
    np.testing.assert_allclose(found.logprobs, expected[np.arange(5), drawn], rtol=1e-5, atol=1e-5)
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
    assert engine._runner._ahead is not None, "there must be a step on its way"
    other = engine.session().send_ids(second, sampling=dataclasses.replace(SAMPLED, max_tokens=6))
    kit.drain(one, other)
    for answer, prompt in ((one, first), (other, second)):
        check_answer(answer.job.token_logprobs, prompt, answer.job.output_ids, answer.job.params)


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
