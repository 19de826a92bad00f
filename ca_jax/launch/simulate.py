"""Simulates a server of conversations: a trace under several policies, many replicas, or the paper's figures.

    python -m ca_jax.launch.simulate --trace_format=mooncake --trace=trace.jsonl --capacity_share=0.1 --policy=lru \\
      --policy=scheduler_aware --policy=belady
    python -m ca_jax.launch.simulate --num_replicas=1000 --trace_format=agent_sessions --trace=trace.jsonl.gz \\
      --model=llama3-8b --arrival_rate=3 --mtbf_hours=100 --scale=2400:+50 --routing=hash --routing=holder
    python -m ca_jax.launch.simulate --figure=13 --figure=16
    python -m ca_jax.launch.simulate --figure=all --json_out=paper.json --plot_dir=figures

Scheduler, store and policies are the engine's own; computing, links and disks take the time that data sheets or
measurements say. Unless a trace is named, conversations are those of ShareGPT that `make setup` installs. The paper's
figures are for a checkout alone.

Not here: the simulated server (`ca_jax.simulate`), the paper's figures (`benchmarks.paper_figures`), the engine itself
on a trace (`replay`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console
from absl import flags

from ca_jax.config import QUEUE_ORDERS
from ca_jax.errors import check
from ca_jax.launch import script
from ca_jax.launch.flags import ConfigFlags, out_path, refuse
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.launch.plots import plot_policies, require_matplotlib
from ca_jax.launch.terminal import progress_bars
from ca_jax.simulate import config as sim
from ca_jax.simulate import workload
from ca_jax.simulate.config import DEVICES, MODELS
from ca_jax.simulate.fleet import MIB, TIERS, FleetConfig, Restore, least_new_tokens
from ca_jax.simulate.replicas import ROUTINGS, Fleet
from ca_jax.simulate.results import PolicyResult
from ca_jax.simulate.server import POLICIES, compare_policies, working_set_bytes
from ca_jax.simulate.traces.requests import (
    BadRows,
    TraceConfig,
    load_agent_sessions,
    load_requests,
    share_of_seen_blocks,
)
from ca_jax.simulate.traces.sharegpt import load_sharegpt

FLAGS = flags.FLAGS
GB = 1e9
_FLOPS_SHARE = 0.085
_USABLE_HBM = 0.9  # Of a device's memory, for weights and KV.
_FIGURES = "paper_figures"  # Of `benchmarks`.
_OF_TRACES = (
    *("model", "window", "num_devices", "cost", "policy", "dram_gb", "ssd_gb", "capacity_share", "ttl_s"),
    "block_tokens",
)
_OF_SHAREGPT = ("chars_per_token", "max_turns", "think_time_s")
_OF_DRAWN = ("arrival_rate", "wait_for_answers", "seed")
_OF_FIGURES = ("price_device", "price_dram_gb", "price_ssd_gb")
_OF_ONE_SERVER = (
    *("policy", "cost", "figure", "capacity_share", "ttl_s", "num_sessions", "warmup_share", "wait_for_answers"),
    *("block_tokens", "plot_dir"),
)
_RESTORED_TOKENS = 65536
_CLOSE_TO_DRAM = 1.06


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
    """ShareGPT and sessions of agents: how many come a second, Poisson."""
    think_time_s: float = 0.0
    """ShareGPT: mean time before a further turn, exponential. The paper gives none."""
    wait_for_answers: bool = True
    """ShareGPT and sessions of agents: turns come after answers, not at times of their own."""
    warmup_share: float | None = None
    """Share of the turns that come first and do not count; None: none of a trace, 10 of 52 for figures."""
    seed: int = 0
    """Of arrivals and the order of conversations."""
    device: str = "a100-80"
    """Accelerator, one of `DEVICES`."""
    flops_share: float | None = None
    """Share of its operations a second that a prefill reaches; None: 0.085, of figures 18 to 20 0.6. The paper's TTFT
    come to so small a share; its 360 ms for 2,048 tokens would be 0.6."""
    bytes_share: float = 0.7
    """Share of its memory's bandwidth that a step reaches."""
    step_ms: float = 0.0
    """Of every prefill and decode step, however small."""
    ssd_gb_per_s: float = 5.0
    """Bandwidth of the SSD, each way."""
    max_batch_size: int = 24
    """Decode slots."""
    queue_order: str = sim.ServerConfig.queue_order
    """Who of those that wait goes first: who came first (`arrival`), as in the paper, or who takes least up to a first
    token (`shortest`), as in the engine."""
    resume_error: float | None = None
    """Clients say when a session's next turn comes, off by a factor of `exp` of a normal number with this standard
    deviation (0: exactly); None: they say nothing."""
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
    block_tokens: int = sim.StoreSizes.block_tokens
    """Without figures: tokens of a block of the store."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("num_sessions", 1), ("max_batch_size", 1), ("max_turns", 0), ("window", 2)):
            value = getattr(self, name)
            check(value is None or value >= least, name, f"at least {least}", value)
        check(self.queue_order in QUEUE_ORDERS, "queue_order", " or ".join(QUEUE_ORDERS), self.queue_order)
        for name in ("chars_per_token", "capacity_share"):
            value = getattr(self, name)
            check(value is None or 0 < value < math.inf, name, "a number above 0", value)
        check(0 <= (self.warmup_share or 0) < 1, "warmup_share", "a share in [0, 1)", self.warmup_share)

    @property
    def path(self) -> Path | None:
        """Of the trace; None for the installed ShareGPT."""
        return None if self.trace is None else Path(self.trace).expanduser()

    def num_tokens(self, text: str) -> int:
        """Of a text, about."""
        return round(len(text) / self.chars_per_token)

    def lengths(self) -> workload.Lengths:
        """How long ShareGPT's conversations are. Raises as `load_sharegpt` does."""
        return workload.conversation_lengths(
            load_sharegpt(self.path), self.num_tokens, max_turns=self.max_turns or None
        )

    def drawn_sessions(self, lengths: workload.Lengths) -> list[workload.SimSession]:
        """Conversations of those lengths, which come at random; without `num_sessions` each once."""
        coming = self.coming | {"num_sessions": self.num_sessions or len(lengths)}
        return list(workload.poisson_sessions(lengths, think_s=self.think_time_s, **coming))

    @property
    def coming(self) -> dict[str, Any]:
        """How sessions come, for `workload`."""
        drawn = {name: getattr(self, name) for name in ("num_sessions", "arrival_rate", "seed")}
        return drawn | {"waits_for_answers": self.wait_for_answers}

    def server(self, model: sim.SimModel, num_devices: int, **others: Any) -> sim.ServerConfig:
        """A server of so many devices, by their data sheet, and of `others` of its fields.

        Raises:
          ValueError: the devices do not hold the weights.
        """
        device = DEVICES[self.device]
        free_bytes = num_devices * device.hbm_bytes * _USABLE_HBM - model.weight_bytes
        wanted = f"as many {device.name} as hold the {model.weight_bytes / GB:.3g} GB of weights of {model.name}"
        check(free_bytes > 0, "num_devices", wanted, num_devices)
        cost = sim.RooflineCost(
            model=model,
            device=device,
            num_devices=num_devices,
            flops_share=_FLOPS_SHARE if self.flops_share is None else self.flops_share,
            bytes_share=self.bytes_share,
            step_s=self.step_ms / 1e3,
        )
        return self._server(model, cost, hbm_tokens=free_bytes / model.token_bytes, **others)

    def _server(self, model: sim.SimModel, cost: sim.RooflineCost | sim.FittedCost, **others: Any) -> sim.ServerConfig:
        link_bytes_per_s, slots = DEVICES[self.device].link_bytes_per_s, self.max_batch_size
        return sim.ServerConfig(
            model=model,
            cost=cost,
            link_bytes_per_s=link_bytes_per_s,
            max_batch_size=slots,
            queue_order=self.queue_order,
            resume_error=self.resume_error,
            **others,
        )

    def trace_server(self, num_turns: int, largest_tokens: int, cost: Sequence[str] = ()) -> sim.ServerConfig:
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
        if cost:  # A measured machine is not in the data sheets, nor what it has room for.
            return self._server(model, sim.FittedCost.from_bench(cost), warmup_turns=warmup_turns)
        return self.server(model, self.num_devices, warmup_turns=warmup_turns)

    def store(self, working_set_bytes: float) -> sim.StoreSizes:
        """The store of a trace."""
        dram_bytes, ssd_bytes = self.dram_gb * GB, self.ssd_gb * GB
        if self.capacity_share is not None:
            dram_bytes, ssd_bytes = self.capacity_share * working_set_bytes, 0.0
        return sim.StoreSizes(
            dram_bytes=dram_bytes,
            ssd_bytes=ssd_bytes,
            ssd_read_bytes_per_s=self.ssd_gb_per_s * GB,
            ssd_write_bytes_per_s=self.ssd_gb_per_s * GB,
            ttl_s=self.ttl_s,
            block_tokens=self.block_tokens,
        )


