"""The store under an engine: no failure of it ends a turn or changes a token, and conversations outlive the engine.

They are found by id and by prefix, by their tenant only; pinned, dropped, expired.
"""

from __future__ import annotations

import functools

import pytest

from ca_jax.errors import InvalidRequestError, SessionBusyError, TenantError, UnknownSessionError
from ca_jax.storage.config import StoreConfig
from ca_jax.storage.records import MissReason, SkipReason
from ca_jax.storage.tickets import SaveTicket
from tests import engine_kit as kit
from tests.storage.store_helpers import writer_stopped
from tests.test_overlap_release import broken

PROMPTS = [kit.prompt(40), kit.prompt(30), kit.prompt(25)]


@pytest.fixture
def store(tmp_path) -> StoreConfig:
    return kit.ssd_store(tmp_path)


def cached_of(session, prompt) -> dict[str, int]:
    """Sends a turn and checks its answer; its cached tokens by tier."""
    return kit.check_turn(session, prompt).cached_tokens


@pytest.mark.parametrize("driver", ["zarr3", "raw"])
def test_a_conversation_goes_on_from_ssd_in_another_engine(tmp_path, driver):
    """Its tokens, messages and KV, as it is, rewound, and rewound while it is on SSD alone."""
    store = kit.ssd_store(tmp_path, ssd_driver=driver)
    with kit.small_engine(store=store) as engine:
        session = engine.session(session_id="one", system="Be brief.")
        kit.check_turn(session, "hello")
        cached_of(session, PROMPTS[1])
        before = session.conversation
    with kit.small_engine(store=store) as engine:
        with pytest.raises(InvalidRequestError, match="system message must come first"):
            engine.session(session_id="one", system="Be long.")
        session = engine.session(session_id="one")
        assert session.conversation == before
        assert [message["role"] for message in session.messages] == ["system"] + ["user", "assistant"] * 2
        num_known = len(before.token_ids) - 1
        assert cached_of(session, PROMPTS[2]) == {"ssd": num_known}
        assert cached_of(session, [65]) == {"dram": num_known + 25 + 12}
        stats = engine.store_stats()
        assert (stats.ssd.num_fetches, stats.num_hits_from_ssd, sum(stats.misses.values())) == (1, 1, 0)
        session.rewind(60)
    with kit.small_engine(store=store) as engine:
        session = engine.session(session_id="one")
        assert session.token_ids == before.token_ids[:60]
        session.rewind(40)
        left = session.conversation
        assert left.messages == before.messages[:3], "those of the second turn have left"
    with kit.small_engine(store=store) as engine:
        session = engine.session(session_id="one")
        assert session.conversation == left
        assert cached_of(session, [66]) == {"ssd": 40}


def test_other_weights_meet_neither_kv_nor_conversation(store):
    other = kit.model_of(seed=2)
    with kit.small_engine(store=store) as engine:
        session = engine.session(session_id="one")
        cached_of(session, PROMPTS[0])
        token_ids = session.token_ids
    with kit.small_engine(other, store=store) as engine:
        session = engine.session(session_id="one")
        assert session.token_ids == []
        kit.say(session, token_ids)
        assert session.usage.num_cached_tokens == 0
    with kit.small_engine(store=store, overflow=None) as engine:
        engine.warmup(max_history_tokens=16, max_new_tokens=8)
        assert engine.rates.fetch is None, "nothing was fetched"
        assert cached_of(engine.session(session_id="one"), PROMPTS[1]) == {"ssd": 51}
        assert engine.rates.fetch.seconds(engine.store_stats().ssd.fetched_bytes) > 0
    with kit.small_engine() as engine:
        assert engine.session(session_id="one").token_ids == [], "there is no SSD"


def test_pin_drop_and_list_by_their_own_tenant_alone(store):
    with kit.small_engine(store=store) as engine:
        session = engine.session(session_id="one")
        cached_of(session, PROMPTS[0])
        engine.stored.pin("one")
        engine.wait_for_saves()
        (info,) = engine.stored.list()
        assert (info.session_id, info.num_tokens, info.ssd_tokens, info.pinned) == ("one", 51, 51, True)
    with kit.small_engine(store=store) as engine:
        stored = engine.stored
        assert [info.pinned for info in stored.list()] == [True]
        for call in (stored.pin, stored.unpin, stored.drop, functools.partial(stored.set_ttl, ttl_s=1.0)):
            with pytest.raises(TenantError, match="'one' must be asked for by its own tenant, got 'b'"):
                call("one", tenant="b")
            with pytest.raises(UnknownSessionError, match="the session must be stored, and 'two' is not"):
                call("two", tenant="b")
        for ttl_s in (-1.0, float("nan")):
            with pytest.raises(InvalidRequestError, match=f"ttl_s must be a number of seconds >= 0, got {ttl_s}"):
                engine.session(ttl_s=ttl_s)
            with pytest.raises(ValueError, match=f"got {ttl_s}"):
                stored.set_ttl("one", ttl_s)
        engine.stored.unpin("one")
        session = engine.session(session_id="one")
        answer = session.send_ids(PROMPTS[1], max_tokens=12)
        next(answer)
        with pytest.raises(SessionBusyError, match="idle"):
            engine.stored.drop("one")
        kit.drain(answer)
        engine.stored.drop("one")
        assert engine.stored.list() == ()
        assert cached_of(session, [65]) == {"dram": 0}
        session.close()
    with kit.small_engine(store=store) as engine:
        assert engine.stored.list() == ()
        assert engine.session(session_id="one").token_ids == []


