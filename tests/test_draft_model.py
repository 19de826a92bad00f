"""A draft model: what it guesses, that no token of any answer is another for it, and when it is no longer asked."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import types

import numpy as np
import pytest

from benchmarks.compiles import CompileCounter
from ca_jax.config import EngineConfig
from ca_jax.device.draft_model import DraftModel
from ca_jax.device.processes import Processes
from ca_jax.engine import Engine
from ca_jax.models.recurrence import RecurrenceConfig
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.serving import drafts
from ca_jax.serving.core import check_draft_model, check_may_draft
from ca_jax.serving.drafts import Drafter, Guess, Lookup
from ca_jax.turns.requests import SamplingParams
from tests import drafts_kit
from tests import engine_kit as kit
from tests import overflow_kit as ok
from tests.test_drafts import Context, guess_of

MOST = 7
OTHER = {"seed": 9, "num_layers": 2}
"""A model that says something else."""


@pytest.fixture
def is_asked(monkeypatch):
    """Has a check cost half a step and a guess none, whatever they take, and nothing guessed from the context; for any
    number of answers."""

    def took(self, num_rows, size, seconds, took=Drafter.took):
        took(self, num_rows, size, self._model_s + (1.5 if size else 1.0))

    monkeypatch.setattr(drafts, "ROW_TOKENS", 1)
    monkeypatch.setattr(DraftModel, "seconds", lambda *of_guess: (0.0, 0.0))
    monkeypatch.setattr(Drafter, "took", took)
    monkeypatch.setattr(Lookup, "find", lambda self, job, most: (0, []))


@contextlib.contextmanager
def with_model(model=None, **changes):
    """An engine that checks drafts, with a draft model, which must not break nor lose pages; not given: its own."""
    changes = {"max_draft_tokens": MOST, "draft_model": model or kit.tiny_model(), **changes}
    with kit.small_engine(**changes) as engine:
        yield engine
        left = drafter_in(engine)._model
        assert left is not None
        left.keep(())
        assert left.runner.pool.num_held == 0


def drafter_in(engine) -> Drafter:
    return engine._batch._drafter


# What it guesses.


@pytest.mark.parametrize("store", [None, "int8"])
def test_a_model_that_says_the_same_is_right_and_far_fewer_steps_are_taken(is_asked, store):
    changes = {"kv_rest_dtype": "int8"} if store else {"overflow": ok.config(method="tt")}
    plain = drafts_kit.said(**changes)
    guessed = drafts_kit.said(max_draft_tokens=MOST, draft_model=kit.tiny_model(), **changes)
    assert guessed.answers == plain.answers
    metrics = guessed.metrics
    assert metrics.decode_steps < 0.75 * plain.metrics.decode_steps
    assert metrics.model_draft_tokens == metrics.draft_tokens > 200
    assert metrics.model_accepted_tokens == metrics.accepted_tokens > 0.85 * metrics.draft_tokens
    assert metrics.cached_tokens == plain.metrics.cached_tokens > 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "top_k": 3, "seed": 6}])
def test_one_answer_takes_a_step_for_all_tokens_of_a_draft(is_asked, sampling):
    params = SamplingParams(max_tokens=80, **sampling)
    with kit.small_engine() as plain, with_model() as engine:
        [expected], [found] = (each.generate([kit.prompt(30)], params) for each in (plain, engine))
        assert found.token_ids == expected.token_ids
        metrics = engine.metrics
        assert metrics.accepted_tokens > 0.95 * metrics.draft_tokens
        assert metrics.decode_steps < 80 / 5


def test_a_model_that_says_otherwise_is_no_longer_asked(is_asked):
    params = SamplingParams(max_tokens=300)
    with kit.small_engine(overflow=None) as plain, with_model(kit.model_of(**OTHER), overflow=None) as engine:
        [expected], [found] = (each.generate([kit.prompt(30)], params) for each in (plain, engine))
        assert found.token_ids == expected.token_ids
        assert 0 < engine.metrics.model_draft_tokens < 400
        assert engine.metrics.draft_steps < 100
        before = engine.metrics.draft_steps
        engine.generate([kit.prompt(31)], params)
        assert engine.metrics.draft_steps - before < 20  # Trials.


@pytest.fixture
def asked(is_asked, monkeypatch):
    """Has a model asked however wrong it is; what it was asked behind, and what it said."""
    found = []
    guess = DraftModel.guess

    def noted(self, counts, step_s):
        guesses = guess(self, counts, step_s)
        found.extend((job.token_ids[self._rows[job].first :], tokens) for job, tokens in guesses.items())
        return guesses

    monkeypatch.setattr(DraftModel, "guess", noted)
    monkeypatch.setattr(Drafter, "score", lambda *of_guess: None)
    return found


def expect_likeliest(asked, model) -> None:
    """Checks that all that was said is what the model holds likeliest, by passes over what it was asked behind."""
    for context, tokens in asked:
        logits = kit.full_pass([*context, *tokens], model)[0][len(context) - 1 : -1]
        chosen = logits[np.arange(len(tokens)), tokens]
        assert (chosen >= logits.max(-1) - kit.ATOL).all()


def test_what_a_model_says_is_what_it_says_of_the_context_alone(asked):
    """Whatever was held, was wrong or is another answer's."""
    model = kit.model_of(**OTHER)
    with with_model(model, max_batch_size=4) as engine:
        sessions = [engine.session() for _ in range(3)]
        kit.drain(*(each.send_ids(kit.prompt(20 + 9 * n), max_tokens=20 + n) for n, each in enumerate(sessions)))
        answers = [each.send_ids(kit.prompt(9), max_tokens=30) for each in sessions]
        next(answers[0])
        answers[1].close()  # Its row is another's then.
        kit.drain(*answers, engine.session().send_ids(kit.prompt(40), max_tokens=20))
        assert engine.metrics.model_draft_tokens > engine.metrics.model_accepted_tokens + 30
    assert len(asked) > 30
    expect_likeliest(asked, model)


