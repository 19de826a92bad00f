"""Turns with a context of chunks, through the engine: against full passes, and against chunks computed alone.

The references are the model's own: `kit.full_pass` for a text computed at once, and the model over an explicit KV
(`chunk_kit`) for chunks that are put one behind the other.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from benchmarks.evaluate.items import RagPrompt
from benchmarks.evaluate.rag_context import ContextModel
from benchmarks.evaluate.rag_methods import Blends, Method, PromptContexts
from ca_jax import BlendConfig
from ca_jax.config import CHUNK_HEADS
from ca_jax.errors import ContextWindowError, EmptyMessageError
from ca_jax.kv.chunk_kv import ChunkKV
from ca_jax.storage.records import Residency
from tests import engine_kit as kit
from tests import overflow_kit as ok
from tests import overlap_kit
from tests.chunk_kit import reused, stored, tiny_head

A, B, C = kit.prompt(70, 1), kit.prompt(33, 2), kit.prompt(48, 3)
ONE = kit.prompt(1, 4)
HEAD = list(tiny_head())
QUESTION = kit.prompt(20, 5)
WHOLE, REUSE = (BlendConfig(recompute_ratio=ratio) for ratio in (1.0, 0.0))
SOME = BlendConfig(recompute_ratio=0.15, selection="hkvd")


def answer_over(kv: np.ndarray, new_ids: list[int], max_tokens: int) -> list[int]:
    """The greedy answer to new tokens behind KV `[L, 2, T, K, H]`."""
    cache, answer = ok.SlicedCache(kit.WINDOW), []
    cache.kv, cache.token_ids = kv, [0] * kv.shape[2]
    while len(answer) < max_tokens:
        answer.append(int(cache.feed(answer[-1:] or new_ids).argmax()))
    return answer


def joined(*chunks: list[int]) -> list[int]:
    return list(itertools.chain.from_iterable(chunks))


@pytest.mark.parametrize(
    ("mode", "context"),
    [("blend", (ONE, A, ONE)), *((mode, (B, B, A, B)) for mode in ("blend", "prefix", "recompute"))],
)
def test_what_is_exact_answers_as_one_pass_over_all(mode, context):
    prompt = joined(*context, QUESTION)
    with kit.small_engine(blend=BlendConfig(mode=mode, recompute_ratio=1.0)) as engine:
        engine.precompute(context)
        engine.wait_for_saves()
        session = engine.session()
        assert kit.say(session, QUESTION, 8, context=context) == kit.greedy_answer(prompt, 8)
        assert session.token_ids[: len(prompt)] == prompt
        num_cached = {"blend": sum(map(len, context)), "prefix": len(context[0]), "recompute": 0}[mode]
        assert session.usage.num_cached_tokens == num_cached
        found = kit.stored_kv(engine, session)[:, :, : len(prompt)]
        np.testing.assert_allclose(found, kit.full_pass(prompt)[1], atol=1e-4)


@pytest.mark.parametrize("context", [(B, B, A, B), (ONE, A, ONE), (A,)])
def test_full_reuse_is_chunks_as_they_are_stored_one_behind_the_other(context):
    """But for the prompt's first token. Also behind a history, and of the turn behind it."""
    kv = reused(*context)
    with kit.small_engine(blend=REUSE) as engine:
        assert engine.precompute(context) == len({tuple(chunk) for chunk in context})
        session = engine.session()
        assert kit.say(session, QUESTION, 8, context=context) == answer_over(kv, QUESTION, 8)
        assert session.usage.num_cached_tokens == kv.shape[2]
        assert not session.usage.repaired_tokens
        np.testing.assert_allclose(kit.stored_kv(engine, session)[:, :, : kv.shape[2]], kv, atol=1e-5)
        later = engine.session()
        kit.say(later, kit.prompt(30, 6), 8)
        history = later.token_ids
        kv = np.concatenate([kit.full_pass(history)[1], *map(stored, context)], axis=2)
        assert kit.say(later, QUESTION, 8, context=context) == answer_over(kv, QUESTION, 8)
        assert later.usage.num_cached_tokens == kv.shape[2] - 1, "all but the last token of the turn before"
        np.testing.assert_allclose(kit.stored_kv(engine, later)[:, :, : kv.shape[2]], kv, atol=1e-4)
        then = later.token_ids[kv.shape[2] :]
        assert kit.say(later, B, 8) == answer_over(kv, then + B, 8)


