"""What a simulated server is: its model, its devices and what computing takes on them, the tiers of its store.

What computing takes follows from data sheets, or is fitted to rows of `ca_jax.launch.bench` or to a replay.

Not here: serving (server), measured rates themselves (`ca_jax.kv.costs`), the paper's set-ups (benchmarks).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ca_jax.errors import check
from ca_jax.kv.costs import PrefillRate, PrefillSample, fit_times
from ca_jax.overflow.config import OverflowConfig

BELADY = "belady"
"""The eviction policy that knows when sessions come back: a bound, for `StoreSizes.eviction_policy`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimModel:
    """A transformer's sizes."""

    name: str
    num_params: float
    num_layers: int
    """L."""
    num_heads: int
    """N, query heads."""
    num_kv_heads: int
    """K."""
    head_dim: int
    """H."""
    window: int
    dtype_bytes: int = 2
    """Bytes of a weight, and of a number of KV."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.num_params * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator."""

    name: str
    flops: float
    """Peak operations a second, dense, at the dtype of the weights."""
    hbm_bytes: float
    hbm_bytes_per_s: float
    """Bandwidth of that."""
    link_bytes_per_s: float
    """Bandwidth of its link to the host, one way."""


_MODEL_FIELDS = "num_params", "num_layers", "num_heads", "num_kv_heads", "head_dim", "window", "dtype_bytes"
_MODELS: dict[str, tuple[float, int, int, int, int, int, int]] = {
    "llama-13b": (13.0e9, 40, 40, 40, 128, 4096, 2),
    "llama-65b": (65.2e9, 80, 64, 64, 128, 2048, 2),
    "llama-70b": (69.0e9, 80, 64, 8, 128, 4096, 2),
    "falcon-40b": (41.8e9, 60, 128, 8, 64, 2048, 2),
    "llama3-8b": (8.03e9, 32, 32, 8, 128, 8192, 2),
    "mistral-7b": (7.2e9, 32, 32, 8, 128, 32768, 2),
    "smollm2-135m": (134.5e6, 30, 9, 3, 64, 8192, 4),
}
MODELS = {
    name: SimModel(name=name, **dict(zip(_MODEL_FIELDS, sizes, strict=True)))  # type: ignore[arg-type]
    for name, sizes in _MODELS.items()
}
"""The models of the paper and Llama 3 8B, as published, and the one that the benchmarks measure, as they do: in
float32."""

