"""Engines that serve as one: what one of them lacks none uses, and all give the answers of a single one.

Here processes are threads, each with an engine and a store of its own; real ones are in `test_two_processes.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import threading

import jax
import pytest

from benchmarks.paced import ControlledStore
from ca_jax.device import transfer
from ca_jax.errors import ProcessesError, TenantError
from ca_jax.overflow.config import OverflowConfig
from ca_jax.session import Session
from ca_jax.storage.config import shard_config
from ca_jax.storage.records import MissReason
from tests import engine_kit as kit
from tests.threads_kit import ThreadProcesses, run_together
from tests.transfers_kit import InstantTransfers

PROMPTS = [kit.prompt(40), kit.prompt(30), kit.prompt(25)]


CACHED = [0, 40 + 12 - 1, 40 + 12 + 30 + 12 - 1]
"""Tokens of each prompt whose KV is stored, in turns that follow each other."""


def cached_of(session: Session, prompts: list[list[int]]) -> list[int]:
    """Sends turns and checks their answers; the tokens that each found stored."""
    return [kit.check_turn(session, prompt).num_cached_tokens for prompt in prompts]


@pytest.mark.parametrize("num_left", [0, 37, 64])
def test_what_one_has_less_of_is_loaded_as_far_as_it_goes(num_left):
    def run(processes: ThreadProcesses) -> list[int]:
        with kit.small_engine(processes=processes) as engine:
            session = engine.session(session_id="one")
            assert cached_of(session, PROMPTS[:2]) == CACHED[:2]
            engine.wait_for_saves()
            if processes.index == 1:
                engine._kv.store.truncate(engine._kv.key("one"), num_left)
            assert cached_of(session, PROMPTS[2:]) == [num_left]
            engine.wait_for_saves()
            assert [info.num_tokens for info in engine.stored.list()] == [len(session.token_ids) - 1]
            assert engine.store_stats().misses.get(MissReason.OTHER_SHARD, 0) == (processes.index == 0)
            return session.token_ids

    one, other = run_together(2, run)
    assert one == other


def test_a_load_that_breaks_on_one_is_begun_anew_on_all():
    def run(processes: ThreadProcesses) -> None:
        loads = InstantTransfers(lambda load: bool(load.layer))
        wrapper = functools.partial(ControlledStore, loads=loads) if processes.index == 1 else None
        with kit.small_engine(processes=processes, store_wrapper=wrapper) as engine:
            assert cached_of(engine.session(session_id="one"), PROMPTS) == [0, 0, 0]
            assert engine.metrics.failed_loads == 2

    run_together(2, run)


def test_what_one_cannot_put_on_its_device_fails_on_all_and_costs_no_kv(monkeypatch):
    out_of_memory: set[int] = set()

    def put(*args: object, original=transfer.staging_to_device) -> jax.Array:
        if threading.get_ident() in out_of_memory:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return original(*args)

    def run(processes: ThreadProcesses) -> None:
        with kit.small_engine(processes=processes) as engine:
            session = engine.session(session_id="one")
            kit.say(session, PROMPTS[0])
            if processes.index == 1:
                out_of_memory.add(threading.get_ident())
            with pytest.raises(ProcessesError, match="could not be brought to its devices"):
                kit.say(session, PROMPTS[1])
            out_of_memory.discard(threading.get_ident())
            assert cached_of(session, PROMPTS[1:]) == CACHED[1:]

    monkeypatch.setattr(transfer, "staging_to_device", put)
    run_together(2, run)


@pytest.mark.parametrize("lost", ["nothing", "shard", "turn"])
def test_a_conversation_goes_on_after_a_restart_whatever_one_has_lost(tmp_path, lost):
    """`turn`: one process died before the second turn was on its disk."""
    store = kit.ssd_store(tmp_path / "store")
    shard = shard_config(store, 1, 2).ssd_directory

    def first(processes: ThreadProcesses) -> None:
        with kit.small_engine(processes=processes, store=store) as engine:
            session = engine.session(session_id="one")
            cached_of(session, PROMPTS[:1])
            engine.wait_for_saves()
            processes.gather("saved", None)
            if processes.index == 1:
                shutil.copytree(shard, tmp_path / "kept")
            cached_of(session, PROMPTS[1:2])

    def second(processes: ThreadProcesses) -> None:
        with kit.small_engine(processes=processes, store=store) as engine:
            session = engine.session(session_id="one")
            assert cached_of(session, PROMPTS[2:]) == [{"nothing": CACHED[2], "shard": 0, "turn": CACHED[1]}[lost]]
            assert [session.token_ids[:40], len(session.messages)] == [PROMPTS[0], 6]

    run_together(2, first)
    if lost != "nothing":
        shutil.rmtree(shard)
    if lost == "turn":
        shutil.copytree(tmp_path / "kept", shard)
    run_together(2, second)


def test_several_conversations_at_once_and_a_full_context_end_alike():
    """The order in which KV is at hand differs between them; what is done must not."""

    def run(processes: ThreadProcesses) -> tuple[list, int]:
        overflow = OverflowConfig(truncation_ratio=0.5)
        with kit.small_engine(
            processes=processes, store=kit.store_of(40), max_batch_size=2, overflow=overflow
        ) as engine:
            sessions = [engine.session() for _ in range(4)]
            for turn in range(6):
                prompts = [kit.prompt(70 + 9 * number, turn) for number in range(4)]
                kit.drain(*(s.send_ids(p, max_tokens=20) for s, p in zip(sessions, prompts, strict=True)))
                engine.wait_for_saves()
                if processes.index == 1 and turn == 1:
                    engine._kv.store.drop(engine._kv.key(sessions[0].session_id))
            return [(s.session_id, s.token_ids) for s in sessions], engine.metrics.truncations

    one, other = run_together(2, run)
    assert one == other
    assert one[1] > 0


def test_those_that_do_not_do_the_same_are_told():
    def run(processes: ThreadProcesses) -> None:
        with kit.small_engine(processes=processes) as engine:
            session = engine.session(session_id="one")
            kit.say(session, PROMPTS[0])
            if processes.index:
                engine.session()
            else:
                kit.say(session, PROMPTS[1])

    with pytest.raises(ProcessesError, match=r"got \['ready', \"a session's name\"\]"):
        run_together(2, run, timeout_s=20)


def test_those_that_serve_otherwise_are_told_before_anything_is_compiled():
    def run(processes: ThreadProcesses) -> None:
        kit.small_engine(processes=processes, save_group_tokens=8 + 8 * processes.index)

    with pytest.raises(ProcessesError, match="engine config"):
        run_together(2, run)


def test_a_conversation_of_another_tenant_is_refused_by_all(tmp_path):
    def run(processes: ThreadProcesses) -> None:
        with kit.small_engine(processes=processes, store=kit.ssd_store(tmp_path)) as engine:
            kit.say(engine.session(session_id="one", tenant="a"), PROMPTS[0])
            engine.wait_for_saves()
            engine._sessions._sessions.clear()
            with pytest.raises(TenantError):
                engine.session(session_id="one", tenant="b")

    run_together(2, run)


def test_a_directory_of_another_number_of_processes_is_refused(tmp_path):
    store = kit.ssd_store(tmp_path)
    assert shard_config(store, 0, 1) == store
    (tmp_path / "shard-0-of-2").mkdir()
    shard = shard_config(dataclasses.replace(store, ssd_url="memory://blocks/"), 1, 2)
    assert (shard.ssd_dir, shard.ssd_url) == (str(tmp_path / "shard-1-of-2"), "memory://blocks/shard-1-of-2")
    with pytest.raises(ValueError, match="store of 4 processes, got that of 2 processes"):
        shard_config(store, 0, 4)
    with pytest.raises(ValueError, match="store of 1 process, got that of 2 processes"):
        kit.small_engine(store=store)
    (tmp_path / "shard-0-of-2").rmdir()
    kit.small_engine(store=store).close()
    with pytest.raises(ValueError, match="store of 2 processes, got that of 1 process"):
        shard_config(store, 0, 2)
