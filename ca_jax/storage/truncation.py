"""Forgetting tokens of a stored session, in place: at its end, its oldest, or any of them, in both tiers.

What stays is not moved: a block goes once no token in it is left, and the rest of a session keeps its rows. Where
scattered tokens went, a session in DRAM is copied together again if it wastes more than two blocks: on a thread, while
nothing else of it moves. It goes over to the copy once that is whole; if it is another one by then, it stays as it is,
and is copied anew.

Belongs to the bookkeeping thread. Nothing here waits, but `close`.

Not here: where tokens lie and what KV has seen (tokens), blocks and moves of the SSD (ssd).

Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.4.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ca_jax.storage.records import EntryInUseError
from ca_jax.storage.sessions import Entry, StoreParts
from ca_jax.storage.ssd import SsdIndex
from ca_jax.storage.tiering import Placement
from ca_jax.storage.tokens import TokenPlaces

_LOG = logging.getLogger(__name__)
_MAX_SPARE_BLOCKS = 2  # Beyond what its tokens need: first tokens that stay take a block, and the oldest block a part.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Copy:
    """A session that is being copied together."""

    entry: Entry
    block_ids: list[int]
    """Its blocks when that began, held until it ends."""
    places: TokenPlaces
    """And where its tokens were in them."""
    fresh_ids: tuple[int, ...]
    """Where to."""
    done: concurrent.futures.Future[None]


class Truncation:
    """Cuts sessions that are not in use. See the module."""

    def __init__(self, parts: StoreParts, placement: Placement, ssd: SsdIndex | None) -> None:
        self._index = parts.index
        self._dram = parts.dram
        self._layout = parts.dram.layout
        self._blocks = parts.blocks
        self._placement = placement
        self._ssd = ssd
        self._on_progress = parts.runtime.on_progress
        self._wasteful: dict[Entry, None] = {}  # Perhaps; looked at when nothing of them moves.
        self._copy: _Copy | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "ca_jax-compact")

    @property
    def busy(self) -> bool:
        """Whether a session is being copied together."""
        return self._copy is not None

    def step(self) -> None:
        """Takes in a copy that has ended and begins the next."""
        if self._copy is not None and self._copy.done.done():
            copy, self._copy = self._copy, None
            self._end(copy)
        for entry in tuple(self._wasteful):
            if self._copy is not None:
                return
            if not (entry.in_use or entry.num_pins or entry.fetch or entry.flush):
                del self._wasteful[entry]
                self._begin(entry)

    def close(self) -> None:
        """Waits for the copy that is under way. Nothing is begun any more."""
        self._thread.shutdown(cancel_futures=True)

    def truncate(self, key: str, num_tokens: int, note: bytes | None = None) -> int:
        """Keeps only a session's first `num_tokens` published tokens, if it has more. Blocks are free at once.

        Args:
          key: session id.
          num_tokens: how many tokens stay.
          note: as for `discard`.

        Returns:
          Tokens that are kept, in DRAM if there are any; 0 for a session that is not stored (any more).

        Raises:
          ValueError: num_tokens is negative.
          EntryInUseError: a load or save of it is open.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
        if not num_tokens:
            self._placement.give_up(key)
            self._index.expect(key, None)
            note = None
        return self._cut(key, note, lambda entry: self.shorten(entry, num_tokens, note))

    def shorten(self, entry: Entry, num_tokens: int, note: bytes | None = None) -> None:
        """Keeps only the first tokens of a session that is not in use; see `truncate`."""
        if num_tokens and not entry.num_readable and self._ssd is not None:
            self._ssd.cancel(entry)  # What is on its way is of a state that was given up, with tokens that must go.
            self._index.place(entry)
            self._placement.set_note(entry.key, note)
        elif num_tokens:
            self._discard(entry, np.arange(max(entry.num_readable, num_tokens)) >= num_tokens, note)
        else:
            self._placement.forget(entry)

    def drop(self, key: str) -> bool:
        """Forgets a session's KV.

        Returns:
          Whether there was any.

        Raises:
          EntryInUseError: a load or save of it is open.
        """
        found = self._index.get(key) is not None
        self.truncate(key, 0)
        return found

    def leave_dram(self, key: str) -> int | None:
        """Forgets what of a session is in DRAM, so that it can be saved anew; what is on SSD stays until that is there.

        Returns:
          Its leading tokens whose KV had seen no token that was dropped; None for all.

        Raises:
          EntryInUseError: a load or save of it is open.
        """
        entry = self._index.get(key)
        if entry is None:
            return None
        num_plain = entry.known_lineage.num_plain
        if entry.num_tokens:
            _check_idle(entry)
            if self._ssd is not None:
                self._ssd.detach(entry)
            self._placement.leave_dram(entry)
        return num_plain

    def discard(self, key: str, discarded: npt.ArrayLike, note: bytes | None = None) -> int:
        """Forgets any of a session's published tokens, in place; the others stay as they are and move together.

        Blocks without a token are free at once, in DRAM and on SSD. Token i of the session is from then on the i-th of
        those that stay, and saves go on behind the last one.

        Args:
          key: session id.
          discarded: bool `[T]`, True for each of the session's first T tokens that is to be forgotten. Tokens that are
            stored beyond T stay; T may be larger than what is stored.
          note: what to keep with the session from now on, as by `set_note`; on SSD it changes together with the KV, or
            not at all. None keeps what is kept.

        Returns:
          Tokens that are kept, in DRAM if there are any; 0 for a session that is not stored (any more).

        Raises:
          ValueError: `discarded` is no list of bool.
          EntryInUseError: a load or save of it is open.
        """
        mask = np.asarray(discarded)
        if mask.ndim != 1 or mask.dtype != np.bool_:
            raise ValueError(f"discarded must be bool[T], got {mask.dtype}{list(mask.shape)}")
        return self._cut(key, note, lambda entry: self._discard(entry, mask, note))

    def _cut(self, key: str, note: bytes | None, cut: Callable[[Entry], None]) -> int:
        """Cuts a session that is stored and not in use; of another one the note is kept. Returns what is left of it."""
        entry = self._index.get(key)
        if entry is None:
            self._placement.set_note(key, note)
            return 0
        _check_idle(entry)
        cut(entry)
        return entry.num_readable

    def _discard(self, entry: Entry, discarded: np.ndarray, note: bytes | None) -> None:
        """Forgets tokens of a session in both tiers, and of what is on its way."""
        if not entry.num_readable:
            self._placement.set_note(entry.key, note)
            return
        kept = np.ones(entry.num_readable, bool)
        num_tokens = min(len(kept), len(discarded))
        kept[:num_tokens] = ~discarded[:num_tokens]
        lineage = entry.known_lineage.after(discarded, len(kept))
        if note is None and lineage == entry.known_lineage and kept.all():
            return
        if not kept.any():
            self._placement.forget(entry)
            return
        in_dram = bool(entry.num_tokens)
        if in_dram:
            entry.places, table = entry.places.keep(kept, self._layout.block_tokens)
            gone = np.delete(entry.block_ids, table).tolist()
            entry.block_ids = [entry.block_ids[index] for index in table.tolist()]
            entry.token_ids, entry.lineage = entry.token_ids[kept], lineage
            self._blocks.free(entry.owner.tenant, gone)
        if self._ssd is not None:
            if note is not None:  # It goes with the next flush too, should SSD forget the session before it has it.
                entry.note = note
            self._ssd.discard(entry, kept, lineage, note)
        if in_dram:
            if not entry.places.is_dense:
                self._wasteful[entry] = None
                self._on_progress()
            self._placement.changed(entry)
        self._index.place(entry)

    def _begin(self, entry: Entry) -> None:
        """Begins to copy a session to fresh blocks, if it wastes some and there is room: no published block is written.

        Blocks that it shares are not its to free, and no waste. It stays in DRAM, and is not flushed, meanwhile.
        """
        num_blocks, tenant = self._layout.num_blocks(entry.num_tokens), entry.owner.tenant
        if next(self._blocks.frees([entry.block_ids])) <= num_blocks + _MAX_SPARE_BLOCKS:
            return
        if self._blocks.excess(tenant, num_blocks) > 0 or self._blocks.lacking(num_blocks) > 0:
            return
        fresh = self._blocks.alloc(tenant, num_blocks)
        table, places = list(entry.block_ids), entry.places
        self._blocks.share(table)  # Whatever becomes of the session, they are not written while they are read.
        entry.num_pins += 1
        self._index.place(entry)
        done = self._thread.submit(copy_together, self._dram.groups, places, table, fresh, self._layout.block_tokens)
        self._copy = _Copy(entry=entry, block_ids=table, places=places, fresh_ids=fresh, done=done)
        done.add_done_callback(lambda _: self._on_progress())

    def _end(self, copy: _Copy) -> None:
        """Has a session go over to its copy, if it is what was copied still."""
        entry, error = copy.entry, copy.done.exception()
        entry.num_pins -= 1
        self._blocks.free(entry.owner.tenant, copy.block_ids)
        is_same = entry.block_ids == copy.block_ids and entry.places == copy.places and not entry.in_use
        if error is None and is_same:
            entry.block_ids, entry.places = list(copy.fresh_ids), TokenPlaces.dense(entry.num_tokens)
            self._blocks.free(entry.owner.tenant, copy.block_ids)
            self._placement.changed(entry)
            return
        self._blocks.free(entry.owner.tenant, copy.fresh_ids)
        if error is not None:
            _LOG.warning("session %s could not be copied together: it stays as it is", entry.key, exc_info=error)
        elif entry.block_ids:
            self._wasteful[entry] = None
        self._index.place(entry)


