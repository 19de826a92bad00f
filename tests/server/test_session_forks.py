"""Forks of conversations over HTTP: at a message, beside their source, over restarts, refused by name."""

from __future__ import annotations

import concurrent.futures

import openai
import pytest

from tests import server_kit as sk
from tests.server_kit import assistant, cached, chat, ssd_store, system, text_of, user


def fork(client, session_id, at):
    return client.post(f"/sessions/{session_id}/fork", body={"at": at}, cast_to=object)


def stands(shown):
    return {"session_id": shown["id"], "session_state": shown["session_state"]}


def converse(client, *texts, **options):
    history = []
    for text in texts:
        answer = chat(client, [*history, user(text)], **options)
        history += [user(text), assistant(text_of(answer))]
    return answer.session_id, history


def test_a_fork_goes_on_behind_the_messages_that_it_was_asked_for(said_by_engine, client):
    source, history = converse(client, "who are you today", "and who am i today")
    forked = fork(client, source, 2)
    assert (forked["messages"], forked["forked_from"]) == (history[:2], {"id": source, "at": 2})
    assert forked["id"] != source
    answer = chat(client, [user("why")], extra_body=stands(forked))
    assert answer.session_id == forked["id"]
    assert text_of(answer) == said_by_engine([*history[:2], user("why")])
    assert cached(answer) >= forked["num_tokens"] - 1
    shown = client.get(f"/sessions/{source}", cast_to=object)
    assert shown["messages"] == history
    assert "forked_from" not in shown
    listed = {each["id"]: each for each in client.get("/sessions", cast_to=object)["data"]}
    assert listed[forked["id"]]["forked_from"] == forked["forked_from"], "its turns leave it"
    whole = fork(client, source, 4)
    assert (whole["messages"], whole["session_state"]) == (history, shown["session_state"])
    twig = fork(client, forked["id"], 0)
    assert (twig["messages"], twig["num_tokens"]) == ([], 0)
    assert text_of(chat(client, [user("so")], extra_body=stands(twig))) == said_by_engine([user("so")])


def test_a_system_message_is_a_beginning_too(said_by_engine, client):
    said = [system("be kind"), user("who are you")]
    forked = fork(client, chat(client, said).session_id, 1)
    assert forked["messages"] == said[:1]
    answer = chat(client, [user("who am i")], extra_body=stands(forked))
    assert text_of(answer) == said_by_engine([system("be kind"), user("who am i")])
    assert client.get(f"/sessions/{forked['id']}", cast_to=object)["forked_from"] == forked["forked_from"]


def test_what_cannot_be_forked_is_refused_by_name(server, client):
    source, _ = converse(client, "are there others", "and are they many")
    for at, said in ((1, r"one of \[0, 2, 4\]; got 1"), (5, "got 5"), (-1, "at")):
        with pytest.raises(openai.BadRequestError, match=said) as told:
            fork(client, source, at)
        assert told.value.param == "at"
    with pytest.raises(openai.NotFoundError) as unknown:
        fork(client, "nobody", 0)
    assert unknown.value.code == "session_not_found"
    with concurrent.futures.ThreadPoolExecutor(2) as pool, sk.held(server.service.loop):
        answering = pool.submit(
            chat, client, [user("on")], extra_body={"session_id": source, **state_of(server, source)}
        )
        sk.wait_for(lambda: len(server.service.loop._commands) == 1)
        forking = pool.submit(fork, client, source, 2)
        sk.wait_for(lambda: len(server.service.loop._commands) == 2)
    assert text_of(answering.result())
    assert (forking.exception().status_code, forking.exception().code) == (409, "session_busy")


def state_of(server, session_id):
    return {"session_state": server.engine.opened(session_id).conversation.chain}


def test_a_fork_is_there_after_a_restart_with_its_kv(tmp_path, said_by_engine):
    store = ssd_store(tmp_path)
    with sk.running(store=store) as server, server.client() as client:
        source, history = converse(client, "tell me of the sea " * 3, "and of the tides")
        forked = [fork(client, source, at) for at in (2, 0)]
        server.engine.wait_for_saves()
    with sk.running(store=store) as server, server.client() as client:
        for before in forked:
            shown = client.get(f"/sessions/{before['id']}", cast_to=object)
            for name in ("messages", "session_state", "forked_from"):
                assert shown[name] == before[name]
        answer = chat(client, [user("why")], extra_body=stands(forked[0]))
        assert text_of(answer) == said_by_engine([*history[:2], user("why")])
        assert cached(answer) >= forked[0]["num_tokens"] - 1
        assert answer.usage.ca_jax["cached_tokens"].keys() == {"ssd"}


def test_a_session_that_was_begun_without_a_turn_is_there_after_a_restart(tmp_path):
    store = ssd_store(tmp_path)
    with sk.running(store=store) as server, server.client() as client:
        body = {"session_id": "begun", "system": "Be brief.", "ttl_s": 3600.0}
        before = client.post("/sessions", body=body, cast_to=object)
    with sk.running(store=store) as server, server.client() as client:
        shown = client.get("/sessions/begun", cast_to=object)
        assert shown["session_state"] == before["session_state"]
        answer = chat(client, [user("why")], extra_body={"session_id": "begun"})
    with sk.running() as server, server.client() as client:
        client.post("/sessions", body=body, cast_to=object)
        assert text_of(answer) == text_of(chat(client, [user("why")], extra_body={"session_id": "begun"}))
