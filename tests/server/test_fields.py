"""Fields that are not OpenAI's chats': unknown ones, names in headers, times to live, tokens and echoes of prompts."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest

from ca_jax.server.config import ServerConfig
from ca_jax.testing import tiny
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import assistant, chat, text_of, user

PROMPT = "once upon a time there was a fox"


def test_unknown_fields_are_ignored_and_named(client):
    plain = chat(client, [user("hello")])
    told = client.chat.completions.with_raw_response.create(
        model=sk.MODEL,
        messages=[{**user("hello"), "mood": "good"}],
        temperature=0,
        max_tokens=8,
        extra_body={"temprature": 1, "reasoning": {"deep": {"er": 1}}, "a\r\nb: c": 1, "é" * 900: 2},
    )
    assert text_of(told.parse()) == text_of(plain)
    named = told.headers["x-ca-jax-ignored-fields"].split(", ")
    assert named[:2] == ["temprature", "reasoning"]
    assert named[-1] == "messages.0.mood"
    assert len(told.headers["x-ca-jax-ignored-fields"]) < 1000
    for body in ({"input": "x", "odd": 1}, {"prompt": "x", "odd": 1}):
        path = "/v1/responses" if "input" in body else "/v1/completions"
        with sk.http(str(client.base_url).removesuffix("/v1/")) as http:
            answer = http.post(path, json={"model": sk.MODEL, "stream": True, **body})
            assert answer.headers["x-ca-jax-ignored-fields"] == "odd"
    raw = client.chat.completions.with_raw_response.create(model=sk.MODEL, messages=[user("hello")], max_tokens=1)
    assert "x-ca-jax-ignored-fields" not in raw.headers


def test_strict_fields_refuse_them():
    assert not ServerConfig().strict_fields
    with sk.running(server={"strict_fields": True}) as server, server.client() as client:
        for changes, param in (
            ({"extra_body": {"temprature": 1}}, "temprature"),
            ({"messages": [{**user("x"), "mood": 1}]}, "messages.0.mood"),
        ):
            with pytest.raises(openai.BadRequestError) as told:
                chat(client, **({"messages": [user("hello")]} | changes))
            assert (told.value.param, told.value.code) == (param, "unknown_parameter")
        assert text_of(chat(client, [user("hello")]))


def test_top_k_of_minus_one_is_all(client):
    drawn = [
        text_of(chat(client, [user("hello")], temperature=1, seed=3, extra_body={"top_k": top_k})) for top_k in (-1, 0)
    ]
    assert drawn[0] == drawn[1]


def test_special_tokens_are_left_out_of_a_text_or_part_of_it(client):
    options = {"ignore_eos": True, "logit_bias": {str(tiny.IM_END_ID): 100}}
    texts = [
        text_of(chat(client, [user("hello")], max_tokens=3, extra_body={"skip_special_tokens": skips, **options}))
        for skips in (True, False)
    ]
    assert texts == ["", "<|im_end|>" * 3]


@pytest.mark.parametrize("header", ["x-session-id", "Session-Id", "X-Claude-Code-Session-Id"])
def test_a_header_names_a_conversation_that_begins(client, header):
    named = {"extra_headers": {header: f"of {header}"}}
    history = [user(f"hello by {header}")]
    first = chat(client, history, **named)
    assert first.session_id == f"of {header}"
    history += [assistant(text_of(first)), user("on")]
    assert chat(client, history, **named).session_id == f"of {header}", "it is found by its history"
    other = chat(client, [user("something else")], **named)
    assert other.session_id != f"of {header}", "a name is one conversation's"
    stands = {"session_id": other.session_id, "session_state": other.session_state}
    assert chat(client, [user("on")], extra_body=stands, **named).session_id == other.session_id
    assert chat(client, [user("a/b")], extra_headers={header: "a/b"}).session_id != "a/b"


def test_how_long_kv_is_kept_is_said_with_a_request(server, client):
    def ttl_of(session_id):
        server.engine.wait_for_saves()
        return client.get(f"/sessions/{session_id}", cast_to=object)["stored"]["ttl_s"]

    history = [user("keep this for a while")]
    first = chat(client, history, extra_body={"kv_retention_ttl_seconds": 90})
    assert ttl_of(first.session_id) == 90
    history += [assistant(text_of(first)), user("on")]
    second = chat(client, history)
    assert ttl_of(second.session_id) == 90
    assert second.session_id == first.session_id
    named = {"session_id": second.session_id, "session_state": second.session_state}
    chat(client, [user("by name")], extra_body={**named, "kv_retention_ttl_seconds": 5})
    assert ttl_of(first.session_id) == 5
    named["session_state"] = client.get(f"/sessions/{first.session_id}", cast_to=object)["session_state"]
    refused = {**named, "kv_retention_ttl_seconds": 9, "truncation": "disabled"}
    with pytest.raises(openai.BadRequestError, match="context window"):
        chat(client, [user("too long " * 99)], extra_body=refused)
    assert ttl_of(first.session_id) == 5, "a request that is refused changes nothing"


def test_when_the_next_turn_comes_is_said_with_a_request_and_between_turns(server, client):
    def expected_s(session_id):
        server.engine.wait_for_saves()
        stored = client.get(f"/sessions/{session_id}", cast_to=object)["stored"]
        return None if stored["expected_s"] is None else stored["expected_s"] - stored["last_used_s"]

    first = chat(client, [user("run the tests")], extra_body={"expected_resume_seconds": 400})
    assert 590 < expected_s(first.session_id) < 610, "it holds for half as long again"
    history = [user("run the tests"), assistant(text_of(first))]
    second = chat(client, [*history, user("and now?")])
    assert second.session_id == first.session_id
    assert expected_s(first.session_id) is None, "the turn has come"
    client.post(f"/sessions/{first.session_id}", body={"expected_resume_s": 40}, cast_to=object)
    assert 50 < expected_s(first.session_id) < 70
    with server.http() as http:
        said = {"model": sk.MODEL, "messages": [user("when?")], "expected_resume_seconds": -1}
        assert http.post("/v1/chat/completions", json=said).status_code == 400
        messages = {"model": sk.MODEL, "max_tokens": 4, "messages": [user("anthropic")], "expected_resume_seconds": 10}
        assert http.post("/v1/messages", json=messages).status_code == 200
        response = {"model": sk.MODEL, "input": "a tool runs now", "expected_resume_seconds": 200}
        answered = http.post("/v1/responses", json=response).json()
    sessions = client.get("/sessions", cast_to=object)["data"]
    server.engine.wait_for_saves()
    found = [client.get(f"/sessions/{each['id']}", cast_to=object) for each in sessions]
    said = {each["messages"][0]["content"]: each["stored"]["expected_s"] for each in found if each["stored"]}
    assert answered["status"] in ("completed", "incomplete")
    assert said["anthropic"] is not None
    assert said["a tool runs now"] - said["anthropic"] > 200
    known = {each.session_id for each in server.engine.stored.list()}
    client.completions.create(model=sk.MODEL, prompt=PROMPT, extra_body={"expected_resume_seconds": 100})
    sk.wait_until_idle(server)
    server.engine.wait_for_saves()
    [plain] = (each for each in server.engine.stored.list() if each.session_id not in known)
    assert plain.expected_s is not None, "another prompt may begin like it"


def test_text_to_tokens_and_back(server, client):
    with server.http() as http:
        told = http.post("/tokenize", json={"model": sk.MODEL, "prompt": "hé", "return_token_strs": True}).json()
        assert told["tokens"] == server.service.tokenizer.encode("hé")
        assert (told["count"], told["max_model_len"], len(told["token_strs"])) == (3, kit.WINDOW, 3)
        assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "hé"}
        messages = [user("hello")]
        rendered = http.post("/v1/chat/completions/render", json={"model": sk.MODEL, "messages": messages}).json()
        assert http.post("/tokenize", json={"messages": messages}).json()["tokens"] == rendered["token_ids"]
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "x", "messages": messages}),
            ("/detokenize", {"tokens": [10**6]}),
            ("/detokenize", {"tokens": []}),
            ("/tokenize", {"prompt": "x", "add_generation_prompt": False}),
        ):
            assert http.post(path, json=body).status_code == 400, body
        assert http.post("/tokenize", json={"model": "gpt-4o", "prompt": "x"}).status_code == 404
        refused = http.post("/v1/embeddings", json={"model": sk.MODEL, "input": "x"})
        assert refused.status_code == 400
        assert "/v1/embeddings is not served" in refused.json()["error"]["message"]
    assert client.models.retrieve(sk.MODEL).model_extra["max_model_len"] == kit.WINDOW


@pytest.fixture(scope="module")
def expected():
    """Log-probabilities behind each token of the prompt, by a pass of the model without engine."""
    logits, _ = kit.full_pass([ord(letter) for letter in PROMPT])
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def complete(client, prompt=PROMPT, **options):
    return client.completions.create(**{"model": sk.MODEL, "prompt": prompt, "temperature": 0, **options})


def test_a_prompt_is_echoed_with_its_log_probabilities(client, expected):
    """As evaluation harnesses ask for it."""
    ids = [ord(letter) for letter in PROMPT]
    for prompt in (PROMPT, ids, [ids]):
        for max_tokens in (0, 1):
            answer = complete(client, prompt, echo=True, logprobs=1, max_tokens=max_tokens)
            [choice] = answer.choices
            told = choice.logprobs
            assert choice.text[: len(PROMPT)] == "".join(told.tokens[: len(PROMPT)]) == PROMPT
            assert len(told.tokens) == len(choice.text) == len(PROMPT) + max_tokens == answer.usage.total_tokens
            assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
            assert told.text_offset == list(range(len(told.tokens)))
            assert choice.finish_reason == "length"
            for place, (logprob, top) in enumerate(zip(told.token_logprobs[1:], told.top_logprobs[1:], strict=True)):
                if place + 1 < len(ids):
                    assert logprob == pytest.approx(expected[place, ids[place + 1]], abs=1e-4)
                assert max(top.values()) == pytest.approx(expected[place].max(), abs=1e-4)
                assert logprob in top.values()
    both = complete(client, [PROMPT, "a fox"], echo=True, n=2, max_tokens=2, temperature=1, seed=1)
    assert [choice.text[:-2] for choice in both.choices] == [PROMPT] * 2 + ["a fox"] * 2
    assert both.choices[0].logprobs is None
    assert complete(client, max_tokens=0).choices[0].text == ""


def test_an_echo_is_streamed(client):
    whole = complete(client, echo=True, logprobs=2, max_tokens=4)
    pieces = [piece.choices[0] for piece in complete(client, echo=True, logprobs=2, max_tokens=4, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text
    told = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for each in told for value in getattr(each, name)] == getattr(whole.choices[0].logprobs, name)


def test_log_probabilities_of_a_prompts_end_leave_its_beginning_stored(server, client, expected):
    ids = [ord(letter) for letter in PROMPT]
    complete(client, max_tokens=1)
    server.engine.wait_for_saves()
    for start, num_cached in ((None, 0), (20, 16), (len(ids) + 5, None)):
        body = {"prompt_logprobs": 2} | ({} if start is None else {"prompt_logprobs_from": start})
        answer = complete(client, max_tokens=1, extra_body=body)
        if num_cached is not None:
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert num_cached <= cached <= max((start or 1) - 1, 0)
        told = answer.choices[0].model_extra["prompt_logprobs"]
        first = start or 1
        assert told[:first] == [None] * min(first, len(ids))
        for place, each in enumerate(told[first:], first):
            found = each[str(ids[place])]
            assert found["logprob"] == pytest.approx(expected[place - 1, ids[place]], abs=1e-4)
            assert found["decoded_token"] == PROMPT[place]
            assert {entry["rank"] for entry in each.values()} >= {1, 2}
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs must come without stream"):
        list(complete(client, stream=True, extra_body={"prompt_logprobs": 1}))
    assert json.dumps(told)
