"""The loading controller: what hides behind loading, the time of the pipeline, and how choices follow the rates."""

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import pytest

from ca_jax.kv import blend_costs, costs
from ca_jax.kv.rates import PrefillRate, Rates, TransferRate

NUM_LAYERS = 10
TOKENS = st.integers(1, 5000)
RATIOS = st.floats(0, 1)
TIERS = st.sampled_from(["dram", "ssd"])
FASTER = st.floats(1, 100)


def make_rates(load_bytes_per_s=1e9, token_s=1e-3, pair_s=0.0, fixed_s=0.0, fetch_bytes_per_s=None) -> Rates:
    """One token of one layer is 1,000 bytes: 1 us each at 1 GB/s, and 100 us of computing at 1 ms for 10 layers."""
    return Rates(
        num_layers=NUM_LAYERS,
        layer_token_bytes=1000,
        load=TransferRate(bytes_per_s=load_bytes_per_s),
        save=TransferRate(bytes_per_s=5e8),
        prefill=PrefillRate(fixed_s=fixed_s, token_s=token_s, pair_s=pair_s),
        fetch=None if fetch_bytes_per_s is None else TransferRate(bytes_per_s=fetch_bytes_per_s),
    )


RATES = st.builds(
    make_rates,
    load_bytes_per_s=st.floats(1e5, 1e10),
    token_s=st.floats(1e-6, 1e-2),
    pair_s=st.floats(0, 1e-6),
    fixed_s=st.floats(0, 0.1),
    fetch_bytes_per_s=st.floats(1e5, 1e10),
)


def with_load(rates: Rates, times: float) -> Rates:
    return dataclasses.replace(rates, load=TransferRate(bytes_per_s=rates.load.bytes_per_s * times))


def with_fetch(rates: Rates, times: float) -> Rates:
    return dataclasses.replace(rates, fetch=TransferRate(bytes_per_s=rates.fetch.bytes_per_s * times))


def with_device(rates: Rates, times: float) -> Rates:
    """Its weights and its attention so many times as fast; what is fixed stays."""
    prefill = dataclasses.replace(
        rates.prefill, token_s=rates.prefill.token_s / times, pair_s=rates.prefill.pair_s / times
    )
    return dataclasses.replace(rates, prefill=prefill)


# Parts.


def test_a_token_that_is_computed_anew_attends_to_half_of_the_context_and_all_before_it():
    rates = make_rates(token_s=1e-3, pair_s=1e-6)
    linear, pairs = 150 * 1e-3, 150 * (200 + 500) * 1e-6
    found = blend_costs.recompute_layer_s(rates, 1000, 0.15, history_tokens=200)
    assert found == pytest.approx((linear + pairs) / NUM_LAYERS)
    assert blend_costs.recompute_layer_s(rates, 1000, 0.0) == 0


@hypothesis.given(rates=RATES, context=TOKENS, new=TOKENS, history=st.integers(0, 5000))
def test_all_of_it_computed_anew_is_the_prefill_of_all_of_it(rates, context, new, history):
    found = blend_costs.blend_layer_s(rates, context, new, 1.0, history_tokens=history)
    assert found == pytest.approx(costs.layer_compute_s(rates, history, context + new))


def test_a_layer_from_ssd_comes_as_fast_as_the_slower_of_two_links():
    rates = make_rates(load_bytes_per_s=1e9, fetch_bytes_per_s=1e8)
    assert blend_costs.fetch_s(rates, 1000) == pytest.approx(0.1)
    assert blend_costs.layer_load_s(rates, 1000) == pytest.approx(1e-3)
    assert blend_costs.layer_load_s(rates, 1000, "ssd") == pytest.approx(1e-2)
    rates = make_rates(load_bytes_per_s=1e9, fetch_bytes_per_s=1e10)
    assert blend_costs.layer_load_s(rates, 1000, "ssd") == pytest.approx(1e-3)


def test_an_ssd_of_which_nothing_is_known_has_no_times():
    for find in (
        lambda: blend_costs.fetch_s(make_rates(), 1000),
        lambda: blend_costs.layer_load_s(make_rates(), 1000, "ssd"),
        lambda: blend_costs.choose_ratio(make_rates(), 1000, 10, 0.15, tier="ssd"),
    ):
        with pytest.raises(ValueError, match="nothing was fetched"):
            find()


# The ratio.


def test_the_recompute_of_a_layer_takes_as_long_as_the_load_of_one():
    """1,000 tokens of a layer: 30 ms to load, 100 ms to compute; 50 new ones take 5 ms."""
    rates = make_rates(load_bytes_per_s=1e6 / 0.03)
    assert blend_costs.choose_ratio(rates, 1000, 50, 0.15) == pytest.approx(0.25)
    assert blend_costs.choose_ratio(rates, 1000, 50, 0.3) == 0.3
    assert blend_costs.choose_ratio(rates, 1000, 250, 0.15) == 0.15, "new tokens take most of the time"
    assert blend_costs.choose_ratio(rates, 1000, 50, 0.15, history_tokens=500) == pytest.approx(0.40)


