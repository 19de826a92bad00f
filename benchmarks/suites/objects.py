"""A turn at another replica: its TTFT with the history in the objects that replicas share, against a local SSD's.

One replica has the session and has published it. Every round takes one sample of each way, of the same new tokens:

    ssd       the replica that has it: the history is on its SSD alone, whose files are not in the page cache
    objects   another replica, which has nothing of it: from claiming the session to the first token; the objects lie on
              the same disk, not in the page cache either

A turn whose history came from anywhere else is an error, not a number. With `--objects_gb_s` KV comes at the speed of a
link, which takes no CPU, instead of the disk's.

Not here: what S3 takes (`simulate --num_replicas`), what is computed where nothing is stored (`suites.tiers`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.disk import drop_cached, is_dropped, scratch_on_disk
from benchmarks.engines import (
    OneSessionEngine,
    check_source,
    cool_down_files,
    make_engine,
    one_session_config,
    send_turn,
    take_back,
)
from benchmarks.harness import BenchError, Run, Sample, Ways
from benchmarks.suites.reuse import DiskHistoryConfig, HistoryRow
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv.shared_sessions import SharedSessions
from ca_jax.serving.open_sessions import Elsewhere
from ca_jax.session import Session
from ca_jax.storage.objects.store import Found

_PATIENCE_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectsConfig(DiskHistoryConfig):
    """One turn over a history that another replica published."""

    objects_gb_s: float | None = None
    """GB a second at which KV comes from the objects; None: as fast as the disk gives it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectsRow(HistoryRow):
    """Time to the first token (TTFT) of the same turn by where its history is."""

    kv_bytes: int
    ttft_ssd_s: float
    """From sending to the first token, with the history on the local SSD alone, out of the page cache."""
    ttft_objects_s: float
    """From claiming the session at another replica to its first token there."""
    claim_s: float
    """Of that, reading the manifest and writing it as the new owner."""
    ratio: float
    """`ttft_objects_s` over `ttft_ssd_s`: the median of the rounds' own ratios."""
    early: float
    """1 where the turn there began while its KV was still coming, 0 where it waited for all of it: of most rounds."""
    publish_s: float
    """From a turn's end until it is published: the new tokens' KV and the manifest."""
    bookkeeping_s: float
    """Of the engine's thread for that: all that it did for the shared tier, from the turn's end to the publish's."""


def _summary(rows: Sequence[ObjectsRow]) -> dict[str, Any]:
    """The largest of the rows."""
    return {
        "ratio": max(row.ratio for row in rows),
        "bookkeeping_s": max(row.bookkeeping_s for row in rows),
        **harness.checks(rows),
    }


@harness.suite(ObjectsConfig, summary=_summary)
def objects(run: Run[ObjectsConfig]) -> Iterator[ObjectsRow]:
    """A turn's TTFT at a replica that takes a session over, against a local SSD's."""
    config = run.config
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch_on_disk(config.ssd_dir))
        sized = one_session_config(config.engine_config(), run.model, directory / "ssd", max_tokens=config.max_tokens)
        sized = _with_objects(sized, directory / "objects")
        (directory / "ssd").mkdir()
        served = OneSessionEngine(run.model, sized, max_tokens=config.max_tokens, seed=config.seed)
        stack.callback(served.close)
        other = make_engine(run.model, _with_objects(sized, directory / "objects", ssd_dir=None))
        stack.callback(other.close)
        shared, elsewhere = served.engine._kv.shared, other.elsewhere
        if shared is None or elsewhere is None:
            raise BenchError("objects must have engines with an objects_url, got one without")
        for engine in (served.engine, other):
            engine.warmup(max_history_tokens=max(config.history_tokens), max_new_tokens=max(config.new_tokens))
        if config.objects_gb_s is not None:
            pace(other, config.objects_gb_s * 1e9)
        for num_history, num_new in config.cells:
            bench = _Bench(run, served, other, directory / "objects", shared, elsewhere)
            yield bench.row(num_history, num_new)


def pace(engine: Engine, bytes_per_s: float) -> None:
    """Has what a replica reads of KV come one after the other over a link."""
    if engine._kv.shared is None:
        raise BenchError("a replica must share its sessions to be paced, got one that does not")
    objects = engine._kv.shared.objects
    begin_read, lock, free_s = objects.begin_read, threading.Lock(), 0.0

    def paced(name: str, start: int = 0, stop: int | None = None, *, may_be_short: bool = False) -> Callable[[], Found]:
        nonlocal free_s
        reading = begin_read(name, start, stop, may_be_short=may_be_short)
        with lock:
            free_s = max(free_s, time.perf_counter()) + (0 if stop is None else stop - start) / bytes_per_s
            due_s = free_s

        def wait() -> Found:
            found = reading()
            time.sleep(max(due_s - time.perf_counter(), 0.0))
            return found

        return wait

    objects.begin_read = paced  # type: ignore[method-assign]


