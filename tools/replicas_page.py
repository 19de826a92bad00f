"""Writes results/cluster/replicas.md: many replicas in simulated time, of the reports results/cluster/replicas_*.json.

    .venv/bin/python -m tools.replicas_page

The words are results/cluster/replicas_notes.md: its sections `## routings` and so on come behind their tables, the
first lines before and all other sections after them. Commands that made the reports are in them, and on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ca_jax.simulate.fleet import OBJECTS_WRITES, TIERS
from tools.pages import Report, assemble, place, read_json, read_notes, table, write_page

WORKLOADS = {"sharegpt": "ShareGPT", "agents": "coding agents"}
"""Names of workloads in reports' file names, and on the page."""


def main() -> None:
    """See the module."""
    write_page(__doc__, "cluster/replicas.md", page)


def page(results: Path) -> str:
    """The page of a directory of results."""
    folder = results / "cluster"
    reports = {path.stem.removeprefix("replicas_"): read_json(path) for path in sorted(folder.glob("replicas_*.json"))}
    return make_page(read_notes(folder / "replicas_notes.md"), reports)


def make_page(notes: Mapping[str, str], reports: Mapping[str, Report]) -> str:
    """The page of these words, and of reports by workload and, but for `turn`, policy of writing: `agents_idle`.

    Raises:
      ValueError: a report lacks what a table shows.
    """
    try:
        parts = [(name, title, list(lines(reports))) for name, (title, lines) in SECTIONS.items()]
    except KeyError as error:
        raise ValueError(f"replicas_*.json must have {error.args[0]}, got none") from error
    return assemble(notes, (), parts, "\n".join(_commands(reports)))


def _of_workloads(reports: Mapping[str, Report]) -> Iterator[str]:
    rows = []
    for workload, name in WORKLOADS.items():
        report = reports[workload]
        config, fleet = report["config"], report["fleet"]
        server = f"{config['model']} on {config['num_devices']} {config['device']}"
        tiers = f"{config['dram_gb']:g} GB, {config['ssd_gb'] / 1000:g} TB"
        numbers = (f"{report['num_sessions']:,}", f"{report['num_turns']:,}", f"{config['arrival_rate']:g}")
        times = f"{fleet['warmup_s']:g} to {fleet['duration_s']:g}"
        others = (f"{fleet['mtbf_hours']:g}", ", ".join(fleet["scale"]))
        rows.append((name, f"{fleet['num_replicas']:,}", server, tiers, *numbers, times, *others))
    headings = ("workload", "replicas", "each", "DRAM, SSD", "recorded sessions", "their turns", "sessions a second")
    yield from table((*headings, "counted from, to, s", "hours between failures", "scale"), rows)


def _of_routings(reports: Mapping[str, Report]) -> Iterator[str]:
    for workload, name in WORKLOADS.items():
        rows = [(row["routing"], *_numbers(row)) for row in reports[workload]["rows"]]
        yield from (
            f"{name[0].upper()}{name[1:]}, `--objects_write=turn`:",
            "",
            *table(("routing", *_NUMBERS), rows),
            "",
        )


def _of_writes(reports: Mapping[str, Report]) -> Iterator[str]:
    for workload, name in WORKLOADS.items():
        rows = []
        for write in OBJECTS_WRITES:
            report = reports.get(workload if write == "turn" else f"{workload}_{write}")
            for row in report["rows"] if report is not None else ():
                if row["routing"] != "random":
                    rows.append((f"{write}, {row['routing']}", *_numbers(row)))
        yield from (f"{name[0].upper()}{name[1:]}:", "", *table(("written, routing", *_NUMBERS), rows), "")


_NUMBERS = (
    *("DRAM, %", "SSD", "objects", "recomputed", "TTFT p50, s", "p99", "network, GB/s", "objects, requests/s"),
    *("$ an hour", "$ a million tokens", "turns: most over mean", "busy: most over mean", "moved", "failures"),
    *("recomputed for them: turns", "tokens"),
)


def _numbers(row: Report) -> tuple[str, ...]:
    return (
        *(f"{100 * row['shares'][tier]:.2f}" for tier in TIERS),
        *(f"{row['ttft_s'][each]:.3g}" for each in ("p50", "p99")),
        f"{row['network_gb_per_s']:,.1f}",
        f"{row['requests_per_s']:,.0f}",
        f"{row['price_per_hour']:,.0f}",
        f"{row['price_per_million_tokens']:.4f}",
        f"{row['most_turns_over_mean']:.2f}",
        f"{row['most_busy_over_mean']:.2f}",
        f"{row['sessions_moved']:,}",
        f"{row['num_failures']:,}",
        f"{row['failure_turns']:,}",
        f"{row['failure_tokens']:,}",
    )


def _of_prices(reports: Mapping[str, Report]) -> Iterator[str]:
    rows = []
    for workload, name in WORKLOADS.items():
        for row in reports[workload]["rows"]:
            prices = (f"{row['prices_per_hour'][each]:,.2f}" for each in ("puts", "gets", "storage", "transfer"))
            sizes = (f"{row[each] / 1e12:,.1f}" for each in ("read_bytes", "written_bytes"))
            rows.append((f"{name}, {row['routing']}", *sizes, f"{row['num_gets']:,}", f"{row['num_puts']:,}", *prices))
    headings = ("read, TB", "written, TB", "GETs", "PUTs", "$ an hour: PUTs", "GETs", "storage", "transfer")
    yield from table(("workload, routing", *headings), rows)


def _of_restore(reports: Mapping[str, Report]) -> Iterator[str]:
    found = reports["agents"]["restores"]
    sizes = list(dict.fromkeys(row["object_mib"] for row in found))
    rows = []
    for new_tokens in dict.fromkeys(row["new_tokens"] for row in found):
        of_sizes = [row for row in found if row["new_tokens"] == new_tokens]
        times = (f"{1000 * of_sizes[0][name]:,.0f}" for name in ("compute_s", "from_dram_s"))
        ratios = (f"{row['over_dram']:.3f}" for row in of_sizes)
        rows.append((f"{new_tokens:,}", *times, f"{1000 * of_sizes[0]['from_objects_s']:,.0f}", *ratios))
    least = {row["object_mib"]: row["least_new_tokens"] for row in found}
    rows.append(("at most 1.06 from", "", "", "", *(f"{least[size]:,} tokens" for size in sizes)))
    ratios = (f"over DRAM, {size} MiB" for size in sizes)
    yield from table(("new tokens", "compute, ms", "TTFT from DRAM", f"from {sizes[0]} MiB objects", *ratios), rows)


def _commands(reports: Mapping[str, Report]) -> Iterable[str]:
    yield from ("", "## Commands", "")
    for name, report in reports.items():
        turns = sum(row["num_turns"] for row in report["rows"])
        text = f"{turns:,} counted turns in {report['elapsed_s']:,.0f} s"
        yield f"- `{report['command']}`: {name}, {text}; {place(report)}."
    yield ""


SECTIONS: dict[str, tuple[str, Callable[[Mapping[str, Report]], Iterable[str]]]] = {
    "workloads": ("What was served", _of_workloads),
    "routings": ("Routings", _of_routings),
    "writes": ("When KV is written", _of_writes),
    "prices": ("What the objects tier costs", _of_prices),
    "restore": ("One restore, layer by layer", _of_restore),
}
"""Titles and tables, by the titles of their words in the notes."""


if __name__ == "__main__":
    main()
