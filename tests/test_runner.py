"""Prompts in passes and jobs that decode: the same logits and KV as alone in one, whatever is packed into a step.

Not here: which passes an engine takes (test_scheduler, test_packing), what it compiles (test_invariants).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.evaluate.by_layer import LayerByLayer
from ca_jax.device.pages import PoolSize
from ca_jax.device.passes import PassPart, Prefill, RunnerSizes
from ca_jax.device.runner import Runner
from ca_jax.device.sampler import Draw, Sampler
from ca_jax.session import Job
from ca_jax.turns.requests import SamplingParams
from ca_jax.turns.text import TextOutput
from tests import engine_kit as kit

ATOL = kit.ATOL
CHUNK = kit.SMALL.max_num_batched_tokens
HISTORIES = (0, 1, 40, 256, 300)
ROWS = st.lists(st.tuples(st.sampled_from(HISTORIES), st.sampled_from((1, 16, 65, 180))), min_size=1, max_size=3)
PASS_SIZES = st.lists(st.sampled_from((1, 16, 32, CHUNK)), min_size=1, max_size=8)

with_buckets_of_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere buckets are coarser")


class RecordingSampler(Sampler):
    """Notes what tokens are drawn from: by slot, how many tokens are before the drawn one, and logits."""

    def start(self, logits: jax.Array, positions: np.ndarray, slots: Sequence[int | None], *known: jax.Array) -> Draw:
        rows = zip(slots, np.asarray(positions).tolist(), np.asarray(logits), strict=True)
        self.last = {slot: (place, row) for slot, place, row in rows if slot is not None}
        return super().start(logits, positions, slots, *known)


@pytest.fixture(scope="module", params=[False, True], ids=["", "with attention"])
def runner(request) -> Runner:
    """One whose pages were full of NaN."""
    model = kit.tiny_model()
    pool = PoolSize.for_window(kit.WINDOW, num_rows=8, num_parts=1, page_tokens=16)
    sizes = RunnerSizes(pool=pool, chunk_tokens=CHUNK, with_attention=request.param)
    runner = Runner(model.config, model.params, sizes)
    runner.sampler = RecordingSampler(8, model.config.vocab_size)
    runner.pool.buffers = [jnp.full_like(pages, np.nan) for pages in runner.pool.buffers]
    return runner


class HeldHistory:
    """A history on the device, NaN behind its tokens, that notes who has read it."""

    def __init__(self, runner: Runner, kv: np.ndarray) -> None:
        self.kv, num_tokens = kv, kv.shape[2]
        padded = np.full((*kv.shape[:2], runner.padded_history(num_tokens), *kv.shape[3:]), np.nan, np.float32)
        padded[:, :, :num_tokens] = kv
        self.layers = [jax.device_put(layer) for layer in padded]
        self.read: list[int] = []

    def layer(self, layer: int) -> jax.Array:
        return self.layers[layer]

    def computed(self, layer: int, result: jax.Array) -> None:
        jax.block_until_ready(result)
        self.read.append(layer)

    def expect_read(self) -> None:
        """Each layer was, once, and nothing was written to it."""
        assert self.read == list(range(len(self.layers)))
        for layer, kv in zip(self.layers, self.kv, strict=True):
            np.testing.assert_array_equal(np.asarray(layer)[:, : kv.shape[1]], kv)
            assert np.isnan(np.asarray(layer)[:, kv.shape[1] :]).all()


class Row:
    """A job in a row of the pool, and what was computed of it so far."""

    def __init__(self, runner: Runner, slot: int, num_history: int, num_new: int) -> None:
        self.job = Job(kit.prompt(num_history + num_new, slot), SamplingParams(), TextOutput(None), frozenset())
        self.job.slot = slot
        kv = kit.full_pass(self.job.prompt_ids)[1]
        self.history = HeldHistory(runner, kv[:, :, :num_history]) if num_history else None
        self.runner = runner
        self.received = np.zeros(kit.WINDOW)
        runner.pool.end(slot)
        runner.pool.begin(slot, kit.WINDOW)
        self.begin(num_history)

    def begin(self, num_history: int) -> None:
        """Its prompt is to be computed behind that."""
        self.prefill = Prefill(self.job.slot, self.job.prompt_ids[num_history:], num_history)
        self.kv: list[np.ndarray] = []  # [L, 2, t, K, H] each.
        self.logits: dict[int, np.ndarray] = {}

    def part(self, num_tokens: int) -> PassPart:
        layers: list[np.ndarray] = []
        is_last, place = num_tokens == self.prefill.num_left, len(self.job.prompt_ids)
        history = None if self.prefill.num_done else self.history

        def take(layer: int, kv: jax.Array, first: int) -> None:
            assert layer == len(layers)
            layers.append(np.asarray(kv)[:, first : first + num_tokens])
            if layer == kit.NUM_LAYERS - 1:
                self.kv.append(np.stack(layers))

        return PassPart(self.prefill, num_tokens, history, take, place if is_last else None)

    def take(self, draw: Draw, row: int) -> None:
        """A token was drawn behind it."""
        place, logits = self.runner.sampler.last[self.job.slot]
        assert place == self.job.num_tokens
        self.logits[place] = logits
        self.job.add(int(draw.tokens[row]))

    def expect(self) -> None:
        """All of it is what a full pass gives."""
        assert [*self.logits] == [*range(len(self.job.prompt_ids), self.job.num_tokens)]
        logits, kv = kit.full_pass(self.job.token_ids[:-1])
        for place, found in self.logits.items():
            np.testing.assert_allclose(found, logits[place - 1], atol=ATOL, rtol=0)
        new_kv = np.concatenate(self.kv, axis=2)
        np.testing.assert_allclose(new_kv, kv[:, :, self.prefill.history_length :], atol=ATOL, rtol=0)
        if self.history is not None and self.prefill.history_length:
            self.history.expect_read()
        if self.runner.with_attention:
            for each in self.prefill.received:
                each.add_to(self.received)
            expected = received_of_all(self.job.token_ids[:-1])
            expected -= received_of_all(self.job.token_ids[: self.prefill.history_length])
            np.testing.assert_allclose(self.received, expected, atol=ATOL, rtol=0)


def received_of_all(token_ids: list[int]) -> np.ndarray:
    """The attention that places receive where all of these tokens are new."""
    by_layer, total = LayerByLayer(kit.tiny_model(), kit.WINDOW, kit.WINDOW), np.zeros(kit.WINDOW)
    x = by_layer.embedded(token_ids, kit.WINDOW)
    for layer in range(kit.NUM_LAYERS):
        empty = by_layer.empty(kit.WINDOW)
        x, _, _, received = by_layer.layer(layer, x, empty, 0, len(token_ids), with_attention=True)
        total += np.asarray(received)[0]
    return total


def run_pass(runner: Runner, rows: Sequence[Row], sizes: Iterator[int]) -> list[PassPart]:
    """A pass of prompts, as many tokens of each as comes next and there is room for, and of jobs that decode."""
    decoding = [row for row in rows if not row.prefill.num_left]
    parts, room = [], CHUNK - len(decoding)
    for row in rows:
        if row.prefill.num_left and room:
            parts.append(row.part(min(next(sizes), row.prefill.num_left, room)))
            room -= parts[-1].num_tokens
    passed = runner.run_pass(parts, [row.job for row in decoding])
    assert (passed.draw is None) == (not passed.rows)
    drawn = None if passed.draw is None else passed.draw.wait()
    for row in rows:
        slot = row.job.slot
        if row in decoding:
            row.kv.append(np.asarray(passed.kv[0])[:, :, passed.kv_rows[slot]][:, :, None])
            if runner.with_attention:
                passed.received[slot].add_to(row.received)
        if slot in passed.rows:
            row.take(drawn, passed.rows[slot])
    return parts


def decode(runner: Runner, rows: Sequence[Row]) -> None:
    """A token for each."""
    decoded = runner.decode([row.job for row in rows], run_ahead=False)
    for row in rows:
        index = decoded.rows[row.job.slot]
        row.kv.append(np.asarray(decoded.kv[0])[:, :, index][:, :, None])
        if runner.with_attention:
            row.received += decoded.received[index, : kit.WINDOW]
        row.take(decoded.draw, index)


@hypothesis.given(ROWS, PASS_SIZES)
@hypothesis.settings(max_examples=8, deadline=None)
def test_whatever_is_packed_into_a_pass_computes_what_each_does_alone_in_one(runner, lengths, sizes):
    slots = (5, 0, 3)
    rows = [Row(runner, *args) for args in zip(slots, *zip(*lengths, strict=True), strict=False)]
    next_size = itertools.cycle(sizes)
    while any(row.prefill.num_left for row in rows):
        run_pass(runner, rows, next_size)
    decode(runner, rows)
    decode(runner, rows[::-1])
    for row in rows:
        row.expect()


@with_buckets_of_a_cpu
@pytest.mark.parametrize(
    ("num_history", "num_new", "padded"),
    [(0, 1, (0, 16)), (1, 64, (1, 64)), (256, 65, (256, 80)), (257, 200, (257, 64 * 3 + 16))],
)
def test_padding_is_of_whole_passes_and_the_rest(runner, num_history, num_new, padded):
    assert runner.padded(num_history, num_new) == padded