def test_what_is_no_faster_to_load_is_computed():
    assert blend_costs.choose_ratio(make_rates(load_bytes_per_s=1e6), 1000, 50, 0.15) == 1
    # 0.97 by the formula. With the first load, which nothing hides, that takes longer than computing all.
    assert blend_costs.choose_ratio(make_rates(load_bytes_per_s=1e6 / 0.102), 1000, 50, 0.15) == 1
    assert blend_costs.choose_ratio(make_rates(token_s=0.0, fixed_s=1.0), 1000, 50, 0.15) == 1


@hypothesis.given(rates=RATES, context=TOKENS, new=TOKENS, min_ratio=RATIOS, tier=TIERS)
def test_the_ratio_is_at_least_the_least_and_hides_behind_the_load_if_it_can(rates, context, new, min_ratio, tier):
    ratio = blend_costs.choose_ratio(rates, context, new, min_ratio, tier=tier)
    assert min_ratio <= ratio <= 1
    if ratio < 1:
        blend_s = blend_costs.predict_blend_s(rates, context, new, ratio, check_layers=0, tier=tier)
        assert blend_s < costs.prefill_s(rates, 0, context + new), "it is not predicted to be slower than computing all"
    load_s = blend_costs.layer_load_s(rates, context, tier)
    if min_ratio < ratio < 1:
        assert blend_costs.blend_layer_s(rates, context, new, ratio) == pytest.approx(load_s)
    if ratio == min_ratio < 1:
        assert blend_costs.blend_layer_s(rates, context, new, ratio) >= load_s * (1 - 1e-9)


@hypothesis.given(
    rates=RATES, context=TOKENS, new=TOKENS, ratios=st.tuples(RATIOS, RATIOS), tier=TIERS, times=st.floats(1, 100)
)
def test_no_slower_link_faster_device_or_higher_least_lowers_the_ratio(rates, context, new, ratios, tier, times):
    least, more = sorted(ratios)
    found = blend_costs.choose_ratio(rates, context, new, least, tier=tier)
    faster_link = with_load(rates, times) if tier == "dram" else with_fetch(rates, times)
    assert found >= blend_costs.choose_ratio(faster_link, context, new, least, tier=tier) - 1e-9
    assert found <= blend_costs.choose_ratio(with_device(rates, times), context, new, least, tier=tier) + 1e-9
    assert found <= blend_costs.choose_ratio(rates, context, new, more, tier=tier)
    assert found <= blend_costs.choose_ratio(rates, context, new, least, tier="ssd")


# The pipeline.


@hypothesis.given(
    rates=RATES,
    context=TOKENS,
    new=TOKENS,
    ratio=RATIOS,
    history=st.integers(0, 5000),
    depth=st.integers(0, NUM_LAYERS + 2),
    head_start_s=st.one_of(st.floats(-10, 10), st.just(math.inf)),
)
def test_with_all_layers_alike_it_is_the_pipeline_of_a_history(
    rates, context, new, ratio, history, depth, head_start_s
):
    load_s = blend_costs.layer_load_s(rates, history + context)
    compute_s = blend_costs.blend_layer_s(rates, context, new, ratio, history_tokens=history)
    options = {"check_layers": 0, "history_tokens": history, "depth": depth, "head_start_s": head_start_s}
    found = blend_costs.predict_blend_s(rates, context, new, ratio, **options)
    assert found == pytest.approx(costs.pipeline_s(load_s, compute_s, NUM_LAYERS, depth, head_start_s))


def test_closed_forms_of_the_pipeline():
    """A layer: 10 ms to load; 100 ms to compute all, 10 ms at a tenth, and 5 ms of new tokens."""
    rates = make_rates(load_bytes_per_s=1e8)
    ideal_s = blend_costs.ideal_blend_s(rates, 1000, 50, 0.1)
    assert ideal_s == pytest.approx(0.105 + 9 * 0.015)  # One check layer, and a tenth of the other nine.
    assert blend_costs.predict_blend_s(rates, 1000, 50, 0.1) == pytest.approx(0.010 + ideal_s)  # The first load.
    slow = make_rates(load_bytes_per_s=1e6 / 0.2)
    found = blend_costs.predict_blend_s(slow, 1000, 50, 0.1)
    assert found == pytest.approx(NUM_LAYERS * 0.2 + 0.015)  # All loads, and the last layer.
    late_s = blend_costs.predict_blend_s(rates, 1000, 50, 0.1, head_start_s=-1.0)
    assert late_s == pytest.approx(1.0 + 0.010 + ideal_s)
    two = blend_costs.ideal_blend_s(rates, 1000, 50, 0.1, check_layers=2)
    assert two == pytest.approx(2 * 0.105 + 8 * 0.015)


