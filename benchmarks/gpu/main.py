"""Measures the accelerator and the engine on it, in one go: what the hardware gives, and how much of it is reached.

    python -m ca_jax.launch.gpu_bench --json_out=results/gpu/h100.json --markdown_out=results/gpu/h100.md
    python -m ca_jax.launch.tpu_bench --json_out=results/tpu/v5e.json --markdown_out=results/tpu/v5e.md

Without an accelerator the same runs small on CPU. Sections come in order of importance. One that would not end within
`--budget_s` is skipped, one that breaks is noted, and what is there is written after each, so that a run that is cut
short leaves all it has measured. No weight is downloaded: all are random, and made on the device.

Not here: what is run and when (`sections`), what is left (`report`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags

from benchmarks import figures, tables
from benchmarks.gpu.paper import PANELS
from benchmarks.gpu.report import Report, make_report, to_markdown
from benchmarks.gpu.rows import GpuBenchConfig, SectionResult
from benchmarks.gpu.sections import GpuBench, choose_sections, run_sections
from ca_jax import backend
from ca_jax.config import EngineConfig
from ca_jax.errors import CaJaxError
from ca_jax.launch import machine
from ca_jax.launch.flags import made
from ca_jax.launch.plots import require_matplotlib
from ca_jax.launch.script import command_line, write_json
from ca_jax.launch.terminal import progress_bars
from ca_jax.serving.core import enable_compile_cache

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

FLAGS = flags.FLAGS
ERRORS = (CaJaxError,)
"""What ends the script with one line; a section that fails is told of and ends nothing."""

# What models in 16 bits take of a device with the KV pools of the engines that are compared, the largest first.
_TAKEN_BYTES = {"llama2-13b": 45e9, "llama3-8b": 28e9, "smollm2-1.7b": 0}


def define_flags() -> None:
    """Defines the flags."""
    flags.DEFINE_string("json_out", None, "File to write the result to.", required=True)
    flags.DEFINE_string("markdown_out", None, "File to write tables to; none by default.")
    flags.DEFINE_string("plot_out", None, "PNG to draw the paper's figures to; none by default.")
    flags.DEFINE_float("budget_s", 420.0, "Seconds after which no section is begun that would not end.")
    flags.DEFINE_bool("small", None, "A small model and short histories; by default so on CPU alone.")
    flags.DEFINE_list("sections", [], "Which sections to run; all by default. The first is always run.")
    flags.DEFINE_string("preset", None, "Model of prefill, decode and TTFT; by default as the size says.")
    flags.DEFINE_string("overlap_preset", None, "Model of the paper's figures; by default as size and memory say.")
    flags.DEFINE_integer("repeats", None, "Samples that a median is of; by default as the size says.")


def _config() -> GpuBenchConfig:
    """As the flags say, and where they do not, as the backend does."""
    is_small = backend.here().shares_memory if FLAGS.small is None else FLAGS.small
    config = GpuBenchConfig.small() if is_small else GpuBenchConfig()
    stats = jax.local_devices()[0].memory_stats() or {}
    if not is_small:
        memory_bytes = stats.get("bytes_limit", math.inf)
        fitting = [preset for preset, taken_bytes in _TAKEN_BYTES.items() if taken_bytes <= memory_bytes]
        preset = config.preset if config.preset in fitting else fitting[-1]
        config = dataclasses.replace(config, preset=preset, overlap_preset=fitting[0])
    given = {name: FLAGS[name].value for name in ("preset", "overlap_preset", "repeats")}
    return dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})


def _write(report: Report) -> None:
    """Leaves what there is."""
    write_json(report, Path(FLAGS.json_out))
    if FLAGS.markdown_out is not None:
        path = Path(FLAGS.markdown_out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_markdown(report), encoding="utf-8")
    rows = {section["name"]: section["rows"] for section in report["sections"]}
    drawn = {name: panel for name, panel in PANELS.items() if rows.get(name)}
    if FLAGS.plot_out is not None and drawn:
        figures.plot(
            Path(FLAGS.plot_out),
            [dataclasses.replace(panel, only=("figure", name)) for name, panel in drawn.items()],
            [{**row, "figure": name} for name in drawn for row in rows[name]],
            title="The paper's figures 18 to 20, redone",
            caption=tables.summarize_machine(report["machine"]),
        )


def main(_: Sequence[str]) -> int:
    """Runs all and writes it; 1 if a section broke off."""
    config, sections = made(_config), made(choose_sections, FLAGS.sections)
    if FLAGS.plot_out is not None:
        require_matplotlib()
    enable_compile_cache(EngineConfig.compile_cache_dir)
    about = {
        "machine": machine.describe_machine(),
        "versions": machine.describe_versions(),
        "command": command_line("tpu_bench" if backend.here() is backend.TPU else "gpu_bench"),
        "budget_s": FLAGS.budget_s,
    }
    with contextlib.ExitStack() as stack:
        bench = GpuBench(config, stack.enter_context(progress_bars()))

        def after_each(results: Sequence[SectionResult]) -> None:
            _write(make_report(config, results, bench.probes, about))
            print(f"{results[-1].name}: {results[-1].status}, {results[-1].seconds:.1f} s", file=sys.stderr)

        results = run_sections(bench, sections, budget_s=FLAGS.budget_s, after_each=after_each)
    return 1 if any(result.status == "failed" for result in results) else 0
