"""Flags of `simulate`, and what they say as configurations.

Not here: what is done with them (`simulate`).
"""

from __future__ import annotations

import dataclasses
import math

from absl import flags

from ca_jax.launch.flags import ConfigFlags
from ca_jax.launch.simulate_trace import TraceSource
from ca_jax.overflow.config import OverflowConfig
from ca_jax.simulate.config import DEVICES, MODELS, CostModel, RooflineCost, ServerConfig, SimModel, StoreSizes
from ca_jax.simulate.fitted import FITTED_SUITES, FittedCost
from ca_jax.simulate.paper import FIGURES, GB, PaperConfig
from ca_jax.simulate.server import POLICIES

flags.disclaim_key_flags()  # They are flags of `simulate`: its --help shows them.

FLAGS = flags.FLAGS
_PAPER = PaperConfig()
_TRACE = ConfigFlags(TraceSource(chars_per_token=_PAPER.chars_per_token, max_turns=40))
_USABLE_HBM = 0.9

_NUMBERS: dict[str, tuple[float | None, str]] = {
    "arrival_rate": (_PAPER.arrival_rate, "ShareGPT: conversations a second, Poisson."),
    "think_time_s": (_PAPER.think_s, "ShareGPT: mean time before a further turn, exponential."),
    "warmup_share": (None, "Share of the turns that come first and do not count."),
    "flops_share": (_PAPER.flops_share, "Share of its operations a second that a prefill reaches."),
    "bytes_share": (_PAPER.bytes_share, "Share of its memory's bandwidth that a step reaches."),
    "step_ms": (_PAPER.step_s * 1e3, "Of every prefill and decode step, however small."),
    "dram_gb": (128.0, "Without figures: DRAM for KV."),
    "ssd_gb": (10_000.0, "Without figures: SSD for KV; 0 for none."),
    "capacity_share": (None, "Without figures: DRAM as this share of the KV of all sessions, and no SSD."),
    "ssd_gb_per_s": (_PAPER.ssd_bytes_per_s / GB, "Bandwidth of the SSD, each way."),
    "ttl_s": (None, "Without figures: how long KV is kept after its last use; by default while room lasts."),
    "price_device": (_PAPER.prices.device, "Figure 17: dollars an hour of an accelerator."),
    "price_dram_gb": (_PAPER.prices.dram_gb, "Figure 17: dollars an hour of a gigabyte of memory."),
    "price_ssd_gb": (_PAPER.prices.ssd_gb, "Figure 17: dollars an hour of a gigabyte of SSD."),
}
_INTEGERS: dict[str, tuple[int | None, str]] = {
    "num_sessions": (None, "Sessions that come; by default all of a trace, 9,000 for figures."),
    "seed": (_PAPER.seed, "Of arrivals and the order of conversations."),
    "window": (None, "Without figures: context window; by default the model's."),
    "num_devices": (2, "Without figures: how many share the model."),
    "max_batch_size": (_PAPER.max_batch_size, "Decode slots."),
    "block_tokens": (StoreSizes.block_tokens, "Without figures: tokens of a block of the store."),
}


def define_flags() -> None:
    """Only where `simulate` is the program: scripts share names of flags."""
    _TRACE.define()
    for name, (number, text) in _NUMBERS.items():
        flags.DEFINE_float(name, number, text)
    for name, (integer, text) in _INTEGERS.items():
        flags.DEFINE_integer(name, integer, text)
    figures = "Figure of the paper to simulate; may be given more than once."
    flags.DEFINE_multi_enum("figure", [], [*FIGURES, "all"], figures)
    waits = "ShareGPT: turns come after answers, not at times of their own."
    flags.DEFINE_boolean("wait_for_answers", _PAPER.waits_for_answers, waits)
    flags.DEFINE_enum("model", "llama-13b", sorted(MODELS), "Without figures: the model.")
    flags.DEFINE_enum("device", _PAPER.device.name, sorted(DEVICES), "Accelerator.")
    flags.DEFINE_multi_string(
        "cost",
        [],
        "Without figures: what computing takes as measured: the JSON of a bench, of the suites "
        f"{', '.join(FITTED_SUITES)}; give one of prefills and one of decoding at least. By default data sheets say.",
    )
    flags.DEFINE_multi_enum("policy", ["scheduler_aware", "lru", "fifo"], POLICIES, "Without figures: who is evicted.")
    flags.DEFINE_string("json_out", None, "File to write the result to.")
    flags.DEFINE_string("plot_dir", None, "Directory to write plots to: figure_13.png and so on, or policies.png.")


def trace_source() -> TraceSource:
    """The trace that flags name.

    Raises:
      ValueError: a flag's value is out of range.
    """
    return _TRACE.read()


