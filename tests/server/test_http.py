"""HTTP itself: keys and hosts, what is no request, health, metrics, clients that leave or do not read, start, end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import math
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ca_jax.kv.costs import PrefillRate, Rates, TransferRate
from ca_jax.server.metrics import Reading
from ca_jax.server.tenants import Tenant, Tenants
from ca_jax.storage.records import GAP_BOUNDS_S, MissReason
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import assistant, chat, held, ssd_store, text_of, user

REPOSITORY = Path(__file__).parents[2]


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
    """Values of metrics by name and labels, the model's name left out; the types of all."""
    with server.http(key) as http:
        families = list(text_string_to_metric_families(http.get("/metrics").text))
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
        assert (
            http.get("/v1/models", headers={"Authorization": "Bearer sk-a", "Host": "any.example"}).status_code == 200
        )
    assert sk.health(keyed.url) == {"status": "ok"}


def test_a_key_does_what_its_tenant_may(keyed):
    with keyed.http("sk-a") as http, keyed.client("sk-a") as client, keyed.http("sk-operator") as operator:
        assert error_of(http.get("/metrics")) == (403, "not_allowed", None)
        assert operator.get("/metrics").status_code == 200
        names = [chat(client, [user(f"pin {number}")], 2).session_id for number in range(2)]
        keyed.engine.wait_for_saves()

        def pin(http, number, pinned=True):
            return http.post(f"/v1/sessions/{names[number]}", json={"pinned": pinned})

        assert pin(http, 0).json()["stored"]["pinned"]
        assert pin(http, 0).status_code == 200, "it is pinned already"
        assert error_of(pin(http, 1)) == (403, "pinning_not_allowed", "pinned")
        assert not pin(http, 0, False).json()["stored"]["pinned"]
        assert pin(http, 1).json()["stored"]["pinned"]
        assert error_of(pin(operator, 1)) == (404, "session_not_found", None)
        body = {"model": sk.MODEL, "prompt": "x", "max_tokens": 1, "priority": -1}
        assert error_of(http.post("/v1/completions", json=body)) == (403, "priority_not_allowed", "priority")


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


def test_a_server_that_others_reach_without_a_key_warns_at_its_start(tmp_path):
    command = [sys.executable, "-m", "ca_jax.launch.serve", f"--model={tmp_path / 'nothing'}", "--port=0"]
    hosts = ("192.0.2.1", "127.0.0.1")  # The first is no address of any machine: it ends there.
    piped = {"stderr": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
    servers = [subprocess.Popen([*command, f"--host={host}"], **piped) for host in hosts]
    of_others, of_this_machine = (server.communicate()[1] for server in servers)
    assert "anybody who reaches it is served" in of_others
    assert "anybody who reaches it" not in of_this_machine


# What is no request.


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/chat/completions", b"{not json", 400, "invalid_json"),
        ("POST", "/v1/chat/completions", b"\xff\xfe", 400, "invalid_json"),
        ("POST", "/v1/chat/completions", b"[1]", 400, "invalid_value"),
        ("POST", "/v1/chat/completions", b"", 400, "missing_required_parameter"),
        ("POST", "/v1/chat/completions", b'{"model": "tiny"}', 400, "missing_required_parameter"),
        ("GET", "/v1/nothing", b"", 404, None),
        ("GET", "/v1/sessions/nobody", b"", 404, "session_not_found"),
        ("GET", "/live?interval_s=0.01", b"", 400, "invalid_value"),
        ("GET", "/live?interval_s=often", b"", 400, "invalid_value"),
        ("GET", "/live?session_id=", b"", 400, "invalid_value"),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": ""}', 400, "empty_message"),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": [99999]}', 400, "invalid_value"),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "x", "echo": true}', 400, "unsupported_parameter"),
        ("PUT", "/v1/sessions", b"", 405, "GET, POST"),
        ("PUT", "/v1/sessions/one", b"", 405, "DELETE, GET, POST"),
        ("GET", "/v1/chat/completions", b"", 405, "POST"),
        ("POST", "/v1/models/tiny", b"", 405, "GET"),
        ("PUT", "/metrics", b"", 405, "GET, HEAD"),
        ("PUT", "/", b"", 405, "GET"),
    ],
)
def test_what_is_no_request_is_told_in_openais_shape(server, method, path, body, status, code):
    with server.http() as http:
        answer = http.request(method, path, content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
    assert error.keys() == {"message", "type", "param", "code"}
    assert (answer.headers["Allow"] if status == 405 else error["code"]) == code


HALF = r'"\ud83d"'  # Of a pair of surrogates: JSON may say so, and it is no text.
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, '"messages": [{"role": "user", "content": HALF}]', "messages.0.content"),
        (CHAT, '"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]', "messages.0.content"),
        (CHAT, '"messages": [{"role": "user", "content": "x"}], "context": ["y", HALF]', "context.1"),
        (CHAT, '"messages": [{"role": "user", "content": "x"}], "stop": [HALF]', "stop"),
        ("/v1/completions", '"prompt": HALF', "prompt"),
        ("/v1/completions", '"prompt": "x", "user": HALF', "user"),
        ("/v1/sessions", '"session_id": "half", "system": HALF', "system"),
        ("/v1/chunks", '"chunks": [HALF]', "chunks.0"),
    ],
)
def test_half_a_character_is_refused(server, path, body, param):
    model = "" if path in ("/v1/sessions", "/v1/chunks") else f'"model": "{sk.MODEL}", '
    content = f"{{{model}{body.replace('HALF', HALF)}}}".encode()
    with server.http() as http:
        answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert error_of(answer) == (400, "invalid_value", param)


