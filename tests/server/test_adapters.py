"""Adapters over HTTP: requests that name one, loading and unloading, and whose keys may."""

from __future__ import annotations

import openai
import pytest

from ca_jax.server.tenants import Tenants
from tests import adapters_kit as ak
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import assistant, chat, text_of, user

LORAS = {"tiny": None, "tiny:a": ak.FIRST, "tiny:b": ak.SECOND}
ROOM = {"max_adapters": 3, "max_adapter_rank": 6}


def make_engine(**changes):
    return kit.small_engine(ak.model_of(None), **changes)


@pytest.fixture(scope="module")
def server():
    with sk.running(make_engine=make_engine, **ROOM) as running:
        for name in "ab":
            load(running, name, LORAS[f"tiny:{name}"]).raise_for_status()
        yield running


def load(server, name, lora, key=None):
    body = {"lora_name": name, "lora_path": str(ak.written(lora))}
    return post(server, "load_lora_adapter", body, key)


def post(server, route, body, key=None):
    with server.http(key) as http:
        return http.post(f"/v1/{route}", json=body)


def said_by(lora, *messages):
    """What the merged model answers, as text."""
    with kit.small_engine(ak.model_of(lora)) as engine:
        session = engine.session()
        return ["".join(session.send(message, max_tokens=8)) for message in messages]


def test_models_lists_adapters_with_their_parent(server):
    listed = {each.id: each.model_extra.get("parent") for each in server.client().models.list()}
    assert listed == {"tiny": None, "tiny:a": "tiny", "tiny:b": "tiny"}
    assert server.client().models.retrieve("tiny:b").model_extra["parent"] == "tiny"


@pytest.mark.parametrize("model", LORAS)
def test_a_model_names_its_adapter_in_chats_and_completions(server, model):
    """By history: the same text under each, which goes on with nobody else's conversation."""
    client, messages = server.client(), [user("Hello there.")]
    expected = said_by(LORAS[model], "Hello there.", "Go on.")
    for turn, text in enumerate(expected):
        found = chat(client, messages, model=model, max_tokens=8, temperature=0)
        assert (found.model, text_of(found)) == (model, text)
        if turn:
            assert found.usage.prompt_tokens_details.cached_tokens > 0
        messages += [assistant(text), user("Go on.")]
    prompt = kit.prompt(20)
    [choice] = client.completions.create(model=model, prompt=prompt, max_tokens=6, temperature=0).choices
    assert choice.text == bytes(kit.greedy_answer(prompt, 6, ak.model_of(LORAS[model]))).decode()


def test_a_named_conversation_is_held_with_its_adapter_alone(server):
    client = server.client()
    with server.http() as http:
        http.post("/v1/sessions", json={"session_id": "held", "model": "tiny:a"}).raise_for_status()
    found = chat(
        client, [user("Hello.")], model="tiny:a", max_tokens=4, temperature=0, extra_body={"session_id": "held"}
    )
    assert found.model_extra["session_id"] == "held"
    for model in ("tiny", "tiny:b"):
        with pytest.raises(openai.BadRequestError, match="model must name the adapter that session 'held' has, a; got"):
            chat(client, [user("Go on.")], model=model, max_tokens=4, extra_body={"session_id": "held"})


def test_an_unknown_adapter_is_named_with_those_that_there_are(server):
    for model in ("tiny:c", "tiny:", "a", "other"):
        with pytest.raises(openai.NotFoundError, match=r"it must be 'tiny' or 'tiny:a' or 'tiny:b'"):
            chat(server.client(), [user("Hello.")], model=model)
        with server.http() as http:
            assert http.post("/v1/sessions", json={"model": model}).status_code == 404
            assert http.get(f"/v1/models/{model}").status_code == 404


