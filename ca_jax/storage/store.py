"""The AttentionStore: which session's KV is kept, and how it gets in and out.

Moves have two phases. A load or save is prepared (blocks are reserved or held), bytes move by its ticket, and it is
completed or aborted. What is not completed is never readable, and a failure only ever shortens a stored prefix.

Keys are opaque strings: the caller makes them (of session, tenant salt, weights, layout) and so decides which sessions
may share KV. The token ids of what is stored are kept with it, so KV is never served for other tokens.

Bookkeeping belongs to one thread, the engine's; it never waits for bytes except where a docstring says so.

Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.3.

Not here: copies between host and device, what moves between the tiers and when (`tiering`), saves and loads
(`transfers`), forgetting (`truncation`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from ca_jax.storage.catalog.file import write_file
from ca_jax.storage.catalog.records import Namespace
from ca_jax.storage.codec import KVCodec
from ca_jax.storage.config import StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.opening import open_ssd_index
from ca_jax.storage.placement.blocks import ChargedBlocks
from ca_jax.storage.placement.orders import LookAhead
from ca_jax.storage.placement.policy import EvictionPolicy, ReturnAwarePolicy, make_policy
from ca_jax.storage.placement.returns import ReturnTimes
from ca_jax.storage.records import (
    BlockTiers,
    EntryInfo,
    LookAheadWindows,
    Owner,
    Residency,
    StoreClosedError,
    StoreRuntime,
    StoreStats,
    check_seconds,
)
from ca_jax.storage.sessions import Entry, SessionIndex, StoreParts
from ca_jax.storage.ssd import SsdIndex
from ca_jax.storage.tiering import Placement
from ca_jax.storage.tiers.dram import DramTier, touch
from ca_jax.storage.transfers import Transfers
from ca_jax.storage.truncation import Truncation

_LOG = logging.getLogger(__name__)
_LEARNT_NAME = "returns.json"  # In the SSD's directory: what `ReturnTimes` has learnt.
_CLOSE_S = 60.0  # How long `close` waits for what is on its way to SSD.
_CLOSE_UNSETTLED_S = 1.0  # And for an SSD that has not answered in that time.
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _done_by(part: str, method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[AttentionStore, _P], _R]:
    """A method of the store that one of its parts does, while the store is open."""

    @functools.wraps(method)
    def do(self: AttentionStore, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        self._check_open()
        return method(getattr(self, part), *args, **kwargs)

    return do


class AttentionStore:
    """KV of many sessions in blocks of DRAM and, where the config names a directory, of SSD, under byte caps.

    With an SSD a session is written there in the background once its turn has ended; `poll` keeps that going, and is to
    be called whenever `on_progress` was, and now and then. What is on SSD is found again by the next store of the
    directory with the same weights and layout.

    Args:
      layout: the shape of a block; its `block_tokens` must be the config's.
      config: caps and policy.
      policy: chooses what is evicted; by default the one that the config names.
      weights: fingerprint of the weights and of whatever else decides what KV they give; other KV is not found on SSD.
      runtime: a clock, and what is told of progress.
      open_ssd: makes the SSD tier of the store's parts, in place of the one that the config names. A simulator has its
        own.

    Raises:
      ValueError: layout and config disagree, a cap is under one block, above the machine's memory, or above what the
        disk has free, or the codec is of another model.
      FileNotFoundError: there is no such codec.
      MemoryError: the system does not grant the cap of DRAM.
      NotADirectoryError, PermissionError, CatalogError, BlocksOwnedError: the directory or its URL cannot be used; the
        message says why.
    """

    def __init__(
        self,
        layout: KVLayout,
        config: StoreConfig,
        policy: EvictionPolicy | None = None,
        *,
        weights: str = "",
        runtime: StoreRuntime | None = None,
        open_ssd: Callable[[StoreParts], SsdIndex] | None = None,
    ):
        if layout.block_tokens != config.block_tokens:
            raise ValueError(f"layout must have blocks of {config.block_tokens} tokens, got {layout.block_tokens}")
        self.layout = layout
        """The shape of a block."""
        self._closed = False
        self._progress = threading.Event()
        self._watcher: Callable[[Collection[str]], None] = lambda keys: None
        runtime = runtime or StoreRuntime()
        self._on_progress = runtime.on_progress
        policy = make_policy(config.eviction_policy) if policy is None else policy
        self._dram = DramTier(layout, config.dram_bytes)
        self._blocks = ChargedBlocks(
            self._dram.num_blocks, config.tenant_quota_bytes, config.tenant_quotas, layout.block_bytes
        )
        self._look_ahead = look_ahead = LookAhead()
        self._returns = ReturnTimes(runtime.clock) if isinstance(policy, ReturnAwarePolicy) else None
        self._index = SessionIndex(look_ahead, self._dram.num_blocks, layout.block_tokens, runtime.clock, self._returns)
        self._counters = StoreStats()
        parts = StoreParts(
            index=self._index,
            look_ahead=look_ahead,
            dram=self._dram,
            blocks=self._blocks,
            policy=policy,
            counters=self._counters,
            runtime=dataclasses.replace(runtime, on_progress=self._progressed),
        )
        if open_ssd is None and config.ssd_dir is not None:
            codec = None if config.ssd_codec is None else KVCodec.load(config.ssd_codec)
            if codec is not None:
                codec.check(layout, weights)
            namespace = Namespace(
                weights=weights,
                layout=layout,
                driver=config.ssd_driver,
                location=config.ssd_url or "",
                codec="" if codec is None else codec.name,
            )
            open_ssd = functools.partial(open_ssd_index, config, namespace, codec=codec)
        self._ssd = None if open_ssd is None else open_ssd(parts)
        directory = config.ssd_directory
        self._learnt_path = None if directory is None else directory / _LEARNT_NAME
        self._adopt_learnt()
        self._placement = Placement(parts, self._ssd, free_fraction=config.dram_free_fraction)
        self._truncation = Truncation(parts, self._placement, self._ssd)
        self._transfers = Transfers(parts, self._placement, self._truncation, ttl_s=config.ttl_s)

    def touch(self, stopped: Callable[[], bool] = lambda: False) -> float:
        """Makes the DRAM tier's memory resident, so that saves do not pay for it; see `tiers.dram.touch`.

        The one method meant for another thread than the bookkeeping one. Ends early, without an error, when the store
        is closed.
        """
        return touch(self._dram.slab, lambda: self._closed or stopped())

    # What is stored.

    def num_readable(self, key: str) -> int:
        """How many of a session's tokens can be read, or fetched. Not a use."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.num_readable

    def residency(self, key: str) -> Residency:
        """Where a session's KV is. Not a use."""
        entry = self._entries.get(key)
        return Residency.ABSENT if entry is None else entry.residency

    def list(self) -> tuple[EntryInfo, ...]:
        """Describes every session stored or being stored, in the order in which they came. Not a use."""
        return tuple(self._describe(entry) for entry in self._entries)

    def owners(self) -> Iterator[tuple[str, Owner]]:
        """Key and owner of every session stored or being stored, the latest to come first; to be used at once."""
        return ((entry.key, entry.owner) for entry in reversed(self._entries))

    def names_pinned(self, tenant: str) -> set[str]:
        """Names of a tenant's sessions that were pinned by `set_pinned`. Not a use."""
        return {entry.owner.session_id for entry in self._entries if entry.pinned and entry.owner.tenant == tenant}

    def of_name(self, session_id: str) -> tuple[EntryInfo, ...]:
        """Describes the sessions that their owners, of whatever tenant, know by a name. Not a use."""
        return tuple(self._describe(entry) for entry in self._entries.of_name(session_id))

    def blocks(self, key: str) -> tuple[BlockTiers, ...]:
        """Where each block of a session is, in token order; none of a session that is not stored. Not a use."""
        entry = self._entries.get(key)
        return () if entry is None else block_map(entry, self.layout.block_tokens)

    @property
    def windows(self) -> LookAheadWindows:
        """How far over the job queue placement looks now."""
        self._check_open()
        return self._placement.windows

    def stats(self) -> StoreStats:
        """Sizes now, and counts since the store was made."""
        return dataclasses.replace(
            self._counters,
            **self._placement.room.stats(self.layout.block_bytes),
            num_sessions=len(self._entries),
            num_dram_sessions=len(self._entries.in_dram),
            misses=dict(self._counters.misses),
            skipped_saves=dict(self._counters.skipped_saves),
            ssd=None if self._ssd is None else self._ssd.stats(),
        )

    def note(self, key: str) -> bytes:
        """What the owner of a session on SSD wanted kept with it; empty if nothing. Reads a file: milliseconds.

        Raises:
          CatalogLateError: after `ssd_deadline_s` it has not been read; it is not known then whether there is one.
        """
        entry = self._entries.get(key)
        if entry is None or self._ssd is None:
            return b""
        if entry.note is not None or entry.ssd is None:  # The catalog may still know of an earlier session of this key.
            return entry.note or b""
        return self._ssd.note(key)

    def has_note_on_ssd(self, key: str, generation: int) -> bool:
        """Whether SSD is known to have a session's `Note` of a generation, or a later one, durably."""
        entry = self._entries.get(key)
        return entry is not None and entry.ssd is not None and entry.noted >= generation

    find_prefix = _done_by("_index", SessionIndex.find_prefix)

    plain_prefix = _done_by("_index", SessionIndex.plain_prefix)

    def watch(self, watcher: Callable[[Collection[str]], None]) -> None:
        """Has `poll` end with a call of `watcher`, where entries have changed since its last one.

        It is given the keys of those that did, gone ones among them; in the first call all that there are.
        """
        self._watcher = watcher
        self._index.watched = dict.fromkeys(entry.key for entry in self._entries)

    # The job queue, and what goes on in the background.

    enqueue = _done_by("_placement", Placement.enqueue)
    dequeue = _done_by("_placement", Placement.dequeue)
    request = _done_by("_placement", Placement.request)
    queue_position = _done_by("_look_ahead", LookAhead.position)
    set_note = _done_by("_placement", Placement.set_note)
    has_free = _done_by("_placement", Placement.has_free)

    def ready(self, key: str, is_next: bool) -> bool:
        """Whether a job of a session would find its KV, or find that there is none, without waiting. Never blocks.

        Args:
          key: of the session.
          is_next: whether its job is the next in the queue. For that one the KV is brought, at the cost of others'; a
            later one is held if it is there, since it runs now: it must not be evicted before it loads.
        """
        if not is_next and self.residency(key) in (Residency.SSD, Residency.PENDING):
            return False
        return not self.request(key)

    def poll(self) -> None:
        """Takes in what has moved, begins what is due: flushes, fetches, evictions, expiry. Never blocks."""
        self._check_open()
        self._truncation.step()  # First: what is copied together need not be written before.
        self._placement.step()
        self._truncation.step()  # And what waited for a flush.
        if self._index.watched:
            changed, self._index.watched = self._index.watched, {}
            self._watcher(changed)

    def settle(self, timeout_s: float = _CLOSE_S) -> bool:
        """Waits until all that can be on SSD is there, durably, and nothing moves; at most `timeout_s` seconds.

        What a running turn holds is not waited for, nor an SSD that has missed a deadline, nor what is to be written
        again later because it failed.

        Returns:
          Whether that is so.
        """
        self._check_open()
        give_up_s = time.monotonic() + timeout_s
        while True:
            self._progress.clear()
            self.poll()
            left_s = give_up_s - time.monotonic()
            waits = self._placement.busy and not self._placement.is_late
            if not (waits or self._truncation.busy) or left_s <= 0:
                return not (self._placement.busy or self._truncation.busy)
            if self._placement.moves or self._truncation.busy:  # If not, what is due began to be so after its turn.
                self._progress.wait(left_s)

    # Pins.

    def pin(self, key: str) -> None:
        """Keeps what is stored, or will be stored, under `key` from being evicted. Counted: each pin wants an unpin.

        A pin does not keep the owner from `truncate` and `drop`.
        """
        self._entries.add_pins(key, 1)

    def unpin(self, key: str) -> None:
        """Takes one pin back.

        Raises:
          ValueError: there is none.
        """
        if not self._entries.num_pins(key):
            raise ValueError(f"the key must be pinned, got {key!r}, which has no pin")
        self._entries.add_pins(key, -1)

    @contextlib.contextmanager
    def pinned(self, key: str) -> Iterator[None]:
        """Pins `key` for the length of a `with` block."""
        self.pin(key)
        try:
            yield
        finally:
            self.unpin(key)

    def set_pinned(self, key: str, pinned: bool) -> bool:
        """Keeps a session in the store, or lets it go like others: no eviction, no expiry, over restarts too.

        It may still leave DRAM while it is on SSD. Not counted.

        Returns:
          Whether the session is stored.
        """
        entry = self._entries.get(key)
        if entry is None:
            return False
        entry.pinned = pinned
        if self._ssd is not None:
            self._ssd.write_down(entry)
        self._entries.place(entry)
        return True

    def set_ttl(self, key: str, ttl_s: float | None) -> bool:
        """Says how long a session lives after its last use, seconds; None: while room lasts. Counts as use.

        Returns:
          Whether the session is stored.

        Raises:
          ValueError: `ttl_s` is negative or not finite.
        """
        check_seconds("ttl_s", ttl_s)
        entry = self._entries.get(key)
        if entry is None:
            return False
        entry.ttl_s = ttl_s
        if self._ssd is not None:
            self._ssd.write_down(entry)
        self._placement.used(entry)
        return True

    def expect_back(self, key: str, seconds: float | None) -> None:
        """As `SaidReturns.say`. Counts as use.

        Raises:
          ValueError: `seconds` is negative or not finite.
        """
        check_seconds("seconds", seconds)
        self._entries.expect_back(key, seconds)
        if (entry := self._entries.get(key)) is not None:
            self._placement.used(entry)

    # Saves and loads.

    prepare_save = _done_by("_transfers", Transfers.prepare_save)
    room_is_coming = _done_by("_transfers", Transfers.room_is_coming)
    complete_save = _done_by("_transfers", Transfers.complete_save)
    abort_save = _done_by("_transfers", Transfers.abort_save)
    abort_saves = _done_by("_transfers", Transfers.abort_saves)
    prepare_load = _done_by("_transfers", Transfers.prepare_load)
    serves_coming = _done_by("_transfers", Transfers.serves_coming)
    complete_load = _done_by("_transfers", Transfers.complete_load)
    abort_load = _done_by("_transfers", Transfers.abort_load)
    copy_prefix = _done_by("_transfers", Transfers.copy_prefix)
    hold_part = _done_by("_transfers", Transfers.hold_part)
    hold = _done_by("_transfers", Transfers.hold)
    let_go = _done_by("_transfers", Transfers.let_go)

    # Forgetting.

    truncate = _done_by("_truncation", Truncation.truncate)
    discard = _done_by("_truncation", Truncation.discard)
    leave_dram = _done_by("_truncation", Truncation.leave_dram)
    drop = _done_by("_truncation", Truncation.drop)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Ends open loads and saves, writes to SSD what is complete, and lets go of memory and files.

        May be called again.

        Args:
          timeout_s: seconds it waits for SSD at most. What is not there by then is not on SSD, and that is all.
        """
        if self._closed:
            return
        self._transfers.abort_all()
        self._entries.clear_pins()
        self._placement.retry()
        settled = self.settle(timeout_s)
        self._closed = True
        self._truncation.close()
        if settled:  # The disk answers.
            self._keep_learnt()
        if self._ssd is not None:
            self._ssd.close(timeout_s if settled else _CLOSE_UNSETTLED_S)
        self._dram.close()

    def _adopt_learnt(self) -> None:
        """Begins with what the directory's last store has learnt of returns, if anything."""
        if self._returns is None or self._learnt_path is None or not self._learnt_path.exists():
            return
        try:
            self._returns.adopt(json.loads(self._learnt_path.read_bytes()))
        except (OSError, ValueError) as error:
            _LOG.warning("what was learnt of returns is not used: %s: %s", self._learnt_path, error)

    def _keep_learnt(self) -> None:
        if self._returns is None or self._learnt_path is None:
            return
        try:
            write_file(self._learnt_path, json.dumps(self._returns.learnt()))
        except OSError as error:
            _LOG.warning("what was learnt of returns is not kept: %s: %s", self._learnt_path, error)

    def _describe(self, entry: Entry) -> EntryInfo:
        ssd_blocks = 0 if entry.ssd is None else len(entry.ssd.block_ids)
        return EntryInfo(
            key=entry.key,
            tenant=entry.owner.tenant,
            session_id=entry.owner.session_id,
            residency=entry.residency,
            num_tokens=entry.num_readable,
            num_dropped=entry.known_lineage.num_dropped,
            num_blocks=len(entry.block_ids),
            num_bytes=len(entry.block_ids) * self.layout.block_bytes,
            ssd_tokens=0 if entry.ssd is None else entry.ssd.num_tokens,
            ssd_bytes=0 if self._ssd is None else ssd_blocks * self._ssd.stored_block_bytes,
            pinned=entry.pinned or bool(entry.num_pins),
            in_use=entry.in_use,
            created_s=entry.created_s,
            last_used_s=entry.last_used_s,
            ttl_s=entry.ttl_s,
            variant=entry.owner.variant,
            expected_s=self._index.said.until_s(entry.key),
        )

    @property
    def _entries(self) -> SessionIndex:
        """The index, while the store is open."""
        self._check_open()
        return self._index

    def _progressed(self) -> None:
        self._progress.set()
        self._on_progress()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the AttentionStore must be open, got one that is closed")


