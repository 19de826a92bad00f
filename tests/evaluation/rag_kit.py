"""What tests of prompts made of chunks share: a few made-up items, and how they are asked of the tiny model."""

import json
from pathlib import Path

from benchmarks.evaluate.items import Chunking, RagPrompt, prompts_of, read_items
from tests import engine_kit as kit

TEXTS = (
    "The lighthouse keeper writes down every ship that passes by at night.",
    "A letter arrived from the harbour office, about lamps and oil and time.",
    "In winter no ships come, and the keeper reads what he wrote in summer.",
)
ITEMS = [
    {"ctxs": [{"title": "", "text": text} for text in TEXTS], "question": "Who writes?", "answers": ["the keeper"]},
    {"ctxs": [{"title": "", "text": text} for text in TEXTS[::-1]], "question": "What came?", "answers": ["a letter"]},
    {"ctxs": [{"title": "", "text": TEXTS[1]}, {"text": TEXTS[1]}], "question": "When?", "answers": ["winter", "x"]},
]
INSTRUCTION = "\nSay: {question}\n"


def ignore(*_: object) -> None:
    pass


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def chunking(path: Path, **changes) -> Chunking:
    return Chunking(**{"data": str(path), "num_chunks": 3, "chunk_tokens": 48, "instruction": INSTRUCTION, **changes})


def prompts(path: Path, **changes) -> list[RagPrompt]:
    asked = chunking(write(path, ITEMS), **changes)
    return prompts_of(kit.tiny_model(), read_items(path), asked)