_CONFIG = ConfigFlags(SimulateConfig())
"""The flags that are fields."""
_FLEET = ConfigFlags(FleetConfig())
"""Those of many replicas."""


def define_flags() -> None:
    """Defines all flags but those of figures alone."""
    _CONFIG.define()
    _FLEET.define()
    text = "With --num_replicas: which replica a turn goes to; may be given more than once."
    flags.DEFINE_multi_enum("routing", list(ROUTINGS), list(ROUTINGS), text)
    text = "Figure of the paper to simulate, or all; may be given more than once. In a checkout alone."
    flags.DEFINE_multi_string("figure", [], text)
    suites = ", ".join(sim.FITTED_SUITES)
    text = (
        f"Without figures: what computing takes as measured: the JSON of a bench, of the suites {suites}; give one of "
    )
    text += "prefills and one of decoding at least. By default data sheets say."
    flags.DEFINE_multi_string("cost", [], text)
    flags.DEFINE_multi_enum("policy", ["scheduler_aware", "lru", "fifo"], POLICIES, "Without figures: who is evicted.")
    flags.DEFINE_string("json_out", None, "File to write the result to.")
    flags.DEFINE_string("plot_dir", None, "Directory to write plots to: figure_13.png and so on, or policies.png.")


def read_trace(
    config: SimulateConfig, bad_rows: BadRows | None = None
) -> tuple[list[workload.SimSession], float | None]:
    """Reads a trace. Conversations of ShareGPT, which has no times, come at random; other traces say when.

    Args:
      config: which trace.
      bad_rows: what happens to rows that cannot be used; by default the first is an error.

    Returns:
      The sessions in order of arrival; of a trace with hashes, the share of all blocks that lead their prompt and were
      seen before.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is malformed (`TraceError` where rows have lines).
    """
    if config.path is None or config.trace_format == "sharegpt":
        return config.drawn_sessions(config.lengths()), None
    requests = load_requests(config.trace_format, config.path, config.num_tokens, bad_rows)
    if config.trace_format == "agent_sessions":
        drawn = workload.recorded_sessions(requests, **config.coming)
        return list(drawn), share_of_seen_blocks(requests)
    hashed = [request for request in requests if request.hash_ids]
    seen_share = share_of_seen_blocks(hashed) if hashed else None
    return workload.trace_sessions(requests)[: config.num_sessions], seen_share


