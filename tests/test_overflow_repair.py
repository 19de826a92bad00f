"""What stays, repaired: all of it, some tokens, or by its drift; each against its own reference."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

from ca_jax.kv.async_saver import AsyncSaver
from ca_jax.kv.layer_loader import LayerLoad
from ca_jax.overflow.config import OverflowConfig
from ca_jax.recompute.drift import Drift
from ca_jax.recompute.plan import repair_plan
from ca_jax.storage.tickets import LoadTicket
from tests import engine_kit as kit
from tests import overflow_kit as ok


@pytest.fixture
def drift(tmp_path) -> tuple[str, Drift]:
    """A file, and what is in it."""
    return ok.random_drift(kit.tiny_model(), ok.WINDOW, tmp_path)


REPAIRS = {
    "all": {"repair_ratio": 1.0},
    "deviating": {"repair_ratio": 0.6},
    "anchor": {"anchor_tokens": 16, "keep_first": 0},
    "anchor behind first tokens": {"anchor_tokens": 32, "keep_first": 4},
    "drift": {"drift": True},
    "drift and anchor": {"drift": True, "anchor_tokens": 16, "keep_first": 0},
    "spread": {"repair_ratio": 0.5, "repair": "spread", "anchor_tokens": 8},
    "drift, then spread": {"drift": True, "repair_ratio": 0.5, "repair": "spread", "keep_first": 0},
    "default": {name: getattr(OverflowConfig(), name) for name in ("repair", "repair_ratio", "anchor_tokens")},
}


def repairing(name: str, drift: tuple[str, Drift]) -> tuple[OverflowConfig, Drift | None]:
    """A config, and the drift that it names."""
    changes = dict(REPAIRS[name])
    drifts = changes.pop("drift", False)
    overflow = ok.config(**changes, **({"drift": drift[0]} if drifts else {}))
    return overflow, drift[1] if drifts else None


def repaired_pair(name: str, drift: tuple[str, Drift], **changes: object) -> contextlib.AbstractContextManager[ok.Pair]:
    return ok.pair(*repairing(name, drift), **changes)


def expect_repaired(pair: ok.Pair, num_tokens: int) -> None:
    """The last turn repaired so many first tokens as its config says, and what is stored is the reference's KV."""
    plan = repair_plan(pair.reference.overflow, kit.NUM_LAYERS, num_tokens)
    assert pair.session.usage.repaired_tokens == (0 if plan is None else round(plan.num_recomputed))
    pair.expect_stored_kv()


BOTH_TIERS = [*((name, "ssd") for name in REPAIRS), ("default", "dram"), ("drift and anchor", "dram")]


@pytest.mark.parametrize(("name", "store"), BOTH_TIERS, indirect=["store"])
def test_repair_after_a_cut_before_a_prompt_and_after_cuts_in_an_answer(name, drift, store):
    """At once what is quick, the rest by the next prefill: of the tokens that were there, not of those behind them."""
    with repaired_pair(name, drift, store=store) as pair:
        pair.turns(100, 30)
        assert pair.engine.metrics.truncations == 1
        expect_repaired(pair, pair.reference.num_cached)
        pair.turns(10)
        expect_repaired(pair, 0)  # Once.
        pair.turn(kit.prompt(20), 100)
        assert pair.engine.metrics.truncations == 3
        num_kept = ok.WINDOW - 1 - 64
        assert pair.session.conversation.num_to_repair == num_kept
        assert pair.session.usage.repaired_tokens == 0
        pair.turns(10)
        assert pair.session.conversation.to_drift == []
        expect_repaired(pair, num_kept)


@pytest.mark.parametrize("num_new", [1, 64, 65, 80])
@pytest.mark.parametrize("name", ["default", "drift, then spread"])
def test_the_repair_is_the_same_with_a_message_in_one_pass_and_in_a_pass_of_its_own(name, num_new, drift):
    with repaired_pair(name, drift) as pair:
        pair.turns(36)
        pair.discard(np.arange(44) % 8 == 1)
        pair.turn(kit.prompt(num_new), 4)
        expect_repaired(pair, pair.reference.num_cached)


@pytest.mark.parametrize("name", ["all", "anchor", "drift"])
@pytest.mark.parametrize("num_kept", [0, 20])
def test_what_is_computed_anew_anyway_is_not_repaired(name, num_kept, drift):
    """KV that was lost before its repair: fresh tokens need none, nor do they later."""
    with repaired_pair(name, drift) as pair:
        pair.turns(60)
        pair.discard(np.arange(68) % 3 == 1)
        pair.lose(num_kept)
        pair.turns(10)
        expect_repaired(pair, num_kept)
        pair.turns(10, seed=3)
        expect_repaired(pair, 0)


