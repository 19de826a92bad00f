"""What one request, and one tenant, may ask for: each limit by itself, and what others notice of it."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ca_jax.server.tenants import Tenant, Tenants
from ca_jax.storage.config import StoreConfig
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import assistant, chat, text_of, user

REPOSITORY = Path(__file__).parents[2]
A, B, OPERATOR = "sk-of-lab-a", "sk-of-lab-b", "sk-of-the-operator"
TENANTS = {
    A: Tenant(name="lab-a", max_requests=4),
    B: Tenant(name="lab-b", best_priority=-5, max_pinned=1),
    OPERATOR: Tenant(name="operator", metrics=True),
}
LIMITS = {"max_queue": 4, "max_chunks": 3, "max_chunk_tokens": 60, "max_lookups": 2, "max_open_sessions": 3}


def store_of(directory):
    return StoreConfig(
        dram_gib=0.05, ssd_dir=str(directory), ssd_gib=0.2, ssd_free_floor_gib=0.0, block_tokens=kit.BLOCK_TOKENS
    )


class CountedStore:
    """A store, and how often each of its methods was called."""

    def __init__(self, store):
        self._store = store
        self.calls = collections.Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self._store, name)


STORES = []


def counted(store):
    STORES.append(CountedStore(store))
    return STORES[-1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tenants = Tenants([(hashlib.sha256(key.encode()).digest(), tenant) for key, tenant in TENANTS.items()])
    store = store_of(tmp_path_factory.mktemp("ssd"))
    with sk.running(tenants, LIMITS, store=store, store_wrapper=counted, max_batch_size=1) as running:
        yield running


@pytest.fixture
def http(server):
    with contextlib.ExitStack() as stack:
        yield {key: stack.enter_context(server.http(key)) for key in (A, B, OPERATOR, None)}


@contextlib.contextmanager
def held(server):
    """The engine's thread does nothing for as long as the block lasts."""
    begun, let_go = threading.Event(), threading.Event()
    server.service.loop.tell(lambda engine: (begun.set(), let_go.wait(sk.DEADLINE_S)))
    assert begun.wait(sk.DEADLINE_S)
    try:
        yield
    finally:
        let_go.set()


@contextlib.contextmanager
def answering(server, client, **options):
    """An answer that takes the only slot for as long as the block lasts."""
    asked = {"stream": True, "max_tokens": 400, "extra_body": {"ignore_eos": True}, **options}
    with chat(client, [user("a long story")], **asked):
        server.wait_until(lambda: server.engine.num_jobs[0] == 1)
        yield
    wait_until_idle(server)


def wait_until_idle(server):
    server.wait_until(lambda: server.service.num_requests == server.service.loop.num_jobs == 0)


def asked_for(http, content="hello", **fields):
    body = {"model": sk.MODEL, "messages": [user(content)], "max_tokens": 2, "temperature": 0, **fields}
    return http.post("/v1/chat/completions", json=body)


def error_of(answer):
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def test_chunks_of_one_request_are_bounded_by_number_and_by_tokens(server, http):
    chunks = [f"chunk {number} of them" for number in range(4)]
    before = server.engine.metrics.computed_chunks
    assert error_of(asked_for(http[A], context=chunks)) == (400, "invalid_value", "context")
    answer = http[A].post("/v1/chunks", json={"chunks": chunks})
    assert error_of(answer) == (400, "invalid_value", "chunks")
    assert "must be at most 3 chunks, got 4" in answer.json()["error"]["message"]
    answer = http[A].post("/v1/chunks", json={"chunks": ["x" * 30, "y" * 30]})
    assert error_of(answer) == (400, "invalid_value", "chunks")
    assert "must be at most 60 tokens together, got" in answer.json()["error"]["message"]
    assert server.engine.metrics.computed_chunks == before, "none was queued"
    assert http[A].post("/v1/chunks", json={"chunks": chunks[:3]}).json()["num_computed"] == 3


