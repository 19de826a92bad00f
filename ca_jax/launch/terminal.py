"""What scripts show while they run: answers, what a turn took, progress bars, conversations and what is stored of them.

Not here: reading the user's lines (`chat`), making tables (`script`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import rich.console
import rich.progress
import rich.table
import rich.text
from rich.filesize import decimal as size

from ca_jax.launch.script import make_table, printable
from ca_jax.pretrained import Progress
from ca_jax.session import Session
from ca_jax.storage.config import GIB
from ca_jax.storage.records import EntryInfo, SsdStats, StoreStats
from ca_jax.telemetry.metrics import EngineMetrics
from ca_jax.turns.requests import Usage

_TITLE_CHARS = 60


def write_piece(console: rich.console.Console, piece: str) -> None:
    """Writes a piece of an answer and flushes it. Markup is text in it; what would steer the terminal is replaced."""
    console.print(rich.text.Text(printable(piece)), end="", soft_wrap=True, highlight=False)


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


@contextlib.contextmanager
def progress_bars(console: rich.console.Console | None = None) -> Iterator[Progress]:
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
    )
    tasks: dict[str, rich.progress.TaskID] = {}
    with rich.progress.Progress(*columns, console=console or rich.console.Console(stderr=True)) as bars:

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield progress


# What users and models have said is text in tables, never markup.


def title_of(session: Session) -> str:
    """The first thing the user said, shortened."""
    first = next((m["content"] for m in session.messages if m["role"] == "user"), "(nothing said yet)")
    line = printable(" ".join(first.split()))
    return line if len(line) <= _TITLE_CHARS else line[: _TITLE_CHARS - 1] + "…"


def sessions_table(sessions: Sequence[Session], current: Session) -> rich.table.Table:
    """The open conversations, numbered from 1; the one that messages go to is marked."""
    rows = [
        (
            f"{'*' if session is current else ' '} {number}",
            title_of(session),
            str(sum(message["role"] == "user" for message in session.messages)),
            f"{len(session.token_ids):,}",
            f"{session.num_dropped:,}",
        )
        for number, session in enumerate(sessions, 1)
    ]
    return make_table(("", "conversation", ">turns", ">tokens", ">dropped"), rows, ruled=False)


def stored_table(infos: Iterable[EntryInfo], current: Session) -> rich.table.Table:
    """What the store keeps, last used first; the conversation that messages go to is marked."""
    rows = [
        (
            "*" if info.session_id == current.session_id else " ",
            info.session_id,
            f"{info.num_tokens:,}",
            info.residency.value,
            size(info.ssd_bytes) if info.ssd_bytes else "-",
            describe_time(info.last_used_s),
            "yes" if info.pinned else "no",
        )
        for info in sorted(infos, key=lambda info: info.last_used_s, reverse=True)
    ]
    return make_table(("", "session", ">tokens", "in", ">on SSD", "last use", "pinned"), rows, ruled=False)


def stats_table(store: StoreStats, done: EngineMetrics) -> rich.table.Table:
    """What the store holds and what the engine has done."""
    share = done.cached_tokens / done.prompt_tokens if done.prompt_tokens else 0.0
    from_ssd = "" if store.ssd is None else f", {store.num_hits_from_ssd} of them from SSD"
    rows = [
        ("store", f"{store.used_bytes / GIB:.3f} of {store.capacity_bytes / GIB:.3f} GiB DRAM"),
        *(() if store.ssd is None else _ssd_rows(store.ssd)),
        ("stored conversations", f"{store.num_sessions} ({store.num_evictions} evicted)"),
        ("loads", f"{store.num_hits} hits{from_ssd}; misses: {_counts(store.misses)}; failed: {done.failed_loads}"),
        ("saves", f"{store.num_saves}; skipped: {_counts(store.skipped_saves)}; failed: {done.failed_saves}"),
        ("turns", f"{done.turns} ({done.cancelled} stopped)"),
        ("prompt tokens", f"{done.prompt_tokens:,}, of which cached {done.cached_tokens:,} ({share:.0%})"),
        ("generated tokens", f"{done.completion_tokens:,}"),
        ("dropped tokens", f"{done.dropped_tokens:,} in {done.truncations} truncations"),
    ]
    return make_table(("", ""), rows, ruled=False)


def _ssd_rows(ssd: SsdStats) -> tuple[tuple[str, str], ...]:
    lost = f", {ssd.num_lost_sessions} lost at start" if ssd.num_lost_sessions else ""
    return (
        ("SSD", f"{ssd.used_bytes / GIB:.3f} of {ssd.capacity_bytes / GIB:.3f} GiB"),
        ("conversations on SSD", f"{ssd.num_sessions} ({ssd.num_evictions} evicted{lost})"),
        ("fetches from SSD", f"{ssd.num_fetches}, {size(ssd.fetched_bytes)}"),
        ("writes to SSD", f"{ssd.num_flushes}, {size(ssd.flushed_bytes)}; failed: {_counts(ssd.failed_flushes)}"),
    )


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items() if count) or "none"
