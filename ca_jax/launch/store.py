"""Looks after a store's directory: what is kept on SSD, whose, how old and how big, whether it is sound; and cleans it.

    python -m ca_jax.launch.store --ssd_dir=D                      list of all sessions
    python -m ca_jax.launch.store --ssd_dir=D show ID              one session and its blocks
    python -m ca_jax.launch.store --ssd_dir=D verify               reads every block; exit code 1 if any is damaged
    python -m ca_jax.launch.store --ssd_dir=D stats                sizes by namespace and tenant
    python -m ca_jax.launch.store --ssd_dir=D export --output_dir=E [ID]   KV and tokens as safetensors files
    python -m ca_jax.launch.store --ssd_dir=D gc [--dry_run] [--verify] [--drop_namespace=N]
    python -m ca_jax.launch.store --ssd_dir=D drop ID
    python -m ca_jax.launch.store --ssd_dir=D --ssd_url=U claim    blocks at U become those of D
    python -m ca_jax.launch.store --objects_url=U [list | show ID | verify | gc]   sessions that replicas share

ID is a session's id, its key, or the beginning of its key. gc, drop and claim want no engine to run on the directory,
claim none on that which had the blocks before; the others may run beside one and change nothing. Results go to stdout,
and with --json_out to a file too.

Not here: reading and changing the directory (`ca_jax.storage`), what is said of it (`store_report`), objects
(`store_objects`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.numpy
from absl import flags

from ca_jax.errors import CaJaxError
from ca_jax.launch import store_objects, store_report
from ca_jax.launch.flags import out_path
from ca_jax.launch.script import make_console, write_json
from ca_jax.launch.script import run as run_script
from ca_jax.launch.store_objects import ObjectsRequest
from ca_jax.launch.store_report import Asked, CommandError, Facts, facts_of, row_facts
from ca_jax.launch.terminal import progress_bars
from ca_jax.pretrained import Progress
from ca_jax.storage.catalog.records import DamagedRecordError
from ca_jax.storage.collect import collect_garbage, drop_session, find_namespaces, take_over_blocks
from ca_jax.storage.config import SSD_DRIVERS
from ca_jax.storage.inspector import (
    DamagedSessionError,
    SessionKV,
    StoredSession,
    StoreInspector,
    catalog_problems,
    read_session,
    verify,
)
from ca_jax.storage.records import BlockIoError

FLAGS = flags.FLAGS

_LONG = ("verify", "export")  # Commands that report progress.
_FIRST_TOKEN_IDS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(Asked):
    """What to do with which store. Raises as of `Asked`."""

    COMMANDS = ("list", "show", "verify", "gc", "export", "drop", "stats", "claim")
    WITH_ID = MappingProxyType({"show": True, "drop": True, "export": False})
    OPTIONS_OF = MappingProxyType(
        {"output_dir": "export", **dict.fromkeys(("drop_namespaces", "dry_run", "verify_blocks"), "gc")}
    )

    directory: Path
    url: str | None = None
    driver: str | None = None
    output_dir: Path | None = None
    drop_namespaces: tuple[str, ...] = ()
    verify_blocks: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for command, name, value in (("export", "output_dir", self.output_dir), ("claim", "ssd_url", self.url)):
            if self.command == command and value is None:
                raise CommandError(f"{command} must be told {name}, got none")


def run(request: Request, progress: Progress) -> Facts:
    """Does what was asked for; what was found or done: `command`, `directory`, `time_s`, and what the command tells.

    Raises:
      CaJaxError: the directory, the catalog or the session cannot be had; the kind says why.
      BlockIoError: blocks cannot be deleted.
      OSError: a file cannot be written or deleted.
      ValueError: two options that exclude each other, or blocks of another layout than the catalog says.
    """
    now_s = time.time()
    with StoreInspector(request.directory, url=request.url, driver=request.driver) as inspector:
        facts = _ACTIONS[request.command](inspector, request, now_s, progress)
    return {"command": request.command, "directory": str(request.directory), "time_s": now_s, **facts}


def is_sound(facts: Facts) -> bool:
    """False where something is damaged; rows of the catalog that a list passes over are not looked at."""
    return not any(facts.get(name) for name in ("damage", "damaged", "catalog_problems"))


def _list(inspector: StoreInspector, request: Request, now_s: float, _: Progress) -> Facts:
    listing = inspector.sessions(request.tenant)
    return {"sessions": facts_of(listing.sound, now_s), "damaged_rows": list(map(row_facts, listing.damaged))}


def _show(inspector: StoreInspector, request: Request, now_s: float, _: Progress) -> Facts:
    session = inspector.find(request.session or "", request.tenant)
    record, layout = session.record, session.namespace.layout
    found, first_token_ids = None, None
    try:
        contents = inspector.reader(session.namespace).contents(record.key)
        if contents is not None:
            first_token_ids = contents.token_ids[:_FIRST_TOKEN_IDS].tolist()
    except DamagedRecordError as error:
        found = str(error)
    tokens_of = {rows.index: rows.num_tokens for rows in record.places.by_block(layout.block_tokens)}
    return {
        "session": facts_of(session, now_s),
        "namespace": store_report.namespace_facts(session.namespace),
        "blocks_at": inspector.block_location(session.namespace),
        "blocks": [
            {"index": index, "block_id": block_id, "tokens": tokens_of.get(index, 0)}
            for index, block_id in enumerate(record.block_ids.tolist())
        ],
        "first_token_ids": first_token_ids,
        "damage": found,
    }


def _verify(inspector: StoreInspector, request: Request, now_s: float, progress: Progress) -> Facts:
    listing = inspector.sessions(request.tenant)
    total = len(listing.sound) + len(listing.damaged)
    verdicts = []
    for verdict in verify(inspector, request.tenant):
        verdicts.append(verdict)
        progress("verify", len(verdicts), max(total, len(verdicts)))
    read = [verdict.session for verdict in verdicts if verdict.session is not None]
    damaged = facts_of([verdict for verdict in verdicts if not verdict.ok], now_s)
    told = {each["key"] for each in damaged}
    problems = [] if request.tenant is not None else catalog_problems(inspector)  # They are the whole store's.
    return {
        "num_sessions": len(verdicts),
        "num_blocks": sum(session.record.num_blocks for session in read),
        "num_bytes": sum(session.num_bytes for session in read),
        "damaged": damaged,
        "catalog_problems": facts_of([each for each in problems if each.key not in told], now_s),
    }


def _gc(inspector: StoreInspector, request: Request, now_s: float, _: Progress) -> Facts:
    garbage = collect_garbage(
        inspector,
        now_s=now_s,
        tenant=request.tenant,
        drop=find_namespaces(inspector, request.drop_namespaces),
        read_blocks=request.verify_blocks,
        dry_run=request.dry_run,
    )
    return {"dry_run": request.dry_run, **facts_of(garbage, now_s)}


def _export(inspector: StoreInspector, request: Request, now_s: float, progress: Progress) -> Facts:
    output_dir, damaged = request.output_dir or Path(), []
    if request.session is not None:
        sessions: Sequence[StoredSession] = [inspector.find(request.session, request.tenant)]
    else:
        listing = inspector.sessions(request.tenant)
        sessions, damaged = listing.sound, list(map(row_facts, listing.damaged))
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise CommandError(f"output_dir must be a new or empty directory, got {output_dir}")
    output_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    exported = []
    for done, session in enumerate(sessions, 1):
        try:
            read = read_session(inspector, session)
        except DamagedSessionError as error:
            damaged.append({**facts_of(session, now_s), "found": str(error)})
        else:
            if read is not None:  # Not forgotten meanwhile.
                path = output_dir / f"{session.record.key}.safetensors"
                _write(read, path)
                exported.append({**facts_of(read.session, now_s), "file": str(path)})
        progress("export", done, len(sessions))
    return {"exported": exported, "damaged": damaged}


def _write(read: SessionKV, path: Path) -> None:
    record, namespace = read.session.record, read.session.namespace
    metadata = {
        **{name: getattr(record, name) for name in ("session_id", "tenant", "key")},
        **{name: getattr(namespace, name) for name in ("weights", "position_encoding", "mesh_shard")},
        "num_dropped": str(record.lineage.num_dropped),
        "axes": "kv: layer, key or value, token, KV head, head dim",
    }
    arrays = {"token_ids": read.token_ids}
    for group, kv in zip(namespace.layout.groups, read.groups, strict=True):
        name = "kv" if len(read.groups) == 1 else f"kv of layers {' '.join(map(str, group.layers))}"
        arrays[name] = kv
    safetensors.numpy.save_file(arrays, path, metadata=metadata)


def _drop(inspector: StoreInspector, request: Request, now_s: float, _: Progress) -> Facts:
    return dict(facts_of(drop_session(inspector, inspector.find(request.session or "", request.tenant)), now_s))


def _stats(inspector: StoreInspector, request: Request, now_s: float, _: Progress) -> Facts:
    use = inspector.disk_use()
    return {
        "namespaces": [
            {
                "created_s": created_s,
                **store_report.usage_facts(each, inspector.sessions(request.tenant, each), use.blocks.get(each), now_s),
            }
            for each, created_s in inspector.namespaces().items()
        ],
        "catalog": facts_of(use.catalog, now_s),
        "unknown": facts_of(use.unknown, now_s),
        "free_bytes": use.free_bytes,
        "total_bytes": use.total_bytes,
    }


def _claim(inspector: StoreInspector, _: Request, now_s: float, __: Progress) -> Facts:
    return {"taken": facts_of(take_over_blocks(inspector), now_s)}


_ACTIONS = dict(zip(Request.COMMANDS, (_list, _show, _verify, _gc, _export, _drop, _stats, _claim), strict=True))


def _define_flags() -> None:
    """Only where this is the program: scripts share names of flags, and a test imports several of them."""
    flags.DEFINE_string("ssd_dir", None, "Directory of the store. This, or objects_url.")
    flags.DEFINE_string("objects_url", None, "Where replicas share sessions: a TensorStore URL. This, or ssd_dir.")
    flags.DEFINE_string("ssd_url", None, "Where its blocks are, if not in ssd_dir: a TensorStore URL.")
    flags.DEFINE_enum("ssd_driver", None, SSD_DRIVERS, "How blocks are kept; needed only where there are both kinds.")
    flags.DEFINE_string("tenant", None, "Sessions of this tenant only.")
    flags.DEFINE_string("json_out", None, "Also write the result to this file, as JSON.")
    flags.DEFINE_string("output_dir", None, "export: where to write; must be new or empty.")
    text = "gc: drop a namespace, by its name in stats or the beginning of its weights' fingerprint."
    flags.DEFINE_multi_string("drop_namespace", [], text)
    flags.DEFINE_bool("dry_run", False, "gc: only say what would go.")
    text = "gc of objects: seconds between its two looks, 600 if not given; longer than any publish takes."
    flags.DEFINE_float("grace_s", None, text)
    text = "gc of objects: most that sessions may hold, GiB; those go first that were used least recently."
    flags.DEFINE_float("max_gib", None, text)
    flags.DEFINE_float("tenant_quota_gib", None, "gc of objects: most that one tenant may hold, GiB.")
    flags.DEFINE_bool("verify", False, "gc: read every block, and forget sessions with a damaged one.")


_OF_DIRECTORY = ("ssd_url", "ssd_driver", "output_dir", "drop_namespace", "verify")
_OF_OBJECTS = ("grace_s", "max_gib", "tenant_quota_gib")


def _request(arguments: Sequence[str]) -> Request | ObjectsRequest:
    """What the command line asks for."""
    if len(arguments) > 2:
        raise CommandError(f"arguments must be a command and at most one session, got {' '.join(arguments)}")
    given = [name for name in ("ssd_dir", "objects_url") if getattr(FLAGS, name) is not None]
    if len(given) != 1:
        raise CommandError(
            f"exactly one of --ssd_dir and --objects_url must be given, got {'both' if given else 'none'}"
        )
    for name in _OF_OBJECTS if given == ["ssd_dir"] else _OF_DIRECTORY:
        if FLAGS[name].present:
            raise CommandError(f"{name} must be left out with {given[0]}, got {FLAGS[name].value!r}")
    asked: dict[str, Any] = dict(zip(("command", "session"), arguments, strict=False))
    asked |= {"tenant": FLAGS.tenant, "dry_run": FLAGS.dry_run}
    if given == ["objects_url"]:
        asked |= {name: FLAGS[name].value for name in _OF_OBJECTS}
        return ObjectsRequest(url=FLAGS.objects_url, **asked)
    return Request(
        directory=Path(FLAGS.ssd_dir).expanduser(),
        url=FLAGS.ssd_url,
        driver=FLAGS.ssd_driver,
        output_dir=None if FLAGS.output_dir is None else Path(FLAGS.output_dir).expanduser(),
        drop_namespaces=tuple(FLAGS.drop_namespace),
        verify_blocks=FLAGS.verify,
        **asked,
    )


def main(argv: Sequence[str]) -> None:
    """Runs from the command line."""
    json_out = out_path("json_out")  # Before anything is deleted.
    request = _request(argv[1:])
    quiet: contextlib.AbstractContextManager[Progress] = contextlib.nullcontext(lambda what, done, total: None)
    with progress_bars() if request.command in _LONG else quiet as progress:
        if isinstance(request, ObjectsRequest):
            facts = store_objects.run(request, progress)
            parts = store_objects.shown(facts)
        else:
            facts = run(request, progress)
            parts = store_report.shown(facts)
    store_report.print_parts(parts, make_console())
    if json_out is not None:
        write_json(facts, json_out)
    sys.exit(0 if is_sound(facts) else 1)


if __name__ == "__main__":
    _define_flags()
    run_script(main, arguments=True, errors=(CaJaxError, BlockIoError, OSError, ValueError))
