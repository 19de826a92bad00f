"""Asks for what stood in a record that has overflowed the window, and counts right answers.

Not here: records and questions (longeval_items), rows (accuracy).
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from pathlib import Path

from ca_jax.evaluation.accuracy import Answers, accuracy_rows
from ca_jax.evaluation.comparison import EvaluationError
from ca_jax.evaluation.longeval_items import Record, build_records
from ca_jax.evaluation.schema import Evaluation, LongevalConfig
from ca_jax.evaluation.stream import ContextStream
from ca_jax.evaluation.texts import tokenizer_of
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.pretrained import LoadedModel, Progress


def run_longeval(model: LoadedModel, config: LongevalConfig, progress: Progress) -> Evaluation:
    """Feeds each record to a context of each method, and asks each question of a copy of it. Answers are greedy.

    Args:
      model: that answers.
      config: what is asked.
      progress: told of questions as they are answered.

    Raises:
      EvaluationError: the data are not LongEval's, no question can be asked of them, or a window above the model's.
    """
    empty = config.comparison.streams(model)
    tokenizer = tokenizer_of(model)
    begin, end = _frame(tokenizer)
    records = _limited(config, tokenizer, begin)
    num_items = sum(len(record.questions) for record in records)
    answers = {name: Answers() for name in empty}
    items = []
    progress("longeval", 0, num_items)
    for record in records:
        contexts = {name: _fed(stream, record, answers[name]) for name, stream in empty.items()}
        for question in record.questions:
            text = question.continued if config.form == "continue" else question.chat + end
            asked = tokenizer.encode(text, add_bos=False)
            for name, context in contexts.items():
                started_s = time.perf_counter()
                stream = context.fork()
                stream.extend(asked)
                given = tokenizer.decode(stream.generate(config.max_answer_tokens, model.stop_token_ids))
                if config.form == "continue":
                    given = given.split("\n")[0]
                given = given.strip()
                answers[name].add(given, question.is_answered_by(given), len(context.truncations))
                answers[name].seconds += time.perf_counter() - started_s
            items.append(
                {
                    "record": record.name,
                    "expected": question.expected,
                    "depth": question.depth,
                    "answers": {name: each.given[-1] for name, each in answers.items()},
                    "is_right": {name: each.is_right[-1] for name, each in answers.items()},
                }
            )
            progress("longeval", len(items), num_items)
    clusters = [item["record"] for item in items]
    return Evaluation(rows=accuracy_rows(Path(config.data).name, config.comparison, answers, clusters), items=items)


def _limited(config: LongevalConfig, tokenizer: Tokenizer, begin: list[int]) -> list[Record]:
    """The records up to the last question that is asked, and the last token that is fed."""
    records: list[Record] = []
    items_left, tokens_left = config.max_items or math.inf, config.max_tokens or math.inf
    built = build_records(
        Path(config.data), config, begin=begin, encode=lambda text: tokenizer.encode(text, add_bos=False)
    )
    while items_left > 0 and tokens_left > 0 and (record := next(built, None)) is not None:
        questions = record.questions[: int(min(items_left, len(record.questions)))]
        records.append(dataclasses.replace(record, questions=questions))
        items_left -= len(questions)
        tokens_left -= len(record.token_ids)
    if not records:
        raise EvaluationError(
            f"there must be something to ask for within {config.asked_depth} tokens of the end of a "
            "record, and kept by every "
            "overflow before it, got nothing; a larger asked_depth or window may have it"
        )
    return records


def _frame(tokenizer: Tokenizer) -> tuple[list[int], str]:
    """What the chat template writes before a user's first message, as token ids, and behind it."""
    template = tokenizer.chat_template or ChatTemplate.plain()
    mark = f"record{secrets.token_hex(16)}"
    parts = template.first_turn([{"role": "user", "content": mark}]).split(mark)
    if len(parts) != 2:
        raise EvaluationError(
            f"there must be a chat template that writes a message once, got it {len(parts) - 1} times"
        )
    return tokenizer.encode(parts[0], add_bos=False), parts[1]


def _fed(empty: ContextStream, record: Record, answers: Answers) -> ContextStream:
    started_s = time.perf_counter()
    stream = empty.fork()
    stream.extend(record.token_ids)
    answers.seconds += time.perf_counter() - started_s
    return stream
