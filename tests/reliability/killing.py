"""Rounds of kill -9 under load, each followed by a restart that is checked."""

from __future__ import annotations

import collections
import dataclasses
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ca_jax.storage.catalog.catalog import CatalogReader, namespaces
from ca_jax.storage.catalog.file import CATALOG_NAME, CatalogAccessError
from ca_jax.storage.tiers.formats import FORMATS
from tests import engine_kit as kit
from tests.reliability import workload
from tests.storage.store_reference import num_common

REPOSITORY = Path(__file__).resolve().parents[2]
_ANSWER_S = 240.0  # How long a victim may be silent: the first one compiles.
_LONGEST_S = {"start": 0.6, "open": 1.2, "turns": 1.2}  # Between what a victim says and its end.
_MAX_PROMPT_TOKENS = 20  # Of a turn after a restart.
_ANSWER_TOKENS = 4  # Likewise.


@dataclasses.dataclass(frozen=True)
class Stored:
    """A session as the catalog has it."""

    num_tokens: int
    digest: str | None
    """Of all that the catalog says; None where that is not known."""

    def matches(self, found: Stored) -> bool:
        return found.num_tokens == self.num_tokens and self.digest in (None, found.digest)


@dataclasses.dataclass
class Report:
    """What rounds have seen."""

    rounds: int = 0
    killed_at: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """`start`, `serving`, or, if a change of the catalog was under way, its name."""
    in_flight: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """What became of a change that was under way: `old` state or `new` one."""
    turns: int = 0
    """Of the victims, that ended."""
    changes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Of the catalog, by kind."""
    sessions_checked: int = 0
    cut_sessions: int = 0
    """Those of them that tokens were dropped from."""
    ahead_sessions: int = 0
    """Those that stand behind a cut or a rewind that their KV on SSD has not seen."""
    tokens_checked: int = 0
    """Of these sessions' stored KV."""
    chunks_checked: int = 0
    """Chunks on SSD, after restarts."""
    wrong_tokens: int = 0
    answers: int = 0
    shared_blocks: int = 0
    """Blocks on SSD that several sessions hold, after restarts."""
    rounds_with_unheld_blocks: int = 0
    """Rounds after which blocks lay on disk that no session held, before the restart."""
    unheld_blocks: int = 0
    leftover_files: int = 0
    """Of writes that were cut short, before the restart."""
    seconds: float = 0.0


