"""The paper's evaluation as simulations: its set-ups, its figures, its own numbers beside ours; their table and plots.

Hit rates are of all turns behind the warm-up, first ones included, but for figure 23. The paper does not say which; its
98 % of figure 23 cannot be of all turns, and its 86 to 90 % elsewhere are what is left of all turns where every history
is X

Not here: the server (`ca_jax.simulate`), figures of one turn (`paper_turns`), flags that traces have too
(`ca_jax.launch.simulate`).
Source: CachedAttention (Gao et al., USENIX ATC 2024), sections 4.1 to 4.3, figures 13 to 25.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import rich.console
from absl import flags

from benchmarks import paper_turns
from ca_jax.launch.flags import NAMES, ConfigFlags, FlagError
from ca_jax.launch.plots import BLUE, VERMILION, new_figure, write_figure
from ca_jax.launch.script import format_number, make_table, note
from ca_jax.launch.simulate import GB, SimulateConfig
from ca_jax.launch.terminal import progress_bars
from ca_jax.overflow.config import OverflowConfig
from ca_jax.simulate.config import BELADY, MODELS, StoreSizes
from ca_jax.simulate.results import SimCounts
from ca_jax.simulate.server import Server
from ca_jax.simulate.workload import Lengths, num_turns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

flags.disclaim_key_flags()  # They are flags of `simulate`: its --help shows them.

TB = 1e12

NUM_DEVICES = {"llama-13b": 2, "llama-65b": 4, "llama-70b": 4, "falcon-40b": 4}
"""How many A100 of 80 GB each model runs on, which also says which models there are."""
STORE = StoreSizes(dram_bytes=128 * GB, ssd_bytes=10 * TB)
"""Of all set-ups, where nothing else is said."""
_NUM_SESSIONS = 9000
_WARMUP_SHARE = 10 / 52
_PAPERS: dict[str, Any] = {"facecolor": "white", "edgecolor": VERMILION, "hatch": "////"}  # Bars of the paper.

# Figures 13 to 17: of each model, in the order of NUM_DEVICES.
_MODEL_ROWS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "13": ("hit rate", "%", (0.86, 0.71, 0.89, 0.90)),
    "14": ("TTFT less than recomputing", "%", (0.85, 0.61, 0.87, 0.86)),
    "15": ("prefill throughput", "x", (6.8, 2.6, 7.8, 7.2)),
    "16": ("GPU time", "x", (4.0, 1.9, 3.3, 3.4)),
    "17": ("cost less than recomputing", "%", (0.70, 0.43, 0.66, 0.68)),
}
FIGURES = (*_MODEL_ROWS, *paper_turns.FIGURES, "21", "22", "23", "24", "25")
"""Figures that can be made."""
_POLICY_HIT_RATES: dict[int, dict[str, float]] = {  # Figure 21, LLaMA-13B: by SSD in TB.
    1: {},
    2: {"scheduler_aware": 0.399, "lru": 0.129, "fifo": 0.095},
    10: {"scheduler_aware": 0.86, "lru": 0.58, "fifo": 0.48},
}
_POLICY_POINTS = {2: {"lru": 0.27, "fifo": 0.31}, 10: {"lru": 0.28, "fifo": 0.38}}  # That the paper's policy is above.
_OVERFLOW_POINTS = (0.176, 0.415, 0.181, 0.184)  # Figure 22, of each model.
_CAPACITY_HIT_RATES = {0.05: None, 0.1: 0.51, 0.15: None, 0.2: None, 0.25: 0.98, 0.5: None, 1.0: None}
_DRAM_HIT_RATES = (0.034, 0.017, 0.077, 0.191)  # Figure 24, of each model.
_ARRIVALS: dict[float, tuple[float | None, ...]] = {  # Figure 25: hit rate, TTFT, prefilled tokens/s, GPU hours.
    0.5: (0.82, 0.122, 858e3, 6.25),
    1.0: (None,) * 4,
    1.5: (None,) * 4,
    2.0: (0.77, 0.154, 681e3, 7.01),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prices:
    """What things cost an hour, dollars. The paper's, of section 4.2. Every field is a flag."""

    device: float = 5.0
    """Figure 17: dollars an hour of an accelerator."""
    dram_gb: float = 0.0088
    """Figure 17: dollars an hour of a gigabyte of memory."""
    ssd_gb: float = 0.000082
    """Figure 17: dollars an hour of a gigabyte of SSD."""

    def of(self, hours: float, num_devices: int, store: StoreSizes | None) -> float:
        """Dollars for so many hours."""
        per_hour = num_devices * self.device
        if store is not None:
            per_hour += store.dram_bytes / GB * self.dram_gb + store.ssd_bytes / GB * self.ssd_gb
        return hours * per_hour


