"""Records overflow once and keep what is asked for; answers are judged and counted."""

import re
from pathlib import Path

import pytest

from benchmarks.evaluate.comparison import Comparison
from benchmarks.evaluate.longeval import LongevalConfig, Question, build_records, run_longeval
from benchmarks.evaluate.stream import ComparedOverflow, ContextStream
from ca_jax.launch.texts import EvaluationError
from tests import engine_kit as kit
from tests.benchmarks.traces_kit import lines_file
from tests.evaluation.rag_kit import ignore

BEGIN = list(b"<user>")
HEADER = "Below is a record of lines.\n\n"
TOPICS = ("The future of space tourism", "The psychology of creativity", "The benefits of learning chess")


def write_lines(path: Path, num_rows: int = 3, num_lines: int = 20) -> Path:
    """Rows of lines "line row-nth: REGISTER_CONTENT is <1000 * row + 7 * nth>"."""
    rows = []
    for row in range(1, num_rows + 1):
        lines = "".join(f"line {row}-{nth}: REGISTER_CONTENT is <{1000 * row + 7 * nth}>\n" for nth in range(num_lines))
        prompt = f"{HEADER}{lines}\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {row}-0?"
        rows.append({"expected_number": 1000 * row, "num_lines": num_lines, "prompt": prompt})
    return lines_file(path, *rows)


def write_topics(path: Path) -> Path:
    """One row of conversations, the topic named at the beginning and the end of each."""
    prompt = "Below is a record of our previous conversation. Now the record start. "
    for name in TOPICS:
        prompt += (
            f"USER: I would like to discuss the topic of {name.lower()}. \n ASSISTANT: Sure. \n USER: Go on. \n "
            f"ASSISTANT: There is much to say. \n USER: Great, this is the end of our discussion on the topic {name}, "
            "let's talk about the next topic. "
        )
    prompt += "Now the record ends. What is the first topic we discussed?"
    return lines_file(path, {"test_id": 0, "prompt": prompt, "topics": list(TOPICS)})


def encode(text: str) -> list[int]:
    return list(text.encode())


def ask(path, **changes) -> LongevalConfig:
    methods = changes.pop("methods", ("tt", "ca"))
    comparison = Comparison(
        methods=tuple(ComparedOverflow(method=method, repair="none") for method in methods),
        window=changes.pop("window", 256),
        step_tokens=32,
    )
    return LongevalConfig(**{"comparison": comparison, "data": str(path), "asked_depth": 128, **changes})


def records(path, **changes):
    return list(build_records(path, ask(path, **changes), begin=BEGIN, encode=encode))


@pytest.mark.parametrize(
    ("expected", "answer", "is_right"),
    [
        ("4831", "It is <4831>.", True),
        ("4831", "It is 48310.", False),
        ("4831", "It is 483 or 1.", False),
        ("The future of space tourism", "Space Tourism!", True),  # Most of its long words.
        ("The future of space tourism", "the future of farming", False),
        ("The psychology of creativity", "the psychology of addiction", False),  # Half is not most.
        ("The art", "the art of war", True),  # It has no long words.
    ],
)
def test_an_answer_is_right_if_it_has_the_number_or_most_of_the_topics_long_words(expected, answer, is_right):
    assert Question(chat="", continued="", expected=expected, depth=1).is_answered_by(answer) == is_right


def test_lines_follow_each_other_until_the_window_overflows(tmp_path):
    built = records(write_lines(tmp_path / "lines.jsonl"))
    assert [record.name for record in built] == [f"{tmp_path / 'lines.jsonl'}:{row}" for row in (1, 2, 3)]
    for row, record in enumerate(built, 1):
        text = bytes(record.token_ids).decode()
        assert text.startswith(f"<user>{HEADER}line {row}-")
        lines = re.findall(r"^line (\d+)-(\d+): REGISTER_CONTENT is <(\d+)>\n", text[6 + len(HEADER) :], re.MULTILINE)
        first = int(lines[0][1])
        assert lines == [(str(row), str(nth), str(1000 * row + 7 * nth)) for nth in range(first, first + len(lines))]
        last_line = len(text) - text.rindex("line ")
        assert 256 < len(record.token_ids) <= 256 + last_line, "the last line overflows it"
        assert len(record.questions) > 1
        for each in record.questions:
            name = re.fullmatch(r"line (.+): REGISTER_CONTENT is <", each.continued)[1]
            line = f"line {name}: REGISTER_CONTENT is <{each.expected}>\n"
            assert text[-each.depth :].startswith(line)
            assert each.depth <= 128
            assert f"in line {name}?" in each.chat
            start = len(text) - each.depth
            # The last overflow was before token 256, and half the window went behind the first four.
            assert start >= 4 + 128
            assert start + len(line) <= 256
        assert len({each.expected for each in record.questions}) == len(record.questions)