def test_a_session_whose_time_is_over_is_forgotten(store):
    with kit.small_engine(store=store) as engine:
        for name, ttl_s in (("brief", 0.0), ("long", 1e6), ("endless", None)):
            cached_of(engine.session(session_id=name, ttl_s=ttl_s), kit.prompt(20))
        engine.wait_for_saves()
        assert {info.session_id for info in engine.stored.list()} == {"long", "endless"}
        assert engine.store_stats().num_expired == 1
        engine.stored.set_ttl("endless", 0.0)
    with kit.small_engine(store=store) as engine:
        assert [(info.session_id, info.ttl_s) for info in engine.stored.list()] == [("long", 1e6)]


def test_turns_taken_back_on_ssd_cost_no_more_than_a_block(tmp_path):
    """Two conversations that push each other out of DRAM, rewound while they are on SSD alone."""
    with kit.small_engine(store=kit.ssd_store(tmp_path, dram_blocks=25), max_batch_size=1) as engine:
        sessions = [engine.session() for _ in range(2)]
        for seed, session in enumerate(sessions):
            kit.say(session, kit.prompt(272, seed), max_tokens=2)
            engine.wait_for_saves()
        for turn in range(10):
            for session in sessions:
                session.rewind(256)
                kit.say(session, kit.prompt(16, turn), max_tokens=2)
                assert session.usage.num_cached_tokens == 256
        stats = engine.store_stats()
        assert (stats.misses[MissReason.ABSENT], sum(stats.misses.values())) == (2, 2)
        assert stats.num_hits_from_ssd > 10


def test_a_turn_that_ends_before_the_store_has_room_for_it_is_kept_with_its_conversation(tmp_path):
    """DRAM is full of what SSD has not yet, and SSD writes nothing for a while."""
    store = kit.ssd_store(tmp_path, dram_blocks=6)
    with kit.small_engine(store=store, max_batch_size=1) as engine:
        with writer_stopped(engine._kv.store):
            kit.say(engine.session(session_id="first"), kit.prompt(85), max_tokens=4)
            session = engine.session(session_id="second")
            kit.say(session, kit.prompt(30), max_tokens=4)
            assert [info.session_id for info in engine.stored.list()] == ["first"]
        left = session.conversation
    with kit.small_engine(store=store) as engine:
        session = engine.session(session_id="second")
        assert session.conversation == left
        assert cached_of(session, [65]) == {"ssd": len(left.token_ids) - 1}


def test_a_turn_given_up_before_its_answer_takes_no_conversation_with_it(store):
    """Its prompt has other tokens than what is stored, which goes; some of its KV is saved, and it is cancelled."""
    with kit.small_engine(store=store) as engine:
        session = engine.session(session_id="one")
        kit.say(session, PROMPTS[0])
        engine.wait_for_saves()
        left = session.conversation
        engine.truncate_stored(session, 0)
        answer = session.send_ids(kit.prompt(200))
        engine.step()
        engine.step()
        answer.close()
        engine.wait_for_saves()
        (info,) = engine.stored.list()
        assert info.ssd_tokens >= 64
    with kit.small_engine(store=store) as engine:
        session = engine.session(session_id="one")
        assert session.conversation == left
        assert cached_of(session, [65])["ssd"] >= 40


# DRAM alone: no room, broken saves, eviction.


def test_a_conversation_larger_than_the_store_is_reused_as_far_as_it_fits():
    """Four blocks of 16: what a save that does not fit would have added is skipped, what is stored stays."""
    with kit.small_engine(store=kit.store_of(4)) as engine:
        session = engine.session()
        assert [cached_of(session, prompt) for prompt in PROMPTS] == [{"dram": num} for num in (0, 51, 51)]
        engine.wait_for_saves()
        stats = engine.store_stats()
        assert stats.skipped_saves[SkipReason.TOO_LARGE] == 2
        assert (stats.num_evictions, stats.num_hits, engine.metrics.failed_saves) == (0, 2, 0)


@pytest.mark.parametrize(
    ("method", "num_calls", "num_stored"),
    [("write", 0, 0), ("write", 2, 0), ("write_all", 0, 40), ("write_all", 1, 48)],
    ids=["first layer", "last layer", "first decoded tokens", "last decoded tokens"],
)
def test_a_save_that_breaks_shortens_what_is_stored_and_nothing_else(method, num_calls, num_stored):
    with kit.small_engine() as engine:
        session = engine.session()
        with broken(SaveTicket, method, num_calls):
            cached_of(session, PROMPTS[0])
            engine.wait_for_saves()
        assert engine.metrics.failed_saves >= 1
        assert [cached_of(session, prompt)["dram"] for prompt in PROMPTS[1:]] == [num_stored, 52 + 42 - 1]
        assert engine.store_stats().num_aborted_saves >= 1
