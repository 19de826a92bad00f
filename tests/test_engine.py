"""Turns through the engine: continuous batching, streaming, stopping, cancelling, rewinding, closing."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import ca_jax
from ca_jax.errors import SessionBusyError, SessionClosedError
from ca_jax.turns.requests import FinishReason, SamplingParams
from tests import engine_kit as kit

SEEDED = SamplingParams(temperature=0.9, top_k=30, seed=11, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def engine() -> Iterator[ca_jax.Engine]:
    """Shared: a test leaves it idle, and uses sessions of its own."""
    with kit.small_engine() as engine:
        yield engine


# Continuous batching.


@pytest.mark.parametrize("sampling", [SamplingParams(), SEEDED], ids=["greedy", "seeded"])
def test_jobs_that_join_midway_answer_as_if_they_were_alone(engine, sampling):
    messages = ["One joins first.", "Two joins while one decodes.", "Three joins last of all."]
    alone = []
    for message in messages:
        session = engine.session()
        kit.say(session, message, 20, sampling=sampling)
        alone.append(session.token_ids)

    sessions = [engine.session() for _ in messages]
    answers = []
    for session, message in zip(sessions, messages, strict=True):
        answers.append(session.send(message, max_tokens=20, sampling=sampling))
        for answer in answers:
            next(answer)  # Those that wait are prefilled now, those that run go on.
    assert len(engine._scheduler.running) == 3
    kit.drain(*answers)
    assert [session.token_ids for session in sessions] == alone


def test_more_jobs_than_slots_wait_for_their_turn(engine):
    prompts = [kit.prompt(5 + 9 * i) for i in range(11)]
    sizes = [1 + i % 4 * 5 for i in range(11)]
    completions = engine.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in sizes])
    expected = [kit.greedy_answer(prompt, n) for prompt, n in zip(prompts, sizes, strict=True)]
    assert [done.token_ids for done in completions] == expected
    assert all(done.finish_reason is FinishReason.LENGTH for done in completions)


def test_generate_takes_texts_and_token_ids_together_and_keeps_their_order(engine):
    text, ids = "some text", kit.prompt(70)
    stored = engine.store_stats().num_saves
    first, second = engine.generate([text, ids], GREEDY)
    assert first.token_ids == kit.greedy_answer(list(text.encode()), 12)
    assert second.token_ids == kit.greedy_answer(ids, 12)
    assert first.text == bytes(first.token_ids).decode()
    assert (second.usage.prompt_tokens, second.usage.completion_tokens, second.usage.num_cached_tokens) == (70, 12, 0)
    assert engine.store_stats().num_saves == stored, "generate stores nothing"


def test_two_threads_may_stream_two_sessions_at_once(engine):
    messages = {"left": "Say something to the left.", "right": "And something to the right, please."}
    alone = {side: "".join(engine.session().send(message, max_tokens=40)) for side, message in messages.items()}
    together = threading.Barrier(2)
    found: dict[str, str] = {}

    def stream(side: str) -> None:
        answer = engine.session().send(messages[side], max_tokens=40)
        together.wait(60)
        found[side] = "".join(answer)

    threads = [threading.Thread(target=stream, args=(side,)) for side in messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == alone


def test_an_answer_is_whole_though_another_thread_ends_it_while_it_is_looked_at():
    """The other thread runs all that is left between the listener's looks at the pieces and at whether it has ended."""
    with kit.small_engine() as engine:
        expected = "".join(engine.session().send("Hello.", max_tokens=6))

        class Overtaken(collections.deque):
            def __bool__(self) -> bool:
                found = len(self) > 0
                if not found and not job.done:
                    other = threading.Thread(target=lambda: [engine.step() for _ in range(8)])
                    other.start()
                    other.join(30)
                return found

        session = engine.session()
        answer = session.send("Hello.", max_tokens=6)
        job = session._job
        job.pieces = Overtaken()
        assert "".join(answer) == expected
        assert session.finish_reason is FinishReason.LENGTH


