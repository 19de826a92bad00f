"""The flags of the evaluation, and the task's config that they stand for.

A flag that is not given leaves a config's own default, which may differ from task to task.

Not here: flags of overflow (`overflow_flags`) and of prompts made of chunks (`evaluate_rag_flags`), what fields mean
(`evaluation.schema`), running (`evaluate_run`).
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from absl import flags

from ca_jax.evaluation.comparison import Comparison
from ca_jax.evaluation.schema import AgreementConfig, LongevalConfig, MmluConfig, PerplexityConfig, TaskConfig
from ca_jax.launch import evaluate_rag_flags, overflow_flags
from ca_jax.overflow.config import METHODS, OverflowConfig

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

_OVERFLOW_CONFIGS: dict[str, type[PerplexityConfig | LongevalConfig | MmluConfig | AgreementConfig]] = {
    "ppl": PerplexityConfig,
    "longeval": LongevalConfig,
    "mmlu": MmluConfig,
    "agreement": AgreementConfig,
}
CONFIGS: dict[str, type[TaskConfig]] = {**_OVERFLOW_CONFIGS, **evaluate_rag_flags.CONFIGS}
"""What each task is asked by."""
DEFAULT_MODEL = "smollm2-135m-instruct"
"""What is evaluated unless another one is asked for."""
DEFAULT_METHODS = ("tt", "ca", "nkvt")
"""What is compared unless something else is asked for."""

_WITHOUT = ("method", "whole_turns")  # Methods are a list here, and a stream has no turns.
_VARIED: dict[str, type] = {
    "truncation_ratio": float,
    "keep_first_tokens": int,
    "anchor_tokens": int,
    "repair_ratio": float,
    "repair": str,
    "drift": str,
    "discarder": str,
}
_METHOD = (
    f"Methods with commas between them, of {', '.join(METHODS)}. One may say what it has otherwise than the flags do: "
    "tt,ca,ca:anchor_tokens=16,ca:keep_first_tokens=0:repair_ratio=0.1. The first tt is what the others are held "
    "against, and agreement adds one; of gives its very numbers, since it is slower and no worse."
)
_DATA = (
    "ppl, agreement: a text, .txt or .jsonl with a field text. longeval: a .jsonl file of its lines or topics. mmlu: a "
    f"directory of its *_dev.csv files. {evaluate_rag_flags.DATA}"
)
_OF_OVERFLOW = ("method", "window", "step_tokens")
_DEFINERS = {int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string, list: flags.DEFINE_list}
_TASK_FLAGS: dict[str, tuple[type, str]] = {
    "max_tokens": (
        int,
        "ppl, agreement: tokens of the text, from its beginning; mmlu: of the preamble; longeval: of all records, from "
        f"which on no more are fed. By default {PerplexityConfig.max_tokens}, {AgreementConfig.max_tokens}, twice the "
        "window and a step, and all.",
    ),
    "max_items": (
        int,
        "longeval, mmlu, rag, blend_gate: most questions or items; all by default, or 16 where items are made.",
    ),
    "answer_tokens": (
        int,
        "longeval, agreement, rag: most tokens of an answer; by default 12 of one that goes on, 32 in chat, "
        f"{AgreementConfig.answer_tokens}, and {evaluate_rag_flags.RagConfig.answer_tokens}, where 0 asks for none.",
    ),
    "num_lines": (
        int,
        "longeval: lines, or conversations, of a record; by default just as many as overflow the window.",
    ),
    "asked_depth": (
        int,
        "longeval: most tokens between what is asked for and the end of the record; by default "
        f"{LongevalConfig.asked_depth}.",
    ),
    "questions_per_record": (
        int,
        f"longeval: lines asked for of one record; by default {LongevalConfig.questions_per_record}.",
    ),
    "form": (
        str,
        "longeval: begin what is asked for again, for the model to go on with (continue), or ask as LongEval does "
        f"(chat), which small models do not answer; by default {LongevalConfig.form}.",
    ),
    "num_shots": (
        int,
        f"mmlu: other questions of the subject, answered, before each; by default {MmluConfig.num_shots}.",
    ),
    "preamble": (str, "mmlu: text before the questions; by default a wikitext*.txt beside the directory."),
    "every": (
        int,
        f"agreement: tokens from one place where methods go on by themselves to the next; by default "
        f"{AgreementConfig.every}.",
    ),
    "seed": (int, "longeval, mmlu, rag, blend_gate: of what is drawn; by default 0."),
    **evaluate_rag_flags.TASK_FLAGS,
}


def define(*, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags, those of overflow too.

    Args:
      flag_values: where they are defined.

    Raises:
      absl.flags.DuplicateFlagError: another flag has such a name.
    """
    here: dict[str, Any] = {"flag_values": flag_values}
    flags.DEFINE_enum("task", None, list(CONFIGS), "What to evaluate.", required=True, **here)
    flags.DEFINE_string("data", None, _DATA, **here)
    flags.DEFINE_list("method", list(DEFAULT_METHODS), _METHOD, **here)
    flags.DEFINE_string("json_out", None, "File to write the result to; blend_gate needs none.", **here)
    flags.DEFINE_string(
        "plot_out", None, "ppl: file for a figure of loss around truncations, PNG; rag: of its figure.", **here
    )
    flags.DEFINE_string(
        "model",
        DEFAULT_MODEL,
        "Preset, .gguf file, Hugging Face directory or hub name, or converted checkpoint.",
        **here,
    )
    flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16"], "Of weights and KV; by default what is fast here.", **here
    )
    flags.DEFINE_integer("window", Comparison.window, "Most tokens of a context.", **here)
    flags.DEFINE_integer("step_tokens", Comparison.step_tokens, "Tokens that are fed at once.", **here)
    for name, (kind, text) in _TASK_FLAGS.items():
        _DEFINERS[kind](name, None, text, **here)  # type: ignore[operator]
    overflow_flags.define(without=_WITHOUT, flag_values=flag_values)


