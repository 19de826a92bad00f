"""OpenAI's own client against the server: what its chat guide does, whole and streamed, and what is refused.

Every answer and chunk that comes is held against OpenAI's own description of its API.
"""

from __future__ import annotations

import json

import openai
import pytest

from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import assistant, system, text_of, user


@pytest.fixture
def chat(client, check):
    """As `sk.chat`; a streamed answer is a list."""

    def ask(messages, *, stream=False, **options):
        answer = sk.chat(client, messages, stream=stream, **options)
        name = "CreateChatCompletionStreamResponse" if stream else "CreateChatCompletionResponse"
        answers = list(answer) if stream else [answer]
        for each in answers:
            check(name, each.to_dict())
        return answers if stream else answer

    return ask


@pytest.fixture
def complete(client, check):
    def ask(prompt, *, stream=False, **options):
        asked = {"model": sk.MODEL, "prompt": prompt, "temperature": 0, **options}
        answer = client.completions.create(**asked, stream=stream)
        answers = list(answer) if stream else [answer]
        for body in (each.to_dict() for each in answers):
            if stream:  # The description has no stream: there usage is null, and reasons come last.
                body |= {"usage": body.get("usage") or {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}
                body["choices"] = [
                    each | {"finish_reason": each["finish_reason"] or "stop"} for each in body["choices"]
                ]
            check("CreateCompletionResponse", body)
        return answers if stream else answer

    return ask


def test_the_one_model_and_errors_are_as_described(server, client, check):
    [model] = client.models.list().data
    assert model.id == client.models.retrieve(sk.MODEL).id == sk.MODEL
    with pytest.raises(openai.NotFoundError, match="'gpt-4o' does not exist here; it must be 'tiny'") as told:
        client.models.retrieve("gpt-4o")
    assert told.value.code == "model_not_found"
    with server.http() as http:
        check("ListModelsResponse", http.get("/v1/models").json())
        check("Model", http.get(f"/v1/models/{sk.MODEL}").json())
        for answer in (http.get("/v1/models/other"), http.get("/nowhere"), http.post("/v1/completions", json={})):
            assert answer.status_code >= 400
            check("ErrorResponse", answer.json())


@pytest.mark.parametrize(
    "messages",
    [
        [user("hello")],
        [system("be kind"), user("hello")],
        [{"role": "developer", "content": "be kind"}, user("hello")],
        [user("one"), assistant("two"), user([{"type": "text", "text": "thr"}, {"type": "text", "text": "ee"}])],
        [user("no answer between"), user("these two")],
        [{**user("hello"), "name": "eve"}, {**assistant("x"), "tool_calls": [], "refusal": None}, user("so?")],
    ],
    ids=["user", "system", "developer", "parts", "two users", "fields that say nothing"],
)
def test_a_chat_is_answered_as_the_engine_does(said_by_engine, chat, messages):
    def plain(message):
        text = message["content"]
        role = "system" if message["role"] == "developer" else message["role"]
        return {"role": role, "content": text if isinstance(text, str) else "".join(part["text"] for part in text)}

    answer = chat(messages)
    assert text_of(answer) == said_by_engine([plain(message) for message in messages])
    [choice], usage = answer.choices, answer.usage
    assert (answer.object, answer.model, choice.finish_reason) == ("chat.completion", sk.MODEL, "length")
    assert (choice.message.role, choice.logprobs) == ("assistant", None)
    assert (usage.completion_tokens, usage.total_tokens) == (8, usage.prompt_tokens + 8)
    *pieces, last = chat(messages, stream=True, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text_of(answer)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(piece.usage is None for piece in pieces)
    assert (last.choices, last.usage.total_tokens) == ([], usage.total_tokens)
    assert len({piece.id for piece in pieces}) == len({piece.created for piece in pieces}) == 1


def test_each_chunk_counts_where_that_is_asked_for(chat):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = chat([user("hello")], n=2, stream=True, stream_options=options)
    for index in range(2):
        said = [piece.usage for piece in pieces if piece.choices[0].index == index]
        counts = [usage.completion_tokens for usage in said]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, 8)
        assert {usage.prompt_tokens for usage in said} == {last.usage.prompt_tokens}
        assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in said)
    assert last.usage.completion_tokens == 16
    alone = chat([user("hello")], stream=True, stream_options={"continuous_usage_stats": True})
    assert all(piece.usage is None for piece in alone), "as vLLM: usage comes first"


