"""Requests of recorded traces: Mooncake's, those of agents, and CSV files of arrivals.

A bad row is reported with its file, line and field, or counted and skipped. Files of JSON may be compressed (`.gz`).

    mooncake    {"timestamp": ms, "input_length": int, "output_length": int, "hash_ids": [int, ...]}
    agents      {"timestamp": µs, "input": text, "output": text, "session_id": text}
    agent_sessions  {"id": text, "tool_tokens": int, "block_size": 64, "requests": [{"t": s, "api_time": s, "in": int,
                     "out": int, "hash_ids": [int, ...]}, ...]}
    arrivals    CSV with columns for time, prompt tokens and answer tokens

Not here: what the prompts say, serving them.
Source: Mooncake (Qin et al., FAST 2025), and the traces published with it.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import dataclasses
import datetime
import gzip
import itertools
import json
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ca_jax.errors import check

T = TypeVar("T")
TracePath = str | os.PathLike[str]

TRACE_FORMATS = ("sharegpt", "mooncake", "agents", "agent_sessions", "arrivals")
"""Conversations; requests with hashes of their prompts; calls of agents with their whole prompts; sessions of agents
with hashes of their prompts; requests of which only the lengths are known."""
HASH_BLOCK_TOKENS = 512
"""Prompt tokens that one of `hash_ids` stands for in a trace of `mooncake`."""
AGENT_BLOCK_TOKENS = 64
"""The same of `agent_sessions`, where it stands for full blocks alone."""
_SHOWN_CHARS = 60
_COLUMNS = {
    "arrival": ("timestamp", "arrival_s", "arrival_time", "time"),
    "input": ("input_tokens", "contexttokens", "input_length", "prompt_tokens", "request tokens"),
    "output": ("output_tokens", "generatedtokens", "output_length", "completion_tokens", "response tokens"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Which trace, and how it is read.

    Raises:
      ValueError: an unknown format, or no file where one is needed.
    """

    trace_format: str = "sharegpt"
    """One of `TRACE_FORMATS`."""
    trace: str | None = None
    """The file, of agents also a directory of such; None for the installed ShareGPT."""
    skip_bad_rows: bool = False
    """Whether rows that cannot be used are skipped and counted; if not, the first one is an error."""

    def __post_init__(self) -> None:
        wanted = f"one of {', '.join(TRACE_FORMATS)}"
        check(self.trace_format in TRACE_FORMATS, "trace_format", wanted, self.trace_format)
        has_trace = self.trace is not None or self.trace_format == "sharegpt"
        check(has_trace, "trace", f"a file of the format {self.trace_format}", self.trace)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request to a server."""

    arrival_s: float
    """Seconds since the trace began, >= 0."""
    session_id: str
    """Requests of one session build upon each other."""
    input_tokens: int
    """Tokens of the whole prompt, history included; > 0."""
    output_tokens: int
    """Tokens of the answer; > 0."""
    shared_tokens: int = 0
    """Leading prompt tokens that are known to be those of the session's previous request and its answer."""
    hash_ids: tuple[int, ...] = ()
    """One for every `HASH_BLOCK_TOKENS` of the prompt, the last block perhaps not full: equal ids mean equal blocks
    behind equal prompts. Empty where the trace has none. Of `agent_sessions` see `load_agent_sessions`."""
    think_s: float = 0.0
    """Seconds between the answer before it and this request, where the trace says how long answers took."""
    tool_tokens: int = 0
    """First tokens of the prompt that define tools: other sessions with as many have the same ones."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AgentCall:
    """One call of a model by an agent."""

    session_id: str
    """The agent's task."""
    arrival_s: float
    """Seconds since the epoch."""
    prompt: str
    """The whole prompt; empty where the trace has none, as for calls about pictures."""
    answer: str


class TraceError(ValueError):
    """A trace that cannot be read as it is. The message says where, what it must be and what was got."""


class BadRows:
    """What happens to rows that cannot be used.

    Args:
      skip: count and skip them; otherwise the first one is an error.
    """

    def __init__(self, skip: bool = False) -> None:
        self.num_skipped = 0
        """Rows that were skipped."""
        self.first: str | None = None
        """What was wrong with the first of them."""
        self._skip = skip

    def take(self, error: TraceError) -> None:
        """Counts a bad row, or raises what is wrong with it."""
        if not self._skip:
            raise error
        self.num_skipped += 1
        self.first = self.first or str(error)