def simulate_trace(config: SimulateConfig, console: rich.console.Console, plot_dir: Path | None) -> dict[str, Any]:
    """Simulates a trace under several policies, prints and draws what came of it; what goes into the JSON."""
    began_s = time.perf_counter()
    bad_rows = BadRows(config.skip_bad_rows)
    sessions, seen_share = read_trace(config, bad_rows)
    check(len(sessions) > 0, "trace", "one of at least one session", len(sessions))
    total = workload.num_turns(sessions)
    server = config.trace_server(total, max(map(workload.stored_tokens, sessions)), FLAGS.cost)
    working_set = working_set_bytes(server, sessions)
    store = config.store(working_set)
    with progress_bars() as progress:
        results = compare_policies(server, store, list(dict.fromkeys(FLAGS.policy)), sessions, progress)
    elapsed_s = time.perf_counter() - began_s
    capacity = store.dram_bytes + store.ssd_bytes
    room = f"{capacity / GB:,.4g} GB of room ({100 * capacity / working_set:.3g} %)"
    kv = f"{working_set / GB:,.4g} GB of KV in all, {room}"
    script.note(console, f"{len(sessions):,} sessions, {total:,} turns; {kv}", None)
    if seen_share is not None:
        script.note(console, f"leading blocks that were seen before: {seen_share:.3f}", None)
    if bad_rows.num_skipped:
        script.note(console, f"{bad_rows.num_skipped:,} rows skipped, the first: {bad_rows.first}", None)
    print_policies(results, console)
    script.note(console, f"{total * len(results):,} turns simulated in {elapsed_s:.0f} s", None)
    if plot_dir is not None:
        plot_policies(plot_dir / "policies.png", results)
    return {
        "num_sessions": len(sessions),
        "num_turns": total,
        "working_set_bytes": working_set,
        "seen_blocks_share": seen_share,
        "skipped_rows": bad_rows.num_skipped,
        "store": dataclasses.asdict(store),
        "rows": [result.row() for result in results],
        "elapsed_s": elapsed_s,
    }


