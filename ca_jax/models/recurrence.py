"""Layers that keep a state of fixed size in place of keys and values: which these are, and what they hold.

A state stands behind one token. It cannot be shortened, moved or put together from others; it is had again by computing
on from an earlier one.

Not here: what is computed (recurrent), which models have such layers (families.recurrent).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from ca_jax.errors import check

RecurrenceKind = Literal["short_conv", "gated_delta", "channel_delta", "state_space"]


class Parameter(NamedTuple):
    """One leaf of such a layer's parameters."""

    name: str
    """In the tree."""
    shape: tuple[int, ...]
    """There."""
    axes: tuple[str | None, ...]
    """A name for each axis, see `weights.Slot`. `heads` of values, or all their numbers, head by head."""
    num_inputs: int | None = None
    """Of a matrix: how many of its axes, the first ones, are inputs; None: it is none."""
    stored_shape: tuple[int, ...] | None = None
    """In files, where that follows from neither of these."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceConfig:
    """The layers of a model that keep a state.

    Raises:
      ValueError: an unknown kind, a size that is not positive, or value heads that key heads do not divide.
    """

    kind: RecurrenceKind
    """`short_conv`: the last inputs of a gated convolution (LFM2). `gated_delta`: those of a convolution, and a matrix
    for each value head (gated delta rule). `channel_delta`: likewise, each of a key's numbers forgets by itself (Kimi
    Delta Attention). `state_space`: likewise, of a selective state space (Mamba-2)."""
    layers: tuple[int, ...]
    """Which, ascending."""
    conv_width: int
    """W: tokens that a convolution looks at, the one that looks among them."""
    has_bias: bool = False
    """Whether the convolution has a bias, and of `short_conv` its matrices too; delta rules have none."""
    num_key_heads: int = 1
    """Heads of queries and keys; of `state_space`, where these are C and B, groups. Not of `short_conv`, nor are those
    below."""
    num_value_heads: int = 1
    """Heads of values, a multiple of those of keys."""
    key_dim: int = 1
    """Numbers of a head's query and key; of `state_space` the size of a number's state."""
    value_dim: int = 1
    """Numbers of a head's value."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        kinds = get_args(RecurrenceKind)
        check(self.kind in kinds, "kind of recurrence", f"one of {', '.join(kinds)}", self.kind)
        for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim"):
            check(getattr(self, name) > 0, f"recurrence {name}", "positive", getattr(self, name))
        check(self.conv_width > 1, "recurrence conv_width", "at least 2", self.conv_width)
        check(bool(self.layers), "recurrence layers", "at least one", self.layers)
        heads, dims = (self.num_value_heads, self.num_key_heads), (self.key_dim, self.value_dim)
        check(heads[0] % heads[1] == 0, "recurrence num_value_heads", "a multiple of num_key_heads", heads)
        are_alike = self.kind != "channel_delta" or (heads[0] == heads[1] and dims[0] == dims[1])
        check(are_alike, "heads and their sizes of a channel_delta", "as many, and as large", (*heads, *dims))

    def conv_dim(self, embed_dim: int) -> int:
        """Numbers of a token that go through the convolution."""
        if self.kind == "short_conv":
            return embed_dim
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def state_shapes(self, embed_dim: int) -> tuple[tuple[tuple[int, ...], str | None], ...]:
        """What one layer's state is made of: shapes, and dtypes, None for that of the weights."""
        shapes: list[tuple[tuple[int, ...], str | None]] = [((self.conv_width - 1, self.conv_dim(embed_dim)), None)]
        if self.kind != "short_conv":
            shapes.append(((self.num_value_heads, self.key_dim, self.value_dim), "float32"))
        return tuple(shapes)

    def parameters(self, embed_dim: int) -> Iterator[Parameter]:
        """Those of one layer."""
        conv_dim, width, heads = self.conv_dim(embed_dim), self.conv_width, self.num_value_heads
        kernel = Parameter("kernel", (conv_dim, width), ("channels", None), stored_shape=(conv_dim, 1, width))
        if self.kind == "short_conv":
            yield Parameter("w_in", (embed_dim, 3 * embed_dim), ("embed", "channels"), 1)
            yield kernel
            yield Parameter("w_out", (embed_dim, embed_dim), ("channels", "embed"), 1)
            if self.has_bias:
                yield Parameter("b_in", (3 * embed_dim,), ("channels",))
                yield Parameter("b_kernel", (embed_dim,), ("channels",))
                yield Parameter("b_out", (embed_dim,), ("embed",))
            return
        if self.kind == "channel_delta":
            yield from self._channel_parameters(embed_dim)
            return
        yield Parameter("w_qkv", (embed_dim, conv_dim), ("embed", "channels"), 1)
        yield Parameter("w_z", (embed_dim, heads, self.value_dim), ("embed", "heads", None), 1)
        if self.kind == "gated_delta":
            yield Parameter("w_beta", (embed_dim, heads), ("embed", "heads"), 1)
        yield Parameter("w_step", (embed_dim, heads), ("embed", "heads"), 1)
        yield kernel
        if self.has_bias:
            yield Parameter("b_kernel", (conv_dim,), ("channels",))
        yield Parameter("a_log", (heads,), ("heads",))
        yield Parameter("b_step", (heads,), ("heads",))
        if self.kind == "gated_delta":
            yield Parameter("scale", (self.value_dim,), (None,))
        else:
            yield Parameter("skip", (heads,), ("heads",))
            yield Parameter("scale", (heads * self.value_dim,), ("heads",))
        yield Parameter("w_out", (heads, self.value_dim, embed_dim), ("heads", None, "embed"), 2)

    def _channel_parameters(self, embed_dim: int) -> Iterator[Parameter]:
        """Of `channel_delta`, whose files have queries, keys and values apart."""
        heads, size = self.num_value_heads, self.value_dim
        width = heads * size
        for part in "qkv":
            yield Parameter(f"w_{part}", (embed_dim, width), ("embed", "heads"), 1)
            # Whole: the convolution is over all three parts one behind the other.
            kernel = (width, self.conv_width)
            yield Parameter(f"kernel_{part}", kernel, (None, None), stored_shape=(width, 1, self.conv_width))
        yield Parameter("w_beta", (embed_dim, heads), ("embed", "heads"), 1)
        for part in ("decay", "gate"):
            yield Parameter(f"w_{part}_a", (embed_dim, size), ("embed", None), 1)
            yield Parameter(f"w_{part}_b", (size, width), (None, "heads"), 1)
        yield Parameter("a_log", (1, heads), (None, "heads"), stored_shape=(1, 1, heads, 1))
        yield Parameter("b_step", (width,), ("heads",))
        yield Parameter("scale", (size,), (None,))
        yield Parameter("w_out", (heads, size, embed_dim), ("heads", None, "embed"), 2)
