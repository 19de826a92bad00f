"""What `simulate` is asked: a trace as sessions of lengths and times alone, a server, a store.

Not here: what is done with them (`simulate`), readers of files (`ca_jax.simulate.traces`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from ca_jax.launch.flags import ConfigFlags
from ca_jax.simulate.config import (
    DEVICES,
    FITTED_SUITES,
    MODELS,
    FittedCost,
    RooflineCost,
    ServerConfig,
    SimModel,
    StoreSizes,
)
from ca_jax.simulate.server import POLICIES
from ca_jax.simulate.traces.requests import BadRows, TraceConfig, load_requests, share_of_seen_blocks
from ca_jax.simulate.traces.sharegpt import load_sharegpt
from ca_jax.simulate.workload import Lengths, SimSession, conversation_lengths, poisson_sessions, trace_sessions

flags.disclaim_key_flags()  # They are flags of `simulate`: its --help shows them.

GB = 1e9
_USABLE_HBM = 0.9  # Of a device's memory, for weights and KV.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateConfig(TraceConfig):
    """What is simulated. Every field is a flag of its name.

    Raises:
      ValueError: an unknown format, no file where one is needed, or a number outside its range.
    """

    chars_per_token: float = 2.27
    """Characters of a text that make a token: with 2.27 as many recorded conversations outgrow 2,048 and 4,096 tokens
    (47 and 29 %) as in the paper (47 and 30 %, section 2.4)."""
    max_turns: int = 40
    """ShareGPT: most turns of a conversation, as in the paper; later ones are left out. 0 for all."""
    num_sessions: int | None = None
    """Sessions that come; None: all of a trace, 9,000 for figures."""
    arrival_rate: float = 1.0
    """ShareGPT: conversations a second, Poisson."""
    think_time_s: float = 0.0
    """ShareGPT: mean time before a further turn, exponential. The paper gives none."""
    wait_for_answers: bool = True
    """ShareGPT: turns come after answers, not at times of their own."""
    warmup_share: float | None = None
    """Share of the turns that come first and do not count; None: none of a trace, 10 of 52 for figures."""
    seed: int = 0
    """Of arrivals and the order of conversations."""
    device: str = "a100-80"
    """Accelerator, one of `DEVICES`."""
    flops_share: float = 0.085
    """Share of its operations a second that a prefill reaches. The paper's TTFT come to so small a share; its 360 ms
    for 2,048 tokens would be 0.6."""
    bytes_share: float = 0.7
    """Share of its memory's bandwidth that a step reaches."""
    step_ms: float = 0.0
    """Of every prefill and decode step, however small."""
    ssd_gb_per_s: float = 5.0
    """Bandwidth of the SSD, each way."""
    max_batch_size: int = 24
    """Decode slots."""
    model: str = "llama-13b"
    """Without figures: the model, one of `MODELS`."""
    window: int | None = None
    """Without figures: context window; None: the model's."""
    num_devices: int = 2
    """Without figures: how many share the model."""
    dram_gb: float = 128.0
    """Without figures: DRAM for KV."""
    ssd_gb: float = 10_000.0
    """Without figures: SSD for KV; 0 for none."""
    capacity_share: float | None = None
    """Without figures: DRAM as this share of the KV of all sessions, and no SSD."""
    ttl_s: float | None = None
    """Without figures: how long KV is kept after its last use; None: while room lasts."""
    block_tokens: int = StoreSizes.block_tokens
    """Without figures: tokens of a block of the store."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("num_sessions", 1), ("max_batch_size", 1), ("max_turns", 0), ("window", 2)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name in ("chars_per_token", "capacity_share"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {value}")
        if not 0 <= (self.warmup_share or 0) < 1:
            raise ValueError(f"warmup_share must be a share in [0, 1), got {self.warmup_share}")

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

    def drawn_sessions(self, lengths: Lengths) -> list[SimSession]:
        """Conversations of those lengths, which come at random; without `num_sessions` each once."""
        drawn = poisson_sessions(
            lengths,
            num_sessions=self.num_sessions or len(lengths),
            arrival_rate=self.arrival_rate,
            think_s=self.think_time_s,
            waits_for_answers=self.wait_for_answers,
            seed=self.seed,
        )
        return list(drawn)

    def server(self, model: SimModel, num_devices: int, **others: Any) -> ServerConfig:
        """A server of so many devices, by their data sheet, and of `others` of its fields.

        Raises:
          ValueError: the devices do not hold the weights.
        """
        device = DEVICES[self.device]
        free_bytes = num_devices * device.hbm_bytes * _USABLE_HBM - model.weight_bytes
        if free_bytes <= 0:
            raise ValueError(
                f"num_devices must be as many {device.name} as hold the {model.weight_bytes / GB:.3g} GB of "
                f"weights of {model.name}, got {num_devices}"
            )
        return ServerConfig(
            model=model,
            cost=RooflineCost(
                model=model,
                device=device,
                num_devices=num_devices,
                flops_share=self.flops_share,
                bytes_share=self.bytes_share,
                step_s=self.step_ms / 1e3,
            ),
            link_bytes_per_s=device.link_bytes_per_s,
            hbm_tokens=free_bytes / model.token_bytes,
            max_batch_size=self.max_batch_size,
            **others,
        )

    def trace_server(self, num_turns: int, largest_tokens: int, cost: Sequence[str] = ()) -> ServerConfig:
        """The server of a trace, but for its store.

        Args:
          num_turns: of all sessions.
          largest_tokens: of the largest session: a window for traces of other models, unless one is given.
          cost: benches that say what computing takes, see `FittedCost.from_bench`; none: data sheets do.

        Raises:
          ValueError: the devices do not hold the weights, or there are no measurements to fit to.
        """
        model = MODELS[self.model]
        longest = model.window if self.trace_format == "sharegpt" else max(model.window, largest_tokens)
        model = dataclasses.replace(model, window=self.window or longest)
        warmup_turns = int((self.warmup_share or 0.0) * num_turns)
        if not cost:
            return self.server(model, self.num_devices, warmup_turns=warmup_turns)
        return ServerConfig(  # A measured machine is not in the data sheets, nor what it has room for.
            model=model,
            cost=FittedCost.from_bench(cost),
            link_bytes_per_s=DEVICES[self.device].link_bytes_per_s,
            max_batch_size=self.max_batch_size,
            warmup_turns=warmup_turns,
        )

    def store(self, working_set_bytes: float) -> StoreSizes:
        """The store of a trace.

        Raises:
          ValueError: a size or rate outside its range.
        """
        by_share = self.capacity_share is not None
        return StoreSizes(
            dram_bytes=(self.capacity_share or 0.0) * working_set_bytes if by_share else self.dram_gb * GB,
            ssd_bytes=0.0 if by_share else self.ssd_gb * GB,
            ssd_read_bytes_per_s=self.ssd_gb_per_s * GB,
            ssd_write_bytes_per_s=self.ssd_gb_per_s * GB,
            ttl_s=self.ttl_s,
            block_tokens=self.block_tokens,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadTrace:
    """What was read of a trace."""

    sessions: Sequence[SimSession]
    """In order of arrival."""
    seen_blocks_share: float | None = None
    """Share of all blocks that lead their prompt and were seen before: of traces with hashes."""
    skipped_rows: int = 0
    """Rows that could not be used."""
    first_skipped: str | None = None
    """What was wrong with the first of them."""


CONFIG = ConfigFlags(SimulateConfig(), without=("length_scale",))
"""The flags that are fields."""


def define_flags() -> None:
    """Defines all flags but those of figures alone."""
    CONFIG.define()
    flags.DEFINE_multi_string(
        "figure", [], "Figure of the paper to simulate, or all; may be given more than once. In a checkout alone."
    )
    flags.DEFINE_multi_string(
        "cost",
        [],
        "Without figures: what computing takes as measured: the JSON of a bench, of the suites "
        f"{', '.join(FITTED_SUITES)}; give one of prefills and one of decoding at least. By default data sheets say.",
    )
    flags.DEFINE_multi_enum("policy", ["scheduler_aware", "lru", "fifo"], POLICIES, "Without figures: who is evicted.")
    flags.DEFINE_string("json_out", None, "File to write the result to.")
    flags.DEFINE_string("plot_dir", None, "Directory to write plots to: figure_13.png and so on, or policies.png.")


def read_trace(config: SimulateConfig) -> ReadTrace:
    """Reads a trace. Conversations of ShareGPT, which has no times, come at random; other traces say when.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is malformed (`TraceError` where rows have lines).
    """
    if config.path is None or config.trace_format == "sharegpt":
        return ReadTrace(sessions=config.drawn_sessions(config.lengths()))
    bad_rows = BadRows(config.skip_bad_rows)
    requests = load_requests(config.trace_format, config.path, config.num_tokens, bad_rows)
    hashed = [request for request in requests if request.hash_ids]
    return ReadTrace(
        sessions=trace_sessions(requests)[: config.num_sessions],
        seen_blocks_share=share_of_seen_blocks(hashed) if hashed else None,
        skipped_rows=bad_rows.num_skipped,
        first_skipped=bad_rows.first,
    )
