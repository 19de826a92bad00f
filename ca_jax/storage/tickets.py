"""Moves under way: a ticket names the blocks of one save or load and copies into or out of them.

Whole blocks go by one TensorStore call a layer, with the block ids as an index array; parts of blocks go by numpy.
Measured on 2 CPU cores for 16 blocks x 30 layers (94 MB, aligned and touched staging), against a memcpy of one layer
into reused staging at 23 GB/s: TensorStore with an index array 25-27 GB/s, on its own threads and with one hold of the
interpreter lock a layer; TensorStore per block 7; numpy per block 18-21 on the calling thread, 11-17 on a worker. A
part of a block is too small for that: 45-105 us by TensorStore, 1-10 us by numpy.

Not here: opening and closing tickets (transfers).
"""

from __future__ import annotations

import enum
import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from ca_jax.storage.tiers.dram import DramTier
from ca_jax.storage.tokens import BlockRows, TokenPlaces


class TicketState(enum.Enum):
    """What became of a move."""

    OPEN = "open"
    """Under way."""
    DONE = "done"
    """Completed."""
    ABORTED = "aborted"
    """Given up, by its owner or with an earlier save that it follows."""


class BrokenOffError(RuntimeError):
    """KV that was to be read as it is written will not be written: its source broke, or the save was given up."""


