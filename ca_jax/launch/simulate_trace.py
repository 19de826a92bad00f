"""A trace as sessions for the simulator: lengths and times alone.

Not here: readers of files (`ca_jax.simulate.traces`), flags (`simulate_flags`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ca_jax.simulate.traces.requests import TRACE_FORMATS, BadRows, load_requests, share_of_seen_blocks
from ca_jax.simulate.traces.sharegpt import load_sharegpt
from ca_jax.simulate.workload import Lengths, SimSession, conversation_lengths, poisson_sessions, trace_sessions


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceSource:
    """Which trace, and how it is read.

    Raises:
      ValueError: an unknown format, no file where one is needed, or a number that cannot be.
    """

    trace_format: str = "sharegpt"
    """One of `TRACE_FORMATS`."""
    trace: str | None = None
    """The file, of agents also a directory of such; None: the installed ShareGPT."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be used, and count them; else the first one is an error."""
    chars_per_token: float = 4.0
    """Characters of a text that make a token."""
    max_turns: int = 0
    """ShareGPT: most turns of a conversation, as in the paper; later ones are left out. 0 for all."""

    def __post_init__(self) -> None:
        if self.trace_format not in TRACE_FORMATS:
            raise ValueError(f"trace_format must be one of {', '.join(TRACE_FORMATS)}; got {self.trace_format!r}")
        if self.trace is None and self.trace_format != "sharegpt":
            raise ValueError(f"trace must be a file of the format {self.trace_format}, got none")
        if not 0 < self.chars_per_token < float("inf"):
            raise ValueError(f"chars_per_token must be a number above 0, got {self.chars_per_token}")
        if self.max_turns < 0:
            raise ValueError(f"max_turns must be at least 0, got {self.max_turns}")

    @property
    def path(self) -> Path | None:
        """Of the trace; None for the installed ShareGPT."""
        return None if self.trace is None else Path(self.trace).expanduser()

    def num_tokens(self, text: str) -> int:
        """Of a text, about."""
        return round(len(text) / self.chars_per_token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadTrace:
    """What was read of one."""

    sessions: Sequence[SimSession]
    """In order of arrival."""
    seen_blocks_share: float | None
    """Share of all blocks that lead their prompt and were seen before: of traces with hashes."""
    skipped_rows: int
    """Rows that could not be used."""
    first_skipped: str | None
    """What was wrong with the first of them."""


def sharegpt_lengths(source: TraceSource) -> Lengths:
    """How long recorded conversations are.

    Raises:
      FileNotFoundError: there is no such file, or the package is not installed.
      ValueError: it is malformed.
    """
    return conversation_lengths(load_sharegpt(source.path), source.num_tokens, max_turns=source.max_turns or None)


def read_trace(
    source: TraceSource,
    *,
    num_sessions: int | None = None,
    arrival_rate: float = 1.0,
    think_s: float = 0.0,
    waits_for_answers: bool = True,
    seed: int = 0,
) -> ReadTrace:
    """Reads a trace. Conversations of ShareGPT, which has no times, come at random; other traces say when.

    Args:
      source: which.
      num_sessions: how many at most, the first ones; None for all.
      arrival_rate, think_s, waits_for_answers, seed: of conversations of ShareGPT, see `poisson_sessions`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is malformed (`TraceError` where rows have lines).
    """
    if source.path is None or source.trace_format == "sharegpt":
        lengths = sharegpt_lengths(source)
        sessions = poisson_sessions(
            lengths,
            num_sessions=num_sessions or len(lengths),
            arrival_rate=arrival_rate,
            think_s=think_s,
            waits_for_answers=waits_for_answers,
            seed=seed,
        )
        return ReadTrace(sessions=list(sessions), seen_blocks_share=None, skipped_rows=0, first_skipped=None)
    bad_rows = BadRows(source.skip_bad_rows)
    requests = load_requests(source.trace_format, source.path, source.num_tokens, bad_rows)
    hashed = [request for request in requests if request.hash_ids]
    return ReadTrace(
        sessions=trace_sessions(requests)[:num_sessions],
        seen_blocks_share=share_of_seen_blocks(hashed) if hashed else None,
        skipped_rows=bad_rows.num_skipped,
        first_skipped=bad_rows.first,
    )
