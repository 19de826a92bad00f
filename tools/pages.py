"""What the pages of results/ share: their words, their tables, and how both become a page.

Not here: what a page shows (`paper_page`, `blend_page`, `server_page`, `quality_page`).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import make_markdown, summarize_machine

Report = Mapping[str, Any]

RESULTS = Path(__file__).resolve().parent.parent / "results"


def write_page(doc: str | None, name: str, page: Callable[[Path], str]) -> None:
    """Runs a page's script: writes `page(results)` to results/`name`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of what was measured, and of the page")
    results = parser.parse_args().results
    (results / name).write_text(page(results), encoding="utf-8")


def read_json(path: Path) -> Report:
    """A report."""
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    return report


def read_notes(path: Path) -> dict[str, str]:
    """The sections of a Markdown file by their titles of the second level, in order; what is before is under `""`."""
    first, *others = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {"": first.strip()}
    for other in others:
        title, _, body = other.partition("\n")
        found[title.strip()] = body.strip()
    return found


def assemble(
    notes: Mapping[str, str], head: Iterable[str], parts: Iterable[tuple[str, str, Iterable[str]]], tail: str = ""
) -> str:
    """Makes a page: the first words, `head`, a section for each part with its words behind it, all other words, `tail`.

    Args:
      notes: words by title, of `read_notes`.
      head: lines behind the first words.
      parts: of each the title of its words in `notes`, its own title, and its lines.
      tail: Markdown at the end.
    """

    def lines() -> Iterator[str]:
        yield from (notes[""], *head)
        own = {""}
        for note, title, body in parts:
            own.add(note)
            yield from ("", f"## {title}", "", *body)
            if note in notes:
                yield from ("", notes[note])
        for title, words in notes.items():
            if title not in own:
                yield from ("", f"## {title}", "", words)
        yield tail

    return "\n".join(lines())


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; numbers are to the right."""
    first, *others = headings
    return make_markdown([first, *(f">{heading}" for heading in others)], rows)


def place(report: Report) -> str:
    """The machine and the versions that a report was made on."""
    versions = ", ".join(f"{package} {version}" for package, version in report["versions"].items() if version)
    return f"{summarize_machine(report['machine'])}, {report['machine']['date'][:10]}; {versions}"
