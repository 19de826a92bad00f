"""What scripts show while they run: an answer as it is generated, what a turn took, progress bars.

Not here: reading the user's lines (`chat_input`), tables (`script`).
"""

from __future__ import annotations

import contextlib
import time
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Protocol

import rich.console
import rich.progress
import rich.text

from ca_jax.turns.requests import Usage


def write_piece(console: rich.console.Console, piece: str, style: str = "") -> None:
    """Writes a piece of an answer and flushes it. Markup is text in it; what would steer the terminal is replaced."""
    console.print(rich.text.Text(printable(piece), style=style), end="", soft_wrap=True, highlight=False)


def printable(text: str) -> str:
    """The text with control characters other than newline and tab replaced by U+FFFD."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) != "Cc" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def decode_rate(usage: Usage) -> float | None:
    """Tokens per second after the first; None for an answer of one token."""
    if usage.completion_tokens < 2 or usage.decode_s <= 0:
        return None
    return (usage.completion_tokens - 1) / usage.decode_s


def describe_tiers(cached_tokens: Mapping[str, int]) -> str:
    """Cached tokens by tier, "ssd 1,234"; empty where there are none."""
    return ", ".join(f"{tier} {count:,}" for tier, count in cached_tokens.items() if count)


def describe_usage(usage: Usage) -> str:
    """One line: TTFT, cached tokens by tier of the prompt's, new tokens, tokens generated and their rate.

    Cached tokens that were computed anew, and chunks that were not stored, where there were any.
    """
    tiers = describe_tiers(usage.cached_tokens)
    parts = [
        f"TTFT {usage.ttft_s * 1e3:,.0f} ms",
        f"cached {usage.num_cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens"
        + (f" ({tiers})" if tiers else ""),
        f"new {usage.new_tokens:,}",
        *([f"recomputed {usage.repaired_tokens:,}"] if usage.repaired_tokens else []),
        *([f"missed chunks {usage.missed_chunks:,}"] if usage.missed_chunks else []),
        f"answer {usage.completion_tokens:,}",
    ]
    rate = decode_rate(usage)
    if rate is not None:
        parts.append(f"decode {rate:.1f} tokens/s")
    return " · ".join(parts)


def describe_overflow(usage: Usage, num_turns: int, *, oldest: bool) -> str:
    """What was dropped in a turn since the context window was full; empty where nothing was.

    Args:
      usage: of the turn.
      num_turns: turns before it that are gone as a whole.
      oldest: whether the oldest tokens are dropped first.
    """
    if not usage.dropped_tokens:
        return ""
    turns = f" ({num_turns:,} turn{'s' if num_turns > 1 else ''})" if num_turns > 0 else ""
    tokens = f"token{'s' if usage.dropped_tokens > 1 else ''}"
    return f"context full: dropped {'the oldest ' if oldest else ''}{usage.dropped_tokens:,} {tokens}{turns}"


def describe_time(time_s: float) -> str:
    """Seconds since the epoch as local date and time; as a number where no calendar has them."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    except (OSError, OverflowError, ValueError):
        return f"{time_s} s"


class Bars(Protocol):
    """Moves a bar; any thread may call it. Without the last argument it is a `Progress`."""

    def __call__(self, what: str, done: int, total: int, now: str = "") -> None:
        """A new `what` begins a new bar; `now` is shown behind it."""


@contextlib.contextmanager
def progress_bars(console: rich.console.Console | None = None) -> Iterator[Bars]:
    """Draws a bar for each task, below each other, and leaves them there when it ends.

    Args:
      console: where to, stderr if not given; one that is no terminal gets each bar once, at the end.

    Yields:
      The callback.
    """
    columns = (
        rich.progress.TextColumn("{task.description:<18}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[now]}"),
    )
    tasks: dict[str, rich.progress.TaskID] = {}
    with rich.progress.Progress(*columns, console=console or rich.console.Console(stderr=True)) as bars:

        def progress(what: str, done: int, total: int, now: str = "") -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total, now=now)
            bars.update(tasks[what], completed=done, total=total, now=now)

        yield progress
