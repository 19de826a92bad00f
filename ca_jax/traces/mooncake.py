"""Reads Mooncake's traces: requests to a production chat service, whose prompts are told by hashes of their blocks.

A line is `{"timestamp": ms, "input_length": int, "output_length": int, "hash_ids": [int, ...]}`. There are no session
ids; which request goes on from which is found from their prompts.

Source: Mooncake (Qin et al., FAST 2025), and the traces published with it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from ca_jax.traces.requests import HASH_BLOCK_TOKENS, Request
from ca_jax.traces.rows import BadRows, Row, TraceError, json_rows


def load_mooncake(path: str | os.PathLike[str], bad_rows: BadRows | None = None) -> Iterator[Request]:
    """Yields the requests of a trace, in order of arrival.

    Args:
      path: of the file.
      bad_rows: what is done about rows that cannot be used; by default the first is an error.

    Raises:
      FileNotFoundError: there is no such file.
      TraceError: a row that is malformed, or came before the one above it.
    """
    bad_rows = bad_rows or BadRows()
    sessions = _Sessions()
    last_s = 0.0
    for row in json_rows(path, bad_rows):
        try:
            request = _request(row, last_s)
        except TraceError as error:
            bad_rows.take(error)
            continue
        last_s = request.arrival_s
        yield sessions.joined(request)


def _request(row: Row, last_s: float) -> Request:
    arrival_s = row.number("timestamp") / 1000
    if arrival_s < last_s:
        raise row.error("timestamp", f"at least the {last_s * 1000:g} ms of the row before")
    input_tokens = row.count("input_length", least=1)
    hash_ids = row.counts("hash_ids")
    num_blocks = -(-input_tokens // HASH_BLOCK_TOKENS)
    if len(hash_ids) != num_blocks:
        raise row.error("hash_ids", f"one for each of {num_blocks} blocks of {HASH_BLOCK_TOKENS} tokens")
    return Request(
        arrival_s=arrival_s,
        session_id="",
        input_tokens=input_tokens,
        output_tokens=row.count("output_length", least=1),
        hash_ids=hash_ids,
    )


@dataclasses.dataclass(slots=True)
class _Session:
    name: str
    num_shared: int  # Leading blocks that others had before it began: a system prompt, say.
    full_ids: tuple[int, ...]  # Of the full blocks of its last prompt.


class _Sessions:
    """Which session a request goes on from.

    A prompt goes on from an earlier one if it begins with all of its full blocks, at least one of which no other
    session had before. One that leaves an earlier prompt within its blocks begins a session of its own.
    """

    def __init__(self) -> None:
        self._session_with: dict[int, _Session] = {}  # By hash id, whose prompt had it first.
        self._num_sessions = 0

    def joined(self, request: Request) -> Request:
        """A request with its session's name, and what it shares with the one before. In order of arrival, each once."""
        ids = request.hash_ids
        num_seen = next((i for i, each in enumerate(ids) if each not in self._session_with), len(ids))
        session = self._session_with[ids[num_seen - 1]] if num_seen else None
        if session is None or not self._goes_on(session, ids[:num_seen]):
            session = _Session(f"s{self._num_sessions}", num_seen, ())
            self._num_sessions += 1
        num_shared = HASH_BLOCK_TOKENS * len(session.full_ids)
        session.full_ids = ids[: request.input_tokens // HASH_BLOCK_TOKENS]
        for each in session.full_ids[num_seen:]:
            self._session_with[each] = session
        return dataclasses.replace(request, session_id=session.name, shared_tokens=num_shared)

    @staticmethod
    def _goes_on(session: _Session, seen_ids: tuple[int, ...]) -> bool:
        num_full = len(session.full_ids)
        return num_full > session.num_shared and seen_ids[:num_full] == session.full_ids
