"""Measures the engine on this machine, and a peer beside it: reuse against recompute, prefill, decode. And its store.

    python -m ca_jax.launch.bench --suite=reuse --history_tokens=500,2000 --new_tokens=100 --json_out=reuse.json
    python -m ca_jax.launch.bench --suite=decode --batch_sizes=1,8 --peer=transformers --json_out=decode.json
    python -m ca_jax.launch.bench --suite=tiers --ssd_dir=/mnt/ssd --json_out=tiers.json
    python -m ca_jax.launch.bench --suite=store --ssd_dir=/mnt/ssd --json_out=store.json
    python -m ca_jax.launch.bench --suite=policy --json_out=policy.json

`tiers` is a turn's TTFT by where its history is: DRAM, SSD, SSD after a restart, nowhere.
`store` (how fast its tiers move bytes) and `policy` (what its bookkeeping costs and is worth) need no model.

Let nothing else run meanwhile. `transformers` waits for all its threads at every operation: where one of them shares
its core it becomes many times slower, and a comparison with it worthless. Medians, their spread, the machine and the
versions are printed and written as JSON.

Not here: measuring (`bench_suites`, `bench_tiers`, `bench_storage`, `bench_policy`), the JSON's rows (`bench_schema`,
`bench_storage_schema`) and form (`bench_report`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import rich.console
from absl import app, flags, logging

from ca_jax.engine import Engine, enable_compile_cache
from ca_jax.errors import CaJaxError
from ca_jax.launch import bench_report, machine
from ca_jax.launch.bench_disk import scratch_on_disk
from ca_jax.launch.bench_peers import PEER_PACKAGES, make_peer
from ca_jax.launch.bench_policy import run_policy_suite
from ca_jax.launch.bench_schema import ENGINE_SUITES, PEER_SUITES, BenchConfig, BenchError, Row, Startup
from ca_jax.launch.bench_storage import run_store_suite
from ca_jax.launch.bench_storage_schema import STORAGE_SUITES, PolicyBenchConfig, StoreBenchConfig
from ca_jax.launch.bench_suites import run_suite
from ca_jax.launch.bench_tiers import run_tiers_suite, tiers_engine_config
from ca_jax.launch.progress import progress_bars
from ca_jax.metrics import CompileCounter
from ca_jax.pretrained import Progress, load_model
from ca_jax.storage.config import SSD_DRIVERS

Config = TypeVar("Config", BenchConfig, StoreBenchConfig, PolicyBenchConfig)

_IDLE_CHECK_S = 0.5
_PIPE_COLUMNS = 140  # where there is no terminal to ask


def _define_integers(name: str, default: Sequence[int], help_text: str) -> None:
    flags.DEFINE_list(name, [str(item) for item in default], help_text)


_SUITE = flags.DEFINE_enum("suite", None, [*ENGINE_SUITES, *STORAGE_SUITES], "What to measure.", required=True)
_JSON_OUT = flags.DEFINE_string("json_out", None, "File to write the result to.", required=True)
_MODEL = flags.DEFINE_string(
    "model", "smollm2-135m-instruct", "Preset, .gguf file, Hugging Face directory or hub name, or converted checkpoint."
)
_PEER = flags.DEFINE_enum(
    "peer", None, list(PEER_PACKAGES), "Engine to measure beside ours on the same weights, dtype and threads."
)
flags.DEFINE_enum("dtype", BenchConfig.dtype, ["float32", "bfloat16"], "Of weights and KV.")
_define_integers("history_tokens", BenchConfig.history_tokens, "reuse, tiers: tokens whose KV is stored.")
_define_integers("new_tokens", BenchConfig.new_tokens, "reuse, tiers: tokens of the turn over them.")
_define_integers("prefill_tokens", BenchConfig.prefill_tokens, "prefill: tokens of the prompts.")
_define_integers("batch_sizes", BenchConfig.batch_sizes, "decode: sessions that decode together.")
_define_integers("context_tokens", BenchConfig.context_tokens, "decode: tokens before decoding.")
flags.DEFINE_integer("decode_steps", BenchConfig.decode_steps, "decode: steps in one sample.")
flags.DEFINE_float("dram_gib", BenchConfig.dram_gib, "reuse, prefill, decode: cap of the DRAM tier, GiB.")
flags.DEFINE_integer("num_layers", StoreBenchConfig.num_layers, "store: layers of a block.")
flags.DEFINE_integer("num_kv_heads", StoreBenchConfig.num_kv_heads, "store: KV heads of a block.")
flags.DEFINE_integer("head_dim", StoreBenchConfig.head_dim, "store: size of a head.")
flags.DEFINE_integer("block_tokens", StoreBenchConfig.block_tokens, "store: tokens in a block.")
flags.DEFINE_integer("session_tokens", StoreBenchConfig.session_tokens, "store: tokens that are loaded from DRAM.")
flags.DEFINE_float("store_gib", StoreBenchConfig.store_gib, "store: what is written to disk and read again, GiB.")
flags.DEFINE_string(
    "ssd_dir", None, "tiers, store, policy: directory on the disk to measure; by default where temporary files are."
)
flags.DEFINE_enum("ssd_driver", BenchConfig.ssd_driver, SSD_DRIVERS, "tiers: how KV is kept on SSD.")
flags.DEFINE_integer("num_sessions", PolicyBenchConfig.num_sessions, "policy: sessions stored.")
flags.DEFINE_integer("num_jobs", PolicyBenchConfig.num_jobs, "policy: jobs that wait.")
flags.DEFINE_integer("num_steps", PolicyBenchConfig.num_steps, "policy: choices that percentiles are of.")
flags.DEFINE_integer("loop_sessions", PolicyBenchConfig.loop_sessions, "policy: sessions revisited in a loop.")
flags.DEFINE_float("queue_depth", PolicyBenchConfig.queue_depth, "policy: jobs that wait in it, a share of them.")
flags.DEFINE_integer("repeats", BenchConfig.repeats, "Samples that a median is of.")
flags.DEFINE_integer("seed", BenchConfig.seed, "Of what is random: token ids, bytes, sizes, who comes next.")


def _config(kind: type[Config]) -> Config:
    """The config of that kind, each field from the flag of its name."""
    return kind(**{field.name: _value(field.name) for field in dataclasses.fields(kind)})


def _value(name: str) -> Any:
    value = flags.FLAGS[name].value
    if not isinstance(value, list):
        return value
    try:
        return tuple(int(item) for item in value)
    except ValueError as error:
        raise ValueError(f"{name} wanted integers with commas between them, found {value}") from error


def run(
    config: BenchConfig, model: str, peer_name: str | None, command: str, console: rich.console.Console
) -> bench_report.Report:
    """Loads the model, measures one suite of the engine and says all about it. Progress goes to stderr.

    Args:
      config: what to measure.
      model: which, as for `load_model`.
      peer_name: one of `PEERS`, or None.
      command: how it was asked for.
      console: where the engine's configuration is printed.

    Raises:
      BenchError: the engine cannot be as large as the suite wants it, the disk cannot be used for it, or the engine did
        other work than a row would say it did.
      PeerUnavailableError: the peer is not installed.
      CaJaxError: the model cannot be loaded.
    """
    other_load_share = _other_load_share()
    described = machine.describe_machine()
    with CompileCounter() as compiles, contextlib.ExitStack() as stack:
        with progress_bars() as progress:
            started_s = time.perf_counter()
            engine = _make_engine(config, model, progress, stack)
            engine_start_s = time.perf_counter() - started_s
        resolved = dataclasses.replace(engine.config, dtype=engine.model.dtype)
        console.print(repr(resolved), style="dim", markup=False, highlight=False, soft_wrap=True)
        peer = None if peer_name is None else make_peer(peer_name, engine.model)
        with progress_bars() as progress:
            rows: Sequence[Row]
            if config.suite == "tiers":
                rows = run_tiers_suite(engine, config, progress)
            else:
                rows = run_suite(engine, config, peer, progress)
    startup = Startup(
        other_load_share=other_load_share,
        model_load_s=engine.metrics.model_load_s,
        engine_start_s=engine_start_s,
        first_touch_s=engine.metrics.first_touch_s,
        compile_s=compiles.seconds,
        compiles=compiles.count,
    )
    return bench_report.make_report(
        config,
        rows,
        startup,
        model=engine.model.name,
        dtype=engine.model.dtype,
        machine=described,
        versions=machine.describe_versions((*machine.PACKAGES, *(PEER_PACKAGES[peer_name] if peer_name else ()))),
        command=command,
        peer=peer_name,
    )


def run_storage(config: StoreBenchConfig | PolicyBenchConfig, command: str) -> bench_report.Report:
    """Measures one suite that needs no engine and says all about it. Progress goes to stderr.

    Args:
      config: what to measure.
      command: how it was asked for.

    Raises:
      BenchError: the disk cannot be used for it, or gave other bytes than were written.
    """
    other_load_share = _other_load_share()
    described = machine.describe_machine()
    with progress_bars() as progress:
        rows: Sequence[Any]
        if isinstance(config, StoreBenchConfig):
            rows = run_store_suite(config, described["cores"], progress)
        else:
            rows = run_policy_suite(config, progress)
    return bench_report.make_storage_report(
        config,
        rows,
        machine=described,
        versions=machine.describe_versions(),
        command=command,
        other_load_share=other_load_share,
    )


def _make_engine(config: BenchConfig, model: str, progress: Progress, stack: contextlib.ExitStack) -> Engine:
    """The engine that a suite wants; `stack` closes it, and removes the directory it has if it has one."""
    try:
        if config.suite != "tiers":
            return stack.enter_context(Engine.from_pretrained(model, config.engine_config(), progress=progress))
        directory = stack.enter_context(scratch_on_disk(config.ssd_dir))
        enable_compile_cache(config.engine_config().compile_cache_dir)
        loaded = load_model(model, dtype=config.dtype, progress=progress)
        return stack.enter_context(Engine(loaded, tiers_engine_config(config, loaded, directory)))
    except ValueError as error:
        if isinstance(error, CaJaxError):
            raise
        raise BenchError(f"no engine for {config.suite} at this size: {error}") from error


def _other_load_share() -> float | None:
    """The share of the machine's CPU time that is spent on something else; None where psutil is not installed."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil.cpu_percent(interval=_IDLE_CHECK_S) / 100


