"""Attention over pages against the textbook, whatever is packed into a step and wherever pages lie."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.models import cpu_kernels, rope
from ca_jax.models.config import RopeConfig
from ca_jax.models.kv import LayerKV
from ca_jax.models.paged_attention import Rows, attend_pages, attention_received
from tests.models.test_attention import textbook, weights_of
from tests.models.test_cpu_kernels import KINDS
from tests.tolerances import ATTENTION_ATOL

ATOL = ATTENTION_ATOL["float32"]

whatever_the_heads = pytest.mark.parametrize(
    ("head_dim", "heads"),
    [(4, (4, 4)), (16, (130, 1)), (20, (8, 1)), (48, (9, 3)), (64, (9, 3)), (64, (71, 1)), (80, (4, 4)), (96, (8, 1)),
     (128, (8, 2)), (256, (4, 2))],
    ids=str,
)  # fmt: skip


class Case:
    """Rows over pages in any order, NaN where nothing is, and what each should give.

    A row is how many tokens it has, and how many are new behind them, or at which places tokens are computed.
    """

    def __init__(self, rows, heads=(6, 2), head_dim=16, page=8, padding=3, seed=0, rotary_dim=None):
        rng = np.random.default_rng(seed)
        num_heads, num_kv = heads
        self.places = [np.arange(n, n + new) if isinstance(new, int) else np.array(new) for n, new in rows]
        counts = list(map(len, self.places))
        ends = [max([before, *(places + 1)]) for (before, _), places in zip(rows, self.places, strict=True)]
        most = max(-(-end // page) for end in ends) + 1
        num_pages = len(rows) * most + 2
        numbers = iter(rng.permutation(num_pages))
        table = np.zeros((len(rows), most), np.int32)
        pages = np.full((num_pages, 2, num_kv, page, head_dim), np.nan, np.float32)
        total = sum(counts) + padding
        self.q = jnp.array(rng.standard_normal((total, num_heads, head_dim)).astype(np.float32))
        self.new = LayerKV(*rng.standard_normal((2, 1, total, num_kv, head_dim)).astype(np.float32))
        self.history = []
        for row, (before, _) in enumerate(rows):
            kv = rng.standard_normal((2, before, num_kv, head_dim)).astype(np.float32)
            for i in range(-(-ends[row] // page)):
                table[row, i] = next(numbers)
                part = kv[:, i * page : (i + 1) * page]
                pages[table[row, i], :, :, : part.shape[1]] = part.swapaxes(1, 2)
            self.history.append(kv)
        starts = np.cumsum([0, *counts]).astype(np.int32)
        places = np.concatenate([*self.places, np.zeros(padding)])
        self.rows = Rows(*(jnp.array(part, jnp.int32) for part in (table, starts, places)))
        self.pages, self.spans = jnp.array(pages), [slice(*span) for span in itertools.pairwise(starts)]
        config = RopeConfig(theta=1e4, rotary_dim=rotary_dim)
        self.table = rope.rotation_at(config, head_dim, jnp.arange(most * page))

    @property
    def args(self):
        return self.q, self.new, self.pages, self.rows, self.table

    def rotated(self, x, places):
        cosines, sines = (np.asarray(part)[places, None] for part in self.table)
        a, b, rest = np.split(x, [cosines.shape[-1], 2 * cosines.shape[-1]], axis=-1)
        return np.concatenate([a * cosines - b * sines, b * cosines + a * sines, rest], axis=-1)

    def held(self, pages, row):
        """What a row's pages hold, `[2, M page, K, H]`."""
        return np.concatenate(list(np.asarray(pages)[self.rows.table[row]].swapaxes(2, 3)), axis=1)

    def expect(self, out, pages, window=None):
        """What tokens attend to is the textbook's, and their KV is behind what was there."""
        out = np.asarray(out)
        assert np.isfinite(out).all()
        for row, (span, kv, q, k, seen) in enumerate(self.in_rows(window)):
            np.testing.assert_allclose(out[span], textbook(q, k, kv[1], seen), atol=ATOL, rtol=0)
            np.testing.assert_array_equal(self.held(pages, row)[:, : len(k)], kv)

    def in_rows(self, window):
        """Of each row its tokens' span, all of its KV, rotated queries and keys, and what is seen, `[t, T]`."""
        for span, own, history in zip(self.spans, self.places, self.history, strict=True):
            places = np.arange(max([history.shape[1], *(own + 1)]))
            kv = np.zeros((2, len(places), *history.shape[2:]), np.float32)
            kv[:, : history.shape[1]] = history
            kv[:, own] = self.new.k[0, span], self.new.v[0, span]
            seen = (places <= own[:, None]) & (places > own[:, None] - (window or len(places)))
            yield span, kv, self.rotated(np.asarray(self.q)[span], own), self.rotated(kv[0], places), seen


