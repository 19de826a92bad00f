"""Turns through the engine: many prompts, streaming, stopping, cancelling, closing.

Not here: conversations that come and go in any order and are given up anywhere (test_packing).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading

import pytest

from ca_jax.errors import SessionBusyError, SessionClosedError, TenantError
from ca_jax.turns.requests import FinishReason, SamplingParams, Usage
from tests import engine_kit as kit
from tests import overlap_kit

GREEDY = SamplingParams(max_tokens=12)
STORY = "Tell me a story."


# Several at once.


def test_more_prompts_than_slots_are_answered_in_order_with_times_of_their_own(engine):
    """Texts and token ids together; each with a size of its own."""
    prompts = ["some text", *(kit.prompt(5 + 9 * i) for i in range(10))]
    sizes = [1 + i % 4 * 5 for i in range(11)]
    completions = engine.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in sizes])
    for prompt, size, done in zip(prompts, sizes, completions, strict=True):
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        assert done.token_ids == kit.greedy_answer(ids, size)
        assert done.text == bytes(done.token_ids).decode()
        assert done.finish_reason is FinishReason.LENGTH
        usage = done.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.num_cached_tokens) == (len(ids), size, 0)
        expect_times(usage)


def test_prompts_begin_with_what_is_stored_of_others_and_no_conversation_is_made_of_them():
    with kit.small_engine() as engine:
        params, prompt = SamplingParams(max_tokens=6, ignore_eos=True), kit.prompt(50)
        (first,) = engine.generate([prompt], params)
        engine.wait_for_saves()
        longer = [*prompt, *first.token_ids, *kit.prompt(9)]
        (second,) = engine.generate([longer], params)
        assert second.token_ids == kit.greedy_answer(longer, 6)
        assert second.usage.num_cached_tokens == 55
        assert engine.sessions == engine.stored.names() == ()
        stranger = engine.session(tenant="bob")
        assert kit.check_turn(stranger, longer).num_cached_tokens == 0


def test_two_threads_may_stream_two_sessions_at_once(engine):
    messages = {"left": "Say something to the left.", "right": "And something to the right, please."}
    alone = {side: "".join(engine.session().send(message, max_tokens=40)) for side, message in messages.items()}
    answers = {side: engine.session().send(message, max_tokens=40) for side, message in messages.items()}
    found: list[str] = []
    with overlap_kit.in_thread(lambda: found.append("".join(answers["left"]))):
        found.append("".join(answers["right"]))
    assert sorted(found) == sorted(alone.values())


def test_an_answer_is_whole_though_another_thread_ends_it_while_it_is_looked_at(engine):
    """The other thread runs all that is left between the listener's looks at the pieces and at whether it has ended."""
    expected = "".join(engine.session().send("Hello.", max_tokens=6))

    class Overtaken(collections.deque):
        def __bool__(self) -> bool:
            found = len(self) > 0
            if not found and not answer.job.done:
                other = threading.Thread(target=lambda: [engine.step() for _ in range(8)])
                other.start()
                other.join(30)
            return found

    answer = engine.session().send("Hello.", max_tokens=6)
    answer.job.pieces = Overtaken()
    assert "".join(answer) == expected


@pytest.mark.parametrize("penalties", [{}, {"frequency_penalty": 1.0, "min_tokens": 20, "repetition_penalty": 1.2}])
def test_a_full_batch_runs_ahead_while_others_wait(engine, penalties):
    """No waiting job could begin sooner if it did not, and a penalty counts only when a token is drawn."""
    params = SamplingParams(max_tokens=30, **penalties)
    prompts = [kit.prompt(20, seed) for seed in range(4)]
    expected = [engine.generate([each], params)[0].token_ids for each in prompts]
    with kit.small_engine(max_batch_size=2) as crowded:
        answers = [crowded.session().send_ids(each, sampling=params) for each in prompts]
        next(answers[0])
        next(answers[1])
        crowded.step()
        runner, ahead = crowded._runner, []
        for _ in range(10):
            crowded.step()
            ahead.append(runner._ahead is not None)
        assert all(ahead)
        assert crowded._scheduler.num_waiting == 2
        answers[0].close()
        crowded.step()
        assert runner._ahead is None, "one that waited begins"
        kit.drain(*answers)
        assert [answer.job.output_ids for answer in answers[1:]] == expected[1:]


# What a turn says of itself.