def _with_objects(config: EngineConfig, directory: Path, **changes: Any) -> EngineConfig:
    """A replica that shares a directory, and publishes when it is told to."""
    store = dataclasses.replace(config.store, objects_url=f"file://{directory}", objects_write="drain", **changes)
    return dataclasses.replace(config, store=store)


@dataclasses.dataclass(frozen=True)
class _Bench:
    run: Run[ObjectsConfig]
    served: OneSessionEngine
    other: Engine
    directory: Path
    shared: SharedSessions  # Of the first.
    elsewhere: Elsewhere  # Of the other.

    def row(self, num_history: int, num_new: int) -> ObjectsRow:
        session = self.served.store_session(num_history)
        self._publish(session)
        new_ids = self.served.random_ids(num_new)

        def ways() -> Ways:
            return {
                "ssd": partial(self._from_ssd, session, new_ids),
                "objects": partial(self._from_objects, session, new_ids),
            }

        rounds = self.run.rounds(ways)
        for each in rounds:
            each["objects"]["ratio"] = each["objects"]["ttft_objects_s"] / each["ssd"]["ttft_ssd_s"]
        published = self.run.rounds(lambda: {"turn": partial(self._publish_turn, num_history, num_new)})
        return harness.make_row(
            ObjectsRow,
            [*harness.samples(rounds), *harness.samples(published)],
            history_tokens=num_history,
            new_tokens=num_new,
            kv_bytes=num_history * self.served.layout.token_bytes,
            same_tokens=harness.same(rounds, "token"),
        )

    def _from_ssd(self, session: Session, new_ids: list[int]) -> Sample:
        num_history, engine = len(session.token_ids), self.served.engine
        self.served.push_out()
        cool_down_files(engine)
        token, ttft_s = send_turn(engine, session, new_ids)
        check_source("ssd", session, len(new_ids), {"ssd": num_history})
        take_back(engine, session, num_history)
        return {"token": token, "ttft_ssd_s": ttft_s}

    def _from_objects(self, session: Session, new_ids: list[int]) -> Sample:
        num_history, elsewhere = len(session.token_ids), self.elsewhere
        files = [path for path in self.directory.rglob("*") if path.is_file()]
        drop_cached(files)
        if not is_dropped(files):
            raise BenchError("objects must have a page cache without stored KV, got it there")
        started_s = time.perf_counter()
        elsewhere.claim(session.session_id)
        claim_s = time.perf_counter() - started_s
        there, num_early = self.other.session(session_id=session.session_id), self.other.metrics.streamed_restores
        token, ttft_s = send_turn(self.other, there, new_ids)
        check_source("objects", there, len(new_ids), {"objects": num_history})
        elsewhere.let_go(there)  # It has nothing of it in the next round.
        early = self.other.metrics.streamed_restores - num_early
        return {"token": token, "claim_s": claim_s, "ttft_objects_s": claim_s + ttft_s, "early": early}

    def _publish_turn(self, num_history: int, num_new: int) -> Sample:
        """Publishes a session's history, then a turn behind it, and takes the time of that."""
        session = self.served.store_session(num_history)
        self._publish(session)
        send_turn(self.served.engine, session, self.served.random_ids(num_new))
        sample = self._publish(session)
        session.close()
        return sample

    def _publish(self, session: Session) -> Sample:
        """Has the owner publish a session's state."""
        engine, shared = self.served.engine, self.shared
        spent_s = 0.0

        def timed(function: Callable[..., Any], *args: Any) -> None:
            nonlocal spent_s
            since_s = time.perf_counter()
            function(*args)
            spent_s += time.perf_counter() - since_s

        before, started_s = engine.metrics.publishes, time.perf_counter()
        timed(shared.changed, session)
        timed(shared.publish_now, session.key)
        while engine.metrics.publishes == before:
            if time.perf_counter() - started_s > _PATIENCE_S or engine.metrics.failed_publishes:
                raise BenchError("a session must be published, and was not")
            with engine._lock:
                timed(shared.collect)
            time.sleep(0.001)
        return {"publish_s": time.perf_counter() - started_s, "bookkeeping_s": spent_s}