def test_what_was_guessed_wrongly_is_not_held_where_steps_without_a_guess_come_between(asked, monkeypatch):
    ask, counted = Drafter._ask, itertools.count()
    # Of two steps in which it is asked, the first one is on its way already.
    monkeypatch.setattr(Drafter, "_ask", lambda *given: drafts.NOTHING if next(counted) % 6 < 4 else ask(*given))
    model = kit.model_of(**OTHER)
    with with_model(model) as engine:
        kit.say(engine.session(), kit.prompt(20), 80)
    assert len(asked) > 8
    expect_likeliest(asked, model)


@pytest.mark.parametrize("changes", [{}, OTHER])
def test_guesses_go_on_where_tokens_leave_and_where_the_model_holds_no_more(asked, monkeypatch, changes):
    """The target's window is full several times; the model's, of 64 tokens, every 32 tokens."""
    monkeypatch.setattr(drafts, "CONTEXT_TOKENS", 64)
    window = {"context_window": 128, "overflow": ok.config(method="ca")}
    model = kit.model_of(**changes) if changes else kit.tiny_model()
    with kit.small_engine(**window) as plain, with_model(model, **window) as engine:
        for turn in range(3):
            answers = [kit.say(each.session(session_id="a"), kit.prompt(20, turn), 80) for each in (plain, engine)]
            assert answers[0] == answers[1]
        assert engine.metrics.truncations == plain.metrics.truncations > 1
        assert changes or engine.metrics.accepted_tokens > 20
    assert 32 < max(len(context) for context, _ in asked) <= 64
    expect_likeliest(asked, model)


def test_more_answers_than_drafts_are_checked_of_and_fewer_again(is_asked, monkeypatch):
    monkeypatch.setattr(drafts, "ROW_TOKENS", 4)  # Of two answers.
    params = [SamplingParams(max_tokens=count) for count in (60, 10, 20, 60)]
    prompts = [kit.prompt(9 + 5 * number) for number in range(4)]
    with kit.small_engine() as plain, with_model() as engine:
        assert drafter_in(engine)._model.num_rows == 2
        expected, found = (each.generate(prompts, params) for each in (plain, engine))
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        assert engine.metrics.accepted_tokens > 40


