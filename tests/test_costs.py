"""Predicted times: rates found again from samples, the pipeline against a simulation, and the choices made by it."""

import heapq
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from ca_jax.kv import costs
from ca_jax.kv.rates import PrefillRate, PrefillSample, Rates, TransferRate, TransferSample

SECONDS = st.floats(0, 3).map(lambda value: round(value, 3))
DEPTHS = st.integers(0, 14)
LAYERS = st.integers(1, 12)


def make_rates(load_bytes_per_s=1e9, token_s=1e-3, pair_s=0.0, fixed_s=0.0, load_fixed_s=0.0, num_layers=10) -> Rates:
    """One token of one layer is 1,000 bytes: 1 us each at 1 GB/s."""
    return Rates(
        num_layers=num_layers,
        layer_token_bytes=1000,
        load=TransferRate(bytes_per_s=load_bytes_per_s, fixed_s=load_fixed_s),
        save=TransferRate(bytes_per_s=5e8),
        prefill=PrefillRate(fixed_s=fixed_s, token_s=token_s, pair_s=pair_s),
    )


# Rates.


@pytest.mark.parametrize(("bytes_per_s", "fixed_s"), [(12e9, 0.0), (3e9, 2e-4), (math.inf, 1e-3)])
def test_a_transfer_rate_is_found_from_its_samples(bytes_per_s, fixed_s):
    rate = TransferRate(bytes_per_s=bytes_per_s, fixed_s=fixed_s)
    sizes = (10_000, 1_000_000, 40_000_000)
    fitted = TransferRate.fit(TransferSample(num_bytes=n, seconds=n / bytes_per_s + fixed_s) for n in sizes)
    assert fitted.bytes_per_s == pytest.approx(rate.bytes_per_s)
    assert fitted.fixed_s == pytest.approx(rate.fixed_s, abs=1e-12)
    for size in (*sizes, 5_000_000):
        assert fitted.seconds(size) == pytest.approx(size / bytes_per_s + fixed_s)
    assert fitted.seconds(0) == 0


@pytest.mark.parametrize("pair_s", [0.0, 3e-8])
@pytest.mark.parametrize("fixed_s", [0.0, 4e-3])
def test_a_prefill_rate_is_found_from_its_samples(fixed_s, pair_s):
    sizes = [(0, 8), (0, 512), (1024, 104), (4096, 104), (4096, 512)]

    def seconds(history, new):
        return fixed_s + 9e-4 * new + pair_s * new * (history + new / 2)

    fitted = PrefillRate.fit(PrefillSample(history_tokens=h, new_tokens=n, seconds=seconds(h, n)) for h, n in sizes)
    assert fitted.fixed_s == pytest.approx(fixed_s, abs=1e-9)
    assert fitted.token_s == pytest.approx(9e-4)
    assert fitted.pair_s == pytest.approx(pair_s, abs=1e-13)
    assert fitted.seconds(2048, 100) == pytest.approx(seconds(2048, 100))


@pytest.mark.parametrize("seed", range(5))
def test_a_fit_to_noisy_samples_is_never_negative_and_no_allowed_change_makes_it_better(seed):
    random = np.random.default_rng(seed)
    samples = [
        PrefillSample(
            history_tokens=int(random.integers(0, 4000)),
            new_tokens=int(random.integers(1, 500)),
            seconds=float(random.uniform(0.1, 1)),
        )
        for _ in range(6)
    ]
    fitted = PrefillRate.fit(samples)

    def error(token_s, pair_s, fixed_s):
        rate = PrefillRate(token_s=token_s, pair_s=pair_s, fixed_s=fixed_s)
        return sum((rate.seconds(each.history_tokens, each.new_tokens) / each.seconds - 1) ** 2 for each in samples)

    found = (fitted.token_s, fitted.pair_s, fitted.fixed_s)
    for i, size in enumerate((1e-5, 1e-8, 1e-3)):
        for step in (-size, size):
            changed = list(found)
            changed[i] = max(0.0, changed[i] + step)
            assert error(*changed) >= error(*found) - 1e-12


