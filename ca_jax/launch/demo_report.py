"""What the demo found: rows, the table, JSON and figure.

Not here: serving (`demo_acts`), drawing (`plots`), describing the machine (`machine`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table

from ca_jax.launch.demo_acts import DemoError, SecondAct, ServedTurn
from ca_jax.launch.machine import summarize_machine
from ca_jax.launch.plots import plot_turns
from ca_jax.launch.terminal import decode_rate, describe_tiers

Report = dict[str, Any]
"""suite, command, config, engine_config, machine, versions, startup, conversation_tokens, rows (of act one), resume (of
act two); JSON types only."""

JSON_NAME = "demo.json"
"""What is written under `results_dir`: everything measured."""
PNG_NAME = "demo.png"
"""The same as a figure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnRow:
    """One turn, recomputed and reused."""

    turn: int
    """From 1."""
    history_tokens: int
    """Of the conversation before the turn, template included."""
    new_tokens: int
    """Of the message, template included."""
    answer_tokens: int
    """Generated."""
    ttft_recompute_s: float
    """Seconds to the first token, history prefilled again."""
    ttft_reuse_s: float
    """Seconds to the first token, history loaded."""
    ratio: float
    """The first over the second."""
    cached_tokens: dict[str, int]
    """Tokens whose KV was loaded in the reuse run, by the tier it was in. The last token of an answer has none yet."""
    load_s: float
    """Seconds in which KV was copied in the reuse run; they overlap compute."""
    decode_tokens_per_s: float | None
    """Of the reuse run, after the first token."""
    same_tokens: bool
    """Whether both answers are the same, token by token."""
    compiles: int
    """Functions compiled in the two measured turns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeRow:
    """The turn of act two, over KV that an ended process left on SSD, and recomputed."""

    turn: int
    """The one after those of act one."""
    session_id: str
    """Of the conversation."""
    num_messages: int
    """Of the conversation, as they were found."""
    history_tokens: int
    """Of the conversation, as they were found."""
    new_tokens: int
    """Of the message, template included."""
    answer_tokens: int
    """Generated."""
    cached_tokens: dict[str, int]
    """Tokens whose KV was loaded, by the tier it was in."""
    ttft_ssd_s: float
    """Seconds to the first token, history fetched from SSD and loaded."""
    ttft_recompute_s: float
    """Seconds to the first token, history prefilled again."""
    ratio: float
    """The second over the first."""
    queued_s: float
    """Of `ttft_ssd_s`, until the KV was fetched and the prefill began."""
    same_tokens: bool
    """Whether both answers are the same, token by token."""
    compiles: int
    """Functions compiled in the two measured turns."""
    start_to_first_token_s: float
    """Seconds from the start of the process to the first token over KV from SSD."""
    model_load_s: float
    """Seconds of those: reading the model."""
    warmup_s: float
    """Seconds of those: compiling, or reading the compile cache."""
    first_touch_s: float
    """Seconds of making host memory resident, in the background."""
    page_cache_dropped: bool
    """Whether the system was asked to forget the files before, so that they were read from the disk."""


def resume_row(turn: int, session_id: str, act: SecondAct, page_cache_dropped: bool) -> ResumeRow:
    """What act two served, as a row."""
    ours, other = act.reused, act.recomputed
    return ResumeRow(
        turn=turn,
        session_id=session_id,
        num_messages=act.num_messages,
        history_tokens=ours.history_tokens,
        new_tokens=ours.usage.prompt_tokens - ours.history_tokens,
        answer_tokens=len(ours.answer_ids),
        cached_tokens=_by_tier(ours),
        ttft_ssd_s=ours.usage.ttft_s,
        ttft_recompute_s=other.usage.ttft_s,
        ratio=other.usage.ttft_s / ours.usage.ttft_s,
        queued_s=ours.usage.queued_s,
        same_tokens=other.answer_ids == ours.answer_ids,
        compiles=other.compiles + ours.compiles,
        start_to_first_token_s=act.start_to_first_token_s,
        page_cache_dropped=page_cache_dropped,
        **act.startup,
    )


def compare(recomputed: Sequence[ServedTurn], reused: Sequence[ServedTurn]) -> list[TurnRow]:
    """Rows of two runs of one conversation.

    Raises:
      ValueError: the runs differ in their number of turns.
    """
    rows = []
    for turn, (other, ours) in enumerate(zip(recomputed, reused, strict=True), 1):
        rows.append(
            TurnRow(
                turn=turn,
                history_tokens=ours.history_tokens,
                new_tokens=ours.usage.prompt_tokens - ours.history_tokens,
                answer_tokens=len(ours.answer_ids),
                ttft_recompute_s=other.usage.ttft_s,
                ttft_reuse_s=ours.usage.ttft_s,
                ratio=other.usage.ttft_s / ours.usage.ttft_s,
                cached_tokens=_by_tier(ours),
                load_s=ours.usage.load_s,
                decode_tokens_per_s=decode_rate(ours.usage),
                same_tokens=other.answer_ids == ours.answer_ids,
                compiles=other.compiles + ours.compiles,
            )
        )
    return rows


def check(report: Report) -> None:
    """Checks what the demo is to show.

    Raises:
      DemoError: an answer over stored KV differs from the recomputed one, or act two had no KV from SSD.
    """
    resume = report["resume"]
    differing = [row["turn"] for row in (*report["rows"], resume) if not row["same_tokens"]]
    if differing:
        raise DemoError(f"wanted the same tokens with and without reuse, found others in turns {differing}")
    wanted = {"ssd": resume["history_tokens"] - 1}
    if resume["cached_tokens"] != wanted:
        raise DemoError(
            f"wanted KV of {describe_tiers(wanted)} tokens after the restart, found "
            f"{describe_tiers(resume['cached_tokens']) or 'none'}"
        )


def print_report(report: Report, console: rich.console.Console) -> None:
    """Prints the table and what else there is to say of a run."""
    rows, resume = report["rows"], report["resume"]
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, title="\nTime to first token", title_justify="left")
    columns = (
        "turn",
        "history\ntokens",
        "new\ntokens",
        "TTFT\nrecompute",
        "TTFT\nreuse",
        "ratio",
        "cached\ntokens",
        "same\ntokens",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*_cells(row, row["ttft_reuse_s"]), end_section=row is rows[-1])
    table.add_row(*_cells(resume, resume["ttft_ssd_s"]))
    console.print(table)
    startup = report["startup"]
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
    polluted = [row["turn"] for row in (*rows, resume) if row["compiles"]]
    if polluted:
        lines.append(f"Functions were compiled while turns {polluted} were measured: their TTFT are of no use.")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _by_tier(turn: ServedTurn) -> dict[str, int]:
    return {tier: count for tier, count in turn.usage.cached_tokens.items() if count}


def _cells(row: dict[str, Any], ttft_reuse_s: float) -> tuple[str, ...]:
    return (
        str(row["turn"]),
        f"{row['history_tokens']:,}",
        f"{row['new_tokens']:,}",
        f"{row['ttft_recompute_s'] * 1e3:,.0f} ms",
        f"{ttft_reuse_s * 1e3:,.0f} ms",
        f"{row['ratio']:.1f}",
        describe_tiers(row["cached_tokens"]) or "0",
        "yes" if row["same_tokens"] else "NO",
    )


def write_report(report: Report, directory: Path) -> tuple[Path, Path]:
    """Writes JSON and figure; the directory is made where it is not.

    Returns:
      Both paths.

    Raises:
      OSError: they cannot be written there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config, resume = report["config"], report["resume"]
    turns = [*report["rows"], resume]
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    json_path, png_path = directory / JSON_NAME, directory / PNG_NAME
    json_path.write_text(text, encoding="utf-8")
    plot_turns(
        png_path,
        ttft_recompute_s=[row["ttft_recompute_s"] for row in turns],
        ttft_reuse_s=[*(row["ttft_reuse_s"] for row in report["rows"]), resume["ttft_ssd_s"]],
        history_tokens=[row["history_tokens"] for row in turns],
        new_tokens=[row["new_tokens"] for row in turns],
        restarted_before=resume["turn"],
        title=f"{config['model']}: ShareGPT conversation {config['conversation_id']}",
        caption=f"{summarize_machine(report['machine'])}, {report['engine_config']['dtype']}",
    )
    return json_path, png_path
