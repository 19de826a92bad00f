"""Agents' loops over Responses and Messages: tools are called, what they give is sent back, and KV is reused."""

from __future__ import annotations

import functools
import json

import anthropic
import pydantic
import pytest
from anthropic import types

from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server.test_responses import KINDS, cached
from tests.server.test_tools import ADD, LOOK, TEMPLATE, THINKS, expect_call, model_with
from tests.server_kit import assistant, user

FUNCTIONS = [{"type": "function", **each["function"]} for each in (LOOK, ADD)]
TOOLS = [{"name": each["name"], "input_schema": each["parameters"], "strict": True} for each in FUNCTIONS]


@pytest.fixture(scope="module")
def server():
    with sk.running(make_engine=lambda: kit.small_engine(model_with(THINKS))) as running:
        yield running


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=sk.DEADLINE_S, max_retries=0) as client:
        yield client


def respond(client, new, max_tokens=200, **options):
    asked = {"model": sk.MODEL, "temperature": 0, "max_output_tokens": max_tokens, "tools": FUNCTIONS, **options}
    return client.responses.create(input=new, **asked)


def must_call(**options):
    """A call in the model's notation, which the tests' model would not write by itself."""
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
    return {"extra_body": {"guided_grammar": f"start: {json.dumps(options.get('before', '') + call)}"}}


def test_a_loop_of_calls_goes_on_by_id_and_by_its_items(server, client, check):
    first = respond(client, "Go.", **must_call())
    check("Response", first.to_dict())
    [call] = first.output
    assert (call.type, call.status, first.status) == ("function_call", "completed", "completed")
    expect_call(call.name, json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "it is blue"}
    server.engine.wait_for_saves()
    second = respond(client, [result], 8, previous_response_id=first.id)
    check("Response", second.to_dict())
    assert cached(second) >= first.usage.total_tokens - 1
    whole = respond(client, [user("Go."), call.to_dict(), result], 8)
    assert whole.output_text == second.output_text
    assert cached(whole) >= first.usage.total_tokens - 1, "a client that sends all finds the same conversation"
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert [tool.name for tool in client.responses.retrieve(second.id).tools] == ["look", "add"]
    page = client.responses.input_items.list(second.id)
    check("ResponseItemList", page.to_dict())
    assert [item.type for item in page] == ["function_call_output", "function_call", "message"]
    others = respond(client, [result], 8, previous_response_id=first.id, tools=FUNCTIONS[:1])
    assert [tool.name for tool in others.tools] == ["look"], "other tools are another beginning"
    assert cached(others) < cached(second)


def test_a_forced_call_is_streamed(client, check):
    asked = {"tool_choice": {"type": "function", "name": "look"}, "parallel_tool_calls": False}
    events = list(respond(client, "Go.", stream=True, **asked))
    for event in events:
        check(KINDS[event.type], event.to_dict())
    final = events[-1].response
    if final.status == "completed":  # It may think for as long as it may say.
        call = final.output[-1]
        assert call.type == "function_call"
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == call.arguments
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done][: len(final.output)] == [item.id for item in final.output]


def test_thinking_text_and_calls_are_blocks_in_their_order(client, check):
    asked = must_call(before="<think>\nHm.\n</think>\n\nLet us see.\n")
    whole = respond(client, "Why?", **asked)
    check("Response", whole.to_dict())
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output[0].content[0].text == "Hm."
    assert whole.output_text == "Let us see."
    events = list(respond(client, "Why?", stream=True, **asked))
    for event in events:
        check(KINDS[event.type], event.to_dict())
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    final = [item.to_dict() for item in events[-1].response.output]
    assert [item["id"] for item in done] == [item["id"] for item in final]
    assert done == final
    items = [user("Why?"), *(item.to_dict() for item in whole.output)]
    result = {"type": "function_call_output", "call_id": whole.output[-1].call_id, "output": "it is blue"}
    assert cached(respond(client, [*items, result], 4)) >= whole.usage.total_tokens - 1


def test_tools_of_other_kinds_are_left_out_and_named(client):
    told = client.responses.with_raw_response.create(
        model=sk.MODEL, input="Hm.", max_output_tokens=2, tools=[{"type": "web_search"}, *FUNCTIONS]
    )
    assert told.headers["x-ca-jax-ignored-fields"] == "tools.0"
    assert [tool.name for tool in told.parse().tools] == ["look", "add"]


