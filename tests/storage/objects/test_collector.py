"""What a collection deletes and what it never does, beside replicas that publish at any moment of it."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ca_jax.engine import Engine
from ca_jax.session import Session
from ca_jax.storage.objects import parts
from ca_jax.storage.objects.collector import Collected, Reason, collect
from ca_jax.storage.objects.manifest import FORMAT, Manifest, hint_name, manifest_name
from ca_jax.storage.objects.store import ObjectsError, ObjectStore
from ca_jax.storage.objects.survey import verify
from ca_jax.storage.records import IoFailure
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit
from tests.storage.objects import shared_kit as kit
from tests.storage.objects.shared_kit import NOW_S, RUN_TOKENS, SPACE, TOKEN_BYTES, Replica, orphan, short_runs

pytestmark = pytest.mark.usefixtures(short_runs.__name__)
LONG = list(range(100, 100 + 2 * RUN_TOKENS + 3))  # Two runs, and three tokens behind them.


@pytest.fixture(params=["memory", "file"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/shared" if request.param == "file" else "memory://", 5.0)


@pytest.fixture
def memory() -> ObjectStore:
    return ObjectStore("memory://", 5.0)


def gc(objects: ObjectStore, meanwhile: Callable[[], None] = lambda: None, **options: object) -> Collected:
    """Collects in no time; what is given happens between the two looks."""
    waited_s = []

    def sleep(seconds: float) -> None:
        if not waited_s:
            meanwhile()
        waited_s.append(seconds)

    collected = collect(objects, **{"now_s": NOW_S, "sleep": sleep, "grace_s": 600.0, **options})
    assert sum(waited_s) == (0.0 if options.get("dry_run") else 600.0)
    return collected


def forgotten(collected: Collected) -> list[tuple[str, Reason]]:
    return [(each.session.key, each.reason) for each in collected.forgotten]


def all_sound(objects: ObjectStore) -> bool:
    return all(verdict.ok for verdict in verify(objects))


def test_what_is_named_stays_and_what_is_nameless_goes(objects) -> None:
    replica = Replica(objects)
    replica.publish("s", LONG)
    replica.publish("t", LONG[:RUN_TOKENS])
    replica.publish("cut", LONG, num_plain=3)
    Replica(objects, namespace=kit.OTHER_SPACE).publish("s", LONG)
    before = kit.contents(objects)
    nameless = orphan(objects, LONG[: RUN_TOKENS + 2])
    assert len(nameless) == 1, "the run is that of others"
    collected = gc(objects)
    assert kit.contents(objects) == before
    assert (collected.num_objects, collected.num_rescued, collected.num_hints) == (1, 0, 1)
    assert collected.num_bytes == 8192 + 2 * TOKEN_BYTES
    num_kept = len(LONG) + len(LONG) + len(LONG)  # Plain KV once, that of the cut session, and the other namespace's.
    assert (collected.num_sessions, collected.kept_bytes) == (4, num_kept * TOKEN_BYTES)
    assert gc(objects).num_objects == 0
    np.testing.assert_array_equal(replica.restored("s"), kit.kv_of(LONG))


def test_nothing_goes_before_the_second_look(objects) -> None:
    nameless = orphan(objects, LONG)
    seen = []
    gc(objects, lambda: seen.append(kit.kv_names(objects)))
    assert seen == [nameless]
    assert not kit.contents(objects)


def test_a_publish_between_the_looks_rescues_its_objects(objects) -> None:
    nameless = orphan(objects, LONG)
    replica = Replica(objects)
    collected = gc(objects, lambda: replica.publish("s", LONG[: 2 * RUN_TOKENS]))
    assert (collected.num_objects, collected.num_rescued) == (1, 2)
    assert len(kit.kv_names(objects) & nameless) == 2
    np.testing.assert_array_equal(replica.restored("s"), kit.kv_of(LONG[: 2 * RUN_TOKENS]))


def test_objects_that_come_between_the_looks_are_left_to_the_next_collection(objects) -> None:
    assert gc(objects, lambda: orphan(objects, LONG)).num_objects == 0
    assert gc(objects).num_objects == 3


def test_a_session_goes_when_its_time_is_over(objects) -> None:
    replica = Replica(objects)
    for key, ttl_s, pinned in (("over", 9.0, False), ("young", 11.0, False), ("pinned", 9.0, True)):
        replica.publish(key, LONG, used_s=NOW_S - 10, ttl_s=ttl_s, pinned=pinned)
    replica.publish("cut", LONG, num_plain=0, used_s=NOW_S - 10, ttl_s=1.0)
    collected = gc(objects)
    assert forgotten(collected) == [("cut", Reason.EXPIRED), ("over", Reason.EXPIRED)]
    assert (collected.num_objects, collected.num_hints) == (3, 2)
    left = kit.stored(objects, "over")
    assert (left.conversation, left.parts, left.owner, left.epoch) == (None, (), "a", 1)
    assert kit.stored(objects, "young").num_tokens == kit.stored(objects, "pinned").num_tokens == len(LONG)
    assert all_sound(objects)


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ({"max_bytes": 48}, ""),
        ({"max_bytes": 47}, "old cap, same cap"),  # That one goes frees nothing as long as the other names the same.
        ({"max_bytes": 31}, "old cap, same cap, mine cap"),
        ({"max_bytes": 0}, "old cap, same cap, mine cap, new cap"),
        ({"max_bytes": 0, "tenant": "bob"}, "mine cap"),
        ({"tenant_quota_bytes": 16}, "old quota, same quota"),
        ({"tenant_quota_bytes": 16, "tenant_quotas": {"alice": 32}}, ""),
        (
            {"tenant_quota_bytes": 16, "tenant_quotas": {"alice": 31}, "max_bytes": 31},
            "old quota, same quota, mine cap",
        ),
        ({"tenant_quotas": {"bob": 15}}, "mine quota"),
    ],
)
def test_caps_and_quotas_hold_by_leaving_out_who_was_used_least_recently(memory, options, gone) -> None:
    """Limits in tokens. `old` and `same` name the same 16, `mine` 16 of another tenant, `new` and `pinned` 8 each."""
    replica = Replica(memory)
    for age, (key, token_ids, tenant) in enumerate(
        (
            ("new", range(8), "alice"),
            ("empty", (), "alice"),
            ("mine", range(100, 116), "bob"),
            ("same", range(100, 116), "alice"),
            ("old", range(100, 116), "alice"),
            ("pinned", range(50, 58), "alice"),
        )
    ):
        replica.publish(key, list(token_ids), tenant=tenant, used_s=NOW_S - age, pinned=key == "pinned")
    limits = {name: options[name] * TOKEN_BYTES for name in ("max_bytes", "tenant_quota_bytes") if name in options}
    quotas = {tenant: number * TOKEN_BYTES for tenant, number in options.get("tenant_quotas", {}).items()}
    collected = gc(memory, **limits, tenant_quotas=quotas, tenant=options.get("tenant"))
    assert ", ".join(f"{key} {reason}" for key, reason in forgotten(collected)) == gone
    assert all_sound(memory)
    left = {"new", "empty", "mine", "same", "old", "pinned"} - {key for key, _ in forgotten(collected)}
    assert {verdict.session.key for verdict in verify(memory)} == left


def test_an_owner_that_is_alive_publishes_again_what_was_forgotten_under_it(objects) -> None:
    replica = Replica(objects)
    replica.publish("s", LONG, used_s=NOW_S - 10, ttl_s=1.0)
    for meanwhile in (lambda: replica.publish("s", [*LONG, 7], ttl_s=1.0, used_s=NOW_S - 9), lambda: None):
        assert forgotten(gc(objects, meanwhile)) == [("s", Reason.EXPIRED)]
        assert replica.publish("s", [*LONG, 7, 8]).epoch == 1
        np.testing.assert_array_equal(replica.restored("s"), kit.kv_of([*LONG, 7, 8]))
        replica.publish("s", [*LONG, 7, 8], ttl_s=1.0, used_s=NOW_S - 9)
    assert forgotten(gc(objects)) == [("s", Reason.EXPIRED)]
    assert not kit.kv_names(objects)
    replica.publish("s", LONG)
    np.testing.assert_array_equal(replica.restored("s"), kit.kv_of(LONG))


def test_what_is_left_of_a_forgotten_session_goes_a_week_after_its_last_turn(objects) -> None:
    replica, other = Replica(objects), Replica(objects, "b")
    replica.publish("s", LONG, used_s=NOW_S - kit.WEEK_S - 2, ttl_s=1.0)
    assert gc(objects).num_tombstones == 0, "it has changed since the first look"
    assert gc(objects, now_s=NOW_S - 3).num_tombstones == 0
    assert gc(objects, lambda: other.claim("s")).num_tombstones == 0
    assert gc(objects).num_tombstones == 1
    assert not kit.contents(objects)
    # An owner that still has the session is not refused.
    replica.publish("s", LONG)
    np.testing.assert_array_equal(replica.restored("s"), kit.kv_of(LONG))
    assert kit.stored(objects, "s").owner == "a"


def test_probes_that_nobody_is_at_go(objects) -> None:
    objects.write("v1/probes/old", b"1")
    assert gc(objects, lambda: objects.write("v1/probes/new", b"1")).num_probes == 1
    assert list(kit.contents(objects)) == ["v1/probes/new"]


def test_hints_stay_as_long_as_they_lead_to_a_session(objects) -> None:
    """Those of its earlier states too, from which another session may go on."""
    replica = Replica(objects)
    for num_tokens in (3, 5):
        replica.publish("s", LONG[:num_tokens])
    replica.publish("gone", LONG[:5], ttl_s=1.0, used_s=NOW_S - 9)
    assert gc(objects).num_hints == 1
    hints = {hint_name(SPACE, "alice", f"s {LONG[:num_tokens]}") for num_tokens in (3, 5)}
    assert set(objects.names(f"v1/{SPACE[:16]}/chains/")) == hints


def rewritten(manifest: Manifest, change: Callable[[bytes], bytes]) -> bytes:
    """A manifest whose text is changed and which passes its checksum."""
    body = change(manifest.to_bytes().partition(b"\n")[2])
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


@pytest.mark.parametrize("is_newer", [False, True])
def test_a_manifest_that_cannot_be_read_stays_and_keeps_what_it_may_name(objects, is_newer) -> None:
    replica = Replica(objects)
    manifest = replica.publish("s", LONG, num_plain=RUN_TOKENS, ttl_s=1.0, used_s=NOW_S - 9)
    nameless = orphan(objects, list(range(RUN_TOKENS)))
    own = {part.name for part in manifest.parts if not parts.is_plain_name(part.name)}
    plain = {part.name for part in manifest.parts} - own
    assert own
    assert plain
    name = manifest_name(SPACE, "s")
    newer = rewritten(manifest, lambda body: body.replace(b'"format": %d' % FORMAT, b'"format": %d' % (FORMAT + 1)))
    objects.write(name, newer if is_newer else manifest.to_bytes()[:-9])
    before = objects.read(name)
    hint = hint_name(SPACE, "alice", f"s {LONG}")
    elsewhere = Replica(objects, namespace=kit.OTHER_SPACE)
    elsewhere.publish("x", LONG)
    objects.write(manifest_name(kit.OTHER_SPACE, "x"), None)
    collected = gc(objects, max_bytes=0)
    assert [each.key for each in collected.unreadable] == ["s"]
    assert not collected.forgotten
    assert objects.read(name) == before
    assert kit.kv_names(objects) == own | (plain | nameless if is_newer else set())
    assert not kit.kv_names(objects, kit.OTHER_SPACE), "another namespace is collected"
    assert objects.read(hint).value == b"s"
    assert [verdict.damages[0].reason for verdict in verify(objects)] == [IoFailure.CATALOG]


def test_a_dry_run_changes_nothing_and_tells_what_would_go(objects) -> None:
    replica = Replica(objects)
    replica.publish("s", LONG)
    replica.publish("over", [*LONG, 5], ttl_s=1.0, used_s=NOW_S - 9)
    orphan(objects, LONG[3:9])
    objects.write("v1/probes/old", b"1")
    before = {name: objects.read(name) for name in objects.names("")}
    told = gc(objects, dry_run=True)
    assert {name: objects.read(name) for name in objects.names("")} == before
    done = gc(objects)
    assert forgotten(told) == forgotten(done) == [("over", Reason.EXPIRED)]
    for name in ("num_objects", "num_bytes", "num_hints", "num_probes", "num_sessions", "kept_bytes"):
        assert getattr(told, name) == getattr(done, name)
    assert told.num_objects == 2


# Verifying.


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda data: None, IoFailure.MISSING),
        (lambda data: data[:-1], IoFailure.CORRUPT),
        (lambda data: data[:100], IoFailure.CORRUPT),
        (lambda data: data[:8200] + bytes([data[8200] ^ 1]) + data[8201:], IoFailure.CORRUPT),
        (lambda data: data.replace(b'"first": 8', b'"first": 0'), IoFailure.CORRUPT),
        (lambda data: data.replace(SPACE.encode(), kit.OTHER_SPACE.encode()), IoFailure.CORRUPT),
    ],
    ids=["gone", "short", "cut", "bit", "header", "namespace"],
)
def test_verify_reads_all_that_is_named(objects, fault, reason) -> None:
    replica = Replica(objects)
    manifest = replica.publish("s", LONG)
    replica.publish("t", LONG[:RUN_TOKENS])
    assert all_sound(objects)
    assert sum(verdict.num_bytes for verdict in verify(objects)) == len(LONG) * TOKEN_BYTES, (
        "what is shared counts once"
    )
    name = manifest.parts[1].name
    objects.write(name, fault(objects.read(name).value))
    damages = {verdict.session.key: verdict.damages for verdict in verify(objects)}
    assert [(each.name, each.reason) for each in damages.pop("s")] == [(name, reason)]
    assert damages == {"t": ()}
    assert not list(verify(objects, tenant="bob"))


def test_verify_reads_a_session_again_that_has_changed(memory) -> None:
    class Changing(ObjectStore):
        changes: tuple[Callable[[], None], ...] = ()

        def read(self, name: str, *args: object, **options: object):
            if "/own/" in name and self.changes:
                first, self.changes = self.changes[0], ()
                first()
            return super().read(name, *args, **options)

    objects = Changing("memory://", 5.0)
    replica = Replica(objects)
    replica.publish("s", LONG, num_plain=0)

    def change() -> None:
        replica.publish("s", [*LONG[1:], 5], num_plain=0)
        replica.kv.objects.write(before, None)

    before = kit.stored(objects, "s").parts[0].name
    objects.changes = (change,)
    assert all_sound(objects)
    assert not objects.changes


# Publishes at any moment.


class Gated(ObjectStore):
    """Lets each thread that registered do so many requests, one thread at a time."""

    def __init__(self) -> None:
        super().__init__("memory://", 5.0)
        self.turns: dict[str, threading.Semaphore] = {}
        self.arrived: dict[str, threading.Semaphore] = {}

    def read(self, *args: object, **options: object):
        self.wait()
        return super().read(*args, **options)

    def write(self, *args: object, **options: object):
        self.wait()
        return super().write(*args, **options)

    def names(self, prefix: str) -> list[str]:
        self.wait()
        return super().names(prefix)

    def wait(self) -> None:
        name = "collector" if "Pool" in threading.current_thread().name else threading.current_thread().name
        if name in self.turns:
            self.arrived[name].release()
            self.turns[name].acquire()


class Actor:
    """A thread whose requests are let through one by one."""

    def __init__(self, objects: Gated, name: str, does: Callable[[], object]) -> None:
        self.name, self.objects, self.error = name, objects, None
        objects.turns[name], objects.arrived[name] = threading.Semaphore(0), threading.Semaphore(0)
        self.is_done = False

        def run() -> None:
            try:
                does()
            except Exception as error:
                self.error = error
            self.is_done = True
            objects.arrived[name].release()

        self.thread = threading.Thread(target=run, name=name)
        self.thread.start()
        self.objects.arrived[name].acquire()

    def step(self, number: int | None = None) -> None:
        """Lets so many requests through, or all."""
        for _ in itertools.count() if number is None else range(number):
            if self.is_done:
                return
            self.objects.turns[self.name].release()
            self.objects.arrived[self.name].acquire()


def in_orders(publishes: Callable[[Replica], object], prepare: Callable[[Replica], object]) -> Iterator[Replica]:
    """All orders in which a publish comes into a collection: it begins at each request of it, is stopped at each of its
    own, and ends before the grace does, or after the collection where it began behind the first look."""
    for begins in itertools.count():
        for stops in itertools.count():
            objects = Gated()
            replica = Replica(objects)
            prepare(replica)
            has_slept: list[float] = []

            def sleep(seconds: float, objects=objects, has_slept=has_slept) -> None:
                has_slept.append(seconds)
                objects.wait()

            collector = Actor(
                objects,
                "collector",
                lambda objects=objects, sleep=sleep: collect(objects, now_s=NOW_S, sleep=sleep, grace_s=1.0),
            )
            collector.step(begins)
            if collector.is_done:
                return
            began_in_grace = bool(has_slept)
            publisher = Actor(objects, "publisher", lambda replica=replica: publishes(replica))
            publisher.step(stops)
            is_last = publisher.is_done
            while not began_in_grace and not has_slept:
                collector.step(1)
            if began_in_grace:
                collector.step()
            publisher.step()
            collector.step()
            assert collector.error is None
            objects.turns.clear()
            for _ in range(2):  # What was refused is tried again, as by an engine.
                if isinstance(publisher.error, ObjectsError):
                    publisher.error = None
                    publishes(replica)
            assert publisher.error is None
            yield replica
            if is_last:
                break


@pytest.mark.parametrize("case", ["same tokens as nameless ones", "forgotten under its owner", "long forgotten"])
def test_a_publish_at_any_moment_names_what_is_there(monkeypatch, case) -> None:
    monkeypatch.setattr("ca_jax.storage.objects.collector._THREADS", 1)
    token_ids = LONG[: RUN_TOKENS + 2]

    def prepare(replica: Replica) -> None:
        if case == "same tokens as nameless ones":
            orphan(replica.kv.objects, token_ids)
        else:
            replica.publish("s", token_ids[:-1], used_s=NOW_S - kit.WEEK_S - 9, ttl_s=1.0)
        if case == "long forgotten":
            gc(replica.kv.objects)

    num_orders = 0
    for replica in in_orders(lambda replica: replica.publish("s", token_ids), prepare):
        np.testing.assert_array_equal(replica.restored("s"), kit.kv_of(token_ids))
        assert all_sound(replica.kv.objects)
        num_orders += 1
    assert num_orders > 100


def test_the_orders_find_a_publisher_that_heeds_no_mark(monkeypatch) -> None:
    monkeypatch.setattr("ca_jax.storage.objects.collector._THREADS", 1)
    monkeypatch.setattr(parts, "is_plain_name", lambda name: False)
    orders = in_orders(
        lambda replica: replica.publish("s", LONG[:RUN_TOKENS]),
        lambda replica: orphan(replica.kv.objects, LONG[:RUN_TOKENS]),
    )
    assert not all(all_sound(replica.kv.objects) for replica in orders)


# Engines.


def test_engines_serve_the_same_before_and_after_a_collection(tmp_path) -> None:
    url = f"file://{tmp_path}/shared"
    store = dataclasses.replace(engine_kit.SMALL.store, objects_url=url, objects_deadline_s=2.0)
    objects = ObjectStore(url, 5.0)
    said = ("Who wrote Faust, and how long did it take?", "And then?", "Tell me of the second part.", "Go on.")
    with engine_kit.small_engine() as alone:
        session = alone.session()
        answers = [say(session, text) for text in said]
    with engine_kit.small_engine(store=store) as first, engine_kit.small_engine(store=store) as second:
        sessions = [first.session(session_id=name) for name in ("old", "new")]
        for session in sessions:
            assert [say_and_publish(first, session, text) for text in said[:2]] == answers[:2]
        before = kit_bytes(objects)
        assert collect(objects, sleep=lambda seconds: None).num_objects > 0, "runs that are full have replaced others"
        assert 0 < kit_bytes(objects) < before
        assert all_sound(objects)
        there = claimed(second, "new")
        num_tokens = len(there.token_ids)
        assert say_and_publish(second, there, said[2]) == answers[2]
        assert there.usage.cached_tokens == {"objects": num_tokens - 1}
        # Both are forgotten, one of them under the engine that has it open, which publishes it again.
        assert len(collect(objects, max_bytes=0, sleep=lambda seconds: None).forgotten) == 2
        assert kit_bytes(objects) == 0
        assert say_and_publish(first, sessions[0], said[2]) == answers[2]
        assert (first.metrics.refused_publishes, second.metrics.refused_publishes) == (0, 0)
        assert all_sound(objects)
        there = claimed(second, "old")
        num_tokens = len(there.token_ids)
        assert say(there, said[3]) == answers[3]
        assert there.usage.cached_tokens == {"objects": num_tokens - 1}


def kit_bytes(objects: ObjectStore) -> int:
    """Of all objects of KV."""
    return sum(len(objects.read(name).value) for name in objects.names("v1/") if "/kv/" in name)


def say(session: Session, text: str) -> str:
    return "".join(session.send(text, sampling=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)))


def say_and_publish(engine: Engine, session: Session, text: str) -> str:
    num_before = engine.metrics.publishes
    answer = say(session, text)
    engine_kit.until(engine, lambda: engine.metrics.publishes > num_before)
    return answer


def claimed(engine: Engine, session_id: str) -> Session:
    engine.elsewhere.claim(session_id)
    return engine.session(session_id=session_id)
