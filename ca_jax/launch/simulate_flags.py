"""Flags of `simulate`, and what they say as configurations.

Not here: what is done with them (simulate).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from absl import flags

from ca_jax.launch.simulate_trace import TraceSource
from ca_jax.overflow.config import OverflowConfig
from ca_jax.simulate.comparison import POLICIES
from ca_jax.simulate.config import ServerConfig, StoreSizes
from ca_jax.simulate.fitted import FITTED_SUITES, FittedCost
from ca_jax.simulate.machine import DEVICES, MODELS, CostModel, RooflineCost, SimModel
from ca_jax.simulate.paper import FIGURES, GB, PaperConfig
from ca_jax.traces.formats import TRACE_FORMATS

FLAGS = flags.FLAGS
_PAPER = PaperConfig()
_USABLE_HBM = 0.9


def define_flags() -> None:
    """Only where `simulate` is the program: scripts share names of flags."""
    flags.DEFINE_multi_enum(
        "figure", [], [*FIGURES, "all"], "Figure of the paper to simulate; may be given more than once."
    )
    # What is asked.
    flags.DEFINE_enum("trace_format", "sharegpt", TRACE_FORMATS, "What kind of trace `--trace` is.")
    flags.DEFINE_string("trace", None, "Trace: a file, of agents also a directory; by default the installed ShareGPT.")
    flags.DEFINE_boolean("skip_bad_rows", False, "Leave out rows that cannot be used, and count them.")
    flags.DEFINE_float("chars_per_token", _PAPER.chars_per_token, "Characters of a text that make a token.")
    flags.DEFINE_integer("max_turns", 40, "ShareGPT: most turns of a conversation, as in the paper; 0 for all.")
    flags.DEFINE_integer("num_sessions", None, "Sessions that come; by default all of a trace, 9,000 for figures.")
    flags.DEFINE_float("arrival_rate", _PAPER.arrival_rate, "ShareGPT: conversations a second, Poisson.")
    flags.DEFINE_float("think_time_s", _PAPER.think_s, "ShareGPT: mean time before a further turn, exponential.")
    flags.DEFINE_boolean(
        "wait_for_answers", _PAPER.waits_for_answers, "ShareGPT: turns come after answers, not at times of their own."
    )
    flags.DEFINE_float("warmup_share", None, "Share of the turns that come first and do not count.")
    flags.DEFINE_integer("seed", _PAPER.seed, "Of arrivals and the order of conversations.")
    # Who answers.
    flags.DEFINE_enum("model", "llama-13b", sorted(MODELS), "Without figures: the model.")
    flags.DEFINE_integer("window", None, "Without figures: context window; by default the model's.")
    flags.DEFINE_enum("device", _PAPER.device.name, sorted(DEVICES), "Accelerator.")
    flags.DEFINE_integer("num_devices", 2, "Without figures: how many share the model.")
    flags.DEFINE_integer("max_batch_size", _PAPER.max_batch_size, "Decode slots.")
    flags.DEFINE_float("flops_share", _PAPER.flops_share, "Share of its operations a second that a prefill reaches.")
    flags.DEFINE_float("bytes_share", _PAPER.bytes_share, "Share of its memory's bandwidth that a step reaches.")
    flags.DEFINE_float("step_ms", _PAPER.step_s * 1e3, "Of every prefill and decode step, however small.")
    flags.DEFINE_multi_string(
        "cost",
        [],
        "Without figures: what computing takes as measured: the JSON of a bench, of the suites "
        f"{', '.join(FITTED_SUITES)}; give one of prefills and one of decoding at least. By default data sheets say.",
    )
    # Where KV is kept.
    flags.DEFINE_multi_enum("policy", ["scheduler_aware", "lru", "fifo"], POLICIES, "Without figures: who is evicted.")
    flags.DEFINE_float("dram_gb", 128.0, "Without figures: DRAM for KV.")
    flags.DEFINE_float("ssd_gb", 10_000.0, "Without figures: SSD for KV; 0 for none.")
    flags.DEFINE_float(
        "capacity_share", None, "Without figures: DRAM as this share of the KV of all sessions, and no SSD."
    )
    flags.DEFINE_float("ssd_gb_per_s", _PAPER.ssd_bytes_per_s / GB, "Bandwidth of the SSD, each way.")
    flags.DEFINE_float(
        "ttl_s", None, "Without figures: how long KV is kept after its last use; by default while room lasts."
    )
    flags.DEFINE_integer("block_tokens", StoreSizes.block_tokens, "Without figures: tokens of a block of the store.")
    # Figure 17.
    flags.DEFINE_float("price_device", _PAPER.prices.device, "Dollars an hour: an accelerator.")
    flags.DEFINE_float("price_dram_gb", _PAPER.prices.dram_gb, "Dollars an hour: a gigabyte of memory.")
    flags.DEFINE_float("price_ssd_gb", _PAPER.prices.ssd_gb, "Dollars an hour: a gigabyte of SSD.")
    # What comes out.
    flags.DEFINE_string("json_out", None, "File to write the result to.")
    flags.DEFINE_string("plot_dir", None, "Directory to write plots to: figure_13.png and so on, or policies.png.")


def trace_source() -> TraceSource:
    """The trace that flags name.

    Raises:
      ValueError: a flag's value is out of range.
    """
    return TraceSource(
        trace_format=FLAGS.trace_format,
        path=None if FLAGS.trace is None else Path(FLAGS.trace).expanduser(),
        skip_bad_rows=FLAGS.skip_bad_rows,
        chars_per_token=FLAGS.chars_per_token,
        max_turns=FLAGS.max_turns or None,
    )


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
        raise ValueError(f"window wanted at least 2, found {FLAGS.window}")
    if FLAGS.warmup_share is not None and not 0 <= FLAGS.warmup_share < 1:
        raise ValueError(f"warmup_share wanted a share in [0, 1), found {FLAGS.warmup_share}")
    if FLAGS.max_batch_size < 1:
        raise ValueError(f"max_batch_size wanted at least 1, found {FLAGS.max_batch_size}")
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
            raise ValueError(f"capacity_share wanted a number above 0, found {FLAGS.capacity_share}")
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
            f"num_devices wanted as many {FLAGS.device} as hold the {model.weight_bytes / GB:.3g} GB of weights of "
            f"{model.name}, found {FLAGS.num_devices}"
        )
    return free_bytes / model.token_bytes
