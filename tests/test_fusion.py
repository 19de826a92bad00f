"""Selective recompute on a tiny model: against a prefill of all, against numpy, and what must stay as it was.

Not here: attention of chosen tokens (models/test_attention), an engine's repairs (test_overflow_repair), chunks in a
store and engines (test_context).
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

from benchmarks.evaluate.by_layer import LayerByLayer, as_pages, from_pages
from ca_jax.config import SELECTIONS
from ca_jax.device import steps
from ca_jax.device.transfer import to_device
from ca_jax.models.paged_attention import Rows
from ca_jax.models.transformer import Transformer
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel
from ca_jax.recompute.layers import recompute_layer
from ca_jax.recompute.plan import Plan, TokenKind, padded_rows, plan_blend, repair_plan
from tests import engine_kit as kit

ATOL = kit.ATOL
MODEL = kit.model_of(num_layers=5, seed=3)
CONFIG = MODEL.config
NUM_LAYERS = CONFIG.num_layers
SLIDING = dataclasses.replace(CONFIG, sliding_window=24, full_layers=(0, 2))
CAPACITY = 256
"""Places of every stored KV here, so that all share what is compiled."""
STORED, NEW, EXACT = TokenKind


def model_of(config) -> LoadedModel:
    return dataclasses.replace(MODEL, config=config, model=Transformer(config))


def full_pass(tokens: np.ndarray, config=CONFIG) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[T, V]` and unrotated KV `[L, 2, T, K, H]` of a plain forward pass."""
    return kit.full_pass(tokens.tolist(), model_of(config))


@functools.cache
def by_layer(config=CONFIG) -> LayerByLayer:
    return LayerByLayer(model_of(config), 2 * CAPACITY, 2 * CAPACITY)


def tokens_of(num_tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, num_tokens)


@functools.cache
def noise(seed: int = 9) -> np.ndarray:
    """KV that is nobody's, `[L, 2, S, K, H]`."""
    shape = (NUM_LAYERS, 2, CAPACITY, CONFIG.num_kv_heads, CONFIG.head_dim)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stale(kv: np.ndarray, behind: float | None = None) -> np.ndarray:
    """KV with room behind it, where noise is or what is said."""
    out = noise().copy() if behind is None else np.full_like(noise(), behind)
    out[:, :, : kv.shape[2]] = kv
    return out


@functools.cache
def fresh() -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Tokens, and of a prefill of them: what goes into each layer and out of the last, and KV `[L, 2, T, K, H]`."""
    tokens = tokens_of(96, 0)
    x, kv = [np.asarray(by_layer().embedded(tokens, 96))], []
    for layer in range(NUM_LAYERS):
        out, new, _ = by_layer().layer(layer, jnp.array(x[-1]), by_layer().empty(96), 0, 96)
        x.append(np.asarray(out))
        kv.append(np.asarray(new))
    return tokens, x, np.stack(kv)


def fused(tokens: np.ndarray, plan: Plan, kv: np.ndarray, config=CONFIG) -> np.ndarray:
    """All layers, one after the other, `[L, 2, CAPACITY, K, H]`."""
    pages = [as_pages(jnp.asarray(layer)) for layer in kv]
    return np.stack([from_pages(found) for found in by_layer(config).recomputed(plan, tokens.tolist(), pages)])


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=ATOL, rtol=0)


# One layer.


def blend_layer(layer: int, x: np.ndarray, chosen: np.ndarray, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One layer of chosen tokens: what goes into the next, and KV."""
    rows = Rows(*(to_device(part, np.int32) for part in ([[0]], [0, len(chosen)], chosen)))
    given = (jnp.array(x), as_pages(jnp.asarray(stored)), rows, by_layer().tables[0], len(chosen))
    x, _, pages = recompute_layer(CONFIG, by_layer().layers[layer], *given, CONFIG.kind_of(layer))
    return np.asarray(x), np.asarray(from_pages(pages))


