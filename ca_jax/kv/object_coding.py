"""KV coded on its way to objects that replicas share, and decoded on its way back: on which threads.

A publish codes on its own thread, an object at a time. What comes back is decoded on as many threads as there are
cores: objects side by side, of each one layer behind the other. A product has one thread, as for blocks on SSD.

Not here: the codec (storage.layer_codec), when objects are read and written (object_transfers).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from ca_jax.kv.threads import Threads
from ca_jax.storage.codec import KVCodec, Places
from ca_jax.storage.layer_codec import LayerCodec
from ca_jax.storage.layout import KVLayout

T = TypeVar("T")


class ObjectCoding:
    """Codes objects of one layout. Any thread may use it."""

    def __init__(self, codec: LayerCodec) -> None:
        self.codec = codec
        """Of the objects."""
        self.places = Places()
        """Places to code at."""
        self.threads = Threads(os.cpu_count() or 1, "ca_jax-decoding")
        """Those that decode."""

    @classmethod
    def load(cls, path: str, layout: KVLayout, fingerprint: str) -> ObjectCoding:
        """By the codec in a file, for KV of that layout, of weights of that fingerprint.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is no codec, or one of another model, or the KV is int8.
        """
        codec = KVCodec.load(path)
        codec.check(layout, fingerprint)
        return cls(LayerCodec(codec, layout))

    def namespace(self, salt: bytes) -> str:
        """Of objects that are coded so, where `salt` names weights, layout and positions of the KV; hex."""
        return hashlib.sha256(salt + self.codec.name.encode()).hexdigest()

    def encode(self, layers: Sequence[np.ndarray]) -> list[bytes]:
        """See `LayerCodec.encode`. Waits for a place."""
        with self.places.taken():
            return self.codec.encode(layers)

    def close(self) -> None:
        """Ends the threads, once they have done what was begun."""
        self.threads.close()


class Decoding:
    """One object of so many tokens, which is about to be read; its layers are decoded one behind the other.

    For one thread, but for `decode`.
    """

    def __init__(self, coding: ObjectCoding, num_tokens: int) -> None:
        self._coding = coding
        self._decoder = coding.codec.decoder(num_tokens)
        self._last: Future[object] | None = None

    def begin(self, bring: Callable[[], T]) -> Callable[[], T]:
        """Has a thread call what decodes the next layers, behind what was begun before. What is returned waits for it.

        It raises what `bring` raises, and what that raised which was begun before.
        """
        before = self._last

        def run() -> T:
            if before is not None:  # It was begun first, so that a thread is at it, or was.
                before.result()
            return bring()

        self._last = future = self._coding.threads.submit(run)
        return future.result

    def decode(self, layer: int, data: memoryview) -> np.ndarray:
        """See `LayerDecoder.decode`. Waits for a place."""
        with self._coding.places.taken():
            return self._decoder.decode(layer, data)
