"""Two servers that share conversations: clients go on at either, by name or by their whole history."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ca_jax.storage.objects import parts
from ca_jax.storage.objects.store import ObjectsError
from tests import engine_kit as kit
from tests.server_kit import MODEL, Running, assistant, running, user, wait_for

TEXTS = ("Who wrote Faust, and how long did it take, from the first page to the last?", "And the second part?", "Why?")


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "RUN_BYTES", 2 * kit.BLOCK_TOKENS * kit.TOKEN_BYTES)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Running, Running]]:
    store = dataclasses.replace(kit.SMALL.store, objects_url=f"file://{tmp_path}/shared", objects_deadline_s=2.0)
    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(running(store=store)) for _ in range(2))


def ask(server: Running, messages: list[dict[str, str]], **more: Any) -> Any:
    """An answer, once it is published."""
    before = server.engine.metrics.publishes
    answer = server.client(max_retries=0).chat.completions.create(
        model=MODEL, messages=messages, extra_body=more, max_tokens=12, temperature=0.0
    )
    wait_for(lambda: server.engine.metrics.publishes > before, 10.0)
    return answer


def text_of(answer: Any) -> str:
    return answer.choices[0].message.content


def serial(num_turns: int) -> list[str]:
    """What one engine answers that shares nothing."""
    with kit.small_engine() as engine:
        session = engine.session()
        return ["".join(session.send(text, max_tokens=12)) for text in TEXTS[:num_turns]]


def test_a_client_goes_on_by_name_at_the_other_server(servers) -> None:
    one, other = servers
    created = one.http().post("/v1/sessions", json={"session_id": "trip"})
    assert created.status_code == 201
    answers, state = [], None
    for number, text in enumerate(TEXTS):
        more = {"session_id": "trip"} | ({} if state is None else {"session_state": state})
        answer = ask(servers[number % 2], [user(text)], **more)
        answers.append(text_of(answer))
        state = answer.session_state
        details = answer.usage.ca_jax["cached_tokens"] if number else {"objects": 1}
        assert list(details) == ["objects"]
    assert answers == serial(3)
    assert one.engine.metrics.takeovers + other.engine.metrics.takeovers == 2


def test_what_is_shown_of_a_conversation_is_what_its_owner_published(servers) -> None:
    one, other = servers
    one.http().post("/v1/sessions", json={"session_id": "trip"})
    first = ask(one, [user(TEXTS[0])], session_id="trip")
    second = ask(other, [user(TEXTS[1])], session_id="trip", session_state=first.session_state)
    shown = one.http().get("/v1/sessions/trip").json()
    assert [each["content"] for each in shown["messages"][1::2]] == [text_of(first), text_of(second)]
    assert shown["session_state"] == second.session_state
    assert one.engine.metrics.takeovers == 0, "it stays where it is"


@pytest.mark.parametrize("change", ["fork", "discard", "pin", "delete"])
def test_a_conversation_is_changed_at_a_server_that_has_an_older_state_of_it(servers, change) -> None:
    one, other = servers
    one.http().post("/v1/sessions", json={"session_id": "trip"})
    first = ask(one, [user(TEXTS[0])], session_id="trip")
    second = ask(other, [user(TEXTS[1])], session_id="trip", session_state=first.session_state)
    said, http = [text_of(first), text_of(second)], one.http()
    if change == "delete":
        assert http.delete("/v1/sessions/trip").status_code == 200
        for server in servers:
            wait_for(lambda server=server: server.http().get("/v1/sessions/trip").status_code == 404, 10.0)
        return
    asked = {
        "fork": ("/v1/sessions/trip/fork", {"at": 4}),
        "discard": ("/v1/sessions/trip/discard", {"start": 0, "stop": 8}),
        "pin": ("/v1/sessions/trip", {"pinned": False}),
    }
    path, body = asked[change]
    answer = http.post(path, json=body)
    assert answer.status_code in (200, 201), answer.text
    assert [each["content"] for each in answer.json()["messages"] if each["role"] == "assistant"][-1] == said[-1]
    assert len(answer.json()["messages"]) == 4
    if change == "fork":
        third = ask(one, [user(TEXTS[2])], session_id=answer.json()["id"])
        assert text_of(third) == serial(3)[2]


def test_a_client_that_knows_an_older_state_is_told(servers) -> None:
    one, other = servers
    one.http().post("/v1/sessions", json={"session_id": "trip"})
    first = ask(one, [user(TEXTS[0])], session_id="trip")
    ask(other, [user(TEXTS[1])], session_id="trip", session_state=first.session_state)
    with pytest.raises(openai.ConflictError, match="does not stand where session_state says"):
        ask(one, [user(TEXTS[2])], session_id="trip", session_state=first.session_state)


def test_a_client_that_sends_its_history_goes_on_at_the_other_server(servers) -> None:
    one, other = servers
    first = ask(one, [user(TEXTS[0])])
    history = [user(TEXTS[0]), assistant(text_of(first)), user(TEXTS[1])]
    second = ask(other, history)
    assert [text_of(first), text_of(second)] == serial(2)
    cached = second.usage.ca_jax["cached_tokens"]
    assert cached == {"objects": first.usage.total_tokens - 1}
    # The first server's is another branch of it, and goes on as it was.
    again = ask(one, history)
    assert text_of(again) == text_of(second)
    assert one.engine.metrics.refused_publishes == other.engine.metrics.refused_publishes == 0


def test_names_that_cannot_be_asked_for_are_not_unknown(servers) -> None:
    one, _ = servers
    one.http().post("/v1/sessions", json={"session_id": "trip"})
    first = ask(one, [user(TEXTS[0])], session_id="trip")
    with pytest.raises(openai.NotFoundError):
        ask(one, [user(TEXTS[0])], session_id="nobody")

    def no_answer(*_: object, **__: object) -> None:
        raise ObjectsError("no answer")

    client = one.client(max_retries=0)
    with pytest.MonkeyPatch.context() as patch:  # Over before the server closes, which would wait for an answer.
        patch.setattr(one.engine._kv.shared.objects, "read", no_answer)
        with pytest.raises(openai.InternalServerError, match="must answer in time") as caught:
            client.chat.completions.create(model=MODEL, messages=[user("x")], extra_body={"session_id": "nobody"})
    assert caught.value.status_code == 503
    goes_on = client.chat.completions.create(
        model=MODEL,
        messages=[user(TEXTS[1])],
        max_tokens=12,
        temperature=0.0,
        extra_body={"session_id": "trip", "session_state": first.session_state},
    )
    assert [text_of(first), text_of(goes_on)] == serial(2)


def test_a_conversation_that_is_deleted_is_gone_everywhere(servers) -> None:
    one, other = servers
    one.http().post("/v1/sessions", json={"session_id": "trip"})
    ask(one, [user(TEXTS[0])], session_id="trip")
    assert one.http().delete("/v1/sessions/trip").status_code == 200
    for _ in range(4):  # Each of the threads has come to what it was told before.
        one.engine._kv.shared._threads.submit(int).result()
    with pytest.raises(openai.NotFoundError):
        ask(other, [user(TEXTS[1])], session_id="trip")
