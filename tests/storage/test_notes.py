"""Notes of open sessions: what outlives the process, what is believed of it, and that no old note is."""

from __future__ import annotations

import os
import sqlite3
import stat

import pytest

from ca_jax.storage.catalog.notes import LOG_NAME, Noted, NoteLog, log_bytes
from ca_jax.storage.records import Owner

from .store_helpers import StoppedClock

OWNER = Owner(tenant="a", session_id="one")


def opened(directory, clock=None, boot="today") -> NoteLog:
    return NoteLog(directory, clock=clock or StoppedClock(1000.0), boot=boot)


def test_what_was_put_is_there_for_a_process_that_follows_one_that_never_closed(tmp_path):
    log = opened(tmp_path)
    log.put("k1", OWNER, b"first")
    log.put("k1", OWNER, b"second")
    log.put("k2", Owner(tenant="b", session_id="one"), b"other")
    log.put("k3", Owner(tenant="", session_id="three"), b"gone")
    log.remove("k3")
    log.remove("never there")
    for name in (LOG_NAME, f"{LOG_NAME}-wal"):  # As SIGKILL leaves it: nothing is closed.
        (tmp_path / "killed").mkdir(exist_ok=True)
        (tmp_path / "killed" / name).write_bytes((tmp_path / name).read_bytes())
    found = opened(tmp_path / "killed")
    assert [found.get(key) for key in ("k1", "k2", "k3")] == [b"second", b"other", None]
    assert set(found.list()) == {Noted("k1", "a", "one"), Noted("k2", "b", "one")}
    assert {each.key for each in found.of_name("one")} == {"k1", "k2"}
    assert found.of_name("three") == ()
    assert log.get("k1") == b"second"


def test_what_another_boot_wrote_is_not_believed(tmp_path):
    opened(tmp_path).put("k1", OWNER, b"x" * 10_000)
    assert opened(tmp_path, boot="tomorrow").list() == ()
    assert opened(tmp_path, boot="today").list() == (), "what is not believed is gone"
    opened(tmp_path, boot="").put("k1", OWNER, b"x")
    assert opened(tmp_path, boot="").list() == (), "nobody knows of which boot that is"


def test_a_note_stays_for_its_time(tmp_path):
    clock = StoppedClock(1000.0)
    log = opened(tmp_path, clock)
    log.put("brief", Owner(session_id="brief", ttl_s=10.0), b"note")
    log.put("long", Owner(session_id="long", ttl_s=1e6), b"note")
    log.put("changed", Owner(session_id="changed", ttl_s=1e6), b"note")
    log.put("unsaid", Owner(session_id="unsaid"), b"note")
    log.set_ttl("changed", 10.0)
    log.set_ttl("never there", 10.0)
    log.close()
    clock.now_s += 9.0
    log = opened(tmp_path, clock)
    assert {each.key for each in log.list()} == {"brief", "long", "changed", "unsaid"}
    assert log.get("brief") == b"note"
    clock.now_s += 2.0
    assert log.get("brief") is None, "in a process that has been there for longer too"
    assert {each.key for each in log.list()} == {"long", "changed", "unsaid"}
    assert {each.key for each in opened(tmp_path, clock).list()} == {"long", "unsaid"}
    clock.now_s += 2e6
    log = opened(tmp_path, clock)
    assert {each.key for each in log.list()} == {"unsaid"}
    assert log.get("unsaid") == b"note"


def test_a_note_is_what_was_put_behind_it_too_and_costs_what_is_new(tmp_path):
    log = opened(tmp_path)
    log.put("k1", OWNER, os.urandom(400_000))
    whole = log.get("k1")
    size = (tmp_path / f"{LOG_NAME}-wal").stat().st_size
    for part in (b" and", b" more"):
        log.put("k2", OWNER, part)
        assert log.put("k1", OWNER, part, behind=True)
    assert (tmp_path / f"{LOG_NAME}-wal").stat().st_size - size < 100_000
    found = opened(tmp_path)
    assert (found.get("k1"), found.get("k2")) == (whole + b" and more", b" more")
    assert [each.key for each in found.list()] == ["k2", "k1"], "written last comes last"
    log.put("k1", OWNER, b"anew")
    assert opened(tmp_path).get("k1") == b"anew"