def expect_times(usage: Usage) -> None:
    """A time for each token, in order, between the first one's and the turn's end."""
    times = usage.token_times_s
    assert len(times) == usage.completion_tokens
    assert all(before <= after for before, after in itertools.pairwise(times))
    assert times[0] >= usage.ttft_s >= usage.queued_s >= 0
    assert times[-1] <= usage.ttft_s + usage.decode_s
    assert min(usage.load_s, usage.load_stall_s) >= 0


def test_metrics_count_turns_and_tokens():
    with kit.small_engine() as engine:
        session = engine.session()
        kit.say(session, kit.prompt(20), 5)
        kit.say(session, kit.prompt(10), 4)
        answer = session.send_ids(kit.prompt(6), max_tokens=50)
        next(answer)
        answer.close()
        found = engine.metrics
    assert (found.turns, found.cancelled, found.prefill_steps) == (2, 1, 3)
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (20 + 35 + 45, 24 + 38, 5 + 4 + 1)
    assert found.decode_steps == 4 + 3
    assert (found.failed_loads, found.failed_saves) == (0, 0)


# Streaming and its end.


def streamed(answer) -> list[str]:
    """The text that came with each token of an answer, held against its pieces all the while."""
    shown = ""
    for piece in answer:
        shown += piece
        assert "".join(answer.job.token_texts) == shown
        assert len(answer.job.token_texts) == len(answer.job.output_ids)
    assert "".join(answer.job.token_texts) == shown == answer.job.output.text
    assert len(answer.job.token_texts) == len(answer.job.output_ids)
    return answer.job.token_texts


def new_character(text: str, start: int) -> int:
    """Where a character comes, from `start` on, that has not come before: nothing else begins what it begins."""
    found = next(at for at in range(start, len(text)) if text[at] not in text[:at])
    assert found <= len(text) - 3
    return found


ENDS = ["max_tokens", "stop string", "stop string of a character", "stop token", "beginning of a stop string"]


@pytest.mark.parametrize("end", ENDS)
def test_each_token_comes_with_the_text_that_became_certain_with_it(engine, end):
    """A token of this model is a character, and no part of a stop string or token is shown."""
    text = "".join(engine.session().send(STORY, max_tokens=24))
    start = new_character(text, 6)
    shown, stop = list(text[:start]), text[start : start + 3]
    sampling, expected = {
        "max_tokens": (SamplingParams(max_tokens=99), list(text)),  # The argument wins.
        "stop string": (SamplingParams(stop=("never", stop)), [*shown, "", "", ""]),
        "stop string of a character": (SamplingParams(stop=stop[0]), [*shown, ""]),
        "stop token": (SamplingParams(stop_token_ids=(ord(stop[0]),)), [*shown, ""]),
        "beginning of a stop string": (SamplingParams(stop=(stop + "\0",)), [*shown, "", "", stop]),
    }[end]
    max_tokens = start + 3 if end.startswith("beginning") else 24
    session = engine.session()
    assert streamed(session.send(STORY, max_tokens=max_tokens, sampling=sampling)) == expected
    assert session.messages == [{"role": "user", "content": STORY}, {"role": "assistant", "content": "".join(expected)}]
    assert session.usage.completion_tokens == len(expected)
    is_stopped = end.startswith("stop")
    assert session.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)


def test_tokens_that_are_parts_of_characters_have_the_text_that_they_complete(engine):
    """Answers of bytes that begin a character: each ends the one before it, the last is ended by the end."""
    first_byte = SamplingParams(logit_bias={0xC3: 100}, ignore_eos=True)
    found = streamed(engine.session().send("Hello.", max_tokens=4, sampling=first_byte))
    assert found == ["", "\ufffd", "\ufffd", "\ufffd\ufffd"]


def test_what_a_cancelled_answer_held_back_is_its_last_tokens(engine):
    text = "".join(engine.session().send(STORY, max_tokens=24))
    start = new_character(text, 3)
    answer = engine.session().send(STORY, max_tokens=24, sampling=SamplingParams(stop=(text[start:] + "\0",)))
    while len(answer.job.output_ids) < start + 3:
        engine.step()
    assert answer.job.token_texts == [*text[:start], "", "", ""]
    answer.close()
    assert answer.job.token_texts == [*text[:start], "", "", text[start : start + 3]]
    assert "".join(answer.job.token_texts) == answer.job.output.text == "".join(answer.job.pieces)