def config(*, flag_values: flags.FlagValues = flags.FLAGS) -> TaskConfig:
    """The task's config that parsed flags stand for.

    Args:
      flag_values: where they were defined.

    Raises:
      ValueError: a value outside its range, or a flag of another task; the message names the flag.
    """

    def value(name: str) -> Any:
        return flag_values[name].value

    task = value("task")
    given = {name: value(name) for name in _TASK_FLAGS if value(name) is not None}
    for name in given.keys() - _fields(CONFIGS[task]):
        tasks = ", ".join(each for each, other in CONFIGS.items() if name in _fields(other))
        raise ValueError(f"{name} wanted one of the tasks {tasks}; found {task}")
    if value("plot_out") is not None and task not in ("ppl", "rag"):
        raise ValueError(f"plot_out wanted one of the tasks ppl, rag; found {task}")
    if value("json_out") is None and task != "blend_gate":
        raise ValueError(f"json_out wanted a file for what {task} gives, found none")
    if task not in _OVERFLOW_CONFIGS:
        for name in _OF_OVERFLOW:
            if flag_values[name].present:
                raise ValueError(f"{name} wanted one of the tasks {', '.join(_OVERFLOW_CONFIGS)}; found {task}")
        return evaluate_rag_flags.config(task, value("data"), given)
    if value("data") is None:
        raise ValueError(f"data wanted what {task} reads, found none")
    base = overflow_flags.overflow_config(flag_values=flag_values)
    methods = [parse_method(text, base) for text in value("method")]
    if task == "agreement" and all(overflow.method != "tt" for overflow in methods):
        methods.insert(0, dataclasses.replace(base, method="tt"))
    comparison = Comparison(
        methods=tuple(methods),
        window=value("window"),
        step_tokens=value("step_tokens"),
    )
    return _OVERFLOW_CONFIGS[task](comparison=comparison, data=value("data"), **given)


def parse_method(text: str, base: OverflowConfig) -> OverflowConfig:
    """A way to overflow as `--method` spells it: "ca", or "ca:anchor_tokens=16".

    Args:
      text: its name, and fields that are not as in `base`.
      base: what else it is.

    Raises:
      ValueError: no such method or field, or a value that is none.
    """
    method, *changes = text.strip().split(":")
    values: dict[str, Any] = {"method": method}
    for change in changes:
        field, _, value = change.partition("=")
        if field not in _VARIED:
            close = difflib.get_close_matches(field, _VARIED, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"method wanted FIELD=VALUE of {', '.join(_VARIED)}; found {change!r} in {text!r}{hint}")
        kind = _VARIED[field]
        try:
            values[field] = kind(value)
        except ValueError as error:
            wanted = "an integer" if kind is int else "a number"
            raise ValueError(f"{field} wanted {wanted}, found {value!r} in {text!r}") from error
    return dataclasses.replace(base, **values)


def _fields(kind: type[TaskConfig]) -> set[str]:
    if kind in evaluate_rag_flags.CONFIGS.values():
        return evaluate_rag_flags.fields_of(kind)
    return {field.name for field in dataclasses.fields(kind)}
