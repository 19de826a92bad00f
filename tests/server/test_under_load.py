"""The server under load: a bounded queue, deadlines, clients that go away, start and end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import threading

import openai
import pytest

from ca_jax.storage.config import StoreConfig
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import assistant, chat, text_of, user


@pytest.fixture(scope="module")
def server():
    with sk.running(server={"max_queue": 2}, max_batch_size=1) as running:
        yield running


def wait_until_idle(server):
    """Until nothing runs, also of what the engine's thread had not been told yet."""
    obeyed = threading.Event()
    server.service.loop.tell(lambda engine: obeyed.set())
    assert obeyed.wait(sk.DEADLINE_S)
    counts = server.service
    server.wait_until(lambda: counts.num_requests == counts.loop.num_live == sum(server.engine.num_jobs) == 0)


def aborts(server):
    name = 'vllm:request_success_total{finished_reason="abort",model_name="tiny"}'
    with server.http() as http:
        told = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(told[0].split()[-1]) if told else 0


def begin_stream(server, connection, **fields):
    """Sends a request for a long stream, and reads nothing of it."""
    asked = {"model": sk.MODEL, "max_tokens": 400, "stream": True, "ignore_eos": True}
    content = json.dumps({**asked, **fields}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    )
    connection.sendall(head + str(len(content)).encode() + b"\r\n\r\n" + content)


@contextlib.contextmanager
def small_socket(server):
    """A connection that takes little before it is read."""
    host, port = server.url.removeprefix("http://").split(":")
    server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # Of those it accepts.
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.settimeout(sk.DEADLINE_S)
        connection.connect((host, int(port)))
        yield connection


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
        client.models.list()
        for path in ("/health", "/metrics", "/v1/sessions", f"/v1/sessions/{name}", "/"):
            assert http.get(path).status_code == 200
        assert http.delete(f"/v1/sessions/{name}").status_code == 200
    assert hops == []


def num_refused(server, status):
    """Requests that were refused with a status so far."""
    name = f'ca_jax:requests_refused_total{{status="{status}"}} '
    with server.http() as http:
        told = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(told[0].removeprefix(name)) if told else 0


def test_a_full_queue_says_when_to_come_again(server):
    client = server.client(max_retries=0)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(chat, client, [user(f"long {i}")], 200) for i in range(3)]
        server.wait_until(lambda: server.service.loop.num_live == 3)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError, match="2 turns wait already, and 2 may") as told:
                chat(client, [user("one more")], stream=stream)
            assert 1 <= int(told.value.response.headers["Retry-After"]) <= 60
        assert all(each.result().usage.completion_tokens == 200 for each in waiting)
    assert text_of(chat(client, [user("one more")]))
    assert num_refused(server, 429) == 2


def test_a_deadline_ends_a_request_and_gives_back_what_it_held(server, client):
    options = {"max_tokens": 400, "extra_body": {"timeout_s": 0.02, "ignore_eos": True}}
    refused = num_refused(server, 408)
    with pytest.raises(openai.APIStatusError) as told:
        chat(client, [user("slow")], **options)
    assert (told.value.status_code, told.value.code) == (408, "timeout")
    assert num_refused(server, 408) == refused + 1, "the client does not ask again by itself"
    assert told.value.request.headers["x-stainless-retry-count"] == "0"
    with pytest.raises(openai.APIError, match="not there in time"):
        list(chat(client, [user("slow")], stream=True, **options))
    wait_until_idle(server)


def test_a_turn_of_a_session_that_still_answers_is_not_asked_for_again(server, client):
    """By itself: what the client would send then does not follow the answer that it has not read."""
    named = {"session_id": chat(client, [user("first")], 1).session_id}
    let_go = threading.Event()
    server.service.loop.tell(lambda engine: let_go.wait(sk.DEADLINE_S))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asking = []
        for number in range(2):
            asking.append(pool.submit(chat, client, [user("go on")], extra_body=named))
            server.wait_until(lambda number=number: server.service.num_requests == number + 1)
        let_go.set()
        told = asking[1].exception()
        assert text_of(asking[0].result())
    assert isinstance(told, openai.ConflictError)
    assert (told.code, told.request.headers["x-stainless-retry-count"]) == ("session_busy", "0")
    wait_until_idle(server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_engine_has_heard_of_it_is_told_so(server, client, stream):
    with pytest.raises(openai.APIStatusError) as told:
        chat(client, [user("at once")], stream=stream, extra_body={"timeout_s": 1e-9})
    assert (told.value.status_code, told.value.code) == (408, "timeout")
    wait_until_idle(server)


def test_a_burst_is_counted_before_the_engine_has_taken_it_in(server):
    """The queue is bounded also while the engine's thread is in a step and takes nothing in."""
    client = server.client(max_retries=0)
    let_go = threading.Event()
    server.service.loop.tell(lambda engine: let_go.wait(sk.DEADLINE_S))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(chat, client, [user(f"burst {i}")]) for i in range(8)]
        try:
            server.wait_until(lambda: sum(each.done() for each in asking) == 5)
        finally:
            let_go.set()
        refused = [each for each in asking if isinstance(each.exception(), openai.RateLimitError)]
        assert len(refused) == 5, "one in the slot and two that wait"
    wait_until_idle(server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_turn(server, client, stream):
    cancelled, aborted = server.engine.metrics.cancelled, aborts(server)
    body = {"model": sk.MODEL, "messages": [user("gone")], "max_tokens": 450, "stream": stream, "ignore_eos": True}
    content = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + f"{len(content)}\r\n\r\n".encode() + content)
        server.wait_until(lambda: server.engine.num_jobs[0] == 1)
    wait_until_idle(server)
    assert (server.engine.metrics.cancelled, aborts(server)) == (cancelled + 1, aborted + 1)
    [session] = [each for each in server.engine.sessions if each.messages and each.messages[0]["content"] == "gone"][
        -1:
    ]
    assert len(session.token_ids) < 450, "what was generated by then is part of the conversation"
    followed = [*session.messages, user("and?")]
    answer = chat(client, followed)
    assert answer.session_id == session.session_id


