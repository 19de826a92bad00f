"""The page of the server's figures: every table of what was measured, what was not, and the words, each once."""

import json

import pytest

from tools import server_page
from tools.paper_page import RESULTS, sections

NOTES = "# Title\n\nWhat it is.\n\n## overhead\n\nHow it was timed.\n\n## Killed\n\nWhat came back.\n"
MACHINE = {
    **{"cpu": "AMD EPYC", "cores": 2, "memory_gib": 23.5, "device": "cpu", "platform": "cpu", "num_devices": 1},
    "date": "2026-11-22T10:00:00+00:00",
}
OVERHEAD = {
    "machine": MACHINE,
    "versions": {"python": "3.11", "jax": None},
    "request_ms": {"http": 3.5, "engine": 1.25},
    "request_overhead_ms": 2.25,
    "stream_token_ms": {"http": 0.175, "engine": 0.075},
    "stream_token_overhead_ms": 0.1,
    "num_streams": 8,
}


def test_what_was_measured_is_shown_and_what_was_not_is_named():
    page = list(server_page.lines(sections(NOTES), {"overhead": OVERHEAD}))
    assert "AMD EPYC, 2 cores, 24 GiB, 2026-11-22; python 3.11." in page
    assert "| a request of one token | 1.25 ms | 3.50 ms | **2.25 ms** | 3 ms |" in page
    assert page.count("Not measured.") == len(server_page.SECTIONS) - 1
    assert page.index("How it was timed.") < page.index("## Fuzzed") < page.index("## Killed")
    for words in ("What it is.", "How it was timed.", "What came back."):
        assert "\n".join(page).count(words) == 1


def test_a_report_that_lacks_something_is_told_by_name():
    lacking = {key: value for key, value in OVERHEAD.items() if key != "num_streams"}
    with pytest.raises(ValueError, match=r"overhead.json must be num_streams"):
        list(server_page.lines(sections(NOTES), {"overhead": lacking}))


def test_the_page_is_of_the_reports_beside_it():
    """Also says that every table is made of a report as its tool writes it."""
    notes = sections((RESULTS / "server" / "notes.md").read_text(encoding="utf-8"))
    reports = server_page.read(RESULTS)
    assert set(reports) == set(server_page.SECTIONS)
    assert (RESULTS / "server.md").read_text(encoding="utf-8") == "\n".join(server_page.lines(notes, reports))
    assert all(json.dumps(report["versions"]) for report in reports.values())
