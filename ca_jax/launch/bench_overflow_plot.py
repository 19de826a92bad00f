"""A figure of conversations that outgrow the window: hit rate and time of each method, as in the paper's Figure 22.

Not here: measuring (`bench_overflow`), tables (`bench_tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

# Of Okabe and Ito's palette, told apart with any colour vision; hatches say the same without colour.
_BLUE, _GREEN = "#0072B2", "#009E73"
_GREY = "#555555"
_ROOM = 1.18  # Above the highest bar, for what is written there.


def plot_overflow(path: Path, rows: Sequence[Mapping[str, Any]], *, title: str, caption: str) -> None:
    """Draws hit rate, share of history loaded and time of the same conversations by every method.

    Args:
      path: the PNG to write; its directory is made.
      rows: of the suite, as JSON; those of conversations are drawn.
      title: what served.
      caption: where, small print below.

    Raises:
      ValueError: no row is of conversations.
    """
    drawn = [row for row in rows if row["measured"] == "conversations"]
    if not drawn:
        raise ValueError("wanted rows of conversations to draw, found none")
    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    hits, times = figure.subplots(1, 2)
    methods = [row["method"] for row in drawn]
    places, width = range(len(drawn)), 0.36

    rates = [100 * row["hit_rate"] for row in drawn]
    shares = [100 * row["loaded_share"] for row in drawn]
    left = hits.bar([at - width / 2 for at in places], rates, width, color=_BLUE, label="turns with a hit")
    right = hits.bar(
        [at + width / 2 for at in places],
        shares,
        width,
        color="white",
        edgecolor=_GREY,
        hatch="////",
        label="history tokens loaded",
    )
    for bars, values in ((left, rates), (right, shares)):
        _write(hits, bars, values, "{:.1f}".format)
    hits.set_ylabel("share (%)")
    hits.set_ylim(0, 100 * _ROOM)

    prefill_s, total_s = [row["prefill_s"] for row in drawn], [row["total_s"] for row in drawn]
    bars = times.bar(places, total_s, 0.5, color="white", edgecolor=_GREY, label="total")
    times.bar(places, prefill_s, 0.5, color=_GREEN, label="of it prefill")
    _write(times, bars, total_s, "{:,.1f}".format)
    times.set_ylabel("time (s)")
    times.set_ylim(0, max(total_s) * _ROOM)

    for axes in (hits, times):
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8, borderaxespad=0)
        axes.set_xticks(list(places), methods)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    first = drawn[0]
    figure.suptitle(
        f"{title}: {first['sessions']} conversations, {first['turns']} turns, {first['overflows']} overflows",
        fontsize=11,
    )
    figure.supxlabel(caption, fontsize=8, color=_GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _write(axes: Axes, bars: BarContainer, values: Sequence[float], form: Callable[[float], str]) -> None:
    axes.bar_label(bars, [form(value) for value in values], padding=2, fontsize=8)
