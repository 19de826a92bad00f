"""Models whose layers keep states: reused at turns' ends and nowhere else, over restarts and evictions, or computed.

Answers are held against `transformers`, each token by a full pass, or against one pass of the model over everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import ca_jax
from benchmarks.compiles import CompileCounter
from ca_jax.config import BlendConfig
from ca_jax.errors import ContextWindowError, InvalidRequestError
from ca_jax.models import kv
from ca_jax.models.config import ModelConfig
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.tickets import LoadTicket
from tests import engine_kit as kit
from tests import families_kit
from tests.state_schedules import Schedule, run_schedule
from tests.test_overlap_release import broken
from tests.threads_kit import ThreadProcesses, run_together

FAMILIES = (
    "lfm2",
    "qwen3_next",
    *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_5", "granite4", "kimi_linear")),
)
"""All that layers of the last three keep, those of the one before them do too."""
WINDOW = 256


def model_of(name: str) -> LoadedModel:
    """A family's random checkpoint, as ca_jax loads it."""
    return families_kit.pair(name).model


def store_of(model: LoadedModel, num_blocks: int = 1000, directory: object = None) -> StoreConfig:
    """A store of so many blocks of a model's KV in DRAM, and of enough on SSD where a directory is given."""
    num_bytes = num_blocks * kit.BLOCK_TOKENS * model.config.kv_bytes_per_token(4)
    config = StoreConfig(dram_gib=num_bytes / GIB, block_tokens=kit.BLOCK_TOKENS)
    if directory is None:
        return config
    return dataclasses.replace(config, ssd_dir=str(directory), ssd_gib=0.05, ssd_free_floor_gib=0.0)


@contextlib.contextmanager
def engine_of(model: LoadedModel, **changes: object) -> Iterator[ca_jax.Engine]:
    """A small engine."""
    with kit.small_engine(model, **{"context_window": WINDOW, "overflow": None, **changes}) as engine:
        yield engine


def turn(session, num_new: int, seed: int = 0, max_tokens: int = 6) -> int:
    """Sends a turn and checks its answer; how many of its tokens were reused."""
    model = session_model(session)
    prompt = families_kit.prompt(num_new, seed=seed)
    before = session.token_ids
    answer = kit.say(session, prompt, max_tokens)
    assert session.token_ids == [*before, *prompt, *answer]
    kit.expect_right(session, model=model)
    session._engine.wait_for_saves()
    return session.usage.num_cached_tokens


def session_model(session) -> LoadedModel:
    return session._engine.model


# Against transformers.


@pytest.mark.parametrize("name", FAMILIES)
def test_three_turns_with_reuse_without_and_over_a_restart(tmp_path, name):
    pair = families_kit.pair(name)
    turns = [families_kit.prompt(length, seed=length) for length in (70, 3, 21)]
    expected: list[int] = []
    for prompt in turns:
        expected += prompt
        expected += pair.their_answer(expected, 5)
    with engine_of(pair.model, store=kit.STORE_OFF) as engine:
        session = engine.session()
        kit.converse(session, turns, 5)
        assert session.token_ids == expected
        assert session.usage.num_cached_tokens == 0
    store = store_of(pair.model, directory=tmp_path)
    with engine_of(pair.model, store=store) as engine:
        session = engine.session(session_id="one")
        assert kit.converse(session, turns[:2], 5)
        assert session.usage.cached_tokens == {"dram": 74}
    with engine_of(pair.model, store=store) as engine:
        session = engine.session(session_id="one")
        kit.say(session, turns[2], 5)
        assert session.usage.cached_tokens == {"ssd": 82}
        assert session.token_ids == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_jobs_are_packed_with_others_and_decode_beside_them(name):
    """Prompts of several jobs in one pass, behind states of their own, while others decode a step ahead."""
    model = model_of(name)
    with engine_of(model, max_num_batched_tokens=64, keep_pages=True) as engine:
        sessions = [engine.session() for _ in range(5)]
        for round_ in range(3):
            lengths = [3, 17, 90, 1, 30]
            answers = [
                session.send_ids(families_kit.prompt(lengths[(i + round_) % 5], seed=i), max_tokens=4 + 3 * i)
                for i, session in enumerate(sessions)
            ]
            kit.drain(*answers)
            kit.expect_right(*sessions, model=model)
            if round_:
                assert all(session.usage.num_cached_tokens > 0 for session in sessions)


