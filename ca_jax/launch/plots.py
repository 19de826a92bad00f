"""Figures of what the scripts measure, as PNG files. Draws without a display and without pyplot's global state.

Not here: measuring, tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Of Okabe and Ito's palette, told apart with any colour vision; markers and hatches say the same without colour.
_VERMILION, _BLUE, _GREEN = "#D55E00", "#0072B2", "#009E73"
_GREY = "#555555"


def plot_turns(
    path: Path,
    *,
    ttft_recompute_s: Sequence[float],
    ttft_reuse_s: Sequence[float],
    history_tokens: Sequence[int],
    new_tokens: Sequence[int],
    title: str,
    caption: str,
    restarted_before: int | None = None,
) -> None:
    """Draws TTFT of each turn, recomputed and reused, above what each turn was conditioned on.

    Args:
      path: the PNG to write; its directory must be there.
      ttft_recompute_s: seconds, one a turn.
      ttft_reuse_s: seconds, one a turn.
      history_tokens: before each turn.
      new_tokens: of each turn's message.
      title: of the figure.
      caption: what it was measured on, small print below.
      restarted_before: the turn, from 1, before which the process was restarted, so that its history came from SSD.

    Raises:
      ValueError: the sequences differ in length, there are no turns, or none of the number `restarted_before`.
    """
    lengths = {len(each) for each in (ttft_recompute_s, ttft_reuse_s, history_tokens, new_tokens)}
    if len(lengths) != 1 or not ttft_reuse_s:
        raise ValueError(f"wanted one value per turn in every sequence, found lengths {sorted(lengths)}")
    turns = list(range(1, len(ttft_reuse_s) + 1))
    if restarted_before is not None and restarted_before not in turns:
        raise ValueError(f"wanted a restart before one of turns 1..{len(turns)}, found {restarted_before}")
    figure = Figure(figsize=(8, 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    latency, tokens = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))

    latency.plot(turns, ttft_recompute_s, "s-", color=_VERMILION, label="recompute: prefill history and message")
    latency.plot(turns, ttft_reuse_s, "o-", color=_BLUE, label="reuse: load history, prefill message")
    for turn, recompute_s, reuse_s in zip(turns, ttft_recompute_s, ttft_reuse_s, strict=True):
        latency.annotate(
            f"{recompute_s / reuse_s:.1f}\N{MULTIPLICATION SIGN}",
            (turn, recompute_s),
            xytext=(-5, 6),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=_GREY,
        )
    if restarted_before is not None:
        _mark_restart(latency, restarted_before, ttft_reuse_s[restarted_before - 1])
    latency.set_ylabel("time to first token (s)")
    latency.set_ylim(0, max(*ttft_recompute_s, *ttft_reuse_s) * 1.15)
    latency.set_title(title, loc="left", fontsize=11)
    latency.legend(loc="upper left", frameon=False, fontsize=9)

    tokens.bar(turns, history_tokens, 0.6, color=_GREEN, label="history")
    tokens.bar(turns, new_tokens, 0.6, bottom=history_tokens, color="white", edgecolor=_GREY, hatch="////", label="new")
    tokens.set_ylabel("prompt (tokens)")
    tokens.set_xlabel("turn")
    tokens.set_xticks(turns)
    tokens.legend(loc="upper left", frameon=False, fontsize=9)
    for axes in (latency, tokens):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.supxlabel(caption, fontsize=8, color=_GREY)
    figure.savefig(path)


def _mark_restart(axes: Axes, turn: int, ttft_s: float) -> None:
    """A line between two turns, and another marker on the turn that loaded from SSD."""
    axes.axvline(turn - 0.5, color=_GREY, linestyle=":", linewidth=1)
    axes.annotate(
        "process restarts",
        (turn - 0.5, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -2),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8,
        color=_GREY,
    )
    axes.plot([turn], [ttft_s], "D", color=_BLUE, markersize=9, fillstyle="none", label="of that, history from SSD")
