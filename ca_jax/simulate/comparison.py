"""One workload under several policies, and without a store, on the same simulated server.

Not here: the server (simulator), the paper's set-ups (paper), tables and plots (launch).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ca_jax.simulate.config import BELADY, ServerConfig, StoreSizes
from ca_jax.simulate.results import SimCounts
from ca_jax.simulate.simulator import Server
from ca_jax.simulate.workload import SimSession, num_turns, stored_tokens
from ca_jax.storage.placement.policy import EVICTION_POLICIES

RECOMPUTE = "recompute"
"""No store: every history is computed again."""
POLICIES = (*EVICTION_POLICIES, BELADY)
"""Whom there is to compare."""
_PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """What became of a workload under one policy. Shares are in [0, 1]."""

    policy: str
    """One of `POLICIES`, or `RECOMPUTE`."""
    num_turns: int
    """Counted ones: those behind the warm-up."""
    hit_rate: float
    """Of turns with a history: found KV of it."""
    hit_rate_of_all: float
    """Of all turns."""
    dram_share: float
    """Of hits: in DRAM when they could run."""
    cached_share: float
    """Of tokens of histories: loaded."""
    prefill_s: float
    """Of all turns, stalls included."""
    prefill_saved: float
    """Share of the prefill seconds of recomputing that was saved."""
    stall_s: float
    """Of those, waiting for loads."""
    gpu_s: float
    """The devices were busy."""
    elapsed_s: float
    """From the first counted turn to the end."""
    ttft_mean_s: float
    """From when a turn came."""
    ttft_percentiles_s: dict[str, float]
    """Likewise: `p50`, `p90`, `p99`."""
    saved_bytes: float
    """Handed to the store."""


def compare_policies(
    config: ServerConfig,
    store: StoreSizes,
    policies: Sequence[str],
    sessions: Sequence[SimSession],
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> list[PolicyResult]:
    """Serves the same sessions without a store, and with one under each policy.

    Args:
      config: of the server; its store is not looked at.
      store: how large, for all policies.
      policies: of `POLICIES`.
      sessions: in order of arrival.
      progress: told of a policy, its turns begun, and all of them.

    Returns:
      Recomputing first, then the policies as given.

    Raises:
      ValueError: an unknown policy, no session, or a store that the largest session does not fit in.
    """
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}; got {', '.join(unknown)}")
    if not sessions:
        raise ValueError("there must be at least one session, got none")
    check_capacity(config, store, sessions)
    total = num_turns(sessions)
    results: list[PolicyResult] = []
    for policy in (RECOMPUTE, *policies):
        sizes = dataclasses.replace(store, eviction_policy=policy) if policy != RECOMPUTE else None

        def begun(done: int, policy: str = policy) -> None:
            progress(policy, done, total)

        counts = Server(dataclasses.replace(config, store=sizes)).serve(sessions, begun)
        progress(policy, total, total)
        baseline_s = results[0].prefill_s if results else counts.prefill_s
        results.append(_result(policy, counts, baseline_s))
    return results


def check_capacity(config: ServerConfig, store: StoreSizes, sessions: Sequence[SimSession]) -> None:
    """Raises ValueError unless the largest session fits in DRAM, through which all KV goes."""
    largest = max(sessions, key=stored_tokens)
    num_tokens = min(stored_tokens(largest), config.model.window)
    wanted = num_tokens * config.model.token_bytes
    if store.dram_bytes < wanted:
        raise ValueError(
            f"dram_bytes must be at least {wanted / 1e9:.3g} GB, the {num_tokens} tokens of session "
            f"{largest.session_id!r}; got {store.dram_bytes / 1e9:.3g} GB"
        )


def working_set_bytes(config: ServerConfig, sessions: Sequence[SimSession]) -> float:
    """KV of all sessions, each as large as it comes to be."""
    window = config.model.window
    return sum(min(stored_tokens(session), window) for session in sessions) * config.model.token_bytes


def _result(policy: str, counts: SimCounts, baseline_s: float) -> PolicyResult:
    ttft_s = counts.ttft_s or [0.0]
    return PolicyResult(
        policy=policy,
        num_turns=counts.num_turns,
        hit_rate=counts.hit_rate,
        hit_rate_of_all=counts.hit_rate_of_all,
        dram_share=counts.dram_share,
        cached_share=counts.cached_share,
        prefill_s=counts.prefill_s,
        prefill_saved=1 - counts.prefill_s / baseline_s if baseline_s else 0.0,
        stall_s=counts.stall_s,
        gpu_s=counts.gpu_s,
        elapsed_s=counts.end_s - counts.begin_s,
        ttft_mean_s=float(np.mean(ttft_s)),
        ttft_percentiles_s={f"p{each}": float(np.percentile(ttft_s, each)) for each in _PERCENTILES},
        saved_bytes=counts.saved_bytes,
    )
