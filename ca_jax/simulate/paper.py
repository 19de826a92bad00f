"""The paper's evaluation as simulations: its set-ups, its figures, and its own numbers beside ours.

Hit rates are of all turns behind the warm-up, first ones included, but for figure 23. The paper does not say which; its
98 % of figure 23 cannot be of all turns, and its 86 to 90 % elsewhere are what is left of all turns where every history
is found: about one in ten of them begins a session.

Not here: the server (simulator), tables and plots (launch).
Source: CachedAttention (Gao et al., USENIX ATC 2024), sections 4.1 to 4.3, figures 13 to 17 and 21 to 25.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from ca_jax.overflow.config import OverflowConfig
from ca_jax.simulate.config import BELADY, ServerConfig, StoreSizes
from ca_jax.simulate.machine import DEVICES, MODELS, Device, RooflineCost
from ca_jax.simulate.results import SimCounts
from ca_jax.simulate.simulator import Server
from ca_jax.simulate.workload import poisson_sessions

GB = 1e9
TB = 1e12

NUM_DEVICES = {"llama-13b": 2, "llama-65b": 4, "llama-70b": 4, "falcon-40b": 4}
"""How many A100 of 80 GB each model runs on, which also says which models there are."""

STORE = StoreSizes(dram_bytes=128 * GB, ssd_bytes=10 * TB)
"""Of all set-ups, where nothing else is said."""

FIGURES = ("13", "14", "15", "16", "17", "21", "22", "23", "24", "25")
"""Figures that can be made."""

_HIT_RATES = {"llama-13b": 0.86, "llama-65b": 0.71, "llama-70b": 0.89, "falcon-40b": 0.90}
_TTFT_CUTS = {"llama-13b": 0.85, "llama-65b": 0.61, "llama-70b": 0.87, "falcon-40b": 0.86}
_PREFILL_SPEEDUPS = {"llama-13b": 6.8, "llama-65b": 2.6, "llama-70b": 7.8, "falcon-40b": 7.2}
_GPU_SPEEDUPS = {"llama-13b": 4.0, "llama-65b": 1.9, "llama-70b": 3.3, "falcon-40b": 3.4}
_COST_CUTS = {"llama-13b": 0.70, "llama-65b": 0.43, "llama-70b": 0.66, "falcon-40b": 0.68}
_POLICY_HIT_RATES: dict[int, dict[str, float]] = {  # Figure 21, LLaMA-13B: by SSD in TB.
    1: {},
    2: {"scheduler_aware": 0.399, "lru": 0.129, "fifo": 0.095},
    10: {"scheduler_aware": 0.86, "lru": 0.58, "fifo": 0.48},
}
_COMPARED = ("scheduler_aware", "lru", "fifo", BELADY)
_POLICY_POINTS = {2: {"lru": 0.27, "fifo": 0.31}, 10: {"lru": 0.28, "fifo": 0.38}}  # That the paper's policy is above.
_OVERFLOW_POINTS = {"llama-13b": 0.176, "llama-65b": 0.415, "llama-70b": 0.181, "falcon-40b": 0.184}
_CAPACITY_HIT_RATES = {0.1: 0.51, 0.25: 0.98}
_DRAM_HIT_RATES = {"llama-13b": 0.034, "llama-65b": 0.017, "llama-70b": 0.077, "falcon-40b": 0.191}
_ARRIVAL_HIT_RATES = {0.5: 0.82, 2.0: 0.77}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prices:
    """What things cost an hour, dollars. The paper's, of section 4.2."""

    device: float = 5.0
    """One accelerator."""
    dram_gb: float = 0.0088
    """A gigabyte of memory."""
    ssd_gb: float = 0.000082
    """A gigabyte of SSD."""

    def of(self, hours: float, num_devices: int, store: StoreSizes | None) -> float:
        """Dollars for so many hours."""
        per_hour = num_devices * self.device
        if store is not None:
            per_hour += store.dram_bytes / GB * self.dram_gb + store.ssd_bytes / GB * self.ssd_gb
        return hours * per_hour


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperConfig:
    """What all figures share.

    Raises:
      ValueError: a number that cannot be.
    """

    num_sessions: int = 9000
    """Conversations."""
    chars_per_token: float = 2.27
    """Characters of a recorded text that make a token, for whoever reads the conversations: with 2.27 as many of them
    outgrow 2,048 and 4,096 tokens (47 and 29 %) as in the paper (47 and 30 %, section 2.4)."""
    warmup_share: float = 10 / 52
    """Share of the turns that come first and are not counted."""
    arrival_rate: float = 1.0
    """Sessions a second."""
    think_s: float = 0.0
    """Mean time between an answer and the next turn. The paper gives none."""
    waits_for_answers: bool = True
    """As in `poisson_sessions`."""
    device: Device = DEVICES["a100-80"]
    """Of all set-ups."""
    flops_share: float = 0.085
    """As in `RooflineCost`. The paper's TTFT come to so small a share; its 360 ms for 2,048 tokens would be 0.6."""
    bytes_share: float = 0.7
    """As in `RooflineCost`."""
    step_s: float = 0.0
    """As in `RooflineCost`."""
    ssd_bytes_per_s: float = 5 * GB
    """Of an SSD, each way."""
    max_batch_size: int = 24
    """Slots."""
    prices: Prices = dataclasses.field(default_factory=Prices)
    """For figure 17."""
    seed: int = 0
    """Of arrivals, and of the order of conversations."""

    def __post_init__(self) -> None:
        if self.num_sessions < 1:
            raise ValueError(f"num_sessions must be at least 1, got {self.num_sessions}")
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"warmup_share must be a share in [0, 1), got {self.warmup_share}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperRow:
    """One number of a figure, the paper's beside ours."""

    figure: str
    """Its number."""
    case: str
    """Model, policy, size, or rate."""
    metric: str
    """What was counted."""
    unit: str
    """`%`, `points`, `x`, `s`, `tokens/s`, `h` or `$`."""
    ours: float
    """As simulated; shares as such, not in per cent."""
    paper: float | None = None
    """As published; None where the text does not say."""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return None if not self.paper else self.ours / self.paper


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What is simulated once: a set-up of the paper, changed in one thing or another."""

    model: str = "llama-13b"
    """A key of `NUM_DEVICES`."""
    store: StoreSizes | None = STORE
    """None to recompute."""
    method: str = "ca"
    """What becomes of KV that is stored when a context overflows: `ca` or `of`."""
    arrival_rate: float | None = None
    """Where it is another than the configuration's."""