@pytest.mark.parametrize("name", ["all", "anchor", "drift"])
def test_repair_outlives_the_engine(name, drift, tmp_path):
    """Cut by hand, then restarted: the next engine repairs. Restarted again: the one after it finds it repaired."""
    overflow, values = repairing(name, drift)
    store, reference = kit.ssd_store(tmp_path / "store"), None
    for start in range(3):
        with kit.small_engine(**ok.SMALL, overflow=overflow, store=store) as engine:
            pair = ok.Pair(engine, engine.session(session_id="one"), reference, values)
            reference = pair.reference
            pair.turn(kit.prompt(70 if not start else 9, seed=start), 5)
            expect_repaired(pair, pair.reference.num_cached if start == 1 else 0)
            if not start:
                pair.discard((np.arange(75) > 10) & (np.arange(75) < 31))


@pytest.mark.parametrize("name", ["all", "anchor", "drift"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_load_that_breaks_while_it_is_repaired_is_recomputed(name, layer, drift, monkeypatch):
    def read(ticket, asked, destination, original=LoadTicket.read):
        if asked == layer:
            raise OSError("the disk is on fire")
        return original(ticket, asked, destination)

    with repaired_pair(name, drift) as pair:
        engine = pair.engine
        pair.turns(60)
        pair.discard(np.arange(68) % 3 == 1)
        pair.reference.forget(0)
        with monkeypatch.context() as patch:
            patch.setattr(LoadTicket, "read", read)
            pair.turns(10)
        assert engine.metrics.failed_loads == 1
        assert pair.session.usage.repaired_tokens == 0
        pair.expect_stored_kv()
        pair.turns(10, seed=3)
        assert pair.session.usage.repaired_tokens == 0


@pytest.mark.parametrize("broken", ["run_pass", "read"])
@pytest.mark.parametrize("name", ["all", "drift and anchor"])
def test_a_repair_that_breaks_otherwise_is_done_by_the_next_turn(name, broken, drift, monkeypatch):
    """Computing it, or reading it to be saved: what is stored gives way to nothing less than all of it."""

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with repaired_pair(name, drift) as pair:
        engine = pair.engine
        pair.turns(60)
        pair.discard(np.arange(68) % 3 == 1)
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, broken, fail)
            with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
                ok.say(pair.session, kit.prompt(20), 4)
        pair.turns(10)
        assert pair.session.usage.repaired_tokens > 0
        assert engine.metrics.failed_loads == 0
        pair.expect_stored_kv()


def test_a_repair_is_alone_in_its_pass_also_where_the_prompt_before_it_breaks(drift, monkeypatch):
    with repaired_pair("default", drift) as pair:
        first, beside = pair.engine.session(), pair.engine.session()
        ok.say(first, kit.prompt(30), 4)
        pair.turns(60)
        pair.discard(np.arange(68) % 3 == 1)
        next(going_on := beside.send_ids(kit.prompt(20), max_tokens=40))
        broken = first.send_ids(kit.prompt(10), max_tokens=4, priority=-1)
        repaired = pair.session.send_ids(kit.prompt(10), max_tokens=8)

        def begin(load: LayerLoad, original=LayerLoad.begin) -> None:
            monkeypatch.setattr(LayerLoad, "begin", original)
            raise OSError("the device is on fire")

        monkeypatch.setattr(LayerLoad, "begin", begin)
        kit.drain(going_on, repaired)
        with pytest.raises(OSError, match="on fire"):
            kit.drain(broken)
        assert repaired.job.output_ids == pair.reference.say(kit.prompt(10), 8)
        assert repaired.job.repaired_tokens
        kit.expect_right(beside)


@pytest.mark.parametrize("then", ["goes on", "is opened anew"])
@pytest.mark.parametrize("when", ["in a turn", "at idle"])
def test_what_is_repaired_and_cannot_be_saved_is_not_taken_from_what_ssd_has(when, then, drift, tmp_path, monkeypatch):
    """That is from before the repair. The first 4 tokens have seen none that left, and are loaded."""

    def fail(self: AsyncSaver, ticket: object, part: object) -> None:
        raise OSError("no memory")

    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values, store=kit.ssd_store(tmp_path / "store")) as pair:
        engine = pair.engine
        pair.turn(kit.prompt(100), 40)
        engine.wait_for_saves()
        with monkeypatch.context() as patch:
            patch.setattr(AsyncSaver, "_write", fail)
            if when == "in a turn":
                pair.turn(kit.prompt(10, 1), 8)
                assert pair.session.usage.repaired_tokens
            else:
                while engine.step():
                    pass
                assert engine.metrics.idle_recomputes == 1
                pair.reference.num_to_repair = 0
            engine.wait_for_saves()
        assert engine.metrics.failed_saves
        if then == "is opened anew":
            name = pair.session.session_id
            engine.release(pair.session)
            pair.session = engine.session(session_id=name)
        pair.reference.forget(4)
        pair.turn(kit.prompt(10, 2), 8)
        assert pair.session.usage.num_cached_tokens == 4
        pair.expect_stored_kv()
