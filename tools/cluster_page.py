"""Writes results/cluster.md: what replicas share and what that costs, of the reports beside it.

    .venv/bin/python -m tools.cluster_page

Its words are results/cluster/notes.md. Reports: results/bench_objects.json (`make bench-objects`),
results/bench_objects_link.json (the same with `--objects_gb_s=0.25`), results/cluster/overhead.json and direct.json
(`python -m tools.cluster_overhead`, and that with `--direct`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tools.pages import Report, assemble, place, read_json, read_notes, table, write_page

_SYSTEMS = {"server": "one server", "cluster": "through Ray Serve", "added": "added"}
_TTFT = ("ttft_ssd_s", "ttft_objects_s")
_MEASURED = {"ttft_ms": "TTFT", "whole_ms": "whole answer", "health_ms": "`/health`"}


def main() -> None:
    """See the module."""
    write_page(__doc__, "cluster.md", page)


def page(results: Path) -> str:
    """The page of a directory of results."""
    notes = read_notes(results / "cluster" / "notes.md")
    parts = []
    for name, (title, path, lines) in SECTIONS.items():
        report = read_json(results / path)
        parts.append((name, title, [f"`{report['command']}`: {place(report)}.", "", *lines(report)]))
    return assemble(notes, (), parts)


def _of_takeovers(report: Report) -> Iterator[str]:
    yield from _takeovers(report)
    yield ""
    headings = ("a turn of so many tokens", "published after", "of the engine's thread")
    yield from table(
        headings,
        [
            (f"{row['new_tokens']:,}", f"{1e3 * row['publish_s']:.0f} ms", f"{1e3 * row['bookkeeping_s']:.2f} ms")
            for row in report["rows"]
        ],
    )


def _takeovers(report: Report) -> Iterator[str]:
    headings = ("history + new tokens", "KV", "TTFT, local SSD", "at another replica", "ratio", "of that claiming")
    rows = []
    for row in report["rows"]:
        spread = row["spread"]
        rows.append(
            (
                f"{row['history_tokens']:,} + {row['new_tokens']:,}",
                f"{row['kv_bytes'] / 1e6:.0f} MB",
                *(
                    f"{1e3 * row[name]:.0f} ms {_range(spread, name, 1e3, 0)}"
                    for name in ("ttft_ssd_s", "ttft_objects_s")
                ),
                f"{row['ratio']:.2f} {_range(spread, 'ratio', 1, 2)}",
                f"{1e3 * row['claim_s']:.1f} ms",
                "yes" if row["early"] else "no",
            )
        )
    yield from table((*headings, "begins before all is there"), rows)


def _range(spread: dict[str, list[float]], name: str, scale: float, digits: int) -> str:
    least, largest = spread[name]
    return f"({scale * least:.{digits}f}-{scale * largest:.{digits}f})"


def _of_overhead(report: Report) -> Iterator[str]:
    yield f"{report['requests']} requests to each, in turns; ms: median (first and third quartile)."
    yield ""
    rows = []
    for what, name in _MEASURED.items():
        quartiles = (report[what][system] for system in _SYSTEMS)
        rows.append((name, *(f"{median:.1f} ({first:.1f}-{third:.1f})" for first, median, third in quartiles)))
    yield from table(("ms", *_SYSTEMS.values()), rows)


SECTIONS: dict[str, tuple[str, str, Callable[[Report], Iterator[str]]]] = {
    "takeovers": ("A turn at another replica", "bench_objects.json", _of_takeovers),
    "link": ("The same over a link", "bench_objects_link.json", _takeovers),
    "overhead": ("What Ray Serve adds", "cluster/overhead.json", _of_overhead),
    "direct": ("The same, the replica answering the client", "cluster/direct.json", _of_overhead),
}
"""By the title of its words: what a section is called, its report, and its lines."""

if __name__ == "__main__":
    main()
