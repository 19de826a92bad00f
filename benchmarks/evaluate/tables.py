"""Reports of evaluations as tables to read, on a terminal or in Markdown.

Not here: what a report holds (the tasks), figures (`plots`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from benchmarks.evaluate.rag import MAX_TOP1_LOSS, TIMED_FIGURES
from benchmarks.evaluate.rag_methods import RECOMPUTE, Method
from benchmarks.tables import make_markdown
from ca_jax.launch.script import make_table, note

Report = Mapping[str, Any]
"""task, model, dtype, machine, versions, command, config, seconds, rows, items; JSON types only.

`config` and `rows` have the fields of the task's config and row (its module); what items hold is said at
`Evaluation`.
"""
Row = Mapping[str, Any]
Columns = tuple[tuple[str, Callable[[Row], str]], ...]

_PREFIX = Method(kind="prefix").name
MIN_F1 = 0.1
"""Where full recompute's own answers score less, scores of answers compare nothing and are left out."""


def print_report(report: Report, console: rich.console.Console) -> None:
    """Prints a report as a table, with what was asked, what it says, and the machine and versions it ran on."""
    console.print(make_table(*_cells(report), title=title_of(report)))
    for remark in remarks_of(report):
        note(console, remark, None)
    for name in ("machine", "versions"):
        told = ", ".join(f"{key} {value}" for key, value in report[name].items() if value not in (None, {}))
        note(console, f"{name}  {told}", None)


def to_markdown(report: Report) -> str:
    """The table of a report in Markdown, with its title and remarks."""
    table = make_markdown(*_cells(report))
    return "\n".join([f"{title_of(report)}:", "", *table, "", *remarks_of(report)]) + "\n"


def _cells(report: Report) -> tuple[list[str], list[list[str]]]:
    columns = columns_of(report)
    headings = [f">{heading}" if nth else heading for nth, (heading, _) in enumerate(columns)]
    return headings, [[cell(row) for _, cell in columns] for row in report["rows"] if _says(report, row)]


def _says(report: Report, row: Row) -> bool:
    """Whether a row compares something: not where all that it has are answers, and those are left out."""
    only_answers = report["task"] == "rag" and row.get("mean_kl", 0) is None and not _compares_answers(report)
    return not found_nothing(row) and not (only_answers and report["config"].get("figure") is None)


def _compares_answers(report: Report) -> bool:
    return (recompute_f1(report) or 0) >= MIN_F1


def found_nothing(row: Row) -> bool:
    """Whether a baseline was measured that found none of what it was to reuse: it is a recompute by another name."""
    return row.get("name") == _PREFIX and row.get("cached_tokens") == 0


def recompute_f1(report: Report) -> float | None:
    """Mean F1 of the answers of full recompute; None where none were scored."""
    scores = [row["f1"] for row in report["rows"] if row.get("name") == RECOMPUTE.name and row.get("f1") is not None]
    return max(scores, default=None)


def title_of(report: Report) -> str:
    """What was asked, in one line."""
    config, rows, by = report["config"], report["rows"], f"{report['model']} in {report['dtype']}"
    if "comparison" in config:
        sizes = config["comparison"]
        data = rows[0].get("text", rows[0].get("data"))
        return f"{report['task']}, {data}, {by}: window {sizes['window']:,}, steps of {sizes['step_tokens']:,}"
    if report["task"] == "kv_gate":
        sizes = f"{config['behind_tokens']:,} tokens behind {config['history_tokens']:,} that were coded"
        return f"kv_gate, {Path(config['data']).name}, {by}: {rows[0]['windows']} windows, {sizes}"
    chunking, figure = config["chunking"], config.get("figure")
    data = "prompts made of recorded conversations" if chunking["data"] is None else Path(chunking["data"]).name
    what = report["task"] if figure is None else f"figure {figure}"
    return (
        f"{what}, {data}, {by}: {num_items_of(report)} items, up to {chunking['num_chunks']} chunks of up to "
        f"{chunking['chunk_tokens']:,} tokens"
    )


def num_items_of(report: Report) -> int:
    """Items of a report on prompts made of chunks."""
    return max(row["num_items"] for row in report["rows"])


