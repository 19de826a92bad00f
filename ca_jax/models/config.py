"""What a model is: its shapes and its position encoding, nothing about how it is run.

Not here: mesh, paths, dtypes of weights, kernels, tokenizer; published architectures (`presets`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from ca_jax.errors import UnsupportedArchitectureError, check
from ca_jax.models.recurrence import RecurrenceConfig

RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
Norm = Literal["rms", "layer"]
Mlp = Literal["swiglu", "swiglu_clipped", "geglu", "geglu_tanh", "gelu", "gelu_tanh"]
Routing = Literal["softmax", "sigmoid"]

ROPE_SCALINGS: tuple[str, ...] = get_args(RopeScaling)
"""Ways to stretch rotary frequencies that are served."""


_LATER = {"is_later": True}
"""Of fields that came later: configs in which such a field has its default are described, and known, as before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021), in half-split ("rotate half") order.

    Raises:
      UnsupportedArchitectureError: `scaling` is not one of those served.
      ValueError: a number out of range.
    """

    theta: float = 10000.0
    """Base of the frequencies."""
    scaling: RopeScaling = "none"
    """How frequencies are stretched: not at all, all alike (`linear`), by wavelength (`llama3`, `yarn`), by how long
    the context is (`dynamic`), or each by a number of its own, of one of two sets by how long the context is
    (`longrope`); or all alike, and only the first ones turn (`proportional`)."""
    factor: float = 1.0
    """How far the context was stretched over what the model was first trained on."""
    low_freq_factor: float = 1.0
    """`llama3` only: wavelengths above original_max_positions / this are stretched by the whole factor."""
    high_freq_factor: float = 4.0
    """`llama3` only: wavelengths below original_max_positions / this are left alone."""
    original_max_positions: int = 8192
    """`llama3`, `yarn`, `dynamic` and `longrope` only: the context length before stretching, tokens."""
    beta_fast: float = 32.0
    """`yarn` only: pairs that turn at least so often within original_max_positions are left alone."""
    beta_slow: float = 1.0
    """`yarn` only: pairs that turn at most so often are stretched by the whole factor."""
    truncate: bool = True
    """`yarn` only: whether the first and the last pair that are stretched in part are rounded to whole ones."""
    attention_factor: float = 1.0
    """`yarn` and `longrope` only: what rotated queries and keys are multiplied by."""
    short_factors: tuple[float, ...] = dataclasses.field(default=(), metadata=_LATER)
    """`longrope` only: what each frequency is divided by, R/2 numbers, in contexts within original_max_positions."""
    long_factors: tuple[float, ...] = dataclasses.field(default=(), metadata=_LATER)
    """`longrope` only: the same in longer ones."""
    rotary_dim: int | None = None
    """How many of a head's numbers are rotated, the first ones; None: all."""
    num_turning: int | None = dataclasses.field(default=None, metadata=_LATER)
    """`proportional` only: how many pairs turn, the first ones. Those behind them are pairs too, and turn by 0."""

    def __post_init__(self) -> None:
        for name in ("short_factors", "long_factors"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.scaling not in ROPE_SCALINGS:
            raise UnsupportedArchitectureError(
                f"rope scaling {self.scaling!r} is not served; it must be one of {', '.join(ROPE_SCALINGS)}"
            )
        for name in ("theta", "factor", "attention_factor", "original_max_positions"):
            check(getattr(self, name) > 0, f"rope {name}", "positive", getattr(self, name))
        for scaling, low, high in (
            ("llama3", "low_freq_factor", "high_freq_factor"),
            ("yarn", "beta_slow", "beta_fast"),
        ):
            found = getattr(self, low), getattr(self, high)
            holds = self.scaling != scaling or 0 < found[0] < found[1]
            check(holds, f"{low} and {high} of {scaling} rope scaling", "0 < the first < the second", found)
        rotary_dim = self.rotary_dim
        is_even = rotary_dim is None or (rotary_dim > 0 and rotary_dim % 2 == 0)
        check(is_even, "rope rotary_dim", "positive and even", rotary_dim)
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            holds = self.scaling != "longrope" or (factors and min(factors) > 0)
            check(holds, f"{name} of longrope rope scaling", "positive numbers", factors)
        holds = self.scaling != "proportional" or (self.num_turning is not None and self.num_turning >= 0)
        check(holds, "num_turning of proportional rope scaling", "0 or more", self.num_turning)


class LayerKind(NamedTuple):
    """What layers of one model may differ in. Those of one kind share compiled functions."""

    window: int | None
    """How many tokens a token sees, itself among them; None: all before it."""
    rope: int
    """Which of `ModelConfig.ropes` turns its queries and keys."""
    has_experts: bool
    """Whether its feed-forward block is of experts."""
    num_kv_heads: int
    """K."""
    head_dim: int
    """H."""
    has_values: bool
    """Whether values are other numbers than keys are made of."""
    has_kv: bool
    """Whether it has KV of its own, and reads no earlier layer's."""
    is_recurrent: bool
    """Whether it keeps a state in place of KV."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder-only transformer.

    Raises:
      ValueError: a size that is not positive, heads that KV heads do not divide, or parts that do not go together.
    """

    architecture: str = "llama"
    """Its family, one of `families.FAMILIES`. What is computed is said by the fields below alone."""
    vocab_size: int
    """V, tokens."""
    embed_dim: int
    """F, width of the residual stream."""
    mlp_dim: int
    """D, width of the feed-forward block, or of each expert."""
    num_layers: int
    """L."""
    num_heads: int
    """N, query heads."""
    num_kv_heads: int
    """K, key/value heads; N is a multiple of K."""
    head_dim: int
    """H."""
    max_positions: int
    """The context length the model was trained for, tokens."""
    norm_eps: float = 1e-5
    """Added to the mean square, or to the variance, inside norms."""
    tie_embeddings: bool = False
    """Whether the output head is the embedding table."""
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    """Rotary embedding."""
    local_rope: RopeConfig | None = dataclasses.field(default=None, metadata=_LATER)
    """Rotary embedding of layers that slide, where that is another one."""
    full_head_dim: int | None = dataclasses.field(default=None, metadata=_LATER)
    """H of layers that do not slide, where that is another one."""
    full_kv_heads: int | None = dataclasses.field(default=None, metadata=_LATER)
    """K of layers that do not slide, likewise."""
    full_keys_are_values: bool = dataclasses.field(default=False, metadata=_LATER)
    """Whether in layers that do not slide keys are values times the scale of the keys' norm: values alone are kept."""
    num_readers: int = dataclasses.field(default=0, metadata=_LATER)
    """Layers, the last ones, that have no KV of their own. Each reads that of the last layer before all of them that
    slides as it does."""
    reader_mlp_dim: int | None = dataclasses.field(default=None, metadata=_LATER)
    """Width of the feed-forward block of such layers; None: D."""
    layer_input_dim: int = dataclasses.field(default=0, metadata=_LATER)
    """Numbers of its own that a layer is given of each token, beside the residual stream; 0: none."""
    has_layer_scale: bool = dataclasses.field(default=False, metadata=_LATER)
    """Whether what comes out of a layer is multiplied by a number of that layer."""
    nope_layers: tuple[int, ...] = dataclasses.field(default=(), metadata=_LATER)
    """Layers that rotate nothing, ascending."""
    query_beta: float = dataclasses.field(default=0.0, metadata=_LATER)
    """Queries at place p are multiplied by `1 + query_beta ln(1 + floor(p / query_span))`."""
    query_span: int = dataclasses.field(default=1, metadata=_LATER)
    """See `query_beta`, tokens."""
    norm: Norm = "rms"
    """RMSNorm or LayerNorm."""
    norm_bias: bool = dataclasses.field(default=True, metadata=_LATER)
    """LayerNorm only: whether it has a bias."""
    norm_offset: float = dataclasses.field(default=0.0, metadata=_LATER)
    """Added to the scale of all norms."""
    norms_before: bool = dataclasses.field(default=True, metadata=_LATER)
    """Whether what attention and feed-forward read goes through a norm."""
    norms_behind: bool = dataclasses.field(default=False, metadata=_LATER)
    """Whether what attention and feed-forward give goes through a norm before it is added to the residual stream."""
    embed_scale: float = dataclasses.field(default=1.0, metadata=_LATER)
    """What embeddings are multiplied by."""
    residual_scale: float = dataclasses.field(default=1.0, metadata=_LATER)
    """What attention and feed-forward give is multiplied by, before it is added to the residual stream."""
    attention_scale: float | None = dataclasses.field(default=None, metadata=_LATER)
    """What scores are multiplied by; None: 1 / sqrt(H)."""
    score_cap: float | None = dataclasses.field(default=None, metadata=_LATER)
    """Scores s become `score_cap tanh(s / score_cap)`; None: they stay."""
    logit_scale: float = dataclasses.field(default=1.0, metadata=_LATER)
    """What logits are multiplied by."""
    logit_cap: float | None = dataclasses.field(default=None, metadata=_LATER)
    """Logits become `logit_cap tanh(logits / logit_cap)`; None: they stay."""
    has_sinks: bool = dataclasses.field(default=False, metadata=_LATER)
    """Whether each head has a score of its own beside those of keys, that weighs on no value."""
    mlp: Mlp = "swiglu"
    """The feed-forward block: gated by SiLU, by SiLU and clipped as in gpt-oss, or by GELU; or ungated with GELU. GELU
    is exact or by its tanh approximation."""
    is_parallel: bool = False
    """Whether attention and feed-forward read the same residual stream, instead of one after the other."""
    shares_norm: bool = False
    """Parallel only: whether both read it through one norm."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias."""
    out_bias: bool = False
    """Whether the attention's output has a bias."""
    mlp_bias: bool = False
    """Whether the feed-forward block's matrices have biases."""
    latent_dim: int = dataclasses.field(default=0, metadata=_LATER)
    """Numbers of a token that the keys and values of all heads are made of, where these are stored in place of them
    (multi-head latent attention). They are one KV head then, behind the numbers that are rotated: H is R and this. 0:
    keys and values are stored."""
    nope_dim: int = dataclasses.field(default=0, metadata=_LATER)
    """Latent attention only: numbers of each head's queries that are not rotated."""
    value_dim: int = dataclasses.field(default=0, metadata=_LATER)
    """Latent attention only: numbers of each head's values."""
    query_rank: int = dataclasses.field(default=0, metadata=_LATER)
    """Latent attention only: numbers that queries are made of; 0: they are made of what the layer reads."""
    qk_norm: bool = False
    """Whether queries and keys go through an RMSNorm before they are rotated, each head by itself."""
    value_norm: bool = dataclasses.field(default=False, metadata=_LATER)
    """Whether values go through an RMSNorm without a scale, each head by itself."""
    qk_norm_is_whole: bool = dataclasses.field(default=False, metadata=_LATER)
    """Whether that norm is over all heads as one vector."""
    sliding_window: int | None = None
    """How many tokens a token sees, itself among them, in layers that slide; None: all before it."""
    full_layers: tuple[int, ...] = ()
    """Layers that do not slide although there is a window, ascending."""
    num_experts: int = 0
    """E, experts of each feed-forward block; 0: one block that is no expert."""
    num_experts_per_token: int = 0
    """How many of them a token goes through."""
    dense_layers: tuple[int, ...] = dataclasses.field(default=(), metadata=_LATER)
    """Layers whose feed-forward block is no experts although others' are, ascending."""
    dense_mlp_dim: int | None = dataclasses.field(default=None, metadata=_LATER)
    """Width of the feed-forward block of such layers; None: D."""
    shared_mlp_dim: int = dataclasses.field(default=0, metadata=_LATER)
    """Width of a block beside the experts that all tokens go through; 0: there is none."""
    gates_shared: bool = dataclasses.field(default=False, metadata=_LATER)
    """Whether each token weighs what that block gives, by a sigmoid."""
    routing: Routing = dataclasses.field(default="softmax", metadata=_LATER)
    """How the router's numbers become an expert's share: over all experts, or each by itself."""
    router_bias: bool = dataclasses.field(default=False, metadata=_LATER)
    """Whether the router has a bias."""
    choice_bias: bool = dataclasses.field(default=False, metadata=_LATER)
    """Whether shares have a bias that counts in choosing experts alone."""
    normalizes_shares: bool = dataclasses.field(default=True, metadata=_LATER)
    """Whether the shares of the experts that were chosen are made to add up to 1."""
    routing_scale: float = dataclasses.field(default=1.0, metadata=_LATER)
    """What shares are multiplied by at last."""
    num_expert_groups: int = dataclasses.field(default=1, metadata=_LATER)
    """Experts are in so many groups, and chosen from the best of them."""
    num_chosen_groups: int = dataclasses.field(default=1, metadata=_LATER)
    """How many groups are chosen from."""
    num_group_shares: int = dataclasses.field(default=2, metadata=_LATER)
    """By how many of its best shares, added up, a group is chosen."""
    norms_experts: bool = dataclasses.field(default=False, metadata=_LATER)
    """Whether experts and the block beside them have norms of their own, and the router reads the residual stream
    through a norm and a scale of its own, and each expert's shares are scaled."""
    gates_heads: bool = dataclasses.field(default=False, metadata=_LATER)
    """Whether what attention gives is multiplied by sigmoids of what the layer reads, before its output matrix."""
    recurrence: RecurrenceConfig | None = dataclasses.field(default=None, metadata=_LATER)
    """The layers that keep a state instead of KV, and its sizes. None if no layer does."""

    def __post_init__(self) -> None:
        layers = ("full_layers", "nope_layers", "dense_layers")
        for name in layers:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        sizes = ("vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "max_positions"):
            check(getattr(self, name) > 0, name, "positive", getattr(self, name))
        for name, kinds in (("norm", Norm), ("mlp", Mlp), ("routing", Routing)):
            choices = get_args(kinds)
            check(getattr(self, name) in choices, name, f"one of {', '.join(choices)}", getattr(self, name))
        heads, experts = (self.num_heads, self.num_kv_heads), (self.num_experts_per_token, self.num_experts)
        check(heads[0] % heads[1] == 0, "num_heads", "a multiple of num_kv_heads", heads)
        check(self.head_dim % 2 == 0, "head_dim", "even for rotary embedding", self.head_dim)
        most = f"at most head_dim {self.head_dim}"
        check(self.rotary_dim <= self.head_dim, "rope rotary_dim", most, self.rotary_dim)
        check(self.is_parallel or not self.shares_norm, "shares_norm", "False without is_parallel", self.shares_norm)
        norms = (self.norms_before, self.norms_behind, self.shares_norm)
        check(any(norms[:2]), "norms_before and norms_behind", "True at least one of them", norms[:2])
        check(norms[0] or not norms[2], "shares_norm", "False without norms_before", norms[2])
        window = self.sliding_window
        check(window is None or window > 0, "sliding_window", "positive or None", window)
        for name in layers:
            found = getattr(self, name)
            are_layers = all(0 <= layer < self.num_layers for layer in found)
            check(are_layers, name, f"layers in [0, {self.num_layers})", found)
        for name in ("attention_scale", "score_cap", "logit_cap", "dense_mlp_dim"):
            found = getattr(self, name)
            check(found is None or found > 0, name, "positive or None", found)
        check(self.query_span > 0, "query_span", "positive", self.query_span)
        are_chosen = experts == (0, 0) or 0 < experts[0] <= experts[1]
        check(are_chosen, "experts", "0 < num_experts_per_token <= num_experts, or both 0", experts)
        if self.latent_dim:
            width = self.rotary_dim + self.latent_dim
            shape = (self.num_kv_heads, self.head_dim)
            check(shape == (1, width), "KV heads and head_dim of latent attention", f"1 and {width}", shape)
            made = (self.nope_dim, self.value_dim)
            check(min(made) > 0, "nope_dim and value_dim of latent attention", "positive", made)
            has_none = not (self.qkv_bias or self.out_bias or self.qk_norm or self.has_sinks)
            check(has_none, "latent attention", "without biases, qk_norm and sinks", "some of them")
        is_gated = not self.num_experts or self.has_gate
        check(is_gated, "mlp of experts", "one that is gated", self.mlp)
        has_both = self.num_experts > 0 and self.shared_mlp_dim > 0
        check(
            has_both or not self.norms_experts, "norms_experts", "False without experts and a block beside them", True
        )
        if self.recurrence is not None:
            recurrent = self.recurrence.layers
            are_some = set(recurrent) < set(range(self.num_layers))
            wanted = f"some and not all of the layers in [0, {self.num_layers})"
            check(are_some, "recurrence layers", wanted, recurrent)
            check(window is None, "sliding_window with a recurrence", "None", window)
        groups = (self.num_chosen_groups, self.num_expert_groups)
        check(0 < groups[0] <= groups[1], "num_chosen_groups", "in [1, num_expert_groups]", groups)
        check(self.num_experts % groups[1] == 0, "num_experts", f"a multiple of {groups[1]} groups", self.num_experts)
        self._check_groups()

    def _check_groups(self) -> None:
        """Checks what tells layers that do not slide from others, and layers without KV of their own from others."""
        slides = self.sliding_window is not None
        for name in ("full_head_dim", "full_kv_heads", "full_keys_are_values"):
            check(slides or not getattr(self, name), name, "None or False without sliding_window", getattr(self, name))
        head_dim, num_kv_heads = self.full_head_dim or self.head_dim, self.full_kv_heads or self.num_kv_heads
        check(head_dim > 0 and head_dim % 2 == 0, "full_head_dim", "positive and even", head_dim)
        divides = num_kv_heads > 0 and self.num_heads % num_kv_heads == 0
        check(divides, "full_kv_heads", f"a divisor of {self.num_heads} heads", num_kv_heads)
        if self.full_keys_are_values:
            norms = (self.qk_norm, not self.qk_norm_is_whole, self.value_norm, not self.norm_offset)
            check(all(norms), "full_keys_are_values", "False without norms of keys and values, or with an offset", True)
            check(not self.num_readers, "full_keys_are_values", "False with num_readers", True)
        check(0 <= self.num_readers < self.num_layers, "num_readers", f"in [0, {self.num_layers})", self.num_readers)
        windows = {*map(self.window_of, self.kv_layers)}
        are_read = {self.window_of(layer) for layer in range(self.num_layers)} <= windows
        check(are_read, "num_readers", "so few that each finds a layer that slides as it does", self.num_readers)
        check(self.layer_input_dim >= 0, "layer_input_dim", "at least 0", self.layer_input_dim)

    @property
    def num_groups(self) -> int:
        """G, query heads that share one KV head, in layers that slide or are all alike."""
        return self.num_heads // self.num_kv_heads

    @functools.cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers that have KV of their own, in the order in which pages and the store number them."""
        return tuple(layer for layer in range(self.num_layers - self.num_readers) if not self.is_recurrent(layer))

    @functools.cached_property
    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Of each of these what a token leaves in it, as `kv_shape`."""
        return tuple(map(self.kv_shape, self.kv_layers))

    @functools.cached_property
    def kv_groups(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of `kv_layers`, in groups of layers that keep the same of a token, and for as long."""
        found: dict[tuple[tuple[int, int, int], int | None], list[int]] = {}
        for number, layer in enumerate(self.kv_layers):
            found.setdefault((self.kv_shape(layer), self.window_of(layer)), []).append(number)
        return tuple(map(tuple, found.values()))

    def kv_number(self, layer: int) -> int:
        """The number among `kv_layers` of the one whose KV a layer reads: itself, or the last that slides alike.

        Of a layer that keeps a state the number of its neighbour, which it does not read.
        """
        if layer in self.kv_layers:
            return self.kv_layers.index(layer)
        window = self.window_of(layer)
        return max(number for number, each in enumerate(self.kv_layers) if self.window_of(each) == window)

    @property
    def rotary_dim(self) -> int:
        """R, how many of a head's numbers are rotated."""
        return self.head_dim if self.rope.rotary_dim is None else self.rope.rotary_dim

    @property
    def has_gate(self) -> bool:
        """Whether the feed-forward block is gated: of three matrices, and not two."""
        return self.mlp not in ("gelu", "gelu_tanh")

    @functools.cached_property
    def ropes(self) -> tuple[tuple[RopeConfig | None, int], ...]:
        """The rotary embeddings of layers, each with H, the usual one first; None: of layers that rotate nothing."""
        found = dict.fromkeys(map(self._rope_of, range(self.num_layers)))
        return tuple(sorted(found, key=lambda each: each[0] != self.rope))

    @property
    def steady_positions(self) -> int:
        """The longest context whose rotary frequencies are those of any shorter one.

        Only `dynamic` and `longrope` scaling have less than `max_positions`.
        """
        if self.rope.scaling in ("dynamic", "longrope"):
            return min(self.max_positions, self.rope.original_max_positions)
        return self.max_positions

    def window_of(self, layer: int) -> int | None:
        """How many tokens a token sees in a layer, itself among them; None: all before it."""
        return None if layer in self.full_layers else self.sliding_window

    def kind_of(self, layer: int) -> LayerKind:
        """What a layer is, as far as layers of one model differ."""
        has_experts = self.num_experts > 0 and layer not in self.dense_layers
        parts, num_kv_heads, head_dim = self.kv_shape(layer)
        return LayerKind(
            self.window_of(layer),
            self.ropes.index(self._rope_of(layer)),
            has_experts,
            num_kv_heads,
            head_dim,
            has_values=parts > 1,
            has_kv=layer in self.kv_layers,
            is_recurrent=self.is_recurrent(layer),
        )

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer keeps a state in place of KV."""
        return self.recurrence is not None and layer in self.recurrence.layers

    @property
    def num_states(self) -> int:
        """Layers that keep a state in place of KV."""
        return 0 if self.recurrence is None else len(self.recurrence.layers)

    def _rope_of(self, layer: int) -> tuple[RopeConfig | None, int]:
        head_dim = self.kv_shape(layer)[2]
        if layer in self.nope_layers:
            return None, head_dim
        return self.rope if self.local_rope is None or self.window_of(layer) is None else self.local_rope, head_dim

    def kv_shape(self, layer: int) -> tuple[int, int, int]:
        """What a token leaves in a layer: parts (keys and values, or the latent alone, or values alone), KV heads, and
        numbers of each. Of a layer without KV of its own: in the one that it reads."""
        if self.window_of(layer) is not None:
            return (1 if self.latent_dim else 2, self.num_kv_heads, self.head_dim)
        parts = 1 if self.latent_dim or self.full_keys_are_values else 2
        return (parts, self.full_kv_heads or self.num_kv_heads, self.full_head_dim or self.head_dim)

    def mlp_dim_of(self, kind: LayerKind) -> int:
        """Width of the feed-forward block of a layer of such a kind, or of each of its experts."""
        if kind.has_experts:
            return self.mlp_dim
        return (self.dense_mlp_dim if kind.has_kv else self.reader_mlp_dim or self.dense_mlp_dim) or self.mlp_dim

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes of keys and values one token leaves in all layers, at `itemsize` bytes a number (2 for bf16)."""
        return sum(map(math.prod, self.kv_shapes)) * itemsize

    def described(self) -> dict[str, Any]:
        """The config as what JSON can hold."""
        return _described(self)

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> ModelConfig:
        """The config that `described` gives, also after a way through JSON.

        Raises:
          TypeError: an entry that is no field, or one that is missing.
          ValueError, UnsupportedArchitectureError: as for the constructors.
        """
        nested = {"rope": RopeConfig, "local_rope": RopeConfig, "recurrence": RecurrenceConfig}
        found = {name: (kind, described.get(name)) for name, kind in nested.items()}
        made = {name: kind(**each) for name, (kind, each) in found.items() if each is not None}
        return cls(**{**described, **made})


def _described(config: Any) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not field.metadata.get("is_later") or value != field.default:
            found[field.name] = _described(value) if dataclasses.is_dataclass(value) else value
    return found
