"""One round of a suite as it happened: a trace that Perfetto opens, a figure of a turn, a profile of jax's.

Not here: measuring (the suites), spans (`ca_jax.telemetry.timeline`), drawing (`figures`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from benchmarks.figures import plot_timeline
from benchmarks.harness import BenchError
from benchmarks.traces import write_trace
from ca_jax.telemetry.timeline import NO_TIMELINE, Span, Timeline


class Recorder:
    """Keeps what happened in the turns of one round, and writes it: as a trace, JSON, and a figure of the first turn.

    The round comes on top of those that a suite measures, so that what it costs to record shows in none of them. jax's
    profiler writes of it to `profile_dir`.
    """

    def __init__(
        self, *, trace_out: Path | None = None, plot_out: Path | None = None, profile_dir: Path | None = None
    ) -> None:
        self._trace_out, self._plot_out, self._profile_dir = trace_out, plot_out, profile_dir
        wants_spans = trace_out is not None or plot_out is not None
        self.timeline = Timeline() if wants_spans else NO_TIMELINE
        """For the suite's engines."""
        self.is_wanted = wants_spans or profile_dir is not None
        """Whether there is to be such a round."""
        self._is_recording = False
        self._turns: dict[str, list[Span]] = {}

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """The block is the round."""
        profile = contextlib.nullcontext() if self._profile_dir is None else jax.profiler.trace(str(self._profile_dir))
        with profile:
            self._is_recording = True
            try:
                yield
            finally:
                self._is_recording = False

    @contextlib.contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """The block is a turn, of the round or of another one, of which nothing is kept. No other turn may run."""
        if not (self._is_recording and self.timeline.enabled):
            yield
            return
        self.timeline.clear()
        with self.timeline.annotate("engine", name):
            yield
        self._turns[name] = self.timeline.spans()

    def write(self, *, title: str, caption: str) -> None:
        """Writes what is wanted and was recorded, the turn's name behind the title. BenchError: no turn was."""
        if not self.timeline.enabled:
            return
        if not self._turns:
            raise BenchError("a recorded round must have at least one turn, got none")
        if self._trace_out is not None:
            write_trace(self._trace_out, [span for turn in self._turns.values() for span in turn])
        if self._plot_out is not None:
            name, spans = next(iter(self._turns.items()))
            plot_timeline(self._plot_out, spans, title=f"{title}: {name}", caption=caption)
