"""The user's side of the terminal chat: lines, typed or from a stream; Ctrl-C; a file as context; other processes.

    for i in 0 1; do ca_jax chat --coordinator_address=HOST:PORT --num_processes=2 --process_id=$i & done

Not here: what the lines mean (`chat`), what processes agree upon (`ca_jax.device.processes`).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import jax
import prompt_toolkit
import prompt_toolkit.completion
import rich.console
from absl import flags

from ca_jax.device.processes import JaxProcesses, Processes, from_first
from ca_jax.errors import InvalidRequestError
from ca_jax.launch.script import note
from ca_jax.pretrained import LoadedModel
from ca_jax.turns.text import split_text, split_tokens

flags.disclaim_key_flags()

SEPARATOR = "\n---\n"
"""Between the chunks of a file, unless a flag says otherwise: a line of three dashes."""

_PROMPT = "> "
_START_S = 300
_USER_S = 7 * 24 * 3600.0  # How long a user's next line may take. A process that died ends the others long before.


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of a file as context, and of several processes."""
    for name, text in {
        "context_file": "Text file whose chunks are the context of the first question.",
        "chunk_separator": "What is between two chunks of context_file, \\n for a line break; by default ---.",
        "coordinator_address": "HOST:PORT of the first process, where several serve as one; each has some devices.",
    }.items():
        flags.DEFINE_string(name, None, text, flag_values=flag_values)
    for name, text in {
        "chunk_tokens": "Cut context_file into chunks of so many tokens instead, the last one shorter.",
        "num_processes": "Number of processes.",
        "process_id": "Which of them this is, from 0.",
    }.items():
        least = 1 if name == "chunk_tokens" else None
        flags.DEFINE_integer(name, None, text, least, flag_values=flag_values)


def context_chunks(model: LoadedModel, flag_values: flags.FlagValues = flags.FLAGS) -> list[str] | list[list[int]]:
    """The chunks of the file that parsed flags name; none where no file is given.

    Args:
      model: whose tokenizer counts tokens.
      flag_values: where the flags were defined.

    Raises:
      ValueError: flags that exclude each other or need a file, or a file that is no text.
      OSError: the file cannot be read.
      EmptyMessageError: it is blank.
      InvalidRequestError: an empty separator, or tokens of a model without tokenizer.
    """
    path, separator = flag_values["context_file"].value, flag_values["chunk_separator"].value
    num_tokens = flag_values["chunk_tokens"].value
    if path is None:
        if separator is not None or num_tokens is not None:
            raise ValueError("chunk_separator and chunk_tokens must come with a context_file to cut, got none")
        return []
    if separator is not None and num_tokens is not None:
        raise ValueError("a context_file must be cut by chunk_separator or by chunk_tokens, got both")
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"context_file must be text in UTF-8, got other bytes in {path}: {error}") from error
    if num_tokens is None:
        return split_text(text, SEPARATOR if separator is None else separator.replace("\\n", "\n"))
    if model.tokenizer is None:
        raise InvalidRequestError(f"chunk_tokens must come with a model that has a tokenizer, got {model.name}")
    return split_tokens(model.tokenizer.encode(text, add_bos=False) if text.strip() else [], num_tokens)


def join_processes(name: str, flag_values: flags.FlagValues = flags.FLAGS) -> Processes:
    """Joins the other processes, if flags say that there are any. Must be called before jax is used.

    Args:
      name: of the script, which agrees with the others on what its user does; they are waited for as long as it takes.
      flag_values: where the flags were defined.

    Raises:
      ValueError: only some of the flags are given, or no such process.
      RuntimeError: the others do not come.
    """
    names = ("coordinator_address", "num_processes", "process_id")
    address, count, index = (flag_values[each].value for each in names)
    if address is None and count is None and index is None:
        return Processes()
    if address is None or count is None or index is None:
        given = ", ".join(each for each in names if flag_values[each].value is not None)
        raise ValueError(f"{', '.join(names)} must be given together, got {given} alone")
    if count < 1:
        raise ValueError(f"num_processes must be at least 1, got {count}")
    if not 0 <= index < count:
        raise ValueError(f"process_id must be a number from 0 to {count - 1}, got {index}")
    jax.distributed.initialize(address, count, index, initialization_timeout=_START_S)
    return JaxProcesses(name, _USER_S) if count > 1 else Processes()


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
        note(console, _PROMPT + line.rstrip("\n"), None)
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
