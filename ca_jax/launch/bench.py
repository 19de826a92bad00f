"""Measures the engine on this machine, and a peer beside it: reuse against recompute, prefill, decode. And its store.

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

`tiers` is a turn's TTFT by where its history is: DRAM, SSD, SSD after a restart, nowhere. `ttft` is the same against
its compute and its load alone, `throughput` a continuous batch of conversations. `preload` and `save` are what of loads
and saves is hidden. `overflow` is what truncation costs, and what it saves over recomputing what is left. `blend` is
the TTFT of a question behind stored chunks, by how much of them is computed anew and where they are, `blend_throughput`
a stream of such questions whose chunks come again. `store` (how fast its tiers move bytes) and `policy` (what its
bookkeeping costs and is worth) need no model.

Let nothing else run meanwhile. `transformers` waits for all its threads at every operation: where one of them shares
its core it becomes many times slower, and a comparison with it worthless. Medians, their spread, the machine and the
versions are printed and written as JSON.

Not here: flags and configs (`bench_flags`), measuring (`bench_run` and what it runs), JSON (`bench_report`), tables
(`bench_tables`).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import rich.console
from absl import app, flags, logging

from ca_jax.errors import CaJaxError
from ca_jax.launch import bench_flags, bench_report, bench_run, bench_tables
from ca_jax.launch.bench_blend_plot import plot_blend, plot_stream
from ca_jax.launch.bench_blend_schema import BlendBenchConfig, BlendThroughputBenchConfig
from ca_jax.launch.bench_overflow_plot import plot_overflow
from ca_jax.launch.bench_overflow_schema import OverflowBenchConfig
from ca_jax.launch.bench_recording import Recorder
from ca_jax.launch.bench_schema import PEER_SUITES, BenchConfig
from ca_jax.launch.bench_storage_schema import PolicyBenchConfig, StoreBenchConfig
from ca_jax.launch.out_flags import out_path

FLAGS = flags.FLAGS

_PIPE_COLUMNS = 180  # where there is no terminal to ask


def _check_flags() -> None:
    """Raises ValueError for flags that do not go together."""
    if FLAGS.peer is not None and FLAGS.suite not in PEER_SUITES:
        raise ValueError(f"a peer wanted one of the suites {', '.join(PEER_SUITES)}, found {FLAGS.suite}")
    if FLAGS.model_preset is not None and FLAGS["model"].present:
        raise ValueError(f"wanted model or model_preset, found {FLAGS.model} and {FLAGS.model_preset}")
    for name, suites in {
        "trace_out": bench_flags.RECORDED_SUITES,
        "profile_dir": bench_flags.RECORDED_SUITES,
        "plot_out": bench_flags.PLOTTED_SUITES,
    }.items():
        if FLAGS[name].value is not None and FLAGS.suite not in suites:
            raise ValueError(f"{name} wanted one of the suites {', '.join(suites)}, found {FLAGS.suite}")


def main(argv: Sequence[str]) -> None:
    """Runs from the command line."""
    if len(argv) > 1:
        raise app.UsageError(f"wanted flags only, found {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # jax reports each backend that it does not find.
    console = rich.console.Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    try:
        _check_flags()
        config = bench_flags.config(bench_flags.CONFIGS[FLAGS.suite])
        if isinstance(config, BenchConfig):
            config.engine_config()
        json_out, trace_out, plot_out = (out_path(name) for name in ("json_out", "trace_out", "plot_out"))
        if isinstance(config, OverflowBenchConfig) and plot_out is not None and not config.num_sessions:
            raise ValueError("plot_out wanted num_sessions of at least 1 to draw, found 0")
    except ValueError as error:
        sys.exit(f"error: {error}")
    profile_dir = None if FLAGS.profile_dir is None else Path(FLAGS.profile_dir).expanduser()
    turn_plot_out = plot_out if FLAGS.suite in bench_flags.RECORDED_SUITES else None
    recorder = Recorder(trace_out=trace_out, plot_out=turn_plot_out, profile_dir=profile_dir)
    load = bench_run.model_loader(FLAGS.model, FLAGS.model_preset, dtype=FLAGS.dtype, seed=FLAGS.seed)
    command = shlex.join(["python", "-m", "ca_jax.launch.bench", *sys.argv[1:]])
    try:
        if isinstance(config, StoreBenchConfig | PolicyBenchConfig):
            report = bench_run.run_storage(config, command)
        else:
            report = bench_run.run(
                config, load, peer_name=FLAGS.peer, recorder=recorder, command=command, console=console
            )
    except CaJaxError as error:
        sys.exit(f"error: {error}")
    if json_out is not None:
        bench_report.write_json(report, json_out)
    bench_tables.print_report(report, console)
    if not isinstance(config, StoreBenchConfig | PolicyBenchConfig):
        place = report["machine"]
        caption = f"{report['dtype']}, {place['cpu']}, {place['device']}"
        recorder.write(title=report["model"], caption=caption)
        if isinstance(config, OverflowBenchConfig) and plot_out is not None:
            plot_overflow(plot_out, report["rows"], title=report["model"], caption=caption)
        if isinstance(config, BlendBenchConfig) and plot_out is not None:
            plot_blend(plot_out, report["rows"], title=report["model"], caption=caption)
        if isinstance(config, BlendThroughputBenchConfig) and plot_out is not None:
            plot_stream(plot_out, report["rows"], title=report["model"], caption=caption)
    written = [path for path in (json_out, trace_out, plot_out, profile_dir) if path is not None]
    console.print(f"written to {', '.join(map(str, written))}", highlight=False)


if __name__ == "__main__":
    bench_flags.define()
    app.run(main)