def test_prefills_of_chunks_count_in_the_queue(server, http):
    """Both before the engine's thread has queued them, and behind that."""
    context = [f"a passage {number}" for number in range(3)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool, server.client(B) as client:
        with answering(server, client):
            waiting = pool.submit(asked_for, http[A], context=context)
            server.wait_until(lambda: server.engine.num_jobs == (1, 4))
            assert error_of(asked_for(http[B]))[:2] == (429, "rate_limit_exceeded")
        assert waiting.result().status_code == 200
    with concurrent.futures.ThreadPoolExecutor(1) as pool, held(server):
        waiting = pool.submit(asked_for, http[A], context=[f"another {number}" for number in range(3)])
        server.wait_until(lambda: server.service._num_coming == 4)
        second = http[B].post("/v1/chunks", json={"chunks": ["p", "q"]})
        assert error_of(second)[:2] == (429, "rate_limit_exceeded")


def test_chunks_of_a_client_that_left_are_not_computed(server, http):
    context = [f"abandoned {number}" for number in range(3)]
    with server.client(B) as client, answering(server, client), server.client(A) as other:
        before = server.engine.metrics.computed_chunks
        with chat(other, [user("never mind")], stream=True, extra_body={"context": context}):
            assert server.engine.num_jobs == (1, 4)
        server.wait_until(lambda: server.service.loop.num_jobs == 1)
        assert server.engine.metrics.computed_chunks == before
        assert http[A].post("/v1/chunks", json={"chunks": context[:1]}).json()["num_computed"] == 1


def test_lookups_of_one_tenant_are_so_many_at_a_time(server, http):
    name = asked_for(http[A]).json()["session_id"]
    calls = [
        ("GET", "/v1/sessions", None),
        ("POST", "/v1/sessions", {"session_id": "new"}),
        ("GET", f"/v1/sessions/{name}", None),
        ("POST", f"/v1/sessions/{name}", {"ttl_s": 9}),
        ("POST", f"/v1/sessions/{name}/discard", {"start": 0, "stop": 0}),
        ("DELETE", f"/v1/sessions/{name}", None),
        ("GET", "/live/snapshot", None),
    ]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        with held(server):
            waiting = [pool.submit(http[A].get, "/v1/sessions") for _ in range(2)]
            server.wait_until(lambda: server.service._looking["lab-a", False] == 2)
            for method, path, body in calls:
                answer = http[A].request(method, path, json=body)
                assert error_of(answer)[:2] == (429, "rate_limit_exceeded"), path
                assert answer.headers["Retry-After"] == "1"
            others = pool.submit(http[B].get, "/v1/sessions")
            server.wait_until(lambda: server.service._looking["lab-b", False] == 1)
        assert {each.result().status_code for each in (*waiting, others)} == {200}
    assert http[A].get("/v1/sessions").status_code == 200


def test_streams_of_what_is_going_on_are_so_many_at_a_time(server, http):
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            assert stack.enter_context(http[A].stream("GET", "/live")).status_code == 200
        assert error_of(http[A].get("/live"))[:2] == (429, "rate_limit_exceeded")
        assert http[A].get("/v1/sessions").status_code == 200
        with http[B].stream("GET", "/live") as other:
            assert other.status_code == 200
    server.wait_until(lambda: not server.service._looking["lab-a", True])


def test_metrics_are_for_keys_that_may(server, http):
    assert http[None].get("/metrics").status_code == http[None].head("/metrics").status_code == 401
    assert error_of(http[A].get("/metrics")) == (403, "not_allowed", None)
    assert http[OPERATOR].get("/metrics").status_code == 200


def test_metrics_and_health_answer_while_the_engine_does_not(server, http, monkeypatch):
    def age():
        families = text_string_to_metric_families(http[OPERATOR].get("/metrics").text)
        return {family.name: family.samples[0].value for family in families if family.samples}[
            "ca_jax:reading_age_seconds"
        ]

    asked_for(http[A])
    wait_until_idle(server)
    with held(server):
        assert http[None].get("/health").json() == {"status": "ok"}, "a step may compile"
        first = age()
        assert age() > first >= 0
        bounded = dataclasses.replace(server.state.config, max_step_s=0.0)
        monkeypatch.setattr(server.state, "config", bounded)
        told = http[None].get("/health")
        assert (told.status_code, told.json()["status"]) == (503, "stuck")
        assert "one step" in told.json()["reason"]
    server.wait_until(lambda: server.service.loop.step_s == 0)
    assert http[None].get("/health").json() == {"status": "ok"}, "nothing is asked of it"
    assert age() < first + sk.DEADLINE_S


def test_who_looks_at_a_conversation_does_not_open_it(tmp_path):
    with sk.running(store=store_of(tmp_path)) as server, server.client() as client:
        names = [chat(client, [user(f"number {number}")]).session_id for number in range(3)]
    with sk.running(server={"max_open_sessions": 1}, store=store_of(tmp_path)) as server, server.http() as http:
        for name in names:
            shown = http.get(f"/v1/sessions/{name}").json()
            assert [message["role"] for message in shown["messages"]] == ["user", "assistant"]
            assert http.post(f"/v1/sessions/{name}", json={"pinned": True}).json()["stored"]["pinned"]
            assert http.post("/v1/sessions", json={"session_id": name}).status_code == 400, "the name is taken"
        assert not server.engine.sessions
        for name in names:
            assert http.post(f"/v1/sessions/{name}/discard", json={"start": 1, "stop": 2}).status_code == 200
        for name in names:
            assert asked_for(http, session_id=name, session_state="elsewhere").status_code == 409
        assert len(server.engine.sessions) == 1


def test_a_page_of_sessions_is_all_that_is_described(server, http):
    while listed := http[B].get("/v1/sessions").json()["data"]:
        for each in listed:
            http[B].delete(f"/v1/sessions/{each['id']}")
    names = [asked_for(http[B], f"listed {number}").json()["session_id"] for number in range(5)]
    server.engine.wait_for_saves()
    pages, after = [], {}
    while True:
        STORES[-1].calls.clear()
        page = http[B].get("/v1/sessions", params={"limit": 2, **after}).json()
        assert STORES[-1].calls["list"] == 0
        assert STORES[-1].calls["of_name"] == len(page["data"])
        ids = [each["id"] for each in page["data"]]
        assert (page["first_id"], page["last_id"]) == (ids[0], ids[-1])
        pages.append(ids)
        after = {"after": page["last_id"]}
        if not page["has_more"]:
            break
    assert [len(ids) for ids in pages] == [2, 2, 1]
    assert [name for ids in pages for name in ids] == names[::-1], "the latest first"
    assert error_of(http[B].get("/v1/sessions", params={"after": "nobody"}))[:2] == (404, "session_not_found")
    for limit in (0, 101):
        assert error_of(http[B].get("/v1/sessions", params={"limit": limit})) == (400, "invalid_value", "limit")


def test_priority_is_as_good_as_the_tenant_may_have(server, http):
    for key, best in ((A, 0), (B, -5)):
        assert asked_for(http[key], priority=best).status_code == 200
        refused = asked_for(http[key], priority=best - 1)
        assert error_of(refused) == (403, "priority_not_allowed", "priority")
        assert f"must be at least {best} for this key's tenant, got {best - 1}" in refused.json()["error"]["message"]
    body = {"model": sk.MODEL, "prompt": "x", "max_tokens": 1, "priority": -1}
    assert error_of(http[A].post("/v1/completions", json=body)) == (403, "priority_not_allowed", "priority")


def test_so_many_sessions_are_pinned_as_the_tenant_may(server, http):
    names = {key: [asked_for(http[key], f"pin {n}").json()["session_id"] for n in range(2)] for key in (A, B)}
    server.engine.wait_for_saves()

    def pin(key, number, pinned=True):
        return http[key].post(f"/v1/sessions/{names[key][number]}", json={"pinned": pinned})

    assert error_of(pin(A, 0)) == (403, "pinning_not_allowed", "pinned")
    assert pin(B, 0).json()["stored"]["pinned"]
    assert pin(B, 0).status_code == 200, "it is pinned already"
    assert error_of(pin(B, 1)) == (403, "pinning_not_allowed", "pinned")
    assert not pin(B, 0, False).json()["stored"]["pinned"]
    assert pin(B, 1).json()["stored"]["pinned"]


def test_each_answer_of_a_request_counts(server, http):
    with server.client(A) as client, answering(server, client, n=3):
        assert error_of(asked_for(http[A], n=2))[:2] == (429, "rate_limit_exceeded")
    refused = asked_for(http[A], n=5)
    assert error_of(refused) == (400, "invalid_value", "n")
    assert "must be at most 4, got 5" in refused.json()["error"]["message"]
    assert len(asked_for(http[A], n=4).json()["choices"]) == 4


def test_one_tenants_load_closes_and_forgets_no_other_tenants_conversation(server, http):
    asked = [user("do not forget me")]
    with server.client(A) as client:
        first = chat(client, asked)
        for number in range(server.service.router.max_known + 1):
            assert asked_for(http[B], f"load {number}", max_tokens=1).status_code == 200
        opened = {session.tenant for session in server.engine.sessions}
        assert opened == {"lab-a", "lab-b"}
        followed = chat(client, [*asked, assistant(text_of(first)), user("and?")])
    assert followed.session_id == first.session_id


def test_a_place_is_kept_for_who_was_told_to_come_again():
    """Who has just been answered would take each place that comes free, being there first."""
    with sk.running(server={"max_queue": 1}, max_batch_size=1) as server, server.http() as http:
        with server.client() as client, answering(server, client):
            with chat(client, [user("waits")], stream=True):
                server.wait_until(lambda: server.service.loop.num_jobs == 2)
                assert asked_for(http).status_code == 429
            server.wait_until(lambda: server.service.loop.num_jobs == 1)
            assert asked_for(http).status_code == 429, "there is a place, which is another's"
        assert asked_for(http).status_code == 200, "what nobody waits for is everybody's"


def test_refusals_do_not_make_the_wait_look_short():
    with sk.running(server={"max_queue": 1}, max_batch_size=1) as server, server.http() as http:
        server.service._seconds.extend([30.0] * 64)  # Of a slot, each of the latest answers.
        with server.client() as client, answering(server, client), chat(client, [user("waits")], stream=True):
            server.wait_until(lambda: server.service.loop.num_jobs == 2)
            told = [int(asked_for(http).headers["Retry-After"]) for _ in range(80)]
        assert min(told) >= 30


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7", 200),
        ("localhost", 200),
        ("LocalHost.:80", 200),
        ("ours.example:8000", 200),
        ("theirs.example", 403),
        ("127.0.0.1.theirs.example", 403),
        ("localhost.theirs.example:8000", 403),
    ],
)
def test_a_page_of_somebody_elses_does_not_reach_a_server_without_keys(nobody, host, status):
    for path in ("/", "/v1/models", "/metrics", "/health"):
        answer = nobody.get(path, headers={"Host": host})
        assert answer.status_code == status, path
        if status == 403:
            assert error_of(answer) == (403, "host_not_allowed", None)


