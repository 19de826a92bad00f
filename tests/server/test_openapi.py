"""Answers and chunks against OpenAI's own description of its API, and fuzzed requests against the server's."""

from __future__ import annotations

import json

import jsonschema
import pytest

from tests import server_kit as sk
from tests.server_kit import assistant, user


@pytest.fixture(scope="module")
def schemas(recorded_data):
    return json.loads((recorded_data / "openai_schemas.json").read_text())["$defs"]


@pytest.fixture(scope="module")
def check(schemas):
    def against(name, body):
        jsonschema.validate(body, {"$ref": f"#/$defs/{name}", "$defs": schemas})

    return against


CHATS = {
    "plain": {},
    "several": {"n": 2, "temperature": 1},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "no likeliest": {"logprobs": True},
    "usage": {"stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("name", CHATS)
def test_chats_are_as_described(server, check, name):
    body = {"model": sk.MODEL, "messages": [user("a"), assistant("b"), user("c")], "max_tokens": 4, **CHATS[name]}
    with server.http() as http:
        if "stream_options" not in body:
            check("CreateChatCompletionResponse", http.post("/v1/chat/completions", json=body).json())
        streamed = http.post("/v1/chat/completions", json={**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *events, done = streamed.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    assert len(events) > 2
    for event in events:
        check("CreateChatCompletionStreamResponse", json.loads(event.removeprefix("data: ")))


@pytest.mark.parametrize("changes", [{}, {"logprobs": 2}, {"n": 2, "prompt": ["a", "b"]}], ids=str)
def test_completions_are_as_described(server, check, changes):
    body = {"model": sk.MODEL, "prompt": "once", "max_tokens": 4, **changes}
    with server.http() as http:
        check("CreateCompletionResponse", http.post("/v1/completions", json=body).json())
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *events, done = http.post("/v1/completions", json=body | options).text.strip().split("\n\n")
    assert done == "data: [DONE]"
    for event in (json.loads(each.removeprefix("data: ")) for each in events):
        if event["usage"] is None:  # The description has no stream: there it is null, and reasons come last.
            event.pop("usage")
        for choice in event["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check("CreateCompletionResponse", event)


def test_models_and_errors_are_as_described(server, check):
    with server.http() as http:
        check("ListModelsResponse", http.get("/v1/models").json())
        check("Model", http.get(f"/v1/models/{sk.MODEL}").json())
        for answer in (http.get("/v1/models/other"), http.get("/nowhere"), http.post("/v1/completions", json={})):
            assert answer.status_code >= 400
            check("ErrorResponse", answer.json())


def test_the_schemas_refuse_what_is_not_as_described(check):
    with pytest.raises(jsonschema.ValidationError):
        check("CreateChatCompletionResponse", {"id": "x", "object": "chat.completion", "choices": [{"index": 0}]})
