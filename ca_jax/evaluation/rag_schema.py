"""What is asked of prompts that are made of text chunks; its fields are the JSON's.

Not here: what comes out (rag_rows), reading chunks and questions (rag_items), measuring (rag, rag_deviation, rag_gate).
"""

from __future__ import annotations

import dataclasses

from ca_jax import config

SELECTIONS: tuple[str, ...] = (*config.SELECTIONS, "random")
"""Ways to choose the tokens that are computed anew: those of `config.Selection`, and any, to compare with."""
BASELINES = ("prefix", "reuse", "mapreduce", "maprerank")
"""What blending is compared with, beside full recompute, with which all are. `prefix`: the KV of the first chunk alone
is reused. `reuse`: that of all, and nothing is computed anew. `mapreduce`: each chunk is summarised, and the question
is asked of the summaries. `maprerank`: each chunk is asked, and the answer of the highest mean log probability taken.
Source: CacheBlend (Yao et al., EuroSys 2025), section 7.1."""
INSTRUCTION = (
    "\n\nAnswer the question based on the given passages. Answer the question within 5 words. Do NOT repeat the "
    "question or output any other words. Question: {question}\nAnswer:"
)
"""How a question is put behind its chunks, as in CacheBlend's own inputs."""
DEVIATION_FIGURES = (6, 7, 8)
"""Figures of the paper that the pure model gives."""
TIMED_FIGURES = (12, 15, 16, 17)
"""Figures that an engine is timed for. 12: quality and TTFT of the methods; 15: TTFT against number and length of
chunks; 16: quality and TTFT against the ratio; 17: TTFT against the speed of what the chunks' KV is stored on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunking:
    """What prompts are made of.

    Raises:
      ValueError: a number below 1, or an instruction without a place for the question.
    """

    data: str | None = None
    """A file of items, or a folder of them, see `rag_items`; None: made of conversations, see `rag_texts`."""
    num_chunks: int = 6
    """Most chunks of a prompt, the first ones of an item."""
    chunk_tokens: int = 512
    """Most tokens of a chunk, the first ones of its text."""
    max_items: int | None = None
    """Most items, the first ones; None: all, or 16 of those that are made."""
    instruction: str = INSTRUCTION
    """What stands behind the chunks, with `{question}` in it."""

    def __post_init__(self) -> None:
        for name in ("num_chunks", "chunk_tokens", "max_items"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if "{question}" not in self.instruction:
            raise ValueError(f"instruction must have {{question}} in it, got {self.instruction!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blends:
    """Which ways to blend are measured, and where.

    Raises:
      ValueError: a number out of range, or an unknown selection.
    """

    ratios: tuple[float, ...] = (0.05, 0.15, 0.3, 0.5)
    """Shares of the chunks' tokens that are computed anew, in the mean of the layers behind the check layers."""
    selections: tuple[str, ...] = ("hkvd",)
    """Which tokens, of `SELECTIONS`."""
    other_ratios: tuple[float, ...] | None = None
    """Ratios of the selections behind the first one; None: the same as its."""
    check_layers: int = 1
    """Layers of which all tokens are computed, see `plan_blend`."""
    positions: int = 8
    """Last positions of a prompt whose next tokens are compared."""
    seed: int = 0
    """Of the selection `random`."""

    def __post_init__(self) -> None:
        if not self.ratios or not self.selections:
            raise ValueError(f"there must be at least one ratio and selection, got {self.ratios} and {self.selections}")
        for ratio in (*self.ratios, *(self.other_ratios or ())):
            if not 0 <= ratio <= 1:
                raise ValueError(f"ratios must be shares in [0, 1], got {ratio}")
        for selection in self.selections:
            if selection not in SELECTIONS:
                raise ValueError(f"selections must be some of {', '.join(SELECTIONS)}; got {selection!r}")
        if len(set(self.ratios)) < len(self.ratios) or len(set(self.selections)) < len(self.selections):
            raise ValueError(f"each ratio and selection must be there once, got {self.ratios} and {self.selections}")
        if self.positions < 1:
            raise ValueError(f"positions must be at least 1, got {self.positions}")

    @property
    def points(self) -> list[tuple[str, float]]:
        """Each selection with each of its ratios."""
        first, *others = self.selections
        other_ratios = self.ratios if self.other_ratios is None else self.other_ratios
        return [(first, ratio) for ratio in self.ratios] + [(each, ratio) for each in others for ratio in other_ratios]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RagConfig:
    """`rag`: answers to questions behind chunks, by each way to use the chunks' KV.

    Raises:
      ValueError: a number out of range, an unknown baseline or figure.
    """

    chunking: Chunking = Chunking()
    """What prompts are made of."""
    blends: Blends = Blends()
    """What is blended."""
    baselines: tuple[str, ...] = BASELINES
    """What it is compared with, of `BASELINES`."""
    answer_tokens: int = 16
    """Most tokens of an answer, greedily; 0 asks for none."""
    summary_tokens: int = 48
    """Most tokens of a summary, for `mapreduce`."""
    figure: int | None = None
    """Of the paper, to be measured instead of the table of methods."""
    timed_items: int = 3
    """Figures of times to first token (TTFT): items, the first ones, that turns are timed of."""
    repeats: int = 3
    """Turns that count of each item and method; one more, the first, does not."""
    chunk_counts: tuple[int, ...] = (3, 6, 9)
    """Figure 15: numbers of chunks, each of `chunk_tokens`."""
    chunk_lengths: tuple[int, ...] = (128, 256, 512)
    """Figure 15: tokens of a chunk, `num_chunks` of them."""
    storage_gb_s: tuple[float, ...] = (0.5, 0.1, 0.05)
    """Figure 17: speeds of storages that loads are paced to, 1e9 bytes/s, beside DRAM and SSD as they are."""

    def __post_init__(self) -> None:
        for name in ("timed_items", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("chunk_counts", "chunk_lengths", "storage_gb_s"):
            values = getattr(self, name)
            if not values or not all(value > 0 for value in values):
                raise ValueError(f"{name} must be numbers above 0, got {values}")
        for baseline in self.baselines:
            if baseline not in BASELINES:
                raise ValueError(f"baselines must be some of {', '.join(BASELINES)}; got {baseline!r}")
        if self.answer_tokens < 0 or self.summary_tokens < 1:
            raise ValueError(
                f"there must be answer_tokens of at least 0 and summary_tokens of at least 1, "
                f"got {self.answer_tokens} and {self.summary_tokens}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateConfig:
    """`blend_gate`: the smallest ratio that keeps a model's next tokens close enough to full recompute.

    The relative bound is the default. How large a divergence matters differs from model to model, since it grows with
    how sure a model is of its tokens and with its vocabulary; full reuse on the same prompts is the measure of it that
    each model brings along. 0.55 of it is what the paper's selection reaches at a ratio of 0.15 on a model of 135M.

    Raises:
      ValueError: no bound, or one that is not above 0.
    """

    chunking: Chunking = Chunking()
    """What prompts are made of."""
    blends: Blends = Blends()
    """What is tried; one selection."""
    max_kl_share: float | None = 0.55
    """Most of full reuse's divergence that is taken, a share of it; None: any."""
    max_kl: float | None = None
    """Most divergence that is taken, nats; None: any. With both bounds both hold."""

    def __post_init__(self) -> None:
        if self.max_kl_share is None and self.max_kl is None:
            raise ValueError("max_kl_share or max_kl must be given, got neither")
        for name in ("max_kl_share", "max_kl"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be a bound above 0, got {value}")
        if len(self.blends.selections) != 1:
            raise ValueError(f"there must be one selection, got {', '.join(self.blends.selections)}")
