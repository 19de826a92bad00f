"""The flags of the benchmarks, made from the suites' configs: each field is a flag, and its docstring the help.

A flag that is not given leaves a config's own default, which may differ from suite to suite.

Not here: the engine's flags (`ca_jax.launch.engine_flags`), running (`main`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from absl import flags

from benchmarks.harness import SUITES, Config, field_docs
from benchmarks.peers import PEER_PACKAGES
from ca_jax.launch import engine_flags
from ca_jax.launch.refused_flags import refuse_flags
from ca_jax.models.presets import PRESETS

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

DEFAULT_MODEL = "smollm2-135m-instruct"
"""What is measured unless another one is asked for."""

_WITHOUT = ("method", "whole_turns")  # Of overflow: methods are lists here, and no suite has turns of its own.
_OF_MODELS = ("model", "model_preset", "dtype")
_DEFINES: dict[str, Callable[..., Any]] = {
    "int": flags.DEFINE_integer,
    "float": flags.DEFINE_float,
    "bool": flags.DEFINE_boolean,
    "tuple": flags.DEFINE_list,
}
_NUMBERS: dict[str, Callable[[str], Any]] = {"tuple[int, ...]": int, "tuple[float, ...]": float}


@functools.cache
def fields() -> dict[str, dict[str, dataclasses.Field[Any]]]:
    """The fields of all configs that are flags, by name and by suite."""
    found: dict[str, dict[str, dataclasses.Field[Any]]] = {}
    for suite in SUITES.values():
        for field in dataclasses.fields(suite.config):
            if field.name not in ("engine", *_OF_MODELS):
                found.setdefault(field.name, {})[suite.name] = field
    return found


def define(*, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags, the engine's too.

    Args:
      flag_values: where they are defined.

    Raises:
      absl.flags.DuplicateFlagError: another flag has such a name.
    """
    here: dict[str, Any] = {"flag_values": flag_values}
    recorded = " and ".join(suite.name for suite in SUITES.values() if suite.is_recorded)
    plotted = ", ".join(suite.name for suite in SUITES.values() if suite.is_plotted)
    flags.DEFINE_enum("suite", None, list(SUITES), "What to measure.", required=True, **here)
    flags.DEFINE_string("json_out", None, "File to write the result to.", required=True, **here)
    model = "Preset, .gguf file, Hugging Face directory or hub name, or converted checkpoint."
    flags.DEFINE_string("model", DEFAULT_MODEL, model, **here)
    preset = "Architecture with random weights to measure instead of --model."
    flags.DEFINE_enum("model_preset", None, sorted(PRESETS), preset, **here)
    peer = "Engine to measure beside ours on the same weights, dtype and threads."
    flags.DEFINE_enum("peer", None, list(PEER_PACKAGES), peer, **here)
    dtype = "Of weights and KV; by default what is fast here."
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], dtype, **here)
    trace = f"{recorded}: file for a trace of one more round, which Perfetto opens."
    flags.DEFINE_string("trace_out", None, trace, **here)
    flags.DEFINE_string("profile_dir", None, f"{recorded}: directory for jax's profile of one more round.", **here)
    flags.DEFINE_string("plot_out", None, f"{plotted}: file for a figure, PNG; of ttft, one more turn.", **here)
    for name, by_suite in fields().items():
        defaults = {suite: field.default for suite, field in by_suite.items()}
        is_shared = len(set(defaults.values())) == 1
        kind = str(next(iter(by_suite.values())).type).split("[")[0]
        default: Any = next(iter(defaults.values())) if is_shared else None
        if kind == "tuple" and default is not None:
            default = [str(item) for item in default]
        _DEFINES.get(kind, flags.DEFINE_string)(name, default, _help(name, defaults, is_shared), **here)
    engine_flags.define(without_overflow=_WITHOUT, flag_values=flag_values)


def _help(name: str, defaults: dict[str, Any], is_shared: bool) -> str:
    suites: dict[str, list[str]] = {}
    for suite in defaults:
        suites.setdefault(field_docs(SUITES[suite].config)[name], []).append(suite)
    if len(defaults) == len(SUITES):
        text = " ".join(suites)
    else:
        text = " ".join(f"{', '.join(names)}: {doc}" for doc, names in suites.items())
    own = ", ".join(f"{suite} {each}" for suite, each in defaults.items())
    return text if is_shared else f"{text} By default {own}."


def config(suite: str, *, flag_values: flags.FlagValues = flags.FLAGS) -> Config:
    """The config of a suite, each field from the flag of its name if that was given.

    Args:
      suite: one of `SUITES`.
      flag_values: where flags were defined, parsed.

    Raises:
      ValueError: a value that is none, or outside its range, or a flag that the suite does not read; the message names
        the flag.
    """
    kind = SUITES[suite].config
    own = {field.name: field for field in dataclasses.fields(kind)}
    refuse_flags(_unread(suite, set(own)), f"suite {suite}", flag_values=flag_values)
    values: dict[str, Any] = {}
    for name, field in own.items():
        if name == "engine":
            values[name] = engine_flags.engine_config(flag_values=flag_values)
        elif flag_values[name].present:
            values[name] = _value(name, str(field.type), flag_values[name].value)
    return kind(**values)


def _unread(suite: str, own: set[str]) -> set[str]:
    """The flags that a suite does not read."""
    unread = set(fields()) - own
    if SUITES[suite].serves:
        return unread.union(SUITES[suite].config.settled) - {"seed"}  # The seed is also that of random weights.
    engine = flags.FlagValues()
    engine_flags.define(flag_values=engine)
    return unread | set(engine) | (set(_OF_MODELS) - own)


def _value(name: str, kind: str, value: Any) -> Any:
    if not kind.startswith("tuple"):
        return value
    number = _NUMBERS.get(kind, str)
    try:
        return tuple(number(item) for item in value)
    except ValueError as error:
        wanted = "integers" if number is int else "numbers"
        raise ValueError(f"{name} must be {wanted} with commas between them, got {','.join(value)}") from error
