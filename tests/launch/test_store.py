"""The tool that looks after a store's directory: every command, as tables and as JSON, and what it refuses."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import rich.console
import safetensors

from ca_jax.launch import store_report
from ca_jax.launch.store import CommandError, Request, is_sound, run
from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.file import CatalogLockedError
from tests.scripts_kit import run_script
from tests.storage import store_helpers as helpers


@pytest.fixture
def filled(tmp_path):
    return helpers.fill(tmp_path / "store", "zarr3")


def ask(path: Path, command: str = "list", session: str | None = None, **options) -> tuple[dict[str, Any], str]:
    """Runs a command; what it tells, which is JSON, and its tables."""
    facts = run(Request(directory=path / "store", command=command, session=session, **options), lambda *_: None)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["command"] == command
    assert facts["directory"] == str(path / "store")
    output = io.StringIO()
    store_report.print_parts(store_report.shown(facts), rich.console.Console(file=output, width=200))
    return facts, output.getvalue()


def cells(line: str) -> list[str]:
    """The columns of one row of a table."""
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def damage(path: Path) -> None:
    file = helpers.block_file(path / "store", 5)
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)


def test_list_show_and_stats_tell_of_sessions(tmp_path, filled):
    """What is read for them is held by `tests/storage/test_inspector.py`."""
    (tmp_path / "store" / "blocks-0123456789abcdef").mkdir()
    facts, text = ask(tmp_path)
    assert [each["key"] for each in facts["sessions"]] == list(helpers.KEYS.values())
    first, second, third, _ = facts["sessions"]
    assert (first["num_tokens"], first["num_blocks"], first["num_bytes"]) == (10, 3, 3 * helpers.LAYOUT.block_bytes)
    assert (first["expires_s"], second["expires_s"], second["expired"]) == (None, 1e9 + 61, True)
    assert (third["expired"], third["pinned"], third["tenant"]) == (False, True, "bob")
    assert text.splitlines()[-1] == "4 sessions, 28 tokens, 7.7 kB"
    facts, text = ask(tmp_path, tenant="bob")
    assert ([each["key"] for each in facts["sessions"]], "alice" in text) == ([helpers.KEYS["third"]], False)
    facts, text = ask(tmp_path, "show", "b3")
    shown = [[each[name] for name in ("index", "block_id", "tokens")] for each in facts["blocks"]]
    assert (facts["session"]["key"], shown) == (helpers.KEYS["third"], [[0, 7, 4], [1, 5, 4], [2, 6, 1]])
    assert facts["first_token_ids"] == list(range(3000, 3009))
    assert "3 layers x 2 KV heads x 5, float32, blocks of 4 tokens" in text
    facts, _ = ask(tmp_path, "stats")
    first, other = facts["namespaces"]
    assert (first["num_sessions"], first["num_tokens"], first["num_blocks"]) == (3, 23, 7)
    assert (first["disk"]["num_files"], other["num_sessions"]) == (8, 1)
    names = ("tenant", "num_sessions", "num_tokens", "num_expired")
    assert [[each[name] for name in names] for each in first["tenants"]] == [["alice", 2, 14, 1], ["bob", 1, 9, 0]]
    assert 0 < facts["free_bytes"] < facts["total_bytes"]
    assert list(facts["unknown"]) == ["blocks-0123456789abcdef"]
    facts, _ = ask(tmp_path, "stats", tenant="bob")
    assert [each["num_sessions"] for each in facts["namespaces"]] == [1, 0]


def test_names_are_text_and_steer_no_terminal(tmp_path):
    tier = helpers.open_tier(tmp_path / "store", "zarr3")
    with Catalog(tmp_path / "store", helpers.NAMESPACE) as catalog:
        helpers.publish(
            catalog, tier, helpers.KEYS["first"], [0], 4, session_id="[red]\x1b[2J", tenant="[/]", created_s=1e300
        )
    tier.close()
    for command, session in (("list", None), ("show", "a1"), ("stats", None), ("drop", "a1")):
        _, text = ask(tmp_path, command, session)
        assert "\x1b" not in text
        assert "[/]" in text
        assert "[red]\ufffd[2J" in text or command in ("stats", "drop")


def test_a_damaged_row_of_the_catalog_is_told_of(tmp_path, filled):
    with Catalog(tmp_path / "store", helpers.NAMESPACE) as catalog:
        catalog._db.execute("UPDATE sessions SET num_tokens = 3 WHERE key = ?", [helpers.KEYS["first"]])
        catalog._db.execute(
            "UPDATE contents SET sums = x'' WHERE session = (SELECT id FROM sessions WHERE key = ?)",
            [helpers.KEYS["second"]],
        )
        catalog._db.execute("INSERT INTO contents VALUES (99, x'', x'', x'', 0)")
    facts, _ = ask(tmp_path)
    assert [row["key"] for row in facts["damaged_rows"]] == [helpers.KEYS["first"]]
    facts, _ = ask(tmp_path, "show", "notes")
    assert not is_sound(facts)
    assert facts["first_token_ids"] is None
    facts, _ = ask(tmp_path, "verify")
    assert [each["damages"][0]["reason"] for each in facts["damaged"]] == ["catalog", "catalog"]
    assert [problem["key"] for problem in facts["catalog_problems"]] == [None]
    facts, _ = ask(tmp_path, "stats")
    assert [each["num_damaged_rows"] for each in facts["namespaces"]] == [1, 0]
    facts, _ = ask(tmp_path, "export", output_dir=tmp_path / "out")
    assert not is_sound(facts)
    assert [each["key"] for each in facts["exported"]] == [helpers.KEYS["third"], helpers.KEYS["other"]]
    ask(tmp_path, "gc")
    assert is_sound(ask(tmp_path, "verify")[0])


def test_export_writes_what_was_stored_and_leaves_out_what_is_damaged(tmp_path, filled):
    facts, text = ask(tmp_path, "export", output_dir=tmp_path / "new" / "out")
    assert is_sound(facts)
    assert os.stat(tmp_path / "new" / "out").st_mode & 0o777 == 0o700
    assert [each["key"] for each in facts["exported"]] == list(helpers.KEYS.values())
    for name, each in zip(helpers.KEYS, facts["exported"], strict=True):
        kept = filled[name]
        assert each["file"] in text.replace("\n", "")
        with safetensors.safe_open(each["file"], "np") as file:
            kv, token_ids, metadata = file.get_tensor("kv"), file.get_tensor("token_ids"), file.metadata()
        assert kv.dtype == kept.kv.dtype
        assert helpers.as_bits(kv).tolist() == helpers.as_bits(kept.kv).tolist()
        assert token_ids.tolist() == kept.token_ids.tolist()
        weights = (helpers.OTHER_NAMESPACE if name == "other" else helpers.NAMESPACE).weights
        wanted = {"session_id": kept.record.session_id, "tenant": kept.record.tenant, "weights": weights}
        assert wanted.items() <= metadata.items()

    damage(tmp_path)
    facts, text = ask(tmp_path, "export", output_dir=tmp_path / "sound")
    assert not is_sound(facts)
    assert [each["session_id"] for each in facts["exported"]] == ["chat", "notes", "x"]
    assert [each["key"] for each in facts["damaged"]] == [helpers.KEYS["third"]]
    assert len(list((tmp_path / "sound").iterdir())) == 3
    facts, _ = ask(tmp_path, "export", "notes", output_dir=tmp_path / "one")
    assert is_sound(facts)
    assert [path.name for path in (tmp_path / "one").iterdir()] == [f"{helpers.KEYS['second']}.safetensors"]
    with pytest.raises(CommandError, match="must be a new or empty directory"):
        ask(tmp_path, "export", output_dir=tmp_path / "one")


def test_gc_says_what_it_frees(tmp_path, filled):
    (tmp_path / "store" / "blocks-0123456789abcdef").mkdir()
    before = helpers.files_of(tmp_path / "store")
    facts, text = ask(tmp_path, "gc", dry_run=True, drop_namespaces=("bbbb",))
    assert helpers.files_of(tmp_path / "store") == before
    assert "2 sessions would be forgotten, 12.3 kB would be freed" in text
    facts, text = ask(tmp_path, "gc", drop_namespaces=("bbbb",))
    first, other = facts["namespaces"]
    assert [(each["key"], each["reason"]) for each in first["forgotten"]] == [(helpers.KEYS["second"], "expired")]
    assert (other["dropped"], facts["files"]) == (True, ["blocks-0123456789abcdef"])
    assert facts["compacted_bytes"] > 0
    assert "2 sessions forgotten, 12.3 kB freed" in text
    assert [each["key"] for each in ask(tmp_path)[0]["sessions"]] == [helpers.KEYS["first"], helpers.KEYS["third"]]
    damage(tmp_path)
    facts, text = ask(tmp_path, "gc", verify_blocks=True)
    assert [each["key"] for each in facts["namespaces"][0]["forgotten"]] == [helpers.KEYS["third"]]


def test_drop_deletes_one_session(tmp_path, filled):
    facts, text = ask(tmp_path, "drop", "chat", tenant="bob")
    assert (facts["num_blocks"], helpers.block_file(tmp_path / "store", 7).exists()) == (3, False)
    assert text.startswith("session 'chat' of tenant 'bob' (b30000000000) dropped: 3 blocks deleted, 12.3 kB freed")
    assert len(ask(tmp_path)[0]["sessions"]) == 3


def test_beside_an_engine_all_that_only_looks_works(tmp_path, filled):
    before = helpers.files_of(tmp_path / "store")
    with Catalog(tmp_path / "store", helpers.NAMESPACE):
        for command, session in (("list", None), ("show", "notes"), ("verify", None), ("stats", None)):
            assert is_sound(ask(tmp_path, command, session)[0])
        assert is_sound(ask(tmp_path, "export", output_dir=tmp_path / "out")[0])
        for command, session in (("gc", None), ("drop", "notes")):
            with pytest.raises(CatalogLockedError, match="in use by process"):
                ask(tmp_path, command, session)
    assert helpers.files_of(tmp_path / "store") == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": "lst"}, "must be one of list, show, .*; got 'lst'"),
        ({"command": "show"}, "show must be told a session's id or the beginning of its key, got none"),
        ({"command": "stats", "session": "x"}, "stats must be told no session, got 'x'"),
        ({"command": "export"}, "export must be told output_dir, got none"),
        ({"command": "list", "dry_run": True}, "dry_run must come with gc, got list"),
        ({"command": "gc", "output_dir": Path("x")}, "output_dir must come with export, got gc"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, options, message):
    with pytest.raises(CommandError, match=message):
        Request(directory=tmp_path, **options)


def test_it_runs_from_the_command_line_and_errors_go_to_stderr(tmp_path, filled):
    damage(tmp_path)
    json_out = tmp_path / "out.json"
    done = run_script("store", f"--ssd_dir={tmp_path / 'store'}", "verify", f"--json_out={json_out}")
    told = "1 of 4 sessions damaged, 0 other problems of the catalog; 9 blocks, 7.7 kB"
    assert (done.code, told in done.out) == (1, True)
    (damaged,) = json.loads(json_out.read_text())["damaged"]
    assert damaged["session"]["key"] == helpers.KEYS["third"]
    assert [(each["reason"], each["index"], each["block_id"]) for each in damaged["damages"]] == [("corrupt", 1, 5)]
    assert is_sound(ask(tmp_path, "verify", tenant="alice")[0])
    done = run_script("store", f"--ssd_dir={tmp_path / 'store'}")
    assert (done.code, done.err, "4 sessions, 28 tokens" in done.out) == (0, "", True)
    nowhere = tmp_path / "none"
    for arguments, message in (
        (("show", "x"), f"{nowhere} must be a store's directory, got nothing there"),
        (("show", "x", "y"), "arguments must be a command and at most one session, got show x y"),
        ((f"--json_out={tmp_path}",), f"json_out must be a file, got the directory {tmp_path}"),
    ):
        done = run_script("store", f"--ssd_dir={nowhere}", *arguments)
        assert (done.code, done.out, done.err) == (1, "", f"error: {message}\n")
