"""What comes out of prompts that are made of text chunks: rows of tables and figures; their fields are the JSON's.

Not here: what is asked (rag_schema), measuring (rag, rag_deviation, rag_gate, and launch for times).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ca_jax.evaluation.statistics import Interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class RagRow:
    """One way to use the chunks' KV, over all items. Intervals are of 95 %, by the bootstrap over items; paired where
    two methods are compared. What a method does not give is None."""

    name: str
    """The method in words."""
    method: str
    """`recompute`, one of `rag_schema.BASELINES`, or `blend`."""
    ratio: float | None
    """Of `blend`: as it was asked for."""
    selection: str | None
    """Of `blend`."""
    num_items: int
    """Prompts."""
    context_tokens: float
    """Tokens of chunks, mean."""
    computed_tokens: float
    """Tokens that are computed before the answer begins, mean: of some layers alone, times their share of the layers.
    Of `mapreduce` and `maprerank` also what they generate for it; the chunks' own KV is stored in any case."""
    mean_kl: float | None
    """KL(full recompute || method) of the next token's distribution, nats, mean over the last positions."""
    kl_interval: Interval | None
    """Of it."""
    kl_share: float | None
    """Of full reuse's; None without that."""
    kl_above_hkvd: float | None
    """How far it is above that of `hkvd` of the same ratio, nats; None of itself, or where that was not measured."""
    kl_above_hkvd_interval: Interval | None
    """Of it."""
    same_top1: float | None
    """Share of those positions with the same likeliest token as full recompute."""
    same_top1_interval: Interval | None
    """Of it."""
    attention_deviation: float | None
    """L2 norm of the difference of the forward attention matrix, all heads', of the question's tokens to the context's,
    from that of full recompute: mean over layers. Source: CacheBlend, section 4.1."""
    layer_deviations: Sequence[float]
    """The same of each layer; none where `attention_deviation` is None."""
    f1: float | None
    """Of the answers, mean over the items that have right ones; None where there are none."""
    f1_interval: Interval | None
    """Of it."""
    f1_above_recompute_interval: Interval | None
    """Of its difference to full recompute's."""
    rouge_l: float | None
    """Likewise."""
    rouge_l_interval: Interval | None
    """Of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateRow:
    """One ratio, held against the bounds."""

    ratio: float
    """As it was asked for; 0 is full reuse."""
    selection: str
    """Which tokens."""
    num_items: int
    """Prompts."""
    computed_tokens: float
    """See `RagRow`."""
    mean_kl: float
    """See `RagRow`."""
    kl_interval: Interval
    """See `RagRow`."""
    kl_share: float | None
    """Of full reuse's; None where that has none."""
    same_top1: float
    """See `RagRow`."""
    share_excess: float | None
    """Upper end of the interval of `kl - max_kl_share * kl of full reuse`, nats, paired; None without that bound."""
    kl_excess: float | None
    """Upper end of the interval less `max_kl`, nats; None without that bound."""
    passes: bool
    """Whether no excess is above 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """Figure 6: what is left of the attention deviation once a share of the tokens is computed anew."""

    selection: str
    """`oracle`: in each layer the tokens of the highest deviation of all have their true KV, as in the paper's figure;
    otherwise one of `rag_schema.SELECTIONS`, with what it computes."""
    ratio: float
    """Share of the chunks' tokens; of `oracle` in each layer, otherwise in the mean over layers."""
    num_items: int
    """Prompts."""
    attention_deviation: float
    """See `RagRow`."""
    interval: Interval
    """Of it."""
    share: float
    """Of full reuse's."""
    layer_deviations: Sequence[float]
    """See `RagRow`."""
    mean_kl: float
    """See `RagRow`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributionRow:
    """Figure 7: how the KV deviation of a layer is distributed over the tokens of all items."""

    layer: int
    """From 0 on."""
    num_items: int
    """Prompts."""
    num_tokens: int
    """Of chunks that were computed alone."""
    percentiles: Sequence[float]
    """KV deviation of percentiles 0, 1, ... 100: L2 norm over keys and values, all heads', of the difference to full
    recompute."""
    top_10_share: float
    """Of all deviation, how much the tenth of the tokens has that deviates most."""
    top_15_share: float
    """The same of 15 %."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelationRow:
    """Figure 8: Spearman's rank correlation of the tokens' KV deviation between a layer and the next one."""

    layer: int
    """The first of the two. Layer 0 is no such one: its KV never deviates."""
    num_items: int
    """Prompts."""
    correlation: float
    """Mean over items."""
    interval: Interval
    """Of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedRow:
    """Figures 12, 15, 16 and 17: the time to the first token (TTFT) behind chunks, served by an engine."""

    name: str
    """See `RagRow`."""
    ratio: float | None
    """Of the chunks' tokens that were computed anew, as it was asked for; None where they are not blended."""
    storage: str
    """Where the chunks' KV was: `dram`, `ssd` (its files are likely in the page cache), or a speed in GB/s that loads
    from DRAM are paced to, as if they came layer by layer from a storage so fast."""
    num_chunks: int
    """Of each prompt at most."""
    chunk_tokens: int
    """Of each chunk at most."""
    num_items: int
    """Prompts that were timed."""
    context_tokens: float | None
    """Of chunks, mean over these; None where nothing was timed. So are the others up to `speedup`."""
    cached_tokens: float | None
    """Of them, whose KV came from the store."""
    recomputed_tokens: float | None
    """Of these, that were computed anew; of some layers alone, times their share of the layers."""
    ttft_s: float | None
    """Median over turns."""
    ttft_quartiles: Interval | None
    """Lower and upper one."""
    ttft_recompute_s: float | None
    """Median of full recompute, in turns that alternated with these."""
    speedup: float | None
    """Median over turns of the TTFT of full recompute over this one's."""
    mean_kl: float | None
    """See `RagRow`, over all items; None where quality was not measured, in figures 15 and 17. So are the others."""
    same_top1: float | None
    """See `RagRow`."""
    f1: float | None
    """See `RagRow`."""
    rouge_l: float | None
    """See `RagRow`."""
