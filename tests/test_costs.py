"""Predicted times: rates found again from samples, and the choices made by them.

Not here: the pipeline's time, against a load that runs (test_layer_loader).
"""

import dataclasses
import math
import threading

import hypothesis
import hypothesis.strategies as st
import pytest

from ca_jax.kv import costs
from ca_jax.kv.costs import PrefillRate, PrefillSample, RateMeter, Rates, TransferRate


def make_rates(
    load_bytes_per_s=1e9,
    token_s=1e-3,
    pair_s=0.0,
    fixed_s=0.0,
    load_fixed_s=0.0,
    num_layers=10,
    fetch_bytes_per_s=None,
) -> Rates:
    """One token of one layer is 1,000 bytes: 1 us each at 1 GB/s, and 100 us of computing at 1 ms for 10 layers."""
    return Rates(
        num_layers=num_layers,
        layer_token_bytes=1000,
        load=TransferRate(bytes_per_s=load_bytes_per_s, fixed_s=load_fixed_s),
        save=TransferRate(bytes_per_s=5e8),
        prefill=PrefillRate(fixed_s=fixed_s, token_s=token_s, pair_s=pair_s),
        fetch=None if fetch_bytes_per_s is None else TransferRate(bytes_per_s=fetch_bytes_per_s),
    )


# Rates.


@pytest.mark.parametrize(("bytes_per_s", "fixed_s"), [(12e9, 0.0), (3e9, 2e-4), (math.inf, 1e-3)])
def test_a_transfer_rate_is_found_from_its_samples(bytes_per_s, fixed_s):
    rate = TransferRate(bytes_per_s=bytes_per_s, fixed_s=fixed_s)
    sizes = (10_000, 1_000_000, 40_000_000)
    fitted = TransferRate.fit((n, n / bytes_per_s + fixed_s) for n in sizes)
    assert fitted.bytes_per_s == pytest.approx(rate.bytes_per_s)
    assert fitted.fixed_s == pytest.approx(rate.fixed_s, abs=1e-12)
    for size in (*sizes, 5_000_000):
        assert fitted.seconds(size) == pytest.approx(size / bytes_per_s + fixed_s)
    assert fitted.seconds(0) == 0


SAMPLES = st.builds(
    PrefillSample, history_tokens=st.integers(0, 4000), new_tokens=st.integers(1, 500), seconds=st.floats(0.1, 1)
)


@hypothesis.given(st.lists(SAMPLES, min_size=6, max_size=6))
@hypothesis.settings(max_examples=20)
def test_a_fit_to_noisy_samples_is_never_negative_and_no_allowed_change_makes_it_better(samples):
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


# Measured.


def filled() -> RateMeter:
    """A sample of each kind but fetches: 1 and 0.5 GB a second, and a millisecond a token."""
    meter = RateMeter(4, 1000)
    meter.add_load(1_000_000, 1e-3)
    meter.add_save(1_000_000, 2e-3)
    meter.add_prefill(0, 100, 0.1)
    return meter


ADDS = {"load": (1_000_000, 1e-3), "save": (1_000_000, 1e-3), "prefill": (0, 100, 1.0)}


@pytest.mark.parametrize("missing", ADDS)
def test_there_are_rates_once_there_are_samples_of_each_kind_but_fetches(missing):
    meter = filled()
    meter.forget()
    meter.add_fetch(4_000_000, 2e-3)
    for kind in ADDS.keys() - {missing}:
        getattr(meter, f"add_{kind}")(*ADDS[kind])
    assert meter.rates is None
    getattr(meter, f"add_{missing}")(*ADDS[missing])
    assert (meter.rates.num_layers, meter.rates.layer_token_bytes) == (4, 1000)


