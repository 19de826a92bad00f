"""What `ca_jax.launch.store` does with objects that replicas share, and what it says of them.

    python -m ca_jax.launch.store --objects_url=U                  list of all sessions
    python -m ca_jax.launch.store --objects_url=U show ID          one session and its objects
    python -m ca_jax.launch.store --objects_url=U verify           reads every object; exit code 1 if any is damaged
    python -m ca_jax.launch.store --objects_url=U gc [--dry_run] [--grace_s=600] [--max_gib=G]

All of it may run beside engines.

Not here: reading and collecting (`ca_jax.storage.objects`), a store's directory (`store`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

import rich.table

from ca_jax.errors import check
from ca_jax.launch import store_report
from ca_jax.launch.store_report import Asked, CommandError, Facts
from ca_jax.pretrained import Progress
from ca_jax.storage.config import GIB
from ca_jax.storage.inspector import StoredNameError
from ca_jax.storage.objects.collector import collect
from ca_jax.storage.objects.store import ObjectStore
from ca_jax.storage.objects.survey import Stored, survey, verify

_DEADLINE_S = 60.0  # Of a request: a listing of many objects is one.
_GRACE_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectsRequest(Asked):
    """What to do with objects at which URL. Raises as of `Asked`; CommandError too where a number is out of range."""

    COMMANDS = ("list", "show", "verify", "gc")
    WITH_ID = MappingProxyType({"show": True})
    OPTIONS_OF = MappingProxyType(dict.fromkeys(("dry_run", "grace_s", "max_gib", "tenant_quota_gib"), "gc"))
    WHERE = " with objects_url"

    url: str
    grace_s: float | None = None
    max_gib: float | None = None
    tenant_quota_gib: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("grace_s", "max_gib", "tenant_quota_gib"):
            value = getattr(self, name)
            check(value is None or 0 <= value < math.inf, name, "a number >= 0", value, CommandError)


def run(request: ObjectsRequest, progress: Progress) -> Facts:
    """Does what was asked for; what was found or done: `command`, `objects_url`, `time_s`, and what the command tells.

    Raises:
      CaJaxError: the objects or the session cannot be had, or another collector is at work; the kind says why.
    """
    now_s = time.time()
    objects = ObjectStore(request.url, _DEADLINE_S)
    facts = _ACTIONS[request.command](objects, request, now_s, progress)
    return {"command": request.command, "objects_url": request.url, "time_s": now_s, **facts}


def _list(objects: ObjectStore, request: ObjectsRequest, now_s: float, _: Progress) -> Facts:
    looked = survey(objects)
    sessions = [_facts(stored, now_s) for stored in _sessions(looked.stored(), request.tenant)]
    damaged = [_row(stored) for stored in looked.stored() if stored.manifest is None and request.tenant is None]
    return {"sessions": sessions, "damaged_rows": damaged}


def _show(objects: ObjectStore, request: ObjectsRequest, now_s: float, _: Progress) -> Facts:
    stored = _found(survey(objects).stored(), request.session or "", request.tenant)
    manifest = stored.alive
    parts = () if manifest is None else manifest.parts
    return {
        "session": _facts(stored, now_s),
        "objects": [{"name": part.name, "first": part.first, "tokens": part.num_tokens} for part in parts],
    }


def _verify(objects: ObjectStore, request: ObjectsRequest, now_s: float, progress: Progress) -> Facts:
    verdicts = []
    for verdict in verify(objects, request.tenant):
        verdicts.append(verdict)
        progress("verify", len(verdicts), len(verdicts))
    parts = {part.name for each in verdicts if (manifest := each.session.alive) is not None for part in manifest.parts}
    return {
        "num_sessions": len(verdicts),
        "num_objects": len(parts),
        "num_bytes": sum(verdict.num_bytes for verdict in verdicts),
        "damaged": [
            {**_row(each.session, now_s), "damages": store_report.facts_of(each.damages, now_s)}
            for each in verdicts
            if not each.ok
        ],
    }


def _gc(objects: ObjectStore, request: ObjectsRequest, now_s: float, _: Progress) -> Facts:
    collected = collect(
        objects,
        max_bytes=_in_bytes(request.max_gib),
        tenant_quota_bytes=_in_bytes(request.tenant_quota_gib),
        tenant=request.tenant,
        grace_s=_GRACE_S if request.grace_s is None else request.grace_s,
        dry_run=request.dry_run,
        now_s=now_s,
    )
    counts = (field.name for field in dataclasses.fields(collected) if field.name not in ("forgotten", "unreadable"))
    return {
        "dry_run": request.dry_run,
        "forgotten": [{**_row(each.session, now_s), "reason": each.reason} for each in collected.forgotten],
        "damaged_rows": [_row(each) for each in collected.unreadable],
        **{name: getattr(collected, name) for name in counts},
    }


_ACTIONS: Mapping[str, Callable[[ObjectStore, ObjectsRequest, float, Progress], Facts]]
_ACTIONS = dict(zip(ObjectsRequest.COMMANDS, (_list, _show, _verify, _gc), strict=True))


def _in_bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def _sessions(stored: Iterable[Stored], tenant: str | None) -> list[Stored]:
    """Those that were not forgotten, the last used one last."""
    found = [
        (manifest.used_s, each) for each in stored if (manifest := each.alive) and tenant in (None, manifest.tenant)
    ]
    return [each for _, each in sorted(found, key=lambda each: each[0])]


def _found(stored: Iterable[Stored], name: str, tenant: str | None) -> Stored:
    """The session that has this id or key, or else the one whose key begins so.

    Raises:
      StoredNameError: there is none, or there are several.
    """
    sessions = [(each, manifest) for each in _sessions(stored, tenant) if (manifest := each.alive)]
    found = [each for each in sessions if name in (each[1].session_id, each[0].key)]
    found = found or [each for each in sessions if name and each[0].key.startswith(name)]
    if len(found) != 1:
        told = "".join(f"\n  {each.key}  session {of.session_id!r} of tenant {of.tenant!r}" for each, of in found)
        raise StoredNameError(
            f"the name must be the id or the beginning of the key of one of {len(sessions)} sessions, "
            f"got {len(found)} for {name!r}{told}"
        )
    return found[0][0]


def _facts(stored: Stored, now_s: float) -> Facts:
    """What is told of a session, by the names that a store's directory has for the same."""
    manifest = stored.manifest
    if manifest is None:
        return {}
    return {
        **{name: getattr(manifest, name) for name in ("session_id", "key", "tenant", "num_tokens")},
        "num_objects": len(manifest.parts),
        "last_used_s": manifest.used_s,
        "ttl_s": manifest.ttl_s,
        "expires_s": None if manifest.ttl_s is None else manifest.used_s + manifest.ttl_s,
        "pinned": manifest.pinned,
        "owner": manifest.owner,
        "epoch": manifest.epoch,
        "namespace": manifest.namespace,
        "num_bytes": manifest.num_bytes,
        "expired": stored.expired(now_s),
        "state": "ready",
    }


