"""What KV that replicas share costs in time to the first token by how it is kept: a turn at a replica that has nothing.

    .venv/bin/python -m tools.coded_objects --data=text.txt --codecs codec.npz --json_out=objects.json

Sessions are windows of a text, so that codes take what they take of such text. For each way to keep KV, as it is
computed, in int8, and by each codec, one engine stores all sessions and publishes them as it is closed. Another engine
of each way then takes each session over, one engine behind the other, the first of them in turn: from claiming it to
the first token of an answer to the tokens that follow in the text. The objects are files that are in no page cache;
with `--gb_s` their bytes come at the speed of a link instead. What computing the session anew takes stands beside that.

Not here: what codes cost in answers (`evaluate --task=kv_gate`), KV on SSD (`tools.coded_lines`), a local SSD beside
objects (`bench --suite=objects`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.disk import drop_cached, is_dropped
from benchmarks.engines import check_source, make_engine, send_turn, store_session, without_store
from benchmarks.harness import BenchError
from benchmarks.suites.objects import pace
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.launch.texts import tokenizer_of
from ca_jax.pretrained import load_model
from ca_jax.serving.core import enable_compile_cache
from ca_jax.storage.config import StoreConfig

PLAIN, ANEW = "as computed", "computed anew"

Window = tuple[list[int], list[int]]
"""Token ids of a session, and of the turn behind it."""


def config_of(name: str, directory: Path, args: argparse.Namespace) -> EngineConfig:
    """An engine that keeps KV of a way in objects in a directory."""
    store = StoreConfig(
        dram_gib=args.dram_gib,
        objects_url=f"file://{directory.resolve()}",
        objects_write="drain",
        objects_codec=name if name in args.codecs else None,
    )
    return EngineConfig(
        kv_rest_dtype="int8" if name == "int8" else "model",
        max_batch_size=1,
        context_window=args.history_tokens + args.new_tokens + 16,
        recompute_if_faster=False,
        store=store,
    )


def take_over(engine: Engine, directory: Path, session_id: str, window: Window) -> dict[str, float]:
    """A session's turn at a replica that has nothing of it.

    Returns:
      Seconds; whether it began before all KV was there (`early`), and whether that was too early, so that all was
      computed (`broken`).
    """
    elsewhere = engine.elsewhere
    if elsewhere is None:
        raise BenchError("a replica must share its sessions, got one that does not")
    files = [path for path in directory.rglob("*") if path.is_file()]
    drop_cached(files)
    if not is_dropped(files):
        raise BenchError("objects must be in no page cache, got them there")
    num_early, num_broken = engine.metrics.streamed_restores, engine.metrics.failed_loads
    started_s = time.perf_counter()
    elsewhere.claim(session_id)
    claim_s = time.perf_counter() - started_s
    session = engine.session(session_id=session_id)
    _, ttft_s = send_turn(engine, session, window[1])
    early = engine.metrics.streamed_restores - num_early
    broken = engine.metrics.failed_loads - num_broken
    if not broken:
        check_source("objects", session, len(window[1]), {"objects": len(window[0])})
    elsewhere.let_go(session)
    return {"ttft_s": claim_s + ttft_s, "claim_s": claim_s, "early": early, "broken": broken}


def compute(engine: Engine, window: Window) -> dict[str, float]:
    """The same turn where nothing is stored."""
    session = engine.session()
    _, ttft_s = send_turn(engine, session, [*window[0], *window[1]])
    session.close()
    return {"ttft_s": ttft_s}


def kv_bytes(directory: Path) -> int:
    """Of all objects of KV."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file() and "/kv/" in str(path))


