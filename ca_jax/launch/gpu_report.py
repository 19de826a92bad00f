"""What the accelerator's benchmark leaves: one JSON object, and a page of tables in Markdown.

Not here: measuring, figures to look at (`gpu_plot`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ca_jax.launch.gpu_schema import Floor, GpuBenchConfig, Probes, SectionResult
from ca_jax.launch.machine import summarize_machine

Report = dict[str, Any]
"""machine, versions, command, config, budget_s, seconds, probes, sections; JSON types only."""


def make_report(
    config: GpuBenchConfig,
    results: Sequence[SectionResult],
    probes: Probes | None,
    *,
    machine: Mapping[str, Any],
    versions: Mapping[str, Any],
    command: str,
    budget_s: float,
) -> Report:
    """Everything there is to say of a run, whether it has ended or not. Without an accelerator there are no floors.

    Args:
      config: what was asked for.
      results: sections so far.
      probes: of the device; None before they were measured.
      machine: where.
      versions: of what ran.
      command: that does it again.
      budget_s: seconds after which no section was begun.
    """
    return {
        "suite": "gpu",
        "machine": dict(machine),
        "versions": dict(versions),
        "command": command,
        "config": dataclasses.asdict(config),
        "budget_s": budget_s,
        "seconds": sum(result.seconds for result in results),
        "probes": None if probes is None else dataclasses.asdict(probes),
        "sections": [_section(result, has_floors=machine["platform"] != "cpu") for result in results],
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
        lines += ["## Floors", "", *_table([_floor_row(floor) for floor in floors])]
    elif report["machine"]["platform"] == "cpu":
        lines += ["Without an accelerator: this shows that it runs, and says nothing of one.", ""]
    for section in report["sections"]:
        lines += [f"## {section['title']}", ""]
        if section["status"] != "done":
            lines += [f"**{section['status'].capitalize()}.**", ""]
        if section["rows"]:
            lines += _table(section["rows"])
        lines += [f"- {note}" for note in section["notes"]]
        lines += [f"- took {section['seconds']:.0f} s", ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(result: SectionResult, has_floors: bool) -> dict[str, Any]:
    return {
        "name": result.name,
        "title": result.title,
        "status": result.status,
        "seconds": result.seconds,
        "rows": list(result.findings.rows),
        "floors": [_floor(floor) for floor in result.findings.floors if has_floors],
        "notes": list(result.findings.notes),
    }


def _floor(floor: Floor) -> dict[str, Any]:
    return {**dataclasses.asdict(floor), "is_met": floor.is_met}


def _floor_row(floor: Mapping[str, Any]) -> dict[str, Any]:
    sign = "at most" if floor["is_ceiling"] else "at least"
    return {
        "what": floor["what"],
        "found": f"{floor['value']:.3g}",
        "wanted": f"{sign} {floor['bound']:g}",
        "met": "yes" if floor["is_met"] else "**no**",
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table, its columns those of the first row; times in milliseconds."""
    columns = list(rows[0])
    headings = [f"{name.removesuffix('_s')} (ms)" if _is_time(name) else name for name in columns]
    lines = [_line(heading.replace("_", " ") for heading in headings), _line("---" for _ in columns)]
    lines += [_line(_cell(name, row[name]) for name in columns) for row in rows]
    return [*lines, ""]


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _is_time(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if _is_time(name):
        return f"{value * 1e3:.2f}"
    if name.endswith("change"):
        return f"{value:+.0%}"
    return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
