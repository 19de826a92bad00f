"""Figures as PNG files: rows as groups of bars, as a suite's panels say; one turn's spans as bars over time.

Not here: measuring, recording spans (`recording`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.traces import Place, place_spans
from ca_jax.launch.plots import COLOURS, GREY, new_figure, write_figure
from ca_jax.telemetry.timeline import TRACKS, Span, Track

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = Mapping[str, Any]

_HATCHES = ("", "//", "..", "xx", "\\\\")  # They say the same as the colours.
_WIDTH = 0.8  # Of all bars of a group.

_TRACK_COLOURS: dict[Track, str] = {
    "engine": "#999999",
    "fetch": "#56B4E9",
    "load": "#0072B2",
    "compute": "#D55E00",
    "save": "#009E73",
    "flush": "#E69F00",
}
_WIDTH_IN = 9.0  # Of a timeline.
_ROW_IN, _MAX_ROWS_IN = 0.32, 6.0
_FRAME_IN = 1.3  # Title, axis and caption.
_LABEL_POINTS = 7
_CHARACTER_POINTS = 0.62 * _LABEL_POINTS
_GAP = 0.4  # Between tracks, in rows.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes: bars in groups."""

    title: str
    x: str
    """The field by whose values bars are grouped."""
    y: tuple[str, ...]
    """The fields drawn; several are bars side by side."""
    by: str | None = None
    """The field whose values are the bars of a group, where `y` is one field."""
    label: str = ""
    scale: float = 1.0
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
    """Draws rows of a suite, as JSON: panels side by side, those without rows left out. ValueError: none has rows."""
    found = [(panel, drawn) for panel in panels if (drawn := _of(panel, rows))]
    if not found:
        raise ValueError("rows must have something to draw, got none that has")
    figure = new_figure(max(8, 4.4 * len(found)), 4.4)
    for axes, (panel, drawn) in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        _draw(axes, panel, drawn)
        axes.legend(frameon=False, fontsize=8)
        axes.set_title(panel.title, loc="left", fontsize=10)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    write_figure(figure, path, caption=caption)


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
        style: dict[str, Any] = {"color": COLOURS[nth % 5], "hatch": _HATCHES[nth % 5], "edgecolor": "white"}
        drawn = axes.bar(places, heights, width, label=label, yerr=_errors(panel, field, known), ecolor=GREY, **style)
        axes.bar_label(drawn, [f"{height:.3g}" for height in heights], padding=2, fontsize=7)
        for place, row in zip(places, known, strict=True):
            if panel.mark is not None and row[panel.mark] is not None:
                height = _scaled(panel, row[panel.mark])
                axes.hlines(height, place - width / 2, place + width / 2, color="black", linewidth=1.5)
    lines = [(row[panel.line], row[panel.y[0]]) for row in rows if panel.line and row[panel.x] is None]
    for (label, value), dash in zip([*lines, *panel.levels], ("-", "--", ":", "-.") * len(rows), strict=False):
        axes.axhline(_scaled(panel, value), color=GREY, linestyle=dash, linewidth=1, label=label)
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


def plot_timeline(path: Path, spans: Iterable[Span], *, title: str, caption: str) -> None:
    """Draws spans over time, in milliseconds from the first one's start.

    Every track that has spans is a row, in the order of `TRACKS`; of as many lines as spans of it overlap or are
    nested. A bar is labelled with its `layer` if it has one, else with its name, where that fits.

    Raises:
      ValueError: there are no spans, or all of them begin and end at one instant.
    """
    places = place_spans(spans)
    if not places:
        raise ValueError("spans must be at least one, got none")
    origin_s = places[0].span.start_s
    total_ms = 1e3 * (max(place.span.end_s for place in places) - origin_s)
    if total_ms == 0:
        raise ValueError("spans must take time, got all of them at one instant")
    rows, middles, height = _rows(places)
    rows_in = min(height * _ROW_IN, _MAX_ROWS_IN)
    has_labels = 72 * rows_in / height > _LABEL_POINTS
    figure = new_figure(_WIDTH_IN, rows_in + _FRAME_IN)
    axes = figure.subplots()
    for place in places:
        start_ms, end_ms = (1e3 * (at_s - origin_s) for at_s in (place.span.start_s, place.span.end_s))
        top = rows[_line(place)]
        axes.broken_barh(
            [(start_ms, end_ms - start_ms)],
            (top + 0.06, 0.88),
            facecolor=_TRACK_COLOURS[place.span.track],
            edgecolor="white",
            linewidth=0.5,
        )
        if has_labels:
            _label_bar(axes, place.span, (start_ms + end_ms) / 2, top + 0.5, (end_ms - start_ms) / total_ms)
    axes.set_yticks(list(middles.values()), list(middles))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(height, 0)
    axes.set_xlim(0, total_ms)
    axes.set_xlabel("time (ms)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines["left"].set_visible(False)
    write_figure(figure, path, caption=caption, grid="x")


def _line(place: Place) -> tuple[Track, int, int]:
    return place.span.track, place.lane, place.depth


def _rows(places: list[Place]) -> tuple[dict[tuple[Track, int, int], float], dict[Track, float], float]:
    """The top of each line, the middle of each track, and the height of all, in rows from above."""
    rows: dict[tuple[Track, int, int], float] = {}
    middles: dict[Track, float] = {}
    height = 0.0
    for track in TRACKS:
        lines = sorted({_line(place) for place in places if place.span.track == track})
        if not lines:
            continue
        rows.update({line: height + i for i, line in enumerate(lines)})
        middles[track] = height + len(lines) / 2
        height += len(lines) + _GAP
    return rows, middles, height - _GAP


def _label_bar(axes: Axes, span: Span, x: float, y: float, share_of_width: float) -> None:
    """Writes a bar's label in its middle, unless it is too narrow."""
    label = str(span.args.get("layer", span.name))
    if len(label) * _CHARACTER_POINTS < 0.85 * share_of_width * 72 * _WIDTH_IN:
        axes.text(x, y, label, ha="center", va="center", fontsize=_LABEL_POINTS, color="white")
