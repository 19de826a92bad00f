"""The pages of results/: every table of what was measured, what was not, and the words, each once; and that the pages
that the repository holds are those of its reports."""

import copy
import dataclasses
import json

import pytest

from benchmarks.evaluate import tables as evaluate_tables
from benchmarks.suites.blend import BlendRow
from benchmarks.suites.blend_throughput import BlendThroughputRow
from tools import blend_page, paper_page, server_page
from tools.pages import RESULTS, read_notes

MACHINE = {
    **{"cpu": "AMD EPYC", "cores": 2, "memory_gib": 23.5, "device": "cpu", "platform": "cpu", "num_devices": 1},
    **{"load_1m": 0.1, "date": "2026-11-22T10:00:00+00:00"},
}


@pytest.fixture
def notes(tmp_path):
    """Words with a title, those of sections, and those of another section."""

    def write(*sections):
        path = tmp_path / "notes.md"
        words = (f"## {name}\n\nOf {name}.\n" for name in (*sections, "What was tried"))
        path.write_text("\n".join(("# Title\n\nWhat it is.\n", *words)))
        return read_notes(path)

    return write


@pytest.mark.parametrize("page", [paper_page, server_page, blend_page])
def test_the_page_is_of_the_reports_beside_it(page):
    name = page.__name__.removeprefix("tools.").removesuffix("_page")
    if not (RESULTS / f"{name}.md").exists():
        pytest.skip("the figures were not made here")
    assert page.page(RESULTS) == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


# The paper's figures.


def figure_row(figure, case, metric, unit, ours, paper=None):
    row = {"figure": figure, "case": case, "metric": metric, "unit": unit, "ours": ours, "paper": paper}
    return {**row, "ratio": paper and ours / paper}


def figures(hits):
    rows = [figure_row("13", "a", "hit rate", "%", hits, 0.75), figure_row("22", "b", "GPU time", "x", 3.0)]
    command = f"python -m x --figure=13 --hits={hits}"
    return {"command": command, "num_turns": 52000, "elapsed_s": 41.2, "machine": MACHINE, "rows": rows}


SUMMARY = {
    **{"turns": 9, "returning_turns": 7, "hit_rate": 0.5, "loaded_tokens": 100, "history_tokens": 400},
    **{
        "prefill_tokens": 2000,
        "totals": {"prefill_s": 3.25, "elapsed_s": 8.5},
        "ttft_s": {"mean": 1.0, "p50": 0.5, "p90": 2.0, "p99": 4.0},
    },
}
AGREEMENT = {
    **{"engine_hit_rate": 0.731, "simulated_hit_rate": 0.716, "hit_rate_points": -1.5, "engine_prefill_tokens": 1000},
    **{"simulated_prefill_tokens": 990, "prefill_tokens_ratio": 0.99},
}
PAPER_REPORTS = {
    "paper/figures": figures(0.9),
    "paper/measured_characters": figures(0.93),
    "paper/own_prefill_time": figures(0.88),
    "replay": {"command": "python -m replay", "machine": MACHINE, "runs": [{"name": "stored", "summary": SUMMARY}]},
    "replay_vs_simulator": {
        **{"command": "python -m check", "machine": MACHINE, "policies": {"lru": {"agreement": AGREEMENT}}},
    },
}


def test_every_figure_has_its_table_its_plot_and_its_words(notes):
    page = paper_page.make_page(notes("13", "fits", "replay"), PAPER_REPORTS)
    assert page.startswith("# Title\n\nWhat it is.\n\n`python -m x --figure=13 --hits=0.9`: 52,000 turns in 41 s")
    first, second, fits = map(page.index, ("## Figure 13: hit rates", "## Figure 22: overflow", "## The two fits"))
    assert "| a | hit rate | 90.0 % | 75.0 % | 1.20 |" in page[first:second]
    assert "![Figure 13](paper/figure_13.png)\n\nOf 13." in page[first:second]
    assert "| b | GPU time | 3 x |  |  |" in page[second:fits]
    for line in (
        "as fitted | 90.0 %",
        "3.86 characters a token | 93.0 %",
        "0.6 of peak | 88.0 %",
        "the paper | 75.0 %",
    ):
        assert f"| a | {line} |" in page[fits:]
    assert "GPU time" not in page[fits:]
    assert page.index("Of replay.") < page.index("## The simulator against the engine")
    assert "| lru | 73.1 % | 71.6 % | -1.50 | 1,000 | 990 | -1.00 % |" in page
    assert "| tokens of histories loaded | 100, 25.0 % |" in page
    assert "| TTFT p99 | 4 s |" in page
    assert page.count("## What was tried\n\nOf What was tried.") == 1
    assert page.count("## 13") == page.count("## replay") == 0


