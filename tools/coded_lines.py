"""What KV coded on SSD costs in answers and in time to the first token: lines of LongEval, asked for after a restart.

    .venv/bin/python -m tools.coded_lines --data=longeval/200_lines.jsonl --codecs=codec.npz --json_out=lines.json

Each record, so many of a file's lines, is a session of one engine for each way to keep KV at rest: as it is computed,
in int8, and by each codec. The engines are closed and opened again, and asked for lines of each record, one engine
behind the other, the first of them in turn. A record's first question reads its KV from files that are in no page
cache; the others find it in DRAM, as it was decoded. What computing the record anew takes stands beside that.

Not here: perplexity (`evaluate --task=kv_gate`), what overflow costs (`evaluate --task=longeval`).
Source: LongEval (Li et al., "How long can open-source LLMs truly promise on context length?", 2023).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.disk import drop_cached
from benchmarks.engines import make_engine, settle, store_session, take_back, without_store
from benchmarks.evaluate.statistics import mean_interval
from benchmarks.harness import BenchError
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.launch.texts import read_rows, tokenizer_of
from ca_jax.pretrained import LoadedModel, load_model
from ca_jax.serving.core import enable_compile_cache
from ca_jax.session import Session
from ca_jax.storage.config import StoreConfig
from ca_jax.turns.requests import SamplingParams

PLAIN, ANEW = "as computed", "computed anew"
_LINE = re.compile(r"^line (.+?): REGISTER_CONTENT is <(\d+)>$", re.MULTILINE)
_ANSWER = SamplingParams(max_tokens=12)


@dataclasses.dataclass(frozen=True)
class Record:
    """Token ids of some lines, and what is asked behind them: token ids, and the number that is right."""

    token_ids: list[int]
    questions: list[tuple[list[int], str]]


def records(model: LoadedModel, args: argparse.Namespace) -> Iterator[Record]:
    """Of each row of the file a record of the first lines, and questions for lines that are drawn from it."""
    encode, rng = tokenizer_of(model).encode, np.random.default_rng(args.seed)
    for _, row in list(read_rows(args.data))[args.skip : args.skip + args.records]:
        lines = _LINE.findall(row["prompt"])[: args.lines]
        text = row["prompt"][: row["prompt"].index("line " + lines[0][0])]
        text += "".join(f"line {name}: REGISTER_CONTENT is <{number}>\n" for name, number in lines)
        drawn = rng.permutation(len(lines))[: args.questions]
        asked = [(encode(f"line {lines[i][0]}: REGISTER_CONTENT is <", add_bos=False), lines[i][1]) for i in drawn]
        yield Record(encode(text), asked)


def configs(args: argparse.Namespace, directory: Path, dram_gib: float) -> dict[str, EngineConfig]:
    """Engines by how KV is at rest."""
    found = {}
    for name in (PLAIN, "int8", *args.codecs):
        store = StoreConfig(
            dram_gib=dram_gib,
            ssd_dir=str(directory / Path(name).stem),
            ssd_gib=32,
            ssd_codec=name if name in args.codecs else None,
        )
        found[Path(name).stem] = EngineConfig(
            kv_rest_dtype="int8" if name == "int8" else "model",
            max_batch_size=1,
            context_window=args.window,
            recompute_if_faster=False,
            store=store,
        )
    return found


def answer(engine: Engine, session: Session, token_ids: Sequence[int]) -> tuple[list[int], float]:
    """What follows, greedily, and seconds to its first token; the session ends where it ended then."""
    num_tokens, started_s, ttft_s = len(session.token_ids), time.perf_counter(), 0.0
    for _ in session.send_ids(token_ids, sampling=_ANSWER):
        ttft_s = ttft_s or time.perf_counter() - started_s
    given = session.token_ids[num_tokens + len(token_ids) :]
    settle(engine)
    take_back(engine, session, num_tokens)
    return given, ttft_s


def ask(
    model: LoadedModel, engines: dict[str, Engine], names: dict[str, list[str]], asked: Sequence[Record]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[float]]]:
    """Of each engine its answers, and of each record seconds to the first token of the first question."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    ttft_s: dict[str, list[float]] = {name: [] for name in (*engines, ANEW)}
    decode, order = tokenizer_of(model).decode, list(engines)
    directories = {name: Path(each.config.store.ssd_dir or ".") for name, each in engines.items()}
    with make_engine(model, without_store(next(iter(engines.values())).config)) as anew:
        for number, record in enumerate(asked):
            token_ids = [*record.token_ids, *record.questions[0][0]]
            _, seconds = answer(anew, anew.session(), token_ids)
            ttft_s[ANEW].append(seconds)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                engine = engines[name]
                drop_cached(path for path in directories[name].rglob("*") if path.is_file())
                session = engine.session(session_id=names[name][number])
                for nth, (question, right) in enumerate(record.questions):
                    given, seconds = answer(engine, session, question)
                    found = None if session.usage is None else session.usage.cached_tokens
                    if nth == 0:
                        ttft_s[name].append(seconds)
                        if not found or found.get("ssd") != len(record.token_ids):
                            raise BenchError(f"{name} must load {len(record.token_ids)} tokens from SSD, got {found}")
                    text = decode(given)
                    is_right = right in re.findall(r"\d+", text.split("\n")[0])
                    answers[name].append({"record": number, "ids": given, "text": text, "is_right": is_right})
    return answers, ttft_s