def paper_config() -> PaperConfig:
    """What the figures share, as flags say.

    Raises:
      ValueError: a flag's value is out of range.
    """
    prices = dataclasses.replace(
        _PAPER.prices, device=FLAGS.price_device, dram_gb=FLAGS.price_dram_gb, ssd_gb=FLAGS.price_ssd_gb
    )
    return PaperConfig(
        num_sessions=_PAPER.num_sessions if FLAGS.num_sessions is None else FLAGS.num_sessions,
        chars_per_token=FLAGS.chars_per_token,
        warmup_share=_PAPER.warmup_share if FLAGS.warmup_share is None else FLAGS.warmup_share,
        arrival_rate=FLAGS.arrival_rate,
        think_s=FLAGS.think_time_s,
        waits_for_answers=FLAGS.wait_for_answers,
        device=DEVICES[FLAGS.device],
        flops_share=FLAGS.flops_share,
        bytes_share=FLAGS.bytes_share,
        step_s=FLAGS.step_ms / 1e3,
        ssd_bytes_per_s=FLAGS.ssd_gb_per_s * GB,
        max_batch_size=FLAGS.max_batch_size,
        prices=prices,
        seed=FLAGS.seed,
    )


def server_config(num_turns: int, largest_tokens: int) -> ServerConfig:
    """The server without figures, but for its store.

    Args:
      num_turns: of all sessions.
      largest_tokens: of the largest session: a window for traces of other models, unless one is given.

    Raises:
      ValueError: a flag's value is out of range, or no measurements to fit to.
    """
    model = MODELS[FLAGS.model]
    if FLAGS.window is not None and FLAGS.window < 2:
        raise ValueError(f"window must be at least 2, got {FLAGS.window}")
    if FLAGS.warmup_share is not None and not 0 <= FLAGS.warmup_share < 1:
        raise ValueError(f"warmup_share must be a share in [0, 1), got {FLAGS.warmup_share}")
    if FLAGS.max_batch_size < 1:
        raise ValueError(f"max_batch_size must be at least 1, got {FLAGS.max_batch_size}")
    window = FLAGS.window or (model.window if FLAGS.trace_format == "sharegpt" else max(model.window, largest_tokens))
    model, device = dataclasses.replace(model, window=window), DEVICES[FLAGS.device]
    return ServerConfig(
        model=model,
        cost=_cost(model),
        link_bytes_per_s=device.link_bytes_per_s,
        hbm_tokens=_hbm_tokens(model),
        max_batch_size=FLAGS.max_batch_size,
        overflow=OverflowConfig(keep_first_tokens=0),
        warmup_turns=int((FLAGS.warmup_share or 0.0) * num_turns),
    )


def store_sizes(working_set_bytes: float) -> StoreSizes:
    """The store without figures.

    Raises:
      ValueError: a flag's value is out of range.
    """
    dram_bytes, ssd_bytes = FLAGS.dram_gb * GB, FLAGS.ssd_gb * GB
    if FLAGS.capacity_share is not None:
        if not 0 < FLAGS.capacity_share < math.inf:
            raise ValueError(f"capacity_share must be a number above 0, got {FLAGS.capacity_share}")
        dram_bytes, ssd_bytes = FLAGS.capacity_share * working_set_bytes, 0.0
    return StoreSizes(
        dram_bytes=dram_bytes,
        ssd_bytes=ssd_bytes,
        ssd_read_bytes_per_s=FLAGS.ssd_gb_per_s * GB,
        ssd_write_bytes_per_s=FLAGS.ssd_gb_per_s * GB,
        ttl_s=FLAGS.ttl_s,
        block_tokens=FLAGS.block_tokens,
    )


def _cost(model: SimModel) -> CostModel:
    if FLAGS.cost:
        return FittedCost.from_bench(FLAGS.cost)
    return RooflineCost(
        model=model,
        device=DEVICES[FLAGS.device],
        num_devices=FLAGS.num_devices,
        flops_share=FLAGS.flops_share,
        bytes_share=FLAGS.bytes_share,
        step_s=FLAGS.step_ms / 1e3,
    )


def _hbm_tokens(model: SimModel) -> float:
    """What the devices have room for beside the weights; a measured machine is not in the data sheets."""
    if FLAGS.cost:
        return math.inf
    free_bytes = FLAGS.num_devices * DEVICES[FLAGS.device].hbm_bytes * _USABLE_HBM - model.weight_bytes
    if free_bytes <= 0:
        raise ValueError(
            f"num_devices must be as many {FLAGS.device} as hold the {model.weight_bytes / GB:.3g} GB of weights of "
            f"{model.name}, got {FLAGS.num_devices}"
        )
    return free_bytes / model.token_bytes
