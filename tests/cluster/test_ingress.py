"""What an ingress reads and passes on, over one replica in this process: without Ray."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator

import pytest

from ca_jax.cluster.ingress import Ingress
from ca_jax.cluster.keys import REPLICA_HEADER, session_key
from ca_jax.cluster.replica import EngineReplica, ReplicaSpec
from ca_jax.server.config import ServerConfig
from ca_jax.server.tenants import Tenant, Tenants
from tests import engine_kit as kit
from tests import server_kit as sk

CHAT = "/v1/chat/completions"
KEYS = Tenants([(hashlib.sha256(b"secret").digest(), Tenant(name="lab"))])


class Client:
    """Sends requests to an ASGI application as a server would, and counts what is read of their bodies."""

    def __init__(self, app):
        self.app = app
        self.num_read = 0

    async def ask(self, method, path, *, pieces=(b"",), headers=(), leaves=None):
        """Status, headers and body of an answer; it may break off.

        Args:
          pieces: of the request's body.
          leaves: an event at which the client goes away.
        """
        unread, sent = list(pieces), []

        async def receive():
            if not unread:
                await (leaves or asyncio.Event()).wait()
                return {"type": "http.disconnect"}
            self.num_read += 1
            return {"type": "http.request", "body": unread.pop(0), "more_body": bool(unread)}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http"}
        scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "extensions": {}}
        scope |= {"headers": [(b"content-type", b"application/json"), *headers], "client": ("127.0.0.1", 1)}
        try:
            await self.app(scope, receive, send)
        finally:
            self.said = b"".join(each.get("body", b"") for each in sent)
        told = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], told, self.said

    async def post(self, path, body, *headers):
        status, told, said = await self.ask("POST", path, pieces=[json.dumps(body).encode()], headers=headers)
        return status, told, json.loads(said)


class Way:
    """The way to one replica, and by which keys requests took it. It may be gone."""

    def __init__(self, replica):
        self.replica, self.keys, self.breaks_behind = replica, [], None

    async def __call__(self, request, key) -> AsyncIterator[list[dict]]:
        self.keys.append(key)
        left = self.breaks_behind
        async with contextlib.aclosing(self.replica.answer(request)) as answer:
            async for messages in answer:
                if left == 0:
                    raise ConnectionError("it has died")
                yield messages
                left = None if left is None else left - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    kit.write_tiny_model(directory)
    return str(directory)


@contextlib.asynccontextmanager
async def a_replica(model, *, tenants=None, engine=kit.SMALL, **server):
    config = ServerConfig(**{"served_model_name": sk.MODEL, "shutdown_grace_s": 5.0, **server})
    tenants = tenants or Tenants()
    spec = ReplicaSpec(model=model, engine=engine, server=config, tenants=tenants, warmup=False)
    replica = EngineReplica(spec, "alone")
    way = Way(replica)
    passed = Ingress(way, config, tenants)

    async def app(scope, receive, send):
        await (await passed(None))(scope, receive, send)

    try:
        await replica.start()
        yield replica, way, Client(app)
    finally:
        await replica.close()


def asked(**fields):
    return {"model": sk.MODEL, "messages": [sk.user("Hello.")], "max_tokens": 4, **fields}


@sk.on_loop
async def test_names_that_answers_tell_go_where_the_answer_came_from(model):
    async with a_replica(model) as (replica, way, client):
        status, told, answer = await client.post(CHAT, asked(), (b"x-session-id", b"mine"))
        assert (status, told[REPLICA_HEADER]) == (200, "alone")
        named = {"session_id": answer["session_id"], "session_state": answer["session_state"]}
        assert (await client.post(CHAT, asked(**named)))[0] == 200
        assert way.keys == [session_key("", "mine")] * 2
        held = (await replica.record_routing_stats())["held"]
        assert {session_key("", "mine"), session_key("", answer["session_id"])} < held.keys()
        await client.ask("DELETE", f"/v1/sessions/{answer['session_id']}")
        assert way.keys[2] == way.keys[0]
        held = (await replica.record_routing_stats())["held"]
        assert session_key("", answer["session_id"]) not in held
        status, *_ = await client.ask("GET", "/v1/sessions/nobody")
        assert status == 404
        assert session_key("", "nobody") not in (await replica.record_routing_stats())["held"]


@sk.on_loop
async def test_a_conversation_stays_held_until_it_is_deleted_itself(model):
    async def held():
        return (await replica.record_routing_stats())["held"]

    async with a_replica(model) as (replica, way, client):
        _, _, begun = await client.post("/v1/conversations", {})
        assert session_key("", begun["id"]) in await held(), "its answer has told the name"
        asked = {"model": sk.MODEL, "input": "Hello.", "max_output_tokens": 4, "conversation": begun["id"]}
        first, second = [(await client.post("/v1/responses", asked))[2] for _ in range(2)]
        assert set(way.keys[1:]) == {way.keys[0]}
        assert (await client.ask("DELETE", f"/v1/responses/{second['id']}"))[0] == 200
        assert session_key("", begun["id"]) in await held(), "it is there without that response"
        assert (await client.ask("GET", f"/v1/responses/{first['id']}"))[0] == 200
        assert (await client.ask("DELETE", f"/v1/conversations/{begun['id']}"))[0] == 200
        assert session_key("", begun["id"]) not in await held()


@sk.on_loop
async def test_a_body_is_read_for_known_keys_alone_and_within_its_bound(model):
    async with a_replica(model, tenants=KEYS, max_body_bytes=1000) as (_, way, client):
        pieces = [b" " * 400] * 4
        for headers in ((), [(b"authorization", b"Bearer another")]):
            status, _, said = await client.ask("POST", CHAT, pieces=pieces, headers=headers)
            assert (status, json.loads(said)["error"]["code"], client.num_read) == (401, "invalid_api_key", 0)
        known = [(b"authorization", b"Bearer secret")]
        asked_by_now = len(way.keys)
        status, _, said = await client.ask("POST", CHAT, pieces=pieces, headers=known)
        assert (status, json.loads(said)["error"]["code"], client.num_read) == (413, "request_too_large", 3)
        assert len(way.keys) == asked_by_now
        assert (await client.post(CHAT, asked(), *known))[0] == 200
        status, _, listed = await client.ask("GET", "/v1/sessions", headers=known)
        assert (status, len(json.loads(listed)["data"])) == (200, 1)


@sk.on_loop
async def test_a_replica_that_dies_is_an_error_before_an_answer_and_breaks_one_that_has_begun(model):
    async with a_replica(model) as (replica, way, client):
        way.breaks_behind = 0
        status, told, answer = await client.post(CHAT, asked())
        assert (status, told["retry-after"], answer["error"]["code"]) == (503, "1", "replica_lost")
        way.breaks_behind = 2
        body = json.dumps(asked(stream=True, max_tokens=40)).encode()
        with pytest.raises(ConnectionError):
            await client.ask("POST", CHAT, pieces=[body])
        assert b"data: " in client.said
        assert b"[DONE]" not in client.said
        way.breaks_behind = None
        assert (await client.post(CHAT, asked()))[0] == 200
        await sk.wait_until(lambda: replica._state.service.loop.num_jobs == 0)


@sk.on_loop
async def test_what_shows_the_store_at_work_ends_so_that_a_replica_can_be_drained(model):
    async with a_replica(model, shutdown_grace_s=0.2) as (_, _, client):
        status, _, said = await client.ask("GET", "/live")
        assert (status, said.startswith(b"data: ")) == (200, True)


@sk.on_loop
async def test_a_replica_says_what_it_holds_and_has_to_do_and_knows_it_again(model, tmp_path):
    engine = dataclasses.replace(kit.SMALL, store=kit.ssd_store(tmp_path))
    async with a_replica(model, engine=engine) as (replica, _, client):
        name = replica.name
        assert name.startswith("replica-0-")
        _, told, answer = await client.post(CHAT, asked(), (b"x-session-id", b"mine"))
        assert told[REPLICA_HEADER] == name
        said = await replica.record_routing_stats()
        assert said["share"] == 0
        assert 0 < said["free_bytes"] < 0.05 * 2**30
        await replica.check_health()
    async with a_replica(model, engine=engine) as (again, _, client):
        held = (await again.record_routing_stats())["held"]
        assert again.name == name
        assert {session_key("", "mine"), session_key("", answer["session_id"])} < held.keys()
        assert json.loads((await client.ask("GET", f"/v1/sessions/{answer['session_id']}"))[2])["messages"]


@sk.on_loop
async def test_a_replica_whose_engine_cannot_be_made_says_why_and_lets_go_of_its_directory(model, tmp_path):
    engine = dataclasses.replace(kit.SMALL, store=kit.ssd_store(tmp_path))
    with pytest.raises(Exception, match="nonesuch"):
        async with a_replica(str(tmp_path / "nonesuch"), engine=engine):
            pass
    async with a_replica(model, engine=engine) as (replica, *_):
        assert replica.name.startswith("replica-0-")


@sk.on_loop
async def test_a_replica_whose_engine_is_broken_is_replaced(model, monkeypatch):
    async with a_replica(model) as (replica, _, client):

        def breaks():
            raise OSError("no more")

        monkeypatch.setattr(replica._state.engine, "step", breaks)
        answered = (await client.post(CHAT, asked()))[0]
        assert answered in {500, 503}, "the latter where the engine stepped, and broke, before it was asked"
        with pytest.raises(RuntimeError, match="broken"):
            await replica.check_health()
        assert await replica.record_routing_stats() == {}
