"""The flags of the benchmark. Each stands for the field of its name in the configs of one or more suites.

A flag that is not given leaves a config's own default, which may differ from suite to suite.

Not here: the engine's flags (`engine_flags`), what fields mean (the schemas), running (`bench_run`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from absl import flags

from ca_jax.config import BLEND_MODES
from ca_jax.launch import engine_flags
from ca_jax.launch.bench_blend_schema import BLEND_SUITES, BlendBenchConfig, BlendThroughputBenchConfig
from ca_jax.launch.bench_overflow_schema import OVERFLOW_SUITES, OverflowBenchConfig
from ca_jax.launch.bench_overlap_schema import OVERLAP_SUITES, PreloadBenchConfig, SaveBenchConfig
from ca_jax.launch.bench_peers import PEER_PACKAGES
from ca_jax.launch.bench_schema import ENGINE_SUITES, BenchConfig
from ca_jax.launch.bench_serving_schema import SERVING_SUITES, ThroughputBenchConfig, TtftBenchConfig
from ca_jax.launch.bench_storage_schema import STORAGE_SUITES, PolicyBenchConfig, StoreBenchConfig
from ca_jax.launch.refused_flags import refuse_flags
from ca_jax.models.presets import PRESETS
from ca_jax.overflow.config import METHODS
from ca_jax.storage.config import SSD_DRIVERS

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

AnyBenchConfig = (
    BenchConfig
    | TtftBenchConfig
    | ThroughputBenchConfig
    | PreloadBenchConfig
    | SaveBenchConfig
    | OverflowBenchConfig
    | BlendBenchConfig
    | BlendThroughputBenchConfig
    | StoreBenchConfig
    | PolicyBenchConfig
)
Config = TypeVar("Config", bound=AnyBenchConfig)

CONFIGS: dict[str, type[AnyBenchConfig]] = {
    **dict.fromkeys(ENGINE_SUITES, BenchConfig),
    "ttft": TtftBenchConfig,
    "throughput": ThroughputBenchConfig,
    "preload": PreloadBenchConfig,
    "save": SaveBenchConfig,
    "overflow": OverflowBenchConfig,
    "blend": BlendBenchConfig,
    "blend_throughput": BlendThroughputBenchConfig,
    "store": StoreBenchConfig,
    "policy": PolicyBenchConfig,
}
"""What each suite is asked by."""
RECORDED_SUITES = SERVING_SUITES
"""Suites that can be recorded: `--trace_out`, `--profile_dir`."""
PLOTTED_SUITES = ("ttft", *OVERFLOW_SUITES, *BLEND_SUITES)
"""Suites that a figure can be drawn of: `--plot_out`."""
DEFAULT_MODEL = "smollm2-135m-instruct"
"""What is measured unless another one is asked for."""

_SUITES_OF = {
    "history_tokens": ("reuse", "tiers"),
    "new_tokens": ("reuse", "tiers"),
    "prefill_tokens": ("prefill",),
    "batch_sizes": ("decode",),
    "context_tokens": ("decode",),
    "decode_steps": ("decode",),
    "dram_gib": ("reuse", "prefill", "decode"),
    "ssd_dir": ("tiers",),
    "ssd_driver": ("tiers",),
}
"""Fields of `BenchConfig`, which several suites share, and the suites that read them; all read the others."""
_SETTLED: dict[type[Any], tuple[str, ...]] = {
    BenchConfig: ("max_batch_size", "recompute_if_faster"),
    TtftBenchConfig: ("max_batch_size", "recompute_if_faster"),
    PreloadBenchConfig: ("max_batch_size", "recompute_if_faster", "read_buffer"),
    SaveBenchConfig: ("max_batch_size", "async_save"),
    OverflowBenchConfig: ("recompute_if_faster",),
    **dict.fromkeys(
        (BlendBenchConfig, BlendThroughputBenchConfig),
        ("max_batch_size", "recompute_if_faster", "blend_mode", "blend_recompute_ratio", "min_recompute_ratio"),
    ),
}
"""Flags of the engine that suites set themselves, by config."""
_WITHOUT = ("method", "whole_turns")  # Of overflow: methods are lists here, and no suite has turns of its own.
_LISTS: dict[str, tuple[Callable[[str], Any], tuple[Any, ...], str]] = {
    "history_tokens": (int, BenchConfig.history_tokens, "reuse, tiers, ttft: tokens whose KV is stored."),
    "new_tokens": (int, BenchConfig.new_tokens, "reuse, tiers, ttft: tokens of the turn over them."),
    "prefill_tokens": (int, BenchConfig.prefill_tokens, "prefill: tokens of the prompts."),
    "batch_sizes": (int, BenchConfig.batch_sizes, "decode: sessions that decode together."),
    "context_tokens": (int, BenchConfig.context_tokens, "decode: tokens before decoding."),
    "preload_history_tokens": (
        int,
        PreloadBenchConfig.preload_history_tokens,
        "preload, real speed: tokens of a prompt whose KV is stored; nothing leaves this part out.",
    ),
    "preload_read_buffers": (
        int,
        PreloadBenchConfig.preload_read_buffers,
        "preload, real speed: layers of the read buffer.",
    ),
    "load_ratios": (
        float,
        PreloadBenchConfig.load_ratios,
        "preload, set speeds: the load over the compute; nothing leaves this part out.",
    ),
    "read_buffers": (int, PreloadBenchConfig.read_buffers, "preload, set speeds: layers of the read buffer."),
    "save_prompt_tokens": (
        int,
        SaveBenchConfig.save_prompt_tokens,
        "save, real speed: tokens of the prompts; nothing leaves this part out.",
    ),
    "save_ratios": (
        float,
        SaveBenchConfig.save_ratios,
        "save, set speeds: the save over the turn; nothing leaves this part out.",
    ),
    "overflow_methods": (
        str,
        OverflowBenchConfig.overflow_methods,
        f"overflow, conversations: methods that serve them, of {', '.join(METHODS)}.",
    ),
    "gap_methods": (
        str,
        OverflowBenchConfig.gap_methods,
        "overflow, gap between tokens: methods; nothing leaves this part out.",
    ),
    "gap_sessions": (
        int,
        OverflowBenchConfig.gap_sessions,
        "overflow, gap between tokens: sessions that decode, one of which overflows.",
    ),
    "next_turn_methods": (
        str,
        OverflowBenchConfig.next_turn_methods,
        "overflow, next turn: methods; nothing leaves this part out.",
    ),
    "num_chunks": (int, BlendBenchConfig.num_chunks, "blend: chunks of a context."),
    "chunk_tokens": (int, BlendBenchConfig.chunk_tokens, "blend: tokens of each chunk."),
    "recompute_ratios": (
        float,
        BlendBenchConfig.recompute_ratios,
        "blend: shares of the chunks' tokens that are computed anew.",
    ),
    "blend_tiers": (str, BlendBenchConfig.blend_tiers, "blend: where chunks' KV is, of dram, ssd_warm and ssd."),
    "stream_modes": (
        str,
        BlendThroughputBenchConfig.stream_modes,
        f"blend_throughput: ways to use what is stored, of {', '.join(BLEND_MODES)}.",
    ),
    "ssd_shares": (
        float,
        BlendThroughputBenchConfig.ssd_shares,
        "blend_throughput: sizes of the SSD, shares of what all chunks take.",
    ),
}
_INTEGERS: dict[str, tuple[int | None, str]] = {
    "decode_steps": (BenchConfig.decode_steps, "decode: steps in one sample."),
    "preload_prompt_tokens": (
        PreloadBenchConfig.preload_prompt_tokens,
        "preload, real speed: tokens of history and turn together.",
    ),
    "paced_history_tokens": (
        PreloadBenchConfig.paced_history_tokens,
        "preload, set speeds: tokens whose KV is stored.",
    ),
    "paced_new_tokens": (PreloadBenchConfig.paced_new_tokens, "preload, set speeds: tokens of the turn over them."),
    "ahead_tokens": (PreloadBenchConfig.ahead_tokens, "preload: tokens of the job before the turn."),
    "paced_prompt_tokens": (SaveBenchConfig.paced_prompt_tokens, "save, set speeds: tokens of the prompt."),
    "stream_prompt_tokens": (SaveBenchConfig.stream_prompt_tokens, "save, stream of turns: tokens of the prompts."),
    "stream_turns": (SaveBenchConfig.stream_turns, "save, stream of turns: how many; 0 leaves this part out."),
    "save_answer_tokens": (SaveBenchConfig.save_answer_tokens, "save: tokens of every answer."),
    "answer_tokens": (ThroughputBenchConfig.answer_tokens, "throughput: tokens of every answer."),
    "concurrent_sessions": (
        ThroughputBenchConfig.concurrent_sessions,
        "throughput, overflow: conversations that go on at once.",
    ),
    "num_turns": (ThroughputBenchConfig.num_turns, "throughput: turns of each conversation."),
    "context_window": (
        None,
        f"Most tokens of a context; by default {ThroughputBenchConfig.context_window}, of overflow "
        f"{OverflowBenchConfig.context_window}.",
    ),
    "conversation_tokens": (
        OverflowBenchConfig.conversation_tokens,
        "overflow, conversations: most tokens of each; later turns are left out.",
    ),
    "max_turns": (OverflowBenchConfig.max_turns, "overflow, conversations: most turns of each."),
    "max_answer_tokens": (
        OverflowBenchConfig.max_answer_tokens,
        "overflow, conversations: most tokens generated of an answer.",
    ),
    "bookkeeping_blocks": (OverflowBenchConfig.bookkeeping_blocks, "overflow, bookkeeping: blocks of a session."),
    "bookkeeping_sessions": (
        OverflowBenchConfig.bookkeeping_sessions,
        "overflow, bookkeeping: sessions that are cut; 0 leaves this part out.",
    ),
    "next_turn_tokens": (OverflowBenchConfig.next_turn_tokens, "overflow, next turn: tokens of its message."),
    "num_layers": (StoreBenchConfig.num_layers, "store: layers of a block."),
    "num_kv_heads": (StoreBenchConfig.num_kv_heads, "store: KV heads of a block."),
    "head_dim": (StoreBenchConfig.head_dim, "store: size of a head."),
    "block_tokens": (StoreBenchConfig.block_tokens, "store: tokens in a block."),
    "session_tokens": (StoreBenchConfig.session_tokens, "store: tokens that are loaded from DRAM."),
    "num_sessions": (
        None,
        f"policy: sessions stored, by default {PolicyBenchConfig.num_sessions}; overflow: conversations, by default "
        f"{OverflowBenchConfig.num_sessions}, 0 leaves this part out.",
    ),
    "stream_chunks": (
        BlendThroughputBenchConfig.stream_chunks,
        "blend_throughput: chunks that turns draw from.",
    ),
    "context_chunks": (BlendThroughputBenchConfig.context_chunks, "blend_throughput: chunks of a turn."),
    "context_chunk_tokens": (
        BlendThroughputBenchConfig.context_chunk_tokens,
        "blend_throughput: tokens of each chunk.",
    ),
    "concurrent_turns": (BlendThroughputBenchConfig.concurrent_turns, "blend_throughput: turns under way together."),
    "round_turns": (BlendThroughputBenchConfig.round_turns, "blend_throughput: turns of a round."),
    "fill_turns": (
        BlendThroughputBenchConfig.fill_turns,
        "blend_throughput: turns before the first round, which fill the store.",
    ),
    "context_answer_tokens": (
        BlendThroughputBenchConfig.context_answer_tokens,
        "blend_throughput: tokens of every answer.",
    ),
    "num_jobs": (PolicyBenchConfig.num_jobs, "policy: jobs that wait."),
    "num_steps": (PolicyBenchConfig.num_steps, "policy: choices that percentiles are of."),
    "loop_sessions": (PolicyBenchConfig.loop_sessions, "policy: sessions revisited in a loop."),
    "repeats": (
        None,
        f"Samples that a median is of; by default {BenchConfig.repeats}, of throughput and blend_throughput "
        f"{ThroughputBenchConfig.repeats}.",
    ),
    "seed": (BenchConfig.seed, "Of what is random: weights of a preset, token ids, bytes, sizes, who comes next."),
}
_NUMBERS: dict[str, tuple[float, str]] = {
    "dram_gib": (BenchConfig.dram_gib, "reuse, prefill, decode: cap of the DRAM tier, GiB."),
    "store_gib": (StoreBenchConfig.store_gib, "store: what is written to disk and read again, GiB."),
    "stream_ratio": (
        BlendThroughputBenchConfig.stream_ratio,
        "blend_throughput: share of the chunks' tokens that is computed anew in the mode blend.",
    ),
    "zipf_exponent": (
        BlendThroughputBenchConfig.zipf_exponent,
        "blend_throughput: how much oftener some chunks are drawn; 0: all alike.",
    ),
    "dram_share": (
        BlendThroughputBenchConfig.dram_share,
        "blend_throughput: size of DRAM, a share of what all chunks take.",
    ),
    "queue_depth": (PolicyBenchConfig.queue_depth, "policy: jobs that wait in the loop, a share of its sessions."),
}


def define(*, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags, the engine's too.

    Args:
      flag_values: where they are defined.

    Raises:
      absl.flags.DuplicateFlagError: another flag has such a name.
    """
    here: dict[str, Any] = {"flag_values": flag_values}
    suites = [*ENGINE_SUITES, *SERVING_SUITES, *OVERLAP_SUITES, *OVERFLOW_SUITES, *BLEND_SUITES, *STORAGE_SUITES]
    flags.DEFINE_enum("suite", None, suites, "What to measure.", required=True, **here)
    flags.DEFINE_string("json_out", None, "File to write the result to.", required=True, **here)
    flags.DEFINE_string(
        "model",
        DEFAULT_MODEL,
        "Preset, .gguf file, Hugging Face directory or hub name, or converted checkpoint.",
        **here,
    )
    flags.DEFINE_enum(
        "model_preset", None, sorted(PRESETS), "Architecture with random weights to measure instead of --model.", **here
    )
    flags.DEFINE_enum(
        "peer",
        None,
        list(PEER_PACKAGES),
        "Engine to measure beside ours on the same weights, dtype and threads.",
        **here,
    )
    recorded = " and ".join(RECORDED_SUITES)
    flags.DEFINE_string(
        "trace_out", None, f"{recorded}: file for a trace of one more round, which Perfetto opens.", **here
    )
    flags.DEFINE_string(
        "plot_out",
        None,
        "File for a figure, PNG; ttft: of one more turn; overflow: of hit rate and time by method; blend: of TTFT by "
        "ratio; blend_throughput: of turns a second by mode.",
        **here,
    )
    flags.DEFINE_string("profile_dir", None, f"{recorded}: directory for jax's profile of one more round.", **here)
    flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16"], "Of weights and KV; by default what is fast here.", **here
    )
    flags.DEFINE_string(
        "ssd_dir",
        None,
        "tiers, ttft, overflow, blend, blend_throughput, store, policy: directory on the disk to measure; by default "
        "where temporary files are.",
        **here,
    )
    flags.DEFINE_enum(
        "ssd_driver",
        BenchConfig.ssd_driver,
        SSD_DRIVERS,
        "tiers, overflow, blend, blend_throughput: how KV is kept on SSD.",
        **here,
    )
    flags.DEFINE_string(
        "data",
        None,
        "blend, blend_throughput: file of questions behind texts, or folder of such files; by default chunks are of "
        "ShareGPT's conversations.",
        **here,
    )
    for name, (_, items, text) in _LISTS.items():
        flags.DEFINE_list(name, [str(item) for item in items], text, **here)
    for name, (integer, text) in _INTEGERS.items():
        flags.DEFINE_integer(name, integer, text, **here)
    for name, (number, text) in _NUMBERS.items():
        flags.DEFINE_float(name, number, text, **here)
    engine_flags.define(without_overflow=_WITHOUT, flag_values=flag_values)


