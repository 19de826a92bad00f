"""Access log and traces, of a real server: what is told of each request, and that neither holds any of them up."""

import http.server
import json
import logging
import threading
from collections.abc import Iterator

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from ca_jax.server import app, observing
from ca_jax.server.config import ServerConfig
from ca_jax.server.tenants import Tenants
from ca_jax.telemetry.spans import SpanSender, traces_url
from tests import engine_kit as kit
from tests import private_kit
from tests import server_kit as sk

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAID = "a secret that no log tells"
KEYS = """
[a]
keys = ["key-of-a-0123456789abcdef"]
metrics = true
"""
KEY = "key-of-a-0123456789abcdef"


class Seen:
    """What an observed server has told."""

    def __init__(self, server, exporter, log):
        self.server, self.exporter, self.log = server, exporter, log

    def lines(self, number=1, **wanted):
        """Lines of the log that have these fields, once there are so many."""

        def found():
            lines = map(json.loads, self.log.read_text().splitlines())
            return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]

        sk.wait_for(lambda: len(found()) >= number)
        return found()

    def spans(self, request_id):
        """The spans of the trace of a request, once it is there: its own, and those below it."""

        def found():
            spans = self.exporter.get_finished_spans()
            return [span for span in spans if span.attributes.get("ca_jax.request_id") == request_id]

        sk.wait_for(found)
        (own,) = found()
        below = [each for each in self.exporter.get_finished_spans() if each.parent == own.context]
        return own, sorted(below, key=lambda span: span.start_time)

    def ask(self, request_id, messages=None, headers=None, **body):
        body = {"model": sk.MODEL, "messages": messages or [sk.user(SAID)], "max_tokens": 4, "temperature": 0, **body}
        headers = {"x-request-id": request_id, **(headers or {})}
        with self.server.http(KEY) as http:
            return http.post("/v1/chat/completions", json=body, headers=headers)


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Iterator[Seen]:
    directory, exporter = tmp_path_factory.mktemp("observed"), InMemorySpanExporter()
    (directory / "keys.toml").write_text(KEYS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        patch.setattr(app, "SpanSender", lambda url, instance: SpanSender(url, instance, exporter))
        config = {"access_log": str(directory / "log"), "otlp_traces_endpoint": "http://127.0.0.1:1"}
        store = sk.ssd_store(directory / "ssd", dram_gib=40 * 16 * kit.TOKEN_BYTES / 2**30)
        with sk.running(Tenants.read(directory / "keys.toml"), config, store=store) as server:
            patch.undo()
            yield Seen(server, exporter, directory / "log")


def test_an_answer_has_a_line_and_a_trace_that_agree_with_what_it_says(seen):
    answer = seen.ask("plain", headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "x-session-id": "talk"})
    usage, (line,) = answer.json()["usage"], seen.lines(request_id="plain")
    assert answer.headers["x-request-id"] == "plain"
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (line["tenant"], line["session"], line["error"]) == ("a", "talk", None)
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert line["ttft_s"] == usage["ca_jax"]["ttft_s"]
    assert 0 < line["ttft_s"] <= line["seconds"]
    assert line["finish_reasons"] == [answer.json()["choices"][0]["finish_reason"]]
    assert line["trace_id"] == TRACE

    own, below = seen.spans("plain")
    assert (own.kind, own.name) == (SpanKind.SERVER, f"chat {sk.MODEL}")
    assert (f"{own.context.trace_id:032x}", f"{own.parent.span_id:016x}") == (TRACE, PARENT)
    assert own.status.status_code is StatusCode.UNSET
    assert {span.name for span in below} == {"queue", "prefill", "decode", "save"}
    told = dict(own.attributes)
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.conversation.id"] == "talk"
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("chat", sk.MODEL)
    assert (told["ca_jax.tenant"], told["http.response.status_code"]) == ("a", 200)


