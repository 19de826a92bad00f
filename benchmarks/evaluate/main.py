"""Evaluates what overflow does to a model's answers, and what reusing the KV of text chunks does to them.

    python -m ca_jax.launch.evaluate --task=ppl --method=tt,ca,nkvt --data=wikitext2.txt --window=1024 \\
        --truncation_ratio=0.5 --max_tokens=50000 --plot_out=ppl.png --json_out=ppl.json
    python -m ca_jax.launch.evaluate --task=ppl --method=tt,ca,ca:anchor_tokens=16,ca:repair_ratio=0.1 \\
        --data=c4_sample.jsonl --json_out=repair.json
    python -m ca_jax.launch.evaluate --task=longeval --method=tt,ca --data=longeval/200_lines.jsonl \\
        --max_items=100 --json_out=lines.json
    python -m ca_jax.launch.evaluate --task=longeval --data=longeval/200_lines.jsonl --max_loss=0.03 \\
        --method=tt,ca:repair=none,ca:repair_ratio=0.05,ca,ca:repair_ratio=0.15 --json_out=repair.json
    python -m ca_jax.launch.evaluate --task=mmlu --method=tt,ca --data=mmlu_dev --preamble=wikitext2.txt \\
        --json_out=mmlu.json
    python -m ca_jax.launch.evaluate --task=agreement --method=tt,ca,nkvt --data=wikitext2.txt --every=256 \\
        --json_out=agreement.json
    python -m ca_jax.launch.evaluate --task=rag --data=musique.json --chunk_tokens=256 --ratios=0.05,0.15,0.3 \\
        --selections=hkvd,random,first --json_out=rag.json
    python -m ca_jax.launch.evaluate --task=rag --data=musique.json --figure=6 --plot_out=6.png --json_out=6.json
    python -m ca_jax.launch.evaluate --task=blend_gate --max_kl_share=0.5 --json_out=gate.json
    python -m ca_jax.launch.evaluate --task=kv_gate --data=wikitext2.txt --fit_data=wikitext2_valid.txt --bits=3.2,4

`ppl` is the perplexity of one long text. `longeval` asks for lines or topics of a record that has overflowed the
window, `mmlu` asks multiple-choice questions behind a text that has. `agreement` is how often a method goes on with a
text as `tt` does, which drops tokens as text and computes the rest anew: what the others are held against. `rag` asks
questions behind text chunks whose KV was computed before, with each way to use it (CacheBlend), and redoes figures of
that paper. `blend_gate` says what share of the chunks' tokens a model must compute anew to stay close to computing all,
and exits with 1 where no ratio of those that are tried will do. `kv_gate` says the same of how few bits a number of KV
may take on SSD. With `--max_loss` `ppl` and `longeval` say it of repair: which of the methods lose no more than that.

The pure model is evaluated, without engine and store: what these keep is what it computes. Intervals and standard
errors are printed and written as JSON, with the machine and the versions. `tools/quality_page.py` makes a page of many.

A task's flags are the fields of its config. One that is not given leaves the config's own default.

Not here: the tasks (a module each), tables (`tables`), figures (`plots`).
"""

from __future__ import annotations

import dataclasses
import difflib
import time
import typing
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from benchmarks.evaluate.agreement import AgreementConfig, run_agreement
from benchmarks.evaluate.comparison import Comparison
from benchmarks.evaluate.items import Chunking
from benchmarks.evaluate.kv_gate import KvGateConfig, run_kv_gate
from benchmarks.evaluate.longeval import LongevalConfig, run_longeval
from benchmarks.evaluate.mmlu import MmluConfig, run_mmlu
from benchmarks.evaluate.perplexity import PerplexityConfig, run_perplexity
from benchmarks.evaluate.plots import draw
from benchmarks.evaluate.rag import DEVIATION_FIGURES, TIMED_FIGURES, GateConfig, RagConfig, run_gate, run_rag
from benchmarks.evaluate.rag_deviation import run_deviation
from benchmarks.evaluate.rag_methods import Blends
from benchmarks.evaluate.stream import ComparedOverflow
from benchmarks.evaluate.tables import Report, print_report
from benchmarks.evaluate.timing import run_timing
from benchmarks.flags import CaseFlags
from ca_jax.config import EngineConfig
from ca_jax.errors import CaJaxError
from ca_jax.launch.flags import (
    ConfigFlags,
    FlagError,
    define_dtype,
    define_flag,
    define_model,
    help_of,
    made,
    out_path,
    refuse,
)
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.launch.plots import require_matplotlib
from ca_jax.launch.script import command_line, make_console, note, write_json
from ca_jax.launch.terminal import progress_bars
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel, Progress, load_model
from ca_jax.serving.core import enable_compile_cache

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

