"""What is recorded of passes whose layers a test computes when it likes."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import pytest

from ca_jax.compute_watch import ComputeWatch
from ca_jax.timeline import NO_TIMELINE, Timeline

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


def test_each_layer_of_each_pass_has_a_span_in_order_and_none_overlap(timeline):
    watch = ComputeWatch(timeline)
    watch.layers([jnp.ones(3) * layer for layer in range(3)], job=4, start=0)
    watch.layers([Output(is_there=True) for _ in range(2)], job=4, start=64)
    watch.close()
    spans = timeline.spans()
    assert [(span.track, span.name, dict(span.args)) for span in spans] == [
        ("compute", f"layer {layer}", {"layer": layer, "job": 4, "start": start})
        for start, num_layers in ((0, 3), (64, 2))
        for layer in range(num_layers)
    ]
    for before, after in zip(spans, spans[1:], strict=False):
        assert before.start_s <= before.end_s <= after.start_s


def test_a_layer_is_recorded_when_it_is_computed_and_its_caller_does_not_wait(timeline):
    watch = ComputeWatch(timeline)
    outputs = [Output(), Output()]
    watch.layers(outputs, job=1)
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
    watch.layers([slow], job=1)
    watch.layers([Output(is_there=True)], job=2)
    closing = threading.Thread(target=watch.close, daemon=True)
    closing.start()
    assert slow.is_waited_for.wait(PATIENCE_S)
    assert closing.is_alive()
    slow.arrive()
    closing.join(PATIENCE_S)
    assert [span.args["job"] for span in timeline.spans()] == [1, 2]
    watch.close()
    watch.layers([Output()], job=3)
    watch.close()
    assert len(timeline.spans()) == 2, "what comes after the end is not recorded, and nobody waits for it"


@pytest.mark.parametrize("timeline", [NO_TIMELINE, Timeline(max_spans=0)])
def test_where_nothing_is_recorded_nothing_is_waited_for_and_there_is_no_thread(timeline):
    num_threads = threading.active_count()
    watch = ComputeWatch(timeline)
    never = Output()
    watch.layers([never], job=1)
    assert threading.active_count() == num_threads
    watch.close()
    assert not never.is_waited_for.is_set()
