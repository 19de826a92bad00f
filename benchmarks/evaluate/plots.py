"""Figures of evaluations: loss around truncations, and CacheBlend's figures with our numbers.

Not here: measuring (the tasks), tables (`tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.evaluate.tables import Report, Row, title_of
from benchmarks.tables import summarize_machine
from ca_jax.launch.plots import COLOURS, GREY, new_figure, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROOM = 0.15  # Above and below what lines need, as a share of it.
_MARKERS = "osD^vPX"  # They say the same as the colours.


def draw(path: Path, report: Report) -> bool:
    """Writes the figure of a report of `ppl` or `rag`; False where there is none to draw: nothing overflowed."""
    caption = f"{report['model']} in {report['dtype']}, {summarize_machine(report['machine'])}"
    if report["task"] == "rag":
        plot_rag(path, report, caption=caption)
        return True
    if not any(row["curve"] for row in report["rows"]):
        return False
    plot_losses(path, report["rows"], caption=caption)
    return True


def plot_losses(path: Path, rows: Sequence[Row], *, caption: str) -> None:
    """Draws mean loss by distance from a truncation, over all of them; below, the same less that of `tt`.

    Bands are one standard error over truncations. The lower part is there where `tt` was compared with, and is as high
    as methods but `nkvt` need.
    """
    drawn = [row for row in rows if row["curve"]]
    if not drawn:
        raise ValueError("rows must have a curve, got none: nothing overflowed")
    compared = [row for row in drawn if row["curve"][0]["gap"] is not None]
    figure = new_figure(8, 6.4 if compared else 4)
    parts = ("loss", "gap") if compared else ("loss",)
    ratios = (3, 2)[: len(parts)]
    all_axes: Sequence[Axes] = np.ravel(figure.subplots(len(parts), 1, sharex=True, height_ratios=ratios))  # type: ignore[assignment]
    for axes, field in zip(all_axes, parts, strict=True):
        for nth, row in enumerate(drawn):
            if field == "loss" or row in compared:
                _draw_curve(axes, row, field, nth)
        axes.axvline(0, color=GREY, linestyle=":", linewidth=1)
    losses = all_axes[0]
    losses.set_ylabel("loss (nats a token)")
    where = f"{drawn[0]['num_truncations']} truncations: {drawn[0]['text']}, window {drawn[0]['window']:,}"
    losses.set_title(f"Loss around {where}", loc="left", fontsize=11)
    losses.legend(frameon=False, fontsize=9)
    if compared:
        gaps = all_axes[1]
        gaps.axhline(0, color=GREY, linewidth=0.8)
        gaps.set_ylabel("loss above tt (nats)")
        points = [point for row in compared if row["method"] != "nkvt" for point in row["curve"]]
        errors = [point["gap_stderr"] or 0.0 for point in points]
        low = min([0.0, *(point["gap"] - error for point, error in zip(points, errors, strict=True))])
        high = max([0.0, *(point["gap"] + error for point, error in zip(points, errors, strict=True))])
        room = _ROOM * (high - low) or _ROOM
        gaps.set_ylim(low - room, high + room)
    all_axes[-1].set_xlabel("tokens behind a truncation")
    write_figure(figure, path, caption=caption)


def _draw_curve(axes: Axes, row: Row, field: str, nth: int) -> None:
    curve = row["curve"]
    width = curve[1]["offset"] - curve[0]["offset"] if len(curve) > 1 else 0
    middles = np.array([point["offset"] + width / 2 for point in curve])
    values = np.array([point[field] for point in curve])
    errors = np.array([point[f"{field}_stderr"] or 0.0 for point in curve])
    axes.plot(middles, values, markersize=4, linewidth=1.2, label=row["name"], **style(nth))
    axes.fill_between(middles, values - errors, values + errors, color=style(nth)["color"], alpha=0.15, linewidth=0)


def plot_rag(path: Path, report: Report, *, caption: str) -> None:
    """Draws the figure of a report of `rag`: KL against computed tokens where it is the table of methods."""
    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    _DRAWN[report["config"]["figure"]](axes, report["rows"])
    axes.set_title(title_of(report), loc="left", fontsize=9)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9)
    write_figure(figure, path, caption=caption)


def _labels(axes: Axes, x: str, y: str, bottom: float | None = 0) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=bottom)


def _draw_methods(axes: Axes, rows: Sequence[Row]) -> None:
    """KL against computed tokens: a line for each selection, a point for each baseline."""
    drawn = [row for row in rows if row["mean_kl"] is not None]
    at = ("computed_tokens", "mean_kl", "kl_interval")
    for nth, (selection, line) in enumerate(_by("selection", (row for row in drawn if row["selection"]))):
        _with_errors(axes, sorted(line, key=lambda row: row["ratio"]), *at, label=selection, **style(nth))
    for nth, row in enumerate((row for row in drawn if row["selection"] is None), 3):
        _with_errors(axes, [row], *at, label=row["name"], linestyle="none", **style(nth))
    _labels(axes, "tokens computed before the answer", "KL to full recompute (nats)")


def _draw_attention(axes: Axes, rows: Sequence[Row]) -> None:
    percents = ({**row, "percent": 100 * row["ratio"]} for row in rows)
    for nth, (selection, line) in enumerate(_by("selection", percents)):
        _with_errors(axes, line, "percent", "attention_deviation", "interval", label=selection, **style(nth))
    _labels(axes, "recompute ratio (%)", "attention deviation, mean over layers")


def _draw_distribution(axes: Axes, rows: Sequence[Row]) -> None:
    for nth, row in enumerate(rows):
        line: dict[str, Any] = {"color": COLOURS[nth % len(COLOURS)], "linestyle": ("-", "--", ":")[nth % 3]}
        axes.plot(row["percentiles"], [i / 100 for i in range(101)], label=f"layer {row['layer']}", **line)
    _labels(axes, "KV deviation of a token", "share of tokens with no more")
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)


def _draw_correlation(axes: Axes, rows: Sequence[Row]) -> None:
    _with_errors(axes, rows, "layer", "correlation", "interval", **style(0))
    _labels(axes, "layer, with the next one", "Spearman's rank correlation")
    axes.set_ylim(min(0.0, *(row["correlation"] for row in rows)), 1)


def _draw_quality(axes: Axes, rows: Sequence[Row]) -> None:
    """KL against TTFT, a point for each method."""
    drawn = [row for row in rows if row["ttft_s"] is not None and row["mean_kl"] is not None]
    for nth, row in enumerate(drawn):
        axes.plot([row["ttft_s"]], [row["mean_kl"]], linestyle="none", label=row["name"], **style(nth))
    lowest = -0.02 * max(row["mean_kl"] for row in drawn)
    _labels(axes, "time to first token (s)", "KL to full recompute (nats)", lowest)
    axes.set_xlim(left=0)


def _draw_sizes(axes: Axes, rows: Sequence[Row]) -> None:
    """TTFT against tokens of chunks, a line for each method."""
    for nth, (name, line) in enumerate(_by("name", rows)):
        by_size = sorted(line, key=lambda row: row["context_tokens"])
        _with_errors(axes, by_size, "context_tokens", "ttft_s", "ttft_quartiles", label=name, **style(nth))
    sizes = sorted({(row["num_chunks"], row["chunk_tokens"]) for row in rows}, key=lambda size: size[0] * size[1])
    told = ", ".join(f"{count}\N{MULTIPLICATION SIGN}{length}" for count, length in sizes)
    _labels(axes, f"tokens of chunks: {told}", "time to first token (s)")


def _draw_storages(axes: Axes, rows: Sequence[Row]) -> None:
    """TTFT of each method over each storage, full recompute and prefix caching as lines across."""
    storages = list(dict.fromkeys(row["storage"] for row in rows))
    for nth, (name, of_name) in enumerate(_by("name", rows)):
        line = [{**row, "at": storages.index(row["storage"])} for row in of_name]
        if len(line) == 1 and len(storages) > 1:
            axes.axhline(line[0]["ttft_s"], color=style(nth)["color"], linestyle="--", linewidth=1, label=name)
        else:
            _with_errors(axes, line, "at", "ttft_s", "ttft_quartiles", label=name, **style(nth))
    axes.set_xticks(range(len(storages)), [f"{each} GB/s" if each[0].isdigit() else each for each in storages])
    _labels(axes, "where the chunks' KV is; speeds are paced", "time to first token (s)")


def _by(field: str, rows: Iterable[Row]) -> list[tuple[Any, list[Row]]]:
    """Rows by a field of them, in the order of its values."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[field], []).append(row)
    return list(found.items())


def _with_errors(axes: Axes, rows: Sequence[Row], x: str, y: str, interval: str, **styled: Any) -> None:
    """A line with intervals."""
    low = [max(row[y] - row[interval][0], 0) for row in rows]
    high = [max(row[interval][1] - row[y], 0) for row in rows]
    drawn: dict[str, Any] = {"linewidth": 1.2, "capsize": 2, "markersize": 5, **styled}
    axes.errorbar([row[x] for row in rows], [row[y] for row in rows], yerr=[low, high], **drawn)


_DRAWN: Mapping[int | None, Callable[[Axes, Sequence[Row]], None]] = {
    None: _draw_methods,
    6: _draw_attention,
    7: _draw_distribution,
    8: _draw_correlation,
    12: _draw_quality,
    15: _draw_sizes,
    16: _draw_quality,
    17: _draw_storages,
}


def style(nth: int) -> dict[str, Any]:
    """Colour and marker of the nth line of a figure."""
    return {"color": COLOURS[nth % len(COLOURS)], "marker": _MARKERS[nth % len(_MARKERS)]}
