"""What eviction policies save on traces of agents and of people: results/placement.json, and a table of it.

    .venv/bin/python -m tools.placement --agents=SESSIONS.jsonl.gz --mooncake=TRACE.jsonl --json_out=placement.json

Each workload is served in simulated time, through the engine's scheduler and store, under each policy, with room in
DRAM for a share of all sessions' KV. What counts is the share saved of the prefill seconds that room for everything
saves, and how much of that room a policy needs to save as much as recency does (LPC's measure).

Half of the sessions were used to choose what a policy does; --half says of which half the rows are. A seed draws when
sessions come, or, where a trace says that, which four of five of its sessions do.

Not here: the policies (`ca_jax.storage.placement`), the simulated server (`ca_jax.simulate`).
"""

from __future__ import annotations

import itertools
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from ca_jax.launch import script
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.launch.simulate import SimulateConfig
from ca_jax.simulate import workload
from ca_jax.simulate.config import StoreSizes
from ca_jax.simulate.server import compare_policies, working_set_bytes
from ca_jax.simulate.traces.requests import load_requests

FLAGS = flags.FLAGS
HALVES = "chosen_by", "held"
POLICIES = "lru", "scheduler_aware", "return_aware", "belady"
_EVERYTHING = 1.05  # Of the working set: room for all, and for blocks that are not full.
_SAMPLED = 0.8  # Of the sessions whose times are recorded.


def of_agents(config: SimulateConfig, half: str) -> list[workload.SimSession]:
    """Sessions of coding agents."""
    requests = load_requests("agent_sessions", config.path)
    names = _half(dict.fromkeys(each.session_id for each in requests), half)
    asked = [each for each in requests if each.session_id in names]
    return list(workload.recorded_sessions(asked, **config.coming))


def of_mooncake(config: SimulateConfig, half: str) -> list[workload.SimSession]:
    """Conversations at the times when they came."""
    sessions = workload.trace_sessions(load_requests("mooncake", config.path))
    names = _half([each.session_id for each in sessions], half)
    rng = np.random.default_rng(config.seed)
    return [each for each in sessions if each.session_id in names and rng.random() < _SAMPLED]


def of_sharegpt(config: SimulateConfig, half: str) -> list[workload.SimSession]:
    """Conversations of ShareGPT, of people who think for a minute in the mean."""
    lengths = config.lengths()
    return config.drawn_sessions([lengths[i] for i in sorted(_half(range(len(lengths)), half))])


def _half(names: Any, half: str) -> set[Any]:
    """Every second one."""
    return set(list(names)[HALVES.index(half) :: 2])


WORKLOADS = {"agents": of_agents, "mooncake": of_mooncake, "sharegpt": of_sharegpt}


def config(
    name: str,
    seed: int,
    trace: str | None = None,
    num_devices: int = 8,
    queue_order: str = "arrival",
    resume_error: float | None = None,
) -> SimulateConfig:
    """Who serves a workload, and how its sessions come: agents one a minute, conversations one a second."""
    came: dict[str, dict[str, Any]] = {
        "agents": {"trace_format": "agent_sessions", "num_sessions": 150, "arrival_rate": 1 / 60},
        "mooncake": {"trace_format": "mooncake"},
        "sharegpt": {"num_sessions": 1000, "think_time_s": 60.0},
    }
    node = {"device": "h100", "num_devices": num_devices, "flops_share": 0.5, "model": "llama3-8b"}
    asked = {"seed": seed, "trace": trace, "queue_order": queue_order, "resume_error": resume_error}
    return SimulateConfig(**asked, **node, **came[name])  # type: ignore[arg-type]