def expect_as_by_blocks(case, how, dtype=jnp.float32, **options):
    """A way to attend over a case's numbers in a dtype gives what blocks give in float32."""
    given = jax.tree.map(lambda x: jnp.asarray(x, dtype), (case.q, case.new, case.pages))
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    (expected, pages), (found, kept) = (
        jax.jit(partial(attend_pages, implementation=each, **options))(*numbers, case.rows, case.table)
        for each, numbers in (("blocks", exact), (how, given))
    )
    num_tokens = case.rows.starts[-1]
    atol = 2 * ATOL if dtype == jnp.float32 else ATTENTION_ATOL["bfloat16"]
    np.testing.assert_allclose(found[:num_tokens].astype(np.float32), expected[:num_tokens], atol=atol, rtol=0)
    assert not found[num_tokens:].any(), "padding sees nothing"
    np.testing.assert_array_equal(kept.astype(np.float32), pages)


@pytest.fixture(params=["blocks", *KINDS])
def attended(request):
    """Attends by blocks, or by the kernels as compiled for a kind of machine: outputs and pages."""
    is_kernel, lib = request.param != "blocks", cpu_kernels.library()

    def attended(case, window=None, **options):
        if is_kernel:
            assert lib.ca_use(request.param.encode())
        how = "cpu" if is_kernel else "blocks"
        run = jax.jit(lambda *args: attend_pages(*args, window, how, **options))
        return jax.block_until_ready(run(*case.args))

    yield attended
    if is_kernel:
        lib.ca_use(KINDS[0].encode())


RAGGED = [(8, 4), (5, 1), (0, 2), (12, 0), (23, 1), (0, 1), (30, 9), (1, 70)]


@pytest.mark.parametrize("window", [None, 1, 11])
@pytest.mark.parametrize("sizes", [{}, {"page": 24, "head_dim": 20}, {"heads": (4, 4), "rotary_dim": 8}], ids=str)
def test_each_token_attends_to_its_own_row_up_to_itself(attended, window, sizes):
    case = Case(RAGGED, **sizes)
    case.expect(*attended(case, window), window)


@pytest.mark.parametrize("window", [None, 1, 11])
@pytest.mark.parametrize("head_dim", [16, 20])
def test_tokens_among_others_see_what_is_before_them(attended, head_dim, window):
    """They are computed anew, and put in the places of what was there."""
    among = np.sort(np.random.default_rng(5).choice(300, 90, replace=False))
    rows = [(12, [0, 3, 4, 11]), (30, 2), (20, [2, 19, 20, 21]), (300, among), (9, [5])]
    case = Case(rows, head_dim=head_dim, seed=4)
    case.expect(*attended(case, window), window)


def test_scores_are_capped_and_sinks_weigh_on_no_value():
    case, cap, sinks = Case(RAGGED, head_dim=16), 1.5, np.linspace(-2, 3, 6).astype(np.float32)
    run = jax.jit(lambda *args: attend_pages(*args, cap=cap, sinks=jnp.asarray(sinks)))
    out = np.asarray(run(*case.args)[0])
    for span, kv, q, k, seen in case.in_rows(None):
        keys, values = (part.astype(np.float64).repeat(3, axis=1) for part in (k, kv[1]))
        scores = cap * np.tanh(np.einsum("tnh,snh->nts", q, keys) / np.sqrt(q.shape[-1]) / cap)
        weights = np.where(seen, np.exp(scores), 0)
        weights /= weights.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None]
        np.testing.assert_allclose(out[span], np.einsum("nts,snh->tnh", weights, values), atol=ATOL, rtol=0)


@pytest.mark.parametrize("window", [None, 7])
def test_rows_of_one_token_each(attended, window):
    case = Case([(17, 1), (0, 1), (40, 1), (8, 1), (9, 0)], padding=1, seed=1)
    case.expect(*attended(case, window, one_each=True), window)


@whatever_the_heads
def test_rows_of_few_and_of_many_tokens_whatever_the_heads(attended, head_dim, heads):
    rng = np.random.default_rng(head_dim + heads[0])
    window = int(rng.integers(1, 150)) if rng.random() < 0.5 else None
    case = Case([(int(rng.integers(0, 130)), new) for new in (1, 2, 70, 1)], heads, head_dim, 16)
    case.expect(*attended(case, window), window)


@pytest.mark.parametrize("window", [None, 63, 513])
def test_rows_over_more_than_one_thread_takes(attended, window):
    case = Case([(1000, 3), (0, 300), (700, 150), (1100, 1)], head_dim=32, page=128)
    case.expect(*attended(case, window), window)


@pytest.mark.parametrize(("rows", "one_each"), [(RAGGED, False), ([(17, 1), (0, 1), (40, 1)], True)])
@pytest.mark.parametrize("window", [None, 7])
def test_what_places_receive(rows, one_each, window):
    case = Case(rows, padding=0 if one_each else 3, seed=2)
    _, pages = attend_pages(*case.args, window, one_each=one_each)
    found = np.asarray(attention_received(case.q, pages, case.rows, case.table, window, one_each=one_each))
    for row, (_, _, q, k, seen) in enumerate(case.in_rows(window)):
        np.testing.assert_allclose(found[row, : len(k)], weights_of(q, k, seen).sum((0, 1)), atol=10 * ATOL, rtol=0)
        assert not found[row, len(k) :].any()
