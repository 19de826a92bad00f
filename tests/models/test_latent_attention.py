"""Attention over latents in both forms against the textbook, and which form is chosen when."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax import backend
from ca_jax.models import latent_attention, rope
from ca_jax.models.config import RopeConfig
from ca_jax.models.kv import LayerKV
from ca_jax.models.latent_attention import Expansion, attend_pages, attention_received
from ca_jax.models.paged_attention import Rows
from tests.models.test_attention import textbook, weights_of
from tests.tolerances import ATTENTION_ATOL

ATOL = 2 * ATTENTION_ATOL["float32"]
HEADS, LATENT, TURNED, NOPE, VALUE, PAGE = 3, 20, 8, 12, 10, 8
LEAST = 37
"""New tokens of a row from which on these sizes are expanded: 1.5 times 20 (12 + 10) / (2 20 - 12 - 10) is 36.7."""
RAGGED = [(8, 4), (5, 1), (0, LEAST), (12, 0), (23, LEAST - 1), (0, 1), (30, 39), (1, 150)]
"""Of each row what was before its new tokens, and how many these are."""
GAPS = [(60, [3, 4, 9, 40, *range(60, 90)]), (40, [0, 39])]


class Case:
    """Rows of latents in pages in any order, NaN where nothing is."""

    def __init__(self, rows, padding=3, latent=LATENT, seed=0):
        rng = np.random.default_rng(seed)
        self.places = [np.arange(n, n + new) if isinstance(new, int) else np.array(new) for n, new in rows]
        ends = [max([before, *(places + 1)]) for (before, _), places in zip(rows, self.places, strict=True)]
        most, total = max(-(-end // PAGE) for end in ends) + 1, sum(map(len, self.places)) + padding
        self.q, self.new, of_keys, of_values = (
            rng.standard_normal(shape).astype(np.float32)
            for shape in (
                (total, HEADS, TURNED + NOPE),
                (1, total, 1, TURNED + latent),
                (latent, HEADS, NOPE),
                (latent, HEADS, VALUE),
            )
        )
        self.expansion = Expansion(*(jnp.array(part * latent**-0.5) for part in (of_keys, of_values)))
        numbers = rng.permutation(len(rows) * most)
        table, self.history = numbers.reshape(len(rows), most).astype(np.int32), []
        pages = np.full((len(numbers), 1, 1, PAGE, TURNED + latent), np.nan, np.float32)
        for row, (before, _) in enumerate(rows):
            self.history.append(rng.standard_normal((before, TURNED + latent)).astype(np.float32))
            for place, kept in enumerate(self.history[-1]):
                pages[table[row, place // PAGE], 0, 0, place % PAGE] = kept
        self.starts = np.cumsum([0, *map(len, self.places)])
        places = np.concatenate([*self.places, np.zeros(padding)])
        self.pages, self.table = jnp.array(pages), table
        self.rows = Rows(*(jnp.array(part, jnp.int32) for part in (table, self.starts, places)))
        config = RopeConfig(theta=100.0, rotary_dim=TURNED)
        self.rotation = rope.rotation_at(config, TURNED + latent, jnp.arange(most * PAGE))

    def run(self, form=None, **options):
        """What comes out, and the pages."""

        def run(q, new, pages):
            given = (q, LayerKV(new, None), pages, self.rows, self.rotation, None, form)
            return attend_pages(*given, expansion=self.expansion, **options)

        return jax.jit(run)(self.q, self.new, self.pages)

    def turned(self, x, places):
        return np.asarray(rope.rotate(x, rope.Rotation(*(part[places] for part in self.rotation))))

    def in_rows(self):
        """Of each row its new tokens, all latents, each head's rotated queries and keys, values, and what is seen."""
        of_keys, of_values = (np.asarray(part, np.float64) for part in self.expansion)
        for row, (own, history) in enumerate(zip(self.places, self.history, strict=True)):
            span = slice(*self.starts[row : row + 2])
            places = np.arange(max([len(history), *(own + 1)]))
            kept = np.zeros((len(places), history.shape[-1]), np.float32)
            kept[: len(history)], kept[own] = history, self.new[0, span, 0]
            first = np.repeat(kept[:, None, :TURNED], HEADS, axis=1)
            made, values = (np.einsum("sc,cnd->snd", kept[:, TURNED:], part) for part in (of_keys, of_values))
            keys = self.turned(np.concatenate([first, made.astype(np.float32)], axis=-1), places)
            yield span, kept, self.turned(self.q[span], own), keys, values, places <= own[:, None]

    def expect(self, out, pages):
        """What tokens attend to is the textbook's over expanded keys and values; what is stored are latents."""
        assert out.shape == (len(self.q), HEADS, VALUE)
        assert np.isfinite(out).all()
        for row, (span, kept, q, keys, values, seen) in enumerate(self.in_rows()):
            np.testing.assert_allclose(out[span], textbook(q, keys, values, seen), atol=ATOL, rtol=0)
            held = np.asarray(pages)[self.table[row], 0, 0].reshape(-1, kept.shape[-1])
            np.testing.assert_array_equal(held[: len(kept)], kept)


