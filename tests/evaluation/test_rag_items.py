"""Items of questions and texts: both kinds of file, folders of them, what is wrong with others, and their token ids."""

import dataclasses

import pytest

from ca_jax.evaluation.comparison import EvaluationError
from ca_jax.evaluation.rag_items import RagItem, check_window, prompts_of, read_items
from ca_jax.evaluation.rag_schema import Chunking
from tests import engine_kit as kit
from tests.evaluation.rag_kit import ITEMS, TEXTS, chunking, prompts, write

EXAMPLE = {"1": "two", "0": "\n\none", "chunk_num": "2", "query": "\n\nAnswer. Question: who?\nAnswer:"}


def test_both_kinds_of_file_are_read_and_folders_in_the_order_of_numbers(tmp_path):
    path = write(tmp_path / "a.json", ITEMS)
    first, _, last = read_items(path)
    assert first == RagItem(source="a.json:0", texts=TEXTS, question="Who writes?", answers=("the keeper",))
    assert (last.texts, last.answers) == ((TEXTS[1], TEXTS[1]), ("winter", "x"))
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in (10, 2):
        write(folder / f"input_{number}.json", EXAMPLE)
    found = read_items(folder)
    assert [item.source for item in found] == ["input_2.json", "input_10.json"]
    assert found[0] == RagItem(
        source="input_2.json", texts=("\n\none", "two"), question=EXAMPLE["query"], answers=(), is_whole=True
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "there must be a list of items with ctxs, question and answers, or an object .*; got an empty list"),
        ("text", "got str"),
        ([1], "a.json:0: there must be an item with ctxs, .*; got int"),
        ([ITEMS[0], {"ctxs": [], "question": "?"}], "a.json:1: there must be an item .*; got none of answers"),
        ([{**ITEMS[0], "ctxs": ["text"]}], "got other ctxs"),
        ([{**ITEMS[0], "ctxs": []}], "a.json:0: there must be at least one text, got none"),
        (
            [{**ITEMS[0], "ctxs": [{"text": "a"}, {"title": "b"}]}],
            "text 1 must have something in it, got None",
        ),
        ([{**ITEMS[0], "question": " "}], "a.json:0: there must be a question, got ' '"),
        ([{**ITEMS[0], "answers": "one"}], "there must be answers, a list of strings; got 'one'"),
        ({"a": 1}, "there must be an object with texts by number from 0 on and query, or a list of items; got a"),
        ({**EXAMPLE, "chunk_num": "three"}, "there must be chunk_num, a number of texts; got 'three'"),
        ({**EXAMPLE, "chunk_num": "4"}, "there must be 4 texts from 0 on, got no 2, 3"),
        ({**EXAMPLE, "1": ""}, "text 1 must have something in it, got ''"),
    ],
)
def test_what_is_no_file_of_items_is_refused(tmp_path, content, message):
    with pytest.raises(EvaluationError, match=message):
        read_items(write(tmp_path / "a.json", content))


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(EvaluationError, match=r"there must be a JSON file of items, got .*a.json: Expecting"):
        read_items(tmp_path / "a.json")
    with pytest.raises(EvaluationError, match=r"got .*none.json: No such file"):
        read_items(tmp_path / "none.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EvaluationError, match=r"there must be a folder with .json files of items, got none in .*empty"):
        read_items(tmp_path / "empty")


def test_a_prompt_is_the_first_tokens_of_each_text_and_the_question_with_its_instruction(tmp_path):
    first, _, last = prompts(tmp_path / "a.json", num_chunks=2, chunk_tokens=20)
    assert first.chunks == tuple(tuple(text.encode()[:20]) for text in TEXTS[:2])
    assert bytes(first.question_ids) == b"\nSay: Who writes?\n"
    assert (first.chunk_starts, len(first.context_ids), first.head) == ([0, 20], 40, ())
    assert last.chunks[0] == last.chunks[1]
    whole = prompts_of(kit.tiny_model(), read_items(write(tmp_path / "b.json", EXAMPLE)), chunking(tmp_path))[0]
    assert bytes(whole.question_ids) == EXAMPLE["query"].encode()
    assert bytes(whole.chunks[1]) == b"two", "shorter ones whole"


def test_a_model_that_wants_a_first_token_has_it_before_the_chunks(tmp_path):
    model = kit.tiny_model()
    backend = model.tokenizer.backend
    tokenizer = type(model.tokenizer)(backend, bos_id=7, add_bos=True)
    items = read_items(write(tmp_path / "a.json", ITEMS))
    prompt = prompts_of(dataclasses.replace(model, tokenizer=tokenizer), items, chunking(tmp_path))[0]
    assert (prompt.head, prompt.chunk_starts[:2], prompt.context_ids[:2]) == ((7,), [1, 49], [7, ord("T")])
    with pytest.raises(EvaluationError, match="there must be a model with a tokenizer"):
        prompts_of(dataclasses.replace(model, tokenizer=None), items, chunking(tmp_path))


def test_prompts_beyond_the_window_are_refused_by_how_much(tmp_path):
    asked = prompts(tmp_path / "a.json", chunk_tokens=512)
    num_tokens = max(len(prompt.context_ids) + len(prompt.question_ids) for prompt in asked)
    check_window(kit.tiny_model(), asked, 512 - num_tokens)
    with pytest.raises(EvaluationError, match=rf"window of 512 tokens, got {num_tokens} in a.json:\d: 3 too many"):
        check_window(kit.tiny_model(), asked, 515 - num_tokens)


def test_chunkings_that_are_none_are_refused():
    with pytest.raises(ValueError, match="num_chunks must be at least 1, got 0"):
        Chunking(num_chunks=0)
    with pytest.raises(ValueError, match=r"instruction must have \{question\} in it, got 'Say'"):
        Chunking(instruction="Say")
