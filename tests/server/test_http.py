"""HTTP itself: keys and hosts, what is no request, health, metrics, clients that leave or do not read, start, end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ca_jax.kv.costs import PrefillRate, Rates, TransferRate
from ca_jax.server.guards import is_loopback
from ca_jax.server.metrics import RequestMetrics
from ca_jax.server.tenants import Tenant, Tenants
from ca_jax.storage.config import GIB
from ca_jax.storage.records import GAP_BOUNDS_S, FlushFailure, GapHistogram, MissReason, SsdStats, StoreStats
from ca_jax.telemetry.metrics import EngineMetrics
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import chat, held, text_of, user

REPOSITORY = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    with sk.running(server={"max_queue": 2, "allowed_hosts": ("ours.example",)}, max_batch_size=1) as running:
        yield running


@pytest.fixture(scope="module")
def keyed():
    tenants = (Tenant(name="a", max_pinned=1), Tenant(name="operator", metrics=True))
    keys = [(hashlib.sha256(f"sk-{each.name}".encode()).digest(), each) for each in tenants]
    with sk.running(Tenants(keys)) as running:
        yield running


def error_of(answer):
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def scrape(server, key=None):
    with server.http(key) as http:
        return parsed(http.get("/metrics").text)


def parsed(text):
    """Values of metrics by name and labels, the model's name left out; the types of all."""
    families = list(text_string_to_metric_families(text))
    values = {
        (sample.name, *sorted(value for label, value in sample.labels.items() if label != "model_name")): sample.value
        for family in families
        for sample in family.samples
    }
    return values, {family.name: family.type for family in families}


# Whose and for whom a request is.


def test_no_key_and_wrong_keys_are_refused_everywhere_but_where_nothing_is_told(keyed):
    paths = [("GET", "/v1/models"), ("GET", "/v1/sessions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/chunks")]
    paths += [("GET", "/live"), ("GET", "/live/snapshot"), ("GET", "/metrics"), ("HEAD", "/metrics")]
    with keyed.http() as http:
        for method, path in paths:
            for key in (None, "sk-nobody", "\u00e9"):
                headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
                for body in (b"{}", b"{not json"):
                    answer = http.request(method, path, content=body, headers=headers)
                    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
                    assert method == "HEAD" or error_of(answer)[1] == "invalid_api_key"
        known = {"Authorization": "Bearer sk-a", "Host": "any.example"}
        assert http.get("/v1/models", headers=known).status_code == 200
    assert sk.is_ready(keyed.url)


def test_a_key_does_what_its_tenant_may(keyed):
    with keyed.http("sk-a") as http, keyed.client("sk-a") as client, keyed.http("sk-operator") as operator:
        assert error_of(http.get("/metrics")) == (403, "not_allowed", None)
        assert operator.get("/metrics").status_code == 200
        paths = [f"/v1/sessions/{chat(client, [user(f'pin {number}')], 2).session_id}" for number in range(2)]
        keyed.engine.wait_for_saves()
        for number, pinned in ((0, True), (0, True), (0, False), (1, True)):  # The second time it is already.
            assert http.post(paths[number], json={"pinned": pinned}).json()["stored"]["pinned"] == pinned
        assert error_of(http.post(paths[0], json={"pinned": True})) == (403, "pinning_not_allowed", "pinned")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("127.0.0.1:8000", "[::1]:8000", "192.168.1.7", "localhost", "LocalHost.:80")),
        *((host, 403) for host in ("theirs.example", "127.0.0.1.theirs.example", "localhost.theirs.example:8000")),
        ("ours.example:8000", 200),
    ],
)
def test_a_page_of_another_site_does_not_reach_a_server_without_keys(server, host, status):
    with server.http() as http:
        for path in ("/", "/v1/models", "/metrics", "/health"):
            answer = http.get(path, headers={"Host": host})
            assert answer.status_code == status, path
            assert status == 200 or error_of(answer) == (403, "host_not_allowed", None)
        told = http.post("/v1/messages", json={}, headers={"Host": host}).json()
        kind = "permission_error" if status == 403 else "invalid_request_error"
        assert (told["type"], told["error"]["type"]) == ("error", kind), "as its API tells it"


