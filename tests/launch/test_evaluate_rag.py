"""The evaluation of prompts made of chunks from the command line: flags, tables, figures, turns of an engine, exits."""

import io
import json
from pathlib import Path

import pytest
import rich.console

from ca_jax.evaluation.rag_schema import BASELINES, Blends, Chunking, GateConfig, RagConfig
from ca_jax.launch import evaluate_plots, evaluate_tables
from tests.evaluation.rag_kit import INSTRUCTION, ITEMS, write
from tests.launch.evaluate_kit import launch, parse, run

SCRIPT = "ca_jax.launch.evaluate"
SMALL = ("--num_chunks=3", "--chunk_tokens=48", f"--instruction={INSTRUCTION}")


@pytest.fixture(scope="module")
def items(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("rag") / "items.json", ITEMS)


def shown(report: dict) -> str:
    output = io.StringIO()
    evaluate_tables.print_report(report, rich.console.Console(file=output, width=220))
    return output.getvalue()


# Flags.


def test_without_flags_configs_have_their_defaults():
    assert parse("--task=rag") == RagConfig()
    assert parse("--task=blend_gate", "--data=a") == GateConfig(chunking=Chunking(data="a"))


def test_flags_are_fields():
    assert parse(
        *(
            "--task=rag",
            "--data=a",
            "--num_chunks=4",
            "--chunk_tokens=64",
            "--max_items=3",
            "--instruction=? {question}",
        ),
        *("--ratios=0.1,0.2", "--selections=first,hkvd", "--other_ratios=0.2", "--check_layers=2", "--positions=1"),
        *("--seed=5", "--baselines=reuse", "--answer_tokens=0", "--summary_tokens=9", "--figure=17", "--timed_items=2"),
        *("--repeats=1", "--chunk_counts=2,4", "--chunk_lengths=8", "--storage_gb_s=0.5"),
    ) == RagConfig(
        chunking=Chunking(data="a", num_chunks=4, chunk_tokens=64, max_items=3, instruction="? {question}"),
        blends=Blends(
            ratios=(0.1, 0.2),
            selections=("first", "hkvd"),
            other_ratios=(0.2,),
            check_layers=2,
            positions=1,
            seed=5,
        ),
        baselines=("reuse",),
        answer_tokens=0,
        summary_tokens=9,
        figure=17,
        timed_items=2,
        repeats=1,
        chunk_counts=(2, 4),
        chunk_lengths=(8,),
        storage_gb_s=(0.5,),
    )
    assert parse("--task=rag", "--baselines=").baselines == ()


def test_a_bound_in_nats_takes_the_place_of_the_share_unless_both_are_given():
    alone, both = (
        parse("--task=blend_gate", "--max_kl=0.2"),
        parse(*("--task=blend_gate", "--max_kl=0.2", "--max_kl_share=1")),
    )
    assert (alone.max_kl, alone.max_kl_share) == (0.2, None)
    assert (both.max_kl, both.max_kl_share) == (0.2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task=rag", "--ratios=a"], "ratios must be numbers with commas between them, got 'a'"),
        (["--task=rag", "--ratios=2"], "ratios"),
        (
            ["--task=rag", "--chunk_counts=1.5"],
            "chunk_counts must be whole numbers with commas.*'1.5'",
        ),
        (["--task=rag", "--storage_gb_s=0"], "storage_gb_s"),
        (["--task=rag", "--repeats=0"], "repeats .*at least 1"),
        (["--task=rag", "--figure=9"], "figure must be one of 6, 7, 8, 12, 15, 16, 17; got 9"),
        (["--task=rag", "--baselines=peer"], f"baselines .*{', '.join(BASELINES)}; .*'peer'"),
        (["--task=rag", "--max_kl=1"], "max_kl must be of one of the tasks blend_gate; got rag"),
        (["--task=rag", "--window=128"], "window must be of one of the tasks ppl, longeval, mmlu, agreement; got rag"),
        (["--task=blend_gate", "--figure=6"], "figure must be of one of the tasks rag; got blend_gate"),
        (["--task=blend_gate", "--plot_out=a.png"], "plot_out must be of one of the tasks ppl, rag; got blend_gate"),
        (["--task=ppl", "--data=a", "--ratios=1"], "ratios must be of one of the tasks rag, blend_gate; got ppl"),
        (["--task=ppl"], "data must be what ppl reads, got none"),
    ],
)
def test_bad_flags_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(*arguments)