def in_store(engine, ids: list[int]) -> np.ndarray:
    """All of a chunk's KV as the store has it, `[L, 2, T, K, H]`."""
    engine.wait_for_saves()
    ticket = engine._kv.store.prepare_load(engine._kv.chunks.key(ids, ""), ids)
    assert ticket.num_tokens == len(ids)
    return kit.loaded(engine._kv.store, ticket)


@pytest.mark.parametrize("num_tokens", [1, 70, kit.WINDOW - 1 - len(HEAD), kit.WINDOW - 1])
def test_a_chunk_is_computed_behind_the_head_which_is_not_stored(num_tokens):
    """Where the window has no room for both, it is computed alone. A pass may have a part of the head and no more."""
    chunk, before = kit.prompt(num_tokens, 8), kit.prompt(62 - len(HEAD), 9)
    head = HEAD if num_tokens + len(HEAD) < kit.WINDOW else []
    with kit.small_engine() as engine:
        assert engine.precompute([before, chunk]) == 2  # The first pass has room for two tokens behind `before`.
        np.testing.assert_allclose(in_store(engine, chunk), stored(chunk, head), atol=1e-4)
        assert sorted(info.num_tokens for info in engine.stored.list()) == sorted([len(before), num_tokens])
        assert not engine.metrics.prompt_tokens
        # What begins like a chunk has seen no head, and does not begin with its KV.
        kit.check_turn(engine.session(), chunk[:300], 4)


@pytest.mark.parametrize(("system", "num_exact"), [("", 1), ("Be brief.", 0)], ids=["the head", "another text"])
def test_a_prompt_that_begins_with_the_head_has_its_first_chunk_exact(system, num_exact):
    """The second chunk is not, and behind another text none is: all of their tokens are computed anew."""
    with kit.small_engine(blend=WHOLE) as engine:
        texts = ["The sky is green.\n", "Grass is blue.\n"]
        sizes = [len(engine.model.tokenizer.encode_content(text)) for text in texts]
        session = engine.session(system=system) if system else engine.session()
        kit.drain(session.send("What is?", context=texts, max_tokens=4))
        kit.expect_right(session)
        assert session.usage.num_cached_tokens == sum(sizes)
        assert session.usage.repaired_tokens == sum(sizes[num_exact:])
        np.testing.assert_allclose(kit.stored_kv(engine, session), kit.full_pass(session.token_ids[:-1])[1], atol=1e-4)


def test_a_history_as_long_as_the_head_is_not_the_head():
    with kit.small_engine(blend=WHOLE) as engine:
        session = engine.session()
        kit.say(session, kit.prompt(len(HEAD) - 2), 2)
        kit.say(session, QUESTION, 8, context=[A, B])
        kit.expect_right(session)
        assert session.usage.repaired_tokens == len(A + B)


def test_keys_tell_heads_and_chunks_apart():
    """Also heads of as many tokens, and the same tokens cut elsewhere."""
    heads = ([], [1], [2], [1, 2], [1, 2, 3])
    keys = {
        ChunkKV(None, None, b"", head, 100).key(chunk, "") for head in heads for chunk in ([2, 3, 4], [3, 4], [4], [1])
    }
    assert len(keys) == 4 * len(heads)


def test_what_was_stored_without_a_head_is_not_used_with_one(tmp_path):
    store = kit.ssd_store(tmp_path)
    for blend in (BlendConfig(chunk_head="none"), BlendConfig(), BlendConfig(chunk_head="none")):
        with kit.small_engine(blend=blend, store=store) as engine:
            num_computed = engine.precompute([A])
            engine.wait_for_saves()
    assert not num_computed, "what was stored first is there still"
    with kit.small_engine(blend=dataclasses.replace(REUSE, chunk_head="template"), store=store) as engine:
        assert kit.say(engine.session(), QUESTION, 8, context=[A, A]) == answer_over(reused(A, A), QUESTION, 8)
        assert engine.metrics.computed_chunks == 0