def copy_together(
    groups: Sequence[np.ndarray],
    places: TokenPlaces,
    block_ids: Sequence[int],
    fresh_ids: Sequence[int],
    block_tokens: int,
) -> None:
    """Copies a sequence's tokens to blocks in which they lie side by side.

    Args:
      groups: all blocks, `[num_blocks, l, P, block_tokens, K, H]` of each layer group.
      places: of the tokens.
      block_ids: the blocks that these are in.
      fresh_ids: as many as the tokens need, which nothing else reads or writes.
      block_tokens: tokens in a block.
    """
    for part, blocks in itertools.product(places.by_block(block_tokens), groups):
        rows = blocks[block_ids[part.index]][:, :, part.rows]  # [l, P, n, K, H]
        done = 0
        while done < part.num_tokens:
            index, row = divmod(part.first_token + done, block_tokens)
            num_rows = min(block_tokens - row, part.num_tokens - done)
            blocks[fresh_ids[index]][:, :, row : row + num_rows] = rows[:, :, done : done + num_rows]
            done += num_rows


def _check_idle(entry: Entry) -> None:
    if entry.in_use:
        raise EntryInUseError(
            f"{entry.key!r} must have no open load or save, got {entry.num_open_loads} loads and "
            f"{len(entry.open_saves)} saves"
        )