def _row(stored: Stored, now_s: float | None = None) -> Facts:
    """A manifest: what is wrong with it where it cannot be read, else its session if a time is given."""
    row: Facts = {"key": stored.key, "namespace": stored.space}
    if now_s is not None:
        return {**row, "session": None if stored.manifest is None else _facts(stored, now_s)}
    return {**row, "found": stored.damage}


# As tables.


def shown(facts: Facts) -> Iterator[rich.table.Table | tuple[str, ...]]:
    """The facts of one command as tables and lines, see `store_report.print_parts`."""
    return _SHOWN[facts["command"]](facts)


def _show_list(facts: Facts) -> Iterator[rich.table.Table | tuple[str, ...]]:
    cells = ("last used", "expires", "pinned", "state", "owner", "namespace")
    yield store_report.sessions_table(facts["sessions"], *cells)
    yield (store_report.sums_line(facts["sessions"]),)
    yield from _show_unreadable(facts)


def _show_session(facts: Facts) -> Iterator[rich.table.Table | tuple[str, ...]]:
    session = facts["session"]
    rows = [
        *store_report.session_rows(session, "session", "key", "tenant", "tokens"),
        ("size", f"{store_report.size(session)} in {session['num_objects']:,} objects"),
        *store_report.session_rows(session, "last used", "expires", "pinned", "state"),
        ("owner", f"{session['owner']}, the {session['epoch']:,}. one"),
        ("namespace", session["namespace"]),
    ]
    yield store_report.table(("", ""), rows)
    yield ("",)
    parts = [[f"{each[name]}" for name in ("first", "tokens", "name")] for each in facts["objects"]]
    yield store_report.table((">first token", ">tokens", "object"), parts)


def _show_verify(facts: Facts) -> Iterator[rich.table.Table | tuple[str, ...]]:
    damaged = facts["damaged"]
    if damaged:
        rows = [
            (*store_report.who(each), damage["name"], damage["reason"], damage["found"])
            for each in damaged
            for damage in each["damages"]
        ]
        yield store_report.table(("session", "tenant", "key", "object", "damage", "found"), rows)
    found = f"{len(damaged):,} of {facts['num_sessions']:,} sessions damaged"
    of_all = f"{facts['num_objects']:,} objects, {store_report.size(facts)}"
    yield f"{found}; {of_all}", "red" if damaged else "green"


def _show_gc(facts: Facts) -> Iterator[rich.table.Table | tuple[str, ...]]:
    would, forgotten = "would be " if facts["dry_run"] else "", facts["forgotten"]
    if forgotten:
        rows = [(*store_report.who(each), each["reason"]) for each in forgotten]
        yield store_report.table(("session", "tenant", "key", "why"), rows)
    yield from _show_unreadable(facts)
    others = (("hints", "num_hints"), ("probes", "num_probes"), ("forgotten sessions", "num_tombstones"))
    told = ", ".join(f"{facts[name]:,} {what}" for what, name in others)
    objects = f"{facts['num_objects']:,} objects of KV ({store_report.size(facts)}), {told}"
    yield (f"{would}deleted: {objects}",)
    if facts["num_rescued"]:
        yield (f"{facts['num_rescued']:,} objects were named meanwhile, and stay",)
    kept = f"{facts['num_sessions']:,} sessions with {store_report.size(facts, 'kept_bytes')} stay"
    freed = f"{store_report.size(facts)} {would}freed"
    yield (f"{len(forgotten):,} sessions {would}forgotten, {freed}; {kept}",)


def _show_unreadable(facts: Facts) -> Iterator[tuple[str, ...]]:
    for row in facts["damaged_rows"]:
        yield f"manifest of {row['key'][: store_report.SHORT]} cannot be read, and stays: {row['found']}", "red"


_SHOWN = dict(zip(ObjectsRequest.COMMANDS, (_show_list, _show_session, _show_verify, _show_gc), strict=True))
