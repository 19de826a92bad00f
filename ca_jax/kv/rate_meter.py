"""Rates as they are measured: samples of transfers and prefills come in, the rates of the last ones come out.

Not here: how rates are fitted (rates), what follows from them (costs, blend_costs), who measures (layer_loader,
async_saver, prefilling, the store's SSD, `Engine.warmup`).
"""

from __future__ import annotations

import collections
import threading

from ca_jax.kv.rates import PrefillSample, Rates, TransferSample

_KEPT_SAMPLES = 64
_REFIT_SAMPLES = 8  # New ones that make another fit worth its half millisecond.


class RateMeter:
    """Keeps the last samples of each kind. Any thread may add; fitting is the engine's thread's.

    Args:
      num_layers: L.
      layer_token_bytes: of one token's KV in one layer.
    """

    def __init__(self, num_layers: int, layer_token_bytes: int) -> None:
        self._num_layers = num_layers
        self._layer_token_bytes = layer_token_bytes
        self._lock = threading.Lock()
        self._loads: collections.deque[TransferSample] = collections.deque(maxlen=_KEPT_SAMPLES)
        self._saves: collections.deque[TransferSample] = collections.deque(maxlen=_KEPT_SAMPLES)
        self._fetches: collections.deque[TransferSample] = collections.deque(maxlen=_KEPT_SAMPLES)
        self._prefills: collections.deque[PrefillSample] = collections.deque(maxlen=_KEPT_SAMPLES)
        self._num_new = 0
        self._rates: Rates | None = None

    def add_load(self, num_bytes: int, seconds: float) -> None:
        """One layer was loaded."""
        self._add_transfer(self._loads, num_bytes, seconds)

    def add_save(self, num_bytes: int, seconds: float) -> None:
        """One layer was saved."""
        self._add_transfer(self._saves, num_bytes, seconds)

    def add_fetch(self, num_bytes: int, seconds: float) -> None:
        """All layers of some sessions were fetched from SSD to DRAM."""
        self._add_transfer(self._fetches, num_bytes, seconds)

    def add_prefill(self, history_tokens: int, new_tokens: int, seconds: float) -> None:
        """All layers of so many tokens, as padded, were computed without waiting for anything else."""
        sample = PrefillSample(history_tokens=history_tokens, new_tokens=new_tokens, seconds=seconds)
        with self._lock:
            self._prefills.append(sample)
            self._num_new += 1

    def forget(self) -> None:
        """Drops all samples: what they were measured on has changed."""
        with self._lock:
            for samples in (self._loads, self._saves, self._fetches, self._prefills):
                samples.clear()
            self._num_new, self._rates = 0, None

    @property
    def rates(self) -> Rates | None:
        """Of the last samples; None while there are none of some kind but fetches."""
        with self._lock:
            samples = tuple(self._loads), tuple(self._saves), tuple(self._prefills)
            fetches = tuple(self._fetches)
            knows_all = self._rates is not None and (self._rates.fetch is not None or not fetches)
            if (knows_all and self._num_new < _REFIT_SAMPLES) or not all(samples):
                return self._rates
            self._num_new = 0
        loads, saves, prefills = samples
        self._rates = Rates.fit(
            num_layers=self._num_layers,
            layer_token_bytes=self._layer_token_bytes,
            loads=loads,
            saves=saves,
            prefills=prefills,
            fetches=fetches,
        )
        return self._rates

    def _add_transfer(self, samples: collections.deque[TransferSample], num_bytes: int, seconds: float) -> None:
        if num_bytes <= 0 or seconds <= 0:
            return  # Below what the clock tells apart.
        with self._lock:
            samples.append(TransferSample(num_bytes=num_bytes, seconds=seconds))
            self._num_new += 1
