"""Runs the long forms of the tests of reliability and writes what they have seen to results/reliability.md.

    .venv/bin/python -m tools.reliability_report

The words are results/reliability/notes.md.

It takes twenty to forty minutes on 2 CPU cores. To be run from the repository's root, as root or by somebody who may
mount if full disks and read-only directories are to be real ones.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from ca_jax.launch.machine import describe_machine, describe_versions
from tests.reliability import campaigns, killing, workload
from tests.reliability.arena import Tally
from tools.pages import RESULTS, assemble, place, read_notes, table

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
    parser.add_argument("--output", type=Path, default=RESULTS / "reliability.md", help="Markdown file")
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
    args.output.write_text(_page(kills, faults, time.monotonic() - began_s), encoding="utf-8")
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


def _page(kills: Mapping[str, killing.Report], faults: Faults, seconds: float) -> str:
    machine, versions = describe_machine(), describe_versions()
    made = f"`{COMMAND}`, {seconds / 60:.0f} minutes: {place({'machine': machine, 'versions': versions})}."
    kill_rows = [[label, *(str(read(report)) for report in kills.values())] for label, read in _KILL_ROWS.items()]
    exact = ["All of the chunks' tokens computed anew:", "", *_faults_table(faults, 1.0), ""]
    partly = ["15 % of them, where answers are not those of one pass, and are not compared:", ""]
    parts = [
        ("kill", "kill -9 under load", table(["", *kills], kill_rows)),
        ("faults", "Injected faults under concurrent turns", _faults_table(faults, None)),
        ("chunks", "The same with contexts of chunks", [*exact, *partly, *_faults_table(faults, 0.15)]),
    ]
    return assemble(read_notes(RESULTS / "reliability" / "notes.md"), ["", made], parts)


def _counts(counter: collections.Counter[str]) -> str:
    return " · ".join(f"{name} {number}" for name, number in sorted(counter.items())) or "none"


def _faults_table(faults: Faults, ratio: float | None) -> list[str]:
    """Of the campaigns at one ratio."""
    head = ["fault", "driver", "faults", "answers", "wrong tokens", "failed requests"]
    head += [] if ratio is None else ["chunks loaded", "chunks missed"]
    tallies = {(kind, driver): tally for (kind, driver, its_ratio), (tally, _) in faults.items() if its_ratio == ratio}
    total = Tally()
    for tally in tallies.values():
        total.add(tally)
    rows = [[kind, driver, *_cells(tally, ratio), _counts(tally.reasons)] for (kind, driver), tally in tallies.items()]
    return table([*head, "counted as"], [*rows, ["**all**", "", *_cells(total, ratio), ""]])


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


if __name__ == "__main__":
    main()