@pytest.fixture
def small_blocks(monkeypatch):
    """Rows have several blocks of queries and of keys."""
    monkeypatch.setattr(latent_attention, "QUERY_BLOCK", 16)
    monkeypatch.setattr(latent_attention, "KEY_BLOCK", 4 * PAGE)


@pytest.mark.parametrize("form", ["absorbed", "expanded", None])
@pytest.mark.parametrize("rows", [RAGGED, GAPS], ids=["ragged", "gaps"])
@pytest.mark.usefixtures("small_blocks")
def test_either_form_and_the_choice_of_each_row_give_what_the_textbook_does(form, rows):
    case = Case(rows)
    case.expect(*case.run(form, has_gaps=rows is GAPS))


@pytest.mark.parametrize("form", ["expanded", None])
def test_blocks_as_large_as_they_are_give_what_the_textbook_does(form):
    case = Case([(700, 140), (520, 3)])
    case.expect(*case.run(form))


@pytest.mark.usefixtures("small_blocks")
def test_latents_that_are_in_the_pages_are_read_there():
    case = Case(RAGGED)
    _, pages = case.run("absorbed")
    given = (jnp.array(case.q), None, pages, case.rows, case.rotation)
    case.expect(*attend_pages(*given, expansion=case.expansion))


@pytest.mark.usefixtures("small_blocks")
def test_what_places_receive_is_what_the_textbook_weighs_them_with():
    case = Case(RAGGED)
    _, pages = case.run()
    found = attention_received(jnp.array(case.q), pages, case.rows, case.rotation, expansion=case.expansion)
    for row, (_, kept, q, keys, _, seen) in enumerate(case.in_rows()):
        expected = weights_of(q, keys, seen).sum((0, 1))
        np.testing.assert_allclose(found[row, : len(kept)], expected, atol=1e-4, rtol=0)
        assert not found[row, len(kept) :].any()


def test_expanded_is_chosen_from_half_more_tokens_than_where_it_is_fewer_products():
    def least(latent, nope, value):
        return Expansion(jnp.zeros((latent, 1, nope)), jnp.zeros((latent, 1, value))).least_tokens

    assert least(512, 128, 128) == 257, "DeepSeek-V3: 1.5 times 512 (128 + 128) / (2 512 - 128 - 128) is 256"
    assert least(LATENT, NOPE, VALUE) == LEAST
    assert least(64, 64, 64) is None, "keys and values are as wide as latents twice"
    assert least(64, 96, 64) is None


FORMS = ("_expanded", "_others")


