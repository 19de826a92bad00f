"""Flags of `simulate`, and what they stand for: a trace as sessions of lengths and times alone, a server, a store.

Not here: what is done with them (`simulate`), readers of files (`ca_jax.simulate.traces`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from ca_jax.launch.flags import ConfigFlags, define_flag
from ca_jax.simulate.config import (
    DEVICES,
    FITTED_SUITES,
    MODELS,
    FittedCost,
    ServerConfig,
    StoreSizes,
)
from ca_jax.simulate.paper import FIGURES, GB, PaperConfig
from ca_jax.simulate.replay.workload import TraceConfig
from ca_jax.simulate.server import POLICIES
from ca_jax.simulate.traces.requests import BadRows, load_requests, share_of_seen_blocks
from ca_jax.simulate.traces.sharegpt import load_sharegpt
from ca_jax.simulate.workload import Lengths, SimSession, conversation_lengths, poisson_sessions, trace_sessions

flags.disclaim_key_flags()  # They are flags of `simulate`: its --help shows them.

FLAGS = flags.FLAGS
_PAPER = PaperConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceSource(TraceConfig):
    """Which trace, and how it is read.

    Raises:
      ValueError: an unknown format, no file where one is needed, or a number that cannot be.
    """

    chars_per_token: float = _PAPER.chars_per_token
    """Characters of a text that make a token."""
    max_turns: int = 40
    """ShareGPT: most turns of a conversation, as in the paper; later ones are left out. 0 for all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.chars_per_token < float("inf"):
            raise ValueError(f"chars_per_token must be a number above 0, got {self.chars_per_token}")
        if self.max_turns < 0:
            raise ValueError(f"max_turns must be at least 0, got {self.max_turns}")

    @property
    def path(self) -> Path | None:
        """Of the trace; None for the installed ShareGPT."""
        return None if self.trace is None else Path(self.trace).expanduser()

    def num_tokens(self, text: str) -> int:
        """Of a text, about."""
        return round(len(text) / self.chars_per_token)

    def lengths(self) -> Lengths:
        """How long ShareGPT's conversations are.

        Raises:
          FileNotFoundError: there is no such file, or the package is not installed.
          ValueError: it is malformed.
        """
        return conversation_lengths(load_sharegpt(self.path), self.num_tokens, max_turns=self.max_turns or None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadTrace:
    """What was read of one."""

    sessions: Sequence[SimSession]
    """In order of arrival."""
    seen_blocks_share: float | None = None
    """Share of all blocks that lead their prompt and were seen before: of traces with hashes."""
    skipped_rows: int = 0
    """Rows that could not be used."""
    first_skipped: str | None = None
    """What was wrong with the first of them."""


_TRACE = ConfigFlags(TraceSource(), without=("length_scale",))
_NUMBERS: dict[str, tuple[type, float | None, str]] = {
    "arrival_rate": (float, _PAPER.arrival_rate, "ShareGPT: conversations a second, Poisson."),
    "think_time_s": (float, _PAPER.think_s, "ShareGPT: mean time before a further turn, exponential."),
    "warmup_share": (float, None, "Share of the turns that come first and do not count."),
    "flops_share": (float, _PAPER.flops_share, "Share of its operations a second that a prefill reaches."),
    "bytes_share": (float, _PAPER.bytes_share, "Share of its memory's bandwidth that a step reaches."),
    "step_ms": (float, _PAPER.step_s * 1e3, "Of every prefill and decode step, however small."),
    "dram_gb": (float, 128.0, "Without figures: DRAM for KV."),
    "ssd_gb": (float, 10_000.0, "Without figures: SSD for KV; 0 for none."),
    "capacity_share": (float, None, "Without figures: DRAM as this share of the KV of all sessions, and no SSD."),
    "ssd_gb_per_s": (float, _PAPER.ssd_bytes_per_s / GB, "Bandwidth of the SSD, each way."),
    "ttl_s": (float, None, "Without figures: how long KV is kept after its last use; by default while room lasts."),
    "price_device": (float, _PAPER.prices.device, "Figure 17: dollars an hour of an accelerator."),
    "price_dram_gb": (float, _PAPER.prices.dram_gb, "Figure 17: dollars an hour of a gigabyte of memory."),
    "price_ssd_gb": (float, _PAPER.prices.ssd_gb, "Figure 17: dollars an hour of a gigabyte of SSD."),
    "num_sessions": (int, None, "Sessions that come; by default all of a trace, 9,000 for figures."),
    "seed": (int, _PAPER.seed, "Of arrivals and the order of conversations."),
    "window": (int, None, "Without figures: context window; by default the model's."),
    "num_devices": (int, 2, "Without figures: how many share the model."),
    "max_batch_size": (int, _PAPER.max_batch_size, "Decode slots."),
    "block_tokens": (int, StoreSizes.block_tokens, "Without figures: tokens of a block of the store."),
}


def define_flags() -> None:
    """Only where `simulate` is the program: scripts share names of flags."""
    _TRACE.define()
    for name, (kind, number, text) in _NUMBERS.items():
        define_flag(name, kind, number, text)
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
    """The trace that flags name; raises ValueError where a flag's value is out of range."""
    return _TRACE.read()


def paper_config() -> PaperConfig:
    """What the figures share, as flags say.

    Raises:
      ValueError: a flag's value is out of range.
    """
    names = ["chars_per_token", "arrival_rate", "seed"]
    names += [name for name in ("num_sessions", "warmup_share") if FLAGS[name].value is not None]
    given: dict[str, Any] = {name: FLAGS[name].value for name in names}
    prices: dict[str, Any] = {name: FLAGS[f"price_{name}"].value for name in ("device", "dram_gb", "ssd_gb")}
    return dataclasses.replace(
        _machine(),
        **given,
        think_s=FLAGS.think_time_s,
        waits_for_answers=FLAGS.wait_for_answers,
        ssd_bytes_per_s=FLAGS.ssd_gb_per_s * GB,
        prices=dataclasses.replace(_PAPER.prices, **prices),
    )


def _machine() -> PaperConfig:
    """What flags say of the machine, with and without figures."""
    names = ("flops_share", "bytes_share", "max_batch_size")
    given: dict[str, Any] = {name: FLAGS[name].value for name in names}
    return PaperConfig(device=DEVICES[FLAGS.device], step_s=FLAGS.step_ms / 1e3, **given)


def server_config(num_turns: int, largest_tokens: int) -> ServerConfig:
    """The server without figures, but for its store.

    Args:
      num_turns: of all sessions.
      largest_tokens: of the largest session: a window for traces of other models, unless one is given.

    Raises:
      ValueError: a flag's value is out of range, or no measurements to fit to.
    """
    model, machine = MODELS[FLAGS.model], _machine()
    if FLAGS.window is not None and FLAGS.window < 2:
        raise ValueError(f"window must be at least 2, got {FLAGS.window}")
    if FLAGS.warmup_share is not None and not 0 <= FLAGS.warmup_share < 1:
        raise ValueError(f"warmup_share must be a share in [0, 1), got {FLAGS.warmup_share}")
    window = FLAGS.window or (model.window if FLAGS.trace_format == "sharegpt" else max(model.window, largest_tokens))
    model, warmup_turns = dataclasses.replace(model, window=window), int((FLAGS.warmup_share or 0.0) * num_turns)
    if not FLAGS.cost:
        return machine.server(model, FLAGS.num_devices, warmup_turns=warmup_turns)
    return ServerConfig(  # A measured machine is not in the data sheets, nor what it has room for.
        model=model,
        cost=FittedCost.from_bench(FLAGS.cost),
        link_bytes_per_s=machine.device.link_bytes_per_s,
        max_batch_size=machine.max_batch_size,
        warmup_turns=warmup_turns,
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


def read_trace(source: TraceSource, num_sessions: int | None = None, **arrivals: Any) -> ReadTrace:
    """Reads a trace. Conversations of ShareGPT, which has no times, come at random; other traces say when.

    Args:
      source: which.
      num_sessions: how many at most, the first ones; None for all.
      **arrivals: of conversations of ShareGPT, see `poisson_sessions`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is malformed (`TraceError` where rows have lines).
    """
    if source.path is None or source.trace_format == "sharegpt":
        lengths = source.lengths()
        drawn = poisson_sessions(lengths, num_sessions=num_sessions or len(lengths), **arrivals)
        return ReadTrace(sessions=list(drawn))
    bad_rows = BadRows(source.skip_bad_rows)
    requests = load_requests(source.trace_format, source.path, source.num_tokens, bad_rows)
    hashed = [request for request in requests if request.hash_ids]
    return ReadTrace(
        sessions=trace_sessions(requests)[:num_sessions],
        seen_blocks_share=share_of_seen_blocks(hashed) if hashed else None,
        skipped_rows=bad_rows.num_skipped,
        first_skipped=bad_rows.first,
    )