def test_sessions_that_take_turns_on_a_slot_are_guessed_by_their_own_contexts(is_asked):
    with with_model(max_batch_size=1) as engine, kit.small_engine() as plain:
        for turn in range(3):
            for name in ("a", "b"):
                message = kit.prompt(15, 2 * turn + (name == "b"))
                answers = [kit.say(each.session(session_id=name), message, 24) for each in (plain, engine)]
                assert answers[0] == answers[1]
        metrics = engine.metrics
        assert metrics.accepted_tokens > 0.95 * metrics.draft_tokens > 60


def test_a_fork_and_an_answer_that_is_cancelled_leave_the_others_as_they_are(is_asked):
    with with_model() as engine, kit.small_engine() as plain:
        said = []
        for each in (plain, engine):
            session = each.session()
            kit.say(session, kit.prompt(25), 20)
            fork = each.fork(session)
            answers = [one.send_ids(kit.prompt(8, 1), max_tokens=30) for one in (session, fork, each.session())]
            next(answers[2])
            answers[2].close()
            kit.drain(*answers[:2])
            said.append([session.token_ids, fork.token_ids])
        assert said[0] == said[1]


def test_a_model_that_breaks_is_not_asked_again_and_no_answer_breaks_with_it(is_asked, monkeypatch, caplog):
    def broken(*of_guess):
        raise RuntimeError("out of memory")

    with kit.small_engine(max_draft_tokens=MOST, draft_model=kit.tiny_model()) as engine:
        monkeypatch.setattr(engine._core._draft_model.runner, "dispatch", broken)
        kit.check_turn(engine.session(), kit.prompt(20), 30)
        assert engine.metrics.model_draft_tokens == 0
        assert drafter_in(engine)._model is None
    assert "the draft model broke" in caplog.text


def test_nothing_is_compiled_while_it_serves(is_asked):
    model = kit.model_of(head_dim=44)  # Like no other test's.
    with kit.small_engine(model, max_draft_tokens=MOST, max_batch_size=1, draft_model=model) as engine:
        engine.warmup()
        with CompileCounter() as counted:
            for sampling in ({}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}):
                engine.generate([kit.prompt(50)], SamplingParams(max_tokens=30, **sampling))
        assert counted.count == 0
        assert engine.metrics.model_draft_tokens > 60


# When it is asked.


class Model:
    """Guesses at such a cost, in steps that check nothing."""

    max_tokens = 7

    def __init__(self, each: float, context: float = 0.0) -> None:
        self.each, self.context = each, context

    def keep(self, jobs):
        pass

    def seconds(self, jobs, num_tokens, step_s):
        return self.context, self.each * num_tokens

    def guess(self, counts, step_s):
        return {job: [5] * count for job, count in counts.items()}


@dataclasses.dataclass(eq=False)
class Turn(Context):
    """An answer that goes on."""

    output_ids: list[int] = dataclasses.field(default_factory=list)


def drafter_with(model: Model, sizes=(4, 8), **costs: float) -> Drafter:
    drafter = Drafter(MOST, sizes, 1, Processes(), model)
    drafter.took(1, 0, 1.0)
    for name, cost in costs.items():
        drafter.took(1, int(name.removeprefix("of_")), cost)
    return drafter


def serve(drafter: Drafter, job: Turn, right: float, num_steps: int, seed: int = 0) -> tuple[float, float, int]:
    """Decodes with a model whose guesses are right so often: time and tokens, and steps in which it was asked."""
    rng, seconds, num_tokens, num_asked = np.random.default_rng(seed), 0.0, 0, 0
    for _ in range(num_steps):
        drafter.guesses({job: MOST})
        choice = drafter.choose({}, {job: 0})
        _, written = drafter.write(choice)
        took, drawn = 1.0, []
        for guess in written.values():
            context_s, guess_s = drafter._model.seconds([job], len(guess.tokens), 1.0)
            drafter._model_s = context_s + guess_s
            took, num_asked = {4: 1.5, 8: 2.0}[choice.size] + drafter._model_s, num_asked + 1
            wrong = rng.random(len(guess.tokens)) >= right
            num_right = int(np.argmax(wrong)) if wrong.any() else len(wrong)
            drawn = [5] * num_right + [6]
            drafter.score(job, guess, drawn)
        drafter.took(1, choice.size, took)
        seconds, num_tokens = seconds + took, num_tokens + max(len(drawn), 1)
    return seconds, num_tokens, num_asked


