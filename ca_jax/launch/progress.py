"""Progress bars for the steps that take long: what `progress(what, done, total)` callbacks report, drawn with rich.

Not here: what is being done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import rich.console
import rich.progress


class Bars(Protocol):
    """Moves a bar; any thread may call it. Without the last argument it is a `Progress`."""

    def __call__(self, what: str, done: int, total: int, now: str = "") -> None:
        """A new `what` begins a new bar; `now` is said behind it."""


@contextlib.contextmanager
def progress_bars(console: rich.console.Console | None = None) -> Iterator[Bars]:
    """Draws a bar per thing that is done, below each other, and leaves them there when it ends.

    Args:
      console: where to, stderr if not given; one that is no terminal gets each bar once, at the end.

    Yields:
      The callback.
    """
    columns = (
        rich.progress.TextColumn("{task.description:<18}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[now]}"),
    )
    tasks: dict[str, rich.progress.TaskID] = {}
    with rich.progress.Progress(*columns, console=console or rich.console.Console(stderr=True)) as bars:

        def progress(what: str, done: int, total: int, now: str = "") -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total, now=now)
            bars.update(tasks[what], completed=done, total=total, now=now)

        yield progress


@contextlib.contextmanager
def spinner(console: rich.console.Console, what: str) -> Iterator[None]:
    """Shows that something of unknown length goes on, and leaves nothing behind; only on a terminal."""
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
