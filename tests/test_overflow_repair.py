"""Other ways to use what stays: computed anew, at old positions, repaired in part; each against its own reference."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.overflow.config import OverflowConfig
from ca_jax.recompute.drift import Drift
from ca_jax.recompute.plan import Plan, plan_repair, repair_plan
from ca_jax.recompute.recomputer import Recomputer, make_recomputer
from ca_jax.storage.tickets import LoadTicket
from ca_jax.turns.requests import Usage
from tests import engine_kit as kit
from tests import overflow_kit as ok

DRIFT_SIZE = 0.2


def random_drift() -> Drift:
    """A drift of the tiny model that nobody measured."""
    model = kit.tiny_model()
    shape = (model.config.num_layers, 2, model.config.num_kv_heads, model.config.head_dim)
    values = np.random.default_rng(0).normal(0, DRIFT_SIZE, shape).astype(np.float32)
    return Drift(values=values, fingerprint=model.fingerprint, window=ok.WINDOW, truncation_ratio=0.5, num_tokens=1)


@pytest.fixture
def drift(tmp_path) -> tuple[str, Drift]:
    """A file, and what is in it."""
    path = tmp_path / "drift.npz"
    random_drift().save(path)
    return str(path), random_drift()


@pytest.fixture(params=["dram", "ssd"])
def store(request, tmp_path):
    return ok.dram_store() if request.param == "dram" else ok.ssd_store(tmp_path / "store")


def fresh_kv(token_ids: list[int]) -> np.ndarray:
    """KV of a fresh prefill: `[L, 2, T, K, H]`."""
    cache = ok.SlicedCache(ok.WINDOW)
    cache.feed(token_ids)
    return cache.kv


# Other methods.


@pytest.mark.parametrize("method", ["tt", "of"])
@pytest.mark.parametrize(("keep_first", "ratio"), [(4, 0.5), (0, 1.0)])
def test_what_stays_is_computed_anew(method, keep_first, ratio, store):
    """It is a fresh prefill's, to the token: before a prompt, and in the middle of an answer, even if nothing stays."""
    with ok.engine_of(ok.config(keep_first, ratio, method=method), store=store) as engine:
        session, reference = engine.session(), ok.Conversation(engine.config.overflow)
        for turn, (prompt_tokens, max_tokens) in enumerate([(60, 10), (80, 10), (20, 3), (30, 150), (40, 5)]):
            prompt = kit.prompt(prompt_tokens, seed=turn)
            was_cut = engine.metrics.truncations
            with ok.recorded_logits(engine) as logits:
                answer = ok.say(session, prompt, max_tokens)
            assert answer == reference.say(prompt, max_tokens)
            np.testing.assert_allclose(logits, reference.logits, rtol=0, atol=ok.ATOL)
            if turn == 1:
                assert engine.metrics.truncations == was_cut + 1
                assert session.usage.num_cached_tokens == 0
            if turn == 2:
                assert session.usage.num_cached_tokens == session.usage.prompt_tokens - 21
            stored = kit.stored_kv(engine, session)
            np.testing.assert_allclose(stored, fresh_kv(session.token_ids[:-1]), rtol=0, atol=ok.ATOL)
        assert engine.metrics.truncations >= 3


def test_of_loses_what_is_stored_and_says_so():
    with ok.engine_of(ok.config(method="of")) as engine:
        pair = ok.Pair(engine)
        for num_lost, prompt_tokens in ((0, 60), (1, 80), (1, 10), (2, 60)):
            ok.say(pair.session, kit.prompt(prompt_tokens), 4)
            assert engine.metrics.invalidated_histories == num_lost
        engine.drop_stored(pair.session)
        ok.say(pair.session, kit.prompt(60), 4)
        assert engine.metrics.invalidated_histories == 2, "nothing was stored"


@pytest.mark.parametrize("method", ["ca", "tt"])
def test_other_methods_lose_nothing_that_way(method):
    with ok.engine_of(ok.config(method=method)) as engine:
        session = engine.session()
        for prompt_tokens in (60, 80, 60):
            ok.say(session, kit.prompt(prompt_tokens), 4)
        assert engine.metrics.invalidated_histories == 0


