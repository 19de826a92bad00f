"""What is recorded of layers that a test computes when it likes."""

from __future__ import annotations

import itertools
import threading
import time

import jax.numpy as jnp
import pytest

from ca_jax.device.runtime import ComputeWatch
from ca_jax.telemetry.timeline import NO_TIMELINE, Timeline

PATIENCE_S = 60


class Output:
    """A layer's output that is there when a test says so."""

    def __init__(self, is_there: bool = False) -> None:
        self._there = threading.Event()
        self.is_waited_for = threading.Event()
        if is_there:
            self._there.set()

    def arrive(self) -> None:
        self._there.set()

    def block_until_ready(self) -> Output:
        self.is_waited_for.set()
        assert self._there.wait(PATIENCE_S)
        return self


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


def test_each_layer_has_a_span_in_order_and_none_overlap(timeline):
    watch = ComputeWatch(timeline)
    since_s = time.perf_counter()
    for layer in range(3):
        watch.layer(jnp.ones(3) * layer, since_s, layer=layer, job=4)
    watch.layer(Output(is_there=True), since_s, layer=0, job=5)
    watch.close()
    spans = timeline.spans()
    expected = [(0, 4), (1, 4), (2, 4), (0, 5)]
    assert [(span.track, span.name, dict(span.args)) for span in spans] == [
        ("compute", f"layer {layer}", {"layer": layer, "job": job}) for layer, job in expected
    ]
    assert spans[0].start_s == since_s
    for before, after in itertools.pairwise(spans):
        assert before.end_s == after.start_s, "what was dispatched early is computed behind what was before it"


def test_a_layer_begins_no_sooner_than_it_was_dispatched_and_no_later_than_it_ends(timeline):
    watch = ComputeWatch(timeline)
    watch.layer(Output(is_there=True), 0.0, layer=0)
    watch.layer(Output(is_there=True), 1e12, layer=1)
    watch.close()
    first, second = timeline.spans()
    assert (first.start_s, first.args["layer"]) == (0.0, 0)
    assert first.end_s <= second.start_s == second.end_s < 1e12


def test_a_layer_is_recorded_when_it_is_computed_and_its_caller_does_not_wait(timeline):
    watch = ComputeWatch(timeline)
    outputs = [Output(), Output()]
    for layer, output in enumerate(outputs):
        watch.layer(output, 0.0, layer=layer)
    assert outputs[0].is_waited_for.wait(PATIENCE_S)
    assert timeline.spans() == []
    outputs[0].arrive()
    assert outputs[1].is_waited_for.wait(PATIENCE_S)
    assert [span.name for span in timeline.spans()] == ["layer 0"]
    outputs[1].arrive()
    watch.close()
    assert [span.name for span in timeline.spans()] == ["layer 0", "layer 1"]


def test_closing_records_what_is_left_and_may_be_repeated(timeline):
    watch = ComputeWatch(timeline)
    slow = Output()
    watch.layer(slow, 0.0, layer=0, job=1)
    watch.layer(Output(is_there=True), 0.0, layer=0, job=2)
    closing = threading.Thread(target=watch.close, daemon=True)
    closing.start()
    assert slow.is_waited_for.wait(PATIENCE_S)
    assert closing.is_alive()
    slow.arrive()
    closing.join(PATIENCE_S)
    assert [span.args["job"] for span in timeline.spans()] == [1, 2]
    watch.close()
    watch.layer(Output(), 0.0, layer=0, job=3)
    watch.close()
    assert len(timeline.spans()) == 2, "what comes after the end is not recorded, and nobody waits for it"


@pytest.mark.parametrize("timeline", [NO_TIMELINE, Timeline(max_spans=0)])
def test_where_nothing_is_recorded_nothing_is_waited_for_and_there_is_no_thread(timeline):
    num_threads = threading.active_count()
    watch = ComputeWatch(timeline)
    never = Output()
    watch.layer(never, 0.0, layer=0)
    assert threading.active_count() == num_threads
    watch.close()
    assert not never.is_waited_for.is_set()
