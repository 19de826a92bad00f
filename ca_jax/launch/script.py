"""What all scripts share: how they run, and how they print and write what they found.

Not here: flags (`launch.flags`), progress (`launch.progress`), figures (`launch.plots`).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text
from absl import app, logging

from ca_jax.errors import CaJaxError
from ca_jax.launch.flags import spelled
from ca_jax.launch.terminal import printable

_PIPE_COLUMNS = 180  # Where there is no terminal to ask.


def run(
    main: Callable[[Sequence[str]], None],
    *,
    arguments: bool = False,
    errors: tuple[type[Exception], ...] = (CaJaxError, OSError, ValueError),
) -> None:
    """Parses flags, which must be defined, and runs a script; does not return.

    Args:
      main: the script; called with the command line without flags.
      arguments: whether it takes other arguments than flags.
      errors: what ends the script with exit code 1 and one line.
    """

    def checked(argv: Sequence[str]) -> None:
        if len(argv) > 1 and not arguments:
            raise app.UsageError(f"arguments must be flags, got {argv[1:]}")
        logging.set_verbosity(logging.WARNING)  # jax reports each backend that it does not find.
        try:
            main(argv)
        except errors as error:
            sys.exit(f"error: {printable(str(error))}")

    app.run(checked, argv=spelled(sys.argv))


def command_line(name: str) -> str:
    """The command that runs the script of that name as this process was, for reports."""
    return shlex.join(["python", "-m", f"ca_jax.launch.{name}", *sys.argv[1:]])


def make_console() -> rich.console.Console:
    """Standard output; wide where it is no terminal, so that tables are not folded in files."""
    return rich.console.Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


def note(console: rich.console.Console, text: str, style: str | None = "dim") -> None:
    """Prints a text as it is: markup is text in it, and what would steer the terminal is replaced."""
    console.print(rich.text.Text(printable(text)), style=style, soft_wrap=True)


def make_table(
    columns: Iterable[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    header: bool = True,
    ruled: bool = True,
) -> rich.table.Table:
    """A table for a console. Cells are text: no markup, and nothing that steers a terminal.

    Args:
      columns: headings; one that begins with ">" is of numbers, and to the right. May have line breaks.
      rows: cells, one for each column; a row of no cells is a line across.
      title: above it.
      header: whether headings are shown.
      ruled: whether a line is below them.
    """
    table = rich.table.Table(
        title=None if title is None else rich.text.Text(printable(title)),
        title_justify="left",
        box=rich.box.SIMPLE_HEAD if ruled else None,
        pad_edge=False,
        show_header=header,
    )
    for column in columns:
        is_number = column.startswith(">")
        table.add_column(
            column.removeprefix(">"), justify="right" if is_number else "left", overflow="fold", no_wrap=is_number
        )
    for row in rows:
        if row:
            table.add_row(*(rich.text.Text(printable(cell)) for cell in row))
        else:
            table.add_section()
    return table


def make_markdown(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table with the same columns and rows."""
    head = [column.removeprefix(">").replace("\n", " ") for column in columns]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *filter(None, rows))]


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Writes a report; makes the directory it goes to.

    Raises:
      OSError: it cannot be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
