"""The two acts of the demo, each to be run in a process of its own (`in_new_process`).

Act one serves a conversation turn by turn, over stored KV and once more by an engine that stores none. Act two, in the
next process, goes on with the conversation that act one left on SSD, and serves its turn once more recomputed.

Nothing is compiled while a turn is measured: in act one each turn runs once before and is taken back; in act two that
would fetch the KV that is to come from SSD, so the engine is warmed up for its lengths instead.

Not here: which conversation (`demo`), table, JSON and figure (also `demo`).
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

from benchmarks.compiles import CompileCounter
from benchmarks.conversations import ServedTurn
from benchmarks.disk import drop_cached
from benchmarks.engines import without_store
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.errors import CaJaxError
from ca_jax.launch.machine import describe_machine
from ca_jax.launch.script import note
from ca_jax.launch.terminal import decode_rate, describe_usage, progress_bars, write_piece
from ca_jax.pretrained import load_model
from ca_jax.serving.core import enable_compile_cache
from ca_jax.serving.prompts import turn_ids
from ca_jax.session import Session
from ca_jax.turns.requests import Usage

T = TypeVar("T")

_REHEARSED_TOKENS = 2  # The first comes from prefill, the second from a decode step.


class DemoError(CaJaxError):
    """The demo cannot run as asked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One turn, over stored KV and recomputed."""

    turn: int
    """From 1."""
    history_tokens: int
    """Of the conversation before the turn, template included."""
    new_tokens: int
    """Of the message, template included."""
    answer_tokens: int
    cached_tokens: dict[str, int]
    """Tokens whose KV was loaded, by the tier it was in. The last token of an answer has none yet."""
    ttft_recompute_s: float
    """Seconds to the first token, history prefilled again."""
    ratio: float
    """That over the seconds to the first token over stored KV."""
    same_tokens: bool
    """Whether both answers are the same, token by token."""
    compiles: int
    """Functions compiled in the two measured turns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnRow(Row):
    """A turn of act one."""

    ttft_reuse_s: float
    """Seconds to the first token, history loaded."""
    load_s: float
    """Seconds in which KV was copied in the reuse run; they overlap compute."""
    decode_tokens_per_s: float | None
    """Of the reuse run, after the first token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeRow(Row):
    """The turn of act two, over KV that an ended process left on SSD."""

    session_id: str
    num_messages: int
    """Of the conversation, as they were found."""
    ttft_ssd_s: float
    """Seconds to the first token, history fetched from SSD and loaded."""
    queued_s: float
    """Of `ttft_ssd_s`, until the KV was fetched and the prefill began."""
    start_to_first_token_s: float
    """Seconds from the start of the process to the first token over KV from SSD."""
    model_load_s: float
    """Seconds of those: reading the model."""
    warmup_s: float
    """Seconds of those: compiling, or reading the compile cache."""
    first_touch_s: float
    """Seconds of making host memory resident, in the background."""
    page_cache_dropped: bool
    """Whether the system was asked to forget the files before, so that they were read from the disk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstAct:
    """What act one served."""

    rows: list[TurnRow]
    engine_config: dict[str, Any]
    """Of the engine that stores KV, resolved: `EngineConfig` as JSON values."""
    machine: dict[str, Any]
    """See `describe_machine`; its load is that of before."""
    startup: dict[str, Any]
    """`model_load_s`, `first_touch_s`, `compile_s`, `compiles`: of the whole act."""


def compared(turn: int, recomputed: ServedTurn, reused: ServedTurn) -> dict[str, Any]:
    """The fields of `Row`, of one turn served both ways."""
    return {
        "turn": turn,
        "history_tokens": reused.history_tokens,
        "new_tokens": reused.usage.prompt_tokens - reused.history_tokens,
        "answer_tokens": len(reused.answer_ids),
        "cached_tokens": {tier: count for tier, count in reused.usage.cached_tokens.items() if count},
        "ttft_recompute_s": recomputed.usage.ttft_s,
        "ratio": recomputed.usage.ttft_s / reused.usage.ttft_s,
        "same_tokens": recomputed.answer_ids == reused.answer_ids,
        "compiles": recomputed.compiles + reused.compiles,
    }


def in_new_process(act: Callable[..., T], **arguments: Any) -> T:
    """Runs a function in a process of its own, which prints where this one prints and has ended on return.

    A fresh interpreter, so that nothing of an earlier process is in its memory, nor on its device. The function is of a
    module; what it is given, returns and raises is pickled.
    """
    sys.stdout.flush()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(act, **arguments).result()


