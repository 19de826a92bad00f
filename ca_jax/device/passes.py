"""What a pass is asked for, how its tokens lie, and what it gives: prompts' tokens, where their history comes from, and
tokens drawn.

Not here: how it is computed (runner), what is asked for when (serving.batch).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np

from ca_jax.device.adapters import AdapterSizes
from ca_jax.device.pages import PoolSize
from ca_jax.device.sampler import Draw
from ca_jax.device.state_steps import Cells
from ca_jax.device.transfer import to_host
from ca_jax.models.paged_attention import Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerSizes:
    """What a runner's steps are like."""

    pool: PoolSize
    """Of the pages of KV: how many jobs run at a time, and how long they may become, too."""
    chunk_tokens: int
    """Most tokens of a step."""
    with_attention: bool = False
    """Whether the attention that tokens receive is measured."""
    packs_kv: bool = False
    """Whether KV is kept in int8."""
    max_draft_tokens: int = 0
    """Most tokens that are guessed ahead for a job; 0: none ever are."""
    adapters: AdapterSizes = dataclasses.field(default_factory=AdapterSizes)
    """Room for adapters."""


class LayerSource(Protocol):
    """Where a prefill takes its history from, layer by layer."""

    def layer(self, layer: int) -> jax.Array | None:
        """Unrotated KV `[2, S, K, H]`, or in int8 `[2, S, K, H + 2]`, S as `Runner.padded_history` says.

        None: it is in its pages already.
        """

    def computed(self, layer: int, result: jax.Array) -> None:
        """Nothing reads what `layer` gave when `result` is ready."""


class Joined(Protocol):
    """A history that is mended together with new tokens behind it."""

    num_chosen: int
    """Tokens before the new ones in what is computed,"""

    @property
    def num_rows(self) -> int:
        """and how many that are in all, padding too."""

    @property
    def joined(self) -> tuple[jax.Array, jax.Array]:
        """Of the layer that was mended last, of all that is computed: what goes into the next layer `[D, T', F]`, and
        unrotated KV `[2, D n, K, H]`."""


@dataclasses.dataclass(frozen=True)
class Received:
    """Attention that a job's tokens received from the new ones of one pass, summed over layers and query heads."""

    attention: jax.Array
    """f32 `[n, C]`, of all rows of the pass, by places."""
    row: int
    """The job's."""
    num_tokens: int
    """Of its context, new ones included."""

    def add_to(self, attention: np.ndarray) -> None:
        """Adds it up over a context, f32 `[T]`. Waits for the pass."""
        attention[: self.num_tokens] += to_host(self.attention)[self.row, : self.num_tokens]