def test_what_is_removed_is_given_back_to_the_disk_and_not_readable(tmp_path):
    log, secret = opened(tmp_path), b"between you and me "
    for number in range(40):
        log.put(f"k{number}", OWNER, secret * 10_000)
    full = log.used_bytes
    assert full > 40 * len(secret) * 10_000
    for number in range(40):
        log.remove(f"k{number}")
    for _ in range(40):  # As much at a time as takes no time.
        log.put("k", OWNER, b"small")
    assert log.used_bytes < full / 50
    log._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert (tmp_path / LOG_NAME).stat().st_size < full / 4
    assert secret not in (tmp_path / LOG_NAME).read_bytes()
    log.close()
    opened(tmp_path).close()
    assert (tmp_path / LOG_NAME).stat().st_size < full / 50


def test_it_says_how_much_room_lacks(tmp_path):
    log = NoteLog(tmp_path, max_bytes=100_000, clock=StoppedClock(1000.0), boot="today")
    assert log.lacks(50_000) < 0 < log.lacks(100_000)
    log.put("k1", OWNER, os.urandom(80_000))
    assert log.lacks(30_000) > 0
    log.remove("k1")
    assert log.lacks(50_000) < 0
    assert log_bytes(64 << 30) == 1 << 30
    assert log_bytes(0) == 16 << 20


@pytest.mark.parametrize("damage", ["random", "empty", "cut", "other tables"])
def test_a_log_that_cannot_be_read_begins_anew(tmp_path, damage, caplog):
    log = opened(tmp_path)
    for number in range(20):
        log.put(f"k{number}", OWNER, os.urandom(2000))
    log.close()
    path = tmp_path / LOG_NAME
    if damage == "random":
        path.write_bytes(os.urandom(8000))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:9000])
    else:
        with sqlite3.connect(path) as db:
            db.execute("DROP TABLE parts")
        db.close()
    log = opened(tmp_path)
    assert log.list() == ()
    log.put("k1", OWNER, b"note")
    assert opened(tmp_path).get("k1") == (None if damage == "other tables" else b"note")


def test_a_write_that_fails_leaves_what_there_was(tmp_path, caplog):
    log = opened(tmp_path)
    log.put("k1", OWNER, b"old")
    log.put("k2", OWNER, b"other")
    log._db.execute("PRAGMA max_page_count = 1")
    assert not log.put("k1", OWNER, b"new" * 10_000)
    assert "not noted now" in caplog.text
    assert [opened(tmp_path).get(key) for key in ("k1", "k2")] == [b"old", b"other"]
    log._db.execute("PRAGMA max_page_count = 1000")
    assert log.put("k1", OWNER, b"new" * 10_000)
    assert opened(tmp_path).get("k1") == b"new" * 10_000


def test_a_log_that_breaks_begins_anew_after_a_while(tmp_path, caplog):
    log = opened(tmp_path)
    log.put("k1", OWNER, b"old")
    log._db.close()
    assert log.get("k1") is None
    assert "go on from SSD alone" in caplog.text
    assert log.list() == ()
    assert not log.put("k1", OWNER, b"newer")
    log.remove("k1")
    assert not [*tmp_path.iterdir()]
    log._next_try_s = 0.0
    assert log.put("k2", OWNER, b"note")
    assert opened(tmp_path).list() == (Noted("k2", "a", "one"),)


def test_a_note_is_of_the_variant_that_its_owner_is_of(tmp_path):
    log, owner = opened(tmp_path), Owner(tenant="a", session_id="one", variant="0f" * 32)
    log.put("k1", owner, b"with an adapter")
    log.put("k2", OWNER, b"without")
    assert opened(tmp_path).list() == (Noted("k1", "a", "one", "0f" * 32), Noted("k2", "a", "one"))


def test_names_may_be_any_text_and_the_file_is_its_owners(tmp_path):
    log = opened(tmp_path)
    owner = Owner(tenant="\ud800 \0", session_id="\udfff' --")
    log.put("k1", owner, b"\0note")
    assert opened(tmp_path).list() == (Noted("k1", owner.tenant, owner.session_id),)
    assert opened(tmp_path).of_name(owner.session_id)[0].tenant == owner.tenant
    assert stat.S_IMODE((tmp_path / LOG_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / f"{LOG_NAME}-wal").stat().st_mode) == 0o600