def test_a_gate_needs_no_file():
    assert parse("--task=blend_gate", json_out=None) == GateConfig()
    with pytest.raises(ValueError, match="json_out must be a file for what rag gives, got none"):
        parse("--task=rag", json_out=None)


# Reports.


def test_methods_are_told_and_drawn(items, tmp_path):
    report = run("rag", f"--data={items}", *SMALL, "--ratios=0.5,1", "--selections=hkvd,first", "--answer_tokens=3")
    table = shown(report)
    assert "rag, items.json" in table
    assert "3 items, up to 3 chunks of up to 48 tokens" in table
    for row in report["rows"]:
        assert row["name"] in table
    assert f"{report['rows'][2]['mean_kl']:.4f}" in table
    assert evaluate_tables.SMALL_MODEL_REMARK.split(":")[0][:60] in table
    markdown = evaluate_tables.to_markdown(report).splitlines()
    assert sum(line.startswith("|") for line in markdown) == 2 + len(report["rows"])
    assert markdown[2].startswith("| method | computed tokens | KL, nats |")
    evaluate_plots.plot_rag(tmp_path / "new" / "a.png", report, caption="tiny")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("figure", [6, 7, 8])
def test_figures_of_deviation_are_told_and_drawn(items, tmp_path, figure):
    report = run("rag", f"--data={items}", *SMALL, "--ratios=0.5", f"--figure={figure}")
    assert f"figure {figure}, items.json" in shown(report)
    assert "3 items" in shown(report)
    evaluate_plots.plot_rag(tmp_path / "a.png", report, caption="tiny")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


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
    assert {row["recomputed_tokens"] for row in report["rows"] if row["ratio"]} == {64}, (
        "half, but all in one layer of 3"
    )
    assert "0.01 GB/s" in shown(report)
    assert "medians of 1 turns of each of up to 2 items" in shown(report)
    evaluate_plots.plot_rag(tmp_path / "a.png", report, caption="tiny")


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
    evaluate_plots.plot_rag(tmp_path / "a.png", report, caption="tiny")


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
    evaluate_plots.plot_rag(tmp_path / "a.png", report, caption="tiny")


def test_a_gate_says_from_which_ratio_on_its_bound_is_kept(items):
    report = run("blend_gate", f"--data={items}", *SMALL, "--ratios=0.5,1", "--max_kl_share=0.01")
    assert "yes: KL to full recompute at most 0.01 of full reuse's, " in shown(report)
    assert "is kept from ratio 1 on, hkvd" in shown(report)
    report["rows"] = report["rows"][:2]
    assert "no: " in shown(report)
    assert "is kept by no ratio of 0, 0.5" in evaluate_tables.verdict(report)


# The command itself.


def test_a_gates_exit_says_whether_a_ratio_will_do(tiny_model, items, tmp_path):
    asked = ("--task=blend_gate", f"--model={tiny_model}", f"--data={items}", *SMALL, "--max_kl_share=0.01")
    out = tmp_path / "gate.json"
    done = launch(SCRIPT, *asked, "--ratios=0.5", f"--json_out={out}", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 0)
    assert "no: KL to full recompute" in done.stdout
    assert [row["passes"] for row in json.loads(out.read_text())["rows"]] == [False, False], "written all the same"
    done = launch(SCRIPT, *asked, "--ratios=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "written to" not in done.stdout
    assert "yes: KL to full recompute" in done.stdout


def test_a_figure_is_written_where_it_is_asked_for(tiny_model, items, tmp_path):
    plot = tmp_path / "new" / "8.png"
    asked = (f"--model={tiny_model}", f"--data={items}", *SMALL, f"--json_out={tmp_path / '8.json'}")
    done = launch(SCRIPT, "--task=rag", "--figure=8", *asked, f"--plot_out={plot}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert str(plot) in done.stdout.replace("\n", "")
    done = launch(SCRIPT, "--task=rag", *asked, "--data=none.json", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 0)
    assert "none.json: No such file" in done.stderr
