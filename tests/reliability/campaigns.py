"""Campaigns of faults: each brings so many of one kind upon conversations that run, and checks what the store counts.

A campaign works in waves: some conversations run, damage is done, all others take a turn beside them. Whatever is
done, every turn must end with the right answer; the counters must name the reason.

With contexts of chunks, a chunk that a fault meets is missed by every turn that waits for it, and may be absent to the
next: the counters must name the same reasons then, as often at least.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from tests.reliability import damage, workload
from tests.reliability.arena import NUM_CONVERSATIONS, Arena, Tally, without_pause
from tests.storage.store_helpers import small_disk, stalled

_RESTART_EVERY = 4  # Waves.
_PATIENCE_S = 60.0
# What a damaged catalog may lead to: it cannot be read, says what cannot be, or does not know a session any more.
_OF_CATALOG = {
    *("miss absent", "miss catalog", "miss corrupt", "miss missing"),
    *("flush catalog", "flush device"),
}


class Campaign(Protocol):
    """Brings at least so many faults upon an arena in a directory. With a ratio, turns have contexts of chunks."""

    def __call__(
        self, directory: Path, driver: str, num_faults: int, seed: int, ratio: float | None = None
    ) -> Tally: ...


def waves(wave: Callable[[Arena], None], **store: object) -> Campaign:
    """Waves of faults upon one arena, until there were enough."""

    def campaign(directory: Path, driver: str, num_faults: int, seed: int, ratio: float | None = None) -> Tally:
        with without_pause(), Arena(directory, driver, seed, ratio=ratio, **store) as arena:
            while arena.tally.faults < num_faults:
                arena.num_waves += 1
                wave(arena)
                arena.renew()
            arena.check_books()
            return arena.tally

    return campaign


def damaged_blocks(
    damage_blocks: Callable[[Arena, Sequence[str]], set[str]], *reasons: str, num_damaged: int = 3
) -> Campaign:
    """Blocks on disk are damaged; each conversation of which one was is a miss for a reason of these, no other is."""

    def wave(arena: Arena) -> None:
        restarts = not arena.num_waves % _RESTART_EVERY
        # All blocks of the raw driver are in one file, which is not cut under those that run.
        runs = not restarts and not (damage_blocks is damage.truncate and arena.driver == "raw")
        running = [arena.begin(name, max_tokens=16) for name in arena.names[:2] if runs]
        for turn in running:
            next(turn.answer)
        idle = arena.names[2:]
        names = arena.random.permutation(idle)[:num_damaged].tolist()
        names += arena.idle_chunks(running)[:2]
        damaged = damage_blocks(arena, names)
        if restarts:
            arena.restart()
        arena.finish([*running, *(arena.begin(n) for n in (idle if runs else arena.names))])
        counts = arena.count(len(names))
        num_misses = counts.total()  # What one turn has missed is absent to those that ask for it next.
        if arena.ratio is not None:
            counts.pop("miss absent", None)
        assert counts.keys() <= set(reasons), f"there must be counts among {reasons}, counted {counts}"
        is_right = num_misses == len(damaged) if arena.ratio is None else num_misses >= len(damaged)
        assert is_right, f"there must be {len(damaged)} misses, counted {counts}"

    return waves(wave)


def stalled_reads(hold: Callable[[Arena], AbstractContextManager[None]]) -> Campaign:
    """Disk or catalog does not answer reads: all that wait for it are misses once the deadline has passed."""

    def wave(arena: Arena) -> None:
        with hold(arena):
            arena.converse()
        _expect(arena, {"miss deadline": NUM_CONVERSATIONS}, only="miss")
        _wait_until(arena, lambda: not workload.ssd_of(arena.engine).is_late)
        arena.converse()
        arena.check_books()

    return waves(wave, ssd_deadline_s=0.4)


def stalled_writes(arena: Arena) -> None:
    """The disk does not answer writes: what waits for it is given up, and turns go on meanwhile."""
    with stalled((arena.tier, "_write")):
        arena.converse()
        _wait_until(arena, lambda: arena.counts()["flush deadline"] > 0, arena.converse_one)
    _wait_until(arena, lambda: not workload.ssd_of(arena.engine).is_late)
    arena.converse()
    counts = arena.count(arena.counts()["flush deadline"])
    # A session whose only copy left DRAM while SSD was late is absent, which is no fault of its own. Nobody
    # waits meanwhile for a chunk that is on SSD alone.
    allowed = {"flush deadline", "miss absent"} | ({"miss deadline"} if arena.ratio is not None else set())
    assert counts.keys() <= allowed, f"counted {counts}"
    arena.check_books()


def stalled_commits(arena: Arena) -> None:
    """The catalog does not take what is written: turns go on meanwhile, and it gets there once the stall is over."""
    with damage.catalog_held(arena, reads=False):
        arena.converse()
        _wait_until(arena, lambda: workload.ssd_of(arena.engine).is_late)
        arena.converse()
    _wait_until(arena, lambda: not workload.ssd_of(arena.engine).is_late)
    arena.converse()
    counts = arena.count(1)
    # As with writes that stall: what left DRAM meanwhile, its only copy, is absent.
    assert counts.keys() <= {"miss deadline", "miss absent", "flush deadline"}, f"counted {counts}"
    arena.check_books()


def failing_reads(arena: Arena) -> None:
    """The disk reports errors for reads: each is a miss, and what is stored stays."""
    with damage.failing(arena, "_read", errno.EIO):
        arena.converse()
    _expect(arena, {"miss device": NUM_CONVERSATIONS})
    arena.converse()


def no_space(directory: Path, driver: str, num_faults: int, seed: int, ratio: float | None = None) -> Tally:
    """The disk is full, whether that is seen in time or met: sessions are served, and not written on."""
    with small_disk(directory, 16 << 20) as disk, Arena(directory / "store", driver, seed, ratio=ratio) as arena:
        wave = 0
        while arena.tally.faults < num_faults or wave < 2:
            unnoticed = bool(wave % 2)
            with damage.full_disk(arena, disk, unnoticed=unnoticed):
                arena.converse()
                arena.engine.wait_for_saves()
            num_failed = arena.counts()["flush no_space"]
            # Some get to where the notes of open sessions were, which the full disk ends. Slots of the raw driver that
            # have had bytes before can be written on a full disk.
            assert num_failed >= NUM_CONVERSATIONS // 2 or (unnoticed and driver == "raw")
            _expect(arena, {"flush no_space": num_failed})
            arena.converse()
            arena.renew()
            wave += 1
        arena.check_books()
        return arena.tally


def read_only(arena: Arena) -> None:
    """The directory of blocks becomes read-only: sessions are served, and not written on."""
    with damage.read_only(arena):
        arena.converse()
        arena.engine.wait_for_saves()
    _expect(arena, {"flush device": NUM_CONVERSATIONS})
    arena.converse()


def catalog_damaged(damage_catalog: Callable[[Arena], None], *, while_running: bool) -> Campaign:
    """The catalog is deleted or overwritten: sessions that it does not know any more are recomputed."""
    deletes = damage_catalog is damage.delete_catalog

    def wave(arena: Arena) -> None:
        if while_running:
            running = [arena.begin(name, max_tokens=16) for name in arena.names[:2]]
            for turn in running:
                next(turn.answer)
            damage_catalog(arena)
            arena.finish([*running, *(arena.begin(name) for name in arena.names[2:])])
            arena.converse()
            arena.engine.wait_for_saves()
            _expect_among(arena, {"flush catalog"} if deletes else _OF_CATALOG, num_faults=1)
            arena.restart()
        else:
            arena.engine.close()
            damage_catalog(arena)
            arena.tally.faults += 1
            arena.open()
        if deletes:
            workload.check_books(arena.engine, arena.directory, fresh=True)
        arena.converse()
        _expect_among(arena, {"miss absent"} if deletes else _OF_CATALOG)
        arena.converse()
        arena.check_chunks()  # Perhaps none: what such a catalog is given it need not give back.
        arena.wipe()

    return waves(wave)


CAMPAIGNS: dict[str, tuple[Campaign, int]] = {
    "bit flipped in a block": (damaged_blocks(damage.flip_bits, "miss corrupt"), 180),
    # The one file of raw blocks grows again with the next write; what was cut off reads as zeros then.
    "block cut short": (damaged_blocks(damage.truncate, "miss corrupt", "miss missing", num_damaged=1), 100),
    "block missing": (damaged_blocks(damage.remove, "miss missing"), 150),
    "blocks swapped": (damaged_blocks(damage.swap, "miss corrupt", num_damaged=4), 150),
    "reads that stall": (stalled_reads(lambda arena: stalled((arena.tier, "_read"))), 60),
    "writes that stall": (waves(stalled_writes, ssd_deadline_s=0.4), 40),
    "catalog reads that stall": (stalled_reads(lambda arena: damage.catalog_held(arena, reads=True)), 60),
    "catalog commits that stall": (waves(stalled_commits, ssd_deadline_s=0.4), 20),
    "reads that fail": (waves(failing_reads), 60),
    "disk full": (no_space, 80),
    "directory read-only": (waves(read_only), 80),
    "catalog deleted while in use": (catalog_damaged(damage.delete_catalog, while_running=True), 20),
    "catalog deleted before a start": (catalog_damaged(damage.delete_catalog, while_running=False), 20),
    "catalog overwritten while in use": (catalog_damaged(damage.overwrite_catalog, while_running=True), 30),
    "catalog overwritten before a start": (catalog_damaged(damage.overwrite_catalog, while_running=False), 30),
}
"""Kinds of faults, how they are brought about, and how many of each the long form takes: 1,080."""


def _expect(arena: Arena, wanted: dict[str, int], only: str = "") -> None:
    """Counts a wave of as many faults as are wanted, and checks that nothing else was counted."""
    counts = arena.count(sum(wanted.values()))
    found = {name: number for name, number in counts.items() if name.startswith(only)}
    wanted = {name: number for name, number in wanted.items() if number}
    is_right = found == wanted
    if arena.ratio is not None:
        is_right = found.keys() - wanted.keys() <= {"miss absent"}
        is_right = is_right and all(found.get(name, 0) >= number for name, number in wanted.items())
    assert is_right, f"there must be {wanted}, counted {counts}"


def _expect_among(arena: Arena, allowed: set[str], num_faults: int = 0) -> None:
    counts = arena.count(num_faults)
    # A turn with chunks may give KV up that its flush is still bringing to SSD.
    allowed = allowed if arena.ratio is None else {*allowed, "miss absent", "flush cancelled"}
    assert counts.keys() <= allowed, f"there must be counts among {sorted(allowed)}, counted {counts}"


def _wait_until(arena: Arena, reached: Callable[[], bool], meanwhile: Callable[[], None] | None = None) -> None:
    """Keeps the engine's tiers going until something is so."""
    give_up_s = time.monotonic() + _PATIENCE_S
    while not reached():
        assert time.monotonic() < give_up_s, "there must be the SSD tier to go on, got it where it was"
        if meanwhile is not None:
            meanwhile()
        arena.engine._wakeup.wait(arena.engine._wakeup.count, 0.05)
        arena.engine.keep()
