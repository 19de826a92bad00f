"""KV in other numbers: what a token keeps in a layer as steps that are worth as much each, predicted by layers before.

    coding       numbers ── less their mean, by `forward` ──  steps ── less what is predicted ── rounded ── codes
    decoding     numbers ── plus their mean, by `inverse` ──  decoded steps = what is predicted + codes
                                                                │                    │
                                                                └─ by `earlier` ─────┘ of the layers behind

A layer's keys and values come from a stream that changes little from layer to layer, so that what is left when layers
before have predicted a layer is smaller, and takes fewer bits. The coder predicts from what the decoder will have, and
what a number loses is what its own rounding takes: errors do not add up from layer to layer. Bundles of heads are
predicted from the same bundle of other layers. With matrices of D = 384 a layer's product takes nearly all the time of
decoding, and each layer that predicts it takes as much again. Where the machine multiplies tiles of bfloat16 they do
all of this; elsewhere numpy does.

Not here: those tiles (storage.transform_amx), how codes are packed (storage.codec), how matrices are found
(`ca_jax.recompute.codec_fit`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ca_jax.storage.transform_amx import PackedTransform, is_served

LEAST_SPREAD = 0.2
"""Steps. What spreads less is 0 but for one number in a hundred, and is left out."""
MOST_CODE = 32_767
"""Whole numbers that are larger are this one."""
ARRAYS = ("means", "forward", "spread", "earlier", "energy")
"""Of a group, as a file has them."""


@dataclasses.dataclass
class DecodedSteps:
    """Decoded steps of a group's last layers, as far as the next ones need them, of T tokens."""

    by_layer: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    """f32 `[R, D, T]`, where numpy computes."""
    columns: np.ndarray | None = None
    """Where the library does, as it has them."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GroupCodec:
    """Of a group of layers `l` that keep P parts of K heads of H numbers.

    KV heads go together in R bundles, with all their parts: D numbers of a bundle, head by head and part by part.

    Raises:
      ValueError: arrays of other shapes, or that are no numbers; a matrix without an inverse.
    """

    means: np.ndarray
    """f32 `[l, P, K, H]`."""
    forward: np.ndarray
    """f32 `[l, R, D, D]`: numbers, less their means, times this are in steps."""
    spread: np.ndarray
    """f32 `[l, R, D]`, the standard deviation of what is rounded of each of those, steps."""
    earlier: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
    """f32 `[l, J, R, D, D]`: decoded steps of layers 1 to J before, times these, predict a layer's. Empty: J is 0."""
    energy: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
    """f32 `[l, R]`, the sum of a token's squared steps, mean. Empty: what spread says where nothing is predicted."""
    inverse: np.ndarray = dataclasses.field(init=False)
    """f32 `[l, R, D, D]`."""
    offset: np.ndarray = dataclasses.field(init=False)
    """f32 `[l, R, D, 1]`, what the means become."""
    packed: PackedTransform | None = dataclasses.field(init=False, repr=False)
    """The matrices for a machine with tiles of bfloat16, made at once, so that no turn waits for it; None elsewhere."""

    def __post_init__(self) -> None:
        if np.size(self.earlier) == 0:
            object.__setattr__(self, "earlier", np.zeros((len(self.means), 0, *self.forward.shape[1:]), np.float32))
        if np.size(self.energy) == 0:
            object.__setattr__(self, "energy", np.square(self.spread).sum(-1))
        for name in ARRAYS:
            found = np.ascontiguousarray(getattr(self, name), np.float32)
            if not np.isfinite(found).all():
                raise ValueError(f"{name} of a codec must be numbers, got others")
            object.__setattr__(self, name, found)
        fits = self.means.ndim == 4 and self.spread.ndim == 3 and self.spread.size == self.means.size
        fits = fits and len(self.spread) == len(self.means) and self.forward.shape == (*self.spread.shape, self.width)
        fits = fits and (len(self.means), *self.forward.shape[1:]) == (*self.earlier.shape[:1], *self.earlier.shape[2:])
        fits = fits and self.energy.shape == self.spread.shape[:2]
        if not fits or self.shape[2] % self.spread.shape[1]:
            shapes = ", ".join(str(list(getattr(self, name).shape)) for name in ARRAYS[1:])
            raise ValueError(
                f"a codec of means {list(self.means.shape)} must have matrices [l, R, D, D], spread [l, R, D], "
                f"matrices [l, J, R, D, D] and energy [l, R], got {shapes}"
            )
        try:
            inverse = np.linalg.inv(self.forward.astype(np.float64)).astype(np.float32)
        except np.linalg.LinAlgError as error:
            raise ValueError("each matrix of a codec must have an inverse, got one without") from error
        object.__setattr__(self, "inverse", inverse)
        means = self.bundled(self.means[:, :, None])[..., 0]
        object.__setattr__(self, "offset", np.einsum("lrd,lrdj->lrj", means, self.forward)[..., None])
        matrices = {"forward": self.forward, "inverse": inverse, "earlier": self.earlier}
        packed = PackedTransform(means=self.means, kept=self.is_kept, **matrices) if is_served() else None
        object.__setattr__(self, "packed", packed)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(l, P, K, H)`."""
        return np.shape(self.means)

    @property
    def width(self) -> int:
        """D."""
        return int(self.spread.shape[-1])

    @property
    def is_kept(self) -> np.ndarray:
        """bool `[l, R, D]`: which numbers are not left out."""
        return self.spread > LEAST_SPREAD

    @property
    def _packed(self) -> PackedTransform | None:
        """None: numpy computes."""
        return self.packed if is_served() else None

    def bundled(self, part: np.ndarray) -> np.ndarray:
        """`[l, P, T, K, H]` as bundles `[l, R, D, T]`."""
        num_layers, _, num_tokens = part.shape[:3]
        return part.transpose(0, 3, 1, 4, 2).reshape(num_layers, -1, self.width, num_tokens)

    def coded(self, part: np.ndarray) -> np.ndarray:
        """`[l, P, T, K, H]` in steps, `[l, R, D, T]`."""
        if self._packed is not None:
            return self._packed.coded(part)
        found = np.matmul(np.swapaxes(self.forward, -1, -2), self.bundled(part))
        found -= self.offset
        return found

    def distance(self, steps: np.ndarray) -> np.ndarray:
        """How far tokens `[l, R, D, T]` are from what is usual: times the energy of other tokens, mean, f64 `[T]`."""
        found = (
            np.einsum("lrdt,lrdt->lrt", steps, steps) / np.maximum(self.energy, np.finfo(np.float32).tiny)[..., None]
        )
        return found.mean((0, 1), dtype=np.float64)

    def rounded(self, steps: np.ndarray, unit: float) -> np.ndarray:
        """What is left of numbers in steps where those of earlier layers, as they come back, have predicted them.

        Args:
          steps: `[l, R, D, T]`.
          unit: to whose multiples it is rounded, steps.

        Returns:
          Multiples, int16 `[l, R, D, T]`, up to `MOST_CODE` either way.
        """
        if self._packed is not None:
            return self._packed.rounded(steps, unit)
        codes, decoded = np.empty(steps.shape, np.int16), np.empty_like(steps)
        is_kept = self.is_kept[..., None]
        for layer, wanted in enumerate(steps):
            predicted = self._predicted(decoded, layer)
            found = decoded[layer]
            np.subtract(wanted, predicted, out=found)
            found /= np.float32(unit)
            np.rint(found, out=found)
            found *= is_kept[layer]
            codes[layer] = np.clip(found, -MOST_CODE, MOST_CODE)
            found *= np.float32(unit)
            decoded[layer] += predicted
        return codes

    def decode(self, codes: np.ndarray, unit: float, into: np.ndarray) -> None:
        """Writes what was int16 `[l, R, D, T]` in multiples of a unit into `[l, P, T, K, H]`."""
        if self._packed is not None:
            return self._packed.decode(codes, unit, into)
        decoded = DecodedSteps()
        for layer in range(len(self.means)):
            self.decode_layer(layer, codes[layer], unit, decoded, into[layer])

    def decode_layer(self, layer: int, codes: np.ndarray, unit: float, decoded: DecodedSteps, into: np.ndarray) -> None:
        """Writes one layer's numbers, once those before are decoded.

        Args:
          layer: which of the group's.
          codes: int16 `[R, D, T]`, multiples of a unit.
          unit: steps.
          decoded: what is known of the layers before; this layer's is added.
          into: `[P, T, K, H]`.
        """
        if (packed := self._packed) is not None and not decoded.by_layer:
            decoded.columns = packed.columns(codes.shape[-1]) if decoded.columns is None else decoded.columns
            return packed.decode(codes[None], unit, into[None], layer, decoded.columns)
        _, num_parts, num_heads, width = self.shape
        num_bundles = self.spread.shape[1]
        by_bundle = (num_parts, -1, num_bundles, num_heads // num_bundles, width)
        steps = np.multiply(codes, np.float32(unit), dtype=np.float32)
        steps += self._predicted(decoded.by_layer, layer)
        decoded.by_layer[layer] = steps
        decoded.by_layer.pop(layer - self.earlier.shape[1], None)
        found = np.matmul(np.swapaxes(steps, -1, -2), self.inverse[layer])  # [R, T, D]
        found = found.reshape(num_bundles, found.shape[1], -1, num_parts, width).transpose(3, 1, 0, 2, 4)
        means = self.means[layer][:, None].reshape(by_bundle)
        np.add(found, means, out=into.reshape(by_bundle, copy=False), casting="unsafe")

    def _predicted(self, decoded: np.ndarray | dict[int, np.ndarray], layer: int) -> np.ndarray | np.float32:
        """A layer's steps by those of layers before that are decoded, `[R, D, T]`; 0 of the first."""
        found: np.ndarray | np.float32 = np.float32(0)
        for back in range(1, min(layer, self.earlier.shape[1]) + 1):
            found = found + np.matmul(np.swapaxes(self.earlier[layer, back - 1], -1, -2), decoded[layer - back])
        return found
