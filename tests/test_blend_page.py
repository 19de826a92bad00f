"""The page of CacheBlend's figures: every table of what was measured, what was not, and the words, each once."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.evaluate import tables as evaluate_tables
from benchmarks.suites.blend import BlendRow
from benchmarks.suites.blend_throughput import BlendThroughputRow
from tools import blend_page
from tools.paper_page import sections

NOTES = """# Title

What it is.

## ttft

How it was timed.

## 6

What falls.

## What was tried

Everything.
"""
COMMON = {
    "model": "tiny",
    "dtype": "float32",
    "machine": {
        **{"cpu": "AMD EPYC", "cores": 2, "memory_gib": 23.5, "device": "cpu", "platform": "cpu", "load_1m": 0.1},
        "date": "2026-11-22T10:00:00+00:00",
    },
    "versions": {"python": "3.11", "jax": "0.10.2"},
    "startup": {"other_load_share": 0.01},
}
CHUNKING = {"data": "build/rag/items.json", "num_chunks": 6, "chunk_tokens": 512}


def filled(columns, row):
    """A row with a number in every field that a table reads, but for those given."""
    return {**dict.fromkeys(columns, 1.0), **row}


def bench_row(kind, **row):
    return filled([field.name for field in dataclasses.fields(kind)], row)


class AnyField(dict):
    """A row that has whatever a table asks it for."""

    def __missing__(self, name):
        return [0.5] * 101 if name == "percentiles" else (0.25, 0.75) if "interval" in name or "quart" in name else 0.5


def rag_report(figure, rows):
    config = {"chunking": CHUNKING, "figure": figure, "repeats": 3, "timed_items": 5}
    command = f"python -m evaluate --figure={figure}"
    return {**COMMON, "task": "rag", "command": command, "config": config, "rows": [AnyField(row) for row in rows]}


TTFT_ROWS = [
    bench_row(BlendRow, mode="recompute", tier=None, recompute_ratio=None, ttft_s=6.0),
    bench_row(BlendRow, mode="prefix", tier="dram", recompute_ratio=None, ttft_s=5.0),
    bench_row(BlendRow, mode="blend", tier="dram", recompute_ratio=0.15, ttft_s=2.0, speedup=3.01, over_ideal=1.1),
    bench_row(BlendRow, mode="blend", tier="ssd", recompute_ratio=0.15, ttft_s=2.5, speedup=2.4, over_ideal=1.4),
]
STREAM_ROWS = [
    bench_row(BlendThroughputRow, mode="blend", dram_share=0.4, ssd_share=0.8, speedup=3.2, speedup_over_prefix=2.71)
]
QUALITY_ROWS = [
    {"name": "full recompute", "method": "recompute", "ratio": None, "selection": None, "f1": 0.05, "num_items": 50},
    {"name": "full reuse", "method": "reuse", "ratio": None, "selection": None, "f1": 0.03, "num_items": 50},
    {
        **{"name": "blend 0.15", "method": "blend", "ratio": 0.15, "selection": "hkvd", "f1": 0.045},
        **{"num_items": 50, "kl_share": 0.47},
    },
    {
        **{"name": "blend 0.15, random", "method": "blend", "ratio": 0.15, "selection": "random", "f1": 0.02},
        **{"num_items": 50, "kl_share": 0.9},
    },
]
GATE = {"max_kl_share": 0.55, "max_kl": None, "chunking": CHUNKING}


@pytest.fixture
def reports():
    made = {
        "bench_blend": {
            **COMMON,
            "suite": "blend",
            "peer": None,
            "command": "bench 1",
            "config": {},
            "rows": TTFT_ROWS,
        },
        "bench_blend_throughput": {
            **{**COMMON, "suite": "blend_throughput", "peer": None, "command": "bench 2", "config": {}},
            "rows": STREAM_ROWS,
        },
        "blend/gate": {**COMMON, "task": "blend_gate", "command": "gate", "config": GATE},
    }
    made["blend/gate"]["rows"] = [AnyField(ratio=0.15, selection="hkvd", passes=True, num_items=16)]
    for tokens in (256, 512):
        made[f"blend/quality_{tokens}"] = rag_report(None, QUALITY_ROWS)
    for figure in (6, 7, 8, 12, 15, 16, 17):
        row = {
            "name": f"row of {figure}",
            "selection": f"row of {figure}",
            "layer": 3,
            "storage": "dram",
            "num_items": 9,
        }
        made[f"blend/figure_{figure}"] = rag_report(figure, [row])
    return copy.deepcopy(made)


def page_of(reports, plots=()):
    return "\n".join(blend_page.lines(sections(NOTES), reports, plots))


def test_every_report_has_its_table_its_plot_and_its_words(reports):
    page = page_of(reports, ["blend/ttft.png", "blend/figure_6.png", "blend/quality_512.png"])
    assert page.startswith("# Title\n\nWhat it is.\n\n## In short\n")
    for title in blend_page.REPORTS.values():
        assert page.count(f"\n## {title}\n") == 1
    assert "Not measured" not in page
    for report in reports.values():
        assert f"`{report['command']}`: 2026-11-22, AMD EPYC, 2 cores, 24 GiB, 1% of it" in page
    assert "![Time to the first token](blend/ttft.png)\n\nHow it was timed." in page
    assert "![Figure 6: attention deviation by ratio](blend/figure_6.png)\n\nWhat falls." in page
    assert page.count(".png") == 3
    for figure in (6, 12, 15, 16, 17):
        assert f"| row of {figure} |" in page
    assert "| 3 and 4 |" in page
    assert "| 2,000.0 |" in page
    assert evaluate_tables.SMALL_MODEL_REMARK in page
    assert page.count("## What was tried\n\nEverything.") == 1
    for name in ("figure_12", "figure_17"):
        assert f"The paper: {blend_page.PAPER[f'blend/{name}']}" in page


def test_the_papers_numbers_stand_beside_ours(reports):
    rows = {what: (paper, ours) for what, paper, ours in blend_page.summary(reports) if not what.startswith("the same")}
    assert rows["TTFT from dram, 15% computed anew: times lower than full recompute"] == ("2.2 to 3.3", "3.01")
    assert rows["TTFT from ssd, 15% computed anew: times lower than full recompute"] == ("2.2 to 3.3", "2.40")
    stream = "turns a second over full recompute, DRAM of 40% and SSD of 80% of all chunks"
    assert rows[stream] == ("2.8 to 5", "3.20")
    quality = "chunks of 512 tokens, 15% computed anew, {}: KL to full recompute, share of full reuse's"
    assert rows[quality.format("hkvd")] == ("-", "0.47")
    assert rows[quality.format("random")] == ("-", "0.90")
    same = [(paper, ours) for what, paper, ours in blend_page.summary(reports) if what.startswith("the same")]
    assert ("3.4 to 6.1 (5 to 18 %)", "2.50") in same, "5.0 over 2.0"
    assert ("up to 3.3", "2.71") in same
    assert ("0.1 to 0.2", "+0.015") in same
    assert ("-0.02 to 0", "-0.005") in same


def test_what_was_not_measured_is_named(reports):
    del reports["blend/figure_17"], reports["bench_blend"]
    page = page_of(reports)
    missing = page.index("## Figure 17")
    assert "Not measured here." in page[missing : page.index("## What was tried")]
    assert page.count("Not measured here.") == 2
    assert "TTFT from dram" not in page


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "bench_blend",
            lambda report: report["rows"][2].update(recompute_ratio=0.3),
            "bench_blend.json must be a row of .*dram",
        ),
        ("bench_blend", lambda report: report["rows"][3].pop("fetch_s"), "bench_blend.json must be rows with fetch_s"),
        ("blend/quality_512", lambda report: report["rows"].pop(2), "quality_512.json must be a row of .*0.15"),
    ],
)
def test_a_report_that_lacks_what_the_page_needs_is_refused(reports, name, change, message):
    change(reports[name])
    with pytest.raises(ValueError, match=message):
        page_of(reports)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bench_blend", {"suite": "ttft"}, "bench_blend.json must be a report of blend, got one of ttft"),
        ("blend/figure_8", {"config": {"figure": 7}}, "figure_8.json must be a report of 8, got one of 7"),
        ("blend/quality_256", {"config": {"figure": 6}}, "quality_256.json must be a report of None, got one of 6"),
        ("blend/gate", {"task": "rag"}, "gate.json must be a report of blend_gate, got one of rag"),
        ("blend/gate", {"rows": []}, "gate.json must be a report with rows, got no rows"),
    ],
)
def test_a_file_that_is_another_report_is_refused(reports, tmp_path, name, change, message):
    (tmp_path / "blend").mkdir()
    (tmp_path / f"{name}.json").write_text(json.dumps({**reports[name], **change}))
    with pytest.raises(ValueError, match=message):
        blend_page.read(tmp_path)


def test_the_page_is_of_what_the_repository_holds():
    results = Path(__file__).resolve().parent.parent / "results"
    if not (results / "blend.md").exists():
        pytest.skip("the figures were not made here")
    notes = sections((results / "blend" / "notes.md").read_text(encoding="utf-8"))
    plots = [str(path.relative_to(results)) for path in (results / "blend").glob("*.png")]
    page = "\n".join(blend_page.lines(notes, blend_page.read(results), plots))
    assert page == (results / "blend.md").read_text(encoding="utf-8")