class Nursery:
    """The process whose forks are killed."""

    def __init__(self, directory: Path, driver: str, compile_cache: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.victim", str(directory), driver, str(compile_cache)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
            bufsize=0,
        )
        self._rest = b""

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def begin(self, seed: int) -> int:
        """Starts a fork; its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n".encode())
        line = self.line(_ANSWER_S)
        assert line is not None
        assert line.startswith("start "), f"there must be a fork, got {line!r}"
        return int(line.split()[1])

    def line(self, timeout_s: float) -> str | None:
        """The next line; None if there is none in time."""
        assert self._process.stdout is not None
        give_up_s = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = max(give_up_s - time.monotonic(), 0.0)
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            assert data, "the victims' process is gone"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


class Ledger:
    """What the catalog must say, by what a victim told."""

    def __init__(self) -> None:
        self.stored: dict[str, Stored] = {}
        self.under_way: list[str] = []
        self.turns = 0
        self.num_lost = 0
        self.changes: collections.Counter[str] = collections.Counter()

    def read(self, line: str) -> None:
        """Takes in one line of a fork."""
        verb, *words = line.split()
        if verb == "broken":
            raise AssertionError(f"a victim broke: {line}")
        if verb == "turns":
            self.turns = int(words[0])
        elif verb == "open":
            assert int(words[0]) == len(self.stored), f"there must be {len(self.stored)} sessions, got {words[0]}"
            assert int(words[1]) == 0, f"{words[1]} sessions were lost"
        elif verb == "ok":
            change, self.under_way = self.under_way, []
            self.changes[change[0]] += 1
            self.stored = self.after(change, words[0] if words else None)
        else:
            assert not self.under_way, f"two changes at once: {self.under_way} and {line}"
            self.under_way = [verb, *words]

    def after(self, change: list[str], found_digest: str | None = None) -> dict[str, Stored]:
        """What is stored once a change is made."""
        stored = dict(self.stored)
        if not change:
            return stored
        verb, key, *words = change
        if verb == "publish":
            stored[key] = Stored(int(words[0]), words[1])
        elif verb == "forget":
            for each in (key, *words):
                stored.pop(each, None)
        elif key in stored:
            if int(words[0]):
                stored[key] = Stored(int(words[0]), found_digest)
            else:
                del stored[key]
        return stored


def run_rounds(directory: Path, driver: str, num_rounds: int, *, seed: int, compile_cache: Path) -> Report:
    """Lets a process serve, kills it at a random moment, checks a copy of what it left; over and over.

    Args:
      directory: where the SSD tier is, and copies of it go.
      driver: of the SSD tier.
      num_rounds: how often.
      seed: of the moments and of what is served.
      compile_cache: where victims find compiled functions.
    """
    random = np.random.default_rng(seed)
    report, ledger = Report(), Ledger()
    began_s = time.monotonic()
    store = directory / "store"
    with Nursery(store, driver, compile_cache) as nursery:
        for number in range(num_rounds):
            # After it began, after its engine is there, after its first turns: the first one must serve, to compile.
            after = "turns" if not number else str(random.choice(["start", "open", "turns"], p=[0.2, 0.3, 0.5]))
            ledger.turns = 0
            where = _kill_one(nursery, ledger, random, seed * 100_000 + number, after)
            report.rounds += 1
            report.turns += ledger.turns
            report.killed_at[ledger.under_way[0] if ledger.under_way else where] += 1
            if store.is_dir():
                _settle(store, driver, ledger, report)
                copy = directory / "copy"
                shutil.rmtree(copy, ignore_errors=True)
                subprocess.run(["cp", "-a", "--sparse=always", str(store), str(copy)], check=True)
                _check_restart(copy, driver, ledger.stored, report, random)
    report.changes += ledger.changes
    report.seconds = time.monotonic() - began_s
    return report


def _kill_one(nursery: Nursery, ledger: Ledger, random: np.random.Generator, seed: int, after: str) -> str:
    """Starts a fork and kills it some time after it said `after`; where it was by then."""
    where = "start"
    pid = nursery.begin(seed)
    try:
        reached = after == "start"
        while not reached:
            line = nursery.line(_ANSWER_S)
            assert line is not None, "the victim is silent"
            ledger.read(line)
            where = "serving" if line.startswith("open") else where
            reached = line.startswith(after)
        moment_s = time.monotonic() + random.uniform(0.0, _LONGEST_S[after])
        while (line := nursery.line(moment_s - time.monotonic())) is not None:
            ledger.read(line)
            where = "serving" if line.startswith("open") else where
    finally:
        os.kill(pid, signal.SIGKILL)
    while (line := nursery.line(_ANSWER_S)) != "end":
        assert line is not None, "the victim does not die"
        ledger.read(line)
    return where


def _settle(directory: Path, driver: str, ledger: Ledger, report: Report) -> None:
    """Holds what is on disk against the ledger, and takes in what became of a change that was under way."""
    found, unheld = _read_disk(directory, driver)
    old, new = ledger.stored, ledger.after(ledger.under_way)
    is_old, is_new = _fits(old, found), _fits(new, found)
    assert is_old or is_new, f"there must be {old}\nor, after {ledger.under_way}, {new}\nfound {found}"
    if ledger.under_way:
        report.in_flight["old" if is_old else "new"] += 1
    ledger.stored, ledger.under_way = found, []
    report.unheld_blocks += len(unheld)
    report.rounds_with_unheld_blocks += bool(unheld)
    report.leftover_files += len(workload.strange_files(directory))


def _fits(wanted: dict[str, Stored], found: dict[str, Stored]) -> bool:
    return wanted.keys() == found.keys() and all(wanted[key].matches(found[key]) for key in wanted)


def _read_disk(directory: Path, driver: str) -> tuple[dict[str, Stored], set[int]]:
    """What the catalog says, and which blocks have bytes that no session holds."""
    try:
        known = tuple(namespaces(directory)) if (directory / CATALOG_NAME).is_file() else ()
    except CatalogAccessError:  # Made, and nothing is in it yet.
        known = ()
    if not known:
        return {}, set()
    (namespace,) = known
    found: dict[str, Stored] = {}
    held: set[int] = set()
    with CatalogReader(directory, namespace) as reader:
        for record in reader.load_all(lambda key, reason: None):
            contents = reader.contents(record.key)
            assert contents is not None
            found[record.key] = Stored(record.num_tokens, workload.digest(record, contents))
            held.update(record.block_ids.tolist())
        location = reader.block_directory
    if not (location / driver).is_dir():
        return found, set()
    layout = namespace.layout
    try:
        tier = FORMATS[driver](layout, location, layout.stored_block_bytes, only_existing=True)
    except FileNotFoundError:
        return found, set()
    stored = set(tier.stored_block_ids())
    tier.close()
    return found, stored - held


def _check_restart(
    directory: Path, driver: str, stored: dict[str, Stored], report: Report, random: np.random.Generator
) -> None:
    """Starts an engine on what is left: every session is there, is loaded from SSD and goes on as if recomputed."""
    config = workload.ssd_store(directory, driver, dram_blocks=400, ssd_blocks=400)
    with kit.small_engine(store=config) as engine:
        workload.check_books(engine, directory, fresh=True)
        report.shared_blocks += len(workload.ssd_of(engine)._blocks._others)
        infos = {info.key: info for info in engine.stored.list()}
        assert {key: info.ssd_tokens for key, info in infos.items()} == {
            key: state.num_tokens for key, state in stored.items()
        }
        for chunk in workload.CHUNKS:
            if infos.pop(engine._kv.chunks.key(chunk, ""), None) is not None:
                assert workload.is_whole(engine, chunk), f"a chunk of {len(chunk)} tokens is stored, and not served"
                report.chunks_checked += 1
        store = kit.store_in(engine)
        kv_ids = {key: store._ssd._mover.contents(key).token_ids.tolist() for key in infos}
        sessions = [engine.session(session_id=info.session_id) for info in infos.values()]
        ahead = {  # Cut or rewound since their KV was written: they are noted at once, it is cut in the background.
            info.session_id
            for session, info in zip(sessions, infos.values(), strict=True)
            if session.conversation.lineage != info.num_dropped
            or session.token_ids[: info.ssd_tokens] != kv_ids[info.key]
        }
        found = [  # Those that go on without an overflow, by which they would load less than is stored.
            (session, info, len(session.token_ids), session.conversation.lineage)
            for session, info in zip(sessions, infos.values(), strict=True)
            if len(session.token_ids) + _MAX_PROMPT_TOKENS + _ANSWER_TOKENS < kit.WINDOW
        ]
        prompts = [kit.prompt(int(n), seed=report.rounds) for n in random.integers(2, _MAX_PROMPT_TOKENS, len(found))]
        kit.drain(*(s.send_ids(p, max_tokens=_ANSWER_TOKENS) for (s, *_), p in zip(found, prompts, strict=True)))
        for session, info, length, lineage in found:
            assert session.usage is not None
            is_ahead = session.session_id in ahead
            if is_ahead:
                assert lineage >= info.num_dropped, "a conversation from before its KV"
                # By chance the prompt may say again what was taken back, or what another conversation has there.
                known = [
                    session.token_ids[:length],
                    *kv_ids.values(),
                    *(other.token_ids for other, *_ in found if other is not session),
                ]
                num_known = max(num_common(session.token_ids, ids) for ids in known)
                assert session.usage.num_cached_tokens <= num_known, "KV of tokens that are gone"
                report.ahead_sessions += 1
            else:
                assert length >= info.ssd_tokens, "KV of more tokens than the conversation has"
                assert session.usage.cached_tokens == {"ssd": info.ssd_tokens}, f"{info}: {session.usage}"
            report.cut_sessions += session.num_dropped > 0
            if not session.num_dropped or lineage > info.num_dropped:
                # The others go on behind KV that no one pass gives.
                report.wrong_tokens += kit.num_wrong(session.token_ids, [kit.last_answer(session)])
            report.answers += 1
            report.sessions_checked += 1
            report.tokens_checked += info.ssd_tokens
        assert sum(engine.store_stats().misses.values()) <= len(ahead)
        workload.check_books(engine, directory)
    assert report.wrong_tokens == 0, f"{report.wrong_tokens} tokens are not those of a recompute"