def test_a_server_that_others_reach_without_a_key_warns_at_its_start(tmp_path):
    """Its address is no one of any machine: it ends there."""
    command = [sys.executable, "-m", "ca_jax.launch.serve", f"--model={tmp_path / 'nothing'}", "--host=192.0.2.1"]
    started = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert "anybody who reaches it is served" in started.stderr
    assert [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0")] == [True, True, True, False]


# What is no request.


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "told"),
    [
        ("POST", CHAT, b"{not json", 400, "invalid_json"),
        ("POST", CHAT, b"\xff\xfe", 400, "invalid_json"),
        ("POST", CHAT, b"[1]", 400, "invalid_value"),
        ("POST", CHAT, b"", 400, "missing_required_parameter"),
        ("POST", CHAT, b'{"model": "tiny"}', 400, "missing_required_parameter"),
        ("GET", "/v1/nothing", b"", 404, None),
        ("GET", "/v1/sessions/nobody", b"", 404, "session_not_found"),
        ("GET", "/live?interval_s=0.01", b"", 400, "invalid_value"),
        ("GET", "/live?interval_s=often", b"", 400, "invalid_value"),
        ("GET", "/live?session_id=", b"", 400, "invalid_value"),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": ""}', 400, "empty_message"),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": [99999]}', 400, "invalid_value"),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "x", "suffix": "y"}', 400, "unsupported_parameter"),
        ("PUT", "/v1/sessions", b"", 405, "GET, POST"),
        ("PUT", "/v1/sessions/one", b"", 405, "DELETE, GET, POST"),
        ("GET", CHAT, b"", 405, "POST"),
        ("POST", "/v1/models/tiny", b"", 405, "GET"),
        ("PUT", "/metrics", b"", 405, "GET, HEAD"),
        ("PUT", "/", b"", 405, "GET"),
    ],
)
def test_what_is_no_request_is_told_in_openais_shape(server, method, path, body, status, told):
    with server.http() as http:
        answer = http.request(method, path, content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
    assert error.keys() == {"message", "type", "param", "code"}
    assert (answer.headers["Allow"] if status == 405 else error["code"]) == told


HALF = r'"\ud83d"'  # Of a pair of surrogates: JSON may say so, and it is no text.


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, '"messages": [{"role": "user", "content": HALF}]', "messages.0.content"),
        (CHAT, '"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]', "messages.0.content"),
        (CHAT, '"messages": [{"role": "user", "content": "x"}], "context": ["y", HALF]', "context.1"),
        ("/v1/completions", '"prompt": "x", "stop": [HALF]', "stop"),
        ("/v1/sessions", '"session_id": "half", "system": HALF', "system"),
        ("/v1/chunks", '"chunks": [HALF]', "chunks.0"),
    ],
)
def test_half_a_character_is_refused(server, path, body, param):
    model = "" if path in ("/v1/sessions", "/v1/chunks") else f'"model": "{sk.MODEL}", '
    with server.http() as http:
        content, kind = f"{{{model}{body.replace('HALF', HALF)}}}".encode(), {"Content-Type": "application/json"}
        assert error_of(http.post(path, content=content, headers=kind)) == (400, "invalid_value", param)


def test_a_body_over_the_limit_is_refused_by_its_length_and_by_what_came(server):
    limit = server.state.config.max_body_bytes
    body = json.dumps({"model": sk.MODEL, "messages": [user("x" * limit)]}).encode()
    with server.http() as http:
        for content in (body, (body[start : start + 65536] for start in range(0, len(body), 65536))):
            assert error_of(http.post(CHAT, content=content)) == (413, "request_too_large", None)


# A full queue, deadlines, clients that leave.


