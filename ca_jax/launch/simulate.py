"""Simulates a server of conversations: the paper's figures, its numbers beside ours, or a trace under several policies.

    python -m ca_jax.launch.simulate --figure=13 --figure=16
    python -m ca_jax.launch.simulate --figure=all --json_out=paper.json --plot_dir=figures
    python -m ca_jax.launch.simulate --trace_format=mooncake --trace=trace.jsonl --capacity_share=0.1 --policy=lru \\
      --policy=scheduler_aware --policy=belady

Scheduler, store and policies are the engine's own; computing, links and disks take the time that data sheets or
measurements say. Unless a trace is named, conversations are those of ShareGPT that `make setup` installs.

Not here: the simulated server (`ca_jax.simulate`), the engine itself on a trace (`replay`), figures (`plots`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console
from absl import flags

from ca_jax.launch.flags import out_path, refuse
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.launch.plots import plot_figure, plot_policies, require_matplotlib
from ca_jax.launch.script import command_line, make_console, make_table, note, run, write_json
from ca_jax.launch.simulate_flags import (
    define_flags,
    paper_config,
    read_trace,
    server_config,
    store_sizes,
    trace_source,
)
from ca_jax.launch.terminal import progress_bars
from ca_jax.simulate.paper import FIGURES, PaperRow, PaperRuns, figure_rows
from ca_jax.simulate.results import PolicyResult
from ca_jax.simulate.server import compare_policies, working_set_bytes
from ca_jax.simulate.workload import num_turns, stored_tokens

FLAGS = flags.FLAGS
_OF_TRACES = (
    *("model", "window", "num_devices", "cost", "policy", "dram_gb", "ssd_gb", "capacity_share", "ttl_s"),
    "block_tokens",
)
_OF_SHAREGPT = ("chars_per_token", "max_turns", "arrival_rate", "think_time_s", "wait_for_answers", "seed")
_OF_FIGURES = ("price_device", "price_dram_gb", "price_ssd_gb")


def simulate_figures(figures: Sequence[str], console: rich.console.Console, plot_dir: Path | None) -> dict[str, Any]:
    """Simulates figures of the paper, prints and draws them; what goes into the JSON."""
    config = paper_config()
    began_s = time.perf_counter()
    with progress_bars() as progress:
        runs = PaperRuns(config, trace_source().lengths(), progress)
        rows = [row for figure in figures for row in figure_rows(figure, runs)]
    elapsed_s = time.perf_counter() - began_s
    print_figures(rows, console)
    note(console, f"{runs.num_turns:,} turns simulated in {elapsed_s:.0f} s", None)
    if plot_dir is not None:
        for figure in figures:
            plot_figure(plot_dir / f"figure_{figure}.png", [row for row in rows if row.figure == figure])
    return {
        "config": dataclasses.asdict(config),
        "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
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
        raise ValueError("trace must have at least one session, got none")
    total = num_turns(sessions)
    config = server_config(total, max(map(stored_tokens, sessions)))
    working_set = working_set_bytes(config, sessions)
    store = store_sizes(working_set)
    with progress_bars() as progress:
        results = compare_policies(config, store, list(dict.fromkeys(FLAGS.policy)), sessions, progress)
    elapsed_s = time.perf_counter() - began_s
    capacity = store.dram_bytes + store.ssd_bytes
    note(
        console,
        f"{len(sessions):,} sessions, {total:,} turns; {working_set / 1e9:,.4g} GB of KV in all, "
        f"{capacity / 1e9:,.4g} GB of room ({100 * capacity / working_set:.3g} %)",
        None,
    )
    if trace.seen_blocks_share is not None:
        note(console, f"leading blocks that were seen before: {trace.seen_blocks_share:.3f}", None)
    if trace.skipped_rows:
        note(console, f"{trace.skipped_rows:,} rows skipped, the first: {trace.first_skipped}", None)
    print_policies(results, console)
    note(console, f"{total * len(results):,} turns simulated in {elapsed_s:.0f} s", None)
    if plot_dir is not None:
        plot_policies(plot_dir / "policies.png", results)
    return {
        "num_sessions": len(sessions),
        "num_turns": total,
        "working_set_bytes": working_set,
        "seen_blocks_share": trace.seen_blocks_share,
        "skipped_rows": trace.skipped_rows,
        "store": dataclasses.asdict(store),
        "rows": [result.row() for result in results],
        "elapsed_s": elapsed_s,
    }


def print_figures(rows: Sequence[PaperRow], console: rich.console.Console) -> None:
    """Prints figures of the paper, its numbers beside ours."""
    cells: list[tuple[str, ...]] = []
    for row in rows:
        if cells and row.figure != cells[-1][0]:
            cells.append(())
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        numbers = (shown(row.ours, row.unit), shown(row.paper, row.unit), ratio)
        cells.append((row.figure, row.case, row.metric, *numbers))
    console.print(make_table((">figure", "case", "what", ">ours", ">paper", ">ratio"), cells))


def print_policies(results: Sequence[PolicyResult], console: rich.console.Console) -> None:
    """Prints what became of a trace under each policy."""
    headings = ">hits\n%", ">in DRAM\n%", ">tokens\n%", ">prefill\ns", ">saved\n%", ">GPU\ns"
    percentiles = ">TTFT\nmean", ">\np50", ">\np90", ">\np99"
    rows = []
    for result in results:
        found = result.counts
        shares = (f"{100 * share:.1f}" for share in (found.hit_rate, found.dram_share, found.cached_share))
        times = map(_number, (found.gpu_s, found.ttft_mean_s, *found.ttft_percentiles_s.values()))
        rows.append((result.policy, *shares, _number(found.prefill_s), f"{100 * result.prefill_saved:.1f}", *times))
    console.print(make_table(("policy", *headings, *percentiles), rows))
    note(
        console,
        "hits: turns of whose history anything was found; tokens: of histories; saved: of recomputing's prefill",
        None,
    )


def shown(value: float | None, unit: str) -> str:
    """A number with its unit; nothing for none."""
    if value is None:
        return ""
    return f"{100 * value:.1f} {unit}" if unit in ("%", "points") else f"{_number(value)} {unit}"


def _number(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    console = make_console()
    refuse(*((_OF_TRACES, "figures") if FLAGS.figure else (_OF_FIGURES, "a trace")))
    if FLAGS.trace_format != "sharegpt":
        refuse(_OF_SHAREGPT, f"a trace of {FLAGS.trace_format}")
    json_out = out_path("json_out")
    plot_dir = None if FLAGS.plot_dir is None else Path(FLAGS.plot_dir).expanduser()
    if plot_dir is not None:
        require_matplotlib()
        plot_dir.mkdir(parents=True, exist_ok=True)
    if FLAGS.figure:
        figures = FIGURES if "all" in FLAGS.figure else tuple(dict.fromkeys(FLAGS.figure))
        report = simulate_figures(figures, console, plot_dir)
    else:
        report = simulate_trace(console, plot_dir)
    if json_out is not None:
        told = {"machine": describe_machine(), "versions": describe_versions()}
        write_json({"command": command_line("simulate"), **report, **told}, json_out)


if __name__ == "__main__":
    define_flags()
    run(main)
