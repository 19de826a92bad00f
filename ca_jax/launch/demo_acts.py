"""The two acts of the demo, each to be run in a process of its own (`in_new_process`).

Act one serves a conversation turn by turn, over stored KV and once more by an engine that stores none. Act two, in the
next process, goes on with the conversation that act one left on SSD, and serves its turn once more recomputed.

Nothing is compiled while a turn is measured: in act one each turn runs once before and is taken back; in act two that
would fetch the KV that is to come from SSD, so the engine is warmed up for its lengths instead.

Not here: which conversation (`demo`), what is made of what was served (`demo_report`).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import rich.console

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine, enable_compile_cache
from ca_jax.errors import CaJaxError
from ca_jax.launch.machine import describe_machine
from ca_jax.launch.progress import progress_bars, spinner
from ca_jax.launch.terminal import describe_usage, printable, write_piece
from ca_jax.pretrained import Progress, load_model
from ca_jax.serving.prompts import turn_ids
from ca_jax.session import Session
from ca_jax.telemetry.metrics import CompileCounter
from ca_jax.turns.requests import SamplingParams, Usage

T = TypeVar("T")

_REHEARSED_TOKENS = 2  # The first comes from prefill, the second from a decode step.


class DemoError(CaJaxError):
    """The demo cannot run as asked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedTurn:
    """One measured turn of one session."""

    history_tokens: int
    """Of the conversation before the turn."""
    answer_ids: list[int]
    """Tokens generated."""
    usage: Usage
    """What it took."""
    compiles: int
    """Functions compiled while it was measured; 0, or its TTFT is of no use."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstAct:
    """What act one served."""

    reused: list[ServedTurn]
    """Over stored KV."""
    recomputed: list[ServedTurn]
    """The same turns, without."""
    engine_config: dict[str, Any]
    """Of the engine that stores KV, resolved: `EngineConfig` as JSON values."""
    machine: dict[str, Any]
    """See `describe_machine`; its load is that of before."""
    startup: dict[str, Any]
    """`model_load_s`, `first_touch_s`, `compile_s`, `compiles`: of the whole act."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecondAct:
    """What act two served: one turn, whose history another process has left on SSD."""

    num_messages: int
    """Of the conversation, as they were found."""
    reused: ServedTurn
    """Over KV from SSD."""
    recomputed: ServedTurn
    """The same turn, without."""
    start_to_first_token_s: float
    """From the start of the process to the first token of the turn over KV from SSD."""
    startup: dict[str, Any]
    """`model_load_s`, `warmup_s`, `first_touch_s` of the process."""


def in_new_process(act: Callable[..., T], **arguments: Any) -> T:
    """Runs a function in a process of its own, which prints where this one prints and has ended on return.

    A fresh interpreter, so that nothing of an earlier process is in its memory, nor on its device.

    Args:
      act: of a module; what it returns and raises must be picklable.
      arguments: of `act`, picklable.

    Raises:
      Exception: what `act` has raised.
      concurrent.futures.process.BrokenProcessPool: the process was killed.
    """
    sys.stdout.flush()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(act, **arguments).result()


def serve_with_and_without(
    *, model: str, engine_config: EngineConfig, session_id: str, messages: Sequence[str], max_tokens: int
) -> FirstAct:
    """Act one. What an earlier demo has stored under `session_id` is forgotten; what this one stores stays.

    Args:
      model: anything `load_model` takes, with a tokenizer.
      engine_config: of the engine that stores KV; the other differs in that it does not.
      session_id: of the conversation that is stored.
      messages: of the user.
      max_tokens: most tokens of an answer.

    Raises:
      CaJaxError: the model cannot be loaded, the store not be opened, or the conversation outgrows the window.
      OSError, ValueError: as for `Engine`.
    """
    console = rich.console.Console()
    machine = describe_machine()
    with CompileCounter() as compiles:
        enable_compile_cache(engine_config.compile_cache_dir)
        with progress_bars(console) as progress:
            loaded = load_model(model, dtype=engine_config.dtype, progress=progress)
        with Engine(loaded, engine_config) as engine:
            _get_ready(engine, console, max_history_tokens=0, max_new_tokens=1)
            console.rule("reuse: history is loaded, the message is prefilled")
            engine.session(session_id=session_id).close()
            session = engine.session(session_id=session_id)
            reused = serve(engine, session, messages, max_tokens=max_tokens, console=console)
        store = dataclasses.replace(engine_config.store, dram_gib=0.0, ssd_dir=None, ssd_url=None)
        with Engine(loaded, dataclasses.replace(engine_config, store=store)) as storeless:
            console.rule("recompute: history and message are prefilled, nothing is stored")
            recomputed = serve(storeless, storeless.session(), messages, max_tokens=max_tokens, console=console)
    return FirstAct(
        reused=reused,
        recomputed=recomputed,
        engine_config=dataclasses.asdict(engine_config) | {"dtype": loaded.dtype, "context_window": engine.window},
        machine=machine,
        startup={
            "model_load_s": loaded.load_s,
            "first_touch_s": engine.metrics.first_touch_s,
            "compile_s": compiles.seconds,
            "compiles": compiles.count,
        },
    )


