"""Plots of simulations: the paper's numbers beside ours, policies beside each other.

Not here: simulating, tables (simulate_tables).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ca_jax.simulate.comparison import PolicyResult
from ca_jax.simulate.paper import PaperRow

_BLUE, _VERMILION = "#0072B2", "#D55E00"
_HUNDREDTHS = ("%", "points")


def plot_figure(path: Path, rows: Sequence[PaperRow]) -> None:
    """Draws a figure: for each thing that was counted bars of ours and, where it is known, of the paper's.

    Args:
      path: the PNG to write; its directory must be there.
      rows: of one figure.

    Raises:
      ValueError: no rows, or of several figures.
    """
    if len({row.figure for row in rows}) != 1:
        raise ValueError(f"wanted rows of one figure, found those of {sorted({row.figure for row in rows})}")
    metrics = list(dict.fromkeys((row.metric, row.unit) for row in rows))
    of_metric = [[row for row in rows if (row.metric, row.unit) == metric] for metric in metrics]
    sizes = [len(each) + 1.5 for each in of_metric]
    figure = Figure(figsize=(9, 0.7 + 0.34 * sum(sizes)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = np.ravel(figure.subplots(len(metrics), 1, height_ratios=sizes))
    for (metric, unit), shown, axes in zip(metrics, of_metric, panels, strict=True):
        scale, places = 100 if unit in _HUNDREDTHS else 1, np.arange(len(shown))
        axes.barh(places - 0.2, [scale * row.ours for row in shown], 0.38, color=_BLUE)
        known = [(place, scale * row.paper) for place, row in zip(places, shown, strict=True) if row.paper is not None]
        if known:
            at, papers = zip(*known, strict=True)
            axes.barh(np.array(at) + 0.2, papers, 0.38, color="white", edgecolor=_VERMILION, hatch="////")
        axes.set_yticks(places, [row.case for row in shown], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(f"{metric} ({unit})", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    marks = [Patch(color=_BLUE), Patch(facecolor="white", edgecolor=_VERMILION, hatch="////")]
    figure.legend(marks, ["simulated", "paper"], loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(f"Figure {rows[0].figure} of the paper, simulated", x=0.01, ha="left", fontsize=11)
    figure.savefig(path)


def plot_policies(path: Path, results: Sequence[PolicyResult]) -> None:
    """Draws what policies found of a trace: hits, tokens, and prefill seconds saved.

    Args:
      path: the PNG to write; its directory must be there.
      results: recomputing first; at least one more.
    """
    panels = {
        "hits (% of returning turns)": [100 * result.hit_rate for result in results],
        "tokens found (% of histories)": [100 * result.cached_share for result in results],
        "prefill saved (% of seconds)": [100 * result.prefill_saved for result in results],
    }
    figure = Figure(figsize=(9, 3.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, heights) in zip(np.ravel(figure.subplots(1, len(panels))), panels.items(), strict=True):
        axes.bar(range(1, len(results)), heights[1:], color=_BLUE, width=0.6)
        axes.set_xticks(range(1, len(results)), [result.policy for result in results[1:]], rotation=20, ha="right")
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylim(0, 100)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.savefig(path)
