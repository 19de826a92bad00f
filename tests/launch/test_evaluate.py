"""The evaluation from the command line: flags to configs, JSON, tables, figure, page, and what is said of bad input."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import rich.console

from ca_jax.evaluation.comparison import EvaluationError
from ca_jax.evaluation.schema import AccuracyRow, AgreementRow, CurveBin, MmluConfig, PerplexityConfig, PerplexityRow
from ca_jax.launch import evaluate_flags
from ca_jax.launch.evaluate_plots import plot_losses
from ca_jax.launch.evaluate_tables import print_report
from ca_jax.overflow.config import OverflowConfig
from tests.launch.evaluate_kit import launch, parse, run
from tools import quality_page

TEXT = "A text that goes on and on, until no window holds it any more, and then goes on all the same. " * 4


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def mmlu(text: Path) -> Path:
    path = text.parent / "mmlu"
    path.mkdir()
    (path / "sums_dev.csv").write_text("Half of 8?,1,2,3,4,D\nTwice 1?,1,2,3,4,B\n")
    return path


def shown(report: dict) -> str:
    output = io.StringIO()
    print_report(report, rich.console.Console(file=output, width=200))
    return output.getvalue()


# Flags.


def test_without_flags_configs_have_their_defaults():
    found = parse("--task=ppl", "--data=a.txt")
    assert [(each.method, each.keep_first_tokens) for each in found.comparison.methods] == [
        (name, OverflowConfig.keep_first_tokens) for name in ("tt", "ca", "nkvt")
    ]
    assert found == PerplexityConfig(comparison=found.comparison, data="a.txt")
    assert (found.comparison.window, found.comparison.step_tokens) == (1024, 128)


def test_flags_are_fields():
    found = parse(
        *("--task=mmlu", "--data=dev", "--method=of,ca", "--window=512", "--step_tokens=64", "--max_tokens=700"),
        *("--num_shots=0", "--max_items=3", "--preamble=a.txt", "--seed=7", "--truncation_ratio=0.25"),
        *("--keep_first_tokens=0", "--overflow_anchor_tokens=4", "--overflow_repair_ratio=0.1"),
    )
    base = {"truncation_ratio": 0.25, "keep_first_tokens": 0, "anchor_tokens": 4, "repair_ratio": 0.1}
    assert found == MmluConfig(
        comparison=type(found.comparison)(
            methods=(OverflowConfig(method="of", **base), OverflowConfig(method="ca", **base)),
            window=512,
            step_tokens=64,
        ),
        data="dev",
        max_tokens=700,
        num_shots=0,
        max_items=3,
        preamble="a.txt",
        seed=7,
    )


def test_a_method_may_say_what_it_has_otherwise():
    found = parse("--task=ppl", "--data=a", "--method=tt,ca:anchor_tokens=16:repair_ratio=0.2,ca:repair=none")
    assert list(found.comparison.by_name) == ["tt, keep 4", "ca, keep 4, anchor 16, spread repair 20%", "ca, keep 4"]
    found = parse("--task=agreement", "--data=a", "--method=ca", "--overflow_repair=none")
    assert list(found.comparison.by_name) == ["tt, keep 4", "ca, keep 4"]
    (other,) = parse("--task=ppl", "--data=a", "--method=ca:drift=a.npz:discarder=sinks").comparison.methods
    assert other == OverflowConfig(drift="a.npz", discarder="sinks")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task=ppl", "--method=tt,cc"], "one of ca, tt, of, nkvt; .* 'cc'"),
        (["--task=ppl", "--method=ca:anchor=1"], r"got 'anchor=1' in 'ca:anchor=1'; did you mean anchor_tokens\?"),
        (["--task=ppl", "--method=ca:discarder=x"], "oldest"),
        (["--task=ppl", "--method=ca:anchor_tokens=x"], "anchor_tokens must be an integer, got 'x'"),
        (["--task=ppl", "--method=ca,ca"], "each method once, .*'ca, keep 4, .*' more often"),
        (["--task=ppl", "--every=256"], "every must be of one of the tasks agreement; got ppl"),
        (["--task=ppl", "--seed=1"], "seed must be of one of the tasks longeval, mmlu, rag, blend_gate; got ppl"),
        (["--task=mmlu", "--plot_out=a.png"], "plot_out must be of one of the tasks ppl, rag; got mmlu"),
        (["--task=longeval", "--form=talk"], "form .* continue, chat, .*'talk'"),
        (["--task=agreement", "--method=tt"], "agreement .*tt and a method"),
        (["--task=ppl", "--keep_first_tokens=1024"], "keep_first_tokens .*1024"),
        (["--task=ppl", "--truncation_ratio=0"], "truncation_ratio"),
        (["--task=ppl", "--step_tokens=2000"], "step_tokens <= window"),
    ],
)
def test_bad_flags_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(*arguments, "--data=a.txt")


# Reports.


def test_perplexity_is_told_with_its_settings_and_drawn(text, tmp_path):
    report = run(
        "ppl",
        *("--method=tt,of,ca:anchor_tokens=2,nkvt", f"--data={text}"),
        *("--window=128", "--step_tokens=32", "--max_tokens=300"),
    )
    assert list(report) == [
        *("task", "model", "dtype", "machine", "versions", "command", "config", "seconds", "rows", "items")
    ]
    assert (report["task"], report["dtype"], report["config"]["max_tokens"]) == ("ppl", "float32", 300)
    assert report["config"]["comparison"]["methods"][2]["anchor_tokens"] == 2
    assert [row.keys() for row in report["rows"]] == [dict.fromkeys(fields(PerplexityRow)).keys()] * 4
    tt, of, ca, nkvt = report["rows"]
    assert {row["text"] for row in report["rows"]} == {"text.txt"}
    assert [(row["method"], row["window"], row["anchor_tokens"]) for row in (tt, ca)] == [
        ("tt", 128, 0),
        ("ca", 128, 2),
    ]
    assert of["perplexity_after_overflow"] == tt["perplexity_after_overflow"]
    assert (of["gap_to_tt"], tt["gap_to_tt"]) == (0, None)
    assert tt["num_truncations"] == nkvt["num_truncations"] == 3
    assert ca["curve"][0].keys() == dict.fromkeys(fields(CurveBin)).keys()
    table = shown(report)
    assert f"{tt['perplexity_after_overflow']:,.3f} ± {tt['stderr']:,.3f}" in table
    assert "ca, keep 4, anchor 2" in table
    plot_losses(tmp_path / "new" / "all.png", report["rows"], caption="tiny")
    plot_losses(tmp_path / "alone.png", [tt], caption="tiny")
    assert (tmp_path / "new" / "all.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "new" / "all.png").stat().st_size > (tmp_path / "alone.png").stat().st_size
    with pytest.raises(ValueError, match="nothing overflowed"):
        plot_losses(tmp_path / "none.png", [{**tt, "curve": []}], caption="tiny")


def test_the_other_tasks_are_told_alike(text, mmlu, tmp_path):
    sizes = ("--window=384", "--step_tokens=64", "--max_tokens=390", f"--preamble={text}", "--num_shots=0")
    text.write_text(TEXT * 2, encoding="utf-8")
    questions = run("mmlu", "--method=tt,ca", f"--data={mmlu}", *sizes)
    assert [row.keys() for row in questions["rows"]] == [dict.fromkeys(fields(AccuracyRow)).keys()] * 2
    assert [row["data"] for row in questions["rows"]] == ["mmlu", "mmlu"]
    assert [item["subject"] for item in questions["items"]] == ["sums", "sums"]
    assert "p\n" in shown(questions) or "McNemar" in shown(questions)
    places = run(
        "agreement",
        *("--method=tt,nkvt", f"--data={text}", "--window=128", "--step_tokens=32"),
        *("--max_tokens=200", "--every=64", "--answer_tokens=2"),
    )
    (row,) = places["rows"]
    assert row.keys() == dict.fromkeys(fields(AgreementRow)).keys()
    assert (row["name"], row["num_places"], len(places["items"])) == ("nkvt, keep 4", 2, 2)
    assert "of 2 tokens" in shown(places)


def test_the_page_has_every_report_once_and_how_to_redo_it(text, tmp_path):
    sizes = ("--step_tokens=32", "--max_tokens=200", f"--data={text}")
    reports = [
        run("ppl", "--method=tt,ca:repair=none", "--window=128", *sizes),
        run("ppl", "--method=tt,nkvt", "--window=96", *sizes),
        run("ppl", "--method=ca:repair=none", "--window=256", *sizes[:1], "--max_tokens=200", sizes[2]),
        run("agreement", "--method=tt,ca:repair=none", "--window=128", "--every=32", *sizes),
    ]
    for i, report in enumerate(reports):
        report["command"] += f" --nth={i}"
    page = quality_page.to_markdown(reports, notes="## What it says\n\nMuch.").splitlines()
    head = page.index("| text | window | tokens | overflows | tt, keep 4 | ca, keep 4 | nkvt, keep 4 |")
    (tt, ca), (_, nkvt) = reports[0]["rows"], reports[1]["rows"]
    first, second, third = (page[head + nth].split(" | ") for nth in (2, 3, 4))
    assert first[:4] == ["| text.txt", "128", "200", str(tt["num_truncations"])]
    assert first[4] == f"{tt['perplexity_after_overflow']:,.2f} ± {tt['stderr']:,.2f}"
    assert first[5].endswith(f"({100 * ca['gap_to_tt']:+,.2f}% ± {100 * ca['gap_stderr']:.2f})")
    assert (first[6], second[5]) == (" |", "")
    assert f"({100 * nkvt['gap_to_tt']:+,.2f}%" in second[6]
    assert third[5].endswith("(no overflow)")
    assert page.index("## What it says") < page.index("## Perplexity") < page.index("## Going on as `tt` does")
    for i in range(4):
        assert sum(line.endswith(f"--nth={i}") and line.startswith("    python") for line in page) == 1
    with pytest.raises(ValueError, match="at least one, got none"):
        quality_page.to_markdown([])


def test_a_run_of_many_methods_has_a_line_for_each(text):
    method = "--method=ca:repair=deviating:repair_ratio=0:anchor_tokens=8"
    report = run("ppl", method, "--window=128", "--step_tokens=32", f"--data={text}")
    (row,) = report["rows"]
    many = {**report, "rows": [{**row, "name": f"ca, {i}"} for i in range(7)]}
    page = quality_page.to_markdown([report, many]).splitlines()
    head = next(i for i, line in enumerate(page) if line.startswith("| data | window | method |"))
    lines = [line.strip("| ").split(" | ") for line in page[head + 2 : head + 9]]
    assert [line[:3] for line in lines] == [["text.txt", "128", f"ca, {i}"] for i in range(7)]
    share = row["recomputed_tokens"] / (row["mean_kept_tokens"] * row["num_truncations"])
    assert 0 < share < 0.2
    assert lines[0][-1] == f"{row['recomputed_tokens']:,.0f} ({100 * share:.1f}%)"
    assert page.count("| text | window | tokens | overflows | ca, keep 4, anchor 8 |") == 1


def test_a_file_that_is_no_report_is_refused(tmp_path):
    path = tmp_path / "a.json"
    for content, message in (
        ("{", "Expecting"),
        ("[]", "without task, model"),
        ('{"task": "ppl"}', "without model, dtype"),
        (json.dumps(dict.fromkeys(quality_page.REQUIRED, "x")), "got .* of the task 'x'"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"must be a JSON file of launch.evaluate, .*{message}"):
            quality_page.read_report(path)
    with pytest.raises(ValueError, match="No such file"):
        quality_page.read_report(tmp_path / "none.json")


def test_data_that_are_none_are_refused_before_anything_is_fed(text, tmp_path):
    with pytest.raises(EvaluationError, match=r"none\.txt: No such file"):
        run("ppl", f"--data={tmp_path / 'none.txt'}", "--window=256")
    with pytest.raises(EvaluationError, match="window <= 512, the model's context window"):
        run("ppl", f"--data={text}")
    text.write_text("short")
    with pytest.raises(EvaluationError, match="at least 257 tokens to overflow a window of 256"):
        run("ppl", f"--data={text}", "--window=256")


# The commands themselves.


def test_the_commands_write_what_they_say(tiny_model, text, tmp_path):
    out, plot = tmp_path / "new" / "ppl.json", tmp_path / "new" / "ppl.png"
    asked = ("--task=ppl", "--method=tt,ca", f"--data={text}", "--window=128", "--step_tokens=32", "--max_tokens=256")
    done = launch(
        "ca_jax.launch.evaluate",
        f"--model={tiny_model}",
        *asked,
        f"--json_out={out}",
        f"--plot_out={plot}",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert [row["tokens"] for row in report["rows"]] == [256, 256]
    assert report["model"] == tiny_model.name
    assert "--window=128" in report["command"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "ca, keep 4" in done.stdout
    assert report["machine"]["cpu"] in done.stdout
    page = tmp_path / "page" / "quality.md"
    done = launch("tools.quality_page", f"--out={page}", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert report["command"] in page.read_text(encoding="utf-8")
    done = launch("tools.quality_page", f"--out={page}", text, cwd=tmp_path)
    assert (done.returncode, "must be a JSON file" in done.stderr) == (1, True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task=ppl", "--method=tt,xx"], "one of ca, tt, of, nkvt; "),
        (
            ["--task=ppl", "--window=9000"],
            "step_tokens <= window <= 8192, the model's context window",
        ),
        (["--task=ppl"], "at least 1025 tokens to overflow a window of 1024"),
        (["--task=chess"], "value should be one of <ppl|longeval|mmlu|agreement|rag|blend_gate>"),
    ],
)
def test_the_command_says_what_was_wrong(tiny_model, text, tmp_path, arguments, message):
    out = tmp_path / "out.json"
    done = launch(
        "ca_jax.launch.evaluate",
        f"--model={tiny_model}",
        f"--data={text}",
        f"--json_out={out}",
        *arguments,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_the_help_has_an_example_of_each_task(tmp_path):
    done = launch("ca_jax.launch.evaluate", "--help", cwd=tmp_path)
    assert all(f"python -m ca_jax.launch.evaluate --task={task} " in done.stdout for task in evaluate_flags.CONFIGS)
    flags_told = ("task", "method", "data", "window", "truncation_ratio", "max_tokens", "json_out", "keep_first_tokens")
    assert all(f"--{name}: " in done.stdout for name in flags_told)
