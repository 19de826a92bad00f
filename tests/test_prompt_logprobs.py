"""How likely a prompt's tokens were: against transformers, whatever is stored of the prompt and how it is computed."""

from __future__ import annotations

import numpy as np
import pytest

from ca_jax.errors import InvalidRequestError
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit

ATOL = 1e-4


@pytest.fixture(scope="module")
def logprobs_of(tmp_path_factory):
    """Log-probabilities of all tokens behind each of a prompt's, f32 `[T, V]`, by transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("tiny")
    kit.write_tiny_model(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def run(token_ids):
        with torch.no_grad():
            logits = model(torch.tensor([token_ids])).logits[0]
        return torch.log_softmax(logits.float(), dim=-1).numpy()

    return run


@pytest.fixture(scope="module")
def engine():
    with kit.small_engine() as engine:
        yield engine


def asked(num_top=5, start=1, **options):
    return SamplingParams(**{"max_tokens": 2, **options}, prompt_logprobs=num_top, prompt_logprobs_from=start)


def assert_as(expected, token_ids, told, start=1, num_top=5):
    assert [each.token_id for each in told] == token_ids[start:]
    for place, each in enumerate(told, start - 1):
        of_all = expected[place]
        assert each.logprob == pytest.approx(of_all[each.token_id], abs=ATOL)
        likeliest = np.sort(of_all)[::-1][:num_top]
        np.testing.assert_allclose([logprob for _, logprob in each.top], likeliest, atol=ATOL)
        for token_id, logprob in each.top:
            assert logprob == pytest.approx(of_all[token_id], abs=ATOL)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 66, 130, 200])
def test_of_prompts_of_any_length(engine, logprobs_of, num_tokens):
    """Pieces of the head and passes of the prompt end in different places."""
    ids = kit.prompt(num_tokens, seed=1)
    [answer] = engine.generate([ids], asked())
    assert_as(logprobs_of(ids), ids, answer.prompt_logprobs)


def test_of_several_prompts_in_one_pass_beside_some_that_do_not_ask(engine, logprobs_of):
    prompts = [kit.prompt(num_tokens, seed=2) for num_tokens in (7, 20, 30, 90)]
    params = [asked(1), SamplingParams(max_tokens=3), asked(0), asked(20, logprobs=2)]
    answers = engine.generate(prompts, params)
    for ids, each, answer in zip(prompts, params, answers, strict=True):
        if each.prompt_logprobs is None:
            assert answer.prompt_logprobs is None
        else:
            assert_as(logprobs_of(ids), ids, answer.prompt_logprobs, num_top=each.prompt_logprobs)
    assert len(answers[3].logprobs) == 2, "those of the answer come beside"


def test_a_stored_prompt_is_computed_anew_from_where_it_is_asked_for(engine, logprobs_of):
    ids = kit.prompt(150, seed=3)
    engine.generate([ids], SamplingParams(max_tokens=1))
    engine.wait_for_saves()
    expected = logprobs_of(ids)
    [whole] = engine.generate([ids], asked())
    assert whole.usage.num_cached_tokens == 0
    assert_as(expected, ids, whole.prompt_logprobs)
    for start in (1, 2, 100, 149, 150, 400):
        [answer] = engine.generate([ids], asked(start=start))
        assert_as(expected, ids, answer.prompt_logprobs, start)
        assert start - 1 - kit.BLOCK_TOKENS < answer.usage.num_cached_tokens <= max(start - 1, 0) or start == 400
        assert answer.token_ids == whole.token_ids
    [plain] = engine.generate([ids], SamplingParams(max_tokens=1))
    assert plain.usage.num_cached_tokens == 149, "what was computed anew is stored for others as before"


def test_of_a_session_whose_turns_are_stored(tmp_path, logprobs_of):
    """The prompt is all of the conversation; stored KV of it, on SSD too, gives way to what is computed anew."""
    with kit.small_engine(store=kit.ssd_store(tmp_path)) as engine:
        session = engine.session()
        for seed in range(2):
            "".join(session.send_ids(kit.prompt(40, seed), max_tokens=4))
        engine.wait_for_saves()
        for start, seed in ((1, 3), (len(session.token_ids) + 20, 4)):
            held, new = list(session.token_ids), kit.prompt(20, seed)
            answer = session.send_ids(new, sampling=asked(start=start))
            "".join(answer)
            assert_as(logprobs_of([*held, *new]), [*held, *new], answer.job.prompt_logprobs, start)
        engine.wait_for_saves()
        "".join(session.send_ids(kit.prompt(5), max_tokens=1))
        assert session.usage.num_cached_tokens >= len(held)


def test_nothing_is_compiled_for_prompts_that_do_not_ask(engine):
    from ca_jax.device.prompt_logprobs import token_logprobs

    engine.generate([kit.prompt(70, seed=5)], asked(1))
    before = token_logprobs._cache_size()
    engine.generate([kit.prompt(70, seed=6)], SamplingParams(max_tokens=2, logprobs=3))
    engine.generate([kit.prompt(3, seed=6), kit.prompt(100, seed=7)], asked(1))
    assert token_logprobs._cache_size() == before, "one function serves prompts of all lengths"


def test_what_is_asked_must_be_in_range():
    for wrong in ({"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs_from": 0}):
        with pytest.raises(InvalidRequestError, match=r"prompt_logprobs.* must be"):
            SamplingParams(**wrong)