def measure(args: argparse.Namespace, windows: list[Window], model: Any, root: Path) -> list[dict[str, Any]]:
    """A row for each way to keep KV."""
    ways = {Path(name).stem: config_of(name, root / Path(name).stem, args) for name in (PLAIN, "int8", *args.codecs)}
    plain = without_store(dataclasses.replace(ways[PLAIN], store=StoreConfig()))
    names: dict[str, list[str]] = {}
    for way, config in ways.items():
        with make_engine(model, config) as engine:
            names[way] = [store_session(engine, stored).session_id for stored, _ in windows]
        print(f"{way}: {len(windows)} sessions published", file=sys.stderr)
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in (*ways, ANEW)}
    with contextlib.ExitStack() as stack:
        engines = {way: stack.enter_context(make_engine(model, config)) for way, config in ways.items()}
        engines[ANEW] = stack.enter_context(make_engine(model, plain))
        for way, engine in engines.items():
            engine.warmup(max_history_tokens=args.history_tokens, max_new_tokens=args.new_tokens)
            if args.gb_s is not None and way != ANEW:
                pace(engine, args.gb_s * 1e9)
        compute(engines[ANEW], windows[0])
        order = list(engines)
        for number, window in enumerate(windows):
            at = number % len(order)
            for way in order[at:] + order[:at]:
                one = compute(engines[way], window) if way == ANEW else None
                samples[way].append(one or take_over(engines[way], root / way, names[way][number], window))
        num_numbers = len(windows) * args.history_tokens * model.config.kv_bytes_per_token(itemsize=1)
        return [
            {
                "kv": way,
                "bits": None if way == ANEW else 8 * kv_bytes(root / way) / num_numbers,
                "num_bytes": None if way == ANEW else kv_bytes(root / way),
                "ttft_s": statistics.median(each["ttft_s"] for each in taken),
                "ttft_s_least_most": [pick(each["ttft_s"] for each in taken) for pick in (min, max)],
                "ratio_to_plain": statistics.median(
                    each["ttft_s"] / other["ttft_s"] for each, other in zip(taken, samples[PLAIN], strict=True)
                ),
                "claim_s": None if way == ANEW else statistics.median(each["claim_s"] for each in taken),
                "early": None if way == ANEW else sum(each["early"] for each in taken),
                "broken": None if way == ANEW else sum(each["broken"] for each in taken),
            }
            for way, taken in samples.items()
        ]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="preset, .gguf file or Hugging Face directory")
    parser.add_argument("--data", type=Path, required=True, help="a text")
    parser.add_argument("--codecs", nargs="+", default=[], help="files of codecs")
    parser.add_argument("--sessions", type=int, default=6, help="windows of the text; DRAM must hold them all")
    parser.add_argument("--history_tokens", type=int, default=1900, help="of a session")
    parser.add_argument("--new_tokens", type=int, default=100, help="of the turn behind it")
    parser.add_argument("--gb_s", type=float, help="GB a second of a link; as fast as the disk where not given")
    parser.add_argument("--dram_gib", type=float, default=0.5, help="of each engine")
    parser.add_argument("--directory", type=Path, default=Path("build"), help="on the disk to be measured")
    parser.add_argument("--json_out", type=Path)
    args = parser.parse_args()
    enable_compile_cache(EngineConfig().compile_cache_dir)
    machine, model = describe_machine(), load_model(args.model)
    token_ids = tokenizer_of(model).encode(args.data.read_text(encoding="utf-8"))
    each, windows = args.history_tokens + args.new_tokens, []
    for start in range(0, min(args.sessions, len(token_ids) // each) * each, each):
        window = token_ids[start : start + each]
        windows.append((window[: args.history_tokens], window[args.history_tokens :]))
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        rows = measure(args, windows, model, Path(directory))
    for row in rows:
        print(row)
    report = {
        "suite": "coded_objects",
        "model": model.name,
        "dtype": model.dtype,
        "machine": machine,
        "versions": describe_versions(),
        "command": shlex.join(["python", "-m", "tools.coded_objects", *sys.argv[1:]]),
        "num_sessions": len(windows),
        "rows": rows,
    }
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