def test_a_full_queue_and_a_deadline_are_told_as_openais_client_understands(server, stops_behind):
    before, _ = scrape(server)
    with (
        server.client(max_retries=0) as client,
        server.client(max_retries=20) as patient,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        with held(server.service.loop):
            waiting = [pool.submit(chat, client, [user(f"long {i}")], 60) for i in range(3)]
            sk.wait_for(lambda: server.service.admission._num_there == 3)
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError, match="2 turns wait already, and 2 may") as told:
                    chat(client, [user("one more")], stream=stream)
                assert 1 <= int(told.value.response.headers["Retry-After"]) <= 60
            coming = pool.submit(chat, patient, [user("comes again, as it is told")])
            sk.wait_for(lambda: scrape(server)[0]["ca_jax:requests_refused_total", "429"] >= 3)
            assert scrape(server)[0]["ca_jax:reading_age_seconds",] > 0, "metrics are read while the engine is held"
        assert all(each.result().usage.completion_tokens == 60 for each in waiting)
        assert text_of(coming.result())
        options = {"max_tokens": 400, "extra_body": {"timeout_s": 0.02, "ignore_eos": True}}
        with pytest.raises(openai.APIStatusError) as told:
            chat(patient, [user("slow")], **options)
        assert (told.value.status_code, told.value.code) == (408, "timeout")
        assert told.value.request.headers["x-stainless-retry-count"] == "0", "it does not ask again by itself"
        options["extra_body"]["timeout_s"] = 0.5  # It has begun by then, and not ended.
        let_go = stops_behind(server.engine, 5)
        with pytest.raises(openai.APIError, match="not there in time"):
            list(chat(client, [user("slow")], stream=True, **options))
        let_go.set()
        with pytest.raises(openai.APIStatusError, match="not there in time"):
            client.post("/chunks", body={"chunks": ["never computed " * 20], "timeout_s": 1e-9}, cast_to=object)
    sk.wait_until_idle(server)
    after, _ = scrape(server)
    assert after["ca_jax:requests_refused_total", "408"] == before.get(("ca_jax:requests_refused_total", "408"), 0) + 2
    assert after["vllm:request_success_total", "length"] >= 4


@contextlib.contextmanager
def connected(server, is_small=False, **fields):
    """A connection that has sent a request for a long answer, and reads nothing of it."""
    host, port = server.url.removeprefix("http://").split(":")
    asked = {"model": sk.MODEL, "max_tokens": 400, "stream": True, "ignore_eos": True}
    content = json.dumps({**asked, **fields}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    with socket.socket() as connection:
        if is_small:  # It takes little before it is read.
            server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.settimeout(sk.DEADLINE_S)
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + f"{len(content)}\r\n\r\n".encode() + content)
        yield connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_turn(server, stream):
    name = ("vllm:request_success_total", "abort")
    cancelled, aborted = server.engine.metrics.cancelled, scrape(server)[0].get(name, 0)
    with connected(server, messages=[user("gone")], stream=stream):
        sk.wait_for(lambda: server.engine.num_jobs[0] == 1)
    sk.wait_until_idle(server)
    assert (server.engine.metrics.cancelled, scrape(server)[0][name]) == (cancelled + 1, aborted + 1)
    session = [each for each in server.engine.sessions if each.messages and each.messages[0]["content"] == "gone"][-1]
    assert len(session.token_ids) < 450, "what was generated by then is part of the conversation"
    with server.client() as client:
        assert chat(client, [*session.messages, user("and?")]).session_id == session.session_id


def test_half_a_request_and_a_client_that_never_reads_hold_nobody(server, monkeypatch):
    """Not even themselves behind their deadline."""
    monkeypatch.setattr("ca_jax.server.state._READING_S", 0.1)
    host, port = server.url.removeprefix("http://").split(":")
    half = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
    for sent in (half, b"GARBAGE\r\n\r\n"):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
    told = {"n": 3, "logprobs": True, "top_logprobs": 20, "timeout_s": 1.5}
    with connected(server, is_small=True, messages=[user("never reads")], **told) as connection:
        sk.wait_for(lambda: server.engine.num_jobs != (0, 0))
        with server.client() as client:
            assert text_of(chat(client, [user("fast")]))
        sk.wait_until_idle(server)
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert b"[DONE]" not in received


