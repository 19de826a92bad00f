"""Figures of rows: groups of bars, as a suite's panels say, in one PNG.

Not here: the figure of one turn (`recording`), measuring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Line = Mapping[str, Any]

# Of Okabe and Ito's palette, told apart with any colour vision; hatches say the same without colour.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00")
_HATCHES = ("", "//", "..", "xx", "\\\\")
_GREY = "#555555"
_WIDTH = 0.8  # Of all bars of a group.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes: bars in groups."""

    title: str
    """Above it."""
    x: str
    """The field by whose values bars are grouped."""
    y: tuple[str, ...]
    """The fields drawn; several are bars side by side."""
    by: str | None = None
    """The field whose values are the bars of a group, where `y` is one field."""
    label: str = ""
    """Of the vertical axis."""
    scale: float = 1.0
    """Numbers are multiplied by it."""
    offset: float = 0.0
    """Added to numbers before."""
    mark: str | None = None
    """A field drawn as a line across each bar."""
    line: str | None = None
    """The field that names rows without a value of `x`, which are lines across the panel."""
    levels: tuple[tuple[str, float], ...] = ()
    """Other lines across it: what they are, and where."""
    only: tuple[str, Any] | None = None
    """A field, and what it is in the rows that are drawn; None for all."""


def plot(path: Path, panels: Sequence[Panel], rows: Sequence[Line], *, title: str, caption: str) -> None:
    """Draws rows.

    Args:
      path: the PNG to write; its directory is made.
      panels: side by side; those without rows are left out.
      rows: of a suite, as JSON.
      title: of the figure.
      caption: what it was measured on, small print below.

    Raises:
      ValueError: no panel has rows.
    """
    found = [(panel, drawn) for panel in panels if (drawn := _of(panel, rows))]
    if not found:
        raise ValueError("rows must have something to draw, got none that has")
    figure = Figure(figsize=(max(8, 4.4 * len(found)), 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (panel, drawn) in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        _draw(axes, panel, drawn)
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title(panel.title, loc="left", fontsize=10)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.supxlabel(caption, fontsize=8, color=_GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _of(panel: Panel, rows: Sequence[Line]) -> list[Line]:
    if panel.only is None:
        return list(rows)
    field, value = panel.only
    return [row for row in rows if row.get(field) == value]


def _draw(axes: Axes, panel: Panel, rows: Sequence[Line]) -> None:
    grouped = [row for row in rows if row[panel.x] is not None]
    groups = list(dict.fromkeys(row[panel.x] for row in grouped))
    bars: list[tuple[str, str, list[Line]]] = [(name.replace("_", " "), name, grouped) for name in panel.y]
    if panel.by is not None:
        names = dict.fromkeys(row[panel.by] for row in grouped)
        bars = [(f"{name}", panel.y[0], [row for row in grouped if row[panel.by] == name]) for name in names]
    width = _WIDTH / max(len(bars), 1)
    for nth, (label, field, of_bar) in enumerate(bars):
        known = [row for row in of_bar if isinstance(row.get(field), int | float)]
        places = [groups.index(row[panel.x]) + (nth - (len(bars) - 1) / 2) * width for row in known]
        heights = [_scaled(panel, row[field]) for row in known]
        style: dict[str, Any] = {"color": _COLOURS[nth % 5], "hatch": _HATCHES[nth % 5], "edgecolor": "white"}
        drawn = axes.bar(places, heights, width, label=label, yerr=_errors(panel, field, known), ecolor=_GREY, **style)
        axes.bar_label(drawn, [f"{height:.3g}" for height in heights], padding=2, fontsize=7)
        for place, row in zip(places, known, strict=True):
            if panel.mark is not None and row[panel.mark] is not None:
                height = _scaled(panel, row[panel.mark])
                axes.hlines(height, place - width / 2, place + width / 2, color="black", linewidth=1.5)
    lines = [(row[panel.line], row[panel.y[0]]) for row in rows if panel.line and row[panel.x] is None]
    for (label, value), dash in zip([*lines, *panel.levels], ("-", "--", ":", "-.") * len(rows), strict=False):
        axes.axhline(_scaled(panel, value), color=_GREY, linestyle=dash, linewidth=1, label=label)
    axes.set_xticks(range(len(groups)), [f"{group:g}" if isinstance(group, float) else str(group) for group in groups])
    axes.set_xlabel(panel.x.replace("_", " "))
    axes.set_ylabel(panel.label)


def _scaled(panel: Panel, value: float) -> float:
    return panel.scale * (panel.offset + value)


def _errors(panel: Panel, field: str, rows: Sequence[Line]) -> list[list[float]] | None:
    """From the median down to the least sample and up to the largest."""
    if not all(field in (row.get("spread") or ()) for row in rows):
        return None
    ends = [(row[field], *row["spread"][field]) for row in rows]
    down = [panel.scale * (middle - least) for middle, least, _ in ends]
    return [down, [panel.scale * (most - middle) for middle, _, most in ends]]
