"""What the accelerator's benchmark is asked and answers: sizes, findings of its sections, and floors.

Not here: measuring (`probes`, `model`, `ttft`, `paper`), what is run when (`sections`), tables (`report`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from benchmarks.harness import Config, require
from ca_jax.config import EngineConfig
from ca_jax.models.presets import PRESETS

MATMUL_FLOOR = 0.5
"""Least share of the measured matmul peak that prefill reaches."""
ROOFLINE_FLOOR = 0.7
"""Least share of the memory bandwidth's roofline that decoding reaches."""
LINK_FLOOR = 0.8
"""Least share of the link's measured pinned bandwidth that a load from DRAM reaches."""
TTFT_CEILING = 1.15
"""Most that TTFT on a DRAM hit is over the larger of load and compute."""
KERNEL_CEILING = 0.01
"""Most that attention in 16 bits is off, of its norm."""
LOGITS_CEILING = 0.05
"""Most that logits in 16 bits differ from another engine's in 16 bits, of their norm."""

Status = Literal["done", "skipped", "failed"]
"""Of a section. Skipped: the time was spent. Failed: it broke off, and the others went on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuBenchConfig(Config):
    """What to measure of an accelerator, and of the engine on it. The defaults are for one with 40 GB or more."""

    may_be_zero: ClassVar = frozenset({"seed", "figure18_read_buffers", "figure19_read_buffers"})

    preset: str = "llama3-8b"
    """Shapes of the model for prefill, decode and TTFT; weights are random."""
    overlap_preset: str = "llama2-13b"
    """Shapes of the model of the paper's figures."""
    dtype: str = "bfloat16"
    """Of weights and KV."""
    matmul_size: int = 8192
    """Rows and columns of the matrices that the peak is measured with."""
    memory_mib: int = 2048
    """Read and written to measure the device's memory, MiB."""
    transfer_mib: int = 256
    """Of one copy between host and device, MiB."""
    prefill_tokens: int = 2048
    """New tokens of the prefill, in one pass."""
    batch_size: int = 16
    """Rows that decode together."""
    context_tokens: int = 990
    """Tokens of each row before it decodes; with the steps behind them they stay under 1,024, whatever is padded to."""
    decode_steps: int = 4
    """Steps in one sample."""
    history_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Histories in DRAM that TTFT is measured over."""
    new_tokens: int = 100
    """Tokens of the turns over them, and over figure 19's history."""
    chunk_tokens: int = 2048
    """Most new tokens of one pass, in all engines."""
    figure18_prompt_tokens: int = 1024
    """Figure 18: tokens of history and turn together."""
    figure18_history_tokens: tuple[int, ...] = (500, 600, 700, 800, 900)
    """Figure 18: tokens of those whose KV is stored."""
    figure18_read_buffers: tuple[int, ...] = (0, 15)
    """Figure 18: layers of the read buffer."""
    figure19_history_tokens: int = 1024
    """Figure 19: tokens whose KV is stored."""
    figure19_read_buffers: tuple[int, ...] = (0, 5, 10, 15)
    """Figure 19: layers of the read buffer."""
    figure20_prompt_tokens: tuple[int, ...] = (1000, 1200, 1400, 1600)
    """Figure 20: tokens of the prompts."""
    figure20_answer_tokens: int = 20
    """Figure 20: tokens of every answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("preset", "overlap_preset"):
            value = getattr(self, name)
            require(value in PRESETS, name, f"one of {', '.join(sorted(PRESETS))}", repr(value))

    @property
    def engine(self) -> EngineConfig:
        """Of all engines."""
        return EngineConfig(max_num_batched_tokens=self.chunk_tokens, recompute_if_faster=False, compile_cache_dir=None)

    @classmethod
    def small(cls) -> GpuBenchConfig:
        """The same, of a small model and short histories: for a machine without an accelerator."""
        return cls(
            preset="smollm2-135m",
            overlap_preset="smollm2-135m",
            dtype="float32",
            matmul_size=1024,
            memory_mib=64,
            transfer_mib=32,
            prefill_tokens=256,
            batch_size=4,
            context_tokens=200,
            decode_steps=2,
            history_tokens=(256, 512),
            new_tokens=40,
            chunk_tokens=256,
            figure18_prompt_tokens=256,
            figure18_history_tokens=(128, 216),
            figure19_history_tokens=256,
            figure19_read_buffers=(0, 15),
            figure20_prompt_tokens=(250,),
            figure20_answer_tokens=4,
            repeats=2,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floor:
    """One figure and what it is to reach."""

    what: str
    value: float
    bound: float
    """What it is to be."""
    is_ceiling: bool = False
    """Whether it is to be at most that, rather than at least."""

    @property
    def is_met(self) -> bool:
        """Whether it is so."""
        return self.value <= self.bound if self.is_ceiling else self.value >= self.bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What a section measured."""

    rows: list[dict[str, Any]]
    """Tables' rows, by column; JSON types. Columns that end in `_s` are seconds, in `_per_s` a rate."""
    floors: list[Floor] = dataclasses.field(default_factory=list)
    """Whether it is enough."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What else is to be known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionResult:
    """A section that was run, or was not."""

    name: str
    title: str
    status: Status
    seconds: float
    findings: Findings
    """Nothing unless it is done; a note says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probes:
    """How fast the device is when nothing of ours is in the way; bytes and floating-point operations per second."""

    matmul_flops_per_s: float
    """Of one large matrix product in the config's dtype, the fastest sample."""
    memory_read_bytes_per_s: float
    """Of summing a large array in the device's memory."""
    memory_copy_bytes_per_s: float
    """Of a pass over one that writes another; both count."""
    to_device_bytes_per_s: float
    """From the host's pinned memory, several copies on their way."""
    to_host_bytes_per_s: float
    """To it."""
    to_device_mapped_bytes_per_s: float | None
    """From an array that was registered for DMA; None where the backend offers no such thing."""
    to_device_pageable_bytes_per_s: float | None
    """From an array that was not; None on CPU, where that is no copy."""
    to_host_pageable_bytes_per_s: float | None
    """To an array of no special kind; likewise."""
    host_copy_bytes_per_s: float
    """From host memory to host memory by up to 16 cores, bytes counted once."""
