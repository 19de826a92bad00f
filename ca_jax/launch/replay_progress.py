"""A replay as it goes on: a bar with what runs and waits, hits, tiers and tokens a second; lines where no terminal is.

Not here: serving (`ca_jax.replay`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import rich.console
import rich.progress

from ca_jax.pretrained import Progress
from ca_jax.replay.running import OnSample
from ca_jax.replay.served import Sample
from ca_jax.replay.workload import Workload

_LINE_S = 10.0  # Between lines where no terminal is.
_RATE_S = 10.0  # What tokens a second are of.


@dataclasses.dataclass(frozen=True)
class Shown:
    """Whom to tell."""

    progress: Progress
    """Of what comes before a run: loading, compiling."""
    on_sample: OnSample
    """Of a run; in the thread that serves."""


@contextlib.contextmanager
def replay_progress(console: rich.console.Console) -> Iterator[Shown]:
    """Shows what goes on while the block lasts; a line of a run now and then where no terminal is."""
    if not console.is_terminal:
        yield Shown(lambda what, done, total: None, _Lines(console).tell)
        return
    columns = (
        rich.progress.TextColumn("{task.description:<18}"),
        rich.progress.BarColumn(bar_width=20),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[now]}"),
    )
    tasks: dict[str, rich.progress.TaskID] = {}
    rates: dict[str, _Rate] = {}
    with rich.progress.Progress(*columns, console=console) as bars:

        def tell(what: str, done: int, total: int, now: str = "") -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total, now=now)
            bars.update(tasks[what], completed=done, total=total, now=now)

        def tell_sample(name: str, workload: Workload, sample: Sample) -> None:
            tokens_per_s = rates.setdefault(name, _Rate()).of(sample)
            tell(name, sample.ended, workload.num_turns, describe(sample, tokens_per_s))

        yield Shown(tell, tell_sample)


def describe(sample: Sample, tokens_per_s: float) -> str:
    """One line of what goes on; tokens are those of prompts and answers."""
    tiers = f"DRAM {sample.dram_share:.0%}" + (f" SSD {sample.ssd_share:.0%}" if sample.ssd_share else "")
    hits = f"hits {sample.hits / sample.returning:.0%}" if sample.returning else "hits -"
    return f"running {sample.running} waiting {sample.waiting} · {hits} · {tiers} · {tokens_per_s:,.0f} tokens/s"


class _Rate:
    """Tokens a second, of the last seconds."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def of(self, sample: Sample) -> float:
        """Up to this sample."""
        self._seen.append((sample.time_s, sample.prompt_tokens + sample.output_tokens))
        while len(self._seen) > 2 and self._seen[1][0] < sample.time_s - _RATE_S:
            self._seen.pop(0)
        (begin_s, before), (end_s, now) = self._seen[0], self._seen[-1]
        return (now - before) / (end_s - begin_s) if end_s > begin_s else 0.0


class _Lines:
    """A line now and then."""

    def __init__(self, console: rich.console.Console) -> None:
        self._console = console
        self._rates: dict[str, _Rate] = {}
        self._last_s: dict[str, float] = {}

    def tell(self, name: str, workload: Workload, sample: Sample) -> None:
        """Of a sample."""
        tokens_per_s = self._rates.setdefault(name, _Rate()).of(sample)
        if sample.time_s - self._last_s.get(name, 0.0) < _LINE_S:
            return
        self._last_s[name] = sample.time_s
        self._console.print(
            f"{name} {sample.time_s:.0f} s: {sample.ended}/{workload.num_turns} turns · "
            f"{describe(sample, tokens_per_s)}",
            highlight=False,
            soft_wrap=True,
        )
