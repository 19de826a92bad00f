"""What tests of chunks share: the KV that the tiny model gives of them, by full passes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ca_jax.serving.prompts import chunk_head
from tests import engine_kit as kit


@functools.cache
def tiny_head() -> tuple[int, ...]:
    """What the tiny model's chunks are computed behind. No constant: processes fork before anything is computed."""
    return tuple(chunk_head(kit.tiny_model(), "template"))


def stored(chunk: Sequence[int], head: Sequence[int] | None = None) -> np.ndarray:
    """A chunk's KV as it is stored, `[L, 2, T, K, H]`: computed behind a head, which is left out."""
    head = tiny_head() if head is None else head
    return kit.full_pass([*head, *chunk])[1][:, :, len(head) :]


def reused(*chunks: Sequence[int]) -> np.ndarray:
    """KV of a context at the beginning of a prompt, nothing of which is computed anew but its first token."""
    kv = np.concatenate([stored(chunk) for chunk in chunks], axis=2)
    kv[:, :, :1] = kit.full_pass(list(chunks[0][:1]))[1]
    return kv