@dataclasses.dataclass
class Prefill:
    """A job's prefill: how much of its prompt was dispatched.

    Raises:
      ValueError: no tokens.
    """

    slot: int
    """The job's: its row in the pool."""
    tokens: list[int]
    """New ones."""
    history_length: int
    """Tokens before them."""
    num_done: int = 0
    """New tokens that were dispatched."""
    outputs: list[jax.Array] = dataclasses.field(default_factory=list)
    """Per layer the unrotated KV of the last pass, of all its rows: ready when the layer is computed."""
    received: list[Received] = dataclasses.field(default_factory=list)
    """Of each pass, the attention that tokens received in it, if the runner measures that."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a prefill must have at least one new token, got none")

    @property
    def num_left(self) -> int:
        """New tokens that are to be dispatched."""
        return len(self.tokens) - self.num_done

    @property
    def start(self) -> int:
        """The place of the first token that is to be dispatched."""
        return self.history_length + self.num_done


@dataclasses.dataclass
class PassPart:
    """What a pass computes of one prefill."""

    prefill: Prefill
    """Whose."""
    num_tokens: int
    """How many of the tokens that are left."""
    history: LayerSource | None = None
    """Of the first pass, where there is a history that is not in its pages."""
    on_layer: Callable[[int, jax.Array, int], None] = lambda layer, kv, first: None
    """Called with each layer's new unrotated KV `[2, T, K, H]` of all rows, as soon as that is dispatched, and with the
    first token of this one."""
    draws_behind: int | None = None
    """Tokens before the one that is drawn behind this part, those that have left included; None: none is drawn."""
    mend: Callable[[int], None] = lambda layer: None
    """Called with each layer whose history was put into its pages, before it is read."""
    joined: Joined | None = None
    """What computes its tokens as it mends the history: the pass is its alone."""
    on_hidden: Callable[[jax.Array, int, int], None] | None = None
    """Called with what the last layer gives of all tokens `[D, T', F]`, the part of the mesh in which this one's are,
    and the first of them there; None: nothing is made of it."""
    error: Exception | None = None
    """What broke of its history, or of taking its KV: nothing that was computed of it is sound."""

    def take(self, layer: int, kv: jax.Array, first: int) -> None:
        """A layer was dispatched, which gives this KV of all rows."""
        self.prefill.outputs.append(kv)
        if self.error is None:
            try:
                self.on_layer(layer, kv, first)
            except Exception as error:
                self.error = error

    def take_hidden(self, x: jax.Array, part: int, first: int) -> None:
        """All layers were dispatched; see `on_hidden`."""
        if self.on_hidden is not None and self.error is None:
            try:
                self.on_hidden(x, part, first)
            except Exception as error:
                self.error = error


@dataclasses.dataclass(frozen=True)
class Passed:
    """What a pass gives."""

    draw: Draw | None
    """The tokens behind the prompts that it completed and those of jobs that decoded, by row; not waited for."""
    rows: dict[int, int]
    """By slot the row of each there."""
    kv: tuple[jax.Array, ...] | None = None
    """Unrotated KV of the tokens of jobs that decoded, of each of `config.kv_groups` `[l, 2, n, K, H]`."""
    kv_rows: dict[int, int] = dataclasses.field(default_factory=dict)
    """By slot the row of each there."""
    received: dict[int, Received] = dataclasses.field(default_factory=dict)
    """By slot what the tokens of these jobs received, where that is measured."""


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What a decode step gives."""

    draw: Draw
    """Tokens by row, on the host."""
    kv: tuple[jax.Array, ...]
    """Unrotated KV of the jobs' last tokens, of each of `config.kv_groups` `[l, 2, n, K, H]`."""
    rows: dict[int, int]
    """By slot the row of each job."""
    received: np.ndarray | None
    """The attention that tokens of each row received, f32 `[n, C]`; None where that is not measured."""


@dataclasses.dataclass(frozen=True)
class Flight:
    """A decode step that has been dispatched."""

    batch: tuple[tuple[int, int, int], ...]
    """Slot, job, and tokens before the one that is computed."""
    slots: list[int | None]
    """By row."""
    lengths: np.ndarray
    """Of each row, tokens before the one that is computed."""
    num_gone: np.ndarray
    """Of each row, tokens that have left."""
    found: tuple[jax.Array, jax.Array]
    """Logits, and the likeliest tokens."""
    draw: Draw | None
    """None: it depends on the last step's tokens."""
    kv: tuple[jax.Array, ...]
    """As `Decoded.kv`."""
    received: jax.Array | None
    """As `Decoded.received`."""


@dataclasses.dataclass(frozen=True)
class Step:
    """How the tokens of a step lie on the device."""

    rows: Rows
    """Where they are."""
    slots: list[int | None]
    """By row."""
    tokens: np.ndarray
    """i32 `[D, T']`."""
    num_tokens: int
    """T, of each part."""
    part: dict[int, int]
    """By slot, which part it is in."""
    first: dict[int, int]
    """By slot, the first of its tokens there."""
    last: dict[int, int]
    """By slot, the last."""
    adapters: jax.Array | None
    """Slots of adapters, i32 `[D, T']`."""
    cells: Cells | None
    """Where rows stand in layers that keep states; None: there are no such layers."""

    def behind(self, count: int, num_tokens: int) -> Step:
        """The same with so many others before a part's tokens, of so many in all."""
        first, last = ({slot: at + count for slot, at in each.items()} for each in (self.first, self.last))
        return dataclasses.replace(self, num_tokens=num_tokens, first=first, last=last)

    def kv_row(self, slot: int) -> int:
        """Which of all tokens, as their KV is handed out, is a slot's first."""
        return self.part[slot] * self.num_tokens + self.first[slot]