# The server.

OVERHEAD = {
    **{"machine": MACHINE, "versions": {"python": "3.11", "jax": None}, "num_streams": 8},
    **{"request_ms": {"http": 3.5, "engine": 1.25}, "request_overhead_ms": 2.25},
    **{"stream_token_ms": {"http": 0.175, "engine": 0.075}, "stream_token_overhead_ms": 0.1},
}


def test_what_was_measured_of_the_server_is_shown_and_what_was_not_is_named(notes):
    page = server_page.make_page(notes("overhead", "Killed"), {"overhead": OVERHEAD})
    assert "AMD EPYC, 2 cores, 24 GiB, 2026-11-22; python 3.11." in page
    assert "| a request of one token | 1.25 ms | 3.50 ms | **2.25 ms** | 3 ms |" in page
    assert page.count("Not measured.") == len(server_page.SECTIONS) - 1
    assert page.index("Of overhead.") < page.index("## Fuzzed") < page.index("## Killed")
    assert all(page.count(words) == 1 for words in ("What it is.", "Of overhead.", "Of Killed."))
    lacking = {key: value for key, value in OVERHEAD.items() if key != "num_streams"}
    with pytest.raises(ValueError, match=r"overhead.json must have num_streams"):
        server_page.make_page(notes(), {"overhead": lacking})


# CacheBlend's figures.

COMMON = {
    **{"model": "tiny", "dtype": "float32", "machine": MACHINE, "versions": {"python": "3.11", "jax": "0.10.2"}},
    "startup": {"other_load_share": 0.01},
}
CHUNKING = {"data": "build/rag/items.json", "num_chunks": 6, "chunk_tokens": 512}


def bench_row(kind, **row):
    """A row with a number in every field that a table reads, but for those given."""
    return {**dict.fromkeys((field.name for field in dataclasses.fields(kind)), 1.0), **row}


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


def quality_row(name, method, f1, ratio=None, selection=None, **row):
    return {"name": name, "method": method, "ratio": ratio, "selection": selection, "f1": f1, "num_items": 50, **row}


QUALITY_ROWS = [
    quality_row("full recompute", "recompute", 0.05),
    quality_row("full reuse", "reuse", 0.03),
    quality_row("blend 0.15", "blend", 0.045, 0.15, "hkvd", kl_share=0.47),
    quality_row("blend 0.15, random", "blend", 0.02, 0.15, "random", kl_share=0.9),
]


@pytest.fixture
def reports():
    bench = {**COMMON, "peer": None, "config": {}}
    gate = {"max_kl_share": 0.55, "max_kl": None, "chunking": CHUNKING}
    made = {
        "bench_blend": {**bench, "suite": "blend", "command": "bench 1", "rows": TTFT_ROWS},
        "bench_blend_throughput": {**bench, "suite": "blend_throughput", "command": "bench 2", "rows": STREAM_ROWS},
        "blend/gate": {**COMMON, "task": "blend_gate", "command": "gate", "config": gate},
    }
    made["blend/gate"]["rows"] = [AnyField(ratio=0.15, selection="hkvd", passes=True, num_items=16)]
    for tokens in (256, 512):
        made[f"blend/quality_{tokens}"] = rag_report(None, QUALITY_ROWS)
    for figure in (6, 7, 8, 12, 15, 16, 17):
        named = f"row of {figure}"
        row = {"name": named, "selection": named, "layer": 3, "storage": "dram", "num_items": 9}
        made[f"blend/figure_{figure}"] = rag_report(figure, [row])
    return copy.deepcopy(made)


