"""What every suite shares: configs, rows, samples in interleaved rounds, and the registry that `suite` fills.

Not here: flags (`flags`), running and writing (`main`), tables (`tables`), figures (`figures`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from benchmarks.compiles import CompileCounter
from ca_jax.config import EngineConfig
from ca_jax.errors import CaJaxError
from ca_jax.pretrained import LoadedModel, Progress

if TYPE_CHECKING:
    from benchmarks.figures import Panel
    from benchmarks.peers import TransformersPeer
    from benchmarks.recording import Recorder

NOISE = 0.03
"""Times that differ by less, as a share, count as the same."""
Spread = dict[str, tuple[float, float]]
"""Least and largest sample, by the name of the field that has their median."""
Sample = Mapping[str, Any]
"""What one run of a way gave, by field of the row."""
Rounds = list[dict[str, dict[str, Any]]]
"""Samples of each way, by its name, of each round that counts."""
Ways = Mapping[str, Callable[[], Sample]]
"""What takes one sample of each of the systems that are compared."""


class BenchError(CaJaxError):
    """A sample did other work than its row would claim, or cannot be taken, so that there is no row."""


# Configs.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """A config whose fields are numbers, words or lists of them, positive and finite but where it says otherwise.

    Raises:
      ValueError: a value outside its range.
    """

    may_be_zero: ClassVar[frozenset[str]] = frozenset({"seed"})
    may_be_empty: ClassVar[frozenset[str]] = frozenset()
    shares: ClassVar[frozenset[str]] = frozenset()  # Fields whose values lie in [0, 1].
    choices: ClassVar[Mapping[str, Sequence[str]]] = {}  # Fields that are a word, or different words; and the words.

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            items = value if isinstance(value, tuple) else (value,)
            if not items and field.name not in self.may_be_empty:
                raise ValueError(f"{field.name} must have at least one item, got none")
            for item in items:
                self._check(field.name, item)
            if field.name in self.choices and len(set(items)) < len(items):
                raise ValueError(f"{field.name} must not name one thing twice, got {', '.join(items)}")

    def _check(self, name: str, item: Any) -> None:
        if isinstance(item, str) and name in self.choices and item not in self.choices[name]:
            how_many = "some" if isinstance(getattr(self, name), tuple) else "one"
            raise ValueError(f"{name} must be {how_many} of {', '.join(self.choices[name])}; got {item}")
        if isinstance(item, bool) or not isinstance(item, int | float):
            return
        if name in self.shares:
            require(0 <= item <= 1, name, "a share in [0, 1]", item)
        elif name in self.may_be_zero:
            require(0 <= item < math.inf, name, "a number of at least 0", item)
        elif isinstance(item, int):
            require(item >= 1, name, "at least 1", item)
        else:
            require(0 < item < math.inf, name, "a positive number", item)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """What to measure. Every field is a flag of its name, its docstring the help."""

    settled: ClassVar[tuple[str, ...]] = ()  # Flags of the engine that the suite sets itself.

    repeats: int = 5
    """Samples that a median is of."""
    seed: int = 0
    """Of what is random: weights of a preset, token ids, bytes, sizes, who comes next."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig(Config):
    """What to measure of engines that serve a model."""

    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """The engines, but for what the suite sets itself."""


def require(is_so: bool, name: str, wanted: str, got: object) -> None:
    """Raises ValueError unless a value is what it must be."""
    if not is_so:
        raise ValueError(f"{name} must be {wanted}, got {got}")


# Rows.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What most rows end with. Seconds end in `_s`; the JSON has every field under its name."""

    recompiles: int = 0
    """Functions compiled while sampling; 0 unless the warm-up missed one."""
    spread: Spread = dataclasses.field(default_factory=dict)
    """See `Spread`."""


AnyRow = TypeVar("AnyRow")