def remarks_of(report: Report) -> list[str]:
    """What a table does not say by itself."""
    if report["task"] == "blend_gate":
        return [verdict(report)]
    if report["task"] == "kv_gate":
        return [kv_verdict(report)]
    config, remarks = report["config"], []
    if config.get("max_loss") is not None:
        remarks.append(repair_verdict(report))
    if config.get("figure") in TIMED_FIGURES:
        load = report["machine"]["load_1m"]
        remarks.append(
            f"TTFT: medians of {config['repeats']} turns of each of up to {config['timed_items']} items; processes "
            f"that ran beside it when it began: {'unknown' if load is None else f'{load:.1f}'} (mean of a minute)."
        )
    if (score := recompute_f1(report)) is not None and score < MIN_F1:
        remarks.append(
            f"Scores of answers are left out: full recompute's own F1 is {score:.3f}, and under {MIN_F1} they compare "
            "nothing."
        )
    if any(map(found_nothing, report["rows"])):
        remarks.append(f"Left out: {_PREFIX}, which found nothing stored.")
    return remarks


def verdict(report: Report) -> str:
    """What a gate says."""
    passing = [row for row in report["rows"] if row["passes"]]
    bounds = [
        form.format(report["config"][name])
        for name, form in (
            ("max_top1_loss", "at most {:.4g} of next tokens other than full recompute's"),
            ("max_kl_share", "KL to full recompute at most {:.4g} of full reuse's"),
            ("max_kl", "KL to full recompute at most {:.4g} nats"),
        )
        if report["config"].get(name) is not None
    ] or [f"at most {MAX_TOP1_LOSS:.4g} of next tokens other than full recompute's"]
    wanted = f"{' and '.join(bounds)}, with its confidence interval"
    if not passing:
        tried = ", ".join(f"{row['ratio']:.4g}" for row in report["rows"])
        return f"no: {wanted}, is kept by no ratio of {tried}"
    least = min(passing, key=lambda row: row["ratio"])
    return f"yes: {wanted}, is kept from ratio {least['ratio']:.4g} on, {least['selection']}"


def kv_verdict(report: Report) -> str:
    """What the gate of coded KV says."""
    wanted = f"perplexity at most {percent(report['config']['max_loss'], '.3g')} higher, with its confidence interval"
    passing = [row for row in report["rows"] if row["passes"]]
    if not passing:
        return f"no: {wanted}, is kept by none of {', '.join(row['name'] for row in report['rows'])}"
    least = min(passing, key=lambda row: row["bits"])
    return f"yes: {wanted}, is kept by {least['name']}, {least['times_smaller']:.1f} times smaller than bfloat16"


def repair_verdict(report: Report) -> str:
    """What a bound on what overflow costs says."""
    most = percent(report["config"]["max_loss"], ".3g")
    wanted = f"perplexity at most {most} above tt's" if report["task"] == "ppl" else f"at most {most} fewer right"
    wanted += ", with its confidence interval"
    tried = [row for row in report["rows"] if row["passes"] is not None]
    passing = [row for row in tried if row["passes"]]
    if not passing:
        return f"no: {wanted}, is kept by none of: {'; '.join(row['name'] for row in tried)}"
    least = min(passing, key=lambda row: row["repair_ratio"] if row["method"] == "ca" else 1)
    return f"yes: {wanted}, is kept by: {least['name']}"


def columns_of(report: Report) -> Columns:
    """Heading and form of each column of a report."""
    figure = report["config"].get("figure")
    what = report["task"] if figure is None else f"figure {figure}"
    return COLUMNS[what] + (ANSWER_COLUMNS.get(what, ()) if _compares_answers(report) else ())


def number(value: float | None, form: str = ",.3f") -> str:
    """A number in that form; a dash for none."""
    return "-" if value is None else format(value, form)


def with_error(value: float | None, error: float | None, form: str = ",.2f") -> str:
    """A number and its standard error."""
    if value is None:
        return "-"
    return number(value, form) if error is None else f"{number(value, form)} ± {number(error, form.removeprefix('+'))}"


def percent(value: float | None, form: str = ".1f") -> str:
    """A share in percent."""
    return "-" if value is None else f"{100 * value:{form}}%"


def interval(value: Sequence[float] | None, form: str = ".3f", unit: float = 1) -> str:
    """Its ends, times a unit; a dash for none."""
    return "-" if value is None else f"{unit * value[0]:{form}} to {unit * value[1]:{form}}"


