"""The tool that looks after objects that replicas share: every command, as tables and as JSON, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import rich.console

from ca_jax.launch import store_objects, store_report
from ca_jax.launch.store import is_sound
from ca_jax.launch.store_objects import ObjectsRequest
from ca_jax.launch.store_report import CommandError
from ca_jax.storage.inspector import StoredNameError
from ca_jax.storage.objects.manifest import manifest_name
from ca_jax.storage.objects.store import ObjectStore
from tests.scripts_kit import run_script
from tests.storage.objects import shared_kit as kit
from tests.storage.objects.shared_kit import RUN_TOKENS, TOKEN_BYTES, Replica, short_runs

pytestmark = pytest.mark.usefixtures(short_runs.__name__)
KEYS = {"chat": "a1" * 32, "notes": "a2" * 32, "bob": "b3" * 32}
LONG = list(range(RUN_TOKENS + 2))


def url_of(path: Path) -> str:
    return f"file://{path}/shared"


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    """Three sessions of two tenants; the time of one is over."""
    store = ObjectStore(url_of(tmp_path), 5.0)
    replica = Replica(store)
    replica.publish(KEYS["chat"], LONG, used_s=1e9)
    replica.publish(KEYS["notes"], LONG[:-1], used_s=2e9, ttl_s=None, pinned=True)
    replica.publish(KEYS["bob"], LONG, used_s=1.5e9, ttl_s=60.0, tenant="bob")
    return store


def ask(path: Path, command: str = "list", session: str | None = None, **options: object) -> tuple[dict[str, Any], str]:
    """Runs a command; what it tells, which is JSON, and its tables."""
    request = ObjectsRequest(url=url_of(path), command=command, session=session, **options)
    facts = store_objects.run(request, lambda *_: None)
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["command"], facts["objects_url"]) == (command, url_of(path))
    output = io.StringIO()
    store_report.print_parts(store_objects.shown(facts), rich.console.Console(file=output, width=250))
    return facts, output.getvalue()


def test_list_and_show_tell_of_sessions(tmp_path, objects):
    facts, text = ask(tmp_path)
    assert [each["key"] for each in facts["sessions"]] == [KEYS["chat"], KEYS["bob"], KEYS["notes"]]
    chat, bob, notes = facts["sessions"]
    assert (chat["num_tokens"], chat["num_objects"], chat["num_bytes"]) == (len(LONG), 2, len(LONG) * TOKEN_BYTES)
    assert (chat["expires_s"], bob["expires_s"], bob["expired"]) == (None, 1.5e9 + 60, True)
    assert (notes["pinned"], notes["owner"], notes["tenant"], bob["tenant"]) == (True, "a", "alice", "bob")
    assert text.splitlines()[-1] == f"3 sessions, 29 tokens, {store_report.size({'num_bytes': 29 * TOKEN_BYTES})}"
    facts, text = ask(tmp_path, tenant="bob")
    assert ([each["key"] for each in facts["sessions"]], "alice" in text) == ([KEYS["bob"]], False)
    facts, text = ask(tmp_path, "show", "b3")
    assert [(each["first"], each["tokens"]) for each in facts["objects"]] == [(0, RUN_TOKENS), (RUN_TOKENS, 2)]
    assert all(each["name"] in text for each in facts["objects"])
    with pytest.raises(StoredNameError, match="one of 3 sessions, got 2 for 'a'"):
        ask(tmp_path, "show", "a")


def test_verify_finds_damage(tmp_path, objects):
    facts, text = ask(tmp_path, "verify")
    assert (is_sound(facts), facts["num_sessions"], facts["num_objects"]) == (True, 3, 5)
    name = kit.stored(objects, KEYS["chat"]).parts[1].name
    objects.write(name, objects.read(name).value[:-1])
    objects.write(manifest_name(kit.SPACE, KEYS["notes"]), b"?")
    facts, text = ask(tmp_path, "verify")
    assert not is_sound(facts)
    found = {each["key"]: [damage["reason"] for damage in each["damages"]] for each in facts["damaged"]}
    assert found == {KEYS["chat"]: ["corrupt"], KEYS["notes"]: ["catalog"]}
    assert "2 of 3 sessions damaged" in text
    assert is_sound(ask(tmp_path, "verify", tenant="bob")[0])
    facts, text = ask(tmp_path)
    assert [row["key"] for row in facts["damaged_rows"]] == [KEYS["notes"]]
    assert "cannot be read, and stays: a manifest must pass its checksum" in text


def test_gc_says_what_it_deletes(tmp_path, objects):
    kit.orphan(objects, list(range(50, 53)))
    before = kit.contents(objects)
    freed = 3 * 8192 + (len(LONG) + 3) * TOKEN_BYTES
    facts, text = ask(tmp_path, "gc", dry_run=True)
    assert kit.contents(objects) == before
    assert [(each["session"]["session_id"], each["reason"]) for each in facts["forgotten"]] == [
        (f"name of {KEYS['bob']}", "expired")
    ]
    assert (facts["num_objects"], facts["num_bytes"], facts["num_hints"]) == (3, freed, 2)
    assert "1 sessions would be forgotten" in text
    done, text = ask(tmp_path, "gc", grace_s=0.0)
    assert {**done, "time_s": 0, "dry_run": True} == {**facts, "time_s": 0}
    assert "1 sessions forgotten" in text
    facts, _ = ask(tmp_path, "gc", grace_s=0.0, max_gib=0.0, tenant="bob")
    assert not facts["forgotten"]
    facts, _ = ask(tmp_path, "gc", grace_s=0.0, tenant_quota_gib=0.0)
    assert [(each["key"], each["reason"]) for each in facts["forgotten"]] == [(KEYS["chat"], "quota")]
    assert [each["key"] for each in ask(tmp_path)[0]["sessions"]] == [KEYS["notes"]], "it is pinned"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": "export"}, "with objects_url must be one of list, show, verify, gc"),
        ({"command": "show"}, "show must be told a session's id or the beginning of its key, got none"),
        ({"command": "gc", "session": "x"}, "gc must be told no session, got 'x'"),
        ({"command": "list", "dry_run": True}, "dry_run must come with gc, got list"),
        ({"command": "verify", "grace_s": 0.0}, "grace_s must come with gc, got verify"),
        ({"command": "gc", "max_gib": -1.0}, "max_gib must be a number >= 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(CommandError, match=message):
        ObjectsRequest(url="memory://", **options)


def test_it_runs_from_the_command_line(tmp_path, objects):
    json_out = tmp_path / "out.json"
    url = url_of(tmp_path)
    done = run_script("store", f"--objects_url={url}", f"--json_out={json_out}")
    assert (done.code, done.err, "3 sessions, 29 tokens" in done.out) == (0, "", True)
    assert len(json.loads(json_out.read_text())["sessions"]) == 3
    done = run_script("store", f"--objects_url={url}", "gc", "--grace_s=0", "--max_gib=1")
    assert (done.code, "1 sessions forgotten" in done.out) == (0, True)
    objects.write(manifest_name(kit.SPACE, KEYS["notes"]), b"?")
    assert run_script("store", f"--objects_url={url}", "verify").code == 1
    wanted = "exactly one of --ssd_dir and --objects_url must be given, got"
    for arguments, message in (
        ((), f"{wanted} none"),
        ((f"--ssd_dir={tmp_path}", f"--objects_url={url}"), f"{wanted} both"),
        ((f"--objects_url={url}", "gc", "--verify"), "verify must be left out with objects_url, got True"),
        ((f"--ssd_dir={tmp_path}", "gc", "--grace_s=5"), "grace_s must be left out with ssd_dir, got 5.0"),
        (
            (f"--objects_url={url}", "stats"),
            "a command with objects_url must be one of list, show, verify, gc; got 'stats'",
        ),
    ):
        done = run_script("store", *arguments)
        assert (done.code, done.out) == (1, "")
        assert message in done.err
