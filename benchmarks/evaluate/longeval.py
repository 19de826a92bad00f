"""Asks for what stood in a record that has overflowed the window, and counts right answers.

A record of LongEval is as long as it happens to be, and may ask for what an overflow has dropped: nothing could answer
that. So records are built anew from a file's own lines or conversations:

    |header| u u u u u u u u u u u u u | u  question        u a line, or a conversation about a topic
    |------- dropped ------|-- kept ---|                    | where the last overflow was
                               ^ asked for

- As many units follow each other as it takes to overflow the window, or `num_lines`.
- Asked for is only what every compared method has kept, where the oldest tokens leave, and had before its last
  overflow: at most `asked_depth` tokens before the record's end. Of lines, some are drawn; of conversations, it is the
  last one, whose topic is named at its beginning alone.
- Conversations are shortened to `asked_depth` tokens. The first is cut in front, so that no more follows the overflow
  than half of what the last one has behind its topic.

Each record is fed to a context of each method, and each question is asked of a copy of it. Rows: see rows.

Source: LongEval (Li et al., "How long can open-source LLMs truly promise on context length?", 2023); asking behind an
overflow: CachedAttention (Gao et al., USENIX ATC 2024), section 4.3.
"""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.evaluate.comparison import Answers, Comparison, Evaluation, accuracy_rows
from benchmarks.harness import Checked
from ca_jax.launch.texts import EvaluationError, read_rows, tokenizer_of
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.pretrained import LoadedModel, Progress

LONGEVAL_FORMS = ("continue", "chat")
"""How `longeval` asks. `continue`: what is asked for is begun again behind the record, and the model goes on with it
to the end of the line; that is what a small model can do. `chat`: as LongEval does, to be answered in own words."""

_LINE = re.compile(r"^line (?P<name>.+?): REGISTER_CONTENT is <(?P<number>\d+)>$", re.MULTILINE)
_LINES_CONTINUED = "line {name}: REGISTER_CONTENT is <"
_LINES_QUESTION = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {name}? I need the number. "
_TOPIC_OPENING = "USER: I would like to discuss the topic of "
_TOPIC_MESSAGES = re.compile(r" \n (?=USER:|ASSISTANT:)")
_TOPIC_CLOSING = "this is the end of our discussion"
_TOPICS_HEADER = (
    "Below is a record of our previous conversation on different topics. You are the ASSISTANT, and I am the USER. At "
    "the beginning of each topic, the USER will say 'I would like to discuss the topic of <TOPIC>'. Memorize each "
    "<TOPIC>. At the end of the record, I will ask you to retrieve the last topic. Now the record start. "
)
_TOPICS_QUESTION = (
    "Now the record ends. What is the last topic we discussed? Only give me the topic name. Do not summarize yourself."
)
_TOPICS_CONTINUED = (
    "USER: What is the last topic we discussed? \n ASSISTANT: The last topic we discussed is the topic of"
)
_SHORT_WORD = 3  # Letters up to which an answer is not judged by a word of the topic.

Encode = Callable[[str], list[int]]
"""Text to token ids, without what begins a sequence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongevalConfig(Checked):
    """`longeval`: asking for what stood in a record that has overflowed the window."""

    choices: ClassVar = {"form": LONGEVAL_FORMS}

    comparison: Comparison
    """What is compared."""
    data: str
    """A .jsonl file of LongEval: lines or topics."""
    num_lines: int | None = None
    """Lines of a record, or earlier conversations and the one asked for; None: just as many as overflow the window."""
    asked_depth: int = 256
    """Most tokens between what is asked for and the end of the record, its own included."""
    questions_per_record: int = 4
    """Lines asked for of one record, each for itself; of topics it is one."""
    max_items: int | None = None
    """Most questions; None: those of all records."""
    max_tokens: int | None = None
    """Tokens of all records together, from which on no more are fed; None: all records."""
    form: str = "continue"
    """How it is asked, one of `LONGEVAL_FORMS`."""
    answer_tokens: int | None = None
    """Most tokens of an answer; None: 12 of one that goes on, 32 of one in chat."""
    seed: int = 0
    """Of which lines are in a record, and which are asked for."""
    max_loss: float | None = None
    """Most by which the share of right answers may be below that of `tt`, at the lower end of the difference's
    interval; by default there is no bound. Where no other method keeps it the script exits with 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.comparison.check_bound(self.max_loss)

    @property
    def max_answer_tokens(self) -> int:
        """Most tokens of an answer."""
        if self.answer_tokens is not None:
            return self.answer_tokens
        return 12 if self.form == "continue" else 32


