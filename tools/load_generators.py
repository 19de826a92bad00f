r"""Serves a model and has public load generators, unmodified, put load on it.

    python -m venv build/guidellm && build/guidellm/bin/pip install torch==2.13.0+cpu guidellm==0.8.1
    python -m venv build/aiperf && build/aiperf/bin/pip install aiperf==0.13.0
    python3.12 -m venv build/inference_perf && build/inference_perf/bin/pip install inference-perf==0.7.0
    .venv/bin/python -m tools.load_generators --guidellm=build/guidellm/bin/guidellm --aiperf=build/aiperf/bin/aiperf \
        --inference_perf=build/inference_perf/bin/inference-perf

Each tool streams in three modes, one after the other, with random texts, others in each: one request at a time, eight
at a time, and conversations of several turns, four at a time, each turn sent with all that was said before. Tokens are
counted by the server's `usage`. Under ten minutes; let nothing else run meanwhile. Exits with 1 where a request failed,
or no turn of a conversation found its history.

What comes of it is `summary.json`, of what the tools say themselves.

Not here: what the server adds to the engine (`server_overhead`), what these tools ask of it (`tests.server`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.servers import started
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.models.checkpoint import load_checkpoint

_PROMPT_TOKENS, _ANSWER_TOKENS = 128, 32
_TOOL_S = 60.0  # Most that a tool takes beside its load.
_COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
_TERMINAL = {"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}


@dataclasses.dataclass(frozen=True)
class Mode:
    """What load is put on the server."""

    name: str
    streams: int
    """Requests, or conversations, at a time."""
    conversations: int
    seed: int
    """Of the texts: what was said in another mode is not found again."""
    turns: int = 1

    @property
    def requests(self) -> int:
        """All of them."""
        return self.conversations * self.turns


MODES = (
    Mode("synchronous", streams=1, conversations=24, seed=1),
    Mode("concurrent", streams=8, conversations=64, seed=2),
    Mode("multi_turn", streams=4, conversations=8, seed=3, turns=6),
)
"""By name in this order."""
TOOLS = ("guidellm", "aiperf", "inference_perf")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", default=os.environ.get("GUIDELLM"), help="its executable; by default $GUIDELLM")
    parser.add_argument("--aiperf", default=os.environ.get("AIPERF"), help="its executable; by default $AIPERF")
    parser.add_argument("--inference_perf", default=os.environ.get("INFERENCE_PERF"), help="its executable, likewise")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--mode", action="append", choices=[mode.name for mode in MODES], help="by default all")
    parser.add_argument("--seconds", type=int, default=75, help="after which a mode begins no more requests")
    parser.add_argument("--out", type=Path, default=Path("results/server"))
    args = parser.parse_args()
    tools = {name: path for name in TOOLS if (path := getattr(args, name))}
    if not tools:
        parser.error(f"one of {', '.join(f'--{name}' for name in TOOLS)} must be given, got none")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the server is ended too.
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="load_generators_") as name:
        folder = Path(name)
        _write_tokenizer(args.model, folder)
        serve = [sys.executable, "-m", "ca_jax.launch.serve", f"--model={args.model}"]
        with started("ca_jax", lambda port: [*serve, f"--port={port}"], {}) as url:
            for mode in MODES:
                if args.mode and mode.name not in args.mode:
                    continue
                for tool, path in tools.items():
                    run = Run(tool, path, mode, args.model, url, args.seconds, folder / f"{tool}_{mode.name}")
                    row = run.measure()
                    print(json.dumps(row), flush=True)
                    rows.append(row)
    found = {"machine": describe_machine(), "versions": describe_versions(), "model": args.model, "runs": rows}
    (args.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(row["errors"] or not row["requests"] or row["returning_turns_found"] == 0 for row in rows))


@dataclasses.dataclass(frozen=True)
class Run:
    """A tool in a mode."""

    tool: str
    path: str
    mode: Mode
    model: str
    url: str
    seconds: int
    folder: Path
    """Of its own: where the tool runs and writes."""

    def measure(self) -> dict[str, Any]:
        """Runs the tool; what it reports, in few words."""
        self.folder.mkdir()
        offline = {"HF_HOME": str(self.folder.parent / "hub"), "HF_HUB_OFFLINE": "1"}
        environment = {**os.environ, **_TERMINAL, **offline}
        version = self._version(environment)
        before, started_s = _counters(self.url), time.monotonic()
        limit_s = self.seconds + _TOOL_S
        arguments, read = {
            "guidellm": (self._guidellm, _said_by_guidellm),
            "aiperf": (self._aiperf, _said_by_aiperf),
            "inference_perf": (self._inference_perf, _said_by_inference_perf),
        }[self.tool]
        _output([self.path, *arguments()], environment, self.folder, limit_s)
        wall_s = time.monotonic() - started_s
        after = _counters(self.url)
        said = read(self.folder)
        return {
            "tool": self.tool,
            "version": version,
            "mode": self.mode.name,
            "streams": self.mode.streams,
            "turns": self.mode.turns,
            **{name: round(value, 3) if isinstance(value, float) else value for name, value in said.items()},
            "wall_s": round(wall_s, 1),
            "server": {name: int(after[name] - before[name]) for name in _COUNTERS},
        }

    def _version(self, environment: dict[str, str]) -> str:
        if self.tool != "inference_perf":
            return _output([self.path, "--version"], environment, self.folder).split()[-1]
        says = "import importlib.metadata; print(importlib.metadata.version('inference-perf'))"  # It does not say it.
        return _output([str(Path(self.path).parent / "python"), "-c", says], environment, self.folder).strip()

    def _guidellm(self) -> list[str]:
        mode = self.mode
        profile = "kind=synchronous" if mode.streams == 1 else f"kind=concurrent,streams={mode.streams}"
        data = f"kind=synthetic_text,prompt_tokens={_PROMPT_TOKENS},output_tokens={_ANSWER_TOKENS},turns={mode.turns}"
        return [
            *("run", "--disable-progress", "--backend", f"kind=openai_http,target={self.url},model={self.model}"),
            *("--seed", f"kind=static,value={mode.seed}", "--profile", profile, "--data", data),
            *("--tokenizer", "kind=huggingface_auto,model=../tokenizer"),
            *("--constraint", f"kind=max_requests,count={mode.requests}"),
            *("--constraint", f"kind=max_duration,seconds={self.seconds}"),
            *("--output", "kind=json,path=report.json"),
        ]

    def _aiperf(self) -> list[str]:
        mode = self.mode
        return [
            *("profile", "--model", self.model, "--url", self.url, "--endpoint-type", "chat", "--streaming"),
            *("--concurrency", str(mode.streams), "--conversation-num", str(mode.conversations)),
            *("--conversation-turn-mean", str(mode.turns), "--conversation-turn-stddev", "0"),
            *("--isl", str(_PROMPT_TOKENS), "--osl", str(_ANSWER_TOKENS), "--random-seed", str(mode.seed)),
            *("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{_ANSWER_TOKENS}"),
            *("--benchmark-duration", str(self.seconds), "--benchmark-grace-period", "30"),
            *("--use-server-token-count", "--per-chunk-usage", "--artifact-dir", "."),
            *("--ui", "none", "--no-gpu-telemetry"),
        ]

    def _inference_perf(self) -> list[str]:
        """By a file of its own. Turns of a conversation are plain prompts, each with all that was said before."""
        mode = self.mode
        texts = {
            **{"num_groups": 1, "num_prompts_per_group": mode.conversations, "seed": mode.seed},
            **{"system_prompt_len": 1, "question_len": _PROMPT_TOKENS, "output_len": _ANSWER_TOKENS},
            "enable_multi_turn_chat": mode.turns > 1,
        }
        stage = {"num_requests": mode.requests, "concurrency_level": mode.streams}
        config = {
            "api": {"type": "chat", "streaming": True},
            "server": {"type": "vllm", "model_name": self.model, "base_url": self.url, "ignore_eos": True},
            "tokenizer": {"pretrained_model_name_or_path": "../tokenizer"},
            "data": {"type": "shared_prefix", "shared_prefix": texts},
            "load": {"type": "concurrent", "num_workers": 1, "base_seed": mode.seed, "stages": [stage]},
            "report": {"request_lifecycle": {"summary": True, "per_request": True}},
            "storage": {"local_storage": {"path": "reports"}},
        }
        (self.folder / "config.yml").write_text(json.dumps(config), encoding="utf-8")  # YAML has all of JSON.
        return ["--config_file", "config.yml"]


def _said_by_guidellm(folder: Path) -> dict[str, Any]:
    [report] = json.loads((folder / "report.json").read_text(encoding="utf-8"))["benchmarks"]
    metrics, good = report["metrics"], report["requests"]["successful"]
    turns = [(each["info"]["turn_index"], each["cached_tokens"] or 0) for each in good]

    times = {
        f"{name}_ms_{share}": float(metrics[metric]["successful"]["percentiles"][share])
        for name, metric in (("ttft", "time_to_first_token_ms"), ("itl", "inter_token_latency_ms"))
        for share in ("p50", "p99")
    }
    return {
        "requests": metrics["request_totals"]["successful"],
        "errors": metrics["request_totals"]["errored"],
        "requests_per_s": float(metrics["requests_per_second"]["successful"]["mean"]),
        "output_tokens_per_s": float(metrics["output_tokens_per_second"]["successful"]["mean"]),
        **times,
        "prompt_tokens": sum(each["prompt_tokens"] for each in good),
        **_of_turns(turns),
    }


def _said_by_aiperf(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    lines = (folder / "profile_export.jsonl").read_text(encoding="utf-8").splitlines()
    good = [each for each in map(json.loads, lines) if not each.get("error")]
    turns = [
        (each["metadata"]["turn_index"], each["metrics"]["usage_prompt_cache_read_tokens"]["value"]) for each in good
    ]
    return {
        "requests": int(report["request_count"]["avg"]),
        "errors": len(lines) - len(good),
        "requests_per_s": report["request_throughput"]["avg"],
        "output_tokens_per_s": report["output_token_throughput"]["avg"],
        **{f"ttft_ms_{share}": report["time_to_first_token"][share] for share in ("p50", "p99")},
        **{f"itl_ms_{share}": report["inter_token_latency"][share] for share in ("p50", "p99")},
        "prompt_tokens": int(report["total_usage_prompt_tokens"]["avg"]),
        **_of_turns(turns),
    }


def _said_by_inference_perf(folder: Path) -> dict[str, Any]:
    read = {
        name: json.loads((folder / "reports" / f"{name}_lifecycle_metrics.json").read_text(encoding="utf-8"))
        for name in ("summary", "per_request")
    }
    report, requests = read["summary"]["successes"], read["per_request"]
    good = [each["info"] for each in requests if not each["error"]]
    usages = [each["response_metrics"]["server_usage"] for each in good]
    turns = [
        (each["extra_info"].get("chat_round", 1) - 1, usage["prompt_tokens_details"]["cached_tokens"])
        for each, usage in zip(good, usages, strict=True)
    ]
    times = {
        f"{name}_ms_{share}": 1e3 * report["latency"][metric][of]
        for name, metric in (("ttft", "time_to_first_token"), ("itl", "inter_token_latency"))
        for share, of in (("p50", "median"), ("p99", "p99"))
    }
    return {
        "requests": len(good),
        "errors": len(requests) - len(good),
        "requests_per_s": report["throughput"]["requests_per_sec"],
        "output_tokens_per_s": report["throughput"]["output_tokens_per_sec"],
        **times,
        "prompt_tokens": sum(usage["prompt_tokens"] for usage in usages),
        **_of_turns(turns),
    }


def _of_turns(turns: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Of each turn its number in its conversation and the prompt tokens whose KV was there."""
    returning = [cached for number, cached in turns if number > 0]
    return {
        "cached_tokens": sum(cached for _, cached in turns),
        "returning_turns": len(returning),
        "returning_turns_found": sum(cached > 0 for cached in returning) if returning else None,
    }


