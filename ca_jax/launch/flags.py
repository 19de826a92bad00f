"""Flags made from config dataclasses, and configs made from flags.

A flag's name, type, default and help are those of the field it stands for: its annotation, its value in the default
config, and the docstring under it. A field that is a config itself gives its own fields' flags. What a flag means is
therefore said once, where the field is.

Dashes do as well as underscores (`--max-batch-size`), and so do the names of `ALIASES`.

Not here: flags that stand for no field; each script defines its own.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from absl import flags

from ca_jax.config import BlendConfig
from ca_jax.errors import CaJaxError
from ca_jax.overflow.config import DISCARDERS, OverflowConfig

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

T = TypeVar("T")

_PREFIXED = ("method", "repair", "anchor_tokens", "repair_ratio", "drift")
NAMES: dict[type, dict[str, str]] = {
    OverflowConfig: {
        **{field: f"overflow_{field}" for field in _PREFIXED},
        **{"whole_turns": "truncate_whole_turns", "discarder": "token_discarder"},
    },
    BlendConfig: {field: f"blend_{field}" for field in ("mode", "recompute_ratio", "check_layers", "selection")},
}
"""Flags that are not named like their field, by config and field."""
ALIASES = {"max_model_len": "context_window", "max_num_seqs": "max_batch_size"}
"""Other names of flags, which users of other servers know."""
OFF = "off"
"""The `--overflow_method` of an engine that drops nothing."""
AUTO = "auto"
"""A size that follows from the machine."""
DTYPES = ("float32", "bfloat16")
"""What weights and KV are computed in."""
DEFAULT_MODEL = "smollm2-135m-instruct"
"""What scripts load unless another model is named."""

_SWITCH = NAMES[OverflowConfig]["method"]
_NO_FLAG = {"save_group_tokens", "compile_cache_dir", "ssd_deadline_s", "block_tokens"}  # Fields for measuring alone.
_CHOICES = {"dtype": DTYPES, "token_discarder": tuple(DISCARDERS)}  # Others follow from the type, or the docstring.
_HELP = {
    "token_discarder": "Which tokens leave: the oldest, the oldest behind some first ones (sinks), or those that "
    "received the least attention (heavy_hitters).",
    "tenant_quotas": "TENANT=BYTES: most that this tenant may hold, in place of --tenant_quota_gib.",
}  # Of flags that are given in another form than their field.


class _SizeParser(flags.FloatParser):
    """Parses a size, or `auto`."""

    def parse(self, argument: Any) -> Any:
        """The number, or the word."""
        return argument if argument == AUTO else super().parse(argument)


class FlagError(CaJaxError, ValueError):
    """Flags that do not go together, or a value that a config refuses; the message names the flag."""


@dataclasses.dataclass(frozen=True)
class ConfigFlags(Generic[T]):
    """Flags that stand for the fields of one config."""

    default: T
    """The config without any flag given; a frozen dataclass."""
    only: Collection[str] | None = None
    """Fields of it that get flags; None: all that can be flags."""
    without: Collection[str] = ()
    """Flags that are left out, and fields that are configs whose flags all are; their values are the default's."""
    auto: Collection[str] = ()
    """Flags that may be `auto` as well: the config has its default for these then, and their reader says what it is."""

    def define(self, flag_values: flags.FlagValues = flags.FLAGS) -> None:
        """Defines the flags."""
        for name, (hint, value, text, choices) in self._flags().items():
            if name in self.auto:
                text = f"{text.rstrip('.')}; {AUTO}: as this machine has room."
                flags.DEFINE(_SizeParser(), name, value, text, flag_values)
            else:
                define_flag(name, hint, value, text, choices, flag_values=flag_values)

    def names(self) -> list[str]:
        """The flags' names."""
        return list(self._flags())

    def read(self, flag_values: flags.FlagValues = flags.FLAGS) -> T:
        """The config that parsed flags stand for.

        Raises:
          FlagError: a value outside its range, or a flag that says how tokens are dropped where none are.
        """
        values: dict[str, Any] = {}
        for field, name, hint, inner in self._fields():
            if inner is None:
                is_auto = name in self.auto and flag_values[name].value == AUTO
                default = getattr(self.default, field)
                values[field] = default if is_auto else parsed(name, hint, flag_values[name].value)
            elif type(None) in _options(hint) and inner._is_off(flag_values, getattr(self.default, field)):
                values[field] = None
            else:
                values[field] = inner.read(flag_values)
        return made(dataclasses.replace, self.default, **values)

    def _is_off(self, flag_values: flags.FlagValues, default: Any) -> bool:
        """Whether --overflow_method is off, or where it is no flag, the default."""
        names = self.names()
        if _SWITCH not in names:
            return default is None
        if flag_values[_SWITCH].value != OFF:
            return False
        for name in names:
            if name != _SWITCH and flag_values[name].present:
                raise FlagError(f"{name} must be left out where {_SWITCH} is {OFF}, got {flag_values[name].value!r}")
        return True

    def _flags(self) -> dict[str, tuple[Any, Any, str, Sequence[str] | None]]:
        """By name, what `define_flag` makes a flag of: type, default, help, choices."""
        kind: type = type(self.default)
        found: dict[str, tuple[Any, Any, str, Sequence[str] | None]] = {}
        for field, name, hint, inner in self._fields():
            value = getattr(self.default, field)
            if inner is None:
                found[name] = (hint, value, help_of(kind, field), choices_of(kind, field))
                continue
            found |= inner._flags()
            if _SWITCH in found and type(None) in _options(hint):
                hint, method, text, choices = found[_SWITCH]
                text += f" {OFF}: nothing is dropped; what does not fit is an error or ends the answer."
                found[_SWITCH] = (hint, OFF if value is None else method, text, (*(choices or ()), OFF))
        return found

    def _fields(self) -> Iterator[tuple[str, str, Any, ConfigFlags[Any] | None]]:
        """Each field that gets a flag: its name, its flag's, its type, and the flags of one that is a config itself."""
        kind = type(self.default)
        hints = typing.get_type_hints(kind)
        for field in (each.name for each in dataclasses.fields(self.default)):  # type: ignore[arg-type]
            name, hint = NAMES.get(kind, {}).get(field, field), hints[field]
            if (self.only is not None and field not in self.only) or name in self.without or name in _NO_FLAG:
                continue
            inner, of_config = None, next(filter(dataclasses.is_dataclass, _options(hint)), None)
            if of_config is not None:
                value = getattr(self.default, field)
                value = of_config() if value is None else value  # type: ignore[operator]
                inner = ConfigFlags(value, without=self.without, auto=self.auto)
            yield field, name, hint, inner