@pytest.mark.parametrize(
    ("rows", "padding", "options", "expected"),
    [
        ([(40, LEAST)], 0, {}, FORMS),
        ([(40, LEAST - 1)], 0, {}, ()),
        ([(40, LEAST)], 0, {"form": "absorbed"}, ()),
        ([(40, 1)], 0, {"form": "expanded"}, ("_expanded",)),
        ([(40, 1)] * LEAST, 0, {"one_each": True}, ()),
    ],
)
def test_a_pass_of_too_few_tokens_for_one_row_to_be_expanded_is_absorbed(monkeypatch, rows, padding, options, expected):
    used = []
    for name in FORMS:
        whole = getattr(latent_attention, name)
        monkeypatch.setattr(latent_attention, name, lambda *args, n=name, f=whole: used.append(n) or f(*args))
    case = Case(rows, padding)
    case.expect(*case.run(**options))
    assert tuple(used) == expected


@pytest.mark.usefixtures("small_blocks")
def test_in_a_pass_each_row_has_the_form_that_is_cheaper_for_it(monkeypatch):
    """What one form gives is thrown away, so that rows say which it was."""
    case = Case(RAGGED)
    for name, are_gone in (("_expanded", lambda count: count >= LEAST), ("_others", lambda count: 0 < count < LEAST)):
        with monkeypatch.context() as patch:
            whole = getattr(latent_attention, name)
            patch.setattr(latent_attention, name, lambda *args, f=whole: 0 * f(*args))
            out, _ = case.run()
        gone = [not np.asarray(out[span]).any() for span, *_ in case.in_rows() if span.start < span.stop]
        assert gone == [are_gone(len(places)) for places in case.places if len(places)]


def test_where_a_kernel_reads_latents_all_are_absorbed(monkeypatch):
    monkeypatch.setattr(latent_attention.paged, "paged_attention", lambda pages: "mosaic")
    case = Case([(0, 60)])
    given = (case.q, LayerKV(case.new, None), case.pages, case.rows, case.rotation)
    taken = []
    monkeypatch.setattr(latent_attention.paged, "attend_pages", lambda q, *_, **__: (taken.append(q.shape), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        attend_pages(*given, expansion=case.expansion)
    assert taken == [(63, HEADS, TURNED + LATENT)]


def test_half_floats_are_near(monkeypatch):
    case = Case([(70, 60), (9, 3)])
    expected, _ = case.run("absorbed")
    case.q, case.new, case.pages = (jnp.asarray(each, jnp.bfloat16) for each in (case.q, case.new, case.pages))
    case.expansion = Expansion(*(part.astype(jnp.bfloat16) for part in case.expansion))
    with backend.assumed(backend.GPU):
        found, pages = case.run()
    assert (found.dtype, pages.dtype) == (jnp.bfloat16, jnp.bfloat16)
    atol = ATTENTION_ATOL["bfloat16"]
    np.testing.assert_allclose(np.float32(found)[:63], np.asarray(expected)[:63], atol=atol, rtol=0)


@pytest.mark.parametrize("num_new", [LEAST - 1, LEAST, 40])
def test_without_pages_prompts_are_expanded_and_what_has_a_history_is_not(monkeypatch, num_new):
    case = Case([(0, num_new)], padding=0)
    widths, whole = [], latent_attention.attention.attend
    monkeypatch.setattr(
        latent_attention.attention, "attend", lambda q, *args: widths.append(q.shape[-1]) or whole(q, *args)
    )
    at = rope.Rotation(*(part[None, :num_new] for part in case.rotation))
    new, lengths = LayerKV(case.new, None), jnp.zeros(1, jnp.int32)
    out = latent_attention.attend(case.q[None], new, None, lengths, at, None, expansion=case.expansion)
    [(_, _, q, keys, values, seen)] = case.in_rows()
    np.testing.assert_allclose(out[0], textbook(q, keys, values, seen), atol=ATOL, rtol=0)
    history = jnp.full((1, 1, 16, 1, TURNED + LATENT), jnp.nan)
    of_places = rope.Rotation(*(part[:16] for part in case.rotation))
    again = latent_attention.attend(case.q[None], new, history, lengths, at, of_places, expansion=case.expansion)
    np.testing.assert_allclose(again, out, atol=ATOL, rtol=0)
    assert widths == [TURNED + (NOPE if num_new >= LEAST else LATENT), TURNED + LATENT]
