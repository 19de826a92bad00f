"""Counts that say what the engine did, named once.

Not here: counts of the store (`storage.records.StoreStats`), latencies of one turn (`session.Usage`).
"""

from __future__ import annotations

import collections
import dataclasses

_KEPT_ERRORS = 256


@dataclasses.dataclass
class EngineMetrics:
    """Totals since the engine was made. Written by the engine's thread."""

    turns: int = 0
    """Jobs that ended well."""
    cancelled: int = 0
    """Jobs their caller gave up."""
    prompt_tokens: int = 0
    """Tokens of history and new ones, of all turns."""
    cached_tokens: int = 0
    """Of those, tokens whose KV was loaded."""
    completion_tokens: int = 0
    """Tokens generated."""
    prefill_steps: int = 0
    """Jobs prefilled."""
    prefill_passes: int = 0
    """Passes that took."""
    prefill_s: float = 0.0
    """Seconds of those, waiting for loads included."""
    decode_steps: int = 0
    """Decode steps run."""
    decode_s: float = 0.0
    """Seconds of those."""
    draft_steps: int = 0
    """Those of them that checked drafts,"""
    draft_tokens: int = 0
    """tokens of these,"""
    accepted_tokens: int = 0
    """and those of them that were right: tokens that took no step of their own."""
    model_draft_tokens: int = 0
    """Tokens of drafts that a draft model wrote,"""
    model_accepted_tokens: int = 0
    """and those of them that were right."""
    resident_histories: int = 0
    """Turns whose stored history was on the devices still."""
    loaded_histories: int = 0
    """Turns whose stored history was loaded, all of it."""
    mixed_histories: int = 0
    """Turns whose stored history was loaded in part and recomputed behind that, which was predicted to be faster."""
    recomputed_histories: int = 0
    """Turns whose stored history was recomputed, which was predicted to be faster."""
    truncations: int = 0
    """Times tokens left a conversation, since its context was full or by `Session.discard`."""
    dropped_tokens: int = 0
    """Tokens that left then."""
    repaired_tokens: int = 0
    """Tokens whose stored KV was computed anew in part, since others had left or stand before them."""
    idle_recomputes: int = 0
    """Times KV of a full context was computed, behind a cut or ahead of it, while nothing else was to be done."""
    invalidated_histories: int = 0
    """Stored histories lost to truncation, since their positions were in them (method `of`)."""
    blended_turns: int = 0
    """Turns whose context was made of stored chunks."""
    computed_chunks: int = 0
    """Chunks that were computed by themselves, to be stored."""
    loaded_chunks: int = 0
    """Chunks of contexts whose stored KV was loaded."""
    missed_chunks: int = 0
    """Chunks of contexts of which nothing was stored by then: they were computed in their places."""
    lost_chunks: int = 0
    """Chunks that broke while they were loaded, and were computed in their places."""
    preloads: int = 0
    """Loads that began while another job still ran."""
    load_stall_s: float = 0.0
    """Seconds in which compute waited for a load."""
    write_stall_s: float = 0.0
    """Seconds in which compute waited for room in the write buffer."""
    prediction_errors: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_KEPT_ERRORS)
    )
    """Predicted over measured time of prefills that had the device to themselves, minus 1; of the last ones."""
    failed_loads: int = 0
    """Loads that broke and were recomputed."""
    failed_saves: int = 0
    """Saves that broke and were given up."""
    refused_notes: int = 0
    """States of conversations that the log of notes had no room for or could not write: they outlive the process once
    they are on SSD."""
    publishes: int = 0
    """Times a session was published for other replicas."""
    published_bytes: int = 0
    """Bytes of KV that were written for that."""
    failed_publishes: int = 0
    """Publishes that failed; they are tried again."""
    refused_publishes: int = 0
    """Publishes that found another replica to own the session: what this one had of it was dropped."""
    takeovers: int = 0
    """Sessions that this engine went on with in place of another replica."""
    restored_tokens: int = 0
    """Tokens whose KV was read from what replicas share."""
    streamed_restores: int = 0
    """Turns that began while the last layers of their KV were still being read from there."""
    failed_restores: int = 0
    """Times what replicas share could not be read, or was not what it should be: then it was computed."""
    first_touch_s: float = 0.0
    """Seconds of making host memory resident, in the background."""
    model_load_s: float = 0.0
    """Seconds of reading the model."""
