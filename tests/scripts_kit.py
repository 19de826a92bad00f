"""Scripts that run in the process of the tests, as in one of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import runpy
import sys
from collections.abc import Iterator
from unittest import mock

from absl import app, flags


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a script left."""

    code: int
    out: str
    err: str


def run_script(module: str, *arguments: object, said: str = "") -> Ended:
    """Runs a module of `ca_jax.launch` as its command line does, with `said` as its standard input."""
    out, err, code, name = io.StringIO(), io.StringIO(), 0, f"ca_jax.launch.{module}"
    imported = sys.modules.pop(name, None)  # Run beside it, it would be warned of.
    with (
        _own_flags(),
        mock.patch.object(sys, "argv", [module, *map(str, arguments)]),
        mock.patch.object(sys, "stdin", io.StringIO(said)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if isinstance(ended.code, str):
                err.write(f"{ended.code}\n")
        finally:
            if imported is not None:
                sys.modules[name] = imported
    return Ended(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _own_flags() -> Iterator[None]:
    """absl's flags alone, as a script finds them; afterwards those that other modules had defined are back."""
    app.define_help_flags()  # Once in a process: they stay.
    values = flags.FLAGS
    others = _others(values)
    for name in others:
        delattr(values, name)
    try:
        yield
    finally:
        for name in _others(values):
            delattr(values, name)
        values.unparse_flags()
        for name, (module, flag) in others.items():
            values[name] = flag
            values.register_flag_by_module(module, flag)


def _others(values: flags.FlagValues) -> dict[str, tuple[str, flags.Flag]]:
    by_module = values.flags_by_module_dict().items()
    return {flag.name: (module, flag) for module, found in by_module if "absl" not in module for flag in found}
