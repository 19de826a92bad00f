"""Simulates a server of conversations: the paper's figures, its numbers beside ours, or a trace under several policies.

    python -m ca_jax.launch.simulate --figure=13 --figure=16
    python -m ca_jax.launch.simulate --figure=all --json_out=paper.json --plot_dir=figures
    python -m ca_jax.launch.simulate --trace_format=mooncake --trace=trace.jsonl --capacity_share=0.1 --policy=lru \\
      --policy=scheduler_aware --policy=belady

Scheduler, store and policies are the engine's own; computing, links and disks take the time that data sheets or
measurements say. Unless a trace is named, conversations are those of ShareGPT that `make setup` installs.

Not here: the simulated server (`ca_jax.simulate`), the engine itself on a trace (`replay`).
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console
from absl import app, flags, logging

from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.launch.out_flags import out_path
from ca_jax.launch.progress import progress_bars
from ca_jax.launch.refused_flags import refuse_flags
from ca_jax.launch.simulate_flags import define_flags, paper_config, server_config, store_sizes, trace_source
from ca_jax.launch.simulate_plot import plot_figure, plot_policies
from ca_jax.launch.simulate_tables import print_figures, print_policies
from ca_jax.launch.simulate_trace import read_trace, sharegpt_lengths
from ca_jax.simulate.comparison import compare_policies, working_set_bytes
from ca_jax.simulate.paper import FIGURES, PaperRow, PaperRuns, figure_rows
from ca_jax.simulate.workload import num_turns, stored_tokens

FLAGS = flags.FLAGS
_OF_TRACES = (
    *("model", "window", "num_devices", "cost", "policy", "dram_gb", "ssd_gb", "capacity_share", "ttl_s"),
    "block_tokens",
)
_OF_SHAREGPT = ("chars_per_token", "max_turns", "arrival_rate", "think_time_s", "wait_for_answers", "seed")
_OF_FIGURES = ("price_device", "price_dram_gb", "price_ssd_gb")
_FILE_WIDTH = 120  # Of tables that are no terminal's.


def simulate_figures(figures: Sequence[str], console: rich.console.Console, plot_dir: Path | None) -> dict[str, Any]:
    """Simulates figures of the paper, prints and draws them; what goes into the JSON."""
    config = paper_config()
    began_s = time.perf_counter()
    with progress_bars() as progress:
        runs = PaperRuns(config, sharegpt_lengths(trace_source()), progress)
        rows = [row for figure in figures for row in figure_rows(figure, runs)]
    elapsed_s = time.perf_counter() - began_s
    print_figures(rows, console)
    console.print(f"{runs.num_turns:,} turns simulated in {elapsed_s:.0f} s", highlight=False)
    if plot_dir is not None:
        for figure in figures:
            plot_figure(plot_dir / f"figure_{figure}.png", [row for row in rows if row.figure == figure])
    return {
        "config": dataclasses.asdict(config),
        "rows": [_shown(row) for row in rows],
        "num_turns": runs.num_turns,
        "elapsed_s": elapsed_s,
    }


def simulate_trace(console: rich.console.Console, plot_dir: Path | None) -> dict[str, Any]:
    """Simulates a trace under several policies, prints and draws what came of it; what goes into the JSON."""
    began_s = time.perf_counter()
    trace = read_trace(
        trace_source(),
        num_sessions=FLAGS.num_sessions,
        arrival_rate=FLAGS.arrival_rate,
        think_s=FLAGS.think_time_s,
        waits_for_answers=FLAGS.wait_for_answers,
        seed=FLAGS.seed,
    )
    sessions = trace.sessions
    if not sessions:
        raise ValueError("trace wanted at least one session, found none")
    total = num_turns(sessions)
    config = server_config(total, max(map(stored_tokens, sessions)))
    working_set = working_set_bytes(config, sessions)
    store = store_sizes(working_set)
    with progress_bars() as progress:
        results = compare_policies(config, store, list(dict.fromkeys(FLAGS.policy)), sessions, progress)
    elapsed_s = time.perf_counter() - began_s
    capacity = store.dram_bytes + store.ssd_bytes
    console.print(
        f"{len(sessions):,} sessions, {total:,} turns; {working_set / 1e9:,.4g} GB of KV in all, "
        f"{capacity / 1e9:,.4g} GB of room ({100 * capacity / working_set:.3g} %)",
        highlight=False,
    )
    if trace.seen_blocks_share is not None:
        console.print(f"leading blocks that were seen before: {trace.seen_blocks_share:.3f}", highlight=False)
    if trace.skipped_rows:
        console.print(f"{trace.skipped_rows:,} rows skipped, the first: {trace.first_skipped}", highlight=False)
    print_policies(results, console)
    console.print(f"{total * len(results):,} turns simulated in {elapsed_s:.0f} s", highlight=False)
    if plot_dir is not None:
        plot_policies(plot_dir / "policies.png", results)
    return {
        "num_sessions": len(sessions),
        "num_turns": total,
        "working_set_bytes": working_set,
        "seen_blocks_share": trace.seen_blocks_share,
        "skipped_rows": trace.skipped_rows,
        "store": dataclasses.asdict(store),
        "rows": [dataclasses.asdict(result) for result in results],
        "elapsed_s": elapsed_s,
    }


def main(argv: Sequence[str]) -> None:
    """Runs from the command line."""
    if len(argv) > 1:
        raise app.UsageError(f"wanted flags only, found {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # jax reports each backend that it does not find.
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=_FILE_WIDTH)
    try:
        if FLAGS.figure:
            refuse_flags(_OF_TRACES, "figures")
        else:
            refuse_flags(_OF_FIGURES, "a trace")
        if FLAGS.trace_format != "sharegpt":
            refuse_flags(_OF_SHAREGPT, f"a trace of {FLAGS.trace_format}")
        json_out = out_path("json_out")
        plot_dir = None if FLAGS.plot_dir is None else Path(FLAGS.plot_dir).expanduser()
        if plot_dir is not None:
            plot_dir.mkdir(parents=True, exist_ok=True)
        if FLAGS.figure:
            figures = FIGURES if "all" in FLAGS.figure else tuple(dict.fromkeys(FLAGS.figure))
            report = simulate_figures(figures, console, plot_dir)
        else:
            report = simulate_trace(console, plot_dir)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    if json_out is not None:
        command = shlex.join(["python", "-m", "ca_jax.launch.simulate", *sys.argv[1:]])
        report = {"command": command, **report, "machine": describe_machine(), "versions": describe_versions()}
        json_out.parent.mkdir(parents=True, exist_ok=True)
        json_out.write_text(json.dumps(report, indent=1) + "\n")


def _shown(row: PaperRow) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "ratio": row.ratio}


if __name__ == "__main__":
    define_flags()
    app.run(main)
