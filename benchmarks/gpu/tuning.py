"""The GPU's kernel over pages, divided otherwise: which `Tiling` is fastest on the device at hand, by case.

All are compiled beside each other, then timed in turn. What is found is written down, not used: the kernel's own is in
`ca_jax.models.gpu_attention`.

Not here: whether the kernel is right, and what bounds it (`kernels`).
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
from typing import Any

from benchmarks.gpu.kernels import CALLS, Attend, Case, cases_of, compiled, given_of, seconds_of
from benchmarks.gpu.rows import Findings, GpuBenchConfig
from ca_jax import backend
from ca_jax.models.gpu_attention import DECODING, PROMPTS, Tiling, attend_pages_kernel

_SHOWN = 3  # Tilings of a case, beside the kernel's own.
_NUM_CASES = 6  # Those without a window.


def measure_tuning(config: GpuBenchConfig, *, interpret: bool = False) -> Findings:
    """The fastest tilings of each case beside the kernel's own; nothing where the kernel does not run."""
    if not interpret and backend.here().kernel != "triton":
        return Findings(rows=[], notes=[f"the kernel must have a GPU, got {backend.here().platform}"])
    rows, notes = [], [f"{CALLS} calls in a row; ratio: to the kernel's own tiling"]
    for case in cases_of(config)[:_NUM_CASES]:
        given, own = given_of(case, config), DECODING if _decodes(case) else PROMPTS
        tried = list(dict.fromkeys([own, *_others(own, _decodes(case))]))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            futures = {each: threads.submit(compiled, _attention(case, each, interpret), given) for each in tried}
        seconds, refused = {}, {each: future.exception() for each, future in futures.items() if future.exception()}
        for tiling in [each for each in tried if each not in refused]:
            seconds[tiling] = seconds_of(futures[tiling].result(), given, config.repeats)
        for tiling, error in itertools.islice(refused.items(), 1):
            notes.append(f"{case}: {len(refused)} of {len(tried)} were refused, {tiling}: {str(error).splitlines()[0]}")
        best = sorted(seconds, key=seconds.__getitem__)[:_SHOWN]
        for tiling in dict.fromkeys([*best, own]):
            row: dict[str, Any] = {"case": str(case), "is_own": tiling == own, **tiling._asdict()}
            rows.append({**row, "attend_s": seconds[tiling], "ratio": seconds[tiling] / seconds[own]})
    return Findings(rows=rows, notes=notes)


def _decodes(case: Case) -> bool:
    return bool(case.options.get("one_each"))


def _others(own: Tiling, decodes: bool) -> list[Tiling]:
    if decodes:
        sizes = itertools.product((2, 4, 8), (2, 3, 5), (2048, 4096, 8192), (256, 1024))
        return [own._replace(num_warps=w, num_stages=s, key_tile=k, num_programs=p) for w, s, k, p in sizes]
    sizes = itertools.product((4, 8), (2, 3, 4), (2048, 4096, 8192), (8192, 16384))
    return [own._replace(num_warps=w, num_stages=s, key_tile=k, query_tile=q) for w, s, k, q in sizes]


def _attention(case: Case, tiling: Tiling, interpret: bool) -> Attend:
    options: dict[str, Any] = {"one_each": _decodes(case), "tiling": tiling, "interpret": interpret}
    return lambda given: attend_pages_kernel(given.q, given.pages, tuple(given.rows), given.rotation, **options)