def made(make: Callable[..., T], *args: Any, **values: Any) -> T:
    """A config of values from flags.

    Raises:
      FlagError: the config refuses one.
    """
    try:
        return make(*args, **values)
    except FlagError:
        raise
    except ValueError as error:
        raise FlagError(str(error)) from error


def define_flag(name: str, hint: Any, value: Any, text: str, choices: Sequence[str] | None = None, **here: Any) -> None:
    """Defines one flag.

    Args:
      name: of it.
      hint: type of the field it stands for.
      value: the default, as the field has it.
      text: the help.
      choices: what the flag may be; None: anything.
      here: `flag_values`, where it is defined.
    """
    kinds, also = _kinds(hint), [alias for alias, flag in ALIASES.items() if flag == name]
    if also:
        text = f"{text} Also --{also[0]}."
    if choices is not None:
        flags.DEFINE_enum(name, value, list(choices), text, **here)
    elif tuple in kinds:
        flags.DEFINE_list(name, None if value is None else [str(each) for each in value], text, **here)
    elif Mapping in kinds:
        flags.DEFINE_multi_string(name, [f"{key}={each}" for key, each in dict(value).items()], text, **here)
    elif bool in kinds:
        flags.DEFINE_boolean(name, value, text, **here)
    elif str in kinds:
        flags.DEFINE_string(name, None if value is None else str(value), text, **here)
    else:
        (flags.DEFINE_float if float in kinds else flags.DEFINE_integer)(name, value, text, **here)


def parsed(name: str, hint: Any, value: Any) -> Any:
    """The value of a field of that type, from its flag's; `~` in a directory is the user's home.

    Raises:
      FlagError: the value is not of the type.
    """
    kinds = _kinds(hint)
    if value is None:
        return None
    if Mapping in kinds:
        return tuple(_quota(name, each) for each in value)
    if tuple in kinds:
        of = next(typing.get_args(kind)[0] for kind in _options(hint) if typing.get_origin(kind) is tuple)
        try:
            return tuple(of(each.strip()) for each in value if each.strip())
        except ValueError as error:
            wanted = "whole numbers" if of is int else "numbers"
            raise FlagError(f"{name} must be {wanted} with commas between them, got {','.join(value)!r}") from error
    if str in kinds and int in kinds:
        return int(value) if re.fullmatch(r"[+-]?\d+", value) else value
    return os.path.expanduser(value) if name.endswith("_dir") else value


