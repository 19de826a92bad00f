"""Figures of what replay and simulate measure, as PNG files; what all figures have in common.

Draws without a display and without pyplot's global state. Only what draws imports matplotlib, which need not be there.

Not here: measuring, tables (`launch.script`), figures of benchmarks and evaluations (`benchmarks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ca_jax.errors import CaJaxError
from ca_jax.simulate.paper import PaperRow
from ca_jax.simulate.replay.running import RECOMPUTE, STORE, Run
from ca_jax.simulate.results import PolicyResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with any colour vision; markers and hatches say the same without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, VERMILION, GREEN = COLOURS[:3]
GREY = "#555555"
MARKERS = "osD^vPX"
_PAPERS: dict[str, Any] = {"color": "white", "edgecolor": VERMILION, "hatch": "////"}  # Bars of the paper.


class PlotError(CaJaxError):
    """A figure is asked for, and matplotlib is not installed."""


def require_matplotlib() -> None:
    """Checks that figures can be drawn; scripts that are asked for one call it before they measure.

    Raises:
      PlotError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise PlotError("matplotlib must be installed to draw figures: pip install 'ca-jax[plot]'") from error


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure of that size, inches.

    Raises:
      PlotError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Figure, path: Path, *, caption: str = "", grid: str = "y") -> None:
    """Gives all axes the same frame and writes the PNG; makes the directory it goes to.

    Args:
      figure: drawn.
      path: of the PNG.
      caption: what it was measured on, small print below.
      grid: across which axis lines run: x, y or both.
    """
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis=grid, color="#dddddd", linewidth=0.6)  # type: ignore[arg-type]
        axes.set_axisbelow(True)
    if caption:
        figure.supxlabel(caption, fontsize=8, color=GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def style(nth: int) -> dict[str, Any]:
    """Colour and marker of the nth line of a figure."""
    return {"color": COLOURS[nth % len(COLOURS)], "marker": MARKERS[nth % len(MARKERS)]}


def plot_replay(path: Path, runs: Sequence[Run], *, title: str, caption: str) -> None:
    """Draws the share of turns by TTFT, and below hit rate and occupancy of the tiers over time.

    Args:
      path: the PNG to write.
      runs: with the store first.
      title: of the figure.
      caption: what it was measured on, small print below.
    """
    figure = new_figure(8, 7)
    cdf, over_time = figure.subplots(2, 1, height_ratios=(3, 2))
    styles = {STORE: (BLUE, "-"), RECOMPUTE: (VERMILION, "--")}
    for run in runs:
        ttft_s = np.sort([turn.ttft_s for turn in run.served.turns if turn.is_counted])
        color, line = styles[run.name]
        shares = 100 * np.arange(1, len(ttft_s) + 1) / len(ttft_s)
        label = f"{run.name}: mean {run.summary.ttft_s.mean:.2f} s"
        cdf.step(ttft_s, shares, line, where="post", color=color, label=label)
    cdf.set_xscale("log")
    cdf.set_xlabel("time to first token, from when a turn came (s)")
    cdf.set_ylabel("turns (%)")
    cdf.set_title(title, loc="left", fontsize=11)
    samples = runs[0].served.samples
    times_s = [sample.time_s for sample in samples]
    hit_rates = [100 * sample.hits / sample.returning if sample.returning else np.nan for sample in samples]
    over_time.plot(times_s, hit_rates, "-", color=BLUE, label="hit rate so far")
    over_time.plot(times_s, [100 * sample.dram_share for sample in samples], "--", color=GREEN, label="DRAM in use")
    if any(sample.ssd_share for sample in samples):
        over_time.plot(times_s, [100 * sample.ssd_share for sample in samples], ":", color=GREY, label="SSD in use")
    over_time.set_ylim(0, 105)
    over_time.set_xlabel("time (s), with the store")
    over_time.set_ylabel("%")
    for axes in (cdf, over_time):
        axes.legend(frameon=False, fontsize=9, loc="lower right")
    write_figure(figure, path, caption=caption, grid="both")


def plot_figure(path: Path, rows: Sequence[PaperRow]) -> None:
    """Draws a figure of the paper: bars of ours and, where it is known, of the paper's for each thing counted.

    Args:
      path: the PNG to write.
      rows: of one figure.

    Raises:
      ValueError: no rows, or of several figures.
    """
    if len({row.figure for row in rows}) != 1:
        raise ValueError(f"rows must be of one figure, got those of {sorted({row.figure for row in rows})}")
    metrics = list(dict.fromkeys((row.metric, row.unit) for row in rows))
    of_metric = [[row for row in rows if (row.metric, row.unit) == metric] for metric in metrics]
    sizes = [len(each) + 1.5 for each in of_metric]
    figure = new_figure(9, 0.7 + 0.34 * sum(sizes))
    panels: Sequence[Axes] = np.ravel(figure.subplots(len(metrics), 1, height_ratios=sizes))  # type: ignore[assignment]
    for (metric, unit), shown, axes in zip(metrics, of_metric, panels, strict=True):
        scale, places = 100 if unit in ("%", "points") else 1, np.arange(len(shown))
        axes.barh(places - 0.2, [scale * row.ours for row in shown], 0.38, color=BLUE)
        papers = [np.nan if row.paper is None else scale * row.paper for row in shown]
        axes.barh(places + 0.2, papers, 0.38, **_PAPERS)
        axes.set_yticks(places, [row.case for row in shown], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(f"{metric} ({unit})", fontsize=9)
    from matplotlib.patches import Patch

    marks = [Patch(color=BLUE), Patch(**_PAPERS)]
    figure.legend(marks, ["simulated", "paper"], loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(f"Figure {rows[0].figure} of the paper, simulated", x=0.01, ha="left", fontsize=11)
    write_figure(figure, path, grid="x")


def plot_policies(path: Path, results: Sequence[PolicyResult]) -> None:
    """Draws what policies found of a trace: hits, tokens, and prefill seconds saved.

    Args:
      path: the PNG to write.
      results: recomputing first; at least one more.
    """
    panels = {
        "hits (% of returning turns)": "hit_rate",
        "tokens found (% of histories)": "cached_share",
        "prefill saved (% of seconds)": "prefill_saved",
    }
    figure = new_figure(9, 3.2)
    for axes, (title, field) in zip(np.ravel(figure.subplots(1, len(panels))), panels.items(), strict=True):
        axes.bar(range(1, len(results)), [100 * each.row()[field] for each in results[1:]], color=BLUE, width=0.6)
        axes.set_xticks(range(1, len(results)), [result.policy for result in results[1:]], rotation=20, ha="right")
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylim(0, 100)
    write_figure(figure, path)
