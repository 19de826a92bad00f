"""Replays a trace through the engine: real conversations, come and gone as they are told to, and what they took.

    python -m ca_jax.launch.replay --num_sessions=100 --max_turns=10 --dram_gib=1 --recompute --json_out=replay.json
    python -m ca_jax.launch.replay --trace_format=mooncake --trace=conversation_trace.jsonl --length_scale=0.05
    python -m ca_jax.launch.replay --arrival_rate=1 --ssd_dir=/mnt/ssd --eviction_policy=lru --simulate

Answers are as long as they were, but for a cap, so that all ways do the same work. `--recompute` serves the same
workload again with the store off; `--simulate` has it served in simulated time, with the rates that were measured.
With `--ssd_dir` the store uses a directory of its own there, which is removed at the end.

Not here: replaying (`ca_jax.replay`), what is simulated at paper scale (simulate), JSON and tables (replay_report).
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rich.console
from absl import app, flags, logging

from ca_jax.config import EngineConfig
from ca_jax.engine import enable_compile_cache
from ca_jax.errors import CaJaxError
from ca_jax.launch import engine_flags, store_flags
from ca_jax.launch.machine import describe_machine, describe_versions, summarize_machine
from ca_jax.launch.out_flags import out_path
from ca_jax.launch.replay_plot import plot_replay
from ca_jax.launch.replay_progress import replay_progress
from ca_jax.launch.replay_report import make_report, print_report, write_json
from ca_jax.launch.scratch import scratch_directory
from ca_jax.pretrained import LoadedModel, Progress, load_model
from ca_jax.replay.running import ReplayConfig, Result, replay
from ca_jax.replay.trace_scripts import TraceConfig
from ca_jax.replay.workload import THINK_TIMES, WorkloadConfig
from ca_jax.traces.formats import TRACE_FORMATS

FLAGS = flags.FLAGS

_DEFAULT_CONFIG = EngineConfig(share_prefixes=False)  # Lengths are a trace's; what texts have in common is made up.
_TRACE, _WORKLOAD = TraceConfig(), WorkloadConfig()
_PIPE_COLUMNS = 180  # Where there is no terminal to ask.


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Only where this is the program: scripts share names of flags."""
    here: dict[str, Any] = {"flag_values": flag_values}
    flags.DEFINE_string(
        "model",
        "smollm2-135m-instruct",
        "Preset, .gguf file, Hugging Face directory, hub name (org/name) or checkpoint.",
        **here,
    )
    flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16"], "Of weights and KV; by default what is fast here.", **here
    )
    flags.DEFINE_integer(
        "context_window", None, "Most tokens of a conversation; by default the model's, up to 4,096.", **here
    )
    flags.DEFINE_enum("trace_format", _TRACE.trace_format, TRACE_FORMATS, "What kind of trace it is.", **here)
    flags.DEFINE_string(
        "trace", None, "The trace's file, of agents also a directory; by default the installed ShareGPT.", **here
    )
    flags.DEFINE_boolean(
        "skip_bad_rows", _TRACE.skip_bad_rows, "Leave out rows that cannot be used, and count them.", **here
    )
    flags.DEFINE_float(
        "length_scale", _TRACE.length_scale, "What lengths are multiplied by where the trace has no text.", **here
    )
    flags.DEFINE_integer("num_sessions", _WORKLOAD.num_sessions, "Conversations, the first ones of the trace.", **here)
    flags.DEFINE_integer("max_turns", _WORKLOAD.max_turns, "Most turns of each; later ones are left out.", **here)
    flags.DEFINE_integer(
        "max_answer_tokens", _WORKLOAD.max_answer_tokens, "Most tokens generated of an answer.", **here
    )
    flags.DEFINE_float(
        "arrival_rate",
        _WORKLOAD.arrival_rate,
        "Conversations that begin a second, Poisson; 0: as in the trace, or all at once where it does not say.",
        **here,
    )
    flags.DEFINE_float("think_time_s", _WORKLOAD.think_time_s, "Mean time between an answer and the next turn.", **here)
    flags.DEFINE_enum(
        "think_time_distribution", _WORKLOAD.think_time_distribution, THINK_TIMES, "How that is distributed.", **here
    )
    flags.DEFINE_integer("warmup_turns", _WORKLOAD.warmup_turns, "First turns that are served and not counted.", **here)
    flags.DEFINE_integer("seed", _WORKLOAD.seed, "Of arrivals, think times and made-up tokens.", **here)
    flags.DEFINE_boolean("recompute", False, "Serve the same again with the store off, and compare.", **here)
    flags.DEFINE_boolean(
        "simulate", False, "Have the same simulated with the rates that were measured, and compare.", **here
    )
    flags.DEFINE_string("json_out", None, "File to write everything to, each turn included.", **here)
    flags.DEFINE_string("plot_out", None, "File for a figure of TTFT, hits and tiers, PNG.", **here)
    engine_flags.define(_DEFAULT_CONFIG, flag_values=flag_values)
    store_flags.define(flag_values=flag_values)