def _counters(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = {name: re.search(rf"^vllm:{name}_total{{.*}} (\S+)$", text, re.MULTILINE) for name in _COUNTERS}
    return {name: float(match[1]) if match else 0.0 for name, match in found.items()}


def _write_tokenizer(model: str, folder: Path) -> None:
    """Puts a model's tokenizer into `tokenizer`, and where aiperf looks for what it has fetched from the hub."""
    tokenizer = load_checkpoint(model).tokenizer
    if tokenizer is None:
        raise ValueError(f"{model} must have a tokenizer, got none")
    snapshot = folder / "tokenizer"
    snapshot.mkdir()
    cached = folder / "hub" / "hub" / f"models--{model.replace('/', '--')}"
    for name in ("snapshots", "refs"):
        (cached / name).mkdir(parents=True)
    (cached / "snapshots" / "served").symlink_to(snapshot)
    (cached / "refs" / "main").write_text("served", encoding="utf-8")
    tokenizer.backend.save(str(snapshot / "tokenizer.json"))
    names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    config = {name: tokenizer.backend.id_to_token(token) for name, token in names.items() if token is not None}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template.source
    (snapshot / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _output(command: Sequence[str], environment: dict[str, str], folder: Path, limit_s: float = 60.0) -> str:
    """What a program prints.

    Raises:
      RuntimeError: it failed; the message ends with its last words.
    """
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
