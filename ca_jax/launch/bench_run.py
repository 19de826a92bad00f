"""Runs one suite and says all about it: what was measured, on what machine, by which versions.

Not here: flags and main (`bench`), measuring (`bench_suites`, `bench_tiers`, `bench_ttft`, `bench_throughput`,
`bench_preload`, `bench_save`, `bench_overflow`, `bench_blend`, `bench_blend_throughput`, `bench_storage`,
`bench_policy`), the JSON (`bench_report`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from ca_jax.config import EngineConfig
from ca_jax.engine import enable_compile_cache
from ca_jax.launch import bench_report, machine
from ca_jax.launch.bench_blend import run_blend_suite
from ca_jax.launch.bench_blend_schema import BlendBenchConfig, BlendThroughputBenchConfig
from ca_jax.launch.bench_blend_throughput import run_blend_throughput_suite
from ca_jax.launch.bench_disk import scratch_on_disk
from ca_jax.launch.bench_engines import make_engine
from ca_jax.launch.bench_overflow import run_overflow_suite
from ca_jax.launch.bench_overflow_schema import OverflowBenchConfig
from ca_jax.launch.bench_overlap_schema import PreloadBenchConfig, SaveBenchConfig
from ca_jax.launch.bench_peers import PEER_PACKAGES, make_peer
from ca_jax.launch.bench_policy import run_policy_suite
from ca_jax.launch.bench_preload import run_preload_suite
from ca_jax.launch.bench_recording import Recorder
from ca_jax.launch.bench_report import EngineBenchConfig, Report
from ca_jax.launch.bench_save import run_save_suite
from ca_jax.launch.bench_schema import BenchConfig, Row, Startup
from ca_jax.launch.bench_serving_schema import ThroughputBenchConfig, TtftBenchConfig
from ca_jax.launch.bench_storage import run_store_suite
from ca_jax.launch.bench_storage_schema import PolicyBenchConfig, StoreBenchConfig
from ca_jax.launch.bench_suites import run_suite
from ca_jax.launch.bench_throughput import run_throughput_suite
from ca_jax.launch.bench_tiers import run_tiers_suite, tiers_engine_config
from ca_jax.launch.bench_ttft import run_ttft_suite
from ca_jax.launch.progress import progress_bars
from ca_jax.pretrained import LoadedModel, Progress, load_model, random_model
from ca_jax.telemetry.metrics import CompileCounter

_IDLE_CHECK_S = 0.5


def model_loader(model: str, preset: str | None, *, dtype: str | None, seed: int) -> Callable[[Progress], LoadedModel]:
    """What gives the model to measure.

    Args:
      model: as for `load_model`.
      preset: as for `random_model`, which gives the model then; None for `load_model`.
      dtype: of the weights; None as for both.
      seed: of random weights.
    """

    def load(progress: Progress) -> LoadedModel:
        if preset is not None:
            return random_model(preset, dtype=dtype, seed=seed)
        return load_model(model, dtype=dtype, progress=progress)

    return load


@dataclasses.dataclass(frozen=True)
class _Measured:
    """What a suite left."""

    rows: Sequence[Any]
    summary: Mapping[str, Any]
    engine_start_s: float | None = None
    first_touch_s: float | None = None


def run(
    config: EngineBenchConfig,
    load: Callable[[Progress], LoadedModel],
    *,
    peer_name: str | None,
    recorder: Recorder,
    command: str,
    console: rich.console.Console,
) -> Report:
    """Loads the model, measures one suite of the engine and says all about it. Progress goes to stderr.

    Args:
      config: what to measure.
      load: gives the model.
      peer_name: one of `PEERS`, or None; for the suites of `BenchConfig` but `tiers`.
      recorder: of one more round, for `ttft` and `throughput`; what it has is still to be written.
      command: how it was asked for.
      console: where the engine's configuration is printed.

    Raises:
      BenchError: the engine cannot be as large as the suite wants it, the disk cannot be used for it, or the engine did
        other work than a row would say it did.
      PeerUnavailableError: the peer is not installed.
      CaJaxError: the model cannot be loaded.
    """
    other_load_share = _other_load_share()
    described = machine.describe_machine()
    enable_compile_cache(EngineConfig().compile_cache_dir)
    with CompileCounter() as compiles:
        with progress_bars() as progress:
            model = load(progress)
        if isinstance(config, BenchConfig):
            measured = _measure_engine(config, model, peer_name, console)
        else:
            measured = _measure_model(config, model, recorder, console)
    startup = Startup(
        other_load_share=other_load_share,
        model_load_s=model.load_s,
        engine_start_s=measured.engine_start_s,
        first_touch_s=measured.first_touch_s,
        compile_s=compiles.seconds,
        compiles=compiles.count,
    )
    return bench_report.make_report(
        config,
        measured.rows,
        measured.summary,
        startup,
        model=model.name,
        dtype=model.dtype,
        machine=described,
        versions=machine.describe_versions((*machine.PACKAGES, *(PEER_PACKAGES[peer_name] if peer_name else ()))),
        command=command,
        peer=peer_name,
    )


def run_storage(config: StoreBenchConfig | PolicyBenchConfig, command: str) -> Report:
    """Measures one suite that needs no engine and says all about it. Progress goes to stderr.

    Args:
      config: what to measure.
      command: how it was asked for.

    Raises:
      BenchError: the disk cannot be used for it, or gave other bytes than were written.
    """
    other_load_share = _other_load_share()
    described = machine.describe_machine()
    with progress_bars() as progress:
        rows: Sequence[Any]
        if isinstance(config, StoreBenchConfig):
            rows = run_store_suite(config, described["cores"], progress)
        else:
            rows = run_policy_suite(config, progress)
    return bench_report.make_storage_report(
        config,
        rows,
        machine=described,
        versions=machine.describe_versions(),
        command=command,
        other_load_share=other_load_share,
    )


def _measure_engine(
    config: BenchConfig, model: LoadedModel, peer_name: str | None, console: rich.console.Console
) -> _Measured:
    """Measures a suite of one engine, beside a peer's if one is named."""
    with contextlib.ExitStack() as stack:
        started_s = time.perf_counter()
        engine_config = config.engine_config()
        if config.suite == "tiers":
            directory = stack.enter_context(scratch_on_disk(config.ssd_dir))
            engine_config = tiers_engine_config(config, model, directory)
        engine = stack.enter_context(make_engine(model, engine_config, suite=config.suite))
        engine_start_s = model.load_s + time.perf_counter() - started_s
        _print_config(dataclasses.replace(engine.config, dtype=model.dtype), console)
        peer = None if peer_name is None else make_peer(peer_name, model)
        with progress_bars() as progress:
            rows: Sequence[Row]
            if config.suite == "tiers":
                rows = run_tiers_suite(engine, config, progress)
            else:
                rows = run_suite(engine, config, peer, progress)
        return _Measured(rows, bench_report.summarize(rows), engine_start_s, engine.metrics.first_touch_s)


