"""`reuse`, `prefill`, `decode` and `tiers` measure what their rows say, on a tiny model. No number is judged here."""

import dataclasses
import importlib.util

import numpy as np
import pytest

from benchmarks import engines
from benchmarks.disk import drop_cached, fill_cached
from benchmarks.engines import OneSessionEngine, one_session_config
from benchmarks.harness import SUITES, BenchError
from benchmarks.peers import make_peer
from benchmarks.suites.reuse import DecodeConfig, PrefillConfig, ReuseConfig
from benchmarks.suites.tiers import SOURCES, TiersConfig, rows_of
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.pretrained import load_model
from ca_jax.storage.config import SSD_DRIVERS
from ca_jax.testing import tiny
from tests.benchmarks.conftest import check_spread, steps

ENGINE = EngineConfig(compile_cache_dir=None)
CONFIGS = {
    "reuse": ReuseConfig(history_tokens=(150, 40), new_tokens=(9,), repeats=3, dram_gib=0.004, engine=ENGINE),
    "prefill": PrefillConfig(prefill_tokens=(70,), repeats=3, dram_gib=0.004, engine=ENGINE),
    "decode": DecodeConfig(
        batch_sizes=(3, 1), context_tokens=(20,), decode_steps=2, repeats=3, dram_gib=0.004, engine=ENGINE
    ),
}
has_torch = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None
wants_torch = pytest.mark.skipif(not has_torch, reason="wants torch and transformers: make setup-parity")


class RecordingPeer:
    """A peer of known speed that draws what the real model would, and notes what it was asked."""

    name = "recording"

    def __init__(self, model):
        self._model = model
        self.prompts = []
        self.decoded = []  # Batch size, context, steps.
        self._batch = (0, 0)

    def prefill(self, token_ids):
        self.prompts.append(list(token_ids))
        return int(np.argmax(self._model.logits(token_ids)[-1])), 1e-9

    def start_decode(self, prompts):
        self._batch = (len(prompts), len(prompts[0]))

    def decode(self, num_steps):
        self.decoded.append((*self._batch, num_steps))
        return 1e-9

    def end_decode(self):
        self._batch = (0, 0)


@pytest.fixture(scope="module")
def beside_a_peer(measure, model):
    """Suites, measured once beside a peer; the peers."""
    peers = {suite: RecordingPeer(model) for suite in CONFIGS}
    return {suite: measure(suite, CONFIGS[suite], model, peer=peer) for suite, peer in peers.items()}, peers


@pytest.mark.parametrize("suite", CONFIGS)
def test_every_cell_is_a_row_without_recompiles(beside_a_peer, suite):
    found = beside_a_peer[0][suite]
    cells = {"reuse": [(150, 9), (40, 9)], "prefill": [(70,)], "decode": [(3, 20), (1, 20)]}[suite]
    names = {"reuse": ("history_tokens", "new_tokens"), "prefill": ("tokens",), "decode": None}[suite]
    names = names or ("batch_size", "context_tokens")
    assert [tuple(getattr(row, name) for name in names) for row in found.rows] == cells
    assert found.told(suite) == steps(len(cells) * 4)
    found.check_spreads()
    assert all(row.spread for row in found.rows)
    assert found.run.startup["engine_start_s"] > 0 < found.run.startup["first_touch_s"]


def test_reuse_speedup_is_against_the_faster_recompute(measure, model, beside_a_peer):
    alone = dataclasses.replace(CONFIGS["reuse"], history_tokens=(40,), repeats=1)
    for row in measure("reuse", alone, model).rows:
        assert row.ttft_peer_recompute_s is None
        assert row.speedup == pytest.approx(row.ttft_recompute_s / row.ttft_reuse_s)
    found, peer = beside_a_peer[0]["reuse"], beside_a_peer[1]["reuse"]
    for row in found.rows:
        assert row.ttft_peer_recompute_s == 1e-9
        assert row.speedup == pytest.approx(1e-9 / row.ttft_reuse_s)
        assert row.same_tokens
    assert [len(prompt) for prompt in peer.prompts] == [159] * 4 + [49] * 4
    first = peer.prompts[0]
    assert all(prompt[:150] == first[:150] for prompt in peer.prompts[:4])
    assert len({prompt[150] for prompt in peer.prompts[:4]}) == 4


def test_decode_gives_the_peer_the_same_batches(beside_a_peer):
    found, peer = beside_a_peer[0]["decode"], beside_a_peer[1]["decode"]
    assert peer.decoded == [(3, 20, 2)] * 4 + [(1, 20, 2)] * 4
    for row in found.rows:
        assert row.peer_tokens_per_s == pytest.approx(row.batch_size * 2 / 1e-9)
        assert row.speedup_vs_peer == pytest.approx(row.tokens_per_s / row.peer_tokens_per_s)
        assert row.tokens_per_s_per_slot == pytest.approx(row.tokens_per_s / row.batch_size)
    (scaling,) = found.summary["batch_scaling"]
    assert scaling["batch_sizes"] == [1, 3]
    assert scaling["ratio"] == pytest.approx(found.rows[0].tokens_per_s / found.rows[1].tokens_per_s)


def test_a_history_the_store_has_no_room_for_is_no_row(measure, model):
    config = dataclasses.replace(CONFIGS["reuse"], dram_gib=0.0)
    with pytest.raises(BenchError, match=r"ttft_reuse_s of 150 .* must load 150 tokens from dram, got no tokens"):
        measure("reuse", config, model)


