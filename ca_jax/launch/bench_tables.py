"""A report of the benchmark as tables to read.

Not here: what it holds (`bench_report`, the schemas).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import rich.box
import rich.console
import rich.table

from ca_jax.launch.bench_report import Report

_QUIET_LOAD_SHARE = 0.1  # of all CPU time; what an idle machine's own housekeeping stays well under


def print_report(report: Report, console: rich.console.Console) -> None:
    """Prints a report as tables, with its summary, the machine and the versions it was measured on."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for row in _lines(report):
        by_kind.setdefault(_kind(report, row), []).append(row)
    for kind, rows in by_kind.items():
        table = rich.table.Table(title=_title(report, kind), box=rich.box.SIMPLE_HEAD, title_justify="left")
        for heading, _, _ in _COLUMNS[kind]:
            table.add_column(heading, justify="right", overflow="fold")
        for row in rows:
            table.add_row(*(_cell(row, name, form) for _, name, form in _COLUMNS[kind]))
        console.print(table)
    summary = rich.table.Table("summary", "", box=rich.box.SIMPLE_HEAD)
    for name, value in report["summary"].items():
        summary.add_row(name, _plain(value))
    console.print(summary)
    for title in ("startup", "machine", "versions"):
        if title in report:
            console.print(f"[bold]{title}[/bold]  {_one_line(report[title])}", highlight=False)
    if (report.get("startup", report)["other_load_share"] or 0.0) > _QUIET_LOAD_SHARE:
        console.print("[bold red]Something else ran on this machine: do not compare these numbers.[/bold red]")


