"""Reports as tables: every column is a field of its rows, and what a summary holds is readable."""

import dataclasses
import io

import pytest
import rich.console

from ca_jax.launch import bench_tables
from ca_jax.launch.bench_blend_schema import BlendRow, BlendThroughputRow
from ca_jax.launch.bench_overflow_schema import BookkeepingRow, ConversationsRow, GapRow, NextTurnRow
from ca_jax.launch.bench_overlap_schema import DepthRow, PreloadRow, SaveRow, StreamRow
from ca_jax.launch.bench_schema import DecodeRow, PrefillRow, ReuseRow, SourceTimes, TiersRow
from ca_jax.launch.bench_serving_schema import ThroughputRow, TtftRow
from ca_jax.launch.bench_storage_schema import DecisionRow, LoopRow, PrefixRow, StartupRow, StoreRow, TurnRow

ROWS = {
    "reuse": ReuseRow,
    "prefill": PrefillRow,
    "decode": DecodeRow,
    "tiers": TiersRow,
    "ttft": TtftRow,
    "throughput": ThroughputRow,
    "preload_turn": PreloadRow,
    "read_buffer": DepthRow,
    "save_turn": SaveRow,
    "stream": StreamRow,
    "blend": BlendRow,
    "blend_throughput": BlendThroughputRow,
    "conversations": ConversationsRow,
    "bookkeeping": BookkeepingRow,
    "decode_gap": GapRow,
    "next_turn": NextTurnRow,
    "store": StoreRow,
    "decision": DecisionRow,
    "startup": StartupRow,
    "prefix": PrefixRow,
    "turn": TurnRow,
    "loop": LoopRow,
}


def test_every_kind_of_row_has_columns_and_those_are_its_fields():
    assert bench_tables._COLUMNS.keys() == ROWS.keys()
    for kind, row_type in ROWS.items():
        fields = {field.name for field in dataclasses.fields(row_type)}
        if row_type is TiersRow:
            fields |= {field.name for field in dataclasses.fields(SourceTimes)} | {"source"}
        assert {name for _, name, _ in bench_tables._COLUMNS[kind]} <= fields, kind


SEVERAL_KINDS = (
    *(PreloadRow, DepthRow, SaveRow, StreamRow),
    *(ConversationsRow, BookkeepingRow, GapRow, NextTurnRow),
    *(DecisionRow, StartupRow, PrefixRow, TurnRow, LoopRow),
)


@pytest.mark.parametrize("row_type", SEVERAL_KINDS)
def test_rows_of_a_suite_with_several_kinds_say_which_they_are(row_type):
    assert ROWS[row_type.measured] is row_type


def printed(suite, rows, summary):
    output = io.StringIO()
    report = {
        "suite": suite,
        "model": "tiny",
        "dtype": "float32",
        "peer": None,
        "config": {"repeats": 3},
        "rows": rows,
        "summary": summary,
        "startup": {"other_load_share": 0.0, "engine_start_s": None},
        "machine": {"cpu": "a cpu"},
        "versions": {},
    }
    bench_tables.print_report(report, rich.console.Console(file=output, width=200))
    return output.getvalue()


def stream_row(overhead):
    row = StreamRow(
        prompt_tokens=500,
        answer_tokens=20,
        num_turns=6,
        stream_off_s=2.0,
        stream_on_s=2.5,
        overhead=overhead,
        same_tokens=False,
        recompiles=0,
        spread={"stream_on_s": (2.25, 2.75), "stream_off_s": (2.0, 2.0)},
    )
    return dataclasses.asdict(row)


def depth_row(ratio):
    times = {"rates_load_s": 0.1, "load_s": 0.1, "rates_compute_s": 0.1, "compute_s": 0.1}
    return dataclasses.asdict(DepthRow(load_ratio=ratio, by_rates=3, best=4, measured_best=5, noise=0.02, **times))


def test_rows_are_told_in_the_words_of_their_kind():
    text = printed("save", [stream_row(0.25)], {})
    assert "stream, tiny in float32: medians of 3" in text
    for cell in ("2,000.0", "2,500.0", "(2,250.0..2,750.0)", "+25.0%", "NO"):
        assert cell in text
    assert "(2,000.0" not in text, "all samples were the same"


def test_rows_of_one_kind_are_one_table_whatever_lies_between_them():
    text = printed("preload", [depth_row(0.5), stream_row(0.1), depth_row(2.0)], {})
    assert text.count("read_buffer, tiny") == 1
    assert text.index("0.50x") < text.index("2.00x") < text.index("stream, tiny")


def test_a_summary_is_a_table_of_its_own():
    summary = {"load_hidden": 0.91234, "worst": None, "same_tokens": True, "saved": {"all": 0.5, "15": 0.25}}
    lines = [line.split() for line in printed("save", [stream_row(0.0)], summary).splitlines()]
    assert ["load_hidden", "0.912"] in lines
    assert ["worst", "-"] in lines
    assert ["same_tokens", "yes"] in lines
    assert ["saved", "all", "0.5,", "15", "0.25"] in lines
