"""A figure of loss around truncations, a line for each method.

Not here: measuring (`evaluation.perplexity`), tables (`evaluate_tables`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with any colour vision; markers say the same without colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_GREY = "#555555"
_ROOM = 0.15  # Above and below what lines need, as a share of it.


def plot_losses(path: Path, rows: Sequence[Mapping[str, Any]], *, caption: str) -> None:
    """Draws mean loss by distance from a truncation, over all of them; below, the same less that of `tt`.

    Bands are one standard error over truncations. The lower part is there where `tt` was compared with, and is as high
    as methods but `nkvt` need.

    Args:
      path: the PNG to write; its directory is made.
      rows: of `ppl`, as JSON.
      caption: what was evaluated and where, small print below.

    Raises:
      ValueError: no row has a curve.
    """
    drawn = [row for row in rows if row["curve"]]
    if not drawn:
        raise ValueError("wanted rows with a curve, found none: nothing overflowed")
    compared = [row for row in drawn if row["curve"][0]["gap"] is not None]
    figure = Figure(figsize=(8, 6.4 if compared else 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if compared:
        losses, gaps = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    else:
        losses, gaps = figure.subplots(), None
    styles = {
        row["name"]: {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)]}
        for i, row in enumerate(drawn)
    }
    for row in drawn:
        _draw(losses, row, "loss", styles[row["name"]])
    losses.set_ylabel("loss (nats a token)")
    losses.set_title(
        f"Loss around {drawn[0]['num_truncations']} truncations: {drawn[0]['text']}, window {drawn[0]['window']:,}",
        loc="left",
        fontsize=11,
    )
    losses.legend(frameon=False, fontsize=9)
    if gaps is not None:
        for row in compared:
            _draw(gaps, row, "gap", styles[row["name"]])
        gaps.axhline(0, color=_GREY, linewidth=0.8)
        gaps.set_ylabel("loss above tt (nats)")
        _fit(gaps, [row for row in compared if row["method"] != "nkvt"])
    for axes in figure.axes:
        axes.axvline(0, color=_GREY, linestyle=":", linewidth=1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.axes[-1].set_xlabel("tokens behind a truncation")
    figure.supxlabel(caption, fontsize=8, color=_GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw(axes: Axes, row: Mapping[str, Any], field: str, style: Mapping[str, Any]) -> None:
    curve = row["curve"]
    width = curve[1]["offset"] - curve[0]["offset"] if len(curve) > 1 else 0
    middles = [point["offset"] + width / 2 for point in curve]
    values = [point[field] for point in curve]
    errors = [point[f"{field}_stderr"] or 0.0 for point in curve]
    axes.plot(middles, values, markersize=4, linewidth=1.2, label=row["name"], **style)
    axes.fill_between(
        middles,
        [value - error for value, error in zip(values, errors, strict=True)],
        [value + error for value, error in zip(values, errors, strict=True)],
        color=style["color"],
        alpha=0.15,
        linewidth=0,
    )


def _fit(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Makes the axes as high as these rows need."""
    points = [point for row in rows for point in row["curve"]]
    if not points:
        return
    low = min(0.0, *(point["gap"] - (point["gap_stderr"] or 0.0) for point in points))
    high = max(0.0, *(point["gap"] + (point["gap_stderr"] or 0.0) for point in points))
    room = _ROOM * (high - low) or _ROOM
    axes.set_ylim(low - room, high + room)
