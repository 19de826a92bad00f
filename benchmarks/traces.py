"""Spans side by side, as traces that open in Perfetto and figures show them.

Not here: recording spans (`ca_jax.telemetry.timeline`), drawing them (`figures`).
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ca_jax.telemetry.timeline import TRACKS, ArgValue, Span, Track


class Place(NamedTuple):
    """Where a span is drawn within its track: spans of a lane, from 0, are nested (so deep) or apart."""

    span: Span
    lane: int
    depth: int


def write_trace(path: Path, spans: Iterable[Span]) -> None:
    """Writes spans as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open; makes its directory.

    Each track is a thread of its own, or one for each lane where spans of a track overlap. Time 0 is the start of the
    first span.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"traceEvents": trace_events(spans), "displayTimeUnit": "ms"}
    path.write_text(json.dumps(content, default=str) + "\n", encoding="utf-8")


def place_spans(spans: Iterable[Span]) -> list[Place]:
    """Places spans, by start, so that within a track and a lane any two are nested or apart, in as few lanes as may be.

    Only what one thread did within what it did is nested. Copies that are under way at once lie side by side, even if
    one began and ended during another.
    """
    lanes: dict[Track, list[list[Span]]] = {}  # Per lane, the spans that enclose the present one.
    places = []
    for span in sorted(spans, key=_order):
        of_track = lanes.setdefault(span.track, [])
        for enclosing in of_track:
            while enclosing and _ns(enclosing[-1].end_s) <= _ns(span.start_s):
                enclosing.pop()
        fitting = (i for i, enclosing in enumerate(of_track) if enclosing and _encloses(enclosing[-1], span))
        free = (i for i, enclosing in enumerate(of_track) if not enclosing)
        lane = next(itertools.chain(fitting, free), len(of_track))
        if lane == len(of_track):
            of_track.append([])
        places.append(Place(span, lane, len(of_track[lane])))
        of_track[lane].append(span)
    return places


def trace_events(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Spans as Chrome trace events: names of the process and of each track, then complete events ("X") in microseconds.

    Source: "Trace Event Format", the JSON that Chrome's tracing and Perfetto read.
    """
    places = place_spans(spans)
    pid = os.getpid()
    origin_ns = _ns(places[0].span.start_s) if places else 0
    events: list[dict[str, Any]] = [_metadata(pid, 0, "process_name", name="ca_jax")]
    used = {(TRACKS.index(place.span.track), place.lane) for place in places}
    thread_ids = {(TRACKS[track], lane): i for i, (track, lane) in enumerate(sorted(used), start=1)}
    for (track, lane), thread_id in thread_ids.items():
        events.append(_metadata(pid, thread_id, "thread_name", name=f"{track} {lane + 1}" if lane else track))
        events.append(_metadata(pid, thread_id, "thread_sort_index", sort_index=thread_id))
    for span, lane, _ in places:
        start_ns, end_ns = _ns(span.start_s), _ns(span.end_s)
        shown = {"ph": "X", "name": span.name, "cat": span.track, "pid": pid, "tid": thread_ids[span.track, lane]}
        times = {"ts": (start_ns - origin_ns) / 1000, "dur": (end_ns - start_ns) / 1000}
        events.append({**shown, **times, "args": dict(span.args)})
    return events


def _metadata(pid: int, thread_id: int, kind: str, **args: ArgValue) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": thread_id, "args": args}


def _ns(at_s: float) -> int:
    """What times are compared in: the sum of a start and a duration may miss the next start by less."""
    return round(at_s * 1e9)


def _order(span: Span) -> tuple[int, int]:
    return _ns(span.start_s), -_ns(span.end_s)


def _encloses(outer: Span, inner: Span) -> bool:
    return outer.thread_id is not None and outer.thread_id == inner.thread_id and _ns(inner.end_s) <= _ns(outer.end_s)
