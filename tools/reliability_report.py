"""Runs the long forms of the tests of reliability and writes what they have seen to results/reliability.md.

    .venv/bin/python -m tools.reliability_report

It takes about forty minutes on 2 CPU cores. To be run from the repository's root, as root or by somebody who may
mount if full disks and read-only directories are to be real ones.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

from ca_jax.launch.machine import describe_machine, describe_versions, summarize_machine
from tests.reliability import campaigns, killing, workload
from tests.reliability.arena import Tally

RESULTS = Path(__file__).resolve().parent.parent / "results" / "reliability.md"
COMMAND = ".venv/bin/python -m tools.reliability_report"
_NUM_ROUNDS = 200
_SEED = 2024
_RATIOS = (None, 1.0, 0.15)  # Of chunks; None: there are none.
Faults = Mapping[tuple[str, str, float | None], tuple[Tally, float]]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=_NUM_ROUNDS, help="of kill -9, over both drivers")
    parser.add_argument("--share", type=float, default=1.0, help="of each campaign's faults")
    parser.add_argument("--output", type=Path, default=RESULTS, help="Markdown file")
    args = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        kills = {driver: _kill(root, driver, args.rounds // len(workload.DRIVERS)) for driver in workload.DRIVERS}
        faults = {
            (kind, driver, ratio): _inject(root, kind, driver, ratio, args.share)
            for ratio in _RATIOS
            for kind in campaigns.CAMPAIGNS
            for driver in workload.DRIVERS
        }
    args.output.write_text(_report(kills, faults, time.monotonic() - began_s), encoding="utf-8")
    print(f"wrote {args.output}")


def _kill(root: Path, driver: str, num_rounds: int) -> killing.Report:
    directory = root / f"kill-{driver}"
    directory.mkdir()
    report = killing.run_rounds(directory, driver, num_rounds, seed=_SEED, compile_cache=root / "xla")
    print(f"kill -9, {driver}: {report}", flush=True)
    return report


def _inject(root: Path, kind: str, driver: str, ratio: float | None, share: float) -> tuple[Tally, float]:
    campaign, num_faults = campaigns.CAMPAIGNS[kind]
    began_s = time.monotonic()
    directory = root / f"{kind}-{driver}-{ratio}".replace(" ", "-")
    tally = campaign(directory, driver, max(1, round(share * num_faults / len(workload.DRIVERS))), _SEED, ratio)
    seconds = time.monotonic() - began_s
    print(f"{kind}, {driver}, chunks at {ratio}, {seconds:.0f} s: {tally}", flush=True)
    return tally, seconds


def _report(kills: Mapping[str, killing.Report], faults: Faults, seconds: float) -> str:
    machine, versions = describe_machine(), describe_versions()
    measured = (
        f"Measured by `{COMMAND}` on {summarize_machine(machine)} ({machine['os']}), {machine['date'][:10]}, in "
        f"{seconds / 60:.0f} minutes. "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    )
    kill_rows = [[label, *(str(read(report)) for report in kills.values())] for label, read in _KILL_ROWS.items()]
    parts = [
        "# Reliability of the store on SSD",
        _paragraph(measured + "."),
        _paragraph(_INTRODUCTION),
        "## kill -9 under load",
        _paragraph(_ON_KILLING),
        _table(["", *kills], kill_rows),
        "## Injected faults under concurrent turns",
        _paragraph(_ON_FAULTS),
        _faults_table(faults, None),
        _paragraph(_ON_REASONS),
        "## The same with contexts of chunks",
        _paragraph(_ON_CHUNKS),
        "All of the chunks' tokens computed anew:",
        _faults_table(faults, 1.0),
        "15 % of them, where answers are not those of one pass, and are not compared:",
        _faults_table(faults, 0.15),
        "## Two engines on one directory",
        _paragraph(_ON_TWO_ENGINES),
    ]
    return "\n\n".join(parts) + "\n"


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


_INTRODUCTION = """
The engine serves a tiny random Llama (3 layers, fp32) over a store of a few hundred blocks. Every answer is held
against one pass over the whole conversation that knows no store: a token that is not the likeliest there is wrong.
"""
_ON_KILLING = """
A process serves eight conversations, four at a time, in less DRAM and SSD than they need; some are rewound, dropped or
closed, some answers cut short; half of the turns have a context of chunks, all of whose tokens are computed anew. It is
killed at a random moment, at times while it starts, and starts again on what it left. Before and after each change of
the catalog it says so on a pipe. After each kill, on a copy of the directory: the catalog says exactly what was told to
be durable, block tables, token ids, seals and conversations alike, and of a change that was under way all or nothing;
an engine loses no session, loads each of them from SSD to its last stored token, and answers rightly; each chunk that
is stored is that of its tokens computed alone; used bytes, free list and catalog agree, and the catalog's own check
finds nothing; no file and no block is left that no session holds, unless the catalog knows no session. A round where
any of that is not so ends the run.
"""
_ON_FAULTS = """
Six conversations, whose KV leaves DRAM as soon as it is on SSD, so that turns read it from there. Damage to blocks is
done while two of them answer; then the others take a turn beside them, every fourth time after a restart. All other
faults meet turns of all six in parallel. Where the catalog stalls, its reads or its commits begin and do not end while
turns run; a stall of commits counts as one fault. A wave whose counters name another reason, or another number, ends
the run.
"""
_ON_REASONS = """
A fault of a block is one block of one conversation; the one file of raw blocks is cut for all that lie behind. `miss`:
a load that served nothing, followed by a recompute. `flush`: KV that did not get to SSD; what was there stays. `absent`
is what a start with another catalog, or other weights, must find. A catalog that is overwritten may go unnoticed, where
its pages are in memory or empty.
"""
_ON_CHUNKS = """
Each turn has a context of two of six chunks, which are stored like conversations; blocks of two chunks are damaged in
each wave too. A chunk that cannot be read is computed in its place, and stored anew for later turns, which find it
absent until then. After each campaign every chunk that the store serves is held against the same tokens computed alone:
it is that, all of it, or nothing.
"""
_ON_TWO_ENGINES = """
The second is refused with `CatalogLockedError`, which names the process that has the directory, whether that is its own
or another and whichever driver it asks for; the first goes on. The directory is free as soon as its process is gone, by
SIGKILL too (`tests/reliability/test_two_engines.py`).
"""


def _counts(counter: collections.Counter[str]) -> str:
    return " · ".join(f"{name} {number}" for name, number in sorted(counter.items())) or "none"


def _faults_table(faults: Faults, ratio: float | None) -> str:
    """Of the campaigns at one ratio."""
    head = ["fault", "driver", "faults", "answers", "wrong tokens", "failed requests"]
    head += [] if ratio is None else ["chunks loaded", "chunks missed"]
    tallies = {(kind, driver): tally for (kind, driver, its_ratio), (tally, _) in faults.items() if its_ratio == ratio}
    total = Tally()
    for tally in tallies.values():
        total.add(tally)
    rows = [[kind, driver, *_cells(tally, ratio), _counts(tally.reasons)] for (kind, driver), tally in tallies.items()]
    return _table([*head, "counted as"], [*rows, ["**all**", "", *_cells(total, ratio), ""]])


_KILL_ROWS = {
    "rounds": lambda r: r.rounds,
    "killed during": lambda r: _counts(r.killed_at),
    "turns of the victims": lambda r: r.turns,
    "durable changes of the catalog": lambda r: _counts(r.changes),
    "changes cut short: found old or new": lambda r: _counts(r.in_flight),
    "sessions loaded after a restart": lambda r: r.sessions_checked,
    "their tokens": lambda r: r.tokens_checked,
    "chunks on SSD, checked": lambda r: r.chunks_checked,
    "answers compared": lambda r: r.answers,
    "wrong tokens": lambda r: r.wrong_tokens,
    "rounds that left blocks of nobody": lambda r: r.rounds_with_unheld_blocks,
    "such blocks, all reclaimed": lambda r: r.unheld_blocks,
    "leftover files, all removed": lambda r: r.leftover_files,
    "seconds a round": lambda r: f"{r.seconds / r.rounds:.1f}",
}


def _cells(tally: Tally, ratio: float | None) -> list[str]:
    wrong = tally.wrong_tokens if ratio in (None, 1.0) else "-"
    chunks = [] if ratio is None else [tally.loaded_chunks, tally.missed_chunks]
    return [*map(str, [tally.faults, tally.answers, wrong, tally.failed_requests, *chunks])]


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    main()
