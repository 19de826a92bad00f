"""Replays a trace through the engine: real conversations, come and gone as they are told to, and what they took.

    python -m ca_jax.launch.replay --num_sessions=100 --max_turns=10 --dram_gib=1 --recompute --json_out=replay.json
    python -m ca_jax.launch.replay --trace_format=mooncake --trace=conversation_trace.jsonl --length_scale=0.05
    python -m ca_jax.launch.replay --arrival_rate=1 --ssd_dir=/mnt/ssd --eviction_policy=lru --simulate

Answers are as long as they were, but for a cap, so that all ways do the same work. `--recompute` serves the same
workload again with the store off; `--simulate` has it served in simulated time, with the rates that were measured.
With `--ssd_dir` the store uses a directory of its own there, which is removed at the end.

Not here: replaying (`running`), what is simulated at paper scale (`ca_jax.launch.simulate`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.progress
from absl import flags

from benchmarks.replay.running import RECOMPUTE, STORE, OnSample, ReplayConfig, Result, Run, replay
from benchmarks.replay.serving import Sample, ServedTurn, Spread, Summary
from benchmarks.replay.workload import ReplayedTrace, Workload, WorkloadConfig
from benchmarks.tables import summarize_machine
from ca_jax.config import EngineConfig
from ca_jax.errors import CaJaxError
from ca_jax.launch.flags import ConfigFlags, define_model, out_path
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.launch.plots import BLUE, GREEN, GREY, VERMILION, new_figure, require_matplotlib, write_figure
from ca_jax.launch.script import command_line, make_console, make_table, note
from ca_jax.pretrained import LoadedModel, Progress, load_model
from ca_jax.serving.core import enable_compile_cache
from ca_jax.storage.config import GIB

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

FLAGS = flags.FLAGS
ERRORS = (CaJaxError, OSError, ValueError)
"""What ends the script with one line."""

_DIGITS = 6  # Of seconds in the JSON.
_LONG = ("turns", "samples")  # Of each run, and written a row on each line.
_MOST_SAMPLES = 200  # Of a run in the JSON, about.
_LINE_S = 10.0  # Between lines where no terminal is.
_RATE_S = 10.0  # Tokens a second are of so many seconds.
_CONFIG = ConfigFlags(
    ReplayConfig(
        trace=ReplayedTrace(),
        workload=WorkloadConfig(),
        engine=EngineConfig(share_prefixes=False),  # Lengths are a trace's; what texts have in common is made up.
    )
)


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags."""
    define_model(flag_values)
    _CONFIG.define(flag_values)
    flags.DEFINE_string("json_out", None, "File to write everything to, each turn included.", flag_values=flag_values)
    flags.DEFINE_string("plot_out", None, "File for a figure of TTFT, hits and tiers, PNG.", flag_values=flag_values)


def run(
    config: ReplayConfig,
    load: Callable[[Progress], LoadedModel],
    console: rich.console.Console,
    *,
    command: str,
    json_out: Path | None = None,
    plot_out: Path | None = None,
) -> Result:
    """Replays a trace, shows how it goes on, prints tables and writes what is to be written."""
    note(console, repr(config))
    machine = describe_machine()
    with contextlib.ExitStack() as stack:
        served = dataclasses.replace(config, engine=_with_scratch(config.engine, stack))
        progress, on_sample = stack.enter_context(replay_progress(console))
        model = load(progress)
        result = replay(model, served, progress, on_sample)
    print_report(result, console)
    if json_out is not None:
        told = {"model": model.name, "dtype": model.dtype, "machine": machine, "versions": describe_versions()}
        write_report(make_report(result, config, **told, command=command), json_out)
    if plot_out is not None:
        share = f"a store of {result.store_bytes / result.workload_bytes:.0%} of their KV"
        title = f"{model.name}: {len(result.workload.sessions):,} conversations, {share}"
        plot_replay(plot_out, result.runs, title=title, caption=summarize_machine(machine))
    return result