def test_a_body_over_the_limit_is_refused_by_its_length_and_by_what_came(server):
    limit = server.state.config.max_body_bytes
    body = json.dumps({"model": sk.MODEL, "messages": [user("x" * limit)]}).encode()
    with server.http() as http:
        for content in (body, (body[start : start + 65536] for start in range(0, len(body), 65536))):
            assert error_of(http.post(CHAT, content=content)) == (413, "request_too_large", None)


# A full queue, deadlines, clients that leave.


def test_a_full_queue_and_a_deadline_are_told_as_openais_client_understands(server, monkeypatch):
    before, _ = scrape(server)
    with (
        server.client(max_retries=0) as client,
        server.client(max_retries=20) as patient,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        with held(server.service.loop):
            waiting = [pool.submit(chat, client, [user(f"long {i}")], 200) for i in range(3)]
            server.wait_until(lambda: server.service._num_there == 3)
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError, match="2 turns wait already, and 2 may") as told:
                    chat(client, [user("one more")], stream=stream)
                assert 1 <= int(told.value.response.headers["Retry-After"]) <= 60
            coming = pool.submit(chat, patient, [user("comes again, as it is told")])
        assert all(each.result().usage.completion_tokens == 200 for each in waiting)
        assert text_of(coming.result())
        options = {"max_tokens": 400, "extra_body": {"timeout_s": 0.02, "ignore_eos": True}}
        with pytest.raises(openai.APIStatusError) as told:
            chat(patient, [user("slow")], **options)
        assert (told.value.status_code, told.value.code) == (408, "timeout")
        assert told.value.request.headers["x-stainless-retry-count"] == "0", "it does not ask again by itself"
        options["extra_body"]["timeout_s"], step = 1.0, server.engine.step  # It has begun by then, and not ended.
        with monkeypatch.context() as slowed:
            slowed.setattr(server.engine, "step", lambda: (time.sleep(0.01), step())[1])
            with pytest.raises(openai.APIError, match="not there in time"):
                list(chat(client, [user("slow")], stream=True, **options))
        with pytest.raises(openai.APIStatusError, match="not there in time"):
            client.post("/chunks", body={"chunks": ["never computed " * 20], "timeout_s": 1e-9}, cast_to=object)
    sk.wait_until_idle(server)
    after, _ = scrape(server)
    name = "ca_jax:requests_refused_total"
    assert after[name, "429"] - before.get((name, "429"), 0) >= 2
    assert after[name, "408"] - before.get((name, "408"), 0) == 2


