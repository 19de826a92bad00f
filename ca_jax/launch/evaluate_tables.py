"""A report of the evaluation as a table to read.

Not here: what it holds (`evaluation.schema`, `evaluate_run`), a page of many reports (`evaluate_report`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import rich.box
import rich.console
import rich.table

from ca_jax.launch.evaluate_run import Report

Row = Mapping[str, Any]


def print_report(report: Report, console: rich.console.Console) -> None:
    """Prints a report as a table, with what was compared, and the machine and versions it ran on."""
    comparison, rows = report["config"]["comparison"], report["rows"]
    data = rows[0].get("text", rows[0].get("data"))
    table = rich.table.Table(
        title=f"{report['task']}, {data}, {report['model']} in {report['dtype']}: window {comparison['window']:,}, "
        f"steps of {comparison['step_tokens']:,}",
        box=rich.box.SIMPLE_HEAD,
        title_justify="left",
    )
    columns = COLUMNS[report["task"]]
    for heading, _ in columns:
        table.add_column(heading, justify="left" if heading == "method" else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    console.print(table)
    for name in ("machine", "versions"):
        told = ", ".join(f"{key} {value}" for key, value in report[name].items() if value not in (None, {}))
        console.print(f"[bold]{name}[/bold]  {told}", highlight=False)


def number(value: float | None, form: str = ",.3f") -> str:
    """A number in that form; a dash for none."""
    return "-" if value is None else format(value, form)


def with_error(value: float | None, error: float | None, form: str = ",.2f") -> str:
    """A number and its standard error."""
    if value is None:
        return "-"
    return number(value, form) if error is None else f"{number(value, form)} ± {number(error, form.removeprefix('+'))}"


def percent_interval(interval: tuple[float, float] | None, form: str = ".1f") -> str:
    """An interval of shares, in percent."""
    return "-" if interval is None else f"{100 * interval[0]:{form}} to {100 * interval[1]:{form}}"


def percent(value: float | None, form: str = ".1f") -> str:
    """A share in percent."""
    return "-" if value is None else f"{100 * value:{form}}%"


def gap(row: Row) -> str:
    """How far a perplexity is above that of `tt`, with its error."""
    if row["gap_to_tt"] is None:
        return "-"
    if row["gap_stderr"] is None:
        return percent(row["gap_to_tt"], "+.2f")
    return f"{100 * row['gap_to_tt']:+,.2f}% ± {100 * row['gap_stderr']:.2f}"


def _seconds(row: Row) -> str:
    return number(row["seconds"], ",.0f")


def _recomputed(row: Row) -> str:
    """Tokens that were computed anew at overflows, and the share of those that stayed."""
    told, kept = number(row["recomputed_tokens"], ",.0f"), (row["mean_kept_tokens"] or 0) * row["num_truncations"]
    return f"{told} ({percent(row['recomputed_tokens'] / kept)})" if kept else told


COLUMNS: dict[str, tuple[tuple[str, Callable[[Row], str]], ...]] = {
    "ppl": (
        ("method", lambda row: str(row["name"])),
        ("perplexity", lambda row: number(row["perplexity"])),
        (
            "after\noverflow",
            lambda row: with_error(row["perplexity_after_overflow"], row["stderr"], ",.3f"),
        ),
        ("above tt", gap),
        ("tokens", lambda row: f"{row['tokens']:,}"),
        ("overflows", lambda row: f"{row['num_truncations']:,}"),
        ("kept,\nmean", lambda row: number(row["mean_kept_tokens"], ",.0f")),
        ("recomputed\nof kept", _recomputed),
        ("s", _seconds),
        ("tokens/s", lambda row: number(row["tokens_per_s"], ",.0f")),
    ),
    **dict.fromkeys(
        ("longeval", "mmlu"),
        (
            ("method", lambda row: str(row["name"])),
            ("questions", lambda row: f"{row['num_items']:,}"),
            ("accuracy", lambda row: percent(row["accuracy"])),
            ("95 %", lambda row: percent_interval(row["interval"])),
            ("less tt's", lambda row: percent(row["difference_to_tt"], "+.1f")),
            ("95 %", lambda row: percent_interval(row["difference_interval"], "+.1f")),
            ("p\n(McNemar)", lambda row: number(row["mcnemar_p"], ".2g")),
            ("same\nanswer", lambda row: percent(row["same_answers"])),
            ("logprobs\noff by", lambda row: number(row["logprob_difference"])),
            ("overflows", lambda row: number(row["num_truncations"], ".1f")),
            ("s", _seconds),
        ),
    ),
    "agreement": (
        ("method", lambda row: str(row["name"])),
        ("places", lambda row: f"{row['num_places']:,}"),
        ("same first\ntoken as tt", lambda row: percent(row["same_first"])),
        ("95 %", lambda row: percent_interval(row["same_first_interval"])),
        ("same\nanswer", lambda row: f"{percent(row['same_answer'])} of {row['answer_tokens']} tokens"),
        ("95 %", lambda row: percent_interval(row["same_answer_interval"])),
        ("same\nprefix", lambda row: percent(row["mean_same_prefix"])),
        ("KL from tt\nnats", lambda row: with_error(row["mean_kl"], row["kl_stderr"], ".4f")),
        ("overflows", lambda row: f"{row['num_truncations']:,}"),
        ("s", _seconds),
    ),
}
"""Heading and form of each column, by task."""
