"""KV coded on its way to disk: a transform of a layer's heads, a few bits a number, packed by zstd.

Keys are stored without position, so that what they have in common is the same wherever they stand: few directions carry
most of them, and of values as well. A codec has, for a layer's KV heads or a bundle of them, a matrix that turns a
token's keys and values into other numbers, which do not go together, in units in which an error of 1 costs the model's
answers the same anywhere. They are rounded to whole numbers, which is all that is lost:

    numbers of a bundle  ── less their mean, by a matrix [D, D] ──  rounded ── bytes ── zstd ──  a block on disk

Most of what is rounded is 0 or near it, and zstd takes as many bits as it is worth: numbers of one kind lie together,
ordered by how far they spread. A token that is unlike those that the codec was made from, as the first of a context is,
would take far more than its share, and what it loses would cost most: such tokens are kept apart, a byte a number and a
scale a row. A token of which any number is none comes back as NaN, all of it.

A block takes at most what the cap of the tier counts for it: one that would take more is rounded more coarsely.

Not here: how a codec is made (`ca_jax.recompute.codec_fit`), files (tiers.formats).

Source: the idea is KVTC's (KV cache transform coding); the transform is by what an error costs, and keys are unrotated.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import zstandard

from ca_jax.storage.catalog.file import make_directory, sync_directory
from ca_jax.storage.layout import PAGE_BYTES, KVLayout

_VERSION = 1
_HEAD = struct.Struct("<BBH")  # Version, how much coarser, tokens that are kept apart.
_MOST = 127  # Of a whole number that is a byte.
_MOST_WIDE = 32_000  # Of one that is two.
_WIDE_SPREAD = 10.0  # Steps, from which it is.
_UNLIKE = 3.0  # Times the mean square of a token's numbers, in units of their spread, from which it is kept apart.
_LEAST_SPREAD = 0.2  # Steps. What spreads less is 0 but for one number in a hundred, and is left out.
_COARSER = 2.0 ** (1 / 4)
_MOST_COARSER = 80  # A factor of a million.
_TOKENS_APART = 16  # One in so many may be kept apart.
_KEPT = "codec.npz"  # Beside blocks.
# Of zstd: whole numbers have no repetitions to be found, and their distribution changes every few channels.
_PACKING = {"window_log": 15, "hash_log": 6, "min_match": 7, "strategy": zstandard.STRATEGY_FAST}
# What numpy raises where a file is another.
_UNREADABLE = (AttributeError, EOFError, KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile)


class CodecError(ValueError):
    """What was read is not what was coded."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GroupCodec:
    """Of a group of layers `l` that keep P parts of K heads of H numbers.

    KV heads go together in R bundles, with all their parts: D numbers of a bundle, head by head and part by part.

    Raises:
      ValueError: arrays of other shapes, or that are no numbers; a matrix without an inverse.
    """

    means: np.ndarray
    """f32 `[l, P, K, H]`."""
    forward: np.ndarray
    """f32 `[l, R, D, D]`: numbers, less their means, times this are in steps."""
    spread: np.ndarray
    """f32 `[l, R, D]`, the standard deviation of each of those, steps."""
    inverse: np.ndarray = dataclasses.field(init=False)
    """f32 `[l, R, D, D]`."""
    offset: np.ndarray = dataclasses.field(init=False)
    """f32 `[l, R, D, 1]`, what the means become."""

    def __post_init__(self) -> None:
        for name in ("means", "forward", "spread"):
            found = np.ascontiguousarray(getattr(self, name), np.float32)
            if not np.isfinite(found).all():
                raise ValueError(f"{name} of a codec must be numbers, got others")
            object.__setattr__(self, name, found)
        fits = self.means.ndim == 4 and self.spread.ndim == 3 and self.spread.size == self.means.size
        fits = fits and len(self.spread) == len(self.means) and self.forward.shape == (*self.spread.shape, self.width)
        if not fits or self.shape[2] % self.spread.shape[1]:
            raise ValueError(
                f"a codec of means {list(self.means.shape)} must have spread [l, R, D] and matrices [l, R, D, D], got "
                f"{list(self.spread.shape)} and {list(self.forward.shape)}"
            )
        try:
            inverse = np.linalg.inv(self.forward.astype(np.float64)).astype(np.float32)
        except np.linalg.LinAlgError as error:
            raise ValueError("each matrix of a codec must have an inverse, got one without") from error
        object.__setattr__(self, "inverse", inverse)
        means = self.bundled(self.means[:, :, None])[..., 0]
        object.__setattr__(self, "offset", np.einsum("lrd,lrdj->lrj", means, self.forward)[..., None])

    @property
    def shape(self) -> tuple[int, ...]:
        """`(l, P, K, H)`."""
        return np.shape(self.means)

    @property
    def width(self) -> int:
        """D."""
        return int(self.spread.shape[-1])

    def bundled(self, part: np.ndarray) -> np.ndarray:
        """`[l, P, T, K, H]` as bundles `[l, R, D, T]`."""
        num_layers, _, num_tokens = part.shape[:3]
        return part.transpose(0, 3, 1, 4, 2).reshape(num_layers, -1, self.width, num_tokens)

    def parted(self, bundles: np.ndarray) -> np.ndarray:
        """Bundles `[l, R, T, D]` as a view `[l, P, T, K, H]` or a copy of it."""
        num_layers, num_parts, num_heads, width = self.shape
        num_bundles, num_tokens = bundles.shape[1:3]
        heads = bundles.reshape(num_layers, num_bundles, num_tokens, num_heads // num_bundles, num_parts, width)
        return heads.transpose(0, 4, 2, 1, 3, 5).reshape(num_layers, num_parts, num_tokens, num_heads, width)

    def coded(self, part: np.ndarray) -> np.ndarray:
        """`[l, P, T, K, H]` in steps, `[l, R, D, T]`."""
        return np.matmul(np.swapaxes(self.forward, -1, -2), self.bundled(part)) - self.offset

    def decoded(self, steps: np.ndarray) -> np.ndarray:
        """What was `[l, R, D, T]` in steps, `[l, P, T, K, H]`."""
        found = self.parted(np.matmul(np.swapaxes(steps, -1, -2), self.inverse))
        found += self.means[:, :, None]
        return found


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KVCodec:
    """How one model's KV is coded. L layers, T tokens of a block, N numbers of a token in all layers.

    Raises:
      ValueError: no groups, or bits that are not above 0.
    """

    groups: tuple[GroupCodec, ...]
    """As the layout has them."""
    fingerprint: str
    """Of the weights."""
    bits: float
    """Most that a number takes on disk, in the mean over a block; the cap of the tier counts as many."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups or not 0 < self.bits <= 32:
            raise ValueError(f"a codec must have groups and bits above 0, up to 32, got {self.bits} bits")

    def check(self, layout: KVLayout, fingerprint: str) -> None:
        """Refuses KV of another model, and such as is int8 already.

        Raises:
          ValueError: it is.
        """
        if layout.dtype == "int8":
            raise ValueError("KV that a codec codes must be at rest as it is computed, got int8")
        wanted = [each.shape for each in self.groups]
        found = [(len(each.layers), each.num_parts, each.num_kv_heads, each.head_dim) for each in layout.groups]
        if found != wanted or not fingerprint.startswith(self.fingerprint):
            raise ValueError(
                f"the codec must be of the model with fingerprint {fingerprint[:12]} and KV {found}, got one of "
                f"{self.fingerprint[:12]} and {wanted}"
            )

    @functools.cached_property
    def name(self) -> str:
        """SHA-256 of all that decides what it gives, hex."""
        found = hashlib.sha256(f"{_VERSION} {self.fingerprint} {self.bits}".encode())
        for group in self.groups:
            for array in (group.means, group.forward, group.spread):
                found.update(str(array.shape).encode())
                found.update(array.tobytes())
        return found.hexdigest()

    @functools.cached_property
    def _order(self) -> np.ndarray:
        """int64 `[C]`: which of the N numbers are kept, those that spread most first."""
        spread = np.concatenate([each.spread.reshape(-1) for each in self.groups])
        order = np.argsort(-spread, kind="stable")
        return order[: np.count_nonzero(spread > _LEAST_SPREAD)]

    @functools.cached_property
    def _num_wide(self) -> int:
        """W: how many of those kept, the first, are two bytes each."""
        return int(sum(np.count_nonzero(each.spread > _WIDE_SPREAD) for each in self.groups))

    @property
    def _num_rows(self) -> int:
        """Rows of a token: each head of each part of each layer."""
        return sum(each.means[..., 0].size for each in self.groups)

    @property
    def _num_numbers(self) -> int:
        """N."""
        return sum(each.means.size for each in self.groups)

    # How a block lies.

    def stored_bytes(self, layout: KVLayout) -> int:
        """Most that one block takes on disk, whole pages."""
        return -(-int(self._num_numbers * layout.block_tokens * self.bits / 8) // PAGE_BYTES) * PAGE_BYTES

    def payload_bytes(self, layout: KVLayout) -> int:
        """Of a block before zstd: a zarr3 chunk of bytes."""
        apart = self._most_apart(layout) * (2 + 4 * self._num_rows + self._num_numbers)
        codes = (len(self._order) + self._num_wide) * layout.block_tokens
        return _HEAD.size + -(-layout.block_tokens // 8) + apart + codes

    @staticmethod
    def _most_apart(layout: KVLayout) -> int:
        return max(1, layout.block_tokens // _TOKENS_APART)

    def _parts_of(self, payload: np.ndarray, layout: KVLayout) -> tuple[np.ndarray, ...]:
        """Views of a payload: its head, which tokens are NaN (a bit each), tokens that are kept apart u16 `[E]`, scales
        f32 `[E, R]`, rows int8 `[E, N]`, low bytes of codes int8 `[C, T]` and high ones int8 `[W, T]`."""
        most, at = self._most_apart(layout), _HEAD.size
        views: list[np.ndarray] = []
        for dtype, shape in (
            (np.dtype(np.uint8), (-(-layout.block_tokens // 8),)),
            (np.dtype("<u2"), (most,)),
            (np.dtype("<f4"), (most, self._num_rows)),
            (np.dtype(np.int8), (most, self._num_numbers)),
            (np.dtype(np.int8), (len(self._order), layout.block_tokens)),
            (np.dtype(np.int8), (self._num_wide, layout.block_tokens)),
        ):
            size = dtype.itemsize * int(np.prod(shape))
            views.append(payload[at : at + size].view(dtype).reshape(shape))
            at += size
        return payload[: _HEAD.size], *views

    # Coding.

    def encode(self, block: np.ndarray, layout: KVLayout) -> tuple[bytes, np.ndarray]:
        """Codes a block.

        Args:
          block: `[*layout.block_shape]`, C-contiguous.
          layout: of the block.

        Returns:
          A zstd frame of at most `stored_bytes`; and checksums, uint32 `[L]`, that `decode` holds it against.

        Raises:
          CodecError: it does not get small enough, however coarse: more of its tokens are huge than may be kept apart.
        """
        parts = [each.astype(np.float32, copy=False) for each in layout.by_group(block)]
        with np.errstate(invalid="ignore", over="ignore"):
            steps = [group.coded(part) for group, part in zip(self.groups, parts, strict=True)]  # [l, R, D, T]
        is_nan, apart = self._unlike(steps, self._most_apart(layout))
        for each in steps:
            each[..., apart] = 0
            each[..., is_nan] = 0
        largest = max(float(each.max()) for each in self._over(steps))
        payload = np.zeros(self.payload_bytes(layout), np.uint8)
        head, nans, tokens, scales, rows, low, high = self._parts_of(payload, layout)
        nans[:] = np.packbits(is_nan)
        tokens[: len(apart)] = apart
        for index, token in enumerate(apart):
            scales[index], rows[index] = _rows_of([part[:, :, token] for part in parts])
        parameters = zstandard.ZstdCompressionParameters.from_level(1, **_PACKING)
        compressor = zstandard.ZstdCompressor(compression_params=parameters)
        most_bytes = self.stored_bytes(layout)
        for coarser in range(_MOST_COARSER):
            unit = _COARSER**coarser
            if largest > unit:
                continue
            whole = np.concatenate(
                [np.rint(each / unit).astype(np.int16).reshape(-1, layout.block_tokens) for each in steps]
            )
            codes = whole[self._order]
            low[:] = codes.astype(np.int8)  # The low byte, as a number of its own.
            high[:] = (codes[: self._num_wide] - low[: self._num_wide]) >> 8
            head[:] = np.frombuffer(_HEAD.pack(_VERSION, coarser, len(apart)), np.uint8)
            data = compressor.compress(payload.data)
            if len(data) <= most_bytes:
                return data, self._sums(payload, self._scattered(low, high), layout)
        raise CodecError(f"a coded block must take at most {most_bytes} bytes, and takes more however coarse")

    def decode(self, data: bytes, layout: KVLayout, into: np.ndarray, sums: np.ndarray | None = None) -> None:
        """Writes what `encode` coded, but for what rounding lost.

        Args:
          data: the frame.
          layout: of the block.
          into: `[*layout.block_shape]`, C-contiguous. After an error it holds anything.
          sums: that `encode` gave; None: only its form is checked.

        Raises:
          CodecError: it is another block, or was changed.
        """
        payload = self.unpacked(data, layout)
        head, nans, tokens, scales, rows, low, high = self._parts_of(payload, layout)
        _, coarser, num_apart = _HEAD.unpack(head.tobytes())
        whole = self._scattered(low, high)
        if sums is not None and not np.array_equal(found := self._sums(payload, whole, layout), sums):
            layer = int(np.argmax(found != sums))
            raise CodecError(f"layer {layer} must have crc32c {sums[layer]:#010x}, got {found[layer]:#010x}")
        unit, start = np.float32(_COARSER**coarser), 0
        for group, part in zip(self.groups, layout.by_group(into), strict=True):
            stop = start + group.means.size
            steps = whole[start:stop].astype(np.float32).reshape(*group.spread.shape, layout.block_tokens)
            steps *= unit
            part[:] = group.decoded(steps)
            start = stop
        parts = layout.by_group(into)
        for index in range(num_apart):
            self._put_rows(parts, int(tokens[index]), scales[index], rows[index])
        for token in np.flatnonzero(np.unpackbits(nans, count=layout.block_tokens)):
            for part in parts:
                part[:, :, token] = np.nan

    def unpacked(self, data: bytes, layout: KVLayout) -> np.ndarray:
        """A frame's payload, uint8 `[payload_bytes]`.

        Raises:
          CodecError: it is none of this codec's.
        """
        wanted = self.payload_bytes(layout)
        try:
            found = zstandard.get_frame_parameters(data).content_size
            if found != wanted:
                raise CodecError(f"a coded block must be of {wanted} bytes, got {found}")
            payload = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
        except zstandard.ZstdError as error:
            raise CodecError(f"a coded block must be a frame of zstd, got another: {error}") from error
        version, coarser, num_apart = _HEAD.unpack(payload[: _HEAD.size].tobytes())
        tokens = self._parts_of(payload, layout)[2]
        if version != _VERSION or coarser >= _MOST_COARSER or num_apart > len(tokens):
            raise CodecError(f"a coded block must begin with {_VERSION}, got {version}, {coarser}, {num_apart}")
        if (tokens[:num_apart] >= layout.block_tokens).any():
            raise CodecError(f"tokens kept apart must be of the block, got {tokens[:num_apart]}")
        return payload

    def _unlike(self, steps: list[np.ndarray], most: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that are no numbers, bool `[T]`; those to keep apart, large or far from all others, int64 `[E]`."""
        squares, largest = np.zeros(steps[0].shape[-1]), np.zeros(steps[0].shape[-1])
        with np.errstate(invalid="ignore", over="ignore"):
            for group, each, over in zip(self.groups, steps, self._over(steps), strict=True):
                scaled = each * (1 / np.maximum(group.spread, _LEAST_SPREAD))[..., None]
                squares += np.square(scaled, dtype=np.float64).sum((0, 1, 2))
                largest = np.maximum(largest, over.max((0, 1, 2)))
        is_nan = ~np.isfinite(squares)
        far = np.where(is_nan, 0, squares / self._num_numbers)
        far += np.where(largest > 1, _UNLIKE, 0)
        worst = np.argsort(-far, kind="stable")[:most]
        return is_nan, np.sort(worst[far[worst] > _UNLIKE])

    def _over(self, steps: list[np.ndarray]) -> Iterator[np.ndarray]:
        """How large numbers are, times what fits in their bytes."""
        for group, each in zip(self.groups, steps, strict=True):
            most = np.where(group.spread > _WIDE_SPREAD, _MOST_WIDE, _MOST) + 0.49
            yield np.abs(each) * (1 / most)[..., None]

    def _scattered(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """int16 `[N, T]`: codes where their numbers are, and 0 where none is kept."""
        codes = low.astype(np.int16)
        codes[: len(high)] += high.astype(np.int16) << 8
        whole = np.zeros((self._num_numbers, codes.shape[1]), np.int16)
        whole[self._order] = codes
        return whole

    def _sums(self, payload: np.ndarray, whole: np.ndarray, layout: KVLayout) -> np.ndarray:
        """crc32c of each layer's codes, and of all that is not of one layer, uint32 `[L]`."""
        head = payload[: len(payload) - (len(self._order) + self._num_wide) * layout.block_tokens]
        of_all, start = crc32c.crc32c(head.data), 0
        sums = np.empty(layout.num_layers, np.uint32)
        for group, of_layout in zip(self.groups, layout.groups, strict=True):
            for layer in of_layout.layers:
                stop = start + group.means[0].size
                sums[layer] = crc32c.crc32c(whole[start:stop].data, of_all)
                start = stop
        return sums

    def _put_rows(self, parts: list[np.ndarray], token: int, scales: np.ndarray, rows: np.ndarray) -> None:
        scale_at = row_at = 0
        for group, part in zip(self.groups, parts, strict=True):
            scale = scales[scale_at : (scale_at := scale_at + group.means[..., 0].size)]
            row = rows[row_at : (row_at := row_at + group.means.size)]
            part[:, :, token] = row.reshape(group.shape) * scale.reshape(group.shape[:-1])[..., None]

    # Files.

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a .npz file."""
        with Path(path).expanduser().open("wb") as file:  # By a path numpy would give the name an ending.
            fields: dict[str, Any] = {"version": _VERSION, "fingerprint": self.fingerprint, "bits": self.bits}
            np.savez(file, **(fields | dict(self._arrays())))
            file.flush()
            os.fsync(file.fileno())

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        for index, group in enumerate(self.groups):
            for name in ("means", "forward", "spread"):
                yield f"{name}_{index}", getattr(group, name)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KVCodec:
        """Reads what `save` wrote.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file is another, or of another version.
        """
        try:
            with np.load(Path(path).expanduser(), allow_pickle=False) as arrays:
                if (version := int(arrays["version"])) != _VERSION:
                    raise ValueError(f"its version must be {_VERSION}, got {version}")
                names = ("means", "forward", "spread")
                count = sum(each.startswith("means_") for each in arrays.files)
                groups = [GroupCodec(**{name: arrays[f"{name}_{i}"] for name in names}) for i in range(count)]
                return cls(groups=tuple(groups), fingerprint=str(arrays["fingerprint"]), bits=float(arrays["bits"]))
        except FileNotFoundError:
            raise
        except _UNREADABLE as error:
            raise ValueError(f"the file must be of a codec, got {os.fspath(path)}: {error}") from error


def _rows_of(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A token's numbers `[l, P, K, H]` of each group as scales f32 `[R]` and int8 `[N]`."""
    scales, rows = [], []
    for part in parts:
        largest = np.abs(part).max(-1)
        scale = np.where(largest > 0, largest / _MOST, 1).astype(np.float32)
        scales.append(scale.reshape(-1))
        rows.append(np.rint(part / scale[..., None]).astype(np.int8).reshape(-1))
    return np.concatenate(scales), np.concatenate(rows)


def keep_codec(codec: KVCodec, directory: Path) -> None:
    """Keeps a codec beside the blocks that it codes, so that tools can read them."""
    path = directory / _KEPT
    if path.exists():
        return
    make_directory(directory)
    temporary = path.with_name(f".{_KEPT}.{os.getpid()}")
    codec.save(temporary)
    temporary.replace(path)
    sync_directory(directory)


def kept_codec(directory: Path, name: str) -> KVCodec | None:
    """The codec of that name that lies beside blocks; none for no name.

    Raises:
      ValueError: there is none, or another.
    """
    if not name:
        return None
    try:
        found = KVCodec.load(directory / _KEPT)
    except FileNotFoundError as error:
        raise ValueError(f"{directory} must hold the codec {name[:12]} of its blocks, got no {_KEPT}") from error
    if found.name != name:
        raise ValueError(f"{directory / _KEPT} must be the codec {name[:12]}, got {found.name[:12]}")
    return found
