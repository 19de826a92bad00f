"""A figure of a replay: how TTFT is distributed, and how hits and tiers go on over time.

Not here: replaying (`ca_jax.replay`), tables (replay_report).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ca_jax.replay.running import RECOMPUTE, STORE, Run

_STYLES = {STORE: ("#0072B2", "-"), RECOMPUTE: ("#D55E00", "--")}
_GREEN, _GREY = "#009E73", "#555555"


def plot_replay(path: Path, runs: Sequence[Run], *, title: str, caption: str) -> None:
    """Draws the share of turns by TTFT, and below hit rate and occupancy of the tiers over time.

    Args:
      path: the PNG to write; its directory must be there.
      runs: with the store first.
      title: of the figure.
      caption: what it was measured on, small print below.
    """
    figure = Figure(figsize=(8, 7), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    cdf, over_time = figure.subplots(2, 1, height_ratios=(3, 2))
    for run in runs:
        ttft_s = np.sort([turn.ttft_s for turn in run.served.turns if turn.is_counted])
        color, line = _STYLES[run.name]
        cdf.step(ttft_s, 100 * np.arange(1, len(ttft_s) + 1) / len(ttft_s), line, where="post", color=color)
        cdf.lines[-1].set_label(f"{run.name}: mean {run.summary.ttft_s.mean:.2f} s")
    cdf.set_xscale("log")
    cdf.set_xlabel("time to first token, from when a turn came (s)")
    cdf.set_ylabel("turns (%)")
    cdf.set_title(title, loc="left", fontsize=11)
    samples = runs[0].served.samples
    times_s = [sample.time_s for sample in samples]
    hit_rates = [100 * sample.hits / sample.returning if sample.returning else np.nan for sample in samples]
    over_time.plot(times_s, hit_rates, "-", color=_STYLES[STORE][0], label="hit rate so far")
    over_time.plot(times_s, [100 * sample.dram_share for sample in samples], "--", color=_GREEN, label="DRAM in use")
    if any(sample.ssd_share for sample in samples):
        over_time.plot(times_s, [100 * sample.ssd_share for sample in samples], ":", color=_GREY, label="SSD in use")
    over_time.set_ylim(0, 105)
    over_time.set_xlabel("time (s), with the store")
    over_time.set_ylabel("%")
    for axes in (cdf, over_time):
        axes.legend(frameon=False, fontsize=9, loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.supxlabel(caption, fontsize=8, color=_GREY)
    figure.savefig(path)
