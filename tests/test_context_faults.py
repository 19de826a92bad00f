"""Contexts of chunks where something breaks, is poisoned or missing; and beside windows, devices and processes."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future

import numpy as np
import pytest

from benchmarks.paced import ControlledStore, Transfer
from ca_jax.engine import Engine
from ca_jax.storage.store import AttentionStore
from tests import engine_kit as kit
from tests import overlap_kit, test_sliding_kv
from tests.test_context import QUESTION, RECOMPUTE, REUSE, SOME, WHOLE, A, B, C, alone, answer_over, joined
from tests.threads_kit import ThreadProcesses, run_together
from tests.transfers_kit import DelayedTransfers


class Breaking:
    """Lets transfers through, but for some layers of some keys."""

    def __init__(self, broken: set[tuple[str, int]]) -> None:
        self.broken = broken
        self.num_broken = 0

    def submit(self, transfer: Transfer, copy) -> Future:
        future: Future = Future()
        if (transfer.key, transfer.layer) in self.broken:
            self.num_broken += 1
            future.set_exception(OSError("the bytes are gone"))
        else:
            future.set_result(copy())
        return future


def breaking(blend, broken: set[tuple[str, int]]) -> tuple[Engine, Breaking]:
    loads = Breaking(broken)

    def wrapper(store: AttentionStore) -> AttentionStore:
        return ControlledStore(store, loads=loads)

    return kit.small_engine(blend=blend, store_wrapper=wrapper), loads


@pytest.mark.parametrize("layer", [0, 1, overlap_kit.NUM_LAYERS - 1])
@pytest.mark.parametrize("blend", [REUSE, SOME, WHOLE], ids=lambda blend: str(blend.recompute_ratio))
def test_a_chunk_that_breaks_in_the_middle_of_a_load_is_computed_in_its_place(blend, layer):
    broken: set[tuple[str, int]] = set()
    engine, loads = breaking(blend, broken)
    with engine:
        engine.precompute([A, B, C])
        engine.wait_for_saves()
        broken.add((engine._kv.chunks.key(B, ""), layer))
        session = engine.session()
        answer = kit.say(session, QUESTION, 8, context=[A, B, C])
        assert loads.num_broken
        assert engine.metrics.failed_loads == engine.metrics.lost_chunks == 1
        assert session.usage.missed_chunks == 1
        assert session.usage.num_cached_tokens == len(A) + len(C)
        kv = kit.stored_kv(engine, session)
        computed = kit.full_pass(joined(A, B))[1]
        np.testing.assert_allclose(kv[:, :, : computed.shape[2]], computed, atol=1e-4)
        if blend is WHOLE:
            assert answer == kit.greedy_answer(joined(A, B, C, QUESTION), 8)
        if blend is REUSE:
            fused = np.concatenate([computed, alone(C)], axis=2)
            assert answer == answer_over(fused, QUESTION, 8)
        broken.clear()
        kit.say(engine.session(), QUESTION, 2, context=[B])  # It was forgotten, and is computed anew.
        assert engine.metrics.computed_chunks == 4


class FailingSave:
    """Lets transfers through, but for one of a key, counted from 0."""

    def __init__(self, failing: int) -> None:
        self.key: str | None = None
        self.failing = failing
        self.num_seen = 0

    def submit(self, transfer: Transfer, copy) -> Future:
        future: Future = Future()
        if transfer.key == self.key:
            self.num_seen += 1
            if self.num_seen == self.failing + 1:
                future.set_exception(OSError("no room"))
                return future
        future.set_result(copy())
        return future


@pytest.mark.parametrize("failing", range(2 * overlap_kit.NUM_LAYERS))
def test_a_chunk_of_which_a_part_was_saved_is_computed_anew(failing):
    """It takes two passes: the first may be in the store when a layer of the second fails."""
    saves = FailingSave(failing)
    with kit.small_engine(blend=WHOLE, store_wrapper=lambda store: ControlledStore(store, saves=saves)) as engine:
        saves.key = engine._kv.chunks.key(A, "")
        engine.precompute([A, B])
        engine.wait_for_saves()
        assert saves.num_seen > failing
        assert engine.metrics.failed_saves == 1
        session = engine.session()
        answer = kit.say(session, QUESTION, 8, context=[B, A])
        assert answer == kit.greedy_answer(joined(B, A, QUESTION), 8)
        assert session.usage.num_cached_tokens == len(A) + len(B)


def test_a_chunk_of_which_only_some_was_saved_is_computed_again():
    chunk = kit.prompt(150, 9)
    with kit.small_engine(blend=REUSE) as engine:
        answer = engine.session().send_ids(QUESTION, context=[chunk], max_tokens=4)
        job = engine._scheduler.waiting[0]
        assert job.chunk is not None
        while engine._scheduler.prefilling is not job or engine._batch._prefilling.num_left == len(chunk):
            engine.step()
        engine.cancel(job)
        answer.close()
        engine.wait_for_saves()
        assert 0 < engine._kv.store.num_readable(job.chunk.key) < len(chunk)
        session = engine.session()
        context = [kit.prompt(5), chunk]
        assert kit.say(session, QUESTION, 8, context=context) == answer_over(alone(*context), QUESTION, 8)
        assert session.usage.missed_chunks == 0
        assert engine._kv.store.num_readable(job.chunk.key) == len(chunk)


def test_chunks_that_all_break_are_all_computed():
    broken: set[tuple[str, int]] = set()
    engine, _ = breaking(REUSE, broken)
    with engine:
        engine.precompute([A, B])
        engine.wait_for_saves()
        broken |= {(engine._kv.chunks.key(A, ""), 1), (engine._kv.chunks.key(B, ""), 0)}
        session = engine.session()
        assert kit.say(session, QUESTION, 8, context=[B, A]) == kit.greedy_answer(joined(B, A, QUESTION), 8)
        assert engine.metrics.lost_chunks == 2
        assert session.usage.missed_chunks == 2
        assert session.usage.num_cached_tokens == 0


def test_an_own_history_that_breaks_is_computed_with_the_chunks_that_do_not():
    broken: set[tuple[str, int]] = set()
    engine, _ = breaking(WHOLE, broken)
    with engine:
        session = engine.session()
        kit.say(session, C, 8)
        engine.precompute([A])
        engine.wait_for_saves()
        broken.add((engine._kv.key(session.session_id), 1))
        expected = kit.greedy_answer([*session.token_ids, *A, *QUESTION], 8)
        assert kit.say(session, QUESTION, 8, context=[A]) == expected
        assert engine.metrics.failed_loads == 1
        assert engine.metrics.lost_chunks == 0
        assert session.usage.num_cached_tokens == len(A)


@pytest.mark.parametrize("seed", range(3))
def test_nobody_reads_what_is_not_theirs(seed):
    """All memory that is not in use is NaN, and transfers end when they like; turns of several sessions at once."""
    loads = DelayedTransfers(3e-3, seed=seed)
    wrapper = overlap_kit.controlled(loads=loads)
    with loads, kit.small_engine(blend=WHOLE, store_wrapper=wrapper) as engine:
        overlap_kit.poison(engine)
        sessions = [engine.session() for _ in range(4)]
        contexts = ([A, B], [B, C, A], [C], [B, B, C])
        questions = [kit.prompt(12 + i, i) for i in range(4)]
        expected = [
            kit.greedy_answer(joined(*context, question), 6)
            for context, question in zip(contexts, questions, strict=True)
        ]
        answers = [
            session.send_ids(question, context=context, max_tokens=6)
            for session, question, context in zip(sessions, questions, contexts, strict=True)
        ]
        kit.drain(*answers)
        assert [session.token_ids[-6:] for session in sessions] == expected
        for session in sessions:
            prompt = [*session.token_ids, *A]
            assert kit.say(session, A, 6) == kit.greedy_answer(prompt, 6)
        overlap_kit.assert_nothing_is_held(engine)


@pytest.mark.parametrize("full_layers", [(), (0,)])
def test_chunks_of_a_model_whose_layers_slide(full_layers):
    model = test_sliding_kv.model(full_layers)
    config = dataclasses.replace(kit.SMALL, blend=WHOLE)
    context = (A, B, A)
    with Engine(model, config) as blended, Engine(model, dataclasses.replace(config, blend=RECOMPUTE)) as plain:
        answers = []
        for engine in (blended, plain):
            session = engine.session()
            answers.append([kit.say(session, QUESTION, 8, context=context), kit.say(session, C, 8, context=[B])])
        assert answers[0] == answers[1]
        assert blended.metrics.blended_turns == 2
        assert plain.metrics.blended_turns == 0


def test_what_one_process_lacks_none_blends():
    """Processes share a model; a chunk that one of them has lost is computed in its place by all."""

    def run(processes: ThreadProcesses) -> tuple[list[int], int, int]:
        config = dataclasses.replace(kit.SMALL, blend=REUSE)
        with Engine(kit.tiny_model(), config, processes=processes) as engine:
            engine.precompute([A, B, C])
            engine.wait_for_saves()
            session = engine.session(session_id="one")
            answer = session.send_ids(QUESTION, context=[A, B, C], max_tokens=8)
            if processes.index == 1:
                engine._kv.drop(engine._kv.chunks.key(B, ""))
            kit.drain(answer)
            return session.token_ids[-8:], session.usage.missed_chunks, engine.metrics.computed_chunks

    expected = answer_over(np.concatenate([kit.full_pass(joined(A, B))[1], alone(C)], axis=2), QUESTION, 8)
    assert run_together(2, run) == [(expected, 1, 3)] * 2