DEVICES = {
    device.name: device
    for device in (
        Device(name="a100-40", flops=312e12, hbm_bytes=40e9, hbm_bytes_per_s=1.555e12, link_bytes_per_s=26e9),
        Device(name="a100-80", flops=312e12, hbm_bytes=80e9, hbm_bytes_per_s=2.039e12, link_bytes_per_s=26e9),
        Device(name="h100", flops=989e12, hbm_bytes=80e9, hbm_bytes_per_s=3.35e12, link_bytes_per_s=52e9),
        Device(name="a40", flops=149.7e12, hbm_bytes=48e9, hbm_bytes_per_s=696e9, link_bytes_per_s=26e9),
    )
}
"""Data sheets; links as PCIe of their generation delivers it, 26 GB/s for 16 lanes of the fourth (the paper, 2.3)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RooflineCost:
    """What computing takes by data sheets: operations and bytes over what devices do of them, the slower of both.

    Raises:
      ValueError: a share outside (0, 1], or no device.
    """

    model: SimModel
    device: Device
    num_devices: int
    """How many share each layer's work."""
    flops_share: float = 0.6
    """Share of peak operations that a prefill reaches. The paper's own 360 ms for 2,048 tokens of a model of 65 G
    weights on four A100 are 0.6."""
    bytes_share: float = 0.7
    """Share of the memory's bandwidth that a step reaches."""
    step_s: float = 0.0
    """Seconds of every pass through the layers, however small."""

    def __post_init__(self) -> None:
        for name in ("flops_share", "bytes_share"):
            check(0 < getattr(self, name) <= 1, name, "a share in (0, 1]", getattr(self, name))
        check(self.num_devices >= 1, "num_devices", "at least 1", self.num_devices)
        check(0 <= self.step_s < math.inf, "step_s", "seconds of at least 0", self.step_s)

    def prefill_s(self, history_tokens: int, new_tokens: int, num_jobs: int = 1) -> float:
        """Seconds of a prefill of one job, its history on the device; or of several alike at once."""
        pairs = new_tokens * (history_tokens + new_tokens / 2)
        return self._step_s(num_jobs * new_tokens, num_jobs * pairs, num_jobs * (history_tokens + new_tokens))

    def decode_s(self, num_jobs: int, context_tokens: int) -> float:
        """Seconds of a decode step of `num_jobs` jobs, with `context_tokens` in all their contexts together."""
        return self._step_s(num_jobs, context_tokens, context_tokens)

    def _step_s(self, num_tokens: int, num_pairs: float, kv_tokens: int) -> float:
        model = self.model
        flops = 2 * model.num_params * num_tokens + 4 * model.num_layers * model.num_heads * model.head_dim * num_pairs
        num_bytes = model.weight_bytes + model.token_bytes * kv_tokens
        compute_s = flops / (self.num_devices * self.device.flops * self.flops_share)
        memory_s = num_bytes / (self.num_devices * self.device.hbm_bytes_per_s * self.bytes_share)
        return self.step_s + max(compute_s, memory_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreSizes:
    """The tiers of a simulated store.

    Raises:
      ValueError: a size or rate outside its range.
    """

    dram_bytes: float
    """Capacity of DRAM."""
    ssd_bytes: float = 0.0
    """Capacity of SSD; 0 for none."""
    ssd_read_bytes_per_s: float = 5e9
    """Bandwidth of fetches. The paper has disks of less than 5 GB/s (section 2.4)."""
    ssd_write_bytes_per_s: float = 5e9
    """Bandwidth of flushes."""
    eviction_policy: str = "scheduler_aware"
    """As in `StoreConfig`, or `BELADY`."""
    looks_ahead: bool = True
    """Whether the store knows of waiting jobs. If not, KV is fetched when its job is the next."""
    ttl_s: float | None = None
    """As in `StoreConfig`."""
    block_tokens: int = 128
    """As in `StoreConfig`."""

    def __post_init__(self) -> None:
        for name in ("dram_bytes", "ssd_read_bytes_per_s", "ssd_write_bytes_per_s"):
            check(0 < getattr(self, name) < math.inf, name, "a number above 0", getattr(self, name))
        check(0 <= self.ssd_bytes < math.inf, "ssd_bytes", "a number of at least 0", self.ssd_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """A simulated server."""

    model: SimModel
    cost: RooflineCost | FittedCost
    """What computing takes."""
    link_bytes_per_s: float
    """Bandwidth between DRAM and the devices, each way."""
    hbm_tokens: float = math.inf
    """Most tokens whose KV the devices hold."""
    max_batch_size: int = 24
    """Decode slots."""
    prefills_block: bool = True
    """Whether nothing is decoded while a job can be prefilled, as in the paper; if not, each job in a slot decodes a
    token between two prefills, as in this engine."""
    queue_order: str = "arrival"
    """As in `EngineConfig`; by arrival in the paper."""
    store: StoreSizes | None = None
    """Where KV is kept between turns; None to recompute it."""
    overflow: OverflowConfig = dataclasses.field(default_factory=lambda: OverflowConfig(keep_first_tokens=0))
    """What happens when a context is full; `method` `ca`, or `of` where what is stored is lost then. Repair takes no
    simulated time."""
    warmup_turns: int = 0
    """First turns that are not counted."""
    resume_error: float | None = None
    """Clients say at a turn's end when the next one comes, where there is one, times `exp` of a normal number with this
    standard deviation; None: they say nothing."""


_SAMPLES: dict[str, Callable[[Mapping[str, Any]], list[tuple[int, int, float]]]] = {
    "prefill": lambda row: [(0, row["tokens"], row["prefill_s"])],
    "reuse": lambda row: [
        (0, row["history_tokens"] + row["new_tokens"], row["ttft_recompute_s"]),
        (row["history_tokens"], row["new_tokens"], row["ttft_reuse_s"] - row["load_stall_s"]),
    ],
    "ttft": lambda row: [(row["history_tokens"], row["new_tokens"], row["compute_s"])],
    "decode": lambda row: [(num := row["batch_size"], num * row["context_tokens"], num / row["tokens_per_s"])],
}  # What a row says: tokens of history, new ones and seconds; of decode steps jobs, tokens of contexts and seconds.
FITTED_SUITES = tuple(_SAMPLES)
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
    """What computing takes by measured rates."""

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
        prefills: list[tuple[int, int, float]] = []
        decodes: list[tuple[int, int, float]] = []
        subjects: dict[tuple[str, str], None] = {}
        for path in map(Path, paths):
            report = _read(path)
            subjects[str(report.get("model")), str(report.get("dtype"))] = None
            samples, sample_of = decodes if report["suite"] == "decode" else prefills, _SAMPLES[report["suite"]]
            try:
                samples += [sample for row in report["rows"] for sample in sample_of(row)]
            except (KeyError, TypeError, ZeroDivisionError) as error:
                raise ValueError(f"{path}: rows must be as bench writes them, got {error!r}") from error
        if len(subjects) > 1:
            raise ValueError(f"cost must be benches of one model, got {', '.join(map(' '.join, subjects))}")
        for name, samples, suites in (("prefills", prefills, FITTED_SUITES[:3]), ("decode steps", decodes, ["decode"])):
            if not samples:
                raise ValueError(f"cost must have a bench of {name} (suite {' or '.join(suites)}), got none")
        return cls.fit(
            [PrefillSample(history_tokens=old, new_tokens=new, seconds=seconds) for old, new, seconds in prefills],
            [DecodeSample(num_jobs=num, context_tokens=of, seconds=seconds) for num, of, seconds in decodes],
        )

    def prefill_s(self, history_tokens: int, new_tokens: int) -> float:
        """As of `RooflineCost`."""
        return self.prefill.seconds(history_tokens, new_tokens)

    def decode_s(self, num_jobs: int, context_tokens: int) -> float:
        """As of `RooflineCost`."""
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
