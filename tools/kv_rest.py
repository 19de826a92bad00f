"""What int8 KV at rest costs in quality, and what it saves in bytes and in time to the first token.

    .venv/bin/python -m tools.kv_rest --text=TEXTS/wikitext2_test_unk_tokens.txt --json_out=results/kv_rest.json

- quality: perplexity of a text whose history is rounded behind every step, beside the same at full precision; and how
  many greedy tokens two engines share whose second turn goes on behind a loaded history.
- bytes: of a token at rest, and of what an engine stores of one conversation.
- load: TTFT over one history by where it is, int8 and the model's dtype in turns in one run; medians.

To be run from the repository's root, with nothing else running.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks.engines import OneSessionEngine, check_source, one_session_config, send_turn
from ca_jax.config import KV_REST_DTYPES, EngineConfig
from ca_jax.engine import Engine, enable_compile_cache
from ca_jax.evaluation.statistics import block_estimate
from ca_jax.evaluation.stream import ContextStream
from ca_jax.evaluation.texts import read_ids
from ca_jax.kv.layout import rest_layout
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel, load_model
from ca_jax.storage.config import SSD_DRIVERS, StoreConfig
from ca_jax.turns.requests import SamplingParams

SECTIONS = ("quality", "bytes", "load")
SOURCES = ("dram", "ssd_warm", "ssd")
"""Where a history is: in DRAM; on SSD and in the page cache; on SSD alone."""

FLAGS = flags.FLAGS


def _define_flags() -> None:
    flags.DEFINE_string("json_out", None, "Where the figures go.", required=True)
    flags.DEFINE_list("sections", list(SECTIONS), f"What is measured, of {', '.join(SECTIONS)}.")
    flags.DEFINE_string("model", "smollm2-135m-instruct", "Preset, .gguf file or Hugging Face directory.")
    flags.DEFINE_string("text", None, "What perplexity is measured on: a .txt or .jsonl file.")
    flags.DEFINE_integer("window", 2048, "Tokens of each context.")
    flags.DEFINE_integer("contexts", 8, "Contexts that perplexity is measured over.")
    flags.DEFINE_integer("step_tokens", 128, "Tokens that are fed at once; what is before them is rounded.")
    flags.DEFINE_integer("answers", 16, "Greedy answers that are compared.")
    flags.DEFINE_integer("answer_tokens", 32, "Tokens of each.")
    flags.DEFINE_list("history_tokens", ["512", "2000"], "Tokens of history that TTFT is measured over.")
    flags.DEFINE_integer("new_tokens", 64, "New tokens behind them.")
    flags.DEFINE_integer("repeats", 11, "Samples of each.")
    flags.DEFINE_enum("ssd_driver", StoreConfig.ssd_driver, SSD_DRIVERS, "How KV is kept on SSD.")


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
                    raise RuntimeError(f"there must be {history} tokens loaded, got {session.usage}")
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


# Load.


def load_times(
    model: LoadedModel, *, history_tokens: Sequence[int], num_new: int, repeats: int, ssd_driver: str
) -> list[dict[str, Any]]:
    """TTFT by where a history is, of engines of either kind, a sample of each in turn."""
    max_tokens = max(history_tokens) + num_new
    rows = []
    with tempfile.TemporaryDirectory(prefix="kv_rest-", dir=".") as name:
        served: dict[str, OneSessionEngine] = {}
        for kind in KV_REST_DTYPES:
            config = _config(kind, context_window=max_tokens + 8, store=StoreConfig(ssd_driver=ssd_driver))
            config = one_session_config(config, model, Path(name) / kind, max_tokens=max_tokens)
            served[kind] = OneSessionEngine(Engine(model, config), suite="load", max_tokens=max_tokens, seed=0)
        try:
            for each in served.values():
                each.begin()
            for num_history in history_tokens:
                rows.append(_load_row(served, num_history, num_new, repeats))
        finally:
            for each in served.values():
                each.close()
    return rows


def _load_row(served: dict[str, OneSessionEngine], num_history: int, num_new: int, repeats: int) -> dict[str, Any]:
    names = {kind: each.store_session(num_history).session_id for kind, each in served.items()}
    samples: dict[str, dict[str, list[dict[str, float]]]] = {
        kind: {source: [] for source in SOURCES} for kind in served
    }
    for index in range(1 + repeats):
        for source in SOURCES:
            for kind in tuple(served) if index % 2 else tuple(reversed(served)):
                sample = _sample(served[kind], names[kind], source, num_history, num_new)
                if index:  # The first compiles.
                    samples[kind][source].append(sample)
    stored_bytes = {
        kind: each.layout.num_blocks(num_history) * each.layout.block_bytes for kind, each in served.items()
    }
    for kind, each in served.items():
        each.engine.session(session_id=names[kind]).close()
    medians = {
        source: {
            kind: {
                name: statistics.median(sample[name] for sample in of_kind[source])
                for name in ("ttft_s", "fetch_s", "load_s", "load_stall_s")
            }
            for kind, of_kind in samples.items()
        }
        for source in SOURCES
    }
    for source, kinds in medians.items():
        kinds["ratio"] = {
            name: kinds["int8"][name] / kinds["model"][name] if kinds["model"][name] else None
            for name in ("ttft_s", "fetch_s", "load_s")
        }
        kinds["spread"] = {
            kind: [bound(sample["ttft_s"] for sample in samples[kind][source]) for bound in (min, max)]
            for kind in served
        }
    return {"history_tokens": num_history, "new_tokens": num_new, "stored_bytes": stored_bytes, "sources": medians}


def _sample(served: OneSessionEngine, name: str, source: str, num_history: int, num_new: int) -> dict[str, float]:
    """One turn of a session that is brought to where its history is to come from, and taken back."""
    if source != "dram":
        served.push_out()
    session = served.engine.session(session_id=name)
    if source == "ssd_warm":
        served.warm_up_files()
    elif source == "ssd":
        served.cool_down_files()
    _, ttft_s = send_turn(served.engine, session, served.random_ids(num_new))
    usage = check_source(source, session, num_new, {"dram" if source == "dram" else "ssd": num_history})
    session.rewind(num_history)
    served.engine.wait_for_saves()
    return {
        "ttft_s": ttft_s,
        "fetch_s": usage.queued_s,
        "load_s": usage.load_s,
        "load_stall_s": usage.load_stall_s,
    }


def _config(kind: str, **fields: Any) -> EngineConfig:
    return EngineConfig(kv_rest_dtype=kind, max_batch_size=1, recompute_if_faster=False, **fields)


def _engine(model: LoadedModel, kind: str, **fields: Any) -> Engine:
    return Engine(model, _config(kind, **fields))


def main(argv: Sequence[str]) -> None:
    """See the module."""
    if len(argv) > 1:
        sys.exit(f"error: there must be flags alone, got {' '.join(argv[1:])}")
    unknown = set(FLAGS.sections) - set(SECTIONS)
    if unknown:
        sys.exit(f"error: --sections must be some of {', '.join(SECTIONS)}, got {', '.join(sorted(unknown))}")
    enable_compile_cache(EngineConfig().compile_cache_dir)
    machine = describe_machine()
    model = load_model(FLAGS.model)
    report: dict[str, Any] = {
        "suite": "kv_rest",
        "model": model.name,
        "dtype": model.dtype,
        "machine": machine,
        "versions": describe_versions(),
        "command": shlex.join(["python", "-m", "tools.kv_rest", *sys.argv[1:]]),
    }
    if "bytes" in FLAGS.sections:
        report["bytes"] = token_bytes(model)
    if "load" in FLAGS.sections:
        report["load"] = load_times(
            model,
            history_tokens=[int(num_tokens) for num_tokens in FLAGS.history_tokens],
            num_new=FLAGS.new_tokens,
            repeats=FLAGS.repeats,
            ssd_driver=FLAGS.ssd_driver,
        )
    if "quality" in FLAGS.sections:
        if FLAGS.text is None:
            sys.exit("error: quality must be --text, got none")
        token_ids = read_ids(model, Path(FLAGS.text), FLAGS.contexts * FLAGS.window)
        report["quality"] = {
            "text": Path(FLAGS.text).name,
            **perplexity(model, token_ids, window=FLAGS.window, step_tokens=FLAGS.step_tokens),
            "agreement": agreement(
                model,
                token_ids,
                window=FLAGS.window,
                num_answers=FLAGS.answers,
                answer_tokens=FLAGS.answer_tokens,
            ),
        }
    Path(FLAGS.json_out).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
