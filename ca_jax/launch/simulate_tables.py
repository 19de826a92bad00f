"""Simulations as tables for people.

Not here: simulating, plots (simulate_plot).
"""

from __future__ import annotations

from collections.abc import Sequence

import rich.box
import rich.console
import rich.table

from ca_jax.simulate.comparison import PolicyResult
from ca_jax.simulate.paper import PaperRow


def print_figures(rows: Sequence[PaperRow], console: rich.console.Console) -> None:
    """Prints figures of the paper, its numbers beside ours."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for heading in ("figure", "case", "what", "ours", "paper", "ratio"):
        table.add_column(heading, justify="left" if heading in ("case", "what") else "right")
    last = None
    for row in rows:
        if last is not None and row.figure != last:
            table.add_section()
        last = row.figure
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.figure, row.case, row.metric, shown(row.ours, row.unit), shown(row.paper, row.unit), ratio)
    console.print(table)


def print_policies(results: Sequence[PolicyResult], console: rich.console.Console) -> None:
    """Prints what became of a trace under each policy."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headings = "policy", "hits\n%", "in DRAM\n%", "tokens\n%", "prefill\ns", "saved\n%", "GPU\ns"
    for heading in (*headings, "TTFT\nmean", "\np50", "\np90", "\np99"):
        is_name = heading == "policy"
        table.add_column(heading, justify="left" if is_name else "right", min_width=15 if is_name else None)
    for result in results:
        shares = result.hit_rate, result.dram_share, result.cached_share
        times_s = result.gpu_s, result.ttft_mean_s, *result.ttft_percentiles_s.values()
        table.add_row(
            result.policy,
            *(f"{100 * share:.1f}" for share in shares),
            _seconds(result.prefill_s),
            f"{100 * result.prefill_saved:.1f}",
            *map(_seconds, times_s),
        )
    console.print(table)
    console.print(
        "hits: of turns with a history; tokens: of those of histories; saved: of recomputing's prefill",
        highlight=False,
    )


def shown(value: float | None, unit: str) -> str:
    """A number with its unit; nothing for none."""
    if value is None:
        return ""
    if unit in ("%", "points"):
        return f"{100 * value:.1f} {unit}"
    return f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _seconds(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
