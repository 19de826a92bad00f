"""Overflow beside all else: the messages that stay, other conversations, and engines that drop nothing.

KV that has seen dropped tokens is no other conversation's, even where the tokens are the same.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from ca_jax.errors import ContextWindowError
from ca_jax.serving.prompts import turn_ids
from ca_jax.turns.requests import FinishReason, SamplingParams
from tests import engine_kit as kit
from tests import overflow_kit as ok

SAME = ord("A")


# Messages.


def test_text_goes_on_behind_what_stays():
    with kit.small_engine(**ok.SMALL, overflow=ok.config(8, 0.5)) as engine:
        pair = ok.Pair(engine, engine.session(system="Short."))
        for turn in range(6):
            session, text = pair.session, f"This is turn {turn}."
            ids = turn_ids(engine.model, session.token_ids, session.messages, text)[len(session.token_ids) :]
            answer = session.send(text, max_tokens=10)
            (said,) = kit.drain(answer)
            assert answer.job.output_ids == pair.reference.say(ids, 10)
            assert session.token_ids == pair.reference.token_ids
            assert session.messages[-2:] == [
                {"role": "user", "content": text},
                {"role": "assistant", "content": said},
            ]
        assert engine.metrics.truncations >= 2
        assert session.messages[0] == {"role": "system", "content": "Short."}, "no turn's: it stays"
        assert len(session.messages) < 1 + 2 * 6


def test_a_text_for_which_everything_leaves_begins_with_the_system_message_again():
    with kit.small_engine(**ok.SMALL, overflow=ok.config(70, 0.5)) as engine:
        session = engine.session(system="Short.")
        kit.say(session, "hello " * 5, 8)
        text = "x" * 50
        expected = turn_ids(engine.model, [], [{"role": "system", "content": "Short."}], text)
        answer = session.send(text, max_tokens=4)
        assert answer.job.prompt_ids == expected
        kit.drain(answer)
        assert session.token_ids[: len(expected)] == expected
        assert [message["role"] for message in session.messages] == ["system", "user", "assistant"]
        kit.say(session, "a", 1)
        assert session.usage.num_cached_tokens == len(expected) + 3


# Nobody else's KV.


@pytest.mark.parametrize(
    ("discarded", "repair", "of_one_token", "restarts"),
    [
        (None, "none", False, True),
        (None, "none", True, False),
        (range(20, 55), "none", True, True),
        (range(20, 55), "none", False, False),
        (range(20), "drift", False, False),  # Its first tokens never leave of themselves.
        (range(20), "anchor", False, False),
    ],
)
def test_a_cut_conversation_is_nobody_elses_beginning(discarded, repair, of_one_token, restarts, tmp_path):
    """Another that says what is left of it gets KV of that text, as far as the first cut at most."""
    path, drift = ok.random_drift(kit.tiny_model(), ok.WINDOW, tmp_path)
    repairs = {"none": {}, "drift": {"drift": path}, "anchor": {"anchor_tokens": 32}}[repair]
    prompt = [SAME] * 100 if of_one_token else kit.prompt(100)
    config = {**ok.SMALL, "overflow": ok.config(20, **repairs), "store": kit.ssd_store(tmp_path / "store")}
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(kit.small_engine(**config))
        pair = ok.Pair(engine, drift=drift if repair == "drift" else None)
        pair.turn(prompt, 4)
        if discarded is not None:
            pair.discard(np.isin(np.arange(104), discarded))
        pair.turn([SAME] * 60, 4)
        left = pair.session.token_ids
        assert pair.session.num_dropped
        engine.wait_for_saves()
        if restarts:
            engine.close()
            engine = stack.enter_context(kit.small_engine(**config))
        for others in (left, left[:50], [*left[:40], SAME, SAME]):
            session = engine.session()
            assert ok.say(session, others, 6) == ok.Conversation(ok.config(20)).say(others, 6)
            assert session.usage.num_cached_tokens <= (0 if discarded == range(20) else 20)
            session.close()


def test_a_cut_conversation_gets_no_kv_of_its_own_text(tmp_path):
    """One that was never cut says the same: each goes on with its own, and so does one that begins like both."""
    with kit.small_engine(**ok.SMALL, overflow=ok.config(20), store=kit.ssd_store(tmp_path)) as engine:
        cut = ok.Pair(engine)
        cut.turn([SAME] * 100, 4)
        cut.discard((np.arange(104) >= 20) & (np.arange(104) < 60))
        whole = ok.Pair(engine)
        ok.say(whole.session, cut.session.token_ids, 4)
        whole.reference.say(cut.session.token_ids, 4)
        engine.wait_for_saves()
        cut.turn([SAME] * 20, 4)
        whole.turn([SAME] * 20, 4)
        engine.drop_stored(cut.session)  # From here on it may have the other's: that is KV of its text.
        cut.reference.forget(0)
        expected = cut.reference.say([SAME] * 5, 4)
        assert ok.say(cut.session, [SAME] * 5, 4) == expected


# Beside it.


def test_without_overflow_a_full_window_is_the_end():
    with kit.small_engine(**ok.SMALL, overflow=None) as engine:
        session = engine.session()
        ok.say(session, kit.prompt(100), 50)
        assert session.usage.completion_tokens == 28
        assert (session.finish_reason, len(session.token_ids)) == (FinishReason.LENGTH, ok.WINDOW)
        with pytest.raises(ContextWindowError, match=f"{ok.WINDOW} tokens, got 129"):
            session.send_ids([SAME])
        (done,) = engine.generate([kit.prompt(100)], SamplingParams(max_tokens=60, ignore_eos=True))
        assert (len(done.token_ids), done.finish_reason) == (28, FinishReason.LENGTH)
        session.rewind(60)
        expected = ok.Conversation(ok.config()).say([*session.token_ids, SAME], 5)
        assert ok.say(session, [SAME], 5) == expected
        assert engine.metrics.truncations == session.num_dropped == 0


def test_no_draw_of_a_conversation_is_by_the_same_number_as_another(monkeypatch):
    """Positions come again after a cut; what tells draws apart must not, or a hot answer would repeat itself."""
    with kit.small_engine(**ok.SMALL, overflow=ok.config(4)) as engine:
        seen: list[int] = []

        def start(logits, positions, *rows, original=engine._runner.sampler.start):
            seen.append(int(positions[0]))
            return original(logits, positions, *rows)

        monkeypatch.setattr(engine._runner.sampler, "start", start)
        session = engine.session()
        hot = SamplingParams(temperature=1.0, seed=3, max_tokens=150)
        for turn in range(2):
            kit.drain(session.send_ids(kit.prompt(60, seed=turn), sampling=hot))
        assert engine.metrics.truncations > 2
        assert len(seen) >= 300
        assert sorted(seen) == [*range(60, 210), *range(270, 420)]


@pytest.mark.parametrize("method", ["ca", "tt", "of"])
@pytest.mark.parametrize("where", ["before a turn", "in an answer"])
def test_how_long_a_conversation_is_kept_does_not_change_with_a_cut(where, method, tmp_path):
    """Also where nothing of it is stored until what is left is computed, and where another process has said it."""
    given = {**ok.SMALL, "overflow": ok.config(method=method), "store": kit.ssd_store(tmp_path / "store")}
    for start in range(2):
        with kit.small_engine(**given) as engine:
            session = engine.session(session_id="one")
            if not start:
                kit.say(session, kit.prompt(90), 16)
                engine.wait_for_saves()
                engine.stored.pin("one")
                engine.stored.set_ttl("one", 60.0)
            new, max_tokens = (60, 8) if where == "before a turn" else (5, 60)
            kit.say(session, kit.prompt(new, start), max_tokens)
            engine.wait_for_saves()
            assert engine.metrics.truncations > 0
            assert engine.stored.pinned() == {"one"}
            assert engine.stored.find("one").ttl_s == 60.0


def test_a_conversation_that_ends_with_a_cut_leaves_no_pin_to_the_next_of_its_name():
    with ok.pair(ok.config(method="tt")) as pair:
        engine, name = pair.engine, pair.session.session_id
        pair.turn(kit.prompt(90), 16)
        engine.wait_for_saves()
        engine.stored.pin(name)
        engine.cancel(pair.session.submit(kit.prompt(30)))
        pair.session.close()
        kit.say(engine.session(session_id=name), kit.prompt(20))
        engine.wait_for_saves()
        assert not engine.stored.pinned()
