"""Selective recompute on a tiny model: against a prefill of all, against numpy, and what must stay as it was.

Not here: attention of chosen tokens (models/test_attention), an engine's repairs (test_overflow_repair).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ca_jax.device import steps
from ca_jax.overflow.config import OverflowConfig
from ca_jax.recompute.layers import carry_along, kv_deviation, recompute_layer
from ca_jax.recompute.plan import Plan, plan_repair, repair_plan
from ca_jax.recompute.recomputer import Recomputer
from ca_jax.telemetry.metrics import CompileCounter
from ca_jax.testing import tiny
from tests import engine_kit as kit

CONFIG = tiny.tiny_config()
NUM_LAYERS = CONFIG.num_layers
NUM_TOKENS = 96
CAPACITY = 128
"""Places of every stored KV here, so that all share what is compiled."""


@functools.cache
def params() -> tuple[list[steps.Params], steps.Params]:
    """Of each layer, and all."""
    variables = jax.device_put(tiny.tiny_params(CONFIG, seed=3))
    return [variables["params"][f"layer_{i}"] for i in range(NUM_LAYERS)], variables


@functools.cache
def table():
    return steps.rotation_table(CONFIG, 2 * CAPACITY)


def token_ids(num_tokens: int = NUM_TOKENS, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, num_tokens)


def embedded(tokens: np.ndarray, size: int | None = None) -> jax.Array:
    padded = np.zeros((1, size or len(tokens)), np.int32)
    padded[0, : len(tokens)] = tokens
    return steps.embed(CONFIG, params()[1], jnp.asarray(padded))


def fresh(tokens: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """A prefill of all: what goes into each layer and out of the last `[1, T, F]`, and KV `[L, 2, T, K, H]`."""
    x, kv = [embedded(tokens)], []
    for layer in params()[0]:
        out, new = steps.prefill_layer(CONFIG, layer, x[-1], None, jnp.int32(0), table())
        x.append(out)
        kv.append(np.asarray(new))
    return [np.asarray(each) for each in x], np.stack(kv)


def noise(seed: int = 9) -> np.ndarray:
    """KV that is nobody's, `[L, 2, S, K, H]`."""
    shape = (NUM_LAYERS, 2, CAPACITY, CONFIG.num_kv_heads, CONFIG.head_dim)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stale(kv: np.ndarray, behind: float | None = None) -> np.ndarray:
    """KV with room behind it, where noise is or what is said."""
    out = noise()
    if behind is not None:
        out[:] = behind
    out[:, :, : kv.shape[2]] = kv
    return out


def blended(plan: Plan, x: jax.Array, kv: np.ndarray) -> np.ndarray:
    """All layers, one after the other."""
    recomputer = Recomputer(CONFIG, params()[0], table(), plan, x)
    return np.stack([np.asarray(recomputer.layer(i, jnp.asarray(kv[i]))) for i in range(NUM_LAYERS)])


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=kit.ATOL, rtol=0)


