"""Chat with a model in the terminal; every conversation's KV is kept, so that each turn prefills only what is new.

    python -m ca_jax.launch.chat --model=smollm2-135m-instruct --system="Answer briefly."

Lines that begin with / are commands, /help lists them. Ctrl-C stops an answer; what was said so far stays. Input that
is no terminal is read line by line, so that a chat can be scripted.

Not here: serving (`ca_jax.engine`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

import prompt_toolkit
import prompt_toolkit.completion
import rich.console
import rich.table
from absl import app, flags, logging

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.errors import CaJaxError
from ca_jax.launch.progress import progress_bars
from ca_jax.launch.terminal import describe_usage, printable, write_piece
from ca_jax.session import FinishReason, SamplingParams, Session
from ca_jax.storage.config import GIB, StoreConfig

FLAGS = flags.FLAGS

COMMANDS = {
    "/new": ("[system]", "begin another conversation, with this system message if given"),
    "/sessions": ("", "list the conversations"),
    "/switch": ("N", "go on with conversation N"),
    "/stats": ("", "what the store holds and what the engine has done"),
    "/help": ("", "this list"),
    "/quit": ("", "leave; so does Ctrl-D"),
}
"""What lines that begin with / may be: name to argument and meaning."""

_WARM_TOKENS = 32  # A first message is short; other lengths are compiled when they come.
_PROMPT = "> "
_TITLE_CHARS = 60


class UnknownCommandError(CaJaxError, ValueError):
    """A line that begins with / and is no command, or a command whose argument is none."""


class Chat:
    """One user, one engine, any number of conversations.

    Args:
      engine: who answers.
      read_line: gives the user's next line, without its end; EOFError ends the chat, KeyboardInterrupt drops the line.
      console: where everything goes.
      sampling: how answers are drawn.
      system: system message of new conversations.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        read_line: Callable[[], str],
        console: rich.console.Console,
        sampling: SamplingParams,
        system: str | None = None,
    ) -> None:
        self._engine = engine
        self._read_line = read_line
        self._console = console
        self._sampling = sampling
        self._system = system
        self._sessions: list[Session] = [engine.session(system=system)]
        self._current = 0
        actions = (self._new, self._list, self._switch, self._stats, self._help, self._quit)
        self._actions: dict[str, Callable[[str], None]] = dict(zip(COMMANDS, actions, strict=True))

    @property
    def session(self) -> Session:
        """The conversation that a message goes to."""
        return self._sessions[self._current]

    def run(self) -> None:
        """Reads and answers until /quit or the end of input. Errors of ca_jax are shown and the chat goes on."""
        while True:
            try:
                line = self._read_line().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note("nothing to stop; /quit or Ctrl-D leaves")
                continue
            try:
                if line.startswith("/"):
                    self._command(line)
                else:
                    self._answer(line)
            except _LeaveChat:
                return
            except CaJaxError as error:
                self._console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name not in self._actions:
            raise UnknownCommandError(f"wanted one of {', '.join(COMMANDS)}; found {name}")
        self._actions[name](argument.strip())

    def _answer(self, message: str) -> None:
        session = self.session
        answer = session.send(message, sampling=self._sampling)
        with _interrupts() as interrupted, contextlib.closing(answer):
            for piece in answer:
                write_piece(self._console, piece)
                if interrupted.is_set():
                    break
        self._console.print()
        ended = {FinishReason.CANCELLED: "stopped · ", FinishReason.LENGTH: "cut short · "}
        if session.usage is not None and session.finish_reason is not None:
            self._note(ended.get(session.finish_reason, "") + describe_usage(session.usage))

    def _new(self, system: str) -> None:
        self._sessions.append(self._engine.session(system=system or self._system))
        self._current = len(self._sessions) - 1
        self._note(f"conversation {len(self._sessions)}")

    def _list(self, _: str) -> None:
        table = rich.table.Table(box=None, pad_edge=False)
        for column in ("", "conversation", "turns", "tokens"):
            table.add_column(column, justify="right" if column in ("", "turns", "tokens") else "left")
        for number, session in enumerate(self._sessions, 1):
            mark = "*" if session is self.session else " "
            turns = sum(message["role"] == "user" for message in session.messages)
            title = rich.text.Text(_title(session))
            table.add_row(f"{mark} {number}", title, str(turns), f"{len(session.token_ids):,}")
        self._console.print(table)

    def _switch(self, argument: str) -> None:
        if not (argument.isdecimal() and 1 <= int(argument) <= len(self._sessions)):
            raise UnknownCommandError(
                f"/switch wanted the number of a conversation, 1 to {len(self._sessions)}; found {argument!r}"
            )
        self._current = int(argument) - 1
        self._note(f"conversation {argument}: {_title(self.session)}")

    def _stats(self, _: str) -> None:
        store, done = self._engine.store_stats(), self._engine.metrics
        misses = ", ".join(f"{count} {reason}" for reason, count in store.misses.items() if count) or "none"
        skipped = ", ".join(f"{count} {reason}" for reason, count in store.skipped_saves.items() if count) or "none"
        share = done.cached_tokens / done.prompt_tokens if done.prompt_tokens else 0.0
        rows = (
            ("store", f"{store.used_bytes / GIB:.3f} of {store.capacity_bytes / GIB:.3f} GiB DRAM"),
            ("stored conversations", f"{store.num_sessions} ({store.num_evictions} evicted)"),
            ("loads", f"{store.num_hits} hits; misses: {misses}; failed: {done.failed_loads}"),
            ("saves", f"{store.num_saves}; skipped: {skipped}; failed: {done.failed_saves}"),
            ("turns", f"{done.turns} ({done.cancelled} stopped)"),
            ("prompt tokens", f"{done.prompt_tokens:,}, of which cached {done.cached_tokens:,} ({share:.0%})"),
            ("generated tokens", f"{done.completion_tokens:,}"),
        )
        table = rich.table.Table(box=None, show_header=False, pad_edge=False)
        for name, value in rows:
            table.add_row(name, value)
        self._console.print(table)

    def _help(self, _: str) -> None:
        table = rich.table.Table(box=None, show_header=False, pad_edge=False)
        for name, (argument, meaning) in COMMANDS.items():
            table.add_row(rich.text.Text(f"{name} {argument}"), meaning)
        table.add_row("Ctrl-C", "stop the answer; what was said so far stays")
        self._console.print(table)

    def _quit(self, _: str) -> None:
        raise _LeaveChat

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