def test_attributes_are_those_of_the_conventions(seen):
    known = {value for name, value in vars(private_kit.gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    seen.ask("conventions", stream=True, n=2, temperature=0.5)
    own, _ = seen.spans("conventions")
    told = {name for name in own.attributes if name.startswith("gen_ai.")}
    assert told <= known
    assert {"gen_ai.request.choice.count", "gen_ai.response.time_to_first_chunk"} <= told


def test_phases_of_a_turn_lie_in_its_request_one_behind_the_other(seen):
    messages = [sk.user("phases " * 12)]
    reply = seen.ask("phases-1", messages).json()["choices"][0]["message"]
    seen.spans("phases-1")  # It is stored.
    answer = seen.ask("phases-2", [*messages, {"role": "assistant", "content": reply["content"]}, sk.user("more")])
    own, below = seen.spans("phases-2")
    spans = {span.name: span for span in below}
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert spans.keys() == {"queue", "load", "prefill", "decode", "save"}
    for span in below:
        assert own.start_time <= span.start_time <= span.end_time
    for name in ("queue", "load", "prefill", "decode"):
        assert spans[name].end_time <= own.end_time
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert spans["save"].attributes["ca_jax.saved_tokens"] > 0
    assert spans["load"].attributes["ca_jax.tier"] == own.attributes["ca_jax.cached_tier"]


def test_what_is_fetched_from_ssd_has_a_span_before_its_load(seen):
    messages = [sk.user("fetched " * 20)]
    reply = seen.ask("fetch-1", messages).json()["choices"][0]["message"]
    seen.spans("fetch-1")
    for other in range(6):  # There is room for few in DRAM.
        seen.ask(f"filler-{other}", [sk.user(f"{other} filler " * 20)])
    again = seen.ask("fetch-2", [*messages, {"role": "assistant", "content": reply["content"]}, sk.user("more")])
    assert again.json()["usage"]["ca_jax"]["cached_tokens"].get("ssd", 0) > 0
    own, below = seen.spans("fetch-2")
    spans = {span.name: span for span in below}
    assert own.start_time <= spans["fetch"].start_time <= spans["fetch"].end_time <= spans["load"].start_time
    assert own.attributes["ca_jax.cached_tier"] == "ssd"


@pytest.mark.parametrize(
    ("request_id", "body", "status", "code"),
    [
        ("moved", {"session_id": "moving", "session_state": "another"}, 409, "session_moved"),
        ("no-model", {"model": "another"}, 404, "model_not_found"),
        ("wrong", {"max_tokens": 0}, 400, "invalid_value"),
    ],
)
def test_what_is_refused_is_told_with_its_status_and_code(seen, request_id, body, status, code):
    if status == 409:
        seen.ask("before-moved", headers={"x-session-id": "moving"})
    answer = seen.ask(request_id, **body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    (line,) = seen.lines(request_id=request_id)
    own, below = seen.spans(request_id)
    assert (line["status"], line["error"], line["trace_id"]) == (status, code, f"{own.context.trace_id:032x}")
    assert (own.status.status_code, own.status.description) == (StatusCode.ERROR, code)
    assert own.attributes["error.type"] == code
    assert not below


def test_a_client_without_key_is_told_and_a_probe_has_no_trace(seen):
    with seen.server.http() as http:
        refused = http.post("/v1/chat/completions", json={}, headers={"x-request-id": "no-key"})
        probe = http.get("/health")
        nowhere = http.get("/nowhere?key=secret")
    assert refused.status_code == 401
    (line,), (own, _) = seen.lines(request_id="no-key"), seen.spans("no-key")
    assert (line["status"], line["error"], line["tenant"]) == (401, "invalid_api_key", None)
    assert own.status.status_code is StatusCode.ERROR
    (line,) = seen.lines(request_id=probe.headers["x-request-id"])
    assert (line["route"], line["status"], line["trace_id"]) == ("/health", 200, None)
    (line,) = seen.lines(request_id=nowhere.headers["x-request-id"])
    assert (line["route"], line["status"]) == ("/nowhere", 404)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_whose_client_goes_away_is_cancelled(seen, stops_behind, stream):
    request_id = f"left-{stream}"
    let_go = stops_behind(seen.server.engine, 3)
    body = {"model": sk.MODEL, "messages": [sk.user(SAID)], "max_tokens": 200, "stream": stream}
    body |= {"stop": ["\0"], "ignore_eos": True}
    with seen.server.client(KEY, max_retries=0) as client:
        headers = {"x-request-id": request_id}
        if stream:
            answer = client.chat.completions.create(**body_of(body), extra_headers=headers)
            next(iter(answer))
            answer.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.5).chat.completions.create(**body_of(body), extra_headers=headers)
    let_go.set()
    (line,), (own, below) = seen.lines(request_id=request_id), seen.spans(request_id)
    assert line["finish_reasons"] == ["cancelled"]
    assert own.status.status_code is StatusCode.ERROR
    assert own.status.description == ("cancelled" if stream else "client_disconnected")
    assert {"queue", "prefill"} <= {span.name for span in below}
    assert all(span.end_time <= own.end_time for span in below if span.name != "save")


def body_of(body):
    """A body as the client of OpenAI takes it."""
    extra = {"ignore_eos": body["ignore_eos"]}
    return {**{name: value for name, value in body.items() if name not in extra}, "extra_body": extra}


def test_neither_tells_what_was_said_nor_keys(seen):
    seen.ask("said")
    seen.spans("said")
    written = seen.log.read_text() + "".join(span.to_json() for span in seen.exporter.get_finished_spans())
    assert SAID not in written
    assert KEY not in written


def test_a_log_that_was_moved_away_is_begun_anew(seen):
    seen.ask("old")
    seen.lines(request_id="old")
    moved = seen.log.rename(seen.log.with_suffix(".1"))
    seen.ask("new")
    sk.wait_for(seen.log.is_file)
    assert seen.lines(request_id="new")
    assert "new" not in {json.loads(line)["request_id"] for line in moved.read_text().splitlines()}


def test_a_collector_gets_what_was_traced(collector, monkeypatch):
    url, came = collector
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with sk.running(server={"otlp_traces_endpoint": url}) as server, server.client() as client:
        sk.chat(client, [sk.user("traced")])
    # It is closed: all was sent.
    (resource, *_), *_ = (each.resource_spans for each in came)
    of_service = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert of_service["service.name"] == "mine"
    names = {
        span.name for each in came for of in each.resource_spans for scope in of.scope_spans for span in scope.spans
    }
    assert names == {f"chat {sk.MODEL}", "queue", "prefill", "decode", "save"}


@pytest.fixture
def collector():
    """A collector of OTLP over HTTP: its URL, and the requests that it got."""
    came = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            came.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}", came
    served.shutdown()
    thread.join()
    served.server_close()


class Stuck(SpanExporter):
    """Exports nothing until it is let go, and then fails."""

    def __init__(self):
        self.begun, self.let_go = threading.Event(), threading.Event()

    def export(self, spans):
        self.begun.set()
        self.let_go.wait(sk.DEADLINE_S)
        raise OSError("the collector is away")

    def shutdown(self):
        self.let_go.set()
        return SpanExportResult.FAILURE


def test_turns_end_while_neither_collector_nor_disk_takes_anything(monkeypatch, tmp_path, caplog):
    exporter = Stuck()
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setattr(app, "SpanSender", lambda url, instance: SpanSender(url, instance, exporter))
    config = {"otlp_traces_endpoint": "http://127.0.0.1:1", "access_log": "/dev/full"}
    with sk.running(server=config) as server, server.client() as client:
        for number in range(4):
            assert sk.chat(client, [sk.user(f"turn {number}")]).usage.completion_tokens == 8
            if not number:
                assert exporter.begun.wait(sk.DEADLINE_S)
        sk.wait_for(lambda: "loses lines" in caplog.text)
        exporter.let_go.set()
    assert caplog.text.count("loses lines") == 1


def test_what_comes_too_fast_is_lost_and_counted(monkeypatch, caplog):
    monkeypatch.setattr(observing, "_MOST_WAITING", 2)
    blocked, let_go = threading.Event(), threading.Event()

    class Log:
        def write(self, observed, trace_id):
            blocked.set()
            let_go.wait(sk.DEADLINE_S)

        def close(self):
            pass

    recorder = observing.Recorder(Log(), None, "")
    ended = [observing.Observed(str(number), "GET", "/", {}, ended_s=1.0) for number in range(6)]
    recorder.add(ended[0])
    assert blocked.wait(sk.DEADLINE_S)
    for each in ended[1:]:
        recorder.add(each)
    let_go.set()
    recorder.close()
    assert "3 requests went unrecorded" in caplog.text


def test_nothing_observes_where_nothing_is_asked_for(server):
    assert observing.Observer not in [each.cls for each in server.server.config.app.user_middleware]


def test_wrong_flags_are_named(tmp_path):
    with pytest.raises(ValueError, match="otlp_traces_endpoint must be an http"):
        ServerConfig(otlp_traces_endpoint="127.0.0.1:4318")
    with pytest.raises(OSError, match="nowhere"):
        app.make_app(lambda: None, ServerConfig(access_log=str(tmp_path / "nowhere" / "log")))
    assert traces_url("http://c:4318/") == traces_url("http://c:4318") == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp") == "https://c/otlp"


def test_standard_output_takes_lines(capsys):
    log = observing.AccessLog("-", "replica-1")
    log.write(observing.Observed("id", "GET", "/x" * 300, {}, ended_s=1.0), None)
    line = json.loads(capsys.readouterr().out)
    assert (line["request_id"], line["replica"], len(line["route"])) == ("id", "replica-1", 256)
    assert logging.raiseExceptions
