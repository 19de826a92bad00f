"""KV coded layer by layer: some tokens of a session as one zstd frame a layer, which can be decoded as it arrives.

    frame    how many are kept apart, u32 | which tokens are NaN, a bit each
             | tokens that are kept apart, u32 [E] | their scales, f32 [E, P, K] | their rows, int8 [E, P, K, H]
             | codes, as `Planes` has them

By the matrices of a block codec, and what a number loses is the same: what it is rounded to is always whole steps. A
layer is predicted from the one or two before it of its group, so layers are decoded in their order. Any number of
tokens may be kept apart, since a frame may be of any size: those that the block codec would keep apart, in all layers.

Not here: matrices and which tokens are unlike the others (storage.codec), who reads objects when (kv.object_transfers).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import zstandard

from ca_jax.storage.codec import KVCodec
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.planes import CodecError, Planes, compressor, decompressed, rows_of
from ca_jax.storage.transform import DecodedSteps

_FORMAT = 1
_COUNT = "<u4"


@dataclasses.dataclass(frozen=True, eq=False)
class LayerCodec:
    """A codec as it codes layers of KV of one layout. Any thread may use it."""

    codec: KVCodec
    layout: KVLayout
    """As `KVCodec.check` accepts it; its blocks do not matter."""

    @property
    def name(self) -> str:
        """SHA-256 of all that decides what it gives, hex."""
        return hashlib.sha256(f"layers {_FORMAT} {self.codec.name}".encode()).hexdigest()

    def encode(self, layers: Sequence[np.ndarray]) -> list[bytes]:
        """Codes all layers of T tokens, `[P, T, K, H]` each; a frame of each."""
        num_tokens = layers[0].shape[1]
        parts = [np.stack([layers[layer] for layer in group.layers]) for group in self.layout.groups]
        steps, is_nan = self.codec.steps_of([part.astype(np.float32, copy=False) for part in parts])
        codes = self.codec.rounded(steps, 1.0)
        apart = np.sort(self.codec.unlike(steps, codes))
        for each in codes:
            each[..., apart] = 0
        frames = []
        for layer, planes in enumerate(self._planes):
            group, index = self.layout.place(layer)
            form = self._form(layer, num_tokens, len(apart))
            payload = np.empty(form.itemsize, np.uint8)
            head, nans, tokens, scales, rows, packed = payload.view(form)[0]
            head[0], tokens[:], nans[:] = len(apart), apart, np.packbits(is_nan)
            of_apart = rows_of([layers[layer][:, apart].swapaxes(0, 1).astype(np.float32)])
            scales.reshape(-1)[:], rows.reshape(-1)[:] = of_apart
            planes.pack(codes[group][index].reshape(-1, num_tokens), packed)
            frames.append(compressor(_window_log(payload.nbytes)).compress(payload.data))
        return frames

    def decoder(self, num_tokens: int) -> LayerDecoder:
        """Decodes the layers of so many tokens."""
        return LayerDecoder(self, num_tokens)

    @functools.cached_property
    def _planes(self) -> list[Planes]:
        """Of each layer."""
        places = (self.layout.place(layer) for layer in range(self.layout.num_layers))
        spreads = (self.codec.groups[group].spread[index].reshape(-1) for group, index in places)
        return [Planes(spread, self.codec.shares_bytes) for spread in spreads]

    def _form(self, layer: int, num_tokens: int, num_apart: int) -> np.dtype:
        """Of a frame before zstd."""
        num_parts, _, num_heads, width = self.layout.layer_shape(layer, num_tokens)
        return np.dtype(
            [
                ("num_apart", _COUNT, (1,)),
                ("nans", "u1", (-(-num_tokens // 8),)),
                ("tokens", "<u4", (num_apart,)),
                ("scales", "<f4", (num_apart, num_parts, num_heads, 1)),
                ("rows", "i1", (num_apart, num_parts, num_heads, width)),
                ("planes", "u1", (self._planes[layer].num_bytes(num_tokens),)),
            ]
        )


def _window_log(num_bytes: int) -> int:
    """Of zstd, for a payload: how many bytes have a code of their own, as a power of 2.

    Of a layer of SmolLM2-135M at 3.1 bits 11 was best for 24 tokens, 12 for 128, 13 for 384 and 14 for 1,152: 3.46,
    3.22, 3.16 and 3.13 bits a number. A block of 128 tokens, which packs all layers together, takes 3.12.
    """
    return min(max((num_bytes.bit_length() + 9) // 2, zstandard.WINDOWLOG_MIN), 15)


class LayerDecoder:
    """Decodes the layers of some tokens, one after the other. For one thread at a time."""

    def __init__(self, codec: LayerCodec, num_tokens: int) -> None:
        self._codec, self._num_tokens = codec, num_tokens
        self._decoded = [DecodedSteps() for _ in codec.codec.groups]
        self._next = 0

    def decode(self, layer: int, data: bytes | memoryview) -> np.ndarray:
        """A layer's KV, `[P, T, K, H]`, but for what rounding lost.

        Args:
          layer: which; each in its turn.
          data: its frame.

        Raises:
          ValueError: it is not the layer's turn.
          CodecError: the frame is damaged, or of another layer or another number of tokens.
        """
        if layer != self._next:
            raise ValueError(f"layer must be {self._next}, the next one, got {layer}")
        codec, num_tokens = self._codec, self._num_tokens
        _, nans, tokens, scales, rows, packed = self._unpacked(layer, data)
        if (tokens >= num_tokens).any():
            raise CodecError(f"layer {layer} must keep apart tokens below {num_tokens}, got {tokens}")
        place, index = codec.layout.place(layer)
        group = codec.codec.groups[place]
        into = np.empty(codec.layout.layer_shape(layer, num_tokens), codec.layout.numpy_dtype)
        codes = codec._planes[layer].unpack(packed, num_tokens).reshape(*group.spread.shape[1:], num_tokens)
        group.decode_layer(index, codes, 1.0, self._decoded[place], into)
        into[:, tokens] = (rows * scales).swapaxes(0, 1)
        into[:, np.unpackbits(nans, count=num_tokens).astype(bool)] = np.nan
        self._next += 1
        return into

    def _unpacked(self, layer: int, data: bytes | memoryview) -> list[np.ndarray]:
        """The arrays of a frame."""
        codec, num_tokens = self._codec, self._num_tokens
        least, most = (codec._form(layer, num_tokens, count).itemsize for count in (0, num_tokens))
        payload = decompressed(data, least, most, f"layer {layer}")
        num_apart = int(payload[:4].view(_COUNT)[0])
        form = codec._form(layer, num_tokens, min(num_apart, num_tokens))
        if num_apart > num_tokens or len(payload) != form.itemsize:
            raise CodecError(f"layer {layer} must be of the bytes of {num_tokens} tokens, {num_apart} of them apart")
        return list(payload.view(form)[0])
