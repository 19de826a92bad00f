"""The loading controller of CacheBlend: how much recomputing hides behind loading, from where, and what it will take.

Pure arithmetic over measured rates, in seconds and tokens. A context of chunks is loaded layer by layer; while one is
loaded, some tokens of the layer before are computed anew, and the new tokens behind the context:

    link      [ load 0 ][ load 1 ][ load 2 ][ load 3 ]
    device              [ blend 0 ][ blend 1 ][ blend 2 ][ blend 3 ]      one: some of the chunks' tokens, the new ones

Where a blend takes no longer than a load, it is free but for the last one: so many tokens are computed anew.

Not here: rates and how they are fitted (rates), sessions' own histories (costs), which tokens (recompute).
Source: CacheBlend (Yao et al., EuroSys 2025), section 5.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ca_jax.kv import costs
from ca_jax.kv.rates import Rates, check

Tier = Literal["ssd", "dram"]
"""Where KV is loaded from."""
TIERS: tuple[Tier, ...] = ("ssd", "dram")
"""All, the cheapest first."""


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
    load_s = costs.layer_load_s(rates, num_tokens)
    return load_s if tier == "dram" else max(load_s, fetch_s(rates, num_tokens) / rates.num_layers)


def recompute_layer_s(rates: Rates, num_tokens: int, ratio: float, *, history_tokens: int = 0) -> float:
    """Seconds of computing a share of a context's tokens anew in one layer: the paper's `T_recompute`.

    A token that is computed goes through the weights, and attends to all before it. Tokens are taken from all of the
    context, so that each has half of it before it, in the mean. What is fixed about a prefill is the new tokens'.

    Args:
      rates: of model and machine.
      num_tokens: of the context.
      ratio: share of them that is computed anew, in [0, 1].
      history_tokens: before the context, none of them computed anew.

    Raises:
      ValueError: a ratio outside [0, 1].
    """
    check(0 <= ratio <= 1, "ratio", "a share in [0, 1]", ratio)
    all_s = costs.prefill_s(rates, history_tokens, num_tokens) - rates.prefill.fixed_s
    return ratio * all_s / rates.num_layers


def blend_layer_s(
    rates: Rates, context_tokens: int, new_tokens: int, ratio: float, *, history_tokens: int = 0
) -> float:
    """Seconds of computing one layer: a share of the context's tokens, and the new ones behind it.

    With ratio 1 that is a layer of the prefill of all of them.

    Args:
      rates: of model and machine.
      context_tokens: of chunks.
      new_tokens: behind them, at least one.
      ratio: share of the context's tokens that is computed anew, in [0, 1].
      history_tokens: before the context.

    Raises:
      ValueError: a number out of range.
    """
    check(context_tokens > 0, "context_tokens", "a positive number", context_tokens)
    check(new_tokens > 0, "new_tokens", "a positive number", new_tokens)
    check(history_tokens >= 0, "history_tokens", "at least 0", history_tokens)
    chosen_s = recompute_layer_s(rates, context_tokens, ratio, history_tokens=history_tokens)
    return chosen_s + costs.layer_compute_s(rates, history_tokens + context_tokens, new_tokens)


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
      rates: of model and machine.
      context_tokens: of chunks, all of them stored.
      new_tokens: behind them, computed in any case.
      min_ratio: least share, which quality wants, in [0, 1].
      history_tokens: before the context; they are loaded with it.
      tier: where it is loaded from, layer by layer.

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


def ideal_blend_s(
    rates: Rates,
    context_tokens: int,
    new_tokens: int,
    ratio: float,
    *,
    check_layers: int = 1,
    history_tokens: int = 0,
) -> float:
    """Seconds of computing alone: what blending would take if loading took no time.

    Args:
      rates: of model and machine.
      context_tokens: of chunks.
      new_tokens: behind them.
      ratio: share of the context's tokens that is computed anew behind the check layers.
      check_layers: first layers of which all tokens are.
      history_tokens: before the context.

    Raises:
      ValueError: a number out of range.
    """
    return sum(_layers_s(rates, context_tokens, new_tokens, ratio, check_layers, history_tokens))


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
      rates: of model and machine.
      context_tokens: of chunks, all of them loaded.
      new_tokens: behind them.
      ratio: as for `ideal_blend_s`.
      check_layers: likewise.
      history_tokens: before the context; they are loaded with it.
      tier: where all is loaded from, layer by layer.
      depth: layers of the read buffer, as for `costs.pipeline_s`; None: all.
      head_start_s: likewise; what is fetched whole first is late by `fetch_s`.

    Raises:
      ValueError: a number out of range, or `ssd` of which no rate is known.
    """
    layers_s = _layers_s(rates, context_tokens, new_tokens, ratio, check_layers, history_tokens)
    load_s = layer_load_s(rates, history_tokens + context_tokens, tier)
    depth = rates.num_layers if depth is None else depth
    check(depth >= 0, "depth", "at least 0", depth)
    check(head_start_s > -math.inf, "head_start_s", "a number of seconds", head_start_s)
    loaded_s = -head_start_s
    ends_s: list[float] = []  # Of each layer's compute.
    for layer, compute_s in enumerate(layers_s):
        if layer >= depth:  # It is loaded to where an earlier layer was, see `costs.pipeline_s`.
            loaded_s = max(loaded_s, 0.0, ends_s[layer - depth - 2] if layer >= depth + 2 else 0.0)
        loaded_s += load_s
        ends_s.append(max(loaded_s, ends_s[-1] if ends_s else 0.0) + compute_s)
    return ends_s[-1]


def choose_tier(
    rates: Rates, context_tokens: int, new_tokens: int, min_ratio: float, *, history_tokens: int = 0
) -> Tier:
    """The cheapest tier from which a context loads without delay, if the least share of it is computed anew.

    Args:
      rates: of model and machine.
      context_tokens: of chunks.
      new_tokens: behind them.
      min_ratio: share of the context's tokens that is computed anew, in [0, 1].
      history_tokens: before the context; they are loaded with it.

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


def layer_ratios(num_layers: int, ratio: float, check_layers: int) -> tuple[float, ...]:
    """The share of a context's tokens that each layer computes anew: all in the check layers, the ratio behind them.

    Gradual filtering is taken as its mean. Where nothing is to be computed anew nothing is checked.

    Args:
      num_layers: L.
      ratio: in [0, 1].
      check_layers: 0 to L.

    Raises:
      ValueError: a number out of range.
    """
    check(0 <= ratio <= 1, "ratio", "a share in [0, 1]", ratio)
    check(0 <= check_layers <= num_layers, "check_layers", f"0 to {num_layers}", check_layers)
    num_checked = check_layers if ratio else 0
    return (1.0,) * num_checked + (ratio,) * (num_layers - num_checked)


def _layers_s(
    rates: Rates, context_tokens: int, new_tokens: int, ratio: float, check_layers: int, history_tokens: int
) -> Sequence[float]:
    """Seconds of computing each layer."""
    ratios = layer_ratios(rates.num_layers, ratio, check_layers)
    return [blend_layer_s(rates, context_tokens, new_tokens, each, history_tokens=history_tokens) for each in ratios]
