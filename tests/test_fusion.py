"""Knowledge fusion on a tiny model: against a forward pass over all tokens, and against numpy.

Not here: one layer of some tokens (test_blend), chunks in a store and engines (test_blend_engine).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ca_jax.config import SELECTIONS
from ca_jax.device import steps
from ca_jax.models.transformer import Transformer
from ca_jax.pretrained import LoadedModel
from ca_jax.recompute.layers import kv_deviation, recompute_layer
from ca_jax.recompute.plan import Plan, TokenKind, padded_rows, plan_blend
from ca_jax.recompute.recomputer import Recomputer
from tests import engine_kit as kit
from tests.test_blend import moved_by_least_squares

ATOL = kit.ATOL
MODEL = kit.model_of(num_layers=5, seed=3)
CONFIG = MODEL.config
SLIDING = dataclasses.replace(CONFIG, sliding_window=24, full_layers=(0, 2))
CAPACITY = 256
STORED, NEW, EXACT = TokenKind


def model_of(config) -> LoadedModel:
    return dataclasses.replace(MODEL, config=config, model=Transformer(config))


def full_pass(tokens: np.ndarray, config=CONFIG) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[T, V]` and unrotated KV `[L, 2, T, K, H]` of a plain forward pass."""
    return kit.full_pass(tokens.tolist(), model_of(config))


@functools.cache
def table():
    return steps.rotation_table(CONFIG, 2 * CAPACITY)


def layers() -> list[steps.Params]:
    return [MODEL.params["params"][f"layer_{i}"] for i in range(CONFIG.num_layers)]


def tokens_of(num_tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, num_tokens)


def embedded(tokens: np.ndarray, size: int = CAPACITY) -> jax.Array:
    padded = np.zeros((1, size), np.int32)
    padded[0, : len(tokens)] = tokens
    return steps.embed(CONFIG, MODEL.params, jnp.asarray(padded))


@dataclasses.dataclass
class Context:
    """Pieces one behind the other, each of a kind, and the KV that is there of them before fusion."""

    tokens: np.ndarray
    kinds: np.ndarray
    chunk_starts: tuple[int, ...]
    kv: np.ndarray  # [L, 2, CAPACITY, K, H]; NaN where there is none

    def plan(self, ratio: float, start: int = 0, **values) -> Plan:
        return plan_blend(
            num_layers=CONFIG.num_layers,
            start=start,
            kinds=self.kinds[start:],
            chunk_starts=self.chunk_starts,
            ratio=ratio,
            **values,
        )


def context_of(*pieces: tuple[TokenKind, np.ndarray], config=CONFIG) -> Context:
    tokens = np.concatenate([piece for _, piece in pieces])
    kinds = np.concatenate([np.full(len(piece), kind) for kind, piece in pieces])
    kv = np.full((CONFIG.num_layers, 2, CAPACITY, CONFIG.num_kv_heads, CONFIG.head_dim), np.nan, np.float32)
    exact, starts, at = full_pass(tokens, config)[1], [], 0
    for kind, piece in pieces:
        span = slice(at, at + len(piece))
        if kind == STORED:
            kv[:, :, span] = full_pass(piece, config)[1]
            starts.append(at)
        elif kind == EXACT:
            kv[:, :, span] = exact[:, :, span]
        at += len(piece)
    return Context(tokens, kinds, tuple(starts), kv)


def fused(context: Context, plan: Plan, config=CONFIG, size: int = CAPACITY) -> np.ndarray:
    """All layers, one after the other, `[L, 2, CAPACITY, K, H]`."""
    recomputer = Recomputer(config, layers(), table(), plan, embedded(context.tokens[plan.start :], size))
    return np.stack([np.asarray(recomputer.layer(i, jnp.asarray(kv))) for i, kv in enumerate(context.kv)])


def answered(kv: np.ndarray, num_tokens: int, question: np.ndarray, config=CONFIG) -> np.ndarray:
    """Logits `[V]` of the last token of a question that is prefilled over KV, as an engine does it."""
    x, length = embedded(question, len(question)), jnp.int32(num_tokens)
    for i, layer in enumerate(layers()):
        window = config.window_of(i)
        x, _ = steps.prefill_layer(config, layer, x, jnp.asarray(kv[i]), length, table(), window=window)
    return np.asarray(steps.last_logits(config, MODEL.params, x, jnp.int32(len(question) - 1)))[0]


