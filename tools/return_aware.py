"""How much prefill `return_aware` saves, beside recency and what cannot be had: whole sessions, one tier, no queue.

    .venv/bin/python tools/return_aware.py --traces=DIR --json_out=results/return_aware.json

DIR has mooncake_conversation_first3000.jsonl, mooncake_synthetic_trace.jsonl and agent_magentic/.

The tier holds a share of the working set, the sum of all sessions' largest contexts. A turn that finds its session's
last context there saves the prefill of as much of it as it begins with; what is told is the share of all prefill time
that returning turns could save, for LLaMA-13B, over samples of the sessions.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ca_jax.simulate.workload import conversation_lengths, poisson_sessions
from ca_jax.storage.placement.orders import LookAhead, TierOrders
from ca_jax.storage.placement.policy import EvictionPolicy, LruPolicy, ReturnAwarePolicy, StoredEntry
from ca_jax.storage.placement.returns import ReturnTimes
from ca_jax.testing.belady import BeladyPolicy
from ca_jax.traces.agents import agent_requests, load_agent_calls
from ca_jax.traces.mooncake import load_mooncake
from ca_jax.traces.requests import Request
from ca_jax.traces.sharegpt import load_sharegpt

CAPACITIES = (0.05, 0.1, 0.25, 0.4)
POLICIES = ("lru", "return_aware", "knows whether", "belady")
_DECODE_S = 0.03  # A token of a ShareGPT answer: its turn ends so much later.
_THINK_S = (0.0, 60.0, 300.0)
_NUM_CONVERSATIONS, _NUM_SESSIONS = 2000, 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What a policy saved of one workload in a tier of one size."""

    workload: str
    """Its name."""
    capacity: float
    """Of the tier, as a share of the working set."""
    policy: str
    """One of `POLICIES`."""
    hits: list[float]
    """Share of returning turns that found their session, of each sample."""
    tokens: list[float]
    """Share of the tokens that returning turns could save."""
    seconds: list[float]
    """Share of their prefill time."""


@dataclasses.dataclass(slots=True, eq=False)
class _Session:
    name: str
    num_tokens: int = 0
    used_s: float = -math.inf
    next_s: float = math.inf


def prefill_flops(num_tokens: int) -> float:
    """Of LLaMA-13B: 2 for each weight and token, and of attention 4 of each layer, head and dimension for each pair."""
    return 2 * 13e9 * num_tokens + 4 * 40 * 40 * 128 * num_tokens**2 / 2


def saved(requests: Sequence[Request], capacity: float, policy_name: str) -> tuple[float, float, float]:
    """The shares of hits, tokens and seconds that a policy saves of a trace, as in `Row`."""
    largest: collections.Counter[str] = collections.Counter()
    for request in requests:
        largest[request.session_id] = max(largest[request.session_id], _context(request))
    num_free = int(capacity * largest.total())
    next_s = _next_arrivals(requests)
    now_s = 0.0
    returns = ReturnTimes(lambda: now_s)
    tier: TierOrders[_Session] = TierOrders(LookAhead(), returns.group)
    sessions: dict[str, _Session] = {}
    policy = _policy(policy_name, sessions, lambda: now_s)
    may_refuse = policy_name not in ("lru", "return_aware")  # To store who has just been served.

    def describe(session: _Session, position: int | None) -> StoredEntry:
        return StoredEntry(
            key=session.name,
            num_blocks=session.num_tokens,
            pinned=False,
            last_used_s=session.used_s,
            created_s=0.0,
            return_rate=returns.rate(returns.group(session.name), session.used_s),
        )

    could, did = np.zeros(3), np.zeros(3)
    for request, after_s in zip(requests, next_s, strict=True):
        key, now_s = request.session_id, request.arrival_s
        session = sessions.setdefault(key, _Session(key))
        returns.came(key)
        if session.num_tokens:
            num_saved = min(session.num_tokens, request.input_tokens)
            worth = np.array([1, num_saved, prefill_flops(num_saved)])
            could += worth
            if key in tier:
                did += worth
                tier.remove(key)
                num_free += session.num_tokens
        returns.left(key)
        session.num_tokens, session.used_s, session.next_s = _context(request), now_s, after_s
        if session.num_tokens > capacity * largest.total():
            continue
        if may_refuse:
            tier.add(key, session)
        lacking = session.num_tokens - num_free
        victims = policy.choose_victims(tier.view(describe), lacking) if lacking > 0 else ()
        if key in victims:
            tier.remove(key)
            continue
        for victim in victims:
            num_free += sessions[victim].num_tokens
            tier.remove(victim)
        if not may_refuse:
            tier.add(key, session)
        num_free -= session.num_tokens
    hits, tokens, seconds = (did / could).tolist()
    return hits, tokens, seconds