def summary(
    answers: dict[str, list[dict[str, Any]]], ttft_s: dict[str, list[float]], bits: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """A row for each way to keep KV; intervals of 95 %, by the bootstrap over records, paired with `PLAIN`."""
    plain = answers[PLAIN]
    clusters = [each["record"] for each in plain]
    for name, given in answers.items():
        right = np.array([each["is_right"] for each in given], float)
        less = right - np.array([each["is_right"] for each in plain], float)
        same = np.array([each["ids"] == other["ids"] for each, other in zip(given, plain, strict=True)], float)
        yield {
            "kv": name,
            "bits": bits.get(name),
            "num_questions": len(given),
            "num_right": int(right.sum()),
            "right_above_plain": mean_interval(less, clusters),
            "same_answers": float(same.mean()),
            "ttft_s": statistics.median(ttft_s[name]),
            "ttft_s_least_most": [min(ttft_s[name]), max(ttft_s[name])],
        }
    yield {
        "kv": ANEW,
        "ttft_s": statistics.median(ttft_s[ANEW]),
        "ttft_s_least_most": [min(ttft_s[ANEW]), max(ttft_s[ANEW])],
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="preset, .gguf file or Hugging Face directory")
    parser.add_argument("--data", type=Path, required=True, help="a .jsonl file of LongEval's lines")
    parser.add_argument("--codecs", nargs="+", default=[], help="files of codecs")
    parser.add_argument("--lines", type=int, default=40, help="of a record")
    parser.add_argument("--records", type=int, default=25, help="rows of the file")
    parser.add_argument("--skip", type=int, default=0, help="rows before the first")
    parser.add_argument("--questions", type=int, default=4, help="of a record")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0, help="of which lines are asked for")
    parser.add_argument("--ssd_dir", type=Path, default=Path("build"), help="a directory on the disk to be measured")
    parser.add_argument("--json_out", type=Path)
    args = parser.parse_args()
    enable_compile_cache(EngineConfig().compile_cache_dir)
    machine, model = describe_machine(), load_model(args.model)
    asked, names = list(records(model, args)), {}
    with tempfile.TemporaryDirectory(dir=args.ssd_dir) as directory, contextlib.ExitStack() as stack:
        by_name = configs(args, Path(directory), dram_gib=1.0)
        for name, config in by_name.items():
            with make_engine(model, config) as engine:
                names[name] = [store_session(engine, each.token_ids).session_id for each in asked]
            print(f"{name}: {len(asked)} records stored", file=sys.stderr)
        engines = {name: stack.enter_context(make_engine(model, each)) for name, each in by_name.items()}
        stored = {name: engine.store_stats().ssd.used_bytes for name, engine in engines.items()}
        answers, ttft_s = ask(model, engines, names, asked)
    num_numbers = model.config.num_layers * 2 * model.config.num_kv_heads * model.config.head_dim
    num_blocks = sum(-(-len(each.token_ids) // StoreConfig.block_tokens) for each in asked)
    bits = {name: 8 * size / (num_blocks * StoreConfig.block_tokens * num_numbers) for name, size in stored.items()}
    rows = list(summary(answers, ttft_s, bits))
    for row in rows:
        print(row)
    report = {
        "suite": "coded_lines",
        "model": model.name,
        "dtype": model.dtype,
        "machine": machine,
        "versions": describe_versions(),
        "command": shlex.join(["python", "-m", "tools.coded_lines", *sys.argv[1:]]),
        "record_tokens": [len(each.token_ids) for each in asked],
        "rows": rows,
        "answers": answers,
        "ttft_s": ttft_s,
    }
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