def test_the_models_own_stop_token_and_the_window_end_an_answer(engine, monkeypatch):
    prompt, long = kit.prompt(20), kit.prompt(kit.WINDOW - 5)
    answer = kit.greedy_answer(prompt, 12)
    monkeypatch.setattr(engine._turns, "_model", dataclasses.replace(engine.model, stop_token_ids=(answer[4],)))
    stopped, ignored, filled = engine.generate(
        [prompt, prompt, long], [GREEDY, *(SamplingParams(max_tokens=n, ignore_eos=True) for n in (12, 50))]
    )
    assert stopped.token_ids == answer[: answer.index(answer[4]) + 1]
    assert ignored.token_ids == answer
    assert (filled.token_ids, filled.finish_reason) == (kit.greedy_answer(long, 5), FinishReason.LENGTH)


# Cancelling, closing.


def test_an_answer_let_go_of_while_a_step_runs_ends_once(engine, monkeypatch):
    """The garbage collector may find it at any moment: here while its last token is being computed."""
    stays, goes = engine.session(), engine.session()
    before = engine.metrics.turns + engine.metrics.cancelled
    staying = stays.send("Stay.", max_tokens=10)
    going = [goes.send("Go.", max_tokens=2)]
    next(staying)
    next(going[0])

    def decode(*args, original=engine._runner.decode):
        going.clear()
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "decode", decode)
        kit.drain(staying)
    kit.expect_right(stays)
    assert [message["role"] for message in goes.messages] == ["user", "assistant"]
    assert engine.metrics.turns + engine.metrics.cancelled == before + 2
    num_tokens = len(goes.token_ids)
    assert kit.check_turn(goes, "Come back.").num_cached_tokens == num_tokens - 1


def test_a_session_comes_back_by_its_name_and_goes_with_its_kv_when_closed(engine):
    session = engine.session(session_id="mine")
    assert engine.session(session_id="mine") is session
    with pytest.raises(TenantError, match="'mine' must be asked for by its own tenant, got 'b'"):
        engine.session(session_id="mine", tenant="b")
    kit.say(session, "Hello.")
    engine.wait_for_saves()
    stored = engine.store_stats().num_sessions
    answer = session.send("Again.", max_tokens=50)
    next(answer)
    with pytest.raises(SessionBusyError, match="idle"):
        engine.warmup()
    session.close()
    session.close()
    answer.close()
    assert engine._scheduler.idle, "its slot is free"
    assert session not in engine.sessions
    engine.wait_for_saves()
    assert engine.store_stats().num_sessions == stored - 1
    again = engine.session(session_id="mine")
    assert again is not session
    assert again.token_ids == []


def test_closing_the_engine_ends_all_jobs_and_refuses_new_ones():
    with kit.small_engine() as engine:
        running, waiting = engine.session(), engine.session()
        answer = running.send("Hello.", max_tokens=50)
        first = next(answer)
        queued = waiting.send("Hello.", max_tokens=50)
        engine.close()
        assert first + "".join(answer) == running.messages[-1]["content"]
        assert running.finish_reason is FinishReason.CANCELLED
        assert list(queued) == []
        for call in (
            lambda: running.send("More."),
            lambda: engine.session(),
            lambda: engine.generate(["x"]),
            lambda: engine.step(),
            lambda: engine.store_stats(),
            lambda: engine.wait_for_saves(),
            lambda: engine.warmup(),
        ):
            with pytest.raises(SessionClosedError, match="the engine is closed"):
                call()
        running.close()
        engine.close()


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_kv_that_a_turn_builds_on_is_not_forgotten_under_it(num_steps):
    """Of one that only waits it may be: that computes all."""
    with kit.small_engine() as engine:
        session = engine.session()
        kit.say(session, kit.prompt(60))
        engine.wait_for_saves()
        job, before = session.submit(kit.prompt(100, 1)), session.conversation
        for _ in range(num_steps):
            engine.step()
        for num_tokens, left in ((0, None), (20, None), (20, before.take(20))):
            may_be = not num_steps and left is None
            with contextlib.nullcontext() if may_be else pytest.raises(SessionBusyError, match="must be idle"):
                engine.truncate_stored(session, num_tokens, left)
        collections.deque(engine.stream(job), maxlen=0)
        kit.expect_right(session)
        kit.check_turn(session, kit.prompt(9, 2))
