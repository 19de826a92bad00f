"""Chat with a model in the terminal; every conversation's KV is kept, so that each turn prefills only what is new.

    python -m ca_jax.launch.chat --model=smollm2-135m-instruct --system="Answer briefly."

Lines that begin with / are commands, /help lists them. Ctrl-C stops an answer; what was said so far stays. Input that
is no terminal is read line by line, so that a chat can be scripted. Where the context window was full and tokens were
dropped, the line under the answer says so.

Where several processes serve as one (`--coordinator_address --num_processes --process_id`), the first one reads and
writes, and the others follow.

`--context_file=FILE` makes a text file the context of the first question: its chunks are computed each by itself, kept
like conversations, and used wherever in a prompt they come (CacheBlend, `--blend_mode`).

With `--ssd_dir=DIR` conversations outlive the process, and `--session_id=NAME` begins or goes on with the one of that
name. Leaving forgets none of them; /drop does.

Not here: serving (`ca_jax.engine`), what processes agree upon (`ca_jax.device.processes`), tables (`terminal`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import jax
import prompt_toolkit
import prompt_toolkit.completion
import rich.console
from absl import flags

from ca_jax.config import EngineConfig
from ca_jax.device.processes import JaxProcesses, Processes, any_agrees, from_first
from ca_jax.engine import Engine
from ca_jax.errors import CaJaxError, InvalidRequestError, check
from ca_jax.launch import terminal
from ca_jax.launch.flags import ConfigFlags, define_model
from ca_jax.launch.script import make_table, note, run
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel
from ca_jax.session import Session
from ca_jax.turns.requests import FinishReason, SamplingParams
from ca_jax.turns.text import split_text, split_tokens

FLAGS = flags.FLAGS

COMMANDS = {
    "/new": ("[system]", "begin another conversation, with this system message if given"),
    "/sessions": ("", "list the conversations"),
    "/switch": ("N", "go on with conversation N"),
    "/forget": ("N", "drop the N oldest turns of this conversation; it goes on with what is stored of the rest"),
    "/stored": ("", "list what the store keeps, conversations of earlier runs too"),
    "/pin": ("", "keep this conversation in the store, over restarts too: no eviction, no expiry"),
    "/unpin": ("", "let this conversation go like others when the store is full"),
    "/drop": ("", "forget what is stored of this conversation; it goes on, and its next turn prefills everything"),
    "/stats": ("", "what the store holds and what the engine has done"),
    "/help": ("", "this list"),
    "/quit": ("", "leave; so does Ctrl-D. With --ssd_dir conversations are kept: --session_id goes on with one"),
}
"""What lines that begin with / may be: name to argument and meaning."""

SEPARATOR = "\n---\n"
"""Between the chunks of a file, unless a flag says otherwise: a line of three dashes."""

_ENGINE = ConfigFlags(EngineConfig(max_batch_size=1))  # One user waits for one answer.
_SAMPLING = ConfigFlags(
    SamplingParams(max_tokens=512),
    only=("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"),
)
_KEPT = {
    "pin": "pinned: stays in the store until /unpin or /drop",
    "unpin": "not pinned: goes like others when the store is full",
    "drop": "nothing is stored of this conversation; its next turn is stored again",
}  # What is said of what the store did with a conversation.
_ENDED = {FinishReason.CANCELLED: "stopped", FinishReason.LENGTH: "cut short"}
_PROMPT = "> "
_TEXT_FLAGS = {
    "system": "System message of new conversations; the model's own if not given.",
    "session_id": "Name of the conversation to go on with, or to begin; made up if not given.",
    "context_file": "Text file whose chunks are the context of the first question.",
    "chunk_separator": "What is between two chunks of context_file, \\n for a line break; by default ---.",
    "coordinator_address": "HOST:PORT of the first process, where several serve as one; each has some devices.",
}
_START_S = 300  # How long processes wait for each other.
_USER_S = 7 * 24 * 3600.0  # How long a user's next line may take. A process that died ends the others long before.
_WARM_TOKENS = 32  # A first message is short; other lengths are compiled when they come.


class UnknownCommandError(CaJaxError, ValueError):
    """A line that begins with / and is no command, or a command whose argument is none."""


class Chat:
    """One user, one engine, any number of conversations. `begin` comes before all else.

    Args:
      engine: who answers.
      read_line: gives the user's next line, without its end; EOFError ends the chat, KeyboardInterrupt drops the line.
      console: where everything goes.
      sampling: how answers are drawn.
      processes: those that chat together; the first one's user is everybody's.
      context: chunks, as of `Session.send`, that stand in front of the first message.
    """

    def __init__(
        self,
        engine: Engine,
        read_line: Callable[[], str],
        console: rich.console.Console,
        sampling: SamplingParams,
        processes: Processes | None = None,
        context: Sequence[str | Sequence[int]] = (),
    ) -> None:
        self._engine = engine
        self._processes = processes or Processes()
        self._read_line = _shared_lines(read_line, self._processes)
        self._console = console
        self._sampling = sampling
        self._context = context  # Until a turn has taken it.
        self._system: str | None = None
        self._sessions: list[Session] = []
        self._current = 0

    def begin(self, session_id: str | None = None, system: str | None = None) -> None:
        """Opens the first conversation, new or gone on with; one that has begun keeps the system message it has.

        Args:
          session_id: its name; made up if not given.
          system: system message of new conversations.

        Raises:
          TenantError: the conversation of that name is another tenant's.
          ObjectsError: replicas share conversations, and whether one has it cannot be found out.
        """
        self._system = system
        if session_id is not None and self._engine.elsewhere is not None:
            self._engine.elsewhere.claim(session_id)
        try:
            self._sessions.append(self._engine.session(session_id=session_id, system=system))
        except InvalidRequestError:
            if session_id is None or system is None:
                raise
            self._sessions.append(self._engine.session(session_id=session_id))

    @property
    def _overflow(self) -> OverflowConfig:
        """How tokens leave; where none do by themselves, how they do by default."""
        return self._engine.config.overflow or OverflowConfig()

    @property
    def session(self) -> Session:
        """The conversation that a message goes to."""
        return self._sessions[self._current]

    def run(self) -> None:
        """Reads and answers until /quit or the end of input. Errors of ca_jax are shown and the chat goes on.

        Conversations stay open, so that the engine, when it is closed, leaves on SSD what it has of them.

        Raises:
          CaJaxError: a chunk of the context cannot be used; see `Engine.precompute`.
        """
        if self._context:
            self._take_up_context()
        if self.session.token_ids:
            held = f"{len(self.session.token_ids):,} tokens, {len(self.session.messages)} messages"
            self._note(f"session {self.session.session_id} goes on: {held}")
        with contextlib.suppress(EOFError):
            self._converse()
        if self._engine.config.store.ssd_dir is not None:
            self._take_leave()

    def _take_up_context(self) -> None:
        """Has the context's chunks computed that are not stored, where they are used as they are stored."""
        parts = [f"context: {len(self._context):,} chunks in front of the next message"]
        if self._engine.config.blend.reuses_chunks:
            began_s = time.perf_counter()
            num_computed = self._engine.precompute(self._context)
            parts.append(f"{num_computed:,} computed now, in {time.perf_counter() - began_s:.1f} s")
        self._note(" · ".join(parts))

    def _converse(self) -> None:
        """Until EOFError, which is the end of input and what `/quit` raises."""
        while True:
            try:
                line = self._read_line().strip()
            except KeyboardInterrupt:
                self._note("nothing to stop; /quit or Ctrl-D leaves")
                continue
            try:
                if line.startswith("/"):
                    self._command(line)
                else:
                    self._answer(line)
            except CaJaxError as error:
                self._note(f"error: {error}", "red")

    def _take_leave(self) -> None:
        """Says which conversations another run may go on with, and by which name."""
        self._engine.wait_for_saves()
        kept = {info.session_id for info in self._engine.stored.list(tenant=self.session.tenant) if info.ssd_tokens}
        for session in self._sessions:
            if session.session_id in kept:
                self._note(f"kept: {terminal.title_of(session)} · --session_id={shlex.quote(session.session_id)}")
            elif session.token_ids:
                self._note(f"not kept: {terminal.title_of(session)}")

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name not in COMMANDS:
            raise UnknownCommandError(f"a command must be one of {', '.join(COMMANDS)}; got {name}")
        getattr(self, f"_do_{name[1:]}")(argument.strip())

    def _answer(self, message: str) -> None:
        session = self.session
        num_turns = len(session.conversation.turn_starts)
        answer = session.send(message, context=self._context or None, sampling=self._sampling)
        self._context = ()
        with _interrupts() as interrupted, contextlib.closing(answer):
            for piece in answer:
                terminal.write_piece(self._console, piece)
                if any_agrees(self._processes, "stop", interrupted.is_set()):
                    break
        self._console.print()
        if session.usage is not None and session.finish_reason is not None:
            num_gone = num_turns + 1 - len(session.conversation.turn_starts)
            oldest = self._overflow.token_discarder.name == "oldest"
            dropped = terminal.describe_overflow(session.usage, num_gone, oldest=oldest)
            parts = (_ENDED.get(session.finish_reason), terminal.describe_usage(session.usage), dropped)
            self._note(" · ".join(filter(None, parts)))

    def _do_new(self, system: str) -> None:
        self._sessions.append(self._engine.session(system=system or self._system))
        self._current = len(self._sessions) - 1
        self._note(f"conversation {len(self._sessions)}")

    def _do_sessions(self, _: str) -> None:
        self._console.print(terminal.sessions_table(self._sessions, self.session))

    def _do_switch(self, argument: str) -> None:
        self._current = _number("/switch", "the number of a conversation", argument, len(self._sessions)) - 1
        self._note(f"conversation {argument}: {terminal.title_of(self.session)}")

    def _do_forget(self, argument: str) -> None:
        """What never leaves by itself stays here too."""
        session, first = self.session, self._overflow.keep_first_tokens
        ends = [start for start, _ in session.conversation.turn_starts[1:] if start > first]
        if not ends:
            raise UnknownCommandError("/forget must have a conversation of two turns or more: the last one stays")
        stop = ends[_number("/forget", "how many of the oldest turns to drop", argument, len(ends)) - 1]
        num_left = session.discard(range(first, stop))
        self._note(f"dropped {stop - first:,} tokens, {num_left:,} are left")

    def _do_stored(self, _: str) -> None:
        infos = self._engine.stored.list(tenant=self.session.tenant)
        if infos:
            self._console.print(terminal.stored_table(infos, self.session))
        else:
            self._note("nothing is stored")

    def _keep(self, verb: str, _: str) -> None:
        getattr(self._engine.stored, verb)(self.session.session_id, tenant=self.session.tenant)
        self._note(_KEPT[verb])

    _do_pin = functools.partialmethod(_keep, "pin")
    _do_unpin = functools.partialmethod(_keep, "unpin")
    _do_drop = functools.partialmethod(_keep, "drop")

    def _do_stats(self, _: str) -> None:
        self._console.print(terminal.stats_table(self._engine.store_stats(), self._engine.metrics))

    def _do_help(self, _: str) -> None:
        commands = [(f"{name} {argument}", meaning) for name, (argument, meaning) in COMMANDS.items()]
        commands.append(("Ctrl-C", "stop the answer; what was said so far stays"))
        self._console.print(make_table(("", ""), commands, ruled=False))

    def _do_quit(self, _: str) -> None:
        raise EOFError

    def _note(self, text: str, style: str = "dim") -> None:
        note(self._console, text, style)


