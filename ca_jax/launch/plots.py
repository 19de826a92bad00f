"""What all figures have in common, and the figure of policies on a trace; PNG files.

Draws without a display and without pyplot's global state. Only what draws imports matplotlib, which need not be there.

Not here: measuring, tables (`launch.script`), figures of benchmarks and evaluations (`benchmarks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ca_jax.errors import CaJaxError
from ca_jax.simulate.results import PolicyResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, VERMILION, GREEN = COLOURS[:3]
GREY = "#555555"


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
    """An empty figure of that size, inches. Raises as `require_matplotlib` does."""
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