def load_requests(
    trace_format: str, path: TracePath, count_tokens: Callable[[str], int] = len, bad_rows: BadRows | None = None
) -> list[Request]:
    """Reads a trace of requests, in order of arrival.

    Sessions of `mooncake` are found by the prompts' prefixes, and each of `arrivals` is one of its own. The first line
    of `arrivals` names the columns, of which three are read: the time, in seconds or as a date with a time
    (`2023-11-16 18:15:46.68`), and the tokens of prompt and answer, under the names that published traces use.

    Args:
      trace_format: of `TRACE_FORMATS`, but for `sharegpt`.
      path: of the file; of `agents` also a directory.
      count_tokens: counts the tokens of a text, for `agents`.
      bad_rows: what happens to rows that cannot be used; by default the first is an error.

    Raises:
      FileNotFoundError: there is no such file.
      TraceError: a column is missing; a row is malformed, or came before the one above it.
    """
    if trace_format == "agents":
        return agent_requests(load_agent_calls(path, bad_rows), count_tokens)
    if trace_format == "agent_sessions":
        return sorted(load_agent_sessions(path, bad_rows), key=lambda request: request.arrival_s)
    rows = _json_rows if trace_format == "mooncake" else _csv_rows
    requests = _parsed(rows, path, bad_rows, _request_parser(trace_format))
    return list(map(_Sessions().joined, requests) if trace_format == "mooncake" else requests)