def block_map(entry: Entry, block_tokens: int) -> tuple[BlockTiers, ...]:
    """The blocks of a session in token order: those of DRAM, or those of SSD where nothing is in DRAM.

        tokens     0 . . .  4 . . .  8 . . .  12 .         blocks of 4
        dram       4        4        4         1 + 1       the last token is being saved
        ssd        4        4        2                     flushed before the last turn

    Returns:
      One for each block with a token. What SSD has of another state of the session than is in DRAM is not shown.
    """
    if not entry.num_reserved_tokens:
        spans = () if entry.ssd is None else entry.ssd.places.by_block(block_tokens)
        return tuple(BlockTiers(each.first_token, 0, each.num_tokens) for each in spans)
    is_cut = entry.flush is not None and bool(entry.flush.cuts)  # What is the same is known once that has ended.
    num_ready, num_same = entry.num_tokens, 0 if entry.ssd is None or is_cut else entry.num_same_tokens
    places = entry.places.append(entry.num_reserved_tokens - num_ready)
    blocks = []
    for each in places.by_block(block_tokens):
        first, stop = each.first_token, each.first_token + each.num_tokens
        blocks.append(
            BlockTiers(
                first,
                max(min(stop, num_ready) - first, 0),
                max(min(stop, num_same) - first, 0),
                stop - max(first, min(stop, num_ready)),
            )
        )
    return tuple(blocks)
