"""Small traces of every format, as files, and the workloads that the tiny model makes of them."""

import json
from pathlib import Path

from benchmarks.replay.workload import ReplayedTrace, Workload, WorkloadConfig, make_workload
from ca_jax.overflow.config import OverflowConfig
from tests import engine_kit as kit

OVERFLOW = OverflowConfig()


def sharegpt_file(path: Path, *conversations: list[tuple[str, str]]) -> Path:
    """Conversations as (user, assistant) pairs, `c0`, `c1`, ..."""
    items = [
        {
            "id": f"c{index}",
            "conversations": [
                {"from": who, "value": text} for pair in pairs for who, text in zip(("human", "gpt"), pair, strict=True)
            ],
        }
        for index, pairs in enumerate(conversations)
    ]
    path.write_text(json.dumps(items), encoding="utf-8")
    return path


def talk(num_turns: int, seed: int) -> list[tuple[str, str]]:
    """A conversation whose messages and answers differ in length."""
    return [
        ("why? " * (1 + (3 * seed + 5 * turn) % 4), "so so. " * (1 + (seed + 2 * turn) % 5))
        for turn in range(num_turns)
    ]


def lines_file(path: Path, *rows: dict[str, object]) -> Path:
    """A JSON object on each line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def workload(trace: ReplayedTrace, *, window: int = kit.WINDOW, overflow=OVERFLOW, **changes: object) -> Workload:
    """What the tiny model makes of a trace."""
    return make_workload(kit.tiny_model(), trace, WorkloadConfig(**changes), window=window, overflow=overflow)


def lengths(made: Workload) -> list[list[tuple[int, int]]]:
    """Tokens of messages and answers."""
    return [[(len(turn.message), turn.answer_tokens) for turn in session.turns] for session in made.sessions]