def _number(command: str, what: str, argument: str, most: int) -> int:
    """A command's argument as a number from 1."""
    if not (argument.isdecimal() and 1 <= int(argument) <= most):
        raise UnknownCommandError(f"{command} must be given {what}, 1 to {most}; got {argument!r}")
    return int(argument)


def context_chunks(
    model: LoadedModel, path: str | None, separator: str | None = None, num_tokens: int | None = None
) -> list[str] | list[list[int]]:
    """The chunks of a text file, as text or as token ids; none where no file is given.

    Args:
      model: whose tokenizer counts tokens.
      path: of the file.
      separator: what is between two chunks, `\\n` for a line break; None: `SEPARATOR`.
      num_tokens: of each chunk but the last, instead of a separator.

    Raises:
      ValueError: arguments that exclude each other or need a file, or a file that is no text.
      OSError: the file cannot be read.
      EmptyMessageError: it is blank.
      InvalidRequestError: an empty separator, or tokens of a model without tokenizer.
    """
    cuts = (separator is not None) + (num_tokens is not None)
    if path is None and cuts:
        raise ValueError("chunk_separator and chunk_tokens must come with a context_file to cut, got none")
    if cuts > 1:
        raise ValueError("a context_file must be cut by chunk_separator or by chunk_tokens, got both")
    if path is None:
        return []
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"context_file must be text in UTF-8, got other bytes in {path}: {error}") from error
    if num_tokens is None:
        return split_text(text, SEPARATOR if separator is None else separator.replace("\\n", "\n"))
    if model.tokenizer is None:
        raise InvalidRequestError(f"chunk_tokens must come with a model that has a tokenizer, got {model.name}")
    return split_tokens(model.tokenizer.encode(text, add_bos=False) if text.strip() else [], num_tokens)