# Streaming and its end.


def test_pieces_come_as_tokens_do_and_together_are_the_text(engine):
    session = engine.session()
    answer = session.send("Hello there.", max_tokens=15)
    pieces = []
    for piece in answer:
        pieces.append(piece)
        assert len(session._job.output_ids) == len(pieces), "a token of this model is a character"
    assert "".join(pieces) == session.messages[-1]["content"]
    assert session.messages[-1]["role"] == "assistant"
    assert session.messages[-2] == {"role": "user", "content": "Hello there."}
    assert bytes(session.token_ids[-15:]).decode() == session.messages[-1]["content"]


def test_usage_counts_history_new_tokens_and_answer(engine):
    session = engine.session(system="Count.")
    kit.say(session, "first message", 10)
    first, num_tokens = session.usage, len(session.token_ids)
    assert (first.num_cached_tokens, first.new_tokens, first.completion_tokens) == (0, first.prompt_tokens, 10)
    assert num_tokens == first.prompt_tokens + 10

    kit.say(session, "second message", 7)
    second = session.usage
    assert second.cached_tokens == {"dram": num_tokens - 1}, "all but the last token, which was drawn and never run"
    assert second.new_tokens == second.prompt_tokens - num_tokens + 1
    assert second.completion_tokens == 7
    assert len(session.token_ids) == second.prompt_tokens + 7
    assert min(second.ttft_s, second.queued_s, second.load_s, second.load_stall_s, second.decode_s) >= 0
    assert second.ttft_s > second.queued_s


def test_max_tokens_ends_an_answer_and_the_argument_wins(engine):
    session = engine.session()
    assert len(kit.say(session, "Hi.", 3, sampling=SamplingParams(max_tokens=9))) == 3
    assert session.finish_reason is FinishReason.LENGTH
    assert len(engine.generate(["x"], SamplingParams(max_tokens=1))[0].token_ids) == 1


def test_an_answer_ends_with_the_context_window(engine):
    prompt = kit.prompt(kit.WINDOW - 5)
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=50, ignore_eos=True))
    assert done.token_ids == kit.greedy_answer(prompt, 5)
    assert done.finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends_the_answer_and_is_no_text(engine):
    prompt = kit.prompt(20)
    answer = kit.greedy_answer(prompt, 12)
    stop = answer[5]
    size = answer.index(stop) + 1
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=12, stop_token_ids=(stop,)))
    assert (done.token_ids, done.finish_reason) == (answer[:size], FinishReason.STOP)
    assert done.text == bytes(answer[: size - 1]).decode()


def test_the_models_own_stop_token_ends_an_answer_unless_ignored(engine, monkeypatch):
    prompt = kit.prompt(20)
    answer = kit.greedy_answer(prompt, 12)
    monkeypatch.setattr(engine._turns, "_model", dataclasses.replace(engine.model, stop_token_ids=(answer[4],)))
    stopped, ignored = engine.generate(
        [prompt, prompt], [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, ignore_eos=True)]
    )
    assert stopped.token_ids == answer[: answer.index(answer[4]) + 1]
    assert ignored.token_ids == answer


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stop_string_ends_the_answer_before_it_and_no_part_of_it_is_shown(engine, size):
    """Tokens are characters: the string spans `size` tokens, and all but the last come before it is known to be one."""
    text = "".join(engine.session().send("Tell me a story.", max_tokens=24))
    stop = text[9 : 9 + size]
    start = text.index(stop)
    session = engine.session()
    pieces = list(session.send("Tell me a story.", sampling=SamplingParams(max_tokens=24, stop=("never", stop))))
    assert "".join(pieces) == text[:start] == session.messages[-1]["content"]
    assert session.finish_reason is FinishReason.STOP
    assert session.usage.completion_tokens == start + size


