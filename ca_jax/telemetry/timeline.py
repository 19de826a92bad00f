"""What happened when: spans on named tracks.

A `Timeline` is handed to what is worth seeing; `NO_TIMELINE` is one that records nothing. Times are
seconds of one clock, `time.perf_counter` unless told otherwise.

Loads no jax before `annotate` is called: the store, which has none, records here too.

Not here: what is worth a span (those who do it), traces and figures of spans (`benchmarks`), totals (`metrics`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Literal, get_args

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


@dataclasses.dataclass
class SaveTimes:
    """When a turn's KV was saved, on the clock of its other times. Goes on behind the turn's end."""

    begun_s: float = 0.0  # When the first of it was handed in; 0 before.
    published_s: float = 0.0  # When the last of it so far was in the store, readable; 0 before.
    num_published: int = 0  # Its tokens that are.
    ended: bool = False  # Whether no more comes: all is published, or was given up.


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
            return sorted(self._spans, key=lambda span: (span.start_s, -span.end_s))

    def clear(self) -> None:
        """Forgets everything recorded so far."""
        with self._lock:
            self._spans.clear()

    def _record(self, span: Span) -> None:
        with self._lock:
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


def _check_track(track: str) -> None:
    if track not in TRACKS:
        raise ValueError(f"track must be one of {', '.join(TRACKS)}, got {track!r}")
