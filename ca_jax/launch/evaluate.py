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
errors are printed and written as JSON, with the machine and the versions. `evaluate_report` makes a page of many.

Not here: flags and configs (`evaluate_flags`), running (`evaluate_run` and what it runs), tables (`evaluate_tables`).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import rich.console
from absl import app, flags, logging

from ca_jax.errors import CaJaxError
from ca_jax.launch import (
    evaluate_flags,
    evaluate_rag_flags,
    evaluate_rag_plot,
    evaluate_rag_tables,
    evaluate_run,
    evaluate_tables,
)
from ca_jax.launch.evaluate_plot import plot_losses
from ca_jax.launch.machine import summarize_machine
from ca_jax.launch.out_flags import out_path
from ca_jax.launch.scratch import write_json
from ca_jax.pretrained import LoadedModel, Progress, load_model

FLAGS = flags.FLAGS

_PIPE_COLUMNS = 180  # where there is no terminal to ask


def _load(progress: Progress) -> LoadedModel:
    return load_model(FLAGS.model, dtype=FLAGS.dtype, progress=progress)


def main(argv: Sequence[str]) -> None:
    """Runs from the command line."""
    if len(argv) > 1:
        raise app.UsageError(f"wanted flags only, found {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # jax reports each backend that it does not find.
    console = rich.console.Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    try:
        config = evaluate_flags.config()
        json_out, plot_out = out_path("json_out"), out_path("plot_out")
    except ValueError as error:
        sys.exit(f"error: {error}")
    command = shlex.join(["python", "-m", "ca_jax.launch.evaluate", *sys.argv[1:]])
    try:
        report = evaluate_run.run(FLAGS.task, config, _load, command=command)
    except CaJaxError as error:
        sys.exit(f"error: {error}")
    if json_out is not None:
        write_json(report, json_out)
    is_drawn = plot_out is not None and _draw(report, plot_out)
    if report["task"] in evaluate_rag_flags.CONFIGS:
        evaluate_rag_tables.print_report(report, console)
    else:
        evaluate_tables.print_report(report, console)
    if plot_out is not None and not is_drawn:
        console.print("no figure: nothing overflowed", highlight=False)
    written = [path for path in (json_out, plot_out if is_drawn else None) if path is not None]
    if written:
        console.print(f"written to {', '.join(map(str, written))}", highlight=False)
    if report["task"] == "blend_gate" and not any(row["passes"] for row in report["rows"]):
        sys.exit(1)


def _draw(report: evaluate_run.Report, path: Path) -> bool:
    """Draws a report's figure; False where there is none to draw."""
    caption = f"{report['model']} in {report['dtype']}, {summarize_machine(report['machine'])}"
    if report["task"] == "rag":
        evaluate_rag_plot.plot(path, report, caption=caption)
        return True
    if not any(row["curve"] for row in report["rows"]):
        return False
    plot_losses(path, report["rows"], caption=caption)
    return True


if __name__ == "__main__":
    evaluate_flags.define()
    app.run(main)
