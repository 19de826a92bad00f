"""Replicas that share sessions: a conversation goes on at another one with its KV, and nothing of two owners is mixed.

Every replica is an engine of its own; what they share is a directory. A single engine that serves the conversation
alone says what each answer must be.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ca_jax.engine import Engine
from ca_jax.errors import SessionClosedError, SessionMovedError
from ca_jax.kv.object_transfers import Published, SharedKV
from ca_jax.storage.objects import parts
from ca_jax.storage.objects.manifest import Manifest
from ca_jax.storage.objects.ownership import NotOwnerError
from ca_jax.storage.objects.store import ObjectsError, ObjectsUnfitError
from ca_jax.storage.records import Residency
from tests import engine_kit as kit
from tests.replica_kit import GREEDY, RUN_BLOCKS, SAID, claimed, make_replica, say, say_and_publish, serial
from tests.storage.store_helpers import Gate, replaced, stalled


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "RUN_BYTES", RUN_BLOCKS * kit.BLOCK_TOKENS * kit.TOKEN_BYTES)


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines that share a directory."""
    made = []

    def make(*of: str, **changes: object) -> Engine:
        made.append(make_replica(tmp_path, *of, **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def objects(tmp_path: Path, kind: str) -> list[Path]:
    return sorted(path for path in (tmp_path / "shared").rglob("*") if path.is_file() and f"/{kind}" in str(path))


@pytest.mark.parametrize("ssd", [False, True])
def test_a_conversation_goes_on_at_each_replica_in_turn(replica, ssd) -> None:
    answers = serial()
    engines = [replica(f"ssd-{number}" if ssd else None) for number in range(2)]
    for number, text in enumerate(SAID):
        engine = engines[number % 2]
        session = claimed(engine)
        num_before = len(session.token_ids)
        assert say_and_publish(engine, session, text) == answers[number]
        assert session.usage.cached_tokens == ({"dram": 0} if not number else {"objects": num_before - 1})
    assert [engine.metrics.takeovers for engine in engines] == [1, 2]
    assert [engine.metrics.refused_publishes for engine in engines] == [0, 0]


def test_only_what_is_new_is_written(replica, tmp_path) -> None:
    engine = replica()
    session = engine.session(session_id="s")
    num_written = []
    for text in SAID:
        before = engine.metrics.published_bytes
        say_and_publish(engine, session, text)
        num_written.append(engine.metrics.published_bytes - before)
    run_bytes = RUN_BLOCKS * kit.BLOCK_TOKENS * kit.TOKEN_BYTES
    [manifest] = [Manifest.from_bytes(path.read_bytes()) for path in objects(tmp_path, "sessions")]
    assert manifest.num_tokens == len(session.token_ids) - 1
    assert all(part.num_tokens * kit.TOKEN_BYTES <= run_bytes for part in manifest.parts)
    # A run is written whole once it is full: at most one more run than what is new, and the headers.
    new_bytes = (len(session.token_ids) - 1) * kit.TOKEN_BYTES
    assert sum(num_written) <= new_bytes + len(SAID) * (run_bytes + 8192 * (1 + new_bytes // run_bytes))


def test_an_owner_that_was_replaced_is_refused_and_drops_its_copy(replica) -> None:
    first, second = replica(), replica()
    session = first.session(session_id="s")
    say_and_publish(first, session, SAID[0])
    there = claimed(second)
    ours = say_and_publish(second, there, SAID[1])
    say(session, "Something else, which the other replica knows nothing of.")
    kit.until(first, lambda: first.metrics.refused_publishes == 1)
    kit.until(first, lambda: not first.sessions)
    assert first.store_stats().num_sessions == 0
    with pytest.raises(SessionClosedError):
        session.send("again")
    again = claimed(first)
    assert [each["content"] for each in again.messages[1::2]] == [serial()[0], ours]
    assert say(again, SAID[2]) == serial()[2]


def test_a_turn_that_runs_while_its_session_is_lost_says_so(replica) -> None:
    first, second = replica(), replica()
    session = first.session(session_id="s")
    say_and_publish(first, session, SAID[0])
    first._kv.shared.policy = "drain"  # The second turn's end is not published before the third one runs.
    say(session, SAID[1])
    claimed(second)
    first._kv.shared.policy = "turn"
    answer = iter(session.send(SAID[2], sampling=dataclasses.replace(GREEDY, max_tokens=200)))
    next(answer)
    first._kv.shared._is_quiet = lambda key: True
    first._kv.shared.changed(session)
    assert isinstance(first._kv.shared.publish_now(session.key).exception(), NotOwnerError)
    with pytest.raises(SessionMovedError, match="gone on with elsewhere"):
        collections.deque(answer)
    assert not first.sessions


def test_an_open_session_that_another_replica_went_on_with_goes_on_from_there(replica) -> None:
    first, second = replica(), replica()
    session = first.session(session_id="s")
    answers = [say_and_publish(first, session, SAID[0])]
    answers.append(say_and_publish(second, claimed(second), SAID[1]))
    assert claimed(first) is session
    answers.append(say_and_publish(first, session, SAID[2]))
    assert answers == serial(SAID[:3])
    assert session.usage.cached_tokens["objects"] > 0


def test_a_session_that_is_claimed_back_while_its_turn_runs_goes_on_with_what_the_other_left(replica) -> None:
    overflow = dataclasses.replace(kit.SMALL.overflow, repair="none", truncation_ratio=0.5)
    first, second = (replica(context_window=192, overflow=overflow) for _ in range(2))
    session = first.session(session_id="s")
    for text in SAID[:2]:
        say_and_publish(first, session, text)
    assert session.conversation.lineage, "KV of it may not be mixed with the other's"
    there = claimed(second)
    say_and_publish(second, there, SAID[2])
    answer = iter(session.send(SAID[3], sampling=GREEDY))
    next(answer)
    assert claimed(first) is session, "its turn runs still"
    collections.deque(answer)
    kit.until(first, lambda: not first.sessions)
    again = claimed(first)
    assert again.messages == there.messages


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_publish_that_ends_once_its_session_was_claimed_back_loses_nothing(replica, monkeypatch, is_refused) -> None:
    """What became of it is of before the claim."""
    first, second = replica(), replica()
    session, gate, publish = first.session(session_id="s"), Gate(is_closed=True), SharedKV.publish

    def ends_late(*of: object) -> Published:
        try:
            return publish(*of)
        finally:
            gate()

    answers = [say_and_publish(first, session, SAID[0])]
    if is_refused:
        answers.append(say_and_publish(second, claimed(second), SAID[1]))
    with monkeypatch.context() as patched:
        patched.setattr(SharedKV, "publish", ends_late)
        first._kv.describe(session)
        first.elsewhere.publish(session)
        gate.wait_held()
    if not is_refused:
        answers.append(say_and_publish(second, claimed(second), SAID[1]))
    assert claimed(first) is session
    gate.open()
    answers.append(say_and_publish(first, session, SAID[2]))
    answers.append(say_and_publish(first, session, SAID[3]))
    assert answers == serial()
    assert len(claimed(second).messages) == 8


def test_a_turn_that_was_not_published_is_kept_by_the_replica_that_has_it(replica) -> None:
    """Nobody has gone on with the session meanwhile, so its owner's own log is the later state."""
    engine = replica("ssd")
    session = engine.session(session_id="s")
    say_and_publish(engine, session, SAID[0])
    engine._kv.shared.policy = "drain"
    say(session, SAID[1])
    engine._kv.shared._publish = lambda *_: None
    engine._kv.shared.drain = lambda timeout_s: False
    engine.close()
    again = replica("ssd")
    session = claimed(again)
    assert len(session.messages) == 4
    assert say(session, SAID[2]) == serial()[2]


def test_a_turn_that_was_not_published_stays_where_another_replica_only_claimed_its_session(replica) -> None:
    first, second = replica(), replica()
    session = first.session(session_id="s")
    say_and_publish(first, session, SAID[0])
    first._kv.shared.policy = "drain"
    say(session, SAID[1])
    assert len(claimed(second).messages) == 2
    assert claimed(first) is session
    assert len(session.messages) == 4
    assert say(session, SAID[2]) == serial()[2]


def test_what_is_kept_with_a_conversation_is_taken_over_though_no_turn_came(replica) -> None:
    first, second = replica(), replica()
    session = first.session(session_id="s")
    say_and_publish(first, session, SAID[0])
    there = claimed(second)
    noted = dataclasses.replace(there.conversation, kept="{}", generation=there.conversation.generation + 1)
    second.truncate_stored(there, len(there.token_ids), noted)
    kit.until(second, lambda: second.metrics.publishes == 1)
    assert claimed(first).conversation.kept == "{}"
    assert say_and_publish(first, session, SAID[1]) == serial()[1]
    assert session.usage.cached_tokens == {"dram": len(there.token_ids) - 1}, "the KV was here, and named all along"
    third = replica()
    assert say(claimed(third), SAID[2]) == serial()[2]


@pytest.mark.parametrize("repair", ["none", "spread"])
def test_a_truncated_conversation_is_restored_as_it_was(replica, repair) -> None:
    """Its KV has seen tokens that left: what the other replica answers is what its first owner would have."""
    overflow = dataclasses.replace(kit.SMALL.overflow, repair=repair, truncation_ratio=0.5, anchor_tokens=8)
    changes = {"context_window": 192, "overflow": overflow}
    said = (*SAID, "And then? Say more of it, if you please, and do not stop so early.", "Go on.")
    answers = serial(said, **changes)
    first, second = replica(**changes), replica(**changes)
    session = first.session(session_id="s")
    for text, answer in zip(said[:-1], answers, strict=False):
        assert say_and_publish(first, session, text) == answer
    assert session.conversation.lineage
    there = claimed(second)
    assert there.conversation == session.conversation
    assert say(there, said[-1]) == answers[-1]
    assert there.usage.cached_tokens["objects"] > 0


def test_other_sessions_that_begin_alike_find_the_same_objects(replica, tmp_path) -> None:
    first, second = replica(), replica()
    say_and_publish(first, first.session(session_id="s"), SAID[0])
    before = first.metrics.published_bytes
    say_and_publish(first, first.session(session_id="t"), SAID[0])
    assert first.metrics.published_bytes == before, "equal KV of one tenant is one object"
    other = second.session(session_id="u")
    assert say(other, SAID[0]) == serial()[0]
    run = RUN_BLOCKS * kit.BLOCK_TOKENS
    assert other.usage.cached_tokens == {"objects": (other.usage.prompt_tokens - 1) // run * run}
    stranger = second.session(session_id="v", tenant="other")
    say(stranger, SAID[0])
    assert stranger.usage.cached_tokens == {"dram": 0}, "what one tenant said never reaches another"


def test_what_is_on_ssd_alone_gives_way_to_longer_runs_that_others_published(replica, monkeypatch) -> None:
    monkeypatch.setattr(parts, "RUN_BYTES", 8 * kit.BLOCK_TOKENS * kit.TOKEN_BYTES)
    first, second = replica(), replica("ssd")
    session, other = first.session(session_id="s"), second.session(session_id="t")
    for text in SAID[:2]:
        say_and_publish(first, session, text)
    assert say_and_publish(second, other, SAID[0]) == serial(SAID[:1])[0]
    second.wait_for_saves()
    second._kv.store.leave_dram(other.key)
    assert second._kv.store.residency(other.key) is Residency.SSD
    assert say(other, SAID[1]) == serial(SAID[:2])[1]
    assert other.usage.cached_tokens["objects"] >= parts.run_tokens(second._kv.store.layout)


def test_runs_that_others_published_wait_for_what_the_turn_before_has_computed(replica, monkeypatch) -> None:
    monkeypatch.setattr(parts, "RUN_BYTES", 8 * kit.BLOCK_TOKENS * kit.TOKEN_BYTES)
    first, second = replica(), replica()
    session, other = first.session(session_id="s"), second.session(session_id="t")
    for text in SAID[:2]:
        say_and_publish(first, session, text)
    shared = second._kv.shared
    with stalled((second._kv._saver, "_write")) as gate:
        say(other, SAID[0])
        gate.wait_held()
        answer = other.send(SAID[1], sampling=GREEDY)
        finding = shared._shared[other.key].finding
        finding.done.result()
        second.keep()
        assert second._kv.store.num_readable(other.key) == 0
    assert "".join(answer) == serial(SAID[:2])[1]
    assert other.usage.cached_tokens["objects"] >= parts.run_tokens(second._kv.store.layout)


def test_what_another_replica_said_since_is_restored_in_place_of_an_own_turn(replica) -> None:
    first, second = replica(), replica()
    session = first.session(session_id="s")
    say_and_publish(first, session, SAID[0])
    first._kv.shared.policy = "drain"
    say(session, "Something else.")
    first.wait_for_saves()
    there = claimed(second)
    for text in SAID[1:3]:
        say_and_publish(second, there, text)
    num_tokens = len(there.token_ids)
    assert num_tokens > len(session.token_ids)
    again = claimed(first)
    assert say(again, SAID[3]) == serial()[3]
    assert again.usage.cached_tokens == {"objects": num_tokens - 1}


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 + 4096] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("fault", [damage, cut_short, Path.unlink], ids=["damaged", "cut short", "gone"])
@pytest.mark.parametrize("which", [0, 1])
def test_objects_that_are_not_what_they_were_are_computed(replica, tmp_path, fault, which) -> None:
    first, second, third = replica(), replica(), replica()
    session = first.session(session_id="s")
    answers = [say_and_publish(first, session, text) for text in SAID[:2]]
    [manifest] = [Manifest.from_bytes(path.read_bytes()) for path in objects(tmp_path, "sessions")]
    broken = manifest.parts[which]
    fault(tmp_path / "shared" / broken.name)
    there = claimed(second)
    answers.append(say_and_publish(second, there, SAID[2]))
    assert answers == serial(SAID[:3])
    assert there.usage.cached_tokens == {"objects" if broken.first else "dram": broken.first}
    assert second.metrics.failed_restores == 1
    # It was written anew: the next replica finds all of it.
    there = claimed(third)
    num_before = len(there.token_ids)
    assert say(there, SAID[3]) == serial()[3]
    assert there.usage.cached_tokens == {"objects": num_before - 1}


@pytest.mark.parametrize("fault", [damage, cut_short], ids=["damaged", "cut short"])
def test_a_manifest_that_is_not_one_is_not_used(replica, tmp_path, fault, caplog) -> None:
    first, second = replica(), replica()
    say_and_publish(first, first.session(session_id="s"), SAID[0])
    [path] = objects(tmp_path, "sessions")
    data = path.read_bytes()
    path.write_bytes(data[:-7] if fault is cut_short else data[:100] + b"x" + data[101:])
    with caplog.at_level(logging.WARNING):
        there = claimed(second)
    assert not there.messages
    assert "must pass its checksum" in caplog.text
    assert say(there, SAID[0]) == serial()[0]


def test_replicas_of_other_weights_do_not_meet(replica) -> None:
    first, second = replica(), replica(model=kit.model_of(seed=2))
    say_and_publish(first, first.session(session_id="s"), SAID[0])
    assert not claimed(second).token_ids


def test_what_is_forgotten_is_forgotten_there(replica) -> None:
    first, second = replica(), replica()
    session = first.session(session_id="s")
    say_and_publish(first, session, SAID[0])
    session.close()
    first._kv.shared._threads.submit(lambda: None).result()
    first.close()
    assert not claimed(second).messages


@pytest.mark.parametrize("is_first", [True, False], ids=["first publish", "later publish"])
def test_what_is_forgotten_while_it_is_published_is_forgotten_there(replica, is_first) -> None:
    first, second = replica(), replica()
    session = first.session(session_id="s")
    if not is_first:
        say_and_publish(first, session, SAID[0])
    with stalled((first._kv.shared.objects, "write")) as gate:
        say(session, SAID[1])
        kit.until(first, lambda: gate.num_come)
        session.close()
    first.close()
    assert not claimed(second).messages


def test_a_session_of_a_name_that_is_being_forgotten_begins_anew(replica) -> None:
    engine = replica()
    session = engine.session(session_id="s")
    say_and_publish(engine, session, SAID[0])
    with stalled((engine._kv.shared.objects, "write")) as gate:
        session.close()
        gate.wait_held()
        claiming = threading.Thread(target=engine.elsewhere.claim, args=("s",))
        claiming.start()
        say(engine.session(), SAID[1])  # Time for a claim that would not wait.
    claiming.join()
    assert not engine.session(session_id="s").messages


def test_what_a_session_of_that_name_publishes_is_not_forgotten(replica) -> None:
    first, second = replica(), replica()
    session = first.session(session_id="s")
    say_and_publish(first, session, SAID[0])
    objects, gate, number = first._kv.shared.objects, Gate(is_closed=True), itertools.count()
    write = objects.write

    def first_held(*of: object, **how: object) -> bytes | None:
        if not next(number):
            gate()
        return write(*of, **how)

    with replaced(objects, "write", first_held):
        session.close()
        gate.wait_held()
        say(first.session(session_id="s"), SAID[1])
        say_and_publish(first, first.session(session_id="another"), SAID[2])
        gate.open()
        kit.until(first, lambda: first.metrics.publishes > 2)
    first.close()
    assert [each["content"] for each in claimed(second).messages[::2]] == [SAID[1]]


def test_what_is_let_go_of_and_dropped_is_forgotten_there(replica) -> None:
    first, second = replica(), replica()
    session = first.session(session_id="s")
    say_and_publish(first, session, SAID[0])
    first.release(session)
    first.stored.drop("s")
    first.close()
    assert not claimed(second).messages


@pytest.mark.parametrize("write", ["drain", "idle"])
def test_what_is_written_on_closing_goes_on_elsewhere(replica, write) -> None:
    first = replica(write=write)
    session = first.session(session_id="s")
    answers = [say(session, text) for text in SAID[:2]]
    assert first.metrics.publishes == 0
    first.close()
    there = claimed(replica())
    answers.append(say(there, SAID[2]))
    assert answers == serial(SAID[:3])
    assert there.usage.cached_tokens["objects"] > 0


@pytest.mark.parametrize("write", ["drain", "idle"])
def test_what_is_on_ssd_alone_on_closing_goes_on_elsewhere(replica, monkeypatch, write) -> None:
    """One after the other, where DRAM has no room for all of them."""
    with monkeypatch.context() as patched:
        patched.setattr(kit, "ssd_store", functools.partial(kit.ssd_store, dram_blocks=20))
        first = replica("ssd", write=write)
    sessions = [first.session(session_id=name) for name in "stu"]
    for session in sessions:
        answers = [say(session, text) for text in SAID[:2]]
        first.wait_for_saves()
        first._kv.store.leave_dram(session.key)
        assert first._kv.store.residency(session.key) is Residency.SSD
    num_tokens = len(sessions[0].token_ids)
    assert num_tokens > 20 * kit.BLOCK_TOKENS // 2
    first.close()
    for session in sessions:
        there = claimed(replica(), session.session_id)
        assert [*answers, say(there, SAID[2])] == serial(SAID[:3])
        assert there.usage.cached_tokens == {"objects": num_tokens - 1}


def test_an_idle_session_is_published(replica, monkeypatch) -> None:
    monkeypatch.setattr("ca_jax.kv.shared_sessions._IDLE_S", 0.0)
    engine = replica(write="idle")
    say_and_publish(engine, engine.session(session_id="s"), SAID[0])


def test_what_is_published_already_is_not_published_again(replica) -> None:
    engine = replica()
    session = engine.session(session_id="s")
    say_and_publish(engine, session, SAID[0])
    told = engine.elsewhere.publish(session)
    assert told is None or told.done()
    assert engine.metrics.publishes == 1


def test_no_turn_fails_while_the_store_does(replica, tmp_path, monkeypatch) -> None:
    engine = replica()
    session = engine.session(session_id="s")
    answers = [say_and_publish(engine, session, SAID[0])]

    def broken(*_: object, **__: object) -> None:
        raise ObjectsError("no answer")

    monkeypatch.setattr("ca_jax.kv.shared_sessions._FIRST_PAUSE_S", 0.01)
    objects = engine._kv.shared.objects
    with monkeypatch.context() as patched:
        for name in ("read", "write"):
            patched.setattr(objects, name, broken)
        with pytest.raises(ObjectsError):
            engine.elsewhere.claim("other")
        answers.append(say(session, SAID[1]))
        kit.until(engine, lambda: engine.metrics.failed_publishes > 0)
        answers.append(say(session, SAID[2]))
    kit.until(engine, lambda: engine.metrics.publishes > 1)
    there = claimed(replica())
    assert len(there.messages) == 6
    assert answers == serial(SAID[:3])


def test_a_url_that_cannot_be_used_is_refused(replica, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for url in (f"file://{tmp_path}/file", "nowhere://x"):
        with pytest.raises(ObjectsUnfitError, match="objects_url must be"):
            replica(url=url)


def test_an_engine_that_is_refused_its_objects_leaves_its_directory_to_another(replica, tmp_path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ObjectsUnfitError, match="objects_url must be") as refused:
        replica("ssd", url="nowhere://x")
    assert {each.name for each in set(threading.enumerate()) - before if "ca_jax" in each.name} == set()
    say(replica("ssd").session(session_id="s"), SAID[0])
    del refused


def test_names_of_objects_say_whose_they_are(replica, tmp_path) -> None:
    """An object under another's name is not taken for it."""
    first, second = replica(), replica()
    session = first.session(session_id="s")
    say_and_publish(first, session, SAID[0])
    [manifest] = [Manifest.from_bytes(path.read_bytes()) for path in objects(tmp_path, "sessions")]
    one, two = (tmp_path / "shared" / part.name for part in manifest.parts[:2])
    one.write_bytes(two.read_bytes())
    other = second.session(session_id="t")
    assert say(other, SAID[0]) == serial()[0]
    assert other.usage.cached_tokens == {"dram": 0}


def test_kv_is_copied_token_by_token_from_any_place(tmp_path) -> None:
    """`LoadTicket.copy` against `LoadTicket.read`, of a session with gaps."""
    with kit.small_engine() as engine:
        session = engine.session(session_id="s")
        say(session, SAID[0])
        engine.wait_for_saves()
        session.discard(range(5, 40))
        store, token_ids = engine._kv.store, session.token_ids
        ticket = store.hold(session.key, token_ids, num_dropped=session.conversation.kv_lineage)
        assert ticket.num_plain == 5
        for layer in range(kit.NUM_LAYERS):
            whole = np.zeros(store.layout.layer_shape(layer, ticket.num_tokens), store.layout.numpy_dtype)
            ticket.read(layer, whole).result()
            for first, stop in ((0, ticket.num_tokens), (3, 9), (17, 18), (30, ticket.num_tokens)):
                part = np.zeros(store.layout.layer_shape(layer, stop - first), store.layout.numpy_dtype)
                assert ticket.copy(layer, first, part)
                np.testing.assert_array_equal(part, whole[:, first:stop])
        store.let_go(ticket)
        assert not ticket.copy(0, 0, part)