def test_half_a_request_holds_nothing(server):
    host, port = server.url.removeprefix("http://").split(":")
    for sent in (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
        b"GARBAGE\r\n\r\n",
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
    wait_until_idle(server)
    assert sk.health(server.url) == {"status": "ok"}


def test_streams_of_slow_readers_do_not_hold_others(server):
    with small_socket(server) as connection:
        begin_stream(server, connection, messages=[user("slow reader")])
        server.wait_until(lambda: server.engine.num_jobs[0] == 1)
        with server.client() as client:
            assert text_of(chat(client, [user("fast")]))
    wait_until_idle(server)


def test_a_client_that_never_reads_is_let_go_behind_its_deadline(server, monkeypatch):
    monkeypatch.setattr("ca_jax.server.waiting._READING_S", 0.1)
    with small_socket(server) as connection:
        told = {"n": 3, "logprobs": True, "top_logprobs": 20, "timeout_s": 3.0}
        begin_stream(server, connection, messages=[user("never reads")], **told)
        server.wait_until(lambda: server.engine.num_jobs != (0, 0))
        wait_until_idle(server)
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert b"[DONE]" not in received


def test_chunks_have_a_deadline_too(server, client):
    with pytest.raises(openai.APIStatusError) as told:
        client.post("/chunks", body={"chunks": ["never computed " * 20], "timeout_s": 1e-9}, cast_to=object)
    assert (told.value.status_code, told.value.code) == (408, "timeout")
    wait_until_idle(server)


def test_a_broken_engine_answers_whoever_waits_and_whoever_comes(monkeypatch):
    with sk.running() as server, server.client(max_retries=0) as client:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(chat, client, [user(f"waits {i}")], 400) for i in range(2)]
            server.wait_until(lambda: server.engine.num_jobs[0] == 2)
            monkeypatch.setattr(server.engine, "step", lambda: 1 / 0)
            told = [each.exception() for each in waiting]
        assert [type(each) for each in told] == [openai.InternalServerError] * 2
        assert not any("ZeroDivision" in str(each) or "Traceback" in str(each) for each in told)
        with pytest.raises(openai.InternalServerError) as refused:
            chat(client, [user("comes")])
        assert refused.value.status_code == 503
        with server.http() as http:
            assert http.get("/health").status_code == 503


def test_it_is_ready_once_the_engine_is():
    let_go = threading.Event()

    def make_engine():
        assert let_go.wait(sk.DEADLINE_S)
        return kit.small_engine()

    with sk.starting(make_engine) as server, server.client(max_retries=0) as client:
        for path in ("/health", "/metrics"):
            with pytest.raises(openai.InternalServerError) as told:
                client.get(f"{server.url}{path}", cast_to=object)
            assert told.value.status_code == 503
        with pytest.raises(openai.InternalServerError, match="not ready: starting") as told:
            client.models.list()
        assert told.value.response.headers["Retry-After"]
        let_go.set()
        server.wait_until(lambda: server.state.status == "ok")
        assert sk.health(server.url) == {"status": "ok"}


def test_what_runs_when_it_is_told_to_stop_ends_and_is_saved(tmp_path):
    store = StoreConfig(
        dram_gib=0.05, ssd_dir=str(tmp_path), ssd_gib=0.2, ssd_free_floor_gib=0.0, block_tokens=kit.BLOCK_TOKENS
    )
    asked, pool = [user("a last word")], concurrent.futures.ThreadPoolExecutor(1)
    with pool, sk.running(store=store) as server, server.client(max_retries=0) as client:
        answering = pool.submit(chat, client, asked, 300)
        server.wait_until(lambda: server.engine.num_jobs[0] == 1)
        server.state.begin_shutdown()
        with pytest.raises(openai.InternalServerError, match="not ready: shutting down"):
            chat(client, [user("too late")])
        server.server.should_exit = True
        answer = answering.result()
        assert answer.usage.completion_tokens == 300
    with sk.running(store=store) as server, server.client() as client:
        followed = chat(client, [*asked, assistant(text_of(answer)), user("more")])
        assert followed.usage.ca_jax["cached_tokens"] == {"ssd": answer.usage.total_tokens - 1}
