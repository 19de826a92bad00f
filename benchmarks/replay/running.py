"""A replay from beginning to end: with the store, recomputed and simulated, as asked for.

Simulated, the same workload is served in simulated time with rates measured in the replay. The same code decides; what
is compared is what that comes to: hits, and tokens that are prefilled.

Not here: one run (serving), the simulated server (`ca_jax.simulate.server`), flags and tables (main).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from benchmarks.compiles import CompileCounter
from benchmarks.engines import without_store
from benchmarks.replay.serving import Sample, Served, Summary, compare, serve, summarize
from benchmarks.replay.workload import ReplayedTrace, ReplayError, Workload, WorkloadConfig, make_workload
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv.costs import PrefillRate, PrefillSample
from ca_jax.kv.layout import kv_layout
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.serving.core import DEFAULT_WINDOW_TOKENS
from ca_jax.simulate.config import DecodeSample, FittedCost, ServerConfig, SimModel, StoreSizes
from ca_jax.simulate.results import SimCounts
from ca_jax.simulate.server import Server
from ca_jax.simulate.workload import SimSession, SimTurn
from ca_jax.storage.config import GIB
from ca_jax.storage.layout import KVLayout

STORE, RECOMPUTE = "store", "recompute"
"""Names of runs."""
_METHODS = ("ca", "of")
_LINK_BYTES_PER_S = 5e9  # Where the engine has measured none.
_SSD_READ_BYTES_PER_S, _SSD_WRITE_BYTES_PER_S = 1.4e9, 0.7e9  # Of zarr3 in results/bench_store.json.

OnSample = Callable[[str, Workload, Sample], None]
"""Told now and then of a run by its name, what is served, and what goes on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What is replayed, and how."""

    trace: ReplayedTrace
    """Which trace."""
    workload: WorkloadConfig
    """How much of it, and how fast."""
    engine: EngineConfig
    """What serves it."""
    recompute: bool = False
    """Whether the same is served again with the store off."""
    simulate: bool = False
    """Whether the same is simulated with the rates that were measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One way to serve a workload."""

    name: str
    """`STORE` or `RECOMPUTE`."""
    served: Served
    summary: Summary
    recompiles: int
    """Functions compiled while serving; 0 unless the warm-up missed one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A replay."""

    workload: Workload
    workload_bytes: int
    """What the KV of all conversations takes at their ends, within the window, in whole blocks."""
    store_bytes: int
    """What the store holds: of SSD where it has one, which keeps what DRAM has too; else of DRAM."""
    runs: tuple[Run, ...]
    """With the store, and recomputed if that was asked for."""
    comparison: dict[str, float] | None
    """Of these two; see `compare`."""
    agreement: dict[str, float] | None
    """With the simulation, if that was asked for; see `agreement`."""


def replay(
    model: LoadedModel, config: ReplayConfig, progress: Progress, on_sample: OnSample = lambda *what: None
) -> Result:
    """Replays a trace; `on_sample` is told of what goes on.

    ReplayError: the trace has too few conversations, the store is too small for one of them, or it cannot be simulated.
    """
    window = config.engine.context_window or min(model.config.steady_positions, DEFAULT_WINDOW_TOKENS)
    workload = make_workload(model, config.trace, config.workload, window=window, overflow=config.engine.overflow)
    warmup_turns, longest = config.workload.warmup_turns, workload.largest_session_tokens
    if warmup_turns >= workload.num_turns:
        raise ReplayError(f"warmup_turns must be fewer than the {workload.num_turns} turns, got {warmup_turns}")
    if config.simulate:
        check_simulable(config.engine, workload)
    layout = kv_layout(model, config.engine)
    _check_store(config.engine, layout, longest)
    runs, agreed = [], None
    for name in (STORE, RECOMPUTE) if config.recompute else (STORE,):

        def sampled(sample: Sample, name: str = name) -> None:
            on_sample(name, workload, sample)

        with Engine(model, config.engine if name == STORE else without_store(config.engine)) as engine:
            most_new = min(longest, config.engine.max_num_batched_tokens)
            engine.warmup(max_history_tokens=longest, max_new_tokens=most_new, progress=progress)
            engine.wait_until_ready()  # First touch would share the memory bus with the run.
            with CompileCounter() as compiles:
                served = serve(engine, workload, warmup_turns=warmup_turns, on_sample=sampled)
            runs.append(Run(name=name, served=served, summary=summarize(served), recompiles=compiles.count))
            if name == STORE and config.simulate:
                counts = simulate(engine, workload, served, warmup_turns=warmup_turns)
                agreed = agreement(runs[0].summary, counts)
    store = config.engine.store
    blocks = sum(layout.num_blocks(min(session.num_tokens, window)) for session in workload.sessions)
    return Result(
        workload=workload,
        workload_bytes=blocks * layout.block_bytes,
        store_bytes=store.dram_bytes if store.ssd_dir is None else store.ssd_bytes,
        runs=tuple(runs),
        comparison=compare(runs[0].served, runs[1].served) if config.recompute else None,
        agreement=agreed,
    )


def _check_store(config: EngineConfig, layout: KVLayout, num_tokens: int) -> None:
    """Refuses a store under one conversation: nothing of the longest one would ever be stored."""
    store, wanted = config.store, layout.num_blocks(num_tokens) * layout.block_bytes
    sizes = {"dram_gib": store.dram_gib} | ({} if store.ssd_dir is None else {"ssd_gib": store.ssd_gib})
    for name, found in sizes.items():
        if found * GIB < wanted:
            raise ReplayError(
                f"{name} must be at least {wanted / GIB:.3f} GiB, the KV of a conversation of {num_tokens:,} tokens; "
                f"got {found:g}"
            )


# Simulated.


def check_simulable(config: EngineConfig, workload: Workload) -> None:
    """Refuses (ReplayError) what the simulator does not do as the engine does.

    A turn but a first one comes at a time of its own, a full context is cut otherwise, or sessions share what they
    begin with.
    """
    if config.share_prefixes:
        raise ReplayError("share_prefixes must be off with simulate, which knows no tokens to be alike by; got it on")
    overflow = config.overflow
    if overflow is not None:
        discarder = overflow.token_discarder.name
        if overflow.method not in _METHODS or overflow.whole_turns or discarder != "oldest":
            raise ReplayError(
                f"overflow_method must be one of {', '.join(_METHODS)} and drop the oldest tokens with simulate, got "
                f"{overflow.method} that drops {'whole turns' if overflow.whole_turns else discarder}"
            )
    turns = [(turn, session.turns[0]) for session in workload.sessions for turn in session.turns]
    if any(turn.not_before_s > first.not_before_s for turn, first in turns):
        raise ReplayError("arrival_rate must be above 0 with simulate, which has turns follow answers; got the trace's")


def simulate(engine: Engine, workload: Workload, served: Served, *, warmup_turns: int = 0) -> SimCounts:
    """Serves a workload in simulated time, by a server that is like an engine, as fast as that was in a run."""
    config, model, rates = engine.config, engine.model.config, engine.rates
    layout = kv_layout(engine.model, config)
    link_bytes_per_s = math.inf if rates is None else rates.load.bytes_per_s
    sim_model = SimModel(
        name=engine.model.name,
        num_params=0.0,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=layout.groups[0].head_dim,
        window=engine.window,
        dtype_bytes=layout.numpy_dtype.itemsize,
    )
    server = Server(
        ServerConfig(
            model=sim_model,
            cost=measured_cost(served),
            link_bytes_per_s=link_bytes_per_s if math.isfinite(link_bytes_per_s) else _LINK_BYTES_PER_S,
            max_batch_size=config.max_batch_size,
            prefills_block=False,
            queue_order=config.queue_order,
            store=_store_sizes(engine),
            overflow=config.overflow or OverflowConfig(),
            warmup_turns=warmup_turns,
        )
    )
    return server.serve(sim_sessions(workload))


def measured_cost(served: Served) -> FittedCost:
    """Fits what computing took in a run, each kind of it and in all. ValueError: no decode step was by itself."""
    prefills = [
        PrefillSample(
            history_tokens=turn.cached_tokens,
            new_tokens=turn.prefill_tokens,
            seconds=max(turn.prefill_s - turn.load_stall_s, 1e-6),
        )
        for turn in served.turns
    ]
    return taking(FittedCost.fit(prefills, served.decode_samples), prefills, served.decode_samples)


def taking(cost: FittedCost, prefills: Sequence[PrefillSample], decodes: Sequence[DecodeSample]) -> FittedCost:
    """Scales fitted rates so that samples take as long in all as they were measured to.

    The least relative error is that of the middle: where some took far longer than others like them, as on a machine
    that is shared, the sum comes out short.
    """
    prefill_s = sum(cost.prefill_s(each.history_tokens, each.new_tokens) for each in prefills)
    decode_s = sum(cost.decode_s(each.num_jobs, each.context_tokens) for each in decodes)
    by_prefill = sum(each.seconds for each in prefills) / prefill_s
    by_decode = sum(each.seconds for each in decodes) / decode_s
    rate = cost.prefill
    return FittedCost(
        prefill=PrefillRate(
            fixed_s=rate.fixed_s * by_prefill, token_s=rate.token_s * by_prefill, pair_s=rate.pair_s * by_prefill
        ),
        decode_step_s=cost.decode_step_s * by_decode,
        decode_job_s=cost.decode_job_s * by_decode,
        decode_token_s=cost.decode_token_s * by_decode,
    )


def sim_sessions(workload: Workload) -> list[SimSession]:
    """Returns a workload as the simulator takes it, in order of arrival."""
    sessions = []
    for index, session in enumerate(workload.sessions):
        turns = tuple(
            SimTurn(user_tokens=len(turn.message), answer_tokens=turn.answer_tokens, think_s=turn.think_s)
            for turn in session.turns
        )
        arrival_s = session.turns[0].not_before_s
        sessions.append(SimSession(session_id=f"s{index}", arrival_s=arrival_s, turns=turns))
    return sorted(sessions, key=lambda session: session.arrival_s)


def agreement(summary: Summary, counts: SimCounts) -> dict[str, float]:
    """Puts a run beside its simulation. Rates are of returning turns of whose history something was loaded."""
    simulated_prefill = counts.prompt_tokens - counts.cached_tokens
    return {
        "engine_hit_rate": summary.hit_rate,
        "simulated_hit_rate": counts.hit_rate,
        "hit_rate_points": 100 * (counts.hit_rate - summary.hit_rate),
        "engine_prefill_tokens": summary.prefill_tokens,
        "simulated_prefill_tokens": simulated_prefill,
        "prefill_tokens_ratio": simulated_prefill / summary.prefill_tokens,
        "engine_prompt_tokens": summary.prompt_tokens,
        "simulated_prompt_tokens": counts.prompt_tokens,
        "engine_elapsed_s": summary.totals["elapsed_s"],
        "simulated_elapsed_s": counts.elapsed_s,
    }


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