def test_an_answer_has_the_shape_that_is_asked_for(client):
    schema = {
        "type": "object",
        "properties": {"at": {"enum": ["sea"]}},
        "required": ["at"],
        "additionalProperties": False,
    }
    shape = {"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}}
    answer = respond(client, "Where?", tools=[], text=shape)
    assert answer.status == "incomplete" or json.loads(answer.output_text) == {"at": "sea"}


def test_a_loop_of_messages(server, client, claude):
    """What a chat has thought and called is gone on with by Anthropic's client, which sends arguments as objects."""
    asked = must_call(before="<think>\nHm.\n</think>\n\nLet us see.\n")
    begun = sk.chat(client, [user("Which?")], 200, tools=[LOOK, ADD], **asked)
    [call] = begun.choices[0].message.tool_calls
    server.engine.wait_for_saves()
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Let us see."},
        {"type": "tool_use", "id": call.id, "name": call.function.name, "input": json.loads(call.function.arguments)},
    ]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "it is blue"}]}
    history = [user("Which?"), {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    asked = {"model": sk.MODEL, "messages": history, "tools": TOOLS}
    answer = claude.messages.create(**asked, max_tokens=8, extra_body={"temperature": 0})
    assert answer.usage.cache_read_input_tokens >= begun.usage.total_tokens - 1, "it is the same conversation"
    assert claude.messages.count_tokens(**asked).input_tokens > 100


def test_a_call_in_messages_whole_and_streamed(claude):
    options = {"model": sk.MODEL, "max_tokens": 200, "tools": TOOLS}
    options |= {"messages": [user("Go.")], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    options["extra_body"] = {"temperature": 0}
    whole = claude.messages.create(**options)
    with claude.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    calls = [
        [(block.name, block.input) for block in each.content if block.type == "tool_use"] for each in (whole, streamed)
    ]
    assert calls[0] == calls[1] or whole.stop_reason == "max_tokens", "a call that is cut is streamed as far as it came"
    assert streamed.stop_reason == whole.stop_reason
    if whole.stop_reason == "tool_use":
        expect_call(whole.content[-1].name, whole.content[-1].input)


def test_variables_of_the_template_are_part_of_what_a_conversation_is():
    template = "{{ reasoning_effort|default('') }}{{ mood|default('') }}" + THINKS
    make_engine = functools.partial(kit.small_engine, model_with(template))
    with sk.running(make_engine=make_engine) as server, server.client() as client, server.http() as http:
        asked = {"model": sk.MODEL, "messages": [user("Hm.")]}
        more = {"reasoning_effort": "high", "chat_template_kwargs": {"mood": "<|im_end|>", "messages": [], "tools": 7}}
        plain, told = (
            http.post("/v1/chat/completions/render", json={**asked, **each}).json()["token_ids"] for each in ({}, more)
        )
        assert bytes(told[: len(told) - len(plain)]) == b"high<|im_end|>", "what a client says is text"
        assert told[len(told) - len(plain) :] == plain
        first = sk.chat(client, [user("Hm.")], extra_body=more)
        history = [user("Hm."), assistant(sk.text_of(first)), user("So?")]
        assert sk.chat(client, history, extra_body=more).session_id == first.session_id
        assert sk.chat(client, history).session_id != first.session_id
        begun = respond(client, "Hm.", 8, reasoning={"effort": "high"})
        same, other = (
            respond(client, "So?", 8, previous_response_id=begun.id, reasoning={"effort": each})
            for each in ("high", "low")
        )
        assert cached(same) >= begun.usage.total_tokens - 1 > cached(other)


CALLED = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "look"}}
ASKED = {"text": ({"max_tokens": 6}, TEMPLATE), "thinking": (CALLED, THINKS), "tool_use": (CALLED, TEMPLATE)}


@pytest.mark.parametrize("kind", ASKED)
def test_messages_are_as_anthropics_own_models_have_them(kind):
    changes, template = ASKED[kind]
    event_of = pydantic.TypeAdapter(types.RawMessageStreamEvent).validate_python
    asked = {"model": sk.MODEL, "max_tokens": 200, "messages": [user("Look.")], "temperature": 0, **changes}
    with sk.running(make_engine=lambda: kit.small_engine(model_with(template))) as server, server.http() as http:
        message = types.Message.model_validate(http.post("/v1/messages", json=asked).json())
        assert [block.type for block in message.content] == [kind]
        streamed = http.post("/v1/messages", json=asked | {"stream": True}).text.splitlines()
        told = [line.removeprefix("data: ") for line in streamed if line.startswith("data: ")]
        assert {event_of(json.loads(each)).type for each in told} == {
            *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
            *("message_delta", "message_stop"),
        }
        counted = http.post("/v1/messages/count_tokens", json={"model": sk.MODEL, "messages": [user("Look.")]})
        assert types.MessageTokensCount.model_validate(counted.json()).input_tokens
        refused = http.post("/v1/messages", json=asked | {"messages": []})
        assert refused.status_code == 400
        assert types.ErrorResponse.model_validate(refused.json()).error.type == "invalid_request_error"
