"""What loading, saving and prefilling take, as measured; how deep to pre-load, and what not to load at all.

Rates are fitted to measurements, of which `RateMeter` keeps the latest. Behind them is pure arithmetic, in seconds,
bytes and tokens: the read buffer of layer-wise pre-loading, the time of the pipeline that it makes, how much of a
history is better computed again than loaded, and how many tokens of a context of chunks are computed anew for nothing,
while others load:

    link      [ load 0 ][ load 1 ][ load 2 ][ load 3 ]
    device              [ blend 0 ][ blend 1 ][ blend 2 ][ blend 3 ]      one: some of the chunks' tokens, the new ones

Arguments are the same everywhere: `rates` of model and machine; `history_tokens`, those before all others, which are
loaded; `context_tokens`, of chunks, loaded too; `new_tokens` behind them, which are computed in any case, at least one;
`tier`, where KV is loaded from, layer by layer.

Not here: measuring, moving bytes (transfer), what is stored (storage).
Source: read buffer and its size, CachedAttention (Gao et al., USENIX ATC 2024), section 3.2.1; loading controller of
chunks, CacheBlend (Yao et al., EuroSys 2025), section 5.1.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import scipy.optimize

from ca_jax.errors import check

_KEPT_SAMPLES = 64
_REFIT_SAMPLES = 8  # New ones that make another fit worth its half millisecond.
_ROUNDING = 1e-9  # Relative: closer than that, two times are the same.
Tier = Literal["ssd", "dram"]
"""Where KV is loaded from."""


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


def _as_they_are(history_tokens: int, new_tokens: int) -> tuple[int, int]:
    return history_tokens, new_tokens


def layer_load_s(rates: Rates, num_tokens: int, tier: Tier = "dram") -> float:
    """Seconds from one loaded layer to the next: the paper's `T_load`.

    Layers that come from SSD one by one are on their way to DRAM and to the device side by side. Sessions that are
    fetched whole, before their job begins, are loaded from DRAM.

    Raises:
      ValueError: `ssd`, and nothing has been fetched yet.
    """
    load_s = rates.load.seconds(num_tokens * rates.layer_token_bytes)
    if tier == "dram":
        return load_s
    if rates.fetch is None:
        raise ValueError("rates must have a fetch in them for loads from SSD, got none: nothing was fetched yet")
    return max(load_s, rates.fetch.seconds(num_tokens * rates.num_layers * rates.layer_token_bytes) / rates.num_layers)


def layer_compute_s(rates: Rates, history_tokens: int, new_tokens: int) -> float:
    """Seconds of computing one layer of new tokens over a history on the device: an even share of the prefill."""
    return rates.prefill.seconds(history_tokens, new_tokens) / rates.num_layers


# The read buffer.


def read_buffer_layers(
    rates: Rates,
    history_tokens: int,
    new_tokens: int,
    *,
    max_buffer_bytes: int | None = None,
    padded: Callable[[int, int], tuple[int, int]] = _as_they_are,
) -> int:
    """Layers of the read buffer that hides a load behind its new tokens, 0 to L: the depth for `pipeline_s`.

    In bytes it is `S_buf = B (T_load L_hist - T_pref L_new)`, B the bandwidth that such a load has, what is fixed about
    it included; 0 where computing takes longer than loading.

    That is the smallest depth with which `pipeline_s` is shortest, or one layer less: the formula leaves out that the
    first layer's compute has nothing to hide its load behind.

    Args:
      max_buffer_bytes: cap of the read buffer.
      padded: the (history, new) lengths that are computed for such lengths.

    Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.2.1.
    """
    loading_s = rates.num_layers * layer_load_s(rates, history_tokens)
    share = max(0.0, 1 - rates.prefill.seconds(*padded(history_tokens, new_tokens)) / loading_s) if loading_s else 0.0
    depth = math.ceil(rates.num_layers * share * (1 - _ROUNDING))
    if max_buffer_bytes is None or not depth:
        return depth
    return min(depth, max_buffer_bytes // (rates.layer_token_bytes * history_tokens))


def pipeline_s(
    load_s_per_layer: float,
    compute_s_per_layer: float,
    num_layers: int,
    depth: int,
    head_start_s: float = math.inf,
) -> float:
    """Seconds from when the device is free for a job to the end of its last layer, if nothing else is in the way.

    Layers are loaded one after the other, and computed one after the other, each after its load. A read buffer holds
    `depth` layers and is filled while the last job still runs, from `head_start_s` before its end on. Behind it are two
    regions of the execution buffer, one that is computed on and one that is filled; they are free when the last job has
    ended. So, from time 0 at that end:

        load of layer i begins      when the load of i - 1 has ended, and
          i < depth                 from -head_start_s on
          i >= depth                from 0 on, once layer i - depth - 2 has been computed
        compute of layer i begins   from 0 on, when its load and the compute of i - 1 have ended

    With depth=1 and loading slower than computing, L of loads and C of computes, L1 begins at 0 for want of room:

        link      [ L0 ]     [ L1 ][ L2 ][ L3 ]
        device    last job   [C0]  [C1]  [C2]  [C3]
                             0                    ^ pipeline_s

    More regions than these would not shorten it, for layers that all take the same: where loading is slower, a region
    is free again before the link is, and where computing is slower, the next layer is always there in time.

    Args:
      depth: layers that the read buffer holds; 0 is pre-loading without one, L or more is all layers.
      head_start_s: infinite where the buffer is full in any case; negative where loading begins only after 0.

    Raises:
      ValueError: a time or size that cannot be.

    Source: CachedAttention (Gao et al., USENIX ATC 2024), figures 6 and 7.
    """
    check(0 <= load_s_per_layer < math.inf, "load_s_per_layer", "at least 0", load_s_per_layer)
    check(0 <= compute_s_per_layer < math.inf, "compute_s_per_layer", "at least 0", compute_s_per_layer)
    check(num_layers > 0, "num_layers", "a positive number", num_layers)
    check(depth >= 0, "depth", "at least 0", depth)
    check(head_start_s > -math.inf, "head_start_s", "a number of seconds", head_start_s)
    depth = min(depth, num_layers)
    begin_s = -head_start_s
    rest_begin_s = max(0.0, begin_s + depth * load_s_per_layer)
    # The last layer ends when no layer could be computed later: for one of them, all from it on follow its load without
    # a gap. Within the buffer and behind it that is linear in the layer, so that the ends of both runs will do.
    ends_s = [num_layers * compute_s_per_layer]
    for first, stop, start_s in ((0, depth, begin_s), (depth, num_layers, rest_begin_s)):
        for layer in (first, stop - 1) if first < stop else ():
            loaded_s = start_s + (layer + 1 - first) * load_s_per_layer
            ends_s.append(loaded_s + (num_layers - layer) * compute_s_per_layer)
    return max(ends_s)


def blocking_s(load_s_per_layer: float, compute_s_per_layer: float, num_layers: int) -> float:
    """Seconds of a job without pre-loading: everything is loaded, and then computed."""
    return num_layers * (load_s_per_layer + compute_s_per_layer)


# Passes between decode steps.


def largest_pass(rates: Rates, history_tokens: int, sizes: Sequence[int], budget_s: float) -> int:
    """The most new tokens whose prefill fits a time; the least there is where none does.

    Args:
      sizes: to choose from, ascending, at least one.
      budget_s: seconds.
    """
    fitting = [size for size in sizes if rates.prefill.seconds(history_tokens, size) <= budget_s]
    return max(fitting, default=sizes[0])


# Load or recompute.


def choose_history(
    rates: Rates,
    history_tokens: int,
    new_tokens: int,
    *,
    block_tokens: int,
    depth: int = 0,
    head_start_s: float = math.inf,
    min_gain: float = 0.0,
    padded: Callable[[int, int], tuple[int, int]] = _as_they_are,
) -> int:
    """How many first tokens of a history to load, the rest being prefilled with the new ones: what is fastest.

    Attention is causal: KV of a prefix is good by itself, and what follows it are new tokens. All splits on block
    boundaries are tried, all and none among them.

    Args:
      block_tokens: of the store.
      depth: of the read buffer, in layers.
      head_start_s: as in `pipeline_s`: negative where the KV can be loaded only after that time.
      min_gain: fraction of the time of loading all that a split must save to be chosen.
      padded: the (history, new) lengths that are computed for such lengths.

    Raises:
      ValueError: a size that is not positive, or a gain outside [0, 1).
    """
    for name, value in (("history_tokens", history_tokens), ("new_tokens", new_tokens), ("block_tokens", block_tokens)):
        check(value > 0, name, "a positive number", value)
    check(0 <= min_gain < 1, "min_gain", "a fraction below 1", min_gain)

    def predicted_s(load_tokens: int) -> float:
        compute_s = layer_compute_s(rates, *padded(load_tokens, history_tokens - load_tokens + new_tokens))
        if not load_tokens:
            return rates.num_layers * compute_s
        return pipeline_s(layer_load_s(rates, load_tokens), compute_s, rates.num_layers, depth, head_start_s)

    load_all_s = predicted_s(history_tokens)
    others = ((predicted_s(load_tokens), -load_tokens) for load_tokens in range(0, history_tokens, block_tokens))
    fastest_s, less = min(others)
    return -less if fastest_s < load_all_s * (1 - min_gain) else history_tokens


# Contexts of chunks.


def blend_layer_s(
    rates: Rates, context_tokens: int, new_tokens: int, ratio: float, *, history_tokens: int = 0
) -> float:
    """Seconds of computing one layer: a share of the context's tokens, and the new ones behind it.

    A token of the context that is computed goes through the weights, and attends to all before it. Tokens are taken
    from all of the context, so that each has half of it before it, in the mean. What is fixed about a prefill is the
    new tokens'. With ratio 1 that is a layer of the prefill of all of them.

    Args:
      ratio: share of the context's tokens that is computed anew, in [0, 1]: the paper's `T_recompute` is that part.

    Raises:
      ValueError: a number out of range.
    """
    check(0 <= ratio <= 1, "ratio", "a share in [0, 1]", ratio)
    check(context_tokens > 0, "context_tokens", "a positive number", context_tokens)
    check(new_tokens > 0, "new_tokens", "a positive number", new_tokens)
    check(history_tokens >= 0, "history_tokens", "at least 0", history_tokens)
    context_s = rates.prefill.seconds(history_tokens, context_tokens) - rates.prefill.fixed_s
    return ratio * context_s / rates.num_layers + layer_compute_s(rates, history_tokens + context_tokens, new_tokens)


def choose_ratio(
    rates: Rates, context_tokens: int, new_tokens: int, min_ratio: float, *, history_tokens: int = 0
) -> float:
    """The share of a context's tokens whose recompute is hidden by loading: as much as a layer's load leaves time for.

    Args:
      min_ratio: least share, which quality wants, in [0, 1].

    Returns:
      At least `min_ratio`. 1 where computing everything takes no longer than blending: then nothing is better loaded.

    Raises:
      ValueError: a number out of range.

    Source: CacheBlend (Yao et al., EuroSys 2025), section 5.1, loading controller.
    """
    check(0 <= min_ratio <= 1, "min_ratio", "a share in [0, 1]", min_ratio)
    none_s = blend_layer_s(rates, context_tokens, new_tokens, 0.0, history_tokens=history_tokens)
    all_s = blend_layer_s(rates, context_tokens, new_tokens, 1.0, history_tokens=history_tokens)
    load_s = layer_load_s(rates, history_tokens + context_tokens)
    if load_s >= all_s:
        return 1.0
    ratio = max(min_ratio, (load_s - none_s) / (all_s - none_s)) if all_s > none_s else 1.0
    blend_s = blend_layer_s(rates, context_tokens, new_tokens, ratio, history_tokens=history_tokens)
    # As deep as can be, from when the device is free: the first load, which nothing hides, counts too.
    first_token_s = pipeline_s(load_s, blend_s, rates.num_layers, rates.num_layers, head_start_s=0.0)
    return ratio if first_token_s < rates.num_layers * all_s else 1.0


def choose_tier(rates: Rates, context_tokens: int, new_tokens: int, min_ratio: float) -> Tier:
    """The cheapest tier from which a context loads without delay, if the least share of it is computed anew.

    Args:
      min_ratio: share of the context's tokens that is computed anew, in [0, 1].

    Returns:
      `dram` where no tier does, or where nothing is known of the SSD yet.

    Raises:
      ValueError: a number out of range.

    Source: CacheBlend (Yao et al., EuroSys 2025), section 5.1, figure 10(b).
    """
    compute_s = blend_layer_s(rates, context_tokens, new_tokens, min_ratio)
    if rates.fetch is None or layer_load_s(rates, context_tokens, "ssd") > compute_s:
        return "dram"
    return "ssd"
