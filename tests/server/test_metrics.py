"""What Prometheus reads of the store, by tier: held against what requests have just brought about."""

from __future__ import annotations

import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ca_jax.storage.records import GAP_BOUNDS_S, MissReason
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import assistant, chat, text_of, user

DRAM_BLOCKS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    store = dataclasses.replace(
        kit.store_of(DRAM_BLOCKS), ssd_dir=str(tmp_path_factory.mktemp("ssd")), ssd_gib=0.05, ssd_free_floor_gib=0.0
    )
    with sk.running(store=store) as running:
        yield running


def scrape(server):
    """Values by name and labels, the model's name left out; the types of all."""
    with server.http() as http:
        families = list(text_string_to_metric_families(http.get("/metrics").text))
    values = {
        (sample.name, *sorted(value for label, value in sample.labels.items() if label != "model_name")): sample.value
        for family in families
        for sample in family.samples
    }
    return values, {family.name: family.type for family in families}


def test_every_tier_says_what_it_holds_and_how_soon_what_it_evicted_was_wanted_again(server):
    asked = [[user(f"{name} {'word ' * 30}")] for name in ("one", "two", "three", "four")]
    with server.client() as client:
        answers = []
        for messages in asked:
            answers.append(chat(client, messages, 12))
            server.engine.wait_for_saves()
        before, _ = scrape(server)
        followed = chat(client, [*asked[0], assistant(text_of(answers[0])), user("more")], 12)
    assert followed.usage.ca_jax["cached_tokens"] == {"ssd": answers[0].usage.total_tokens - 1}
    found, types = scrape(server)
    assert types["ca_jax:evict_to_reuse_seconds"] == "histogram"
    assert before["ca_jax:tier_evictions_total", "dram"] >= 1
    assert before["ca_jax:evict_to_reuse_seconds_count", "dram"] == 0
    assert found["ca_jax:evict_to_reuse_seconds_count", "dram"] == 1
    assert 0 < found["ca_jax:evict_to_reuse_seconds_sum", "dram"] < sk.DEADLINE_S
    for tier, num_gaps in (("dram", 1), ("ssd", 0)):
        cumulative = [found["ca_jax:evict_to_reuse_seconds_bucket", *sorted((str(le), tier))] for le in GAP_BOUNDS_S]
        assert cumulative == sorted(cumulative)
        assert found["ca_jax:evict_to_reuse_seconds_bucket", "+Inf", tier] == cumulative[-1] == num_gaps
    stats = server.engine.store_stats()
    for tier, num_sessions in (("dram", stats.num_dram_sessions), ("ssd", stats.ssd.num_sessions)):
        assert found["ca_jax:tier_sessions", tier] == num_sessions > 0
        assert 0 < found["ca_jax:tier_used_bytes", tier] <= found["ca_jax:tier_capacity_bytes", tier]
        assert ("ca_jax:tier_evicted_bytes_total", tier) in found
    assert found["ca_jax:tier_sessions", "dram"] < found["ca_jax:tier_sessions", "ssd"] == len(asked)
    assert found["ca_jax:fetches_total",] - before["ca_jax:fetches_total",] == 1
    assert found["ca_jax:store_hits_total", "ssd"] - before["ca_jax:store_hits_total", "ssd"] == 1
    assert {key[1] for key in found if key[0] == "ca_jax:store_misses_total"} == set(MissReason)
    assert found["ca_jax:store_misses_total", "absent"] >= len(asked)


def test_what_moves_says_how_fast_and_what_waited_for_it_how_long(server):
    history = []
    with server.client() as client:
        for text in ("how fast?", "and how far?", "and for how long?"):
            history.append(user(text))
            history.append(assistant(text_of(chat(client, history))))
    server.engine.wait_for_saves()
    meter = server.engine._kv.meter
    meter.forget()  # What a turn of a tiny model moves is too little for a rate: a fit may say that bytes cost nothing.
    meter.add_prefill(0, 64, 0.01)
    for add, rate in ((meter.add_load, 1e8), (meter.add_save, 1e9)):
        for num_bytes in (1 << 20, 1 << 22):
            add(num_bytes, num_bytes / rate)
    found, types = scrape(server)
    assert types["ca_jax:bytes_per_second"] == "gauge"
    assert found["ca_jax:bytes_per_second", "load"] == pytest.approx(1e8)
    assert found["ca_jax:bytes_per_second", "save"] == pytest.approx(1e9)
    for name in ("load_stall", "write_stall"):
        assert found[f"ca_jax:{name}_seconds_total",] >= 0
    for name in ("loaded", "saved", "flushed"):
        assert found[f"ca_jax:{name}_bytes_total",] > 0