def test_no_request_hops_to_a_pool_of_threads_and_back(server, monkeypatch):
    """FastAPI sends every function there that is no coroutine, dependencies too: a third of a millisecond a request."""
    hops = []

    async def run_sync(function, *args, **options):
        hops.append(function)
        return function(*args)

    monkeypatch.setattr("anyio.to_thread.run_sync", run_sync)
    with server.client() as client, server.http() as http:
        name = chat(client, [user("one")], 2).session_id
        list(client.completions.create(model=sk.MODEL, prompt="two", max_tokens=2, stream=True))
        for path in ("/health", "/metrics", "/v1/models", "/v1/sessions", f"/v1/sessions/{name}", "/"):
            assert http.get(path).status_code == 200
        assert http.delete(f"/v1/sessions/{name}").status_code == 200
    assert hops == []


# Start, health and end.


def test_health_is_told_while_the_engine_does_not_answer(server, monkeypatch):
    with server.http() as http:
        with held(server.service.loop):
            assert http.get("/health").json() == {"status": "ok"}, "a step may compile"
            monkeypatch.setattr(server.state, "config", dataclasses.replace(server.state.config, max_step_s=0.0))
            told = http.get("/health")
            assert (told.status_code, told.json()["status"]) == (503, "stuck")
            assert "one step" in told.json()["reason"]
        sk.wait_for(lambda: server.service.loop.step_s == 0)
        assert http.get("/health").json() == {"status": "ok"}, "nothing is asked of it"
        assert http.head("/health").status_code == http.head("/metrics").status_code == 200
        assert not http.head("/metrics").content


def test_it_is_ready_once_the_engine_is_and_broken_once_that_breaks(monkeypatch):
    let_go = threading.Event()

    def make_engine():
        assert let_go.wait(sk.DEADLINE_S)
        return kit.small_engine()

    with sk.starting(make_engine) as server, server.client(max_retries=0) as client, server.http() as http:
        assert [http.get(path).status_code for path in ("/health", "/metrics")] == [503, 503]
        with pytest.raises(openai.InternalServerError, match="not ready: starting") as told:
            client.models.list()
        assert told.value.response.headers["Retry-After"]
        let_go.set()
        sk.wait_for(lambda: server.state.status == "ok")
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(chat, client, [user(f"waits {i}")], 400) for i in range(2)]
            sk.wait_for(lambda: server.engine.num_jobs[0] == 2)
            monkeypatch.setattr(server.engine, "step", lambda: 1 / 0)
            told = [each.exception() for each in waiting]
        assert [type(each) for each in told] == [openai.InternalServerError] * 2
        assert not any("ZeroDivision" in str(each) or "Traceback" in str(each) for each in told)
        with pytest.raises(openai.InternalServerError) as refused:
            chat(client, [user("comes")])
        assert refused.value.status_code == http.get("/health").status_code == 503


# Metrics.