class PaperRuns:
    """Simulations, each done once however many figures ask for it.

    Args:
      config: what they share.
      lengths: for each conversation its turns' tokens, (user, answer).
      progress: told of a run, its turns begun, and all of its turns.
    """

    def __init__(
        self,
        config: PaperConfig,
        lengths: Sequence[Sequence[tuple[int, int]]],
        progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    ) -> None:
        self.config = config
        self._lengths = lengths
        self._progress = progress
        self._counts: dict[Run, SimCounts] = {}
        self.num_turns = 0
        """Turns simulated so far."""

    def __call__(self, run: Run) -> SimCounts:
        """What a run counted."""
        if run not in self._counts:
            self._counts[run] = self._simulate(run)
        return self._counts[run]

    def _simulate(self, run: Run) -> SimCounts:
        config, model = self.config, MODELS[run.model]
        num_devices = NUM_DEVICES[run.model]
        sessions = list(
            poisson_sessions(
                self._lengths,
                num_sessions=config.num_sessions,
                arrival_rate=config.arrival_rate if run.arrival_rate is None else run.arrival_rate,
                think_s=config.think_s,
                waits_for_answers=config.waits_for_answers,
                seed=config.seed,
            )
        )
        num_turns = sum(len(session.turns) for session in sessions)
        cost = RooflineCost(
            model=model,
            device=config.device,
            num_devices=num_devices,
            flops_share=config.flops_share,
            bytes_share=config.bytes_share,
            step_s=config.step_s,
        )
        free_bytes = num_devices * config.device.hbm_bytes * 0.9 - model.weight_bytes
        server = Server(
            ServerConfig(
                model=model,
                cost=cost,
                link_bytes_per_s=config.device.link_bytes_per_s,
                hbm_tokens=free_bytes / model.token_bytes,
                max_batch_size=config.max_batch_size,
                store=self._sizes(run.store),
                overflow=OverflowConfig(method=run.method, keep_first_tokens=0),
                warmup_turns=int(config.warmup_share * num_turns),
            )
        )
        self.num_turns += num_turns
        name = f"run {len(self._counts) + 1}: {run.model} {'recompute' if run.store is None else run.method}"
        counts = server.serve(sessions, lambda done: self._progress(name, done, num_turns))
        self._progress(name, num_turns, num_turns)
        return counts

    def _sizes(self, store: StoreSizes | None) -> StoreSizes | None:
        if store is None:
            return None
        speed = self.config.ssd_bytes_per_s
        return dataclasses.replace(store, ssd_read_bytes_per_s=speed, ssd_write_bytes_per_s=speed)