NAMES[Prices] = {field.name: f"price_{field.name}" for field in dataclasses.fields(Prices)}
_PRICES = ConfigFlags(Prices())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperRow:
    """One number of a figure, the paper's beside ours."""

    figure: str
    case: str
    """Model, policy, size, or rate."""
    metric: str
    unit: str
    """`%`, `points`, `x`, `s`, `tokens/s`, `h`, `layers` or `$`."""
    ours: float
    """As simulated; shares as such, not in per cent."""
    paper: float | None = None
    """As published; None where the text does not say."""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return None if not self.paper else self.ours / self.paper


class PaperRuns:
    """Simulations, each done once however many figures ask for it.

    What they share is the config's; of sessions and of the warm-up as the paper has them, unless it says otherwise.
    """

    def __init__(
        self,
        config: SimulateConfig,
        lengths: Lengths,
        prices: Prices | None = None,
        progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    ) -> None:
        warmup_share = _WARMUP_SHARE if config.warmup_share is None else config.warmup_share
        num_sessions = config.num_sessions or _NUM_SESSIONS
        self.config = dataclasses.replace(config, num_sessions=num_sessions, warmup_share=warmup_share)
        self.prices = prices or Prices()
        self._lengths = lengths
        self._progress = progress
        self._counts: dict[tuple[SimulateConfig, str, StoreSizes | None, str], SimCounts] = {}
        self.num_turns = 0

    def __call__(
        self,
        config: SimulateConfig | None = None,
        *,
        model: str = "llama-13b",
        store: StoreSizes | None = STORE,
        method: str = "ca",
    ) -> SimCounts:
        """What a run counted: of the shared config where none is given, without a store where it is to recompute."""
        run = (config or self.config, model, store, method)
        if run not in self._counts:
            self._counts[run] = self._simulate(*run)
        return self._counts[run]

    def _simulate(self, config: SimulateConfig, name: str, store: StoreSizes | None, method: str) -> SimCounts:
        speed = config.ssd_gb_per_s * GB
        sessions = config.drawn_sessions(self._lengths)
        total = num_turns(sessions)
        server = Server(
            config.server(
                MODELS[name],
                NUM_DEVICES[name],
                store=store and dataclasses.replace(store, ssd_read_bytes_per_s=speed, ssd_write_bytes_per_s=speed),
                overflow=OverflowConfig(method=method, keep_first_tokens=0),
                warmup_turns=int((config.warmup_share or 0.0) * total),
            )
        )
        self.num_turns += total
        told = f"run {len(self._counts) + 1}: {name} {'recompute' if store is None else method}"
        counts = server.serve(sessions, lambda done: self._progress(told, done, total))
        self._progress(told, total, total)
        return counts


def figure_rows(figure: str, runs: PaperRuns) -> list[PaperRow]:
    """Simulates what a figure shows. ValueError: there is no such figure here."""
    makers: dict[str, Callable[[PaperRuns], Iterable[_Row]]] = {
        **{each: functools.partial(_of_models, figure=each) for each in _MODEL_ROWS},
        **{each: lambda runs: paper_turns.rows(figure, runs.config) for each in paper_turns.FIGURES},
        "21": _policies,
        "22": _overflow,
        "23": _capacity,
        "24": _mediums,
        "25": _arrivals,
    }
    if figure not in makers:
        raise ValueError(f"figure must be one of {', '.join(FIGURES)}, got {figure!r}")
    return [
        PaperRow(figure=figure, case=case, metric=metric, unit=unit, ours=ours, paper=paper)
        for case, metric, unit, ours, paper in makers[figure](runs)
    ]


_Row = paper_turns.Row


def _mean_prefill_s(counts: SimCounts) -> float:
    """From the beginning of a prefill to its first token: the paper's TTFT."""
    return counts.prefill_s / max(counts.num_turns, 1)


def _prefill_rate(counts: SimCounts) -> float:
    """Prompt tokens, loaded ones included, over the time of prefills."""
    return counts.prompt_tokens / counts.prefill_s if counts.prefill_s else 0.0


