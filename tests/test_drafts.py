"""Decoding ahead: what is guessed, what of it is checked, and that no token of any answer is another for it."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import types
from typing import ClassVar

import numpy as np
import pytest

from ca_jax.device.processes import Processes
from ca_jax.serving import core, drafts
from ca_jax.serving.drafts import Drafter, Guess, Lookup
from ca_jax.session import Job
from ca_jax.storage.config import GIB
from tests import drafts_kit
from tests import engine_kit as kit
from tests import overflow_kit as ok

MOST = 15


@dataclasses.dataclass(eq=False)
class Context:
    """Of a job, what is looked at to guess."""

    token_ids: list[int]
    num_gone: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def expected(tokens: list[int], most: int) -> tuple[int, list[int]]:
    """What `Lookup.find` says, by trying all places."""
    best, found = (0, 0), []
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, drafts.MOST_MATCH) and tokens[end - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= drafts.LEAST_MATCH and (length, end) > best:
            best, found = (length, end), (tokens[end:] * most)[:most]
    return best[0], found


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_match_is_found_however_the_context_grows_and_is_cut(seed):
    rng = np.random.default_rng(seed)
    job = Context(rng.integers(0, 2 + seed % 4, rng.integers(1, 40)).tolist())
    lookup, num_matches = Lookup(job), 0
    for _ in range(60):
        assert lookup.find(job, MOST) == expected(job.token_ids, MOST)
        num_matches += expected(job.token_ids, MOST)[0] > 0
        job.token_ids = [*job.token_ids, *rng.integers(0, 2 + seed % 4, rng.integers(1, 80)).tolist()]
        if rng.random() < 0.2:
            job.num_gone += 7
            job.token_ids = job.token_ids[7:]
    assert num_matches > 30


def guess_of(*likely: float) -> Guess:
    return Guess(2, list(range(len(likely))), np.array(likely))


def drafter_of(sizes: tuple[int, ...] = (4, 8), num_parts: int = 1, **costs: float) -> Drafter:
    """One whose steps cost so many plain ones, by `rows_size`."""
    drafter = Drafter(MOST, sizes, num_parts, Processes())
    for name, cost in costs.items():
        num_rows, size = map(int, name.removeprefix("of_").split("_"))
        drafter.took(num_rows, 0, 1.0)
        drafter.took(num_rows, size, cost)
    return drafter


def chosen(drafter: Drafter, guesses: list[Guess], parts: list[int] | None = None) -> tuple[int, list[int]]:
    """The size of a step, and how much of each guess is checked in it."""
    jobs = [object() for _ in guesses]
    of_jobs = dict(zip(jobs, parts or [0] * len(jobs), strict=True))
    size, found, _ = drafter.choose({job: guess for job, guess in zip(jobs, guesses, strict=True) if guess}, of_jobs)
    for job, guess in zip(jobs, guesses, strict=True):
        draft = found.get(job, [])
        assert draft == (guess.tokens[: len(draft)] if guess else [])
    return size, [len(found.get(job, ())) for job in jobs]


@pytest.mark.parametrize(
    ("likely", "costs", "size", "length"),
    [
        ([0.9] * 7, {"of_1_4": 1.5, "of_1_8": 2.0}, 8, 7),  # 5.7 tokens in 2 steps, 3.4 in 1.5.
        ([0.9] * 7, {"of_1_4": 1.5, "of_1_8": 3.0}, 4, 3),
        ([0.3] * 7, {"of_1_4": 1.5, "of_1_8": 2.0}, 0, 0),  # 1.4 tokens in 1.5 steps.
        ([0.3] * 7, {"of_1_4": 1.3, "of_1_8": 2.0}, 4, 3),
        ([0.9] * 2, {"of_1_4": 1.5, "of_1_8": 1.6}, 4, 2),
        ([0.9] * 7, {"of_1_4": 6.0, "of_1_8": 6.0}, 0, 0),
    ],
)
def test_what_gives_most_tokens_a_second_is_checked(likely, costs, size, length):
    assert chosen(drafter_of(**costs), [guess_of(*likely)]) == (size, [length])


def test_the_likeliest_tokens_of_all_rows_are_checked_and_each_part_has_room_of_its_own():
    guesses = [guess_of(0.9, 0.9, 0.9), guess_of(0.5, 0.5), None, guess_of(0.95, 0.1)]
    drafter = drafter_of(of_4_4=9.0, of_4_8=1.1)
    assert chosen(drafter, guesses) == (8, [3, 0, 0, 1])  # Of 8, each row has its own token; 0.73 goes before 0.5.
    drafter = drafter_of((8,), 2, of_4_8=1.1)
    assert chosen(drafter, guesses, [0, 0, 1, 1]) == (8, [3, 2, 0, 2])
    assert chosen(drafter, [None] * 4) == (0, [0] * 4)


def test_what_is_guessed_wrongly_is_no_longer_checked_and_what_turns_right_again_is():
    drafter, job = drafter_of((8,), of_1_8=1.5), Context([1, 2, 3, 4, 1, 2])
    for right, is_checked in ((True, True), (False, False), (True, True)):
        for _ in range(400):
            guess = drafter.guesses({job: MOST})[job]
            drafter.score(job, guess, [3 if right else 9])
        assert guess.tokens[:3] == [3, 4, 1]
        assert bool(drafter.choose({job: guess}, {job: 0})[0]) == is_checked


def test_a_step_that_took_long_once_is_tried_again_later():
    drafter, guess = drafter_of((4,), of_1_4=1.2), guess_of(0.9, 0.9, 0.9)
    assert chosen(drafter, [guess]) == (4, [3])
    for _ in range(20):
        drafter.took(1, 4, 50.0)
    waits = next(count for count in itertools.count() if chosen(drafter, [guess])[0])
    assert 100 < waits < 5000


# Answers.


@pytest.fixture
def is_eager(monkeypatch):
    """Has all that may be right checked, whatever that takes, of any number of answers."""
    monkeypatch.setattr(drafts, "ROW_TOKENS", 1)
    monkeypatch.setattr(Drafter, "took", lambda self, *of_step: None)


class Known(Lookup):
    """Guesses what was said before, in an engine that guesses nothing, and now and then something else."""

    said: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    rng: ClassVar[random.Random] = random.Random(1)

    def find(self, job, most):
        rest = self.said[ended_by(job)][len(job.output_ids) :][:most]
        return drafts.MOST_MATCH, [self.rng.choice([token] * 5 + [88]) for token in rest]


def ended_by(job: Job) -> tuple[int, ...]:
    """What tells a turn from all others."""
    return list(drafts_kit.SAMPLINGS).index(job.session.session_id), *job.prompt_ids[-22:]


@pytest.mark.parametrize("store", [None, "int8"])
def test_answers_are_the_same_with_and_without(is_eager, store, monkeypatch):
    changes = {"kv_rest_dtype": "int8"} if store else {"overflow": ok.config(method="tt")}
    plain = drafts_kit.said(**changes)
    Known.said |= {ended_by(job): job.output_ids for job in plain.jobs}
    monkeypatch.setattr(drafts, "Lookup", Known)
    guessed = drafts_kit.said(max_draft_tokens=MOST, **changes)
    assert guessed.answers == plain.answers
    metrics = guessed.metrics
    assert metrics.decode_steps < 0.7 * plain.metrics.decode_steps
    assert metrics.accepted_tokens > 200
    assert metrics.draft_tokens > metrics.accepted_tokens + 50
    # What was accepted is stored, and loaded by the next turn.
    assert metrics.cached_tokens == plain.metrics.cached_tokens > 0


def test_an_answer_that_fills_its_context_takes_no_page_that_it_was_not_promised(is_eager, monkeypatch):
    monkeypatch.setattr(Lookup, "find", lambda self, job, most: (drafts.MOST_MATCH, [88] * most))
    size = {"context_window": 64, "page_tokens": 8, "max_batch_size": 1, "overflow": None}
    pool_gib = 8 * 8 * kit.TOKEN_BYTES / GIB
    with kit.small_engine(max_draft_tokens=MOST, kv_pool_gib=pool_gib, **size) as engine:
        session = engine.session()
        kit.say(session, kit.prompt(20), 60)
        kit.expect_right(session)
        assert len(session.token_ids) == 64
        assert engine.metrics.draft_tokens > 50


def test_models_that_cannot_go_back_check_nothing():
    model = kit.model_of(num_layers=2)
    with kit.small_engine(model, max_draft_tokens=MOST, overflow=ok.config(discarder="heavy_hitters")) as engine:
        assert engine._runner.draft_buckets == ()
        kit.check_turn(engine.session(), kit.prompt(10) * 3, model=model)
        assert engine.metrics.draft_steps == 0


def test_no_answer_waits_for_what_checks_drafts_to_be_compiled(is_eager, monkeypatch):
    compiling = threading.Event()
    monkeypatch.setattr(
        core, "Background", lambda functions: types.SimpleNamespace(thread=waiting, close=compiling.set)
    )
    waiting = threading.Thread(target=compiling.wait, daemon=True)
    waiting.start()
    monkeypatch.setattr(Lookup, "find", lambda self, job, most: (drafts.MOST_MATCH, [88] * most))
    with kit.small_engine(max_draft_tokens=MOST) as engine:
        engine._core.warm_in_background()
        kit.say(engine.session(), kit.prompt(20), 8)
        assert engine.metrics.draft_steps == 0
        compiling.set()
        waiting.join()
        kit.say(engine.session(), kit.prompt(20), 8)
        assert engine.metrics.draft_steps > 0