def figure_rows(figure: str, runs: PaperRuns) -> list[PaperRow]:
    """Simulates what a figure shows.

    Raises:
      ValueError: there is no such figure here.
    """
    makers: dict[str, Callable[[PaperRuns], Iterable[PaperRow]]] = {
        "13": _hit_rates,
        "14": _ttft,
        "15": _prefill,
        "16": _gpu_time,
        "17": _costs,
        "21": _policies,
        "22": _overflow,
        "23": _capacity,
        "24": _mediums,
        "25": _arrivals,
    }
    if figure not in makers:
        raise ValueError(f"figure must be one of {', '.join(FIGURES)}, got {figure!r}")
    return list(makers[figure](runs))


def _both(runs: PaperRuns, model: str) -> tuple[SimCounts, SimCounts]:
    return runs(Run(model=model)), runs(Run(model=model, store=None))


def _hit_rates(runs: PaperRuns) -> Iterable[PaperRow]:
    for model, paper in _HIT_RATES.items():
        counts = runs(Run(model=model))
        yield PaperRow(figure="13", case=model, metric="hit rate", unit="%", ours=counts.hit_rate_of_all, paper=paper)


def _ttft(runs: PaperRuns) -> Iterable[PaperRow]:
    for model, paper in _TTFT_CUTS.items():
        ours, recomputed = _both(runs, model)
        cut = 1 - ours.mean_ttft_s / recomputed.mean_ttft_s
        yield PaperRow(figure="14", case=model, metric="TTFT less than recomputing", unit="%", ours=cut, paper=paper)


def _prefill(runs: PaperRuns) -> Iterable[PaperRow]:
    for model, paper in _PREFILL_SPEEDUPS.items():
        ours, recomputed = _both(runs, model)
        speedup = ours.prefill_tokens_per_s / recomputed.prefill_tokens_per_s
        yield PaperRow(figure="15", case=model, metric="prefill throughput", unit="x", ours=speedup, paper=paper)


def _gpu_time(runs: PaperRuns) -> Iterable[PaperRow]:
    for model, paper in _GPU_SPEEDUPS.items():
        ours, recomputed = _both(runs, model)
        yield PaperRow(
            figure="16", case=model, metric="GPU time", unit="x", ours=recomputed.gpu_s / ours.gpu_s, paper=paper
        )


def _costs(runs: PaperRuns) -> Iterable[PaperRow]:
    prices = runs.config.prices
    for model, paper in _COST_CUTS.items():
        (ours, recomputed), num_devices = _both(runs, model), NUM_DEVICES[model]
        paid = prices.of(ours.gpu_s / 3600, num_devices, STORE)
        cut = 1 - paid / prices.of(recomputed.gpu_s / 3600, num_devices, None)
        yield PaperRow(figure="17", case=model, metric="cost less than recomputing", unit="%", ours=cut, paper=paper)