def _of_models(runs: PaperRuns, figure: str) -> Iterable[_Row]:
    """A figure of 13 to 17."""
    metric, unit, papers = _MODEL_ROWS[figure]
    prices = runs.prices
    for (model, num_devices), paper in zip(NUM_DEVICES.items(), papers, strict=True):
        stored = runs(model=model)
        if figure == "13":
            yield model, metric, unit, stored.hit_rate_of_all, paper
            yield model, "history tokens found", "%", stored.cached_share, None
            continue
        recomputed = runs(model=model, store=None)
        cost, baseline = prices.of(stored.gpu_s, num_devices, STORE), prices.of(recomputed.gpu_s, num_devices, None)
        ours = {
            "14": 1 - _mean_prefill_s(stored) / _mean_prefill_s(recomputed),
            "15": _prefill_rate(stored) / _prefill_rate(recomputed),
            "16": recomputed.gpu_s / stored.gpu_s,
            "17": 1 - cost / baseline,
        }
        yield model, metric, unit, ours[figure], paper


def _policies(runs: PaperRuns) -> Iterable[_Row]:
    for ssd_tb, papers in _POLICY_HIT_RATES.items():
        rates = {}
        for policy in ("scheduler_aware", "lru", "fifo", BELADY):
            looks_ahead = policy in ("scheduler_aware", BELADY)
            sizes = dataclasses.replace(STORE, ssd_bytes=ssd_tb * TB, eviction_policy=policy, looks_ahead=looks_ahead)
            counts = runs(store=sizes)
            case, rates[policy] = f"128G/{ssd_tb}T {policy}", counts.hit_rate_of_all
            yield case, "hit rate", "%", rates[policy], papers.get(policy)
            known = 0.996 if ssd_tb == 10 and policy == "scheduler_aware" else None
            yield case, "hits in DRAM", "%", counts.dram_share, known
            yield case, "GPU time", "h", counts.gpu_s / 3600, None
        for policy, paper in _POLICY_POINTS.get(ssd_tb, {}).items():
            case = f"128G/{ssd_tb}T scheduler_aware over {policy}"
            yield case, "hit rate", "points", rates["scheduler_aware"] - rates[policy], paper


def _overflow(runs: PaperRuns) -> Iterable[_Row]:
    for model, paper in zip(NUM_DEVICES, _OVERFLOW_POINTS, strict=True):
        kept, lost = runs(model=model), runs(model=model, method="of")
        yield model, "hit rate that OF loses", "points", kept.hit_rate_of_all - lost.hit_rate_of_all, paper
        yield model, "GPU time of OF over CA", "x", lost.gpu_s / kept.gpu_s, None


def _capacity(runs: PaperRuns) -> Iterable[_Row]:
    """Capacity as a share of what all sessions of an hour could take, each with a full window."""
    model, ttl_s = MODELS["llama-13b"], 3600.0
    most_bytes = runs.config.arrival_rate * ttl_s * model.window * model.token_bytes
    for share, paper in _CAPACITY_HIT_RATES.items():
        ssd_bytes = max(share * most_bytes - 128 * GB, 0.0)
        counts = runs(store=StoreSizes(dram_bytes=min(128 * GB, share * most_bytes), ssd_bytes=ssd_bytes, ttl_s=ttl_s))
        case = f"{share:g} of CCpUT"
        yield case, "hit rate", "%", counts.hit_rate, paper
        yield case, "decoded", "tokens/s", counts.output_tokens / counts.elapsed_s, None


def _mediums(runs: PaperRuns) -> Iterable[_Row]:
    for model, dram, ssd in zip(NUM_DEVICES, _DRAM_HIT_RATES, _MODEL_ROWS["13"][2], strict=True):
        for name, sizes, paper in (
            ("10G of HBM", StoreSizes(dram_bytes=10 * GB), 0.0),
            ("with 128G of DRAM", StoreSizes(dram_bytes=138 * GB), dram),
            ("with 10T of SSD", STORE, ssd),
        ):
            yield f"{model} {name}", "hit rate", "%", runs(model=model, store=sizes).hit_rate_of_all, paper


