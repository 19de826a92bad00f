"""Attention over pages as the device is best at it, against the plain form: how far off it is, and how fast.

Both are given the same pages, in any order, and queries in the config's dtype; what is right is the plain form's in
float32. Time is bounded by what must be read and multiplied: the keys and values that a row's tokens see, once for each
KV head, and two products with each for every query head.

Not here: whole steps (`model`), what bounds them (`probes`), small shapes (tests/models/test_gpu_attention).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.gpu.rows import KERNEL_CEILING, Findings, Floor, GpuBenchConfig, Probes
from ca_jax.config import EngineConfig
from ca_jax.models import rope
from ca_jax.models.paged_attention import Rows, attend_pages, paged_attention
from ca_jax.models.presets import PRESETS

CALLS = 20
"""Of one sample, one after the other, within one function: dispatching them takes no time."""


class Case(NamedTuple):
    """Rows of a step."""

    history: int
    """Tokens of each row's context before the new ones."""
    new: int
    """New tokens of each row."""
    rows: int
    options: Mapping[str, Any] = MappingProxyType({})
    """Of attention: a window, a cap of scores."""

    def __str__(self) -> str:
        asked = [f"{name} {value:g}" for name, value in self.options.items() if name != "one_each"]
        return ", ".join([f"{self.rows} x {self.new} over {self.history}", *asked])


class Given(NamedTuple):
    """Arrays of a case."""

    q: jax.Array
    pages: jax.Array
    rows: Rows
    rotation: rope.Rotation


Attend = Callable[[Given], jax.Array]
"""Attention of a case, `[T, N, H]`."""


def measure_kernels(config: GpuBenchConfig, probes: Probes) -> Findings:
    """Attention of the preset's shape: decoding, prompts, turns over a history, windows."""
    c = PRESETS[config.preset]
    rows = [_row(case, config, probes) for case in cases_of(config)]
    worst = max(row["relative_error"] for row in rows)
    return Findings(
        rows=rows,
        floors=[Floor(what="attention, relative error", value=worst, bound=KERNEL_CEILING, is_ceiling=True)],
        notes=[
            f"{c.num_heads} query heads, {c.num_kv_heads} KV heads of {c.head_dim}, {config.dtype}; {CALLS} calls each",
            "relative_error: norm of what differs from the plain form in float32, over that form's norm",
        ],
    )


def cases_of(config: GpuBenchConfig) -> list[Case]:
    """Decoding, prompts, turns over a history, several at once; and both with a window."""
    longest, decoding = max(config.history_tokens), {"one_each": True}
    return [
        Case(config.context_tokens, 1, config.batch_size, decoding),
        Case(2 * config.context_tokens, 1, 4 * config.batch_size, decoding),
        Case(longest, 1, 1, decoding),
        Case(0, config.prefill_tokens, 1),
        Case(longest, config.new_tokens, 1),
        Case(longest // 4, config.prefill_tokens // 8, 4),
        Case(longest // 4, config.prefill_tokens // 4, 1, {"window": longest // 8, "cap": 30.0}),
        Case(longest // 4, 1, config.batch_size, {"window": longest // 8, "cap": 30.0, **decoding}),
    ]


def _row(case: Case, config: GpuBenchConfig, probes: Probes) -> dict[str, Any]:
    given, c = given_of(case, config), PRESETS[config.preset]
    kind = paged_attention(given.pages)
    attend, plain = _attention(case, kind), _attention(case, "blocks")
    exact = given._replace(q=given.q.astype(jnp.float32), pages=given.pages.astype(jnp.float32))
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(jax.jit(plain)(exact))
    found = np.asarray(jax.jit(attend)(given).astype(jnp.float32))
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    attend_s = seconds_of(compiled(attend, given), given, config.repeats)
    num_flops = 4 * _pairs(case) * c.num_heads * c.head_dim * case.rows
    num_bytes = 2 * _keys(case) * c.num_kv_heads * c.head_dim * given.pages.dtype.itemsize * case.rows
    bound_s = max(num_flops / probes.matmul_flops_per_s, num_bytes / probes.memory_read_bytes_per_s)
    return {
        "case": str(case),
        "kernel": kind,
        "relative_error": error,
        "attend_s": attend_s,
        "tflop_per_s": num_flops / attend_s / 1e12,
        "read_gb_per_s": num_bytes / attend_s / 1e9,
        "share_of_bound": bound_s / attend_s,
    }


def _attention(case: Case, kind: str) -> Attend:
    def attend(given: Given) -> jax.Array:
        options = {"new": None, "implementation": kind, **case.options}
        return attend_pages(given.q, pages=given.pages, rows=given.rows, rotation=given.rotation, **options)[0]

    return attend


def _pairs(case: Case) -> int:
    """Pairs of a token and one that it sees, in a row."""
    sees = np.arange(case.history + 1, case.history + case.new + 1)
    return int(np.minimum(sees, case.options.get("window", sees[-1])).sum())


def _keys(case: Case) -> int:
    """Tokens of a row that any of its new ones sees."""
    num_tokens = case.history + case.new
    return min(num_tokens, case.options.get("window", num_tokens) + case.new - 1)


def given_of(case: Case, config: GpuBenchConfig) -> Given:
    """Arrays of order one, made on the device; pages in any order, and NaN in those that are nobody's."""
    c = PRESETS[config.preset]
    page, num_tokens = EngineConfig.page_tokens, case.rows * case.new
    per_row = -(-(case.history + case.new) // page)
    num_pages = case.rows * per_row + 1
    order = np.random.default_rng(config.seed).permutation(num_pages)
    keys = jax.random.split(jax.random.key(config.seed))
    q = jax.random.normal(keys[0], (num_tokens, c.num_heads, c.head_dim)).astype(config.dtype)
    pages = jax.random.normal(keys[1], (num_pages, 2, c.num_kv_heads, page, c.head_dim), config.dtype)
    rows = Rows(
        table=jnp.asarray(order[:-1].reshape(case.rows, per_row), jnp.int32),
        starts=jnp.arange(case.rows + 1, dtype=jnp.int32) * case.new,
        places=jnp.tile(case.history + jnp.arange(case.new, dtype=jnp.int32), case.rows),
    )
    rotation = rope.rotation_at(c.ropes[0][0], c.head_dim, jnp.arange(per_row * page))
    return Given(q, pages.at[order[-1]].set(jnp.nan), rows, rotation)


def compiled(attend: Attend, given: Given) -> Attend:
    """Many calls in a row. Each takes what the last one gave, so that none is left out."""

    def calls(given: Given) -> jax.Array:
        return jax.lax.fori_loop(0, CALLS, lambda _, q: attend(given._replace(q=q)), given.q)

    return jax.jit(calls).lower(given).compile()


def seconds_of(calls: Attend, given: Given, repeats: int) -> float:
    """Of one call of `compiled`, median of samples."""
    samples = [harness.timed("s", lambda: jax.block_until_ready(calls(given)))["s"] for _ in range(1 + repeats)]
    return float(np.median(samples[1:])) / CALLS
