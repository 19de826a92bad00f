"""Texts from files, and what is said of files that are none."""

from pathlib import Path

import pytest

from ca_jax.launch.texts import EvaluationError, read_ids, read_text
from tests import engine_kit as kit


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_texts_are_read_as_they_are_and_documents_with_a_blank_line_between(tmp_path):
    assert read_text(write(tmp_path / "a.txt", "One.\r\n\n Two é\n")) == "One.\n\n Two é\n"
    rows = '{"text": "first\\nline", "url": 1}\n\n{"text": "second\\u2028"}\n'
    assert read_text(write(tmp_path / "b.jsonl", rows)) == "first\nline\n\nsecond\u2028"


def test_ids_are_the_first_of_the_text(tmp_path):
    path = write(tmp_path / "a.txt", "abcdef")
    assert read_ids(kit.tiny_model(), path, 4) == [97, 98, 99, 100]
    assert read_ids(kit.tiny_model(), path, 400) == [97, 98, 99, 100, 101, 102]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.md", "text", r"a text must be a \.txt or \.jsonl file, got .*a\.md"),
        ("a.txt", " \n", r"a\.txt must have text in it, got none"),
        ("a.txt", b"ab\xff", r"a\.txt must be UTF-8, got another byte at 2"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": \n', r"a\.jsonl:3: a line must be a JSON object, got Expecting value"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', r"a\.jsonl:2: a line must be a JSON object, got list"),
        ("a.jsonl", '{"txt": "a", "id": 1}\n', r"a\.jsonl:1: a row must have a string `text`, got txt, id"),
    ],
)
def test_what_is_no_text_is_refused_with_its_place(tmp_path, name, content, message):
    with pytest.raises(EvaluationError, match=message):
        read_text(write(tmp_path / name, content))