@pytest.mark.parametrize(
    ("right", "each", "context", "least", "is_asked"),
    [
        (0.9, 0.1, 0.0, 1.8, True),
        (0.7, 0.1, 0.0, 1.2, True),
        (0.9, 0.35, 0.0, 1.2, True),
        (0.9, 1.0, 0.0, 0.98, False),  # Its own draft model.
        (0.1, 0.1, 0.0, 0.98, False),
        (0.9, 0.1, 90.0, 0.98, False),  # Of each guess, all of its context is to be computed.
        (0.0, 0.0, 0.0, 0.98, False),
    ],
)
def test_it_is_asked_where_that_pays_and_seldom_where_it_does_not(right, each, context, least, is_asked):
    drafter, job = drafter_with(Model(each, context), of_4=1.5, of_8=2.0), Turn([1, 2, 3])
    serve(drafter, job, right, 200)
    seconds, num_tokens, num_asked = serve(drafter, job, right, 4000, seed=1)
    assert num_tokens / seconds > least
    # What a step takes that checks nothing is measured now and then.
    assert 3000 < num_asked < 3975 if is_asked else num_asked < 100


def test_one_that_turns_right_is_asked_again():
    drafter, job = drafter_with(Model(0.1), of_4=1.5, of_8=2.0), Turn([1, 2, 3])
    assert serve(drafter, job, 0.0, 2000)[2] < 120
    serve(drafter, job, 0.95, 4000)
    assert serve(drafter, job, 0.95, 200)[2] > 150


def test_a_trial_that_a_step_had_no_room_for_is_made_in_the_next_one():
    drafter, job = drafter_with(Model(2.0), of_4=1.5, of_8=2.0), Turn([1, 2, 3])
    drafter.guesses({job: MOST})
    waits = next(count for count in itertools.count() if drafter.choose({}, {job: 0}).size)
    assert 2000 < waits < 2500
    for _ in range(8):  # The last choice was for a step that was on its way already.
        choice = drafter.choose({}, {job: 0})
        assert choice.size
        drafter.write(choice)
    assert not drafter.choose({}, {job: 0}).size


def test_the_better_guess_of_each_answer_is_checked():
    drafter = Drafter(MOST, (32,), 1, Processes(), Model(0.01))
    drafter.took(3, 0, 1.0)
    found, not_found, both = Turn([1]), Turn([1]), Turn([1])
    drafter.guesses(dict.fromkeys((found, not_found, both), MOST))
    choice = drafter.choose({found: guess_of(*[0.99] * 7), both: guess_of(0.2)}, {found: 0, not_found: 0, both: 0})
    assert choice.size == 32
    assert choice.asked == {not_found, both}
    drafts_of, written = drafter.write(choice)
    assert drafts_of[found] == list(range(7))
    assert drafts_of[not_found] == written[not_found].tokens
    assert set(drafts_of[both]) == {5}


def test_each_source_is_counted_by_itself():
    drafter, job = drafter_with(Model(0.1)), Turn([1, 2, 1, 2])
    drafter.guesses({job: MOST})
    before = drafter._likely(job).copy()
    for _ in range(50):
        drafter.score(job, Guess(0, [5, 5, 5], np.ones(3)), [5, 6])
    after = drafter._likely(job)
    assert after[0] < 0.6 < before[0]
    assert (after[1:] == before[1:]).all()
    drafter.score(job, Guess(2, [5], np.ones(1)), [6])
    assert drafter._likely(job)[0] == after[0]


