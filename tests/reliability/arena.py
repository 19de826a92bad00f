"""Conversations over an SSD directory that things are done to, with callers who know what was said and check it all."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ca_jax.config import BlendConfig
from ca_jax.engine import Engine
from ca_jax.session import Answer, Session
from ca_jax.storage import ssd
from ca_jax.storage.records import Residency
from ca_jax.storage.tiers.disk import DiskTier
from tests import engine_kit as kit
from tests.reliability import workload

NUM_CONVERSATIONS = 6
_RENEW_TOKENS = 200
_NEW_TOKENS = 6


@dataclasses.dataclass
class Tally:
    """What was done to an arena, and what came of it."""

    faults: int = 0
    answers: int = 0
    wrong_tokens: int = 0
    failed_requests: int = 0
    cached_tokens: int = 0
    loaded_chunks: int = 0
    missed_chunks: int = 0
    reasons: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """The store's counters of misses and failed flushes, by kind and reason."""

    def add(self, other: Tally) -> None:
        """Takes in another one."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclasses.dataclass
class Turn:
    """A turn that runs."""

    name: str
    session: Session
    answer: Answer
    context: Sequence[Sequence[int]]


class Arena:
    """An engine whose sessions leave DRAM as soon as they are on SSD, and its callers.

    Args:
      directory: of the SSD tier.
      driver: of it.
      seed: of what is said.
      ratio: share of chunks that is computed anew: turns have contexts of chunks then. With less than 1 answers are not
        those of one pass, and are not checked; None: there are no chunks.
      **store: fields of the store's config.
    """

    def __init__(self, directory: Path, driver: str, seed: int, *, ratio: float | None = None, **store: object) -> None:
        self.ratio = ratio
        self.directory = directory
        self.driver = driver
        self.random = np.random.default_rng(seed)
        self.tally = Tally()
        self._config = workload.ssd_store(
            directory, driver, **{"dram_blocks": 200, "ssd_blocks": 300, "dram_free_fraction": 0.995} | store
        )
        self._num_contexts = 0
        self.num_waves = 0  # Of faults, until now.
        self._known: dict[str, list[int]] = {}  # What was said, as the callers know it.
        self._num_named = 0
        self._counted: collections.Counter[str] = collections.Counter()
        self.names: list[str] = []
        self.open()
        self.renew()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.engine.close()

    @property
    def tier(self) -> DiskTier:
        """The blocks on SSD."""
        return workload.ssd_of(self.engine)._mover._tier

    @property
    def block_directory(self) -> Path:
        """Where they are."""
        (found,) = self.directory.glob(f"blocks-*/{self.driver}")
        return found

    def open(self) -> None:
        """Starts an engine."""
        blend = BlendConfig(recompute_ratio=self.ratio)
        # By arrival, so that no load which was begun early is given up for a shorter turn, and counted.
        options = {"share_prefixes": self.ratio is None, "queue_order": "arrival"}
        config = dataclasses.replace(kit.SMALL, store=self._config, blend=blend, **options)
        self.engine = Engine(kit.tiny_model(), config)
        self._counted.clear()

    def restart(self) -> None:
        """Closes the engine and starts another."""
        self.engine.close()
        self.open()

    def wipe(self) -> None:
        """Begins anew, in a directory that is empty."""
        self.engine.close()
        shutil.rmtree(self.directory)
        self._known.clear()
        self.names.clear()
        self.open()
        self.renew()

    def renew(self) -> None:
        """Lets new conversations begin in place of long ones, and waits until all of them are on SSD alone."""
        for name in [name for name in self.names if len(self._known[name]) > _RENEW_TOKENS]:
            self.engine.session(session_id=name).close()
            self.names.remove(name)
            del self._known[name]
        new = [f"conversation {self._num_named + i}" for i in range(NUM_CONVERSATIONS - len(self.names))]
        self._num_named += len(new)
        self.names += new
        self.converse(new, num_new=(20, 40))
        self.rest()

    def rest(self) -> None:
        """Waits until conversations are on SSD alone."""
        self.engine.wait_for_saves()
        where = {info.residency for info in self.engine.stored.list()}
        assert where <= {Residency.SSD}, f"there must be all on SSD, got {where}"
        self.take_counts()

    def begin(
        self,
        name: str,
        num_new: tuple[int, int] = (2, 12),
        max_tokens: int = _NEW_TOKENS,
    ) -> Turn:
        """Queues a turn. A caller whose conversation the engine has lost says all of it again.

        Where there are chunks, it has a context of two: four turns have all of them.
        """
        session = self.engine.session(session_id=name)
        known = self._known.setdefault(name, [])
        num_held, context = len(session.token_ids), ()
        assert session.token_ids == known[:num_held], f"{name}: the engine tells another conversation"
        new = self.random.integers(0x20, 0x7F, self.random.integers(*num_new)).tolist()
        if self.ratio is not None:
            first = self._num_contexts = (self._num_contexts + 1) % len(workload.CHUNKS)
            pair = (workload.CHUNKS[first], workload.CHUNKS[first - len(workload.CHUNKS) // 2])
            context = tuple(pair[i] for i in self.random.permutation(2))
        answer = session.send_ids([*known[num_held:], *new], context=context or None, max_tokens=max_tokens)
        return Turn(name, session, answer, context)

    def finish(self, turns: Sequence[Turn]) -> None:
        """Runs turns to their ends, a token of each at a time, and checks their answers."""
        pending, ended = list(turns), []
        while pending:
            for turn in tuple(pending):
                try:
                    if next(turn.answer, None) is not None:
                        continue
                    ended.append(turn)
                except Exception:  # Any at all is a failed request, and counted.
                    self.tally.failed_requests += 1
                pending.remove(turn)
        for turn in ended:
            usage, token_ids = turn.session.usage, turn.session.token_ids
            assert usage is not None
            self.tally.answers += 1
            self.tally.cached_tokens += usage.num_cached_tokens
            self.tally.loaded_chunks += len(turn.context) - usage.missed_chunks
            self.tally.missed_chunks += usage.missed_chunks
            if self.ratio in (None, 1.0):
                self.tally.wrong_tokens += kit.num_wrong(token_ids, [kit.last_answer(turn.session)])
            self._known[turn.name] = list(token_ids)

    def converse(self, names: Sequence[str] | None = None, num_new: tuple[int, int] = (2, 12)) -> None:
        """A turn of each conversation, all in parallel."""
        self.finish([self.begin(name, num_new) for name in (self.names if names is None else names)])

    def converse_one(self) -> None:
        """A turn of one conversation, of each in its turn."""
        self.names.append(self.names.pop(0))
        self.converse(self.names[-1:])

    def counts(self) -> collections.Counter[str]:
        """What the store has counted since `take_counts`: misses and failed flushes."""
        stats = self.engine.store_stats()
        assert stats.ssd is not None
        now = collections.Counter({f"miss {reason}": number for reason, number in stats.misses.items()})
        now.update({f"flush {reason}": number for reason, number in stats.ssd.failed_flushes.items()})
        return now - self._counted

    def take_counts(self) -> collections.Counter[str]:
        """The same, from the last time to now."""
        counts = self.counts()
        self._counted += counts
        return counts

    def count(self, num_faults: int) -> collections.Counter[str]:
        """Takes the counts into the tally, as those of so many faults."""
        counts = self.take_counts()
        self.tally.faults += num_faults
        self.tally.reasons += counts
        return counts

    def block_tables(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Which blocks hold each conversation."""
        with workload.reader_of(self.engine, self.directory) as reader:
            tables = {r.session_id: r.block_ids.tolist() for r in reader.load_all(lambda key, reason: None)}
        return {name: tables[name] for name in names}

    def idle_chunks(self, running: Sequence[Turn] = ()) -> list[str]:
        """Names of chunks that are on SSD alone, and that no turn which runs has in its context."""
        keys = {chunk: self.engine._kv.chunks.key(chunk, "") for chunk in workload.CHUNKS}
        used = {keys[tuple(chunk)] for turn in running for chunk in turn.context}
        wanted = set(keys.values()) - used
        infos = self.engine.stored.list()
        return [info.session_id for info in infos if info.key in wanted and info.residency is Residency.SSD]

    def check_books(self) -> None:
        """Holds the store's books against the disk, and what it serves as chunks against full passes."""
        workload.check_books(self.engine, self.directory)
        assert self.check_chunks() or self.ratio is None, "no chunk is stored"

    def check_chunks(self) -> int:
        """Holds what the store serves as chunks against full passes; how many it serves."""
        if self.ratio is None:
            return 0
        return sum(workload.is_whole(self.engine, chunk) for chunk in workload.CHUNKS)


@contextlib.contextmanager
def without_pause() -> Iterator[None]:
    """Lets the store try its SSD again at once after a missed deadline, so that each stall is one of its own."""
    usual = ssd._LATE_PAUSE_S
    ssd._LATE_PAUSE_S = 0.0
    try:
        yield
    finally:
        ssd._LATE_PAUSE_S = usual