def test_methods_differ():
    """Else none of these tests would tell one from another."""
    answers = set()
    for method in ("ca", "tt"):
        with ok.engine_of(ok.config(method=method)) as engine:
            session = engine.session()
            ok.say(session, kit.prompt(100), 4)
            answers.add(tuple(ok.say(session, kit.prompt(60), 12)))
    assert len(answers) == 2


# Repair.


REPAIRS = {
    "all": {"repair_ratio": 1.0},
    "all, of all tokens": {"repair_ratio": 1.0, "keep_first": 0},
    "anchor": {"anchor_tokens": 16, "keep_first": 0},
    "anchor behind first tokens": {"anchor_tokens": 32, "keep_first": 4},
    "anchor over all": {"anchor_tokens": 1000},
    "drift": {"drift": True},
    "drift and anchor": {"drift": True, "anchor_tokens": 16, "keep_first": 0},
    "drift, then all": {"drift": True, "repair_ratio": 1.0},
    "all, spread": {"repair_ratio": 1.0, "repair": "spread"},
    "spread": {"repair_ratio": 0.5, "repair": "spread", "anchor_tokens": 8},
    "drift, then spread": {"drift": True, "repair_ratio": 0.5, "repair": "spread", "keep_first": 0},
    "default": {name: getattr(OverflowConfig(), name) for name in ("repair", "repair_ratio", "anchor_tokens")},
}


def repairing(name: str, drift: tuple[str, Drift], ratio: float = 0.5) -> tuple[OverflowConfig, Drift | None]:
    """A config, and the drift that it names."""
    changes = dict(REPAIRS[name])
    drifts = changes.pop("drift", False)
    overflow = ok.config(ratio=ratio, **changes, **({"drift": drift[0]} if drifts else {}))
    return overflow, drift[1] if drifts else None


@pytest.mark.parametrize("name", REPAIRS)
def test_repair_before_a_prompt(name, drift, store):
    overflow, values = repairing(name, drift)
    with ok.engine_of(overflow, store=store) as engine:
        pair = ok.Pair(engine, drift=values)
        pair.turns(100, 30)
        assert engine.metrics.truncations == 1
        assert pair.session.usage.repaired_tokens == expected_repaired(overflow, pair.reference.num_cached)
        pair.expect_stored_kv()
        pair.turns(10)
        assert pair.session.usage.repaired_tokens == 0, "once"
        pair.turns(60, 10)
        pair.expect_stored_kv()


@pytest.mark.parametrize(("max_tokens", "num_cuts"), [(50, 1), (110, 2)])
@pytest.mark.parametrize("name", REPAIRS)
def test_repair_after_cuts_in_an_answer(name, max_tokens, num_cuts, drift):
    """At once what is quick, the rest by the next prefill: of the tokens that were there, not of those behind them."""
    overflow, values = repairing(name, drift)
    with ok.engine_of(overflow) as engine:
        pair = ok.Pair(engine, drift=values)
        pair.turn(kit.prompt(100), max_tokens)
        assert engine.metrics.truncations == num_cuts
        num_kept = ok.WINDOW - 1 - 64
        assert pair.session.conversation.num_to_repair == num_kept
        assert pair.session.usage.repaired_tokens == 0
        pair.turn(kit.prompt(10, seed=1), 8)
        assert pair.session.usage.repaired_tokens == expected_repaired(overflow, num_kept)
        pair.expect_stored_kv()
        pair.turn(kit.prompt(5, seed=2), 3)
        assert pair.session.usage.repaired_tokens == 0


@pytest.mark.parametrize("num_new", [1, 64, 65, 80])
@pytest.mark.parametrize("name", ["spread", "default", "drift, then spread"])
def test_the_repair_is_the_same_with_a_message_in_one_pass_and_in_a_pass_of_its_own(name, num_new, drift):
    overflow, values = repairing(name, drift)
    with ok.engine_of(overflow) as engine:
        pair = ok.Pair(engine, drift=values)
        pair.turns(36)
        pair.discard(np.arange(44) % 8 == 1)
        pair.turn(kit.prompt(num_new), 4)
        assert pair.session.usage.repaired_tokens == expected_repaired(overflow, pair.reference.num_cached)
        pair.expect_stored_kv()