def test_measured_rates_are_those_of_the_last_samples_fitted_again_when_enough_is_new():
    meter = filled()
    first = meter.rates
    assert (first.load.bytes_per_s, first.save.bytes_per_s, first.fetch) == (*map(pytest.approx, (1e9, 5e8)), None)
    assert first.prefill.seconds(0, 20) == pytest.approx(0.02)
    for _ in range(7):
        meter.add_load(1_000_000, 2e-3)
        assert meter.rates is first, "fitted again for a few samples"
    meter.add_load(1_000_000, 2e-3)
    assert meter.rates.load.bytes_per_s < first.load.bytes_per_s
    for _ in range(64):
        meter.add_load(1_000_000, 4e-3)
        meter.add_save(1_000_000, 5e-3)
        meter.add_prefill(0, 100, 0.6)
    assert (meter.rates.load.bytes_per_s, meter.rates.save.bytes_per_s) == pytest.approx((1e6 / 4e-3, 1e6 / 5e-3))
    assert meter.rates.prefill.seconds(0, 100) == pytest.approx(0.6)
    meter.add_fetch(4_000_000, 2e-3)
    first = meter.rates
    assert first.fetch.bytes_per_s == pytest.approx(2e9), "not known from the first fetch on"
    meter.add_fetch(4_000_000, 8e-3)
    assert meter.rates is first, "fitted again for one sample"


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 1.0), (1_000_000, 0.0), (1_000_000, -1e-9)])
def test_a_transfer_that_the_clock_does_not_see_says_nothing(num_bytes, seconds):
    meter = filled()
    for _ in range(8):
        meter.add_load(num_bytes, seconds)
        meter.add_fetch(num_bytes, seconds)
    assert (meter.rates.load.bytes_per_s, meter.rates.fetch) == (pytest.approx(1e9), None)


def test_any_thread_may_add():
    """A fit takes the samples as they are then, while others come in."""
    meter = filled()
    saving = threading.Thread(target=lambda: [meter.add_save(1_000_000, 2e-3) for _ in range(5_000)])
    saving.start()
    while saving.is_alive():
        assert meter.rates.save.bytes_per_s == pytest.approx(5e8)
    saving.join()


# Bad input.


def choose(**changes):
    return costs.choose_history(make_rates(), **{"history_tokens": 9, "new_tokens": 9, "block_tokens": 9, **changes})


def ratio(**changes):
    return costs.choose_ratio(make_rates(), **{"context_tokens": 9, "new_tokens": 9, "min_ratio": 0.1, **changes})


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: TransferRate(bytes_per_s=0), "bytes_per_s .*got 0"),
        (lambda: TransferRate(bytes_per_s=1, fixed_s=math.nan), "fixed_s .*got nan"),
        (lambda: PrefillRate(token_s=-1), "token_s .*got -1"),
        (lambda: PrefillSample(history_tokens=-1, new_tokens=1, seconds=1), "history_tokens .*got -1"),
        (lambda: PrefillSample(history_tokens=0, new_tokens=0, seconds=1), "new_tokens .*got 0"),
        (lambda: TransferRate.fit([]), "at least one sample"),
        (lambda: make_rates(num_layers=0), "num_layers .*got 0"),
        (lambda: costs.pipeline_s(-1.0, 1.0, 4, 0), "load_s_per_layer .*got -1"),
        (lambda: costs.pipeline_s(1.0, 1.0, 4, -1), "depth .*got -1"),
        (lambda: costs.pipeline_s(1.0, 1.0, 4, 0, math.nan), "head_start_s .*got nan"),
        (lambda: choose(history_tokens=0), "history_tokens .*got 0"),
        (lambda: choose(min_gain=1.0), "min_gain .*got 1"),
        (lambda: ratio(min_ratio=-0.1), r"min_ratio .*got -0\.1"),
        (lambda: ratio(min_ratio=math.nan), "ratio .*got nan"),
        (lambda: ratio(context_tokens=0), "context_tokens .*got 0"),
        (lambda: ratio(new_tokens=0), "new_tokens .*got 0"),
        (lambda: ratio(history_tokens=-1), "history_tokens .*got -1"),
        (lambda: costs.layer_load_s(make_rates(), 1000, "ssd"), "nothing was fetched"),
    ],
)
def test_what_cannot_be_is_refused(make, wrong):
    with pytest.raises(ValueError, match=wrong):
        make()


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
    layer_bytes = rates.layer_token_bytes * history
    assert costs.read_buffer_layers(rates, history, new, max_buffer_bytes=4 * layer_bytes - 1) == min(by_formula, 3)


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
    chosen = costs.choose_history(rates, history, new, block_tokens=block_tokens, depth=depth, head_start_s=0.5)

    def seconds(k):
        compute_s = costs.layer_compute_s(rates, k, history - k + new)
        return costs.pipeline_s(costs.layer_load_s(rates, k), compute_s, 10, depth if k else 0, 0.5)

    all_s = {k: seconds(k) for k in {*range(0, history, block_tokens), history}}
    assert all_s[chosen] <= min(all_s.values()) + 1e-12


