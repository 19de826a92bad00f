"""The sections of the accelerator's benchmark, in order of importance, and who runs them for as long as time lasts.

Not here: measuring (`gpu_probes`, `gpu_model`, `gpu_ttft`, `gpu_overlap`), flags and main (`gpu_bench`).
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence

from absl import logging

from ca_jax.launch import gpu_model, gpu_overlap
from ca_jax.launch.gpu_probes import measure_probes, probe_findings
from ca_jax.launch.gpu_schema import Findings, GpuBenchConfig, MissingResultError, Probes, SectionResult, Status
from ca_jax.launch.gpu_ttft import measure_ttft
from ca_jax.pretrained import LoadedModel, Progress

Clock = Callable[[], float]


class GpuBench:
    """Runs the sections, one after the other.

    Args:
      config: what to measure.
      progress: told of rounds.
    """

    def __init__(self, config: GpuBenchConfig, progress: Progress) -> None:
        self.probes: Probes | None = None
        """Of the device, once they are measured."""
        self._config = config
        self._progress = progress
        self._model: tuple[str, LoadedModel] | None = None
        self._runner_bench: gpu_model.RunnerBench | None = None

    def run_probes(self) -> Findings:
        """What the hardware gives."""
        self.probes = measure_probes(self._config)
        return probe_findings(self.probes, self._config)

    def run_prefill(self) -> Findings:
        """Prefill against the matmul peak."""
        probes = self._known_probes()
        return self._runner().prefill(probes)

    def run_decode(self) -> Findings:
        """Decoding against the memory's bandwidth."""
        probes = self._known_probes()
        return self._runner().decode(probes)

    def run_ttft(self) -> Findings:
        """Turns over histories in DRAM."""
        probes = self._known_probes()
        return measure_ttft(self._preset(self._config.preset), self._config, probes)

    def run_figure_18(self) -> Findings:
        """Figure 18."""
        return gpu_overlap.figure_18(self._preset(self._config.overlap_preset), self._config, self._progress)

    def run_figure_19(self) -> Findings:
        """Figure 19."""
        return gpu_overlap.figure_19(self._preset(self._config.overlap_preset), self._config, self._progress)

    def run_figure_20(self) -> Findings:
        """Figure 20."""
        return gpu_overlap.figure_20(self._preset(self._config.overlap_preset), self._config, self._progress)

    def _known_probes(self) -> Probes:
        if self.probes is None:
            raise MissingResultError("wanted the device's own rates to compare with, found that they failed")
        return self.probes

    def _preset(self, preset: str) -> LoadedModel:
        """The model; of two the device may not have room for, so there is one at a time."""
        self._runner_bench = None  # Its decode slots are in the way as well.
        if self._model is None or self._model[0] != preset:
            self._model = None
            gc.collect()
            num_tokens = max(self._config.history_tokens) + self._config.new_tokens + 2
            self._model = preset, gpu_model.shaped_model(preset, self._config, num_tokens)
        return self._model[1]

    def _runner(self) -> gpu_model.RunnerBench:
        if self._runner_bench is None:
            self._runner_bench = gpu_model.RunnerBench(self._preset(self._config.preset), self._config)
        return self._runner_bench


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of the benchmark."""

    name: str
    """For the command line and the JSON."""
    title: str
    """For people."""
    needs_s: float
    """Seconds that it takes on an H100 with everything still to be compiled, generously."""
    run: Callable[[GpuBench], Findings]
    """Measures it."""


SECTIONS = (
    Section("probes", "The hardware", 0, GpuBench.run_probes),
    Section("prefill", "Prefill against the matmul peak", 40, GpuBench.run_prefill),
    Section("decode", "Decode against the memory's bandwidth", 60, GpuBench.run_decode),
    Section("ttft", "Turns over histories in DRAM", 90, GpuBench.run_ttft),
    Section("figure_19", "Figure 19: layer-wise pre-loading by depth of the read buffer", 50, GpuBench.run_figure_19),
    Section("figure_20", "Figure 20: asynchronous saving", 70, GpuBench.run_figure_20),
    Section("figure_18", "Figure 18: reuse by share of history", 50, GpuBench.run_figure_18),
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
    """Runs sections for as long as the time lasts; one that breaks does not end the others.

    Args:
      bench: what they are of.
      sections: in the order they are run.
      budget_s: seconds in all; a section that needs more than is left is skipped.
      after_each: called with all results so far.
      clock: gives the time, seconds.
    """
    begun_s = clock()
    results: list[SectionResult] = []
    for section in sections:
        left_s = budget_s - (clock() - begun_s)
        started_s = clock()
        status: Status = "done"
        if section.needs_s and left_s < section.needs_s:
            status, findings = "skipped", _note(f"wanted {section.needs_s:.0f} s, found {max(left_s, 0):.0f} s left")
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
    """The sections of those names, in order, and the first; all for none.

    Raises:
      ValueError: there is no such section.
    """
    known = [section.name for section in SECTIONS]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"sections wanted some of {', '.join(known)}; found {', '.join(unknown)}")
    return [section for section in SECTIONS if not names or section.name in names or section is SECTIONS[0]]


def _note(text: str) -> Findings:
    return Findings(rows=[], notes=[text])
