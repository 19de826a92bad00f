"""Evaluations from the command line: reports, tables, figures, pages, turns of an engine, and exits."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import rich.console
from absl import flags
from absl.testing import flagsaver

from benchmarks.evaluate import main, plots, tables
from benchmarks.evaluate.agreement import AgreementRow
from benchmarks.evaluate.comparison import AccuracyRow
from benchmarks.evaluate.perplexity import CurveBin, PerplexityRow
from ca_jax.evaluation.texts import EvaluationError
from tests import engine_kit as kit
from tests.evaluation.rag_kit import INSTRUCTION, ITEMS, write
from tools import quality_page

TEXT = "A text that goes on and on, until no window holds it any more, and then goes on all the same. " * 4
SMALL = ("--num_chunks=3", "--chunk_tokens=48", f"--instruction={INSTRUCTION}")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def items(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("rag") / "items.json", ITEMS)


def run(task: str, *arguments: object) -> dict:
    """The report of a task on the tiny model, as it is written."""
    values = flags.FlagValues()
    main.define_flags(values)
    values(["program", f"--task={task}", "--json_out=out.json", *map(str, arguments)])
    config = main.read_config(values)
    report = main.run(task, config, lambda _: kit.tiny_model(), command=f"python -m it --task={task}")
    return json.loads(json.dumps(report, allow_nan=False))


def shown(report: dict) -> str:
    output = io.StringIO()
    tables.print_report(report, rich.console.Console(file=output, width=220))
    return output.getvalue()


def names_of(kind: type):
    return dict.fromkeys(field.name for field in dataclasses.fields(kind)).keys()


def is_drawn(path: Path, report: dict) -> bool:
    return plots.draw(path, report) and path.read_bytes().startswith(b"\x89PNG")


# Overflow.


def test_perplexity_is_told_with_its_settings_and_drawn(text, tmp_path):
    sizes = ("--window=128", "--step_tokens=32", "--max_tokens=300")
    report = run("ppl", "--method=tt,of,ca:anchor_tokens=2,nkvt", f"--data={text}", *sizes)
    assert list(report) == [
        *("task", "model", "dtype", "machine", "versions", "command", "config", "seconds", "rows", "items")
    ]
    assert (report["task"], report["dtype"], report["config"]["max_tokens"]) == ("ppl", "float32", 300)
    assert report["config"]["comparison"]["methods"][2]["anchor_tokens"] == 2
    assert [row.keys() for row in report["rows"]] == [names_of(PerplexityRow)] * 4
    tt, of, ca, nkvt = report["rows"]
    assert {row["text"] for row in report["rows"]} == {"text.txt"}
    assert [(row["method"], row["window"], row["anchor_tokens"]) for row in (tt, ca)] == [
        ("tt", 128, 0),
        ("ca", 128, 2),
    ]
    assert of["perplexity_after_overflow"] == tt["perplexity_after_overflow"]
    assert (of["gap_to_tt"], tt["gap_to_tt"]) == (0, None)
    assert tt["num_truncations"] == nkvt["num_truncations"] == 3
    assert ca["curve"][0].keys() == names_of(CurveBin)
    table = shown(report)
    assert f"{tt['perplexity_after_overflow']:,.3f} ± {tt['stderr']:,.3f}" in table
    assert "ca, keep 4, anchor 2" in table
    assert is_drawn(tmp_path / "new" / "all.png", report)
    assert is_drawn(tmp_path / "alone.png", {**report, "rows": [tt]})
    assert (tmp_path / "new" / "all.png").stat().st_size > (tmp_path / "alone.png").stat().st_size
    assert not plots.draw(tmp_path / "none.png", {**report, "rows": [{**tt, "curve": []}]}), "nothing overflowed"


def test_questions_and_places_are_told_alike(text, tmp_path):
    mmlu = tmp_path / "mmlu"
    mmlu.mkdir()
    (mmlu / "sums_dev.csv").write_text("Half of 8?,1,2,3,4,D\nTwice 1?,1,2,3,4,B\n")
    text.write_text(TEXT * 2, encoding="utf-8")
    sizes = ("--window=384", "--step_tokens=64", "--max_tokens=390", f"--preamble={text}", "--num_shots=0")
    questions = run("mmlu", "--method=tt,ca", f"--data={mmlu}", *sizes)
    assert [row.keys() for row in questions["rows"]] == [names_of(AccuracyRow)] * 2
    assert [row["data"] for row in questions["rows"]] == ["mmlu", "mmlu"]
    assert [item["subject"] for item in questions["items"]] == ["sums", "sums"]
    assert "McNemar" in shown(questions)
    sizes = ("--window=128", "--step_tokens=32", "--max_tokens=200", "--every=64", "--answer_tokens=2")
    places = run("agreement", "--method=tt,nkvt", f"--data={text}", *sizes)
    (row,) = places["rows"]
    assert row.keys() == names_of(AgreementRow)
    assert (row["name"], row["num_places"], len(places["items"])) == ("nkvt, keep 4", 2, 2)
    assert "of 2 tokens" in shown(places)


def test_data_that_are_none_are_refused_before_anything_is_fed(text, tmp_path):
    with pytest.raises(EvaluationError, match=r"none\.txt: No such file"):
        run("ppl", f"--data={tmp_path / 'none.txt'}", "--window=256")
    with pytest.raises(EvaluationError, match="at most the model's 512 tokens"):
        run("ppl", f"--data={text}")
    text.write_text("short")
    with pytest.raises(EvaluationError, match="at least 257 tokens to overflow a window of 256"):
        run("ppl", f"--data={text}", "--window=256")


# The page of reports.


def test_the_page_has_every_report_once_and_how_to_redo_it(text):
    sizes = ("--step_tokens=32", "--max_tokens=200", f"--data={text}")
    reports = [
        run("ppl", "--method=tt,ca:repair=none", "--window=128", *sizes),
        run("ppl", "--method=tt,nkvt", "--window=96", *sizes),
        run("ppl", "--method=ca:repair=none", "--window=256", *sizes),
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


# Chunks.


def test_methods_are_told_and_drawn(items, tmp_path):
    report = run("rag", f"--data={items}", *SMALL, "--ratios=0.5,1", "--selections=hkvd,first", "--answer_tokens=3")
    table = shown(report)
    assert "rag, items.json" in table
    assert "3 items, up to 3 chunks of up to 48 tokens" in table
    assert all(row["name"] in table for row in report["rows"] if row["mean_kl"] is not None)
    assert f"{report['rows'][2]['mean_kl']:.4f}" in table
    answered = {**report, "rows": [{**row, "f1": 0.5} for row in report["rows"]]}
    assert "F1" not in table.replace("own F1 is", ""), "answers that full recompute cannot give compare nothing"
    assert "own F1 is 0.000" in table
    assert "F1" in shown(answered)
    markdown = tables.to_markdown(report).splitlines()
    assert sum(line.startswith("|") for line in markdown) == 2 + sum(
        row["mean_kl"] is not None for row in report["rows"]
    )
    assert markdown[2].startswith("| method | computed tokens | KL, nats |")
    assert is_drawn(tmp_path / "new" / "a.png", report)


@pytest.mark.parametrize("figure", [6, 7, 8])
def test_figures_of_deviation_are_told_and_drawn(items, tmp_path, figure):
    report = run("rag", f"--data={items}", *SMALL, "--ratios=0.5", f"--figure={figure}")
    assert f"figure {figure}, items.json" in shown(report)
    assert "3 items" in shown(report)
    assert is_drawn(tmp_path / "a.png", report)


def test_turns_from_each_storage_find_their_chunks_there(items, tmp_path):
    report = run(
        *("rag", f"--data={items}", *SMALL, "--ratios=0.5", "--figure=17", "--timed_items=2", "--repeats=1"),
        *("--storage_gb_s=0.01", "--baselines=prefix,reuse"),
    )
    assert [(row["name"], row["storage"]) for row in report["rows"]] == [
        ("full recompute", "dram"),
        ("prefix caching", "dram"),
        *((name, storage) for storage in ("dram", "ssd", "0.01") for name in ("full reuse", "hkvd 50%")),
    ]
    for row in report["rows"]:
        assert (row["num_items"], row["context_tokens"], row["mean_kl"]) == (2, 144, None)
        assert row["ttft_quartiles"][0] <= row["ttft_s"] <= row["ttft_quartiles"][1]
        if row["name"] in ("full reuse", "hkvd 50%"):
            assert row["cached_tokens"] == 144
    recomputed = {row["recomputed_tokens"] for row in report["rows"] if row["ratio"]}
    assert recomputed == {64}, "half, but all in one layer of 3"
    assert "0.01 GB/s" in shown(report)
    assert "medians of 1 turns of each of up to 2 items" in shown(report)
    assert is_drawn(tmp_path / "a.png", report)


def test_quality_and_time_stand_beside_each_other(items, tmp_path):
    asked = ("rag", f"--data={items}", *SMALL, "--ratios=0.5", "--timed_items=1", "--repeats=1", "--answer_tokens=2")
    report = run(*asked, "--figure=12", "--summary_tokens=4")
    names = ["full recompute", "prefix caching", "full reuse", "hkvd 50%", "MapReduce", "MapRerank"]
    assert [row["name"] for row in report["rows"]] == names
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["full recompute"]["mean_kl"] == 0 < rows["hkvd 50%"]["mean_kl"] < rows["full reuse"]["mean_kl"]
    assert rows["full recompute"]["speedup"] == 1
    assert (rows["MapReduce"]["ttft_s"], rows["MapReduce"]["num_items"]) == (None, 0)
    assert rows["MapReduce"]["f1"] is not None
    assert len(report["items"]) == 3, "quality is of all items"
    assert "figure 12, items.json" in shown(report)
    assert is_drawn(tmp_path / "a.png", report)


def test_sizes_of_contexts_are_varied_one_by_one(items, tmp_path):
    report = run(
        *("rag", f"--data={items}", *SMALL, "--ratios=0.5", "--figure=15", "--timed_items=1", "--repeats=1"),
        *("--chunk_counts=2,3", "--chunk_lengths=32,48", "--baselines="),
    )
    assert [(row["name"], row["num_chunks"], row["chunk_tokens"], row["context_tokens"]) for row in report["rows"]] == [
        (name, count, length, count * length)
        for count, length in ((2, 48), (3, 48), (3, 32))
        for name in ("full recompute", "hkvd 50%")
    ]
    assert "2 of 48" in shown(report)
    assert is_drawn(tmp_path / "a.png", report)


# The commands themselves.


def test_the_command_writes_what_it_says(command, tiny_model, text, tmp_path):
    out, plot = tmp_path / "new" / "ppl.json", tmp_path / "new" / "ppl.png"
    asked = ("--task=ppl", "--method=tt,ca", f"--data={text}", "--window=128", "--step-tokens=32", "--max_tokens=256")
    files = (f"--json_out={out}", f"--plot_out={plot}")
    done = command(f"--model={tiny_model}", *asked, *files, module="evaluate")
    assert done.code == 0, done.err
    report = json.loads(out.read_text(encoding="utf-8"))
    assert [row["tokens"] for row in report["rows"]] == [256, 256]
    assert report["model"] == tiny_model.name
    assert "--window=128" in report["command"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "ca, keep 4" in done.out
    assert report["machine"]["cpu"] in done.out
    assert str(plot) in done.out.replace("\n", "")
    page = tmp_path / "page" / "quality.md"
    with flagsaver.flagsaver((quality_page._OUT, str(page))):
        flags.FLAGS.mark_as_parsed()
        quality_page.main(["quality_page", str(out)])
        with pytest.raises(SystemExit, match=r"error: .*must be a JSON file"):
            quality_page.main(["quality_page", str(text)])
    assert report["command"] in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task=ppl", "--method=tt,xx"], "one of ca, tt, of, nkvt; "),
        (["--task=ppl", "--window=9000"], "at most the model's 8192 tokens"),
        (["--task=ppl"], "at least 1025 tokens to overflow a window of 1024"),
        (["--task=chess"], "value should be one of <ppl|longeval|mmlu|agreement|rag|blend_gate>"),
        (["--task=rag", "--data=none.json"], "none.json: No such file"),
    ],
)
def test_the_command_says_what_was_wrong(command, tiny_model, text, tmp_path, arguments, message):
    out = tmp_path / "out.json"
    done = command(f"--model={tiny_model}", f"--data={text}", f"--json_out={out}", *arguments, module="evaluate")
    assert done.code == 1
    assert message in done.err
    assert "Traceback" not in done.err
    assert not out.exists()


def test_a_gates_exit_says_whether_a_ratio_will_do(command, tiny_model, items, tmp_path):
    asked = ("--task=blend_gate", f"--model={tiny_model}", f"--data={items}", *SMALL, "--max_kl_share=0.01")
    out = tmp_path / "gate.json"
    done = command(*asked, "--ratios=0.5", f"--json_out={out}", module="evaluate")
    assert (done.code, done.err.count("Traceback")) == (1, 0)
    assert "no: KL to full recompute" in done.out
    assert [row["passes"] for row in json.loads(out.read_text())["rows"]] == [False, False], "written all the same"
    done = command(*asked, "--ratios=1", module="evaluate")
    assert done.code == 0, done.err
    assert "written to" not in done.out
    assert "yes: KL to full recompute" in done.out
