"""Servers of OpenAI's API as processes of this machine, on loopback: ca_jax's own, and those that users run otherwise.

Not here: what they are asked and when (`suites.serving`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.harness import BenchError
from ca_jax.models.checkpoint import PRESETS

PACKAGES = {
    "ca_jax": ("ca_jax",),
    "llama.cpp": ("xllamacpp",),
    "vllm": ("vllm",),
    "transformers": ("torch", "openai", "accelerate"),
}
"""The servers that there are, and the packages without which each cannot be started."""

VLLM_NAME = "model"
"""What vLLM calls the model, which it reads from a directory of no lasting name."""

_READY_S = 900.0  # Model load and warm-up.
_STOP_S = 30.0
_POLL_S = 0.1
_BLOCK_TOKENS = 32  # Of the pool of transformers.
# llama.cpp's server is in a library; a process of its own leaves ours alone, and ends when its input is closed.
_LLAMA_CPP = """
import sys
import xllamacpp
path, port, slots, window, threads = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path, params.port = path, port
params.n_parallel, params.n_ctx = slots, slots * window
params.cpuparams.n_threads = threads
server = xllamacpp.Server(params)
sys.stdin.read()
"""
_TO_DIRECTORY = """
import pathlib, sys
from transformers import AutoTokenizer
from benchmarks.peers import TransformersPeer
from ca_jax.pretrained import load_model
path, target = map(pathlib.Path, sys.argv[1:])
TransformersPeer(load_model(str(path), dtype="float32")).save(target)
AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(target)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What every server has room for."""

    slots: int
    """Answers that are generated at once."""
    context_window: int
    threads: int
    dram_gib: float
    """KV that ca_jax and vLLM keep, GiB; llama.cpp keeps that of its slots."""
    warmup: bool = True
    """Whether ca_jax compiles all that turns may need before it is ready."""
    vllm_python: str = ""
    """Interpreter of the environment that vLLM is in; empty for this one."""


def is_installed(system: str, vllm_python: str = "") -> bool:
    """Whether what a server is started from is there, vLLM perhaps in an environment of its own.

    BenchError: there is no such environment, or it has no vLLM.
    """
    if system == "vllm" and vllm_python:
        command = [vllm_python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"]
        try:
            found = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError as error:
            raise BenchError(f"vllm_python must be an interpreter, got {vllm_python}: {error}") from error
        if not found:
            raise BenchError(f"vllm_python must be an interpreter of an environment with vllm, got {vllm_python}")
        return True
    return all(importlib.util.find_spec(package) for package in PACKAGES[system])


@contextlib.contextmanager
def serving(system: str, model: str, sizes: Sizes) -> Iterator[str]:
    """Starts a server of `PACKAGES`, waits until it is ready, and ends it; yields the address of its API.

    `model` is what `--model` of ca_jax would be. BenchError: it cannot serve that, or does not become ready.
    """
    environment = {"OMP_NUM_THREADS": str(sizes.threads)}
    if system == "vllm":  # It binds a thread to each core itself.
        environment = {"VLLM_CPU_KVCACHE_SPACE": str(max(round(sizes.dram_gib), 1))}
    with contextlib.ExitStack() as stack:
        if system in ("transformers", "vllm"):
            model = stack.enter_context(_as_directory(model_file(model)))
        url = stack.enter_context(started(system, lambda port: _command(system, model, sizes, port), environment))
        yield f"{url}/v1"


@contextlib.contextmanager
def _as_directory(path: Path) -> Iterator[str]:
    """A checkpoint as a directory of Hugging Face's, for a server that serves no GGUF file."""
    if path.is_dir():
        yield str(path)
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-c", _TO_DIRECTORY, str(path), directory]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"{path} must be read by transformers, got: {done.stderr[-500:]}")
        yield directory


@contextlib.contextmanager
def started(name: str, command: Callable[[int], Sequence[str]], environment: Mapping[str, str]) -> Iterator[str]:
    """Starts a server by a command that is given a free port, waits until it is ready, and ends it; yields its address.

    BenchError: it does not become ready.
    """
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command(port),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
        try:
            if not _becomes_ready(process, f"http://127.0.0.1:{port}/health"):
                log.seek(0)
                lines = log.read().decode(errors="replace").splitlines()
                raise BenchError(f"{name} must become ready, got: {' | '.join(lines[-5:]) or 'nothing'}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.communicate(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def model_file(model: str) -> Path:
    """The GGUF file, or the directory of a Hugging Face checkpoint, that servers other than ours read."""
    path = Path(model).expanduser()
    if model in PRESETS:
        spec = importlib.util.find_spec(PRESETS[model].package)
        folders = (spec and spec.submodule_search_locations) or [""]
        path = Path(folders[0]) / PRESETS[model].filename
    if not path.exists():
        raise BenchError(f"model must be an installed preset, a file or a directory, got {model}")
    return path


def _command(system: str, model: str, sizes: Sizes, port: int) -> list[str]:
    if system == "ca_jax":
        own = [f"--model={model}", f"--port={port}", f"--max_batch_size={sizes.slots}", f"--dram_gib={sizes.dram_gib}"]
        own += [f"--context_window={sizes.context_window}", f"--warmup={sizes.warmup}"]
        return [sys.executable, "-m", "ca_jax.launch.serve", *own]
    path = model_file(model)
    if system == "llama.cpp":
        numbers = map(str, (port, sizes.slots, sizes.context_window, sizes.threads))
        return [sys.executable, "-c", _LLAMA_CPP, str(path), *numbers]
    if system == "transformers":
        blocks = sizes.slots * -(-sizes.context_window // _BLOCK_TOKENS)  # Left to itself it takes most of the memory.
        pool = (f"--cb-block-size={_BLOCK_TOKENS}", f"--cb-num-blocks={blocks}", "--device=cpu", "--dtype=float32")
        serve = ("transformers.cli.transformers", "serve", str(path), "--continuous-batching")
        return [sys.executable, "-m", *serve, *pool, f"--port={port}"]
    limits = (f"--max-num-seqs={sizes.slots}", f"--max-model-len={sizes.context_window}", "--dtype=float32")
    caching = ("--enable-prefix-caching", "--enable-prompt-tokens-details")
    address = ("--host=127.0.0.1", f"--port={port}", f"--model={path}", f"--served-model-name={VLLM_NAME}")
    python = sizes.vllm_python or sys.executable
    return [python, "-m", "vllm.entrypoints.openai.api_server", *address, *limits, *caching]


def _becomes_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    until_s = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < until_s:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=5) as response:
            if response.status == 200:
                return True
        time.sleep(_POLL_S)
    return False


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