def _request_parser(trace_format: str) -> Callable[[_Row], Request]:
    """Parses the rows of a file of `mooncake` or `arrivals`, which must come in order of time."""
    is_hashed = trace_format == "mooncake"
    time, num_in, num_out = ("timestamp", "input_length", "output_length") if is_hashed else tuple(_COLUMNS)
    first_s, last_s = (0.0, 0.0) if is_hashed else (math.nan, -math.inf)

    def parse(row: _Row) -> Request:
        nonlocal first_s, last_s
        arrival_s = row.number(time) / 1000 if is_hashed else row.seconds(time)
        if arrival_s < last_s:
            raise row.error(time, "a time that is not before that of the row above")
        input_tokens, output_tokens = row.count(num_in), row.count(num_out)
        hash_ids = row.counts("hash_ids") if is_hashed else ()
        num_blocks = -(-input_tokens // HASH_BLOCK_TOKENS)
        if is_hashed and len(hash_ids) != num_blocks:
            raise row.error("hash_ids", f"one for each of {num_blocks} blocks of {HASH_BLOCK_TOKENS} tokens")
        first_s, last_s = arrival_s if math.isnan(first_s) else first_s, arrival_s
        return Request(
            arrival_s=arrival_s - first_s,
            session_id=f"s{row.line}",
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            hash_ids=hash_ids,
        )

    return parse


def load_agent_calls(path: TracePath, bad_rows: BadRows | None = None) -> Iterator[AgentCall]:
    """Yields agents' calls, one file after the other; those of a file by time, which need not be their order in it.

    Args:
      path: of a file, or of a directory, whose files `*.jsonl` are read by name.
      bad_rows: what happens to rows that cannot be used; by default the first is an error.

    Raises:
      FileNotFoundError: there is no such file, or a directory without files.
      TraceError: a row is malformed.
    """
    paths = sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [path]
    if not paths:
        raise FileNotFoundError(f"{path}: there must be at least one file *.jsonl, got none")
    for each in paths:
        yield from sorted(_parsed(_json_rows, each, bad_rows, _agent_call), key=lambda call: call.arrival_s)


def _agent_call(row: _Row) -> AgentCall:
    arrival_s = row.number("timestamp") / 1e6
    if arrival_s < 0:
        raise row.error("timestamp", "microseconds of at least 0")
    session_id = row.text("session_id")
    if not session_id:
        raise row.error("session_id", "a name")
    return AgentCall(session_id=session_id, arrival_s=arrival_s, prompt=row.text("input"), answer=row.text("output"))


def agent_requests(calls: Iterable[AgentCall], count_tokens: Callable[[str], int]) -> list[Request]:
    """Turns calls into requests, in order of arrival; skips those without a prompt or an answer.

    Args:
      calls: of any number of sessions.
      count_tokens: counts the tokens of a text.
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


def load_agent_sessions(path: TracePath, bad_rows: BadRows | None = None) -> Iterator[Request]:
    """Yields the requests of agents' sessions, one session after the other; each session begins at 0 s.

    Those of subagents come among the others by time. A hash counts within its session, but for those of the first
    blocks, which define tools: sessions with as many tokens of tools get the same ids there. That such sessions have
    the same tools is assumed; the trace does not say so.

    Args:
      path: of the file.
      bad_rows: what happens to sessions that cannot be used; by default the first is an error.

    Raises:
      FileNotFoundError: there is no such file.
      TraceError: a session is malformed.
    """
    num_ids = itertools.count()
    of_tools: dict[tuple[int, int], int] = collections.defaultdict(num_ids.__next__)
    for requests in _parsed(_json_rows, path, bad_rows, _agent_session):
        of_session: dict[int, int] = collections.defaultdict(num_ids.__next__)
        last_ids: tuple[int, ...] = ()
        for each in requests:
            for place, local in enumerate(each.hash_ids[: each.tool_tokens // AGENT_BLOCK_TOKENS]):
                if local not in of_session:
                    of_session[local] = of_tools[each.tool_tokens, place]
            ids = tuple(of_session[local] for local in each.hash_ids)
            shared = AGENT_BLOCK_TOKENS * len(os.path.commonprefix([last_ids, ids]))  # noqa: RUF071 (of ids)
            last_ids = ids
            yield dataclasses.replace(each, hash_ids=ids, shared_tokens=shared)


def _agent_session(row: _Row) -> list[Request]:
    """The requests of one session by time, with the hashes of the file."""
    name, size = row.text("id"), row.count("block_size")
    if size != AGENT_BLOCK_TOKENS:
        raise row.error("block_size", f"{AGENT_BLOCK_TOKENS}, the only size that is read")
    asked = sorted(_agent_rows(row, 0.0), key=lambda each: each[0])
    requests: list[Request] = []
    end_s = asked[0][0] if asked else 0.0
    for begin_s, tool_tokens, each in asked:
        input_tokens, hash_ids = each.count("in"), each.counts("hash_ids")
        if len(hash_ids) != input_tokens // AGENT_BLOCK_TOKENS:
            raise each.error("hash_ids", f"one for each full block of {AGENT_BLOCK_TOKENS} tokens")
        requests.append(
            Request(
                arrival_s=begin_s - asked[0][0],
                session_id=name,
                input_tokens=input_tokens,
                output_tokens=max(1, int(each.number("out", 0))),
                hash_ids=hash_ids,
                think_s=max(0.0, begin_s - end_s),
                tool_tokens=min(tool_tokens, input_tokens),
            )
        )
        end_s = max(end_s, begin_s + each.number("api_time", 0))
    return requests


def _agent_rows(row: _Row, begin_s: float) -> Iterator[tuple[float, int, _Row]]:
    """Yields when each request began that a session or a subagent made, its tokens of tools, and its row."""
    for each in row.rows("requests"):
        if each.has("requests"):
            yield from _agent_rows(each, begin_s + each.number("t"))
        else:
            yield begin_s + each.number("t"), int(row.number("tool_tokens", 0)), each


def share_of_seen_blocks(requests: Iterable[Request]) -> float:
    """Returns the share of all blocks that lead their prompt and were seen before: the hit rate of unbounded capacity.

    Args:
      requests: with `hash_ids`, in order of arrival.

    Returns:
      In [0, 1]; 0 where there are no blocks.
    """
    seen: set[int] = set()
    num_hits = num_blocks = 0
    for request in requests:
        num_hits += _num_leading(request.hash_ids, seen)
        num_blocks += len(request.hash_ids)
        seen.update(request.hash_ids)
    return num_hits / num_blocks if num_blocks else 0.0


def _num_leading(ids: Sequence[int], seen: Container[int]) -> int:
    """How many of the first ids were seen before."""
    return next((i for i, each in enumerate(ids) if each not in seen), len(ids))


@dataclasses.dataclass(slots=True)
class _Session:
    name: str
    num_shared: int  # Leading blocks that others had before it began: a system prompt, say.
    full_ids: tuple[int, ...]  # Of the full blocks of its last prompt.


class _Sessions:
    """Finds the session that a request continues.

    A prompt continues an earlier one if it begins with all of its full blocks, at least one of which no other session
    had before. One that leaves an earlier prompt within its blocks begins a session of its own.
    """

    def __init__(self) -> None:
        self._session_with: dict[int, _Session] = {}  # By hash id: the session whose prompt had it first.
        self._num_sessions = 0

    def joined(self, request: Request) -> Request:
        """Adds the session's name and what is shared with its last request. Call once each, in order of arrival."""
        ids = request.hash_ids
        num_seen = _num_leading(ids, self._session_with)
        session = self._session_with[ids[num_seen - 1]] if num_seen else None
        full_ids = () if session is None else session.full_ids
        if session is None or len(full_ids) <= session.num_shared or ids[:num_seen][: len(full_ids)] != full_ids:
            session = _Session(f"s{self._num_sessions}", num_seen, ())
            self._num_sessions += 1
        num_shared = HASH_BLOCK_TOKENS * len(session.full_ids)
        session.full_ids = ids[: request.input_tokens // HASH_BLOCK_TOKENS]
        self._session_with.update(dict.fromkeys(session.full_ids[num_seen:], session))
        return dataclasses.replace(request, session_id=session.name, shared_tokens=num_shared)


# Rows of files.


class _Row:
    """One row of a file, its fields by name; getters raise TraceError where a field is not what it must be."""

    def __init__(self, path: TracePath, line: int, fields: Mapping[str, Any]) -> None:
        self.line = line
        self._path = path
        self._where = f"{path}, line {line}"
        self._fields = fields

    def error(self, field: str, wanted: str) -> TraceError:
        """What to raise for a field that is not as it must be."""
        found = "nothing" if field not in self._fields else shorten(self._fields[field])
        return TraceError(f"{self._where}: `{field}` must be {wanted}, got {found}")

    def has(self, field: str) -> bool:
        """Whether there is such a field."""
        return field in self._fields

    def rows(self, field: str) -> list[_Row]:
        """A list of objects."""
        value = self._fields.get(field)
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise self.error(field, "a list of objects")
        return [_Row(self._path, self.line, each) for each in value]

    def number(self, field: str, default: float | None = None) -> float:
        """A finite number, or text that spells one; where it is lacking the default, if there is one."""
        value = self._fields.get(field, default)
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if not isinstance(value, bool) and math.isfinite(number := float(value)):
                return number
        raise self.error(field, "a number")

    def seconds(self, field: str) -> float:
        """A number, or a date with a time, UTC unless it says otherwise."""
        try:
            return self.number(field)
        except TraceError as error:
            try:
                date = datetime.datetime.fromisoformat(self.text(field).strip())
            except ValueError:
                raise self.error(field, "seconds, or a date with a time") from error
        return (date if date.tzinfo else date.replace(tzinfo=datetime.UTC)).timestamp()

    def count(self, field: str) -> int:
        """An integer of at least 1."""
        number = self.number(field)
        if number < 1 or number != int(number):
            raise self.error(field, "an integer of at least 1")
        return int(number)

    def text(self, field: str) -> str:
        """Text."""
        value = self._fields.get(field)
        if not isinstance(value, str):
            raise self.error(field, "text")
        return value

    def counts(self, field: str) -> tuple[int, ...]:
        """A list of integers of at least 0."""
        value = self._fields.get(field)
        if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
            raise self.error(field, "a list of integers of at least 0")
        return tuple(value)


def _parsed(
    read: Callable[[TracePath], Iterator[_Row | TraceError]],
    path: TracePath,
    bad_rows: BadRows | None,
    parse: Callable[[_Row], T],
) -> Iterator[T]:
    """Yields what rows stand for; reports those that cannot be read or parsed."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no trace at {path}")
    bad_rows = bad_rows or BadRows()
    for row in read(path):
        try:
            if isinstance(row, TraceError):
                raise row
            parsed = parse(row)
        except TraceError as error:
            bad_rows.take(error)
        else:
            yield parsed


def _json_rows(path: TracePath) -> Iterator[_Row | TraceError]:
    """Yields the objects of a file that has one on each line, without blank lines."""
    is_compressed = Path(path).suffix == ".gz"
    with gzip.open(path, "rt", encoding="utf-8") if is_compressed else open(path, encoding="utf-8") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            wrong = f"{path}, line {line}: a row must be a JSON object, got {shorten(text)}"
            try:
                fields = json.loads(text)
                yield _Row(path, line, fields) if isinstance(fields, dict) else TraceError(wrong)
            except ValueError as error:
                yield TraceError(f"{wrong}: {error}")


def _csv_rows(path: TracePath) -> Iterator[_Row | TraceError]:
    """Yields the rows of a CSV file whose first line names its columns; of these, those of `_COLUMNS`."""
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        header = [name.strip().lower() for name in next(reader, [])]
        places = {}
        for field, names in _COLUMNS.items():
            places[field] = next((header.index(name) for name in names if name in header), -1)
            if places[field] < 0:
                raise TraceError(f"{path}, line 1: `{field}` must be a column of {', '.join(names)}; got {header}")
        for cells in filter(None, reader):
            if len(cells) == len(header):
                yield _Row(path, reader.line_num, {field: cells[place] for field, place in places.items()})
            else:
                wrong = f"a row must have {len(header)} fields, got {shorten(cells)}"
                yield TraceError(f"{path}, line {reader.line_num}: {wrong}")


def shorten(value: Any) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
