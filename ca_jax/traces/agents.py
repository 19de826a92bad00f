"""Reads traces of agents: every call they made to a chat model, with its whole prompt and its answer.

A line is `{"timestamp": µs, "input": text, "output": text, "session_id": text}`; a session is one task of an agent.
Lines are written when calls end, so that those of a session need not stand in order.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ca_jax.traces.requests import Request
from ca_jax.traces.rows import BadRows, Row, TraceError, json_rows


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AgentCall:
    """One call of a model by an agent."""

    session_id: str
    """Its task."""
    arrival_s: float
    """Since the epoch."""
    prompt: str
    """The whole prompt; empty where the trace has none, as of calls about pictures."""
    answer: str
    """What the model said."""


def load_agent_calls(paths: Iterable[str | os.PathLike[str]], bad_rows: BadRows | None = None) -> Iterator[AgentCall]:
    """Yields the calls of one file after the other, those of a file by time.

    Args:
      paths: of the files.
      bad_rows: what is done about rows that cannot be used; by default the first is an error.

    Raises:
      FileNotFoundError: there is no such file.
      TraceError: a row that is malformed.
    """
    bad_rows = bad_rows or BadRows()
    for path in paths:
        calls = []
        for row in json_rows(path, bad_rows):
            try:
                calls.append(_call(row))
            except TraceError as error:
                bad_rows.take(error)
        yield from sorted(calls, key=lambda call: call.arrival_s)


def agent_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files of a trace: those of a directory, `*.jsonl`, by name, or the one that is named.

    Raises:
      FileNotFoundError: a directory without such files.
    """
    path = Path(path)
    if not path.is_dir():
        return [path]
    paths = sorted(path.glob("*.jsonl"))
    if not paths:
        raise FileNotFoundError(f"{path}: there must be at least one file *.jsonl, got none")
    return paths


def agent_requests(calls: Iterable[AgentCall], count_tokens: Callable[[str], int]) -> list[Request]:
    """Calls as requests, in order of arrival; those without a prompt or an answer are left out.

    Args:
      calls: of any number of sessions.
      count_tokens: of a text.
    """
    spoken = sorted((call for call in calls if call.prompt and call.answer), key=lambda call: call.arrival_s)
    last_text: dict[str, str] = {}
    requests = []
    for call in spoken:
        before = last_text.get(call.session_id, "")
        shared = os.path.commonprefix([before, call.prompt])  # noqa: RUF071 (by characters is what is wanted)
        last_text[call.session_id] = call.prompt + call.answer
        num_tokens = max(1, count_tokens(call.prompt))
        requests.append(
            Request(
                arrival_s=call.arrival_s - spoken[0].arrival_s,
                session_id=call.session_id,
                input_tokens=num_tokens,
                output_tokens=max(1, count_tokens(call.answer)),
                shared_tokens=min(count_tokens(shared) if shared else 0, num_tokens),
            )
        )
    return requests


def _call(row: Row) -> AgentCall:
    arrival_s = row.number("timestamp") / 1e6
    if arrival_s < 0:
        raise row.error("timestamp", "microseconds of at least 0")
    session_id = row.text("session_id")
    if not session_id:
        raise row.error("session_id", "a name")
    return AgentCall(session_id=session_id, arrival_s=arrival_s, prompt=row.text("input"), answer=row.text("output"))