@functools.cache
def help_of(kind: type, field: str) -> str:
    """The docstring under a field as a flag's help, with what the field's choices mean."""
    name = NAMES.get(kind, {}).get(field, field)
    if name in _HELP:
        return _HELP[name]
    module, text, meanings = _module_of(kind, field), field_docs(kind)[field], ""
    for constant, told in _docs(inspect.getsource(module)).items():
        if f"`{constant}`" in text:
            text = re.sub(rf"(, |\b)([Oo]ne of|a) `{constant}`[:.]?", "", text)
            choices = re.search(r"`\w+`:", told)
            meanings += f"{told[choices.start() :]} " if choices else "" if text else told
    text = f"{text.rstrip('.')}. {meanings}" if text and meanings else text or meanings
    text = re.sub(r"`([A-Z_]+)`", lambda name: ", ".join(getattr(module, name[1], [name[1]])), text).replace("`", "")
    return re.sub(r"\bNone: ", "Not given: ", text.replace("; None: ", "; by default ")).strip()


@functools.cache
def choices_of(kind: type, field: str) -> Sequence[str] | None:
    """What a field of strings may be, where its type or the words "one of" in its docstring name it; None: anything."""
    name, hint = NAMES.get(kind, {}).get(field, field), typing.get_type_hints(kind)[field]
    if name in _CHOICES:
        return _CHOICES[name]
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    named = re.search(r"[Oo]ne of `([A-Z_]+)`", field_docs(kind)[field])
    return None if named is None else tuple(getattr(_module_of(kind, field), named[1]))


def _module_of(kind: type, field: str) -> types.ModuleType:
    """Where the class is that declares a field."""
    return sys.modules[next(base.__module__ for base in kind.__mro__ if field in vars(base).get("__annotations__", ()))]


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, each in one line; those of its bases too."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _docs(textwrap.dedent(inspect.getsource(base)))
    return docs


@functools.cache
def _docs(source: str) -> dict[str, str]:
    """The docstring under each name that a module, or the one class that it is, assigns."""
    body: list[ast.stmt] = ast.parse(source).body
    if len(body) == 1 and isinstance(body[0], ast.ClassDef):
        body = body[0].body
    docs = {}
    for assigned, told in itertools.pairwise(body):
        targets = assigned.targets if isinstance(assigned, ast.Assign) else [getattr(assigned, "target", None)]
        if isinstance(targets[0], ast.Name) and isinstance(told, ast.Expr) and isinstance(told.value, ast.Constant):
            docs[targets[0].id] = " ".join(str(told.value.value).split())
    return docs


def _options(hint: Any) -> tuple[Any, ...]:
    """The types that a union is of, or the one type."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _kinds(hint: Any) -> set[Any]:
    """The same as classes, without what they are of."""
    return {typing.get_origin(each) or each for each in _options(hint)}


def _quota(name: str, text: str) -> tuple[str, int]:
    tenant, _, num_bytes = text.rpartition("=")
    if not num_bytes.isdecimal():
        raise FlagError(f"{name} must be TENANT=BYTES, got {text!r}")
    return tenant, int(num_bytes)


def define_model(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines --model."""
    text = "Preset, .gguf file, Hugging Face directory, hub name (org/name) or checkpoint."
    flags.DEFINE_string("model", DEFAULT_MODEL, text, flag_values=flag_values)


def define_dtype(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines --dtype, for scripts without an engine's flags."""
    text = "Of weights and KV. Not given: what is fast here."
    flags.DEFINE_enum("dtype", None, DTYPES, text, flag_values=flag_values)


def refuse(names: Iterable[str], reader: str, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Refuses flags that would be ignored.

    Args:
      names: of flags that the reader does not read; names that are not defined are passed over.
      reader: what runs, for the error.
      flag_values: where flags were defined, parsed.

    Raises:
      FlagError: one of them was given.
    """
    for name in sorted(names):
        if name in flag_values and flag_values[name].present:
            raise FlagError(f"--{name} must be left out of {reader}, which does not read it")


def out_path(name: str, flag_values: flags.FlagValues = flags.FLAGS) -> Path | None:
    """The file that a flag names, checked before anything runs for minutes; None where the flag is not given.

    Raises:
      FlagError: it is a directory.
    """
    value: str | None = flag_values[name].value
    if value is None:
        return None
    path = Path(value).expanduser()
    if path.is_dir():
        raise FlagError(f"{name} must be a file, got the directory {path}")
    return path


def spelled(arguments: Sequence[str], known: Mapping[str, Any] | flags.FlagValues = flags.FLAGS) -> list[str]:
    """Command-line arguments with flags spelled as they are defined: dashes in names and aliases are replaced."""
    found, ended = list(arguments), False
    for index, argument in enumerate(arguments):
        ended = ended or argument == "--"
        match = re.match(r"--?([A-Za-z][\w-]*)(=.*)?$", argument, re.DOTALL)
        if ended or not index or match is None or match[1] in known:
            continue
        name = match[1].replace("-", "_")
        for prefix in ("", "no_", "no"):
            bare = name.removeprefix(prefix)
            bare = ALIASES.get(bare, bare)
            if name.startswith(prefix) and bare in known:
                found[index] = f"--{'no' if prefix else ''}{bare}{match[2] or ''}"
                break
    return found