def _arrivals(runs: PaperRuns) -> Iterable[_Row]:
    for rate, (hits, ttft_s, tokens_per_s, hours) in _ARRIVALS.items():
        counts = runs(dataclasses.replace(runs.config, arrival_rate=rate))
        case = f"{rate:g} sessions/s"
        yield case, "hit rate", "%", counts.hit_rate_of_all, hits
        yield case, "TTFT", "s", _mean_prefill_s(counts), ttft_s
        yield case, "prefilled", "tokens/s", _prefill_rate(counts), tokens_per_s
        yield case, "GPU time", "h", counts.gpu_s / 3600, hours


# Tables and plots.


def define_flags() -> None:
    """Defines the flags that `simulate` has for figures alone."""
    _PRICES.define()


def simulate_figures(config: SimulateConfig, console: rich.console.Console, plot_dir: Path | None) -> dict[str, Any]:
    """Simulates the figures that flags name, prints and draws them; what goes into the JSON."""
    wanted: Sequence[str] = flags.FLAGS.figure
    if unknown := sorted(set(wanted) - {*FIGURES, "all"}):
        raise FlagError(f"figure must be one of {', '.join(FIGURES)}, all; got {', '.join(unknown)}")
    figures = FIGURES if "all" in wanted else tuple(dict.fromkeys(wanted))
    began_s = time.perf_counter()
    with progress_bars() as progress:
        lengths = config.lengths() if set(figures) - {*paper_turns.FIGURES} else ()
        runs = PaperRuns(config, lengths, _PRICES.read(), progress)
        rows = [row for figure in figures for row in figure_rows(figure, runs)]
    elapsed_s = time.perf_counter() - began_s
    print_figures(rows, console)
    if runs.num_turns:
        note(console, f"{runs.num_turns:,} turns simulated in {elapsed_s:.0f} s", None)
    if plot_dir is not None:
        for figure in figures:
            plot_figure(plot_dir / f"figure_{figure}.png", [row for row in rows if row.figure == figure])
    return {
        "config": {**dataclasses.asdict(runs.config), "prices": dataclasses.asdict(runs.prices)},
        "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
        "num_turns": runs.num_turns,
        "elapsed_s": elapsed_s,
    }


def print_figures(rows: Sequence[PaperRow], console: rich.console.Console) -> None:
    """Prints figures of the paper, its numbers beside ours."""
    cells: list[tuple[str, ...]] = []
    for row in rows:
        if cells and row.figure != cells[-1][0]:
            cells.append(())
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        numbers = (shown(row.ours, row.unit), shown(row.paper, row.unit), ratio)
        cells.append((row.figure, row.case, row.metric, *numbers))
    console.print(make_table((">figure", "case", "what", ">ours", ">paper", ">ratio"), cells))


def shown(value: float | None, unit: str) -> str:
    """A number with its unit; nothing for none."""
    if value is None:
        return ""
    return f"{100 * value:.1f} {unit}" if unit in ("%", "points") else f"{format_number(value)} {unit}"


def plot_figure(path: Path, rows: Sequence[PaperRow]) -> None:
    """Draws a figure of the paper: bars of ours and, where it is known, of the paper's for each thing counted."""
    if len({row.figure for row in rows}) != 1:
        raise ValueError(f"rows must be of one figure, got those of {sorted({row.figure for row in rows})}")
    metrics = list(dict.fromkeys((row.metric, row.unit) for row in rows))
    of_metric = [[row for row in rows if (row.metric, row.unit) == metric] for metric in metrics]
    sizes = [len(each) + 1.5 for each in of_metric]
    figure = new_figure(9, 0.7 + 0.34 * sum(sizes))
    panels: Sequence[Axes] = np.ravel(figure.subplots(len(metrics), 1, height_ratios=sizes))  # type: ignore[assignment]
    for (metric, unit), shown, axes in zip(metrics, of_metric, panels, strict=True):
        scale, places = 100 if unit in ("%", "points") else 1, np.arange(len(shown))
        axes.barh(places - 0.2, [scale * row.ours for row in shown], 0.38, color=BLUE)
        papers = [np.nan if row.paper is None else scale * row.paper for row in shown]
        axes.barh(places + 0.2, papers, 0.38, **_PAPERS)
        axes.set_yticks(places, [row.case for row in shown], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(f"{metric} ({unit})", fontsize=9)
    from matplotlib.patches import Patch

    marks = [Patch(color=BLUE), Patch(**_PAPERS)]
    figure.legend(marks, ["simulated", "paper"], loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(f"Figure {rows[0].figure} of the paper, simulated", x=0.01, ha="left", fontsize=11)
    write_figure(figure, path, grid="x")
