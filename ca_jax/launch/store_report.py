"""What `ca_jax.launch.store` says of what it found: facts, which are JSON values by name, and tables of them.

In tables sizes are rounded and times are local. Sessions are those whose rows of the catalog are sound.

Not here: finding it (`store`).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import rich.console
import rich.table
from rich.filesize import decimal

from ca_jax.errors import CaJaxError, check
from ca_jax.launch.script import make_table, note
from ca_jax.launch.terminal import describe_time
from ca_jax.storage.catalog.records import Namespace
from ca_jax.storage.collect import NamespaceGarbage
from ca_jax.storage.inspector import DiskUse, Listing, StoredSession, Verdict

Facts = dict[str, Any]
"""JSON values by name."""
Parts = Iterator[rich.table.Table | tuple[str, ...]]  # Tables, and lines with their style.


class CommandError(CaJaxError, ValueError):
    """A command that there is not, or that was told too little or too much."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What to do; the flags' help says what the fields mean.

    Raises:
      CommandError: an unknown command, a session too few or too many, an option of another command.
    """

    COMMANDS: ClassVar[tuple[str, ...]]
    """What there is to do; the first one is the default."""
    WITH_ID: ClassVar[Mapping[str, bool]]
    """Command to whether it must be told which session."""
    OPTIONS_OF: ClassVar[Mapping[str, str]]
    """Field to the command that it is of."""
    WHERE: ClassVar[str] = ""

    command: str = "list"
    session: str | None = None  # Its id, its key, or the beginning of its key.
    tenant: str | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        must = f"one of {', '.join(self.COMMANDS)}"
        check(self.command in self.COMMANDS, f"a command{self.WHERE}", must, self.command, CommandError)
        if self.WITH_ID.get(self.command) and not self.session:
            raise CommandError(f"{self.command} must be told a session's id or the beginning of its key, got none")
        if self.session is not None and self.command not in self.WITH_ID:
            raise CommandError(f"{self.command} must be told no session, got {self.session!r}")
        for field, command in self.OPTIONS_OF.items():
            if getattr(self, field) not in (None, ()) and getattr(self, field) is not False and command != self.command:
                raise CommandError(f"{field} must come with {command}, got {self.command}")


_SUMS = ("num_sessions", "num_tokens", "num_blocks", "num_bytes")  # Of a namespace and of each tenant.
_OF_RECORD = (
    *("session_id", "key", "tenant", "num_tokens", "num_blocks", "created_s", "last_used_s", "ttl_s", "expires_s"),
    *("pinned", "generation"),
)
SHORT = 12  # Characters of a fingerprint or key in a table.


def facts_of(value: Any, now_s: float) -> Any:
    """JSON values of what the store's tools tell: fields by name, sessions and namespaces in a few words."""
    if isinstance(value, StoredSession):
        record = value.record
        return {
            **{name: getattr(record, name) for name in _OF_RECORD},
            "namespace": value.namespace.directory_name,
            "weights": value.namespace.weights,
            "num_dropped": record.lineage.num_dropped,
            "num_bytes": value.num_bytes,
            "expired": value.expired(now_s),
            "state": "ready",
        }
    if isinstance(value, Namespace):
        return value.directory_name
    if isinstance(value, NamespaceGarbage):
        return {**_fields(value, now_s), "weights": value.namespace.weights}
    if isinstance(value, Mapping):
        return {name: facts_of(each, now_s) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [facts_of(each, now_s) for each in value]
    return _fields(value, now_s) if dataclasses.is_dataclass(value) else value


def _fields(value: Any, now_s: float) -> Facts:
    return {field.name: facts_of(getattr(value, field.name), now_s) for field in dataclasses.fields(value)}


def row_facts(row: Verdict) -> Facts:
    """What is left of a damaged row."""
    return {"key": row.key, "namespace": row.namespace.directory_name, "found": row.damages[0].found}


def namespace_facts(namespace: Namespace) -> Facts:
    """A namespace's name and what makes it."""
    return {"name": namespace.directory_name, **namespace.to_dict()}


def usage_facts(namespace: Namespace, listing: Listing, use: DiskUse | None, now_s: float) -> Facts:
    """What a namespace holds, by tenant, and takes on disk. A block that sessions of a tenant share counts once."""
    by_tenant: dict[str, list[StoredSession]] = {}
    for session in listing.sound:
        by_tenant.setdefault(session.record.tenant, []).append(session)
    tenants = []
    for tenant, sessions in sorted(by_tenant.items()):
        num_blocks = len({block for session in sessions for block in session.record.block_ids.tolist()})
        tenants.append(
            {
                "tenant": tenant,
                "num_sessions": len(sessions),
                "num_tokens": sum(session.record.num_tokens for session in sessions),
                "num_blocks": num_blocks,
                "num_bytes": num_blocks * namespace.layout.block_bytes,
                "num_expired": sum(session.expired(now_s) for session in sessions),
            }
        )
    return {
        "namespace": namespace_facts(namespace),
        **{name: sum(each[name] for each in tenants) for name in _SUMS},
        "num_damaged_rows": len(listing.damaged),
        "tenants": tenants,
        "disk": facts_of(use, now_s),
    }


def shown(facts: Facts) -> Parts:
    """The facts of one command as tables and lines."""
    return _SHOWN[facts["command"]](facts)


def print_parts(parts: Parts, console: rich.console.Console) -> None:
    """Shows tables and lines."""
    for part in parts:
        if isinstance(part, rich.table.Table):
            console.print(part)
        else:
            note(console, *part)


def _list(facts: Facts) -> Parts:
    sessions = facts["sessions"]
    yield sessions_table(sessions, "created", "last used", "expires", "pinned", "state", "weights")
    yield (sums_line(sessions),)
    for row in facts["damaged_rows"]:
        yield f"damaged row of the catalog: {row['found']}", "red"


def _show(facts: Facts) -> Parts:
    session, namespace = facts["session"], facts["namespace"]
    layout, token_ids = namespace["layout"], facts["first_token_ids"]
    groups = layout.get("groups") or [{**layout, "layers": range(layout["num_layers"])}]
    shape = " and ".join(
        f"{len(group['layers'])} layers x {group['num_kv_heads']} KV heads x {group['head_dim']}" for group in groups
    )
    rows = [
        *session_rows(session, "session", "key", "tenant"),
        ("tokens", f"{session['num_tokens']:,}, after {session['num_dropped']:,} were dropped"),
        ("size", f"{size(session)} in {session['num_blocks']:,} blocks"),
        *session_rows(session, "created"),
        ("last used", f"{describe_time(session['last_used_s'])}, saved {session['generation']} times"),
        *session_rows(session, "expires", "pinned", "state"),
        ("weights", namespace["weights"]),
        ("layout", f"{shape}, {layout['dtype']}, blocks of {layout['block_tokens']} tokens"),
        ("blocks at", facts["blocks_at"]),
        ("first token ids", "not readable" if token_ids is None else " ".join(map(str, token_ids))),
    ]
    yield table(("", ""), rows)
    if facts["damage"]:
        yield f"damaged: {facts['damage']}", "red"
    yield ("",)
    blocks = [[f"{each[name]}" for name in ("index", "block_id", "tokens")] for each in facts["blocks"]]
    yield table((">block", ">id on disk", ">tokens"), blocks)


def _verify(facts: Facts) -> Parts:
    damaged, problems = facts["damaged"], facts["catalog_problems"]
    if damaged:
        rows = []
        for each in damaged:
            for damage in each["damages"]:
                at = ("-" if damage[name] is None else f"{damage[name]}" for name in ("index", "block_id"))
                rows.append((*who(each), *at, damage["reason"], damage["found"]))
        yield table(("session", "tenant", "key", ">block", ">id on disk", "damage", "found"), rows)
    for problem in problems:
        of = "" if problem["key"] is None else f" (session {problem['key'][:SHORT]})"
        yield f"catalog{of}: {problem['found']}", "red"
    found = f"{len(damaged):,} of {facts['num_sessions']:,} sessions damaged, {len(problems):,} other problems"
    of_all = f"{facts['num_blocks']:,} blocks, {size(facts)}"
    yield f"{found} of the catalog; {of_all}", "red" if damaged or problems else "green"


def _gc(facts: Facts) -> Parts:
    would = "would be " if facts["dry_run"] else ""
    forgotten = [each for namespace in facts["namespaces"] for each in namespace["forgotten"]]
    if forgotten:
        yield table(("session", "tenant", "key", "why"), [(*who(each), each["reason"]) for each in forgotten])
    namespaces = []
    for each in facts["namespaces"]:
        name, leftovers = each["namespace"] + (f", {would}dropped" if each["dropped"] else ""), each["num_leftovers"]
        counts = (f"{len(each['forgotten']):,}", f"{each['num_blocks']:,}", size(each))
        namespaces.append((name, each["weights"][:SHORT], *counts, "-" if leftovers is None else f"{leftovers:,}"))
    yield table(("namespace", "weights", ">forgotten", ">blocks", ">freed", ">leftovers"), namespaces)
    if facts["files"]:
        yield (f"{would}deleted ({size(facts, 'num_file_bytes')}): {', '.join(facts['files'])}",)
    if facts["compacted_bytes"] is not None:
        yield (f"catalog: {size(facts, 'catalog_bytes')} before, {size(facts, 'compacted_bytes')} now",)
    if facts["not_compacted"] is not None:
        yield f"catalog not compacted: {facts['not_compacted']}", "red"
    freed = decimal(sum(each["num_bytes"] for each in facts["namespaces"]) + facts["num_file_bytes"])
    yield (f"{len(forgotten):,} sessions {would}forgotten, {freed} {would}freed",)


def _export(facts: Facts) -> Parts:
    if facts["exported"]:
        yield sessions_table(facts["exported"], "file")
    for each in facts["damaged"]:
        yield f"not exported: {each['found']}", "red"
    yield (f"{len(facts['exported']):,} sessions exported, {len(facts['damaged']):,} damaged",)


def _drop(facts: Facts) -> Parts:
    session, tenant, key = who(facts["forgotten"][0])
    freed = f"{facts['num_blocks']:,} blocks deleted, {size(facts)} freed"
    yield (f"session {session!r} of tenant {tenant!r} ({key}) dropped: {freed}",)


def _stats(facts: Facts) -> Parts:
    rows = []
    for each in facts["namespaces"]:
        disk = each["disk"]
        on_disk = ("-", "-") if disk is None else (f"{disk['num_files']:,}", size(disk))
        name, weights = each["namespace"]["name"], each["namespace"]["weights"][:SHORT]
        rows.append((name, weights, "all", *_sums(each), *on_disk, f"{each['num_damaged_rows']:,}"))
        rows.extend(("", "", tenant["tenant"], *_sums(tenant), "", "", "") for tenant in each["tenants"])
    sums = (">sessions", ">tokens", ">blocks", ">size")
    yield table(("namespace", "weights", "tenant", *sums, ">files", ">on disk", ">damaged rows"), rows)
    for name, use in facts["unknown"].items():
        yield (f"of no namespace: {name}, {use['num_files']:,} files, {size(use)}; gc deletes it",)
    disk = f"disk {size(facts, 'free_bytes')} free of {size(facts, 'total_bytes')}"
    yield (f"catalog {size(facts['catalog'])}; {disk}",)


def _claim(facts: Facts) -> Parts:
    for each in facts["taken"]:
        yield (f"{each['num_blocks']:,} blocks at {each['blocks_at']}, before of {each['owner'] or 'nobody known'}",)


_SHOWN = {part.__name__[1:]: part for part in (_list, _show, _verify, _gc, _export, _drop, _stats, _claim)}


def table(columns: tuple[str, ...], rows: Iterable[Sequence[str]]) -> rich.table.Table:
    """A table without lines."""
    return make_table(columns, rows, ruled=False)


def who(facts: Facts) -> tuple[str, str, str]:
    """Session, tenant and shortened key of what has a `key` and perhaps a `session`."""
    session = facts["session"]
    named = ("?", "?") if session is None else (session["session_id"], session["tenant"])
    return (*named, facts["key"][:SHORT])


def sessions_table(sessions: Sequence[Facts], *cells: str) -> rich.table.Table:
    """Sessions, a row each: what they are called, how large they are, and other cells by name."""
    columns = ("session", "tenant", ">tokens", ">size", *cells)
    return table(columns, [[_CELLS[name.removeprefix(">")](each) for name in columns] for each in sessions])


def session_rows(session: Facts, *cells: str) -> list[tuple[str, str]]:
    """One session: cells by name, each a row."""
    return [(name, _CELLS[name](session)) for name in cells]


def sums_line(sessions: Sequence[Facts]) -> str:
    """How many sessions these are, and how large."""
    tokens, num_bytes = (sum(each[name] for each in sessions) for name in ("num_tokens", "num_bytes"))
    return f"{len(sessions):,} sessions, {tokens:,} tokens, {decimal(num_bytes)}"


def _sums(facts: Facts) -> tuple[str, str, str, str]:
    return f"{facts['num_sessions']:,}", f"{facts['num_tokens']:,}", f"{facts['num_blocks']:,}", size(facts)


def size(facts: Mapping[str, Any], name: str = "num_bytes") -> str:
    """Bytes, rounded."""
    return decimal(facts[name])


def _expiry(session: Facts) -> str:
    if session["expires_s"] is None:
        return "never"
    if session["pinned"]:
        return "never, pinned"
    return f"{describe_time(session['expires_s'])}{', expired' if session['expired'] else ''}"


_CELLS: Mapping[str, Callable[[Facts], str]] = {
    "session": lambda session: session["session_id"],
    **{name: operator.itemgetter(name) for name in ("key", "tenant", "state", "file")},
    "tokens": lambda session: f"{session['num_tokens']:,}",
    "size": size,
    "created": lambda session: describe_time(session["created_s"]),
    "last used": lambda session: describe_time(session["last_used_s"]),
    "expires": _expiry,
    "pinned": lambda session: "yes" if session["pinned"] else "no",
    "weights": lambda session: session["weights"][:SHORT],
    "owner": lambda session: session["owner"][:SHORT],
    "namespace": lambda session: session["namespace"][:SHORT],
}  # What tables say of a session.
