"""Measures the engine on this machine, and a peer beside it: runs one suite of `benchmarks/`, from a checkout.

    python -m ca_jax.launch.bench --suite=reuse --history_tokens=500,2000 --new_tokens=100 --json_out=reuse.json
    python -m ca_jax.launch.bench --suite=decode --batch_sizes=1,8 --peer=transformers --json_out=decode.json
    python -m ca_jax.launch.bench --suite=tiers --ssd_dir=/mnt/ssd --json_out=tiers.json
    python -m ca_jax.launch.bench --suite=ttft --trace_out=trace.json --plot_out=turn.png --json_out=ttft.json
    python -m ca_jax.launch.bench --suite=throughput --model_preset=llama3-8b --json_out=throughput.json
    python -m ca_jax.launch.bench --suite=preload --json_out=preload.json
    python -m ca_jax.launch.bench --suite=overflow --plot_out=overflow.png --json_out=overflow.json
    python -m ca_jax.launch.bench --suite=blend --data=musique.json --json_out=blend.json
    python -m ca_jax.launch.bench --suite=blend_throughput --json_out=blend_throughput.json
    python -m ca_jax.launch.bench --suite=store --ssd_dir=/mnt/ssd --json_out=store.json
    python -m ca_jax.launch.bench --suite=policy --json_out=policy.json
    python -m ca_jax.launch.bench --suite=serving --json_out=serving.json

`tiers` is a turn's TTFT by where its history is: DRAM, SSD, SSD after a restart, nowhere. `ttft` is the same against
its compute and its load alone, `throughput` a continuous batch of conversations. `preload` and `save` are what of loads
and saves is hidden. `overflow` is what truncation costs, and what it saves over recomputing what is left. `blend` is
the TTFT of a question behind stored chunks, by how much of them is computed anew and where they are, `blend_throughput`
a stream of such questions whose chunks come again. `serving` is chats of several clients over HTTP, against
llama.cpp's server and, where it is installed, vLLM's. `store` (how fast its tiers move bytes) and `policy` (what its
bookkeeping costs and is worth) need no model.

Let nothing else run meanwhile. `transformers` waits for all its threads at every operation: where one of them shares
its core it becomes many times slower, and a comparison with it worthless. Medians, their spread, the machine and the
versions are printed and written as JSON.

Not here: flags (`flags`), suites (`suites`), what they share (`harness`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rich.console
from absl import flags as absl_flags

import benchmarks.suites
from benchmarks import figures, flags, tables
from benchmarks.compiles import CompileCounter
from benchmarks.harness import SUITES, Config, Run, ServingConfig, Suite
from benchmarks.peers import PEER_PACKAGES, PEERS
from benchmarks.recording import Recorder
from ca_jax.config import EngineConfig
from ca_jax.errors import CaJaxError
from ca_jax.launch import machine
from ca_jax.launch.flags import FlagError, out_path
from ca_jax.launch.plots import require_matplotlib
from ca_jax.launch.script import command_line, make_console, note, write_json
from ca_jax.launch.terminal import progress_bars
from ca_jax.pretrained import LoadedModel, Progress, load_model, random_model
from ca_jax.serving.core import enable_compile_cache

FLAGS = absl_flags.FLAGS
Report = dict[str, Any]
"""suite, machine, versions, command, config, rows, summary; JSON types only.