def test_penalties_and_a_batch_that_changes_leave_states_where_answers_are():
    model = model_of("lfm2")
    with engine_of(model) as engine:
        first, second = engine.session(), engine.session()
        sampling = ca_jax.SamplingParams(max_tokens=20, temperature=0.0, frequency_penalty=1e-9)
        answers = first.send_ids(families_kit.prompt(9), sampling=sampling), second.send_ids([5, 6], max_tokens=3)
        kit.drain(*answers)
        kit.expect_right(first, second, model=model)
        assert turn(second, 4) == 4
        assert turn(first, 4) == 28


# Where turns end.


def test_a_rewind_goes_back_to_the_last_snapshot_and_computes_on():
    model = model_of("lfm2")
    with engine_of(model) as engine:
        session, ends = engine.session(), []
        for seed in range(4):
            assert turn(session, 11, seed) == (ends[-1] - 1 if ends else 0)
            ends.append(len(session.token_ids))
        session.rewind(ends[2])
        assert turn(session, 5) == ends[2] - 1, "the turn's end before the last one"
        session.rewind(ends[2] + 3)
        assert turn(session, 5, 1) == ends[2] - 1, "and from there on anew"
        session.rewind(ends[1])
        assert turn(session, 5, 2) == 0, "that one was replaced"
        assert turn(session, 5, 3) == len(session.token_ids) - 6 - 5 - 1


def test_a_snapshot_is_used_behind_its_own_tokens_alone(monkeypatch):
    """One of a turn that was taken back, and sent otherwise, stands behind other tokens of the same number."""
    model = model_of("lfm2")
    with engine_of(model) as engine:
        session = engine.session()
        turn(session, 20)
        end = len(session.token_ids)
        turn(session, 12, seed=1)
        session.rewind(end)
        with monkeypatch.context() as patch:
            patch.setattr(engine._kv.snapshots, "keep", lambda job, states: None)
            turn(session, 12, seed=2)
        assert turn(session, 4) == end - 1


@pytest.mark.parametrize("name", FAMILIES[:2])
def test_what_was_said_of_an_answer_that_is_given_up_is_a_turns_end(name):
    """A step that was dispatched ahead is thrown away: what is kept is behind the answer's last token but one."""
    model = model_of(name)
    with engine_of(model) as engine:
        session = engine.session()
        turn(session, 20)
        answer = session.send_ids(families_kit.prompt(12, seed=1), max_tokens=30)
        while len(answer.job.output_ids) < 5:
            engine.step()
        answer.close()
        end = len(session.token_ids)
        engine.wait_for_saves()
        found = kept_state(engine, session)
        ids = np.array([session.token_ids[:-1]])
        run = jax.jit(model.model.apply)
        _, cache = run(model.params, ids, np.arange(end - 1)[None])
        for part, of_part in zip(zip(*cache.states, strict=True), found, strict=True):
            np.testing.assert_allclose(np.concatenate(part), of_part, atol=kit.ATOL, rtol=0)
        assert turn(session, 4) == end - 1


def kept_state(engine, session) -> list[np.ndarray]:
    """The latest snapshot of a session, `[l, *shape]` of its layers."""
    ids = np.array(session.token_ids, np.int32)
    snapshot = engine._kv.snapshots.open(session.key, session.conversation, ids, len(ids) - 1)
    assert snapshot.num_tokens == len(ids) - 1
    for read in snapshot._reads:
        read.result()
    snapshot.give_up()
    return snapshot._staged.arrays


@pytest.mark.parametrize("is_resident", [False, True])
def test_forks_and_parallel_answers_share_what_a_turn_has_left(is_resident):
    model = model_of("lfm2")
    with engine_of(model, keep_pages=is_resident) as engine:
        session = engine.session()
        turn(session, 40)
        turn(session, 10, 1)
        end = len(session.token_ids)
        branches = [engine.fork(session) for _ in range(3)]
        sampled = ca_jax.SamplingParams(max_tokens=6, temperature=0.0)
        answers = [each.send_ids(families_kit.prompt(7, i), sampling=sampled) for i, each in enumerate(branches)]
        kit.drain(*answers)
        kit.expect_right(*branches, model=model)
        assert [each.usage.num_cached_tokens for each in branches] == [end - 1] * 3
        engine.wait_for_saves()
        assert [turn(each, 3) for each in branches] == [end - 1 + 7 + 6] * 3
        assert turn(session, 4) == end - 1
        alone = engine.session()
        kit.say(alone, session.token_ids[:end], 4)
        kit.expect_right(alone, model=model)
        assert alone.usage.num_cached_tokens == 0, "no turn of its own has ended there"


