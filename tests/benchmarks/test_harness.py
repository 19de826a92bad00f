"""Rows, tables and figures follow from the suites' declarations; a suite is added in twenty lines."""

import dataclasses
import io
import json
import textwrap

import pytest
import rich.console

import benchmarks
from benchmarks import figures, harness, tables
from benchmarks.evaluate.agreement import AgreementConfig
from benchmarks.evaluate.comparison import Comparison
from benchmarks.evaluate.longeval import LongevalConfig
from benchmarks.evaluate.mmlu import MmluConfig
from benchmarks.evaluate.perplexity import PerplexityConfig
from benchmarks.evaluate.rag import GateConfig
from benchmarks.evaluate.rag_methods import Blends
from benchmarks.evaluate.stream import ComparedOverflow
from benchmarks.figures import Panel
from benchmarks.gpu.rows import GpuBenchConfig
from benchmarks.harness import SUITES, Row
from benchmarks.main import run_suite
from benchmarks.overflow_rows import OverflowBenchConfig
from benchmarks.replay.workload import ReplayedTrace, WorkloadConfig
from benchmarks.suites.blend import BlendBenchConfig
from benchmarks.suites.blend_throughput import BlendThroughputConfig
from benchmarks.suites.policy import PolicyBenchConfig
from benchmarks.suites.preload import PreloadConfig
from benchmarks.suites.reuse import DecodeConfig, ReuseConfig
from benchmarks.suites.save import SaveConfig
from benchmarks.suites.store import StoreBenchConfig
from benchmarks.suites.throughput import ThroughputConfig
from ca_jax.config import EngineConfig
from ca_jax.launch.simulate import SimulateConfig
from ca_jax.overflow.config import OverflowConfig

# Configs.

CA, TT = ComparedOverflow(), ComparedOverflow(method="tt")
KEEPS_60 = ComparedOverflow(keep_first_tokens=60)
SMALL = {"methods": (CA,), "window": 64, "step_tokens": 8}
COMPARING = {"comparison": Comparison(methods=(CA, TT)), "data": "a.txt"}
UNSIMULABLE = {"chars_per_token": 0.0, "max_turns": -1, "num_sessions": 0, "max_batch_size": 0, "window": 1}
UNSIMULABLE |= {"warmup_share": 1.0, "capacity_share": float("inf")}
OVERFLOW = {"engine": EngineConfig(overflow=OverflowConfig(), max_batch_size=2), "gap_sessions": (1, 2)}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (ReuseConfig, {"repeats": 0}, "repeats must be at least 1, got 0"),
        (DecodeConfig, {"batch_sizes": ()}, "batch_sizes must have at least one item"),
        (ThroughputConfig, {"context_window": 24, "num_turns": 3}, "context_window must be room for 3 turns of"),
        (PreloadConfig, {"preload_history_tokens": (500, 1000)}, "fewer than the 1000 preload_prompt_tokens"),
        (PreloadConfig, {"load_ratios": (1.0, float("inf"))}, "load_ratios must be a positive number, got inf"),
        (PreloadConfig, {"preload_history_tokens": (), "load_ratios": ()}, "something to measure, got none"),
        (SaveConfig, {"save_prompt_tokens": (), "save_ratios": (), "stream_turns": 0}, "to measure, got none in all"),
        (BlendBenchConfig, {"recompute_ratios": (0.1, 1.5)}, r"recompute_ratios must be a share in \[0, 1\], got 1.5"),
        (BlendThroughputConfig, {"stream_modes": ("blend", "best")}, "stream_modes must be some of .*; got best"),
        (BlendThroughputConfig, {"stream_chunks": 5}, "stream_chunks must be at least the 6 of a turn, got 5"),
        (OverflowBenchConfig, {**OVERFLOW, "gap_methods": ("ca", "ca")}, "gap_methods must not name one thing twice"),
        (OverflowBenchConfig, {**OVERFLOW, "conversation_tokens": 1040}, "conversation_tokens must be at least 1041"),
        (OverflowBenchConfig, {**OVERFLOW, "gap_sessions": (1, 3)}, "gap_sessions must be numbers from 1 to the"),
        (OverflowBenchConfig, {**OVERFLOW, "max_answer_tokens": 513}, "max_answer_tokens must be at most the 512"),
        (OverflowBenchConfig, {"engine": EngineConfig(overflow=None)}, "engine.overflow must be an OverflowConfig"),
        (StoreBenchConfig, {"store_gib": 0.0}, "store_gib must be room for at least one block of 5898240 bytes, got 0"),
        (PolicyBenchConfig, {"queue_depth": 0.0}, "queue_depth must be a share above 0, got 0.0"),
        (GpuBenchConfig, {"preset": "gpt-5"}, "preset must be one of .*llama3-8b.*, got 'gpt-5'"),
        (GpuBenchConfig, {"history_tokens": ()}, "history_tokens must have at least one item, got none"),
        (WorkloadConfig, {"num_sessions": 0}, "num_sessions must be at least 1, got 0"),
        (WorkloadConfig, {"max_answer_tokens": 1}, "max_answer_tokens must be at least 2"),
        (WorkloadConfig, {"think_time_s": float("nan")}, "think_time_s must be a number of at least 0"),
        (WorkloadConfig, {"think_time_distribution": "even"}, "think_time_distribution must be one of exponential"),
        (
            ReplayedTrace,
            {"trace_format": "parquet", "trace": "x"},
            "trace_format must be one of sharegpt, mooncake, ag",
        ),
        (ReplayedTrace, {"trace_format": "mooncake"}, "trace must be a file of the format mooncake"),
        (ReplayedTrace, {"length_scale": 0.0}, "length_scale must be a number above 0"),
        *((SimulateConfig, {name: value}, f"{name} must be") for name, value in UNSIMULABLE.items()),
        (Comparison, {"methods": ()}, "methods must be at least one, got none"),
        (Comparison, {"methods": (CA, CA)}, "methods must differ, got 'ca, keep 4, .*' more than once"),
        (Comparison, {**SMALL, "step_tokens": 65}, "step_tokens must be in .*, got step_tokens=65 and window=64"),
        (Comparison, {**SMALL, "methods": (KEEPS_60,)}, "got 60 and 8"),
        (
            AgreementConfig,
            {"comparison": Comparison(methods=(CA,))},
            "must have tt and a method to hold against it, got ca",
        ),
        (AgreementConfig, {"comparison": Comparison(methods=(TT,))}, "got tt, keep 4"),
        (AgreementConfig, {"every": 40}, "every must be a multiple of step_tokens, 128; got 40"),
        (PerplexityConfig, {"max_tokens": 1}, "max_tokens must be at least 2"),
        (LongevalConfig, {"form": "talk"}, "form must be one of continue, chat; got talk"),
        (LongevalConfig, {"max_items": 0}, "max_items must be at least 1, got 0"),
        (MmluConfig, {"num_shots": -1}, "num_shots must be a number of at least 0, got -1"),
        (GateConfig, {"max_kl": 0.0}, "max_kl must be a positive number, got 0.0"),
        (GateConfig, {"blends": Blends(selections=("hkvd", "first"))}, "selections must be one, got hkvd, first"),
    ],
)
def test_configs_refuse_what_cannot_be_measured(kind, changes, message):
    given = COMPARING if kind in (AgreementConfig, PerplexityConfig, LongevalConfig, MmluConfig) else {}
    with pytest.raises(ValueError, match=message):
        kind(**given | changes)