Of suites that serve also model, dtype, peer and startup; of the others other_load_share, which startup has there.
"""

ERRORS = (CaJaxError,)
"""What ends the script with one line; anything else is a fault of a suite, and shows where."""

_IDLE_CHECK_S = 0.5

benchmarks.suites.load()
define_flags = flags.define


def run_suite(
    suite: Suite,
    config: Config,
    *,
    load: Callable[[Progress], LoadedModel],
    command: str,
    peer_name: str | None = None,
    recorder: Recorder | None = None,
    console: rich.console.Console | None = None,
) -> Report:
    """Measures a suite and says all about it; progress goes to stderr, the configuration to the console.

    `load` gives the model, and is not called for suites that serve none. What the recorder has of one more round is
    still to be written.
    """
    other_load_share = _other_load_share()
    described = machine.describe_machine()
    run: Run[Any] = Run(config=config, recorder=recorder, cores=described["cores"])
    about: Report = {"suite": suite.name}
    with CompileCounter() as compiles, progress_bars() as run.progress:
        if suite.serves:
            enable_compile_cache(EngineConfig().compile_cache_dir)
            run.loaded = load(run.progress)
            about |= {"model": run.model.name, "dtype": run.model.dtype}
            run.peer = None if peer_name is None else PEERS[peer_name](run.model)
        if console is not None:
            note(console, repr(config))
        rows, summary = suite.run(run)
    packages = PEER_PACKAGES[peer_name] if peer_name else ()
    about |= {
        "machine": described,
        "versions": machine.describe_versions((*machine.PACKAGES, *packages)),
        "command": command,
        "config": dataclasses.asdict(config),
        "rows": [row if isinstance(row, dict) else dataclasses.asdict(row) for row in rows],
        "summary": summary,
    }
    if not suite.serves:
        return {**about, "other_load_share": other_load_share}
    startup = {
        "other_load_share": other_load_share,
        "model_load_s": run.model.load_s,
        "engine_start_s": run.startup.get("engine_start_s"),
        "first_touch_s": run.startup.get("first_touch_s"),
        "compile_s": compiles.seconds,
        "compiles": compiles.count,
    }
    return {**about, "peer": peer_name, "startup": startup}


def model_loader(
    model: str, preset: str | None, *, dtype: str | None, weight_dtype: str = "model", seed: int
) -> Callable[[Progress], LoadedModel]:
    """What gives the model to measure: of a preset, random weights of that seed; else as `load_model`."""

    def load(progress: Progress) -> LoadedModel:
        if preset is not None:
            return random_model(preset, dtype=dtype, seed=seed)
        return load_model(model, dtype=dtype, weight_dtype=weight_dtype, progress=progress)

    return load


def _check_flags(suite: Suite) -> None:
    """Raises FlagError for flags that do not go together."""
    for name, able in (
        ("peer", "has_peer"),
        ("trace_out", "is_recorded"),
        ("profile_dir", "is_recorded"),
        ("plot_out", "is_plotted"),
    ):
        if FLAGS[name].value is not None and not getattr(suite, able):
            suites = ", ".join(each.name for each in SUITES.values() if getattr(each, able))
            raise FlagError(f"{name} must go with one of the suites {suites}, got {suite.name}")
    if FLAGS.model_preset is not None and FLAGS["model"].present:
        raise FlagError(f"model and model_preset must not both be given, got {FLAGS.model} and {FLAGS.model_preset}")


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    console, suite = make_console(), SUITES[FLAGS.suite]
    _check_flags(suite)
    config = flags.config(suite.name)
    json_out, trace_out, plot_out = (out_path(name) for name in ("json_out", "trace_out", "plot_out"))
    if plot_out is not None:
        require_matplotlib()
        if suite.plot_needs is not None and not getattr(config, suite.plot_needs):
            raise FlagError(f"plot_out must have {suite.plot_needs} of at least 1 to draw, got 0")
    profile_dir = None if FLAGS.profile_dir is None else Path(FLAGS.profile_dir).expanduser()
    turn_out = plot_out if suite.plots_turn else None
    recorder = Recorder(trace_out=trace_out, plot_out=turn_out, profile_dir=profile_dir)
    report = run_suite(
        suite,
        config,
        load=model_loader(
            FLAGS.model,
            FLAGS.model_preset,
            dtype=FLAGS.dtype,
            weight_dtype=FLAGS.weight_dtype or "model",
            seed=FLAGS.seed or 0,
        ),
        command=command_line("bench"),
        peer_name=FLAGS.peer,
        recorder=recorder,
        console=console if isinstance(config, ServingConfig) else None,
    )
    if json_out is not None:
        write_json(report, json_out)
    tables.print_report(report, console)
    if suite.serves:
        place = report["machine"]
        text = {"title": report["model"], "caption": f"{report['dtype']}, {place['cpu']}, {place['device']}"}
        recorder.write(**text)
        if plot_out is not None and suite.panels:
            figures.plot(plot_out, suite.panels, report["rows"], **text)
    written = [path for path in (json_out, trace_out, plot_out, profile_dir) if path is not None]
    note(console, f"written to {', '.join(map(str, written))}", None)


def _other_load_share() -> float | None:
    """The share of the machine's CPU time that is spent on something else; None where psutil is not installed."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil.cpu_percent(interval=_IDLE_CHECK_S) / 100
