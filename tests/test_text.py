"""Text of answers with stop strings, fed piece by piece; and texts and tokens cut into chunks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ca_jax.errors import EmptyMessageError, InvalidRequestError
from ca_jax.turns.text import ChunkSpan, TextOutput, split_text, split_tokens


class Pieces:
    """A detokeniser whose token i is the i-th piece; the last piece comes at the end only."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces = pieces
        self.rest = rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.rest


def expected_text(pieces: list[str], stop: tuple[str, ...]) -> tuple[str, bool]:
    """The text before the first stop string there is once a piece has completed one."""
    text = ""
    for piece in pieces:
        text += piece
        found = [text.index(string) for string in stop if string in text]
        if found:
            return text[: min(found)], True
    return text, False


letters = st.text("ab", max_size=4)
stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)


@settings(max_examples=300, deadline=None)
@given(st.lists(letters, max_size=8), stops, letters)
def test_what_is_shown_is_the_text_before_the_first_stop_string(pieces, stop, rest):
    """And no more is held back meanwhile than may begin a stop string."""
    output, shown = TextOutput(Pieces(pieces, rest), stop), []
    for token in range(len(pieces)):
        shown.append(output.push(token))
        held = "".join(pieces[: token + 1])[len(output.text) :]
        assert output.stopped or not held or any(string.startswith(held) for string in stop)
    shown.append(output.finish())
    text, stopped = expected_text([*pieces, rest], stop)
    assert "".join(shown) == output.text == text
    assert output.stopped == stopped


def test_stop_strings_are_not_looked_for_in_the_first_tokens():
    output = TextOutput(Pieces(["a", "b", "a", "b", "c"]), ("ab",), min_tokens=2)
    assert [output.push(token) for token in range(4)] == ["a", "b", "", ""]
    assert output.stopped
    assert output.text == "ab"


# Chunks.


@given(st.lists(st.text("ab \n", max_size=6), min_size=1))
def test_pieces_are_what_was_joined_but_for_blank_ones_and_breaks_around_them(pieces):
    if all(not piece.strip() for piece in pieces):
        with pytest.raises(EmptyMessageError):
            split_text("|".join(pieces), "|")
    else:
        assert split_text("|".join(pieces), "|") == [piece.strip("\n") for piece in pieces if piece.strip()]


@given(st.lists(st.integers(), min_size=1), st.integers(1, 9))
def test_pieces_of_tokens_are_all_tokens_in_order_and_all_but_the_last_full(token_ids, num_tokens):
    pieces = split_tokens(token_ids, num_tokens)
    assert [token for piece in pieces for token in piece] == token_ids
    assert [len(piece) for piece in pieces[:-1]] == [num_tokens] * (len(pieces) - 1)
    assert 1 <= len(pieces[-1]) <= num_tokens


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        *((lambda text=text: split_text(text, "---"), EmptyMessageError, "blank") for text in ("", " \n", "\n---\n")),
        (lambda: split_text("text", ""), InvalidRequestError, "separator .*empty"),
        (lambda: split_tokens([], 2), EmptyMessageError, "at least one token"),
        (lambda: split_tokens([1], 0), InvalidRequestError, "got 0"),
        (lambda: ChunkSpan("key", 4, 0), ValueError, "at least 1 token .*got 0 from 4 on"),
        (lambda: ChunkSpan("key", 4, 6).shifted(-5), ValueError, "got 6 from -1 on"),
    ],
)
def test_what_cannot_be_is_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()