# What is lost is computed.


def test_evictions_cost_time_alone(tmp_path):
    model = model_of("lfm2")
    for directory in (None, tmp_path):
        with engine_of(model, store=store_of(model, 14, directory)) as engine:
            sessions = [engine.session() for _ in range(3)]
            for seed in range(3):
                for session in sessions:
                    turn(session, 20, seed)
            stats = engine.store_stats()
            assert stats.num_evictions + (0 if stats.ssd is None else stats.ssd.num_fetches) > 0


@pytest.mark.parametrize("is_state", [True, False])
def test_a_load_that_breaks_is_computed_anew(is_state):
    model = model_of("lfm2")
    with engine_of(model) as engine:
        session = engine.session()
        turn(session, 30)
        prompt = families_kit.prompt(9, seed=1)
        with broken_reads(engine, session, is_state):
            answer = kit.say(session, prompt, 6)
        assert len(answer) == 6
        kit.expect_right(session, model=model)
        assert session.usage.num_cached_tokens == 0
        assert engine.metrics.failed_loads == 1
        assert turn(session, 5) == len(session.token_ids) - 6 - 5 - 1


@contextlib.contextmanager
def broken_reads(engine, session, is_state: bool) -> Iterator[None]:
    """Reads of a session's snapshot, or of its KV, break."""
    original, states = LoadTicket.read, set(engine._kv.snapshots.keys(session.key))

    def read(ticket: LoadTicket, layer: int, dst: np.ndarray) -> object:
        if (ticket.key in states) == is_state:
            raise OSError("the memory is on fire")
        return original(ticket, layer, dst)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadTicket, "read", read)
        yield


def test_a_step_that_breaks_takes_states_with_it_and_the_engine_goes_on():
    model = model_of("lfm2")
    with engine_of(model) as engine:
        session = engine.session()
        turn(session, 30)
        end = len(session.token_ids)
        with broken(engine._runner, "_passed"), pytest.raises(OSError, match="on fire"):
            kit.say(session, families_kit.prompt(9, seed=1), 6)
        assert len(session.token_ids) == end
        assert turn(session, 5) in (0, end - 1)


def test_what_is_dropped_takes_its_snapshots_along():
    model = model_of("lfm2")
    with engine_of(model) as engine:
        session = engine.session()
        turn(session, 30)
        turn(session, 30, 1)
        keys = engine._kv.snapshots.keys(session.key)
        stored = {info.key for info in engine.stored.list()}
        assert {session.key, *keys} == stored
        assert engine.stored.names() == (("", session.session_id),)
        session.close()
        assert engine.stored.list() == ()


def test_nothing_is_kept_of_what_nobody_goes_on_with():
    model = model_of("lfm2")
    with engine_of(model) as engine:
        engine.generate([families_kit.prompt(9)], ca_jax.SamplingParams(max_tokens=4))
        engine.wait_for_saves()
        assert not any(info.session_id.startswith("state-") for info in engine.stored.list())


# What states stand in the way of.


def test_truncation_that_keeps_kv_is_refused_by_name_and_what_is_computed_anew_is_right():
    model = model_of("lfm2")
    with engine_of(model, overflow=OverflowConfig(), context_window=64) as engine:
        session = engine.session()
        turn(session, 40)
        before = session.token_ids
        with pytest.raises(ContextWindowError, match=r"lfm2.*overflow method must be 'tt' or 'of'.*got 'ca'"):
            session.send_ids(families_kit.prompt(30), max_tokens=4)
        assert session.token_ids == before
        with pytest.raises(InvalidRequestError, match=r"lfm2.*overflow method must be"):
            session.discard([3, 4])
        kit.say(session, families_kit.prompt(10), 30)
        assert len(session.token_ids) == 64, "an answer ends where the window is full"
    for method in ("tt", "of"):
        config = OverflowConfig(method=method, truncation_ratio=0.25)
        with engine_of(model, overflow=config, context_window=64) as engine:
            session = engine.session()
            turn(session, 14)
            turn(session, 14, 1)
            session.discard([0, 1])
            assert (turn(session, 3), turn(session, 3, 1)) == (0, 46)
            before = session.token_ids
            prompt = families_kit.prompt(30)
            kit.say(session, prompt, 20)
            assert session.usage.dropped_tokens > 0
            kept = [*before[:4], *before[20:]]  # A quarter of the window leaves.
            plain = [*kept, *prompt]
            greedy = kit.greedy_answer(plain, 64 - len(plain), model)
            answer = session.token_ids[-20:]
            assert answer[: len(greedy)] == greedy


