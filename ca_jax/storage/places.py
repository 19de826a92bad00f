"""Where the tokens of a session lie in its blocks, when some of them have been forgotten in between.

Token i of a session lies at place p_i: row `p_i % block_tokens` of block `p_i // block_tokens` of its block table. A
new session is dense, p_i = i. Forgetting tokens moves none of those that stay: rows of the others are left dead, and
only blocks without any living token go.

    blocks of 4      0 1 2 3   4 5 6 7   8 9
    forget 1 to 4    0 . . .   . 5 6 7   8 9      places 0, 5 to 9: runs (0, 1) and (5, 5)
    forget 5 to 7    0 . . .             8 9      its block goes: places 0, 4, 5

New tokens go behind the last one. Blocks in the midst of a table therefore have no rows that were never written.

Not here: block tables, bytes, who forgets what (cutting).
"""

from __future__ import annotations

import dataclasses

import numpy as np

_RUN_DTYPE = np.dtype("<u4")


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
    """The places of a sequence's tokens, ascending. Immutable.

    Args:
      runs: pairs (first place, number of tokens) of neighbours, ascending; no run begins where the one before ends.

    Raises:
      ValueError: runs that are empty, negative, overlap or touch.
    """

    runs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        behind = -1
        for start, length in self.runs:
            if start <= behind or length <= 0:
                raise ValueError(
                    "wanted runs of tokens that ascend and do not touch, "
                    f"found {length} from place {start} behind one that ends at {behind}"
                )
            behind = start + length

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
        """The places that `to_bytes` wrote.

        Raises:
          ValueError: the data is no list of runs.
        """
        starts_and_lengths = np.frombuffer(data, _RUN_DTYPE).reshape(-1, 2).tolist()
        return cls(tuple((start, length) for start, length in starts_and_lengths))

    def to_bytes(self) -> bytes:
        """The runs, each as two unsigned 32-bit integers."""
        return np.array(self.runs, _RUN_DTYPE).tobytes()

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        return sum(length for _, length in self.runs)

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
            raise ValueError(f"kept wanted bool[{self.num_tokens}], found {kept.dtype}{list(kept.shape)}")
        places = self.to_array()[kept]
        blocks = places // block_tokens
        is_first = np.diff(blocks, prepend=-1) > 0
        table = blocks[is_first]
        return TokenPlaces.of(places + (np.cumsum(is_first) - 1 - blocks) * block_tokens), table

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