def to_markdown(report: Report) -> str:
    """The rows of a report as tables in Markdown, one for each kind of row; of medians without their spread."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for row in _lines(report):
        by_kind.setdefault(_kind(report, row), []).append(row)
    tables = []
    for kind, rows in by_kind.items():
        lines = [[heading.replace("-\n", "").replace("\n", " ") for heading, _, _ in _COLUMNS[kind]]]
        lines.append(["---:"] * len(_COLUMNS[kind]))
        lines += [[_median(row, name, form) for _, name, form in _COLUMNS[kind]] for row in rows]
        tables.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return "\n\n".join(tables) + "\n"


def _lines(report: Report) -> Iterator[Mapping[str, Any]]:
    """What is a line of a table each: a row, or each source of one."""
    for row in report["rows"]:
        if "sources" not in row:
            yield row
            continue
        for source, times in row["sources"].items():
            yield {**row, **times, "source": source}


def _kind(report: Report, row: Mapping[str, Any]) -> str:
    """Which columns a row has: those of its suite, or of its own kind where a suite has several."""
    return report["suite"] if report["suite"] in _COLUMNS else row["measured"]


def _title(report: Report, kind: str) -> str:
    what = kind
    if "model" in report:
        beside = f", beside {report['peer']}" if report["peer"] else ""
        what = f"{kind}, {report['model']} in {report['dtype']}{beside}"
    if kind in _WITHOUT_MEDIANS:
        return what
    return f"{what}: medians of {report['config']['repeats']}, in brackets the least and the largest"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _fine_milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.1f}"


def _count(count: int) -> str:
    return f"{count:,}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}x"


def _speed(gb_per_s: float) -> str:
    return f"{gb_per_s:.2f}"


def _share(share: float) -> str:
    return f"{share:.1%}"


def _signed_share(share: float) -> str:
    return f"{share:+.1%}"


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "NO"


_WITHOUT_MEDIANS = ("decision", "loop", "read_buffer", "conversations", "bookkeeping")
_COLUMNS: dict[str, tuple[tuple[str, str, Callable[[Any], str]], ...]] = {
    "reuse": (
        ("history\ntokens", "history_tokens", str),
        ("new\ntokens", "new_tokens", str),
        ("TTFT\nrecompute ms", "ttft_recompute_s", _milliseconds),
        ("TTFT peer\nrecompute ms", "ttft_peer_recompute_s", _milliseconds),
        ("TTFT\nreuse ms", "ttft_reuse_s", _milliseconds),
        ("speedup", "speedup", _ratio),
        ("load\nms", "load_s", _milliseconds),
        ("load\nshare", "load_share", _share),
        ("load\nstall ms", "load_stall_s", _milliseconds),
        ("same\ntokens", "same_tokens", _yes_or_no),
        ("re-\ncompiles", "recompiles", str),
    ),
    "prefill": (
        ("tokens", "tokens", str),
        ("prefill ms", "prefill_s", _milliseconds),
        ("tokens/s", "tokens_per_s", _rate),
        ("peer tokens/s", "peer_tokens_per_s", _rate),
        ("ratio", "ratio", _ratio),
        ("same\ntokens", "same_tokens", _yes_or_no),
        ("re-\ncompiles", "recompiles", str),
    ),
    "decode": (
        ("batch", "batch_size", str),
        ("context\ntokens", "context_tokens", str),
        ("tokens/s", "tokens_per_s", _rate),
        ("tokens/s\nper slot", "tokens_per_s_per_slot", _rate),
        ("peer tokens/s", "peer_tokens_per_s", _rate),
        ("speedup", "speedup_vs_peer", _ratio),
        ("re-\ncompiles", "recompiles", str),
    ),
    "tiers": (
        ("history\ntokens", "history_tokens", str),
        ("new\ntokens", "new_tokens", str),
        ("history\nfrom", "source", str),
        ("cached\ntokens", "cached_tokens", lambda tiers: ", ".join(f"{n} {tier}" for tier, n in tiers.items()) or "0"),
        ("TTFT ms", "ttft_s", _milliseconds),
        ("speedup", "speedup", _ratio),
        ("fetch ms", "fetch_s", _milliseconds),
        ("load\nstall ms", "load_stall_s", _milliseconds),
        ("same\ntokens", "same_tokens", _yes_or_no),
        ("re-\ncompiles", "recompiles", str),
    ),
    "ttft": (
        ("history\ntokens", "history_tokens", str),
        ("new\ntokens", "new_tokens", str),
        ("TTFT\nDRAM ms", "ttft_dram_s", _milliseconds),
        ("TTFT\nSSD ms", "ttft_ssd_s", _milliseconds),
        ("compute\nms", "compute_s", _milliseconds),
        ("load\nms", "load_s", _milliseconds),
        ("load\nstall ms", "load_stall_s", _milliseconds),
        ("DRAM /\ncompute", "ratio_dram", _ratio),
        ("SSD /\ncompute", "ratio_ssd", _ratio),
        ("DRAM /\nideal", "ratio_ideal", _ratio),
        ("same\ntokens", "same_tokens", _yes_or_no),
        ("re-\ncompiles", "recompiles", str),
    ),
    "throughput": (
        ("mode", "mode", str),
        ("sessions", "concurrent_sessions", str),
        ("turns", "turns", str),
        ("turns/min", "turns_per_minute", _rate),
        ("prompt\ntokens", "prompt_tokens", _count),
        ("prefilled\ntokens", "prefill_tokens", _count),
        ("hit\nshare", "hit_share", _share),
        ("TTFT\np50 ms", "ttft_p50_s", _milliseconds),
        ("TTFT\np99 ms", "ttft_p99_s", _milliseconds),
        ("TPOT\np50 ms", "tpot_p50_s", _milliseconds),
        ("TPOT\np99 ms", "tpot_p99_s", _milliseconds),
        ("re-\ncompiles", "recompiles", str),
    ),
    "preload_turn": (
        ("link", "link", str),
        ("load /\ncompute", "load_ratio", _ratio),
        ("history\ntokens", "history_tokens", str),
        ("new\ntokens", "new_tokens", str),
        ("read\nbuffer", "read_buffer", str),
        ("TTFT ms", "ttft_s", _milliseconds),
        ("ideal ms", "ideal_s", _milliseconds),
        ("TTFT /\nideal", "ratio", _ratio),
        ("load\nhidden", "hidden", _share),
        ("compute\nms", "compute_s", _milliseconds),
        ("load\nms", "load_s", _milliseconds),
        ("load\nstall ms", "load_stall_s", _milliseconds),
        ("same\ntokens", "same_tokens", _yes_or_no),
        ("re-\ncompiles", "recompiles", str),
    ),
    "read_buffer": (
        ("load /\ncompute", "load_ratio", _ratio),
        ("layers\nby rates", "by_rates", str),
        ("best", "best", str),
        ("best\nmeasured", "measured_best", str),
        ("rates'\nload ms", "rates_load_s", _milliseconds),
        ("load\nms", "load_s", _milliseconds),
        ("rates'\ncompute ms", "rates_compute_s", _milliseconds),
        ("compute\nms", "compute_s", _milliseconds),
    ),
    "save_turn": (
        ("link", "link", str),
        ("save /\nturn", "save_ratio", _ratio),
        ("prompt\ntokens", "prompt_tokens", str),
        ("answer\ntokens", "answer_tokens", str),
        ("turn without\nstore ms", "turn_off_s", _milliseconds),
        ("turn, async\nsave ms", "turn_async_s", _milliseconds),
        ("turn, blocking\nsave ms", "turn_blocking_s", _milliseconds),
        ("async\nadds", "async_overhead", _signed_share),
        ("blocking\nadds", "blocking_overhead", _signed_share),
        ("save\nhidden", "hidden", _share),
        ("same\ntokens", "same_tokens", _yes_or_no),
        ("re-\ncompiles", "recompiles", str),
    ),
    "stream": (
        ("prompt\ntokens", "prompt_tokens", str),
        ("answer\ntokens", "answer_tokens", str),
        ("turns", "num_turns", str),
        ("without\nstore ms", "stream_off_s", _milliseconds),
        ("with\nstore ms", "stream_on_s", _milliseconds),
        ("store\nadds", "overhead", _signed_share),
        ("same\ntokens", "same_tokens", _yes_or_no),
        ("re-\ncompiles", "recompiles", str),
    ),
    "blend": (
        ("mode", "mode", str),
        ("KV\nfrom", "tier", str),
        ("ratio", "recompute_ratio", "{:g}".format),
        ("selection", "selection", str),
        ("chunks", "num_chunks", str),
        ("tokens\neach", "chunk_tokens", str),
        ("computed\nanew", "recomputed_tokens", _count),
        ("TTFT ms", "ttft_s", _milliseconds),
        ("speedup", "speedup", _ratio),
        ("ideal ms", "ideal_s", _milliseconds),
        ("TTFT /\nideal", "over_ideal", _ratio),
        ("fetch ms", "fetch_s", _milliseconds),
        ("load\nstall ms", "load_stall_s", _milliseconds),
        ("same\ntokens", "same_token_share", _share),
        ("re-\ncompiles", "recompiles", str),
    ),
    "blend_throughput": (
        ("mode", "mode", str),
        ("ratio", "recompute_ratio", "{:g}".format),
        ("DRAM", "dram_share", _share),
        ("SSD", "ssd_share", _share),
        ("turns", "turns", str),
        ("turns/s", "turns_per_s", _speed),
        ("tokens/s", "tokens_per_s", _rate),
        ("over\nrecompute", "speedup", _ratio),
        ("over\nprefix", "speedup_over_prefix", _ratio),
        ("hit\nshare", "hit_share", _share),
        ("computed\nshare", "computed_share", _share),
        ("turns\nwith SSD", "ssd_turn_share", _share),
        ("TTFT\np50 ms", "ttft_p50_s", _milliseconds),
        ("TTFT\np95 ms", "ttft_p95_s", _milliseconds),
        ("re-\ncompiles", "recompiles", str),
    ),
    "conversations": (
        ("method", "method", str),
        ("sessions", "sessions", str),
        ("turns", "turns", str),
        ("over-\nflows", "overflows", str),
        ("in an\nanswer", "answer_overflows", str),
        ("hit\nrate", "hit_rate", _share),
        ("history\nloaded", "loaded_share", _share),
        ("prefilled\ntokens", "prefill_tokens", _count),
        ("prefill s", "prefill_s", _rate),
        ("TTFT\nmean ms", "ttft_mean_s", _milliseconds),
        ("TTFT\np50 ms", "ttft_p50_s", _milliseconds),
        ("TTFT\np99 ms", "ttft_p99_s", _milliseconds),
        ("overflowing\nTTFT p50 ms", "overflow_ttft_p50_s", _milliseconds),
        ("total s", "total_s", _rate),
        ("re-\ncompiles", "recompiles", str),
    ),
    "bookkeeping": (
        ("KV in", "tier", str),
        ("blocks", "blocks", str),
        ("kept\nblocks", "kept_blocks", str),
        ("sessions", "sessions", str),
        ("discard ms", "discard_s", _fine_milliseconds),
        ("discard\np99 ms", "discard_p99_s", _fine_milliseconds),
        ("conversation\nms", "conversation_s", _fine_milliseconds),
    ),
    "decode_gap": (
        ("method", "method", str),
        ("sessions", "sessions", str),
        ("context\ntokens", "context_tokens", str),
        ("dropped\ntokens", "dropped_tokens", str),
        ("TPOT ms", "tpot_s", _milliseconds),
        ("gap ms", "gap_s", _milliseconds),
        ("gap /\nTPOT", "gap_ratio", _ratio),
        ("steps\nlost", "extra_steps", "{:.2f}".format),
        ("re-\ncompiles", "recompiles", str),
    ),
    "next_turn": (
        ("method", "method", str),
        ("overflowed\nby", "overflowed", str),
        ("history\ntokens", "history_tokens", str),
        ("new\ntokens", "new_tokens", str),
        ("recomputed\ntokens", "recomputed_tokens", str),
        ("repaired\ntokens", "repaired_tokens", str),
        ("TTFT ms", "ttft_s", _milliseconds),
        ("TTFT /\nca", "ratio", _ratio),
        ("TTFT / no\noverflow", "overflow_ratio", _ratio),
        ("re-\ncompiles", "recompiles", str),
    ),
    "store": (
        ("measured", "measured", str),
        ("driver", "driver", str),
        ("GB/s", "gb_per_s", _speed),
        ("CPU s\nper GB", "cpu_s_per_gb", _speed),
        ("plain", "plain", str),
        ("plain\nGB/s", "plain_gb_per_s", _speed),
        ("plain CPU s\nper GB", "plain_cpu_s_per_gb", _speed),
        ("ratio", "ratio", _ratio),
    ),
    "decision": (
        ("policy", "policy", str),
        ("sessions", "num_sessions", str),
        ("jobs", "num_jobs", str),
        ("p50 ms", "p50_ms", "{:.3f}".format),
        ("p99 ms", "p99_ms", "{:.3f}".format),
        ("max ms", "max_ms", "{:.3f}".format),
        ("fetches\nper plan", "fetches_per_plan", "{:.1f}".format),
    ),
    "startup": (
        ("sessions", "num_sessions", str),
        ("blocks", "num_blocks", str),
        ("catalog MB", "catalog_bytes", lambda num_bytes: f"{num_bytes / 1e6:,.1f}"),
        ("start-up ms", "startup_s", _milliseconds),
        ("cold start-up ms", "cold_startup_s", _milliseconds),
        ("memory MB", "store_bytes", lambda num_bytes: f"{num_bytes / 1e6:,.1f}"),
    ),
    "prefix": (
        ("sessions", "num_sessions", str),
        ("shared\ntokens", "shared_tokens", str),
        ("prompt\ntokens", "prompt_tokens", str),
        ("p50 ms", "p50_ms", "{:.3f}".format),
        ("p99 ms", "p99_ms", "{:.3f}".format),
        ("max ms", "max_ms", "{:.3f}".format),
    ),
    "turn": (
        ("history", "history_tokens", str),
        ("new", "new_tokens", str),
        ("messages", "num_messages", str),
        ("host ms", "total_ms", "{:.2f}".format),
        ("of it", "ms_of", lambda parts: ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items())),
    ),
    "loop": (
        ("policy", "policy", str),
        ("sessions", "num_sessions", str),
        ("over\ncapacity", "over_capacity", _share),
        ("queue\ndepth", "queue_depth", _share),
        ("hit rate", "hit_rate", _share),
        ("vs Belady", "vs_belady", _share),
    ),
}
"""Heading, field and form of each column, by suite or, where a suite has rows of several kinds, by kind."""


def _cell(row: Mapping[str, Any], name: str, form: Callable[[Any], str]) -> str:
    if row[name] is None or name not in row.get("spread", ()):
        return _median(row, name, form)
    least, largest = row["spread"][name]
    if least == largest:
        return form(row[name])
    return f"{form(row[name])}\n({form(least)}..{form(largest)})"


def _median(row: Mapping[str, Any], name: str, form: Callable[[Any], str]) -> str:
    return "-" if row[name] is None else form(row[name])


def _one_line(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_plain(value)}" for name, value in values.items())


def _plain(value: Any) -> str:
    """A JSON value in short."""
    if isinstance(value, Mapping):
        return _one_line(value)
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    if isinstance(value, bool):
        return _yes_or_no(value)
    return f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)
