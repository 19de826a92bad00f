"""What the terminal chat shows as tables. What users and models have said is text in them, never markup.

Not here: commands and their effects (`chat`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import rich.filesize
import rich.table

from ca_jax.launch.script import make_table
from ca_jax.launch.terminal import describe_time, printable
from ca_jax.session import Session
from ca_jax.storage.config import GIB
from ca_jax.storage.records import EntryInfo, FlushFailure, MissReason, SkipReason, SsdStats, StoreStats
from ca_jax.telemetry.metrics import EngineMetrics

_TITLE_CHARS = 60


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
            rich.filesize.decimal(info.ssd_bytes) if info.ssd_bytes else "-",
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
    return pairs_table(rows)


def pairs_table(rows: Iterable[tuple[str, str]]) -> rich.table.Table:
    """Names and values, without a header."""
    return make_table(("", ""), rows, header=False, ruled=False)


def _ssd_rows(ssd: SsdStats) -> tuple[tuple[str, str], ...]:
    lost = f", {ssd.num_lost_sessions} lost at start" if ssd.num_lost_sessions else ""
    return (
        ("SSD", f"{ssd.used_bytes / GIB:.3f} of {ssd.capacity_bytes / GIB:.3f} GiB"),
        ("conversations on SSD", f"{ssd.num_sessions} ({ssd.num_evictions} evicted{lost})"),
        ("fetches from SSD", f"{ssd.num_fetches}, {rich.filesize.decimal(ssd.fetched_bytes)}"),
        (
            "writes to SSD",
            f"{ssd.num_flushes}, {rich.filesize.decimal(ssd.flushed_bytes)}; failed: {_counts(ssd.failed_flushes)}",
        ),
    )


def _counts(counts: Mapping[MissReason, int] | Mapping[SkipReason, int] | Mapping[FlushFailure, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items() if count) or "none"