def gap(row: Row) -> str:
    """How far a perplexity is above that of `tt`, with its error."""
    if row["gap_to_tt"] is None:
        return "-"
    if row["gap_stderr"] is None:
        return percent(row["gap_to_tt"], "+.2f")
    return f"{100 * row['gap_to_tt']:+,.2f}% ± {100 * row['gap_stderr']:.2f}"


def _recomputed(row: Row) -> str:
    """Tokens that were computed anew at overflows, and the share of those that stayed."""
    told, kept = number(row["recomputed_tokens"], ",.0f"), (row["mean_kept_tokens"] or 0) * row["num_truncations"]
    return f"{told} ({percent(row['recomputed_tokens'] / kept)})" if kept else told


def _of(form: str, name: str) -> Callable[[Row], str]:
    """A cell with the field of that name: as text, or as a number, percentage or interval in that form."""

    def cell(row: Row) -> str:
        value = row[name]
        if form.startswith("%"):
            return percent(value, form[1:])
        if form.startswith("to"):
            return interval(value, form.lstrip("to%"), 100 if "%" in form else 1)
        return number(value, form) if form else str(value)

    return cell


def _columns(*columns: tuple[str, str, str] | tuple[str, Callable[[Row], str]]) -> Columns:
    return tuple((each[0], each[1] if len(each) == 2 else _of(each[2], each[1])) for each in columns)


_TTFT = (
    ("cached\ntokens", "cached_tokens", ",.0f"),
    ("computed\nanew", "recomputed_tokens", ",.0f"),
    ("TTFT, s", "ttft_s", ",.3f"),
    ("quartiles", "ttft_quartiles", "to.3f"),
    ("speedup", lambda row: "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"),
)
_METHOD, _OVERFLOWS, _SECONDS = (
    ("method", "name", ""),
    ("overflows", "num_truncations", ",.0f"),
    ("s", "seconds", ",.0f"),
)
_KL, _SAME_TOP1 = ("KL, nats", "mean_kl", ",.4f"), ("same\ntop-1", "same_top1", "%.1f")
_COMPUTED, _KL_SHARE = ("computed\ntokens", "computed_tokens", ",.0f"), ("of full\nreuse's", "kl_share", ".2f")
_KL_INTERVAL, _F1, _ROUGE_L = ("95 %", "kl_interval", "to.4f"), ("F1", "f1", ",.3f"), ("ROUGE-L", "rouge_l", ",.3f")