QUESTION = tokens_of(9, seed=77)
A, B, C = (tokens_of(size, seed) for size, seed in ((50, 1), (37, 2), (64, 3)))
ONE = tokens_of(1, 4)

CONTEXTS = {
    "three chunks": [(STORED, A), (STORED, B), (STORED, C)],
    "one of them again": [(STORED, A), (STORED, A), (STORED, B), (STORED, A)],
    "of one token": [(STORED, ONE), (STORED, ONE), (STORED, B), (STORED, ONE)],
    "behind a history": [(EXACT, C), (STORED, A), (STORED, B)],
    "new text between": [(NEW, tokens_of(5, 8)), (STORED, A), (NEW, tokens_of(3, 9)), (STORED, B)],
    "new text last": [(EXACT, A), (STORED, B), (NEW, tokens_of(17, 5))],
    "nothing stored": [(EXACT, A), (NEW, B)],
}


@pytest.mark.parametrize(
    ("name", "config"),
    [*((name, CONFIG) for name in CONTEXTS), ("one of them again", SLIDING), ("behind a history", SLIDING)],
)
def test_all_tokens_anew_are_a_prefill_of_all(name, config):
    context = context_of(*CONTEXTS[name], config=config)
    count = len(context.tokens)
    found = fused(context, context.plan(1.0), config)
    logits, kv = full_pass(np.concatenate([context.tokens, QUESTION]), config)
    np.testing.assert_allclose(found[:, :, :count], kv[:, :, :count], atol=ATOL, rtol=0)
    np.testing.assert_allclose(answered(found, count, QUESTION, config), logits[-1], atol=ATOL, rtol=0)


@pytest.mark.parametrize(("selection", "ratio"), [("hkvd", 0.0), ("hkvd", 0.6), ("first", 0.3)])
@pytest.mark.parametrize("name", CONTEXTS)
def test_what_is_not_chosen_stays_and_what_is_new_is_computed(name, selection, ratio):
    """As many tokens of each layer as the plan says have other KV than before, all new ones among them."""
    context = context_of(*CONTEXTS[name])
    count = len(context.tokens)
    rng = np.random.default_rng(0)  # What is computed anew is never what was stored, to the last bit.
    stored = np.flatnonzero(context.kinds == STORED)
    context.kv[:, :, stored] += 1e-3 * rng.standard_normal(context.kv[:, :, stored].shape).astype(np.float32)
    plan = context.plan(ratio, selection=selection)
    found = fused(context, plan)
    changed = (found != context.kv).any((1, 3, 4)) & ~(np.isnan(found) & np.isnan(context.kv)).all((1, 3, 4))
    assert np.isfinite(found[:, :, :count]).all()
    assert not changed[:, count:].any()
    assert not changed[:, :count][:, context.kinds == EXACT].any()
    assert changed[:, :count][:, context.kinds == NEW].all()
    assert (changed.sum(1) <= plan.counts).all()
    for below, above in itertools.pairwise(changed[1:]):
        assert not (above & ~below).any(), "of those of the layer before"


@pytest.mark.parametrize("ratio", [0.1, 0.6])
@pytest.mark.parametrize("name", CONTEXTS)
def test_spread_tokens_are_computed_and_say_how_the_others_of_chunks_move(name, ratio):
    """Against the same with each layer's map fitted by least squares, here."""
    context = context_of(*CONTEXTS[name])
    count = len(context.tokens)
    plan = context.plan(ratio, selection="spread")
    found = fused(context, plan)
    assert np.isfinite(found[:, :, :count]).all()
    stored = np.flatnonzero(context.kinds == STORED)
    rows = plan.first_rows
    chosen = np.intersect1d(rows, stored)
    assert len(chosen) == int(ratio * len(stored))
    others = np.setdiff1d(stored, chosen)
    exact = np.flatnonzero(context.kinds == EXACT)
    np.testing.assert_array_equal(found[:, :, exact], context.kv[:, :, exact])
    np.testing.assert_array_equal(found[0][:, others], context.kv[0][:, others])
    if plan.moves is None:
        np.testing.assert_array_equal(found[:, :, others], context.kv[:, :, others])
        return
    starts = np.array(context.chunk_starts)
    first = [place for start in starts for place in (start, start + 1) if place in stored and place < count]
    assert np.isin(first, chosen).all() or len(chosen) < len(first)
    offsets = chosen - starts[np.searchsorted(starts, chosen, side="right") - 1]
    fitted = chosen[offsets >= 4]
    if not len(fitted):
        np.testing.assert_array_equal(found[:, :, others], context.kv[:, :, others])
        return
    for layer in range(1, plan.num_layers):
        moved = moved_by_least_squares(found[layer][:, fitted], fitted, context.kv[layer], 0, count, min_place=0)
        np.testing.assert_allclose(found[layer][:, others], moved[:, others], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("start", "size"), [(0, 200), (30, 256), (64, 200)])