def blend_layer(layer: int, x: np.ndarray, chosen: np.ndarray, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One layer of chosen tokens: what goes into the next, and KV."""
    places = jnp.asarray(chosen, jnp.int32)
    found = recompute_layer(CONFIG, params()[0][layer], jnp.asarray(x), places, jnp.asarray(stored), table())
    return np.asarray(found[0]), np.asarray(found[1])


# One layer.


def test_a_layer_of_all_tokens_is_that_of_a_prefill_whatever_was_stored():
    x, kv = fresh(token_ids())
    stored = noise()
    for layer in range(NUM_LAYERS):
        out, new = blend_layer(layer, x[layer], np.arange(NUM_TOKENS), stored[layer])
        assert_close(out, x[layer + 1])
        assert_close(new[:, :NUM_TOKENS], kv[layer])
        np.testing.assert_array_equal(new[:, NUM_TOKENS:], stored[layer, :, NUM_TOKENS:])


@pytest.mark.parametrize("chosen", [[0], [95], [0, 1, 2, 3], [5, 17, 18, 60, 95]], ids=str)
def test_chosen_tokens_take_the_places_of_their_own_and_of_no_other(chosen):
    """Their own stored KV is not read: they are computed over the others' and their new one."""
    x, kv = fresh(token_ids())
    stored, layer = stale(kv, np.nan), 1
    stored[:, :, chosen] = noise()[:, :, chosen]
    out, new = blend_layer(layer, x[layer][:, chosen], chosen, stored[layer])
    assert_close(out, x[layer + 1][:, chosen])
    assert_close(new[:, chosen], kv[layer][:, chosen])
    others = np.setdiff1d(np.arange(CAPACITY), chosen)
    np.testing.assert_array_equal(new[:, others], stored[layer][:, others])


def test_a_token_sees_what_is_stored_before_it_and_nothing_behind():
    x, kv = fresh(token_ids())
    chosen, layer = np.array([10, 40]), 2

    def out_of(stored: np.ndarray) -> np.ndarray:
        return blend_layer(layer, x[layer][:, chosen], chosen, stored)[0][0]

    before = out_of(stale(kv, np.nan)[layer])
    changed = stale(kv)[layer]
    changed[:, 41:] = np.nan
    np.testing.assert_array_equal(out_of(changed), before)
    changed[:, 11] += 1.0  # Between the two.
    np.testing.assert_array_equal(out_of(changed)[0], before[0])
    assert np.abs(out_of(changed)[1] - before[1]).max() > 0.01


@pytest.mark.parametrize("layer", [0, 2])
def test_deviation_is_the_squared_distance_of_unrotated_kv(layer):
    x, _ = fresh(token_ids())
    positions, stored = np.array([0, 3, 50, 95]), noise()[layer]
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params()[0][layer])
    rows = x[layer][0, positions].astype(np.float64)
    normed = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * weights["attn_norm"]["scale"]
    expected = sum(
        ((np.einsum("nf,fkh->nkh", normed, weights["attn"][name]) - stored[part, positions]) ** 2).sum((1, 2))
        for part, name in enumerate(("wk", "wv"))
    )
    found = kv_deviation(
        CONFIG, params()[0][layer], jnp.asarray(x[layer][:, positions]), jnp.asarray(positions), jnp.asarray(stored)
    )
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4)


# How many.


@given(
    num_layers=st.integers(1, 40),
    num_tokens=st.integers(1, 2000),
    ratio=st.floats(0, 1),
    first=st.floats(0, 1),
    check=st.integers(0, 3),
)
@example(num_layers=30, num_tokens=512, ratio=0.15, first=0.0, check=1)
@example(num_layers=30, num_tokens=512, ratio=0.15, first=0.02, check=1)
def test_a_plan_computes_its_share_up_to_rounding(num_layers, num_tokens, ratio, first, check):
    check, num_first = min(check, num_layers), int(first * num_tokens)
    plan = plan_repair(
        num_layers=num_layers, num_tokens=num_tokens, ratio=ratio, num_first=num_first, check_layers=check
    )
    counts = plan.counts
    assert len(counts) == num_layers
    assert all(count % 8 == 0 or count == num_tokens for count in counts)
    assert all(num_first <= count <= num_tokens for count in counts)
    assert list(counts) == sorted(counts, reverse=True)
    assert plan.num_recomputed == pytest.approx(sum(counts) / num_layers)
    rounded_first = min(-(-num_first // 8) * 8, num_tokens)
    if not num_first:
        assert plan.num_recomputed <= ratio * num_tokens + 1e-6, "never more than was asked for"
    budget = (ratio * num_layers - check) * num_tokens
    if ratio < 1 and check < num_layers and budget >= 8 * (num_layers - check):
        assert plan.num_recomputed >= ratio * num_tokens - 8, "the share is made use of"
        assert counts[:check] == (num_tokens,) * check
    elif ratio < 1 and budget < 0:
        assert set(counts) == {rounded_first}, "too little to check a whole layer"


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ({"ratio": 1.0}, (100,) * 4),
        ({"ratio": 0.0}, (0,) * 4),
        ({"ratio": 0.0, "num_first": 1}, (8,) * 4),
        ({"ratio": 0.25, "num_first": 20}, (24,) * 4),  # All of it would go into the first layer.
        ({"ratio": 0.5}, (100, 32, 32, 32)),  # 33 of each further layer, rounded down.
        ({"ratio": 0.5, "num_first": 60}, (100, 64, 64, 64)),
        ({"ratio": 0.5, "check_layers": 0}, (48,) * 4),
        ({"ratio": 0.75, "check_layers": 2}, (100, 100, 48, 48)),
        ({"ratio": 0.0, "num_tokens": 3, "num_first": 2}, (3,) * 4),
    ],
)
def test_counts_of_each_layer(values, counts):
    plan = plan_repair(**{"num_layers": 4, "num_tokens": 100, **values})
    assert plan.counts == counts
    assert (plan.counts[-1] < plan.counts[0]) == (len(set(counts)) > 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 0}, "got 0, 10 and 0"),
        ({"num_tokens": 0}, "got 2, 0 and 0"),
        ({"num_first": -1}, "got 2, 10 and -1"),
        ({"ratio": 1.1}, "ratio .*got 1.1"),
        ({"ratio": float("nan")}, "ratio .*got nan"),
        ({"check_layers": 3}, "check_layers .*got 3"),
    ],
)
def test_a_plan_out_of_range_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        plan_repair(**{"num_layers": 2, "num_tokens": 10, "ratio": 0.5, **values})


