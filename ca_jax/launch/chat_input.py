"""The user's side of the terminal chat: lines, typed or from a stream, and Ctrl-C.

Not here: what the lines mean (`chat`).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

import prompt_toolkit
import prompt_toolkit.completion
import rich.console

from ca_jax.device.processes import Processes, from_first
from ca_jax.launch.terminal import printable

_PROMPT = "> "


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Notes Ctrl-C in an event instead of raising KeyboardInterrupt, which could leave the engine within a step."""
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def lines_of(stream: TextIO, console: rich.console.Console) -> Callable[[], str]:
    """A `read_line` over a stream that is no terminal; echoes each line, so that the output reads as a transcript."""

    def read_line() -> str:
        line = stream.readline()
        if not line:
            raise EOFError
        console.print(_PROMPT + printable(line.rstrip("\n")), markup=False, highlight=False, soft_wrap=True)
        return line

    return read_line


def prompt_lines(commands: Sequence[str]) -> Callable[[], str]:
    """A `read_line` on a terminal, with line editing, history and completion of `commands`."""
    completer = prompt_toolkit.completion.WordCompleter(list(commands), sentence=True)
    prompt: prompt_toolkit.PromptSession[str] = prompt_toolkit.PromptSession(
        _PROMPT, completer=completer, complete_while_typing=False
    )
    return prompt.prompt


def shared_lines(read_line: Callable[[], str], processes: Processes) -> Callable[[], str]:
    """A `read_line` that gives all processes what the first one's gives; the others' are not asked."""
    if processes.count == 1:
        return read_line

    def read_first() -> str:
        said = None
        if processes.index == 0:
            try:
                said = ["line", read_line()]
            except EOFError:
                said = ["end", ""]
            except KeyboardInterrupt:
                said = ["interrupt", ""]
        kind, line = from_first(processes, "a line", said)
        if kind == "end":
            raise EOFError
        if kind == "interrupt":
            raise KeyboardInterrupt
        return line

    return read_first
