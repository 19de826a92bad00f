"""The flags of benchmarks and evaluations, made from the configs of their suites and tasks: each field is a flag.

A flag that is not given leaves a config's own default, which may differ from suite to suite.

Not here: how a field becomes a flag (`ca_jax.launch.flags`), running (`main`).
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from benchmarks.harness import SUITES, Config
from benchmarks.peers import PEERS
from ca_jax.config import EngineConfig
from ca_jax.launch.flags import ConfigFlags, define_dtype, define_flag, define_model, help_of, made, parsed, refuse
from ca_jax.models.presets import PRESETS

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

_OF_MODELS = ("model", "model_preset", "dtype")
# No suite has turns of its own, and methods of overflow are lists here.
_ENGINE = ConfigFlags(
    EngineConfig(), without=("dtype", "context_window", "store", "overflow_method", "truncate_whole_turns")
)


@dataclasses.dataclass(frozen=True)
class CaseFlags:
    """Flags of several cases, suites or tasks, of which a run reads those of one."""

    word: str
    """What a case is called: suite or task."""
    kinds: Mapping[str, Sequence[type]]
    """By case: the configs whose fields are flags."""
    without: Sequence[str] = ()
    """Fields that are no flags."""

    @functools.cached_property
    def fields(self) -> dict[str, dict[str, tuple[type, Any]]]:
        """The fields that are flags: by name and by case, of which config and of what type."""
        found: dict[str, dict[str, tuple[type, Any]]] = {}
        for case, kinds in self.kinds.items():
            for kind in kinds:
                for name, hint in typing.get_type_hints(kind).items():
                    if name in (field.name for field in dataclasses.fields(kind)) and name not in self.without:
                        found.setdefault(name, {})[case] = (kind, hint)
        return found

    def define(self, flag_values: flags.FlagValues) -> None:
        """Defines the flags."""
        for name, by_case in self.fields.items():
            _, hint = next(iter(by_case.values()))
            define_flag(name, hint, None, self._help(name), flag_values=flag_values)

    def read(self, case: str, flag_values: flags.FlagValues) -> dict[str, Any]:
        """The values of the flags that are given, by field.

        Raises:
          FlagError: a value that is none, or a flag of another case.
        """
        own = {name for name, by_case in self.fields.items() if case in by_case}
        refuse(self.fields.keys() - own, f"{self.word} {case}", flag_values)
        given = [name for name in self.fields if name in own and flag_values[name].value is not None]
        return {name: parsed(name, self.fields[name][case][1], flag_values[name].value) for name in given}

    def _help(self, name: str) -> str:
        """What the flag is in each case, and its defaults where configs have some."""
        texts: dict[str, list[str]] = {}
        defaults: dict[str, list[str]] = {}
        for case, (kind, _) in self.fields[name].items():
            texts.setdefault(help_of(kind, name), []).append(case)
            default = getattr(kind, name, None)
            if default not in (None, ()):
                shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
                defaults.setdefault(shown, []).append(case)
        is_all = len(self.fields[name]) == len(self.kinds)
        text = " ".join(t if is_all else f"{', '.join(cases)}: {t}" for t, cases in texts.items())
        if not defaults:
            return text
        told = [f"{value} ({', '.join(cases)})" for value, cases in defaults.items()]
        return f"{text} By default {next(iter(defaults)) if len(defaults) == 1 else '; '.join(told)}."


@functools.cache
def suite_flags() -> CaseFlags:
    """Those of all suites."""
    return CaseFlags("suite", {name: [suite.config] for name, suite in SUITES.items()}, ("engine", *_OF_MODELS))


def define(*, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of `bench`, the engine's too."""
    here: dict[str, Any] = {"flag_values": flag_values}
    recorded = " and ".join(suite.name for suite in SUITES.values() if suite.is_recorded)
    plotted = ", ".join(suite.name for suite in SUITES.values() if suite.is_plotted)
    flags.DEFINE_enum("suite", None, list(SUITES), "What to measure.", required=True, **here)
    flags.DEFINE_string("json_out", None, "File to write the result to.", required=True, **here)
    define_model(flag_values)
    preset = "Architecture with random weights to measure instead of --model."
    flags.DEFINE_enum("model_preset", None, sorted(PRESETS), preset, **here)
    peer = "Engine to measure beside ours on the same weights, dtype and threads."
    flags.DEFINE_enum("peer", None, list(PEERS), peer, **here)
    define_dtype(flag_values)
    trace = f"{recorded}: file for a trace of one more round, which Perfetto opens."
    flags.DEFINE_string("trace_out", None, trace, **here)
    flags.DEFINE_string("profile_dir", None, f"{recorded}: directory for jax's profile of one more round.", **here)
    flags.DEFINE_string("plot_out", None, f"{plotted}: file for a figure, PNG; of ttft, one more turn.", **here)
    suite_flags().define(flag_values)
    _ENGINE.define(flag_values)


def config(suite: str, *, flag_values: flags.FlagValues = flags.FLAGS) -> Config:
    """The config of a suite, each field from the flag of its name if that was given.

    Raises:
      FlagError: a value that is none, or outside its range, or a flag that the suite does not read.
    """
    kind = SUITES[suite].config
    own = {field.name for field in dataclasses.fields(kind)}
    if SUITES[suite].serves:
        unread = set(SUITES[suite].config.settled)
    else:
        unread = {*_ENGINE.names(), *_OF_MODELS} - own
    refuse(unread, f"suite {suite}", flag_values)
    values = suite_flags().read(suite, flag_values)
    if "engine" in own:
        values["engine"] = _ENGINE.read(flag_values)
    values |= {name: flag_values[name].value for name in own.intersection(_OF_MODELS) if flag_values[name].present}
    return made(kind, **values)
