"""Multi-turn chat over HTTP, from end to end: ca_jax's own server against those that users run otherwise.

Clients talk at once, each its own conversation: the whole history with each message, streamed, greedy, answers of a set
length. All servers have as many slots as there are clients, the same threads, and room for the KV of all conversations.
They run as processes of this machine and take turns, each with the same messages; one that waits computes nothing.

Where it flatters: all conversations fit into every server's KV, so nothing is evicted; behind a restart, or with more
conversations than slots, llama.cpp computes histories again. Where it does not: llama.cpp computes with the weights as
the GGUF file packs them, ca_jax with the same weights in `dtype`.

Not here: starting servers (`benchmarks.servers`), turns of one engine without HTTP (`suites.throughput`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from benchmarks import conversations, harness
from benchmarks.harness import BenchError, Config, Row, Run, Sample
from benchmarks.servers import PACKAGES, VLLM_NAME, Sizes, is_installed
from benchmarks.servers import serving as served
from ca_jax.launch.flags import DEFAULT_MODEL
from ca_jax.simulate.traces.sharegpt import load_sharegpt

_TIMEOUT_S = 900.0
_MOST_CHARS, _LEAST_CHARS = 700, 10  # Of a message: of longer ones few fit into a window.
_RANDOM_WORDS = 30  # Of a message where no conversations are installed.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingBenchConfig(Config):
    """Conversations of clients that talk at once; every number of clients is a row for each server."""

    choices: ClassVar = {"systems": tuple(PACKAGES)}

    repeats: int = 3
    """Samples that a median is of."""
    model: str = DEFAULT_MODEL
    """Preset or .gguf file, which all servers read."""
    systems: tuple[str, ...] = tuple(PACKAGES)
    """Servers to measure, ca_jax, llama.cpp, vllm or transformers; those not installed are left out, and named."""
    clients: tuple[int, ...] = (1, 4, 8, 16)
    """Clients that talk at once, a row for each."""
    num_turns: int = 4
    """Turns of a conversation."""
    answer_tokens: int = 64
    """Tokens of an answer."""
    context_window: int = 2048
    """Most tokens of a conversation."""
    dram_gib: float = 2.0
    """KV that ca_jax and vLLM keep in memory, GiB."""
    vllm_python: str = ""
    """Interpreter of the environment that vLLM is in; empty for this one."""
    small: bool = False
    """Short conversations of 1 and of 2 clients, once, and nothing is warmed up: shows that it runs."""

    def sized(self) -> ServingBenchConfig:
        """What is measured."""
        if not self.small:
            return self
        return dataclasses.replace(self, clients=(1, 2), num_turns=2, answer_tokens=4, repeats=1, dram_gib=0.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingRow(Row):
    """One server with so many clients: medians over rounds, each of as many conversations as clients."""

    system: str
    clients: int
    turns: int
    """Of a round, all clients'."""
    turns_per_min: float
    """Of all clients, from the first message to the last token."""
    output_tokens_per_s: float
    ttft_p50_s: float
    """From sending to the first token as the client sees it, over all turns."""
    ttft_p99_s: float
    later_ttft_p50_s: float
    """Of turns behind a first one: these have a history."""
    later_ttft_p99_s: float
    tpot_p50_ms: float
    """Between two pieces of an answer, as the client sees them, over all turns; a piece is a token, or few."""
    tpot_p99_ms: float
    prompt_tokens: int
    """Of all prompts, as the server counts them."""
    cached_tokens: int
    """Of these, whose KV was not computed again, as the server says."""
    cached_share: float


def _summary(rows: Sequence[ServingRow]) -> dict[str, Any]:
    """ca_jax against each other server, by clients: above 1 where it is faster."""
    by = {(row.system, row.clients): row for row in rows}
    found: dict[str, Any] = {f"vs_{system}".replace(".", "_"): {} for system, _ in by if system != "ca_jax"}
    for (system, clients), row in by.items():
        own = by.get(("ca_jax", clients))
        if own is not None and system != "ca_jax":
            ratios = {
                "turns_ratio": own.turns_per_min / row.turns_per_min,
                "later_ttft_p50_ratio": row.later_ttft_p50_s / own.later_ttft_p50_s,
                "later_ttft_p99_ratio": row.later_ttft_p99_s / own.later_ttft_p99_s,
            }
            found[f"vs_{system}".replace(".", "_")][clients] = ratios["turns_ratio"]
            found |= {f"{name}_{system}_{clients}_clients": ratio for name, ratio in ratios.items()}
    return found