def serve_with_and_without(
    *, model: str, engine_config: EngineConfig, session_id: str, messages: Sequence[str], max_tokens: int
) -> FirstAct:
    """Act one. What an earlier demo has stored under `session_id` is forgotten; what this one stores stays."""
    console = rich.console.Console()
    machine = describe_machine()
    with CompileCounter() as compiles:
        enable_compile_cache(engine_config.compile_cache_dir)
        with progress_bars(console) as progress:
            kinds = {name: getattr(engine_config, name) for name in ("dtype", "weight_dtype")}
            loaded = load_model(model, **kinds, progress=progress)
        with Engine(loaded, engine_config) as engine:
            _get_ready(engine, console, max_history_tokens=0, max_new_tokens=1)
            console.rule("reuse: history is loaded, the message is prefilled")
            engine.session(session_id=session_id).close()
            session = engine.session(session_id=session_id)
            reused = serve(engine, session, messages, max_tokens=max_tokens, console=console)
        with Engine(loaded, without_store(engine_config)) as storeless:
            console.rule("recompute: history and message are prefilled, nothing is stored")
            recomputed = serve(storeless, storeless.session(), messages, max_tokens=max_tokens, console=console)
    rows = [
        TurnRow(
            **compared(turn, other, ours),
            ttft_reuse_s=ours.usage.ttft_s,
            load_s=ours.usage.load_s,
            decode_tokens_per_s=decode_rate(ours.usage),
        )
        for turn, (other, ours) in enumerate(zip(recomputed, reused, strict=True), 1)
    ]
    return FirstAct(
        rows=rows,
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
    *,
    model: str,
    engine_config: EngineConfig,
    session_id: str,
    message: str,
    max_tokens: int,
    started_s: float,
    page_cache_dropped: bool,
) -> ResumeRow:
    """Act two, in a process that was started at `started_s`, seconds since the epoch.

    DemoError: nothing is stored under `session_id`.
    """
    console = rich.console.Console()
    console.rule("restart: a new process goes on with what is on SSD")
    with progress_bars(console) as progress:
        engine = Engine.from_pretrained(model, engine_config, progress=progress, warm=False)
    with engine:
        session = engine.session(session_id=session_id)
        history_tokens, num_messages = len(session.token_ids), len(session.messages)
        if not history_tokens:
            raise DemoError(f"the store must have the conversation of session {session_id!r}, got nothing of it")
        prompt = turn_ids(engine.model, session.token_ids, session.messages, message)
        warmup_s = _get_ready(
            engine, console, max_history_tokens=history_tokens, max_new_tokens=len(prompt) - history_tokens + 1
        )
        note(console, f"session {session_id} goes on: {history_tokens:,} tokens, {num_messages} messages")
        turn = 1 + sum(each["role"] == "user" for each in session.messages)
        _print_message(console, turn, message)
        sent_s = time.time()
        reused = _serve_turn(session, message, max_tokens=max_tokens, console=console)
        with console.status("recomputing the same turn"):
            recomputed = _recompute(engine, prompt, history_tokens, max_tokens)
        note(console, f"recomputed: {describe_usage(recomputed.usage)}")
        return ResumeRow(
            **compared(turn, recomputed, reused),
            session_id=session_id,
            num_messages=num_messages,
            ttft_ssd_s=reused.usage.ttft_s,
            queued_s=reused.usage.queued_s,
            start_to_first_token_s=sent_s - started_s + reused.usage.ttft_s,
            model_load_s=engine.metrics.model_load_s,
            warmup_s=warmup_s,
            first_touch_s=engine.metrics.first_touch_s,
            page_cache_dropped=page_cache_dropped,
        )


def serve(
    engine: Engine, session: Session, messages: Sequence[str], *, max_tokens: int, console: rich.console.Console
) -> list[ServedTurn]:
    """Serves a conversation turn by turn, streaming the answers to `console`, and waits for its KV to be stored."""
    served = []
    for turn, message in enumerate(messages, 1):
        _print_message(console, turn, message)
        with console.status("compiling for this turn"):
            _rehearse(engine, session, message)
        served.append(_serve_turn(session, message, max_tokens=max_tokens, console=console))
    engine.wait_for_saves()
    return served


def drop_from_page_cache(directory: Path) -> bool:
    """Has the system forget what it holds of a directory's files in memory; False where it cannot be asked to."""
    can_drop = hasattr(os, "posix_fadvise")
    if can_drop:
        drop_cached(path for path in directory.rglob("*") if path.is_file())
    return can_drop


def _get_ready(engine: Engine, console: rich.console.Console, *, max_history_tokens: int, max_new_tokens: int) -> float:
    """Warms the engine up, and waits for its memory; seconds the first took."""
    with progress_bars(console) as progress:
        warmup_s = engine.warmup(
            max_history_tokens=max_history_tokens, max_new_tokens=max_new_tokens, progress=progress
        )
        progress("touching memory", 0, 1)
        engine.wait_until_ready()
        progress("touching memory", 1, 1)
    return warmup_s


def _rehearse(engine: Engine, session: Session, message: str) -> None:
    """Runs a turn up to its second token and takes it back, KV too: what its lengths need is compiled then.

    Twice: first over pages that are on the device still, and then over what is stored, as the turn itself.
    """
    num_tokens = len(session.token_ids)
    for _ in range(2):
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
    served = _served(session, history_tokens, compiles)
    note(console, describe_usage(served.usage))
    return served


def _recompute(engine: Engine, prompt: list[int], history_tokens: int, max_tokens: int) -> ServedTurn:
    """Serves a turn to somebody of whom nothing is stored: all of it is computed, and nothing of it kept."""
    nobody = engine.session(tenant="recompute")
    for _ in engine.fork(nobody, is_kept=False).send_ids(prompt, max_tokens=_REHEARSED_TOKENS):
        pass
    session = engine.fork(nobody, is_kept=False)
    with CompileCounter() as compiles:
        for _ in session.send_ids(prompt, max_tokens=max_tokens):
            pass
    nobody.close()
    served = _served(session, history_tokens, compiles)
    if num_loaded := served.usage.num_cached_tokens:
        raise DemoError(f"what is to be computed must not be loaded, got {num_loaded} tokens that were")
    return served


def _served(session: Session, history_tokens: int, compiles: CompileCounter) -> ServedTurn:
    usage = _usage_of(session)
    return ServedTurn(history_tokens, tuple(session.token_ids[usage.prompt_tokens :]), usage, compiles.count)


def _usage_of(session: Session) -> Usage:
    if session.usage is None:
        raise DemoError(f"a turn of session {session.session_id} must have ended, got none")
    return session.usage


def _print_message(console: rich.console.Console, turn: int, message: str) -> None:
    note(console, f"\n{turn}. {message}", "bold")
