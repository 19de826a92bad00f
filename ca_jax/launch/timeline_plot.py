"""A figure of what happened when: one turn's spans, tracks as rows, layers as bars.

Not here: recording spans (`timeline`), traces to zoom into (`Timeline.write`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes

from ca_jax.launch.plots import new_figure, write_figure
from ca_jax.telemetry.timeline import TRACKS, Place, Span, Track, place_spans

# Of Okabe and Ito's palette, told apart with any colour vision; each track is labelled as well.
_COLOURS: dict[Track, str] = {
    "engine": "#999999",
    "fetch": "#56B4E9",
    "load": "#0072B2",
    "compute": "#D55E00",
    "save": "#009E73",
    "flush": "#E69F00",
}
_WIDTH_IN = 9.0
_ROW_IN, _MAX_ROWS_IN = 0.32, 6.0
_FRAME_IN = 1.3  # Title, axis and caption.
_LABEL_POINTS = 7
_CHARACTER_POINTS = 0.62 * _LABEL_POINTS
_GAP = 0.4  # Between tracks, in rows.


def plot_timeline(path: Path, spans: Iterable[Span], *, title: str, caption: str) -> None:
    """Draws spans over time, in milliseconds from the first one's start.

    Every track that has spans is a row, in the order of `TRACKS`; of as many lines as spans of it overlap or are
    nested. A bar is labelled with its `layer` if it has one, else with its name, where that fits.

    Args:
      path: the PNG to write; its directory must be there.
      spans: of a turn, in any order.
      title: of the figure.
      caption: what it was measured on, small print below.

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
            facecolor=_COLOURS[place.span.track],
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
