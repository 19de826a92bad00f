"""The lengths that functions are compiled for: every length is padded up to one of these, so that compiles are bounded.

A step is compiled for its tokens, whatever was before them: what it reads is known at run time. Histories are brought,
and recomputed, in padded lengths. `Engine.warmup` compiles all of them.

Not here: what is compiled (steps), who pads (runner).
"""

from __future__ import annotations


def token_buckets(max_tokens: int, coarse: bool = False) -> tuple[int, ...]:
    """Padded numbers of tokens of a step: steps of 16 to 128, of 32 to 256, of 128 to 512, doublings beyond.

    Steps are fine where a step costs most: TTFT of a short turn is proportional to its padded tokens. Coarse ones are
    powers of two from 16: on a GPU few tokens take as long as some more, and compiling takes longer.
    """
    if coarse:
        sizes = [1 << power for power in range(4, max_tokens.bit_length())]
    else:
        sizes = [*range(16, 128, 16), *range(128, 256, 32), *range(256, 513, 128)]
        sizes += [1 << power for power in range(10, max_tokens.bit_length())]
    return (*(size for size in sizes if size < max_tokens), max_tokens)


def history_buckets(window_tokens: int) -> tuple[int, ...]:
    """Padded numbers of history tokens: none, 256, 512, half doublings from 1,024, doublings from 4,096."""
    ladder = [0, 256, 512, 1024, 1536, 2048, 3072, 4096]
    while ladder[-1] < window_tokens:
        ladder.append(2 * ladder[-1])
    return tuple(size for index, size in enumerate(ladder) if not index or ladder[index - 1] < window_tokens)


def batch_buckets(max_batch_size: int, least: int = 1) -> tuple[int, ...]:
    """Padded numbers of rows: powers of two from `least`, which is one, and the maximum."""
    sizes = [min(least, max_batch_size)]
    while sizes[-1] * 2 < max_batch_size:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if sizes[-1] == max_batch_size else (*sizes, max_batch_size)


def pad_to(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds `size`.

    Raises:
      ValueError: `size` is above the largest bucket.
    """
    for bucket in buckets:
        if size <= bucket:
            return bucket
    raise ValueError(f"the size must be at most {buckets[-1]}, got {size}")