def make_report(result: Result, config: ReplayConfig, **told: Any) -> dict[str, Any]:
    """Everything there is to say of a replay, JSON types only; `told` are model, dtype, machine, versions and command.

    Of each run `turns` are rows of `turn_columns`, and `samples`, some of those that were taken, of `sample_columns`.
    """
    workload = result.workload
    counts = ("cut_turns", "cut_tokens", "left_out_turns", "skipped_rows", "first_skipped", "stored_tokens")
    return {
        "suite": "replay",
        **told,
        "config": dataclasses.asdict(config),
        "workload": {
            "sessions": len(workload.sessions),
            "turns": workload.num_turns,
            "window": result.workload.window,
            "workload_bytes": result.workload_bytes,
            "store_bytes": result.store_bytes,
            **{name: getattr(workload, name) for name in counts},
        },
        "comparison": result.comparison,
        "agreement": result.agreement,
        "turn_columns": [field.name for field in dataclasses.fields(ServedTurn)],
        "sample_columns": [field.name for field in dataclasses.fields(Sample)],
        "runs": [_run(run) for run in result.runs],
    }


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Writes a report, each turn and each sample on a line; makes the directory it goes to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = [{**run, **{name: f"@{name} {index}" for name in _LONG}} for index, run in enumerate(report["runs"])]
    text = json.dumps({**report, "runs": runs}, indent=2, allow_nan=False)
    for index, run in enumerate(report["runs"]):
        for name in _LONG:
            rows = ",\n".join(json.dumps(row, allow_nan=False) for row in run[name])
            text = text.replace(f'"@{name} {index}"', f"[\n{rows}\n]")
    path.write_text(text + "\n", encoding="utf-8")


def print_report(result: Result, console: rich.console.Console) -> None:
    """Prints what was served and what it took, one column for each run."""
    workload = result.workload
    note(
        console,
        f"{len(workload.sessions):,} conversations, {workload.num_turns:,} turns, window of {workload.window:,} "
        f"tokens; KV of all at their ends {result.workload_bytes / GIB:.2f} GiB, "
        f"store {result.store_bytes / GIB:.2f} GiB",
        None,
    )
    if workload.cut_turns:
        cut = f"{workload.cut_tokens:,} tokens of {workload.cut_turns:,} messages"
        note(console, f"cut to fit the window: {cut}", "yellow")
    if workload.left_out_turns:
        note(console, f"left out, since the window was full: {workload.left_out_turns:,} turns", "yellow")
    if workload.skipped_rows:
        skipped = f"{workload.skipped_rows:,} rows of the trace, the first one: {workload.first_skipped}"
        note(console, f"skipped: {skipped}", "yellow")
    rows = [(name, *(cell(run.summary) for run in result.runs)) for name, cell in _ROWS.items()]
    console.print(make_table(("", *(f">{run.name}" for run in result.runs)), rows))
    if (against := result.comparison) is not None:
        note(
            console,
            f"store against recompute: prefill time {against['prefill_time']:.2f}x, "
            f"total time {against['total_time']:.2f}x, busy time {against['busy_time']:.2f}x, "
            f"mean TTFT {against['mean_ttft']:.2f}x; the same answer in {against['same_answers']} "
            f"of {against['comparable_answers']} turns before anything was dropped",
            None,
        )
    if (agreed := result.agreement) is not None:
        hits = f"{agreed['simulated_hit_rate']:.1%} ({agreed['hit_rate_points']:+.1f} points)"
        tokens = f"{agreed['simulated_prefill_tokens']:,} tokens ({agreed['prefill_tokens_ratio'] - 1:+.2%})"
        elapsed = f"{agreed['simulated_elapsed_s']:.0f} s"
        note(console, f"simulated: hit rate {hits}, prefilled {tokens}, {elapsed}", None)


def _tiers(one: Summary) -> str:
    returning = max(one.returning_turns, 1)
    return ", ".join(f"{hits / returning:.1%}" for hits in (one.dram_hits, one.ssd_hits, one.misses))


