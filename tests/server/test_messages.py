"""Anthropic's client against `/v1/messages`: whole, streamed, counted, with keys, and what is refused."""

from __future__ import annotations

import hashlib

import anthropic
import pytest

from ca_jax.server.tenants import Tenant, Tenants
from tests import server_kit as sk
from tests.server_kit import assistant, system, user


def client_of(server, key="none", **options):
    return anthropic.Anthropic(base_url=server.url, api_key=key, timeout=sk.DEADLINE_S, max_retries=0, **options)


@pytest.fixture(scope="module")
def claude(server):
    with client_of(server) as client:
        yield client


def asked(messages, **options):
    """Greedy, unless `options` say otherwise."""
    return {"model": sk.MODEL, "max_tokens": 8, "messages": messages, "extra_body": {"temperature": 0}, **options}


def test_a_conversation_goes_on_with_its_kv(said_by_engine, claude):
    history = [user("who are you")]
    first = claude.messages.create(**asked(history, system="Be brief."))
    assert (first.type, first.role, first.model, first.stop_reason) == ("message", "assistant", sk.MODEL, "max_tokens")
    [block] = first.content
    assert block.text == said_by_engine([system("Be brief."), *history])
    history += [assistant(block.text), user([{"type": "text", "text": "and "}, {"type": "text", "text": "I?"}])]
    cached = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    second = claude.messages.create(**asked(history, system=cached))
    told = [system("Be brief."), *history[:2], user("and I?")]
    assert second.content[0].text == said_by_engine(told)
    usage = second.usage
    num_first = first.usage.input_tokens + first.usage.output_tokens
    assert usage.cache_read_input_tokens == num_first - 1, "all but the last token of what was said"
    counted = claude.messages.count_tokens(model=sk.MODEL, messages=history, system="Be brief.")
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_stream_of_events(claude):
    whole = claude.messages.create(**asked([user("hello")]))
    with claude.messages.stream(**asked([user("hello")])) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with claude.messages.stream(**asked([user("hello")])) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text


def test_stop_sequences_are_told(claude):
    text = claude.messages.create(**asked([user("hello")])).content[0].text
    stopped = claude.messages.create(**asked([user("hello")], stop_sequences=["\u0000none", text[3:5]]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:5])
    assert stopped.content[0].text == text[: text.index(text[3:5])]


def test_a_stream_that_breaks_ends_with_what_broke_it(server, claude, monkeypatch):
    monkeypatch.setattr(server.engine._runner.sampler, "start", lambda *_: 1 / 0)
    with pytest.raises(anthropic.APIStatusError) as told, claude.messages.stream(**asked([user("hello")])) as stream:
        stream.until_done()
    assert told.value.body["error"]["type"] == "api_error"


BAD = {
    "another model": ({"model": "claude-opus"}, anthropic.NotFoundError, "not_found_error", "does not exist here"),
    "a tool": (
        {"tools": [{"name": "f", "input_schema": {}}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "tools",
    ),
    "an answer begun": (
        {"messages": [user("a"), assistant("b")]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "must end with the user's",
    ),
    "an image": (
        {"messages": [user([{"type": "image", "source": {}}])]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "messages.0.content.0: ",
    ),
    "over the window": (
        {"messages": [user("x" * 600)]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "context window of 512 tokens",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_have_the_shape_of_their_api(claude, name):
    changes, kind, type_, message = BAD[name]
    with pytest.raises(kind, match=message) as told:
        claude.messages.create(**asked([user("hello")], **changes) if "messages" not in changes else asked(**changes))
    body = told.value.body
    assert (body["type"], body["error"]["type"]) == ("error", type_)
    assert body["request_id"]


def test_keys_come_in_a_header_of_their_own():
    tenants = Tenants([(hashlib.sha256(b"sk-a").digest(), Tenant(name="a"))])
    with sk.running(tenants) as server:
        with client_of(server, "sk-a") as client:
            assert client.messages.create(**asked([user("hello")])).content[0].text
        with client_of(server, "sk-b") as client, pytest.raises(anthropic.AuthenticationError) as told:
            client.messages.create(**asked([user("hello")]))
        assert told.value.body["error"]["type"] == "authentication_error"