def test_chunks_are_refused_by_name_or_are_ordinary_text():
    model = model_of("qwen3_next")
    chunk = families_kit.prompt(20)
    with engine_of(model) as engine:
        session = engine.session()
        with pytest.raises(InvalidRequestError, match=r"qwen3_next.*blend mode must be 'prefix' or 'recompute'"):
            session.send_ids([1, 2], context=[chunk])
        with pytest.raises(InvalidRequestError, match="blend mode must be"):
            engine.precompute([chunk])
    with engine_of(model, blend=BlendConfig(mode="prefix")) as engine:
        session = engine.session()
        kit.say(session, [1, 2], 5, context=[chunk])
        assert session.token_ids[:22] == [*chunk, 1, 2]
        kit.expect_right(session, model=model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_adapters": 1}, "max_adapters must be 0 with family lfm2, whose models here have states"),
        ({"overflow": OverflowConfig(method="tt", discarder="heavy_hitters")}, "discarder with lfm2"),
        ({"store": StoreConfig(ssd_dir="nowhere", ssd_codec="codec.npz")}, "ssd_codec must be none for a model"),
    ],
)
def test_what_is_not_served_with_states_is_refused_when_an_engine_is_made(changes, message):
    with pytest.raises(ValueError, match=message), engine_of(model_of("lfm2"), **changes):
        pass


def test_several_processes_are_refused_when_an_engine_is_made():
    def run(processes: ThreadProcesses) -> None:
        wanted = "the processes with lfm2, layers of which keep states must be one, got 2"
        with pytest.raises(ValueError, match=wanted), engine_of(model_of("lfm2"), processes=processes):
            pass

    run_together(2, run)


@pytest.mark.parametrize("fields", [{"layers": ()}, {"layers": (0, 9)}, {"layers": (0, 1, 2)}, {"conv_width": 1}])
def test_a_recurrence_that_makes_no_model_is_refused(fields):
    described = {**model_of("lfm2").config.described(), "num_layers": 3}
    recurrence = {**described["recurrence"], **fields}
    with pytest.raises(ValueError, match="recurrence"):
        ModelConfig.from_dict({**described, "recurrence": recurrence})


@pytest.mark.parametrize("name", FAMILIES[:2])
def test_a_config_goes_through_json_and_a_cache_through_turns(name):
    model = model_of(name)
    assert ModelConfig.from_dict(model.config.described()) == model.config
    ids, run = families_kit.prompt(48), jax.jit(model.model.apply)
    cache, found = kv.empty(model.config, 1, 0), []
    for start in (0, 24):
        part, places = np.array([ids[start : start + 24]]), start + np.arange(24)[None]
        logits, new = run(model.params, part, places, cache)
        cache = kv.append(cache, new)
        found.append(np.asarray(logits)[0])
    wanted = families_kit.our_logits(model, ids, room=128, context=128)
    np.testing.assert_allclose(np.concatenate(found), wanted, atol=kit.ATOL, rtol=0)
    with pytest.raises(ValueError, match="without states"):
        kv.take(cache, 3)


def test_int8_at_rest_keeps_states_as_they_are():
    model = model_of("lfm2")
    with engine_of(model, kv_rest_dtype="int8") as engine:
        session = engine.session()
        kit.say(session, families_kit.prompt(30), 6)
        engine.wait_for_saves()
        kit.say(session, families_kit.prompt(3), 6)
        assert session.usage.num_cached_tokens == 35
        assert len(session.token_ids) == 45


def test_warmup_compiles_all_that_turns_need():
    model = model_of("lfm2")
    with engine_of(model, context_window=64, max_batch_size=1) as engine:
        engine.warmup()
        with CompileCounter() as compiles:
            session = engine.session()
            turn_ids = families_kit.prompt(20)
            kit.say(session, turn_ids, 4)
            engine.wait_for_saves()
            kit.say(session, turn_ids[:3], 4)
        assert session.usage.num_cached_tokens == 23
        assert compiles.count == 0


# Schedules.


def test_tokens_of_any_schedule_are_those_of_a_run_without_a_store(tmp_path):
    for seed in range(10):
        run_schedule(Schedule(seed, model_of(("lfm2", "qwen3_next")[seed % 2]), tmp_path / str(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_tokens_of_a_thousand_schedules(tmp_path, first):
    for seed in range(1000 + first, 1100 + first):
        run_schedule(Schedule(seed, model_of(("lfm2", "qwen3_next")[seed % 2]), tmp_path / str(seed)))
