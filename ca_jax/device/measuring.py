"""How long a runner's passes take, measured with functions that are compiled already.

Not here: what is made of it (kv.costs), what is compiled (warmup).
"""

from __future__ import annotations

import time

import jax
import numpy as np

from ca_jax.device import steps
from ca_jax.device.buckets import pad_to
from ca_jax.device.passes import Step
from ca_jax.device.runner import Runner

_TIMED_RUNS = 3


def measure_prefill(runner: Runner, max_history: int, max_new: int) -> list[tuple[int, int, float]]:
    """Times a layer of each kind at a few pairs of lengths up to these, compiled by `warmup`, and the head once.

    Returns:
      History tokens, padded new tokens, and seconds of all layers and the head.
    """
    window = runner.window
    max_new = min(max_new, runner.chunk_tokens, window)
    new_sizes = sorted({min(pad_to(runner.token_buckets, size), window) for size in (16, max_new // 4, max_new)})
    pasts = sorted({min(size, window - new_sizes[-1]) for size in (0, max_history // 2, max_history)})
    samples = []
    runner.pool.begin(0, window)
    for num_new in new_sizes:
        for num_past in pasts:
            runner.pool.make_room(0, num_past + num_new, 0)
            step = runner.laid_out({0: (num_past, [0] * num_new)})
            samples.append((num_past, step.num_tokens, min(_timed(runner, step) for _ in range(_TIMED_RUNS))))
    runner.pool.end(0)
    return samples


def _timed(runner: Runner, step: Step) -> float:
    """Seconds of all layers and the head, from one layer of each kind."""
    kinds = [runner.config.kind_of(layer) for layer in range(runner.config.num_layers)]
    seconds, x = 0.0, runner.embed(step.tokens)
    for layer in runner.kinds:
        jax.block_until_ready((x, runner.pool.buffers, runner.states.buffers))
        started_s = time.perf_counter()
        x, *_ = runner.layer(layer, x, step)
        x.block_until_ready()
        seconds += (time.perf_counter() - started_s) * kinds.count(kinds[layer])
    started_s = time.perf_counter()
    index = runner.to_device(np.zeros(runner.pool.size.num_parts, np.int32))
    jax.block_until_ready(steps.row_logits(runner.config, runner.outer, x, index, runner.sharding))
    return seconds + time.perf_counter() - started_s