def join_processes(address: str | None, count: int | None, index: int | None) -> Processes:
    """Joins the other processes, if flags say that there are any. Must be called before jax is used.

    Args:
      address: of the first process, HOST:PORT.
      count: number of processes.
      index: of this one.

    Raises:
      ValueError: only some of the flags are given, or no such process.
      RuntimeError: the others do not come.
    """
    group = {"coordinator_address": address, "num_processes": count, "process_id": index}
    given = [name for name, value in group.items() if value is not None]
    if address is None or count is None or index is None:
        if given:
            raise ValueError(f"{', '.join(group)} must be given together, got {', '.join(given)} alone")
        return Processes()
    check(count >= 1, "num_processes", "at least 1", count)
    check(0 <= index < count, "process_id", f"a number from 0 to {count - 1}", index)
    jax.distributed.initialize(address, count, index, initialization_timeout=_START_S)
    return JaxProcesses("chat", _USER_S) if count > 1 else Processes()


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Notes Ctrl-C in an event instead of raising KeyboardInterrupt, which could leave the engine within a step."""
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _lines_of(stream: TextIO, console: rich.console.Console) -> Callable[[], str]:
    """A `read_line` over a stream that is no terminal; echoes each line, so that the output reads as a transcript."""

    def read_line() -> str:
        line = stream.readline()
        if not line:
            raise EOFError
        note(console, _PROMPT + line.rstrip("\n"), None)
        return line

    return read_line


def _prompt_lines() -> Callable[[], str]:
    """A `read_line` on a terminal, with line editing, history and completion of commands."""
    completer = prompt_toolkit.completion.WordCompleter(list(COMMANDS), sentence=True)
    prompt: prompt_toolkit.PromptSession[str] = prompt_toolkit.PromptSession(
        _PROMPT, completer=completer, complete_while_typing=False
    )
    return prompt.prompt


def _shared_lines(read_line: Callable[[], str], processes: Processes) -> Callable[[], str]:
    """A `read_line` that gives all processes what the first one's gives; the others' are not asked."""
    if processes.count == 1:
        return read_line

    def read_first() -> str:
        said = None
        if processes.index == 0:
            try:
                said = ["", read_line()]
            except (EOFError, KeyboardInterrupt) as ended:
                said = [type(ended).__name__, ""]
        ended_by, line = from_first(processes, "a line", said)
        if ended_by:
            raise {"EOFError": EOFError, "KeyboardInterrupt": KeyboardInterrupt}[ended_by]
        return line

    return read_first


def _define_flags() -> None:
    """Only where this is the program: scripts share names of flags, and a test imports several of them."""
    define_model()
    for name, text in _TEXT_FLAGS.items():
        flags.DEFINE_string(name, None, text)
    text = "Cut context_file into chunks of so many tokens instead, the last one shorter."
    flags.DEFINE_integer("chunk_tokens", None, text, 1)
    flags.DEFINE_integer("num_processes", None, "Number of processes.")
    flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")
    _SAMPLING.define()
    _ENGINE.define()


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    processes = join_processes(FLAGS.coordinator_address, FLAGS.num_processes, FLAGS.process_id)
    console = rich.console.Console(quiet=processes.index > 0)
    sampling, config = _SAMPLING.read(), _ENGINE.read()
    with contextlib.ExitStack() as stack:
        with terminal.progress_bars() as progress:
            engine = stack.enter_context(Engine.from_pretrained(FLAGS.model, config, progress=progress))
            engine.warmup(max_history_tokens=0, max_new_tokens=_WARM_TOKENS, progress=progress)
        resolved = dataclasses.replace(config, dtype=engine.model.dtype, context_window=engine.window)
        for part in (resolved, sampling):
            note(console, repr(part))
        loaded = f"{engine.model.name}, loaded in {engine.metrics.model_load_s:.1f} s"
        note(console, f"{loaded}. /help lists the commands, Ctrl-C stops an answer.", None)
        typed = sys.stdin.isatty()
        read_line = _prompt_lines() if typed else _lines_of(sys.stdin, console)
        context = context_chunks(engine.model, FLAGS.context_file, FLAGS.chunk_separator, FLAGS.chunk_tokens)
        chat = Chat(engine, read_line, console, sampling, processes, context)
        chat.begin(FLAGS.session_id, FLAGS.system)
        chat.run()


if __name__ == "__main__":
    _define_flags()
    run(main)
