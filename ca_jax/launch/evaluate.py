"""Evaluates what overflow does to a model's answers, and what reusing the KV of text chunks does to them.

    python -m ca_jax.launch.evaluate --task=ppl --method=tt,ca,nkvt --data=wikitext2.txt --window=1024 \\
        --truncation_ratio=0.5 --max_tokens=50000 --plot_out=ppl.png --json_out=ppl.json
    python -m ca_jax.launch.evaluate --task=ppl --method=tt,ca,ca:anchor_tokens=16,ca:repair_ratio=0.1 \\
        --data=c4_sample.jsonl --json_out=repair.json
    python -m ca_jax.launch.evaluate --task=longeval --method=tt,ca --data=longeval/200_lines.jsonl \\
        --max_items=100 --json_out=lines.json
    python -m ca_jax.launch.evaluate --task=mmlu --method=tt,ca --data=mmlu_dev --preamble=wikitext2.txt \\
        --json_out=mmlu.json
    python -m ca_jax.launch.evaluate --task=agreement --method=tt,ca,nkvt --data=wikitext2.txt --every=256 \\
        --json_out=agreement.json
    python -m ca_jax.launch.evaluate --task=rag --data=musique.json --chunk_tokens=256 --ratios=0.05,0.15,0.3 \\
        --selections=hkvd,random,first --json_out=rag.json
    python -m ca_jax.launch.evaluate --task=rag --data=musique.json --figure=6 --plot_out=6.png --json_out=6.json
    python -m ca_jax.launch.evaluate --task=blend_gate --max_kl_share=0.5 --json_out=gate.json

`ppl` is the perplexity of one long text. `longeval` asks for lines or topics of a record that has overflowed the
window, `mmlu` asks multiple-choice questions behind a text that has. `agreement` is how often a method goes on with a
text as `tt` does, which drops tokens as text and computes the rest anew: what the others are held against. `rag` asks
questions behind text chunks whose KV was computed alone, with each way to use it (CacheBlend), and redoes figures of
that paper. `blend_gate` says what share of the chunks' tokens a model must compute anew to stay close to computing all,
and exits with 1 where no ratio of those that are tried will do.

The pure model is evaluated, without engine and store: what these keep is what it computes. Intervals and standard
errors are printed and written as JSON, with the machine and the versions. `tools/quality_page.py` makes a page of many.

Not here: flags and configs (`evaluate_flags`), the tasks (`ca_jax.evaluation`, `evaluate_rag_timing`), tables
(`evaluate_tables`), figures (`evaluate_plots`).
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from ca_jax.config import EngineConfig
from ca_jax.engine import enable_compile_cache
from ca_jax.errors import CaJaxError
from ca_jax.evaluation.agreement import run_agreement
from ca_jax.evaluation.longeval import run_longeval
from ca_jax.evaluation.mmlu import run_mmlu
from ca_jax.evaluation.perplexity import run_perplexity
from ca_jax.evaluation.rag import run_rag
from ca_jax.evaluation.rag_deviation import run_deviation
from ca_jax.evaluation.rag_gate import run_gate
from ca_jax.evaluation.rag_schema import TIMED_FIGURES, GateConfig, RagConfig
from ca_jax.evaluation.schema import AgreementConfig, Evaluation, LongevalConfig, PerplexityConfig, TaskConfig
from ca_jax.launch import evaluate_flags
from ca_jax.launch.evaluate_plots import draw
from ca_jax.launch.evaluate_rag_timing import run_timing
from ca_jax.launch.evaluate_tables import Report, print_report
from ca_jax.launch.flags import out_path
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.launch.progress import progress_bars
from ca_jax.launch.script import command_line, make_console, note, write_json
from ca_jax.launch.script import run as run_script
from ca_jax.pretrained import LoadedModel, Progress, load_model

FLAGS = flags.FLAGS


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
    described = describe_machine()
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
        "versions": describe_versions(),
        "command": command,
        "config": dataclasses.asdict(config),
        "seconds": seconds,
        "rows": [dataclasses.asdict(row) for row in done.rows],
        "items": list(done.items),
    }


def _evaluate(model: LoadedModel, config: TaskConfig, progress: Progress) -> Evaluation:
    if isinstance(config, RagConfig):
        if config.figure in TIMED_FIGURES:
            return run_timing(model, config, progress)
        return (run_rag if config.figure is None else run_deviation)(model, config, progress)
    if isinstance(config, PerplexityConfig):
        return run_perplexity(model, config, progress)
    if isinstance(config, LongevalConfig):
        return run_longeval(model, config, progress)
    if isinstance(config, AgreementConfig):
        return run_agreement(model, config, progress)
    if isinstance(config, GateConfig):
        return run_gate(model, config, progress)
    return run_mmlu(model, config, progress)


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    console = make_console()
    try:
        config = evaluate_flags.config()
        json_out, plot_out = out_path("json_out"), out_path("plot_out")
    except ValueError as error:
        sys.exit(f"error: {error}")

    def load(progress: Progress) -> LoadedModel:
        return load_model(FLAGS.model, dtype=FLAGS.dtype, progress=progress)

    report: dict[str, Any] = dict(run(FLAGS.task, config, load, command=command_line("evaluate")))
    if json_out is not None:
        write_json(report, json_out)
    drawn = plot_out if plot_out is not None and draw(plot_out, report) else None
    print_report(report, console)
    if drawn is not plot_out:
        note(console, "no figure: nothing overflowed", None)
    written = [str(path) for path in (json_out, drawn) if path is not None]
    if written:
        note(console, f"written to {', '.join(written)}", None)
    if report["task"] == "blend_gate" and not any(row["passes"] for row in report["rows"]):
        sys.exit(1)


if __name__ == "__main__":
    evaluate_flags.define()
    run_script(main, errors=(CaJaxError,))
