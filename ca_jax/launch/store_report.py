"""How `ca_jax.launch.store` shows what it found: tables of the facts that are also written as JSON.

Sizes are rounded, times are local. What users have named is text, never markup, and steers no terminal.

Not here: finding it (store), the facts (store_facts).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import rich.console
import rich.filesize
import rich.table
import rich.text

from ca_jax.launch.store_facts import SUMS, Facts
from ca_jax.launch.terminal import printable

_SHORT = 12  # Characters of a fingerprint or key in a table.


def print_facts(facts: Facts, console: rich.console.Console) -> None:
    """Shows the facts of one command as tables."""
    _PRINTERS[facts["command"]](facts, console)


def _print_list(facts: Facts, console: rich.console.Console) -> None:
    sessions = facts["sessions"]
    _print_sessions(sessions, console)
    _note(
        console,
        f"{len(sessions):,} sessions, {sum(each['num_tokens'] for each in sessions):,} tokens, "
        f"{_size(sum(each['num_bytes'] for each in sessions))}",
    )
    for row in facts["damaged_rows"]:
        _note(console, f"damaged row of the catalog: {row['found']}", style="red")


def _print_show(facts: Facts, console: rich.console.Console) -> None:
    session, namespace = facts["session"], facts["namespace"]
    layout = namespace["layout"]
    token_ids = facts["first_token_ids"]
    rows = [
        ("session", session["session_id"]),
        ("key", session["key"]),
        ("tenant", session["tenant"]),
        ("tokens", f"{session['num_tokens']:,}, after {session['num_dropped']:,} were dropped"),
        ("size", f"{_size(session['num_bytes'])} in {session['num_blocks']:,} blocks"),
        ("created", _when(session["created_s"])),
        ("last used", f"{_when(session['last_used_s'])}, saved {session['generation']} times"),
        ("expires", _expiry(session)),
        ("pinned", "yes" if session["pinned"] else "no"),
        ("state", session["state"]),
        ("weights", namespace["weights"]),
        (
            "layout",
            f"{layout['num_layers']} layers x {layout['num_kv_heads']} KV heads x {layout['head_dim']}, "
            f"{layout['dtype']}, blocks of {layout['block_tokens']} tokens",
        ),
        ("blocks at", facts["blocks_at"]),
        ("first token ids", "not readable" if token_ids is None else " ".join(map(str, token_ids))),
    ]
    table = rich.table.Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows:
        table.add_row(name, rich.text.Text(printable(value), overflow="fold"))
    console.print(table)
    if facts["damage"]:
        _note(console, f"damaged: {facts['damage']}", style="red")
    console.print()
    _print_table(
        console,
        (">block", ">id on disk", ">tokens"),
        ((f"{each['index']}", f"{each['block_id']}", f"{each['tokens']}") for each in facts["blocks"]),
    )


def _print_verify(facts: Facts, console: rich.console.Console) -> None:
    damaged, problems = facts["damaged"], facts["catalog_problems"]
    if damaged:
        _print_table(
            console,
            ("session", "tenant", "key", ">block", ">id on disk", "damage", "found"),
            (
                (
                    *_who(each),
                    *("-" if damage[name] is None else f"{damage[name]}" for name in ("index", "block_id")),
                    damage["reason"],
                    damage["found"],
                )
                for each in damaged
                for damage in each["damages"]
            ),
        )
    for problem in problems:
        of = "" if problem["key"] is None else f" (session {problem['key'][:_SHORT]})"
        _note(console, f"catalog{of}: {problem['found']}", style="red")
    style = "red" if damaged or problems else "green"
    _note(
        console,
        f"{len(damaged):,} of {facts['num_sessions']:,} sessions damaged, {len(problems):,} other problems of the "
        f"catalog; {facts['num_blocks']:,} blocks, {_size(facts['num_bytes'])}",
        style=style,
    )


def _print_gc(facts: Facts, console: rich.console.Console) -> None:
    would = "would be " if facts["dry_run"] else ""
    forgotten = [each for namespace in facts["namespaces"] for each in namespace["forgotten"]]
    if forgotten:
        _print_table(
            console, ("session", "tenant", "key", "why"), ((*_who(each), each["reason"]) for each in forgotten)
        )
    rows = []
    for each in facts["namespaces"]:
        leftovers = each["num_leftovers"]
        rows.append(
            (
                each["namespace"] + (f", {would}dropped" if each["dropped"] else ""),
                each["weights"][:_SHORT],
                f"{len(each['forgotten']):,}",
                f"{each['num_blocks']:,}",
                _size(each["num_bytes"]),
                "-" if leftovers is None else f"{leftovers:,}",
            )
        )
    _print_table(console, ("namespace", "weights", ">forgotten", ">blocks", ">freed", ">leftovers"), rows)
    if facts["files"]:
        _note(console, f"{would}deleted ({_size(facts['num_file_bytes'])}): {', '.join(facts['files'])}")
    if facts["compacted_bytes"] is not None:
        _note(console, f"catalog: {_size(facts['catalog_bytes'])} before, {_size(facts['compacted_bytes'])} now")
    if facts["not_compacted"] is not None:
        _note(console, f"catalog not compacted: {facts['not_compacted']}", style="red")
    freed_bytes = sum(each["num_bytes"] for each in facts["namespaces"]) + facts["num_file_bytes"]
    _note(console, f"{len(forgotten):,} sessions {would}forgotten, {_size(freed_bytes)} {would}freed")


def _print_export(facts: Facts, console: rich.console.Console) -> None:
    if facts["exported"]:
        _print_table(
            console,
            ("session", "tenant", ">tokens", ">size", "file"),
            (
                (
                    each["session_id"],
                    each["tenant"],
                    f"{each['num_tokens']:,}",
                    _size(each["num_bytes"]),
                    each["file"],
                )
                for each in facts["exported"]
            ),
        )
    for each in facts["damaged"]:
        _note(console, f"not exported: {each['found']}", style="red")
    _note(console, f"{len(facts['exported']):,} sessions exported, {len(facts['damaged']):,} damaged")


def _print_drop(facts: Facts, console: rich.console.Console) -> None:
    session, tenant, key = _who(facts["forgotten"][0])
    _note(
        console,
        f"session {session!r} of tenant {tenant!r} ({key}) dropped: {facts['num_blocks']:,} blocks deleted, "
        f"{_size(facts['num_bytes'])} freed",
    )


def _print_stats(facts: Facts, console: rich.console.Console) -> None:
    rows = []
    for each in facts["namespaces"]:
        disk, damaged = each["disk"], each["num_damaged_rows"]
        rows.append(
            (
                each["namespace"]["name"],
                each["namespace"]["weights"][:_SHORT],
                "all",
                *_sums(each),
                "-" if disk is None else f"{disk['num_files']:,}",
                "-" if disk is None else _size(disk["num_bytes"]),
                f"{damaged:,}",
            )
        )
        rows.extend(("", "", tenant["tenant"], *_sums(tenant), "", "", "") for tenant in each["tenants"])
    sums = (">sessions", ">tokens", ">blocks", ">size")
    _print_table(console, ("namespace", "weights", "tenant", *sums, ">files", ">on disk", ">damaged rows"), rows)
    for name, use in facts["unknown"].items():
        _note(console, f"of no namespace: {name}, {use['num_files']:,} files, {_size(use['num_bytes'])}; gc deletes it")
    _note(
        console,
        f"catalog {_size(facts['catalog']['num_bytes'])}; disk {_size(facts['free_bytes'])} free of "
        f"{_size(facts['total_bytes'])}",
    )


def _print_claim(facts: Facts, console: rich.console.Console) -> None:
    for each in facts["taken"]:
        _note(
            console,
            f"{each['num_blocks']:,} blocks at {each['blocks_at']}, before of {each['owner'] or 'nobody known'}",
        )


_PRINTERS: dict[str, Callable[[Facts, rich.console.Console], None]] = {
    "list": _print_list,
    "show": _print_show,
    "verify": _print_verify,
    "gc": _print_gc,
    "export": _print_export,
    "drop": _print_drop,
    "stats": _print_stats,
    "claim": _print_claim,
}


def _print_sessions(sessions: Iterable[Facts], console: rich.console.Console) -> None:
    columns = ("session", "tenant", ">tokens", ">size", "created", "last used", "expires", "pinned", "state", "weights")
    rows = (
        (
            each["session_id"],
            each["tenant"],
            f"{each['num_tokens']:,}",
            _size(each["num_bytes"]),
            _when(each["created_s"]),
            _when(each["last_used_s"]),
            _expiry(each),
            "yes" if each["pinned"] else "no",
            each["state"],
            each["weights"][:_SHORT],
        )
        for each in sessions
    )
    _print_table(console, columns, rows)


def _print_table(console: rich.console.Console, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A column whose name begins with ">" is of numbers."""
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = column.startswith(">")
        table.add_column(
            column.removeprefix(">"), justify="right" if is_number else "left", overflow="fold", no_wrap=is_number
        )
    for row in rows:
        table.add_row(*(rich.text.Text(printable(value)) for value in row))
    console.print(table)


def _note(console: rich.console.Console, text: str, style: str = "dim") -> None:
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def _who(facts: Facts) -> tuple[str, str, str]:
    """Session, tenant and shortened key of what has a `key` and perhaps a `session`."""
    session = facts["session"]
    named = ("?", "?") if session is None else (session["session_id"], session["tenant"])
    return (*named, facts["key"][:_SHORT])


def _sums(facts: Facts) -> tuple[str, str, str, str]:
    num_sessions, num_tokens, num_blocks, num_bytes = (facts[name] for name in SUMS)
    return f"{num_sessions:,}", f"{num_tokens:,}", f"{num_blocks:,}", _size(num_bytes)


def _size(num_bytes: int) -> str:
    return rich.filesize.decimal(num_bytes)


def _when(time_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    except (OSError, OverflowError, ValueError):  # No checksum is over the times in a catalog.
        return f"{time_s} s"


def _expiry(session: Facts) -> str:
    if session["expires_s"] is None:
        return "never"
    if session["pinned"]:
        return "never, pinned"
    return f"{_when(session['expires_s'])}{', expired' if session['expired'] else ''}"
