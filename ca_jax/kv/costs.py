"""What loading, saving and prefilling will take; how deep to pre-load, and what not to load at all.

Pure arithmetic over measured rates, in seconds, bytes and tokens: the read buffer of layer-wise pre-loading, the time
of the pipeline that it makes, how much of a history is better computed again than loaded, and how many tokens of a
context of chunks are computed anew for nothing, while others load:

    link      [ load 0 ][ load 1 ][ load 2 ][ load 3 ]
    device              [ blend 0 ][ blend 1 ][ blend 2 ][ blend 3 ]      one: some of the chunks' tokens, the new ones

Arguments are the same everywhere: `rates` of model and machine; `history_tokens`, those before all others, which are
loaded; `context_tokens`, of chunks, loaded too; `new_tokens` behind them, which are computed in any case, at least one;
`check_layers`, the first ones in which all tokens of a context are computed; `tier`, where KV is loaded from, layer by
layer.

Not here: rates and how they are fitted (rates), moving bytes (transfer), what is stored (storage).
Source: read buffer and its size, CachedAttention (Gao et al., USENIX ATC 2024), section 3.2.1; loading controller of
chunks, CacheBlend (Yao et al., EuroSys 2025), section 5.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from ca_jax.kv.rates import Rates, check

_ROUNDING = 1e-9  # Relative: closer than that, two times are the same.
Tier = Literal["ssd", "dram"]
"""Where KV is loaded from."""
TIERS: tuple[Tier, ...] = ("ssd", "dram")
"""All, the cheapest first."""


def _as_they_are(history_tokens: int, new_tokens: int) -> tuple[int, int]:
    return history_tokens, new_tokens


def fetch_s(rates: Rates, num_tokens: int) -> float:
    """Seconds of bringing all layers of so many tokens from SSD to DRAM, before any is loaded.

    Raises:
      ValueError: nothing has been fetched yet, so that nothing is known of it.
    """
    if rates.fetch is None:
        raise ValueError("fetch_s must be asked of rates with a fetch in them, got none: nothing was fetched yet")
    return rates.fetch.seconds(num_tokens * rates.num_layers * rates.layer_token_bytes)


def layer_load_s(rates: Rates, num_tokens: int, tier: Tier = "dram") -> float:
    """Seconds from one loaded layer to the next: the paper's `T_load`.

    Layers that come from SSD one by one are on their way to DRAM and to the device side by side. Sessions that are
    fetched whole, before their job begins, are loaded from DRAM, `fetch_s` later.

    Raises:
      ValueError: `ssd`, and nothing has been fetched yet.
    """
    load_s = rates.load.seconds(num_tokens * rates.layer_token_bytes)
    return load_s if tier == "dram" else max(load_s, fetch_s(rates, num_tokens) / rates.num_layers)


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

    That is the smallest depth with which `pipeline_s` is shortest, or one layer less: the formula leaves out that the
    first layer's compute has nothing to hide its load behind.

    Args:
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


# Passes between decode steps.


def largest_pass(rates: Rates, history_tokens: int, sizes: Sequence[int], budget_s: float) -> int:
    """The most new tokens whose prefill fits a time; the least there is where none does.

    Args:
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


# Contexts of chunks.


def recompute_layer_s(rates: Rates, num_tokens: int, ratio: float, *, history_tokens: int = 0) -> float:
    """Seconds of computing a share of a context's tokens anew in one layer: the paper's `T_recompute`.

    A token that is computed goes through the weights, and attends to all before it. Tokens are taken from all of the
    context, so that each has half of it before it, in the mean. What is fixed about a prefill is the new tokens'.

    Args:
      num_tokens: of the context.
      ratio: share of them that is computed anew, in [0, 1].

    Raises:
      ValueError: a ratio outside [0, 1].
    """
    check(0 <= ratio <= 1, "ratio", "a share in [0, 1]", ratio)
    all_s = prefill_s(rates, history_tokens, num_tokens) - rates.prefill.fixed_s
    return ratio * all_s / rates.num_layers


def blend_layer_s(
    rates: Rates, context_tokens: int, new_tokens: int, ratio: float, *, history_tokens: int = 0
) -> float:
    """Seconds of computing one layer: a share of the context's tokens, and the new ones behind it.

    With ratio 1 that is a layer of the prefill of all of them.

    Args:
      ratio: share of the context's tokens that is computed anew, in [0, 1].

    Raises:
      ValueError: a number out of range.
    """
    check(context_tokens > 0, "context_tokens", "a positive number", context_tokens)
    check(new_tokens > 0, "new_tokens", "a positive number", new_tokens)
    check(history_tokens >= 0, "history_tokens", "at least 0", history_tokens)
    chosen_s = recompute_layer_s(rates, context_tokens, ratio, history_tokens=history_tokens)
    return chosen_s + layer_compute_s(rates, history_tokens + context_tokens, new_tokens)


