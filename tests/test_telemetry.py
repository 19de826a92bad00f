"""Spans as they are recorded and written, events that threads wait for, and when layers were computed."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.traces import place_spans, write_trace
from ca_jax.device.runtime import ComputeWatch
from ca_jax.telemetry.timeline import NO_TIMELINE, Span, Timeline
from ca_jax.telemetry.wakeup import Wakeup

PATIENCE_S = 60.0


def counting() -> Timeline:
    """A timeline whose clock goes on by a second whenever it is read."""
    return Timeline(clock=map(float, itertools.count()).__next__)


def brief(spans: list[Span]) -> list[tuple]:
    return [(span.track, span.name, span.start_s, span.end_s) for span in spans]


def run_at_once(*actions: Callable[[], object]) -> None:
    """Each on a thread of its own, to the end."""
    with concurrent.futures.ThreadPoolExecutor(len(actions)) as pool:
        for future in [pool.submit(action) for action in actions]:
            future.result(PATIENCE_S)


def test_blocks_and_what_is_over_are_spans_by_start():
    timeline = counting()
    with timeline.annotate("engine", "step", batch=2), timeline.annotate("compute", "prefill"):
        timeline.add("load", "layer", 1.25, 1.5, layer=0)
    spans = timeline.spans()
    assert brief(spans) == [("engine", "step", 0, 3), ("compute", "prefill", 1, 2), ("load", "layer", 1.25, 1.5)]
    assert [dict(span.args) for span in spans] == [{"batch": 2}, {}, {"layer": 0}]
    assert [span.thread_id for span in spans] == [threading.get_ident()] * 2 + [None]
    timeline = counting()
    with pytest.raises(OSError, match="torn off"), timeline.annotate("load", "torn"):
        raise OSError("torn off")
    assert brief(timeline.spans()) == [("load", "torn", 0, 1)]


def test_threads_record_at_once_and_nothing_is_lost():
    timeline = Timeline(max_spans=1000)
    start = threading.Barrier(4)

    def record(thread: int) -> None:
        start.wait()
        for i in range(400):
            with timeline.annotate("save", f"{thread}.{i}"):
                timeline.add("load", f"{thread}.{i}", 0, 1)

    run_at_once(*(functools.partial(record, i) for i in range(4)))
    assert len(timeline.spans()) == 1000, "the oldest make room"
    timeline.clear()
    assert timeline.spans() == []


def test_nothing_is_recorded_when_off():
    with NO_TIMELINE.annotate("compute", "prefill", layer=1):
        NO_TIMELINE.add("load", "layer", 0, 1)
    assert not NO_TIMELINE.enabled
    assert NO_TIMELINE.spans() == []
    num_threads, watch = threading.active_count(), ComputeWatch(NO_TIMELINE)
    watch.layer(Output(), 0.0, layer=0)
    assert threading.active_count() == num_threads
    watch.close()


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        (Timeline.annotate, "track .*'loads'"),
        (lambda timeline, *args: timeline.add("load", "x", 1.0, 0.5), "1.0 and 0.5"),
        (lambda timeline, *args: timeline.add("load", "x", 1.0, float("nan")), "1.0 and nan"),
        (lambda *args: Timeline(max_spans=-1), "max_spans .*got -1"),
    ],
)
def test_what_cannot_be_recorded_is_refused(record, wrong):
    with pytest.raises(ValueError, match=wrong):
        record(Timeline(), "loads", "x")


def test_a_written_trace_has_what_perfetto_wants(tmp_path):
    timeline = Timeline(max_spans=4)
    timeline.add("save", "forgotten", 90.0, 91.0)
    timeline.add("compute", "prefill", 100.0, 100.25, layer=np.int64(3))
    timeline.add("load", "layer", 100.0005, 100.001, source="dram")
    timeline.add("load", "at once", 100.0006, 100.0011)
    timeline.add("engine", "step", 100.0, 101.0)
    write_trace(tmp_path / "trace.json", timeline.spans())
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    assert {event["pid"] for event in events} == {os.getpid()}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(names)] == ["engine", "load", "load 2", "compute"]
    fields = ("name", "cat", "ts", "dur", "args")
    assert [(names[event["tid"]], *(event[field] for field in fields)) for event in events if event["ph"] == "X"] == [
        ("engine", "step", "engine", 0.0, 1e6, {}),
        ("compute", "prefill", "compute", 0.0, 250000.0, {"layer": "3"}),
        ("load", "layer", "load", 500.0, 500.0, {"source": "dram"}),
        ("load 2", "at once", "load", 600.0, 500.0, {}),
    ]


def test_what_is_under_way_at_once_lies_side_by_side_and_what_is_within_is_nested():
    spans = [
        Span("load", "copy", 0, 10),
        Span("load", "shorter copy", 1, 2),
        Span("load", "of a thread", 1, 4, {}, 1),
        Span("load", "of another", 2, 3, {}, 2),
        Span("load", "within", 3, 4, {}, 1),
        Span("save", "elsewhere", 1, 2),
    ]
    assert {place.span.name: (place.lane, place.depth) for place in place_spans(spans)} == {
        "copy": (0, 0),
        "of a thread": (1, 0),
        "shorter copy": (2, 0),
        "of another": (2, 0),
        "within": (1, 1),
        "elsewhere": (0, 0),
    }


def test_the_profiler_sees_annotations_of_a_timeline_on_or_off(tmp_path):
    timeline = counting()
    with jax.profiler.trace(tmp_path):
        with timeline.annotate("compute", "seen_while_on", layer=3):
            pass
        with NO_TIMELINE.annotate("compute", "seen_while_off"):
            pass
    (profile,) = Path(tmp_path).rglob("*.xplane.pb")
    content = profile.read_bytes()
    assert b"seen_while_on" in content
    assert b"seen_while_off" in content
    assert [(span.name, dict(span.args)) for span in timeline.spans()] == [("seen_while_on", {"layer": 3})]


# Events that threads wait for.


def test_no_event_of_many_threads_is_lost_and_all_who_wait_are_woken():
    wakeup, found = Wakeup(), list[int]()

    def wait() -> None:
        seen = 0
        while seen < 800:  # What happened before a wait is not waited for.
            now = wakeup.wait(seen, PATIENCE_S)
            assert now > seen, "an event was missed"
            seen = now
        found.append(seen)

    run_at_once(*[lambda: [wakeup.tell() for _ in range(200)]] * 4, *[wait] * 3)
    assert (found, wakeup.count) == ([800] * 3, 800)


# When layers were computed.


class Output:
    """A layer's output that is there when a test says so."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self.is_waited_for = threading.Event()

    def block_until_ready(self) -> Output:
        self.is_waited_for.set()
        assert self.is_there.wait(PATIENCE_S)
        return self


def test_layers_have_a_span_each_in_order_when_they_are_computed_and_their_caller_does_not_wait():
    timeline = Timeline()
    watch, since_s, slow = ComputeWatch(timeline), time.perf_counter(), Output()
    for layer in range(3):
        watch.layer(jnp.ones(3) * layer, since_s, layer=layer, job=4)
    watch.layer(slow, since_s, layer=0, job=5)
    watch.layer(jnp.ones(3), since_s, layer=1, job=5)
    assert slow.is_waited_for.wait(PATIENCE_S)
    assert len(timeline.spans()) == 3
    slow.is_there.set()
    watch.close()
    watch.layer(Output(), 0.0, layer=0, job=6)  # What comes after the end is not recorded.
    watch.close()
    spans, expected = timeline.spans(), [(0, 4), (1, 4), (2, 4), (0, 5), (1, 5)]
    assert [(span.track, span.name, dict(span.args)) for span in spans] == [
        ("compute", f"layer {layer}", {"layer": layer, "job": job}) for layer, job in expected
    ]
    assert spans[0].start_s == since_s
    for before, after in itertools.pairwise(spans):
        assert before.end_s == after.start_s, "what was dispatched early is computed behind what was before it"