def test_rates_are_fitted_each_to_its_own_samples_and_one_gives_a_rate_in_proportion():
    def fit(**fetches):
        return Rates.fit(
            num_layers=4,
            layer_token_bytes=10,
            loads=[TransferSample(num_bytes=100, seconds=1.0)],
            saves=[TransferSample(num_bytes=100, seconds=2.0)],
            prefills=[PrefillSample(history_tokens=0, new_tokens=10, seconds=5.0)] * 2,
            **fetches,
        )

    rates = fit()
    assert (rates.load, rates.save) == (TransferRate(bytes_per_s=100.0), TransferRate(bytes_per_s=50.0))
    assert costs.layer_load_s(rates, 20) == pytest.approx(2)
    assert costs.load_s(rates, 20) == pytest.approx(8)
    assert costs.prefill_s(rates, 0, 20) == pytest.approx(10)
    assert costs.layer_compute_s(rates, 0, 20) == pytest.approx(2.5)
    assert rates.fetch is None
    assert fit(fetches=[TransferSample(num_bytes=100, seconds=4.0)]).fetch == TransferRate(bytes_per_s=25.0)
    rates = make_rates(load_fixed_s=0.5)
    assert costs.load_s(rates, 1000) == pytest.approx(10 * (0.5 + 1e-3)), "layers pay what is fixed one by one"
    assert costs.load_s(rates, 0) == 0


def choose(**changes):
    return costs.choose_history(make_rates(), **{"history_tokens": 9, "new_tokens": 9, "block_tokens": 9, **changes})


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: TransferRate(bytes_per_s=0), "bytes_per_s .*got 0"),
        (lambda: TransferRate(bytes_per_s=1, fixed_s=math.nan), "fixed_s .*got nan"),
        (lambda: PrefillRate(token_s=-1), "token_s .*got -1"),
        (lambda: TransferSample(num_bytes=0, seconds=1), "num_bytes .*got 0"),
        (lambda: TransferSample(num_bytes=1, seconds=math.inf), "seconds .*got inf"),
        (lambda: PrefillSample(history_tokens=-1, new_tokens=1, seconds=1), "history_tokens .*got -1"),
        (lambda: PrefillSample(history_tokens=0, new_tokens=0, seconds=1), "new_tokens .*got 0"),
        (lambda: PrefillSample(history_tokens=0, new_tokens=1, seconds=0), "seconds .*got 0"),
        (lambda: TransferRate.fit([]), "at least one sample"),
        (lambda: PrefillRate.fit([]), "at least one sample"),
        (lambda: make_rates(num_layers=0), "num_layers .*got 0"),
        (lambda: costs.pipeline_s(-1.0, 1.0, 4, 0), "load_s_per_layer .*got -1"),
        (lambda: costs.pipeline_s(1.0, math.inf, 4, 0), "compute_s_per_layer .*got inf"),
        (lambda: costs.pipeline_s(1.0, 1.0, 0, 0), "num_layers .*got 0"),
        (lambda: costs.pipeline_s(1.0, 1.0, 4, -1), "depth .*got -1"),
        (lambda: costs.pipeline_s(1.0, 1.0, 4, 0, math.nan), "head_start_s .*got nan"),
        (lambda: choose(history_tokens=0), "history_tokens .*got 0"),
        (lambda: choose(new_tokens=0), "new_tokens .*got 0"),
        (lambda: choose(block_tokens=0), "block_tokens .*got 0"),
        (lambda: choose(min_gain=1.0), "min_gain .*got 1"),
    ],
)
def test_what_cannot_be_is_refused(make, wrong):
    with pytest.raises(ValueError, match=wrong):
        make()


# The pipeline.


def simulate(load_s, compute_s, num_layers, depth, head_start_s, num_execution_regions) -> float:
    """The pipeline event by event: a link and a device that take up what they may as soon as they may."""
    events = [(-head_start_s, "wake"), (0.0, "wake")]
    num_loaded = num_computed = 0
    link_busy = device_busy = False
    now_s = end_s = -math.inf
    while events:
        now_s, what = heapq.heappop(events)
        if what == "loaded":
            num_loaded, link_busy = num_loaded + 1, False
        elif what == "computed":
            num_computed, device_busy, end_s = num_computed + 1, False, now_s
        if any(time_s == now_s for time_s, _ in events):
            continue  # First everything that happens now.
        regions = depth + (num_execution_regions if now_s >= 0 else 0)
        if not link_busy and now_s >= -head_start_s and num_loaded < min(num_layers, num_computed + regions):
            link_busy = True
            heapq.heappush(events, (now_s + load_s, "loaded"))
        if not device_busy and now_s >= 0 and num_computed < num_loaded:
            device_busy = True
            heapq.heappush(events, (now_s + compute_s, "computed"))
    assert num_computed == num_layers
    return end_s


@hypothesis.given(
    load_s=SECONDS, compute_s=SECONDS, num_layers=LAYERS, depth=DEPTHS, head_start_s=st.integers(-9, 40).map(float)
)
@pytest.mark.parametrize("num_execution_regions", [2, 99])
def test_the_pipeline_takes_what_its_simulation_takes(
    load_s, compute_s, num_layers, depth, head_start_s, num_execution_regions
):
    """Two regions behind the read buffer, or one for each layer: it makes no difference."""
    expected = simulate(load_s, compute_s, num_layers, depth, head_start_s, num_execution_regions)
    found = costs.pipeline_s(load_s, compute_s, num_layers, depth, head_start_s)
    assert found == pytest.approx(expected, abs=1e-9)


