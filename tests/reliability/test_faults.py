"""Nothing that a disk does changes a token or ends a request, and the store says what it was."""

from __future__ import annotations

import itertools

import pytest

from tests.reliability import campaigns, workload

OF_READS = [
    name
    for name in campaigns.CAMPAIGNS
    if name not in ("writes that stall", "catalog commits that stall", "disk full", "directory read-only")
    and ("catalog" not in name or name == "catalog deleted before a start")
]


def run(directory, name: str, driver: str, num_faults: int, seed: int, ratio: float | None = None) -> None:
    campaign, _ = campaigns.CAMPAIGNS[name]
    tally = campaign(directory / "arena", driver, num_faults, seed, ratio)
    assert tally.faults >= num_faults
    assert tally.answers > 0
    assert tally.cached_tokens > 0, "nothing was ever read from SSD"
    assert tally.loaded_chunks > 0 or ratio is None
    assert (tally.wrong_tokens, tally.failed_requests) == (0, 0)


@pytest.mark.parametrize(
    ("name", "driver"),
    [
        (name, driver)
        for number, name in enumerate(campaigns.CAMPAIGNS)
        for driver in (workload.DRIVERS if "catalog" not in name else workload.DRIVERS[number % 2 :][:1])
    ],
)
def test_a_few_faults(tmp_path, name, driver):
    """What is done to blocks both formats see, what is done to the catalog one of them."""
    run(tmp_path, name, driver, 2, seed=1)


@pytest.mark.parametrize(("name", "ratio"), [*zip(OF_READS, itertools.cycle([1.0, 0.15]))])
def test_a_few_faults_with_chunks(tmp_path, name, ratio):
    """All of the chunks computed anew, answers are those of one pass; some, and a chunk is itself or nothing.

    Not what is done to writes: of chunks and of conversations these are the same. Of what is done to the catalog, which
    names both in one table, one.
    """
    run(tmp_path, name, "zarr3" if ratio == 1.0 else "raw", 2, seed=1, ratio=ratio)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [None, 1.0, 0.15])
@pytest.mark.parametrize("driver", workload.DRIVERS)
@pytest.mark.parametrize("name", campaigns.CAMPAIGNS)
def test_many_faults(tmp_path, name, driver, ratio):
    run(tmp_path, name, driver, campaigns.CAMPAIGNS[name][1] // 2, seed=2, ratio=ratio)
