"""Flags of the chat that stand for no config: a file as context, and processes that serve as one."""

import dataclasses

import pytest
from absl import flags

from ca_jax.errors import EmptyMessageError, InvalidRequestError
from ca_jax.launch import chat_input
from tests import engine_kit as kit


def parse(*arguments):
    values = flags.FlagValues()
    chat_input.define_flags(values)
    values(["program", *arguments])
    return values


def chunks(*arguments, model=None):
    return chat_input.context_chunks(model or kit.tiny_model(), parse(*arguments))


@pytest.fixture
def file_of(tmp_path):
    def make(text: str | bytes) -> str:
        path = tmp_path / "context.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return f"--context_file={path}"

    return make


@pytest.mark.parametrize(
    ("text", "arguments", "wanted"),
    [
        ("one\n\n---\n\ntwo\n  more", [], ["one", "two\n  more"]),
        ("one\r\n---\r\ntwo\r\n  more\r\n", [], ["one", "two\n  more"]),
        ("one\n\ntwo ## four", ["--chunk_separator=##"], ["one\n\ntwo ", " four"]),
        ("one\n\ntwo\n---\n\n\nfour", [r"--chunk_separator=\n\n"], ["one", "two\n---", "four"]),
        ("one\n\ntwo\n---\n\n\nfour", ["--chunk_separator=\n\n"], ["one", "two\n---", "four"]),
        ("one two\n", ["--chunk_tokens=3"], [list(b"one"), list(b" tw"), list(b"o\n")]),
    ],
)
def test_a_file_is_cut_at_lines_of_dashes_or_where_it_is_said_to_be(file_of, text, arguments, wanted):
    assert chunks(file_of(text), *arguments) == wanted
    assert chunks() == []


@pytest.mark.parametrize(
    ("text", "arguments", "error", "message"),
    [
        (" \n", [], EmptyMessageError, "blank"),
        (" \n", ["--chunk_tokens=4"], EmptyMessageError, "at least one token"),
        ("a", ["--chunk_separator="], InvalidRequestError, "at least one character"),
        ("a", ["--chunk_separator=#", "--chunk_tokens=4"], ValueError, "chunk_separator or by chunk_tokens, got both"),
        (b"\xff\xfe", [], ValueError, "context_file must be text in UTF-8, got other bytes in .*context.txt"),
        (None, ["--chunk_tokens=4"], ValueError, "must come with a context_file to cut, got none"),
        (None, ["--context_file=/nonesuch"], FileNotFoundError, "/nonesuch"),
        ("a", ["--chunk_tokens=0"], flags.IllegalFlagValueError, "chunk_tokens"),
    ],
)
def test_what_is_no_context_is_said(file_of, text, arguments, error, message):
    with pytest.raises(error, match=message):
        chunks(*([] if text is None else [file_of(text)]), *arguments)


def test_tokens_of_a_model_without_tokenizer_cannot_be_counted(file_of):
    model = dataclasses.replace(kit.tiny_model(), tokenizer=None)
    with pytest.raises(InvalidRequestError, match="chunk_tokens must come with a model that has a tokenizer"):
        chunks(file_of("a"), "--chunk_tokens=4", model=model)


ADDRESS = "--coordinator_address=127.0.0.1:1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--num_processes=2"], "coordinator_address, num_processes, process_id must be given together, got num_proc"),
        ([ADDRESS, "--process_id=0"], "got coordinator_address, process_id alone"),
        ([ADDRESS, "--num_processes=2", "--process_id=2"], "process_id must be a number from 0 to 1, got 2"),
        ([ADDRESS, "--num_processes=0", "--process_id=0"], "num_processes must be at least 1, got 0"),
    ],
)
def test_processes_that_cannot_be_are_refused_before_anybody_is_waited_for(given, message):
    assert chat_input.join_processes("chat", parse()).count == 1
    with pytest.raises(ValueError, match=message):
        chat_input.join_processes("chat", parse(*given))