@harness.suite(ServingBenchConfig, summary=_summary)
def serving(run: Run[ServingBenchConfig]) -> Iterator[ServingRow]:
    """Chats of several clients with each server, in turn."""
    config = run.config.sized()
    systems = [system for system in config.systems if is_installed(system, config.vllm_python)]
    run.facts["not_installed"] = [system for system in config.systems if system not in systems]
    if not systems:
        raise BenchError(f"one of {', '.join(config.systems)} must be installed, got none")
    sizes = Sizes(
        slots=max(config.clients),
        context_window=config.context_window,
        threads=run.cores,
        dram_gib=config.dram_gib,
        warmup=not config.small,
        vllm_python=config.vllm_python,
    )
    said, run.facts["conversations"] = _messages(config)
    nonce = itertools.count()
    with contextlib.ExitStack() as stack:
        urls = {}
        for system in harness.ticked(run.progress, "servers", systems):
            urls[system] = stack.enter_context(served(system, config.model, sizes))
            load = _Load(system, urls[system], config)
            load.talk(next(said), f"warm-up {system}")  # Each step compiles, or first touches.
        for clients in config.clients:

            def ways(clients: int = clients) -> dict[str, Any]:
                chats = list(itertools.islice(said, clients))
                name = f"round {next(nonce)}"  # In front of all: nothing of an earlier round is cached.
                return {system: partial(_Load(system, url, config).round, chats, name) for system, url in urls.items()}

            rounds = harness.interleave(ways, config.repeats, warm_up=0, progress=run.progress)
            for system in systems:
                yield harness.make_row(ServingRow, harness.of_way(rounds, system), system=system, clients=clients)


@dataclasses.dataclass(frozen=True)
class _Turn:
    """What a turn took, as its client sees it."""

    number: int
    ttft_s: float
    gaps_s: list[float]  # Between pieces of the answer.
    usage: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Load:
    """Clients of one server."""

    system: str
    url: str
    config: ServingBenchConfig

    def round(self, chats: Sequence[Sequence[str]], name: str) -> Sample:
        """One conversation of each client, all at once."""
        began_s = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(len(chats)) as pool:
            talks = [pool.submit(self.talk, chat, f"{name}, client {nth}") for nth, chat in enumerate(chats)]
            turns = [turn for talk in talks for turn in talk.result()]
        elapsed_s = time.perf_counter() - began_s
        ttft_s = np.array([turn.ttft_s for turn in turns])
        later_s = np.array([turn.ttft_s for turn in turns if turn.number] or ttft_s)
        gaps_s = np.concatenate([turn.gaps_s for turn in turns])
        prompt_tokens = sum(turn.usage["prompt_tokens"] for turn in turns)
        details = [turn.usage.get("prompt_tokens_details") or {} for turn in turns]
        cached_tokens = sum(int(each.get("cached_tokens") or 0) for each in details)
        return {
            "turns": len(turns),
            "turns_per_min": 60 * len(turns) / elapsed_s,
            "output_tokens_per_s": sum(turn.usage["completion_tokens"] for turn in turns) / elapsed_s,
            **harness.percentiles("ttft_p{}_s", ttft_s, 50, 99),
            **harness.percentiles("later_ttft_p{}_s", later_s, 50, 99),
            **harness.percentiles("tpot_p{}_ms", 1e3 * gaps_s, 50, 99),
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "cached_share": cached_tokens / prompt_tokens,
        }

    def talk(self, messages: Sequence[str], name: str) -> list[_Turn]:
        """A conversation, turn by turn. BenchError: a turn failed."""
        history = [{"role": "system", "content": f"You are a helpful assistant ({name})."}]
        turns = []
        for number, message in enumerate(messages):
            history.append({"role": "user", "content": message})
            try:
                turn, answer = self._send(number, history)
            except (OSError, urllib.error.URLError, ValueError, KeyError) as error:
                raise BenchError(
                    f"turn {number + 1} of {name} must be answered by {self.url}, got {error!r}"
                ) from error
            turns.append(turn)
            history.append({"role": "assistant", "content": answer})
        return turns

    def _send(self, number: int, messages: Sequence[dict[str, str]]) -> tuple[_Turn, str]:
        body = {
            "model": self.config.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.config.answer_tokens,
            "temperature": 0,
        }
        # All servers do the same work: no answer ends before it is as long as asked for.
        if self.system == "transformers":
            del body["model"]  # It serves one, and knows that by the path.
            body["generation_config"] = json.dumps({"eos_token_id": None, "do_sample": False})
        else:
            body["ignore_eos"] = True
        if self.system == "vllm":
            body["model"] = VLLM_NAME
        request = urllib.request.Request(
            f"{self.url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began_s, times_s, answer, usage = time.perf_counter(), list[float](), "", None
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[len(b"data: ") :])
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", []):
                    if text := choice.get("delta", {}).get("content"):
                        times_s.append(time.perf_counter())
                        answer += text
        if usage is None or not times_s:
            raise ValueError("a stream without text or usage")
        return _Turn(number, times_s[0] - began_s, [*np.diff(times_s)], usage), answer


def _messages(config: ServingBenchConfig) -> tuple[Iterator[list[str]], str]:
    """The user's messages of conversations, without end, and where they are from."""
    if not conversations.is_installed():
        rng = np.random.default_rng(config.seed)

        def make() -> list[str]:
            words = rng.integers(1000, size=(config.num_turns, _RANDOM_WORDS))
            return [" ".join(f"word{each}" for each in row) for row in words]

        return iter(make, None), "random"
    found = []
    wanted = 1 + sum(config.clients) * config.repeats
    for conversation in load_sharegpt():
        said = list(conversation.user_texts[: config.num_turns])
        is_long = len(conversation.user_texts) >= 2 * config.num_turns
        if is_long and all(_LEAST_CHARS < len(text) < _MOST_CHARS for text in said):
            found.append(said)
        if len(found) == wanted:
            break
    if not found:
        raise BenchError(f"ShareGPT must have conversations of {config.num_turns} turns, got none")
    return itertools.cycle(found), "sharegpt"
