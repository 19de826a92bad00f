"""Stored KV of text chunks, each computed by itself: entries of the store that any conversation of a tenant may use.

A chunk is found by its tokens: the key is a hash of them, the tenant, the weights, the layout and the head. It is
stored like a session's KV, and moves between the tiers like one: jobs that wait for it say so, so that it is fetched
early and evicted late.

The head is a few tokens, the same for all chunks of a model, that a chunk is computed behind and that are not stored:

    computed     h h h h a a a a a a       h head, a chunk
    stored               a a a a a a       keys unrotated: they may be used at any place

A context's first token takes much attention and says nothing (an attention sink). Without a head each chunk would have
one of its own.

`FusedTicket` reads several entries as one history, each in its place, with room between for what is not stored.

Not here: how chunks become a context (recompute), loads (load), who computes one that is missing (engine).
Source: CacheBlend (Yao et al., EuroSys 2025), section 5; the head: APE (Yang et al., ICLR 2025), section 3.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from ca_jax.kv.save import TurnKV, TurnSaver, WriteBuffer
from ca_jax.session import Job
from ca_jax.storage.records import MissReason, Owner, Residency, domain_of
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import LoadTicket, all_of
from ca_jax.turns.text import ChunkSpan

_NAME_DIGITS = 16  # Of the key, in the name that listings show.


class ChunkKV:
    """The chunks in a store. Belongs to the engine's thread.

    Args:
      salt: tells weights and layouts apart.
      head: token ids that chunks are computed behind.
      window: most tokens that a chunk and its head may have.
    """

    def __init__(
        self, store: AttentionStore, write_buffer: WriteBuffer, salt: bytes, head: Sequence[int], window: int
    ) -> None:
        self._store = store
        self._write_buffer = write_buffer
        self._salt = salt
        self._head = list(head)
        self._window = window
        self._coming: dict[str, Job] = {}  # By key, jobs that compute a chunk.
        self._asked_for: set[str] = set()  # Keys of those that are computed whether such a job waits or not.
        self._leaving: set[str] = set()  # Keys of chunks that are to be on SSD alone.

    def head_of(self, num_tokens: int) -> list[int]:
        """What a chunk of so many tokens is computed behind: nothing where the window has no room for both."""
        return self._head if len(self._head) + num_tokens <= self._window else []

    def key(self, token_ids: Sequence[int], tenant: str, variant: str = "") -> str:
        """The store's key of a chunk: SHA-256 of sharing domain (`Owner.domain`), weights, layout, head and tokens."""
        name, head = domain_of(tenant, variant), self.head_of(len(token_ids))
        domain = f"chunk behind {len(head)} {len(name)}:{name}".encode("utf-8", "surrogatepass")
        ids = np.asarray([*head, *token_ids], "<i4").tobytes()
        return hashlib.sha256(self._salt + domain + ids).hexdigest()

    def span(self, prompt_ids: Sequence[int], start: int, num_tokens: int, tenant: str, variant: str = "") -> ChunkSpan:
        """The chunk that stands in a prompt from `start` on."""
        key = self.key(prompt_ids[start : start + num_tokens], tenant, variant)
        head = self.head_of(num_tokens)
        return ChunkSpan(key, start, num_tokens, start == len(head) and list(prompt_ids[:start]) == head)

    def is_kept(self, chunk: ChunkSpan) -> bool:
        """Whether all of a chunk is stored, or will be without anybody's doing."""
        return chunk.key in self._coming or self._is_on_its_way(chunk.key) or self._is_whole(chunk)

    def has_room(self, num_tokens: int) -> bool:
        """Whether the store is large enough for a chunk of so many tokens, were it empty."""
        layout = self._store.layout
        return layout.num_blocks(num_tokens) * layout.block_bytes <= self._store.stats().capacity_bytes

    # A job that computes a chunk.

    def coming(self, job: Job) -> None:
        """A job is queued that computes a chunk."""
        if job.chunk is not None:
            self._coming[job.chunk.key] = job

    def ask_for(self, key: str) -> None:
        """A chunk that is coming is wanted for itself, not for a context alone."""
        if key in self._coming:
            self._asked_for.add(key)

    def is_coming(self, key: str) -> bool:
        """Whether a job is queued, or runs, that computes a chunk."""
        return key in self._coming

    def unasked(self, key: str) -> Job | None:
        """The job that computes a chunk for contexts alone; None if there is none, or the chunk was asked for."""
        return None if key in self._asked_for else self._coming.get(key)

    def ended(self, job: Job) -> None:
        """A job has ended, well or not."""
        if job.chunk is not None and self._coming.get(job.chunk.key) is job:
            del self._coming[job.chunk.key]
            self._asked_for.discard(job.chunk.key)

    def begin_saving(self, chunk: ChunkSpan, tenant: str, variant: str = "") -> TurnSaver | None:
        """Opens the saving of a chunk; None where it is there, or on its way there, by now."""
        if self._is_on_its_way(chunk.key) or self._is_whole(chunk):
            return None
        self._store.drop(chunk.key)  # What of it was saved by a job that was given up.
        owner = Owner(tenant=tenant, session_id=_name(chunk.key), variant=variant)
        num_plain = 0 if self.head_of(chunk.num_tokens) else None  # A text that begins so has seen no head.
        return self._write_buffer.begin(TurnKV(chunk.key, owner, 0, num_plain=num_plain))

    # Where chunks are.

    def keep_on_ssd(self, key: str) -> None:
        """Has a chunk leave DRAM once it is on SSD, so that there is room for what is not as cheap to fetch."""
        self._leaving.add(key)

    def collect(self) -> None:
        """Has chunks leave DRAM that are to be on SSD alone, are there by now, and are not in use."""
        for key in tuple(self._leaving):
            if key in self._coming or self._is_on_its_way(key):
                continue
            info = next((info for info in self._store.of_name(_name(key)) if info.key == key), None)
            if info is not None and info.residency is Residency.DRAM:
                if info.in_use or info.ssd_tokens < info.num_tokens:
                    continue
                self._store.leave_dram(key)
            self._leaving.discard(key)

    # A job that uses chunks.

    def hold(self, span: ChunkSpan, token_ids: list[int]) -> LoadTicket | None:
        """All of a chunk's KV, to be read; None where not all of it is stored."""
        if span.first is not None:
            return self._store.hold_part(span.key, token_ids, span.first)
        ticket = self._store.prepare_load(span.key, token_ids)
        if ticket is not None and ticket.num_tokens < span.num_tokens:
            self._store.abort_load(ticket, MissReason.MISMATCH)
            return None
        return ticket

    def _is_whole(self, chunk: ChunkSpan) -> bool:
        return self._store.num_readable(chunk.key) >= chunk.num_tokens

    def _is_on_its_way(self, key: str) -> bool:
        return self._write_buffer.is_running(key) or self._write_buffer.is_unsaved(key)


