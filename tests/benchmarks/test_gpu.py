"""The accelerator's benchmark on any backend, with a tiny model: what it counts, runs, leaves and skips."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import jax
import pytest

from benchmarks import figures
from benchmarks.gpu import model as models
from benchmarks.gpu import paper, sections, tuning
from benchmarks.gpu.kernels import Case
from benchmarks.gpu.model import compute_bytes, prefill_flops
from benchmarks.gpu.report import make_report, to_markdown
from benchmarks.gpu.rows import Findings, Floor, GpuBenchConfig, SectionResult
from benchmarks.peers import PEER_PACKAGES
from ca_jax.launch.machine import describe_machine
from ca_jax.models.gpu_attention import DECODING
from tests import engine_kit as kit
from tests.scripts_kit import run_script

TINY = dataclasses.replace(
    GpuBenchConfig.small(),
    matmul_size=64,
    memory_mib=1,
    transfer_mib=1,
    prefill_tokens=64,
    batch_size=2,
    context_tokens=40,
    decode_steps=1,
    history_tokens=(40, 70),
    new_tokens=10,
    chunk_tokens=64,
    figure18_prompt_tokens=64,
    figure18_history_tokens=(32,),
    figure18_read_buffers=(0, 1),
    figure19_history_tokens=64,
    figure19_read_buffers=(0, 1),
    figure20_prompt_tokens=(40,),
    figure20_answer_tokens=2,
    repeats=1,
)

# What is counted.


def test_work_is_counted_as_it_would_be_by_hand():
    """3 layers of wq, wo 64x64, wk, wv 64x32, three of 64x128 and two norms of 64; head and table 64x256."""
    model = kit.tiny_model()
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    pairs = 1 + 2 + 3 + 4 + 5
    assert prefill_flops(model, 5) == 2 * 5 * 3 * layer + 2 * 64 * 256 + 4 * pairs * 3 * 64
    assert compute_bytes(model) == 4 * (3 * layer + 64 * 256)


# What is measured.


def test_all_sections_measure_what_was_asked_for_with_one_model_at_a_time(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(models, "random_model", lambda preset, **_: made.append(preset) or kit.tiny_model())
    bench = sections.GpuBench(dataclasses.replace(TINY, overlap_preset="smollm2-360m"), lambda *_: None)
    results = sections.run_sections(bench, sections.SECTIONS, budget_s=1e6, after_each=lambda *_: None)
    assert [(result.name, result.status) for result in results] == [(each.name, "done") for each in sections.SECTIONS]
    assert made == ["smollm2-135m", "smollm2-360m"]
    found = {result.name: result.findings for result in results}
    rows = {name: findings.rows for name, findings in found.items()}

    probes = bench.probes
    assert min(rate for rate in dataclasses.asdict(probes).values() if rate is not None) > 0
    assert (probes.to_device_pageable_bytes_per_s is None) == (jax.default_backend() == "cpu")
    assert rows["probes"][0] == {"probe": "matmul", "rate": probes.matmul_flops_per_s / 1e12, "unit": "TFLOP/s"}
    assert len(rows["probes"]) == len(dataclasses.fields(probes))

    (row,) = rows["prefill"]
    flops_per_s = prefill_flops(kit.tiny_model(), 64) / row["prefill_s"]
    assert row["share_of_matmul_peak"] == pytest.approx(flops_per_s / probes.matmul_flops_per_s)
    (row,) = rows["decode"]
    kv_bytes = 2 * 44 * kit.TOKEN_BYTES
    assert (row["rows"], row["context_tokens"], row["recompiles"]) == (2, 40 + 2 + 1 + 1, 0)
    read_s = (compute_bytes(kit.tiny_model()) + kv_bytes) / probes.memory_read_bytes_per_s
    assert (row["kv_gb"], row["roofline_s"]) == (kv_bytes / 1e9, pytest.approx(read_s))

    cases = {row["case"]: row for row in rows["kernels"]}
    assert [*cases][:2] == ["2 x 1 over 40", "8 x 1 over 80"]
    assert all(row["relative_error"] < 1e-4 and row["attend_s"] > 0 for row in cases.values())
    row = cases["1 x 10 over 70"]
    pairs, heads, size = sum(range(71, 81)), (9, 3), 64
    assert row["tflop_per_s"] * row["attend_s"] * 1e12 == pytest.approx(4 * pairs * heads[0] * size)
    assert row["read_gb_per_s"] * row["attend_s"] * 1e9 == pytest.approx(2 * 80 * heads[1] * size * 4)

    has_peer = all(map(importlib.util.find_spec, PEER_PACKAGES["transformers"]))
    assert [row["what"] for row in rows["transformers"]] == has_peer * ["prefill of 64", "decode step, 2 rows of 40"]
    for row in rows["transformers"]:
        assert row["ratio"] == pytest.approx(row["transformers_s"] / row["ours_s"])
    for floor in found["transformers"].floors:
        assert floor.value < 1e-4, "both compute the same"
    assert all((row["transformers_recompute_s"] is not None) == has_peer for row in rows["ttft"])

    assert all(row["same_tokens"] and not row["recompiles"] for row in rows["ttft"])
    assert [row["kv_gb"] for row in rows["ttft"]] == [num * kit.TOKEN_BYTES / 1e9 for num in (40, 70)]
    link, ttft = found["ttft"].floors
    assert link.value == min(row["share_of_link"] for row in rows["ttft"])
    assert (ttft.value, ttft.is_ceiling) == (max(row["ttft_vs_bound"] for row in rows["ttft"]), True)

    assert [row["read_buffer"] for row in rows["figure_18"]] == ["off", "0", "1", "all", "recompute"]
    changes = {row["read_buffer"]: (row["change"], row["paper_change"]) for row in rows["figure_19"]}
    assert changes["off"] == (0.0, None)
    assert changes["0"][1] == -0.35
    (row,) = rows["figure_20"]
    assert row["change"] == pytest.approx(row["async_s"] / row["blocking_s"] - 1)
    for name, panel in paper.PANELS.items():
        assert all(row["same_tokens"] for row in rows[name])
        figures.plot(tmp_path / f"{name}.png", [panel], rows[name], title="t", caption="c")
        assert (tmp_path / f"{name}.png").stat().st_size > 0


def test_tilings_of_the_kernel_are_timed_beside_its_own(monkeypatch):
    refused = DECODING._replace(num_programs=0)
    monkeypatch.setattr(tuning, "_others", lambda own, _: [own._replace(key_tile=1024), refused])
    monkeypatch.setattr(tuning, "cases_of", lambda config: [Case(20, 1, 2, {"one_each": True}), Case(0, 10, 1)])
    found = tuning.measure_tuning(TINY, interpret=True)
    assert [row["case"] for row in found.rows] == 2 * ["2 x 1 over 20"] + 2 * ["1 x 10 over 0"]
    assert {row["key_tile"] for row in found.rows} == {1024, 2048}
    assert [row["ratio"] for row in found.rows if row["is_own"]] == [1, 1]
    assert [note.partition(" were refused")[0] for note in found.notes[1:]] == [
        "2 x 1 over 20: 1 of 3",
        "1 x 10 over 0: 1 of 3",
    ]


# What is run and what is left.


def test_what_would_not_end_in_time_is_skipped_and_what_breaks_does_not_end_the_others():
    now_s, seen = 100.0, []

    def section(name: str, needs_s: float, takes_s: float, error: Exception | None = None):
        def run(bench: object) -> Findings:
            nonlocal now_s
            now_s += takes_s
            if error is not None:
                raise error
            return Findings(rows=[{"name": name}])

        return sections.Section(name, name.upper(), needs_s, run)

    made = [
        section("first", 0, 7),
        section("broken", 5, 2, RuntimeError("out of memory")),
        section("too long", 12, 9),
        section("short", 11, 11),
        section("late", 1, 1),
    ]
    results = sections.run_sections(
        None, made, budget_s=20, after_each=lambda so_far: seen.append(len(so_far)), clock=lambda: now_s
    )
    assert [(result.name, result.status, result.seconds) for result in results] == [
        ("first", "done", 7),
        ("broken", "failed", 2),
        ("too long", "skipped", 0),
        ("short", "done", 11),
        ("late", "skipped", 0),
    ]
    assert results[1].findings.notes == ["RuntimeError: out of memory"]
    assert results[2].findings.notes == ["needs 12 s, got 11 s left"]
    assert seen == [1, 2, 3, 4, 5]


def test_the_hardware_is_run_in_any_case_and_unknown_sections_are_refused():
    assert [each.name for each in sections.choose_sections(["decode"])] == ["probes", "decode"]
    assert sections.choose_sections([]) == list(sections.SECTIONS)
    with pytest.raises(ValueError, match=r"sections must be some of probes, kernels, prefill, .*; got nothing"):
        sections.choose_sections(["nothing"])


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_the_page_has_floors_where_there_is_an_accelerator(platform):
    floors = [Floor(what="decode", value=0.7511, bound=0.7), Floor(what="ttft", value=2, bound=1, is_ceiling=True)]
    findings = Findings(rows=[], floors=floors)
    done = SectionResult(name="decode", title="Decoding", status="done", seconds=3.0, findings=findings)
    about = {"machine": {**describe_machine(), "platform": platform}, "versions": {}, "command": "it", "budget_s": 420}
    page = to_markdown(make_report(TINY, [done], None, about))
    of_floors = ("| decode | 0.751 | at least 0.7 | yes |", "| ttft | 2 | at most 1 | **no** |")
    assert [line in page for line in of_floors] == [platform == "gpu"] * 2


def test_the_command_writes_what_it_has(tmp_path):
    made = tmp_path / "made"
    files = (f"--json_out={made / 'it.json'}", f"--markdown_out={made / 'it.md'}", f"--plot_out={made / 'it.png'}")
    done = run_script("gpu_bench", *files, "--small", "--repeats=1", "--sections=ttft", "--budget_s=1")
    assert done.code == 0, done.err
    report = json.loads((made / "it.json").read_text(encoding="utf-8"))
    assert [(each["name"], each["status"]) for each in report["sections"]] == [("probes", "done"), ("ttft", "skipped")]
    assert report["probes"]["matmul_flops_per_s"] > 0
    assert report["command"].endswith("--sections=ttft --budget_s=1")
    assert "**Skipped.**" in (made / "it.md").read_text(encoding="utf-8")
    assert not (made / "it.png").exists(), "there is no figure to draw"
