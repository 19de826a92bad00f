"""How often methods go on alike: known answers and distributions, and methods that must agree."""

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.evaluate.agreement import AgreementConfig, run_agreement, same_prefix
from benchmarks.evaluate.comparison import Comparison
from benchmarks.evaluate.stream import ComparedOverflow
from ca_jax.launch.texts import EvaluationError
from tests import engine_kit as kit

TEXT = "Some go on as others do, and some do not; where a window ends it shows. " * 4


def ask(path: Path, *methods: str, **changes: int) -> AgreementConfig:
    comparison = Comparison(
        methods=tuple(ComparedOverflow(method=method) for method in methods), window=64, step_tokens=16
    )
    return AgreementConfig(
        **{"comparison": comparison, "data": str(path), "max_tokens": 160, "every": 32, "answer_tokens": 3, **changes}
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_a_prefix_is_of_the_tokens_that_are_alike():
    assert [same_prefix([1, 2, 3], other) for other in ([1, 2, 3], [1, 2, 4], [0, 2, 3])] == [3, 2, 0]


def test_of_goes_on_as_tt_does_and_nkvt_does_not(text):
    told = []
    evaluation = run_agreement(kit.tiny_model(), ask(text, "nkvt", "of", "tt"), lambda *call: told.append(call))
    nkvt, of = evaluation.rows
    assert [item["num_fed"] for item in evaluation.items] == [96, 128, 160], "64 tokens fit"
    assert [row.name for row in evaluation.rows] == ["nkvt, keep 4", "of, keep 4"]
    assert (of.num_places, of.answer_tokens, of.text) == (3, 3, "a.txt")
    assert (of.same_first, of.same_answer, of.mean_same_prefix, of.mean_kl, of.kl_stderr) == (1, 1, 1, 0, 0)
    assert of.same_answer_interval[1] == pytest.approx(1)
    assert of.num_truncations == nkvt.num_truncations == 3
    answers = [item["answers"] for item in evaluation.items]
    prefixes = [same_prefix(each["nkvt, keep 4"], each["tt, keep 4"]) for each in answers]
    assert all(len(ids) == 3 for each in answers for ids in each.values())
    assert nkvt.same_first == sum(prefix > 0 for prefix in prefixes) / 3
    assert nkvt.same_answer == sum(prefix == 3 for prefix in prefixes) / 3
    assert nkvt.mean_same_prefix == pytest.approx(sum(prefixes) / 9)
    kl = [item["kl"]["nkvt, keep 4"] for item in evaluation.items]
    assert nkvt.mean_kl == pytest.approx(np.mean(kl))
    assert nkvt.kl_stderr == pytest.approx(np.std(kl, ddof=1) / math.sqrt(3))
    assert nkvt.mean_kl > 1e-3
    assert told == [("agreement", done, 5) for done in range(6)]


def test_too_few_tokens_are_refused(text):
    with pytest.raises(EvaluationError, match="max_tokens must be above the window of 64"):
        run_agreement(kit.tiny_model(), ask(text, "tt", "ca", max_tokens=64), lambda *_: None)
