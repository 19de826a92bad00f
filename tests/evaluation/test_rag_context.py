"""Contexts of chunks on the pure model, and attention that is counted otherwise; `test_rag` holds the rest."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.evaluate.by_layer import LayerByLayer, as_pages
from benchmarks.evaluate.items import RagPrompt
from benchmarks.evaluate.rag_context import (
    Answerer,
    Behind,
    ContextModel,
    attention_deviations,
    forward_attention,
    kv_deviations,
    plan_of,
)
from tests import engine_kit as kit

CHUNKS = tuple(tuple(kit.prompt(num_tokens, num_tokens)) for num_tokens in (30, 41, 1, 30))
QUESTION = tuple(kit.prompt(11))
ANSWER_TOKENS = 6


def prompt(head=()) -> RagPrompt:
    return RagPrompt(source="made", head=head, chunks=CHUNKS, question_ids=QUESTION, answers=())


@pytest.fixture(scope="module")
def contexts() -> ContextModel:
    return ContextModel(kit.tiny_model(), [prompt((5,))], ANSWER_TOKENS)


def stacked(kv, num_tokens: int) -> np.ndarray:
    return np.stack([np.asarray(layer)[:, :num_tokens] for layer in kv])


def test_the_first_chunk_is_exact_behind_what_it_was_computed_behind():
    """Where it begins the prompt and was computed behind others, its first token is as good as new."""
    config = kit.tiny_model().config
    plan = plan_of(config, prompt(), ratio=3 / 72, selection="first")
    assert (plan.start, plan.num_tokens, plan.num_new) == (30, 72, 0)
    assert (30 + plan.first_rows).tolist() == [30, 71, 72]
    plan = plan_of(config, prompt((5,)), ratio=4 / 102, selection="first")
    assert (plan.start, plan.num_tokens, plan.num_new) == (0, 103, 1)
    assert plan.first_rows.tolist() == [0, 1, 31, 72, 73]
    plan = plan_of(config, prompt(), head=(5,), ratio=4 / 101, selection="first")
    assert (plan.start, plan.num_tokens, plan.num_new) == (0, 102, 1)
    assert plan.first_rows.tolist() == [0, 1, 30, 71, 72]
    plan = plan_of(config, prompt((5,)), head=(5,), ratio=3 / 72, selection="first")
    assert (plan.start, plan.num_tokens, plan.num_new) == (0, 103, 1)
    assert plan.first_rows.tolist() == [0, 31, 72, 73]


def test_all_tokens_anew_are_full_recompute_and_none_full_reuse(contexts):
    """What is between is held by `test_fusion`."""
    head = (5,)
    ids = prompt(head).context_ids
    stored = contexts.joined([contexts.stored(chunk) for chunk in CHUNKS], len(head))
    plan = plan_of(contexts.config, prompt(head), ratio=1.0, selection="random")
    np.testing.assert_allclose(stacked(contexts.fused(plan, ids, stored), len(ids)), kit.full_pass(ids)[1], atol=1e-4)
    single, kv = dataclasses.replace(prompt(), chunks=CHUNKS[:1]), contexts.joined([contexts.stored(CHUNKS[0])], 0)
    fused = contexts.fused(plan_of(contexts.config, single, ratio=0.5), list(CHUNKS[0]), kv)
    np.testing.assert_array_equal(stacked(fused, 30), stacked(kv, 30))
    stored = contexts.joined([contexts.stored(chunk) for chunk in CHUNKS], 0)
    fused = contexts.fused(plan_of(contexts.config, prompt(), ratio=0.0), prompt().context_ids, stored)
    np.testing.assert_array_equal(stacked(fused, 102), stacked(stored, 102))


@pytest.mark.parametrize("window", [None, 40])
def test_forward_attention_adds_up_to_what_places_receive(contexts, window):
    """Summed over heads and the question's tokens it is what `steps` counts for discarding lists, in its own way."""
    ids = prompt().context_ids
    kv = contexts.prefill(ids)
    by_layer = contexts.by_layer
    x = by_layer.embedded(QUESTION, 16)
    length, count = jnp.int32(len(ids)), jnp.int32(len(QUESTION))
    config = dataclasses.replace(contexts.config, sliding_window=window)
    for i, (params, layer) in enumerate(zip(by_layer.layers, kv, strict=True)):
        kind = config.kind_of(i)
        given = np.asarray(forward_attention(config, params, x, layer, length, count, by_layer.tables[0], kind))
        room = as_pages(jnp.pad(layer, ((0, 0), (0, 16), (0, 0), (0, 0))))
        sliding = LayerByLayer(dataclasses.replace(contexts.model, config=config), contexts.capacity + 16, kit.WINDOW)
        x, _, _, received = sliding.layer(i, x, room, len(ids), len(QUESTION), with_attention=True)
        assert given.shape == (contexts.config.num_heads, 16, contexts.capacity)
        np.testing.assert_allclose(given.sum((0, 1))[: len(ids)], np.asarray(received)[0, : len(ids)], atol=1e-5)
        assert not given[:, :, len(ids) :].any()
        assert not given[:, len(QUESTION) :].any()
        assert (given.sum(-1)[:, : len(QUESTION)] < 1).all()


def test_deviations_are_l2_norms():
    one, other = jnp.zeros((2, 3, 4)), jnp.zeros((2, 3, 4)).at[0, 1, 2].set(3.0).at[1, 0, 0].set(-4.0)
    np.testing.assert_allclose(attention_deviations([one, other], [other, other]), [5, 0])
    kv, full = jnp.zeros((2, 3, 1, 2)), jnp.zeros((2, 3, 1, 2)).at[0, 1, 0, 0].set(3.0).at[1, 1, 0, 1].set(4.0)
    np.testing.assert_allclose(kv_deviations([kv, kv], [full, kv]), [[0, 5, 0], [0, 0, 0]])


def test_answers_are_greedy_each_behind_its_own_context(contexts):
    rows, expected = [], []
    for order in (CHUNKS, CHUNKS[1::-1]):
        ids = [token for chunk in order for token in chunk]
        kv = contexts.prefill(ids)
        rows.append(Behind(kv, len(ids), contexts.ask(kv, len(ids), QUESTION, 1), len(QUESTION)))
        expected.append(kit.greedy_answer([*ids, *QUESTION], ANSWER_TOKENS))
    answerer = Answerer(contexts, num_rows=2, max_tokens=ANSWER_TOKENS, capacity=contexts.capacity)
    both = answerer.answer(rows)
    assert [answer.token_ids for answer in both] == expected
    (again,) = answerer.answer(rows[1:])
    assert again.token_ids == expected[1]
    stop = expected[0][3]
    stopped = answerer.answer(rows[:1], [stop])[0]
    assert stopped.token_ids == expected[0][: expected[0].index(stop)], "a token that ends an answer is none of it"
