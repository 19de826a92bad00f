"""Tools and calls that no request may have, by whichever API they come."""

from __future__ import annotations

import openai
import pytest

from ca_jax.server.message_routes import as_input
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server.test_tools import model_with
from tests.server_kit import user

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    with sk.running(make_engine=lambda: kit.small_engine(model_with())) as running:
        yield running


ASKED = {
    "/v1/responses": ({"input": "Go."}, lambda named: {"type": "function", "name": named}, "required"),
    "/v1/messages": ({"messages": [user("Go.")]}, lambda named: {"type": "tool", "name": named}, {"type": "any"}),
}


@pytest.mark.parametrize("path", ASKED)
def test_tools_that_do_not_go_together_are_refused_whatever_api_they_come_by(server, path):
    asked, choice, must = ASKED[path]
    look = {"name": "look", **({"type": "function"} if "input" in asked else {"input_schema": {"type": "object"}})}
    length = {"max_output_tokens" if "input" in asked else "max_tokens": 4}
    for wrong, told in (
        ({"tools": [look, look]}, "names of their own"),
        ({"tools": [look], "tool_choice": choice("add")}, "one of the tools"),
        ({"tool_choice": must}, "must come with tools"),
    ):
        with server.http() as http:
            answer = http.post(path, json={"model": sk.MODEL, **asked, **length, **wrong})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), wrong
        assert told in answer.json()["error"]["message"]


DEEP_CALL = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":' * 300 + "1" + "}" * 300}}]


@pytest.mark.parametrize("value", ["NaN", "1e999", r'"\ud83d"', r'{"\ud83d": 1}', "[" * 300 + "]" * 300])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": VALUE}}}]'),
        (CHAT, '"chat_template_kwargs": {"x": VALUE}'),
        ("/v1/responses", '"tools": [{"type": "function", "name": "f", "parameters": {"x": VALUE}}]'),
        ("/v1/messages", '"tools": [{"name": "f", "input_schema": {"x": VALUE}}]'),
        ("/v1/messages", '"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": '
         '[{"type": "tool_use", "id": "a", "name": "f", "input": {"x": VALUE}}]}, {"role": "user", "content": "b"}]'),
    ],
)  # fmt: skip
def test_values_that_no_answer_could_tell_are_refused(server, path, body, value):
    """They are kept with the conversation, and told again as JSON."""
    said = (
        '"input": "a", '
        if path == "/v1/responses"
        else '"max_tokens": 4, "messages": [{"role": "user", "content": "a"}], '
    )
    content = f'{{"model": "{sk.MODEL}", {said}{body.replace("VALUE", value)}}}'
    with server.http() as http:
        answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_arguments_of_calls_that_no_template_can_write_are_refused_or_left_as_they_are(client):
    history = [user("Look."), {"role": "assistant", "content": "", "tool_calls": DEEP_CALL}, user("So?")]
    with pytest.raises(openai.BadRequestError, match="arguments"):
        sk.chat(client, history, 4)
    half = {**DEEP_CALL[0], "function": {"name": "f", "arguments": r'{"at": "\ud83d"}'}}
    history[1] = {**history[1], "tool_calls": [half]}
    assert sk.chat(client, history, 4).usage.completion_tokens > 0, "a model may write half a character"


def test_arguments_of_a_call_are_an_object_or_stand_under_a_name():
    assert as_input('{"at": "sea"}') == {"at": "sea"}
    for arguments in ("", "[1]", '{"x": NaN}', '{"x": 1e999}', "[" * 5000):
        assert as_input(arguments) == {"arguments": arguments}
