"""Conversations over HTTP: gone on with by history and by name, begun, listed, shown, pinned, cut, restarted."""

from __future__ import annotations

import concurrent.futures

import openai
import pytest

from ca_jax.config import BlendConfig
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import assistant, chat, ssd_store, system, text_of, user


def stands(answer):
    return {"session_id": answer.session_id, "session_state": answer.session_state}


def test_a_conversation_goes_on_by_its_history_and_by_its_name(said_by_engine, server, client):
    history, answers = [], []
    for text in ("who are you", "and who am i"):
        history.append(user(text))
        answers.append(chat(client, history))
        assert text_of(answers[-1]) == said_by_engine(history)
        history.append(assistant(text_of(answers[-1])))
    assert answers[1].session_id == answers[0].session_id
    assert answers[1].usage.ca_jax["cached_tokens"] == {"dram": answers[0].usage.total_tokens - 1}
    *_, last = chat(client, [user("are we alone")], stream=True, extra_body=stands(answers[1]))
    shown = client.get(f"/sessions/{answers[1].session_id}", cast_to=object)
    assert shown["session_state"] == last.session_state != answers[1].session_state
    assert shown["title"] == "who are you"
    with concurrent.futures.ThreadPoolExecutor(2) as pool, sk.held(server.service.loop):
        asking = []
        for number in range(2):
            named = {"session_id": answers[1].session_id, "session_state": last.session_state}
            asking.append(pool.submit(chat, client, [user("on")], extra_body=named))
            sk.wait_for(lambda number=number: server.service.admission.answers.total() == number + 1)
    assert text_of(asking[0].result())
    with pytest.raises(openai.ConflictError, match="behind 8 messages") as moved:
        chat(client, [user("again")], extra_body=stands(answers[1]))
    for told, code in ((asking[1].exception(), "session_busy"), (moved.value, "session_moved")):
        retried = told.request.headers["x-stainless-retry-count"]
        assert (told.code, retried) == (code, "0"), "it does not ask again by itself"
    with pytest.raises(openai.BadRequestError, match="session_state must come with a session_id"):
        chat(client, [user("again")], extra_body={"session_state": last.session_state})
    with pytest.raises(openai.NotFoundError, match="'nobody'"):
        chat(client, [user("again")], extra_body={"session_id": "nobody"})


def test_a_history_longer_than_the_window_is_cut_or_an_error(client):
    history = [user("a first word")]
    for number in range(8):
        history += [assistant("x" * 30), user(f"turn {number} " + "tell me more of it " * 2)]
    answer = chat(client, history)
    listed = {each["id"]: each for each in client.get("/sessions", cast_to=object)["data"]}
    assert answer.usage.ca_jax["num_dropped"] == listed[answer.session_id]["num_dropped"] > 0
    with pytest.raises(openai.BadRequestError) as told:
        chat(client, history, extra_body={"truncation": "disabled"})
    assert told.value.code == "context_length_exceeded"
    filled = chat(client, [user("x" * 400)], 400, extra_body={"truncation": "disabled"})
    assert (filled.usage.total_tokens, filled.choices[0].finish_reason) == (kit.WINDOW, "length")