# What is refused.


def named(**changes: object) -> EngineConfig:
    return dataclasses.replace(kit.SMALL, **{"max_draft_tokens": MOST, **changes})


def test_what_cannot_be_drafted_for_is_refused():
    config = kit.tiny_model().config
    with pytest.raises(ValueError, match="max_draft_tokens with a draft model must be at least 1, got 0"):
        check_may_draft(config, kit.SMALL, Processes())
    for name in ("tensor_parallel_size", "data_parallel_size"):
        with pytest.raises(ValueError, match="devices of the model with a draft model must be one, got 2"):
            check_may_draft(config, named(**{name: 2}), Processes())
    with pytest.raises(ValueError, match="model with a draft model must be one whose layers keep no states"):
        check_may_draft(
            dataclasses.replace(config, recurrence=RecurrenceConfig(kind="short_conv", layers=(0,), conv_width=3)),
            named(),
            Processes(),
        )
    heavy = named(overflow=ok.config(discarder="heavy_hitters"))
    with pytest.raises(ValueError, match="discarder with a draft model must be one that looks at no attention"):
        check_may_draft(config, heavy, Processes())
    with pytest.raises(ValueError, match="processes with a draft model must be one, got 2"):
        check_may_draft(config, named(), types.SimpleNamespace(count=2))


@pytest.mark.parametrize("more", [40, -40])
def test_tables_of_the_same_tokens_may_be_padded_otherwise(asked, more):
    model = kit.tiny_model()
    other = dataclasses.replace(kit.model_of(vocab_size=model.config.vocab_size + more), tokenizer=model.tokenizer)
    params, prompts = SamplingParams(max_tokens=80, temperature=1.5, seed=2), [kit.prompt(30), kit.prompt(50, 1)]
    with kit.small_engine() as plain, with_model(other) as engine:
        expected, found = (each.generate(prompts, params) for each in (plain, engine))
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        assert engine.metrics.model_draft_tokens > 20
        drafted = [token for _, guess in asked for token in guess]
        assert max(drafted) < min(model.config.vocab_size, other.config.vocab_size)


def test_a_bias_of_a_token_that_its_table_has_no_row_for_does_not_break_it(asked):
    model = kit.tiny_model()
    last = model.config.vocab_size - 1
    other = dataclasses.replace(kit.model_of(vocab_size=last), tokenizer=model.tokenizer)
    params = SamplingParams(max_tokens=40, logit_bias={last: -5.0, 66: 1.0})
    with kit.small_engine() as plain, with_model(other) as engine:
        [expected], [found] = (each.generate([kit.prompt(30)], params) for each in (plain, engine))
        assert found.token_ids == expected.token_ids
        assert engine.metrics.model_draft_tokens > 20


def test_another_vocabulary_is_refused():
    model = kit.tiny_model()
    small = kit.model_of(vocab_size=model.config.vocab_size - 1)
    with pytest.raises(ValueError, match=r"draft_model must be of the model's vocabulary, \d+ tokens, got \d+"):
        kit.small_engine(max_draft_tokens=MOST, draft_model=small)
    told = model.tokenizer.backend.to_str().replace('"<|im_end|>"', '"<|im_stop|>"')
    assert "<|im_stop|>" in told
    other = dataclasses.replace(model, tokenizer=Tokenizer(type(model.tokenizer.backend).from_str(told)))
    with pytest.raises(ValueError, match=r"with token \d+ '<\|im_end\|>', got '<\|im_stop\|>'"):
        check_draft_model(other, model)
    check_draft_model(kit.model_of(**OTHER), model)  # Without a tokenizer.


def test_it_is_loaded_by_name_and_its_memory_counts(tmp_path):
    kit.write_tiny_model(tmp_path)
    config = named(draft_model=str(tmp_path))
    with Engine.from_pretrained(str(tmp_path), config, warm=False) as engine:
        assert engine._core._draft_model.num_bytes > engine._core._draft_model.runner.param_bytes > 0
        kit.check_turn(engine.session(), kit.prompt(20), 12)
