"""What all scripts share: how they run, and how they print and write their results.

Not here: flags (`launch.flags`), progress (`launch.terminal`), figures (`launch.plots`).
"""

from __future__ import annotations

import importlib
import json
import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text
from absl import app, flags, logging

import ca_jax
from ca_jax.errors import CaJaxError
from ca_jax.launch.flags import spelled

flags.disclaim_key_flags()  # Flags defined below `run_benchmark` are the script's: its --help shows them.

_PIPE_COLUMNS = 180  # Where there is no terminal to ask.


def run(
    main: Callable[[Sequence[str]], int | None],
    *,
    arguments: bool = False,
    errors: tuple[type[Exception], ...] = (CaJaxError, OSError, ValueError),
) -> None:
    """Parses flags, which must be defined, and runs a script; does not return.

    Args:
      main: the script; called with the command line without flags. Returns the exit code; None: 0.
      arguments: whether it takes other arguments than flags.
      errors: what ends the script with exit code 1 and one line.
    """

    def checked(argv: Sequence[str]) -> int | None:
        if len(argv) > 1 and not arguments:
            raise app.UsageError(f"arguments must be flags, got {argv[1:]}")
        logging.set_verbosity(logging.WARNING)  # jax reports each backend that it does not find.
        try:
            return main(argv)
        except errors as error:
            sys.exit(f"error: {printable(str(error))}")

    app.run(checked, argv=spelled(sys.argv))


def load_benchmark(name: str) -> ModuleType | None:
    """A module of `benchmarks`, which is in a checkout of the repository; None in an installed package."""
    root = Path(ca_jax.__file__).resolve().parents[1]
    if not (root / "benchmarks" / "harness.py").is_file():
        return None
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"benchmarks.{name}")


def must_load_benchmark(name: str) -> ModuleType:
    """Likewise; ends the script where there is no checkout."""
    if (module := load_benchmark(name)) is None:
        text = "the benchmarks are not part of the installed package: clone its repository, and run this from there"
        sys.exit(f"error: {text}")
    return module


def run_benchmark(name: str) -> None:
    """Runs a script that is in a checkout of the repository and not in the installed package; does not return.

    Args:
      name: of its module in `benchmarks`: what `--help` says is its text, its flags are those of `define_flags`, and
        `run` is given its `main` and `ERRORS`.
    """
    module = must_load_benchmark(name)
    sys.modules["__main__"].__doc__ = module.__doc__
    module.define_flags()
    run(module.main, errors=module.ERRORS)


def command_line(name: str) -> str:
    """The command that runs the script of that name as this process was, for reports."""
    return shlex.join(["python", "-m", f"ca_jax.launch.{name}", *sys.argv[1:]])


def make_console() -> rich.console.Console:
    """Standard output; wide where it is no terminal, so that tables are not folded in files."""
    return rich.console.Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


def note(console: rich.console.Console, text: str, style: str | None = "dim") -> None:
    """Prints a text as it is: markup is text in it, and what would steer the terminal is replaced."""
    console.print(rich.text.Text(printable(text)), style=style, soft_wrap=True)


def printable(text: str) -> str:
    """The text with control characters other than newline and tab replaced by U+FFFD."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) != "Cc" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", ruled: bool = True
) -> rich.table.Table:
    """A table for a console. Cells are text: no markup, and nothing that steers a terminal.

    Args:
      columns: headings, shown if one of them says something; one that begins with ">" is of numbers, and to the right.
        May have line breaks.
      rows: cells, one for each column; a row of no cells is a line across.
      title: above it.
      ruled: whether a line is below them.
    """
    table = rich.table.Table(
        title=rich.text.Text(printable(title)) if title else None,
        title_justify="left",
        box=rich.box.SIMPLE_HEAD if ruled else None,
        pad_edge=False,
        show_header=any(columns),
    )
    for column in columns:
        table.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(
            *(rich.text.Text(printable(cell)) for cell in row), end_section=False
        ) if row else table.add_section()
    return table


def format_number(value: float) -> str:
    """A number in three digits; all digits before the point of a thousand or more."""
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Writes a report; makes the directory it goes to.

    Raises:
      OSError: it cannot be written there.
      ValueError: a number in it is not finite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