def test_where_the_description_begins_changes_nothing(start, size):
    context = context_of((EXACT, C), (NEW, ONE), (STORED, A), (NEW, tokens_of(3, 9)), (STORED, B))
    for ratio in (0.0, 0.3, 1.0):
        np.testing.assert_allclose(
            fused(context, context.plan(ratio, start), size=size),
            fused(context, context.plan(ratio)),
            atol=ATOL,
            rtol=0,
        )


def test_without_any_token_to_compute_it_is_full_reuse_in_buffers_of_its_own():
    context = context_of(*CONTEXTS["three chunks"])
    recomputer = Recomputer(CONFIG, layers(), table(), context.plan(0.0), embedded(context.tokens))
    for i, kv in enumerate(context.kv):
        given_kv = jnp.asarray(kv)
        found = recomputer.layer(i, given_kv)
        np.testing.assert_array_equal(found, kv)
        assert found.unsafe_buffer_pointer() != given_kv.unsafe_buffer_pointer()


@pytest.mark.parametrize("check_layers", [1, 2])
def test_the_tokens_that_deviate_most_are_computed_over_what_stands(check_layers):
    """Layer by layer against a reference that chooses in numpy among the tokens of the layer before."""
    context = context_of(*CONTEXTS["new text between"])
    plan = context.plan(0.7, check_layers=check_layers)
    count, counts = len(context.tokens), plan.counts
    assert len(set(counts)) > 2
    found = fused(context, plan)
    chosen = np.flatnonzero(context.kinds != EXACT)
    x = np.asarray(embedded(context.tokens, count))
    for i, layer in enumerate(layers()):
        stored = jnp.asarray(np.nan_to_num(context.kv[i], nan=5.0))
        if counts[i] < len(chosen):
            deviation = np.asarray(kv_deviation(CONFIG, layer, jnp.asarray(x), jnp.asarray(chosen), stored))
            deviation = np.where(context.kinds[chosen] == NEW, np.inf, deviation)
            kept = np.sort(np.argsort(-deviation, kind="stable")[: counts[i]])
            x, chosen = x[:, kept], chosen[kept]
        out, expected = recompute_layer(CONFIG, layer, jnp.asarray(x), jnp.asarray(chosen), stored, table())
        np.testing.assert_allclose(found[i][:, :count], np.asarray(expected)[:, :count], atol=ATOL, rtol=0)
        x = np.asarray(out)


def test_more_tokens_bring_it_nearer_to_a_prefill():
    """In the mean over contexts."""
    errors = np.zeros(5)
    for seed in range(6):
        context = context_of(*((STORED, tokens_of(48, 10 * seed + i)) for i in range(4)))
        exact = full_pass(context.tokens)[1]
        for i, ratio in enumerate((0.0, 0.3, 0.6, 0.8, 1.0)):
            found = fused(context, context.plan(ratio))[:, :, : len(context.tokens)]
            errors[i] += ((found - exact) ** 2).mean()
    assert (np.diff(errors) < 0).all()
    assert errors[-1] < 1e-6 < errors[-2]


def test_first_tokens_are_those_of_every_chunk_or_in_the_order_that_is_given():
    context = context_of((EXACT, C), (STORED, A), (NEW, ONE), (STORED, ONE), (STORED, B))
    plan = context.plan(0.5, start=60, selection="first")
    rows = plan.start + plan.first_rows
    assert plan.counts == (1 + 44,) * CONFIG.num_layers
    assert 114 in rows  # What is new.
    assert 115 in rows  # A chunk of one token.
    of_chunks = [rows[(rows >= low) & (rows < high)] - low for low, high in ((64, 114), (116, 153))]
    assert [each.tolist() for each in of_chunks] == [list(range(22)), list(range(21))]

    order = np.random.default_rng(1).permutation(len(A) + len(ONE) + len(B))
    stored = np.flatnonzero(context.kinds == STORED)
    plan = context.plan(0.3, selection="first", order=order)
    np.testing.assert_array_equal(plan.first_rows, np.sort([*stored[order[:26]], 114]))