class _LeaveChat(Exception):
    """The user wants to leave."""


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Notes Ctrl-C in an event instead of raising KeyboardInterrupt, which could leave the engine within a step."""
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _title(session: Session) -> str:
    """The first thing the user said, shortened."""
    first = next((m["content"] for m in session.messages if m["role"] == "user"), "(nothing said yet)")
    line = printable(" ".join(first.split()))
    return line if len(line) <= _TITLE_CHARS else line[: _TITLE_CHARS - 1] + "…"


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


def _define_flags() -> None:
    """Only where this is the program: scripts share names of flags, and a test imports several of them."""
    flags.DEFINE_string(
        "model",
        "smollm2-135m-instruct",
        "Preset, .gguf file, Hugging Face directory, hub name (org/name) or checkpoint.",
    )
    flags.DEFINE_string("system", None, "System message of new conversations; the model's own if not given.")
    flags.DEFINE_integer("max_tokens", 512, "Most tokens of an answer.")
    flags.DEFINE_float("temperature", 0.0, "0 is greedy; above, answers are drawn, the wilder the higher.")
    flags.DEFINE_integer("top_k", 0, "Draw from the k likeliest tokens; 0 means all.")
    flags.DEFINE_float("top_p", 1.0, "Draw from the likeliest tokens that together have this probability.")
    flags.DEFINE_float("min_p", 0.0, "Drop tokens less likely than this share of the likeliest.")
    flags.DEFINE_float("repetition_penalty", 1.0, "Above 1 makes tokens seen so far less likely.")
    flags.DEFINE_integer("seed", 0, "Of the draws.")
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Of weights and KV; by default what is fast here.")
    flags.DEFINE_integer("context_window", None, "Most tokens of a conversation; by default the model's, up to 4,096.")
    flags.DEFINE_float("dram_gib", 2.0, "Memory for stored KV, GiB, taken at start; 0 keeps none.")


def main(argv: Sequence[str]) -> None:
    """Runs from the command line."""
    if len(argv) > 1:
        raise app.UsageError(f"wanted flags only, found {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # jax reports each backend that it does not find.
    console = rich.console.Console()
    try:
        sampling = SamplingParams(
            max_tokens=FLAGS.max_tokens,
            temperature=FLAGS.temperature,
            top_k=FLAGS.top_k,
            top_p=FLAGS.top_p,
            min_p=FLAGS.min_p,
            repetition_penalty=FLAGS.repetition_penalty,
            seed=FLAGS.seed,
        )
        config = EngineConfig(
            dtype=FLAGS.dtype,
            context_window=FLAGS.context_window,
            max_batch_size=1,  # One user waits for one answer.
            store=StoreConfig(dram_gib=FLAGS.dram_gib),
        )
        with contextlib.ExitStack() as stack:
            with progress_bars() as progress:
                engine = stack.enter_context(Engine.from_pretrained(FLAGS.model, config, progress=progress))
                engine.warmup(max_history_tokens=0, max_new_tokens=_WARM_TOKENS, progress=progress)
            resolved = dataclasses.replace(config, dtype=engine.model.dtype, context_window=engine.window)
            for part in (resolved, sampling):
                console.print(repr(part), style="dim", markup=False, highlight=False, soft_wrap=True)
            console.print(
                f"{engine.model.name}, loaded in {engine.metrics.model_load_s:.1f} s. /help lists the commands, "
                "Ctrl-C stops an answer.",
                highlight=False,
                soft_wrap=True,
            )
            read_line = prompt_lines(tuple(COMMANDS)) if sys.stdin.isatty() else lines_of(sys.stdin, console)
            Chat(engine, read_line=read_line, console=console, sampling=sampling, system=FLAGS.system).run()
    except (CaJaxError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
