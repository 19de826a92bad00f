"""The paper's figures 18, 19 and 20 on the accelerator, beside what the paper says of them.

The paper's are of LLaMA-13B on an A100 at a batch of 16; ours are of one job at a time behind another one, at the same
lengths. What is compared are shares, of each one's own time without pre-loading, or with saves at the end.

Not here: measuring (`suites.preload`, `suites.save`), drawing (`benchmarks.figures`).
Source: CachedAttention (Gao et al., USENIX ATC 2024), sections 4.3.1 and 4.3.2.
"""

from __future__ import annotations

from typing import Any

from benchmarks.figures import Panel
from benchmarks.gpu.rows import Findings, GpuBenchConfig
from benchmarks.harness import Run
from benchmarks.suites.preload import PreloadConfig, PreloadRow, preload
from benchmarks.suites.save import SaveConfig, SaveRow, save
from ca_jax.pretrained import LoadedModel, Progress

PAPER_PRELOAD = {"0": -0.35, "15": -0.61}
"""Figure 19: prefill time against no pre-loading, by layers of the read buffer; 1K history and 100 new tokens."""
PAPER_SAVE = (-0.13, -0.15)
"""Figure 20: time with asynchronous saving against blocking, from and to."""
PANELS = {
    "figure_18": Panel(
        title="figure 18: reuse", x="history_tokens", y=("ttft_s",), by="read_buffer", label="prefill (ms)", scale=1e3
    ),
    "figure_19": Panel(
        title="figure 19: read buffer",
        x="read_buffer",
        y=("change", "paper_change"),
        label="prefill, against no pre-loading",
        offset=1.0,
    ),
    "figure_20": Panel(
        title="figure 20: asynchronous saving",
        x="prompt_tokens",
        y=("change",),
        label="turn, against saving at its end",
        offset=1.0,
        levels=(("paper, least", PAPER_SAVE[0]), ("paper, most", PAPER_SAVE[1])),
    ),
}
"""How each figure is drawn."""


def figure_18(model: LoadedModel, config: GpuBenchConfig, progress: Progress) -> Findings:
    """A prompt of 1K tokens by how many of them are history: recomputed, without pre-loading, with, with a buffer."""
    sizes = config.figure18_prompt_tokens, config.figure18_history_tokens, config.figure18_read_buffers
    rows = _preload_rows(model, config, progress, *sizes)
    notes = ["paper: reuse is faster than recomputing at every share, the more the fewer tokens are new; no figures"]
    return Findings(rows=rows, notes=[_of(model), *notes])


def figure_19(model: LoadedModel, config: GpuBenchConfig, progress: Progress) -> Findings:
    """1K tokens of history and 100 new ones, by layers of the read buffer."""
    num_history = config.figure19_history_tokens
    sizes = num_history + config.new_tokens, (num_history,), config.figure19_read_buffers
    rows = _preload_rows(model, config, progress, *sizes)
    for row in rows:
        row["paper_change"] = PAPER_PRELOAD.get(row["read_buffer"])
    return Findings(rows=rows, notes=[_of(model), "changes are against `off`: all is loaded, then computed"])


def figure_20(model: LoadedModel, config: GpuBenchConfig, progress: Progress) -> Findings:
    """A prompt and 20 tokens of answer: saves at the end of the turn against saves beside it."""
    asked = SaveConfig(
        save_prompt_tokens=config.figure20_prompt_tokens,
        save_answer_tokens=config.figure20_answer_tokens,
        save_ratios=(),
        stream_turns=0,
        engine=config.engine,
        repeats=config.repeats,
        seed=config.seed,
    )
    found = [row for row in save(Run(config=asked, loaded=model, progress=progress)) if isinstance(row, SaveRow)]
    rows = [
        {
            "prompt_tokens": row.prompt_tokens,
            "answer_tokens": row.answer_tokens,
            "no_store_s": row.turn_off_s,
            "blocking_s": row.turn_blocking_s,
            "async_s": row.turn_async_s,
            "change": -row.async_gain,
            "paper_change": f"{PAPER_SAVE[0]:.0%} to {PAPER_SAVE[1]:.0%}",
            "same_tokens": row.same_tokens,
            "recompiles": row.recompiles,
        }
        for row in found
    ]
    return Findings(rows=rows, notes=[_of(model)])


def _preload_rows(
    model: LoadedModel,
    config: GpuBenchConfig,
    progress: Progress,
    prompt_tokens: int,
    history_tokens: tuple[int, ...],
    read_buffers: tuple[int, ...],
) -> list[dict[str, Any]]:
    asked = PreloadConfig(
        preload_prompt_tokens=prompt_tokens,
        preload_history_tokens=history_tokens,
        preload_read_buffers=read_buffers,
        load_ratios=(),
        ahead_tokens=min(prompt_tokens, config.chunk_tokens),
        engine=config.engine,
        repeats=config.repeats,
        seed=config.seed,
    )
    found = [row for row in preload(Run(config=asked, loaded=model, progress=progress)) if isinstance(row, PreloadRow)]
    off_s = {row.history_tokens: row.ttft_s for row in found if row.read_buffer == "off"}
    return [
        {
            "history_tokens": row.history_tokens,
            "new_tokens": row.new_tokens,
            "read_buffer": row.read_buffer,
            "ttft_s": row.ttft_s,
            "change": row.ttft_s / off_s[row.history_tokens] - 1,
            "load_s": row.load_s,
            "compute_s": row.compute_s,
            "load_stall_s": row.load_stall_s,
            "same_tokens": row.same_tokens,
            "recompiles": row.recompiles,
        }
        for row in found
    ]


def _of(model: LoadedModel) -> str:
    return f"{model.name} in {model.dtype}, one job at a time; the paper: LLaMA-13B, batch of 16, A100"
