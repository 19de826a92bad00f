"""What the HTTP layer adds to a request, and to a token of eight streams: the same turns with and without it, in turns.

    .venv/bin/python -m tools.server_overhead --json_out=results/server/overhead.json

Without HTTP the engine is stepped in this process and nobody listens; with it the clients are another process, which
reads sockets and no more. Let nothing else run meanwhile.

Not here: how long turns take (`bench`), what happens under load (`tests.server.soak`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit
from tests import server_kit as sk

_NUM_STREAMS = 8
_STREAM_TOKENS = 256
_PATH, _HEADERS = "/v1/chat/completions", {"Content-Type": "application/json"}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="of one token each, in each round")
    parser.add_argument("--rounds", type=int, default=5, help="with and without HTTP")
    parser.add_argument("--json_out", type=Path)
    args = parser.parse_args()
    requests: dict[str, list[float]] = {"http": [], "engine": []}
    tokens: dict[str, list[float]] = {"http": [], "engine": []}
    with (
        concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as client,
        sk.running(max_batch_size=_NUM_STREAMS) as server,
        kit.small_engine(max_batch_size=_NUM_STREAMS) as engine,
    ):
        for number in range(args.rounds + 1):  # The first one compiles.
            for way in ("engine", "http") if number % 2 else ("http", "engine"):
                if way == "http":
                    one, many = client.submit(_with, server.url, args.requests).result()
                else:
                    one, many = _without(engine, args.requests)
                if number:
                    requests[way] += one
                    tokens[way].append(many)
    medians = {way: statistics.median(seconds) * 1e3 for way, seconds in requests.items()}
    per_token = {way: statistics.median(seconds) * 1e3 for way, seconds in tokens.items()}
    row = {
        "request_ms": medians,
        "request_overhead_ms": medians["http"] - medians["engine"],
        "stream_token_ms": per_token,
        "stream_token_overhead_ms": per_token["http"] - per_token["engine"],
        "num_streams": _NUM_STREAMS,
        "rounds": args.rounds,
    }
    print(json.dumps(row, indent=1))
    if args.json_out is not None:
        found = {"machine": describe_machine(), "versions": describe_versions(), **row}
        args.json_out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _messages(number: int) -> list[dict[str, str]]:
    return [sk.user(f"request {number:06d}")]


def _without(engine: Any, num_requests: int) -> tuple[list[float], float]:
    """Seconds of each request of one token, and of each token of the streams."""
    params = SamplingParams(max_tokens=1)
    seconds = []
    for number in range(num_requests):
        started_s = time.perf_counter()
        session = engine.session()
        "".join(session.send(_messages(number), sampling=params))
        seconds.append(time.perf_counter() - started_s)
        session.close()
    params = SamplingParams(max_tokens=_STREAM_TOKENS, ignore_eos=True)
    sessions = [engine.session() for _ in range(_NUM_STREAMS)]
    started_s = time.perf_counter()
    jobs = [session.submit(_messages(number), sampling=params) for number, session in enumerate(sessions)]
    while not all(job.done for job in jobs):
        engine.step()
    per_token = (time.perf_counter() - started_s) / (_NUM_STREAMS * _STREAM_TOKENS)
    for session in sessions:
        session.close()
    return seconds, per_token


def _with(url: str, num_requests: int) -> tuple[list[float], float]:
    """The same over HTTP, in another process."""
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host)
    seconds = []
    for number in range(num_requests):
        content = _body(number, 1)
        started_s = time.perf_counter()
        connection.request("POST", _PATH, content, _HEADERS)
        answer = connection.getresponse().read()
        seconds.append(time.perf_counter() - started_s)
        _delete(connection, json.loads(answer)["session_id"])
    ended = [0] * _NUM_STREAMS
    names: list[str] = [""] * _NUM_STREAMS

    def stream(number: int) -> None:
        each = http.client.HTTPConnection(host)
        each.request("POST", _PATH, _body(number, _STREAM_TOKENS, stream=True, ignore_eos=True), _HEADERS)
        response = each.getresponse()
        first = response.readline()
        names[number] = json.loads(first.removeprefix(b"data: "))["session_id"]
        while piece := response.read1(1 << 16):
            ended[number] += piece.count(b"data: ")
        each.close()

    with concurrent.futures.ThreadPoolExecutor(_NUM_STREAMS) as threads:
        started_s = time.perf_counter()
        list(threads.map(stream, range(_NUM_STREAMS)))
    per_token = (time.perf_counter() - started_s) / (_NUM_STREAMS * _STREAM_TOKENS)
    if min(ended) < _STREAM_TOKENS // 2:
        raise RuntimeError(f"pieces of each stream must be about {_STREAM_TOKENS}, got {ended}")
    connection.close()  # It was idle for as long as the streams took: the server may have closed its end.
    for name in names:
        _delete(connection, name)
    return seconds, per_token


def _body(number: int, max_tokens: int, **changes: bool) -> str:
    asked = {"model": sk.MODEL, "messages": _messages(number), "max_tokens": max_tokens, "temperature": 0}
    return json.dumps({**asked, **changes})


def _delete(connection: http.client.HTTPConnection, session_id: str) -> None:
    connection.request("DELETE", f"/v1/sessions/{session_id}")
    connection.getresponse().read()


if __name__ == "__main__":
    main()