def _spread(spread: Spread) -> str:
    return ", ".join(f"{value:.3f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99))


def _totals(form: str, *names: str, unit: float = 1) -> Callable[[Summary], str]:
    return lambda one: ", ".join(format(one.totals[name] / unit, form) for name in names)


_ROWS: dict[str, Callable[[Summary], str]] = {
    "turns, those with a history": lambda one: f"{one.turns:,}, {one.returning_turns:,}",
    "hit rate": lambda one: f"{one.hit_rate:.1%}",
    "  from DRAM, SSD, missed": _tiers,
    "history tokens loaded, recomputed": lambda one: f"{one.loaded_tokens:,}, {one.recomputed_tokens:,}",
    "tokens prefilled": lambda one: f"{one.prefill_tokens:,}",
    "TTFT, s: mean, p50, p90, p99": lambda one: _spread(one.ttft_s),
    "TPOT, s": lambda one: _spread(one.tpot_s),
    "latency, s": lambda one: _spread(one.latency_s),
    "prefill, prompt tokens/s": lambda one: f"{one.prefill_tokens_per_s:,.0f}",
    "decode, tokens/s": lambda one: f"{one.decode_tokens_per_s:,.0f}",
    "prefill, decode time, s": _totals(".1f", "prefill_s", "decode_s"),
    "waited for loads, for saves, s": _totals(".2f", "load_stall_s", "write_stall_s"),
    "loaded, saved, GiB": _totals(".2f", "loaded_bytes", "saved_bytes", unit=GIB),
    "fetched from, flushed to SSD, GiB": _totals(".2f", "fetched_bytes", "flushed_bytes", unit=GIB),
    "truncations": lambda one: f"{one.totals['truncations']:,}",
    "turns a minute": lambda one: f"{one.turns_per_minute:.1f}",
    "total time, s": _totals(".1f", "elapsed_s"),
}
"""Lines of the table, and what each says of a run."""


def _run(run: Run) -> dict[str, Any]:
    samples = run.served.samples[:: max(1, len(run.served.samples) // _MOST_SAMPLES)]
    return {
        "name": run.name,
        "summary": dataclasses.asdict(run.summary),
        "recompiles": run.recompiles,
        "samples": [_rounded(dataclasses.astuple(sample)) for sample in samples],
        "turns": [_rounded(dataclasses.astuple(turn)) for turn in run.served.turns],
    }


def _rounded(values: tuple[Any, ...]) -> list[Any]:
    return [round(value, _DIGITS) if isinstance(value, float) else value for value in values]


def plot_replay(path: Path, runs: Sequence[Run], *, title: str, caption: str) -> None:
    """Draws the share of turns by TTFT, and below hit rate and occupancy of the tiers over time, of the first run."""
    figure = new_figure(8, 7)
    cdf, over_time = figure.subplots(2, 1, height_ratios=(3, 2))
    styles = {STORE: (BLUE, "-"), RECOMPUTE: (VERMILION, "--")}
    for run in runs:
        ttft_s = np.sort([turn.ttft_s for turn in run.served.turns if turn.is_counted])
        color, line = styles[run.name]
        shares = 100 * np.arange(1, len(ttft_s) + 1) / len(ttft_s)
        label = f"{run.name}: mean {run.summary.ttft_s.mean:.2f} s"
        cdf.step(ttft_s, shares, line, where="post", color=color, label=label)
    cdf.set_xscale("log")
    cdf.set_xlabel("time to first token, from when a turn came (s)")
    cdf.set_ylabel("turns (%)")
    cdf.set_title(title, loc="left", fontsize=11)
    samples = runs[0].served.samples
    times_s = [sample.time_s for sample in samples]
    hit_rates = [100 * sample.hits / sample.returning if sample.returning else np.nan for sample in samples]
    over_time.plot(times_s, hit_rates, "-", color=BLUE, label="hit rate so far")
    over_time.plot(times_s, [100 * sample.dram_share for sample in samples], "--", color=GREEN, label="DRAM in use")
    if any(sample.ssd_share for sample in samples):
        over_time.plot(times_s, [100 * sample.ssd_share for sample in samples], ":", color=GREY, label="SSD in use")
    over_time.set_ylim(0, 105)
    over_time.set_xlabel("time (s), with the store")
    over_time.set_ylabel("%")
    for axes in (cdf, over_time):
        axes.legend(frameon=False, fontsize=9, loc="lower right")
    write_figure(figure, path, caption=caption, grid="both")


@contextlib.contextmanager
def replay_progress(console: rich.console.Console) -> Iterator[tuple[Progress, OnSample]]:
    """Shows what goes on while the block lasts: bars; where no terminal is, a line of a run now and then.

    Yields whom to tell of what comes before a run, and whom, in the thread that serves, of a run.
    """
    seen: dict[str, list[tuple[float, int]]] = {}
    last_s: dict[str, float] = {}

    def describe(name: str, workload: Workload, sample: Sample) -> str:
        points = seen.setdefault(name, [])
        points.append((sample.time_s, sample.prompt_tokens + sample.output_tokens))
        while len(points) > 2 and points[1][0] < sample.time_s - _RATE_S:
            points.pop(0)
        (begin_s, before), (end_s, now) = points[0], points[-1]
        tokens_per_s = (now - before) / (end_s - begin_s) if end_s > begin_s else 0.0
        tiers = f"DRAM {sample.dram_share:.0%}" + (f" SSD {sample.ssd_share:.0%}" if sample.ssd_share else "")
        hits = f"hits {sample.hits / sample.returning:.0%}" if sample.returning else "hits -"
        turns = f"{sample.ended}/{workload.num_turns} turns · running {sample.running} waiting {sample.waiting}"
        return f"{turns} · {hits} · {tiers} · {tokens_per_s:,.0f} tokens/s"

    def print_line(name: str, workload: Workload, sample: Sample) -> None:
        described = describe(name, workload, sample)
        if sample.time_s - last_s.get(name, 0.0) >= _LINE_S:
            last_s[name] = sample.time_s
            note(console, f"{name} {sample.time_s:.0f} s: {described}", None)

    if not console.is_terminal:
        yield lambda what, done, total: None, print_line
        return
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.TextColumn("{task.fields[now]}"))
    tasks: dict[str, rich.progress.TaskID] = {}
    with rich.progress.Progress(*columns, console=console) as bars:

        def tell(what: str, done: int, total: int, now: str = "") -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total, now=now)
            bars.update(tasks[what], completed=done, total=total, now=now)

        def tell_sample(name: str, workload: Workload, sample: Sample) -> None:
            tell(name, sample.ended, workload.num_turns, describe(name, workload, sample))

        yield tell, tell_sample


def _with_scratch(config: EngineConfig, stack: contextlib.ExitStack) -> EngineConfig:
    """The engine with an SSD tier in a directory of its own, if it is to have one."""
    if config.store.ssd_dir is None:
        return config
    Path(config.store.ssd_dir).mkdir(parents=True, exist_ok=True)
    made = stack.enter_context(tempfile.TemporaryDirectory(prefix="ca_jax-replay-", dir=config.store.ssd_dir))
    return dataclasses.replace(config, store=dataclasses.replace(config.store, ssd_dir=made))


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    console = make_console()
    config = _CONFIG.read()
    json_out, plot_out = out_path("json_out"), out_path("plot_out")
    if plot_out is not None:
        require_matplotlib()
    enable_compile_cache(config.engine.compile_cache_dir)
    kinds = {name: getattr(config.engine, name) for name in ("dtype", "weight_dtype")}
    run(
        config,
        lambda progress: load_model(FLAGS.model, **kinds, progress=progress),
        console,
        command=command_line("replay"),
        json_out=json_out,
        plot_out=plot_out,
    )
    written = [str(path) for path in (json_out, plot_out) if path is not None]
    if written:
        note(console, f"written to {', '.join(written)}", None)
