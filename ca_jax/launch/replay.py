"""Replays a trace through the engine: real conversations, come and gone as they are told to, and what they took.

    python -m ca_jax.launch.replay --num_sessions=100 --max_turns=10 --dram_gib=1 --recompute --json_out=replay.json
    python -m ca_jax.launch.replay --trace_format=mooncake --trace=conversation_trace.jsonl --length_scale=0.05
    python -m ca_jax.launch.replay --arrival_rate=1 --ssd_dir=/mnt/ssd --eviction_policy=lru --simulate

Answers are as long as they were, but for a cap, so that all ways do the same work. `--recompute` serves the same
workload again with the store off; `--simulate` has it served in simulated time, with the rates that were measured.
With `--ssd_dir` the store uses a directory of its own there, which is removed at the end.

Not here: replaying (`ca_jax.simulate.replay`), what is simulated at paper scale (`simulate`), what is shown and written
(`replay_report`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import rich.console
from absl import flags

from ca_jax.config import EngineConfig
from ca_jax.engine import enable_compile_cache
from ca_jax.launch.flags import ConfigFlags, define_model, out_path
from ca_jax.launch.machine import describe_machine, describe_versions, summarize_machine
from ca_jax.launch.plots import plot_replay
from ca_jax.launch.replay_report import make_report, print_report, replay_progress, write_report
from ca_jax.launch.script import command_line, make_console, note
from ca_jax.launch.script import run as run_script
from ca_jax.pretrained import LoadedModel, Progress, load_model
from ca_jax.simulate.replay.running import ReplayConfig, Result, replay
from ca_jax.simulate.replay.workload import TraceConfig, WorkloadConfig

FLAGS = flags.FLAGS

_CONFIG = ConfigFlags(
    ReplayConfig(
        trace=TraceConfig(),
        workload=WorkloadConfig(),
        engine=EngineConfig(share_prefixes=False),  # Lengths are a trace's; what texts have in common is made up.
    )
)


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Only where this is the program: scripts share names of flags."""
    define_model(flag_values)
    _CONFIG.define(flag_values)
    flags.DEFINE_string("json_out", None, "File to write everything to, each turn included.", flag_values=flag_values)
    flags.DEFINE_string("plot_out", None, "File for a figure of TTFT, hits and tiers, PNG.", flag_values=flag_values)


def replay_config(flag_values: flags.FlagValues = flags.FLAGS) -> ReplayConfig:
    """The configuration that parsed flags stand for.

    Raises:
      ValueError: a value outside its range; the message names the flag.
    """
    return _CONFIG.read(flag_values)


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
    note(console, repr(config))
    machine = describe_machine()
    with contextlib.ExitStack() as stack:
        served = dataclasses.replace(config, engine=_with_scratch(config.engine, stack))
        progress, on_sample = stack.enter_context(replay_progress(console))
        model = load(progress)
        result = replay(model, served, progress, on_sample)
    print_report(result, console)
    if json_out is not None:
        told = {"model": model.name, "dtype": model.dtype, "machine": machine, "versions": describe_versions()}
        write_report(make_report(result, config, **told, command=command), json_out)
    if plot_out is not None:
        share = f"a store of {result.store_bytes / result.workload_bytes:.0%} of their KV"
        title = f"{model.name}: {len(result.workload.sessions):,} conversations, {share}"
        plot_replay(plot_out, result.runs, title=title, caption=summarize_machine(machine))
    return result


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    console = make_console()
    config = replay_config()
    json_out, plot_out = out_path("json_out"), out_path("plot_out")
    enable_compile_cache(config.engine.compile_cache_dir)
    run(
        config,
        lambda progress: load_model(FLAGS.model, dtype=config.engine.dtype, progress=progress),
        console,
        command=command_line("replay"),
        json_out=json_out,
        plot_out=plot_out,
    )
    written = [str(path) for path in (json_out, plot_out) if path is not None]
    if written:
        note(console, f"written to {', '.join(written)}", None)


def _with_scratch(config: EngineConfig, stack: contextlib.ExitStack) -> EngineConfig:
    """The engine with an SSD tier in a directory of its own, if it is to have one."""
    if config.store.ssd_dir is None:
        return config
    Path(config.store.ssd_dir).mkdir(parents=True, exist_ok=True)
    made = stack.enter_context(tempfile.TemporaryDirectory(prefix="ca_jax-replay-", dir=config.store.ssd_dir))
    return dataclasses.replace(config, store=dataclasses.replace(config.store, ssd_dir=made))


if __name__ == "__main__":
    define_flags()
    run_script(main)