def expected_repaired(overflow: OverflowConfig, num_tokens: int) -> int:
    if overflow.repair_ratio == 1:
        return num_tokens
    return max(min(overflow.anchor_tokens, num_tokens), int(overflow.repair_ratio * num_tokens) // 8 * 8)


def test_all_of_it_repaired_is_a_fresh_prefill():
    with ok.engine_of(ok.config(repair_ratio=1.0)) as engine:
        session = engine.session()
        ok.say(session, kit.prompt(100), 4)
        answer = ok.say(session, kit.prompt(60), 12)
        with ok.engine_of(ok.config(method="tt")) as other:
            same = other.session()
            ok.say(same, kit.prompt(100), 4)
            assert ok.say(same, kit.prompt(60), 12) == answer
        stored = kit.stored_kv(engine, session)
        np.testing.assert_allclose(stored, fresh_kv(session.token_ids[:-1]), rtol=0, atol=ok.ATOL)


@pytest.mark.parametrize("num_anchors", [1, 5, 17])
def test_anchors_are_rounded_up_to_what_is_compiled(num_anchors):
    """To 8 and 24: what is stored has a fresh beginning so long, and what is behind it is as it was."""
    with ok.engine_of(ok.config(0, anchor_tokens=num_anchors)) as engine:
        pair = ok.Pair(engine)
        pair.turns(100, 30)
        rounded = -(-num_anchors // 8) * 8
        assert pair.session.usage.repaired_tokens == rounded
        stored = kit.stored_kv(engine, pair.session)
        fresh = fresh_kv(pair.session.token_ids[: rounded + 1])
        np.testing.assert_allclose(stored[:, :, :rounded], fresh[:, :, :rounded], rtol=0, atol=ok.ATOL)
        assert np.abs(stored[1:, :, rounded] - fresh[1:, :, rounded]).max() > 0.1
        pair.expect_stored_kv()


@dataclasses.dataclass(frozen=True)
class CutByHand:
    """What is left of a conversation of 112 tokens after its next turn."""

    kv: np.ndarray  # Stored, of the 75 tokens that stayed, [L, 2, 75, K, H].
    token_ids: list[int]  # Those.
    usage: Usage  # Of that turn.
    plan: Plan | None  # Of its repair.
    recomputer: Recomputer | None  # Another that would do it.


def cut_by_hand(overflow: OverflowConfig) -> CutByHand:
    """Has 36 tokens leave, and the next turn repair the others."""
    with ok.engine_of(overflow) as engine:
        session = engine.session()
        ok.say(session, kit.prompt(110), 2)
        discarded = np.zeros(112, bool)
        discarded[4:40] = True
        session.discard(discarded)
        ok.say(session, kit.prompt(5), 1)
        token_ids, plan = session.token_ids[:75], repair_plan(overflow, 3, 75, engine._runner.padded_history(75))
        return CutByHand(
            kv=kit.stored_kv(engine, session)[:, :, :75],
            token_ids=token_ids,
            usage=session.usage,
            plan=plan,
            recomputer=None if plan is None else make_recomputer(engine._runner, plan, token_ids),
        )


@pytest.mark.parametrize("ratio", [0.5, 0.7, 0.8])
def test_the_tokens_that_deviate_most_are_computed_anew(ratio):
    """Of each layer as many as planned, whose KV is then nearer to a fresh prefill's; all others stay as they were."""
    without, found = cut_by_hand(ok.config()), cut_by_hand(ok.config(repair_ratio=ratio))
    token_ids, usage, kept = found.token_ids, found.usage, {0.0: without.kv, ratio: found.kv}
    fresh = fresh_kv(token_ids)
    plan = plan_repair(num_layers=3, num_tokens=75, ratio=ratio)
    assert usage.repaired_tokens == round(plan.num_recomputed)
    assert plan.chooses
    changed = np.abs(kept[ratio] - kept[0.0]).max((1, 3, 4)) > 1e-3
    assert changed[1:].sum(1).tolist() == list(plan.counts[1:])
    before, after = (np.square(kv - fresh).sum((1, 3, 4)) for kv in kept.values())
    first = before[1]
    assert first[changed[1]].min() >= first[~changed[1]].max(), "those that are furthest off in the layer that decides"
    assert after[1][changed[1]].max() < ok.ATOL, "in that layer they are exact"
    assert after.sum() < 0.8 * before.sum()


@pytest.mark.parametrize(("ratio", "num_anchors"), [(0.15, 0), (0.4, 0), (0.4, 12), (0.02, 0)])
def test_tokens_that_are_spread_say_how_all_others_move(ratio, num_anchors):
    """The engine's repair is that of `blend` over what an engine without repair has."""
    without = cut_by_hand(ok.config(4))
    found = cut_by_hand(ok.config(4, repair_ratio=ratio, repair="spread", anchor_tokens=num_anchors))
    kept, recomputer = {0.0: without.kv, ratio: found.kv}, found.recomputer
    assert found.usage.repaired_tokens == (0 if found.plan is None else round(found.plan.num_recomputed))
    if ratio * 75 < 8:
        assert recomputer is None
        np.testing.assert_array_equal(kept[ratio], kept[0.0])
        return
    padded = np.zeros((*kept[0.0].shape[:2], 128, *kept[0.0].shape[3:]), np.float32)
    padded[:, :, :75] = kept[0.0]
    wanted = np.stack([np.asarray(recomputer.layer(i, jnp.asarray(kv)))[:, :75] for i, kv in enumerate(padded)])
    np.testing.assert_allclose(kept[ratio], wanted, rtol=0, atol=ok.ATOL)
    first = max(num_anchors, 4)
    moved = np.abs(kept[ratio] - kept[0.0]).max((1, 3, 4))[1:]
    assert (moved[:, first:] > 1e-4).all(), "all of them have"
    kept_first = np.abs(kept[ratio] - kept[0.0])[:, :, : 4 if not num_anchors else 0]
    assert (kept_first[:, :, 1:] < ok.ATOL).all(), "first tokens that stay have seen nobody who left"


def test_more_repair_is_nearer():
    """None, a part, all."""
    gaps = []
    for repair_ratio in (0.0, 0.6, 0.8, 1.0):
        with ok.engine_of(ok.config(repair_ratio=repair_ratio)) as engine:
            session = engine.session()
            ok.say(session, kit.prompt(100), 4)
            ok.say(session, kit.prompt(60), 1)
            stored = kit.stored_kv(engine, session)
        gaps.append(float(np.square(stored - fresh_kv(session.token_ids[:-1])).mean()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < ok.ATOL < gaps[0]


@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.4])
def test_a_share_too_small_for_any_token_repairs_none(ratio):
    """All tokens of the first layer are computed to know which to choose: for so few that is more than the share."""
    with ok.engine_of(ok.config(repair_ratio=ratio)) as engine:
        pair = ok.Pair(engine)
        pair.turns(30)
        pair.discard(np.arange(38) % 2 == 1)
        pair.turns(20, 10)
        assert engine.metrics.repaired_tokens == engine.metrics.failed_loads == 0
        pair.expect_stored_kv()


@pytest.mark.parametrize("name", ["all", "anchor", "drift"])
def test_repair_outlives_the_engine(name, drift, tmp_path):
    """Cut by hand, then restarted: the next engine repairs. Restarted again: the one after it finds it repaired."""
    overflow, values = repairing(name, drift)
    store, reference = ok.ssd_store(tmp_path / "store"), None
    for start in range(3):
        with ok.engine_of(overflow, store=store) as engine:
            pair = ok.Pair(engine, engine.session(session_id="one"), reference, values)
            reference = pair.reference
            pair.turn(kit.prompt(70 if not start else 9, seed=start), 5)
            num_repaired = expected_repaired(overflow, pair.reference.num_cached) if start == 1 else 0
            assert pair.session.usage.repaired_tokens == num_repaired
            pair.expect_stored_kv()
            if not start:
                pair.discard((np.arange(75) > 10) & (np.arange(75) < 31))
                assert engine.metrics.repaired_tokens == 0


@pytest.mark.parametrize("name", ["all", "anchor", "drift"])
def test_what_is_computed_anew_anyway_is_not_repaired(name, drift):
    """KV that was lost before its repair: fresh tokens need none, nor do they later."""
    overflow, values = repairing(name, drift)
    with ok.engine_of(overflow) as engine:
        for num_kept in (0, 20):
            pair = ok.Pair(engine, drift=values)
            pair.turns(60)
            pair.discard(np.arange(68) % 3 == 1)
            engine.truncate_stored(pair.session, num_kept)
            pair.reference.forget(num_kept)
            pair.turns(10)
            assert pair.session.usage.repaired_tokens == expected_repaired(overflow, num_kept)
            pair.turns(10, seed=3)
            assert pair.session.usage.repaired_tokens == 0
            pair.expect_stored_kv()


@pytest.mark.parametrize("name", ["all", "anchor", "drift"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_load_that_breaks_while_it_is_repaired_is_recomputed(name, layer, drift, monkeypatch):
    def read(ticket, asked, destination, original=LoadTicket.read):
        if asked == layer:
            raise OSError("the disk is on fire")
        return original(ticket, asked, destination)

    overflow, values = repairing(name, drift)
    with ok.engine_of(overflow) as engine:
        pair = ok.Pair(engine, drift=values)
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


@pytest.mark.parametrize("broken", ["run_pass", "at_rest"])
@pytest.mark.parametrize("name", ["all", "drift and anchor"])
def test_a_repair_that_breaks_otherwise_is_done_by_the_next_turn(name, broken, drift, monkeypatch):
    """Computing it, or packing it to be saved: what is stored gives way to nothing less than all of it."""

    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    overflow, values = repairing(name, drift)
    with ok.engine_of(overflow) as engine:
        pair = ok.Pair(engine, drift=values)
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


@pytest.mark.parametrize("name", ["all", "drift"])
def test_repair_of_what_the_store_does_not_hold(name, drift):
    overflow, values = repairing(name, drift)
    with ok.engine_of(overflow, store=ok.dram_store(3)) as engine:
        pair = ok.Pair(engine, drift=values)
        for turn in range(5):
            infos = engine.stored.list()
            pair.reference.forget(infos[0].num_tokens if infos else 0)
            pair.turn(kit.prompt(40, seed=turn), 10)
            engine.wait_for_saves()


def test_repair_in_a_batch(drift):
    """A session that is repaired, beside others that load and decode."""
    overflow, values = repairing("drift and anchor", drift, ratio=0.25)
    with ok.engine_of(overflow) as engine:
        pairs = [ok.Pair(engine, drift=values) for _ in range(3)]
        for turn, prompts in enumerate([(100, 30, 20), (60, 15, 100)]):
            ids = [kit.prompt(count, seed=turn) for count in prompts]
            answers = [pair.session.send_ids(part, max_tokens=24) for pair, part in zip(pairs, ids, strict=True)]
            jobs = [answer._job for answer in answers]
            kit.drain(*answers)
            for pair, part, job in zip(pairs, ids, jobs, strict=True):
                assert job.output_ids == pair.reference.say(part, 24)
        assert [bool(job.repaired_tokens) for job in jobs] == [True, False, True]


@pytest.mark.parametrize("name", ["drift", "anchor"])
def test_repaired_kv_is_nobody_elses(name, drift, tmp_path):
    """Not even its first tokens, which never leave of themselves, once others before them were discarded by hand."""
    overflow = ok.config(20, **({"drift": drift[0]} if name == "drift" else {"anchor_tokens": 32}))
    with ok.engine_of(overflow, store=ok.ssd_store(tmp_path / "store")) as engine:
        session = engine.session()
        ok.say(session, kit.prompt(70), 4)
        session.discard(np.arange(20))
        ok.say(session, kit.prompt(10), 4)
        assert engine.metrics.repaired_tokens or name == "drift"
        engine.wait_for_saves()
        others = session.token_ids[:40]
        assert ok.say(engine.session(), others, 6) == ok.Conversation(overflow).say(others, 6)


def test_what_stays_through_several_cuts_drifts_once_for_each(drift):
    """In the slot at once, in what is stored by the next prefill: the next answer is of both."""
    path, values = drift
    with ok.engine_of(ok.config(ratio=0.2, drift=path)) as engine:
        pair = ok.Pair(engine, drift=values)
        pair.turn(kit.prompt(100), 150)
        assert len(pair.session.conversation.to_drift) > 1
        pair.turn(kit.prompt(10), 8)
        assert pair.session.conversation.to_drift == []
