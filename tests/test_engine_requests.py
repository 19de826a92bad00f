"""Bad input gets a specific error that says what was wanted and found, and nothing is lost by it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import ca_jax
from ca_jax.errors import (
    CaJaxError,
    ContextWindowError,
    EmptyMessageError,
    InvalidRequestError,
    SessionBusyError,
    SessionClosedError,
    UnknownModelError,
    UnsupportedArchitectureError,
)
from ca_jax.session import Session
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit


@pytest.fixture(scope="module")
def engine() -> Iterator[ca_jax.Engine]:
    with kit.small_engine() as engine:
        yield engine


@pytest.fixture
def bystander(engine) -> Iterator[Session]:
    """A conversation beside what goes wrong: afterwards it goes on from its stored KV, with the right tokens."""
    session = engine.session(system="You are a bystander.")
    kit.say(session, "Hello.")
    num_tokens = len(session.token_ids)
    yield session
    assert engine._scheduler.idle, "a job was left behind"
    answer = kit.say(session, "Go on.")
    assert session.usage.num_cached_tokens == num_tokens - 1
    assert answer == kit.greedy_answer(session.token_ids[: session.usage.prompt_tokens], 12)
    session.close()


def send_to_closed(engine: ca_jax.Engine) -> None:
    session = engine.session()
    kit.say(session, "Hello.")
    session.close()
    session.send("Are you there?")


def send_while_busy(engine: ca_jax.Engine) -> None:
    session = engine.session()
    answer = session.send("Hello.", max_tokens=20)
    next(answer)
    try:
        session.send("Quick!")
    finally:
        kit.drain(answer)


def rewind_while_busy(engine: ca_jax.Engine) -> None:
    session = engine.session()
    answer = session.send("Hello.", max_tokens=20)
    next(answer)
    try:
        session.rewind(0)
    finally:
        kit.drain(answer)


BAD_REQUESTS = {
    "message longer than the window": (
        lambda engine: engine.session().send("x" * 600),
        ContextWindowError,
        r"a prompt must be under the context window of 512 tokens, got 6\d\d",
    ),
    "prompt of just the window": (
        lambda engine: engine.generate(["fine", kit.prompt(kit.WINDOW)]),
        ContextWindowError,
        "a prompt must be under the context window of 512 tokens, got 512",
    ),
    "empty message": (lambda engine: engine.session().send(""), EmptyMessageError, "a message must have text"),
    "blank message": (lambda engine: engine.session().send(" \n"), EmptyMessageError, "got a blank one"),
    "no token ids": (lambda engine: engine.session().send_ids([]), EmptyMessageError, "at least one token"),
    "empty prompt": (lambda engine: engine.generate([""]), EmptyMessageError, "at least one token, got an empty one"),
    "no max_tokens": (
        lambda engine: engine.session().send("Hi.", max_tokens=0),
        InvalidRequestError,
        "max_tokens must be at least 1, got 0",
    ),
    "negative max_tokens": (
        lambda engine: engine.session().send_ids([65], max_tokens=-3),
        InvalidRequestError,
        "max_tokens must be at least 1, got -3",
    ),
    "id above the vocabulary": (
        lambda engine: engine.session().send_ids([65, 256]),
        InvalidRequestError,
        r"token ids must be in \[0, 256\), got 256",
    ),
    "negative id": (
        lambda engine: engine.generate([[-1]]),
        InvalidRequestError,
        "token ids must be in .0, 256., got -1",
    ),
    "bias of a token above the vocabulary": (
        lambda engine: engine.session().send("Hi.", sampling=SamplingParams(logit_bias={256: 1.0})),
        InvalidRequestError,
        r"logit_bias token ids must be in \[0, 256\), got 256",
    ),
    "negative token in a bias": (
        lambda engine: engine.generate(["Hi."], SamplingParams(logit_bias={-1: 1.0})),
        InvalidRequestError,
        r"logit_bias token ids must be in \[0, 256\), got -1",
    ),
    "params for other prompts": (
        lambda engine: engine.generate(["a", "b"], [SamplingParams()]),
        InvalidRequestError,
        "there must be one params for each of 2 prompts, got 1",
    ),
    "closed session": (send_to_closed, SessionClosedError, "session '.*' is closed"),
    "busy session": (send_while_busy, SessionBusyError, "still answers; it must have ended before the next turn"),
    "rewinding a busy session": (
        rewind_while_busy,
        SessionBusyError,
        "still answers; it must have ended before the next turn",
    ),
    "rewinding too far": (
        lambda engine: engine.session().rewind(1),
        InvalidRequestError,
        r"tokens to keep must be 0\.\.0 tokens, got 1",
    ),
    "system message twice": (
        lambda engine: engine.session(session_id=engine.sessions[0].session_id, system="Be rude."),
        InvalidRequestError,
        "has begun: a system message must come first",
    ),
}


@pytest.mark.parametrize(("request_", "error", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_refused_and_others_go_on(engine, bystander, request_, error, message):
    with pytest.raises(error, match=message) as caught:
        request_(engine)
    assert isinstance(caught.value, CaJaxError)


def test_a_refused_turn_leaves_its_own_session_as_it_was(engine):
    session = engine.session()
    kit.say(session, "Hello.")
    before = (list(session.token_ids), list(session.messages), session.usage)
    for message, max_tokens in (("x" * 600, 5), ("", 5), ("fine", 0)):
        with pytest.raises(CaJaxError):
            session.send(message, max_tokens=max_tokens)
    assert (session.token_ids, session.messages, session.usage) == before
    answer = kit.say(session, "Go on.")
    assert session.usage.num_cached_tokens == len(before[0]) - 1
    assert answer == kit.greedy_answer(session.token_ids[: session.usage.prompt_tokens], 12)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.0),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", -2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", 2.1),
        ("logit_bias", ((5, 100.5),)),
        ("logit_bias", ((4, 1.0), (5, -101))),
        ("logprobs", -1),
        ("logprobs", 21),
        ("seed", -1),
        ("seed", 2**32),
        ("stop", ("fine", "")),
    ],
)
def test_a_sampling_parameter_outside_its_range_is_named_with_what_was_found(field, value):
    with pytest.raises(InvalidRequestError, match=f"{field} must be .*, got "):
        SamplingParams(**{field: value})


def test_a_bias_may_come_as_a_mapping_and_is_hashable():
    params = SamplingParams(logit_bias={5: -100, 7: 0.5})
    assert params.logit_bias == ((5, -100), (7, 0.5))
    assert hash(params) == hash(SamplingParams(logit_bias=((5, -100), (7, 0.5))))


def test_one_stop_string_may_come_without_a_tuple():
    assert SamplingParams(stop="END").stop == ("END",)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float64"},
        {"context_window": 0},
        {"max_batch_size": 0},
        {"prefill_chunk_tokens": -64},
        {"prefill_chunk_tokens": 100},
        {"save_group_tokens": 0},
    ],
)
def test_an_engine_config_out_of_range_is_refused(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} .*got {next(iter(changes.values()))!r}"):
        ca_jax.EngineConfig(**changes)


def test_a_window_above_what_the_model_was_trained_for_is_refused():
    with pytest.raises(ValueError, match="context_window must be at most the model's 512 tokens, got 513"):
        kit.small_engine(context_window=513)


def test_a_store_above_the_machines_memory_is_refused():
    with pytest.raises(ValueError, match="DRAM capacity must be at most this machine's"):
        kit.small_engine(store=ca_jax.StoreConfig(dram_gib=1e6, block_tokens=kit.BLOCK_TOKENS))


def test_an_unknown_model_is_refused_with_the_presets_there_are():
    with pytest.raises(UnknownModelError, match=r"unknown model 'no-such-model'.*smollm2-135m-instruct"):
        ca_jax.Engine.from_pretrained("no-such-model", kit.SMALL)


def test_a_model_with_absolute_positions_is_refused_with_the_reason(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UnsupportedArchitectureError, match="'gpt2' is not served: it embeds absolute positions"):
        ca_jax.Engine.from_pretrained(str(tmp_path), kit.SMALL)


def test_text_for_a_model_without_tokenizer_is_refused_and_token_ids_are_served(tmp_path):
    config = kit.tiny_model().config
    kit.tiny.write_tiny_hf(tmp_path, config, kit.tiny.tiny_params(config), tokenizer=False)
    with ca_jax.Engine.from_pretrained(str(tmp_path), kit.SMALL) as engine:
        for call in (lambda: engine.generate(["text"]), lambda: engine.session().send("text")):
            with pytest.raises(InvalidRequestError, match="has no tokenizer; a prompt must be token ids, got text"):
                call()
        (done,) = engine.generate([[65, 66]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert (len(done.token_ids), done.text) == (3, "")


def test_a_model_gives_logits_of_token_ids_and_refuses_others():
    model = kit.tiny_model()
    ids = kit.prompt(9)
    assert model.logits(ids).shape == (9, 256)
    assert model.logits(ids)[-1].argmax() == kit.full_pass(ids)[0][-1].argmax()
    for wrong, message in (
        ([], "at least one token"),
        ([256], "got 256"),
        ([65] * 513, "must be at most 512 tokens"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            model.logits(wrong)
