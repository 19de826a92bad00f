"""The page of the paper's figures: every row of what was measured, and every word that was written, once."""

import json
from pathlib import Path

import pytest

from tools import paper_page

NOTES = """# Title

What it is.

## 13

Why ours is higher.

## replay

What was served.

## What was tried

Everything.
"""
MACHINE = {"cpu": "AMD EPYC", "cores": 2, "memory_gib": 23.5, "device": "cpu", "platform": "cpu"}
FIGURES = {
    "command": "python -m x --figure=13",
    "num_turns": 52000,
    "elapsed_s": 41.2,
    "machine": MACHINE,
    "rows": [
        {"figure": "13", "case": "a", "metric": "hit rate", "unit": "%", "ours": 0.9, "paper": 0.75, "ratio": 1.2},
        {"figure": "16", "case": "b", "metric": "GPU time", "unit": "x", "ours": 3.0, "paper": None, "ratio": None},
    ],
}
SUMMARY = {
    "turns": 9,
    "returning_turns": 7,
    "hit_rate": 0.5,
    "loaded_tokens": 100,
    "prefill_tokens": 2000,
    "totals": {"prefill_s": 3.25, "elapsed_s": 8.5},
    "ttft_s": {"mean": 1.0, "p50": 0.5, "p90": 2.0, "p99": 4.0},
}
REPLAY = {"command": "python -m replay", "machine": MACHINE, "runs": [{"name": "stored", "summary": SUMMARY}]}
AGREEMENT = {
    "engine_hit_rate": 0.731,
    "simulated_hit_rate": 0.716,
    "hit_rate_points": -1.5,
    "engine_prefill_tokens": 1000,
    "simulated_prefill_tokens": 990,
    "prefill_tokens_ratio": 0.99,
}
CHECK = {"command": "python -m check", "machine": MACHINE, "policies": {"lru": {"agreement": AGREEMENT}}}


def test_every_figure_has_its_table_its_plot_and_its_words():
    page = "\n".join(paper_page.lines(paper_page.sections(NOTES), FIGURES, REPLAY, CHECK))
    assert page.startswith("# Title\n\nWhat it is.\n\n`python -m x --figure=13`: 52,000 turns in 41 s")
    first, second = page.index("## Figure 13: hit rates"), page.index("## Figure 16: GPU time")
    assert "| a | hit rate | 90.0 % | 75.0 % | 1.20 |" in page[first:second]
    assert "![Figure 13](paper/figure_13.png)\n\nWhy ours is higher." in page[first:second]
    assert "| b | GPU time | 3 x |  |  |" in page[second:]
    assert page.index("What was served.") < page.index("## The simulator against the engine")
    assert "| lru | 73.1 % | 71.6 % | -1.50 | 1,000 | 990 | -1.00 % |" in page
    assert "| TTFT p99 | 4 s |" in page
    assert page.count("## What was tried\n\nEverything.") == 1
    assert page.count("## 13") == page.count("## replay") == 0


def test_the_page_is_of_what_the_repository_holds():
    results = Path(__file__).resolve().parent.parent / "results"
    if not (results / "paper" / "figures.json").exists():
        pytest.skip("the figures were not made here")
    notes = paper_page.sections((results / "paper" / "notes.md").read_text(encoding="utf-8"))
    reports = [json.loads((results / f"{each}.json").read_text()) for each in ("paper/figures", "replay")]
    check = json.loads((results / "replay_vs_simulator.json").read_text())
    page = "\n".join(paper_page.lines(notes, *reports, check))
    assert page == (results / "paper.md").read_text(encoding="utf-8")
