"""Rows of trace files, read one by one: what is wrong with one is said with file, line and field.

Not here: what rows mean (a reader for each kind of trace).
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_SHOWN_CHARS = 60


class TraceError(ValueError):
    """A trace that cannot be read as it is. The message says where, what was wanted and what was found."""


class BadRows:
    """What is done about rows that cannot be used.

    Args:
      skip: whether to leave them out and count them; if not, the first one is an error.
    """

    def __init__(self, skip: bool = False) -> None:
        self.num_skipped = 0
        """Rows that were left out."""
        self.first: str | None = None
        """What was wrong with the first of them."""
        self._skip = skip

    def take(self, error: TraceError) -> None:
        """Counts a bad row, or raises what is wrong with it."""
        if not self._skip:
            raise error
        self.num_skipped += 1
        self.first = self.first or str(error)


class Row:
    """One row, and where it stands.

    Args:
      path: of the file.
      line: counted from 1.
      fields: by name.
    """

    def __init__(self, path: Path, line: int, fields: Mapping[str, Any]) -> None:
        self._where = f"{path}, line {line}"
        self._fields = fields

    def error(self, field: str, wanted: str) -> TraceError:
        """What to raise of a field that is not as wanted."""
        found = "nothing" if field not in self._fields else _shorten(self._fields[field])
        return TraceError(f"{self._where}: `{field}` must be {wanted}, got {found}")

    def number(self, field: str) -> float:
        """A field that is a finite number, or text that spells one.

        Raises:
          TraceError: it is not there, or something else.
        """
        value = self._fields.get(field)
        try:
            number = math.nan if value is None or isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.error(field, "a number")
        return number

    def count(self, field: str, least: int = 0) -> int:
        """A field that is an integer, `least` or more.

        Raises:
          TraceError: it is not there, or something else.
        """
        number = self.number(field)
        if number < least or number != int(number):
            raise self.error(field, f"an integer of at least {least}")
        return int(number)

    def text(self, field: str) -> str:
        """A field that is text.

        Raises:
          TraceError: it is not there, or something else.
        """
        value = self._fields.get(field)
        if not isinstance(value, str):
            raise self.error(field, "text")
        return value

    def counts(self, field: str) -> tuple[int, ...]:
        """A field that is a list of integers, 0 or more.

        Raises:
          TraceError: it is not there, or something else.
        """
        value = self._fields.get(field)
        if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
            raise self.error(field, "a list of integers of at least 0")
        return tuple(value)


def json_rows(path: str | os.PathLike[str], bad_rows: BadRows) -> Iterator[Row]:
    """Yields the objects of a file that has one on each line; blank lines are passed over.

    Raises:
      FileNotFoundError: there is no such file.
      TraceError: a line that is something else, unless such rows are skipped.
    """
    with _open(path) as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                fields = json.loads(text)
            except ValueError as error:  # RecursionError apart, all that json raises.
                bad_rows.take(
                    TraceError(f"{path}, line {line}: contents must be a JSON object, got {_shorten(text)}: {error}")
                )
                continue
            if isinstance(fields, dict):
                yield Row(Path(path), line, fields)
            else:
                bad_rows.take(
                    TraceError(f"{path}, line {line}: contents must be a JSON object, got {_shorten(fields)}")
                )


def csv_rows(path: str | os.PathLike[str], bad_rows: BadRows, columns: Mapping[str, Iterable[str]]) -> Iterator[Row]:
    """Yields the rows of a CSV file whose first line names its columns.

    Args:
      path: of the file.
      bad_rows: what is done about rows with other than so many fields.
      columns: for each field that is wanted, names its column may have, in any case.

    Raises:
      FileNotFoundError: there is no such file.
      TraceError: the first line lacks a column; or a bad row, unless such rows are skipped.
    """
    with _open(path, newline="") as file:
        reader = csv.reader(file)
        header = [name.strip().lower() for name in next(reader, [])]
        places = {}
        for field, names in columns.items():
            wanted = [name.lower() for name in names]
            found = [header.index(name) for name in wanted if name in header]
            if not found:
                raise TraceError(f"{path}, line 1: `{field}` must be a column of {', '.join(wanted)}; got {header}")
            places[field] = found[0]
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                bad_rows.take(
                    TraceError(
                        f"{path}, line {reader.line_num}: there must be {len(header)} fields, got {_shorten(cells)}"
                    )
                )
                continue
            yield Row(Path(path), reader.line_num, {field: cells[place] for field, place in places.items()})


def _open(path: str | os.PathLike[str], newline: str | None = None) -> Any:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no trace at {path}")
    return open(path, encoding="utf-8", newline=newline)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
