"""Spans as they are recorded, bounded, placed and written; that a null timeline does nothing; the profiler's events."""

import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from ca_jax.telemetry.timeline import NO_TIMELINE, TRACKS, Place, Span, Timeline, place_spans, trace_events


def counting() -> Timeline:
    """A timeline whose clock goes on by a second whenever it is read."""
    return Timeline(clock=map(float, itertools.count()).__next__)


def brief(spans: list[Span]) -> list[tuple]:
    return [(span.track, span.name, span.start_s, span.end_s) for span in spans]


def complete(events: list[dict]) -> list[dict]:
    return [event for event in events if event["ph"] == "X"]


def placed(places: list[Place]) -> dict[str, tuple[int, int]]:
    return {place.span.name: (place.lane, place.depth) for place in places}


def test_blocks_and_what_is_over_are_spans_by_start():
    timeline = counting()
    with timeline.span("engine", "step", batch=2), timeline.span("compute", "prefill"):
        timeline.add("load", "layer", 1.25, 1.5, layer=0)
    spans = timeline.spans()
    assert brief(spans) == [("engine", "step", 0, 3), ("compute", "prefill", 1, 2), ("load", "layer", 1.25, 1.5)]
    assert [dict(span.args) for span in spans] == [{"batch": 2}, {}, {"layer": 0}]
    assert [span.thread_id for span in spans] == [threading.get_ident()] * 2 + [None]


def test_a_block_that_raises_is_a_span_and_raises():
    timeline = counting()
    for context in (timeline.span("load", "torn"), timeline.annotate("compute", "torn")):
        with pytest.raises(OSError, match="torn off"), context:
            raise OSError("torn off")
    assert brief(timeline.spans()) == [("load", "torn", 0, 1), ("compute", "torn", 2, 3)]


def test_the_oldest_spans_make_room():
    timeline = Timeline(max_spans=3)
    for i in range(5):
        timeline.add("save", str(i), i, i + 1)
    assert [span.name for span in timeline.spans()] == ["2", "3", "4"]
    assert timeline.num_forgotten == 2
    timeline.clear()
    assert (timeline.spans(), timeline.num_forgotten) == ([], 0)