def main(argv: Sequence[str]) -> None:
    """Runs from the command line."""
    if len(argv) > 1:
        raise app.UsageError(f"wanted flags only, found {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # jax reports each backend that it does not find.
    suite = _SUITE.value
    try:
        config: BenchConfig | StoreBenchConfig | PolicyBenchConfig
        if suite in ENGINE_SUITES:
            config = _config(BenchConfig)
            config.engine_config()
        else:
            config = _config(StoreBenchConfig) if suite == "store" else _config(PolicyBenchConfig)
        if _PEER.value is not None and suite not in PEER_SUITES:
            raise ValueError(f"a peer wanted one of the suites {', '.join(PEER_SUITES)}, found {suite}")
    except ValueError as error:
        sys.exit(f"error: {error}")
    json_out = Path(_JSON_OUT.value).expanduser()
    if json_out.is_dir():  # Minutes before it would be noticed otherwise.
        sys.exit(f"error: json_out wanted a file, found the directory {json_out}")
    console = rich.console.Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    try:
        command = shlex.join(["python", "-m", "ca_jax.launch.bench", *sys.argv[1:]])
        if isinstance(config, BenchConfig):
            report = run(config, _MODEL.value, _PEER.value, command, console)
        else:
            report = run_storage(config, command)
    except CaJaxError as error:
        sys.exit(f"error: {error}")
    bench_report.write_json(report, json_out)
    bench_report.print_report(report, console)
    console.print(f"written to {json_out}", highlight=False)


if __name__ == "__main__":
    app.run(main)