def test_a_turn_of_a_session_that_still_answers_is_not_asked_for_again(server):
    """By itself: what the client would send then does not follow the answer that it has not read."""
    with server.client() as client, concurrent.futures.ThreadPoolExecutor(2) as pool:
        named = {"session_id": chat(client, [user("first")], 1).session_id}
        with held(server.service.loop):
            asking = []
            for number in range(2):
                asking.append(pool.submit(chat, client, [user("go on")], extra_body=named))
                server.wait_until(lambda number=number: server.service.num_requests == number + 1)
        told = asking[1].exception()
        assert text_of(asking[0].result())
    assert isinstance(told, openai.ConflictError)
    assert (told.code, told.request.headers["x-stainless-retry-count"]) == ("session_busy", "0")


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
        server.wait_until(lambda: server.engine.num_jobs[0] == 1)
    sk.wait_until_idle(server)
    assert (server.engine.metrics.cancelled, scrape(server)[0][name]) == (cancelled + 1, aborted + 1)
    session = [each for each in server.engine.sessions if each.messages and each.messages[0]["content"] == "gone"][-1]
    assert len(session.token_ids) < 450, "what was generated by then is part of the conversation"
    with server.client() as client:
        assert chat(client, [*session.messages, user("and?")]).session_id == session.session_id


def test_half_a_request_and_a_slow_reader_hold_nobody(server):
    host, port = server.url.removeprefix("http://").split(":")
    for sent in (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
        b"GARBAGE\r\n\r\n",
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
    with connected(server, is_small=True, messages=[user("slow reader")]), server.client() as client:
        server.wait_until(lambda: server.engine.num_jobs[0] == 1)
        assert text_of(chat(client, [user("fast")]))
    sk.wait_until_idle(server)


def test_a_client_that_never_reads_is_let_go_behind_its_deadline(server, monkeypatch):
    monkeypatch.setattr("ca_jax.server.state._READING_S", 0.1)
    told = {"n": 3, "logprobs": True, "top_logprobs": 20, "timeout_s": 3.0}
    with connected(server, is_small=True, messages=[user("never reads")], **told) as connection:
        server.wait_until(lambda: server.engine.num_jobs != (0, 0))
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
        server.wait_until(lambda: server.service.loop.step_s == 0)
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
        server.wait_until(lambda: server.state.status == "ok")
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(chat, client, [user(f"waits {i}")], 400) for i in range(2)]
            server.wait_until(lambda: server.engine.num_jobs[0] == 2)
            monkeypatch.setattr(server.engine, "step", lambda: 1 / 0)
            told = [each.exception() for each in waiting]
        assert [type(each) for each in told] == [openai.InternalServerError] * 2
        assert not any("ZeroDivision" in str(each) or "Traceback" in str(each) for each in told)
        with pytest.raises(openai.InternalServerError) as refused:
            chat(client, [user("comes")])
        assert refused.value.status_code == http.get("/health").status_code == 503


def test_what_runs_when_it_is_told_to_stop_ends_and_is_saved(tmp_path):
    asked, pool = [user("a last word")], concurrent.futures.ThreadPoolExecutor(1)
    with pool, sk.running(store=ssd_store(tmp_path)) as server, server.client(max_retries=0) as client:
        answering = pool.submit(chat, client, asked, 300)
        server.wait_until(lambda: server.engine.num_jobs[0] == 1)
        server.state.begin_shutdown()
        with pytest.raises(openai.InternalServerError, match="not ready: shutting down"):
            chat(client, [user("too late")])
        server.server.should_exit = True
        answer = answering.result()
        assert answer.usage.completion_tokens == 300
    with sk.running(store=ssd_store(tmp_path)) as server, server.client() as client:
        followed = chat(client, [*asked, assistant(text_of(answer)), user("more")])
        assert followed.usage.ca_jax["cached_tokens"] == {"ssd": answer.usage.total_tokens - 1}


# Metrics.


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    sizes = {"dram_gib": kit.store_of(24).dram_gib, "ssd_gib": 0.05}
    with sk.running(store=ssd_store(tmp_path_factory.mktemp("ssd"), **sizes)) as running:
        yield running