def replay_config(flag_values: flags.FlagValues = flags.FLAGS) -> ReplayConfig:
    """The configuration that parsed flags stand for.

    Args:
      flag_values: where they were defined.

    Raises:
      ValueError: a value outside its range; the message names the flag.
    """

    def values(config: type) -> dict[str, Any]:
        return {field.name: flag_values[field.name].value for field in dataclasses.fields(config)}

    return ReplayConfig(
        trace=TraceConfig(**values(TraceConfig)),
        workload=WorkloadConfig(**values(WorkloadConfig)),
        engine=dataclasses.replace(
            engine_flags.engine_config(_DEFAULT_CONFIG, flag_values=flag_values),
            dtype=flag_values["dtype"].value,
            context_window=flag_values["context_window"].value,
            store=store_flags.store_config(flag_values=flag_values),
        ),
        recompute=bool(flag_values["recompute"].value),
        simulate=bool(flag_values["simulate"].value),
    )


def run(
    config: ReplayConfig,
    load: Callable[[Progress], LoadedModel],
    console: rich.console.Console,
    *,
    command: str,
    json_out: Path | None = None,
    plot_out: Path | None = None,
) -> Result:
    """Replays a trace, shows how it goes on, prints tables and writes what is to be written.

    Args:
      config: what is replayed, and how.
      load: gives the model.
      console: where to print.
      command: told in the JSON.
      json_out: file for everything; None for none.
      plot_out: file for the figure; None for none.

    Raises:
      CaJaxError: the model cannot be loaded, or what was to be replayed is not there or does not fit.
      OSError: there is no trace, or a file or directory cannot be used.
      ValueError: the trace is malformed, or a size does not fit the machine.
    """
    console.print(repr(config), style="dim", markup=False, highlight=False, soft_wrap=True)
    machine = describe_machine()
    with contextlib.ExitStack() as stack:
        served = dataclasses.replace(config, engine=_with_scratch(config.engine, stack))
        shown = stack.enter_context(replay_progress(console))
        model = load(shown.progress)
        result = replay(model, served, shown.progress, shown.on_sample)
    print_report(result, console)
    if json_out is not None:
        report = make_report(
            result,
            config,
            model=model.name,
            dtype=model.dtype,
            machine=machine,
            versions=describe_versions(),
            command=command,
        )
        write_json(report, json_out)
    if plot_out is not None:
        plot_out.parent.mkdir(parents=True, exist_ok=True)
        plot_replay(plot_out, result.runs, title=_title(result, model.name), caption=summarize_machine(machine))
    return result


def main(argv: Sequence[str]) -> None:
    """Runs from the command line."""
    if len(argv) > 1:
        raise app.UsageError(f"wanted flags only, found {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # jax reports each backend that it does not find.
    console = rich.console.Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    try:
        config = replay_config()
        json_out, plot_out = out_path("json_out"), out_path("plot_out")
        enable_compile_cache(config.engine.compile_cache_dir)
        run(
            config,
            lambda progress: load_model(FLAGS.model, dtype=config.engine.dtype, progress=progress),
            console,
            command=shlex.join(["python", "-m", "ca_jax.launch.replay", *sys.argv[1:]]),
            json_out=json_out,
            plot_out=plot_out,
        )
    except (CaJaxError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    written = [str(path) for path in (json_out, plot_out) if path is not None]
    if written:
        console.print(f"written to {', '.join(written)}", highlight=False, markup=False, soft_wrap=True)


def _with_scratch(config: EngineConfig, stack: contextlib.ExitStack) -> EngineConfig:
    """The engine with an SSD tier in a directory of its own, if it is to have one."""
    if config.store.ssd_dir is None:
        return config
    directory = stack.enter_context(scratch_directory(config.store.ssd_dir))
    return dataclasses.replace(config, store=dataclasses.replace(config.store, ssd_dir=str(directory)))


def _title(result: Result, model: str) -> str:
    workload = result.workload
    share = result.store_bytes / result.workload_bytes
    return f"{model}: {len(workload.sessions):,} conversations, a store of {share:.0%} of their KV"


if __name__ == "__main__":
    define_flags()
    app.run(main)