def go_on(
    *, model: str, engine_config: EngineConfig, session_id: str, message: str, max_tokens: int, started_s: float
) -> SecondAct:
    """Act two.

    Args:
      model: as in act one.
      engine_config: as in act one.
      session_id: of the conversation that was stored.
      message: the user's next.
      max_tokens: most tokens of the answer.
      started_s: when the process was started, seconds since the epoch.

    Raises:
      DemoError: nothing is stored under `session_id`.
      CaJaxError: as in act one; so are OSError and ValueError.
    """
    console = rich.console.Console()
    console.rule("restart: a new process goes on with what is on SSD")
    with progress_bars(console) as progress:
        engine = Engine.from_pretrained(model, engine_config, progress=progress)
    with engine:
        session = engine.session(session_id=session_id)
        history_tokens, num_messages = len(session.token_ids), len(session.messages)
        if not history_tokens:
            raise DemoError(f"wanted the conversation of session {session_id!r} in the store, found nothing of it")
        prompt = turn_ids(engine.model, session.token_ids, session.messages, message)
        warmup_s = _get_ready(
            engine, console, max_history_tokens=history_tokens, max_new_tokens=len(prompt) - history_tokens + 1
        )
        _note(console, f"session {session_id} goes on: {history_tokens:,} tokens, {num_messages} messages")
        turns_before = sum(each["role"] == "user" for each in session.messages)
        _print_message(console, turns_before + 1, message)
        sent_s = time.time()
        reused = _serve_turn(session, message, max_tokens=max_tokens, console=console)
        with spinner(console, "recomputing the same turn"):
            recomputed = _recompute(engine, prompt, history_tokens, max_tokens)
        _note(console, f"recomputed: {describe_usage(recomputed.usage)}")
        return SecondAct(
            num_messages=num_messages,
            reused=reused,
            recomputed=recomputed,
            start_to_first_token_s=sent_s - started_s + reused.usage.ttft_s,
            startup={
                "model_load_s": engine.metrics.model_load_s,
                "warmup_s": warmup_s,
                "first_touch_s": engine.metrics.first_touch_s,
            },
        )


def serve(
    engine: Engine, session: Session, messages: Sequence[str], *, max_tokens: int, console: rich.console.Console
) -> list[ServedTurn]:
    """Serves a conversation turn by turn, streaming the answers to `console`, and waits for its KV to be stored.

    Args:
      engine: idle; no other session of it may run.
      session: of it, without a turn yet.
      messages: of the user.
      max_tokens: most tokens of an answer.
      console: where questions, answers and latencies go.

    Raises:
      ContextWindowError: the conversation outgrows the window.
    """
    served = []
    for turn, message in enumerate(messages, 1):
        _print_message(console, turn, message)
        with spinner(console, "compiling for this turn"):
            _rehearse(engine, session, message)
        served.append(_serve_turn(session, message, max_tokens=max_tokens, console=console))
    engine.wait_for_saves()
    return served


def drop_from_page_cache(directory: Path) -> bool:
    """Has the system forget what it holds of a directory's files in memory, so that reading them reads the disk.

    Returns:
      Whether it was asked to; not every system can be.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
    return True


def _get_ready(engine: Engine, console: rich.console.Console, *, max_history_tokens: int, max_new_tokens: int) -> float:
    """Warms the engine up, and waits for its memory; seconds the first took."""
    with progress_bars(console) as progress:
        warmup_s = engine.warmup(
            max_history_tokens=max_history_tokens, max_new_tokens=max_new_tokens, progress=progress
        )
        _touch(engine, progress)
    return warmup_s


def _touch(engine: Engine, progress: Progress) -> None:
    what = "touching memory"
    progress(what, 0, 1)
    engine.wait_until_ready()
    progress(what, 1, 1)


def _rehearse(engine: Engine, session: Session, message: str) -> None:
    """Runs a turn up to its second token and takes it back, KV too: what its lengths need is compiled then."""
    num_tokens = len(session.token_ids)
    for _ in session.send(message, max_tokens=_REHEARSED_TOKENS):
        pass
    cached_tokens = _usage_of(session).num_cached_tokens
    session.rewind(num_tokens)
    engine.truncate_stored(session, cached_tokens)  # The rehearsal has saved the last token before the message too.
    engine.wait_for_saves()  # Nothing is written to SSD while the turn is measured.


def _serve_turn(session: Session, message: str, *, max_tokens: int, console: rich.console.Console) -> ServedTurn:
    history_tokens = len(session.token_ids)
    with CompileCounter() as compiles:
        for piece in session.send(message, max_tokens=max_tokens):
            write_piece(console, piece)
    console.print()
    usage = _usage_of(session)
    _note(console, describe_usage(usage))
    return ServedTurn(
        history_tokens=history_tokens,
        answer_ids=session.token_ids[usage.prompt_tokens :],
        usage=usage,
        compiles=compiles.count,
    )


def _recompute(engine: Engine, prompt: list[int], history_tokens: int, max_tokens: int) -> ServedTurn:
    """Serves a turn as a prompt that has no session: nothing of it is loaded or stored."""
    engine.generate([prompt], SamplingParams(max_tokens=_REHEARSED_TOKENS))
    with CompileCounter() as compiles:
        completion = engine.generate([prompt], SamplingParams(max_tokens=max_tokens))[0]
    return ServedTurn(
        history_tokens=history_tokens,
        answer_ids=completion.token_ids,
        usage=completion.usage,
        compiles=compiles.count,
    )


def _usage_of(session: Session) -> Usage:
    if session.usage is None:
        raise DemoError(f"wanted a turn of session {session.session_id} to have ended, found none")
    return session.usage


def _print_message(console: rich.console.Console, turn: int, message: str) -> None:
    console.print(f"\n{turn}. {printable(message)}", style="bold", markup=False, highlight=False, soft_wrap=True)


def _note(console: rich.console.Console, text: str) -> None:
    console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
