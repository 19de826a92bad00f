"""A replay, simulated: the same workload in simulated time, with rates measured in the replay.

What decides is the same code; what is compared is what that comes to: hits, and tokens that are prefilled.

Not here: the simulated server (`ca_jax.simulate`).
"""

from __future__ import annotations

import dataclasses
import math

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.kv.rates import PrefillSample
from ca_jax.overflow.config import OverflowConfig
from ca_jax.replay.served import Served
from ca_jax.replay.summary import Summary
from ca_jax.replay.trace_scripts import ReplayError
from ca_jax.replay.workload import Workload
from ca_jax.simulate.config import ServerConfig, StoreSizes
from ca_jax.simulate.fitted import FittedCost
from ca_jax.simulate.machine import SimModel
from ca_jax.simulate.results import SimCounts
from ca_jax.simulate.simulator import Server
from ca_jax.simulate.workload import SimSession, SimTurn

_METHODS = ("ca", "of")
_LINK_BYTES_PER_S = 5e9  # Where the engine has measured none.
_SSD_READ_BYTES_PER_S, _SSD_WRITE_BYTES_PER_S = 1.4e9, 0.7e9  # Of zarr3 in results/bench_store.json.


def measured_cost(served: Served) -> FittedCost:
    """What computing took in a run, each kind of it and in all.

    Raises:
      ValueError: there was no turn, or no decode step by itself.
    """
    prefills = [
        PrefillSample(
            history_tokens=turn.cached_tokens,
            new_tokens=turn.prefill_tokens,
            seconds=max(turn.prefill_s - turn.load_stall_s, 1e-6),
        )
        for turn in served.turns
    ]
    return FittedCost.fit(prefills, served.decode_samples).taking(prefills, served.decode_samples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """A replay beside its simulation."""

    engine_hit_rate: float
    """Returning turns of whose history something was loaded."""
    simulated_hit_rate: float
    """Likewise."""
    hit_rate_points: float
    """The simulation's over the engine's, percentage points."""
    engine_prefill_tokens: int
    """Prefilled."""
    simulated_prefill_tokens: int
    """Likewise."""
    prefill_tokens_ratio: float
    """The simulation's over the engine's."""
    engine_prompt_tokens: int
    """Histories and messages."""
    simulated_prompt_tokens: int
    """Likewise."""
    engine_elapsed_s: float
    """From the beginning to the last token."""
    simulated_elapsed_s: float
    """Likewise."""


def check_simulable(config: EngineConfig, workload: Workload) -> None:
    """Refuses what the simulator does not do as the engine does.

    Raises:
      ReplayError: a turn but a first one comes at a time of its own, a full context is cut otherwise, or sessions share
        what they begin with.
    """
    if config.share_prefixes:
        raise ReplayError(
            "simulate must come with share_prefixes off: simulated sessions have no tokens to be alike by"
        )
    overflow = config.overflow
    if overflow is not None:
        discarder = overflow.token_discarder.name
        if overflow.method not in _METHODS or overflow.whole_turns or discarder != "oldest":
            raise ReplayError(
                f"simulate must have an overflow_method of {', '.join(_METHODS)} that drops the oldest tokens, got "
                f"{overflow.method} that drops {'whole turns' if overflow.whole_turns else discarder}"
            )
    turns = [(turn, session.turns[0]) for session in workload.sessions for turn in session.turns]
    if any(turn.not_before_s > first.not_before_s for turn, first in turns):
        raise ReplayError(
            "simulate must have turns that follow upon answers, got times of the trace's own; give an arrival_rate"
        )


def sim_sessions(workload: Workload) -> list[SimSession]:
    """A workload as the simulator takes it, in order of arrival."""
    sessions = [
        SimSession(
            session_id=f"s{index}",
            arrival_s=session.turns[0].not_before_s,
            turns=tuple(
                SimTurn(
                    user_tokens=len(turn.exchange.message),
                    answer_tokens=turn.exchange.answer_tokens,
                    think_s=turn.think_s,
                )
                for turn in session.turns
            ),
        )
        for index, session in enumerate(workload.sessions)
    ]
    return sorted(sessions, key=lambda session: session.arrival_s)


def server_config(engine: Engine, served: Served, *, warmup_turns: int = 0) -> ServerConfig:
    """The simulated server that is like an engine, as fast as that was in a run."""
    config, model = engine.config, engine.model.config
    layout = kv_layout(engine.model, config)
    sizes = SimModel(
        name=engine.model.name,
        num_params=0.0,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=layout.head_dim,
        window=engine.window,
        dtype_bytes=layout.numpy_dtype.itemsize,
    )
    return ServerConfig(
        model=sizes,
        cost=measured_cost(served),
        link_bytes_per_s=_link_bytes_per_s(engine),
        max_batch_size=config.max_batch_size,
        prefills_block=False,
        store=_store_sizes(engine),
        overflow=config.overflow or OverflowConfig(),
        warmup_turns=warmup_turns,
    )


def simulate(engine: Engine, workload: Workload, served: Served, *, warmup_turns: int = 0) -> SimCounts:
    """Serves a workload in simulated time, as an engine served it."""
    config = server_config(engine, served, warmup_turns=warmup_turns)
    return Server(config).serve(sim_sessions(workload))


def agreement(summary: Summary, counts: SimCounts) -> Agreement:
    """A run beside its simulation."""
    simulated_prefill = counts.prompt_tokens - counts.cached_tokens
    return Agreement(
        engine_hit_rate=summary.hit_rate,
        simulated_hit_rate=counts.hit_rate,
        hit_rate_points=100 * (counts.hit_rate - summary.hit_rate),
        engine_prefill_tokens=summary.prefill_tokens,
        simulated_prefill_tokens=simulated_prefill,
        prefill_tokens_ratio=simulated_prefill / summary.prefill_tokens,
        engine_prompt_tokens=summary.prompt_tokens,
        simulated_prompt_tokens=counts.prompt_tokens,
        engine_elapsed_s=summary.totals.elapsed_s,
        simulated_elapsed_s=counts.end_s - counts.begin_s,
    )


def _link_bytes_per_s(engine: Engine) -> float:
    rates = engine.rates
    measured = math.inf if rates is None else rates.load.bytes_per_s
    return measured if math.isfinite(measured) else _LINK_BYTES_PER_S


def _store_sizes(engine: Engine) -> StoreSizes | None:
    """Tiers of as many blocks as the engine's, whose checksums come to less than one."""
    config, stats = engine.config.store, engine.store_stats()
    if not stats.capacity_bytes:
        return None
    return StoreSizes(
        dram_bytes=stats.capacity_bytes,
        ssd_bytes=0.0 if stats.ssd is None else stats.ssd.capacity_bytes,
        ssd_read_bytes_per_s=_SSD_READ_BYTES_PER_S,
        ssd_write_bytes_per_s=_SSD_WRITE_BYTES_PER_S,
        eviction_policy=config.eviction_policy,
        ttl_s=config.ttl_s,
        block_tokens=config.block_tokens,
    )