@pytest.mark.parametrize(
    ("rates", "options", "loaded"),
    [
        ({}, {"head_start_s": -0.9}, 1000),
        ({}, {"head_start_s": -1.1}, 0),  # It comes too late.
        ({"load_bytes_per_s": 1e7}, {"min_gain": 0.40}, 500),
        ({"load_bytes_per_s": 1e7}, {"min_gain": 0.41}, 1000),
    ],
)
def test_how_much_of_a_history_is_loaded(rates, options, loaded):
    assert costs.choose_history(make_rates(**rates), 1000, 50, block_tokens=100, **options) == loaded


def test_what_is_computed_is_what_lengths_are_padded_to():
    """Recomputing 128 tokens is faster than loading them, unless it takes the job to the next padded length."""
    rates = make_rates(load_bytes_per_s=128 * 1000 * 10 / 0.7)

    def padded(history, new):
        return history, -(-new // 512) * 512

    assert costs.choose_history(rates, 128, 500, block_tokens=128) == 0
    assert costs.choose_history(rates, 128, 500, block_tokens=128, padded=padded) == 128


# Contexts of chunks.


TOKENS = st.integers(1, 5000)
RATIOS = st.floats(0, 1)
FASTER = st.floats(1, 100)
RATES = st.builds(
    make_rates,
    load_bytes_per_s=st.floats(1e5, 1e10),
    token_s=st.floats(1e-6, 1e-2),
    pair_s=st.floats(0, 1e-6),
    fixed_s=st.floats(0, 0.1),
    fetch_bytes_per_s=st.floats(1e5, 1e10),
)


def faster(rates: Rates, *, load: float = 1, device: float = 1) -> Rates:
    """The link, or weights and attention, so many times as fast; what is fixed stays."""
    prefill = rates.prefill
    return dataclasses.replace(
        rates,
        load=TransferRate(bytes_per_s=rates.load.bytes_per_s * load),
        prefill=dataclasses.replace(prefill, token_s=prefill.token_s / device, pair_s=prefill.pair_s / device),
    )


def test_a_token_that_is_computed_anew_attends_to_half_of_the_context_and_all_before_it():
    rates = make_rates(token_s=1e-3, pair_s=1e-6)
    linear, pairs = 150 * 1e-3, 150 * (200 + 500) * 1e-6
    new_s = costs.layer_compute_s(rates, 1200, 1)
    found = costs.blend_layer_s(rates, 1000, 1, 0.15, history_tokens=200)
    assert found == pytest.approx((linear + pairs) / 10 + new_s)
    assert costs.blend_layer_s(rates, 1000, 1, 0.0, history_tokens=200) == new_s


@hypothesis.given(rates=RATES, context=TOKENS, new=TOKENS, history=st.integers(0, 5000))
def test_all_of_it_computed_anew_is_the_prefill_of_all_of_it(rates, context, new, history):
    found = costs.blend_layer_s(rates, context, new, 1.0, history_tokens=history)
    assert found == pytest.approx(costs.layer_compute_s(rates, history, context + new))


@pytest.mark.parametrize(
    ("rates", "new", "options", "ratio"),
    [
        # 1,000 tokens of a layer: 30 ms to load, 100 ms to compute; 50 new ones take 5 ms.
        ({"load_bytes_per_s": 1e6 / 0.03}, 50, {"min_ratio": 0.15}, 0.25),
        ({"load_bytes_per_s": 1e6 / 0.03}, 50, {"min_ratio": 0.3}, 0.3),
        ({"load_bytes_per_s": 1e6 / 0.03}, 250, {"min_ratio": 0.15}, 0.15),  # New tokens take most of the time.
        ({"load_bytes_per_s": 1e6 / 0.03}, 50, {"min_ratio": 0.15, "history_tokens": 500}, 0.4),
        # What is no faster to load is computed. The second is 0.97 by the formula: with the first load, which nothing
        # hides, that takes longer than computing all.
        ({"load_bytes_per_s": 1e6}, 50, {"min_ratio": 0.15}, 1),
        ({"load_bytes_per_s": 1e6 / 0.102}, 50, {"min_ratio": 0.15}, 1),
        ({"token_s": 0.0, "fixed_s": 1.0}, 50, {"min_ratio": 0.15}, 1),
    ],
)
def test_the_recompute_of_a_layer_takes_as_long_as_the_load_of_one(rates, new, options, ratio):
    assert costs.choose_ratio(make_rates(**rates), 1000, new, **options) == pytest.approx(ratio)


@hypothesis.given(rates=RATES, context=TOKENS, new=TOKENS, min_ratio=RATIOS)
def test_the_ratio_is_at_least_the_least_and_hides_behind_the_load_if_it_can(rates, context, new, min_ratio):
    ratio = costs.choose_ratio(rates, context, new, min_ratio)
    assert min_ratio <= ratio <= 1
    load_s, blend_s = costs.layer_load_s(rates, context), costs.blend_layer_s(rates, context, new, ratio)
    if ratio < 1:
        all_s = rates.prefill.seconds(0, context + new)
        assert costs.pipeline_s(load_s, blend_s, 10, 10, 0.0) < all_s, "it is predicted to be slower than computing all"
    if min_ratio < ratio < 1:
        assert blend_s == pytest.approx(load_s)
    if ratio == min_ratio < 1:
        assert blend_s >= load_s * (1 - 1e-9)


@hypothesis.given(rates=RATES, context=TOKENS, new=TOKENS, ratios=st.tuples(RATIOS, RATIOS), times=FASTER)
def test_no_slower_link_faster_device_or_higher_least_lowers_the_ratio(rates, context, new, ratios, times):
    least, more = sorted(ratios)
    found = costs.choose_ratio(rates, context, new, least)
    assert found >= costs.choose_ratio(faster(rates, load=times), context, new, least) - 1e-9
    assert found <= costs.choose_ratio(faster(rates, device=times), context, new, least) + 1e-9
    assert found <= costs.choose_ratio(rates, context, new, more)


def test_chunks_are_kept_where_it_is_cheapest_without_delay():
    """A layer computes for 15 + 5 ms."""
    assert costs.choose_tier(make_rates(fetch_bytes_per_s=1e6 / 0.019), 1000, 50, 0.15) == "ssd"
    assert costs.choose_tier(make_rates(fetch_bytes_per_s=1e6 / 0.021), 1000, 50, 0.15) == "dram"
    assert costs.choose_tier(make_rates(fetch_bytes_per_s=1e6 / 0.021), 1000, 50, 0.2) == "ssd"
    assert costs.choose_tier(make_rates(), 1000, 50, 0.15) == "dram", "no SSD is known of"
    slow = make_rates(load_bytes_per_s=1e6, fetch_bytes_per_s=1e9)
    assert costs.choose_tier(slow, 1000, 50, 0.15) == "dram", "either delays"