class SaveTicket:
    """Room for the KV of tokens `[start_token, start_token + num_tokens)` of one session.

    Any thread may write, several at a time to different layers. Axes as in `layout`; T tokens.

    Args:
      may_be_read: whether loads may read a layer once it is written, before the others are.
    """

    def __init__(
        self,
        tier: DramTier,
        key: str,
        start_token: int,
        token_ids: np.ndarray,
        block_ids: np.ndarray,
        start_place: int,
        *,
        may_be_read: bool = False,
    ) -> None:
        self.key = key
        """Session id."""
        self.may_be_read = may_be_read
        """Whether loads may read a layer once it is written, before the others are."""
        self.start_token = start_token
        """First token, counted from the session's first."""
        self.start_place = start_place
        """Where it goes: a row of the session's blocks. The others go behind it."""
        self.token_ids = token_ids
        """The tokens, int32 `[num_tokens]`, read-only."""
        self._tier = tier
        self._block_ids = block_ids  # Of the whole session, up to the last token of this save.
        self._written = np.zeros((tier.layout.num_layers, len(token_ids)), bool)
        self.state = TicketState.OPEN
        """What became of it."""
        self._broken: Exception | None = None
        self._num_writers = 0
        self._idle = threading.Condition()

    @property
    def num_tokens(self) -> int:
        """Tokens this save adds."""
        return len(self.token_ids)

    @property
    def stop_token(self) -> int:
        """One past the last token, counted from the session's first."""
        return self.start_token + len(self.token_ids)

    @property
    def stop_place(self) -> int:
        """One past the place of the last token."""
        return self.start_place + len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """How many (layer, token) pairs are not written yet."""
        return self._written.size - int(np.count_nonzero(self._written))

    def write(self, layer: int, kv: np.ndarray, token_offset: int = 0) -> bool:
        """Copies one layer's KV in. Blocks until copied; the same tokens may be written again.

        Args:
          layer: which layer.
          kv: `[P, T, K, H]` of the layer's group and the layout's dtype: keys unrotated, then values. Any strides.
          token_offset: where it goes, in tokens from `start_token`.

        Returns:
          Whether it was copied: False once the save was completed or aborted.

        Raises:
          ValueError: a layer, shape, dtype or offset that does not fit.
        """
        group, index = self._tier.layout.place(layer)
        return self._write({group: (slice(index, index + 1), kv[None])}, token_offset)

    def write_all(self, kv: np.ndarray | Sequence[np.ndarray], token_offset: int = 0) -> bool:
        """Copies all layers' KV in. Otherwise as `write`.

        Args:
          kv: of each of the layout's groups `[l, P, T, K, H]`; or of all layers as one array, where they are of one
            shape.
          token_offset: as in `write`.
        """
        groups = self._tier.layout.groups
        if isinstance(kv, np.ndarray):
            kv = [kv if len(groups) == 1 else kv[list(group.layers)] for group in groups]
        layers = [slice(0, len(group.layers)) for group in groups]
        return self._write(dict(enumerate(zip(layers, kv, strict=True))), token_offset)

    def has(self, layer: int) -> bool:
        """Whether a layer is written, of all tokens."""
        return bool(self._written[layer].all())

    def wait_for(self, layer: int, timeout_s: float) -> bool:
        """Waits until a layer is written, so many seconds at most; whether it is.

        Raises:
          BrokenOffError: it will not be.
        """
        with self._idle:
            self._idle.wait_for(lambda: self.has(layer) or self.is_broken, timeout_s)
            if not self.has(layer) and self.is_broken:
                raise BrokenOffError(f"KV of {self.key!r} was to come, and will not") from self._broken
            return self.has(layer)

    @property
    def is_broken(self) -> bool:
        """Whether what is not written yet never will be."""
        return self._broken is not None or self.state is TicketState.ABORTED

    def break_off(self, error: Exception) -> None:
        """Says that nothing more will be written, and why. Any thread may; the save stays open until it is aborted."""
        with self._idle:
            self._broken = error
            self._idle.notify_all()

    def mark_written(self) -> None:
        """Says that all is written, by other means than this ticket's: a simulator has no bytes."""
        self._written[:] = True

    def close(self, state: TicketState) -> None:
        """Ends the save: waits for writes under way, refuses later ones. For the AttentionStore."""
        with self._idle:
            self.state = state
            self._idle.notify_all()
            self._idle.wait_for(lambda: not self._num_writers)

    def _write(self, of_groups: dict[int, tuple[slice, np.ndarray]], token_offset: int) -> bool:
        """Copies in, of some groups, some layers' `[l, P, T, K, H]`; layers by their places in the group."""
        layout = self._tier.layout
        for group, (layers, kv) in of_groups.items():
            num_tokens = kv.shape[-3] if kv.ndim == 5 else -1
            shape = (layers.stop - layers.start, *layout.groups[group].shape(num_tokens))
            _check_array("kv", kv, layout.numpy_dtype, shape)
            if not 0 <= token_offset <= self.num_tokens - num_tokens:
                raise ValueError(
                    f"tokens must lie within [0, {self.num_tokens}) of the save, "
                    f"got [{token_offset}, {token_offset + num_tokens})"
                )
        with self._idle:
            if self.state is not TicketState.OPEN:
                return False
            self._num_writers += 1
        try:
            for group, (layers, kv) in of_groups.items():
                self._copy(group, layers, kv, self.start_place + token_offset)
                written = layout.groups[group].layers[layers]
                self._written[written, token_offset : token_offset + kv.shape[2]] = True
        finally:
            with self._idle:
                self._num_writers -= 1
                self._idle.notify_all()
        return True

    def _copy(self, group: int, layers: slice, kv: np.ndarray, start: int) -> None:
        """Copies `kv` `[l, P, T, K, H]` to the rows from place `start` on."""
        layout = self._tier.layout
        stretches, parts = _stretches(start, kv.shape[2], layout.block_tokens)
        copies = []
        for first, first_block, num_blocks in stretches:
            blocks = _as_blocks(kv[:, :, first : first + num_blocks * layout.block_tokens], layout.block_tokens)
            ids = self._block_ids[first_block : first_block + num_blocks]
            # The reference ends with this call, which waits for the copy.
            write = self._tier.blocks[group][ids, layers].write(
                blocks.transpose(2, 0, 1, 3, 4, 5), can_reference_source_data_indefinitely=True
            )
            copies.append(write)
        for part in parts:
            block = self._tier.groups[group][self._block_ids[part.index]]
            block[layers, :, part.rows] = kv[:, :, part.first_token : part.first_token + part.num_tokens]
        for write in copies:
            write.result()


_Plan = tuple[list[tuple[int, list[ts.TensorStore]]], tuple[BlockRows, ...]]


