"""Models all of whose layers slide: what no layer looks back to leaves the store, and answers stay right."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from ca_jax.engine import Engine
from ca_jax.kv.layout import kept_window, kv_layout
from ca_jax.models.transformer import Transformer
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel
from tests import engine_kit as kit
from tests.threads_kit import ThreadProcesses, run_together

SLIDING = 48
PROMPTS = [kit.prompt(70), kit.prompt(5), kit.prompt(90), kit.prompt(33)]


@functools.cache
def model(full_layers: tuple[int, ...] = (), window: int = SLIDING) -> LoadedModel:
    """The tests' tiny model, but that its layers slide."""
    plain = kit.tiny_model()
    config = dataclasses.replace(plain.config, sliding_window=window, full_layers=full_layers)
    name = f"sliding {window} {full_layers}"
    return dataclasses.replace(plain, config=config, model=Transformer(config), fingerprint=name)


def engine(**changes) -> Engine:
    return kit.small_engine(model(), **changes)


def expect_right_answers(session, prompts) -> list[int]:
    """Sends turns and checks their answers; the tokens that each prefilled."""
    return [kit.check_turn(session, prompt, model=model()).new_tokens for prompt in prompts]


def num_stored(engine: Engine) -> list[int]:
    engine.wait_for_saves()
    return [info.num_tokens for info in engine.stored.list()]


def test_what_is_stored_stays_within_the_window_and_answers_are_right():
    with engine() as served:
        session = served.session()
        for prompt in PROMPTS:
            before = len(session.token_ids)
            [new] = expect_right_answers(session, [prompt])
            assert new == len(prompt) + (1 if before else 0)
            assert session.usage.prompt_tokens == before + len(prompt)
            [stored] = num_stored(served)
            assert SLIDING - 1 <= stored < SLIDING - 1 + kit.BLOCK_TOKENS
        assert len(session.token_ids) == sum(map(len, PROMPTS)) + 12 * len(PROMPTS)
        assert served.store_stats().used_bytes <= 5 * kit.BLOCK_TOKENS * kit.TOKEN_BYTES


def test_a_conversation_goes_on_from_ssd(tmp_path):
    store = kit.ssd_store(tmp_path)
    with engine(store=store) as served:
        session = served.session(session_id="one")
        expect_right_answers(session, PROMPTS[:2])
        kept = session.token_ids
    with engine(store=store) as served:
        session = served.session(session_id="one")
        assert session.token_ids == kept
        assert expect_right_answers(session, PROMPTS[2:]) == [91, 34]
        assert served.store_stats().num_hits_from_ssd == 1


def test_a_conversation_of_which_no_kv_is_needed_is_kept_all_the_same(tmp_path):
    store = kit.ssd_store(tmp_path)
    with kit.small_engine(model(window=1), store=store) as served:
        session = served.session(session_id="one")
        kit.say(session, PROMPTS[0])
        assert num_stored(served) == [1]
        kept = session.conversation
    with kit.small_engine(model(window=1), store=store) as served:
        assert served.session(session_id="one").conversation == kept


@pytest.mark.parametrize("num_left", [0, 20])
def test_kv_that_is_lost_in_part_or_whole_is_computed_anew_from_the_first_token(num_left):
    """What is left of it alone would not do: the tokens behind look back further."""
    with engine() as served:
        session = served.session()
        expect_right_answers(session, PROMPTS[:2])
        kit.store_in(served).truncate(served._kv.key(session.session_id), num_left)
        before = len(session.token_ids)
        assert expect_right_answers(session, PROMPTS[2:]) == [before + 90, 34]


def test_tokens_taken_back_or_dropped_by_hand_leave_right_answers():
    with engine() as served:
        session = served.session()
        expect_right_answers(session, PROMPTS[:3])
        num_stored(served)
        session.rewind(len(session.token_ids) - 3)
        expect_right_answers(session, PROMPTS[3:])
        num_stored(served)
        session.rewind(40)
        assert expect_right_answers(session, PROMPTS[1:]) == [45, 91, 34]
        num_stored(served)
        left = session.discard([len(session.token_ids) - 20])
        assert SLIDING <= left + 1 < SLIDING + kit.BLOCK_TOKENS
        assert kit.say(session, PROMPTS[1])
        assert session.usage.new_tokens == 6


@pytest.mark.parametrize("sizes", [[(40, 16)] * 9, [(70, 12), (90, 12), (33, 180), (5, 12)]], ids=["turns", "answer"])
def test_a_full_context_loses_what_has_slid_first(sizes):
    """Then nothing is forgotten that a layer looks back to, and answers are as if no context were full."""
    with engine(context_window=256, overflow=OverflowConfig()) as served:
        session, everything = served.session(), []
        for turn, (num_new, max_tokens) in enumerate(sizes):
            answer = session.send_ids(kit.prompt(num_new, turn), max_tokens=max_tokens)
            kit.drain(answer)
            everything += [*kit.prompt(num_new, turn), *answer.job.output_ids]
            assert len(answer.job.output_ids) == max_tokens
            assert kit.num_wrong(everything, [range(len(everything) - max_tokens, len(everything))], model()) == 0
            num_stored(served)
        assert served.metrics.truncations > 0
        assert served.metrics.repaired_tokens == 0, "nothing is lost that could be repaired"
        assert session.num_dropped + len(session.token_ids) == len(everything)
        kept = session.token_ids[4:]  # The first ones stay, as far away as they are.
        assert kept == everything[-len(kept) :]


def test_where_a_layer_looks_further_or_discarding_may_everything_is_stored():
    """As where the context is no longer than what a layer sees: what is left of a full one is repaired there."""
    any_token = dataclasses.replace(kit.SMALL, overflow=OverflowConfig(discarder="heavy_hitters"))
    slides, mixed = (kv_layout(model(full_layers=layers), kit.SMALL) for layers in ((), (1,)))
    assert [group.layers for group in mixed.groups] == [(0, 2), (1,)]
    assert [kept_window(slides, kit.SMALL, window) for window in (SLIDING, SLIDING + 1)] == [None, SLIDING]
    assert kept_window(mixed, kit.SMALL, SLIDING + 1) is None
    assert kept_window(slides, any_token, SLIDING + 1) is None
    with kit.small_engine(model(full_layers=(1,))) as served:
        session = served.session()
        kit.converse(session, PROMPTS[:3])
        assert num_stored(served) == [len(session.token_ids) - 1]


def test_processes_that_serve_as_one_keep_the_same():
    def run(processes: ThreadProcesses) -> list[int]:
        with engine(processes=processes) as served:
            session = served.session()
            expect_right_answers(session, PROMPTS[:2])
            served.wait_for_saves()
            expect_right_answers(session, PROMPTS[2:])
            return session.token_ids

    one, other = run_together(2, run)
    assert one == other
