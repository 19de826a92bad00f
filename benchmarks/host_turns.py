"""Measures the host's work for a turn behind a short history and behind a long one: what is new is the same in both.

Each part is what an engine and its server do; no model computes, and no KV is moved but what is new. It belongs to the
suite `policy`.

Not here: turns of an engine (`suites.ttft`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.harness import BenchError
from benchmarks.overflow_store import LAYOUT, save_tokens
from ca_jax.device.processes import current
from ca_jax.engine import Engine
from ca_jax.kv.kept_conversations import KeptConversations
from ca_jax.kv.load import packed_prompt
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.session import Job, Session
from ca_jax.storage.catalog.notes import NoteLog
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.store import AttentionStore
from ca_jax.telemetry.metrics import EngineMetrics
from ca_jax.turns.conversations import Conversation, chain_of
from ca_jax.turns.requests import FinishReason, SamplingParams
from ca_jax.turns.text import TextOutput

_HISTORIES = (1_000, 100_000)  # Tokens.
_NEW_TOKENS = 50  # Of a message, and of an answer.
_KEY = "turn"
_TEMPLATE = ChatTemplate.plain()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnRow:
    """The host's work for one turn behind a history whose KV is in DRAM, without a model's."""

    measured: str = "turn"
    history_tokens: int
    """Tokens of the conversation before the turns that are timed."""
    new_tokens: int
    """Tokens of each of these."""
    num_messages: int
    total_ms: float
    """Median of the turns."""
    ms_of: dict[str, float]
    """Medians of the parts: `render` (the chat template, not on the engine's thread where it is much), `queue` (the
    prompt), `load` (what of it is stored, and how it is read), `save` (of what is new), `adopt` (the turn becomes part
    of the conversation), `keep` (that outlives the process)."""


def measure_turns(repeats: int, seed: int, directory: Path) -> list[TurnRow]:
    """Times the parts of turns, one row for each length of history."""
    return [_measure(repeats, seed, num_tokens, directory / f"turn-{num_tokens}") for num_tokens in _HISTORIES]


def _measure(repeats: int, seed: int, num_tokens: int, directory: Path) -> TurnRow:
    rng = np.random.default_rng(seed)
    dram_gib = 2 * (num_tokens // LAYOUT.block_tokens + repeats + 2) * LAYOUT.block_bytes / GIB
    directory.mkdir()
    store = AttentionStore(LAYOUT, StoreConfig(dram_gib=dram_gib, block_tokens=LAYOUT.block_tokens))
    kept = KeptConversations(store, NoteLog(directory), current(), None, EngineMetrics())
    session = Session(cast(Engine, None), _KEY, _conversation(num_tokens, rng))
    save_tokens(store, _KEY, 0, np.array(session.token_ids))
    samples = [_turn(store, kept, session, rng) for _ in range(1 + repeats)][1:]  # The first one for nothing.
    kept.close()
    store.close()
    return TurnRow(
        history_tokens=num_tokens,
        new_tokens=2 * _NEW_TOKENS,
        num_messages=len(session.messages),
        total_ms=float(np.median([sum(sample.values()) for sample in samples])) * 1e3,
        ms_of={part: float(np.median([sample[part] for sample in samples])) * 1e3 for part in samples[0]},
    )


def _conversation(num_tokens: int, rng: np.random.Generator) -> Conversation:
    """So many tokens, of messages that are as long as those of the turns to come."""
    starts = [(start, start // _NEW_TOKENS) for start in range(0, num_tokens, 2 * _NEW_TOKENS)]
    messages = [{"role": role, "content": _text(rng)} for _ in starts for role in ("user", "assistant")]
    token_ids = rng.integers(1 << 16, size=num_tokens).tolist()
    return Conversation(token_ids=token_ids, messages=messages, turn_starts=starts, chain=chain_of(messages))


def _text(rng: np.random.Generator) -> str:
    return " ".join(map(str, rng.integers(1000, size=_NEW_TOKENS)))


def _turn(
    store: AttentionStore, kept: KeptConversations, session: Session, rng: np.random.Generator
) -> dict[str, float]:
    """Seconds of each part of a turn."""
    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(part: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        seconds[part] = time.perf_counter() - started_s

    said = [{"role": "user", "content": _text(rng)}]
    new_ids, answer_ids = rng.integers(1 << 16, size=(2, _NEW_TOKENS)).tolist()
    num_before = len(session.token_ids)
    with timed("render"):
        _TEMPLATE.next_turn(session.messages, said)
    with timed("queue"):
        prompt_ids = [*session.token_ids, *new_ids]
        job = Job(prompt_ids, SamplingParams(), TextOutput(None, (), 0), frozenset(), session, said)
    with timed("load"):
        ticket = store.prepare_load(_KEY, packed_prompt(job)[:-1], truncate=True)
        if ticket is None or ticket.num_tokens != num_before:
            raise BenchError(
                f"the store must have {num_before} tokens, got {0 if ticket is None else ticket.num_tokens}"
            )
        ticket.plan()
        store.complete_load(ticket)
    for token in answer_ids:
        job.add(token)
    with timed("save"):
        save_tokens(store, _KEY, num_before, np.array([*new_ids, *answer_ids]))
    with timed("adopt"):
        session.adopt(job, FinishReason.LENGTH)
    with timed("keep"):
        kept.remember(_KEY, session)
    return seconds