@hypothesis.given(load_s=SECONDS, compute_s=SECONDS, num_layers=LAYERS, depth=DEPTHS, head_start_s=st.floats(0, 40))
def test_the_pipeline_is_no_shorter_than_either_no_longer_than_both_and_never_longer_for_more_depth(
    load_s, compute_s, num_layers, depth, head_start_s
):
    found = costs.pipeline_s(load_s, compute_s, num_layers, depth, head_start_s)
    least = max(num_layers * compute_s, (num_layers - depth) * load_s, num_layers * load_s - head_start_s)
    assert least - 1e-9 <= found <= costs.blocking_s(load_s, compute_s, num_layers) + 1e-9
    assert costs.pipeline_s(load_s, compute_s, num_layers, depth + 1, head_start_s) <= found + 1e-9
    assert costs.pipeline_s(load_s, compute_s, num_layers, depth, head_start_s + 1) <= found + 1e-9


# The read buffer.


def test_the_papers_figure_19_follows():
    """LLaMA-13B, 1K history and 100 new tokens: no buffer gives about -35 %, 15 layers are enough and give -61 %."""
    # Of the time without pre-loading: what 15 layers of buffer save is the load, and what is left is the compute.
    compute_s, load_s, num_layers = 0.39, 0.61, 40
    rates = Rates(
        num_layers=num_layers,
        layer_token_bytes=20_480,
        load=TransferRate(bytes_per_s=num_layers * 20_480 * 1000 / load_s),
        save=TransferRate(bytes_per_s=1e9),
        prefill=PrefillRate(token_s=compute_s / 100),
    )
    assert costs.read_buffer_layers(rates, 1000, 100) == 15
    layer_load_s, layer_compute_s = costs.layer_load_s(rates, 1000), costs.layer_compute_s(rates, 1000, 100)
    assert costs.pipeline_s(layer_load_s, layer_compute_s, num_layers, 15) == pytest.approx(0.39, abs=0.002)
    assert costs.pipeline_s(layer_load_s, layer_compute_s, num_layers, 0) == pytest.approx(0.65, abs=0.04)


def test_the_read_buffer_is_what_loads_while_nothing_is_left_to_compute():
    rates = make_rates(load_bytes_per_s=1e6, token_s=1e-2)  # Of 1,000 + 100 tokens: a second a layer, and 0.1.
    assert costs.read_buffer_bytes(rates, 1000, 100) == pytest.approx(1e6 * (10 - 1))  # The paper's formula.
    assert costs.read_buffer_layers(rates, 1000, 100) == 9
    assert costs.read_buffer_layers(rates, 1000, 101) == 9
    assert costs.read_buffer_layers(rates, 1000, 99) == 10
    assert costs.read_buffer_layers(rates, 1000, 100, max_buffer_bytes=3_999_999) == 3
    assert costs.read_buffer_layers(rates, 1000, 100, max_buffer_bytes=10**9) == 9


@hypothesis.given(
    load_bytes_per_s=st.floats(1e5, 1e9),
    load_fixed_s=st.floats(0, 1),
    fixed_s=st.floats(0, 5),
    history=st.integers(1, 5000),
    new=st.integers(1, 500),
    num_layers=st.integers(1, 40),
)
def test_the_read_buffer_is_the_least_that_gives_the_shortest_time_within_a_layer(
    load_bytes_per_s, load_fixed_s, fixed_s, history, new, num_layers
):
    rates = make_rates(load_bytes_per_s, load_fixed_s=load_fixed_s, fixed_s=fixed_s, num_layers=num_layers)
    load_s, compute_s = costs.layer_load_s(rates, history), costs.layer_compute_s(rates, history, new)
    by_formula = costs.read_buffer_layers(rates, history, new)
    times_s = [costs.pipeline_s(load_s, compute_s, num_layers, depth) for depth in range(num_layers + 1)]
    best = next(depth for depth, time_s in enumerate(times_s) if time_s <= min(times_s) * (1 + 1e-12))
    assert best - 1 <= by_formula <= best
    needed_bytes = costs.read_buffer_bytes(rates, history, new)
    assert (by_formula - 1) * history * 1000 < needed_bytes + 1 <= by_formula * history * 1000 + 1


# Passes between decode steps.