def test_sessions_are_begun_shown_pinned_cut_and_deleted(said_by_engine, server, client):
    begun = client.post("/sessions", body={"session_id": "mine", "system": "be kind"}, cast_to=object)
    assert begun["id"] == "mine"
    with pytest.raises(openai.BadRequestError, match="must be a name that is not taken, got 'mine'"):
        client.post("/sessions", body={"session_id": "mine"}, cast_to=object)
    answer = chat(client, [user("a word " * 10)], extra_body={"session_id": "mine"})
    assert text_of(answer) == said_by_engine([system("be kind"), user("a word " * 10)])
    server.engine.wait_for_saves()
    shown = client.get("/sessions/mine", cast_to=object)
    assert [message["role"] for message in shown["messages"]] == ["system", "user", "assistant"]
    assert (shown["stored"]["tier"], shown["stored"]["pinned"]) == ("dram", False)
    assert client.post("/sessions/mine", body={"pinned": True}, cast_to=object)["stored"]["pinned"]
    assert client.post("/sessions/mine", body={"ttl_s": 60, "pinned": False}, cast_to=object)["stored"]["ttl_s"] == 60
    cut = client.post("/sessions/mine/discard", body={"start": 4, "stop": 24}, cast_to=object)
    assert cut["num_tokens"] == shown["num_tokens"] - 20
    with pytest.raises(openai.BadRequestError):
        client.post("/sessions/mine/discard", body={"start": 4, "stop": 4000}, cast_to=object)
    assert chat(client, [user("more")], extra_body={"session_id": "mine"}).session_id == "mine"
    assert client.delete("/sessions/mine", cast_to=object)["deleted"]
    for path in ("/sessions/mine", "/sessions/other"):
        with pytest.raises(openai.NotFoundError):
            client.get(path, cast_to=object)
    with pytest.raises(openai.BadRequestError) as told:
        client.post("/sessions", body={"session_id": "a/b"}, cast_to=object)
    assert told.value.param == "session_id", "no path can say it"


def test_a_list_has_the_sessions_that_can_be_asked_for_by_name(server, client):
    client.post("/chunks", body={"chunks": ["the mill is by the river " * 2]}, cast_to=object)
    client.completions.create(model=sk.MODEL, prompt="once upon a time", max_tokens=4)
    client.post("/sessions", body={"session_id": "chunk 1"}, cast_to=object)
    server.engine.wait_for_saves()
    page = client.get("/sessions", cast_to=object, options={"params": {"limit": 100}})
    assert not page["has_more"]
    names = [each["id"] for each in page["data"]]
    assert "chunk 1" in names
    for name in names:
        assert client.get(f"/sessions/{name}", cast_to=object)["id"] == name
    for name in {info.session_id for info in server.engine.stored.list()} - set(names):
        with pytest.raises(openai.NotFoundError, match=f"there must be a session of that name, got '{name}'"):
            client.get(f"/sessions/{name}", cast_to=object)
        if name.startswith("chunk-"):
            with pytest.raises(openai.BadRequestError, match="must be a name that is not taken"):
                client.post("/sessions", body={"session_id": name}, cast_to=object)


def test_a_page_of_sessions_is_all_that_is_described(tmp_path):
    with sk.running(store=ssd_store(tmp_path), store_wrapper=sk.CountedStore) as server, server.http() as http:
        with server.client() as client:
            names = [chat(client, [user(f"listed {number}")], 2).session_id for number in range(5)]
        server.engine.wait_for_saves()
        calls, pages, after, has_more = server.engine._kv.store.calls, [], {}, True
        while has_more:
            calls.clear()
            page = http.get("/v1/sessions", params={"limit": 2, **after}).json()
            assert (calls["list", True], calls["of_name", True]) == (0, len(page["data"]))
            pages.append([each["id"] for each in page["data"]])
            assert (page["first_id"], page["last_id"]) == (pages[-1][0], pages[-1][-1])
            after, has_more = {"after": page["last_id"]}, page["has_more"]
        assert pages == [names[:2:-1], names[2:0:-1], names[:1]], "the latest first"
        assert http.get("/v1/sessions", params={"after": "nobody"}).status_code == 404
        for limit in (0, 101):
            assert http.get("/v1/sessions", params={"limit": limit}).json()["error"]["param"] == "limit"


@pytest.fixture
def blending():
    """Of a server that blends whatever rates were measured."""
    with sk.running(blend=BlendConfig(recompute_ratio=0.2)) as server, server.client() as client:
        yield client


