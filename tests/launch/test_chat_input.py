"""Flags of the chat that stand for no config: a file as context, and processes that serve as one."""

import dataclasses

import pytest

from ca_jax.errors import EmptyMessageError, InvalidRequestError
from ca_jax.launch.chat import context_chunks, join_processes
from tests import engine_kit as kit


def chunks(path=None, model=None, **cut):
    return context_chunks(model or kit.tiny_model(), path, **cut)


@pytest.fixture
def file_of(tmp_path):
    def make(text: str | bytes) -> str:
        path = tmp_path / "context.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return make


@pytest.mark.parametrize(
    "text", ["one\n---\ntwo\n  more\n", "one\n\n---\n\ntwo\n  more", "one\r\n---\r\ntwo\r\n  more\r\n"]
)
def test_a_file_is_cut_at_lines_of_dashes(file_of, text):
    assert chunks(file_of(text)) == ["one", "two\n  more"]
    assert chunks() == []


def test_it_is_cut_where_it_is_said_to_be(file_of):
    path = file_of("one\n\ntwo\n---\n\n\nthree ## four")
    assert chunks(path, separator="##") == ["one\n\ntwo\n---\n\n\nthree ", " four"]
    assert chunks(path, separator=r"\n\n") == ["one", "two\n---", "three ## four"]
    assert chunks(path, separator="\n\n") == ["one", "two\n---", "three ## four"]
    assert [bytes(chunk) for chunk in chunks(file_of("one two\n"), num_tokens=3)] == [b"one", b" tw", b"o\n"]


@pytest.mark.parametrize(
    ("text", "cut", "error", "message"),
    [
        (" \n", {}, EmptyMessageError, "blank"),
        (" \n", {"num_tokens": 4}, EmptyMessageError, "at least one token"),
        ("a", {"separator": ""}, InvalidRequestError, "at least one character"),
        ("a", {"separator": "#", "num_tokens": 4}, ValueError, "chunk_separator or by chunk_tokens, got both"),
        (b"\xff\xfe", {}, ValueError, "context_file must be text in UTF-8, got other bytes in .*context.txt"),
        (None, {"num_tokens": 4}, ValueError, "must come with a context_file to cut, got none"),
    ],
)
def test_what_is_no_context_is_said(file_of, text, cut, error, message):
    with pytest.raises(error, match=message):
        chunks(None if text is None else file_of(text), **cut)
    with pytest.raises(FileNotFoundError, match="/nonesuch"):
        chunks("/nonesuch")


def test_tokens_of_a_model_without_tokenizer_cannot_be_counted(file_of):
    model = dataclasses.replace(kit.tiny_model(), tokenizer=None)
    with pytest.raises(InvalidRequestError, match="chunk_tokens must come with a model that has a tokenizer"):
        chunks(file_of("a"), model, num_tokens=4)


ADDRESS = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, 2, None), "coordinator_address, num_processes, process_id must be given together, got num_proc"),
        ((ADDRESS, None, 0), "got coordinator_address, process_id alone"),
        ((ADDRESS, 2, 2), "process_id must be a number from 0 to 1, got 2"),
        ((ADDRESS, 0, 0), "num_processes must be at least 1, got 0"),
    ],
)
def test_processes_that_cannot_be_are_refused_before_anybody_is_waited_for(given, message):
    assert join_processes(None, None, None).count == 1
    with pytest.raises(ValueError, match=message):
        join_processes(*given)