@pytest.fixture(scope="module")
def nobody():
    with sk.running(server={"allowed_hosts": ("ours.example",)}) as running, running.http() as http:
        yield http


def test_where_keys_are_asked_for_any_host_is(http):
    assert http[A].get("/v1/models", headers={"Host": "any.example"}).status_code == 200


def test_the_openai_client_waits_as_it_is_told_and_is_served(server):
    """Its defaults: two more tries."""
    with server.client(B) as client, server.client(A) as other, concurrent.futures.ThreadPoolExecutor(1) as pool:
        with answering(server, other, n=4), chat(client, [user("the last place")], stream=True):
            server.wait_until(lambda: server.service.loop.num_jobs == 5)
            coming = pool.submit(chat, client, [user("comes again")])
            server.wait_until(lambda: bool(server.service._told))
        assert text_of(coming.result())


def test_a_server_that_others_reach_without_a_key_warns_at_its_start(tmp_path):
    def said(*flags):
        command = [sys.executable, "-m", "ca_jax.launch.serve", f"--model={tmp_path / 'nothing'}", "--port=0", *flags]
        return subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY).stderr

    assert "anybody who reaches it is served" in said("--host=192.0.2.1")  # No address of any machine: it ends there.
    assert "anybody who reaches it" not in said("--host=127.0.0.1")