# Tiers.

TIERS = TiersConfig(history_tokens=(150, 40), new_tokens=(9,), repeats=2, engine=ENGINE)


@pytest.mark.parametrize("driver", SSD_DRIVERS)
def test_tiers_are_what_the_history_came_from(measure, model, disk, driver):
    found = measure("tiers", dataclasses.replace(TIERS, ssd_driver=driver, ssd_dir=str(disk)), model)
    rows = found.rows
    assert [(row.history_tokens, row.new_tokens, row.ssd_driver) for row in rows] == [(150, 9, driver), (40, 9, driver)]
    assert found.told("tiers") == steps(6)
    block_bytes = 128 * model.config.kv_bytes_per_token(itemsize=4)
    assert [row.kv_bytes for row in rows] == [2 * block_bytes, block_bytes]
    for row in rows:
        assert (row.recompiles, row.same_tokens) == (0, True)
        assert {source: times.cached_tokens for source, times in row.sources.items()} == {
            "dram": {"dram": row.history_tokens},
            "ssd_warm": {"ssd": row.history_tokens},
            "ssd": {"ssd": row.history_tokens},
            "ssd_restart": {"ssd": row.history_tokens},
            "recompute": {},
        }
        for times in row.sources.values():
            assert times.speedup == pytest.approx(row.sources["recompute"].ttft_s / times.ttft_s)
            assert times.spread.keys() == {"ttft_s", "fetch_s", "load_s", "load_stall_s"}
            check_spread(times)
        assert row.sources["recompute"].load_s == 0 < row.sources["dram"].load_s
    times = {name: rows[0].sources[name].speedup for name in SOURCES[:-1]}
    assert found.summary == {
        "recompiles": 0,
        "same_tokens": True,
        **{f"ttft_{source}_vs_recompute": speedup for source, speedup in times.items()},
    }
    assert list(disk.iterdir()) == []


def one_row(model, disk, **store_changes):
    """The row of one cell, by an engine whose store is another one."""
    config = dataclasses.replace(TIERS, history_tokens=(150,))
    sized = one_session_config(config.engine_config(), model, disk, max_tokens=159)
    engine = Engine(model, dataclasses.replace(sized, store=dataclasses.replace(sized.store, **store_changes)))
    served = OneSessionEngine(engine, suite="tiers", max_tokens=159, seed=0)
    try:
        return list(rows_of(served, [(150, 9)], 1, lambda: None))
    finally:
        served.close()


@pytest.mark.parametrize(
    ("store_changes", "message"),
    [
        ({"dram_gib": 0.01}, "ssd_warm of 150 .* must load 150 tokens from ssd, got 150 tokens from dram"),
        ({"dram_gib": 0.0001}, "dram of 150 .* must load 150 tokens from dram, got no tokens from the store"),
        ({"ssd_dir": None}, "must have an engine with an SSD tier"),
    ],
    ids=["too much DRAM", "too little DRAM", "no SSD"],
)
def test_a_sample_from_another_tier_is_no_row(model, disk, store_changes, message):
    with pytest.raises(BenchError, match=message):
        one_row(model, disk, **store_changes)


@pytest.mark.parametrize(
    ("name", "instead", "message"),
    [
        ("drop_cached", fill_cached, "ssd must have a page cache without stored KV"),
        ("fill_cached", drop_cached, "ssd_warm must have stored KV in the page cache"),
    ],
)
def test_a_page_cache_of_the_other_kind_is_no_row(model, disk, monkeypatch, name, instead, message):
    monkeypatch.setattr(engines, name, instead)
    with pytest.raises(BenchError, match=message):
        one_row(model, disk)


def test_a_recompute_that_finds_kv_is_no_row(model, disk, monkeypatch):
    monkeypatch.setattr(Engine, "drop_stored", lambda *_: None)
    with pytest.raises(BenchError, match=r"recompute of 150 .* must load no tokens from the store, got 150 tokens"):
        one_row(model, disk)


# The peer.


@wants_torch
@pytest.mark.parametrize("overrides", [{}, {"tie_embeddings": True, "num_kv_heads": 4}], ids=["untied", "tied"])
def test_transformers_peer_is_the_same_model(tmp_path, overrides):
    config = tiny.tiny_config(**overrides)
    tiny.write_tiny_hf(tmp_path, config, tiny.tiny_params(config, seed=3))
    model = load_model(str(tmp_path), dtype="float32")
    peer = make_peer("transformers", model)
    rng = np.random.default_rng(0)
    for length in (1, 30, 90):
        prompt = rng.integers(config.vocab_size, size=length).tolist()
        token, elapsed_s = peer.prefill(prompt)
        assert token == int(np.argmax(model.logits(prompt)[-1]))
        assert elapsed_s > 0
    with pytest.raises(RuntimeError, match="start_decode"):
        peer.decode(1)
    peer.start_decode(rng.integers(config.vocab_size, size=(2, 20)).tolist())
    assert peer.decode(3) > 0
    peer.end_decode()


def test_unknown_peers_are_refused_and_suites_say_which_have_one(model):
    with pytest.raises(ValueError, match="peer must be one of transformers, got 'vllm'"):
        make_peer("vllm", model)
    assert [suite.name for suite in SUITES.values() if suite.has_peer] == ["reuse", "prefill", "decode"]