@pytest.mark.parametrize("num_tokens", [1, 20, 33, 90])
def test_a_repair_of_few_tokens_compiles_nothing_that_one_of_many_has_not(num_tokens):
    def repair(num_tokens: int) -> int:
        overflow = OverflowConfig(anchor_tokens=32, repair_ratio=0.1)
        plan = repair_plan(overflow, NUM_LAYERS, num_tokens, CAPACITY)
        recomputer = Recomputer(CONFIG, params()[0], table(), plan, embedded(token_ids()))
        with CompileCounter() as compiles:
            for layer, kv in enumerate(noise()):
                recomputer.layer(layer, jnp.asarray(kv))
        return compiles.count

    repair(NUM_TOKENS)
    assert repair(num_tokens) == 0


# All layers.


def plan_of(num_tokens: int, ratio: float, num_first: int = 0) -> Plan:
    return plan_repair(num_layers=NUM_LAYERS, num_tokens=num_tokens, ratio=ratio, num_first=num_first)


@pytest.mark.parametrize(
    ("ratio", "num_first", "spreads", "num_anew"),
    [
        (0.0, 0, False, 0),
        (0.0, 1, False, 8),
        (0.0, 33, False, 40),
        (0.0, 96, False, 96),
        (1.0, 0, False, 96),
        (1.0, 0, True, 96),
        (0.05, 40, True, 40),  # How first tokens move is not how others do.
    ],
)
def test_first_tokens_anew_are_a_prefill_of_these_alone_and_all_else_stands(ratio, num_first, spreads, num_anew):
    tokens = token_ids()
    plan = plan_repair(num_layers=NUM_LAYERS, num_tokens=NUM_TOKENS, ratio=ratio, num_first=num_first, spreads=spreads)
    stored = noise()
    found = blended(plan, embedded(tokens, CAPACITY if spreads else None), stored)
    if num_anew:
        assert_close(found[:, :, :num_anew], fresh(tokens[:num_anew])[1])
    np.testing.assert_array_equal(found[:, :, num_anew:], stored[:, :, num_anew:])


