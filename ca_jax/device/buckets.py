"""The lengths that functions are compiled for: every length is padded up to one of these, so that compiles are bounded.

Steps are fine where a step costs most: TTFT of a short turn over stored history is proportional to its padded tokens.
Each pair of new and history lengths is compiled when it is first met, or by `Engine.warmup`
(on 2 CPU cores 64 functions of all kinds took 16.5 s).

Not here: what is compiled (steps), who pads (runner).
"""

from __future__ import annotations

import itertools


def new_token_buckets(chunk_tokens: int, coarse: bool = False) -> tuple[int, ...]:
    """Padded numbers of new tokens of one pass: 8, steps of 16 to 128, of 32 to 256, of 64 beyond, the chunk itself.

    Coarse ones are powers of two from 16: on a GPU few tokens take as long as some more, and compiling takes longer.
    """
    if coarse:
        return pass_sizes(chunk_tokens)
    ladder = [8, *range(16, 128, 16), *range(128, 256, 32), *range(256, chunk_tokens, 64)]
    return (*(size for size in ladder if size < chunk_tokens), chunk_tokens)


def pass_sizes(chunk_tokens: int) -> tuple[int, ...]:
    """Numbers of new tokens of a pass that is not a prompt's last: powers of two from 16, and the chunk itself."""
    sizes = (1 << power for power in range(4, chunk_tokens.bit_length()))
    return (*(size for size in sizes if size < chunk_tokens), chunk_tokens)


def history_buckets(window_tokens: int, coarse: bool = False) -> tuple[int, ...]:
    """Padded numbers of history tokens: none, steps of 256 to 1,024, of 512 to 4,096, of 1,024 beyond.

    Coarse ones are 512 and its doublings, and what lies halfway between them from 2,048 on.
    """
    if coarse:
        ladder = [0, 512, 1024]
        while ladder[-1] < window_tokens:
            ladder += [ladder[-1] * 2] if ladder[-1] < 2048 else [ladder[-1] * 3 // 2, ladder[-1] * 2]
        return tuple(size for index, size in enumerate(ladder) if not index or ladder[index - 1] < window_tokens)
    ladder = [0]
    while ladder[-1] < window_tokens:
        last = ladder[-1]
        ladder.append(last + (256 if last < 1024 else 512 if last < 4096 else 1024))
    return tuple(ladder)


def batch_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Padded numbers of decode slots in use: powers of two, and the maximum."""
    sizes = [1]
    while sizes[-1] * 2 < max_batch_size:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if sizes[-1] == max_batch_size else (*sizes, max_batch_size)


def slot_tokens(window_tokens: int, chunk_tokens: int, block_tokens: int, coarse: bool = False) -> int:
    """Tokens that a decode slot has room for: a full context window and what its last pass is padded by, or the longest
    padded history, in whole blocks. An update that overlaps a slot's end would be moved, not cut.
    """
    padding = max(high - low - 1 for low, high in itertools.pairwise((0, *new_token_buckets(chunk_tokens, coarse))))
    widest = max(window_tokens + padding, history_buckets(window_tokens, coarse)[-1])
    return -(-widest // block_tokens) * block_tokens


def pad_to(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds `size`.

    Raises:
      ValueError: `size` is above the largest bucket.
    """
    for bucket in buckets:
        if size <= bucket:
            return bucket
    raise ValueError(f"the size must be at most {buckets[-1]}, got {size}")
