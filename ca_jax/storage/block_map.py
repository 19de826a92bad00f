"""Where each block of one session's KV is, for whoever looks at it.

    tokens     0 . . .  4 . . .  8 . . .  12 .         blocks of 4
    dram       4        4        4         1 + 1       the last token is being saved
    ssd        4        4        2                     flushed before the last turn

Not here: the books these are read from (`books`), who moves blocks (`placement`).
"""

from __future__ import annotations

from ca_jax.storage.books import Entry
from ca_jax.storage.records import BlockTiers


def block_map(entry: Entry, block_tokens: int) -> tuple[BlockTiers, ...]:
    """The blocks of a session in token order: those of DRAM, or those of SSD where nothing is in DRAM.

    Args:
      entry: the session.
      block_tokens: tokens in a block.

    Returns:
      One for each block with a token. What SSD has of another state of the session than is in DRAM is not shown.
    """
    if not entry.num_reserved_tokens:
        spans = () if entry.ssd is None else entry.ssd.places.by_block(block_tokens)
        return tuple(BlockTiers(each.first_token, 0, each.num_tokens) for each in spans)
    num_ready, num_same = entry.num_tokens, 0 if entry.ssd is None else entry.num_same_tokens
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
