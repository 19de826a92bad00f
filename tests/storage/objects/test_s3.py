"""Objects on S3, by a server that behaves like it: conditions, refusals, outages, bodies that are cut short.

A proxy in front of the server answers some requests itself, as a service does that is overloaded or breaks off.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import http.server
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
import tensorstore as ts

from ca_jax.engine import Engine
from ca_jax.kv import object_transfers
from ca_jax.storage.objects import ownership, parts
from ca_jax.storage.objects.ownership import NotOwnerError
from ca_jax.storage.objects.store import ObjectsError, ObjectStore, ObjectsUnfitError
from tests import engine_kit as kit
from tests.replica_kit import RUN_BLOCKS, SAID, claimed, make_replica, say, serial

threaded = pytest.importorskip("moto.server", reason="needs moto[server]")

DEADLINE_S = 6.0
SPACE = "n" * 64


class Proxy(http.server.ThreadingHTTPServer):
    """Hands requests on; `answer` may answer one itself, with a status, or change a body."""

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.refuse: Callable[[str, str], int | None] = lambda method, path: None
        self.changes: Callable[[str, bytes], bytes] = lambda path, body: body
        self.without: tuple[str, ...] = ()
        """Headers that are not handed on."""
        self.seen: list[tuple[str, str]] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, self.path))
        if (status := self.server.refuse(self.command, self.path)) is not None:
            self._reply(status, {}, b"<Error><Code>Code</Code></Error>")
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in self.server.without}
        request = urllib.request.Request(self.server.target + self.path, body or None, headers, method=self.command)
        try:
            with urllib.request.urlopen(request) as answer:
                self._reply(answer.status, answer.headers, self.server.changes(self.path, answer.read()))
        except urllib.error.HTTPError as error:
            self._reply(error.code, error.headers, error.read())

    def _reply(self, status: int, headers, body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = _serve

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    server = threaded.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def proxy(service, monkeypatch, request) -> Iterator[Proxy]:
    for name, value in (("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "y"), ("AWS_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    proxy = Proxy(service)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_address[1]}")
    soon = {"s3_request_retries": {"initial_delay": "10ms"}}  # A second, if it is not said.
    monkeypatch.setattr(ts, "Context", lambda spec, context=ts.Context: context({**spec, **soon}))
    yield proxy
    proxy.shutdown()
    thread.join()
    proxy.server_close()


@pytest.fixture
def objects(proxy, service, request) -> ObjectStore:
    bucket = f"bucket-{abs(hash(request.node.name)) % 10**9}"
    urllib.request.urlopen(urllib.request.Request(f"{service}/{bucket}", method="PUT")).close()
    return ObjectStore(f"s3://{bucket}/kv", DEADLINE_S)


def test_a_bucket_holds_to_conditions(objects) -> None:
    objects.probe()
    absent = objects.read("a")
    assert absent.value is None
    first = objects.write("a", b"0123456789", replaces=absent.generation)
    assert first
    assert objects.write("a", b"2", replaces=absent.generation) is None
    assert objects.read("a", 2, 5).value == b"234"
    assert objects.write("a", b"3", replaces=first)
    assert objects.write("a", b"4", replaces=first) is None
    assert objects.read("a").value == b"3"
    assert objects.names("") == ["a"]
    objects.write("a", None)
    assert objects.read("a").value is None


def test_a_look_alike_that_ignores_conditions_is_refused(objects, proxy) -> None:
    proxy.without = ("if-match", "if-none-match")
    with pytest.raises(ObjectsUnfitError, match="must be of a store that writes on a condition"):
        objects.probe()


def test_a_bucket_that_is_not_there_is_refused(proxy) -> None:
    with pytest.raises(ObjectsUnfitError, match="must be one that can be written to"):
        ObjectStore("s3://no-such-bucket/kv", DEADLINE_S).probe()


def test_a_conflict_with_a_write_under_way_is_tried_again(objects, proxy) -> None:
    absent = objects.read("a")
    left = iter([409, 409])
    proxy.refuse = lambda method, path: next(left, None) if method == "PUT" else None
    assert objects.write("a", b"1", replaces=absent.generation)
    assert next(left, None) is None, "both conflicts were met"


def test_an_outage_ends_at_the_deadline(objects, proxy) -> None:
    proxy.refuse = lambda method, path: 503
    objects._deadline_s = 0.5
    with pytest.raises(ObjectsError, match="could not be read"):
        objects.read("a")
    with pytest.raises(ObjectsError, match="could not be written"):
        objects.write("a", b"1", replaces=b"\x02")


def test_a_short_outage_is_waited_for(objects, proxy) -> None:
    left = iter([503, 503])
    proxy.refuse = lambda method, path: next(left, None)
    objects.write("a", b"1")
    assert objects.read("a").value == b"1"


def test_a_body_that_is_cut_short_is_what_is_read(objects, proxy) -> None:
    """Checksums of manifests and objects find it: the store does not."""
    objects.write("a", b"0123456789")
    proxy.changes = lambda path, body: body[:4]
    assert objects.read("a").value == b"0123"


def test_two_owners_on_s3(objects) -> None:
    def publish(held, chain: str):
        return objects.run(ownership.publish(held, chain=chain, conversation=chain.encode()))

    one = publish(objects.run(ownership.claim(SPACE, "k", "one")), "1")
    two = objects.run(ownership.claim(SPACE, "k", "two"))
    assert two.manifest.epoch == one.manifest.epoch + 1
    two = publish(two, "1 2")
    with pytest.raises(NotOwnerError):
        publish(one, "1 x")
    assert objects.run(ownership.claim(SPACE, "k", "one")).manifest.chain == "1 2"


@pytest.mark.parametrize("fault", ["none", "slow down", "cut short"])
def test_a_conversation_goes_on_at_replicas_that_share_a_bucket(service, proxy, tmp_path, monkeypatch, fault) -> None:
    """KV comes layer by layer; what is refused or cut short while a turn waits for it is computed."""
    bucket = f"replicas-{fault.replace(' ', '-')}"
    urllib.request.urlopen(urllib.request.Request(f"{service}/{bucket}", method="PUT")).close()
    monkeypatch.setattr(parts, "RUN_BYTES", RUN_BLOCKS * kit.BLOCK_TOKENS * kit.TOKEN_BYTES)
    monkeypatch.setattr(object_transfers, "_READ_BYTES", 1)
    with contextlib.ExitStack() as stack:
        make = functools.partial(make_replica, tmp_path, url=f"s3://{bucket}/shared")
        engines = [stack.enter_context(contextlib.closing(make())) for _ in range(2)]
        for number, (text, answer) in enumerate(zip(SAID, serial(), strict=True)):
            engine, seen = engines[number % 2], len(proxy.seen)
            session = claimed(engine)
            num_before, num_published = len(session.token_ids), engine.metrics.publishes
            if fault == "slow down":
                proxy.refuse = lambda method, path: 503 if method == "GET" and _is_of_kv(path) else None
            elif fault == "cut short":
                proxy.changes = lambda path, body: body[:-1] if _is_of_kv(path) else body
            assert say(session, text) == answer
            proxy.refuse, proxy.changes = lambda method, path: None, lambda path, body: body
            kit.until(engine, functools.partial(_has_published, engine, num_published))
            if number and fault == "none":
                assert session.usage.cached_tokens == {"objects": num_before - 1}
                seen_now = proxy.seen[seen:]
                read = collections.Counter(path for method, path in seen_now if method == "GET" and _is_of_kv(path))
                assert set(read.values()) == {engine.model.config.num_layers, 1}, "layer by layer; new ones looked for"
        assert any(engine.metrics.failed_restores for engine in engines) == (fault != "none")


def _is_of_kv(path: str) -> bool:
    return "/kv/" in path.partition("v1/")[2]


def _has_published(engine: Engine, num_before: int) -> bool:
    return engine.metrics.publishes > num_before
