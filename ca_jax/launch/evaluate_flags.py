"""The flags of the evaluation, and the task's config that they stand for.

A task's flags are the fields of its config. One that is not given leaves the config's own default, which may differ
from task to task.

Not here: how flags are made of fields (`launch.flags`), running (`launch.evaluate`).
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Sequence
from typing import Any

from absl import flags

from ca_jax.evaluation.comparison import Comparison
from ca_jax.evaluation.rag_schema import DEVIATION_FIGURES, TIMED_FIGURES, Blends, Chunking, GateConfig, RagConfig
from ca_jax.evaluation.schema import AgreementConfig, LongevalConfig, MmluConfig, PerplexityConfig, TaskConfig
from ca_jax.evaluation.stream import ComparedOverflow
from ca_jax.launch.flags import ConfigFlags, define_dtype, define_flag, define_model, help_of, parsed
from ca_jax.overflow.config import OverflowConfig

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

CONFIGS: dict[str, type[TaskConfig]] = {
    "ppl": PerplexityConfig,
    "longeval": LongevalConfig,
    "mmlu": MmluConfig,
    "agreement": AgreementConfig,
    "rag": RagConfig,
    "blend_gate": GateConfig,
}
"""What each task is asked by."""

_OVERFLOW_TASKS = ("ppl", "longeval", "mmlu", "agreement")
_PARTS = {"chunking": Chunking, "blends": Blends}  # Configs in a task's config.
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


def define(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags, those of overflow too.

    Raises:
      absl.flags.DuplicateFlagError: another flag has such a name.
    """
    here: dict[str, Any] = {"flag_values": flag_values}
    flags.DEFINE_enum("task", None, list(CONFIGS), "What to evaluate.", required=True, **here)
    flags.DEFINE_list("method", list(_DEFAULT_METHODS), _METHOD, **here)
    flags.DEFINE_string("json_out", None, "File to write the result to; blend_gate needs none.", **here)
    flags.DEFINE_string(
        "plot_out", None, "ppl: file for a figure of loss around truncations, PNG; rag: of its figure.", **here
    )
    define_model(flag_values)
    define_dtype(flag_values)
    for name in ("window", "step_tokens"):
        define_flag(name, int, getattr(Comparison, name), help_of(Comparison, name), **here)
    for name in dict.fromkeys(name for task in CONFIGS for name in _fields(task)):
        tasks: dict[str, list[str]] = {}
        for task in CONFIGS:
            if name in _fields(task):
                kind, hint = _fields(task)[name]
                tasks.setdefault(_described(kind, name), []).append(task)
        text = " ".join(f"{', '.join(those)}: {told}" for told, those in tasks.items())
        define_flag(name, hint, None, text, **here)
    _OVERFLOW.define(flag_values)


def config(flag_values: flags.FlagValues = flags.FLAGS) -> TaskConfig:
    """The task's config that parsed flags stand for.

    Raises:
      ValueError: a value outside its range, or a flag of another task; the message names the flag.
    """

    def value(name: str) -> Any:
        return flag_values[name].value

    task = value("task")
    names = dict.fromkeys(name for each in CONFIGS for name in _fields(each) if value(name) is not None)
    for name in names:
        _check_task(name, [each for each in CONFIGS if name in _fields(each)], task)
    given = {name: parsed(name, _fields(task)[name][1], value(name)) for name in names}
    if value("plot_out") is not None:
        _check_task("plot_out", ["ppl", "rag"], task)
    if value("json_out") is None and task != "blend_gate":
        raise ValueError(f"json_out must be a file for what {task} gives, got none")
    if task in _OVERFLOW_TASKS:
        if "data" not in given:
            raise ValueError(f"data must be what {task} reads, got none")
        given["comparison"] = _comparison(task, flag_values)
        return CONFIGS[task](**given)
    for name in ("method", "window", "step_tokens"):
        if flag_values[name].present:
            _check_task(name, _OVERFLOW_TASKS, task)
    if given.get("figure") not in (None, *_FIGURES):
        raise ValueError(f"figure must be one of {', '.join(map(str, _FIGURES))}; got {given['figure']}")
    if "max_kl" in given:
        given.setdefault("max_kl_share", None)
    for part, kind in _PARTS.items():
        of_part = [field.name for field in dataclasses.fields(kind) if field.name in given]
        given[part] = kind(**{name: given.pop(name) for name in of_part})
    return CONFIGS[task](**given)


def parse_method(text: str, base: OverflowConfig) -> OverflowConfig:
    """A way to overflow as `--method` spells it: "ca", or "ca:anchor_tokens=16".

    Args:
      text: its name, and fields that are not as in `base`.
      base: what else it is.

    Raises:
      ValueError: no such method or field, or a value that is none.
    """
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
            raise ValueError(f"method must have FIELD=VALUE of {', '.join(kinds)}; got {change!r} in {text!r}{hint}")
        try:
            values[field] = kinds[field](value)
        except ValueError as error:
            wanted = "an integer" if kinds[field] is int else "a number"
            raise ValueError(f"{field} must be {wanted}, got {value!r} in {text!r}") from error
    return dataclasses.replace(base, **values)


def _comparison(task: str, flag_values: flags.FlagValues) -> Comparison:
    base = ComparedOverflow(**vars(_OVERFLOW.read(flag_values)))
    texts: list[str] = flag_values["method"].value or []
    methods = [parse_method(text, base) for text in texts]
    if task == "agreement" and all(overflow.method != "tt" for overflow in methods):
        methods.insert(0, dataclasses.replace(base, method="tt"))
    sizes: dict[str, Any] = {name: flag_values[name].value for name in ("window", "step_tokens")}
    return Comparison(methods=tuple(methods), **sizes)


def _fields(task: str) -> dict[str, tuple[type, Any]]:
    """Fields of a task's config and of its parts that are flags: of which config, and of what type."""
    found: dict[str, tuple[type, Any]] = {}
    for kind in (CONFIGS[task], *(_PARTS.values() if issubclass(CONFIGS[task], RagConfig | GateConfig) else ())):
        hints = typing.get_type_hints(kind)
        found |= {name: (kind, hint) for name, hint in hints.items() if name not in ("comparison", *_PARTS)}
    return found


def _described(kind: type, name: str) -> str:
    default = getattr(kind, name, None)
    if default in (None, ()):
        return help_of(kind, name)
    shown = ",".join(f"{each}" for each in default) if isinstance(default, tuple) else repr(default)
    return f"{help_of(kind, name)} By default {shown}."


def _check_task(flag: str, tasks: Sequence[str], task: str) -> None:
    if task not in tasks:
        raise ValueError(f"{flag} must be of one of the tasks {', '.join(tasks)}; got {task}")
