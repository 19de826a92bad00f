"""The sections of the accelerator's benchmark, in order of importance, run for as long as time lasts.

Not here: measuring (`probes`, `model`, `ttft`, `paper`), flags and main (`main`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence

from absl import logging

from benchmarks.gpu import model, paper, peer
from benchmarks.gpu.kernels import measure_kernels
from benchmarks.gpu.model import RunnerBench
from benchmarks.gpu.probes import measure_probes, probe_findings
from benchmarks.gpu.rows import Findings, GpuBenchConfig, Probes, SectionResult, Status
from benchmarks.gpu.ttft import measure_ttft
from benchmarks.gpu.tuning import measure_tuning
from benchmarks.harness import BenchError
from benchmarks.peers import PeerUnavailableError, TransformersPeer
from ca_jax.pretrained import LoadedModel, Progress

Clock = Callable[[], float]


class GpuBench:
    """Runs the sections, one after the other, with one model at a time."""

    def __init__(self, config: GpuBenchConfig, progress: Progress) -> None:
        self.config = config
        self.progress = progress
        self.probes: Probes | None = None
        """Of the device, once they are measured."""
        self._model: tuple[str, LoadedModel] | None = None
        self._runner: RunnerBench | None = None
        self._peer: TransformersPeer | None = None

    def measure_probes(self) -> Findings:
        """What the hardware gives."""
        self.probes = measure_probes(self.config)
        return probe_findings(self.probes, self.config)

    @property
    def known_probes(self) -> Probes:
        """What was measured; an error where the probes failed."""
        if self.probes is None:
            raise BenchError("the device's own rates must be known to compare with, got none: they failed")
        return self.probes

    def model(self, preset: str) -> LoadedModel:
        """The model; of two the device may not have room for, so there is one at a time."""
        self._runner = None  # Its pages of KV are in the way as well.
        if self._model is None or self._model[0] != preset:
            self._model = self._peer = None
            gc.collect()
            num_tokens = max(self.config.history_tokens) + self.config.new_tokens + 2
            self._model = preset, model.shaped_model(preset, self.config, num_tokens)
        return self._model[1]

    def runner(self) -> RunnerBench:
        """Prefill and decode of the model."""
        probes = self.known_probes
        if self._runner is None:
            self._runner = RunnerBench(self.model(self.config.preset), self.config, probes)
        return self._runner

    def peer(self) -> TransformersPeer | None:
        """Another engine on the model of prefill, decode and TTFT, if it is installed."""
        if self._peer is None:
            with contextlib.suppress(PeerUnavailableError):
                self._peer = TransformersPeer(self.model(self.config.preset))
        return self._peer

    def figure(self, measure: Callable[[LoadedModel, GpuBenchConfig, Progress], Findings]) -> Findings:
        """One of the paper's figures."""
        return measure(self.model(self.config.overlap_preset), self.config, self.progress)


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of the benchmark."""

    name: str
    """For the command line and the JSON."""
    title: str
    needs_s: float
    """Seconds that it takes on an H100 with everything still to be compiled, generously."""
    run: Callable[[GpuBench], Findings]


SECTIONS = (
    Section("probes", "The hardware", 0, GpuBench.measure_probes),
    Section("kernels", "Attention over pages", 30, lambda bench: measure_kernels(bench.config, bench.known_probes)),
    Section("prefill", "Prefill against the matmul peak", 40, lambda bench: bench.runner().prefill()),
    Section("decode", "Decode against the memory's bandwidth", 60, lambda bench: bench.runner().decode()),
    Section("transformers", "Beside transformers", 40, lambda bench: peer.measure_beside(bench.peer(), bench.runner())),
    Section(
        "ttft",
        "Turns over histories in DRAM",
        90,
        lambda bench: measure_ttft(
            probes=bench.known_probes,
            model=bench.model(bench.config.preset),
            config=bench.config,
            peer=bench.peer(),
        ),
    ),
    Section(
        "figure_19",
        "Figure 19: layer-wise pre-loading by depth of the read buffer",
        50,
        lambda bench: bench.figure(paper.figure_19),
    ),
    Section("figure_20", "Figure 20: asynchronous saving", 70, lambda bench: bench.figure(paper.figure_20)),
    Section("figure_18", "Figure 18: reuse by share of history", 50, lambda bench: bench.figure(paper.figure_18)),
    Section("tuning", "Attention over pages, divided otherwise", 60, lambda bench: measure_tuning(bench.config)),
)
"""In order of importance."""


def run_sections(
    bench: GpuBench,
    sections: Sequence[Section],
    *,
    budget_s: float,
    after_each: Callable[[Sequence[SectionResult]], None],
    clock: Clock = time.perf_counter,
) -> list[SectionResult]:
    """Runs sections in order for as long as the time lasts; one that breaks does not end the others.

    One that needs more seconds than are left of `budget_s` is skipped. `after_each` is told all results so far.
    """
    begun_s = clock()
    results: list[SectionResult] = []
    for section in sections:
        left_s = budget_s - (clock() - begun_s)
        started_s = clock()
        status: Status = "done"
        if section.needs_s and left_s < section.needs_s:
            status, findings = "skipped", _note(f"needs {section.needs_s:.0f} s, got {max(left_s, 0):.0f} s left")
        else:
            try:
                findings = section.run(bench)
            except Exception as error:  # Whatever it is: what the other sections find is worth having.
                logging.exception("section %s broke off", section.name)
                status, findings = "failed", _note(f"{type(error).__name__}: {error}")
        results.append(
            SectionResult(
                name=section.name, title=section.title, status=status, seconds=clock() - started_s, findings=findings
            )
        )
        after_each(results)
    return results


def choose_sections(names: Sequence[str]) -> list[Section]:
    """The sections of those names, in order, and the first; all for none. ValueError: there is no such section."""
    known = [section.name for section in SECTIONS]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"sections must be some of {', '.join(known)}; got {', '.join(unknown)}")
    return [section for section in SECTIONS if not names or section.name in names or section is SECTIONS[0]]


def _note(text: str) -> Findings:
    return Findings(rows=[], notes=[text])
