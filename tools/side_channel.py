"""Whether the time to a first token tells what another tenant has stored: TTFT over HTTP of prompts in three arms.

    .venv/bin/python -m tools.side_channel --json_out=results/server/side_channel.json

    other    another tenant has had the same prompt computed, and it is stored
    new      nobody has
    own      the same tenant has: what a hit looks like, so that one would be seen

In each round two tenants have a prompt computed each, and then one of them asks for those and a new one, streamed, in
random order. Prompts are of made-up words and as long as each other in tokens, so that the tokenizer too has met only
the words of `other` and `own` before. `own` must be served from the store and the others must not, or the run ends.
Compared are all samples of two arms (Mann-Whitney U, Cliff's delta), and those of a round (differences, Wilcoxon).

The client is another process. Let nothing else run meanwhile. --tiny is the tests' model, for a quick look.

Not here: that no more is done for one arm than for the other (`tests/server/test_tenants.py`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import hashlib
import http.client
import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.server.tenants import Tenant, Tenants
from ca_jax.storage.config import StoreConfig
from tests import engine_kit as kit
from tests import server_kit as sk

ARMS = ("other", "new", "own")
_KEYS = {"victim": "sk-of-the-victim", "prober": "sk-of-the-prober"}
_FIRST_ROUNDS = 2  # Compile, and are for nothing.
_PAUSE_S = 0.1  # Before each request: what the last one has stored is in place.
_RESAMPLES = 4000
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tiny", action="store_true", help="the tests' model instead, in its window of 512 tokens")
    parser.add_argument("--rounds", type=int, default=40, help="each of a prompt of each arm")
    parser.add_argument("--tokens", type=int, help="of a prompt, without its template; by default 1000, or 400 if tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json_out", type=Path)
    args = parser.parse_args()
    num_tokens = args.tokens or (400 if args.tiny else 1000)
    make_engine = kit.small_engine if args.tiny else functools.partial(_make_engine, args.model, num_tokens)
    tenants = Tenants(
        [(hashlib.sha256(key.encode()).digest(), Tenant(name=name, salt=name)) for name, key in _KEYS.items()]
    )
    with (
        concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as client,
        sk.running(tenants, start_s=600.0, make_engine=make_engine) as server,
    ):
        tokenizer = server.engine.model.tokenizer
        if tokenizer is None:
            raise ValueError(f"the model must have a tokenizer, got {args.model}")
        ttft_s: dict[str, list[float]] = {arm: [] for arm in ARMS}
        draw = random.Random(args.seed)
        for number in range(_FIRST_ROUNDS + args.rounds):
            prompts = {arm: made_up(tokenizer, num_tokens, draw) for arm in ARMS}
            asked = [("victim", prompts["other"]), ("prober", prompts["own"])]
            order = draw.sample(ARMS, len(ARMS))
            asked += [("prober", prompts[arm]) for arm in order]
            answers = client.submit(_ttfts, server.url, asked).result()[2:]
            for arm, (seconds, num_cached) in zip(order, answers, strict=True):
                if (num_cached > num_tokens // 2) != (arm == "own") or (arm != "own" and num_cached):
                    raise RuntimeError(f"a prompt of arm {arm!r} had {num_cached} cached tokens of {num_tokens}")
                if number >= _FIRST_ROUNDS:
                    ttft_s[arm].append(seconds)
    row = {
        "model": "tiny" if args.tiny else args.model,
        "prompt_tokens": num_tokens,
        "rounds": args.rounds,
        "ttft_ms": {arm: _spread(seconds) for arm, seconds in ttft_s.items()},
        "other_vs_new": compare(ttft_s["other"], ttft_s["new"]),
        "own_vs_new": compare(ttft_s["own"], ttft_s["new"]),
    }
    print(json.dumps(row, indent=1))
    if args.json_out is not None:
        samples = {arm: [round(1e3 * each, 3) for each in seconds] for arm, seconds in ttft_s.items()}
        found = {"machine": describe_machine(), "versions": describe_versions(), **row, "samples_ms": samples}
        args.json_out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def compare(first_s: list[float], second_s: list[float], seed: int = 0) -> dict[str, Any]:
    """Whether two arms differ: of all samples, and of those that were taken in the same round.

    Args:
      first_s: seconds, one a round.
      second_s: likewise, of the same rounds.
      seed: of the resampling.

    Returns:
      `mann_whitney_p` and `wilcoxon_p`, two-sided; `auc`, how often a sample of the first arm is the slower one;
      `cliffs_delta`, 2 auc - 1; `median_difference_ms` of the first less the second in the same round; of the last two
      the 95 % interval, by resampling rounds.
    """
    first, second = np.asarray(first_s), np.asarray(second_s)
    difference_ms = 1e3 * (first - second)
    wins = (np.sign(first[:, None] - second[None, :]) + 1) / 2  # Of each against each; a tie is half of one.
    rounds = np.random.default_rng(seed).integers(len(first), size=(_RESAMPLES, len(first)))
    deltas = [2 * wins[np.ix_(chosen, chosen)].mean() - 1 for chosen in rounds]
    differs = bool(np.any(difference_ms))
    return {
        "mann_whitney_p": float(stats.mannwhitneyu(first, second, alternative="two-sided").pvalue),
        "wilcoxon_p": float(stats.wilcoxon(difference_ms).pvalue) if differs else 1.0,
        "auc": float(wins.mean()),
        "cliffs_delta": float(2 * wins.mean() - 1),
        "cliffs_delta_95": np.percentile(deltas, [2.5, 97.5]).tolist(),
        "median_difference_ms": float(np.median(difference_ms)),
        "median_difference_ms_95": np.percentile(np.median(difference_ms[rounds], axis=1), [2.5, 97.5]).tolist(),
    }


def made_up(tokenizer: Tokenizer, num_tokens: int, draw: random.Random) -> str:
    """Words that nobody has said, of so many tokens, or a few less where words are of several."""
    words = ["".join(draw.choices(_LETTERS, k=draw.randint(2, 7))) for _ in range(num_tokens)]
    fewest, most = 1, len(words)
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if len(tokenizer.encode(" ".join(words[:middle]), add_bos=False)) <= num_tokens:
            fewest = middle
        else:
            most = middle - 1
    return " ".join(words[:fewest])


def _make_engine(model: str, num_tokens: int) -> Engine:
    """As it is served, in a window that such prompts need."""
    config = EngineConfig(context_window=num_tokens + 256, store=StoreConfig(dram_gib=2.0))
    engine = Engine.from_pretrained(model, config)
    engine.wait_until_ready()
    return engine


def _spread(seconds: list[float]) -> dict[str, float]:
    low, median, high = np.percentile(1e3 * np.asarray(seconds), [25, 50, 75])
    return {"median": float(median), "p25": float(low), "p75": float(high), "iqr": float(high - low)}


def _ttfts(url: str, requests: list[tuple[str, str]]) -> list[tuple[float, int]]:
    """In the other process: asks one request after the other."""
    return [_ttft(url.removeprefix("http://"), _KEYS[tenant], text) for tenant, text in requests]


def _ttft(host: str, key: str, text: str) -> tuple[float, int]:
    """Seconds to the first token of an answer, and how many tokens of the prompt were cached."""
    time.sleep(_PAUSE_S)
    body = {"model": sk.MODEL, "messages": [sk.user(text)], "max_tokens": 1, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection = http.client.HTTPConnection(host)
    connection.connect()
    content = json.dumps(body)
    first_s, num_cached = None, None
    started_s = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", content, headers)
    response = connection.getresponse()
    while line := response.readline():
        if not line.startswith(b"data: {"):
            continue
        arrived_s = time.perf_counter()
        event = json.loads(line.removeprefix(b"data: "))
        if first_s is None and any(each["delta"].get("content") or each["finish_reason"] for each in event["choices"]):
            first_s = arrived_s - started_s
        if event.get("usage"):
            num_cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    connection.close()
    if first_s is None or num_cached is None:
        raise RuntimeError(f"the answer must be streamed, got status {response.status}")
    return first_s, num_cached


if __name__ == "__main__":
    main()
