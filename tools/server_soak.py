"""Many clients at once against one server, some of which misbehave: wrong answers, memory, time to the first token.

    .venv/bin/python -m tools.server_soak --json_out=results/server/soak.json --plot_out=results/server/soak.png

Not here: what the clients do (`tests.server.soak`), what must hold (`tests.server.test_soak`).
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import multiprocessing
import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.tables import summarize_machine
from ca_jax.launch.machine import describe_machine, describe_versions
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
    found, rss, seconds = _run(args.clients, args.turns, args.seed)
    row = {
        **{"clients": args.clients, "seed": args.seed, **figures(found, rss, seconds)},
        "command": " ".join(["python -m tools.server_soak", *sys.argv[1:]]),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }
    print(json.dumps(row, indent=1))
    print(*found.failures[:5], *found.wrong[:5], sep="\n")
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(row, indent=1) + "\n")
    if args.plot_out is not None:
        _plot(args.plot_out, found, rss, f"{args.clients} clients, {summarize_machine(row['machine'])}")
    sys.exit(bool(found.failures or found.wrong))


def _run(num_clients: int, num_turns: int, seed: int) -> tuple[soak.Report, list[tuple[float, int]], float]:
    """What came of a run, resident bytes of this process by seconds since the start, and seconds of it.

    Clients are another process than the server, so that memory is the server's alone.
    """
    rss: list[tuple[float, int]] = []
    process, spawned = psutil.Process(), multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as directory,
        sk.running(**soak.limits(directory)) as server,
        concurrent.futures.ProcessPoolExecutor(1, spawned) as pool,
    ):
        report = pool.submit(soak.Report).result()  # It has begun and imported by then.
        body_bytes = server.state.config.max_body_bytes
        crowd = soak.Crowd(server.url, body_bytes, num_clients, -(-num_turns // num_clients), seed)
        started_s = time.perf_counter()
        path = Path(directory) / "talked"
        talking = pool.submit(_talk, crowd, report, path)
        while not talking.done():
            rss.append((time.perf_counter() - started_s, process.memory_info().rss))
            concurrent.futures.wait((talking,), timeout=0.25)
        talking.result()
        seconds = time.perf_counter() - started_s
        rss.append((seconds, process.memory_info().rss))
        report, all_asked = pickle.loads(path.read_bytes())  # What this takes is not the server's.
    soak.check_all(all_asked, report)
    return report, rss, seconds


def _talk(crowd: soak.Crowd, report: soak.Report, path: Path) -> None:
    path.write_bytes(pickle.dumps(crowd.talk(report)))


def figures(report: soak.Report, rss: list[tuple[float, int]], seconds: float) -> dict[str, Any]:
    """What came of a run, in numbers alone."""
    ttft = sorted(report.ttft_s)
    later = rss[len(rss) // 3 :]  # What is allocated once has been by then.
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
        "rss_mib": rss[-1][1] / 2**20,
        "rss_slope_mib_per_1000_turns": slope * seconds / max(report.num_turns, 1) * 1000 / 2**20,
        "seconds": seconds,
    }


def _plot(path: Path, found: soak.Report, rss: list[tuple[float, int]], title: str) -> None:
    figure = new_figure(8, 5)
    memory, first = figure.subplots(1, 2)
    memory.plot([at for at, _ in rss], [size / 2**20 for _, size in rss], color=BLUE)
    memory.set(xlabel="seconds", ylabel="resident memory of the server [MiB]", ylim=(0, None))
    ordered = sorted(found.ttft_s)
    first.plot(ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))], color=VERMILION)
    first.set(xlabel="time to the first token [s]", ylabel="share of answers", xscale="log", ylim=(0, 1))
    figure.suptitle(title)
    write_figure(figure, path, grid="both")


if __name__ == "__main__":
    main()