def run_longeval(model: LoadedModel, config: LongevalConfig, progress: Progress) -> Evaluation:
    """Feeds each record to a context of each method, and asks each question of a copy of it. Answers are greedy."""
    empty = config.comparison.streams(model)
    tokenizer = tokenizer_of(model)
    begin, end = _frame(tokenizer)
    records = _limited(config, tokenizer, begin)
    answers = {name: Answers() for name in empty}
    items: list[dict[str, Any]] = []
    num_items = sum(len(record.questions) for record in records)
    progress("longeval", 0, num_items)
    for record in records:
        contexts = {name: stream.fork() for name, stream in empty.items()}
        for name, context in contexts.items():
            started_s = time.perf_counter()
            context.extend(record.token_ids)
            answers[name].seconds += time.perf_counter() - started_s
        for question in record.questions:
            text = question.continued if config.form == "continue" else question.chat + end
            token_ids = tokenizer.encode(text, add_bos=False)
            for name, context in contexts.items():
                started_s = time.perf_counter()
                stream = context.fork()
                stream.extend(token_ids)
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
    data = Path(config.data).name
    rows = accuracy_rows(data, config.comparison, answers, clusters, max_loss=config.max_loss)
    return Evaluation(rows=rows, items=items)


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
            f"records must have something to ask for in their last {config.asked_depth} tokens that every overflow "
            "keeps, got nothing; try a larger asked_depth or window"
        )
    return records


def _frame(tokenizer: Tokenizer) -> tuple[list[int], str]:
    """What the chat template writes before a user's first message, as token ids, and behind it."""
    template = tokenizer.chat_template or ChatTemplate.plain()
    mark = f"record{secrets.token_hex(16)}"
    parts = template.first_turn([{"role": "user", "content": mark}]).split(mark)
    if len(parts) != 2:
        raise EvaluationError(f"the chat template must write a message once, got it {len(parts) - 1} times")
    return tokenizer.encode(parts[0], add_bos=False), parts[1]


