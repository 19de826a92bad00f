"""What the demo found: rows, the table, JSON and figure.

Not here: serving (`demo`), drawing (`plots`), describing the machine (`machine`).
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

from ca_jax.errors import CaJaxError
from ca_jax.launch.machine import summarize_machine
from ca_jax.launch.plots import plot_turns
from ca_jax.launch.terminal import decode_rate
from ca_jax.session import Usage

Report = dict[str, Any]
"""suite, command, config, engine_config, machine, versions, startup, conversation_tokens, rows; JSON types only."""

JSON_NAME = "demo.json"
"""What is written under `results_dir`: everything measured."""
PNG_NAME = "demo.png"
"""The same as a figure."""


class DemoError(CaJaxError):
    """The demo cannot run as asked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedTurn:
    """One measured turn of one session."""

    history_tokens: int
    """Of the conversation before the turn."""
    answer_ids: list[int]
    """Tokens generated."""
    usage: Usage
    """What it took."""
    compiles: int
    """Functions compiled while it was measured; 0, or its TTFT is of no use."""


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
    cached_tokens: int
    """Tokens whose KV was loaded in the reuse run. The last token of an answer has none yet."""
    load_s: float
    """Seconds in which KV was copied in the reuse run; they overlap compute."""
    decode_tokens_per_s: float | None
    """Of the reuse run, after the first token."""
    same_tokens: bool
    """Whether both answers are the same, token by token."""
    compiles: int
    """Functions compiled in the two measured turns."""


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
                cached_tokens=ours.usage.num_cached_tokens,
                load_s=ours.usage.load_s,
                decode_tokens_per_s=decode_rate(ours.usage),
                same_tokens=other.answer_ids == ours.answer_ids,
                compiles=other.compiles + ours.compiles,
            )
        )
    return rows


def check_same(report: Report) -> None:
    """Raises DemoError if an answer over stored KV differs from the recomputed one."""
    differing = [row["turn"] for row in report["rows"] if not row["same_tokens"]]
    if differing:
        raise DemoError(f"wanted the same tokens with and without reuse, found others in turns {differing}")


def print_report(report: Report, console: rich.console.Console) -> None:
    """Prints the table and what else there is to say of a run."""
    rows = report["rows"]
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
        table.add_row(
            str(row["turn"]),
            f"{row['history_tokens']:,}",
            f"{row['new_tokens']:,}",
            f"{row['ttft_recompute_s'] * 1e3:,.0f} ms",
            f"{row['ttft_reuse_s'] * 1e3:,.0f} ms",
            f"{row['ratio']:.1f}",
            f"{row['cached_tokens']:,}",
            "yes" if row["same_tokens"] else "NO",
        )
    console.print(table)
    startup = report["startup"]
    lines = [
        f"The conversation ends at {report['conversation_tokens']:,} tokens. {summarize_machine(report['machine'])}, "
        f"{report['engine_config']['dtype']}.",
        f"Model load {startup['model_load_s']:.1f} s, first touch of memory {startup['first_touch_s']:.1f} s in the "
        f"background, {startup['compiles']} functions compiled or read from the compile cache in "
        f"{startup['compile_s']:.1f} s, whole demo {startup['total_s']:.0f} s.",
    ]
    polluted = [row["turn"] for row in rows if row["compiles"]]
    if polluted:
        lines.append(f"Functions were compiled while turns {polluted} were measured: their TTFT are of no use.")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def write_report(report: Report, directory: Path) -> tuple[Path, Path]:
    """Writes JSON and figure; the directory is made where it is not.

    Returns:
      Both paths.

    Raises:
      OSError: they cannot be written there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rows, config = report["rows"], report["config"]
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    json_path, png_path = directory / JSON_NAME, directory / PNG_NAME
    json_path.write_text(text, encoding="utf-8")
    plot_turns(
        png_path,
        ttft_recompute_s=[row["ttft_recompute_s"] for row in rows],
        ttft_reuse_s=[row["ttft_reuse_s"] for row in rows],
        history_tokens=[row["history_tokens"] for row in rows],
        new_tokens=[row["new_tokens"] for row in rows],
        title=f"{config['model']}: ShareGPT conversation {config['conversation_id']}",
        caption=f"{summarize_machine(report['machine'])}, {report['engine_config']['dtype']}",
    )
    return json_path, png_path
