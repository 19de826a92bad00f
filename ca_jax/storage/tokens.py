"""What is known of a session's tokens at rest: where they lie, what their KV has seen, and what others find them by.

Token i of a session lies at place p_i: row `p_i % block_tokens` of block `p_i // block_tokens` of its block table. A
new session is dense, p_i = i. Forgetting tokens moves none of those that stay: rows of the others are left dead, and
only blocks without any living token go.

    blocks of 4      0 1 2 3   4 5 6 7   8 9
    forget 1 to 4    0 . . .   . 5 6 7   8 9      places 0, 5 to 9: runs (0, 1) and (5, 5)
    forget 5 to 7    0 . . .             8 9      its block goes: places 0, 4, 5

New tokens go behind the last one. Blocks in the midst of a table therefore have no rows that were never written.

KV that was computed behind dropped tokens has seen them, and what is left of a cut session may spell another text. Both
must never be served as KV of that text: only the tokens before the first cut may. `Lineage` says which these are.

Not here: block tables in DRAM, bytes, when tokens are forgotten (truncation).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import struct
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedList

TOKEN_BYTES = 4
"""Of a token id at rest."""
_RUN = struct.Struct("<II")
_MAX_CHANGED = 64  # Sessions that a search puts in their place, at most: a millisecond or two.


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRows:
    """The tokens in one block of a sequence."""

    index: int
    """Which block of the sequence, counted from its first."""
    first_token: int
    """The first of its tokens, counted from the sequence's first; the others follow it."""
    num_tokens: int
    """How many they are, > 0."""
    rows: slice | np.ndarray
    """Where they lie in the block; a slice where they lie side by side, as int64 `[num_tokens]` otherwise."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenPlaces:
    """The places of a sequence's tokens, ascending. Immutable."""

    runs: tuple[tuple[int, int], ...] = ()
    """Pairs (first place, number of tokens) of neighbours, ascending; no run begins where the one before ends."""

    @classmethod
    def dense(cls, num_tokens: int) -> TokenPlaces:
        """Token i at place i."""
        return cls(((0, num_tokens),) if num_tokens else ())

    @classmethod
    def of(cls, places: np.ndarray) -> TokenPlaces:
        """The places as they are listed, ascending: int64 `[T]`."""
        if not places.size:
            return cls()
        firsts = np.concatenate([[0], np.flatnonzero(np.diff(places) != 1) + 1])
        lengths = np.diff(firsts, append=len(places))
        return cls(tuple(zip(places[firsts].tolist(), lengths.tolist(), strict=True)))

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenPlaces:
        """The places that `to_bytes` wrote."""
        return cls(tuple(_RUN.iter_unpack(data)))

    def to_bytes(self) -> bytes:
        """The runs, each as two unsigned 32-bit integers."""
        return b"".join(_RUN.pack(*run) for run in self.runs)

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        return self.runs[0][1] if len(self.runs) == 1 else sum(length for _, length in self.runs)

    @property
    def num_places(self) -> int:
        """Rows in use, up to that of the last token: where the next token goes."""
        return sum(self.runs[-1]) if self.runs else 0

    @property
    def is_dense(self) -> bool:
        """Whether each token i lies at place i."""
        return not self.runs or (len(self.runs) == 1 and not self.runs[0][0])

    def to_array(self) -> np.ndarray:
        """The place of each token, int64 `[num_tokens]`."""
        if len(self.runs) == 1:
            ((start, length),) = self.runs
            return np.arange(start, start + length)
        starts, lengths = np.array(self.runs, np.int64).reshape(-1, 2).T  # Of none too.
        return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())

    def append(self, num_tokens: int) -> TokenPlaces:
        """The same with so many more tokens, behind the last one."""
        if not num_tokens or not self.runs:
            return self if self.runs else TokenPlaces.dense(num_tokens)
        *others, (start, length) = self.runs
        return TokenPlaces((*others, (start, length + num_tokens)))

    def take(self, num_tokens: int) -> TokenPlaces:
        """The first so many tokens, or all if there are fewer."""
        runs = []
        for start, length in self.runs:
            if num_tokens <= 0:
                break
            runs.append((start, min(length, num_tokens)))
            num_tokens -= length
        return TokenPlaces(tuple(runs))

    def skip(self, num_tokens: int) -> TokenPlaces:
        """All but the first so many tokens."""
        runs = []
        for start, length in self.runs:
            if num_tokens < length:
                runs.append((start + num_tokens, length - num_tokens))
            num_tokens = max(num_tokens - length, 0)
        return TokenPlaces(tuple(runs))

    def keep(self, kept: np.ndarray, block_tokens: int) -> tuple[TokenPlaces, np.ndarray]:
        """Forgets tokens, and the blocks that have none left.

        Args:
          kept: bool `[num_tokens]`, which tokens stay.
          block_tokens: tokens in a block.

        Returns:
          The places of those that stay, in a table of the blocks that stay, and which blocks these are: int64
          `[num_blocks]`, ascending.

        Raises:
          ValueError: the mask is of another length.
        """
        if kept.shape != (self.num_tokens,):
            raise ValueError(f"kept must be bool[{self.num_tokens}], got {kept.dtype}{list(kept.shape)}")
        places = self.to_array()[kept]
        blocks = places // block_tokens
        is_first = np.diff(blocks, prepend=-1) > 0
        table = blocks[is_first]
        return TokenPlaces.of(places + (np.cumsum(is_first) - 1 - blocks) * block_tokens), table

    def num_same_rows(self, other: TokenPlaces, num_tokens: int) -> int:
        """Leading rows in use, up to the last of the leading tokens that lie at the same places in both sequences.

        Args:
          other: the places of the other sequence.
          num_tokens: how many leading tokens the two have in common.
        """
        num_rows = 0
        for run, other_run in zip(self.take(num_tokens).runs, other.take(num_tokens).runs, strict=False):
            if run[0] != other_run[0]:
                break
            num_rows = run[0] + min(run[1], other_run[1])
            if run != other_run:
                break
        return num_rows

    def stretches(self, block_tokens: int) -> tuple[list[tuple[int, int, int]], tuple[BlockRows, ...]]:
        """The tokens of whole blocks side by side, and those of other blocks: quick where there are few runs.

        Returns:
          First token, first block and number of blocks of each stretch of whole blocks; and what `by_block` gives of
          all other blocks.
        """
        starts, lengths = np.array(self.runs, np.int64).reshape(-1, 2).T
        heads, tails = -(-starts // block_tokens), (starts + lengths) // block_tokens
        firsts = np.cumsum(lengths) - lengths + heads * block_tokens - starts
        whole = np.stack([firsts, heads, tails - heads], axis=1)[heads < tails].tolist()
        is_part = np.ones(self.num_tokens, bool)
        for first, _, num_blocks in whole:
            is_part[first : first + num_blocks * block_tokens] = False
        return [(first, head, count) for first, head, count in whole], self._rows(block_tokens, np.flatnonzero(is_part))

    def by_block(self, block_tokens: int) -> tuple[BlockRows, ...]:
        """The tokens of each block that has any, in their order."""
        return self._rows(block_tokens, np.arange(self.num_tokens))

    def _rows(self, block_tokens: int, tokens: np.ndarray) -> tuple[BlockRows, ...]:
        """The same, of blocks that have these tokens, int64 `[n]`: each has all of its own among them."""
        if not len(tokens):
            return ()
        blocks, rows = np.divmod(self.to_array()[tokens], block_tokens)
        firsts = np.flatnonzero(np.diff(blocks, prepend=-1))
        stops = np.append(firsts[1:], len(blocks))
        lasts = rows[stops - 1]
        found = []
        for index, first, stop, row, last in zip(
            blocks[firsts].tolist(), firsts.tolist(), stops.tolist(), rows[firsts].tolist(), lasts.tolist(), strict=True
        ):
            side_by_side = last - row == stop - first - 1
            where = slice(row, last + 1) if side_by_side else rows[first:stop]
            found.append(BlockRows(index, int(tokens[first]), stop - first, where))
        return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Lineage:
    """What was dropped from a session so far. Immutable."""

    num_dropped: int = 0
    """Tokens that were dropped with others left behind them: a mark, by which KV of two states is told apart."""
    num_plain: int | None = None
    """Leading tokens whose KV has seen no token that was dropped; None for all, those to come too."""

    def plain_tokens(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens may be served to any session of the same tokens."""
        return num_tokens if self.num_plain is None else min(self.num_plain, num_tokens)

    def after(self, discarded: np.ndarray, num_stored: int) -> Lineage:
        """What it is once tokens were discarded.

        Args:
          discarded: bool `[T]`, which of the session's first T tokens go.
          num_stored: tokens of the session that are known to be there, more than T or fewer.
        """
        if num_stored <= len(discarded):  # What goes from the end leaves nothing behind that has seen it.
            left = np.flatnonzero(~discarded)
            discarded = discarded[: left[-1] if left.size else 0]
        num_dropped = int(np.count_nonzero(discarded))
        if not num_dropped:
            return self
        first = int(np.argmax(discarded))
        return Lineage(self.num_dropped + num_dropped, first if self.num_plain is None else min(first, self.num_plain))


PLAIN = Lineage()
"""Of a session that nothing was ever dropped from."""


HASH_BYTES = 8
"""Kept of each SHA-256, and chained. A match is a hint: loads compare the tokens themselves."""


def prefix_hashes(token_ids: np.ndarray, block_tokens: int, known: bytes = b"") -> bytes:
    """Hashes of the first 1, 2, … full blocks of a sequence, joined.

    Each is of the hash before it and its block's tokens: equal n-th hashes mean n equal blocks.

    Args:
      token_ids: `[T]`, integers that fit int32.
      block_tokens: tokens in a block.
      known: hashes of leading blocks that are known already; only the blocks behind them are read.

    Returns:
      `T // block_tokens` hashes of `HASH_BYTES` bytes.
    """
    hashes = bytearray(known)
    for start in range(len(known) // HASH_BYTES * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        block = np.ascontiguousarray(token_ids[start : start + block_tokens], "<i4").tobytes()
        hashes += hashlib.sha256(hashes[-HASH_BYTES:] + block).digest()[:HASH_BYTES]
    return bytes(hashes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SsdCopy:
    """What of a session is on SSD, published in the catalog. Immutable."""

    block_ids: np.ndarray
    """The block table: int64 `[num_blocks]`, in token order."""
    places: TokenPlaces
    """Where its tokens lie in the blocks."""
    lineage: Lineage = PLAIN
    """What was dropped from it."""
    prefixes: bytes = b""
    """`prefix_hashes` of its leading tokens whose KV other sessions may use; other sessions find it by them."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is stored."""
        return self.places.num_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return len(self.block_ids)

    def keep(self, kept: np.ndarray, lineage: Lineage, block_tokens: int) -> tuple[Self, np.ndarray]:
        """Forgets tokens, and the blocks that have none left.

        Args:
          kept: bool `[num_tokens]`, which tokens stay.
          lineage: what has been dropped then.
          block_tokens: tokens in a block.

        Returns:
          What stays, and which blocks these are: int64 `[n]`, ascending.

        Raises:
          ValueError: the mask is of another length.
        """
        places, table = self.places.keep(kept, block_tokens)
        num_plain = lineage.plain_tokens(len(kept) if kept.all() else int(np.argmin(kept)))
        prefixes = self.prefixes[: num_plain // block_tokens * HASH_BYTES]
        block_ids = self.block_ids[table]
        return dataclasses.replace(self, places=places, block_ids=block_ids, lineage=lineage, prefixes=prefixes), table

    def find_in(self, before: SsdCopy, block_tokens: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Which tokens and blocks of an earlier state these are; None if they are none of it.

        A block and a row say which token it is, as long as the session is only cut.

        Args:
          before: the state.
          block_tokens: tokens in a block.

        Returns:
          Which tokens of `before`, int64 `[num_tokens]`, and which of its blocks, int64 `[num_blocks]`.
        """
        index_of = {block: index for index, block in enumerate(before.block_ids.tolist())}
        if not index_of.keys() >= set(self.block_ids.tolist()):
            return None
        blocks = np.array([index_of[block] for block in self.block_ids.tolist()], np.int64)
        places, places_before = self.places.to_array(), before.places.to_array()
        wanted = blocks[places // block_tokens] * block_tokens + places % block_tokens
        tokens = np.searchsorted(places_before, wanted)
        if (tokens >= len(places_before)).any() or not np.array_equal(places_before[tokens], wanted):
            return None
        return tokens, blocks


Published = tuple[str, np.ndarray | bytes, int]
"""What a session has to share: its domain (`Owner.domain`); token ids, int32 `[T]`, or hashes of blocks, joined,
another object whenever they are others; and how many of these units, from the first on, others may have the KV of."""


class _Indexed(NamedTuple):
    """An item of the sorted list."""

    domain: str
    sequence: bytes
    key: str
    units: np.ndarray | bytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlainPrefix:
    """The leading tokens of a session whose KV has seen no token that was dropped."""

    domain: str
    """Whose sessions may use it: a tenant's, of one variant."""
    token_ids: np.ndarray
    """Of those in DRAM, int32 `[T]`; not to be written to."""
    ssd_hashes: bytes
    """`prefix_hashes` of those on SSD."""


class PrefixIndex:
    """Which session begins like a sequence for longest, unit by unit: tokens in DRAM, hashes of blocks on SSD.

        units as bytes, sorted       a b c d
                                     a b c e f     <- of a b c e x: four units in common
                                     a x           <- one
        a b c e x would stand between the two

    The longest prefix that a sequence shares with any of a sorted list, it shares with one of the two that it would
    stand between. Saves of decoded tokens publish often, and searches are rare: what changes is only marked, and put in
    its place by the next search. Belongs to the bookkeeping thread.

    A search costs O(log n) comparisons, and for each session that changed since the last one a copy of its units if
    they are token ids. A change costs an entry in a dict.

    Args:
      published: what a session has to share by its key; None if it has nothing (any more).
      unit_bytes: of one unit.
      min_units: shorter prefixes are not found.
    """

    def __init__(self, published: Callable[[str], Published | None], unit_bytes: int, min_units: int = 1) -> None:
        self._published = published
        self._unit_bytes = unit_bytes
        self._min_units = max(min_units, 1)
        self._max_changed = _MAX_CHANGED
        self._changed: dict[str, None] = {}
        self._sorted = SortedList()
        self._indexed: dict[str, _Indexed] = {}

    def changed(self, key: str) -> None:
        """What a session has to share is perhaps something else now, or it is gone."""
        self._changed[key] = None
        if len(self._changed) > self._max_changed:
            self._catch_up()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Puts what changes in a `with` block in its place at the end of it: faster for very many."""
        self._max_changed = sys.maxsize
        yield
        self._max_changed = _MAX_CHANGED
        self._catch_up()

    def find(self, domain: str, wanted: bytes) -> tuple[int, str]:
        """Finds the domain's session that agrees with a sequence for longest, at least for `min_units`.

        Args:
          domain: whose sessions; others' are never found.
          wanted: the sequence's units.

        Returns:
          How many units agree, and its key; 0 and an empty one where there is none.
        """
        self._catch_up()
        place, sequence = (domain, wanted), np.frombuffer(wanted, np.uint8)
        around = (self._sorted.irange(maximum=place, reverse=True), self._sorted.irange(minimum=place))
        neighbours = [item for item in (next(items, None) for items in around) if item is not None]
        found = [
            (num_common(np.frombuffer(item.sequence, np.uint8), sequence) // self._unit_bytes, item.key)
            for item in neighbours
            if item.domain == domain
        ]
        return max([agreeing for agreeing in found if agreeing[0] >= self._min_units], default=(0, ""))

    def _catch_up(self) -> None:
        changed, self._changed = self._changed, {}
        added: list[_Indexed] = []
        for key in changed:
            now, known = self._published(key), self._indexed.get(key)
            domain, units, num_units = now or ("", b"", 0)
            if known is not None:
                if now is not None and units is known.units and num_units * self._unit_bytes == len(known.sequence):
                    continue
                self._sorted.remove(known)
                del self._indexed[key]
            if now is not None and num_units >= self._min_units:
                sequence = (units if isinstance(units, bytes) else as_units(units))[: num_units * self._unit_bytes]
                self._indexed[key] = _Indexed(domain, sequence, key, units)
                added.append(self._indexed[key])
        self._sorted.update(added)  # Of few it adds one by one; with many it sorts all.


def as_token_ids(token_ids: npt.ArrayLike) -> np.ndarray:
    """Token ids as int32 `[T]`, read-only.

    Raises:
      ValueError: there are none, or they are not a list of int32.
    """
    given = np.asarray(token_ids)
    if given.ndim != 1 or not given.size or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"token_ids must be a non-empty list of integers, got {given.dtype}{list(given.shape)}")
    ids = given.astype(np.int32)
    if given.dtype != np.int32 and not np.array_equal(ids, given):
        raise ValueError(f"token_ids must be int32, got values in [{given.min()}, {given.max()}]")
    ids.flags.writeable = False
    return ids


def as_units(token_ids: np.ndarray) -> bytes:
    """Token ids as units of 4 bytes: in whatever order they sort so, sequences that begin alike stand side by side."""
    return np.ascontiguousarray(token_ids, "<i4").tobytes()


def num_common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
