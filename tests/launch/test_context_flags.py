"""The flags that make a file the context of a question: where it is cut, and what is wrong with it."""

import dataclasses

import pytest
from absl import flags

from ca_jax.errors import EmptyMessageError, InvalidRequestError
from ca_jax.launch import context_flags
from tests import engine_kit as kit


def chunks(*arguments, model=None):
    values = flags.FlagValues()
    context_flags.define(values)
    values(["program", *arguments])
    return context_flags.context_chunks(model or kit.tiny_model(), flag_values=values)


@pytest.fixture
def file_of(tmp_path):
    def make(text: str | bytes) -> str:
        path = tmp_path / "context.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return f"--context_file={path}"

    return make


def test_without_a_file_there_is_no_context():
    assert chunks() == []


@pytest.mark.parametrize(
    "text", ["one\n---\ntwo\n  more\n", "one\n\n---\n\ntwo\n  more", "one\r\n---\r\ntwo\r\n  more\r\n"]
)
def test_a_file_is_cut_at_lines_of_dashes(file_of, text):
    assert chunks(file_of(text)) == ["one", "two\n  more"]


def test_it_is_cut_where_it_is_said_to_be(file_of):
    flag = file_of("one\n\ntwo\n---\n\n\nthree ## four")
    assert chunks(flag, "--chunk_separator=##") == ["one\n\ntwo\n---\n\n\nthree ", " four"]
    assert chunks(flag, r"--chunk_separator=\n\n") == ["one", "two\n---", "three ## four"]
    assert chunks(flag, "--chunk_separator=\n\n") == ["one", "two\n---", "three ## four"]


def test_it_is_cut_into_so_many_tokens(file_of):
    flag = file_of("one two\n")
    assert [bytes(chunk) for chunk in chunks(flag, "--chunk_tokens=3")] == [b"one", b" tw", b"o\n"]


def test_every_flag_has_help():
    values = flags.FlagValues()
    context_flags.define(values)
    assert all(values[name].help for name in ("context_file", "chunk_separator", "chunk_tokens"))


@pytest.mark.parametrize(
    ("text", "arguments", "error", "message"),
    [
        (" \n", [], EmptyMessageError, "wanted a text with at least one chunk in it, found a blank one"),
        (" \n", ["--chunk_tokens=4"], EmptyMessageError, "wanted at least one token to make chunks of, found none"),
        ("a", ["--chunk_separator="], InvalidRequestError, "separator of chunks of at least one character"),
        ("a", ["--chunk_separator=#", "--chunk_tokens=4"], ValueError, "chunk_separator or chunk_tokens, found both"),
        (b"\xff\xfe", [], ValueError, "context_file wanted text in UTF-8, found other bytes in .*context.txt"),
        (None, ["--chunk_tokens=4"], ValueError, "wanted a context_file to cut, found none"),
        (None, ["--context_file=/nonesuch"], FileNotFoundError, "/nonesuch"),
    ],
)
def test_what_is_no_context_is_said(file_of, text, arguments, error, message):
    with pytest.raises(error, match=message):
        chunks(*([] if text is None else [file_of(text)]), *arguments)


def test_tokens_of_a_model_without_tokenizer_cannot_be_counted(file_of):
    model = dataclasses.replace(kit.tiny_model(), tokenizer=None)
    with pytest.raises(InvalidRequestError, match="chunk_tokens wanted a model with a tokenizer"):
        chunks(file_of("a"), "--chunk_tokens=4", model=model)
    with pytest.raises(flags.IllegalFlagValueError, match="chunk_tokens"):
        chunks("--chunk_tokens=0")
