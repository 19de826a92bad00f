"""Prefill and decode beside `transformers` on the same weights, in turns; and whether both compute the same.

Not here: the peer itself (`benchmarks.peers`), turns over stored histories (`ttft`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.gpu.model import RunnerBench
from benchmarks.gpu.rows import LOGITS_CEILING, Findings, Floor
from benchmarks.harness import Sample, Ways
from benchmarks.peers import TransformersPeer

_COMPARED_TOKENS = 256


def measure_beside(peer: TransformersPeer | None, bench: RunnerBench) -> Findings:
    """A prefill and decode steps of both, in turns; nothing where the peer is not installed."""
    if peer is None:
        return Findings(rows=[], notes=["torch and transformers must be installed for this, got none"])
    config, prompt = bench.config, bench.tokens[: bench.config.prefill_tokens]
    ours, theirs = (np.asarray(each.logits(prompt[:_COMPARED_TOKENS])) for each in (bench.model, peer))
    error = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    agreed = float(np.mean(ours.argmax(-1) == theirs.argmax(-1)))

    def prefills() -> Ways:
        return {
            "ours": partial(harness.timed, "ours_s", bench.compute, 0, len(prompt)),
            "peer": lambda: {"transformers_s": peer.prefill(prompt)[1]},
        }

    rows = [_row(f"prefill of {len(prompt)}", prefills(), config.repeats)]
    prompts, step = bench.begin_decode()
    peer.start_decode(prompts)

    def theirs_step() -> Sample:
        return {"transformers_s": peer.decode(config.decode_steps) / config.decode_steps}

    steps: Ways = {"ours": lambda: {"ours_s": step()["step_s"]}, "peer": theirs_step}
    rows.append(_row(f"decode step, {config.batch_size} rows of {config.context_tokens}", steps, config.repeats))
    peer.end_decode()
    return Findings(
        rows=rows,
        floors=[Floor(what="logits, off transformers'", value=error, bound=LOGITS_CEILING, is_ceiling=True)],
        notes=[
            *bench.notes,
            "transformers: eager, sdpa attention, its growing cache; on the same weights",
            f"logits of {_COMPARED_TOKENS} tokens: they differ by {error:.2g} of their norm, and agree on the "
            f"likeliest token of {agreed:.1%}",
        ],
    )


def _row(what: str, ways: Ways, repeats: int) -> dict[str, Any]:
    samples = harness.samples(harness.interleave(lambda: ways, repeats))
    ours_s, theirs_s = (harness.must_median(samples, name) for name in ("ours_s", "transformers_s"))
    return {"what": what, "ours_s": ours_s, "transformers_s": theirs_s, "ratio": theirs_s / ours_s}
