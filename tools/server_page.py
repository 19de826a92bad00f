"""Writes results/server.md: what the server was measured to do, of what `tools/server.sh` has left in results/server.

    .venv/bin/python -m tools.server_page

The words are results/server/notes.md: its sections `## overhead`, `## soak` and so on come behind their tables, the
first lines before and all other sections after them. What was not measured is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tools.pages import Report, assemble, place, read_json, read_notes, table, write_page


def main() -> None:
    """See the module."""
    write_page(__doc__, "server.md", page)


def page(results: Path) -> str:
    """The page of a directory of results."""
    paths = {name: results / "server" / f"{name}.json" for name in SECTIONS}
    reports = {name: read_json(path) for name, path in paths.items() if path.exists()}
    return make_page(read_notes(results / "server" / "notes.md"), reports)


def make_page(notes: Mapping[str, str], reports: Mapping[str, Report]) -> str:
    """The page of these words, and of reports by the names in `SECTIONS`.

    Raises:
      ValueError: a report lacks what its table shows.
    """
    parts = [(name, title, _lines(name, reports.get(name))) for name, (title, _) in SECTIONS.items()]
    return assemble(notes, (), parts)


def _lines(name: str, report: Report | None) -> list[str]:
    if report is None:
        return ["Not measured."]
    try:
        return [f"{place(report)}.", "", *SECTIONS[name][1](report)]
    except KeyError as error:
        raise ValueError(f"{name}.json must have {error.args[0]}, got none") from error


def _of_overhead(report: Report) -> Iterable[str]:
    request, token = report["request_ms"], report["stream_token_ms"]
    rows = [
        (
            "a request of one token",
            f"{request['engine']:.2f} ms",
            f"{request['http']:.2f} ms",
            f"**{report['request_overhead_ms']:.2f} ms**",
            "3 ms",
        ),
        (
            f"a token of {report['num_streams']} streams",
            f"{token['engine']:.3f} ms",
            f"{token['http']:.3f} ms",
            f"**{report['stream_token_overhead_ms']:.3f} ms**",
            "0.2 ms",
        ),
    ]
    yield from table(("median", "engine alone", "over HTTP", "HTTP adds", "wanted: under"), rows)


def _of_soak(report: Report) -> Iterable[str]:
    shown = {
        "clients, answers that came whole": f"{report['clients']}, {report['turns']:,}",
        "wrong tokens, against each conversation served alone": f"**{report['wrong']}**",
        "equally likely but for rounding, and drawn otherwise": f"{report['ties']}",
        "sessions lost or mixed up, and other failures": f"**{report['failures']}**",
        "answers left in the middle; requests that are none, or too large, refused": f"{report['left']:,}; "
        f"{report['refused']:,}",
        "429 and come again": f"{report['busy']:,}",
        "tokens of prompts found in the cache": f"{report['cached_share']:.0%}",
        "time to the first token, p50 and p99": f"{report['ttft_p50_s']:.2f} s, {report['ttft_p99_s']:.2f} s",
        "resident memory of the server at the end": f"{report['rss_mib']:.0f} MiB",
        "its slope in the last two thirds": f"{report['rss_slope_mib_per_1000_turns']:+.1f} MiB per 1,000 answers",
        "all of it took": f"{report['seconds']:.0f} s",
    }
    yield from table(("what", "measured"), shown.items())
    yield from ("", "![Memory and time to the first token](server/soak.png)")


def _of_side_channel(report: Report) -> Iterable[str]:
    names = {
        "new": "nobody has cached it",
        "other": "another tenant has cached it",
        "own": "the same tenant has cached it",
    }
    rows = []
    for arm, name in names.items():
        spread, against = report["ttft_ms"][arm], report.get(f"{arm}_vs_new")
        row = [name, f"{spread['median']:.1f} ms", f"{spread['p25']:.1f} to {spread['p75']:.1f}"]
        if against is None:
            row += ["-"] * 4
        else:
            low, high = against["median_difference_ms_95"]
            row.append(f"{against['median_difference_ms']:+.2f} ({low:+.2f} to {high:+.2f}) ms")
            row += [f"{against['mann_whitney_p']:.2g}", f"{against['wilcoxon_p']:.2g}"]
            low, high = against["cliffs_delta_95"]
            row.append(f"{against['cliffs_delta']:+.2f} ({low:+.2f} to {high:+.2f})")
        rows.append(row)
    yield f"{report['model']}, prompts of {report['prompt_tokens']:,} tokens, {report['rounds']} rounds."
    yield ""
    columns = ("TTFT over HTTP", "median", "quartiles", "less that of a new one, same round", "Mann-Whitney p")
    yield from table((*columns, "Wilcoxon p", "Cliff's delta"), rows)


def _of_load(report: Report) -> Iterable[str]:
    yield f"{report['model']}, streamed; what the tools say themselves."
    yield ""
    columns = ("tool, mode", "requests, errors", "tokens/s", "TTFT p50, p99", "between tokens p50, p99")
    rows = [
        (
            f"{run['tool']} {run['version']}, {run['mode'].replace('_', ' ')}",
            f"{run['requests']}, {run['errors']}",
            f"{run['output_tokens_per_s']:.1f}",
            f"{run['ttft_ms_p50']:.0f}, {run['ttft_ms_p99']:.0f} ms",
            f"{run['itl_ms_p50']:.0f}, {run['itl_ms_p99']:.0f} ms",
            f"{run['cached_tokens']:,} of {run['prompt_tokens']:,}",
            "-" if not run["returning_turns"] else f"{run['returning_turns_found']} of {run['returning_turns']}",
        )
        for run in report["runs"]
    ]
    yield from table((*columns, "prompt tokens cached", "later turns that found their history"), rows)


def _of_fuzz(report: Report) -> Iterable[str]:
    rows = [
        (
            name,
            f"{found['cases']:,}",
            ", ".join(f"{status}: {count:,}" for status, count in sorted(found["statuses"].items())),
            str(found["server_errors"]),
            str(found["leaks"]),
            str(len(found["failures"])),
        )
        for name, found in report["rounds"].items()
    ]
    yield f"{report['cases']:,} cases, seed {report['seed']}."
    yield ""
    yield from table(("round", "cases", "answers by status", "5xx", "traces, paths", "not as described"), rows)


SECTIONS: dict[str, tuple[str, Callable[[Report], Iterable[str]]]] = {
    "overhead": ("What HTTP adds", _of_overhead),
    "soak": ("Many clients, some of which misbehave", _of_soak),
    "side_channel": ("Whether a tenant's time tells what another has cached", _of_side_channel),
    "summary": ("Public load generators", _of_load),
    "fuzz": ("Fuzzed", _of_fuzz),
}
"""Files in results/server, without their suffix: the title of each one's section, and what makes its table."""


if __name__ == "__main__":
    main()
