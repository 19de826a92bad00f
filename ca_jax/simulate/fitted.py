"""What computing takes on a machine that was measured: rates fitted to rows of `ca_jax.launch.bench`, or to a replay.

Not here: rates themselves (`ca_jax.kv.rates`), what follows from data sheets (config).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ca_jax.kv.rates import PrefillRate, PrefillSample, fit_times

FITTED_SUITES = ("prefill", "reuse", "ttft", "decode")
"""Suites of the benchmarks whose rows say what computing takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSample:
    """One measured decode step."""

    num_jobs: int
    """Jobs that got a token each."""
    context_tokens: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedCost:
    """A `CostModel` of measured rates."""

    prefill: PrefillRate
    decode_step_s: float
    """Seconds of each decode step."""
    decode_job_s: float
    """Seconds of each job in it."""
    decode_token_s: float
    """Seconds of each token of their contexts."""

    @classmethod
    def fit(cls, prefills: Iterable[PrefillSample], decodes: Iterable[DecodeSample]) -> FittedCost:
        """Fits the rates of least relative error.

        Raises:
          ValueError: there is no sample of one kind.
        """
        decodes = tuple(decodes)
        step_s, job_s, token_s = fit_times(
            [(1.0, each.num_jobs, each.context_tokens) for each in decodes], [each.seconds for each in decodes]
        )
        return cls(prefill=PrefillRate.fit(prefills), decode_step_s=step_s, decode_job_s=job_s, decode_token_s=token_s)

    @classmethod
    def from_bench(cls, paths: Sequence[str | os.PathLike[str]]) -> FittedCost:
        """Fits what `ca_jax.launch.bench --json_out` wrote, of any of `FITTED_SUITES`.

        Args:
          paths: of the files, all of one model and dtype.

        Raises:
          FileNotFoundError: one is not there.
          ValueError: one is no such file, or of another model or dtype; or none has prefills, or decode steps.
        """
        prefills: list[PrefillSample] = []
        decodes: list[DecodeSample] = []
        subjects: dict[tuple[str, str], None] = {}
        for path in map(Path, paths):
            report = _read(path)
            subjects[str(report.get("model")), str(report.get("dtype"))] = None
            for row in report["rows"]:
                try:
                    if report["suite"] == "decode":
                        decodes.append(_decode(row))
                    else:
                        prefills += _prefills(report["suite"], row)
                except (KeyError, TypeError, ZeroDivisionError) as error:
                    raise ValueError(f"{path}: rows must be as bench writes them, got {error!r}") from error
        if len(subjects) > 1:
            raise ValueError(f"cost must be benches of one model, got {', '.join(map(' '.join, subjects))}")
        for name, samples, suites in (("prefills", prefills, FITTED_SUITES[:3]), ("decode steps", decodes, ["decode"])):
            if not samples:
                raise ValueError(f"cost must have a bench of {name} (suite {' or '.join(suites)}), got none")
        return cls.fit(prefills, decodes)

    def taking(self, prefills: Sequence[PrefillSample], decodes: Sequence[DecodeSample]) -> FittedCost:
        """Scales the rates so that samples take as long in all as they were measured to.

        The least relative error is that of the middle: where some took far longer than others like them, as on a
        machine that is shared, the sum comes out short.
        """
        prefill_s = sum(self.prefill_s(each.history_tokens, each.new_tokens) for each in prefills)
        decode_s = sum(self.decode_s(each.num_jobs, each.context_tokens) for each in decodes)
        by_prefill = sum(each.seconds for each in prefills) / prefill_s
        by_decode = sum(each.seconds for each in decodes) / decode_s
        rate = self.prefill
        return FittedCost(
            prefill=PrefillRate(
                fixed_s=rate.fixed_s * by_prefill, token_s=rate.token_s * by_prefill, pair_s=rate.pair_s * by_prefill
            ),
            decode_step_s=self.decode_step_s * by_decode,
            decode_job_s=self.decode_job_s * by_decode,
            decode_token_s=self.decode_token_s * by_decode,
        )

    def prefill_s(self, history_tokens: int, new_tokens: int) -> float:
        """See `CostModel`."""
        return self.prefill.seconds(history_tokens, new_tokens)

    def decode_s(self, num_jobs: int, context_tokens: int) -> float:
        """See `CostModel`."""
        return self.decode_step_s + self.decode_job_s * num_jobs + self.decode_token_s * context_tokens


def _read(path: Path) -> Mapping[str, Any]:
    wanted = f"{path}: the file must be the JSON of a bench of {', '.join(FITTED_SUITES)}"
    try:
        report = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{wanted}; got {error}") from error
    if not isinstance(report, dict) or report.get("suite") not in FITTED_SUITES or "rows" not in report:
        raise ValueError(f"{wanted}; got {report.get('suite') if isinstance(report, dict) else type(report).__name__}")
    return report


def _prefills(suite: str, row: Mapping[str, Any]) -> list[PrefillSample]:
    if suite == "prefill":
        return [PrefillSample(history_tokens=0, new_tokens=row["tokens"], seconds=row["prefill_s"])]
    history, new = row["history_tokens"], row["new_tokens"]
    if suite == "ttft":
        return [PrefillSample(history_tokens=history, new_tokens=new, seconds=row["compute_s"])]
    reused_s = row["ttft_reuse_s"] - row["load_stall_s"]
    return [
        PrefillSample(history_tokens=0, new_tokens=history + new, seconds=row["ttft_recompute_s"]),
        PrefillSample(history_tokens=history, new_tokens=new, seconds=reused_s),
    ]


def _decode(row: Mapping[str, Any]) -> DecodeSample:
    num_jobs = row["batch_size"]
    seconds = num_jobs / row["tokens_per_s"]
    return DecodeSample(num_jobs=num_jobs, context_tokens=num_jobs * row["context_tokens"], seconds=seconds)
