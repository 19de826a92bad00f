"""Writes results/blend.md: what of CacheBlend's evaluation was measured here, the paper's numbers beside ours.

    .venv/bin/python -m tools.blend_page

What it reads was written by `make blend`: results/blend/*.json by the evaluation, results/bench_blend.json and
results/bench_blend_throughput.json by the benchmark. The words are results/blend/notes.md: its sections `## ttft`,
`## throughput`, `## quality`, `## gate` and `## 6` and so on come behind their tables, all others before and after, as
they stand. What was not measured is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.evaluate import tables as evaluate_tables
from benchmarks.tables import summarize_machine
from tools.pages import Report, assemble, read_json, read_notes, table, write_page

RATIO = 0.15
"""Share of tokens that the paper computes anew, and the summary is of."""
REPORTS = {
    "bench_blend": "Time to the first token",
    "bench_blend_throughput": "Throughput: a stream of questions whose chunks come again",
    "blend/quality_512": "Quality with chunks of 512 tokens",
    "blend/quality_256": "Quality with chunks of 256 tokens",
    "blend/gate": "The gate: which ratio is close enough",
    "blend/figure_6": "Figure 6: attention deviation by ratio",
    "blend/figure_7": "Figure 7: how KV deviation is distributed over tokens",
    "blend/figure_8": "Figure 8: rank correlation of KV deviation between layers",
    "blend/figure_12": "Figure 12: quality and time to the first token",
    "blend/figure_15": "Figure 15: number and length of chunks",
    "blend/figure_16": "Figure 16: recompute ratio",
    "blend/figure_17": "Figure 17: speed of the storage",
}
"""Files, without their suffix, and what each is a section of."""
PAPER = {
    "bench_blend": "TTFT 2.2 to 3.3 times lower than with full recompute (Mistral-7B, Yi-34B, Llama-70B on A40s).",
    "bench_blend_throughput": "2.8 to 5 times the throughput at the same TTFT (figure 14); up to 5 times that of full "
    "recompute and 3.3 times that of prefix caching (section 7).",
    "blend/quality_512": "F1 and ROUGE-L at most 0.02 below full recompute; F1 0.1 to 0.2 above full reuse.",
    "blend/figure_6": "The deviation falls as more tokens are computed anew, most with the first few, those of the "
    "highest KV deviation.",
    "blend/figure_7": "About 10 to 15 % of the tokens deviate much more than the others.",
    "blend/figure_8": "Consistently high from layer to layer.",
    "blend/figure_12": "TTFT 2.2 to 3.3 times lower than with full recompute, F1 and ROUGE-L at most 0.02 lower.",
    "blend/figure_15": "The reduction is similar at all numbers and lengths of chunks.",
    "blend/figure_16": "With 5 to 18 % computed anew at most 0.002 below full recompute in F1 or ROUGE-L, and TTFT 4.1 "
    "to 6.6 times lower, 3.4 to 6.1 times lower than with prefix caching (Yi-34B).",
    "blend/figure_17": "TTFT lower from RAM and from slower disks; the slower, the less is between CacheBlend and full "
    "reuse.",
}
"""What the paper says of it."""
_PLOTS = {"bench_blend": "blend/ttft.png", "bench_blend_throughput": "blend/throughput.png"}
_NOTES = {
    "bench_blend": "ttft",
    "bench_blend_throughput": "throughput",
    "blend/quality_512": "quality",
    "blend/gate": "gate",
}


def main() -> None:
    """See the module."""
    write_page(__doc__, "blend.md", page)


def page(results: Path) -> str:
    """The page of a directory of results.

    Raises:
      ValueError: a report is not what its name says, or lacks what the page shows.
    """
    notes = read_notes(results / "blend" / "notes.md")
    return make_page(notes, read(results), {str(path.relative_to(results)) for path in results.glob("blend/*.png")})


def read(results: Path) -> dict[str, Report]:
    """The reports that are there, by the names in `REPORTS`.

    Raises:
      ValueError: one is not what its name says.
    """
    paths = {name: results / f"{name}.json" for name in REPORTS}
    reports = {name: read_json(path) for name, path in paths.items() if path.exists()}
    for name, report in reports.items():
        _check(name, report)
    return reports


def make_page(notes: Mapping[str, str], reports: Mapping[str, Report], plots: Iterable[str]) -> str:
    """The page.

    Args:
      notes: sections of words, by title.
      reports: what was measured, by the names in `REPORTS`.
      plots: figures that are there, by their path from the page.

    Raises:
      ValueError: a report lacks what a table or the summary needs.
    """
    drawn = set(plots)
    parts = [
        (_NOTES.get(name, name.rpartition("_")[2]), title, _section(name, title, reports.get(name), drawn))
        for name, title in REPORTS.items()
    ]
    head = ("", "## In short", "", *table(("what", "paper", "ours"), summary(reports)))
    commands = ["", "## Commands", "", "`make blend` runs all of these; where each ran:", ""]
    for report in reports.values():
        versions = ", ".join(f"{package} {version}" for package, version in report["versions"].items() if version)
        commands.append(f"- `{report['command']}`: {report['machine']['date'][:10]}, {_place(report)}; {versions}")
    return assemble(notes, head, parts, "\n".join([*commands, ""]))


def _section(name: str, title: str, report: Report | None, drawn: set[str]) -> Iterator[str]:
    if name in PAPER:
        yield from (f"The paper: {PAPER[name]}", "")
    if report is None:
        yield "Not measured here."
        return
    yield from _of_report(name, report)
    if (plot := _PLOTS.get(name, f"{name}.png")) in drawn:
        yield from ("", f"![{title}]({plot})")


def summary(reports: Mapping[str, Report]) -> Iterable[tuple[str, str, str]]:
    """What is wanted, what the paper has of it, and what was measured here, of what was.

    Raises:
      ValueError: a report has no row of `RATIO`, or of what it is compared with.
    """
    if "bench_blend" in reports:
        rows = reports["bench_blend"]["rows"]
        prefix = _row(rows, "bench_blend", mode="prefix")
        tiers = list(dict.fromkeys(row["tier"] for row in rows if row["recompute_ratio"] is not None))
        for tier in tiers:
            row = _row(rows, "bench_blend", mode="blend", recompute_ratio=RATIO, tier=tier)
            what = f"TTFT from {tier}, {RATIO:.0%} computed anew: times lower than full recompute"
            over_prefix = f"{prefix['ttft_s'] / row['ttft_s']:.2f}"
            yield what, "2.2 to 3.3", f"{row['speedup']:.2f}"
            yield "the same: times lower than prefix caching", "3.4 to 6.1 (5 to 18 %)", over_prefix
            yield "the same: TTFT over its own compute with nothing to load", "-", f"{row['over_ideal']:.2f}"
    if "bench_blend_throughput" in reports:
        for row in reports["bench_blend_throughput"]["rows"]:
            if row["mode"] == "blend":
                size = f"DRAM of {row['dram_share']:.0%} and SSD of {row['ssd_share']:.0%} of all chunks"
                yield f"turns a second over full recompute, {size}", "2.8 to 5", _times(row["speedup"])
                yield "the same: over prefix caching", "up to 3.3", _times(row["speedup_over_prefix"])
    for tokens in (512, 256):
        if (name := f"blend/quality_{tokens}") not in reports:
            continue
        rows = reports[name]["rows"]
        hkvd = _row(rows, name, method="blend", ratio=RATIO, selection="hkvd")
        others = [row for row in rows if row is not hkvd and (row["method"], row["ratio"]) == ("blend", RATIO)]
        reuse, recompute = (_row(rows, name, method=method) for method in ("reuse", "recompute"))
        for row in (hkvd, *others):
            what = f"chunks of {tokens} tokens, {RATIO:.0%} computed anew, {row['selection']}"
            yield f"{what}: KL to full recompute, share of full reuse's", "-", f"{row['kl_share']:.2f}"
            if (evaluate_tables.recompute_f1(reports[name]) or 0) >= evaluate_tables.MIN_F1:
                yield "the same: F1 above full reuse", "0.1 to 0.2", _less(row["f1"], reuse["f1"])
                yield "the same: F1 above full recompute", "-0.02 to 0", _less(row["f1"], recompute["f1"])
    if "blend/gate" in reports:
        yield "the gate", "-", evaluate_tables.verdict(dict(reports["blend/gate"]))


def _of_report(name: str, report: Report) -> Iterable[str]:
    yield f"{report['model']} in {report['dtype']}, {_place(report)}."
    yield ""
    try:
        to_markdown = tables.to_markdown if "suite" in report else evaluate_tables.to_markdown
        yield to_markdown(dict(report)).rstrip()
    except KeyError as error:
        raise ValueError(f"{name}.json must have rows with {error.args[0]}, got none") from error


def _check(name: str, report: Report) -> None:
    missing = [
        key for key in ("model", "dtype", "machine", "versions", "command", "config", "rows") if key not in report
    ]
    if missing or not report["rows"]:
        raise ValueError(f"{name}.json must have rows and what made them, got no {', '.join(missing) or 'rows'}")
    if name.startswith("bench_"):
        found, wanted = report.get("suite"), name.removeprefix("bench_")
    elif name == "blend/gate":
        found, wanted = report.get("task"), "blend_gate"
    else:
        number = name.rpartition("figure_")[2]
        found, wanted = report["config"].get("figure"), int(number) if number.isdecimal() else None
    if found != wanted:
        raise ValueError(f"{name}.json must be a report of {wanted}, got one of {found}")


def _row(rows: Sequence[Report], name: str, **wanted: Any) -> Report:
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if not found:
        raise ValueError(f"{name}.json must have a row of {wanted}, got none")
    return found[0]


def _place(report: Report) -> str:
    load = report.get("startup", {}).get("other_load_share")
    beside = "" if load is None else f", {load:.0%} of it busy with something else just before"
    return summarize_machine(report["machine"]) + beside


def _times(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _less(value: float | None, other: float | None) -> str:
    return "not measured" if value is None or other is None else f"{value - other:+.3f}"


if __name__ == "__main__":
    main()
