"""Rates from samples as they come in: of the last ones, and only once there are some of each kind."""

from __future__ import annotations

import threading

import pytest

from ca_jax.kv.rates import RateMeter, Rates

NUM_LAYERS, LAYER_TOKEN_BYTES = 4, 1000


@pytest.fixture
def meter() -> RateMeter:
    return RateMeter(NUM_LAYERS, LAYER_TOKEN_BYTES)


def fill(meter: RateMeter, *, load: float = 1e9, save: float = 5e8, token_s: float = 1e-3) -> None:
    """A sample of each kind: bandwidths in bytes per second, and seconds of a token."""
    meter.add_load(1_000_000, 1_000_000 / load)
    meter.add_save(1_000_000, 1_000_000 / save)
    meter.add_prefill(0, 100, 100 * token_s)


def test_the_rates_are_those_of_the_samples(meter):
    fill(meter)
    rates = meter.rates
    assert isinstance(rates, Rates)
    assert (rates.num_layers, rates.layer_token_bytes) == (NUM_LAYERS, LAYER_TOKEN_BYTES)
    assert rates.load.bytes_per_s == pytest.approx(1e9)
    assert rates.save.bytes_per_s == pytest.approx(5e8)
    assert rates.prefill.seconds(0, 100) == pytest.approx(0.1)


@pytest.mark.parametrize("missing", ["add_load", "add_save", "add_prefill"])
def test_there_are_none_while_a_kind_has_no_sample(meter, missing, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(meter, missing, lambda *_: None)
        for _ in range(20):
            fill(meter)
        assert meter.rates is None
    fill(meter)
    assert meter.rates is not None


def test_they_are_fitted_again_when_enough_is_new(meter):
    fill(meter)
    first = meter.rates
    for _ in range(7):
        meter.add_load(1_000_000, 2e-3)
        assert meter.rates is first, "fitted again for a few samples"
    meter.add_load(1_000_000, 2e-3)
    assert meter.rates is not first
    assert meter.rates.load.bytes_per_s < first.load.bytes_per_s


def test_how_fast_the_ssd_is_is_known_from_the_first_fetch_on(meter):
    fill(meter)
    assert meter.rates.fetch is None
    meter.add_fetch(4_000_000, 2e-3)
    assert meter.rates.fetch.bytes_per_s == pytest.approx(2e9)
    first = meter.rates
    meter.add_fetch(4_000_000, 8e-3)
    assert meter.rates is first, "fitted again for one sample"
    for _ in range(64):
        meter.add_fetch(4_000_000, 8e-3)
    assert meter.rates.fetch.bytes_per_s == pytest.approx(5e8)
    meter.forget()
    assert meter.rates is None
    meter.add_fetch(4_000_000, 2e-3)
    assert meter.rates is None, "fetches alone give no rates"
    meter.forget()
    fill(meter, load=1e8)
    assert (meter.rates.fetch, meter.rates.load.bytes_per_s) == (None, pytest.approx(1e8))


def test_the_last_samples_count(meter):
    fill(meter)
    for _ in range(64):
        meter.add_load(1_000_000, 4e-3)
        meter.add_save(1_000_000, 5e-3)
        meter.add_prefill(0, 100, 0.6)
    rates = meter.rates
    assert rates.load.bytes_per_s == pytest.approx(1_000_000 / 4e-3)
    assert rates.save.bytes_per_s == pytest.approx(1_000_000 / 5e-3)
    assert rates.prefill.seconds(0, 100) == pytest.approx(0.6)


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 1.0), (1_000_000, 0.0), (1_000_000, -1e-9)])
def test_a_transfer_that_the_clock_does_not_see_says_nothing(meter, num_bytes, seconds):
    meter.add_load(num_bytes, seconds)
    meter.add_save(num_bytes, seconds)
    meter.add_fetch(num_bytes, seconds)
    meter.add_prefill(0, 100, 0.1)
    assert meter.rates is None
    fill(meter)
    assert meter.rates.fetch is None
    assert meter.rates.load.bytes_per_s == pytest.approx(1e9)


def test_any_thread_may_add(meter):
    """A fit takes the samples as they are then, while others come in."""
    fill(meter)
    saving = threading.Thread(target=lambda: [meter.add_save(1_000_000, 2e-3) for _ in range(5_000)])
    saving.start()
    while saving.is_alive():
        assert meter.rates.save.bytes_per_s == pytest.approx(5e8)
    saving.join()
    assert meter.rates.save.bytes_per_s == pytest.approx(5e8)