@pytest.mark.parametrize("name", ["guidellm", "aiperf"])
def test_a_load_generators_conversation_is_found_by_what_was_said(server, name):
    """As guidellm 0.8 and aiperf 0.13 write it: all of it with every turn, and what was streamed concatenated."""
    messages, length, is_guidellm = [], 0, name == "guidellm"
    body = {"model": sk.MODEL, "stream": True, "max_completion_tokens": 12, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True, **({"continuous_usage_stats": True} if is_guidellm else {})}}
    body |= {} if is_guidellm else {"min_tokens": 12}
    with server.http() as http:
        for turn in range(3):
            text = f"{name} says {turn} " + "and goes on " * 4
            messages.append(user([{"type": "text", "text": text}] if is_guidellm else text))
            answer = http.post("/v1/chat/completions", json={**body, "messages": messages})
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            assert lines.pop() == "[DONE]"
            *pieces, last = [json.loads(line) for line in lines]
            messages.append(assistant("".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)))
            usage = last["usage"]
            assert usage["completion_tokens"] == 12, "no stop token ends it"
            assert usage["prompt_tokens_details"]["cached_tokens"] >= max(length - 1, 0), "all but the last one's KV"
            length = usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_clients_helpers(said_by_engine, client):
    """Event streams, raw and streamed responses, request ids, options of one request."""
    asked = {"model": sk.MODEL, "messages": [user("hello")], "max_tokens": 8, "temperature": 0}
    expected = said_by_engine([user("hello")])
    with client.chat.completions.stream(**asked, stop=expected[5:]) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    told = "".join(event.delta for event in events if event.type == "content.delta")
    assert told == text_of(final) == expected[: expected.index(expected[5:])]
    raw = client.chat.completions.with_raw_response.create(**asked)
    assert text_of(raw.parse()) == expected
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    with client.chat.completions.with_streaming_response.create(**asked) as response:
        assert json.loads("".join(response.iter_lines()))["choices"][0]["message"]["content"] == expected
    named = client.chat.completions.create(**asked, extra_headers={"X-Request-ID": "mine-1"})
    odd = client.chat.completions.create(**asked, extra_headers={"X-Request-ID": "no id\tat all"})
    assert named._request_id == "mine-1"
    assert odd._request_id not in ("mine-1", "no id\tat all", raw.parse()._request_id)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.001).chat.completions.create(**{**asked, "max_tokens": 400})
    modern = {"max_completion_tokens": 8, "top_p": 1, "user": "eve", "response_format": {"type": "text"}}
    assert text_of(client.chat.completions.create(**{**asked, "max_tokens": openai.omit, **modern})) == expected


def test_several_choices_are_drawn_apart_and_any_is_gone_on_with(said_by_engine, chat):
    asked = [user("tell me")]
    options = {"n": 3, "temperature": 1.5, "seed": 7, "extra_body": {"top_k": 8}}
    answers = chat(asked, **options)
    texts = [choice.message.content for choice in answers.choices]
    streamed = ["", "", ""]
    for piece in chat(asked, stream=True, **options):
        streamed[piece.choices[0].index] += piece.choices[0].delta.content or ""
    assert streamed == texts, "a seed draws the same again"
    assert len(set(texts)) == 3
    assert [choice.index for choice in answers.choices] == [0, 1, 2]
    assert answers.usage.completion_tokens == 24
    for text in texts:
        followed = [*asked, assistant(text), user("and then?")]
        answer = chat(followed)
        assert text_of(answer) == said_by_engine(followed)
        assert sk.cached(answer) > 20, "its KV was there"


