"""Figures of the evaluation on prompts made of chunks: CacheBlend's, with our numbers.

Not here: measuring (`evaluation.rag`, `evaluation.rag_deviation`), tables (`evaluate_rag_tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ca_jax.launch.evaluate_rag_tables import title_of
from ca_jax.launch.evaluate_run import Report

Row = Mapping[str, Any]

# Okabe and Ito's palette, told apart with any colour vision; markers say the same without colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_GREY = "#555555"


def plot(path: Path, report: Report, *, caption: str) -> None:
    """Draws the figure of a report of `rag`: KL against computed tokens where it is the table of methods.

    Args:
      path: the PNG to write; its directory is made.
      report: as JSON.
      caption: what was evaluated and where, small print below.
    """
    drawing = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(drawing)
    axes = drawing.subplots()
    _DRAWN[report["config"]["figure"]](axes, report["rows"])
    axes.set_title(title_of(report), loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9)
    drawing.supxlabel(caption, fontsize=8, color=_GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path)


def _style(nth: int) -> dict[str, Any]:
    return {"color": _COLOURS[nth % len(_COLOURS)], "marker": _MARKERS[nth % len(_MARKERS)], "markersize": 5}


def _draw_methods(axes: Axes, rows: Sequence[Row]) -> None:
    """KL against computed tokens: a line for each selection, a point for each baseline."""
    drawn = [row for row in rows if row["mean_kl"] is not None]
    for nth, selection in enumerate(dict.fromkeys(row["selection"] for row in drawn if row["selection"])):
        line = sorted((row for row in drawn if row["selection"] == selection), key=lambda row: row["ratio"])
        _with_errors(axes, line, "computed_tokens", "mean_kl", "kl_interval", label=selection, **_style(nth))
    for nth, row in enumerate((row for row in drawn if row["selection"] is None), 3):
        _with_errors(
            axes,
            [row],
            *("computed_tokens", "mean_kl", "kl_interval"),
            label=row["name"],
            linestyle="none",
            **_style(nth),
        )
    axes.set_xlabel("tokens computed before the answer")
    axes.set_ylabel("KL to full recompute (nats)")
    axes.set_ylim(bottom=0)


def _draw_attention(axes: Axes, rows: Sequence[Row]) -> None:
    for nth, selection in enumerate(dict.fromkeys(row["selection"] for row in rows)):
        line = [{**row, "percent": 100 * row["ratio"]} for row in rows if row["selection"] == selection]
        _with_errors(axes, line, "percent", "attention_deviation", "interval", label=selection, **_style(nth))
    axes.set_xlabel("recompute ratio (%)")
    axes.set_ylabel("attention deviation, mean over layers")
    axes.set_ylim(bottom=0)


def _draw_distribution(axes: Axes, rows: Sequence[Row]) -> None:
    for nth, row in enumerate(rows):
        axes.plot(
            row["percentiles"],
            [i / 100 for i in range(101)],
            color=_COLOURS[nth % len(_COLOURS)],
            linestyle=("-", "--", ":")[nth % 3],
            label=f"layer {row['layer']}",
        )
    axes.set_xlabel("KV deviation of a token")
    axes.set_ylabel("share of tokens with no more")
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)


def _draw_correlation(axes: Axes, rows: Sequence[Row]) -> None:
    _with_errors(axes, rows, "layer", "correlation", "interval", **_style(0))
    axes.set_xlabel("layer, with the next one")
    axes.set_ylabel("Spearman's rank correlation")
    axes.set_ylim(min(0.0, *(row["correlation"] for row in rows)), 1)


def _draw_quality(axes: Axes, rows: Sequence[Row]) -> None:
    """KL against TTFT, a point for each method."""
    drawn = [row for row in rows if row["ttft_s"] is not None and row["mean_kl"] is not None]
    for nth, row in enumerate(drawn):
        axes.plot([row["ttft_s"]], [row["mean_kl"]], linestyle="none", label=row["name"], **_style(nth))
    axes.set_xlabel("time to first token (s)")
    axes.set_ylabel("KL to full recompute (nats)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=-0.02 * max(row["mean_kl"] for row in drawn))


def _draw_sizes(axes: Axes, rows: Sequence[Row]) -> None:
    """TTFT against tokens of chunks, a line for each method."""
    for nth, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
        line = sorted((row for row in rows if row["name"] == name), key=lambda row: row["context_tokens"])
        _with_errors(axes, line, "context_tokens", "ttft_s", "ttft_quartiles", label=name, **_style(nth))
    axes.set_xlabel("tokens of chunks: " + ", ".join(_sizes(rows)))
    axes.set_ylabel("time to first token (s)")
    axes.set_ylim(bottom=0)


def _sizes(rows: Sequence[Row]) -> list[str]:
    sizes = {(row["num_chunks"], row["chunk_tokens"]) for row in rows}
    by_tokens = sorted(sizes, key=lambda size: size[0] * size[1])
    return [f"{count}\N{MULTIPLICATION SIGN}{length}" for count, length in by_tokens]


def _draw_storages(axes: Axes, rows: Sequence[Row]) -> None:
    """TTFT of each method over each storage, full recompute and prefix caching as lines across."""
    storages = list(dict.fromkeys(row["storage"] for row in rows))
    for nth, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
        line = [{**row, "at": storages.index(row["storage"])} for row in rows if row["name"] == name]
        if len(line) == 1 and len(storages) > 1:
            axes.axhline(line[0]["ttft_s"], color=_style(nth)["color"], linestyle="--", linewidth=1, label=name)
        else:
            _with_errors(axes, line, "at", "ttft_s", "ttft_quartiles", label=name, **_style(nth))
    axes.set_xticks(range(len(storages)), [f"{each} GB/s" if each[0].isdigit() else each for each in storages])
    axes.set_xlabel("where the chunks' KV is; speeds are paced")
    axes.set_ylabel("time to first token (s)")
    axes.set_ylim(bottom=0)


def _with_errors(axes: Axes, rows: Sequence[Row], x: str, y: str, interval: str, **style: Any) -> None:
    """A line with intervals."""
    low = [max(row[y] - row[interval][0], 0) for row in rows]
    high = [max(row[interval][1] - row[y], 0) for row in rows]
    axes.errorbar(
        [row[x] for row in rows], [row[y] for row in rows], yerr=[low, high], linewidth=1.2, capsize=2, **style
    )


_DRAWN: dict[int | None, Callable[[Axes, Sequence[Row]], None]] = {
    None: _draw_methods,
    6: _draw_attention,
    7: _draw_distribution,
    8: _draw_correlation,
    12: _draw_quality,
    15: _draw_sizes,
    16: _draw_quality,
    17: _draw_storages,
}
