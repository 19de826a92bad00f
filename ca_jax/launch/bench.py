"""Measures the engine on this machine, and a peer beside it: reuse against recompute, prefill, decode.

    python -m ca_jax.launch.bench --suite=reuse --history_tokens=500,2000 --new_tokens=100 --json_out=reuse.json
    python -m ca_jax.launch.bench --suite=decode --batch_sizes=1,8 --peer=transformers --json_out=decode.json

Let nothing else run meanwhile. `transformers` waits for all its threads at every operation: where one of them shares
its core it becomes many times slower, and a comparison with it worthless. Medians, their spread, the machine and the
versions are printed and written as JSON.

Not here: measuring (`bench_suites`), the JSON's rows (`bench_schema`) and form (`bench_report`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import rich.console
from absl import app, flags, logging

from ca_jax.engine import Engine
from ca_jax.errors import CaJaxError
from ca_jax.launch import bench_report, machine
from ca_jax.launch.bench_peers import PEER_PACKAGES, make_peer
from ca_jax.launch.bench_schema import SUITES, BenchConfig, Startup
from ca_jax.launch.bench_suites import BenchError, run_suite
from ca_jax.launch.progress import progress_bars
from ca_jax.metrics import CompileCounter
from ca_jax.pretrained import Progress

_IDLE_CHECK_S = 0.5
_PIPE_COLUMNS = 140  # where there is no terminal to ask


def _define_integers(name: str, default: Sequence[int], help_text: str) -> flags.FlagHolder[list[str]]:
    return flags.DEFINE_list(name, [str(item) for item in default], help_text)


_SUITE = flags.DEFINE_enum("suite", None, list(SUITES), "What to measure.", required=True)
_JSON_OUT = flags.DEFINE_string("json_out", None, "File to write the result to.", required=True)
_MODEL = flags.DEFINE_string(
    "model", "smollm2-135m-instruct", "Preset, .gguf file, Hugging Face directory or hub name, or converted checkpoint."
)
_PEER = flags.DEFINE_enum(
    "peer", None, list(PEER_PACKAGES), "Engine to measure beside ours on the same weights, dtype and threads."
)
_DTYPE = flags.DEFINE_enum("dtype", BenchConfig.dtype, ["float32", "bfloat16"], "Of weights and KV.")
_HISTORY_TOKENS = _define_integers("history_tokens", BenchConfig.history_tokens, "reuse: tokens whose KV is stored.")
_NEW_TOKENS = _define_integers("new_tokens", BenchConfig.new_tokens, "reuse: tokens of the turn over them.")
_PREFILL_TOKENS = _define_integers("prefill_tokens", BenchConfig.prefill_tokens, "prefill: tokens of the prompts.")
_BATCH_SIZES = _define_integers("batch_sizes", BenchConfig.batch_sizes, "decode: sessions that decode together.")
_CONTEXT_TOKENS = _define_integers("context_tokens", BenchConfig.context_tokens, "decode: tokens before decoding.")
_DECODE_STEPS = flags.DEFINE_integer("decode_steps", BenchConfig.decode_steps, "decode: steps in one sample.")
_REPEATS = flags.DEFINE_integer("repeats", BenchConfig.repeats, "Samples that a median is of.")
_DRAM_GIB = flags.DEFINE_float("dram_gib", BenchConfig.dram_gib, "Cap of the DRAM tier, GiB.")
_SEED = flags.DEFINE_integer("seed", BenchConfig.seed, "Of the random token ids.")


def _integers(flag: flags.FlagHolder[list[str]]) -> tuple[int, ...]:
    try:
        return tuple(int(item) for item in flag.value)
    except ValueError as error:
        raise ValueError(f"{flag.name} wanted integers with commas between them, found {flag.value}") from error


def run(
    config: BenchConfig, model: str, peer_name: str | None, command: str, console: rich.console.Console
) -> bench_report.Report:
    """Loads the model, measures one suite and says all about it. Progress goes to stderr.

    Args:
      config: what to measure.
      model: which, as for `load_model`.
      peer_name: one of `PEERS`, or None.
      command: how it was asked for.
      console: where the engine's configuration is printed.

    Raises:
      BenchError: the engine cannot be as large as the suite wants it, or did other work than a row would say it did.
      PeerUnavailableError: the peer is not installed.
      CaJaxError: the model cannot be loaded.
    """
    other_load_share = _other_load_share()
    described = machine.describe_machine()
    with CompileCounter() as compiles, contextlib.ExitStack() as stack:
        with progress_bars() as progress:
            started_s = time.perf_counter()
            engine = stack.enter_context(_make_engine(config, model, progress))
            engine_start_s = time.perf_counter() - started_s
        resolved = dataclasses.replace(engine.config, dtype=engine.model.dtype)
        console.print(repr(resolved), style="dim", markup=False, highlight=False, soft_wrap=True)
        peer = None if peer_name is None else make_peer(peer_name, engine.model)
        with progress_bars() as progress:
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


def _make_engine(config: BenchConfig, model: str, progress: Progress) -> Engine:
    try:
        return Engine.from_pretrained(model, config.engine_config(), progress=progress)
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
    try:
        config = BenchConfig(
            suite=_SUITE.value,
            history_tokens=_integers(_HISTORY_TOKENS),
            new_tokens=_integers(_NEW_TOKENS),
            prefill_tokens=_integers(_PREFILL_TOKENS),
            batch_sizes=_integers(_BATCH_SIZES),
            context_tokens=_integers(_CONTEXT_TOKENS),
            decode_steps=_DECODE_STEPS.value,
            repeats=_REPEATS.value,
            dtype=_DTYPE.value,
            dram_gib=_DRAM_GIB.value,
            seed=_SEED.value,
        )
        config.engine_config()
    except ValueError as error:
        sys.exit(f"error: {error}")
    json_out = Path(_JSON_OUT.value).expanduser()
    if json_out.is_dir():  # Minutes before it would be noticed otherwise.
        sys.exit(f"error: json_out wanted a file, found the directory {json_out}")
    console = rich.console.Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    try:
        command = shlex.join(["python", "-m", "ca_jax.launch.bench", *sys.argv[1:]])
        report = run(config, _MODEL.value, _PEER.value, command, console)
    except CaJaxError as error:
        sys.exit(f"error: {error}")
    bench_report.write_json(report, json_out)
    bench_report.print_report(report, console)
    console.print(f"written to {json_out}", highlight=False)


if __name__ == "__main__":
    app.run(main)
