"""A replay from beginning to end: with the store, recomputed and simulated, whatever is asked for.

Not here: one run (serving), what it comes to (summary), flags and tables (`ca_jax.launch.replay`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.replay.served import Sample, Served
from ca_jax.replay.serving import serve
from ca_jax.replay.simulated import Agreement, agreement, check_simulable, simulate
from ca_jax.replay.summary import Comparison, Summary, compare, summarize
from ca_jax.replay.trace_scripts import ReplayError, TraceConfig
from ca_jax.replay.workload import Workload, WorkloadConfig, make_workload
from ca_jax.serving.core import DEFAULT_WINDOW_TOKENS
from ca_jax.storage.config import GIB
from ca_jax.storage.layout import KVLayout
from ca_jax.telemetry.metrics import CompileCounter

STORE, RECOMPUTE = "store", "recompute"
"""Names of runs."""

OnSample = Callable[[str, Workload, Sample], None]
"""Told now and then of a run by its name, what is served, and what goes on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What is replayed, and how."""

    trace: TraceConfig
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
    """What was served."""
    summary: Summary
    """What it comes to."""
    recompiles: int
    """Functions compiled while serving; 0 unless the warm-up missed one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A replay."""

    workload: Workload
    """What was served."""
    window: int
    """Of the engine."""
    workload_bytes: int
    """What the KV of all conversations takes at their ends, within the window, in whole blocks."""
    store_bytes: int
    """What the store holds: of SSD where it has one, which keeps what DRAM has too; else of DRAM."""
    runs: tuple[Run, ...]
    """With the store, and recomputed if that was asked for."""
    comparison: Comparison | None
    """Of these two."""
    agreement: Agreement | None
    """With the simulation, if that was asked for."""


def replay(
    model: LoadedModel, config: ReplayConfig, progress: Progress, on_sample: OnSample = lambda *what: None
) -> Result:
    """Replays a trace. Blocks.

    Args:
      model: who answers.
      config: what, and how.
      progress: told of warm-ups.
      on_sample: told of what goes on.

    Raises:
      FileNotFoundError: there is no such trace.
      ReplayError: the trace has too few conversations, or the store is too small for one of them.
      ValueError: the trace is malformed, or a size does not fit the machine.
    """
    window = config.engine.context_window or min(model.config.steady_positions, DEFAULT_WINDOW_TOKENS)
    workload = make_workload(model, config.trace, config.workload, window=window, overflow=config.engine.overflow)
    if config.workload.warmup_turns >= workload.num_turns:
        raise ReplayError(
            f"warmup_turns must be fewer than the {workload.num_turns} turns, got {config.workload.warmup_turns}"
        )
    if config.simulate:
        check_simulable(config.engine, workload)
    layout = kv_layout(model, config.engine)
    _check_store(config.engine, layout, workload.largest_session_tokens)
    runs, agreed = [], None
    for name in (STORE, RECOMPUTE) if config.recompute else (STORE,):
        with Engine(model, config.engine if name == STORE else without_store(config.engine)) as engine:
            longest = workload.largest_session_tokens
            engine.warmup(
                max_history_tokens=longest,
                max_new_tokens=min(longest, config.engine.prefill_chunk_tokens),
                progress=progress,
            )
            engine.wait_until_ready()  # First touch would share the memory bus with the run.
            with CompileCounter() as compiles:
                served = serve(
                    engine,
                    workload,
                    warmup_turns=config.workload.warmup_turns,
                    on_sample=lambda sample, name=name: on_sample(name, workload, sample),  # type: ignore[misc]
                )
            runs.append(Run(name=name, served=served, summary=summarize(served), recompiles=compiles.count))
            if name == STORE and config.simulate:
                counts = simulate(engine, workload, served, warmup_turns=config.workload.warmup_turns)
                agreed = agreement(runs[0].summary, counts)
    store = config.engine.store
    return Result(
        workload=workload,
        window=window,
        workload_bytes=sum(
            layout.num_blocks(min(session.num_tokens, window)) * layout.block_bytes for session in workload.sessions
        ),
        store_bytes=store.dram_bytes if store.ssd_dir is None else store.ssd_bytes,
        runs=tuple(runs),
        comparison=compare(runs[0].served, runs[1].served) if config.recompute else None,
        agreement=agreed,
    )


def without_store(config: EngineConfig) -> EngineConfig:
    """The same engine, which stores nothing."""
    store = dataclasses.replace(config.store, dram_gib=0.0, ssd_dir=None, ssd_url=None)
    return dataclasses.replace(config, store=store)


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
