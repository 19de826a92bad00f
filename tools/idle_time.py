"""What idle time gives people whose conversations outgrow the window: turns behind a cut, with and without it.

    .venv/bin/python -m tools.idle_time --clients=4 --think_s=6 --json_out=idle.json

One server after the other, with `--exact_when_idle` and without: clients talk as ShareGPT's users did, send their whole
history at every turn, as usual, and read each answer for as long as a draw from an exponential distribution says, the
same at both servers. A turn's TTFT is what its client sees. A turn is behind a cut where tokens had left since the
answer before began, for its message or in that answer.

Not here: a machine with nothing else to do (`bench --suite=overflow`), what answers are worth (`evaluate`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import shlex
import statistics
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.servers import started
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.simulate.traces.sharegpt import load_sharegpt

TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one took."""

    ttft_s: float
    has_history: bool
    is_cut: bool
    """Whether tokens had left since the answer before began."""
    repaired_tokens: int


def chats(count: int, num_turns: int) -> list[list[str]]:
    """Users' messages of the first conversations of ShareGPT that have so many, none of them very long."""
    found: list[list[str]] = []
    for conversation in load_sharegpt():
        said = list(conversation.user_texts[:num_turns])
        if len(said) == num_turns and all(len(text) < 800 for text in said):
            found.append(said)
        if len(found) == count:
            return found
    raise ValueError(f"ShareGPT must have {count} conversations of {num_turns} turns, got {len(found)}")


def send(url: str, model: str, messages: list[dict[str, str]], answer_tokens: int) -> tuple[float, str, dict[str, Any]]:
    """A turn: its TTFT, its answer and its usage."""
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": answer_tokens, "temperature": 0}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    began_s, ttft_s, answer, usage = time.perf_counter(), 0.0, "", {}
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[len(b"data: ") :])
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", []):
                if text := choice.get("delta", {}).get("content"):
                    ttft_s = ttft_s or time.perf_counter() - began_s
                    answer += text
    return ttft_s, answer, usage


def talk(url: str, said: list[str], thinks_s: np.ndarray, args: argparse.Namespace) -> list[Turn]:
    """A conversation, turn by turn."""
    messages: list[dict[str, str]] = []
    turns: list[Turn] = []
    num_gone = 0
    for text, think_s in zip(said, thinks_s, strict=True):
        time.sleep(think_s)
        messages.append({"role": "user", "content": text})
        ttft_s, answer, usage = send(url, args.model, messages, args.answer_tokens)
        messages.append({"role": "assistant", "content": answer})
        own = usage["ca_jax"]
        # What has left by the turn's end, without what left in its answer, which is behind the first token.
        num_before = own["num_dropped"] - own["dropped_tokens"]
        for_message = own["dropped_tokens"] > 0 and usage["prompt_tokens"] + args.answer_tokens <= args.context_window
        turns.append(Turn(ttft_s, len(turns) > 0, num_before > num_gone or for_message, own["repaired_tokens"]))
        num_gone = num_before + (own["dropped_tokens"] if for_message else 0)
    return turns


def measure(exact: bool, args: argparse.Namespace) -> dict[str, Any]:
    """All conversations at one server."""

    def command(port: int) -> list[str]:
        sizes = [f"--context_window={args.context_window}", f"--max_batch_size={args.clients}"]
        own = [f"--model={args.model}", f"--port={port}", "--warmup=true", f"--exact_when_idle={str(exact).lower()}"]
        return [sys.executable, "-m", "ca_jax.launch.serve", *own, *sizes]

    said, rng = chats(args.clients, args.turns), np.random.default_rng(args.seed)
    thinks_s = rng.exponential(args.think_s, (args.clients, args.turns))
    with started("ca_jax", command, {}) as url, concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
        talks = [pool.submit(talk, url, *each, args) for each in zip(said, thinks_s, strict=True)]
        turns = [turn for each in talks for turn in each.result() if turn.has_history]
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as response:
            lines = response.read().decode().splitlines()
    counts = {line.split()[0].split("{")[0]: float(line.split()[-1]) for line in lines if line[:1] not in ("#", "")}
    behind = [turn for turn in turns if turn.is_cut]
    others = [turn.ttft_s for turn in turns if not turn.is_cut]
    return {
        "exact_when_idle": exact,
        "turns": len(turns),
        "turns_behind_a_cut": len(behind),
        "of_these_repaired": sum(turn.repaired_tokens > 0 for turn in behind),
        "ttft_behind_a_cut_p50_s": statistics.median(turn.ttft_s for turn in behind),
        "ttft_behind_a_cut_max_s": max(turn.ttft_s for turn in behind),
        "ttft_of_others_p50_s": statistics.median(others),
        "ttft_of_others_max_s": max(others),
        "idle_recomputes": counts.get("ca_jax:idle_recomputes_total", 0.0),
        "truncations": counts.get("ca_jax:truncations_total", 0.0),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="preset, .gguf file or Hugging Face directory")
    parser.add_argument("--clients", type=int, default=4, help="conversations at a time")
    parser.add_argument("--turns", type=int, default=12, help="of each conversation")
    parser.add_argument("--answer_tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--context_window", type=int, default=512, help="most tokens of a conversation")
    parser.add_argument("--think_s", type=float, default=6.0, help="seconds between an answer and the next turn, mean")
    parser.add_argument("--seed", type=int, default=0, help="of these")
    parser.add_argument("--json_out", type=Path)
    args = parser.parse_args()
    machine = describe_machine()
    rows = [measure(exact, args) for exact in (True, False)]
    for row in rows:
        print(row)
    report = {
        "suite": "idle_time",
        "model": args.model,
        "machine": machine,
        "versions": describe_versions(),
        "command": shlex.join(["python", "-m", "tools.idle_time", *sys.argv[1:]]),
        "rows": rows,
    }
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
