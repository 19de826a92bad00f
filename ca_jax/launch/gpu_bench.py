"""Measures the accelerator and the engine on it, in one go: what the hardware gives, and how much of it is reached.

    python -m ca_jax.launch.gpu_bench --json_out=results/gpu/h100.json --markdown_out=results/gpu/h100.md

Without an accelerator the same runs small on CPU. Sections come in order of importance. One that would not end within
`--budget_s` is skipped, one that breaks is noted, and what is there is written after each, so that a run that is cut
short leaves all it has measured. No weight is downloaded: all are random, and made on the device.

Not here: what is run and when (`gpu_sections`), what is left (`gpu_report`, `gpu_plot`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

from ca_jax.config import EngineConfig
from ca_jax.engine import enable_compile_cache
from ca_jax.launch import machine
from ca_jax.launch.gpu_plot import plot_figures
from ca_jax.launch.gpu_report import Report, make_report, to_markdown
from ca_jax.launch.gpu_schema import GpuBenchConfig, SectionResult
from ca_jax.launch.gpu_sections import GpuBench, choose_sections, run_sections
from ca_jax.launch.progress import progress_bars

_LARGE_MODEL_BYTES = 45e9  # The 13B model in 16 bits, and the decode slots of the engines that are compared.

_JSON_OUT = flags.DEFINE_string("json_out", None, "File to write the result to.", required=True)
_MARKDOWN_OUT = flags.DEFINE_string("markdown_out", None, "File to write tables to; none by default.")
_PLOT_OUT = flags.DEFINE_string("plot_out", None, "PNG to draw the paper's figures to; none by default.")
_BUDGET_S = flags.DEFINE_float("budget_s", 420.0, "Seconds after which no section is begun that would not end.")
_SMALL = flags.DEFINE_bool("small", None, "A small model and short histories; by default so on CPU alone.")
_SECTIONS = flags.DEFINE_list("sections", [], "Which sections to run; all by default. The first is always run.")
flags.DEFINE_string("preset", None, "Model of prefill, decode and TTFT; by default as the size says.")
flags.DEFINE_string("overlap_preset", None, "Model of the paper's figures; by default as size and memory say.")
flags.DEFINE_integer("repeats", None, "Samples that a median is of; by default as the size says.")


def _config() -> GpuBenchConfig:
    """As the flags say, and where they do not, as the backend does."""
    is_small = jax.default_backend() == "cpu" if _SMALL.value is None else _SMALL.value
    config = GpuBenchConfig.small() if is_small else GpuBenchConfig()
    stats = jax.local_devices()[0].memory_stats() or {}
    if not is_small and stats.get("bytes_limit", math.inf) < _LARGE_MODEL_BYTES:
        config = dataclasses.replace(config, overlap_preset="llama2-7b")
    given = {name: flags.FLAGS[name].value for name in ("preset", "overlap_preset", "repeats")}
    return dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})


def _write(report: Report) -> None:
    """Leaves what there is."""
    for path, text in (
        (_JSON_OUT.value, json.dumps(report, indent=2) + "\n"),
        (_MARKDOWN_OUT.value, to_markdown(report)),
    ):
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
    rows: dict[str, Any] = {section["name"]: section["rows"] for section in report["sections"]}
    if _PLOT_OUT.value is not None and any(rows.get(name) for name in ("figure_18", "figure_19", "figure_20")):
        plot_figures(
            Path(_PLOT_OUT.value),
            rows,
            title="The paper's figures 18 to 20, redone",
            caption=machine.summarize_machine(report["machine"]),
        )


def main(argv: Sequence[str]) -> int:
    """Runs all and writes it; 1 if a section broke off."""
    if len(argv) > 1:
        raise app.UsageError(f"wanted flags alone, found {argv[1:]}")
    try:
        config, sections = _config(), choose_sections(_SECTIONS.value)
    except ValueError as error:
        logging.error("%s", error)
        return 2
    enable_compile_cache(EngineConfig.compile_cache_dir)
    described, versions = machine.describe_machine(), machine.describe_versions()
    command = shlex.join(["python", "-m", "ca_jax.launch.gpu_bench", *sys.argv[1:]])
    for path in (_JSON_OUT.value, _MARKDOWN_OUT.value, _PLOT_OUT.value):
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        bench = GpuBench(config, stack.enter_context(progress_bars()))

        def after_each(results: Sequence[SectionResult]) -> None:
            report = make_report(
                config,
                results,
                bench.probes,
                machine=described,
                versions=versions,
                command=command,
                budget_s=_BUDGET_S.value,
            )
            _write(report)
            print(f"{results[-1].name}: {results[-1].status}, {results[-1].seconds:.1f} s", file=sys.stderr)

        results = run_sections(bench, sections, budget_s=_BUDGET_S.value, after_each=after_each)
    return 1 if any(result.status == "failed" for result in results) else 0


if __name__ == "__main__":
    app.run(main)
