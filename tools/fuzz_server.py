"""Fuzzes the server with schemathesis over the tiny model, by the server's own description of itself.

    .venv/bin/python -m tools.fuzz_server --schemathesis=/path/to/schemathesis --json_out=results/server/fuzz.json

Two rounds. The first takes the description as it is served, and keys are not asked for. In the second they are, the
store is on SSD too, and the description is narrowed to one model, a few names of sessions and short answers: what is
generated then reaches the engine. Somebody else talks in these sessions meanwhile, so that they are there, and busy.

schemathesis holds every answer against the description: no status 5xx, and status, content type, headers and body as
described. What leaves the server is also read here: no status 5xx but 503, no trace, no path of this machine's files.
The exit status says whether all was so. `/live`, which never ends, is no part of the description.

schemathesis is not among the packages that the project installs: `pip install schemathesis` somewhere.

Not here: clients' own view of answers (`tests.server`), many of them at once (`tests.server.soak`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.server.tenants import Tenant, Tenants
from ca_jax.storage.config import StoreConfig
from tests import engine_kit as kit
from tests import server_kit as sk

_KEY = "sk-of-the-fuzzer"
_NAMES = ["a", "b c", "ü%", "..", "chunk-1"]
_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
_PACKAGES = ("ca-jax", "jax", "fastapi", "starlette", "pydantic", "uvicorn", "httptools")
_PATHS = (str(Path(__file__).resolve().parent.parent), sys.prefix, f"{tempfile.gettempdir()}{os.sep}")
_LEAKS = re.compile(rb"Traceback|site-packages|\.py\b.{0,20}line \d|" + "|".join(map(re.escape, _PATHS)).encode())


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", default="schemathesis", help="the executable")
    parser.add_argument("--max_examples", type=int, default=500, help="generated for each operation, in each round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json_out", type=Path)
    args = parser.parse_args()
    found_at = shutil.which(args.schemathesis)
    if found_at is None:
        parser.error(f"there must be an executable of schemathesis, got none as {args.schemathesis}")
    args.schemathesis = os.path.abspath(found_at)
    rounds = {"as served": _fuzz(args, narrow=False), "narrowed, with keys": _fuzz(args, narrow=True)}
    cases = sum(each["cases"] for each in rounds.values())
    found = {
        "machine": describe_machine(),
        "versions": describe_versions(_PACKAGES) | {"schemathesis": _version(args.schemathesis)},
        "seed": args.seed,
        "max_examples": args.max_examples,
        "checks": _CHECKS,
        "cases": cases,
        "server_errors": sum(each["server_errors"] for each in rounds.values()),
        "leaks": sum(each["leaks"] for each in rounds.values()),
        "failures": [failure for each in rounds.values() for failure in each["failures"]],
        "rounds": rounds,
    }
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{cases} cases, {found['server_errors']} server errors, {found['leaks']} leaks; {found['failures']}")
    sys.exit(bool(found["server_errors"] or found["leaks"] or found["failures"]))


class Recorder:
    """Middleware around the server: notes what leaves it.

    Args:
      app: what is behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.statuses: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
        """How often each operation answered with each status."""
        self.num_streams = 0
        """Answers that were streams of events."""
        self.leaks: list[str] = []
        """What left that should not have."""
        self.errors: list[str] = []
        """What was answered with a status from 500 on, 503 apart."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; as ASGI says."""
        status, told = 0, b""

        async def noted(message: Message) -> None:
            nonlocal status, told
            if message["type"] == "http.response.start":
                status = message["status"]
                told = repr(message["headers"]).encode()
                self.num_streams += b"text/event-stream" in told
            elif message["type"] == "http.response.body":
                told += message.get("body", b"")
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            if scope["type"] == "http":
                self._note(scope, status, told)

    def _note(self, scope: Scope, status: int, told: bytes) -> None:
        path = getattr(scope.get("route"), "path", None)
        name = "others" if path is None or status == 405 else f"{scope['method']} {path}"
        self.statuses[name][status] += 1
        asked = f"{scope['method']} {scope['raw_path']!r}"
        if status >= 500 and status != 503:
            self.errors.append(asked)
        if _LEAKS.search(told):
            self.leaks.append(f"{asked}: {told[:2000]!r}")


def _fuzz(args: argparse.Namespace, narrow: bool) -> dict[str, Any]:
    """One round."""
    recorders: list[Recorder] = []

    def wrap(app: ASGIApp) -> ASGIApp:
        recorders.append(Recorder(app))
        return recorders[-1]

    tenant = Tenant(name="fuzzer", quota_gib=0.05)
    tenants = Tenants([(hashlib.sha256(_KEY.encode()).digest(), tenant)]) if narrow else None
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        on_ssd = StoreConfig(
            dram_gib=0.01, ssd_dir=str(root / "kv"), ssd_gib=0.1, ssd_free_floor_gib=0, block_tokens=kit.BLOCK_TOKENS
        )
        options = {"store": on_ssd} if narrow else {}
        with sk.running(tenants, {"max_open_sessions": 32}, wrap, context_window=128, **options) as server:
            started_s = time.perf_counter()
            command = _command(args, server.url, narrow, root)
            with _talking(server) if narrow else contextlib.nullcontext():
                exit_code = subprocess.run(command, check=False, cwd=root).returncode
            seconds = time.perf_counter() - started_s
            if server.state.status != "ok":
                raise RuntimeError(f"there must be a server that still serves, got it {server.state.status}")
        told = json.loads((root / "report.json").read_text(encoding="utf-8"))
    failures = [*told["failures"], *told["errors"]]
    if exit_code and not failures:
        raise RuntimeError(f"schemathesis ended with status {exit_code}; wanted a report of why")
    recorder = recorders[0]
    for line in (*recorder.errors[:20], *recorder.leaks[:20]):
        print(line)
    all_statuses: collections.Counter[int] = sum(recorder.statuses.values(), collections.Counter())
    return {
        "cases": told["test_cases"]["generated"],
        "requests": sum(all_statuses.values()),
        "streams": recorder.num_streams,
        "seconds": round(seconds, 1),
        "server_errors": len(recorder.errors),
        "leaks": len(recorder.leaks),
        "failures": failures,
        "statuses": _sorted(all_statuses),
        "operations": {name: _sorted(of_status) for name, of_status in sorted(recorder.statuses.items())},
    }