def test_what_only_begins_a_stop_string_is_shown_in_the_end(engine):
    text = "".join(engine.session().send("Tell me a story.", max_tokens=10))
    sampling = SamplingParams(max_tokens=10, stop=(text[-3:] + "\0",))
    assert "".join(engine.session().send("Tell me a story.", sampling=sampling)) == text


def texts_while_streaming(answer) -> list[str]:
    """What the tokens of an answer say they gave out, held against the pieces all the while."""
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
    return next(at for at in range(start, len(text)) if text[at] not in text[:at])


@pytest.mark.parametrize("end", ["max_tokens", "stop string", "stop token", "what begins a stop string"])
def test_each_token_is_told_with_the_text_that_became_certain_with_it(engine, end):
    """A token of this model is a character."""
    text = "".join(engine.session().send("Tell me a story.", max_tokens=24))
    start = new_character(text, 6)
    assert start <= len(text) - 3
    shown, stop = list(text[:start]), text[start : start + 3]
    sampling, expected = {
        "max_tokens": (SamplingParams(), list(text)),
        "stop string": (SamplingParams(stop=(stop,)), [*shown, "", "", ""]),
        "stop token": (SamplingParams(stop_token_ids=(ord(stop[0]),)), [*shown, ""]),
        "what begins a stop string": (SamplingParams(stop=(stop + "\0",)), [*shown, "", "", stop]),
    }[end]
    max_tokens = start + 3 if end.startswith("what") else 24
    answer = engine.session().send("Tell me a story.", max_tokens=max_tokens, sampling=sampling)
    assert texts_while_streaming(answer) == expected


def test_tokens_that_are_parts_of_characters_have_the_text_that_they_complete(engine):
    """Answers of bytes that begin a character: each ends the one before it, the last is ended by the end."""
    first_byte = SamplingParams(logit_bias={0xC3: 100}, ignore_eos=True)
    found = texts_while_streaming(engine.session().send("Hello.", max_tokens=4, sampling=first_byte))
    assert found == ["", "\ufffd", "\ufffd", "\ufffd\ufffd"]


def test_what_a_cancelled_answer_held_back_is_its_last_tokens(engine):
    text = "".join(engine.session().send("Tell me a story.", max_tokens=24))
    start = new_character(text, 3)
    assert start <= len(text) - 3
    sampling = SamplingParams(stop=(text[start:] + "\0",))
    answer = engine.session().send("Tell me a story.", max_tokens=24, sampling=sampling)
    while len(answer.job.output_ids) < start + 3:
        engine.step()
    assert answer.job.token_texts == [*text[:start], "", "", ""]
    answer.close()
    assert answer.job.token_texts == [*text[:start], "", "", text[start : start + 3]]
    assert "".join(answer.job.token_texts) == answer.job.output.text == "".join(answer.job.pieces)


# Breaking.


def broken(*_: object) -> None:
    raise RuntimeError("the device is on fire")


@pytest.mark.parametrize("step", ["run_pass", "draw"])
def test_a_job_that_breaks_is_its_callers_alone(monkeypatch, step):
    """Its caller gets the error, its session stays as it was, and nobody loses stored KV."""
    with kit.small_engine() as engine:
        waiting, running, breaks = sessions = [engine.session() for _ in range(3)]
        for session in sessions:
            kit.say(session, "Hello.")
        before = list(breaks.token_ids)
        other = running.send("Go on.", max_tokens=12)
        next(other)
        answer = breaks.send("Break.")
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner if step == "run_pass" else engine._sampler, step, broken)
            patch.setattr(engine._batch, "_decode", lambda _: None)
            with pytest.raises(RuntimeError, match="the device is on fire"):
                next(answer)
        kit.drain(other)
        assert breaks.token_ids == before
        for session in (waiting, running):
            num_tokens = len(session.token_ids)
            kit.say(session, "And on.")
            assert session.usage.num_cached_tokens == num_tokens - 1
        for session in sessions:
            answered = kit.say(session, "And on and on.")
            assert answered == kit.greedy_answer(session.token_ids[: session.usage.prompt_tokens], 12)
        assert engine.metrics.failed_loads == 0
        assert engine._scheduler.idle


