"""Whole numbers of tokens as bytes that zstd packs well: those of one kind together, first those that spread most.

    low bytes int8 [C - M, T] | low halves of two each int8 [M / 2, T] | what is above them int8 [W + M, T]

C of N numbers of T tokens are kept, the first W of them two bytes each; zstd's shortest word is a bit, so that the
last M, which spread little, share bytes. A token that is unlike the others lies elsewhere: rows of a byte a number.

Not here: what the numbers are (storage.codec, storage.layer_codec).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import zstandard

from ca_jax.storage.transform import LEAST_SPREAD

_MOST = 127  # Of a whole number that is a byte.
_MOST_WIDE = 32_000  # Of one that is two.
_WIDE_SPREAD = 10.0  # Steps, from which it is.
_NARROW_SPREAD = 0.9  # Steps, up to which two share a byte; what is beyond 4 bits lies elsewhere.
# Of zstd: whole numbers have no repetitions to be found, and their distribution changes every few channels.
_PACKING = {"hash_log": 6, "min_match": 7, "strategy": zstandard.STRATEGY_FAST}


class CodecError(ValueError):
    """What was read is not what was coded."""


def compressor(window_log: int) -> zstandard.ZstdCompressor:
    """Of zstd, for one thread. Each `2 ** window_log` bytes have a code of their own."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=window_log, **_PACKING)
    return zstandard.ZstdCompressor(compression_params=parameters)


def decompressed(data: bytes | memoryview, least: int, most: int, name: str) -> np.ndarray:
    """What a frame of zstd has, uint8 of `least` to `most` bytes.

    Raises:
      CodecError: the frame, by its `name`, is none, or of another size.
    """
    wanted = str(least) if least == most else f"{least} to {most}"
    try:
        if not least <= (found := zstandard.get_frame_parameters(data).content_size) <= most:
            raise CodecError(f"{name} must be of {wanted} bytes, got {found}")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
    except zstandard.ZstdError as error:
        raise CodecError(f"{name} must be a frame of zstd, got another: {error}") from error


def largest_codes(spread: np.ndarray) -> np.ndarray:
    """The largest whole number that fits, int16, of numbers that spread so far."""
    return np.where(spread > _WIDE_SPREAD, _MOST_WIDE, _MOST).astype(np.int16)


@dataclasses.dataclass(frozen=True, eq=False)
class Planes:
    """How N numbers of a token lie."""

    spread: np.ndarray
    """f32 `[N]`, steps."""
    shares_bytes: bool = True
    """False: M is 0."""

    @functools.cached_property
    def order(self) -> np.ndarray:
        """int64 `[C]`: which of the N numbers are kept, those that spread most first."""
        order = np.argsort(-self.spread, kind="stable")
        return order[: np.count_nonzero(self.spread > LEAST_SPREAD)]

    @functools.cached_property
    def _num_wide(self) -> int:
        """W."""
        return int(np.count_nonzero(self.spread > _WIDE_SPREAD))

    @functools.cached_property
    def _num_narrow(self) -> int:
        """M, an even number."""
        narrow = (self.spread > LEAST_SPREAD) & (self.spread < _NARROW_SPREAD)
        return int(np.count_nonzero(narrow)) // 2 * 2 if self.shares_bytes else 0

    @functools.cached_property
    def _rows(self) -> tuple[int, int, int]:
        """Of each plane."""
        return len(self.order) - self._num_narrow, self._num_narrow // 2, self._num_wide + self._num_narrow

    def num_bytes(self, num_tokens: int) -> int:
        """Of so many tokens' codes."""
        return sum(self._rows) * num_tokens

    def pack(self, codes: np.ndarray, into: np.ndarray) -> None:
        """Writes whole numbers that fit, int16 `[N, T]`, into uint8 `[num_bytes]`."""
        low, pairs, high = self._views(into, codes.shape[1])
        codes = codes[self.order]
        low[:] = codes[: len(low)].astype(np.int8)  # The low byte, as a number of its own.
        wide = self._num_wide
        high[:wide] = (codes[:wide] - low[:wide]) >> 8
        narrow = codes[len(low) :]
        half = (narrow.astype(np.int8) << 4) >> 4  # -8 to 7.
        high[wide:] = (narrow - half) >> 4  # -8 to 8: a byte has no room for 127 - -1.
        pairs[:] = (half[::2] & 15) | (half[1::2] << 4)

    def unpack(self, data: np.ndarray, num_tokens: int) -> np.ndarray:
        """int16 `[N, T]`, of uint8 `[num_bytes]`: codes where their numbers are, and 0 where none is kept."""
        low, pairs, high = self._views(data, num_tokens)
        codes = np.empty((len(self.order), num_tokens), np.int16)
        codes[: len(low)] = low
        wide = self._num_wide
        codes[:wide] += high[:wide].astype(np.int16) << 8
        narrow = codes[len(low) :]
        narrow[::2], narrow[1::2] = (pairs << 4) >> 4, pairs >> 4
        narrow += high[wide:].astype(np.int16) << 4
        whole = np.zeros((len(self.spread), num_tokens), np.int16)
        whole[self.order] = codes
        return whole

    def _views(self, data: np.ndarray, num_tokens: int) -> list[np.ndarray]:
        planes = np.split(data.view(np.int8).reshape(-1, num_tokens), np.cumsum(self._rows[:-1]))
        return list(planes)


def rows_of(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers `[..., H]` of each part as scales f32 `[R]`, one for each row of H, and int8 `[N]`."""
    scales, rows = [], []
    for part in parts:
        largest = np.abs(part).max(-1)
        scale = np.where(largest > 0, largest / _MOST, 1).astype(np.float32)
        scales.append(scale.reshape(-1))
        rows.append(np.rint(part / scale[..., None]).astype(np.int8).reshape(-1))
    return np.concatenate(scales), np.concatenate(rows)