def _policies(runs: PaperRuns) -> Iterable[PaperRow]:
    for ssd_tb, papers in _POLICY_HIT_RATES.items():
        rates = {}
        for policy in _COMPARED:
            looks_ahead = policy in ("scheduler_aware", BELADY)
            sizes = dataclasses.replace(STORE, ssd_bytes=ssd_tb * TB, eviction_policy=policy, looks_ahead=looks_ahead)
            counts = runs(Run(store=sizes))
            case = f"128G/{ssd_tb}T {policy}"
            rate = rates[policy] = counts.hit_rate_of_all
            yield PaperRow(figure="21", case=case, metric="hit rate", unit="%", ours=rate, paper=papers.get(policy))
            known = 0.996 if ssd_tb == 10 and policy == "scheduler_aware" else None
            in_dram = counts.dram_share
            yield PaperRow(figure="21", case=case, metric="hits in DRAM", unit="%", ours=in_dram, paper=known)
            yield PaperRow(figure="21", case=case, metric="GPU time", unit="h", ours=counts.gpu_s / 3600)
        for policy, paper in _POLICY_POINTS.get(ssd_tb, {}).items():
            above = rates["scheduler_aware"] - rates[policy]
            case = f"128G/{ssd_tb}T scheduler_aware over {policy}"
            yield PaperRow(figure="21", case=case, metric="hit rate", unit="points", ours=above, paper=paper)


def _overflow(runs: PaperRuns) -> Iterable[PaperRow]:
    for model, paper in _OVERFLOW_POINTS.items():
        kept, lost = runs(Run(model=model)), runs(Run(model=model, method="of"))
        less = kept.hit_rate_of_all - lost.hit_rate_of_all
        yield PaperRow(figure="22", case=model, metric="hit rate that OF loses", unit="points", ours=less, paper=paper)
        longer = lost.gpu_s / kept.gpu_s
        yield PaperRow(figure="22", case=model, metric="GPU time of OF over CA", unit="x", ours=longer)


def _capacity(runs: PaperRuns) -> Iterable[PaperRow]:
    """Capacity as a share of what all sessions of an hour could take, each with a full window."""
    model, ttl_s = MODELS["llama-13b"], 3600.0
    most_bytes = runs.config.arrival_rate * ttl_s * model.window * model.token_bytes
    for share in (0.05, 0.1, 0.15, 0.2, 0.25, 0.5, 1.0):
        ssd_bytes = max(share * most_bytes - 128 * GB, 0.0)
        sizes = StoreSizes(dram_bytes=min(128 * GB, share * most_bytes), ssd_bytes=ssd_bytes, ttl_s=ttl_s)
        counts = runs(Run(store=sizes))
        case = f"{share:g} of CCpUT"
        paper = _CAPACITY_HIT_RATES.get(share)
        yield PaperRow(figure="23", case=case, metric="hit rate", unit="%", ours=counts.hit_rate, paper=paper)
        speed = counts.output_tokens / (counts.end_s - counts.begin_s)
        yield PaperRow(figure="23", case=case, metric="decoded", unit="tokens/s", ours=speed)


def _mediums(runs: PaperRuns) -> Iterable[PaperRow]:
    for model in NUM_DEVICES:
        cases = {
            "10G of HBM": (StoreSizes(dram_bytes=10 * GB), 0.0),
            "with 128G of DRAM": (StoreSizes(dram_bytes=138 * GB), _DRAM_HIT_RATES[model]),
            "with 10T of SSD": (STORE, _HIT_RATES[model]),
        }
        for name, (sizes, paper) in cases.items():
            counts = runs(Run(model=model, store=sizes))
            case = f"{model} {name}"
            yield PaperRow(
                figure="24", case=case, metric="hit rate", unit="%", ours=counts.hit_rate_of_all, paper=paper
            )


def _arrivals(runs: PaperRuns) -> Iterable[PaperRow]:
    for rate in (0.5, 1.0, 1.5, 2.0):
        counts, case = runs(Run(arrival_rate=rate)), f"{rate:g} sessions/s"
        paper = _ARRIVAL_HIT_RATES.get(rate)
        yield PaperRow(figure="25", case=case, metric="hit rate", unit="%", ours=counts.hit_rate_of_all, paper=paper)
        known = {0.5: 0.122, 2.0: 0.154}.get(rate)
        yield PaperRow(figure="25", case=case, metric="TTFT", unit="s", ours=counts.mean_ttft_s, paper=known)
        known = {0.5: 858e3, 2.0: 681e3}.get(rate)
        yield PaperRow(
            figure="25", case=case, metric="prefilled", unit="tokens/s", ours=counts.prefill_tokens_per_s, paper=known
        )
        known = {0.5: 6.25, 2.0: 7.01}.get(rate)
        yield PaperRow(figure="25", case=case, metric="GPU time", unit="h", ours=counts.gpu_s / 3600, paper=known)