# Cancelling, rewinding, closing.


def test_a_cancelled_answer_keeps_what_was_said_and_the_session_goes_on(engine):
    session = engine.session()
    answer = session.send("Tell me a long story.", max_tokens=100)
    shown = "".join(next(answer) for _ in range(5))
    answer.close()
    assert session.finish_reason is FinishReason.CANCELLED
    assert session.messages[-1] == {"role": "assistant", "content": shown}
    assert engine._scheduler.idle, "its slot is free"
    num_tokens = len(session.token_ids)
    follow_up = kit.say(session, "Go on.")
    assert session.usage.num_cached_tokens == num_tokens - 1
    assert follow_up == kit.greedy_answer(session.token_ids[: session.usage.prompt_tokens], 12)


def test_a_turn_cancelled_before_its_first_token_leaves_no_trace():
    with kit.small_engine() as engine:
        session = engine.session(system="Be brief.")
        kit.say(session, "Hello.")
        before = (list(session.token_ids), list(session.messages))
        session.send("Never mind.").close()
        assert engine._scheduler.idle, "the turn is not queued any more"
        assert (session.token_ids, session.messages) == before
        kit.say(session, "Hello again.")
        assert session.usage.num_cached_tokens == len(before[0]) - 1


def test_cancelling_one_job_leaves_those_beside_it_alone(engine):
    expected = "".join(engine.session().send("Stay.", max_tokens=20))
    stays, goes = engine.session(), engine.session()
    staying, going = stays.send("Stay.", max_tokens=20), goes.send("Go.", max_tokens=20)
    shown = next(staying)
    next(going)
    going.close()
    assert shown + "".join(staying) == expected


def test_an_answer_let_go_of_while_a_step_runs_ends_once(monkeypatch):
    """The garbage collector may find it at any moment: here while its last token is being computed."""
    with kit.small_engine() as engine:
        stays, goes = engine.session(), engine.session()
        staying = stays.send("Stay.", max_tokens=10)
        going = [goes.send("Go.", max_tokens=2)]
        next(staying)
        next(going[0])

        def decode(*args, original=engine._runner.slots.decode):
            going.clear()
            return original(*args)

        monkeypatch.setattr(engine._runner.slots, "decode", decode)
        kit.drain(staying)
        assert stays.token_ids[-10:] == kit.greedy_answer(stays.token_ids[:-10], 10)
        assert [message["role"] for message in goes.messages] == ["user", "assistant"]
        assert engine.metrics.turns + engine.metrics.cancelled == 2
        num_tokens = len(goes.token_ids)
        kit.say(goes, "Come back.")
        assert goes.usage.num_cached_tokens == num_tokens - 1


@pytest.mark.parametrize("keep", ["first turn", "middle of a prompt", "nothing"])
def test_rewinding_continues_from_what_is_kept_with_its_kv(engine, keep):
    session = engine.session()
    kit.say(session, kit.prompt(50))
    after_first = len(session.token_ids)
    kit.say(session, kit.prompt(40))
    num_tokens = {"first turn": after_first, "middle of a prompt": 23, "nothing": 0}[keep]
    kept = session.token_ids[:num_tokens]
    session.rewind(num_tokens)
    assert session.token_ids == kept
    assert len(session.messages) == (0 if keep == "nothing" else 2)
    new_ids = kit.prompt(30, seed=9)
    answer = kit.say(session, new_ids)
    assert session.usage.num_cached_tokens == num_tokens
    assert answer == kit.greedy_answer(kept + new_ids, 12)


def test_turns_of_token_ids_and_of_text_mix(engine):
    session = engine.session()
    ids = kit.prompt(30)
    assert kit.say(session, ids) == kit.greedy_answer(ids, 12)
    assert session.messages[0] == {"role": "user", "content": bytes(ids).decode()}
    answer = kit.say(session, "And now text.")
    assert session.usage.num_cached_tokens == 41
    assert answer == kit.greedy_answer(session.token_ids[: session.usage.prompt_tokens], 12)