def _context(request: Request) -> int:
    return request.input_tokens + request.output_tokens


def _next_arrivals(requests: Sequence[Request]) -> list[float]:
    """When the session of each request comes again."""
    coming: dict[str, float] = {}
    later = []
    for request in reversed(requests):
        later.append(coming.get(request.session_id, math.inf))
        coming[request.session_id] = request.arrival_s
    return later[::-1]


def _policy(name: str, sessions: dict[str, _Session], now_s: Callable[[], float]) -> EvictionPolicy:
    if name == "lru":
        return LruPolicy()
    if name == "return_aware":
        return ReturnAwarePolicy()
    if name == "belady":
        return BeladyPolicy(lambda key: sessions[key].next_s)
    return BeladyPolicy(  # Knows whether, not when: recency among those that come back.
        lambda key: math.inf if sessions[key].next_s == math.inf else now_s() - sessions[key].used_s
    )


def workloads(traces: Path) -> dict[str, list[Request]]:
    """All there are, by name."""
    found = {
        "Mooncake conversation": list(load_mooncake(traces / "mooncake_conversation_first3000.jsonl")),
        "Mooncake synthetic": list(load_mooncake(traces / "mooncake_synthetic_trace.jsonl")),
        "agents": agent_requests(
            load_agent_calls(sorted((traces / "agent_magentic").glob("*.jsonl"))), lambda text: len(text) // 4
        ),
    }
    lengths = conversation_lengths(load_sharegpt(limit=_NUM_CONVERSATIONS), lambda text: len(text) // 4)
    for think_s in _THINK_S:
        found[f"ShareGPT, {think_s:g} s to think"] = _conversations(lengths, think_s)
    return found


def _conversations(lengths: Sequence[Sequence[tuple[int, int]]], think_s: float) -> list[Request]:
    requests = []
    for session in poisson_sessions(lengths, num_sessions=_NUM_SESSIONS, arrival_rate=1.0, think_s=think_s):
        now_s, history = session.arrival_s, 0
        for turn in session.turns:
            now_s += turn.think_s
            requests.append(
                Request(
                    arrival_s=now_s,
                    session_id=session.session_id,
                    input_tokens=history + turn.user_tokens,
                    output_tokens=turn.answer_tokens,
                )
            )
            history += turn.user_tokens + turn.answer_tokens
            now_s += turn.answer_tokens * _DECODE_S
    return sorted(requests, key=lambda request: request.arrival_s)


def sample(requests: Sequence[Request], share: float, seed: int) -> list[Request]:
    """The requests of a share of the sessions."""
    names = sorted({request.session_id for request in requests})
    drawn = np.random.default_rng(seed).random(len(names)) < share
    kept = {name for name, is_kept in zip(names, drawn.tolist(), strict=True) if is_kept}
    return [request for request in requests if request.session_id in kept]


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="Share of the prefill time that returning turns could save")
    for name in ("workload", "capacity", *POLICIES, "return_aware - lru", "least"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for (workload, capacity), group in itertools.groupby(rows, key=lambda row: (row.workload, row.capacity)):
        seconds = {row.policy: row.seconds for row in group}
        gains = [100 * (a - b) for a, b in zip(seconds["return_aware"], seconds["lru"], strict=True)]
        spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
        table.add_row(
            workload,
            f"{capacity:.0%}",
            *(f"{statistics.mean(seconds[policy]):.3f}" for policy in POLICIES),
            f"{statistics.mean(gains):+.2f} ± {spread:.2f}",
            f"{min(gains):+.2f}",
        )
    return table


def main() -> None:
    """Runs all, prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the trace files")
    parser.add_argument("--num_samples", type=int, default=5, help="samples of the sessions, seeded 0, 1, ...")
    parser.add_argument("--share", type=float, default=0.8, help="of the sessions that are in a sample")
    parser.add_argument("--json_out", type=Path, help="where the rows go")
    args = parser.parse_args()
    rows = []
    for name, requests in workloads(args.traces).items():
        samples = [sample(requests, args.share, seed) for seed in range(args.num_samples)]
        for capacity, policy in itertools.product(CAPACITIES, POLICIES):
            hits, tokens, seconds = map(list, zip(*(saved(each, capacity, policy) for each in samples), strict=True))
            rows.append(Row(workload=name, capacity=capacity, policy=policy, hits=hits, tokens=tokens, seconds=seconds))
        Console(stderr=True).print(name)
    Console(width=200 if not sys.stdout.isatty() else None).print(_table(rows))
    if args.json_out is not None:
        text = json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
        args.json_out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
