"""Runs one task and says all about it: what came out, on what machine, by which versions, and how to do it again.

Not here: flags and main (`evaluate`), the tasks (`evaluation`), tables (`evaluate_tables`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from ca_jax.config import EngineConfig
from ca_jax.engine import enable_compile_cache
from ca_jax.evaluation.agreement import run_agreement
from ca_jax.evaluation.longeval import run_longeval
from ca_jax.evaluation.mmlu import run_mmlu
from ca_jax.evaluation.perplexity import run_perplexity
from ca_jax.evaluation.rag import run_rag
from ca_jax.evaluation.rag_deviation import run_deviation
from ca_jax.evaluation.rag_gate import run_gate
from ca_jax.evaluation.rag_schema import TIMED_FIGURES, GateConfig, RagConfig
from ca_jax.evaluation.schema import (
    AgreementConfig,
    Evaluation,
    LongevalConfig,
    PerplexityConfig,
    TaskConfig,
)
from ca_jax.launch import machine
from ca_jax.launch.evaluate_rag_timing import run_timing
from ca_jax.launch.progress import progress_bars
from ca_jax.pretrained import LoadedModel, Progress

Report = dict[str, Any]
"""task, model, dtype, machine, versions, command, config, seconds, rows, items; JSON types only.

`config` and `rows` have the fields of the task's config and row (`evaluation.schema`); what items hold is said at
`Evaluation`.
"""


def run(task: str, config: TaskConfig, load: Callable[[Progress], LoadedModel], *, command: str) -> Report:
    """Loads the model, runs a task and says all about it. Progress goes to stderr.

    Args:
      task: its name.
      config: what is asked.
      load: gives the model.
      command: how it was asked for.

    Raises:
      EvaluationError: the data are not what the task wants, or do not fit the settings.
      CaJaxError: the model cannot be loaded.
    """
    described = machine.describe_machine()
    enable_compile_cache(EngineConfig().compile_cache_dir)
    with progress_bars() as progress:
        model = load(progress)
        started_s = time.perf_counter()
        done = _evaluate(model, config, progress)
        seconds = time.perf_counter() - started_s
    return {
        "task": task,
        "model": model.name,
        "dtype": model.dtype,
        "machine": described,
        "versions": machine.describe_versions(),
        "command": command,
        "config": dataclasses.asdict(config),
        "seconds": seconds,
        "rows": [dataclasses.asdict(row) for row in done.rows],
        "items": list(done.items),
    }


def _evaluate(model: LoadedModel, config: TaskConfig, progress: Progress) -> Evaluation:
    if isinstance(config, PerplexityConfig):
        return run_perplexity(model, config, progress)
    if isinstance(config, LongevalConfig):
        return run_longeval(model, config, progress)
    if isinstance(config, AgreementConfig):
        return run_agreement(model, config, progress)
    if isinstance(config, GateConfig):
        return run_gate(model, config, progress)
    if isinstance(config, RagConfig):
        if config.figure in TIMED_FIGURES:
            return run_timing(model, config, progress)
        return (run_rag if config.figure is None else run_deviation)(model, config, progress)
    return run_mmlu(model, config, progress)