@contextlib.contextmanager
def _talking(server: sk.Running) -> Iterator[None]:
    """Somebody who goes on in every session, one after the other, and begins those that there are not."""
    ended = threading.Event()

    def talk() -> None:
        with server.http(_KEY) as http:
            for number, name in enumerate(itertools.cycle(_NAMES)):
                if ended.wait(0.1):
                    return
                http.post("/v1/sessions", json={"session_id": name})
                body = {"model": sk.MODEL, "session_id": name, "messages": [sk.user(f"turn {number}")], "max_tokens": 8}
                http.post("/v1/chat/completions", json=body)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _command(args: argparse.Namespace, url: str, narrow: bool, root: Path) -> list[str]:
    with urllib.request.urlopen(f"{url}/openapi.json") as response:
        described = json.load(response)
    if narrow:
        _narrow(described)
    location = root / "openapi.json"
    location.write_text(json.dumps(described), encoding="utf-8")
    return [
        *(args.schemathesis, "run", str(location), f"--url={url}", "--no-color", "--workers=1"),
        *("--phases=examples,coverage,fuzzing,stateful", f"--max-examples={args.max_examples}", f"--seed={args.seed}"),
        *(f"--checks={','.join(_CHECKS)}", "--continue-on-failure", "--generation-database=none"),
        *("--request-timeout=60", f"--report-json-path={root / 'report.json'}"),
        *([f"--header=Authorization:Bearer {_KEY}"] if narrow else []),
    ]


def _narrow(described: dict[str, Any]) -> None:
    """Leaves of a description of requests what reaches the engine, in place."""
    text = {"type": "string", "pattern": "[a-z]", "maxLength": 40}
    tokens = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 127}, "minItems": 1}
    pieces = {"type": "array", "items": {"anyOf": [text, {**tokens, "maxItems": 40}]}, "minItems": 1, "maxItems": 3}
    few = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 16}, {"type": "null"}]}
    asked = {
        "model": {"enum": [sk.MODEL]},
        "max_tokens": few,
        "timeout_s": {"enum": [None, 20.0, 1e-3]},
        "n": {"enum": [None, 1, 2]},
        "stream": {"type": "boolean"},
        "stream_options": {"type": "null"},  # Wants `stream` to be true, which a schema does not say.
    }
    schemas = described["components"]["schemas"]
    narrowed: dict[str, dict[str, Any]] = {
        "ChatRequest": {**asked, "max_completion_tokens": few, "session_id": {"enum": [None, *_NAMES]}},
        "CompletionRequest": {**asked, "prompt": {"anyOf": [text, {**tokens, "maxItems": 100}, pieces]}},
        "ChatMessage": {"content": text},
        "ResponseRequest": {
            "model": {"enum": [sk.MODEL]},
            "input": text,
            "max_output_tokens": few,
            "stream": {"type": "boolean"},
            "conversation": {"enum": [None, *_NAMES]},
            "previous_response_id": {"type": "null"},
            "timeout_s": asked["timeout_s"],
            **{name: {"type": "null"} for name in ("tools", "tool_choice", "text", "include")},
        },
        "MessagesRequest": {
            "model": {"enum": [sk.MODEL]},
            "max_tokens": {"type": "integer", "minimum": 1, "maximum": 16},
            "stream": {"type": "boolean"},
            "tools": {"type": "null"},
        },
        "NewSession": {"session_id": {"enum": [None, *_NAMES]}},
        "NewChunks": {"chunks": pieces},
        "Discard": {"start": {"type": "integer", "minimum": 0, "maximum": 40}},
    }
    narrowed["ChatRequest"] |= {"context": {"anyOf": [pieces, {"type": "null"}]}, "top_logprobs": {"type": "null"}}
    for name, properties in narrowed.items():
        schemas[name]["properties"] |= properties
    for name in ("ChatRequest", "CompletionRequest", "ResponseRequest", "MessagesRequest"):
        schemas[name]["required"].append("stream")
    for operations in described["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", []):
                named = {"session_id": _NAMES, "conversation_id": _NAMES, "model": [sk.MODEL]}.get(parameter["name"])
                if named is not None:
                    parameter["schema"] = {"enum": named}


def _sorted(of_status: collections.Counter[int]) -> dict[str, int]:
    return {str(status): number for status, number in sorted(of_status.items())}


def _version(schemathesis: str) -> str:
    ran = subprocess.run([schemathesis, "--version"], check=True, capture_output=True, text=True)
    return ran.stdout.split()[-1]


if __name__ == "__main__":
    main()
