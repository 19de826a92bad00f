"""Two servers that share conversations: clients go on at either, by name or by their whole history."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from ca_jax.storage.config import StoreConfig
from ca_jax.storage.objects import parts
from ca_jax.storage.objects.store import ObjectsError
from ca_jax.turns import conversations
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


@pytest.mark.parametrize("begun", ["session", "conversation", "fork"])
def test_a_conversation_that_was_begun_is_there_at_the_other_server_at_once(servers, begun) -> None:
    one, other = servers
    if begun == "fork":
        one.http().post("/v1/sessions", json={"session_id": "trunk"})
        ask(one, [user(TEXTS[0])], session_id="trunk")
    for number in range(8):
        if begun == "conversation":
            name = one.http().post("/v1/conversations", json={"metadata": {"topic": "Faust"}}).json()["id"]
            assert other.http().get(f"/v1/conversations/{name}").json()["metadata"] == {"topic": "Faust"}
            continue
        path, body = ("/v1/sessions/trunk/fork", {"at": 2}) if begun == "fork" else ("/v1/sessions", {})
        created = one.http().post(path, json=body | ({} if begun == "fork" else {"session_id": f"trip {number}"}))
        assert created.status_code == 201, created.text
        shown = other.http().get(f"/v1/sessions/{created.json()['id']}")
        assert shown.status_code == 200, shown.text
        assert len(shown.json()["messages"]) == (2 if begun == "fork" else 0)
    if begun == "session":
        again = other.http().post("/v1/sessions", json={"session_id": "trip 0"})
        assert again.status_code == 400
        assert "not taken" in again.text
        assert text_of(ask(other, [user(TEXTS[0])], session_id="trip 0")) == serial(1)[0]


def test_two_servers_that_begin_a_name_at_once_have_one_conversation_of_it(servers) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for number in range(8):
            begin = functools.partial(httpx2.Client.post, url="/v1/sessions", json={"session_id": f"trip {number}"})
            statuses = [each.status_code for each in pool.map(begin, [server.http() for server in servers])]
            assert sorted(statuses) == [201, 400]


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
        "pin": ("/v1/sessions/trip", {"pinned": True, "ttl_s": 60.0}),
    }
    path, body = asked[change]
    answer = published(one, lambda: http.post(path, json=body))
    assert answer.status_code in (200, 201), answer.text
    assert [each["content"] for each in answer.json()["messages"] if each["role"] == "assistant"][-1] == said[-1]
    assert len(answer.json()["messages"]) == 4
    name, state = answer.json()["id"], answer.json()["session_state"]
    theirs = other.engine.elsewhere.theirs(name)
    assert (theirs.pinned, theirs.ttl_s) == ((True, 60.0) if change == "pin" else (False, None))
    seen = other.http().get(f"/v1/sessions/{name}").json()
    assert (seen["messages"], seen["session_state"]) == (answer.json()["messages"], state)
    third = ask(one, [user(TEXTS[2])], session_id=name, session_state=state)
    if change == "pin":
        assert third.usage.ca_jax["cached_tokens"] == {"objects": second.usage.total_tokens - 1}, "it stays named"
    if change != "discard":
        assert text_of(third) == serial(3)[2]


def published(server: Running, ask: Callable[[], Any]) -> Any:
    """What a request gives, once what it has changed is published."""
    before = server.engine.metrics.publishes
    answer = ask()
    wait_for(lambda: server.engine.metrics.publishes > before, 10.0)
    return answer


def respond(server: Running, text: str, **more: Any) -> Any:
    """A response, once it is published."""
    create = server.client(max_retries=0).responses.create
    asked = {"model": MODEL, "max_output_tokens": 12, "temperature": 0.0, **more}
    return published(server, lambda: create(input=text, **asked))


def test_a_response_is_found_gone_on_from_and_deleted_at_either_server(servers) -> None:
    one, other = servers
    first = respond(one, TEXTS[0])
    second = respond(other, TEXTS[1], previous_response_id=first.id)
    assert [first.output_text, second.output_text] == serial(2)
    for server in servers:
        shown = server.client().responses
        assert shown.retrieve(first.id).to_dict() == first.to_dict()
        assert shown.retrieve(second.id).to_dict() == second.to_dict()
        assert len(shown.input_items.list(second.id).data) == 3
    published(one, lambda: one.client().responses.delete(second.id))
    for server in servers:
        with pytest.raises(openai.NotFoundError):
            server.client(max_retries=0).responses.retrieve(second.id)
        assert server.client().responses.retrieve(first.id).to_dict() == first.to_dict()
    third = respond(other, TEXTS[1], previous_response_id=first.id)
    assert third.output_text == second.output_text


def test_a_conversation_is_shown_and_changed_at_either_server(servers) -> None:
    one, other = servers
    here, there = (server.client(max_retries=0).conversations for server in servers)
    item = {"type": "message", "role": "user", "content": TEXTS[0]}
    begun = published(one, lambda: here.create(items=[item], metadata={"trip": "1"}))
    assert there.retrieve(begun.id).metadata == {"trip": "1"}
    assert [each.content[0].text for each in there.items.list(begun.id)] == [TEXTS[0]]
    assert respond(other, TEXTS[1], conversation=begun.id).output_text
    said = there.items.list(begun.id, order="asc").data
    assert [each.to_dict() for each in here.items.list(begun.id, order="asc")] == [each.to_dict() for each in said]
    assert here.items.retrieve(said[-1].id, conversation_id=begun.id).to_dict() == said[-1].to_dict()
    published(one, lambda: here.update(begun.id, metadata={"trip": "2"}))
    assert there.retrieve(begun.id).metadata == {"trip": "2"}
    [added] = published(other, lambda: there.items.create(begun.id, items=[item])).data
    assert len(here.items.list(begun.id).data) == len(said) + 1
    published(one, lambda: here.items.delete(added.id, conversation_id=begun.id))
    assert len(there.items.list(begun.id).data) == len(said)
    here.delete(begun.id)
    wait_for(lambda: other.http().get(f"/v1/conversations/{begun.id}").status_code == 404, 10.0)


def test_what_a_newer_release_has_published_is_not_known_here(servers) -> None:
    one, other = servers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversations, "_FORMAT", 99)
        first = ask(one, [user(TEXTS[0])])
    history = [user(TEXTS[0]), assistant(text_of(first)), user(TEXTS[1])]
    assert [text_of(first), text_of(ask(other, history))] == serial(2)
    assert other.http().get(f"/v1/sessions/{first.session_id}").status_code == 404


def test_while_the_objects_do_not_answer_what_is_here_is_shown_and_nothing_is_called_unknown(servers) -> None:
    one, other = servers
    one.http().post("/v1/sessions", json={"session_id": "trip"})
    first = ask(one, [user(TEXTS[0])], session_id="trip")
    response = respond(one, TEXTS[0])

    def no_answer(*_: object, **__: object) -> None:
        raise ObjectsError("no answer")

    paths = ("/v1/sessions/trip", f"/v1/responses/{response.id}")
    with pytest.MonkeyPatch.context() as patch:
        for server in servers:
            patch.setattr(server.engine._kv.shared.objects, "read", no_answer)
        assert one.http().get(paths[0]).json()["session_state"] == first.session_state
        for path in paths:
            assert one.http().get(path).status_code == 200
            assert other.http().get(path).status_code == 503
        assert other.http().get("/v1/conversations/nobody").status_code == 503
    for path in paths:
        assert other.http().get(path).status_code == 200
    assert other.http().get("/v1/conversations/nobody").status_code == 404


def test_an_owner_that_was_restarted_shows_what_was_published_though_it_has_less_of_it(tmp_path) -> None:
    """It claimed the conversation for a client of another state, and was killed before it kept anything of it."""
    store = dataclasses.replace(kit.SMALL.store, objects_url=f"file://{tmp_path}/shared", objects_deadline_s=2.0)

    def of_its_own(directory: str) -> StoreConfig:
        return dataclasses.replace(kit.ssd_store(tmp_path / directory), objects_url=store.objects_url)

    with running(store=store) as one:
        with running(store=of_its_own("ssd")) as other:
            other.http().post("/v1/sessions", json={"session_id": "trip"})
            shutil.copytree(tmp_path / "ssd", tmp_path / "as it was")
            first = ask(one, [user(TEXTS[0])], session_id="trip")
            body = {"model": MODEL, "messages": [user(TEXTS[1])], "session_id": "trip", "session_state": "of another"}
            assert other.http().post("/v1/chat/completions", json=body).status_code == 409
        with running(store=of_its_own("as it was")) as other:
            shown = other.http().get("/v1/sessions/trip").json()
            assert [each["content"] for each in shown["messages"][1::2]] == [text_of(first)]
            assert other.http().post("/v1/sessions", json={"session_id": "trip"}).status_code == 400
            again = ask(other, [user(TEXTS[1])], session_id="trip", session_state=first.session_state)
            assert [text_of(first), text_of(again)] == serial(2)


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