# Records and questions.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One that is asked behind a record."""

    chat: str
    """As LongEval asks it; the user's message ends with it."""
    continued: str
    """What stands behind the record where the answer is to go on with it."""
    expected: str
    """The number, or the topic."""
    depth: int
    """Tokens from the beginning of what is asked for to the end of the record."""

    def is_answered_by(self, answer: str) -> bool:
        """Whether it is: the number is one of the answer's; more than half of the topic's words are in it, short ones
        left out."""
        if self.expected.isdecimal():
            return self.expected in re.findall(r"\d+", answer)
        found = set(re.findall(r"\w+", answer.lower()))
        wanted = topic_words(self.expected)
        return 2 * sum(word in found for word in wanted) > len(wanted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What is fed, and what is asked behind it."""

    name: str
    """Where it is from, "FILE:LINE"."""
    token_ids: tuple[int, ...]
    """Of the record, from the beginning of the conversation."""
    questions: tuple[Question, ...]


@dataclasses.dataclass(frozen=True)
class _Lines:
    place: str
    header: str
    lines: Sequence[tuple[str, str]]  # name, number


@dataclasses.dataclass(frozen=True)
class _Topic:
    place: str
    name: str
    messages: Sequence[str]  # of user and assistant in turn, the first names the topic


def topic_words(topic: str) -> list[str]:
    """The words of a topic that an answer is judged by, in small letters: those of four letters or more, if any."""
    words = re.findall(r"\w+", topic.lower())
    return [word for word in words if len(word) > _SHORT_WORD] or words


def build_records(path: Path, config: LongevalConfig, *, begin: Sequence[int], encode: Encode) -> Iterator[Record]:
    """The records of a file, drawn by the config's seed; one that nothing can be asked of is left out.

    `begin` are the token ids of the conversation before the record.

    Raises:
      EvaluationError: a row of no known kind or of both, or a record too short to overflow the window.
    """
    lines, topics = _read(path)
    rng = np.random.default_rng(config.seed)
    if lines:
        built = (_line_record(each, config, begin, encode, rng) for each in lines)
    else:
        built = (_topic_record(topics, nth, config, begin, encode, rng) for nth in range(len(topics)))
    yield from (record for record in built if record.questions)


def _read(path: Path) -> tuple[list[_Lines], list[_Topic]]:
    lines: list[_Lines] = []
    topics: list[_Topic] = []
    for place, row in read_rows(path):
        if not isinstance(row.get("prompt"), str) or ("expected_number" in row) == ("topics" in row):
            raise EvaluationError(
                f"{place}: a row must have a string `prompt` and either `expected_number` or `topics`; got "
                f"{', '.join(row) or 'no fields'}"
            )
        if "topics" in row:
            topics += _topics_of(place, row)
        else:
            lines.append(_lines_of(place, row["prompt"]))
    if bool(lines) == bool(topics):
        raise EvaluationError(f"{path} must have rows of lines or of topics, got {'both' if lines else 'none'}")
    return lines, topics


def _lines_of(place: str, prompt: str) -> _Lines:
    found = list(_LINE.finditer(prompt))
    if not found:
        raise EvaluationError(f"{place}: a prompt must have lines 'line NAME: REGISTER_CONTENT is <NUMBER>', got none")
    return _Lines(place, prompt[: found[0].start()], [(each["name"], each["number"]) for each in found])


def _topics_of(place: str, row: dict[str, Any]) -> Iterator[_Topic]:
    names, texts = row["topics"], row["prompt"].split(_TOPIC_OPENING)[1:]
    if not isinstance(names, list) or len(names) != len(texts) or not texts:
        found = len(names) if isinstance(names, list) else type(names).__name__
        raise EvaluationError(
            f"{place}: `topics` must be as many as conversations that begin with '{_TOPIC_OPENING}', got {found} and "
            f"{len(texts)}"
        )
    for name, text in zip(names, texts, strict=True):
        messages = [message for message in _TOPIC_MESSAGES.split(_TOPIC_OPENING + text) if message]
        yield _Topic(place, str(name), [message for message in messages if _TOPIC_CLOSING not in message])


def _line_record(
    each: _Lines, config: LongevalConfig, begin: Sequence[int], encode: Encode, rng: np.random.Generator
) -> Record:
    """Lines that follow each other in the file, from a drawn one on."""
    window, num_lines = config.comparison.window, config.num_lines
    header = [*begin, *encode(each.header)]
    units = [encode(f"line {name}: REGISTER_CONTENT is <{number}>\n") for name, number in each.lines]
    lengths = np.array([len(unit) for unit in units])
    from_each = np.cumsum(lengths[::-1])[::-1]  # Tokens from each line to the last.
    if num_lines is not None:
        num_starts, wanted = len(units) - num_lines + 1, f"{num_lines} lines"
    else:
        num_starts, wanted = int((len(header) + from_each > window).sum()), f"lines of more than {window} tokens"
    if num_starts < 1:
        raise EvaluationError(f"{each.place}: a record must have {wanted}, got {len(units)} of {from_each[0]} tokens")
    first = int(rng.integers(num_starts))
    if num_lines is None:
        num_lines = 1 + int(np.searchsorted(np.cumsum(lengths[first:]), window - len(header), side="right"))
    token_ids, spans = header, []
    for nth in range(first, first + num_lines):
        spans.append((nth, len(token_ids), len(token_ids) + len(units[nth])))
        token_ids = token_ids + units[nth]
    _check_overflows(each.place, len(token_ids), window)
    asked = _askable(spans, len(token_ids), config)
    drawn = rng.permutation(len(asked))[: config.questions_per_record]
    questions = []
    for nth, start, _ in (asked[i] for i in drawn):
        name, number = each.lines[nth]
        questions.append(
            Question(
                chat=_LINES_QUESTION.format(name=name),
                continued=_LINES_CONTINUED.format(name=name),
                expected=number,
                depth=len(token_ids) - start,
            )
        )
    return Record(name=each.place, token_ids=tuple(token_ids), questions=tuple(questions))


def _topic_record(
    topics: Sequence[_Topic],
    nth: int,
    config: LongevalConfig,
    begin: Sequence[int],
    encode: Encode,
    rng: np.random.Generator,
) -> Record:
    """Drawn conversations, and the nth of the file behind them."""
    window, asked = config.comparison.window, topics[nth]
    header = [*begin, *encode(_TOPICS_HEADER)]
    opening = encode(asked.messages[0])
    last = _shortened(asked, config.asked_depth, encode)
    earlier: list[list[int]] = []
    for i in rng.permutation(len(topics)):
        is_enough = len(header) + sum(map(len, earlier)) + len(last) > window
        if len(earlier) + 1 == config.num_lines or (config.num_lines is None and is_enough):
            break
        if topics[i].name != asked.name:
            earlier.append(_shortened(topics[i], config.asked_depth, encode))
    body = [token_id for unit in earlier for token_id in unit]
    excess = len(header) + len(body) + len(last) - window
    _check_overflows(asked.place, window + excess, window)
    if config.num_lines is None:
        body = body[max(0, excess - max(1, (len(last) - len(opening)) // 2)) :]
    token_ids = [*header, *body, *last]
    start = len(token_ids) - len(last)
    questions = [
        Question(chat=_TOPICS_QUESTION, continued=_TOPICS_CONTINUED, expected=asked.name, depth=len(last))
        for _ in _askable([(nth, start, start + len(opening))], len(token_ids), config)
    ]
    return Record(name=f"{asked.place}, {asked.name}", token_ids=tuple(token_ids), questions=tuple(questions))


def _shortened(topic: _Topic, max_tokens: int, encode: Encode) -> list[int]:
    """The first messages of a conversation that fit, at least one."""
    token_ids = encode(topic.messages[0])
    for message in topic.messages[1:]:
        more = encode(f" \n {message}")
        if len(token_ids) + len(more) > max_tokens:
            break
        token_ids = token_ids + more
    return token_ids + encode(" \n ")


def _askable(
    spans: Sequence[tuple[int, int, int]], num_tokens: int, config: LongevalConfig
) -> list[tuple[int, int, int]]:
    """Of (unit, start, stop), those that can be asked for."""
    left = config.comparison.surviving(num_tokens)
    return [
        span for span in spans if num_tokens - span[1] <= config.asked_depth and bool(left[span[1] : span[2]].all())
    ]


def _check_overflows(place: str, num_tokens: int, window: int) -> None:
    if num_tokens <= window:
        raise EvaluationError(
            f"{place}: a record must have at least {window + 1} tokens to overflow a window of {window}, "
            f"got {num_tokens}"
        )