def make_row(kind: type[AnyRow], taken: Iterable[Sample], **values: Any) -> AnyRow:
    """A row: fields that samples have are their medians, with their spread; `recompiles` is the sum.

    Samples are of one way, or of several that have no field in common. Integers are rounded; what may be None is None
    where no sample has it; `values` are all other fields.
    """
    taken, spread = list(taken), {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name = field.name
        found = [sample[name] for sample in taken if sample.get(name) is not None]
        if name in values or name == "spread":
            continue
        if name == "recompiles":
            values[name] = sum(found)
        elif found:
            median = float(np.median(found))
            values[name] = round(median) if field.type == "int" else median
            spread[name] = (float(min(found)), float(max(found)))
        elif "None" in str(field.type):
            values[name] = None
    if any(field.name == "spread" for field in dataclasses.fields(kind)):  # type: ignore[arg-type]
        values["spread"] = spread
    return kind(**values)


# Rounds.


Item = TypeVar("Item")


def ticked(progress: Progress, what: str, items: Collection[Item]) -> Iterator[Item]:
    """The items, one by one, with progress told as each is done with."""
    for done, item in enumerate(items):
        progress(what, done, len(items))
        yield item
    progress(what, len(items), len(items))


def interleave(
    make_round: Callable[[], Ways], repeats: int, *, warm_up: int = 1, progress: Progress = lambda *_: None
) -> Rounds:
    """Takes samples of several ways in turn, never at once; every round begins with the next way (A B C, B C A, ...).

    `make_round` gives the ways of a round, which share its inputs. Rounds of the warm-up, which compile, do not count.
    Every sample also has `recompiles`.
    """
    rounds: Rounds = []
    for nth in ticked(progress, "rounds", range(warm_up + repeats)):
        ways, taken = make_round(), {}
        for name in in_turn(list(ways), nth):
            with CompileCounter() as compiles:
                sample = ways[name]()
            taken[name] = {**sample, "recompiles": compiles.count}
        if nth >= warm_up:
            rounds.append({name: taken[name] for name in ways})
    return rounds


def timed(name: str, work: Callable[..., object], *args: Any) -> dict[str, float]:
    """A sample: under that name, the seconds that a call takes."""
    started_s = time.perf_counter()
    work(*args)
    return {name: time.perf_counter() - started_s}


def in_turn(items: Sequence[Item], nth_round: int) -> list[Item]:
    """The items in the order of a round: each has every place in turn, since what ran before may cost the next."""
    first = nth_round % max(len(items), 1)
    return [*items[first:], *items[:first]]


def samples(rounds: Rounds) -> list[dict[str, Any]]:
    """The samples of all ways."""
    return [sample for each in rounds for sample in each.values()]


def median(taken: Iterable[Sample], name: str) -> float | None:
    """The median of what samples have under a name; None where none has it."""
    found = [sample[name] for sample in taken if sample.get(name) is not None]
    return float(np.median(found)) if found else None


def must_median(taken: Iterable[Sample], name: str) -> float:
    """Likewise, where there must be one; BenchError: no sample has it."""
    found = median(taken, name)
    if found is None:
        raise BenchError(f"samples must have {name}, got none with it")
    return found


def percentiles(name: str, values: Any, *at: int) -> dict[str, Any]:
    """Fields of percentiles: those of `ttft_p{}_s` at 50 and 99 are `ttft_p50_s` and `ttft_p99_s`."""
    return {name.format(each): float(np.percentile(values, each)) for each in at}


def ratio(taken: Sequence[Sample], name: str, other: str) -> float | None:
    """The median under one name over that under another; None where either is missing."""
    found, base = median(taken, name), median(taken, other)
    return None if found is None or base is None else found / base


def of_way(rounds: Rounds, name: str) -> list[dict[str, Any]]:
    """The samples of one way."""
    return [each[name] for each in rounds if name in each]


def same(rounds: Rounds, name: str) -> bool:
    """Whether all ways of each round gave the same value under a name."""
    return all(len({_key(sample[name]) for sample in each.values()}) == 1 for each in rounds)


def recompiles(rounds: Rounds) -> int:
    """Functions compiled by all ways."""
    return sum(sample["recompiles"] for each in rounds for sample in each.values())


def extremes(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    """`best_NAME` and `worst_NAME`, the largest and the least; None where there are no values."""
    found = [value for value in values if value is not None]
    return {f"best_{name}": max(found, default=None), f"worst_{name}": min(found, default=None)}


def _key(value: Any) -> Any:
    return tuple(map(_key, value)) if isinstance(value, list) else value


# Suites.

AnyConfig = TypeVar("AnyConfig", bound=Config, covariant=True)


@dataclasses.dataclass(kw_only=True)
class Run(Generic[AnyConfig]):
    """What a suite is given, and what it leaves besides rows."""

    config: AnyConfig
    """What to measure."""
    progress: Progress = lambda *_: None
    """Told of rounds."""
    loaded: LoadedModel | None = None
    """See `model`."""
    peer: TransformersPeer | None = None
    """Another engine with the same weights, to be measured beside ours."""
    recorder: Recorder | None = None
    """Gets one more round of suites that are recorded."""
    cores: int = 1
    """Cores of the machine."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Put in front of the summary by the suite."""
    startup: dict[str, float] = dataclasses.field(default_factory=dict)
    """`engine_start_s` and `first_touch_s`, of a suite that has one engine."""

    @property
    def model(self) -> LoadedModel:
        """What is served."""
        if self.loaded is None:
            raise RuntimeError("a suite that serves must have a model, got none")
        return self.loaded

    def rng(self) -> np.random.Generator:
        """A generator of the config's seed."""
        return np.random.default_rng(self.config.seed)

    def rounds(self, make_round: Callable[[], Ways], *, warm_up: int = 1) -> Rounds:
        """As many rounds as the config says, see `interleave`."""
        return interleave(make_round, self.config.repeats, warm_up=warm_up, progress=self.progress)


Measure = Callable[[Run[Any]], Iterator[Any]]
Summary = Callable[[Sequence[Any]], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """One suite."""

    name: str
    """Of the flag `--suite`."""
    config: type[Config]
    """What it is asked by."""
    measure: Measure
    """Yields rows: dataclasses, or dicts of JSON types."""
    summarize: Summary
    """What the rows come to."""
    panels: tuple[Panel, ...] = ()
    """Of the figure that `--plot_out` draws."""
    has_peer: bool = False
    """Whether a peer can be measured beside it."""
    is_recorded: bool = False
    """Whether one more round can be recorded."""
    plot_needs: str | None = None
    """Field of the config without which there is nothing to draw."""
    plots_turn: bool = False
    """Whether `--plot_out` draws the recorded turn."""

    @property
    def serves(self) -> bool:
        """Whether it serves a model."""
        return issubclass(self.config, ServingConfig)

    @property
    def is_plotted(self) -> bool:
        """Whether there is a figure of it."""
        return bool(self.panels) or self.plots_turn

    def run(self, run: Run[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Measures it; rows, and the summary."""
        rows = list(self.measure(run))
        return rows, {**run.facts, **self.summarize(rows)}


SUITES: dict[str, Suite] = {}
"""By name."""


def suite(
    config: type[Config], *, summary: Summary | None = None, **options: Any
) -> Callable[[Callable[[Run[Any]], Iterator[Any]]], Callable[[Run[Any]], Iterator[Any]]]:
    """Registers a function that yields rows as the suite of its name; `options` are other fields of `Suite`.

    By default the summary says whether all gave the same tokens, and recompiles.
    """

    def register(measure: Callable[[Run[Any]], Iterator[Any]]) -> Callable[[Run[Any]], Iterator[Any]]:
        SUITES[measure.__name__] = Suite(
            name=measure.__name__, config=config, measure=measure, summarize=summary or checks, **options
        )
        return measure

    return register


def checks(rows: Sequence[Any]) -> dict[str, Any]:
    """`same_tokens` and `recompiles` of all rows that have them."""
    found: dict[str, Any] = {}
    if flags := [row.same_tokens for row in rows if hasattr(row, "same_tokens")]:
        found["same_tokens"] = all(flags)
    if counts := [row.recompiles for row in rows if hasattr(row, "recompiles")]:
        found["recompiles"] = sum(counts)
    return found
