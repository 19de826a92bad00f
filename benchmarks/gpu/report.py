"""What the accelerator's benchmark leaves: one JSON object, and a page of tables in Markdown.

Not here: measuring, tables of rows (`benchmarks.tables`), figures to look at (`paper`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.rows import GpuBenchConfig, Probes, SectionResult
from benchmarks.tables import markdown_lines, summarize_machine

Report = dict[str, Any]
"""machine, versions, command, config, budget_s, seconds, probes, sections; JSON types only."""


def make_report(
    config: GpuBenchConfig, results: Sequence[SectionResult], probes: Probes | None, about: Mapping[str, Any]
) -> Report:
    """Everything there is to say of a run, whether it has ended or not. Without an accelerator there are no floors.

    `about` has `machine`, `versions`, `command` and `budget_s`.
    """
    return {
        "suite": "gpu",
        **about,
        "config": dataclasses.asdict(config),
        "seconds": sum(result.seconds for result in results),
        "probes": None if probes is None else dataclasses.asdict(probes),
        "sections": [_section(result, has_floors=about["machine"]["platform"] != "cpu") for result in results],
    }


def to_markdown(report: Report) -> str:
    """The report as a page: floors first, then a table for each section."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version is not None)
    lines = [
        f"# {report['machine']['device']}",
        "",
        f"{summarize_machine(report['machine'])}; {versions}; {report['machine']['date']}. "
        f"Medians of {report['config']['repeats']}; {report['seconds']:.0f} s in all.",
        "",
        f"    {report['command']}",
        "",
    ]
    floors = [floor for section in report["sections"] for floor in section["floors"]]
    if floors:
        lines += ["## Floors", "", *markdown_lines([_floor_row(floor) for floor in floors])]
    elif report["machine"]["platform"] == "cpu":
        lines += ["Without an accelerator: this shows that it runs, and says nothing of one.", ""]
    for section in report["sections"]:
        lines += [f"## {section['title']}", ""]
        if section["status"] != "done":
            lines += [f"**{section['status'].capitalize()}.**", ""]
        if section["rows"]:
            lines += markdown_lines(section["rows"])
        lines += [f"- {note}" for note in section["notes"]]
        lines += [f"- took {section['seconds']:.0f} s", ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(result: SectionResult, has_floors: bool) -> dict[str, Any]:
    section = dataclasses.asdict(result)
    findings = section.pop("findings")
    floors = [{**dataclasses.asdict(floor), "is_met": floor.is_met} for floor in result.findings.floors if has_floors]
    return {**section, **findings, "floors": floors}


def _floor_row(floor: Mapping[str, Any]) -> dict[str, Any]:
    sign = "at most" if floor["is_ceiling"] else "at least"
    return {
        "what": floor["what"],
        "found": f"{floor['value']:.3g}",
        "bound": f"{sign} {floor['bound']:g}",
        "met": "yes" if floor["is_met"] else "**no**",
    }
