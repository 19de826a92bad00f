"""Reads traces of arrivals without sessions: CSV files that say when a request came and how long it was."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterator

from ca_jax.traces.requests import Request
from ca_jax.traces.rows import BadRows, Row, TraceError, csv_rows

_COLUMNS = {
    "arrival": ("timestamp", "arrival_s", "arrival_time", "time"),
    "input": ("input_tokens", "contexttokens", "input_length", "prompt_tokens", "request tokens"),
    "output": ("output_tokens", "generatedtokens", "output_length", "completion_tokens", "response tokens"),
}


def load_arrivals(path: str | os.PathLike[str], bad_rows: BadRows | None = None) -> Iterator[Request]:
    """Yields the requests of a CSV file, in order of arrival, each a session of its own.

    The first line names the columns, of which three are read: the time, in seconds or as a date with a time
    (`2023-11-16 18:15:46.68`), and the tokens of prompt and answer, under any of the names that published traces have
    for them.

    Args:
      path: of the file.
      bad_rows: what is done about rows that cannot be used; by default the first is an error.

    Raises:
      FileNotFoundError: there is no such file.
      TraceError: a column is missing; a row is malformed, or came before the one above it.
    """
    bad_rows = bad_rows or BadRows()
    first_s: float | None = None
    last_s = -math.inf
    for index, row in enumerate(csv_rows(path, bad_rows, _COLUMNS)):
        try:
            arrival_s = _seconds(row)
            if arrival_s < last_s:
                raise row.error("arrival", "a time that is not before that of the row above")
            input_tokens, output_tokens = row.count("input", least=1), row.count("output", least=1)
        except TraceError as error:
            bad_rows.take(error)
            continue
        last_s = arrival_s
        first_s = arrival_s if first_s is None else first_s
        yield Request(
            arrival_s=arrival_s - first_s,
            session_id=f"s{index}",
            input_tokens=input_tokens,
            output_tokens=output_tokens,
        )


def _seconds(row: Row) -> float:
    try:
        return row.number("arrival")
    except TraceError:
        pass
    try:
        date = datetime.datetime.fromisoformat(row.text("arrival").strip())
    except ValueError as error:
        raise row.error("arrival", "seconds, or a date with a time") from error
    return (date if date.tzinfo else date.replace(tzinfo=datetime.UTC)).timestamp()