def test_a_first_turn_of_one_token_and_a_prompt_of_many_passes(engine):
    session = engine.session()
    assert kit.say(session, [65], 4) == kit.greedy_answer([65], 4)
    long = kit.prompt(300)
    answer = kit.say(session, long, 4)
    assert session.usage.num_cached_tokens == 4
    assert answer == kit.greedy_answer(session.token_ids[:305], 4)


def test_a_session_comes_back_by_its_name_and_goes_with_its_kv_when_closed(engine):
    session = engine.session(session_id="mine")
    assert engine.session(session_id="mine") is session
    kit.say(session, "Hello.")
    engine.wait_for_saves()
    stored = engine.store_stats().num_sessions
    session.close()
    session.close()
    assert session not in engine.sessions
    assert engine.store_stats().num_sessions == stored - 1
    again = engine.session(session_id="mine")
    assert again is not session
    assert again.token_ids == []


def test_closing_a_session_amid_its_answer_frees_its_slot(engine):
    session = engine.session()
    answer = session.send("Hello.", max_tokens=50)
    next(answer)
    session.close()
    assert engine._scheduler.idle
    answer.close()
    assert engine.generate(["x"], SamplingParams(max_tokens=2))[0].token_ids == kit.greedy_answer([0x78], 2)


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


def test_warming_up_is_for_an_idle_engine(engine):
    session = engine.session()
    answer = session.send("Hello.", max_tokens=5)
    with pytest.raises(SessionBusyError, match="an engine must be idle to warm up, got jobs running or waiting"):
        engine.warmup()
    kit.drain(answer)


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


def penalised_answer(ids: list[int], num_tokens: int, penalty: float, late: bool) -> list[int]:
    """The greedy answer by a full pass a token; `late` leaves the last drawn token out of what the penalty counts."""
    answer = list(ids)
    for step in range(num_tokens):
        logits = kit.full_pass(answer)[0][-1].copy()
        seen = sorted(set(answer[:-1] if late and step else answer))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        answer.append(int(logits.argmax()))
    return answer[len(ids) :]


def test_a_penalty_counts_every_token_though_decode_runs_ahead():
    """A step dispatched before the last token is marked would draw as if that had not been said."""
    penalty = 1.5
    ids = kit.prompt(20, seed=1)
    expected = penalised_answer(ids, 24, penalty, late=False)
    assert expected != penalised_answer(ids, 24, penalty, late=True), "there must be a prompt on which the two differ"
    params = SamplingParams(max_tokens=24, repetition_penalty=penalty, ignore_eos=True)
    with kit.small_engine() as engine:
        assert engine.generate([ids], params)[0].token_ids == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.2),
        SamplingParams(frequency_penalty=1.0, presence_penalty=0.5),
        SamplingParams(min_tokens=20, max_tokens=30),
    ],
)
def test_a_full_batch_runs_ahead_while_others_wait(params):
    """Nobody could begin sooner if it did not, and a penalty counts only when a token is drawn."""
    params = dataclasses.replace(params, max_tokens=30)
    prompts = [kit.prompt(20, seed) for seed in range(4)]
    with kit.small_engine() as engine:
        expected = [engine.generate([each], params)[0].token_ids for each in prompts]
    with kit.small_engine(max_batch_size=2) as engine:
        answers = [engine.session().send_ids(each, sampling=params) for each in prompts]
        next(answers[0])
        next(answers[1])
        engine.step()
        decoder, ahead = engine._batch._decoder, []
        for _ in range(10):
            engine.step()
            ahead.append(decoder._ahead is not None)
        assert all(ahead)
        assert engine._scheduler.num_waiting == 2
        answers[0].close()
        engine.step()
        assert decoder._ahead is None, "one that waited begins"
        kit.drain(*answers)
        assert [answer.job.output_ids for answer in answers[1:]] == expected[1:]
