"""Who of those that wait goes first: who takes least up to a first token, by what is stored; or who came first."""

from __future__ import annotations

import pytest

from ca_jax import SamplingParams
from ca_jax.kv.costs import PrefillRate, RateMeter, Rates, TransferRate
from tests import engine_kit as kit

LONG = [7 + i % 50 for i in range(50)]
FEW = SamplingParams(max_tokens=2, ignore_eos=True)


def begun_in(order: str) -> list[str]:
    """Of a long prompt, a short one and a short message behind a stored history: names, as they began.

    All wait for one slot, and came in that order.
    """
    with kit.small_engine(max_batch_size=1, queue_order=order, share_prefixes=False) as engine:
        session = engine.session()
        "".join(session.send_ids(LONG, sampling=FEW))
        kit.until(engine, lambda: kit.store_in(engine).num_readable(session.key) >= len(LONG))
        first = engine.session().submit(LONG, sampling=FEW)
        engine.step()
        jobs = {"long": engine.session().submit([9, *LONG], sampling=FEW)}
        jobs["short"] = engine.session().submit([5] * 20, sampling=FEW)
        jobs["stored"] = session.submit([4] * 3, sampling=FEW)
        for job in (first, *jobs.values()):
            for _ in engine.stream(job):
                pass
        return sorted(jobs, key=lambda name: jobs[name].started_s)


def test_the_least_to_compute_goes_first_and_by_arrival_whoever_came_first():
    assert begun_in("shortest") == ["stored", "short", "long"]
    assert begun_in("arrival") == ["long", "short", "stored"]


@pytest.mark.parametrize(
    ("seconds", "expected"), [(1e-9, ["stored", "short", "long"]), (0.15, ["short", "stored", "long"])]
)
def test_by_measured_rates_a_history_that_takes_long_to_load_counts(monkeypatch, seconds, expected):
    link = TransferRate(bytes_per_s=1e9, fixed_s=seconds)
    rates = Rates(num_layers=2, layer_token_bytes=8, load=link, save=link, prefill=PrefillRate(token_s=0.01))
    monkeypatch.setattr(RateMeter, "rates", property(lambda self: rates))
    assert begun_in("shortest") == expected