COLUMNS: dict[str, Columns] = {
    "ppl": _columns(
        _METHOD,
        ("perplexity", "perplexity", ",.3f"),
        ("after\noverflow", lambda row: with_error(row["perplexity_after_overflow"], row["stderr"], ",.3f")),
        ("above tt", gap),
        ("tokens", "tokens", ","),
        _OVERFLOWS,
        ("kept,\nmean", "mean_kept_tokens", ",.0f"),
        ("recomputed\nof kept", _recomputed),
        _SECONDS,
        ("tokens/s", "tokens_per_s", ",.0f"),
    ),
    **dict.fromkeys(
        ("longeval", "mmlu"),
        _columns(
            _METHOD,
            ("questions", "num_items", ","),
            ("accuracy", "accuracy", "%.1f"),
            ("95 %", "interval", "to%.1f"),
            ("less tt's", "difference_to_tt", "%+.1f"),
            ("95 %", "difference_interval", "to%+.1f"),
            ("p\n(McNemar)", "mcnemar_p", ".2g"),
            ("same\nanswer", "same_answers", "%.1f"),
            ("logprobs\noff by", "logprob_difference", ",.3f"),
            ("overflows", "num_truncations", ".1f"),
            _SECONDS,
        ),
    ),
    "agreement": _columns(
        _METHOD,
        ("places", "num_places", ","),
        ("same first\ntoken as tt", "same_first", "%.1f"),
        ("95 %", "same_first_interval", "to%.1f"),
        ("same\nanswer", lambda row: f"{percent(row['same_answer'])} of {row['answer_tokens']} tokens"),
        ("95 %", "same_answer_interval", "to%.1f"),
        ("same\nprefix", "mean_same_prefix", "%.1f"),
        ("KL from tt\nnats", lambda row: with_error(row["mean_kl"], row["kl_stderr"], ".4f")),
        _OVERFLOWS,
        _SECONDS,
    ),
    "rag": _columns(
        _METHOD,
        _COMPUTED,
        _KL,
        _KL_INTERVAL,
        _KL_SHARE,
        ("above hkvd\n95 %", "kl_above_hkvd_interval", "to+.4f"),
        _SAME_TOP1,
        ("attention\ndeviation", "attention_deviation", ",.2f"),
    ),
    "blend_gate": _columns(
        ("ratio", "ratio", ".4g"),
        ("selection", lambda row: str(row["selection"]) if row["ratio"] else "full reuse"),
        _COMPUTED,
        _KL,
        _KL_INTERVAL,
        _KL_SHARE,
        _SAME_TOP1,
        ("next tokens lost,\nabove the bound", lambda row: number(row.get("top1_excess"), "+.4f")),
        ("above the share,\nupper bound", "share_excess", "+.4f"),
        ("above the bound,\nupper bound", "kl_excess", "+.4f"),
        ("passes", lambda row: "yes" if row["passes"] else "no"),
    ),
    "kv_gate": _columns(
        ("KV at rest", "name", ""),
        ("bits a number", "bits", ".2f"),
        ("smaller than\nbfloat16", lambda row: f"{row['times_smaller']:.2f}x"),
        ("perplexity", "loss", "%+.3f"),
        ("95 %", "loss_interval", "to%+.3f"),
        ("KL, nats", "mean_kl", ".5f"),
        ("95 %", "kl_interval", "to.5f"),
        ("same likeliest\nnext token", "same_top1", "%.2f"),
        ("same greedy\ntokens", "same_greedy_tokens", ".1f"),
        ("same greedy\nanswers", "same_greedy", "%.0f"),
        ("coded,\nGB/s", "encode_gb_s", ".2f"),
        ("decoded,\nGB/s", "decode_gb_s", ".2f"),
        ("passes", lambda row: "yes" if row["passes"] else "no"),
    ),
    "figure 6": _columns(
        ("selection", "selection", ""),
        ("ratio", "ratio", ".4g"),
        ("attention\ndeviation", "attention_deviation", ",.3f"),
        ("95 %", "interval", "to.3f"),
        ("of full\nreuse's", "share", ".2f"),
        _KL,
    ),
    "figure 7": _columns(
        ("layer", "layer", ""),
        ("tokens", "num_tokens", ","),
        *(
            (f"{percentile} %", lambda row, at=percentile: number(row["percentiles"][at], ",.2f"))
            for percentile in (10, 50, 85, 90, 95, 99, 100)
        ),
        ("of all deviation,\ntop 10 %", "top_10_share", "%.1f"),
        ("top 15 %", "top_15_share", "%.1f"),
    ),
    "figure 8": _columns(
        ("layers", lambda row: f"{row['layer']} and {row['layer'] + 1}"),
        ("rank\ncorrelation", "correlation", ",.3f"),
        ("95 %", "interval", "to.3f"),
    ),
    **dict.fromkeys(("figure 12", "figure 16"), _columns(_METHOD, *_TTFT, _KL, _SAME_TOP1)),
    "figure 15": _columns(_METHOD, ("chunks", lambda row: f"{row['num_chunks']} of {row['chunk_tokens']:,}"), *_TTFT),
    "figure 17": _columns(
        _METHOD,
        ("storage", lambda row: row["storage"] + (" GB/s" if row["storage"][0].isdigit() else "")),
        *_TTFT,
    ),
}
"""Heading and form of each column, by task or figure."""

ANSWER_COLUMNS: dict[str, Columns] = {
    "rag": _columns(
        _F1,
        ("95 %", "f1_interval", "to.3f"),
        ("less full\nrecompute's, 95 %", "f1_above_recompute_interval", "to+.3f"),
        _ROUGE_L,
        ("have a\nright one", lambda row: percent(row.get("has_answer"))),  # Older reports do not say it.
    ),
    **dict.fromkeys(("figure 12", "figure 16"), _columns(_F1, _ROUGE_L)),
}
"""Columns of how answers score, behind those, where they compare something."""