def test_stop_ends_an_answer_that_is_long_enough_and_is_not_part_of_it(chat):
    whole = text_of(chat([user("hello")], max_tokens=12))
    early, later, stop = whole[0], whole[6], whole[5:7]
    answer = chat([user("hello")], max_tokens=12, stop=[stop])
    assert (text_of(answer), answer.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")
    held = chat([user("hello")], max_tokens=12, extra_body={"stop_token_ids": [ord(early)], "min_tokens": 5})
    assert early not in text_of(held)[:5]
    assert held.usage.completion_tokens >= 5
    text = text_of(chat([user("hello")], max_tokens=12, stop=[later], extra_body={"min_tokens": 6}))
    assert text == whole[:6], "stop strings are looked for behind that"


def test_logprobs_are_of_the_tokens_that_were_drawn(chat):
    answer = chat([user("hello")], logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == text_of(answer)
    for token in content:
        assert bytes(token.bytes).decode() == token.token
        likeliest, *others = token.top_logprobs
        assert (likeliest.token, likeliest.logprob) == (token.token, token.logprob), "it was drawn greedily"
        assert likeliest.logprob >= others[0].logprob >= others[1].logprob
    pieces = chat([user("hello")], logprobs=True, top_logprobs=3, stream=True)
    streamed = [token for piece in pieces if piece.choices[0].logprobs for token in piece.choices[0].logprobs.content]
    assert streamed == content


def test_penalties_and_biases_reach_the_draw(chat):
    plain = text_of(chat([user("hello")], max_tokens=30))
    assert text_of(chat([user("hello")], logit_bias={str(ord(plain[0])): -100}))[0] != plain[0]
    assert set(text_of(chat([user("hello")], logit_bias={"65": 100}))) == {"A"}
    penalised = text_of(chat([user("hello")], max_tokens=30, frequency_penalty=2, presence_penalty=2))
    assert len(set(penalised)) > len(set(plain))


def test_plain_completions(complete, server):
    with kit.small_engine(store=kit.STORE_OFF) as engine:
        [one, two] = (each.text for each in engine.generate(["once upon", "a time"], SamplingParams(max_tokens=16)))
    assert complete("once upon").choices[0].text == one
    both = complete(["once upon", "a time"])
    assert [choice.text for choice in both.choices] == [one, two]
    assert both.usage.completion_tokens == 32
    ids = [ord(letter) for letter in "once upon"]
    assert complete(ids).choices[0].text == complete([ids, ids]).choices[1].text == one
    *pieces, last = complete("once upon", stream=True, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].text for piece in pieces) == one
    assert last.usage.completion_tokens == 16
    told = complete("once upon", logprobs=2, max_tokens=3, n=2).choices[1].logprobs
    assert "".join(told.tokens) == one[:3]
    assert told.text_offset == [0, 1, 2]
    assert [max(top, key=top.get) for top in told.top_logprobs] == told.tokens
    longer = complete("once upon a time there was a conversation " * 4)
    server.engine.wait_for_saves()
    again = complete("once upon a time there was a conversation " * 4 + "that went on")
    assert longer.usage.prompt_tokens_details.cached_tokens < 16
    assert again.usage.prompt_tokens_details.cached_tokens > 100, "what others began with is found"


def test_what_routers_add_is_taken(client):
    """vllm-router 0.1.17 writes these defaults of vLLM and SGLang into each body that it sends on."""
    both = {"no_stop_trim": False, "skip_special_tokens": True, "return_hidden_states": False}
    reasoning = {"separate_reasoning": True, "stream_reasoning": True, "include_reasoning": True}
    added = both | reasoning | {"continue_final_message": False}
    plain, routed = (sk.chat(client, [user("hello")], extra_body=each) for each in ({}, added))
    assert routed.choices[0].message.content == plain.choices[0].message.content
    assert client.completions.create(model=sk.MODEL, prompt="once", max_tokens=2, extra_body=both | {"echo": False})


def schema_of(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


BAD = {
    "no messages": ({"messages": []}, "messages", "invalid_value"),
    "an unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "invalid_value"),
    "a tool's message": (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": 1}]},
        "messages.0.tool_call_id",
        "invalid_value",
    ),
    "a blank message": ({"messages": [user("  \n")]}, None, "empty_message"),
    "an image": (
        {"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]},
        "messages.0.content.0.type",
        "invalid_value",
    ),
    "over the window": ({"messages": [user("x" * 600)]}, None, "context_length_exceeded"),
    "a tool": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
    "a format of nobody's": ({"response_format": {"type": "yaml"}}, "response_format", "invalid_value"),
    "no schema": (schema_of({"type": "nothing"}), None, "invalid_value"),
    "a schema of itself": (schema_of({"$ref": "#"}), None, "invalid_value"),
    "two formats": (
        {"response_format": {"type": "json_object"}, "extra_body": {"guided_regex": "a"}},
        "guided_regex",
        "invalid_value",
    ),
    "an expression": ({"extra_body": {"guided_regex": "("}}, None, "invalid_value"),
    "no choice": ({"extra_body": {"guided_choice": [""]}}, None, "invalid_value"),
    "a choice of no tool": ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    "a temperature": ({"temperature": 3}, "temperature", "invalid_value"),
    "too many choices": ({"n": 17}, "n", "invalid_value"),
    "logprobs not asked for": ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    "usage of no stream": ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    "a shortest answer over the longest": ({"extra_body": {"min_tokens": 9}}, None, "invalid_value"),
    "a bias of no token": ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    "a bias outside": ({"logit_bias": {"99999": 1}}, None, "invalid_value"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_says_what_is_bad(client, name):
    changes, param, code = BAD[name]
    for stream in (False, True):
        if stream and "stream_options" in changes:
            continue
        with pytest.raises(openai.BadRequestError) as told:
            sk.chat(client, **({"messages": [user("hello")]} | changes), stream=stream)
        assert (told.value.param, told.value.code, told.value.type) == (param, code, "invalid_request_error")
        assert "Traceback" not in told.value.message


def test_prompts_are_rendered_as_they_are_served(server, client):
    """By the routes that vllm-router and llm-d ask for the token ids of a request."""
    messages = [user("What happened?"), sk.assistant("Much."), user("And then?")]
    with server.http() as http:
        asked = {"model": sk.MODEL, "messages": messages}
        told = http.post("/v1/chat/completions/render", json=asked).json()["token_ids"]
        answer = sk.chat(client, messages)
        assert len(told) == answer.usage.prompt_tokens
        session = server.engine.find_session(answer.session_id)
        assert session.token_ids[: len(told)] == told
        asked = {"model": sk.MODEL, "prompt": [[1, 2, 3], [4, 5]]}
        rendered = http.post("/v1/completions/render", json=asked).json()
        assert [each["token_ids"] for each in rendered] == asked["prompt"]
        named = {"model": sk.MODEL, "messages": messages, "session_id": answer.session_id}
        assert http.post("/v1/chat/completions/render", json=named).status_code == 400
        assert http.post("/v1/chat/completions/render", json={**named, "messages": []}).status_code == 400