FLAGS = flags.FLAGS
ERRORS = (CaJaxError,)
"""What ends the script with one line."""
TASKS: dict[str, tuple[type, Callable[..., Any]]] = {
    "ppl": (PerplexityConfig, run_perplexity),
    "longeval": (LongevalConfig, run_longeval),
    "mmlu": (MmluConfig, run_mmlu),
    "agreement": (AgreementConfig, run_agreement),
    "rag": (RagConfig, run_rag),
    "blend_gate": (GateConfig, run_gate),
    "kv_gate": (KvGateConfig, run_kv_gate),
}
"""What each task is asked by, and what runs it: a function of the model, the config, and what is told of progress.
Figures of `rag` have functions of their own."""

_OVERFLOW_TASKS = ("ppl", "longeval", "mmlu", "agreement")
_PLOTTED_TASKS = ("ppl", "rag")
_GATES = ("blend_gate", "kv_gate")
_PARTS = {"chunking": Chunking, "blends": Blends}  # Configs in the configs of `rag` and `blend_gate`.
_CASES = CaseFlags(
    "task",
    {task: [kind, *_PARTS.values()] if task in ("rag", "blend_gate") else [kind] for task, (kind, _) in TASKS.items()},
    ("comparison", *_PARTS),
)
_OVERFLOW = ConfigFlags(
    OverflowConfig(), without=("overflow_method", "truncate_whole_turns")
)  # Methods are a list here, and a stream has no turns.
_DEFAULT_METHODS = ("tt", "ca", "nkvt")
_METHOD = (
    f"Methods with commas between them, of {', '.join(ComparedOverflow().methods)}. One may say what it has otherwise "
    "than the flags do: tt,ca,ca:anchor_tokens=16,ca:keep_first_tokens=0:repair_ratio=0.1. The first tt is what the "
    "others are held against, and agreement adds one; of gives its very numbers, since it is slower and no worse."
)
_FIGURES = sorted((*DEVIATION_FIGURES, *TIMED_FIGURES))


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags, those of overflow too."""
    here: dict[str, Any] = {"flag_values": flag_values}
    flags.DEFINE_enum("task", None, list(TASKS), "What to evaluate.", required=True, **here)
    flags.DEFINE_list("method", list(_DEFAULT_METHODS), _METHOD, **here)
    flags.DEFINE_string("json_out", None, "File to write the result to; a gate needs none.", **here)
    plot = "ppl: file for a figure of loss around truncations, PNG; rag: of its figure."
    flags.DEFINE_string("plot_out", None, plot, **here)
    define_model(flag_values)
    define_dtype(flag_values)
    for name in ("window", "step_tokens"):
        define_flag(name, int, getattr(Comparison, name), help_of(Comparison, name), **here)
    _CASES.define(flag_values)
    _OVERFLOW.define(flag_values)


def read_config(flag_values: flags.FlagValues = flags.FLAGS) -> Any:
    """The task's config that parsed flags stand for.

    Raises:
      FlagError: a value outside its range, or a flag of another task.
    """
    task = str(flag_values["task"].value)
    given = _CASES.read(task, flag_values)
    if task not in _PLOTTED_TASKS:
        refuse(("plot_out",), f"task {task}", flag_values)
    if flag_values["json_out"].value is None and task not in _GATES:
        raise FlagError(f"json_out must be a file for what {task} gives, got none")
    kind = TASKS[task][0]
    if task in _OVERFLOW_TASKS:
        if "data" not in given:
            raise FlagError(f"data must be what {task} reads, got none")
        return made(kind, comparison=_comparison(task, flag_values), **given)
    refuse(("method", "window", "step_tokens"), f"task {task}", flag_values)
    if task == "kv_gate":
        if "data" not in given:
            raise FlagError("data must be what kv_gate reads, got none")
        return made(kind, **given)
    if given.get("figure") not in (None, *_FIGURES):
        raise FlagError(f"figure must be one of {', '.join(map(str, _FIGURES))}; got {given['figure']}")
    for name, part in _PARTS.items():
        of_part = [field.name for field in dataclasses.fields(part) if field.name in given]
        given[name] = made(part, **{field: given.pop(field) for field in of_part})
    return made(kind, **given)


def parse_method(text: str, base: OverflowConfig) -> OverflowConfig:
    """A way to overflow as `--method` spells it: "ca", or "ca:anchor_tokens=16", which is `base` in all else."""
    hints = typing.get_type_hints(OverflowConfig)
    kinds = {name: hints[name] if hints[name] in (int, float) else str for name in hints}
    del kinds["method"], kinds["whole_turns"]
    method, *changes = text.strip().split(":")
    values: dict[str, Any] = {"method": method}
    for change in changes:
        field, _, value = change.partition("=")
        if field not in kinds:
            close = difflib.get_close_matches(field, kinds, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise FlagError(f"method must have FIELD=VALUE of {', '.join(kinds)}; got {change!r} in {text!r}{hint}")
        try:
            values[field] = kinds[field](value)
        except ValueError as error:
            wanted = "an integer" if kinds[field] is int else "a number"
            raise FlagError(f"{field} must be {wanted}, got {value!r} in {text!r}") from error
    return made(dataclasses.replace, base, **values)


def _comparison(task: str, flag_values: flags.FlagValues) -> Comparison:
    base = ComparedOverflow(**vars(_OVERFLOW.read(flag_values)))
    methods = [parse_method(text, base) for text in flag_values["method"].value or []]
    if task == "agreement" and all(overflow.method != "tt" for overflow in methods):
        methods.insert(0, dataclasses.replace(base, method="tt"))
    sizes: dict[str, Any] = {name: flag_values[name].value for name in ("window", "step_tokens")}
    return made(Comparison, methods=tuple(methods), **sizes)


def run(task: str, config: Any, load: Callable[[Progress], LoadedModel], *, command: str) -> Report:
    """Loads the model, runs a task and says all about it. Progress goes to stderr."""
    described = describe_machine()
    enable_compile_cache(EngineConfig().compile_cache_dir)
    evaluate = TASKS[task][1]
    if isinstance(config, RagConfig) and config.figure is not None:
        evaluate = run_timing if config.figure in TIMED_FIGURES else run_deviation
    with progress_bars() as progress:
        model = load(progress)
        started_s = time.perf_counter()
        done = evaluate(model, config, progress)
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


def main(_: Sequence[str]) -> int:
    """Runs from the command line; 1 where a gate is passed by nothing."""
    console, config = make_console(), read_config()
    json_out, plot_out = out_path("json_out"), out_path("plot_out")
    if plot_out is not None:
        require_matplotlib()

    def load(progress: Progress) -> LoadedModel:
        return load_model(FLAGS.model, dtype=FLAGS.dtype, progress=progress)

    report = dict(run(FLAGS.task, config, load, command=command_line("evaluate")))
    if json_out is not None:
        write_json(report, json_out)
    is_drawn = plot_out is not None and draw(plot_out, report)
    print_report(report, console)
    if plot_out is not None and not is_drawn:
        note(console, "no figure: nothing overflowed", None)
    written = [*filter(None, (json_out, plot_out if is_drawn else None))]
    if written:
        note(console, f"written to {', '.join(map(str, written))}", None)
    has_bound = report["task"] in _GATES or report["config"].get("max_loss") is not None
    return int(has_bound and not any(row["passes"] for row in report["rows"]))
