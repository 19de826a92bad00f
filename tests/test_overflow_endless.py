"""A conversation without end takes as much memory and disk after many turns as after a few, and stays right."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ca_jax.engine import Engine
from ca_jax.session import Session
from ca_jax.storage.catalog.file import CATALOG_NAME
from tests import engine_kit as kit
from tests import overflow_kit as ok

MIB = 1 << 20
MAX_BLOCKS = ok.WINDOW // kit.BLOCK_TOKENS + 3
"""Of a conversation as long as the window: the first tokens that stay take a block, and its ends parts of two."""


def sizes_of(engine: Engine, session: Session, directory: Path) -> dict[str, int]:
    """What the only conversation takes."""
    engine.wait_for_saves()
    (info,) = engine.stored.list()
    assert engine.store_stats().num_sessions == len(engine.sessions) == 1
    return {
        "dram_blocks": info.num_blocks,
        "ssd_bytes": info.ssd_bytes,
        "num_files": sum(path.is_file() for path in directory.rglob("*")),
        "catalog_bytes": sum(path.stat().st_size for path in directory.glob(f"{CATALOG_NAME}*")),
        "note_bytes": len(session.conversation.to_bytes()),
        "num_tokens": len(session.token_ids),
        "num_messages": len(session.messages),
        "memory_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def converse_without_end(num_turns: int, num_looks: int, directory: Path) -> None:
    """Short turns, long ones and tokens discarded by hand; every answer is followed by the reference."""
    rng = np.random.default_rng(num_turns)
    seen: list[dict[str, int]] = []
    config = {**ok.SMALL, "overflow": ok.config(4, 0.5), "store": kit.ssd_store(directory, ssd_blocks=64)}
    with kit.small_engine(**config) as engine:
        session = engine.session(session_id="one")
        reference = ok.Conversation(engine.config.overflow)
        for turn in range(num_turns):
            prompt = kit.prompt(int(rng.integers(1, 32)), seed=turn)
            reference.follow(prompt, ok.say(session, prompt, 50 if turn % 40 == 39 else int(rng.integers(1, 5))))
            assert session.token_ids == reference.token_ids
            assert session.usage.num_cached_tokens == reference.num_cached
            if turn % 7 == 6:
                discarded = rng.random(len(session.token_ids)) < 0.2
                session.discard(discarded)
                reference.discard(discarded)
            if turn % (num_turns // num_looks) == num_turns // num_looks - 1:
                seen.append(sizes_of(engine, session, directory))
        assert engine.metrics.truncations > num_turns / 8
        assert session.num_dropped > 4 * num_turns
        assert engine.metrics.failed_loads == engine.metrics.failed_saves == 0
        before = session.conversation
    with kit.small_engine(**config) as engine:
        session = engine.session(session_id="one")
        assert session.conversation == before
        pair = ok.Pair(engine, session, reference)
        pair.turns(9, 30)
    expect_bounded(seen)


def expect_bounded(seen: list[dict[str, int]]) -> None:
    """At no look more than the window explains, and at the last no more than at the first."""
    bounds = {
        "dram_blocks": MAX_BLOCKS,
        "ssd_bytes": MAX_BLOCKS * (kit.BLOCK_TOKENS * kit.TOKEN_BYTES + kit.SSD_FILE_BYTES),
        "num_files": 64 + 16,
        "catalog_bytes": max(2 * seen[0]["catalog_bytes"], 8 * MIB),
        "note_bytes": 4096,
        "num_tokens": ok.WINDOW,
        "num_messages": 2 * ok.WINDOW,
    }
    for sizes in seen:
        assert {name: sizes[name] for name, bound in bounds.items() if sizes[name] > bound} == {}
    assert seen[-1]["memory_bytes"] - seen[0]["memory_bytes"] <= 64 * MIB


def test_200_turns(tmp_path):
    converse_without_end(200, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_10_000_turns(tmp_path):
    converse_without_end(10_000, 20, tmp_path)