def choose_ratio(
    rates: Rates,
    context_tokens: int,
    new_tokens: int,
    min_ratio: float,
    *,
    history_tokens: int = 0,
    tier: Tier = "dram",
) -> float:
    """The share of a context's tokens whose recompute is hidden by loading: as much as a layer's load leaves time for.

    Args:
      min_ratio: least share, which quality wants, in [0, 1].

    Returns:
      At least `min_ratio`. 1 where computing everything takes no longer than blending: then nothing is better loaded.

    Raises:
      ValueError: a number out of range, or `ssd` of which no rate is known.

    Source: CacheBlend (Yao et al., EuroSys 2025), section 5.1, loading controller.
    """
    check(0 <= min_ratio <= 1, "min_ratio", "a share in [0, 1]", min_ratio)
    none_s = blend_layer_s(rates, context_tokens, new_tokens, 0.0, history_tokens=history_tokens)
    all_s = blend_layer_s(rates, context_tokens, new_tokens, 1.0, history_tokens=history_tokens)
    load_s = layer_load_s(rates, history_tokens + context_tokens, tier)
    if load_s >= all_s:
        return 1.0
    ratio = max(min_ratio, (load_s - none_s) / (all_s - none_s)) if all_s > none_s else 1.0
    blend_s = predict_blend_s(
        rates, context_tokens, new_tokens, ratio, check_layers=0, history_tokens=history_tokens, tier=tier
    )
    return ratio if blend_s < rates.num_layers * all_s else 1.0


def blend_layers_s(
    rates: Rates, context_tokens: int, new_tokens: int, ratio: float, *, check_layers: int = 1, history_tokens: int = 0
) -> list[float]:
    """Seconds of computing each layer: all of a context's tokens in the check layers, a share of them behind those.

    Gradual filtering is taken as its mean. Where nothing is to be computed anew nothing is checked.

    Args:
      ratio: share of the context's tokens that is computed anew behind the check layers, in [0, 1].

    Raises:
      ValueError: a number out of range.
    """
    check(0 <= check_layers <= rates.num_layers, "check_layers", f"0 to {rates.num_layers}", check_layers)
    num_checked = check_layers if ratio else 0
    checked_s, filtered_s = (
        blend_layer_s(rates, context_tokens, new_tokens, each, history_tokens=history_tokens) for each in (1.0, ratio)
    )
    return [checked_s] * num_checked + [filtered_s] * (rates.num_layers - num_checked)


def predict_blend_s(
    rates: Rates,
    context_tokens: int,
    new_tokens: int,
    ratio: float,
    *,
    check_layers: int = 1,
    history_tokens: int = 0,
    tier: Tier = "dram",
    depth: int | None = None,
    head_start_s: float = 0.0,
) -> float:
    """Seconds from when the device is free for a job to its first token: each layer is blended once it is loaded.

    Args:
      ratio: as for `blend_layers_s`.
      depth: layers of the read buffer, as for `pipeline_s`; None: all.
      head_start_s: likewise; what is fetched whole first is late by `fetch_s`.

    Raises:
      ValueError: a number out of range, or `ssd` of which no rate is known.
    """
    layers_s = blend_layers_s(
        rates, context_tokens, new_tokens, ratio, check_layers=check_layers, history_tokens=history_tokens
    )
    load_s = layer_load_s(rates, history_tokens + context_tokens, tier)
    depth = rates.num_layers if depth is None else depth
    check(depth >= 0, "depth", "at least 0", depth)
    check(head_start_s > -math.inf, "head_start_s", "a number of seconds", head_start_s)
    loaded_s = -head_start_s
    ends_s: list[float] = []  # Of each layer's compute.
    for layer, compute_s in enumerate(layers_s):
        if layer >= depth:  # It is loaded to where an earlier layer was, see `pipeline_s`.
            loaded_s = max(loaded_s, 0.0, ends_s[layer - depth - 2] if layer >= depth + 2 else 0.0)
        loaded_s += load_s
        ends_s.append(max(loaded_s, ends_s[-1] if ends_s else 0.0) + compute_s)
    return ends_s[-1]


def choose_tier(
    rates: Rates, context_tokens: int, new_tokens: int, min_ratio: float, *, history_tokens: int = 0
) -> Tier:
    """The cheapest tier from which a context loads without delay, if the least share of it is computed anew.

    Args:
      min_ratio: share of the context's tokens that is computed anew, in [0, 1].

    Returns:
      `dram` where no tier does, or where nothing is known of the SSD yet.

    Raises:
      ValueError: a number out of range.

    Source: CacheBlend (Yao et al., EuroSys 2025), section 5.1, figure 10(b).
    """
    compute_s = blend_layer_s(rates, context_tokens, new_tokens, min_ratio, history_tokens=history_tokens)
    known = [tier for tier in TIERS if tier == "dram" or rates.fetch is not None]
    num_tokens = history_tokens + context_tokens
    return next((tier for tier in known if layer_load_s(rates, num_tokens, tier) <= compute_s), "dram")


# Measured against predicted.


def prediction_error(predicted_s: float, measured_s: float) -> float:
    """How far a prediction was off, as a fraction of what was measured; positive where it was too long.

    Raises:
      ValueError: `measured_s` is not positive.
    """
    check(measured_s > 0, "measured_s", "a positive number", measured_s)
    return predicted_s / measured_s - 1


def _share_to_buffer(
    rates: Rates, history_tokens: int, new_tokens: int, padded: Callable[[int, int], tuple[int, int]]
) -> float:
    """The part of a load, 0 to 1, that computing does not hide."""
    loading_s = load_s(rates, history_tokens)
    return max(0.0, 1 - prefill_s(rates, *padded(history_tokens, new_tokens)) / loading_s) if loading_s else 0.0