@hypothesis.given(rates=RATES, context=TOKENS, new=TOKENS, ratio=RATIOS, check_layers=st.integers(0, NUM_LAYERS))
def test_loading_adds_one_layer_at_least_and_all_of_it_at_most(rates, context, new, ratio, check_layers):
    ideal_s = blend_costs.ideal_blend_s(rates, context, new, ratio, check_layers=check_layers)
    found = blend_costs.predict_blend_s(rates, context, new, ratio, check_layers=check_layers)
    load_s = blend_costs.layer_load_s(rates, context)
    assert (ideal_s + load_s) * (1 - 1e-9) <= found <= (ideal_s + NUM_LAYERS * load_s) * (1 + 1e-9)
    assert found >= NUM_LAYERS * load_s
    ahead_s = blend_costs.predict_blend_s(rates, context, new, ratio, check_layers=check_layers, head_start_s=math.inf)
    assert ahead_s == pytest.approx(ideal_s)


@hypothesis.given(rates=RATES, context=TOKENS, new=TOKENS, ratios=st.tuples(RATIOS, RATIOS), times=FASTER)
def test_computing_more_or_loading_slower_is_never_predicted_to_be_faster(rates, context, new, ratios, times):
    low, high = (blend_costs.predict_blend_s(rates, context, new, each, check_layers=0) for each in sorted(ratios))
    assert low <= high * (1 + 1e-9)
    for faster in (with_load(rates, times), with_device(rates, times)):
        assert blend_costs.predict_blend_s(faster, context, new, ratios[0]) <= (
            blend_costs.predict_blend_s(rates, context, new, ratios[0]) * (1 + 1e-9)
        )


# The tier.


def test_chunks_are_kept_where_it_is_cheapest_without_delay():
    """A layer computes for 15 + 5 ms."""
    assert blend_costs.choose_tier(make_rates(fetch_bytes_per_s=1e6 / 0.019), 1000, 50, 0.15) == "ssd"
    assert blend_costs.choose_tier(make_rates(fetch_bytes_per_s=1e6 / 0.021), 1000, 50, 0.15) == "dram"
    assert blend_costs.choose_tier(make_rates(fetch_bytes_per_s=1e6 / 0.021), 1000, 50, 0.2) == "ssd"
    assert blend_costs.choose_tier(make_rates(), 1000, 50, 0.15) == "dram", "no SSD is known of"
    slow = make_rates(load_bytes_per_s=1e6, fetch_bytes_per_s=1e9)
    assert blend_costs.choose_tier(slow, 1000, 50, 0.15) == "dram", "either delays"


@hypothesis.given(rates=RATES, context=TOKENS, new=TOKENS, min_ratio=RATIOS, times=FASTER)
def test_a_faster_disk_never_moves_chunks_off_it_and_neither_does_a_slower_device(
    rates, context, new, min_ratio, times
):
    if blend_costs.choose_tier(rates, context, new, min_ratio) == "ssd":
        assert blend_costs.choose_tier(with_fetch(rates, times), context, new, min_ratio) == "ssd"
        assert blend_costs.choose_tier(with_device(rates, 1 / times), context, new, min_ratio) == "ssd"


@pytest.mark.parametrize(
    ("find", "wrong"),
    [
        (lambda rates: blend_costs.recompute_layer_s(rates, 10, 1.5), r"ratio .*got 1\.5"),
        (lambda rates: blend_costs.recompute_layer_s(rates, 10, math.nan), "ratio .*got nan"),
        (lambda rates: blend_costs.choose_ratio(rates, 10, 10, -0.1), r"min_ratio .*got -0\.1"),
        (lambda rates: blend_costs.choose_ratio(rates, 0, 10, 0.15), "context_tokens .*got 0"),
        (lambda rates: blend_costs.choose_ratio(rates, 10, 0, 0.15), "new_tokens .*got 0"),
        (lambda rates: blend_costs.choose_tier(rates, 10, 10, 0.15, history_tokens=-1), "history_tokens .*got -1"),
        (lambda rates: blend_costs.ideal_blend_s(rates, 10, 10, 0.5, check_layers=11), "check_layers .*got 11"),
        (lambda rates: blend_costs.predict_blend_s(rates, 10, 10, 0.5, depth=-1), "depth .*got -1"),
        (
            lambda rates: blend_costs.predict_blend_s(rates, 10, 10, 0.5, head_start_s=math.nan),
            "head_start_s .*got nan",
        ),
    ],
)
def test_what_cannot_be_is_refused(find, wrong):
    with pytest.raises(ValueError, match=wrong):
        find(make_rates())