class LoadTicket:
    """The KV of the first `num_tokens` tokens of one session, held in place until the load is completed or aborted.

    One thread at a time may read.
    """

    def __init__(
        self,
        tier: DramTier,
        key: str,
        places: TokenPlaces,
        block_ids: np.ndarray,
        *,
        from_ssd: bool = False,
        coming: Sequence[SaveTicket] = (),
    ) -> None:
        self.key = key
        """Session id."""
        self.num_tokens = places.num_tokens
        """Tokens that can be read."""
        self.num_plain = places.num_tokens
        """First tokens of these whose KV has seen no dropped token; all, where nobody has said."""
        self.from_ssd = from_ssd
        """Whether they were fetched from SSD for this load."""
        self.fetch_span_s: tuple[float, float] | None = None
        """When that fetch began and ended, on the timeline's clock; None where there was none, or nobody measured."""
        self.skipped_bytes = 0
        """Of first tokens that were left out of what was read."""
        self.coming = tuple(coming)
        """Saves that the last tokens are of, which are written while this is read: a layer may be read once it `has`
        come."""
        self._tier = tier
        self._places = places
        self._block_ids = block_ids
        self._reads: list[ts.Future] = []
        self._plans: dict[int, _Plan] = {}  # By the first token that is read.
        self._copying = threading.Lock()
        self.state = TicketState.OPEN
        """What became of it."""

    def has(self, layer: int) -> bool:
        """Whether a layer may be read: all of it is there."""
        return all(save.has(layer) for save in self.coming)

    def wait_for(self, layer: int, timeout_s: float) -> bool:
        """Waits until a layer may be read, so many seconds at most; whether it may.

        Raises:
          BrokenOffError: it will not come.
        """
        missing = next((save for save in self.coming if not save.has(layer)), None)
        return missing is None or (missing.wait_for(layer, timeout_s) and self.has(layer))

    @property
    def is_broken(self) -> bool:
        """Whether some of what was to come never will."""
        return any(save.is_broken for save in self.coming)

    def shorten(self, num_tokens: int) -> None:
        """Reads only the first so many tokens from here on. All of them are there.

        Raises:
          ValueError: none, or more than there are, or some are yet to come.
        """
        if not 0 < num_tokens <= self.num_tokens or self.coming:
            raise ValueError(f"num_tokens must be 1 to {self.num_tokens} that are there, got {num_tokens}")
        self.num_tokens = num_tokens
        self._places = self._places.take(num_tokens)
        self._plans.clear()
        self.__dict__.pop("_rows", None)

    def read(self, layer: int, dst: np.ndarray, first_token: int = 0) -> ts.Future:
        """Copies one layer's KV of all tokens, or of those from one on, to the beginning of `dst`, and touches nothing
        beyond. Does not wait for the copy.

        Two or more reads in flight reach the speed of a memcpy; one at a time reaches half of it, the rest being the
        hand-over between threads.

        Args:
          layer: which layer.
          dst: `[P, S, K, H]` of the layer's group and the layout's dtype, S at least as many as are read, writable:
            staging that the caller reuses, best of `host_array` (unaligned staging halves the speed). It must not be
            used until the future is done.
          first_token: the first that is read.

        Returns:
          A future, done when the bytes are in place.

        Raises:
          ValueError: a layer, shape or dtype that does not fit, or a ticket that is closed.
        """
        layout = self._tier.layout
        if self.state is not TicketState.OPEN:
            raise ValueError(f"the load of {self.key!r} must be open, got one that is {self.state.value}")
        if not self.has(layer):
            raise ValueError(f"layer {layer} of {self.key!r} must have come, and has not")
        group, index = layout.place(layer)
        num_slots = dst.shape[1] if dst.ndim == 4 else -1
        _check_array("dst", dst, layout.numpy_dtype, layout.groups[group].shape(num_slots))
        num_tokens = self.num_tokens - first_token
        if not 0 <= first_token < self.num_tokens:
            raise ValueError(f"first_token must be in [0, {self.num_tokens}), got {first_token}")
        if num_slots < num_tokens or not dst.flags.writeable:
            raise ValueError(
                f"dst must have room for {num_tokens} tokens and be writable; "
                f"got {num_slots}, {'writable' if dst.flags.writeable else 'read-only'}"
            )
        futures = []
        self.skipped_bytes += first_token * layout.layer_token_bytes(layer)
        stretches, parts = self.plan(first_token)
        for first, blocks in stretches:
            staging = dst[:, first : first + blocks[group].shape[0] * layout.block_tokens]
            staging = _as_blocks(staging, layout.block_tokens).transpose(1, 0, 2, 3, 4)
            futures.append(ts.array(staging).write(blocks[group][:, index]).commit)
        self._reads += futures
        for part in parts:
            block = self._tier.groups[group][self._block_ids[part.index], index]
            into = dst[:, part.first_token : part.first_token + part.num_tokens]
            if isinstance(part.rows, slice):
                into[...] = block[:, part.rows]
            else:  # Without `mode` it would go by a buffer.
                np.take(block, part.rows, axis=1, out=into, mode="clip")
        return futures[0] if len(futures) == 1 else all_of(futures)

    def copy(self, layer: int, first_token: int, dst: np.ndarray) -> bool:
        """Copies one layer's KV of some tokens into `dst`, and waits. A thread may that is not the one that reads.

        Args:
          layer: which layer.
          first_token: the first of them.
          dst: `[P, T, K, H]` of the layer's group and the layout's dtype, T of the tokens that can be read.

        Returns:
          Whether it was copied: False once the load was completed or aborted.
        """
        with self._copying:
            if self.state is not TicketState.OPEN:
                return False
            self._copy(layer, first_token, dst)
            return True

    def close(self, state: TicketState) -> None:
        """Ends the load: waits for copies under way, refuses later ones. For the AttentionStore."""
        with self._copying:
            self.state = state
        for future in self._reads:
            future.exception()  # Waits. An error is for the holder of the future.
        self._reads.clear()

    def _copy(self, layer: int, first_token: int, dst: np.ndarray) -> None:
        group, index = self._tier.layout.place(layer)
        stop_token = first_token + dst.shape[1]
        for part in self._rows:
            first, stop = max(part.first_token, first_token), min(part.first_token + part.num_tokens, stop_token)
            if first < stop:
                taken = slice(first - part.first_token, stop - part.first_token)
                rows = part.rows
                rows = (
                    slice(rows.start + taken.start, rows.start + taken.stop) if isinstance(rows, slice) else rows[taken]
                )
                block = self._tier.groups[group][self._block_ids[part.index], index]
                dst[:, first - first_token : stop - first_token] = block[:, rows]

    @functools.cached_property
    def _rows(self) -> tuple[BlockRows, ...]:
        """The tokens of each block."""
        return self._places.by_block(self._tier.layout.block_tokens)

    def plan(self, first_token: int = 0) -> _Plan:
        """How the tokens from one on are read: stretches of whole blocks, by group, each with its first token counted
        from that one; parts of blocks.
        """
        if first_token not in self._plans:
            places = self._places.skip(first_token) if first_token else self._places
            stretches, parts = places.stretches(self._tier.layout.block_tokens)
            taken = ((token, self._block_ids[first : first + count]) for token, first, count in stretches)
            found = [(token, [blocks[ids] for blocks in self._tier.blocks]) for token, ids in taken]
            self._plans[first_token] = found, parts
        return self._plans[first_token]


