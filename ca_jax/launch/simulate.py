"""Simulates a server of conversations: a trace under several policies, or in a checkout the paper's figures.

    python -m ca_jax.launch.simulate --trace_format=mooncake --trace=trace.jsonl --capacity_share=0.1 --policy=lru \\
      --policy=scheduler_aware --policy=belady
    python -m ca_jax.launch.simulate --figure=13 --figure=16
    python -m ca_jax.launch.simulate --figure=all --json_out=paper.json --plot_dir=figures

Scheduler, store and policies are the engine's own; computing, links and disks take the time that data sheets or
measurements say. Unless a trace is named, conversations are those of ShareGPT that `make setup` installs.

Not here: the simulated server (`ca_jax.simulate`), the paper's figures (`benchmarks.paper_figures`), the engine itself
on a trace (`replay`).
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
from ca_jax.launch.plots import plot_policies, require_matplotlib
from ca_jax.launch.script import (
    command_line,
    format_number,
    load_benchmark,
    make_console,
    make_table,
    must_load_benchmark,
    note,
    run,
    write_json,
)
from ca_jax.launch.simulate_flags import CONFIG, SimulateConfig, define_flags, read_trace
from ca_jax.launch.terminal import progress_bars
from ca_jax.simulate.results import PolicyResult
from ca_jax.simulate.server import compare_policies, working_set_bytes
from ca_jax.simulate.workload import num_turns, stored_tokens

FLAGS = flags.FLAGS
_FIGURES = "paper_figures"  # Of `benchmarks`.
_OF_TRACES = (
    *("model", "window", "num_devices", "cost", "policy", "dram_gb", "ssd_gb", "capacity_share", "ttl_s"),
    "block_tokens",
)
_OF_SHAREGPT = ("chars_per_token", "max_turns", "arrival_rate", "think_time_s", "wait_for_answers", "seed")
_OF_FIGURES = ("price_device", "price_dram_gb", "price_ssd_gb")


def simulate_trace(config: SimulateConfig, console: rich.console.Console, plot_dir: Path | None) -> dict[str, Any]:
    """Simulates a trace under several policies, prints and draws what came of it; what goes into the JSON."""
    began_s = time.perf_counter()
    trace = read_trace(config)
    sessions = trace.sessions
    if not sessions:
        raise ValueError("trace must have at least one session, got none")
    total = num_turns(sessions)
    server = config.trace_server(total, max(map(stored_tokens, sessions)), FLAGS.cost)
    working_set = working_set_bytes(server, sessions)
    store = config.store(working_set)
    with progress_bars() as progress:
        results = compare_policies(server, store, list(dict.fromkeys(FLAGS.policy)), sessions, progress)
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


def print_policies(results: Sequence[PolicyResult], console: rich.console.Console) -> None:
    """Prints what became of a trace under each policy."""
    headings = ">hits\n%", ">in DRAM\n%", ">tokens\n%", ">prefill\ns", ">saved\n%", ">GPU\ns"
    percentiles = ">TTFT\nmean", ">\np50", ">\np90", ">\np99"
    rows = []
    for result in results:
        found = result.counts
        shares = (f"{100 * share:.1f}" for share in (found.hit_rate, found.dram_share, found.cached_share))
        times = map(format_number, (found.gpu_s, found.ttft_mean_s, *found.ttft_percentiles_s.values()))
        rows.append(
            (result.policy, *shares, format_number(found.prefill_s), f"{100 * result.prefill_saved:.1f}", *times)
        )
    console.print(make_table(("policy", *headings, *percentiles), rows))
    note(
        console,
        "hits: turns of whose history anything was found; tokens: of histories; saved: of recomputing's prefill",
        None,
    )


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    console = make_console()
    refuse(*((_OF_TRACES, "figures") if FLAGS.figure else (_OF_FIGURES, "a trace")))
    if FLAGS.trace_format != "sharegpt":
        refuse(_OF_SHAREGPT, f"a trace of {FLAGS.trace_format}")
    config, json_out = CONFIG.read(), out_path("json_out")
    plot_dir = None if FLAGS.plot_dir is None else Path(FLAGS.plot_dir).expanduser()
    if plot_dir is not None:
        require_matplotlib()
        plot_dir.mkdir(parents=True, exist_ok=True)
    simulate = must_load_benchmark(_FIGURES).simulate_figures if FLAGS.figure else simulate_trace
    report = simulate(config, console, plot_dir)
    if json_out is not None:
        told = {"machine": describe_machine(), "versions": describe_versions()}
        write_json({"command": command_line("simulate"), **report, **told}, json_out)


if __name__ == "__main__":
    define_flags()
    if (figures := load_benchmark(_FIGURES)) is not None:
        figures.define_flags()
    run(main)
