"""Every task runs small by its command: its rows, table, figure, the page of reports, and the gate's exit."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks.evaluate import main, tables
from benchmarks.evaluate.agreement import AgreementRow
from benchmarks.evaluate.comparison import AccuracyRow
from benchmarks.evaluate.kv_gate import KvGateRow
from benchmarks.evaluate.perplexity import PerplexityRow
from benchmarks.evaluate.rag import GateRow, RagRow
from benchmarks.evaluate.rag_deviation import AttentionRow, CorrelationRow, DistributionRow
from benchmarks.evaluate.timing import TimedRow
from tests import engine_kit as kit
from tests.evaluation.rag_kit import INSTRUCTION, ITEMS, write
from tests.evaluation.test_longeval import write_lines
from tests.scripts_kit import run_script
from tools import quality_page

TEXT = "A text that goes on and on, until no window holds it any more, and then goes on all the same. " * 8
WINDOW = "--window=128 --step_tokens=32"
RAG = f"--data=items.json --num_chunks=3 --chunk_tokens=48 --instruction='{INSTRUCTION}' --ratios=0.5"
KV = "--data=text.txt --fit_data=text.txt --history_tokens=128 --behind_tokens=32"
TIMED = "--timed_items=1 --repeats=1 --answer_tokens=2 --storage_gb_s=0.01"
BOTH = ("full recompute", "spread 50%")
TASKS = {
    "ppl": (
        f"--method=tt,of,ca:anchor_tokens=2,nkvt --data=text.txt {WINDOW} --max_tokens=300",
        PerplexityRow,
        [("tt, keep 4",), ("of, keep 4",), ("ca, keep 4, anchor 2, spread repair 10%",), ("nkvt, keep 4",)],
    ),
    "longeval": (
        "--method=tt,nkvt --data=lines.jsonl --window=256 --step_tokens=32 --max_items=2 --answer_tokens=2 "
        "--asked_depth=128",
        AccuracyRow,
        [("tt, keep 4",), ("nkvt, keep 4",)],
    ),
    "mmlu": (
        "--method=tt,ca --data=mmlu --preamble=text.txt --num_shots=0 --window=384 --step_tokens=64 --max_tokens=390",
        AccuracyRow,
        [("tt, keep 4",), ("ca, keep 4, anchor 32, spread repair 10%",)],
    ),
    "agreement": (
        f"--method=tt,nkvt --data=text.txt {WINDOW} --max_tokens=200 --every=64 --answer_tokens=2",
        AgreementRow,
        [("nkvt, keep 4",)],
    ),
    "rag": (
        f"{RAG} --answer_tokens=3 --baselines=reuse",
        RagRow,
        [("full recompute",), ("full reuse",), ("spread 50%",)],
    ),
    "rag figure=6": (RAG, AttentionRow, [(name, ratio) for name in ("oracle", "spread") for ratio in (0, 0.5)]),
    "rag figure=7": (RAG, DistributionRow, [(1,), (2,)]),
    "rag figure=8": (RAG, CorrelationRow, [(1,)]),
    "rag figure=12": (
        f"{RAG} {TIMED} --summary_tokens=4",
        TimedRow,
        [(name, "dram") for name in (BOTH[0], "prefix caching", "full reuse", BOTH[1], "MapReduce", "MapRerank")],
    ),
    "rag figure=15": (
        f"{RAG} {TIMED} --chunk_counts=2,3 --chunk_lengths=32,48 --baselines=",
        TimedRow,
        [
            (name, "dram", count, length, count * length)
            for count, length in ((2, 48), (3, 48), (3, 32))
            for name in BOTH
        ],
    ),
    "rag figure=17": (
        f"{RAG} {TIMED} --baselines=prefix,reuse",
        TimedRow,
        [
            ("full recompute", "dram"),
            ("prefix caching", "dram"),
            *((name, storage) for storage in ("dram", "ssd", "0.01") for name in ("full reuse", "spread 50%")),
        ],
    ),
    "blend_gate": (f"{RAG} --max_kl_share=1e9", GateRow, [("full reuse",), ("spread 50%",)]),
    "kv_gate": (f"{KV} --bits=6,3 --max_loss=9", KvGateRow, [("int8",), ("6 bits",), ("3 bits",)]),
}
"""By task and figure: flags, the kind of its rows, and the first of their fields below."""
FIELDS = {
    AttentionRow: ("selection", "ratio"),
    DistributionRow: ("layer",),
    CorrelationRow: ("layer",),
    TimedRow: ("name", "storage", "num_chunks", "chunk_tokens", "context_tokens"),
}


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Runs a task on the tiny model, in a directory that has the data; how it ended, and its report."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "load_model", lambda *_, **__: kit.tiny_model())
    write(tmp_path / "items.json", ITEMS)
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    Path("mmlu").mkdir()
    Path("mmlu/sums_dev.csv").write_text("Half of 8?,1,2,3,4,D\nTwice 1?,1,2,3,4,B\n")
    write_lines(tmp_path / "lines.jsonl")

    def run(task, line, *arguments):
        flags = [f"--{flag}" for flag in f"task={task}".split()]
        done = run_script("evaluate", *flags, *shlex.split(line), "--json_out=new/it.json", *arguments)
        assert "Traceback" not in done.err
        assert Path("new/it.json").exists(), done.err
        report = json.loads(Path("new/it.json").read_text(encoding="utf-8"))
        return done, report

    return run


@pytest.mark.parametrize("task", TASKS)
def test_a_task_yields_its_rows_table_and_figure(evaluate, task):
    line, kind, wanted = TASKS[task]
    is_plotted = task.startswith(("ppl", "rag"))
    done, report = evaluate(task, line, *(["--plot_out=new/it.png"] if is_plotted else []))
    assert done.code == 0, done.err
    assert report.keys() == {
        *("task", "model", "dtype", "machine", "versions", "command", "config", "seconds", "rows", "items")
    }
    assert (report["task"], report["dtype"]) == (task.split()[0], "float32")
    assert report["machine"]["cpu"] in done.out
    rows = report["rows"]
    assert {tuple(row) for row in rows} == {tuple(field.name for field in dataclasses.fields(kind))}
    names = FIELDS.get(kind, ("name",))[: len(wanted[0])]
    assert [tuple(row[name] for name in names) for row in rows] == wanted
    assert not is_plotted or Path("new/it.png").read_bytes().startswith(b"\x89PNG")
    if task == "ppl":
        tt = rows[0]
        assert f"{tt['perplexity_after_overflow']:,.3f} ± {tt['stderr']:,.3f}" in done.out
    for row in rows if kind is TimedRow else ():
        if row["ttft_s"] is not None:
            assert row["ttft_quartiles"][0] <= row["ttft_s"] <= row["ttft_quartiles"][1]
        if row["name"] in ("full reuse", "spread 50%"):
            assert row["cached_tokens"] == row["context_tokens"]
        if row["ratio"] and row["context_tokens"] == 144:
            assert row["recomputed_tokens"] == 71, "half of all but the first one"
    if task == "rag figure=12":
        found = {row["name"]: row for row in rows}
        assert found[BOTH[0]]["mean_kl"] == 0 < found[BOTH[1]]["mean_kl"] < found["full reuse"]["mean_kl"]
        assert (found[BOTH[0]]["speedup"], found["MapReduce"]["ttft_s"], len(report["items"])) == (1, None, 3)
        assert "ROUGE-L" not in tables.to_markdown(report), "answers that full recompute cannot give compare nothing"
        answered = {**report, "rows": [{**row, "f1": 0.5, "rouge_l": 0.5} for row in rows]}
        assert "ROUGE-L" in tables.to_markdown(answered)
        empty = {**report, "rows": [{**row, "cached_tokens": 0} for row in rows]}
        assert "Left out: prefix caching" in tables.to_markdown(empty)


def test_a_gates_exit_says_whether_a_ratio_will_do(evaluate):
    done, report = evaluate("blend_gate", f"{RAG} --max_kl_share=0.01")
    assert done.code == 1
    assert "no: KL to full recompute" in done.out
    assert [row["passes"] for row in report["rows"]] == [False, False], "written all the same"
    done, _ = evaluate("blend_gate", f"{RAG} --ratios=1 --max_kl_share=0.01")
    assert (done.code, "yes: KL to full recompute" in done.out) == (0, True)


@pytest.mark.parametrize("task", ["ppl", "longeval"])
def test_a_bound_on_what_overflow_costs_decides_the_exit(evaluate, task):
    lines = "--data=lines.jsonl --window=256 --step_tokens=32 --max_items=2 --answer_tokens=2 --asked_depth=128"
    line = {"ppl": f"--data=text.txt {WINDOW} --max_tokens=300", "longeval": lines}[task]
    line += " --method=tt,ca:repair=none,nkvt"
    done, report = evaluate(task, f"{line} --max_loss=9")
    assert done.code == 0, done.err
    assert "is kept by: ca, keep 4" in done.out.replace("\n", " "), "it computes nothing anew"
    assert [row["passes"] for row in report["rows"]] == [None, True, True]
    if task == "ppl":
        done, report = evaluate(task, f"{line} --max_loss=1e-9")
        assert (done.code, [row["passes"] for row in report["rows"]]) == (1, [None, False, False])
        assert "is kept by none of: ca, keep 4; nkvt, keep 4" in done.out.replace("\n", " ")


def test_the_page_has_every_report_once_and_how_to_redo_it(evaluate, tmp_path):
    asked = (
        ("ppl", "--method=tt,ca:repair=none --window=128"),
        ("ppl", "--method=tt,nkvt --window=96"),
        ("ppl", "--method=ca:repair=none --window=256"),
        ("agreement", "--method=tt,ca:repair=none --window=128 --every=32"),
    )
    sizes = "--step_tokens=32 --max_tokens=200 --data=text.txt"
    reports = [evaluate(task, f"{line} {sizes}")[1] for task, line in asked]
    paths = [write(tmp_path / f"{nth}.json", report) for nth, report in enumerate(reports)]
    (tmp_path / "notes.md").write_text("## What it says\n\nMuch.")
    out = str(tmp_path / "page" / "quality.md")
    with flagsaver.flagsaver((quality_page._OUT, out), (quality_page._NOTES, str(tmp_path / "notes.md"))):
        flags.FLAGS.mark_as_parsed()
        quality_page.main(["quality_page", *map(str, paths)])
        with pytest.raises(SystemExit, match=r"error: .*must be a JSON file"):
            quality_page.main(["quality_page", str(tmp_path / "text.txt")])
    page = Path(out).read_text(encoding="utf-8").splitlines()
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
    text = " ".join(" ".join(page).split())
    assert all(text.count(" ".join(report["command"].split())) == 1 for report in reports)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting"),
        ("[]", "without task, model"),
        ('{"task": "ppl"}', "without model, dtype"),
        (json.dumps(dict.fromkeys(quality_page.REQUIRED, "x")), "got .* of the task 'x'"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=f"must be a JSON file of launch.evaluate, .*{message}"):
        quality_page.read_report(tmp_path / "a.json")


def test_a_gate_of_coded_kv_says_which_is_good_enough_or_that_none_is(evaluate):
    done, report = evaluate("kv_gate", f"{KV} --bits=8,2 --max_loss=1")
    assert (done.code, "yes: perplexity at most 100% higher" in done.out) == (0, True)
    int8, fine, coarse = report["rows"]
    assert 0 <= int8["mean_kl"] < coarse["mean_kl"] > fine["mean_kl"]
    assert coarse["bits"] < fine["bits"] < int8["bits"]
    assert 0 <= coarse["same_greedy_tokens"] <= fine["same_greedy_tokens"] <= 32
    assert 0 <= coarse["same_greedy"] <= fine["same_greedy"] <= 1
    assert [row["passes"] for row in report["rows"]] == [row["loss_interval"][1] <= 1 for row in report["rows"]]
    none = {**report, "rows": [{**row, "passes": False} for row in report["rows"]]}
    assert tables.kv_verdict(none) == "no: " + (
        "perplexity at most 100% higher, with its confidence interval, is kept by none of int8, 8 bits, 2 bits"
    )
    done = run_script("evaluate", "--task=kv_gate", *shlex.split(KV), "--codecs=none.npz", "--bits=")
    assert done.code == 1
    assert "none.npz" in done.err
