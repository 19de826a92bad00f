"""Figures of turns behind chunks: their time to the first token, and how many a second are served.

Not here: measuring (`bench_blend`, `bench_blend_throughput`), tables (`bench_tables`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Row = Mapping[str, Any]

# Of Okabe and Ito's palette, told apart with any colour vision; hatches say the same without colour.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
_HATCHES = ("", "//", "..", "xx")
_GREY = "#555555"
_WIDTH = 0.8  # Of all bars of a group.


def plot_blend(path: Path, rows: Sequence[Row], *, title: str, caption: str) -> None:
    """Draws TTFT by ratio, a bar for each tier, its ideal across it; full recompute and prefix caching are lines.

    Args:
      path: the PNG to write; its directory is made.
      rows: of `blend`, as JSON; those of the first number and length of chunks are drawn.
      title: what served.
      caption: where, small print below.
    """
    size = rows[0]["num_chunks"], rows[0]["chunk_tokens"]
    rows = [row for row in rows if (row["num_chunks"], row["chunk_tokens"]) == size]
    figure, axes = _drawing()
    blends = [row for row in rows if row["recompute_ratio"] is not None]
    ratios = sorted({row["recompute_ratio"] for row in blends})
    tiers = list(dict.fromkeys(row["tier"] for row in blends))
    for nth, tier in enumerate(tiers):
        of_tier = [row for row in blends if row["tier"] == tier]
        places = [ratios.index(row["recompute_ratio"]) + _offset(nth, len(tiers)) for row in of_tier]
        times_s = [row["ttft_s"] for row in of_tier]
        ends = [row["spread"]["ttft_s"] for row in of_tier]
        errors = [[mid - low for mid, (low, _) in zip(times_s, ends, strict=True)]]
        errors += [[high - mid for mid, (_, high) in zip(times_s, ends, strict=True)]]
        width = _WIDTH / len(tiers)
        axes.bar(places, times_s, width, yerr=errors, ecolor=_GREY, label=f"from {tier}", **_style(nth))
        for place, row in zip(places, of_tier, strict=True):
            label = "its ideal" if place == places[0] and not nth else ""
            axes.hlines(row["ideal_s"], place - width / 2, place + width / 2, color="black", linewidth=1.5, label=label)
    for mode, line, name in (("recompute", "-", "full recompute"), ("prefix", "--", "prefix caching")):
        for row in rows:
            if row["mode"] == mode:
                axes.axhline(row["ttft_s"], color=_GREY, linestyle=line, linewidth=1, label=name)
    axes.set_xticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
    axes.set_xlabel("share of the chunks' tokens computed anew")
    axes.set_ylabel("time to the first token (s)")
    _finish(figure, axes, path, f"{title}: {size[0]} chunks of {size[1]} tokens", caption)


def plot_stream(path: Path, rows: Sequence[Row], *, title: str, caption: str) -> None:
    """Draws turns a second, a group of bars for each store, a bar for each mode.

    Args:
      path: the PNG to write; its directory is made.
      rows: of `blend_throughput`, as JSON.
      title: what served.
      caption: where, small print below.
    """
    figure, axes = _drawing()
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    shares = list(dict.fromkeys(row["ssd_share"] for row in rows))
    for nth, mode in enumerate(modes):
        of_mode = {row["ssd_share"]: row for row in rows if row["mode"] == mode}
        places = [at + _offset(nth, len(modes)) for at in range(len(shares))]
        rates = [of_mode[share]["turns_per_s"] for share in shares]
        bars = axes.bar(places, rates, _WIDTH / len(modes), label=mode, **_style(nth))
        axes.bar_label(bars, [f"{rate:.2f}" for rate in rates], fontsize=8)
    axes.set_xticks(range(len(shares)), [f"{share:.0%} of all chunks on SSD" for share in shares])
    axes.set_ylabel("turns a second")
    _finish(figure, axes, path, f"{title}: {rows[0]['dram_share']:.0%} of all chunks in DRAM", caption)


def _offset(nth: int, count: int) -> float:
    return (nth - (count - 1) / 2) * _WIDTH / count


def _style(nth: int) -> dict[str, Any]:
    return {"color": _COLOURS[nth], "hatch": _HATCHES[nth], "edgecolor": "white"}


def _drawing() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _finish(figure: Figure, axes: Axes, path: Path, title: str, caption: str) -> None:
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=10)
    figure.supxlabel(caption, fontsize=8, color=_GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