def test_what_cannot_be_loaded_says_why(server, tmp_path):
    for path, message in ((tmp_path / "nowhere", "cannot be read"), (ak.write(tmp_path, ak.FIRST, r=5), r"(5, 64)")):
        found = post(server, "load_lora_adapter", {"lora_name": "c", "lora_path": str(path)})
        assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_adapter")
        assert message in found.json()["error"]["message"]
    found = load(server, "a", ak.FIRST)
    assert found.status_code == 400
    assert "not taken, got 'a'" in found.json()["error"]["message"]
    assert post(server, "load_lora_adapter", {"lora_name": "a b", "lora_path": "/"}).status_code == 400
    found = post(server, "unload_lora_adapter", {"lora_name": "c"})
    assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")


def test_an_adapter_is_unloaded_once_no_answer_uses_it_and_its_conversations_go_on_when_it_is_back(tmp_path):
    with sk.running(make_engine=make_engine, store=kit.ssd_store(tmp_path), **ROOM) as server:
        assert load(server, "a", ak.FIRST).json()["id"] == "tiny:a"
        client = server.client()
        options = {"model": "tiny:a", "temperature": 0, "extra_body": {"session_id": "one"}}
        with server.http() as http:
            http.post("/v1/sessions", json={"session_id": "one", "model": "tiny:a"}).raise_for_status()
        first = text_of(chat(client, [user("Hello there.")], max_tokens=8, **options))
        stream = chat(client, [user("Count.")], stream=True, max_tokens=300, model="tiny:a")
        next(iter(stream))
        found = post(server, "unload_lora_adapter", {"lora_name": "a"})
        assert (found.status_code, found.json()["error"]["code"]) == (409, "adapter_in_use")
        stream.close()
        sk.wait_for(lambda: not any(server.engine.num_jobs))
        assert post(server, "unload_lora_adapter", {"lora_name": "a"}).json()["deleted"]
        with pytest.raises(openai.NotFoundError, match="must be 'tiny'"):
            chat(client, [user("Go on.")], **options)
        with server.http() as http:
            found = http.post("/v1/sessions/one/discard", json={"start": 0, "stop": 1})
            assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")
        load(server, "a", ak.FIRST).raise_for_status()
        again = text_of(chat(client, [user("Go on.")], max_tokens=8, **options))
        assert [first, again] == said_by(ak.FIRST, "Hello there.", "Go on.")
        post(server, "unload_lora_adapter", {"lora_name": "a"}).raise_for_status()
        with server.http() as http:
            assert http.delete("/v1/sessions/one").status_code == 200
            assert http.get("/v1/sessions/one").status_code == 404


def test_keys_load_adapters_where_their_tenant_may(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text('[admin]\nkeys = ["sk-of-admin"]\nadapters = true\n[lab]\nkeys = ["sk-of-the-lab"]\n')
    with sk.running(Tenants.read(path), make_engine=make_engine, **ROOM) as server:
        assert load(server, "a", ak.FIRST).status_code == 401
        found = load(server, "a", ak.FIRST, "sk-of-the-lab")
        assert (found.status_code, found.json()["error"]["code"]) == (403, "not_allowed")
        load(server, "a", ak.FIRST, "sk-of-admin").raise_for_status()
        said = chat(server.client("sk-of-the-lab"), [user("Hello there.")], model="tiny:a", max_tokens=8, temperature=0)
        assert [text_of(said)] == said_by(ak.FIRST, "Hello there.")
        assert post(server, "unload_lora_adapter", {"lora_name": "a"}, "sk-of-the-lab").status_code == 403


def test_without_room_the_routes_are_off():
    with sk.running(make_engine=make_engine) as server:
        for route in ("load_lora_adapter", "unload_lora_adapter"):
            found = post(
                server, route, {"lora_name": "a", "lora_path": "/"} if "un" not in route else {"lora_name": "a"}
            )
            assert (found.status_code, found.json()["error"]["code"]) == (404, "adapters_off")
        assert [each.id for each in server.client().models.list()] == ["tiny"]