# How many.


@given(
    num_layers=st.integers(1, 40),
    num_stored=st.integers(0, 3000),
    num_new=st.integers(0, 300),
    ratio=st.floats(0, 1),
    check=st.integers(1, 3),
    selection=st.sampled_from(SELECTIONS),
)
@example(num_layers=30, num_stored=3000, num_new=20, ratio=0.15, check=1, selection="hkvd")
@example(num_layers=30, num_stored=1280, num_new=0, ratio=0.15, check=1, selection="hkvd")
@example(num_layers=2, num_stored=75, num_new=256, ratio=0.875, check=1, selection="hkvd")
def test_a_plan_computes_its_share_up_to_rounding(num_layers, num_stored, num_new, ratio, check, selection):
    check = min(check, num_layers)
    kinds = [STORED] * num_stored + [NEW] * num_new
    plan = plan_blend(
        num_layers=num_layers,
        start=7,
        kinds=kinds,
        chunk_starts=(),
        ratio=ratio,
        check_layers=check,
        selection=selection,
    )
    counts = plan.counts
    assert len(counts) == num_layers
    assert list(counts) == sorted(counts, reverse=True)
    assert all(num_new <= count <= num_new + num_stored for count in counts)
    assert plan.num_recomputed == pytest.approx(sum(counts) / num_layers - num_new)
    num_checked = check if plan.counts[-1] < plan.counts[0] else 0
    spent = sum(counts[num_checked:]) - (num_layers - num_checked) * num_new
    wanted = ratio * num_stored * (num_layers - num_checked)
    assert spent <= wanted + 1e-6, "never more than was asked for"
    if plan.counts[-1] < plan.counts[0]:
        assert counts[:check] == (num_new + num_stored,) * check
        mean = num_new + ratio * num_stored
        assert spent >= wanted - max(64, 0.4 * mean) - 1, "the share is made use of, but for less than a step"
        assert len(set(counts[check:])) <= 9
    else:
        assert len(set(counts)) == 1
        assert counts[0] - num_new >= ratio * num_stored - 1
    assert len(plan.first_rows) == counts[0]
    assert padded_rows(counts[0]) - counts[0] < 64


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 0}, "got 0 and 4"),
        ({"start": -1}, "got 2 and -1"),
        ({"kinds": [0, 3]}, r"kinds .*got \[0, 3\]"),
        ({"chunk_starts": (3,)}, r"from 4 .*got \(3,\)"),
        ({"chunk_starts": (6, 5)}, r"got \(6, 5\)"),
        ({"chunk_starts": (5, 14)}, r"got \(5, 14\)"),
        ({"ratio": 1.1}, "ratio .*got 1.1"),
        ({"check_layers": 0}, "check_layers .*got 0"),
        ({"check_layers": 3}, "check_layers .*got 3"),
        ({"selection": "best"}, "selection .*'best'"),
    ],
)
def test_a_plan_out_of_range_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        plan_blend(**{"num_layers": 2, "start": 4, "kinds": [0] * 10, "chunk_starts": (4,), "ratio": 0.5, **values})


def test_fewer_embeddings_than_tokens_are_refused():
    context = context_of((STORED, A))
    with pytest.raises(ValueError, match="there must be embeddings of 50 tokens, got 49"):
        Recomputer(CONFIG, layers(), table(), context.plan(0.5), embedded(context.tokens[:49], 49))


def test_half_precision_stays_half():
    context = context_of(*CONTEXTS["three chunks"])
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layers())
    x = embedded(context.tokens).astype(jnp.bfloat16)
    recomputer = Recomputer(CONFIG, half, table(), context.plan(0.6), x)
    for i, kv in enumerate(context.kv):
        found = recomputer.layer(i, jnp.asarray(kv, jnp.bfloat16))
        assert found.dtype == jnp.bfloat16
        assert np.isfinite(np.asarray(found[:, : len(context.tokens)], np.float32)).all()
