"""Two replicas, one of which is killed: what a conversation sees of it.

    python -m tools.cluster_demo [--model=...]      needs the extra `cluster`; a minute and a half

It starts `ca_jax cluster` with two replicas that share a directory, says two turns, kills the process that answered
them, goes on at the other one, and says what came from where. What it writes goes to a temporary directory.

Not here: the promises themselves (`tests/reliability/test_replica_kill.py`, `tests/cluster/test_shared.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "smollm2-135m-instruct", "What to serve.")
flags.DEFINE_integer("max_tokens", 48, "Of each answer.")
flags.DEFINE_float("start_s", 240.0, "Longest wait for the replicas, seconds.")

_TURNS = (
    "Tell me about the city of Paris.",
    "What should I see there first?",
    "And on the second day?",
    "How do I get there?",
)
_KILLED_AFTER = 2  # Turns.
_HEADER = "x-ca-jax-replica"


def main(_: Sequence[str]) -> None:
    """Runs it."""
    with tempfile.TemporaryDirectory(prefix="ca_jax-cluster-") as scratch, socket.socket() as free:
        root = Path(scratch)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "ca_jax.launch.cluster", f"--model={FLAGS.model}", f"--port={port}"]
        command += ["--num_replicas=2", "--cpus_per_replica=0.5", "--dram_gib=1", "--ssd_gib=2"]
        command += [f"--ssd_dir={root}/ssd", f"--objects_url=file://{root}/objects"]
        with (root / "log").open("w") as log:
            cluster = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _converse(f"http://127.0.0.1:{port}", root, cluster)
        finally:
            cluster.send_signal(signal.SIGTERM)
            cluster.wait(120)


def _converse(url: str, root: Path, cluster: subprocess.Popen[bytes]) -> None:
    started_s = time.monotonic()
    while _ask(url, "/health") is None:
        if cluster.poll() is not None or time.monotonic() - started_s > FLAGS.start_s:
            sys.exit(
                f"the replicas must serve within {FLAGS.start_s:.0f} s, got:\n{(root / 'log').read_text()[-3000:]}"
            )
        time.sleep(0.5)
    print(f"two replicas serve after {time.monotonic() - started_s:.0f} s; they share file://{root}/objects\n")
    _ask(url, "/v1/sessions", {"session_id": "demo"})
    model = _ask(url, "/v1/models")[0]["data"][0]["id"]
    state: dict[str, Any] = {}
    for number, text in enumerate(_TURNS):
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": FLAGS.max_tokens}
        began_s, answer = time.monotonic(), None
        while answer is None:  # A replica that went away is said so, with 503.
            answer = _ask(url, "/v1/chat/completions", {**body, "temperature": 0, "session_id": "demo", **state})
        told, headers = answer
        state = {"session_state": told["session_state"]}
        usage = told["usage"]
        cached = ", ".join(f"{count} from {tier}" for tier, count in usage["ca_jax"]["cached_tokens"].items() if count)
        print(f"you: {text}\n{headers[_HEADER]}: {told['choices'][0]['message']['content'].strip()}")
        taken_s = time.monotonic() - began_s
        print(f"    {usage['prompt_tokens']} tokens of prompt, cached: {cached or 'none'}; {taken_s:.2f} s\n")
        if number + 1 == _KILLED_AFTER:
            time.sleep(2.0)  # The answer is told before it is published.
            _kill(root, headers[_HEADER])


def _kill(root: Path, replica: str) -> None:
    for path in (root / "ssd").glob("*.name"):
        if path.read_text() == replica:
            pid = json.loads((path.with_suffix("") / "catalog.lock").read_text())["pid"]
            os.kill(pid, signal.SIGKILL)
            print(f"--- {replica} (process {pid}) is killed ---\n")


def _ask(url: str, path: str, body: dict[str, Any] | None = None) -> tuple[Any, Any] | None:
    """What is answered, and its headers; None where nothing is, or that the server is not ready."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer), answer.headers
    except urllib.error.HTTPError as error:
        if error.code == 503 or (error.code, path) == (404, "/health"):  # Ray answers before there are routes.
            return None
        raise
    except OSError:
        return None


if __name__ == "__main__":
    app.run(main)