def _measure_model(
    config: EngineBenchConfig,
    model: LoadedModel,
    recorder: Recorder,
    console: rich.console.Console,
) -> _Measured:
    """Measures a suite that makes its engines itself."""
    _print_config(config, console)
    with progress_bars() as progress:
        if isinstance(config, TtftBenchConfig):
            ttft = run_ttft_suite(model, config, progress, recorder)
            return _Measured(ttft.rows, ttft.summary)
        if isinstance(config, ThroughputBenchConfig):
            throughput = run_throughput_suite(model, config, progress, recorder)
            return _Measured(throughput.rows, throughput.summary)
        if isinstance(config, PreloadBenchConfig):
            preload = run_preload_suite(model, config, progress)
            return _Measured(preload.rows, preload.summary)
        if isinstance(config, OverflowBenchConfig):
            overflow = run_overflow_suite(model, config, progress)
            return _Measured(overflow.rows, overflow.summary)
        if isinstance(config, BlendBenchConfig):
            blend = run_blend_suite(model, config, progress)
            return _Measured(blend.rows, blend.summary)
        if isinstance(config, BlendThroughputBenchConfig):
            stream = run_blend_throughput_suite(model, config, progress)
            return _Measured(stream.rows, stream.summary)
        if isinstance(config, SaveBenchConfig):
            save = run_save_suite(model, config, progress)
            return _Measured(save.rows, save.summary)
        raise ValueError(f"suite {config.suite} wanted an engine to measure")


def _print_config(config: object, console: rich.console.Console) -> None:
    console.print(repr(config), style="dim", markup=False, highlight=False, soft_wrap=True)


def _other_load_share() -> float | None:
    """The share of the machine's CPU time that is spent on something else; None where psutil is not installed."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil.cpu_percent(interval=_IDLE_CHECK_S) / 100
