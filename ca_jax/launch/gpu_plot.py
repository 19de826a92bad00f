"""The paper's figures 19 and 20 as they came out, the paper's own shares beside them, in one PNG.

Not here: measuring (`gpu_overlap`), tables (`gpu_report`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ca_jax.launch.gpu_overlap import PAPER_PRELOAD, PAPER_SAVE

_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#E69F00", "#009E73", "#555555"  # Of Okabe and Ito's palette.
_WAYS = {
    "off": "no pre-loading",
    "0": "no read buffer",
    "15": "15 layers",
    "all": "all layers",
    "recompute": "recompute",
}
_COLOURS = ("#D55E00", _ORANGE, _BLUE, _GREEN, "#999999")

Rows = Sequence[Mapping[str, Any]]


def plot_figures(path: Path, sections: Mapping[str, Rows], *, title: str, caption: str) -> None:
    """Draws those of figures 18, 19 and 20 that there are rows of.

    Args:
      path: the PNG to write; its directory must be there.
      sections: rows of `gpu_overlap`, by `figure_18`, `figure_19` and `figure_20`.
      title: of the figure.
      caption: what it was measured on, small print below.

    Raises:
      ValueError: there are rows of none.
    """
    draws = {"figure_18": _draw_18, "figure_19": _draw_19, "figure_20": _draw_20}
    found = [name for name in draws if sections.get(name)]
    if not found:
        raise ValueError("wanted rows of at least one figure to draw, found none")
    figure = Figure(figsize=(4.6 * len(found), 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        draws[name](axes, sections[name])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.supxlabel(caption, fontsize=8, color=_GREY)
    figure.savefig(path)


def _draw_18(axes: Axes, rows: Rows) -> None:
    """Groups of bars, a group for each length of history."""
    histories = sorted({row["history_tokens"] for row in rows})
    ways = [way for way in ("recompute", "off", "0", "15", "all") if any(row["read_buffer"] == way for row in rows)]
    times = {(row["history_tokens"], row["read_buffer"]): row["ttft_s"] for row in rows}
    new_tokens = {row["history_tokens"]: row["new_tokens"] for row in rows}
    width = 0.8 / len(ways)
    for i, way in enumerate(ways):
        middles = [group + (i + 0.5) * width - 0.4 for group in range(len(histories))]
        heights = [1e3 * times[history, way] for history in histories]
        axes.bar(middles, heights, width, color=_COLOURS[i], label=_WAYS[way])
    axes.set_xticks(range(len(histories)), [f"{history}/{new_tokens[history]}" for history in histories])
    axes.set_xlabel("history/new tokens")
    axes.set_ylabel("prefill (ms)")
    axes.set_title("figure 18: reuse", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _draw_19(axes: Axes, rows: Rows) -> None:
    """Time against no pre-loading by depth of the read buffer."""
    kept = [row for row in rows if row["read_buffer"] not in ("off", "recompute")]
    names = ["off", *(row["read_buffer"] for row in kept)]
    _bars_beside(
        axes,
        [_WAYS["off"], *(f"{name} layers" for name in names[1:])],
        ours=[1.0, *(1 + row["change"] for row in kept)],
        paper=[1.0, *(1 + PAPER_PRELOAD[name] if name in PAPER_PRELOAD else None for name in names[1:])],
    )
    axes.set_ylabel("prefill, against no pre-loading")
    axes.set_xlabel("read buffer")
    axes.set_title(f"figure 19: {kept[0]['history_tokens']} + {kept[0]['new_tokens']} tokens", loc="left", fontsize=10)


def _draw_20(axes: Axes, rows: Rows) -> None:
    """Time with saves beside the turn, against at its end."""
    _bars_beside(
        axes,
        [str(row["prompt_tokens"]) for row in rows],
        ours=[1 + row["change"] for row in rows],
        paper=[1 + sum(PAPER_SAVE) / len(PAPER_SAVE)] * len(rows),
    )
    axes.axhline(1.0, color=_GREY, linewidth=0.8, linestyle=":")
    axes.set_ylabel("turn, against saving at its end")
    axes.set_xlabel(f"prompt (tokens), {rows[0]['answer_tokens']} decoded")
    axes.set_title("figure 20: asynchronous saving", loc="left", fontsize=10)


def _bars_beside(axes: Axes, labels: Sequence[str], *, ours: Sequence[float], paper: Sequence[float | None]) -> None:
    places = range(len(labels))
    axes.bar([place - 0.2 for place in places], ours, 0.4, color=_BLUE, label="here")
    known = [(place + 0.2, share) for place, share in zip(places, paper, strict=True) if share is not None]
    axes.bar(
        [place for place, _ in known],
        [share for _, share in known],
        0.4,
        label="paper",
        color="white",
        edgecolor=_GREY,
        hatch="////",
    )
    axes.set_xticks(list(places), labels, fontsize=8)
    axes.set_ylim(0, 1.3)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
