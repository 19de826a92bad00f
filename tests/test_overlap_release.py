"""Jobs that break or are given up midway: their caller alone is told, and nothing of theirs is held afterwards.

A turn over stored history, prefilled in three passes while another job decodes, ends at every point on its way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import jax
import pytest

from ca_jax.device import sampler as sampling
from ca_jax.device import steps, transfer
from ca_jax.device.passes import Passed, PassPart
from ca_jax.engine import Engine
from ca_jax.kv.async_saver import Part
from ca_jax.kv.layer_loader import LayerLoad, LayerLoader, LoadError
from ca_jax.kv.load import Histories
from ca_jax.overflow.config import OverflowConfig
from ca_jax.session import Answer, Session
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import SaveTicket
from ca_jax.turns.requests import FinishReason, SamplingParams
from tests import engine_kit as kit
from tests import overlap_kit
from tests.transfers_kit import GatedTransfers

NUM_NEW = 150
PASSES = (63, 126, NUM_NEW + 1)
"""Tokens that are done behind each pass, with the last one of the history; one of 64 is of who decodes along."""


@dataclasses.dataclass
class Scene:
    """A turn on its way, and one beside it."""

    engine: Engine
    loads: GatedTransfers
    saves: GatedTransfers
    session: Session
    beside: Session
    going_on: Answer = dataclasses.field(init=False)

    def begin(self, max_tokens: int = 20) -> Answer:
        """Queues the turn that will end midway."""
        return self.session.send_ids(kit.prompt(NUM_NEW, seed=9), max_tokens=max_tokens)

    def begin_to(self, num_done: int) -> Answer:
        """The same, and runs the engine until its prefill has dispatched so many tokens."""
        answer = self.begin()
        for _ in range(500):
            prefilling = self.engine._batch._prefilling.get(answer.job)
            if answer.job.output_ids if prefilling is None else prefilling.prefill.num_done == num_done:
                return answer
            self.engine.step()
        raise AssertionError("the engine runs, and what was waited for does not come")

    def go_on(self) -> None:
        """Another turn beside, where the last one has ended."""
        self.going_on = self.beside.send_ids(kit.prompt(20), max_tokens=40)
        next(self.going_on)


@contextlib.contextmanager
def scene(*, max_batch_size: int = 2, **changes: object) -> Iterator[Scene]:
    """A session with history, and one that decodes; in the end both go on from the store, and nothing is held."""
    with overlap_kit.gated_engine(max_batch_size=max_batch_size, **changes) as (engine, loads, saves):
        session, beside = engine.session(), engine.session()
        for each in (session, beside):
            kit.say(each, kit.prompt(60))
        engine.wait_for_saves()
        at = Scene(engine, loads, saves, session, beside)
        at.go_on()
        yield at
        kit.drain(at.going_on)
        kit.expect_right(beside)
        overlap_kit.assert_nothing_is_held(engine)
        for each in (session, beside):
            kit.say(each, kit.prompt(10))
            usage = kit.check_turn(each, kit.prompt(11))
            assert usage.num_cached_tokens == usage.prompt_tokens - 12, "its KV is not stored any more"


@contextlib.contextmanager
def broken(owner: object, name: str, num_calls: int = 0) -> Iterator[None]:
    """Something that breaks in a `with` block, from its call of that number on."""
    original, count = getattr(owner, name), itertools.count()

    def call(*args: object, **options: object) -> object:
        if num_calls <= next(count):
            raise OSError("the device is on fire")
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


def expect_end(answer: Answer) -> None:
    with pytest.raises(OSError, match="on fire"):
        kit.drain(answer)


# Given up.


@pytest.mark.parametrize("holds_saves", [False, True])
@pytest.mark.parametrize("num_done", PASSES)
def test_given_up_behind_any_pass(num_done, holds_saves):
    """The slot is free at once; what was submitted is saved all the same, or given up where its pass was."""
    with scene() as at, overlap_kit.shut(*[at.saves] * holds_saves):
        answer = at.begin_to(num_done)
        answer.close()
        assert len(answer.job.output_ids) == (num_done > NUM_NEW)
        assert not at.engine._scheduler.prefilling
        assert answer.job.slot is None
        assert not holds_saves or at.engine._kv.write_buffer.num_bytes > 0
        overlap_kit.take(at.going_on, 3)


def test_an_engine_that_closes_amid_everything_lets_go_of_it():
    loads, saves = overlap_kit.open_gate(), overlap_kit.open_gate()
    engine = kit.small_engine(store_wrapper=overlap_kit.controlled(loads=loads, saves=saves), max_batch_size=2)
    sessions = [engine.session() for _ in range(4)]
    for session in sessions:
        kit.say(session, kit.prompt(40))
    engine.wait_for_saves()
    answers = [session.send_ids(kit.prompt(100), max_tokens=30) for session in sessions]
    next(answers[0])
    loads.shut()
    saves.shut()
    with overlap_kit.in_thread(engine.close):
        loads.open()
        saves.open()
    assert not engine._kv._loader._loads
    assert not engine._kv.write_buffer.num_bytes
    assert [answer.job.finish_reason for answer in answers] == [FinishReason.CANCELLED] * 4


# Broken.


@pytest.mark.parametrize("is_preloaded", [True, False])
@pytest.mark.parametrize("layer", range(kit.NUM_LAYERS))
def test_a_read_that_breaks_at_any_layer_is_a_miss(layer, is_preloaded):
    """In passes or at once, before the turn has come or after: all is recomputed, with the right tokens."""
    with scene(max_batch_size=1 if is_preloaded else 2) as at:
        with overlap_kit.shut(at.loads):
            answer = at.begin(max_tokens=8)
            with overlap_kit.in_thread(lambda: overlap_kit.take(at.going_on, 6)):
                for transfer in at.loads.wait_held(kit.NUM_LAYERS):
                    error = OSError("the disk is on fire") if transfer.layer == layer else None
                    at.loads.let_through(transfer, error=error)
        kit.drain(answer)
        kit.expect_right(at.session)
        assert at.engine.metrics.failed_loads == 1
        assert at.session.usage.num_cached_tokens == 0


def break_prefill(at: Scene, owner: object, name: str, num_calls: int = 0, *, is_shared: bool = False) -> None:
    """Breaks the turn; its session stays as it was, and the next finds all that was stored before.

    So does the one that decodes along where a pass breaks, which is both of theirs.
    """
    before, stored = at.session.token_ids, at.engine.stored.find(at.session.session_id)
    answer = at.begin()
    with broken(owner, name, num_calls):
        expect_end(answer)
        if is_shared:
            expect_end(at.going_on)
    assert at.session.token_ids == before
    assert at.engine.metrics.failed_loads == 0
    at.engine.wait_for_saves()
    assert at.engine.metrics.failed_saves == 0, "what is given up did not break"
    left = at.engine.stored.find(at.session.session_id)
    assert left.num_tokens >= stored.num_tokens
    assert left.ssd_tokens >= stored.ssd_tokens
    assert kit.check_turn(at.session, kit.prompt(9)).num_cached_tokens >= len(before) - 1
    if is_shared:
        at.go_on()


@pytest.mark.parametrize("nth_pass", range(len(PASSES)))
def test_a_pass_that_breaks_at_any_layer_ends_all_that_it_was_of_and_costs_no_kv(nth_pass):
    with scene() as at:
        if nth_pass == len(PASSES) - 1:  # Of few tokens: one function for all layers.
            break_prefill(at, steps, "model_step", is_shared=True)
            return
        for layer in range(kit.NUM_LAYERS):
            break_prefill(at, steps, "layer_step", nth_pass * kit.NUM_LAYERS + layer, is_shared=True)


def test_what_a_pass_gives_may_break_when_it_is_waited_for():
    """That is when the device says so."""
    with scene() as at:
        break_prefill(at, sampling.Draw, "wait", is_shared=True)


@pytest.mark.parametrize("error", [LoadError("it is gone"), OSError("the device is on fire")], ids=["load", "other"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_history_that_breaks_in_a_pass_of_two_prompts_is_that_of_one(monkeypatch, is_first, error):
    """The other goes on; it begins anew where only its load broke."""
    with scene(max_batch_size=3) as at:
        other, before, num_parts = at.engine.session(), at.session.token_ids, []
        kit.say(other, kit.prompt(9))
        at.engine.wait_for_saves()

        def take(load: LayerLoad, layer: int, original=LayerLoad.layer) -> jax.Array:
            if layer == 1 and load.ticket.parts[0][0].key == at.session.key:
                raise error
            return original(load, layer)

        def run_pass(parts: list[PassPart], *args: object, original=at.engine._runner.run_pass) -> Passed:
            num_parts.append(len(parts))
            return original(parts, *args)

        with monkeypatch.context() as patch:
            patch.setattr(LayerLoad, "layer", take)
            patch.setattr(at.engine._runner, "run_pass", run_pass)
            sessions = (at.session, other) if is_first else (other, at.session)
            answers = {each: each.send_ids(kit.prompt(10 + i), max_tokens=8) for i, each in enumerate(sessions)}
            kit.drain(answers[other])
            with pytest.raises(OSError, match="on fire") if isinstance(error, OSError) else contextlib.nullcontext():
                kit.drain(answers[at.session])
        assert num_parts[0] == 2
        assert (at.session.token_ids == before) == isinstance(error, OSError)
        kit.expect_right(at.session, other)
        assert other.usage.num_cached_tokens == 20
        assert at.engine.metrics.failed_loads == isinstance(error, LoadError)


def test_a_first_pass_that_breaks_otherwise_than_by_its_load_costs_no_kv(tmp_path):
    """Out of memory, a compile error: the bytes at rest are sound, in DRAM and on SSD."""
    with scene(store=kit.ssd_store(tmp_path)) as at:
        assert at.engine.stored.find(at.session.session_id).ssd_tokens > 0
        pool = at.engine._runner.pool
        for owner, name in (
            (transfer, "staging_to_device"),
            (LayerLoad, "begin"),
            (pool, "fill"),
            (Histories, "complete"),
        ):
            break_prefill(at, owner, name)


def test_a_turn_that_cannot_begin_fails_alone():
    with scene() as at:
        engine, kv = at.engine, at.engine._kv
        for owner, name in (
            (kv.write_buffer, "begin_turn"),
            (kv.histories, "open"),
            (engine._runner.sampler, "set_slot"),
            (engine._runner.pool, "begin"),
            (AttentionStore, "prepare_save"),
        ):
            answer = at.begin()
            with broken(owner, name), pytest.raises(OSError, match="on fire"):
                next(answer)


@pytest.mark.parametrize(("owner", "name"), [(AttentionStore, "prepare_load"), (LayerLoader, "open")])
def test_a_load_that_cannot_begin_before_its_turn_is_its_own_jobs_failure(owner, name):
    """The job that runs meanwhile is none the wiser."""
    with scene(max_batch_size=1) as at:
        answer = at.begin()
        with broken(owner, name):
            overlap_kit.take(at.going_on, 5)
            expect_end(answer)


@pytest.mark.parametrize("num_calls", [0, 3])
def test_a_text_that_cannot_be_shown_ends_its_answer_alone(num_calls):
    """The first token's and a later one's: others in the batch get theirs, though they run the engine."""
    with scene() as at:
        answer = at.begin()
        with broken(answer.job.output, "push", num_calls):
            kit.drain(at.going_on)
            expect_end(answer)


@pytest.mark.parametrize(
    ("owner", "method", "num_calls"),
    [
        *((SaveTicket, *each) for each in (("write", 0), ("write", 4), ("write_all", 1))),
        *((Part, "on_host", num_calls) for num_calls in (1, 5)),  # As where there is no pinned memory left.
    ],
)
@pytest.mark.parametrize("closes", [True, False])
def test_a_save_that_breaks_while_its_turn_runs_or_when_it_was_given_up(owner, method, num_calls, closes):
    with scene() as at, broken(owner, method, num_calls):
        answer = at.begin(max_tokens=30)
        overlap_kit.take(answer, 12)
        if closes:
            answer.close()
        else:
            kit.drain(answer)
        kit.expect_right(at.session)
        at.engine.wait_for_saves()
        assert at.engine.metrics.failed_saves > 0


# The pages.


@contextlib.contextmanager
def lost_pages(engine: Engine, owner: object, name: str, *, loses: bool = True) -> Iterator[None]:
    """Something that breaks before it takes the donated pages or, if it loses them, after."""

    def call(*_: object, **__: object) -> None:
        if loses:
            jax.tree.map(lambda buffer: buffer.delete(), engine._runner.pool.buffers)
        raise OSError("the device is on fire")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


@pytest.mark.parametrize("who_runs", ["its caller", "another"])
def test_pages_that_are_lost_to_a_history_end_all_that_run(who_runs):
    with scene() as at:
        before, pool = at.session.token_ids, at.engine._runner.pool
        answer = at.begin()
        answers = (answer, at.going_on) if who_runs == "its caller" else (at.going_on, answer)
        with lost_pages(at.engine, pool, "fill"):
            for each in answers:
                with pytest.raises((OSError, RuntimeError)):
                    kit.drain(each)
        assert at.session.token_ids == before
        assert not pool.remake_if_broken()


@pytest.mark.parametrize("keep_pages", [False, True])
@pytest.mark.parametrize("loses", [False, True])
def test_a_decode_step_that_breaks_ends_all_that_it_was_of(loses, keep_pages):
    with scene(keep_pages=keep_pages) as at:
        answer = at.begin()
        overlap_kit.take(answer, 3)
        with lost_pages(at.engine, steps, "decode", loses=loses):
            expect_end(answer)
            expect_end(at.going_on)


def test_pages_that_are_lost_to_a_cut_end_all_that_run():
    with kit.small_engine(overflow=OverflowConfig(repair="none")) as engine:
        cut, other = engine.session(), engine.session()
        beside = other.send_ids(kit.prompt(20), max_tokens=60)
        next(beside)
        with lost_pages(engine, engine._runner.pool, "cut"):
            expect_end(cut.send_ids(kit.prompt(kit.WINDOW - 20), max_tokens=40))
        expect_end(beside)
        for each in (cut, other):
            kit.check_turn(each, kit.prompt(10))


def test_marks_that_are_lost_end_all_that_are_in_a_slot(monkeypatch):
    def lose(marks: jax.Array, *_: object) -> None:
        marks.delete()
        raise OSError("the device is on fire")

    params = SamplingParams(max_tokens=10, frequency_penalty=1.0, ignore_eos=True)
    with kit.small_engine() as engine:
        expected = engine.generate([kit.prompt(20)], params)[0].token_ids
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "set_entry", lose)
            with pytest.raises(OSError, match="on fire"):
                engine.generate([kit.prompt(20), kit.prompt(21)], params)
        assert engine.generate([kit.prompt(20)], params)[0].token_ids == expected
        overlap_kit.assert_nothing_is_held(engine)
