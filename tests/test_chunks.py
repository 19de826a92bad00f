"""Truncation texts and tokens into chunks, and where chunks lie in a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ca_jax.errors import EmptyMessageError, InvalidRequestError
from ca_jax.turns.chunks import CHUNK_END, ChunkSpan, chunk_text, split_text, split_tokens


def test_a_text_is_cut_at_separators_and_blank_pieces_are_left_out():
    text = "First.\n\n---\n\n\n\n---\n\nSecond,\n  two lines.\n\n---\n\n \t\n"
    assert split_text(text, "\n\n---\n\n") == ["First.", "Second,\n  two lines."]


def test_a_passage_is_the_same_chunk_wherever_it_stands():
    """At the end of a file there is a line break more behind it, and some have two characters."""
    assert split_text("one---\r\n  two\n", "---") == ["one", "  two"]
    assert split_text("\n  two\r\n---one\n", "---") == ["  two", "one"]


def test_a_text_without_the_separator_is_one_chunk():
    assert split_text("a\nb", "---") == ["a\nb"]


@given(st.lists(st.text("ab \n", max_size=6), min_size=1))
def test_pieces_are_what_was_joined_but_for_blank_ones_and_breaks_around_them(pieces):
    if all(not piece.strip() for piece in pieces):
        with pytest.raises(EmptyMessageError):
            split_text("|".join(pieces), "|")
    else:
        assert split_text("|".join(pieces), "|") == [piece.strip("\n") for piece in pieces if piece.strip()]


@pytest.mark.parametrize("text", ["", " \n", "\n---\n"])
def test_a_text_without_a_chunk_in_it_is_refused(text):
    with pytest.raises(EmptyMessageError, match="a text must have at least one chunk in it, got a blank one"):
        split_text(text, "---")


def test_an_empty_separator_is_refused():
    with pytest.raises(
        InvalidRequestError, match="separator of chunks must be at least one character, got an empty one"
    ):
        split_text("text", "")


def test_tokens_are_cut_at_a_size_and_the_rest_is_a_chunk():
    assert split_tokens([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert split_tokens((1, 2), 2) == [[1, 2]]
    assert split_tokens([1, 2], 9) == [[1, 2]]


@given(st.lists(st.integers(), min_size=1), st.integers(1, 9))
def test_pieces_of_tokens_are_all_tokens_in_order_and_all_but_the_last_full(token_ids, num_tokens):
    pieces = split_tokens(token_ids, num_tokens)
    assert [token for piece in pieces for token in piece] == token_ids
    assert [len(piece) for piece in pieces[:-1]] == [num_tokens] * (len(pieces) - 1)
    assert 1 <= len(pieces[-1]) <= num_tokens


def test_no_tokens_and_no_size_are_refused():
    with pytest.raises(EmptyMessageError, match="a chunk must have at least one token, got none"):
        split_tokens([], 2)
    with pytest.raises(InvalidRequestError, match="chunks must be at least 1 token, got 0"):
        split_tokens([1], 0)


@pytest.mark.parametrize(
    ("text", "expected"), [("a", "a" + CHUNK_END), ("a\n", "a\n"), ("a\n\n", "a\n\n"), ("a\n ", "a\n " + CHUNK_END)]
)
def test_the_next_chunk_begins_a_line(text, expected):
    assert chunk_text(text) == expected


def test_a_span_says_where_a_chunk_lies():
    span = ChunkSpan("key", 4, 6)
    assert (span.start, span.stop) == (4, 10)
    assert span.shifted(3) == ChunkSpan("key", 7, 6)
    assert span.shifted(-4) == ChunkSpan("key", 0, 6)


def test_a_span_has_tokens_and_lies_in_the_prompt():
    with pytest.raises(ValueError, match="at least 1 token from place 0 on, got 0 from 4 on"):
        ChunkSpan("key", 4, 0)
    with pytest.raises(ValueError, match="at least 1 token from place 0 on, got 6 from -1 on"):
        ChunkSpan("key", 4, 6).shifted(-5)
