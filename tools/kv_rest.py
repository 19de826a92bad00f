"""What int8 KV at rest costs in quality, and what it saves in bytes.

    .venv/bin/python -m tools.kv_rest --text=TEXTS/wikitext2_test_unk_tokens.txt --json_out=results/kv_rest.json

- quality: perplexity of a text whose history is rounded behind every step, beside the same at full precision; and how
  many greedy tokens two engines share whose second turn goes on behind a loaded history.
- bytes: of a token at rest.

To be run from the repository's root, with nothing else running.

Not here: what it saves in time to the first token (`ca_jax.launch.bench --suite=tiers --kv_rest_dtype=int8`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import send_turn
from benchmarks.evaluate.statistics import block_estimate
from benchmarks.evaluate.stream import ContextStream
from ca_jax.config import KV_REST_DTYPES, EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv.layout import rest_layout
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.launch.texts import read_ids
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel, load_model
from ca_jax.serving.core import enable_compile_cache
from ca_jax.turns.requests import SamplingParams

# Quality.


def perplexity(model: LoadedModel, token_ids: Sequence[int], *, window: int, step_tokens: int) -> dict[str, Any]:
    """Perplexity of contexts of `window` tokens that follow each other, with rounded history and without."""
    losses: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for start in range(0, len(token_ids), window):
        part = token_ids[start : start + window]
        for rounds, found in losses.items():
            stream = ContextStream(model, OverflowConfig(), window=window, step_tokens=step_tokens, rounds_kv=rounds)
            found.append(stream.feed(part)[1:])
    plain, rounded = (np.concatenate(losses[rounds]) for rounds in (False, True))
    gap = block_estimate(rounded - plain, window - 1)
    return {
        "tokens": len(plain),
        "window": window,
        "step_tokens": step_tokens,
        "perplexity": block_estimate(plain, window - 1).exp().mean,
        "perplexity_int8": block_estimate(rounded, window - 1).exp().mean,
        "change": gap.exp().mean - 1,
        "change_stderr": gap.stderr,
        "mean_absolute_change_nats": float(np.abs(rounded - plain).mean()),
    }


def agreement(
    model: LoadedModel, token_ids: Sequence[int], *, window: int, num_answers: int, answer_tokens: int
) -> dict[str, Any]:
    """Greedy answers behind a history that was loaded, by engines of either kind."""
    history = (window - answer_tokens) // 2
    found: dict[str, list[list[int]]] = {}
    for kind in KV_REST_DTYPES:
        with _engine(model, kind, context_window=window) as engine:
            found[kind] = []
            for start in range(0, num_answers * (history + 8), history + 8):
                session = engine.session()
                send_turn(engine, session, list(token_ids[start : start + history]))
                params = SamplingParams(max_tokens=answer_tokens, ignore_eos=True)
                session.rewind(history)
                for _ in session.send_ids(token_ids[start + history : start + history + 8], sampling=params):
                    pass
                if session.usage is None or session.usage.num_cached_tokens != history:
                    raise RuntimeError(f"loaded tokens must be {history}, got {session.usage}")
                found[kind].append(session.token_ids[-answer_tokens:])
                session.close()
    shared = [_num_shared(a, b) for a, b in zip(*found.values(), strict=True)]
    return {
        "answers": num_answers,
        "history_tokens": history,
        "answer_tokens": answer_tokens,
        "same_answers": sum(num == answer_tokens for num in shared),
        "same_first_tokens": sum(num > 0 for num in shared),
        "mean_tokens_before_they_differ": statistics.fmean(shared),
    }


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before two answers differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


# Bytes.


def token_bytes(model: LoadedModel) -> list[dict[str, Any]]:
    """Of one token at rest, for this model's heads and for wider ones."""
    rows = []
    for head_dim in sorted({model.config.head_dim, 128}):
        resized = dataclasses.replace(model.config, head_dim=head_dim)
        int8 = rest_layout(resized, model.dtype, EngineConfig(kv_rest_dtype="int8")).token_bytes
        for dtype in ("bfloat16", "float32"):
            plain = rest_layout(resized, dtype, EngineConfig()).token_bytes
            rows.append(
                {
                    "head_dim": head_dim,
                    "dtype": dtype,
                    "token_bytes": plain,
                    "token_bytes_int8": int8,
                    "ratio": int8 / plain,
                }
            )
    return rows


def _engine(model: LoadedModel, kind: str, **fields: Any) -> Engine:
    config = EngineConfig(kv_rest_dtype=kind, max_batch_size=1, recompute_if_faster=False, **fields)
    return Engine(model, config)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json_out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="preset, .gguf file or Hugging Face directory")
    parser.add_argument("--text", type=Path, required=True, help="a .txt or .jsonl file to measure on")
    parser.add_argument("--window", type=int, default=2048, help="tokens of each context")
    parser.add_argument("--contexts", type=int, default=8, help="that perplexity is measured over")
    parser.add_argument("--step_tokens", type=int, default=128, help="fed at once; what is before them is rounded")
    parser.add_argument("--answers", type=int, default=16, help="greedy answers that are compared")
    parser.add_argument("--answer_tokens", type=int, default=32, help="of each")
    args = parser.parse_args()
    enable_compile_cache(EngineConfig().compile_cache_dir)
    machine = describe_machine()
    model = load_model(args.model)
    token_ids = read_ids(model, args.text, args.contexts * args.window)
    quality = perplexity(model, token_ids, window=args.window, step_tokens=args.step_tokens)
    agreed = agreement(model, token_ids, window=args.window, num_answers=args.answers, answer_tokens=args.answer_tokens)
    report = {
        "suite": "kv_rest",
        "model": model.name,
        "dtype": model.dtype,
        "machine": machine,
        "versions": describe_versions(),
        "command": shlex.join(["python", "-m", "tools.kv_rest", *sys.argv[1:]]),
        "bytes": token_bytes(model),
        "quality": {"text": args.text.name, **quality, "agreement": agreed},
    }
    args.json_out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