def test_chunks_are_computed_once_and_blended(blending):
    client = blending
    chunks = ["the harbour is to the east of the old town " * 2, "the market is held on thursdays " * 2]
    assert client.post("/chunks", body={"chunks": chunks}, cast_to=object)["num_computed"] == 2
    assert client.post("/chunks", body={"chunks": chunks[:1]}, cast_to=object)["num_computed"] == 0
    answer = chat(client, [user("where is it?")], 12, extra_body={"context": chunks[::-1]})
    assert sk.cached(answer) > 50
    asked = {**user("where is it?"), "context": chunks[::-1]}
    history = [asked, assistant(text_of(answer)), user("and when?")]
    followed = chat(client, history, 12)
    assert followed.session_id == answer.session_id, "who says the context again goes on"
    assert followed.usage.prompt_tokens > answer.usage.total_tokens
    assert chat(client, [user("sure?")], extra_body=stands(followed)).session_id == answer.session_id
    for other in (user("where is it?"), {**asked, "context": chunks}):
        anew = chat(client, [other, *history[1:]], 12)
        assert anew.session_id != answer.session_id
        assert sk.cached(anew) <= sum(map(len, chunks)) + 20
    with pytest.raises(openai.BadRequestError, match="context must be given once"):
        chat(client, [asked], extra_body={"context": chunks})
    with pytest.raises(openai.BadRequestError, match="must be of a message to the assistant"):
        chat(client, [user("a"), {**assistant("b"), "context": chunks}, user("c")])


def test_conversations_outlive_the_server_and_looking_at_them_does_not_open_them(said_by_engine, tmp_path):
    few, said = {"max_open_sessions": 1}, [user(f"number {number}") for number in range(20)]
    with sk.running(store=ssd_store(tmp_path), server=few) as server, server.client(max_retries=0) as client:
        answers = [chat(client, [each], 4) for each in said[:-1]]
        assert chat(client, [user("on")], 4, extra_body={"session_id": answers[0].session_id}).session_id
        client.post("/chunks", body={"chunks": ["the mill is by the river " * 2], "tier": "ssd"}, cast_to=object)
        num_known = server.service.router.max_known
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # What runs when it is told to stop ends and is saved.
            answering = pool.submit(chat, client, said[-1:], 200)
            sk.wait_for(lambda: server.engine.num_jobs[0] == 1)
            server.state.stopping = True
            with pytest.raises(openai.InternalServerError, match="not ready: shutting down"):
                chat(client, [user("too late")])
            server.server.should_exit = True
            answers.append(answering.result())
        assert answers[-1].usage.completion_tokens == 200
    assert num_known < len(said)
    with sk.running(store=ssd_store(tmp_path), server=few) as server, server.client() as client:
        assert len(server.service.router._states) <= 2 * num_known, "each by its chain and its last exchange"
        listed = client.get("/sessions", cast_to=object, options={"params": {"limit": 100}})["data"]
        assert {each["id"] for each in listed} == {answer.session_id for answer in answers}, "chunks are no sessions"
        for answer in answers[:3]:
            path = f"/sessions/{answer.session_id}"
            assert client.get(path, cast_to=object)["messages"]
            assert client.post(path, body={"pinned": True}, cast_to=object)["stored"]["pinned"]
        assert not server.engine.sessions
        for number in (1, 19):  # By name both are found, by history the one that was used last.
            history = [said[number], assistant(text_of(answers[number])), user("and on")]
            found = chat(client, history, 4)
            assert (found.session_id == answers[number].session_id) == (number == 19)
            assert text_of(found) == said_by_engine(history, 4)
            assert sk.cached(found) > 0
        assert found.usage.ca_jax["cached_tokens"] == {"ssd": answers[-1].usage.total_tokens - 1}
        assert len(server.engine.sessions) == 1
        shown = client.get(f"/sessions/{answers[0].session_id}", cast_to=object)
        assert [each["content"] for each in shown["messages"][::2]] == ["number 0", "on"]
