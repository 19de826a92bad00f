"""What loading, saving and prefilling will take; how deep to pre-load, and what not to load at all.

Pure arithmetic over measured rates, in seconds, bytes and tokens: the read buffer of layer-wise pre-loading, the time
of the pipeline that it makes, and how much of a history is better computed again than loaded.

Not here: rates and how they are fitted (rates), moving bytes (transfer), what is stored (storage).
Source: read buffer and its size, CachedAttention (Gao et al., USENIX ATC 2024), section 3.2.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from ca_jax.kv.rates import Rates, check

_ROUNDING = 1e-9  # Relative: closer than that, two times are the same.


def _as_they_are(history_tokens: int, new_tokens: int) -> tuple[int, int]:
    return history_tokens, new_tokens


def layer_load_s(rates: Rates, history_tokens: int) -> float:
    """Seconds of loading one layer of a history."""
    return rates.load.seconds(history_tokens * rates.layer_token_bytes)


def load_s(rates: Rates, history_tokens: int) -> float:
    """Seconds of loading all layers of a history: the paper's `T_load L_hist`."""
    return rates.num_layers * layer_load_s(rates, history_tokens)


def prefill_s(rates: Rates, history_tokens: int, new_tokens: int) -> float:
    """Seconds of computing new tokens over a history on the device: the paper's `T_pref L_new`."""
    return rates.prefill.seconds(history_tokens, new_tokens)


def layer_compute_s(rates: Rates, history_tokens: int, new_tokens: int) -> float:
    """Seconds of computing one layer of new tokens: an even share of the prefill."""
    return prefill_s(rates, history_tokens, new_tokens) / rates.num_layers


# The read buffer.


def read_buffer_bytes(rates: Rates, history_tokens: int, new_tokens: int) -> int:
    """Size of the read buffer that hides a load behind its new tokens: `S_buf = B (T_load L_hist - T_pref L_new)`.

    B is the bandwidth that such a load has, what is fixed about it included. 0 where computing takes longer than
    loading.

    Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.2.1.
    """
    num_bytes = rates.num_layers * rates.layer_token_bytes * history_tokens
    share = _share_to_buffer(rates, history_tokens, new_tokens, _as_they_are)
    return math.ceil(num_bytes * share * (1 - _ROUNDING))


def read_buffer_layers(
    rates: Rates,
    history_tokens: int,
    new_tokens: int,
    *,
    max_buffer_bytes: int | None = None,
    padded: Callable[[int, int], tuple[int, int]] = _as_they_are,
) -> int:
    """The same in layers, 0 to L: the depth for `pipeline_s`.

    It is `best_depth`, or one layer less: the formula leaves out that the first layer's compute has nothing to hide
    its load behind.

    Args:
      rates: of model and machine.
      history_tokens: to load.
      new_tokens: to prefill.
      max_buffer_bytes: cap of the read buffer.
      padded: the (history, new) lengths that are computed for such lengths.
    """
    share = _share_to_buffer(rates, history_tokens, new_tokens, padded)
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
      load_s_per_layer: of the link.
      compute_s_per_layer: of the device.
      num_layers: L.
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


def best_depth(
    load_s_per_layer: float, compute_s_per_layer: float, num_layers: int, head_start_s: float = math.inf
) -> int:
    """The smallest depth, 0 to L, with which `pipeline_s` is shortest, by trying all."""
    times_s = [
        pipeline_s(load_s_per_layer, compute_s_per_layer, num_layers, depth, head_start_s)
        for depth in range(num_layers + 1)
    ]
    shortest_s = min(times_s) * (1 + _ROUNDING)
    return next(depth for depth, time_s in enumerate(times_s) if time_s <= shortest_s)


# Passes between decode steps.


def largest_pass(rates: Rates, history_tokens: int, sizes: Sequence[int], budget_s: float) -> int:
    """The most new tokens whose prefill fits a time; the least there is where none does.

    Args:
      rates: of model and machine.
      history_tokens: before them, on the device.
      sizes: to choose from, ascending, at least one.
      budget_s: seconds.
    """
    fitting = [size for size in sizes if prefill_s(rates, history_tokens, size) <= budget_s]
    return max(fitting, default=sizes[0])


# Load or recompute.


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryPlan:
    """What is done about a stored history: a prefix of it is loaded, the rest is prefilled with the new tokens."""

    load_tokens: int
    """The first ones, to load."""
    recompute_tokens: int
    """Those behind them, to prefill."""
    predicted_s: float
    """What that will take, new tokens included."""

    @property
    def kind(self) -> Literal["load", "mix", "recompute"]:
        """The choice in a word."""
        if not self.load_tokens:
            return "recompute"
        return "mix" if self.recompute_tokens else "load"


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
) -> HistoryPlan:
    """Loads all of a history, recomputes all of it, or loads a prefix and recomputes the rest: what is fastest.

    Attention is causal: KV of a prefix is good by itself, and what follows it are new tokens. All splits on block
    boundaries are tried.

    Args:
      rates: of model and machine.
      history_tokens: stored, at least one.
      new_tokens: to prefill in any case, at least one.
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

    def plan(load_tokens: int) -> HistoryPlan:
        rest = history_tokens - load_tokens
        compute_s = layer_compute_s(rates, *padded(load_tokens, rest + new_tokens))
        predicted_s = rates.num_layers * compute_s
        if load_tokens:
            predicted_s = pipeline_s(layer_load_s(rates, load_tokens), compute_s, rates.num_layers, depth, head_start_s)
        return HistoryPlan(load_tokens=load_tokens, recompute_tokens=rest, predicted_s=predicted_s)

    load_all = plan(history_tokens)
    others = (plan(load_tokens) for load_tokens in range(0, history_tokens, block_tokens))
    fastest = min(others, key=lambda each: (each.predicted_s, -each.load_tokens))
    return fastest if fastest.predicted_s < load_all.predicted_s * (1 - min_gain) else load_all


# Measured against predicted.


def prediction_error(predicted_s: float, measured_s: float) -> float:
    """How far a prediction was off, as a fraction of what was measured; positive where it was too long.

    Raises:
      ValueError: `measured_s` is not positive.
    """
    check(measured_s > 0, "measured_s", "a positive number", measured_s)
    return predicted_s / measured_s - 1


def hidden_fraction(total_s: float, compute_s: float, transfer_s: float) -> float:
    """The fraction of a transfer that did not lengthen what it ran beside: 1 all of it, 0 as if it had blocked.

    Args:
      total_s: of both together.
      compute_s: of the compute alone.
      transfer_s: of the transfer alone.

    Raises:
      ValueError: `transfer_s` is not positive.
    """
    check(transfer_s > 0, "transfer_s", "a positive number", transfer_s)
    return 1 - (total_s - compute_s) / transfer_s


def _share_to_buffer(
    rates: Rates, history_tokens: int, new_tokens: int, padded: Callable[[int, int], tuple[int, int]]
) -> float:
    """The part of a load, 0 to 1, that computing does not hide."""
    loading_s = load_s(rates, history_tokens)
    return max(0.0, 1 - prefill_s(rates, *padded(history_tokens, new_tokens)) / loading_s) if loading_s else 0.0
