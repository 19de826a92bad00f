"""What the samples of the suites of overlap come to, by hand; and what cannot be asked of them."""

import dataclasses
import math

import pytest

from ca_jax.kv import costs
from ca_jax.kv.rates import PrefillRate, Rates, TransferRate
from ca_jax.launch.bench_overlap_rows import (
    NOISE,
    PreloadCell,
    SaveCell,
    save_round,
    stream_round,
    summarize_preload,
    summarize_save,
)
from ca_jax.launch.bench_overlap_schema import PreloadBenchConfig, SaveBenchConfig, StreamRow
from ca_jax.launch.bench_schema import Samples

# preload


def sample(ttft_s: float, head_start_s: float = 10.0) -> dict[str, float]:
    return {"ttft_s": ttft_s, "head_start_s": head_start_s, "load_stall_s": 0.5, "load_s": 0.25}


def one_round(**ttft_s: float) -> list[dict[str, dict[str, float]]]:
    """A round of the ways of those names, and of read buffers `_0`, `_1`, ...; each takes that long."""
    return [{name.removeprefix("_"): sample(time_s) for name, time_s in ttft_s.items()}]


def cell_of(load_s: float, load_ratio: float | None = 2.0, **changes: object) -> PreloadCell:
    cell = PreloadCell(
        link="real" if load_ratio is None else "paced",
        load_ratio=load_ratio,
        history_tokens=100,
        new_tokens=10,
        num_layers=4,
        load_s=load_s,
        same_tokens=True,
        recompiles=0,
    )
    return dataclasses.replace(cell, **changes)


def test_ideals_and_what_is_hidden_by_hand() -> None:
    # Of 4 layers each is loaded in 2 s and computed in 1 s.
    (times,) = one_round(off=12.5, _0=9.9, _1=7.0, all=4.85, auto=4.0, recompute=20.0, compute=4.0)
    times["2"] = sample(7.0, head_start_s=3.0)
    rows = {row.read_buffer: row for row in cell_of(8.0).rows([times])}
    assert {name: row.ideal_s for name, row in rows.items()} == {
        "off": 12.0,
        "0": 9.0,  # L0 arrives at 2, L3 at 8.
        "1": 7.0,  # L0 is there, L1..L3 are loaded from 0 on.
        "2": 6.0,  # L0 arrives before 0 and L1 at 1: L2 and L3 by 5.
        "all": 4.0,
        "auto": 4.0,
        "recompute": None,
    }
    assert {name: row.ratio for name, row in rows.items()} == pytest.approx(
        {"off": 12.5 / 12, "0": 1.1, "1": 1, "2": 7 / 6, "all": 4.85 / 4, "auto": 1, "recompute": None}
    )
    assert {name: row.hidden for name, row in rows.items()} == pytest.approx(
        {"off": 0, "0": 1 - 5.9 / 8.5, "1": 1 - 3 / 8.5, "2": 1 - 3 / 8.5, "all": 0.9, "auto": 1, "recompute": None}
    )
    assert (rows["2"].head_start_s, rows["2"].load_stall_s, rows["2"].load_s, rows["2"].compute_s) == (3, 0.5, 8, 4)


def test_a_ratio_is_of_the_rounds_and_times_are_medians() -> None:
    # The machine slows down from round to round, and then computing takes longer than loading.
    rounds = one_round(off=12.0, all=5.0, compute=4.0)
    rounds += one_round(off=16.0, all=16.8, compute=16.0)
    rounds += one_round(off=40.0, all=24.0, compute=24.0)
    off, deep = cell_of(8.0).rows(rounds)
    assert (off.ttft_s, off.compute_s, off.ideal_s) == (16, 16, 24)
    assert off.ratio == pytest.approx(1.0)
    assert off.spread["ratio"] == pytest.approx((16 / 24, 40 / 32))
    assert deep.ratio == pytest.approx(1.05)
    assert deep.spread == {
        "ttft_s": (5, 24),
        "head_start_s": (10, 10),
        "load_stall_s": (0.5, 0.5),
        "ratio": pytest.approx((1, 1.25)),
    }
    assert (off.hidden, deep.hidden) == (None, None), "blocking took no longer than computing alone"