@functools.lru_cache(maxsize=64)
def _stretches(
    start: int, num_tokens: int, block_tokens: int
) -> tuple[list[tuple[int, int, int]], tuple[BlockRows, ...]]:
    """Where tokens side by side lie, see `TokenPlaces.stretches`; the same for each layer of a save."""
    return TokenPlaces(((start, num_tokens),) if num_tokens else ()).stretches(block_tokens)


def all_of(futures: Sequence[Any]) -> ts.Future:
    """A future of several copies, or of none: done with the last of them, and failed if one has."""
    promise: ts.Promise
    promise, future = ts.Promise.new()
    num_done = itertools.count(1)  # Counts callbacks of several threads without a lock.

    def end() -> None:
        errors = [error for each in futures if (error := each.exception()) is not None]
        if errors:
            promise.set_exception(errors[0])
        else:
            promise.set_result(None)

    def one_done(_: ts.Future) -> None:
        if next(num_done) == len(futures):
            end()

    if not futures:
        end()
    for each in futures:
        each.add_done_callback(one_done)
    return future


def _as_blocks(kv: np.ndarray, block_tokens: int) -> np.ndarray:
    """Views `[..., n * block_tokens, K, H]` as `[..., n, block_tokens, K, H]`; never copies."""
    return kv.reshape(*kv.shape[:-3], -1, block_tokens, *kv.shape[-2:], copy=False)


def _check_array(name: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype != dtype:
        wanted = ", ".join("any" if size < 0 else str(size) for size in shape)
        raise ValueError(f"{name} must be {dtype}[{wanted}], got {array.dtype}{list(array.shape)}")