def test_threads_record_at_once_and_nothing_is_lost():
    timeline = Timeline(max_spans=1000)
    start = threading.Barrier(4)

    def record(thread: int) -> None:
        start.wait()
        for i in range(400):
            with timeline.span("save", f"{thread}.{i}"):
                timeline.add("load", f"{thread}.{i}", 0, 1)

    threads = [threading.Thread(target=record, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.spans()) == 1000
    assert timeline.num_forgotten == 4 * 400 * 2 - 1000


def test_nothing_is_recorded_when_off(tmp_path):
    with NO_TIMELINE.span("engine", "step", batch=1), NO_TIMELINE.annotate("compute", "prefill", layer=1):
        NO_TIMELINE.add("load", "layer", 0, 1)
    assert not NO_TIMELINE.enabled
    assert (NO_TIMELINE.spans(), NO_TIMELINE.num_forgotten) == ([], 0)
    assert NO_TIMELINE.span("engine", "a") is NO_TIMELINE.span("save", "b"), "an object for each span would cost"
    NO_TIMELINE.write(tmp_path / "trace.json")
    assert complete(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == []


@pytest.mark.parametrize("record", [Timeline.span, Timeline.annotate, lambda *args: Timeline.add(*args, 0, 1)])
def test_an_unknown_track_is_refused(record):
    with pytest.raises(ValueError, match=r"track must be one of engine, fetch, .*, got 'loads'"):
        record(Timeline(), "loads", "x")


@pytest.mark.parametrize("end_s", [0.5, float("nan")])
def test_an_end_before_the_start_is_refused(end_s):
    with pytest.raises(ValueError, match=f"span 'x' must have start_s <= end_s, got 1.0 and {end_s}"):
        Timeline().add("load", "x", 1.0, end_s)


def test_a_negative_bound_is_refused():
    with pytest.raises(ValueError, match="max_spans must not be negative, got -1"):
        Timeline(max_spans=-1)


def test_a_written_trace_has_what_perfetto_wants(tmp_path):
    timeline = Timeline(max_spans=3)
    timeline.add("save", "forgotten", 90.0, 91.0)
    timeline.add("compute", "prefill", 100.0, 100.25, layer=np.int64(3))
    timeline.add("load", "layer", 100.0005, 100.001, source="dram")
    timeline.add("load", "layer", 100.001, 100.0011)
    timeline.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    assert trace["otherData"] == {"num_forgotten": 1}
    pid = os.getpid()
    load, compute = 1, 2
    assert trace["traceEvents"] == [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "ca_jax"}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": load, "args": {"name": "load"}},
        {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": load, "args": {"sort_index": load}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": compute, "args": {"name": "compute"}},
        {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": compute, "args": {"sort_index": compute}},
        {
            "ph": "X",
            "name": "prefill",
            "cat": "compute",
            "ts": 0.0,
            "dur": 250000.0,
            "pid": pid,
            "tid": compute,
            "args": {"layer": "3"},
        },
        {
            "ph": "X",
            "name": "layer",
            "cat": "load",
            "ts": 500.0,
            "dur": 500.0,
            "pid": pid,
            "tid": load,
            "args": {"source": "dram"},
        },
        {"ph": "X", "name": "layer", "cat": "load", "ts": 1000.0, "dur": 100.0, "pid": pid, "tid": load, "args": {}},
    ]


def test_tracks_are_in_one_order_and_overlapping_spans_on_threads_of_their_own():
    spans = [Span(track, "a", 0.0, 2.0) for track in reversed(TRACKS)]
    spans += [Span("load", "b", 1.0, 3.0), Span("load", "c", 2.0, 4.0)]
    events = trace_events(spans)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(names)] == ["engine", "fetch", "load", "load 2", "compute", "save", "flush"]
    loads = {event["name"]: names[event["tid"]] for event in complete(events) if event["cat"] == "load"}
    assert loads == {"a": "load", "b": "load 2", "c": "load"}


def test_what_a_thread_did_within_something_is_nested():
    spans = [
        Span("compute", "turn", 0, 10, {}, 1),
        Span("compute", "layer 0", 0, 4, {}, 1),
        Span("compute", "kernel", 1, 2, {}, 1),
        Span("compute", "layer 1", 4, 10, {}, 1),
        Span("compute", "next", 10, 11, {}, 1),
    ]
    assert placed(place_spans(reversed(spans))) == {
        "turn": (0, 0),
        "layer 0": (0, 1),
        "kernel": (0, 2),
        "layer 1": (0, 1),
        "next": (0, 0),
    }


def test_spans_that_miss_each_other_by_rounding_are_still_nested_or_apart():
    assert 0.1 + 0.2 > 0.3
    spans = [
        Span("compute", "pass", 0, 0.3, {}, 1),
        Span("compute", "layer 0", 0, 0.1 + 0.2, {}, 1),
        Span("compute", "next", 0.3, 1, {}, 2),
    ]
    assert placed(place_spans(spans)) == {"pass": (0, 0), "layer 0": (0, 1), "next": (0, 0)}
    first, _, last = complete(trace_events(spans))
    assert first["ts"] + first["dur"] <= last["ts"]


def test_what_is_under_way_at_once_lies_side_by_side():
    spans = [
        Span("load", "copy", 0, 10),
        Span("load", "shorter copy", 1, 2),
        Span("load", "of a thread", 1, 4, {}, 1),
        Span("load", "of another", 2, 3, {}, 2),
        Span("load", "within", 3, 4, {}, 1),
        Span("save", "elsewhere", 1, 2),
    ]
    assert placed(place_spans(spans)) == {
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
        with timeline.span("compute", "of_the_timeline_alone"):
            pass
    (profile,) = Path(tmp_path).rglob("*.xplane.pb")
    content = profile.read_bytes()
    assert b"seen_while_on" in content
    assert b"seen_while_off" in content
    assert b"of_the_timeline_alone" not in content
    assert [span.name for span in timeline.spans()] == ["seen_while_on", "of_the_timeline_alone"]
    assert dict(timeline.spans()[0].args) == {"layer": 3}


def test_recording_loads_no_jax():
    program = (
        "import sys, importlib.util\n"
        "spec = importlib.util.spec_from_file_location('timeline', sys.argv[1])\n"
        "sys.modules['timeline'] = timeline = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(timeline)\n"
        "with timeline.Timeline().span('flush', 'x'): pass\n"
        "sys.exit('jax' in sys.modules)\n"
    )
    module = sys.modules[Timeline.__module__].__file__
    assert subprocess.run([sys.executable, "-c", program, module], timeout=120).returncode == 0