# Rows and rounds.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeRow(Row):
    """A row of everything that a row may have."""

    name: str
    """Given."""
    count: int
    """A median that is rounded."""
    work_s: float
    """A median."""
    other_s: float | None
    """None where no sample has it."""


def test_a_row_has_the_medians_of_its_samples_their_spread_and_the_sum_of_recompiles():
    taken = [
        {"work_s": 3.0, "count": 2, "recompiles": 1, "unknown": 7},
        {"work_s": 1.0, "count": 3},
        {"work_s": 2.0, "count": 9},
    ]
    row = harness.make_row(ProbeRow, taken, name="it")
    spread = {"work_s": (1.0, 3.0), "count": (2.0, 9.0)}
    assert row == ProbeRow(name="it", count=3, work_s=2.0, other_s=None, recompiles=1, spread=spread)
    with pytest.raises(TypeError, match="work_s"):
        harness.make_row(ProbeRow, [], name="it", count=1)


def test_rounds_are_interleaved_and_the_first_is_for_nothing():
    order, told = [], []

    def way(name):
        return lambda: order.append(name) or {"n": len(order)}

    ways = {name: way(name) for name in "abc"}
    rounds = harness.interleave(lambda: ways, 3, progress=lambda *call: told.append(call))
    assert "".join(order) == "abcbcacababc"
    assert [list(each) for each in rounds] == [["a", "b", "c"]] * 3
    assert [each["n"] for each in harness.of_way(rounds, "a")] == [6, 8, 10]
    assert (told, harness.recompiles(rounds)) == ([("rounds", done, 4) for done in range(5)], 0)
    assert not harness.same(rounds, "n")


def test_a_suite_is_added_in_twenty_lines(model):
    text = (benchmarks.__doc__ or "").split("runs it:\n")[1].split("\nWays that")[0]
    source = textwrap.dedent(text)
    assert len([line for line in source.splitlines() if line.strip()]) <= 20
    space = {"__name__": __name__}
    try:
        exec(compile(source, "tokenize", "exec"), space)
        kind = space["TokenizeConfig"]
        report = run_suite(
            SUITES["tokenize"], kind(num_words=(10, 20), repeats=2), load=lambda _: model, command="python"
        )
    finally:
        SUITES.pop("tokenize", None)
    assert [row["num_words"] for row in report["rows"]] == [10, 20]
    assert all(0 < row["encode_s"] <= row["spread"]["encode_s"][1] for row in report["rows"])
    assert (report["suite"], report["model"], report["summary"]) == ("tokenize", model.name, {"recompiles": 0})
    output = io.StringIO()
    tables.print_report(json.loads(json.dumps(report, allow_nan=False)), rich.console.Console(file=output))
    assert "encode ms" in output.getvalue()


def test_a_figure_of_no_rows_is_refused(tmp_path):
    panels = [Panel(title="none", x="size", y=("work_s",), only=("measured", "other"))]
    with pytest.raises(ValueError, match="rows must have something to draw, got none"):
        figures.plot(
            tmp_path / "it.png", panels, [{"size": 1, "work_s": 1.0, "measured": "turn"}], title="tiny", caption="here"
        )