@pytest.mark.parametrize("has_ssd", [True, False])
def test_metrics_are_what_engine_and_store_say_by_the_names_that_are_read(has_ssd):
    gaps = GapHistogram(counts=tuple(range(len(GAP_BOUNDS_S) + 1)), sum_s=12.5)
    ssd = SsdStats(num_sessions=7, used_bytes=50, capacity_bytes=200, num_evictions=3, num_fetches=4, flushed_bytes=9)
    ssd.failed_flushes[FlushFailure.NO_ROOM] = 1
    store = StoreStats(num_dram_sessions=5, num_sessions=8, used_bytes=25, capacity_bytes=100, evict_to_reuse=gaps)
    store = dataclasses.replace(
        store, num_hits=6, num_hits_from_ssd=2, num_saves=11, num_expired=12, ssd=ssd if has_ssd else None
    )
    store.misses[MissReason.ABSENT] = 13
    limitless = TransferRate(bytes_per_s=math.inf)  # As a few measurements of a fast link may say.
    rates = Rates(
        num_layers=2,
        layer_token_bytes=64,
        load=limitless,
        save=TransferRate(bytes_per_s=1e9),
        prefill=PrefillRate(token_s=1e-3),
    )
    counted = EngineMetrics(turns=1, prompt_tokens=2, cached_tokens=3, completion_tokens=4, load_stall_s=0.5)
    job = types.SimpleNamespace(num_tokens=32)
    engine = types.SimpleNamespace(
        **{"metrics": counted, "store_stats": lambda: store, "rates": rates, "jobs": ((job,), (job, job))},
        stored=types.SimpleNamespace(busy_pages_share=0.75),
    )
    metrics = RequestMetrics(sk.MODEL)
    metrics.read(engine)
    found, types_of = parsed(metrics.text().decode())
    tiers = {"dram": (5, 25, 100, 0, 4), "ssd": (7, 50, 200, 3, 2)}
    names = ("tier_sessions", "tier_used_bytes", "tier_capacity_bytes", "tier_evictions_total", "store_hits_total")
    for tier in tiers if has_ssd else ("dram",):
        assert tuple(found[f"ca_jax:{name}", tier] for name in names) == tiers[tier]
    assert (("ca_jax:tier_sessions", "ssd") in found) == (("ca_jax:fetches_total",) in found) == has_ssd
    bounds = [*map(str, GAP_BOUNDS_S), "+Inf"]
    buckets = [found["ca_jax:evict_to_reuse_seconds_bucket", *sorted((bound, "dram"))] for bound in bounds]
    assert buckets == list(itertools.accumulate(gaps.counts))
    assert found["ca_jax:evict_to_reuse_seconds_sum", "dram"] == 12.5
    wanted = {
        **{("ca_jax:store_misses_total", "absent"): 13, ("ca_jax:saves_total",): 11},
        **{("ca_jax:expired_sessions_total",): 12, ("ca_jax:turns_total",): 1},
        **{("ca_jax:load_stall_seconds_total",): 0.5, ("ca_jax:bytes_per_second", "save"): 1e9},
        **{("vllm:num_requests_running",): 1, ("vllm:num_requests_waiting",): 2},
        **{("vllm:prompt_tokens_total",): 2, ("vllm:generation_tokens_total",): 4},
        **{("vllm:prefix_cache_queries_total",): 2, ("vllm:prefix_cache_hits_total",): 3},
        **{("vllm:kv_cache_usage_perc",): 0.75, ("vllm:cpu_cache_usage_perc",): 0.25},
    }
    if has_ssd:
        wanted |= {("ca_jax:fetches_total",): 4, ("ca_jax:flushed_bytes_total",): 9}
        wanted |= {("ca_jax:failed_flushes_total", "no_room"): 1}
    assert {name: found[name] for name in wanted} == wanted
    assert ("ca_jax:bytes_per_second", "load") not in found
    assert {key[1] for key in found if key[0] == "ca_jax:store_misses_total"} == set(MissReason)
    assert all(math.isfinite(value) for value in found.values())
    assert types_of["ca_jax:evict_to_reuse_seconds"] == types_of["vllm:time_to_first_token_seconds"] == "histogram"


def test_kv_usage_is_the_share_of_all_pages_that_running_answers_hold():
    num_pages, page = 64, kit.BLOCK_TOKENS
    pool_gib = num_pages * page * kit.TOKEN_BYTES / GIB
    metrics = RequestMetrics(sk.MODEL)

    def usage():
        metrics.read(engine)
        return parsed(metrics.text().decode())[0]["vllm:kv_cache_usage_perc",]

    with kit.small_engine(keep_pages=True, kv_pool_gib=pool_gib) as engine:
        first, second = engine.session(), engine.session()
        assert usage() == 0
        answer = first.send_ids(kit.prompt(3 * page + 1), max_tokens=4)
        next(answer)
        assert usage() == 4 / num_pages
        kit.drain(answer)
        assert usage() == 0, "pages that are kept between turns make room"
        answers = [each.send_ids(kit.prompt(page + 1), max_tokens=8) for each in (engine.fork(first), second)]
        for each in answers:
            next(each)
        assert usage() == (5 + 2) / num_pages
        kit.drain(*answers)
        assert usage() == 0