@pytest.mark.parametrize(
    ("changes", "history", "budget_s", "size"),
    [
        *(({}, 0, *each) for each in ((1.0, 64), (0.064, 64), (0.0639, 32), (0.032, 32), (0.0319, 16), (-1.0, 16))),
        ({}, 0, math.inf, 64),
        *(({"pair_s": 1e-6}, history, 0.07, size) for history, size in ((0, 64), (1000, 32), (3000, 16))),
        ({"fixed_s": 0.02}, 0, 0.064, 32),
    ],
)
def test_a_pass_is_the_longest_that_fits_its_time_or_the_shortest_there_is(changes, history, budget_s, size):
    assert costs.largest_pass(make_rates(token_s=1e-3, **changes), history, (16, 32, 64), budget_s) == size


# Load or recompute.


def test_what_is_cheap_to_load_is_loaded_and_what_is_not_is_recomputed():
    plan = costs.choose_history(make_rates(load_bytes_per_s=1e9), 1000, 50, block_tokens=128)
    assert plan == costs.HistoryPlan(load_tokens=1000, recompute_tokens=0, predicted_s=pytest.approx(0.05, rel=0.05))
    assert plan.kind == "load"
    plan = costs.choose_history(make_rates(load_bytes_per_s=1e3), 1000, 50, block_tokens=128)
    assert plan == costs.HistoryPlan(load_tokens=0, recompute_tokens=1000, predicted_s=pytest.approx(1.05))
    assert plan.kind == "recompute"


@hypothesis.given(
    load_bytes_per_s=st.floats(1e5, 1e9),
    load_fixed_s=st.floats(0, 0.01),
    pair_s=st.floats(0, 1e-5),
    history=st.integers(1, 900),
    new=st.integers(1, 200),
    block_tokens=st.sampled_from([16, 100, 128]),
    depth=st.integers(0, 10),
)
def test_no_split_is_predicted_to_be_faster(load_bytes_per_s, load_fixed_s, pair_s, history, new, block_tokens, depth):
    rates = make_rates(load_bytes_per_s, pair_s=pair_s, load_fixed_s=load_fixed_s)
    plan = costs.choose_history(rates, history, new, block_tokens=block_tokens, depth=depth, head_start_s=0.5)
    assert plan.load_tokens + plan.recompute_tokens == history
    assert plan.load_tokens == history or plan.load_tokens % block_tokens == 0

    def seconds(k):
        compute_s = costs.layer_compute_s(rates, k, history - k + new)
        return costs.pipeline_s(costs.layer_load_s(rates, k), compute_s, 10, depth if k else 0, 0.5)

    all_s = {k: seconds(k) for k in {*range(0, history, block_tokens), history}}
    assert plan.predicted_s == pytest.approx(all_s[plan.load_tokens])
    assert plan.predicted_s <= min(all_s.values()) + 1e-12


def test_a_split_must_gain_what_is_asked_of_it():
    rates = make_rates(load_bytes_per_s=1e7)
    all_s = costs.pipeline_s(costs.layer_load_s(rates, 1000), costs.layer_compute_s(rates, 1000, 50), 10, 0)
    gain = 1 - costs.choose_history(rates, 1000, 50, block_tokens=100).predicted_s / all_s
    assert 0 < gain < 1
    assert costs.choose_history(rates, 1000, 50, block_tokens=100, min_gain=gain - 0.01).kind == "mix"
    assert costs.choose_history(rates, 1000, 50, block_tokens=100, min_gain=gain + 0.01).kind == "load"


def test_a_history_that_comes_late_is_recomputed():
    rates = make_rates(load_bytes_per_s=1e9)
    assert costs.choose_history(rates, 1000, 50, block_tokens=128, head_start_s=-0.9).kind == "load"
    late = costs.choose_history(rates, 1000, 50, block_tokens=128, head_start_s=-1.1)
    assert (late.kind, late.predicted_s) == ("recompute", pytest.approx(1.05))


def test_what_is_computed_is_what_lengths_are_padded_to():
    """Recomputing 128 tokens is faster than loading them, unless it takes the job to the next padded length."""
    rates = make_rates(load_bytes_per_s=128 * 1000 * 10 / 0.7)
    asked = []

    def padded(history, new):
        asked.append((history, new))
        return history, -(-new // 512) * 512

    plan = costs.choose_history(rates, 128, 500, block_tokens=128)
    assert (plan.kind, plan.predicted_s) == ("recompute", pytest.approx(0.628))
    plan = costs.choose_history(rates, 128, 500, block_tokens=128, padded=padded)
    assert (plan.kind, plan.predicted_s) == ("load", pytest.approx(0.7 + 0.0512))
    assert asked == [(128, 500), (0, 628)]