def test_the_number_of_lines_may_be_set_if_they_overflow_the_window(tmp_path):
    path = write_lines(tmp_path / "lines.jsonl")
    for record in records(path, num_lines=12):
        assert bytes(record.token_ids).count(b"line ") == 12 + HEADER.count("line ")
    with pytest.raises(EvaluationError, match=r"lines\.jsonl:1: a record must have at least 257 tokens to overflow"):
        records(path, num_lines=2)
    with pytest.raises(EvaluationError, match=r"lines\.jsonl:1: a record must have 21 lines, got 20"):
        records(path, num_lines=21)
    with pytest.raises(
        EvaluationError, match=r"lines\.jsonl:1: a record must have lines of more than 5000 tokens, got 20 of \d+"
    ):
        records(path, window=5000)


def test_the_last_topic_is_asked_for_and_named_before_the_overflow_alone(tmp_path):
    built = records(write_topics(tmp_path / "topics.jsonl"), window=448)
    assert [record.name.split(", ")[1] for record in built] == list(TOPICS)
    for record, topic in zip(built, TOPICS, strict=True):
        text = bytes(record.token_ids).decode()
        (each,) = record.questions
        opening = f"USER: I would like to discuss the topic of {topic.lower()}."
        assert text[-each.depth :].startswith(opening)
        assert text.lower().count(topic.lower()) == 1
        assert each.expected == topic
        assert "this is the end" not in text
        start = len(text) - each.depth
        assert start >= 4 + 224
        assert start + len(opening) <= 448 < len(record.token_ids)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, r"a\.jsonl:2: a row must have .*; got prompt"),
        ({"prompt": "no lines", "expected_number": 1}, r"a\.jsonl:2: a prompt must have lines 'line NAME"),
        ({"prompt": "x", "topics": ["one"]}, r"a\.jsonl:2: `topics` must be as many as .* got 1 and 0"),
    ],
)
def test_a_row_that_is_none_is_refused_with_its_place(tmp_path, row, message):
    path = write_lines(tmp_path / "good.jsonl", num_rows=1)
    (tmp_path / "a.jsonl").write_text(path.read_text() + lines_file(tmp_path / "row", row).read_text())
    with pytest.raises(EvaluationError, match=message):
        records(tmp_path / "a.jsonl")


def answer_from_context(stream: ContextStream, max_tokens: int, stop_ids: object = ()) -> list[int]:
    """What a perfect reader goes on with: the line that stands in its context begins as the context ends."""
    text = bytes(stream.token_ids).decode(errors="replace")
    asked = text[text.rindex("line ") :]
    place = text.find(asked)
    reads = place < len(text) - len(asked) and stream._overflow.method != "nkvt"
    return list((text[place + len(asked) :] if reads else "0>\n").encode()[:max_tokens])


def test_a_perfect_reader_finds_all_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(ContextStream, "generate", answer_from_context)
    path, told = write_lines(tmp_path / "lines.jsonl"), []
    config = ask(path, methods=("nkvt", "tt", "ca"))
    evaluation = run_longeval(kit.tiny_model(), config, lambda *call: told.append(call))
    nkvt, tt, ca = evaluation.rows
    num = len(evaluation.items)
    assert num == sum(len(record.questions) for record in records(path)) >= 6
    assert (tt.num_right, ca.num_right, nkvt.num_right) == (num, num, 0)
    assert (tt.data, tt.accuracy, tt.interval[1]) == ("lines.jsonl", 1.0, 1.0)
    assert (tt.difference_to_tt, tt.difference_interval, tt.mcnemar_p, tt.same_answers) == (None,) * 4
    assert (ca.difference_to_tt, ca.difference_interval, ca.mcnemar_p, ca.same_answers) == (0, (0, 0), 1, 1)
    assert (nkvt.difference_to_tt, nkvt.difference_interval, nkvt.same_answers) == (-1, (-1, -1), 0)
    assert nkvt.mcnemar_p == 2 / 2**num
    assert {row.num_truncations for row in evaluation.rows} == {1.0}
    item = evaluation.items[0]
    assert item["answers"] == {
        "nkvt, keep 4": "0>",
        "tt, keep 4": f"{item['expected']}>",
        "ca, keep 4": f"{item['expected']}>",
    }
    assert item["is_right"] == {"nkvt, keep 4": False, "tt, keep 4": True, "ca, keep 4": True}
    assert told == [("longeval", done, num) for done in range(num + 1)]


def test_both_kinds_are_asked_in_a_chat_too_up_to_the_last_item(tmp_path):
    lines, topics = write_lines(tmp_path / "lines.jsonl"), write_topics(tmp_path / "topics.jsonl")
    for path, window, most in ((lines, 256, 3), (topics, 448, 2)):
        config = ask(path, methods=("tt", "of"), window=window, form="chat", max_items=most, answer_tokens=2)
        tt, of = run_longeval(kit.tiny_model(), config, ignore).rows
        assert (of.num_items, of.same_answers, of.difference_to_tt) == (most, 1.0, 0.0)
        assert tt.num_truncations == of.num_truncations == 1


def test_nothing_to_ask_for_is_refused(tmp_path):
    path = write_lines(tmp_path / "lines.jsonl")
    with pytest.raises(EvaluationError, match="must have something to ask for in their last 5 tokens"):
        run_longeval(kit.tiny_model(), ask(path, asked_depth=5), ignore)
    assert [ask(path, form=form).max_answer_tokens for form in ("continue", "chat")] == [12, 32]
