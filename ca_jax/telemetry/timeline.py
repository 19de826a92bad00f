"""What happened when: spans on named tracks, for traces that open in Perfetto and for figures.

A `Timeline` is handed to what is worth seeing; `NO_TIMELINE` is one that records nothing. Times are
seconds of one clock, `time.perf_counter` unless told otherwise.

Loads no jax before `annotate` is called: the store, which has none, records here too.

Not here: what is worth a span (those who do it), figures (`launch.timeline_plot`), totals (`metrics`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

Track = Literal["engine", "fetch", "load", "compute", "save", "flush"]
"""Engine: the host's steps. Fetch: SSD to DRAM. Load, compute, save: DRAM to device, there, and back. Flush: to SSD."""

TRACKS: tuple[Track, ...] = get_args(Track)
"""All tracks, in the order in which they are shown."""

ArgValue = str | int | float | bool
"""What a span may say of itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Something that took time."""

    track: Track
    """Where it is shown."""
    name: str
    """What it was."""
    start_s: float
    """When it began, on the timeline's clock."""
    end_s: float
    """When it ended."""
    args: Mapping[str, ArgValue] = dataclasses.field(default_factory=dict)
    """More about it: `layer`, `job`, `num_bytes`."""
    thread_id: int | None = None
    """The thread that it occupied from start to end; None where it was no thread's, as a copy under way."""


class Place(NamedTuple):
    """Where a span is drawn within its track: spans of a lane, from 0, are nested (so deep) or apart."""

    span: Span
    lane: int
    depth: int


class Timeline:
    """Records spans. Every method may be called from any thread, and none waits for anything but a short lock.

    Args:
      max_spans: how many are kept; beyond that the oldest are forgotten. 0: nothing is recorded.
      clock: gives the time, seconds.

    Raises:
      ValueError: max_spans is negative.
    """

    def __init__(self, *, max_spans: int = 100_000, clock: Callable[[], float] = time.perf_counter) -> None:
        if max_spans < 0:
            raise ValueError(f"max_spans must not be negative, got {max_spans}")
        self._clock = clock
        self._lock = threading.Lock()
        self._spans: collections.deque[Span] = collections.deque(maxlen=max_spans)
        self.num_forgotten = 0
        """Spans that were recorded and made room for later ones."""
        self.enabled = max_spans > 0
        """Whether anything is recorded: ask before computing what only a span would say."""

    def annotate(self, track: Track, name: str, **args: ArgValue) -> AbstractContextManager[object]:
        """Records how long the `with` block takes, also where it raises. It begins and ends on one thread.

        It is an event in a trace of `jax.profiler` too, beside the device's kernels, whether or not this records.

        Raises:
          ValueError: it records, and there is no such track.
        """
        from jax.profiler import TraceAnnotation

        annotation = TraceAnnotation(name, **args)
        if not self.enabled:
            return annotation
        _check_track(track)
        return self._recorded(track, name, args, annotation)

    def add(self, track: Track, name: str, start_s: float, end_s: float, **args: ArgValue) -> None:
        """Records what is over already, and was measured with the timeline's clock.

        Raises:
          ValueError: it records, and there is no such track or the end is before the start.
        """
        if not self.enabled:
            return
        _check_track(track)
        if not start_s <= end_s:
            raise ValueError(f"span {name!r} must have start_s <= end_s, got {start_s} and {end_s}")
        self._record(Span(track, name, start_s, end_s, args))

    def spans(self) -> list[Span]:
        """What is recorded, by start; of spans that start together the longer first."""
        with self._lock:
            return sorted(self._spans, key=_order)

    def clear(self) -> None:
        """Forgets everything recorded so far."""
        with self._lock:
            self._spans.clear()
            self.num_forgotten = 0

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes what is recorded as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

        Each track is a thread of its own, or one for each lane where spans of a track overlap. Time 0 is the start of
        the first span.

        Args:
          path: the JSON file; its directory must be there.
        """
        with self._lock:
            spans, num_forgotten = list(self._spans), self.num_forgotten
        content = {"traceEvents": trace_events(spans), "displayTimeUnit": "ms"}
        told = json.dumps({**content, "otherData": {"num_forgotten": num_forgotten}}, default=str)
        Path(path).write_text(f"{told}\n", encoding="utf-8")

    def _record(self, span: Span) -> None:
        with self._lock:
            self.num_forgotten += len(self._spans) == self._spans.maxlen
            self._spans.append(span)

    @contextlib.contextmanager
    def _recorded(
        self, track: Track, name: str, args: Mapping[str, ArgValue], annotation: AbstractContextManager[object]
    ) -> Iterator[None]:
        with annotation:
            start_s = self._clock()
            try:
                yield
            finally:
                self._record(Span(track, name, start_s, self._clock(), args, threading.get_ident()))


NO_TIMELINE = Timeline(max_spans=0)
"""Records nothing: what a timeline is by default."""


def place_spans(spans: Iterable[Span]) -> list[Place]:
    """Places spans so that within a track and a lane any two are nested or apart, in as few lanes as come of it.

    Only what one thread did within what it did is nested. Copies that are under way at once lie side by side, even if
    one began and ended during another.

    Returns:
      One place for each span, by start.
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


def _check_track(track: str) -> None:
    if track not in TRACKS:
        raise ValueError(f"track must be one of {', '.join(TRACKS)}, got {track!r}")