class FusedTicket:
    """Open loads of a store, or one, read as one history: to a `LayerLoader` they are one load.

        places     0 .. 120   120 .. 140   140 .. 652   652 .. 1164   1164 .. 1676
        read from  session    nothing      chunk        nothing       chunk

    Args:
      parts: loads, each with the place of its first token: in order, not overlapping, at least one.
    """

    def __init__(self, parts: Sequence[tuple[LoadTicket, int]]) -> None:
        self.parts = tuple(parts)
        """Loads and where they go."""
        self._reads: list[tuple[str, Any]] = []  # Futures, by what they are of.

    @property
    def broken(self) -> set[str]:
        """Keys of what could not be read."""
        return {key for key, read in self._reads if read.done() and read.exception() is not None}

    @property
    def num_tokens(self) -> int:
        """Places, what is not read included."""
        ticket, start = self.parts[-1]
        return start + ticket.num_tokens

    @property
    def from_ssd(self) -> bool:
        """Whether any of it was fetched from SSD for this load."""
        return any(ticket.from_ssd for ticket, _ in self.parts)

    def has(self, layer: int) -> bool:
        """Whether a layer may be read: nothing of it is yet to come."""
        return all(ticket.has(layer) for ticket, _ in self.parts)

    def wait_for(self, layer: int, timeout_s: float) -> bool:
        """See `LoadTicket.wait_for`."""
        return all(ticket.wait_for(layer, timeout_s) for ticket, _ in self.parts)

    @property
    def is_broken(self) -> bool:
        """Whether some of what was to come never will."""
        return any(ticket.is_broken for ticket, _ in self.parts)

    def read(self, layer: int, dst: np.ndarray, first_token: int = 0) -> ts.Future:
        """Copies one layer's KV into places of `dst [2, S, K, H]`, and touches no others. Does not wait.

        Args:
          layer: which layer.
          dst: of all places, or from that of `first_token` on.
          first_token: of one load alone, the first token that is read.

        Returns:
          A future, done when all of it is in place; failed if any of it is not.
        """
        futures: list[Any] = []
        for ticket, start in self.parts:
            try:
                if first_token:
                    futures.append(ticket.read(layer, dst, first_token))
                else:
                    futures.append(ticket.read(layer, dst[:, start : start + ticket.num_tokens]))
            except Exception as error:  # Raised where the layer is taken: copies into it may be under way.
                futures.append(concurrent.futures.Future())
                futures[-1].set_exception(error)
        self._reads += zip((ticket.key for ticket, _ in self.parts), futures, strict=True)
        return futures[0] if len(futures) == 1 else all_of(futures)


def _name(key: str) -> str:
    """What listings show of a chunk."""
    return f"chunk-{key[:_NAME_DIGITS]}"


def distinct_keys(spans: Sequence[ChunkSpan]) -> list[str]:
    """Each key of chunks once, in order."""
    return list(dict.fromkeys(span.key for span in spans))