def test_every_report_has_its_table_its_plot_and_its_words(reports, notes):
    plots = ["blend/ttft.png", "blend/figure_6.png", "blend/quality_512.png"]
    page = blend_page.make_page(notes("ttft", "6"), reports, plots)
    assert page.startswith("# Title\n\nWhat it is.\n\n## In short\n")
    for title in blend_page.REPORTS.values():
        assert page.count(f"\n## {title}\n") == 1
    assert "Not measured" not in page
    for report in reports.values():
        assert f"`{report['command']}`: 2026-11-22, AMD EPYC, 2 cores, 24 GiB, 1% of it" in page
    assert "![Time to the first token](blend/ttft.png)\n\nOf ttft." in page
    assert "![Figure 6: attention deviation by ratio](blend/figure_6.png)\n\nOf 6." in page
    assert page.count(".png") == 3
    for wanted in (*(f"| row of {figure} |" for figure in (6, 12, 15, 16, 17)), "| 3 and 4 |", "| 2,000.0 |"):
        assert wanted in page
    assert evaluate_tables.SMALL_MODEL_REMARK in page
    assert page.count("## What was tried\n\nOf What was tried.") == 1
    for name in ("figure_12", "figure_17"):
        assert f"The paper: {blend_page.PAPER[f'blend/{name}']}" in page


def test_the_papers_numbers_stand_beside_ours(reports):
    rows = {what: (paper, ours) for what, paper, ours in blend_page.summary(reports) if not what.startswith("the same")}
    quality = "chunks of 512 tokens, 15% computed anew, {}: KL to full recompute, share of full reuse's"
    stream = "turns a second over full recompute, DRAM of 40% and SSD of 80% of all chunks"
    assert rows["TTFT from dram, 15% computed anew: times lower than full recompute"] == ("2.2 to 3.3", "3.01")
    assert rows["TTFT from ssd, 15% computed anew: times lower than full recompute"] == ("2.2 to 3.3", "2.40")
    assert rows[stream] == ("2.8 to 5", "3.20")
    assert (rows[quality.format("hkvd")], rows[quality.format("random")]) == (("-", "0.47"), ("-", "0.90"))
    same = [(paper, ours) for what, paper, ours in blend_page.summary(reports) if what.startswith("the same")]
    assert ("3.4 to 6.1 (5 to 18 %)", "2.50") in same, "5.0 over 2.0"
    assert {("up to 3.3", "2.71"), ("0.1 to 0.2", "+0.015"), ("-0.02 to 0", "-0.005")} <= set(same)


def test_what_was_not_measured_is_named(reports, notes):
    del reports["blend/figure_17"], reports["bench_blend"]
    page = blend_page.make_page(notes(), reports, ())
    assert "Not measured here." in page[page.index("## Figure 17") : page.index("## What was tried")]
    assert page.count("Not measured here.") == 2
    assert "TTFT from dram" not in page


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bench_blend", lambda rows: rows[2].update(recompute_ratio=0.3), "bench_blend.json must have a row of .*dram"),
        ("bench_blend", lambda rows: rows[3].pop("fetch_s"), "bench_blend.json must have rows with fetch_s"),
        ("blend/quality_512", lambda rows: rows.pop(2), "quality_512.json must have a row of .*0.15"),
    ],
)
def test_a_report_that_lacks_what_the_page_needs_is_refused(reports, notes, name, change, message):
    change(reports[name]["rows"])
    with pytest.raises(ValueError, match=message):
        blend_page.make_page(notes(), reports, ())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bench_blend", {"suite": "ttft"}, "bench_blend.json must be a report of blend, got one of ttft"),
        ("blend/figure_8", {"config": {"figure": 7}}, "figure_8.json must be a report of 8, got one of 7"),
        ("blend/gate", {"rows": []}, "gate.json must have rows and what made them, got no rows"),
    ],
)
def test_a_file_that_is_another_report_is_refused(reports, tmp_path, name, change, message):
    (tmp_path / "blend").mkdir()
    (tmp_path / f"{name}.json").write_text(json.dumps({**reports[name], **change}))
    with pytest.raises(ValueError, match=message):
        blend_page.read(tmp_path)