def test_at_real_speed_a_history_that_was_loaded_before_stands_for_compute() -> None:
    off, deep = cell_of(1.0, None).rows(one_round(off=5.5, all=4.0))
    assert (off.compute_s, off.ideal_s, off.ratio) == (4, 5, 1.1)
    assert (deep.ratio, deep.hidden) == (1, 1)


def rates_of(layer_load_s: float, compute_s: float) -> Rates:
    """Of 4 layers: that long for each of 100 tokens, and for 10 new ones."""
    rate = TransferRate(bytes_per_s=100 * 8 / layer_load_s)
    return Rates(num_layers=4, layer_token_bytes=8, load=rate, save=rate, prefill=PrefillRate(token_s=compute_s / 10))


def test_depths_by_rates_by_arithmetic_and_by_trial() -> None:
    cell = cell_of(8.0)
    second = 5.0 * (1 + NOISE / 2)
    rows = cell.rows(one_round(off=12.0, _0=9.0, _1=7.0, _2=second, _3=5.0, all=5.0, auto=1.0, compute=4.0))
    found = cell.depth_row(rows, 2.0, rates_of(2.0, 4.0), (100, 10))
    assert (found.by_rates, found.best, found.measured_best) == (2, 3, 2)
    assert found.best == costs.best_depth(2.0, 1.0, 4, 10.0)
    assert (found.rates_load_s, found.rates_compute_s) == pytest.approx((8, 4))
    assert (found.load_s, found.compute_s, found.load_ratio) == (8, 4, 2)
    padded = cell.depth_row(rows, 2.0, rates_of(2.0, 4.0), (100, 20))
    assert (padded.by_rates, padded.rates_compute_s) == (1, pytest.approx(8)), "one layer, where nothing has to be"
    (times,) = one_round(off=12.0, _0=9.0, all=9.0, compute=4.0)
    for each in times.values():
        each["head_start_s"] = 0.0
    found = cell.depth_row(cell.rows([times]), 2.0, rates_of(2.0, 4.0), (100, 10))
    assert (found.best, found.measured_best) == (0, 0)


def test_preload_summary_by_hand() -> None:
    equal = cell_of(4.0, 1.0, recompiles=2)
    equal_rows = equal.rows(one_round(off=8.0, all=4.4, auto=4.0, compute=4.0))
    slow_rows = cell_of(8.0).rows(one_round(off=12.0, all=3.6, compute=4.0))
    real_rows = [
        row
        for num_history, all_s in ((50, 8.0), (60, 6.0), (70, 5.0))
        for row in cell_of(9.0, None, history_tokens=num_history).rows(one_round(off=10.0, all=all_s, recompute=30.0))
    ]
    depth = equal.depth_row(equal_rows, 1.0, rates_of(2.0, 4.0), (100, 10))
    assert (depth.by_rates, depth.best) == (2, 1)
    summary = summarize_preload([*real_rows, *equal_rows, depth, *slow_rows])
    assert summary["load_hidden"] == pytest.approx(0.9)
    assert summary["worst_ttft_vs_ideal"] == pytest.approx(1.1)
    assert summary["best_ttft_vs_ideal"] == pytest.approx(0.9)
    assert summary["worst_depth_error"] == 1
    assert summary["ttft_saved_by_read_buffer"] == {"all": pytest.approx(0.4)}
    assert summary["same_tokens"] is True
    assert summary["recompiles"] == 2, "of a cell, not of each of its rows"
    other = summarize_preload(slow_rows)
    assert (other["load_hidden"], other["worst_depth_error"]) == (None, None)
    assert other["ttft_saved_by_read_buffer"] == {}


# save


def samples_of(*samples: dict[str, float]) -> Samples:
    found = Samples()
    for sample in samples:
        found.add(**sample)
    return found


def save_cell(link: str = "paced", save_ratio: float | None = 1.0, **changes: object) -> SaveCell:
    cell = SaveCell(
        link=link,
        save_ratio=save_ratio,
        prompt_tokens=40,
        answer_tokens=4,
        save_s=None,
        same_tokens=True,
        recompiles=0,
    )
    return dataclasses.replace(cell, **changes)