def serve(
    name: str,
    asked: SimulateConfig,
    half: str,
    shares: Sequence[float],
    policies: Sequence[str],
    ssd_share: float = 0.0,
) -> list[dict[str, Any]]:
    """Rows of one workload: every policy with room for every share, and room for everything.

    Args:
      ssd_share: room on SSD below that, as a share of all sessions' KV.
    """
    sessions = WORKLOADS[name](asked, half)
    server = asked.trace_server(workload.num_turns(sessions), max(map(workload.stored_tokens, sessions)))
    all_bytes = working_set_bytes(server, sessions)
    rows = []
    for share in (_EVERYTHING, *shares):
        ssd_bytes = 0.0 if share == _EVERYTHING else ssd_share * all_bytes
        store = StoreSizes(dram_bytes=share * all_bytes, ssd_bytes=ssd_bytes, block_tokens=asked.block_tokens)
        named = policies if share != _EVERYTHING else ["lru"]
        for result in compare_policies(server, store, named, sessions)[1:]:
            counts = result.counts
            rows.append(
                {
                    "workload": name,
                    "seed": asked.seed,
                    "half": half,
                    "queue_order": asked.queue_order,
                    "resume_error": asked.resume_error,
                    "policy": "everything" if share == _EVERYTHING else result.policy,
                    "capacity_share": share,
                    "capacity_gb": store.dram_bytes / 1e9,
                    "num_turns": counts.num_turns,
                    "hit_rate": counts.hit_rate,
                    "cached_share": counts.cached_share,
                    "prefill_saved": result.prefill_saved,
                    "ttft_mean_s": counts.ttft_mean_s,
                    "ttft_percentiles_s": counts.ttft_percentiles_s,
                    "device_s": counts.gpu_s,
                    "elapsed_s": counts.elapsed_s,
                }
            )
    most = rows[0]["prefill_saved"]
    return [row | {"saved_of_possible": row["prefill_saved"] / most} for row in rows]


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each workload, share and policy: means over seeds, of the difference to recency the least and largest too."""

    def kind(row: dict[str, Any]) -> tuple[str, str, str, float, str]:
        return row["workload"], row["queue_order"], _said(row), row["capacity_share"], row["policy"]

    of_kind = {key: list(group) for key, group in itertools.groupby(sorted(rows, key=kind), kind)}
    for (name, order, said, share, policy), group in of_kind.items():
        recency = {row["seed"]: row["saved_of_possible"] for row in of_kind.get((name, order, said, share, "lru"), ())}
        gains = [100 * (row["saved_of_possible"] - recency[row["seed"]]) for row in group if row["seed"] in recency]
        yield {
            "workload": name,
            "queue_order": order,
            "resume_error": said,
            "capacity_share": share,
            "policy": policy,
            **{
                field: statistics.mean(row[field] for row in group)
                for field in ("saved_of_possible", "cached_share", "hit_rate", "ttft_mean_s", "device_s")
            },
            "ttft_percentiles_s": {
                name: statistics.mean(row["ttft_percentiles_s"][name] for row in group)
                for name in group[0]["ttft_percentiles_s"]
            },
            "gain_points": [statistics.mean(gains), min(gains), max(gains)] if gains else None,
            "room_of_recency": _room(
                [row for row in rows if (row["queue_order"], _said(row)) == (order, said)], name, policy, share
            ),
        }


def _said(row: dict[str, Any]) -> str:
    """Whether clients say when they will be back, and how far off."""
    return "none" if row["resume_error"] is None else f"{row['resume_error']:g}"


def _room(rows: Sequence[dict[str, Any]], name: str, policy: str, share: float) -> float | None:
    """How much of the room of recency a policy needs to save as much, by straight lines between the sizes tried.

    None where it saves less with all of them, or more with the smallest.
    """
    own = [row for row in rows if row["workload"] == name and row["policy"] in (policy, "everything")]
    shares = sorted({row["capacity_share"] for row in own})
    saved = [
        statistics.mean(row["saved_of_possible"] for row in own if row["capacity_share"] == each) for each in shares
    ]
    wanted = [
        row["saved_of_possible"]
        for row in rows
        if (row["workload"], row["policy"], row["capacity_share"]) == (name, "lru", share)
    ]
    if not wanted or not saved[0] <= statistics.mean(wanted) <= saved[-1]:
        return None
    return float(np.interp(statistics.mean(wanted), saved, shares)) / share


def main(_: Sequence[str]) -> None:
    """See the module."""
    console = script.make_console()
    shares, rows = [float(each) for each in FLAGS.shares], []
    for seed, name in itertools.product(range(FLAGS.seeds), FLAGS.workloads):
        trace = {"agents": FLAGS.agents, "mooncake": FLAGS.mooncake}.get(name)
        for order, said in itertools.product(FLAGS.queue_orders, FLAGS.resume_errors):
            error = None if said == "none" else float(said)
            asked = config(name, seed, trace, FLAGS.num_devices, order, error)
            rows += serve(name, asked, FLAGS.half, shares, FLAGS.policies, FLAGS.ssd_share)
        script.note(console, f"{name}, seed {seed}: done")
    found = list(summary(rows))
    print("\n".join(_table(found)))
    report = {
        "command": shlex.join(["python", "-m", "tools.placement", *sys.argv[1:]]),
        "half": FLAGS.half,
        "summary": found,
        "rows": rows,
    }
    if FLAGS.json_out is not None:
        told = {"machine": describe_machine(), "versions": describe_versions()}
        script.write_json(report | told, Path(FLAGS.json_out))


def _table(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown."""
    yield (
        "| workload | order | said | room | policy | saved of what can be | less recency's, points | "
        "room of recency's | TTFT, s: mean, p50, p99 | device, s |"
    )
    yield "|---|---|---|---:|---|---:|---:|---:|---:|---:|"
    for row in found:
        gain, room = row["gain_points"], row["room_of_recency"]
        told = [
            row["workload"],
            row["queue_order"],
            row["resume_error"],
            f"{100 * row['capacity_share']:g} %",
            row["policy"],
            f"{100 * row['saved_of_possible']:.1f} %",
            "" if gain is None else f"{gain[0]:+.1f} ({gain[1]:+.1f} to {gain[2]:+.1f})",
            "" if room is None else f"{room:.2f}",
            ", ".join(
                f"{each:.2f}" for each in (row["ttft_mean_s"], *(row["ttft_percentiles_s"][p] for p in ("p50", "p99")))
            ),
            f"{row['device_s']:.0f}",
        ]
        yield f"| {' | '.join(told)} |"


if __name__ == "__main__":
    flags.DEFINE_string("agents", None, "Recorded sessions of coding agents, of the format agent_sessions.")
    flags.DEFINE_string("mooncake", None, "A trace of Mooncake's format.")
    flags.DEFINE_enum("half", HALVES[1], HALVES, "Which half of the sessions is served.")
    flags.DEFINE_integer("seeds", 3, "How often each workload is drawn.", lower_bound=1)
    flags.DEFINE_list("shares", ["0.05", "0.1", "0.2", "0.4"], "Rooms, as shares of all sessions' KV.")
    flags.DEFINE_float("ssd_share", 0.0, "Room on SSD below, as a share of all sessions' KV.", lower_bound=0)
    flags.DEFINE_integer("num_devices", 8, "H100 that share the model.", lower_bound=1)
    flags.DEFINE_list("queue_orders", ["arrival"], "Who of those that wait goes first: arrival, shortest.")
    flags.DEFINE_list("resume_errors", ["none"], "Of what clients say of their next turn: none, 0 (exact), 0.5, ...")
    flags.DEFINE_list("policies", list(POLICIES), "Who is evicted.")
    flags.DEFINE_list("workloads", list(WORKLOADS), "What is served.")
    flags.DEFINE_string("json_out", None, "File to write all rows to.")
    script.run(main)