def read_plans(config: SimulateConfig, window: int, bad_rows: BadRows) -> list[workload.SessionPlan]:
    """The recorded sessions that come to many replicas, again and again. Raises as `read_trace` does."""
    if config.trace_format == "sharegpt":
        overflow = sim.OverflowConfig(keep_first_tokens=0)
        return [workload.plan_conversation(each, window, overflow) for each in config.lengths()]
    wanted = "sharegpt or agent_sessions with num_replicas"
    check(
        config.trace_format == "agent_sessions" and config.path is not None, "trace_format", wanted, config.trace_format
    )
    return workload.plan_requests(load_agent_sessions(config.path or "", bad_rows))


def simulate_replicas(config: SimulateConfig, fleet: FleetConfig, console: rich.console.Console) -> dict[str, Any]:
    """Simulates many replicas under several routings, and prints what came of it; what goes into the JSON."""
    began_s = time.perf_counter()
    bad_rows = BadRows(config.skip_bad_rows)
    model = MODELS[config.model]
    sessions = read_plans(config, config.window or model.window, bad_rows)
    check(len(sessions) > 0, "trace", "one of at least one session", len(sessions))
    server = dataclasses.replace(config.server(model, config.num_devices), store=config.store(0.0))
    largest = max(turn.prompt_tokens + turn.answer_tokens for each in sessions for turn in each.turns)
    wanted = f"as many as hold the {largest:,} tokens of the largest turn"
    check(server.hbm_tokens >= largest, "num_devices", wanted, config.num_devices)
    rows = []
    for routing in dict.fromkeys(FLAGS.routing):
        coming = workload.coming_sessions(
            sessions, arrival_rate=config.arrival_rate, think_s=config.think_time_s, seed=config.seed
        )
        simulated = Fleet(fleet, server, routing, config.seed)
        with progress_bars() as progress:
            simulated.run(coming, lambda now_s, name=routing: progress(name, int(now_s), int(fleet.duration_s)))  # type: ignore[misc]
        rows.append(simulated.row())
    restores = restore_rows(config)
    elapsed_s = time.perf_counter() - began_s
    num_turns = sum(len(each.turns) for each in sessions)
    text = (
        f"{len(sessions):,} recorded sessions of {num_turns:,} turns, again and again; {config.arrival_rate:g} a second"
    )
    script.note(console, f"{text}; {fleet.num_replicas:,} replicas", None)
    if bad_rows.num_skipped:
        script.note(console, f"{bad_rows.num_skipped:,} rows skipped, the first: {bad_rows.first}", None)
    print_replicas(rows, console)
    script.note(console, f"simulated in {elapsed_s:.0f} s", None)
    return {
        "config": {**dataclasses.asdict(config), "trace": None if config.path is None else config.path.name},
        "fleet": dataclasses.asdict(fleet),
        "num_sessions": len(sessions),
        "num_turns": num_turns,
        "largest_turn_tokens": largest,
        "rows": rows,
        "restores": restores,
        "elapsed_s": elapsed_s,
    }


def restore_rows(config: SimulateConfig) -> list[dict[str, Any]]:
    """What restoring 64K tokens of llama3-8b layer by layer takes beside local DRAM, by size of objects and prompt."""
    model, device = MODELS["llama3-8b"], DEVICES[config.device]
    cost = sim.RooflineCost(model=model, device=device, num_devices=1)
    rows = []
    for object_mib in (16, 32, 64):
        restore = Restore(
            model=model,
            cost=cost,
            history_tokens=_RESTORED_TOKENS,
            new_tokens=1,
            link_bytes_per_s=device.link_bytes_per_s,
            object_bytes=object_mib * MIB,
        )
        least = least_new_tokens(restore, _CLOSE_TO_DRAM)
        for new_tokens in (64, 512, 1024, 2048, 4096, 8192):
            one = dataclasses.replace(restore, new_tokens=new_tokens)
            times = {name: getattr(one, name) for name in ("from_dram_s", "from_objects_s", "compute_s", "over_dram")}
            rows.append({"object_mib": object_mib, "new_tokens": new_tokens, **times, "least_new_tokens": least})
    return rows


