"""`ttft` compares a turn with its load and its compute alone, each of which is what it says. No number is judged."""

import contextlib
import dataclasses

import numpy as np
import pytest

from benchmarks.apart import ApartEngine
from benchmarks.engines import OneSessionEngine, send_turn
from benchmarks.harness import BenchError
from benchmarks.recording import Recorder
from benchmarks.suites.ttft import TtftConfig
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.storage.config import StoreConfig
from tests.benchmarks.conftest import check_spread, steps

ENGINE = EngineConfig(compile_cache_dir=None, prefill_chunk_tokens=64)
ONE_ROW = TtftConfig(history_tokens=(150,), new_tokens=(9,), engine=ENGINE, repeats=1)
MEASURED = {
    *("ttft_dram_s", "ttft_ssd_s", "fetch_ssd_s", "compute_s", "load_s", "load_stall_s"),
    *("ratio_dram", "ratio_ssd", "ratio_ideal"),
}
RATIOS = ("ratio_dram", "ratio_ssd", "ratio_ideal")


def test_every_pair_of_lengths_is_a_row_without_recompiles(measure, model, tmp_path):
    config = dataclasses.replace(ONE_ROW, history_tokens=(150, 40), ssd_dir=str(tmp_path))
    result = measure("ttft", config, model)
    rows = result.rows
    assert [(row.history_tokens, row.new_tokens) for row in rows] == [(150, 9), (40, 9)]
    token_bytes = model.config.kv_bytes_per_token(itemsize=4)
    assert [row.kv_bytes for row in rows] == [150 * token_bytes, 40 * token_bytes]
    assert [(row.same_tokens, row.recompiles) for row in rows] == [(True, 0)] * 2
    for row in rows:
        assert row.spread.keys() == MEASURED
        check_spread(row)
        assert 0 < row.fetch_ssd_s < row.ttft_ssd_s
        assert row.ratio_dram == pytest.approx(row.ttft_dram_s / row.compute_s)
        assert row.ratio_ssd == pytest.approx(row.ttft_ssd_s / row.compute_s)
        assert row.ratio_ideal == pytest.approx(row.ttft_dram_s / max(row.load_s, row.compute_s))
    assert result.summary == {
        **{name: max(getattr(row, name) for row in rows) for name in RATIOS},
        "same_tokens": True,
        "recompiles": 0,
    }
    assert result.told("ttft") == steps(4)
    assert list(tmp_path.iterdir()) == [], "what was written is removed"


def test_a_history_that_did_not_come_from_ssd_is_no_row(measure, model, monkeypatch):
    monkeypatch.setattr(OneSessionEngine, "push_out", lambda _: None)
    with pytest.raises(BenchError, match=r"ssd_warm of 150 \+ 9 .* must load 150 tokens from ssd, got 150 tokens from"):
        measure("ttft", ONE_ROW, model)


def test_a_profile_is_of_the_round_and_needs_no_spans(tmp_path):
    recorder = Recorder(profile_dir=tmp_path / "profile")
    assert (recorder.is_wanted, recorder.timeline.enabled) == (True, False)
    with recorder.turn("before"):
        pass
    assert not (tmp_path / "profile").exists()
    with recorder.round(), recorder.turn("one"):
        pass
    recorder.write(title="", caption="")
    assert [path for path in (tmp_path / "profile").rglob("*") if path.is_file()]


# A load and a compute, one without the other.


@pytest.fixture
def apart(model):
    """An engine, and what does its loads and prefills apart."""
    stores = []
    config = dataclasses.replace(
        ENGINE, context_window=512, max_batch_size=1, store=StoreConfig(dram_gib=0.01, block_tokens=32)
    )
    with Engine(model, config, store_wrapper=lambda store: stores.append(store) or store) as engine:
        engine.wait_until_ready()
        with contextlib.closing(ApartEngine(engine, stores[0], max_history_tokens=200)) as made:
            yield engine, made


@pytest.mark.parametrize("num_new", [1, 9, 150], ids=["a token", "one pass", "three passes"])
def test_a_prefill_over_what_was_loaded_is_the_models(model, apart, num_new):
    engine, alone = apart
    rng = np.random.default_rng(0)
    history, new_ids = (rng.integers(model.config.vocab_size, size=n).tolist() for n in (100, num_new))
    session = engine.session()
    send_turn(engine, session, history)
    session.rewind(100)
    with alone.loaded(session) as loaded:
        assert loaded.num_tokens == 100
        assert loaded.load_s > 0
        token, elapsed_s = alone.prefill(loaded, new_ids)
    assert token == int(np.argmax(model.logits([*history, *new_ids])[-1]))
    assert elapsed_s > 0
    answer, _ = send_turn(engine, session, new_ids)
    assert answer == token, "the engine goes on as if nothing had been"
    assert session.usage.num_cached_tokens == 100


def test_a_history_the_store_has_not_all_of_is_no_load(model, apart):
    engine, alone = apart
    session = engine.session()
    send_turn(engine, session, list(range(1, 41)))
    engine.truncate_stored(session, 20)
    with (
        pytest.raises(BenchError, match="a load of 41 tokens must find all of them in DRAM, got 20"),
        alone.loaded(session),
    ):
        pytest.fail("there must be no history")
    session.rewind(20)
    with alone.loaded(session) as loaded:
        assert loaded.num_tokens == 20
    engine.drop_stored(session)
    with pytest.raises(BenchError, match=r"a load of 20 tokens .* got 0"), alone.loaded(session):
        pytest.fail("there must be no history")
