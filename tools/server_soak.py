"""Many clients at once against one server, some of which misbehave: wrong answers, memory, time to the first token.

    .venv/bin/python -m tools.server_soak --json_out=results/server/soak.json --plot_out=results/server/soak.png

Not here: what the clients do (`tests.server.soak`), what must hold (`tests.server.test_soak`).
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from ca_jax.launch.machine import describe_machine, describe_versions, summarize_machine
from ca_jax.launch.plots import BLUE, VERMILION, new_figure, write_figure
from tests import server_kit as sk
from tests.server import soak


def main() -> None:
    """See the module. Exits with 1 where an answer was wrong or a client was told what it should not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5000, help="of all clients together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json_out", type=Path)
    parser.add_argument("--plot_out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, sk.running(**soak.limits(directory)) as server:
        found = soak.soak(server, args.clients, args.turns, args.seed)
    row = {
        **{"clients": args.clients, "seed": args.seed, **figures(found)},
        "command": " ".join(["python -m tools.server_soak", *sys.argv[1:]]),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }
    print(json.dumps(row, indent=1))
    print(*found.failures[:5], *found.wrong[:5], sep="\n")
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(row, indent=1) + "\n")
    if args.plot_out is not None:
        _plot(args.plot_out, found, f"{args.clients} clients, {summarize_machine(row['machine'])}")
    sys.exit(bool(found.failures or found.wrong))


def figures(report: soak.Report) -> dict[str, Any]:
    """What came of a run, in numbers alone."""
    ttft = sorted(report.ttft_s)
    later = report.rss[len(report.rss) // 3 :]  # What is allocated once has been by then.
    slope = statistics.linear_regression(*zip(*later, strict=True)).slope if len(later) > 2 else 0.0
    return {
        "turns": report.num_turns,
        "left": report.num_left,
        "refused": report.num_refused,
        "busy": sum(report.refusals),
        "refusals_per_answer": sum(report.refusals) / len(report.refusals),
        "refusals_by_answers": dict(sorted(collections.Counter(report.refusals).items())),
        "wrong": len(report.wrong),
        "ties": report.num_ties,
        "failures": len(report.failures),
        "cached_share": report.cached_tokens / max(report.prompt_tokens, 1),
        "ttft_p50_s": ttft[len(ttft) // 2],
        "ttft_p99_s": ttft[int(len(ttft) * 0.99)],
        "rss_mib": report.rss[-1][1] / 2**20,
        "rss_slope_mib_per_1000_turns": slope * report.seconds / max(report.num_turns, 1) * 1000 / 2**20,
        "seconds": report.seconds,
    }


def _plot(path: Path, found: soak.Report, title: str) -> None:
    figure = new_figure(8, 5)
    memory, first = figure.subplots(1, 2)
    memory.plot([at for at, _ in found.rss], [size / 2**20 for _, size in found.rss], color=BLUE)
    memory.set(xlabel="seconds", ylabel="resident memory of the server [MiB]", ylim=(0, None))
    ordered = sorted(found.ttft_s)
    first.plot(ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))], color=VERMILION)
    first.set(xlabel="time to the first token [s]", ylabel="share of answers", xscale="log", ylim=(0, 1))
    figure.suptitle(title)
    write_figure(figure, path, grid="both")


if __name__ == "__main__":
    main()
