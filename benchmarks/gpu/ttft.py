"""Turns over histories in the host's memory: how near the load comes to the link, and the turn to what bounds it.

Not here: loads and computes alone (`benchmarks.apart`), what the link gives (`probes`), other tiers (`suites.ttft`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.apart import ApartEngine
from benchmarks.engines import (
    check_source,
    engine_for,
    make_engine,
    random_ids,
    send_turn,
    store_session,
    take_back,
)
from benchmarks.gpu.model import model_note
from benchmarks.gpu.rows import LINK_FLOOR, TTFT_CEILING, Findings, Floor, GpuBenchConfig, Probes
from benchmarks.harness import Sample, Ways
from benchmarks.peers import TransformersPeer
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.pretrained import LoadedModel
from ca_jax.session import Session


def measure_ttft(model: LoadedModel, config: GpuBenchConfig, probes: Probes, peer: TransformersPeer | None) -> Findings:
    """TTFT of turns over histories in DRAM, by history: against its load and its compute, each measured alone."""
    longest = max(config.history_tokens) + config.new_tokens + 1
    settings = dataclasses.replace(config.engine, read_buffer="all")
    engine_config = engine_for(settings, model, [longest], context_window=longest + 1)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(make_engine(model, engine_config))
        apart = ApartEngine(engine, max_history_tokens=max(config.history_tokens))
        stack.callback(apart.close)
        rows = [_ttft_row(engine, apart, num_history, config, probes, peer) for num_history in config.history_tokens]
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
    peer: TransformersPeer | None,
) -> dict[str, Any]:
    model, rng = engine.model, np.random.default_rng((config.seed, num_history))
    history_ids = random_ids(rng, model, num_history)
    session = store_session(engine, history_ids)

    def ways() -> Ways:
        new_ids = random_ids(rng, model, config.new_tokens)
        found = {"turn": partial(_turn, engine, session, new_ids), "apart": partial(apart.sample, session, new_ids)}
        return found if peer is None else {**found, "peer": partial(_recompute, peer, [*history_ids, *new_ids])}

    rounds = harness.interleave(ways, config.repeats)
    session.close()
    for each in rounds:
        alone = each["apart"]
        alone["ttft_vs_bound"] = each["turn"]["ttft_s"] / max(alone["load_s"], alone["compute_s"])
    names = ("load_s", "compute_s", "ttft_s", "ttft_vs_bound", "load_stall_s")
    samples = harness.samples(rounds)
    medians = {name: harness.must_median(samples, name) for name in names}
    kv_bytes = num_history * kv_layout(model, engine.config).token_bytes
    load_s = medians.pop("load_s")
    return {
        "history_tokens": num_history,
        "new_tokens": config.new_tokens,
        "kv_gb": kv_bytes / 1e9,
        "load_s": load_s,
        "load_gb_per_s": kv_bytes / load_s / 1e9,
        "share_of_link": kv_bytes / load_s / probes.to_device_bytes_per_s,
        **medians,
        "transformers_recompute_s": harness.median(samples, "transformers_recompute_s"),
        "same_tokens": harness.same([{name: each[name] for name in ("turn", "apart")} for each in rounds], "token"),
        "recompiles": harness.recompiles(rounds),
    }


def _turn(engine: Engine, session: Session, new_ids: list[int]) -> Sample:
    num_history = len(session.token_ids)
    token, ttft_s = send_turn(engine, session, new_ids)
    usage = check_source("dram", session, len(new_ids), {"dram": num_history})
    take_back(engine, session, num_history)
    return {"token": token, "ttft_s": ttft_s, "load_stall_s": usage.load_stall_s}


def _recompute(peer: TransformersPeer, prompt: list[int]) -> Sample:
    return {"transformers_recompute_s": peer.prefill(prompt)[1]}
