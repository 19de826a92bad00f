"""KV coded on its way to disk: a transform of a layer's heads, a few bits a number, packed by zstd.

Keys are stored without position, so that what they have in common is the same wherever they stand: few directions carry
most of them, and of values as well. A codec has, for a layer's KV heads or a bundle of them, a matrix that turns a
token's keys and values into other numbers, which do not go together, in units in which an error of 1 costs the model's
answers the same anywhere. What the layers before say of them is taken away, and what is left is rounded to whole
numbers, which is all that is lost:

    numbers of a bundle  ── less their mean, by a matrix [D, D] ── less what is predicted ── rounded ── zstd ── on disk

Most of what is rounded is 0 or near it, and zstd takes as many bits as it is worth: numbers of one kind lie together,
ordered by how far they spread. Its shortest word is a bit, so two numbers that spread little share a byte. A token that
is unlike those that the codec was made from, as the first of a context is, would take far more than its share, and what
it loses would cost most: such tokens are kept apart, a byte a number and a scale a row. A token of which any number is
none comes back as NaN, all of it. A token is predicted from itself alone, so that no token spoils another.

A block takes at most what the cap of the tier counts for it: one that would take more is rounded more coarsely.

Not here: the matrices (storage.transform), how a codec is made (`ca_jax.recompute.codec_fit`), files (tiers.formats).

Source: the idea is KVTC's (KV cache transform coding); the transform is by what an error costs, and keys are unrotated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import struct
import threading
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
from threadpoolctl import ThreadpoolController

from ca_jax.storage.catalog.file import make_directory, sync_directory
from ca_jax.storage.layout import PAGE_BYTES, KVLayout
from ca_jax.storage.planes import CodecError, Planes, compressor, decompressed, largest_codes, rows_of
from ca_jax.storage.transform import ARRAYS, GroupCodec

_VERSION = 2
_PLAIN = 1  # The version that predicts nothing, and has a byte at least for each number.
_HEAD = struct.Struct("<BBH")  # Version, how much coarser, tokens that are kept apart.
_UNLIKE = 3.5  # Times the energy of other tokens from which one is kept apart.
_COARSER = 2.0 ** (1 / 4)
_MOST_COARSER = 80  # A factor of a million.
_TOKENS_APART = 16  # One in so many may be kept apart.
_KEPT = "codec.npz"  # Beside blocks.
_WINDOW_LOG = 15  # Of zstd.
# What numpy raises where a file is another.
_UNREADABLE = (AttributeError, EOFError, KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile)


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
    version: int = _VERSION
    """1: of a file made before layers were predicted, whose blocks and name stay what they were."""

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
        found = hashlib.sha256(f"{self.version} {self.fingerprint} {self.bits}".encode())
        for _, array in self._arrays():
            found.update(str(array.shape).encode())
            found.update(array.tobytes())
        return found.hexdigest()

    @property
    def shares_bytes(self) -> bool:
        """Whether numbers that spread little do."""
        return self.version != _PLAIN

    @functools.cached_property
    def _planes(self) -> Planes:
        """Of all N numbers."""
        return Planes(np.concatenate([each.spread.reshape(-1) for each in self.groups]), self.shares_bytes)

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
        return self._form(layout).itemsize

    @staticmethod
    def _most_apart(layout: KVLayout) -> int:
        return max(1, layout.block_tokens // _TOKENS_APART)

    def _parts_of(self, payload: np.ndarray, layout: KVLayout) -> list[np.ndarray]:
        """Views of a payload: its head, which tokens are NaN (a bit each), tokens that are kept apart u16 `[E]`, scales
        f32 `[E, R]`, rows int8 `[E, N]`, and codes as `Planes` has them."""
        return list(payload.view(self._form(layout))[0])

    def _form(self, layout: KVLayout) -> np.dtype:
        most = self._most_apart(layout)
        return np.dtype(
            [
                ("head", "u1", (_HEAD.size,)),
                ("nans", "u1", (-(-layout.block_tokens // 8),)),
                ("tokens", "<u2", (most,)),
                ("scales", "<f4", (most, self._num_rows)),
                ("rows", "i1", (most, self._num_numbers)),
                ("planes", "u1", (self._planes.num_bytes(layout.block_tokens),)),
            ]
        )

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
        steps, is_nan = self.steps_of(parts)
        payload = np.zeros(self.payload_bytes(layout), np.uint8)
        head, nans, tokens, scales, rows, planes = self._parts_of(payload, layout)
        nans[:] = np.packbits(is_nan)
        pack = compressor(_WINDOW_LOG).compress
        most_bytes, coarser, apart = self.stored_bytes(layout), 0, None
        while coarser < _MOST_COARSER:
            codes = self.rounded(steps, _COARSER**coarser)
            if apart is None:
                apart = self.unlike(steps, codes)[: self._most_apart(layout)]
                apart.sort()
                tokens[: len(apart)] = apart
                for index, token in enumerate(apart):
                    scales[index], rows[index] = rows_of([part[:, :, token] for part in parts])
            for each in codes:
                each[..., apart] = 0
            coarser += 1
            if any(
                (np.maximum(each.max(-1), -each.min(-1)) > most).any()
                for each, most in zip(codes, self._most, strict=True)
            ):
                continue
            whole = np.concatenate([each.reshape(-1, layout.block_tokens) for each in codes])
            self._planes.pack(whole, planes)
            head[:] = np.frombuffer(_HEAD.pack(self.version, coarser - 1, len(apart)), np.uint8)
            data = pack(payload.data)
            if len(data) <= most_bytes:
                return data, self._sums(payload, whole, layout)
            # A number takes a quarter of a bit less for each time, at most.
            coarser += int(32 * (len(data) - most_bytes) / (self._num_numbers * layout.block_tokens))
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
        head, nans, tokens, scales, rows, planes = self._parts_of(payload, layout)
        _, coarser, num_apart = _HEAD.unpack(head.tobytes())
        whole = self._planes.unpack(planes, layout.block_tokens)
        if sums is not None and not np.array_equal(found := self._sums(payload, whole, layout), sums):
            layer = int(np.argmax(found != sums))
            raise CodecError(f"layer {layer} must have crc32c {sums[layer]:#010x}, got {found[layer]:#010x}")
        is_nan = np.unpackbits(nans, count=layout.block_tokens).astype(bool)
        start = first_row = 0
        for group, part in zip(self.groups, layout.by_group(into), strict=True):
            stop, stop_row = start + group.means.size, first_row + group.means[..., 0].size
            group.decode(whole[start:stop].reshape(*group.spread.shape, -1), _COARSER**coarser, part)
            scale = scales[:num_apart, first_row:stop_row].reshape(num_apart, *group.shape[:-1], 1)
            apart = rows[:num_apart, start:stop].reshape(num_apart, *group.shape) * scale
            part[:, :, tokens[:num_apart]] = np.moveaxis(apart, 0, 2)
            part[:, :, is_nan] = np.nan
            start, first_row = stop, stop_row

    def unpacked(self, data: bytes, layout: KVLayout) -> np.ndarray:
        """A frame's payload, uint8 `[payload_bytes]`.

        Raises:
          CodecError: it is none of this codec's.
        """
        wanted = self.payload_bytes(layout)
        payload = decompressed(data, wanted, wanted, "a coded block")
        version, coarser, num_apart = _HEAD.unpack(payload[: _HEAD.size].tobytes())
        tokens = self._parts_of(payload, layout)[2]
        if version != self.version or coarser >= _MOST_COARSER or num_apart > len(tokens):
            raise CodecError(f"a coded block must begin with {self.version}, got {version}, {coarser}, {num_apart}")
        if (tokens[:num_apart] >= layout.block_tokens).any():
            raise CodecError(f"tokens kept apart must be of the block, got {tokens[:num_apart]}")
        return payload

    # What layers that are coded one by one need as well (storage.layer_codec).

    def steps_of(self, parts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
        """f32 `[l, P, T, K, H]` of each group in steps, `[l, R, D, T]`; and which tokens are no numbers, bool `[T]`.

        The steps of these are 0.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            steps = [group.coded(part) for group, part in zip(self.groups, parts, strict=True)]
        is_nan = ~np.logical_and.reduce([np.isfinite(each).all((0, 1, 2)) for each in steps])
        for each in steps:
            each[..., is_nan] = 0
        return steps, is_nan

    def rounded(self, steps: Sequence[np.ndarray], unit: float) -> list[np.ndarray]:
        """See `GroupCodec.rounded`, of each group."""
        with np.errstate(invalid="ignore", over="ignore"):
            return [group.rounded(each, unit) for group, each in zip(self.groups, steps, strict=True)]

    def unlike(self, steps: Sequence[np.ndarray], codes: Sequence[np.ndarray]) -> np.ndarray:
        """Tokens to keep apart, whose codes do not fit or that are far from all others, int64 `[E]`, the worst first.

        Args:
          steps, codes: of each group `[l, R, D, T]`.
        """
        with np.errstate(over="ignore"):
            each_far = [group.distance(each) for group, each in zip(self.groups, steps, strict=True)]
        far = np.average(each_far, axis=0, weights=[len(group.means) for group in self.groups])
        for each, limit in zip(codes, self._most, strict=True):
            far += np.where((~(np.abs(each) <= limit[..., None])).any((0, 1, 2)), _UNLIKE, 0)
        worst = np.argsort(-far, kind="stable")
        return worst[far[worst] > _UNLIKE]

    @functools.cached_property
    def _most(self) -> list[np.ndarray]:
        """Of each group int16 `[l, R, D]`: the largest code that fits."""
        return [largest_codes(each.spread) for each in self.groups]

    def _sums(self, payload: np.ndarray, whole: np.ndarray, layout: KVLayout) -> np.ndarray:
        """crc32c of each layer's codes, and of all that is not of one layer, uint32 `[L]`."""
        head = payload[: len(payload) - self._planes.num_bytes(layout.block_tokens)]
        of_all, start = crc32c.crc32c(head.data), 0
        sums = np.empty(layout.num_layers, np.uint32)
        for group, of_layout in zip(self.groups, layout.groups, strict=True):
            for layer in of_layout.layers:
                stop = start + group.means[0].size
                sums[layer] = crc32c.crc32c(whole[start:stop].data, of_all)
                start = stop
        return sums

    # Files.

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a .npz file."""
        with Path(path).expanduser().open("wb") as file:  # By a path numpy would give the name an ending.
            fields: dict[str, Any] = {"version": self.version, "fingerprint": self.fingerprint, "bits": self.bits}
            np.savez(file, **(fields | dict(self._arrays())))
            file.flush()
            os.fsync(file.fileno())

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        for index, group in enumerate(self.groups):
            for name in ARRAYS if self.version != _PLAIN else ARRAYS[:3]:
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
                if (version := int(arrays["version"])) not in (_PLAIN, _VERSION):
                    raise ValueError(f"its version must be {_PLAIN} or {_VERSION}, got {version}")
                names = ARRAYS if version != _PLAIN else ARRAYS[:3]
                count = sum(each.startswith("means_") for each in arrays.files)
                groups = [GroupCodec(**{name: arrays[f"{name}_{i}"] for name in names}) for i in range(count)]
                fingerprint, bits = str(arrays["fingerprint"]), float(arrays["bits"])
                return cls(groups=tuple(groups), version=version, fingerprint=fingerprint, bits=bits)
        except FileNotFoundError:
            raise
        except _UNREADABLE as error:
            raise ValueError(f"the file must be of a codec, got {os.fspath(path)}: {error}") from error


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


# How many are coded at a time, and on how many threads each: beside a model that computes on the same cores.
#
# numpy's products are spread over all cores, whose threads wait for each other by spinning. With others on two cores
# (load 6) a block of 5.9 MB took 0.23 to 0.48 s to code so and 0.18 to 0.60 s to decode, on one thread 0.07 and 0.06 s.
# So each product has one thread while blocks are coded, in all of the process, and blocks are coded side by side: no
# more of them than there are cores, so that they end one by one, and a busy machine is not taken for a disk that does
# not answer.

_lock = threading.Lock()
_limits: list[Any] = []  # A place for each that codes now; the first holds the limit, which the last to end takes back.


class Places:
    """Places to code at, of a tier."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(os.cpu_count() or 1)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for a place, and has products take one thread each meanwhile."""
        with self._places, _one_thread_each():
            yield


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    with _lock:
        _limits.append(None if _limits else _controller().limit(limits=1, user_api="blas"))
    try:
        yield
    finally:
        with _lock:
            _limits.pop() if len(_limits) > 1 else _limits.pop().restore_original_limits()


@functools.cache
def _controller() -> ThreadpoolController:
    """Of the libraries that are loaded: numpy's is."""
    return ThreadpoolController()