def test_every_tier_says_what_it_holds_and_how_soon_what_it_evicted_was_needed_again(tiered):
    asked = [[user(f"{name} {'word ' * 30}")] for name in ("one", "two", "three", "four")]
    with tiered.client() as client:
        answers = []
        for messages in asked:
            answers.append(chat(client, messages, 12))
            tiered.engine.wait_for_saves()
        before, _ = scrape(tiered)
        followed = chat(client, [*asked[0], assistant(text_of(answers[0])), user("more")], 12)
    assert followed.usage.ca_jax["cached_tokens"] == {"ssd": answers[0].usage.total_tokens - 1}
    found, types = scrape(tiered)
    gaps = "ca_jax:evict_to_reuse_seconds"
    assert types[gaps] == "histogram"
    assert before["ca_jax:tier_evictions_total", "dram"] >= 1
    assert (before[f"{gaps}_count", "dram"], found[f"{gaps}_count", "dram"]) == (0, 1)
    assert 0 < found[f"{gaps}_sum", "dram"] < sk.DEADLINE_S
    for tier, num_gaps in (("dram", 1), ("ssd", 0)):
        cumulative = [found[f"{gaps}_bucket", *sorted((str(bound), tier))] for bound in GAP_BOUNDS_S]
        assert cumulative == sorted(cumulative)
        assert found[f"{gaps}_bucket", "+Inf", tier] == cumulative[-1] == num_gaps
    stats = tiered.engine.store_stats()
    for tier, num_sessions in (("dram", stats.num_dram_sessions), ("ssd", stats.ssd.num_sessions)):
        assert found["ca_jax:tier_sessions", tier] == num_sessions > 0
        assert 0 < found["ca_jax:tier_used_bytes", tier] <= found["ca_jax:tier_capacity_bytes", tier]
        assert ("ca_jax:tier_evicted_bytes_total", tier) in found
    assert found["ca_jax:tier_sessions", "dram"] < found["ca_jax:tier_sessions", "ssd"] == len(asked)
    for name in (("ca_jax:fetches_total",), ("ca_jax:store_hits_total", "ssd")):
        assert found[name] - before[name] == 1
    assert {key[1] for key in found if key[0] == "ca_jax:store_misses_total"} == set(MissReason)
    assert found["ca_jax:store_misses_total", "absent"] >= len(asked)
    for name in ("loaded", "saved", "flushed"):
        assert found[f"ca_jax:{name}_bytes_total",] > 0


def test_metrics_are_numbers_by_the_names_that_are_read(tiered):
    meter = tiered.engine._kv.meter
    meter.forget()  # What a turn of a tiny model moves is too little for a rate: a fit may say that bytes cost nothing.
    meter.add_prefill(0, 64, 0.01)
    for add, rate in ((meter.add_load, 1e8), (meter.add_save, 1e9)):
        for num_bytes in (1 << 20, 1 << 22):
            add(num_bytes, num_bytes / rate)
    found, types = scrape(tiered)
    assert types["ca_jax:bytes_per_second"] == "gauge"
    assert found["ca_jax:bytes_per_second", "load"] == pytest.approx(1e8)
    assert found["ca_jax:bytes_per_second", "save"] == pytest.approx(1e9)
    assert min(found["ca_jax:load_stall_seconds_total",], found["ca_jax:write_stall_seconds_total",]) >= 0
    limitless = TransferRate(bytes_per_s=math.inf)  # As a few measurements of a fast link may say.
    rates = Rates(num_layers=2, layer_token_bytes=64, load=limitless, save=limitless, prefill=PrefillRate(token_s=1e-3))
    reading = dataclasses.replace(Reading.of(tiered.engine), rates=rates)
    families = {
        family.name: family for family in text_string_to_metric_families(tiered.service.metrics.text(reading).decode())
    }
    wanted = {
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prompt_tokens", "vllm:generation_tokens"),
        *("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:kv_cache_usage_perc"),
        *("vllm:cpu_cache_usage_perc", "vllm:request_success", "vllm:time_to_first_token_seconds"),
    }
    assert wanted <= families.keys()
    for family in families.values():
        assert all(math.isfinite(sample.value) for sample in family.samples), family.name
    for name in ("vllm:kv_cache_usage_perc", "vllm:cpu_cache_usage_perc"):
        assert 0 <= families[name].samples[0].value <= 1
