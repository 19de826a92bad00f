"""How long transfers and prefills take: fitted to what was measured, and the engine's latest measurements.

Not here: what follows from rates (costs), who measures.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import scipy.optimize


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillSample:
    """One measured prefill of all layers, its history on the device already.

    Raises:
      ValueError: a number of tokens that cannot be, or a time that is not positive.
    """

    history_tokens: int
    """Of history, as padded."""
    new_tokens: int
    """Prefilled, as padded."""
    seconds: float
    """What that took."""

    def __post_init__(self) -> None:
        check(self.history_tokens >= 0, "history_tokens", "at least 0", self.history_tokens)
        check(self.new_tokens > 0, "new_tokens", "at least 1", self.new_tokens)
        check(0 < self.seconds < math.inf, "seconds", "a positive number", self.seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferRate:
    """A link that makes one transfer after the other: `seconds = fixed_s + num_bytes / bytes_per_s`.

    Raises:
      ValueError: a rate that is not positive, or a negative time.
    """

    bytes_per_s: float
    """Bandwidth; infinite where bytes cost nothing."""
    fixed_s: float = 0.0
    """Of each transfer, however small."""

    def __post_init__(self) -> None:
        check(self.bytes_per_s > 0, "bytes_per_s", "a positive number", self.bytes_per_s)
        check(0 <= self.fixed_s < math.inf, "fixed_s", "at least 0", self.fixed_s)

    @classmethod
    def fit(cls, samples: Iterable[tuple[int, float]]) -> TransferRate:
        """The rate of least relative error. Samples of one size give a bandwidth alone.

        Args:
          samples: bytes and seconds of transfers, both positive.

        Raises:
          ValueError: there is no sample.
        """
        samples = tuple(samples)
        byte_s, fixed_s = fit_times([(size, 1.0) for size, _ in samples], [seconds for _, seconds in samples])
        return cls(bytes_per_s=1 / byte_s if byte_s else math.inf, fixed_s=fixed_s)

    def seconds(self, num_bytes: float) -> float:
        """Of one transfer; nothing for no bytes."""
        return self.fixed_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillRate:
    """Prefill of all layers: `seconds = fixed_s + token_s * new + pair_s * new * (history + new / 2)`.

    The three are what is paid once, what goes through the weights, and the (query, key) pairs of attention. Embedding
    and logits are within the first two.

    Raises:
      ValueError: a time that is negative.
    """

    fixed_s: float = 0.0
    """Of each prefill, however short."""
    token_s: float
    """Of each new token."""
    pair_s: float = 0.0
    """Of each pair of a new token and one that it attends to."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check(0 <= getattr(self, field.name) < math.inf, field.name, "at least 0", getattr(self, field.name))

    @classmethod
    def fit(cls, samples: Iterable[PrefillSample]) -> PrefillRate:
        """The rate of least relative error. Samples of one size give `token_s` alone.

        Raises:
          ValueError: there is no sample.
        """
        samples = tuple(samples)
        rows = [(each.new_tokens, _num_pairs(each.history_tokens, each.new_tokens), 1.0) for each in samples]
        token_s, pair_s, fixed_s = fit_times(rows, [each.seconds for each in samples])
        return cls(fixed_s=fixed_s, token_s=token_s, pair_s=pair_s)

    def seconds(self, history_tokens: int, new_tokens: int) -> float:
        """Of one prefill with its history on the device."""
        return self.fixed_s + self.token_s * new_tokens + self.pair_s * _num_pairs(history_tokens, new_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What one model on one machine does per second.

    Raises:
      ValueError: a size that is not positive.
    """

    num_layers: int
    """L."""
    layer_token_bytes: int
    """Of one token's keys and values in one layer."""
    load: TransferRate
    """Of one layer, from DRAM to the device."""
    save: TransferRate
    """Of one layer, from the device to DRAM."""
    prefill: PrefillRate
    """Of all layers."""
    fetch: TransferRate | None = None
    """Of all layers at once, from SSD to DRAM; None where nothing has been fetched."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "layer_token_bytes"):
            check(getattr(self, name) > 0, name, "a positive number", getattr(self, name))


def _num_pairs(history_tokens: int, new_tokens: int) -> float:
    return new_tokens * (history_tokens + new_tokens / 2)


def fit_times(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Times >= 0 of the terms that measured times are sums of: those of least relative error.

    Terms that no sample tells apart are the first column's.

    Args:
      rows: how much of each term is in each measured time; every term is in one at least.

    Raises:
      ValueError: there is no sample.
    """
    if not rows:
        raise ValueError("a rate must be fitted to at least one sample, got none")
    weighted = np.array(rows, float) / np.array(seconds)[:, None]  # Of relative errors: short times count as well.
    scale = weighted.max(axis=0)
    best, _ = scipy.optimize.nnls(weighted / scale, np.ones(len(weighted)))
    return [float(value) for value in best / scale]


def check(is_so: bool, name: str, wanted: str, found: float) -> None:
    """Raises ValueError that says what was wanted of a number and what was found, if it is not so."""
    if not is_so:
        raise ValueError(f"{name} must be {wanted}, got {found}")


_KEPT_SAMPLES = 64
_REFIT_SAMPLES = 8  # New ones that make another fit worth its half millisecond.


class RateMeter:
    """Keeps the last samples of each kind. Any thread may add; fitting is the engine's thread's."""

    def __init__(self, num_layers: int, layer_token_bytes: int) -> None:
        self._num_layers = num_layers
        self._layer_token_bytes = layer_token_bytes
        self._lock = threading.Lock()
        self._samples: dict[str, collections.deque[Any]] = {
            kind: collections.deque(maxlen=_KEPT_SAMPLES) for kind in ("load", "save", "fetch", "prefill")
        }
        self._num_new = 0
        self._rates: Rates | None = None

    def add_transfer(self, kind: Literal["load", "save", "fetch"], num_bytes: int, seconds: float) -> None:
        """One layer was loaded or saved, or all layers of some sessions were fetched from SSD to DRAM."""
        if num_bytes <= 0 or seconds <= 0:
            return  # Below what the clock tells apart.
        with self._lock:
            self._samples[kind].append((num_bytes, seconds))
            self._num_new += 1

    add_load = functools.partialmethod(add_transfer, "load")
    add_save = functools.partialmethod(add_transfer, "save")
    add_fetch = functools.partialmethod(add_transfer, "fetch")

    def add_prefill(self, history_tokens: int, new_tokens: int, seconds: float) -> None:
        """All layers of so many tokens, as padded, were computed without waiting for anything else."""
        sample = PrefillSample(history_tokens=history_tokens, new_tokens=new_tokens, seconds=seconds)
        with self._lock:
            self._samples["prefill"].append(sample)
            self._num_new += 1

    def forget(self) -> None:
        """Drops all samples: what they were measured on has changed."""
        with self._lock:
            for samples in self._samples.values():
                samples.clear()
            self._num_new, self._rates = 0, None

    @property
    def rates(self) -> Rates | None:
        """Fitted to the last samples; None until there are loads, saves and prefills."""
        with self._lock:
            loads, saves, fetches, prefills = (tuple(samples) for samples in self._samples.values())
            knows_all = self._rates is not None and (self._rates.fetch is not None or not fetches)
            if (knows_all and self._num_new < _REFIT_SAMPLES) or not (loads and saves and prefills):
                return self._rates
            self._num_new = 0
        self._rates = Rates(
            num_layers=self._num_layers,
            layer_token_bytes=self._layer_token_bytes,
            load=TransferRate.fit(loads),
            save=TransferRate.fit(saves),
            prefill=PrefillRate.fit(prefills),
            fetch=TransferRate.fit(fetches) if fetches else None,
        )
        return self._rates
