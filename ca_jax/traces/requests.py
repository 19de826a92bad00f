"""A request as a trace of a server has it: when it came, of which session, how long it was.

Not here: readers of files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

HASH_BLOCK_TOKENS = 512
"""Prompt tokens that one of `hash_ids` stands for."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request."""

    arrival_s: float
    """Since the trace began, >= 0."""
    session_id: str
    """Which requests build upon each other."""
    input_tokens: int
    """Of the whole prompt, history included; > 0."""
    output_tokens: int
    """Of the answer; > 0."""
    shared_tokens: int = 0
    """Leading tokens of the prompt that are those of the session's request before it and its answer, as far as is
    known."""
    hash_ids: tuple[int, ...] = ()
    """One for every block of `HASH_BLOCK_TOKENS` of the prompt, the last one perhaps not full: equal ids are of equal
    blocks behind equal prompts. Empty where the trace has none."""


def share_of_seen_blocks(requests: Iterable[Request]) -> float:
    """Which share of all blocks lead their prompt and were seen in an earlier one: the hit rate of unbounded capacity.

    Args:
      requests: with `hash_ids`, in order of arrival.

    Returns:
      In [0, 1]; 0 where there are no blocks.
    """
    seen: set[int] = set()
    num_hits = num_blocks = 0
    for request in requests:
        num_hits += next((i for i, each in enumerate(request.hash_ids) if each not in seen), len(request.hash_ids))
        num_blocks += len(request.hash_ids)
        seen.update(request.hash_ids)
    return num_hits / num_blocks if num_blocks else 0.0
