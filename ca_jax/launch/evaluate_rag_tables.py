"""A report on prompts made of chunks as a table to read, on a terminal or in Markdown.

Not here: what it holds (`evaluation.rag_rows`, `evaluate_run`), figures (`evaluate_rag_plot`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table

from ca_jax.evaluation.rag_schema import TIMED_FIGURES
from ca_jax.launch.evaluate_run import Report
from ca_jax.launch.evaluate_tables import number, percent

Row = Mapping[str, Any]
Columns = tuple[tuple[str, Callable[[Row], str]], ...]

SMALL_MODEL_REMARK = (
    "F1 and ROUGE-L are of short answers by a model that may be small: one of 135M answers few of these questions, by "
    "full recompute too. KL divergence and top-1 agreement say more of how close a method is to it."
)
"""Said below every table of answers."""


def print_report(report: Report, console: rich.console.Console) -> None:
    """Prints a report as a table, with what was asked, what it says, and the machine and versions it ran on."""
    table = rich.table.Table(title=title_of(report), box=rich.box.SIMPLE_HEAD, title_justify="left")
    columns = columns_of(report)
    for nth, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="right" if nth else "left", overflow="fold")
    for row in report["rows"]:
        table.add_row(*(cell(row) for _, cell in columns))
    console.print(table)
    for remark in remarks_of(report):
        console.print(remark, highlight=False)
    for name in ("machine", "versions"):
        told = ", ".join(f"{key} {value}" for key, value in report[name].items() if value not in (None, {}))
        console.print(f"[bold]{name}[/bold]  {told}", highlight=False)


def to_markdown(report: Report) -> str:
    """The table of a report in Markdown, with its title and remarks."""
    columns = columns_of(report)
    lines = [[heading.replace("\n", " ") for heading, _ in columns], ["---"] * len(columns)]
    lines += [[cell(row) for _, cell in columns] for row in report["rows"]]
    table = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([f"{title_of(report)}:", "", *table, "", *remarks_of(report)]) + "\n"


def title_of(report: Report) -> str:
    """What was asked, in one line."""
    chunking, figure = report["config"]["chunking"], report["config"].get("figure")
    data = "prompts made of recorded conversations" if chunking["data"] is None else _name(chunking["data"])
    what = report["task"] if figure is None else f"figure {figure}"
    return (
        f"{what}, {data}, {report['model']} in {report['dtype']}: {num_items_of(report)} items, up to "
        f"{chunking['num_chunks']} chunks of up to {chunking['chunk_tokens']:,} tokens"
    )


def num_items_of(report: Report) -> int:
    """Items of a report."""
    return max(row["num_items"] for row in report["rows"])


def remarks_of(report: Report) -> list[str]:
    """What a table does not say by itself."""
    if report["task"] == "blend_gate":
        return [verdict(report)]
    remarks = []
    if report["config"]["figure"] in TIMED_FIGURES:
        load = report["machine"]["load_1m"]
        remarks.append(
            f"TTFT: medians of {report['config']['repeats']} turns of each of up to {report['config']['timed_items']} "
            f"items; processes that ran beside it when it began: {'unknown' if load is None else f'{load:.1f}'} (mean "
            "of a minute)."
        )
    if any(row.get("f1") is not None for row in report["rows"]):
        remarks.append(SMALL_MODEL_REMARK)
    return remarks


def verdict(report: Report) -> str:
    """What a gate says."""
    passing = [row for row in report["rows"] if row["passes"]]
    bounds = [
        form.format(report["config"][name])
        for name, form in (("max_kl_share", "{:.4g} of full reuse's"), ("max_kl", "{:.4g} nats"))
        if report["config"][name] is not None
    ]
    wanted = f"KL to full recompute at most {' and '.join(bounds)}, with its confidence interval"
    if not passing:
        tried = ", ".join(f"{row['ratio']:.4g}" for row in report["rows"])
        return f"no: {wanted}, is kept by no ratio of {tried}"
    least = min(passing, key=lambda row: row["ratio"])
    return f"yes: {wanted}, is kept from ratio {least['ratio']:.4g} on, {least['selection']}"


def columns_of(report: Report) -> Columns:
    """Heading and form of each column of a report."""
    figure = report["config"].get("figure")
    return _COLUMNS[report["task"] if figure is None else f"figure {figure}"]


def interval(value: Sequence[float] | None, form: str = ".3f") -> str:
    """Its ends; a dash for none."""
    return "-" if value is None else f"{value[0]:{form}} to {value[1]:{form}}"


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


_TTFT: Columns = (
    ("cached\ntokens", lambda row: number(row["cached_tokens"], ",.0f")),
    ("computed\nanew", lambda row: number(row["recomputed_tokens"], ",.0f")),
    ("TTFT, s", lambda row: number(row["ttft_s"])),
    ("quartiles", lambda row: interval(row["ttft_quartiles"])),
    ("speedup", lambda row: "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"),
)

_COLUMNS: dict[str, Columns] = {
    "rag": (
        ("method", lambda row: str(row["name"])),
        ("computed\ntokens", lambda row: number(row["computed_tokens"], ",.0f")),
        ("KL, nats", lambda row: number(row["mean_kl"], ",.4f")),
        ("95 %", lambda row: interval(row["kl_interval"], ".4f")),
        ("of full\nreuse's", lambda row: number(row["kl_share"], ".2f")),
        ("above hkvd\n95 %", lambda row: interval(row["kl_above_hkvd_interval"], "+.4f")),
        ("same\ntop-1", lambda row: percent(row["same_top1"])),
        ("attention\ndeviation", lambda row: number(row["attention_deviation"], ",.2f")),
        ("F1", lambda row: number(row["f1"])),
        ("95 %", lambda row: interval(row["f1_interval"])),
        ("less full\nrecompute's, 95 %", lambda row: interval(row["f1_above_recompute_interval"], "+.3f")),
        ("ROUGE-L", lambda row: number(row["rouge_l"])),
    ),
    "blend_gate": (
        ("ratio", lambda row: f"{row['ratio']:.4g}"),
        ("selection", lambda row: str(row["selection"]) if row["ratio"] else "full reuse"),
        ("computed\ntokens", lambda row: number(row["computed_tokens"], ",.0f")),
        ("KL, nats", lambda row: number(row["mean_kl"], ",.4f")),
        ("95 %", lambda row: interval(row["kl_interval"], ".4f")),
        ("of full\nreuse's", lambda row: number(row["kl_share"], ".2f")),
        ("same\ntop-1", lambda row: percent(row["same_top1"])),
        ("above the share,\nupper bound", lambda row: number(row["share_excess"], "+.4f")),
        ("above the bound,\nupper bound", lambda row: number(row["kl_excess"], "+.4f")),
        ("passes", lambda row: "yes" if row["passes"] else "no"),
    ),
    "figure 6": (
        ("selection", lambda row: str(row["selection"])),
        ("ratio", lambda row: f"{row['ratio']:.4g}"),
        ("attention\ndeviation", lambda row: number(row["attention_deviation"])),
        ("95 %", lambda row: interval(row["interval"])),
        ("of full\nreuse's", lambda row: number(row["share"], ".2f")),
        ("KL, nats", lambda row: number(row["mean_kl"], ",.4f")),
    ),
    "figure 7": (
        ("layer", lambda row: f"{row['layer']}"),
        ("tokens", lambda row: f"{row['num_tokens']:,}"),
        *(
            (f"{percentile} %", lambda row, at=percentile: number(row["percentiles"][at], ",.2f"))
            for percentile in (10, 50, 85, 90, 95, 99, 100)
        ),
        ("of all deviation,\ntop 10 %", lambda row: percent(row["top_10_share"])),
        ("top 15 %", lambda row: percent(row["top_15_share"])),
    ),
    **dict.fromkeys(
        ("figure 12", "figure 16"),
        (
            ("method", lambda row: str(row["name"])),
            *_TTFT,
            ("KL, nats", lambda row: number(row["mean_kl"], ",.4f")),
            ("same\ntop-1", lambda row: percent(row["same_top1"])),
            ("F1", lambda row: number(row["f1"])),
            ("ROUGE-L", lambda row: number(row["rouge_l"])),
        ),
    ),
    "figure 15": (
        ("method", lambda row: str(row["name"])),
        ("chunks", lambda row: f"{row['num_chunks']} of {row['chunk_tokens']:,}"),
        *_TTFT,
    ),
    "figure 17": (
        ("method", lambda row: str(row["name"])),
        ("storage", lambda row: row["storage"] + (" GB/s" if row["storage"][0].isdigit() else "")),
        *_TTFT,
    ),
    "figure 8": (
        ("layers", lambda row: f"{row['layer']} and {row['layer'] + 1}"),
        ("rank\ncorrelation", lambda row: number(row["correlation"])),
        ("95 %", lambda row: interval(row["interval"])),
    ),
}
