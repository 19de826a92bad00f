"""Many clients at once against one server, some of which misbehave: wrong answers, memory, time to the first token.

    .venv/bin/python -m tools.server_soak --json_out=results/server/soak.json --plot_out=results/server/soak.png

Not here: what the clients do (`tests.server.soak`), what must hold (`tests.server.test_soak`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ca_jax.launch.machine import describe_machine, describe_versions, summarize_machine
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
        **{"clients": args.clients, "seed": args.seed, **found.figures()},
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


def _plot(path: Path, found: soak.Report, title: str) -> None:
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    memory, first = figure.subplots(1, 2)
    memory.plot([at for at, _ in found.rss], [size / 2**20 for _, size in found.rss], color="#0072B2")
    memory.set(xlabel="seconds", ylabel="resident memory of the server [MiB]", ylim=(0, None))
    ordered = sorted(found.ttft_s)
    first.plot(ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))], color="#D55E00")
    first.set(xlabel="time to the first token [s]", ylabel="share of answers", xscale="log", ylim=(0, 1))
    for axes in (memory, first):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path)


if __name__ == "__main__":
    main()