@pytest.mark.parametrize(
    ("selection", "context"),
    [
        *(("hkvd", context) for context in ((C, B, A), (A, A))),
        *((name, context) for name in ("spread", "query") for context in ((C, B, A), (ONE, ONE, B), (ONE,))),
    ],
)
def test_any_order_of_what_was_all_seen_before(context, selection):
    """Chunks that were not computed before are computed first, and once; a single one is a prefix."""
    with kit.small_engine(blend=dataclasses.replace(SOME, selection=selection)) as engine:
        kit.say(engine.session(), QUESTION, 2, context=[A, B, A])
        assert engine.metrics.computed_chunks == 2
        assert engine.precompute([A, B, C, ONE]) == 2
        loaded = engine.metrics.loaded_chunks
        session = engine.session()
        answer = kit.say(session, QUESTION, 8, context=context)
        assert engine.metrics.loaded_chunks == loaded + len(context)
        assert engine.metrics.missed_chunks == 0
        assert session.usage.num_cached_tokens == sum(map(len, context))
        if len(context) == 1:
            assert answer == kit.greedy_answer(joined(*context, QUESTION), 8)
            assert not session.usage.repaired_tokens


@pytest.mark.parametrize("head", CHUNK_HEADS)
def test_some_tokens_are_computed_anew_and_none_of_a_chunk_that_has_what_it_was_computed_behind(head):
    context = (A, B, C)
    with kit.small_engine(blend=dataclasses.replace(SOME, chunk_head=head)) as engine:
        engine.precompute(context)
        session = engine.session()
        kit.say(session, QUESTION, 8, context=context)
        usage, kv = session.usage, kit.stored_kv(engine, session)
    num_tokens = sum(map(len, context))
    assert usage.num_cached_tokens == num_tokens
    assert usage.missed_chunks == 0
    num_layers = kit.NUM_LAYERS
    assert 0 < usage.repaired_tokens <= (0.15 + 1 / num_layers) * num_tokens  # One layer checks.
    as_computed, num_exact = kit.full_pass(joined(*context))[1], 1
    as_stored = reused(*context)
    if head == "none":
        as_stored, num_exact = np.concatenate([stored(chunk, ()) for chunk in context], axis=2), len(A)
    np.testing.assert_allclose(kv[:, :, :num_exact], as_computed[:, :, :num_exact], atol=1e-5)
    stays = np.isclose(kv[:, :, :num_tokens], as_stored, atol=1e-5).all((0, 1, 3, 4))
    assert stays[:num_exact].all()
    assert 0 < (~stays).sum() <= 0.5 * num_tokens
    gone = np.abs(kv[:, :, :num_tokens] - as_computed).mean(), np.abs(as_stored - as_computed).mean()
    assert gone[0] < gone[1]


@pytest.mark.parametrize("num_asked", [20, 90], ids=["one pass", "its last tokens ask"])
def test_what_the_question_looks_at_is_computed_anew(num_asked):
    """Against the evaluation's arrays: the attention of all heads in a forward pass over chunks as they are stored."""
    context, question = (C, A, B), kit.prompt(num_asked, 7)
    asks = question[-kit.SMALL.max_num_batched_tokens :]
    prompt = RagPrompt(source="", head=(), chunks=tuple(map(tuple, context)), question_ids=tuple(asks), answers=())
    of = PromptContexts(ContextModel(kit.tiny_model(), [prompt], 0), prompt, Blends())
    count, method = of.num_tokens, Method(kind="blend", ratio=0.3, selection="query")
    kv = np.stack([np.asarray(layer) for layer in of.kv(method)])[:, :, :count]
    spread = np.stack([np.asarray(each) for each in of.kv(dataclasses.replace(method, selection="spread"))])
    with kit.small_engine(blend=BlendConfig(recompute_ratio=0.3, selection="query")) as engine:
        session = engine.session()
        assert kit.say(session, question, 8, context=context) == answer_over(kv, question, 8)
        assert session.usage.num_cached_tokens == count
        assert session.usage.repaired_tokens == int(0.3 * (count - 1))
        stored = kit.stored_kv(engine, session)[:, :, :count]
        np.testing.assert_allclose(stored, kv, atol=1e-4)
        assert np.abs(stored - spread[:, :, :count]).max() > 1e-2, "the question says which"
        # Behind a history of its own, which stays as it is.
        kit.say(session, question[:20], 4, context=(B, A))
        np.testing.assert_allclose(kit.stored_kv(engine, session)[:, :, :count], kv, atol=1e-4)