def print_replicas(rows: Sequence[dict[str, Any]], console: rich.console.Console) -> None:
    """Prints what became of a workload under each routing."""
    headings = *(f">{tier}\n%" for tier in TIERS), ">TTFT\np50", ">\np99", ">network\nGB/s", ">objects\nreq/s", ">\n$/h"
    headings += ">\n$/M tok", ">turns: most\nover mean", ">busy\n%", ">moved", ">failures", ">failed\nturns"
    table = [
        (
            row["routing"],
            *(f"{100 * row['shares'][tier]:.1f}" for tier in TIERS),
            *(script.format_number(row["ttft_s"][each]) for each in ("p50", "p99")),
            *(script.format_number(row[name]) for name in ("network_gb_per_s", "requests_per_s", "price_per_hour")),
            f"{row['price_per_million_tokens']:.5f}",
            f"{row['most_turns_over_mean']:.2f}",
            f"{100 * row['busy_share']:.0f}",
            *(f"{row[name]:,}" for name in ("sessions_moved", "num_failures", "failure_turns")),
        )
        for row in rows
    ]
    console.print(script.make_table(("routing", *headings), table))
    told = "%: of tokens of histories; moved: turns served elsewhere than the turn before; failed turns: of whose "
    script.note(console, told + "history some was computed, since a failure had taken it", None)


def print_policies(results: Sequence[PolicyResult], console: rich.console.Console) -> None:
    """Prints what became of a trace under each policy."""
    headings = ">hits\n%", ">in DRAM\n%", ">tokens\n%", ">prefill\ns", ">saved\n%", ">GPU\ns"
    percentiles = ">TTFT\nmean", ">\np50", ">\np90", ">\np99"
    rows = []
    for result in results:
        found = result.counts
        shares = (f"{100 * share:.1f}" for share in (found.hit_rate, found.dram_share, found.cached_share))
        times = map(script.format_number, (found.gpu_s, found.ttft_mean_s, *found.ttft_percentiles_s.values()))
        saved = f"{100 * result.prefill_saved:.1f}"
        rows.append((result.policy, *shares, script.format_number(found.prefill_s), saved, *times))
    console.print(script.make_table(("policy", *headings, *percentiles), rows))
    told = "hits: turns of whose history anything was found; tokens: of histories; saved: of recomputing's prefill"
    script.note(console, told, None)


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    console = script.make_console()
    refuse(*((_OF_TRACES, "figures") if FLAGS.figure else (_OF_FIGURES, "a trace")))
    if FLAGS.num_replicas is not None:
        refuse(_OF_ONE_SERVER, "many replicas")
    else:
        refuse((*_FLEET.names(), "routing"), "one server")
        if FLAGS.trace_format != "sharegpt":
            drawn = () if FLAGS.trace_format == "agent_sessions" else _OF_DRAWN
            refuse((*_OF_SHAREGPT, *drawn), f"a trace of {FLAGS.trace_format}")
    config, json_out = _CONFIG.read(), out_path("json_out")
    plot_dir = None if FLAGS.plot_dir is None else Path(FLAGS.plot_dir).expanduser()
    if plot_dir is not None:
        require_matplotlib()
        plot_dir.mkdir(parents=True, exist_ok=True)
    if FLAGS.num_replicas is not None:
        report = simulate_replicas(config, _FLEET.read(), console)
    else:
        simulate = script.must_load_benchmark(_FIGURES).simulate_figures if FLAGS.figure else simulate_trace
        report = simulate(config, console, plot_dir)
    if json_out is not None:
        told = {"machine": describe_machine(), "versions": describe_versions()}
        script.write_json({"command": script.command_line("simulate"), **report, **told}, json_out)


if __name__ == "__main__":
    define_flags()
    if (figures := script.load_benchmark(_FIGURES)) is not None:
        figures.define_flags()
    script.run(main)
