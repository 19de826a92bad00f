"""Contexts of chunks where something breaks, is poisoned or missing; and beside windows, devices and processes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from ca_jax import BlendConfig
from ca_jax.engine import Engine
from tests import engine_kit as kit
from tests import overlap_kit, test_sliding_kv
from tests.chunk_kit import stored
from tests.test_context import QUESTION, REUSE, SOME, WHOLE, A, B, C, answer_over, joined
from tests.threads_kit import ThreadProcesses, run_together
from tests.transfers_kit import DelayedTransfers, InstantTransfers

# What is computed in the place of a chunk is known where all before it is exact: a first chunk without a head is.
REUSE_ALONE, SOME_ALONE = (dataclasses.replace(blend, chunk_head="none") for blend in (REUSE, SOME))


@contextlib.contextmanager
def faulty(blend: BlendConfig) -> Iterator[tuple[Engine, InstantTransfers, InstantTransfers]]:
    """An engine, and its loads and saves, which break as they are told."""
    loads, saves = InstantTransfers(), InstantTransfers()
    with kit.small_engine(blend=blend, store_wrapper=overlap_kit.controlled(loads=loads, saves=saves)) as engine:
        yield engine, loads, saves


def key_of(engine: Engine, chunk: list[int]) -> str:
    return engine._kv.chunks.key(chunk, "")


@pytest.mark.parametrize(
    ("blend", "layer"), [(REUSE_ALONE, 0), (SOME_ALONE, kit.NUM_LAYERS - 1), (WHOLE, 1)], ids=["reuse", "some", "whole"]
)
def test_a_chunk_that_breaks_in_the_middle_of_a_load_is_computed_in_its_place(blend, layer):
    with faulty(blend) as (engine, loads, _):
        engine.precompute([A, B, C])
        engine.wait_for_saves()
        broken = (key_of(engine, B), layer)
        loads.breaks = lambda load: (load.key, load.layer) == broken
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
        if blend is REUSE_ALONE:
            assert answer == answer_over(np.concatenate([computed, stored(C, ())], axis=2), QUESTION, 8)
        loads.breaks = lambda load: False
        kit.say(engine.session(), QUESTION, 2, context=[B])  # It was forgotten, and is computed anew.
        assert engine.metrics.computed_chunks == 4


@pytest.mark.parametrize("broken", ["all chunks", "own history"])
def test_what_breaks_is_computed_with_what_does_not(broken):
    with faulty(WHOLE) as (engine, loads, _):
        session = engine.session()
        kit.say(session, C, 8)
        engine.precompute([A, B])
        engine.wait_for_saves()
        chunks, own = [key_of(engine, A), key_of(engine, B)], [engine._kv.key(session.session_id)]
        keys = chunks if broken == "all chunks" else own
        broken_layers = {(key, layer) for layer, key in enumerate(keys, start=1)}
        loads.breaks = lambda load: (load.key, load.layer) in broken_layers
        before = session.token_ids
        expected = kit.greedy_answer([*before, *B, *A, *QUESTION], 8)
        assert kit.say(session, QUESTION, 8, context=[B, A]) == expected
        num_lost = 2 if broken == "all chunks" else 0
        assert (engine.metrics.lost_chunks, session.usage.missed_chunks) == (num_lost, num_lost)
        assert session.usage.num_cached_tokens == (len(before) - 1 if num_lost else len(A) + len(B))


@pytest.mark.parametrize("failing", [2, 3])
def test_a_chunk_of_which_a_part_was_saved_is_computed_anew(failing):
    """It takes two passes: the first may be in the store when a layer of the second fails."""
    with faulty(WHOLE) as (engine, _, saves):
        key, count = key_of(engine, A), itertools.count()
        saves.breaks = lambda save: save.key == key and next(count) == failing
        engine.precompute([A, B])
        engine.wait_for_saves()
        assert engine.metrics.failed_saves == saves.num_broken == 1
        session = engine.session()
        answer = kit.say(session, QUESTION, 8, context=[B, A])
        assert answer == kit.greedy_answer(joined(B, A, QUESTION), 8)
        assert session.usage.num_cached_tokens == len(A) + len(B)


def test_nobody_reads_what_is_not_theirs():
    """All memory that is not in use is NaN, and transfers end when they like; turns of several sessions at once."""
    loads = DelayedTransfers(3e-3, seed=0)
    wrapper = overlap_kit.controlled(loads=loads)
    with loads, kit.small_engine(blend=WHOLE, store_wrapper=wrapper) as engine:
        overlap_kit.poison(engine)
        sessions = [engine.session() for _ in range(4)]
        contexts = ([A, B], [B, C, A], [C], [B, B, C])
        questions = [kit.prompt(12 + i, i) for i in range(4)]
        answers = [
            session.send_ids(question, context=context, max_tokens=6)
            for session, question, context in zip(sessions, questions, contexts, strict=True)
        ]
        kit.drain(*answers)
        kit.expect_right(*sessions)
        for session in sessions:
            kit.check_turn(session, A, 6)
        overlap_kit.assert_nothing_is_held(engine)


def test_chunks_of_a_model_whose_layers_slide():
    model, context = test_sliding_kv.model(), (A, B, A)
    recompute = BlendConfig(mode="recompute")
    with kit.small_engine(model, blend=WHOLE) as blended, kit.small_engine(model, blend=recompute) as plain:
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
        with kit.small_engine(blend=REUSE_ALONE, processes=processes) as engine:
            engine.precompute([A, B, C])
            engine.wait_for_saves()
            session = engine.session(session_id="one")
            answer = session.send_ids(QUESTION, context=[A, B, C], max_tokens=8)
            if processes.index == 1:
                engine._kv.drop(engine._kv.chunks.key(B, ""))
            kit.drain(answer)
            return session.token_ids[-8:], session.usage.missed_chunks, engine.metrics.computed_chunks

    expected = answer_over(np.concatenate([kit.full_pass(joined(A, B))[1], stored(C, ())], axis=2), QUESTION, 8)
    assert run_together(2, run) == [(expected, 1, 3)] * 2
