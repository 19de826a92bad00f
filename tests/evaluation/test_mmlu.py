"""MMLU's files and prompts, and choices against one pass over the context that is left."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.evaluate.comparison import Comparison
from benchmarks.evaluate.mmlu import CHOICES, MmluConfig, Question, choice_tokens, prompt, read_subjects, run_mmlu
from benchmarks.evaluate.statistics import log_softmax
from ca_jax.launch.texts import EvaluationError
from ca_jax.overflow.config import OverflowConfig
from tests import engine_kit as kit
from tests.evaluation.rag_kit import ignore

SUMS = '"Two, or more?",1,2,3,4,B\nHalf of 8?,1,2,3,4,D\n"Line\nbreak",a,b,c,d,A\n'
ZOO = "question,choice0,choice1,choice2,choice3,answer\nWhich barks?,cat,dog,cow,ox,1\n"
PREAMBLE = "A long text that nobody asks about stands before all questions. " * 10


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "mmlu_dev"
    path.mkdir()
    (path / "high_school_sums_dev.csv").write_text(SUMS)
    (path / "zoo_dev.csv").write_text(ZOO)
    (tmp_path / "wikitext_b.txt").write_text(PREAMBLE)
    return path


def ask(directory: Path, **changes) -> MmluConfig:
    methods = tuple(OverflowConfig(method=method, repair="none") for method in changes.pop("methods", ("tt",)))
    comparison = Comparison(methods=methods, window=384, step_tokens=64)
    return MmluConfig(
        **{"comparison": comparison, "data": str(directory), "max_tokens": 400, "num_shots": 0, **changes}
    )


def test_questions_are_read_with_or_without_headings_and_put_behind_examples(directory):
    subject, zoo = read_subjects(directory)
    sums = subject.questions
    assert [(each.subject, each.number, each.answer) for each in sums] == [
        ("high school sums", 0, "B"),
        ("high school sums", 1, "D"),
        ("high school sums", 2, "A"),
    ]
    assert sums[2].text == "Line\nbreak"
    (asked,) = zoo.questions
    assert asked == Question(
        subject="zoo", number=0, text="Which barks?", choices=("cat", "dog", "cow", "ox"), answer="B"
    )
    assert [each.number for each in subject.examples_of(1, 2)] == [2, 0]
    assert prompt(sums[1], sums[:1]) == (
        "The following are multiple choice questions (with answers) about high school sums.\n\n"
        "Two, or more?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: B\n\n"
        "Half of 8?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "a,1,2,3,4,A\nb,1,2,3,B\n",
            r"bad_dev\.csv:2: a row must have a question, four .* got 5 columns, the last 'B'",
        ),
        ("a,1,2,3,4,A\n\nb,1,2,3,4,E\n", r"bad_dev\.csv:3: a row must have .* got 6 columns, the last 'E'"),
        ('"a,1,2,3,4,A\n', r"bad_dev\.csv:1 must be CSV, got unexpected end of data"),
        ("question,a,b,c,d,answer\n", r"bad_dev\.csv must have questions, got none"),
    ],
)
def test_a_row_that_is_none_is_refused_with_its_place(tmp_path, content, message):
    (tmp_path / "bad_dev.csv").write_text(content)
    with pytest.raises(EvaluationError, match=message):
        read_subjects(tmp_path)


def test_the_test_split_is_asked_with_examples_of_the_dev_split(directory):
    (directory / "zoo_test.csv").write_text("Which flies?,cat,bird,cow,ox,B\nWhich swims?,cat,bird,cow,eel,D\n")
    (zoo,) = read_subjects(directory)
    assert [(each.subject, each.answer) for each in zoo.questions] == [("zoo", "B"), ("zoo", "D")]
    assert [each.text for each in zoo.examples_of(0, 5)] == ["Which barks?"]
    (directory / "zoo_dev.csv").unlink()
    with pytest.raises(EvaluationError, match=r"zoo_dev\.csv: No such file"):
        read_subjects(directory)


def test_choices_are_told_apart_by_the_token_that_differs():
    assert choice_tokens(kit.tiny_model().tokenizer) == ([ord(" ")], [ord(choice) for choice in CHOICES])


def test_a_choice_is_the_likeliest_behind_the_context_that_is_left(directory):
    model = kit.tiny_model()
    evaluation = run_mmlu(model, ask(directory, methods=("tt", "of", "ca")), ignore)
    tt, of, ca = evaluation.rows
    ids, right = list(PREAMBLE.encode()[:400]), 0
    questions = [each for subject in read_subjects(directory) for each in subject.questions]
    for item, question in zip(evaluation.items, questions, strict=True):
        # Before token 384 half the window left, behind the first four tokens.
        asked = list(f"\n\n{prompt(question, [])} ".encode())
        logits = kit.full_pass(ids[:4] + ids[196:] + asked)[0][-1]
        logprobs = log_softmax(logits)[[ord(choice) for choice in CHOICES]]
        assert item["logprobs"]["tt, keep 4"] == pytest.approx(logprobs, abs=1e-3)
        assert item["answers"]["tt, keep 4"] == CHOICES[int(np.argmax(logprobs))]
        right += item["answers"]["tt, keep 4"] == question.answer
        assert (item["subject"], item["expected"]) == (question.subject, question.answer)
    assert (tt.data, tt.num_items, tt.num_right, tt.num_truncations) == ("mmlu_dev", 4, right, 1.0)
    assert (tt.logprob_difference, tt.same_answers) == (None, None)
    assert (of.logprob_difference, of.same_answers, of.difference_to_tt, of.mcnemar_p) == (0, 1, 0, 1)
    given = {
        name: np.array([item["logprobs"][f"{name}, keep 4"] for item in evaluation.items]) for name in ("tt", "ca")
    }
    assert ca.logprob_difference == pytest.approx(np.abs(given["ca"] - given["tt"]).mean(), abs=1e-3)
    assert ca.logprob_difference > 1e-2


def test_a_preamble_must_be_there_and_overflow_the_window(directory, tmp_path):
    assert ask(directory, max_tokens=None).preamble_tokens == 2 * 384 + 64
    with pytest.raises(EvaluationError, match="max_tokens must be above the window of 384 to overflow it, got 300"):
        run_mmlu(kit.tiny_model(), ask(directory, max_tokens=300), ignore)
    (tmp_path / "own.txt").write_text("short")
    with pytest.raises(EvaluationError, match=r"at least 385 tokens .* got 5 in .*own\.txt"):
        run_mmlu(kit.tiny_model(), ask(directory, preamble=str(tmp_path / "own.txt")), ignore)
    (tmp_path / "wikitext_b.txt").unlink()
    with pytest.raises(EvaluationError, match=r"preamble must be given, or a wikitext\*\.txt be beside"):
        run_mmlu(kit.tiny_model(), ask(directory), ignore)