def test_what_saving_adds_by_hand() -> None:
    # The machine slows down from round to round: shares are of a round, what is hidden is of the medians.
    rounds = [(10.0, 11.0, 20.0), (20.0, 24.0, 40.0), (40.0, 40.0, 50.0)]
    row = save_cell(recompiles=1).row(samples_of(*(save_round(*each) for each in rounds)))
    assert (row.turn_off_s, row.turn_async_s, row.turn_blocking_s) == (20, 24, 40)
    assert row.async_overhead == pytest.approx(0.1)
    assert row.blocking_overhead == pytest.approx(1.0)
    assert row.async_gain == pytest.approx(0.4)
    assert row.hidden == pytest.approx(1 - 4 / 20)
    assert row.spread["async_overhead"] == pytest.approx((0, 0.2))
    assert row.recompiles == 1
    assert save_cell().row(samples_of(save_round(10.0, 11.0, 10.0))).hidden is None


def test_save_summary_by_hand() -> None:
    paced = [
        save_cell(save_ratio=ratio).row(samples_of(save_round(10.0, 11.0, 10 + 10 * ratio))) for ratio in (0.5, 1.0)
    ]
    real = [
        save_cell("real", None, same_tokens=same).row(samples_of(save_round(10.0, async_s, 12.5)))
        for async_s, same in ((10.2, True), (10.0, False))
    ]
    samples = samples_of(stream_round(10.0, 10.1), stream_round(20.0, 21.0), stream_round(30.0, 30.6))
    stream = StreamRow(
        prompt_tokens=30,
        answer_tokens=4,
        num_turns=5,
        stream_off_s=samples.median("stream_off_s"),
        stream_on_s=samples.median("stream_on_s"),
        overhead=samples.median("overhead"),
        same_tokens=True,
        recompiles=3,
        spread=samples.spread(),
    )
    assert summarize_save([*real, *paced, stream]) == {
        "save_hidden": pytest.approx(0.9),
        "save_overhead": pytest.approx(0.02),
        "worst_async_gain": pytest.approx(1 - 10.2 / 12.5),
        "best_async_gain": pytest.approx(0.2),
        "store_overhead": pytest.approx(0.02),
        "same_tokens": False,
        "recompiles": 3,
    }
    assert summarize_save(paced[:1]) == {
        "save_hidden": None,
        "save_overhead": None,
        "worst_async_gain": None,
        "best_async_gain": None,
        "store_overhead": None,
        "same_tokens": True,
        "recompiles": 0,
    }


# configs


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (PreloadBenchConfig, {"repeats": 0}, "repeats wanted at least 1, found 0"),
        (PreloadBenchConfig, {"ahead_tokens": 0}, "ahead_tokens wanted at least 1"),
        (PreloadBenchConfig, {"paced_new_tokens": -1}, "paced_new_tokens wanted at least 1"),
        (PreloadBenchConfig, {"preload_history_tokens": (500, 1000)}, "fewer than the 1000 preload_prompt_tokens"),
        (PreloadBenchConfig, {"preload_history_tokens": (0,)}, "preload_history_tokens wanted positive numbers"),
        (PreloadBenchConfig, {"load_ratios": (1.0, 0.0)}, "load_ratios wanted positive numbers"),
        (PreloadBenchConfig, {"load_ratios": (math.nan,)}, "load_ratios wanted positive numbers"),
        (PreloadBenchConfig, {"load_ratios": (math.inf,)}, "load_ratios wanted positive numbers"),
        (PreloadBenchConfig, {"read_buffers": (1, -1)}, "read_buffers wanted numbers of layers of at least 0"),
        (PreloadBenchConfig, {"preload_read_buffers": (-2,)}, "preload_read_buffers wanted numbers of layers"),
        (PreloadBenchConfig, {"preload_history_tokens": (), "load_ratios": ()}, "found none of both"),
        (SaveBenchConfig, {"save_answer_tokens": 0}, "save_answer_tokens wanted at least 1"),
        (SaveBenchConfig, {"stream_turns": -1}, "stream_turns wanted at least 0, found -1"),
        (SaveBenchConfig, {"save_prompt_tokens": (9, 0)}, "save_prompt_tokens wanted positive numbers"),
        (SaveBenchConfig, {"save_ratios": (-1.0,)}, "save_ratios wanted positive numbers"),
        (SaveBenchConfig, {"save_prompt_tokens": (), "save_ratios": (), "stream_turns": 0}, "found none of them"),
    ],
)
def test_configs_refuse_what_cannot_be_measured(kind: type, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**changes)