def kept_of_a_longer_context(num_dropped: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that stay of a context, and their KV, which has seen those that left."""
    tokens = token_ids(NUM_TOKENS + num_dropped, seed=5)
    return tokens[num_dropped:], fresh(tokens)[1][:, :, num_dropped:]


@pytest.mark.parametrize("num_first", [0, 4])
def test_tokens_that_deviate_most_are_computed_anew_over_what_stands(num_first):
    """Layer by layer against a reference; the first ones do not deviate, and are among them only if that is asked."""
    tokens, kv = kept_of_a_longer_context()
    x, new = fresh(tokens)
    kv[:, :, :4] = new[:, :, :4]
    plan = plan_of(NUM_TOKENS, 0.5, num_first)
    assert plan.counts == (96, 24, 24)
    stored = stale(kv, np.nan)
    found = blended(plan, embedded(tokens), stored)

    assert_close(found[0, :, :NUM_TOKENS], new[0])
    deviation = ((new[1].astype(np.float64) - kv[1]) ** 2).sum((0, 2, 3))
    deviation[:num_first] = np.inf
    chosen = np.sort(np.argsort(-deviation, kind="stable")[:24])
    others = np.setdiff1d(np.arange(CAPACITY), chosen)
    x_of_chosen = x[1][:, chosen]
    for layer in (1, 2):
        x_of_chosen, expected = blend_layer(layer, x_of_chosen, chosen, stored[layer])
        assert_close(found[layer][:, chosen], expected[:, chosen])
        np.testing.assert_array_equal(found[layer][:, others], stored[layer][:, others])
    assert np.isin(np.arange(4), chosen).all() == (num_first == 4)


@pytest.mark.parametrize(("ratio", "num_first"), [(1.0, 0), (0.5, 0), (0.0, 4), (0.0, 60)])
def test_padding_behind_the_tokens_is_never_chosen_nor_written(ratio, num_first):
    """Behind the tokens that may be chosen others may lie, whose KV is right as it is."""
    tokens, kv = kept_of_a_longer_context()
    num_tokens = 61
    stored = stale(kv)
    plan = plan_of(num_tokens, ratio, num_first)
    exact = blended(plan, embedded(tokens[:num_tokens]), stored)
    padded = blended(plan, embedded(tokens[:num_tokens], 80), stored)
    np.testing.assert_array_equal(padded[:, :, num_tokens:], stored[:, :, num_tokens:])
    assert_close(padded[:, :, :num_tokens], exact[:, :, :num_tokens])
    if ratio == 1:
        assert_close(exact[:, :, :num_tokens], fresh(tokens[:num_tokens])[1])


# Tokens evenly apart, as which all others move.


@given(num_tokens=st.integers(1, 700), ratio=st.floats(0, 1), num_first=st.integers(0, 80))
def test_places_are_evenly_apart_behind_the_first_ones(num_tokens, ratio, num_first):
    num_first = min(num_first, num_tokens)
    plan = plan_repair(num_layers=3, num_tokens=num_tokens, ratio=ratio, num_first=num_first, spreads=True)
    count = plan.counts[0]
    assert plan.counts == (count,) * 3
    assert num_first <= count <= max(num_first, ratio * num_tokens)
    assert plan.counts[-1] == plan.counts[0]
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


def carried(new: np.ndarray, positions: np.ndarray, kv: np.ndarray, start: int, stop: int) -> np.ndarray:
    """All tokens from `start` up to `stop` moved as these did, of which the first 16 say nothing."""
    place, positions = np.arange(CAPACITY), np.asarray(positions)
    fits, moves = positions >= max(start, 16), (place >= start) & (place < stop)
    return np.asarray(carry_along(*map(jnp.asarray, (new, positions, kv, fits, moves))))


@pytest.mark.parametrize(("start", "stop"), [(0, CAPACITY), (4, NUM_TOKENS), (30, 31)])
def test_others_move_by_the_map_that_fits_best(start, stop):
    kv, positions = noise()[0], np.arange(3, NUM_TOKENS, 4)
    new = kv[:, positions] + noise(1)[0][:, : len(positions)] + 3 * kv[:, positions, :, ::-1]
    found = carried(new, positions, kv, start, stop)
    wanted = moved_by_least_squares(new, positions, kv, start, stop)
    assert_close(found, wanted)
    assert np.abs(wanted[:, start:stop] - kv[:, start:stop]).max() > 1
    np.testing.assert_array_equal(found[:, :start], kv[:, :start])
    np.testing.assert_array_equal(found[:, stop:], kv[:, stop:])


@pytest.mark.parametrize("positions", [np.arange(0, NUM_TOKENS, 8), np.array([90]), np.arange(8)])
def test_what_all_move_by_is_what_others_move_by(positions):
    """By nothing, where nobody says it: first tokens do not."""
    kv, by = noise()[0], noise(1)[0][:, :1]
    wanted = kv.copy()
    if positions.max() >= 16:
        wanted[:, 4:NUM_TOKENS] += by
    assert_close(carried(kv[:, positions] + by, positions, kv, 4, NUM_TOKENS), wanted)


@pytest.mark.parametrize("num_first", [0, 5])
def test_spread_tokens_are_computed_over_what_has_moved(num_first):
    tokens = token_ids()
    kv = stale(fresh(tokens)[1] + 0.3 * noise()[:, :, :NUM_TOKENS])
    plan = plan_repair(
        num_layers=NUM_LAYERS, num_tokens=NUM_TOKENS, ratio=0.3, num_first=num_first, spreads=True, carries_from=4
    )
    found = blended(plan, embedded(tokens, CAPACITY), kv)
    places = plan.first_rows
    x = embedded(tokens)[:, places]
    for layer, wanted in enumerate(kv):
        _, alone = blend_layer(layer, x, places, wanted)
        moved = carried(alone[:, places], places, wanted, 4, NUM_TOKENS)
        x, fused = blend_layer(layer, x, places, moved)
        assert_close(found[layer], fused)