def config(kind: type[Config], *, flag_values: flags.FlagValues = flags.FLAGS) -> Config:
    """The config of that kind, each field from the flag of its name if that was given.

    Args:
      kind: one of the values of `CONFIGS`.
      flag_values: where flags were defined, parsed.

    Raises:
      ValueError: a value that is none, or outside its range, or a flag that the suite does not read; the message names
        the flag.
    """
    suite = str(flag_values["suite"].value)
    refuse_flags(_unread(kind, suite), f"suite {suite}", flag_values=flag_values)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name == "engine":
            values["engine"] = engine_flags.engine_config(flag_values=flag_values)
        elif flag_values[field.name].present:
            values[field.name] = _value(field.name, flag_values[field.name].value)
    return kind(**values)


def _unread(kind: type[Any], suite: str) -> set[str]:
    """The flags that a suite does not read."""
    read = {field.name for field in dataclasses.fields(kind)}
    if kind is BenchConfig:
        read -= {name for name, suites in _SUITES_OF.items() if suite not in suites}
    unread = {*_LISTS, *_INTEGERS, *_NUMBERS, "ssd_dir", "ssd_driver", "data"} - read
    if "engine" in read:
        return unread.union(_SETTLED.get(kind, ())) - {"seed"}  # The seed is also that of random weights.
    engine = flags.FlagValues()
    engine_flags.define(flag_values=engine)
    return unread | set(engine) | ({"model", "model_preset", "dtype"} - read)


def _value(name: str, value: Any) -> Any:
    if name not in _LISTS:
        return value
    number = _LISTS[name][0]
    try:
        return tuple(number(item) for item in value)
    except ValueError as error:
        wanted = "integers" if number is int else "numbers"
        raise ValueError(f"{name} wanted {wanted} with commas between them, found {value}") from error
