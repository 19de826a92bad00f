"""The pages of results/: of the reports beside them; what was not measured is named; other reports are refused."""

import json

import pytest

from tools import accelerators_page, blend_page, cluster_page, paper_page, replicas_page, server_page
from tools.pages import RESULTS, read_json, read_notes

PAGES = {
    "paper": paper_page,
    "server": server_page,
    "blend": blend_page,
    "accelerators": accelerators_page,
    "cluster": cluster_page,
    "cluster/replicas": replicas_page,
}


@pytest.fixture
def reports():
    """Those of CacheBlend's page, to be changed."""
    return blend_page.read(RESULTS)


@pytest.fixture
def notes(tmp_path):
    """Words with a title, those of two sections, and those of a section of their own."""
    path = tmp_path / "notes.md"
    path.write_text(
        "# Title\n\nWhat it is.\n\n## ttft\n\nOf ttft.\n\n## overhead\n\nOf overhead.\n\n## Tried\n\nMuch.\n"
    )
    return read_notes(path)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_of_the_reports_beside_it(name):
    assert PAGES[name].page(RESULTS) == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_every_report_has_its_section_its_plot_and_its_words_and_what_was_not_measured_is_named(reports, notes):
    del reports["blend/figure_17"], reports["bench_blend_throughput"]
    page = blend_page.make_page(notes, reports, ["blend/ttft.png", "blend/figure_6.png", "blend/figure_17.png"])
    assert page.startswith("# Title\n\nWhat it is.\n\n## In short\n")
    assert all(page.count(f"\n## {title}\n") == 1 for title in blend_page.REPORTS.values())
    assert all(f"`{report['command']}`: " in page for report in reports.values())
    assert "![Time to the first token](blend/ttft.png)\n\nOf ttft." in page
    assert page.count("![") == 2
    assert "Not measured here." in page[page.index("## Figure 17") : page.index("## Tried")]
    assert page.count("Not measured here.") == 2
    assert page.count("## Tried\n\nMuch.") == page.count("Of overhead.") == 1


def test_what_was_not_measured_of_the_server_is_named(notes):
    report = read_json(RESULTS / "server" / "overhead.json")
    page = server_page.make_page(notes, {"overhead": report})
    assert page.count("Not measured.") == len(server_page.SECTIONS) - 1
    assert page.index("Of overhead.") < page.index("## Fuzzed") < page.index("## Tried")
    lacking = {key: value for key, value in report.items() if key != "num_streams"}
    with pytest.raises(ValueError, match=r"overhead.json must have num_streams"):
        server_page.make_page(notes, {"overhead": lacking})


def only(wanted):
    return lambda report: report.update(rows=[row for row in report["rows"] if wanted(row)])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bench_blend", only(lambda row: row["recompute_ratio"] != 0.15), "bench_blend.json must have a row of .*dram"),
        ("bench_blend", lambda report: report["rows"][-1].pop("fetch_s"), "must have rows with fetch_s"),
        ("blend/quality_512", only(lambda row: row["ratio"] != 0.15), "quality_512.json must have a row of .*0.15"),
        ("bench_blend", lambda report: report.update(suite="ttft"), "must be a report of blend, got one of ttft"),
        ("blend/figure_8", lambda report: report["config"].update(figure=7), "must be a report of 8, got one of 7"),
        ("blend/gate", lambda report: report.update(rows=[]), "gate.json must have rows .*, got no rows"),
    ],
)
def test_a_report_that_is_another_or_lacks_what_the_page_needs_is_refused(
    reports, notes, tmp_path, name, change, message
):
    change(reports[name])
    (tmp_path / "blend").mkdir()
    (tmp_path / f"{name}.json").write_text(json.dumps(reports[name]))
    with pytest.raises(ValueError, match=message):
        blend_page.make_page(notes, reports | blend_page.read(tmp_path), ())