def deviation_of(layer: int, x: np.ndarray, chosen: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """How far chosen tokens' KV is from what is stored: sums of squared differences of unrotated KV."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), by_layer().layers[layer])
    rows = x[0].astype(np.float64)
    normed = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * weights["attn_norm"]["scale"]
    found = (np.einsum("nf,fkh->nkh", normed, weights["attn"][name]) for name in ("wk", "wv"))
    return sum(((each - stored[part, chosen]) ** 2).sum((1, 2)) for part, each in enumerate(found))


@pytest.mark.parametrize("chosen", [[0], [5, 17, 18, 60, 95]], ids=str)
def test_chosen_tokens_take_the_places_of_their_own_and_of_no_other(chosen):
    """They are computed over what is stored before them and their own new KV; what is stored of them is not read."""
    _, x, kv = fresh()
    stored, layer = stale(kv, np.nan), 1
    stored[:, :, chosen] = noise()[:, :, chosen]
    out, new = blend_layer(layer, x[layer][:, chosen], chosen, stored[layer])
    assert_close(out, x[layer + 1][:, chosen])
    assert_close(new[:, chosen], kv[layer][:, chosen])
    others = np.setdiff1d(np.arange(CAPACITY), chosen)
    np.testing.assert_array_equal(new[:, others], stored[layer][:, others])


# Repairs.


def plan_of(
    num_tokens: int, ratio: float, num_first: int = 0, *, num_layers: int = NUM_LAYERS, **values
) -> Plan | None:
    values = {"repair": "deviating", **values}
    overflow = OverflowConfig(repair_ratio=ratio, anchor_tokens=num_first, **values)
    return repair_plan(overflow, num_layers, num_tokens)


@given(num_layers=st.integers(1, 40), num_tokens=st.integers(1, 2000), ratio=st.floats(0, 1), first=st.floats(0, 1))
@example(num_layers=30, num_tokens=512, ratio=0.15, first=0.0)
@example(num_layers=30, num_tokens=512, ratio=0.15, first=0.02)
def test_a_repair_computes_its_share_up_to_rounding(num_layers, num_tokens, ratio, first):
    num_first = int(first * num_tokens)
    plan = plan_of(num_tokens, ratio, num_first, num_layers=num_layers)
    if plan is None:
        assert not num_first
        assert (ratio * num_layers - 1) * num_tokens < 8 * num_layers
        return
    counts = plan.counts
    assert len(counts) == num_layers
    assert all(count % 8 == 0 or count == num_tokens for count in counts)
    assert all(num_first <= count <= num_tokens for count in counts)
    assert list(counts) == sorted(counts, reverse=True)
    assert plan.num_recomputed == pytest.approx(sum(counts) / num_layers)
    if not num_first:
        assert plan.num_recomputed <= ratio * num_tokens + 1e-6, "never more than was asked for"
    budget = (ratio * num_layers - 1) * num_tokens
    if ratio < 1 and num_layers > 1 and budget >= 8 * (num_layers - 1):
        assert plan.num_recomputed >= ratio * num_tokens - 8, "the share is made use of"
        assert counts[0] == num_tokens
    elif ratio < 1 and budget < 0:
        assert set(counts) == {min(-(-num_first // 8) * 8, num_tokens)}, "too little to check a whole layer"


@pytest.mark.parametrize(
    ("ratio", "num_first", "repair", "num_anew"),
    [
        (0.0, 33, "deviating", 40),
        (1.0, 0, "deviating", 96),
        (1.0, 0, "spread", 96),
        (0.05, 40, "spread", 40),  # How first tokens move is not how others do.
    ],
)
def test_first_tokens_anew_are_a_prefill_of_these_alone_and_all_else_stands(ratio, num_first, repair, num_anew):
    tokens, _, kv = fresh()
    found = fused(tokens, plan_of(96, ratio, num_first, repair=repair), noise())
    assert_close(found[:, :, :num_anew], kv[:, :, :num_anew])
    np.testing.assert_array_equal(found[:, :, num_anew:], noise()[:, :, num_anew:])


# Tokens evenly apart, as which all others move.


@given(num_tokens=st.integers(1, 700), ratio=st.floats(0, 1), num_first=st.integers(0, 80))
def test_places_are_evenly_apart_behind_the_first_ones(num_tokens, ratio, num_first):
    num_first = min(num_first, num_tokens)
    plan = plan_of(num_tokens, ratio, num_first, num_layers=3, repair="spread")
    if plan is None or not ratio:
        assert plan is None or num_first
        return
    count = plan.counts[0]
    assert plan.counts == (count,) * 3
    assert num_first <= count <= max(num_first, ratio * num_tokens)
    places = plan.first_rows
    assert len(places) == count
    assert (np.diff(places) > 0).all()
    assert places[:num_first].tolist() == list(range(num_first))
    if count > num_first:
        gaps = np.diff([*places[num_first:], num_tokens])
        assert places[num_first] == num_first
        assert gaps.max() - gaps.min() <= 1


def moved_by_least_squares(new, positions, kv, start, stop, min_place=16):
    """The ridge regression as one of least squares, head by head: rows of the ridge below those of the tokens."""
    out = kv.copy()
    fits = positions >= max(start, min_place)
    for of in np.ndindex(kv.shape[0], kv.shape[2]):
        every = kv[of[0], :, of[1]].astype(np.float64)
        old, now = every[positions][fits], new[of[0], :, of[1]].astype(np.float64)[fits]
        mean, moved = old.mean(0), now - old
        ridge = np.sqrt(3 * np.square(old - mean).sum(1).mean()) * np.eye(kv.shape[3])
        left = np.concatenate([old - mean, ridge])
        right = np.concatenate([moved - moved.mean(0), np.zeros_like(ridge)])
        linear = np.linalg.lstsq(left, right, rcond=None)[0]
        out[of[0], start:stop, of[1]] = (every + moved.mean(0) + (every - mean) @ linear)[start:stop]
    return out


@pytest.mark.parametrize("num_first", [0, 5])
def test_spread_tokens_are_computed_over_what_has_moved(num_first):
    tokens, x, kv = fresh()
    kv = stale(kv + 0.3 * noise()[:, :, :96])
    plan = plan_of(96, 0.3, num_first, repair="spread", keep_first_tokens=4)
    found = fused(tokens, plan, kv)
    places = plan.first_rows
    x = x[0][:, places]
    for layer, wanted in enumerate(kv):
        _, alone = blend_layer(layer, x, places, wanted)
        moved = moved_by_least_squares(alone[:, places], places, wanted, max(4, num_first), 96)
        x, expected = blend_layer(layer, x, places, moved)
        assert_close(found[layer], expected)


# Contexts of chunks.


@dataclasses.dataclass
class Context:
    """Pieces one behind the other, each of a kind, and the KV that is there of them before fusion."""

    tokens: np.ndarray
    kinds: np.ndarray
    chunk_starts: tuple[int, ...]
    kv: np.ndarray  # [L, 2, CAPACITY, K, H]; NaN where there is none

    def fused(self, plan: Plan, config=CONFIG) -> np.ndarray:
        return fused(self.tokens, plan, self.kv, config)

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


def answered(kv: np.ndarray, num_tokens: int, question: np.ndarray, config=CONFIG) -> np.ndarray:
    """Logits `[V]` of the last token of a question that is prefilled over KV, as an engine does it."""
    x = by_layer(config).embedded(question, len(question))
    for i in range(NUM_LAYERS):
        x, *_ = by_layer(config).layer(i, x, as_pages(jnp.asarray(kv[i])), num_tokens, len(question))
    return np.asarray(steps.all_logits(config, MODEL.params, x))[0, len(question) - 1]


QUESTION = tokens_of(9, seed=77)
A, B, C = (tokens_of(size, seed) for size, seed in ((50, 1), (37, 2), (64, 3)))
ONE = tokens_of(1, 4)

CONTEXTS = {
    "three chunks": [(STORED, A), (STORED, B), (STORED, C)],
    "again and of one token": [(STORED, A), (STORED, ONE), (STORED, A), (STORED, B), (STORED, ONE)],
    "between history and new text": [(EXACT, C), (STORED, A), (STORED, B), (NEW, tokens_of(17, 5))],
    "new text between": [(NEW, tokens_of(5, 8)), (STORED, A), (NEW, tokens_of(3, 9)), (STORED, B)],
    "nothing stored": [(EXACT, A), (NEW, B)],
}


@pytest.mark.parametrize(
    ("name", "config"),
    [*((name, CONFIG) for name in CONTEXTS), ("between history and new text", SLIDING)],
)
def test_all_tokens_anew_are_a_prefill_of_all(name, config):
    context = context_of(*CONTEXTS[name], config=config)
    count = len(context.tokens)
    found = context.fused(context.plan(1.0), config)
    logits, kv = full_pass(np.concatenate([context.tokens, QUESTION]), config)
    assert_close(found[:, :, :count], kv[:, :, :count])
    assert_close(answered(found, count, QUESTION, config), logits[-1])


@pytest.mark.parametrize(
    ("name", "selection", "ratio"),
    [
        *((name, "hkvd", 0.6) for name in CONTEXTS),
        *(("new text between", *way) for way in (("hkvd", 0.0), ("first", 0.3))),
    ],
)
def test_what_is_not_chosen_stays_and_what_is_new_is_computed(name, selection, ratio):
    """As many tokens of each layer as the plan says have other KV than before, all new ones among them."""
    context = context_of(*CONTEXTS[name])
    count = len(context.tokens)
    rng = np.random.default_rng(0)  # What is computed anew is never what was stored, to the last bit.
    stored = np.flatnonzero(context.kinds == STORED)
    context.kv[:, :, stored] += 1e-3 * rng.standard_normal(context.kv[:, :, stored].shape).astype(np.float32)
    plan = context.plan(ratio, selection=selection)
    found = context.fused(plan)
    changed = (found != context.kv).any((1, 3, 4)) & ~(np.isnan(found) & np.isnan(context.kv)).all((1, 3, 4))
    assert np.isfinite(found[:, :, :count]).all()
    assert not changed[:, count:].any()
    assert not changed[:, :count][:, context.kinds == EXACT].any()
    assert changed[:, :count][:, context.kinds == NEW].all()
    assert (changed.sum(1) <= plan.counts).all()
    for below, above in itertools.pairwise(changed[1:]):
        assert not (above & ~below).any(), "of those of the layer before"


@pytest.mark.parametrize(("name", "ratio"), [*((name, 0.6) for name in CONTEXTS), ("again and of one token", 0.1)])
def test_spread_tokens_are_computed_and_say_how_the_others_of_chunks_move(name, ratio):
    """Against the same with each layer's map fitted by least squares, here."""
    context = context_of(*CONTEXTS[name])
    count = len(context.tokens)
    plan = context.plan(ratio, selection="spread")
    found = context.fused(plan)
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


@pytest.mark.parametrize("start", [0, 30, 64])
def test_where_the_description_begins_changes_nothing(start):
    context = context_of((EXACT, C), (NEW, ONE), (STORED, A), (NEW, tokens_of(3, 9)), (STORED, B))
    for ratio in (0.0, 0.3, 1.0):
        assert_close(context.fused(context.plan(ratio, start)), context.fused(context.plan(ratio)))


@pytest.mark.parametrize("what", ["blend", "two check layers", "repair", "repair with first ones"])
def test_the_tokens_that_deviate_most_are_computed_over_what_stands(what):
    """Layer by layer against a reference that chooses in numpy among the tokens of the layer before."""
    if "repair" in what:
        tokens, exact = tokens_of(128, 5), full_pass(tokens_of(128, 5))[1][:, :, 32:]
        exact[:, :, :4] = full_pass(tokens[32:])[1][:, :, :4]  # These do not deviate.
        tokens, kv, chosen = tokens[32:], stale(exact), np.arange(96)
        plan = plan_of(96, 0.5, 4 if "first" in what else 0)
        always = plan.always
    else:
        context = context_of(*CONTEXTS["new text between"])
        tokens, kv, chosen = context.tokens, np.nan_to_num(context.kv, nan=5.0), np.flatnonzero(context.kinds != EXACT)
        plan, always = context.plan(0.7, check_layers=1 + ("two" in what)), context.kinds == NEW
        assert len(set(plan.counts)) > 2
    found, x = fused(tokens, plan, kv), np.asarray(by_layer().embedded(tokens, len(tokens)))
    for i in range(NUM_LAYERS):
        if plan.counts[i] < len(chosen):
            deviation = np.where(always[chosen], np.inf, deviation_of(i, x, chosen, kv[i]))
            kept = np.sort(np.argsort(-deviation, kind="stable")[: plan.counts[i]])
            x, chosen = x[:, kept], chosen[kept]
        x, expected = blend_layer(i, x, chosen, kv[i])
        assert_close(found[i], expected)
    if "repair" in what:
        assert np.isin(np.arange(4), chosen).all() == ("first" in what)


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


def test_what_a_question_attends_to_is_computed_with_the_first_tokens_of_chunks():
    """Other chosen tokens are evenly apart. Exact and new tokens are never chosen, whatever attention they received."""
    kinds = [EXACT] * 20 + [STORED] * 40 + [NEW] * 4 + [STORED] * 40
    attention = np.zeros(len(kinds), np.float32)
    asked = [31, 32, 55, 70, 90, 101]
    attention[[*asked, 3, 62]] = [*range(1, 7), 50, 60]
    given = {"num_layers": 4, "start": 10, "kinds": kinds[10:], "chunk_starts": (20, 64), "ratio": 0.15}
    plan = plan_blend(**given, selection="query", attention=attention[10:])
    rows = plan.start + plan.first_rows
    assert {20, 21, 64, 65, *asked, *range(60, 64)} <= set(rows.tolist())
    assert len(rows) == plan.counts[0] == 4 + int(0.15 * 80)
    assert not set(rows.tolist()) & set(range(20))
    unasked = plan_blend(**given, selection="query")
    assert (unasked.counts, unasked.rows) == (plan.counts, plan.rows)
    np.testing.assert_array_equal(plan.moves, np.array(kinds[10:]) == STORED)
    assert not plan.fitted[np.array(asked) - 10].any(), "what a question attends to moves otherwise than all else"
    evenly = [row for row in rows if row not in (*asked, 20, 21, 64, 65, *range(60, 64))]
    assert evenly
    assert plan.fitted[np.array(evenly) - 10].all()


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
def test_a_blend_computes_its_share_up_to_rounding(num_layers, num_stored, num_new, ratio, check, selection):
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
        attention=np.random.default_rng(num_stored).random(len(kinds)),
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
        ({"chunk_starts": (5, 14)}, r"got \(5, 14\)"),
        ({"ratio": 1.1}, "ratio .*got 1.1"),
        ({"check_layers": 3}, "check_layers .*got 3"),
        ({"selection": "best"}, "selection .*'best'"),
    ],
)
def test_a_plan_out_of_range_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        plan_blend(**{"num_layers": 2, "start": 4, "kinds": [0] * 10, "chunk_starts": (4,), "ratio": 0.5, **values})


def test_fewer_tokens_than_a_plan_describes_are_refused():
    context = context_of((STORED, A))
    with pytest.raises(ValueError, match="there must be ids of 50 tokens, got 49"):
        fused(context.tokens[:49], context.plan(0.5), context.kv)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_half_precision_stays_half(selection):
    context = context_of(*CONTEXTS["three chunks"])
    half = dataclasses.replace(MODEL, params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), MODEL.params))
    pages = [as_pages(jnp.asarray(kv, jnp.bfloat16)) for kv in context.kv]
    plan = context.plan(0.3, selection=selection)
    for found in LayerByLayer(half, CAPACITY, CAPACITY).recomputed(plan, context.tokens.tolist(), pages):
        assert found.dtype == jnp.bfloat16
        assert np.isfinite(np.asarray(from_pages(found)[:, : len(context.tokens)], np.float32)).all()
