"""Turns over histories in the host's memory: how near the load comes to the link, and the turn to what bounds it.

Not here: loads and computes alone (`bench_apart`), what the link gives (`gpu_probes`), other tiers (`bench_ttft`).
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.launch.bench_apart import ApartEngine
from ca_jax.launch.bench_engines import check_source, make_engine
from ca_jax.launch.bench_overlap import engine_for, random_ids, token_bytes
from ca_jax.launch.bench_schema import Samples
from ca_jax.launch.bench_suites import send_turn
from ca_jax.launch.gpu_model import model_note
from ca_jax.launch.gpu_schema import LINK_FLOOR, TTFT_CEILING, Findings, Floor, GpuBenchConfig, Probes
from ca_jax.pretrained import LoadedModel
from ca_jax.session import Session
from ca_jax.storage.store import AttentionStore
from ca_jax.telemetry.metrics import CompileCounter


def measure_ttft(model: LoadedModel, config: GpuBenchConfig, probes: Probes) -> Findings:
    """TTFT of turns over histories in DRAM, by history: against its load and its compute, each measured alone.

    Raises:
      BenchError: the engine cannot be as large as that, or a history did not come from DRAM.
    """
    stores: list[AttentionStore] = []

    def keep(store: AttentionStore) -> AttentionStore:
        stores.append(store)
        return store

    longest = max(config.history_tokens) + config.new_tokens + 1
    settings = EngineConfig(
        prefill_chunk_tokens=config.chunk_tokens, read_buffer="all", recompute_if_faster=False, compile_cache_dir=None
    )
    engine_config = engine_for(settings, model, [longest], context_window=longest + 1)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(make_engine(model, engine_config, suite="ttft", store_wrapper=keep))
        apart = ApartEngine(engine, stores[0], max_history_tokens=max(config.history_tokens))
        stack.callback(apart.close)
        engine.wait_until_ready()  # First touch would share the memory bus with the samples.
        rng = np.random.default_rng(config.seed)
        rows = [_ttft_row(engine, apart, num_history, config, probes, rng) for num_history in config.history_tokens]
    return Findings(
        rows=rows,
        floors=[
            Floor(
                what="load from DRAM, least share of the link",
                value=min(row["share_of_link"] for row in rows),
                bound=LINK_FLOOR,
            ),
            Floor(
                what="TTFT on a DRAM hit over the larger of load and compute, most",
                value=max(row["ttft_vs_bound"] for row in rows),
                bound=TTFT_CEILING,
                is_ceiling=True,
            ),
        ],
        notes=[
            model_note(model),
            "load_s: of all layers to the device, nothing computed. compute_s: of the new tokens and the first token's "
            "draw, the history on the device. ttft_vs_bound: TTFT over the larger of both, median of the rounds",
        ],
    )


def _ttft_row(
    engine: Engine,
    apart: ApartEngine,
    num_history: int,
    config: GpuBenchConfig,
    probes: Probes,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """One history: a round that does not count, then as many as there are samples."""
    model = engine.model
    session = engine.session()
    send_turn(engine, session, random_ids(rng, model, num_history))
    session.rewind(num_history)
    _ttft_round(engine, apart, session, random_ids(rng, model, config.new_tokens), Samples())
    samples, same_tokens = Samples(), True
    with CompileCounter() as compiles:
        for _ in range(config.repeats):
            same_tokens &= _ttft_round(engine, apart, session, random_ids(rng, model, config.new_tokens), samples)
    session.close()
    kv_bytes = num_history * token_bytes(model, engine.config)
    load_s = samples.median("load_s")
    return {
        "history_tokens": num_history,
        "new_tokens": config.new_tokens,
        "kv_gb": kv_bytes / 1e9,
        "load_s": load_s,
        "load_gb_per_s": kv_bytes / load_s / 1e9,
        "share_of_link": kv_bytes / load_s / probes.to_device_bytes_per_s,
        "compute_s": samples.median("compute_s"),
        "ttft_s": samples.median("ttft_s"),
        "ttft_vs_bound": samples.median("ttft_vs_bound"),
        "load_stall_s": samples.median("load_stall_s"),
        "same_tokens": same_tokens,
        "recompiles": compiles.count,
    }


def _ttft_round(engine: Engine, apart: ApartEngine, session: Session, new_ids: list[int], samples: Samples) -> bool:
    """One sample of each way; whether both drew the same token."""
    num_history = len(session.token_ids)
    token, ttft_s = send_turn(engine, session, new_ids)
    usage = check_source("dram", session, len(new_ids), {"dram": num_history})
    session.rewind(num_history)
    engine.wait_for_saves()
    with apart.loaded(session) as history:
        apart_token, compute_s = apart.prefill(history, new_ids)
    samples.add(
        ttft_s=ttft_s,
        compute_s=compute_s,
        load_s=history.load_s,
        load_stall_s=usage.load_stall_s,
        ttft_vs_bound=ttft_s / max(history.load_s, compute_s),
    )
    return token == apart_token