def test_what_nothing_is_stored_of_is_computed_before_the_question_looks():
    """A template's words before the chunks, in pages that have anything."""
    with kit.small_engine(blend=BlendConfig(recompute_ratio=0.3, selection="query")) as engine:
        tokenizer, texts = engine.model.tokenizer, ["The sky is green and so is the sea.\n", "Grass is blue.\n"]
        overlap_kit.poison(engine)
        session = engine.session(system="Be brief.")
        kit.drain(session.send("What is green?", context=texts, max_tokens=1))
        chunks = [tuple(tokenizer.encode_content(text)) for text in texts]
        ids = session.token_ids[: session.usage.prompt_tokens]
        start = bytes(ids).index(bytes(chunks[0]))
        stop = start + sum(map(len, chunks))
        asked = RagPrompt(
            source="", head=tuple(ids[:start]), chunks=tuple(chunks), question_ids=tuple(ids[stop:]), answers=()
        )
        of = PromptContexts(ContextModel(engine.model, [asked], 0), asked, Blends())
        found = kit.stored_kv(engine, session)[:, :, :stop]
    kv = of.kv(Method(kind="blend", ratio=0.3, selection="query"))
    np.testing.assert_allclose(found, np.stack([np.asarray(layer) for layer in kv])[:, :, :stop], atol=1e-4)


def test_turns_with_the_same_chunk_at_once_compute_it_once():
    with kit.small_engine(blend=REUSE) as engine:
        sessions = [engine.session() for _ in range(4)]
        kit.drain(*(session.send_ids(QUESTION, context=[A, B], max_tokens=6) for session in sessions))
        assert engine.metrics.computed_chunks == 2
        expected = answer_over(reused(A, B), QUESTION, 6)
        assert all(session.token_ids[-6:] == expected for session in sessions)


def test_chunks_are_kept_in_the_tier_that_is_asked_for_and_fetched_for_the_turn(tmp_path):
    with kit.small_engine(blend=REUSE, store=kit.ssd_store(tmp_path)) as engine:
        engine.precompute([A], tier="dram")
        engine.precompute([A, B], tier="ssd")
        for _ in range(3):
            engine.wait_for_saves()
            engine.keep()
        found = {info.num_tokens: info.residency for info in engine.stored.list()}
        assert found == {len(A): Residency.DRAM, len(B): Residency.SSD}
        session = engine.session()
        assert kit.say(session, QUESTION, 8, context=[B, A]) == answer_over(reused(B, A), QUESTION, 8)
        assert session.usage.cached_tokens["ssd"] >= len(B)
        assert session.usage.num_cached_tokens == len(A + B)
        prompt, plain, stranger = joined(B, A, QUESTION), engine.session(), engine.session(tenant="another")
        engine.wait_for_saves()
        assert kit.say(plain, prompt, 8) == kit.greedy_answer(prompt, 8)
        assert plain.usage.num_cached_tokens <= len(B), "blended KV is never served as that of the same text"
        assert engine.metrics.computed_chunks == 2
        kit.say(stranger, QUESTION, 2, context=[A])
        assert engine.metrics.computed_chunks == 3, "another tenant computes its own"


def test_the_window_may_overflow_before_a_context_and_behind_it():
    with kit.small_engine(blend=WHOLE) as engine:
        session = engine.session()
        kit.say(session, kit.prompt(400), 8)
        kit.say(session, QUESTION, 8, context=[A, B, C])
        assert session.usage.dropped_tokens > 0
        assert session.usage.num_cached_tokens >= len(A + B + C)
        num_dropped = session.num_dropped
        while session.num_dropped == num_dropped:
            kit.say(session, kit.prompt(100, len(session.token_ids)), 8)
        kv = kit.stored_kv(engine, session)
        assert np.isfinite(kv).all()
        assert kv.shape[2] >= len(session.token_ids) - 1
        kit.say(session, QUESTION, 8, context=[C])
        assert session.usage.num_cached_tokens > len(C)


