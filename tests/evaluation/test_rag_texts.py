"""Prompts made of conversations: which, of what, and what is said where there are too few."""

import pytest

from ca_jax.evaluation.comparison import EvaluationError
from ca_jax.evaluation.rag_schema import Chunking
from ca_jax.evaluation.rag_texts import QUESTION_TOKENS, conversation_prompts
from tests import engine_kit as kit
from tests.evaluation.rag_kit import write

SAID = {name: f"{name} says this, again and again. " * 4 for name in "abcde"}


@pytest.fixture
def path(tmp_path):
    pieces = [
        {"id": f"{name}_0", "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "So it is."}]}
        for name, text in SAID.items()
    ]
    pieces.insert(1, {"id": "short_0", "conversations": [{"from": "human", "value": "Hm."}]})
    return write(tmp_path / "sharegpt.json", pieces)


def test_each_prompt_has_conversations_of_its_own_and_goes_on_with_the_last(path):
    asked = conversation_prompts(kit.tiny_model(), Chunking(num_chunks=2, chunk_tokens=30, max_items=2), path)
    assert [prompt.source for prompt in asked] == ["a b", "c d"]
    for prompt in asked:
        names = prompt.source.split()
        assert [bytes(chunk).decode() for chunk in prompt.chunks] == [SAID[name][:30] for name in names]
        assert bytes(prompt.question_ids).decode() == SAID[names[1]][30 : 30 + QUESTION_TOKENS]
        assert prompt.answers == ()


def test_too_few_or_no_conversations_are_refused(path, tmp_path):
    with pytest.raises(
        EvaluationError, match=r"there must be 16 prompts of 2 conversations with at least 78 .* got 2 in "
    ):
        conversation_prompts(kit.tiny_model(), Chunking(num_chunks=2, chunk_tokens=30), path)
    with pytest.raises(
        EvaluationError, match="there must be data, or conversations to make prompts of; no ShareGPT file"
    ):
        conversation_prompts(kit.tiny_model(), Chunking(), tmp_path / "none.json")
