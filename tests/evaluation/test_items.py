"""Prompts of chunks: both kinds of file, what is wrong with others, their token ids, and prompts of conversations."""

import dataclasses
import re

import pytest

from benchmarks.evaluate.items import QUESTION_TOKENS, Chunking, RagItem, conversation_prompts, prompts_of, read_items
from benchmarks.evaluate.items import read_prompts as read
from ca_jax.launch.texts import EvaluationError
from tests import engine_kit as kit
from tests.evaluation.rag_kit import ITEMS, TEXTS, chunking, prompts, write
from tools import needles

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
        ([], "must be a list of items with ctxs, question and answers, or an object .*; got an empty list"),
        ([1], "a.json:0 must be an item with ctxs, .*; got int"),
        ([ITEMS[0], {"ctxs": [], "question": "?"}], "a.json:1 must be an item .*; got none of answers"),
        ([{**ITEMS[0], "ctxs": ["text"]}], "got other ctxs"),
        ([{**ITEMS[0], "ctxs": [{"text": "a"}, {"title": "b"}]}], "text 1 must be a string .* got None"),
        ([{**ITEMS[0], "question": " "}], "a.json:0: question must be a string that is not blank, got ' '"),
        ({"a": 1}, "must be an object with texts by number from 0 on and query, or a list of items; got a"),
        ({**EXAMPLE, "chunk_num": "4"}, "must have 4 texts from 0 on, got no 2, 3"),
        ({**EXAMPLE, "1": ""}, "text 1 must be a string that is not blank, got ''"),
    ],
)
def test_what_is_no_file_of_items_is_refused(tmp_path, content, message):
    with pytest.raises(EvaluationError, match=message):
        read_items(write(tmp_path / "a.json", content))


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("a.json", r"a.json must be JSON, got Expecting"),
        ("none.json", "none.json: No such file"),
        ("empty", r"must have .json files of items, got none in .*empty"),
    ):
        with pytest.raises(EvaluationError, match=message):
            read_items(tmp_path / name)


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
    with pytest.raises(EvaluationError, match="the model must have a tokenizer"):
        prompts_of(dataclasses.replace(model, tokenizer=None), items, chunking(tmp_path))


def test_prompts_beyond_the_window_or_of_too_few_chunks_are_refused(tmp_path):
    model, asked = kit.tiny_model(), chunking(write(tmp_path / "a.json", ITEMS), chunk_tokens=512)
    num_tokens = max(len(each.context_ids) + len(each.question_ids) for each in read(model, asked))
    read(model, asked, answer_tokens=512 - num_tokens, least_chunks=2)
    with pytest.raises(EvaluationError, match=rf"window of 512 tokens, got {num_tokens} in a.json:\d: 3 too many"):
        read(model, asked, answer_tokens=515 - num_tokens)
    with pytest.raises(EvaluationError, match=r"must have at least 3 chunks, got 2 in a\.json:2"):
        read(model, asked, least_chunks=3)
    first = read(model, chunking(tmp_path / "a.json", max_items=2))
    assert [each.source for each in first] == ["a.json:0", "a.json:1"]


# Conversations.

SAID = {name: f"{name} says this, again and again. " * 4 for name in "abcde"}


def test_each_prompt_has_conversations_of_its_own_and_goes_on_with_the_last(tmp_path):
    pieces = [
        {"id": f"{name}_0", "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "So it is."}]}
        for name, text in SAID.items()
    ]
    pieces.insert(1, {"id": "short_0", "conversations": [{"from": "human", "value": "Hm."}]})
    path = write(tmp_path / "sharegpt.json", pieces)
    asked = conversation_prompts(kit.tiny_model(), Chunking(num_chunks=2, chunk_tokens=30, max_items=2), path)
    assert [prompt.source for prompt in asked] == ["a b", "c d"]
    for prompt in asked:
        names = prompt.source.split()
        assert [bytes(chunk).decode() for chunk in prompt.chunks] == [SAID[name][:30] for name in names]
        assert bytes(prompt.question_ids).decode() == SAID[names[1]][30 : 30 + QUESTION_TOKENS]
        assert prompt.answers == ()
    with pytest.raises(EvaluationError, match=r"at least 78 tokens must make 16 prompts of 2 each, got 2 in "):
        conversation_prompts(kit.tiny_model(), Chunking(num_chunks=2, chunk_tokens=30), path)
    with pytest.raises(EvaluationError, match=r"data must be given, or .* no ShareGPT file"):
        conversation_prompts(kit.tiny_model(), Chunking(), tmp_path / "none.json")


def test_needles_are_each_in_a_passage_of_their_own_and_one_is_asked_for(tmp_path):
    texts = [f"Text {number}. " + "One says so. And another says that. " * 40 for number in range(5)]
    made = needles.make_items([*texts, "short"], num_items=9, seed=1)
    assert made == needles.make_items([*texts, "short"], num_items=9, seed=1) != needles.make_items(texts, 9, seed=2)
    items = read_items(write(tmp_path / "needles.json", made))
    assert len({item.question for item in items}) == len(items) == 9
    for item in items:
        [right] = item.answers
        has = [f"The magic number of the {item.question} is {right}" in text for text in item.texts]
        assert (sum(has), len(has)) == (1, 6)
        assert sum(text.count("magic number") for text in item.texts) == 6
    with pytest.raises(ValueError, match="more than 1200 characters, got 1 texts without one"):
        needles.make_items(["short"], 1, seed=1)
    with pytest.raises(ValueError, match="task must be one of needle, variable, common, got 'needles'"):
        needles.make_items(texts, 1, seed=1, task="needles")


def test_the_number_of_a_variable_is_in_another_passage_than_its_name():
    texts = [f"Text {number}. " + "One says so. And another says that. " * 40 for number in range(5)]
    for item in needles.make_items(texts, num_items=20, seed=1, task="variable", num_passages=5, passage_chars=300):
        passages = [each["text"] for each in item["ctxs"]]
        assert len(passages) == 5
        assert max(map(len, passages)) < 400
        [whose] = [text for text in passages if f"number of the {item['question']} is that of the " in text]
        key = re.search(r" is that of the (\w+ \w+)", whose)[1]
        [told] = [text for text in passages if f"The magic number of the {key} is {item['answers'][0]}" in text]
        assert told is not whose


def test_one_colour_alone_is_in_all_passages():
    texts = [f"Text {number}. " + "One says so. And another says that. " * 40 for number in range(5)]
    for item in needles.make_items(texts, num_items=20, seed=1, task="common"):
        named = [re.search(r"colours here are (\w+), (\w+) and (\w+)", each["text"]).groups() for each in item["ctxs"]]
        assert set(item["answers"]) == set.intersection(*map(set, named))
        assert all(len(set(each)) == 3 for each in named)