@pytest.mark.parametrize(
    ("context", "error", "says"),
    [
        ([A, []], EmptyMessageError, "chunk 2 of 2"),
        ([kit.prompt(kit.WINDOW)], ContextWindowError, "chunk 1 of 1"),
        ([kit.prompt(300, 1), kit.prompt(300, 2)], ContextWindowError, "109 tokens"),
    ],
)
def test_bad_contexts_are_named_and_change_nothing(engine, context, error, says):
    session, num_computed = engine.session(), engine.metrics.computed_chunks
    with pytest.raises(error, match=says):
        session.send_ids(QUESTION, context=context)
    if error is not ContextWindowError or len(context) == 1:
        with pytest.raises(error, match=says):
            engine.precompute(context)
    assert session.token_ids == []
    assert engine.metrics.computed_chunks == num_computed
    kit.check_turn(session, QUESTION, 4)


def test_following_turns_go_on_from_what_was_blended(tmp_path):
    store = kit.ssd_store(tmp_path)
    with kit.small_engine(blend=REUSE, store=store) as engine:
        session = engine.session(session_id="one")
        kit.say(session, QUESTION, 8, context=[A, B])
        kv = kit.stored_kv(engine, session)
        engine.wait_for_saves()
    fused = reused(A, B)
    np.testing.assert_allclose(kv[:, :, : fused.shape[2]], fused, atol=1e-5)
    with kit.small_engine(blend=REUSE, store=store) as engine:
        session = engine.session(session_id="one")
        history = session.token_ids
        answer = kit.say(session, C, 8)
        assert session.usage.cached_tokens == {"ssd": len(history) - 1}
        assert answer == answer_over(fused, history[fused.shape[2] :] + C, 8)
        engine.wait_for_saves()
        assert kit.say(engine.session(), QUESTION, 8, context=[B, A]) == answer_over(reused(B, A), QUESTION, 8)
        assert engine.metrics.computed_chunks == 0  # Chunks outlive their engine too.


@pytest.mark.parametrize("dram_blocks", [0, 8])
def test_a_store_that_is_too_small_for_chunks_gives_right_answers_all_the_same(dram_blocks):
    context = (A, B, C)
    with kit.small_engine(blend=WHOLE, store=kit.store_of(dram_blocks)) as engine:
        session = engine.session()
        assert kit.say(session, QUESTION, 8, context=context) == kit.greedy_answer(joined(*context, QUESTION), 8)
        assert engine.metrics.missed_chunks or not session.usage.missed_chunks


def test_texts_make_a_turn_like_any_other():
    texts = ["The sky is green.", "Grass is blue.\n"]
    with kit.small_engine(blend=WHOLE) as engine:
        session = engine.session(system="Be brief.")
        kit.drain(session.send("What is green?", context=texts, max_tokens=8))
        prompt = session.token_ids[: session.usage.prompt_tokens]
        assert session.token_ids[len(prompt) :] == kit.greedy_answer(prompt, 8)
        assert session.messages[1] == {"role": "user", "content": "What is green?", "context": texts}
        text = engine.model.tokenizer.decode(prompt)
        assert "Be brief." in text
        assert "The sky is green.\n\nGrass is blue.\nWhat is green?" in text
        assert session.usage.num_cached_tokens == sum(len(each) for each in ("The sky is green.\n\n", texts[1]))


def test_a_turn_given_up_in_the_queue_leaves_nothing_behind():
    with kit.small_engine(blend=REUSE, max_batch_size=1) as engine:
        busy = engine.session().send_ids(C, max_tokens=30)
        next(busy)
        session = engine.session()
        session.send_ids(QUESTION, context=[A, B], max_tokens=4).close()
        kit.drain(busy)
        engine.wait_for_saves()
        assert kit.say(session, QUESTION, 8, context=[A, B]) == answer_over(reused(A, B), QUESTION, 8)
        assert len(engine._kv.store._placement._look_ahead) == 0


def test_the_ratio_is_what_hides_behind_loading_as_measured(monkeypatch):
    with kit.small_engine() as engine:
        engine.precompute([A, B, C])
        for times_of_computing, ratio, num_loaded in ((0.01, 0.15, 3), (0.5, 0.5, 6), (2.0, 1.0, 6)):
            rates = overlap_kit.rates_of(times_of_computing * 1e-6, token_s=1e-6)
            monkeypatch.setattr(type(engine._kv.meter), "rates", rates)
            session = engine.session()
            kit.say(session, QUESTION, 2, context=[C, A, B])
            assert session.usage.recompute_ratio == pytest.approx(ratio, abs=0.11)
            assert engine.metrics.loaded_chunks == num_loaded
