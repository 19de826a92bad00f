"""What KV costs in quality that was coded at rest, and how small it gets: codecs of any number of bits, and int8.

A text is fed in windows. The KV of a window's first part is coded and comes back, block by block, as a tier has it; the
second is computed over that, and over the exact KV. The same tokens are predicted over each: what is told is by how
much less likely they are.

Not here: coding (`ca_jax.storage.codec`), making codecs (`ca_jax.recompute.codec_fit`), serving with one.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.evaluate.comparison import Evaluation
from benchmarks.evaluate.statistics import Interval, mean_interval
from ca_jax.device.steps import Params
from ca_jax.device.transfer import to_device, to_host
from ca_jax.launch.texts import EvaluationError, read_ids
from ca_jax.models import kv
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.recompute.codec_fit import HISTORY_TOKENS, fit_codecs, layout_block, layout_of
from ca_jax.storage.codec import KVCodec
from ca_jax.storage.layout import KVLayout

_BFLOAT16_BITS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvGateConfig:
    """`kv_gate`: the fewest bits a number that keep a model's loss behind a coded history within a bound."""

    data: str
    """A .txt file, or a .jsonl file whose rows have `text`."""
    fit_data: str | None = None
    """Text that codecs are made from, other than `data`; None: those of `codecs` alone."""
    bits: tuple[float, ...] = (2.5, 3.2, 4.0, 5.0)
    """Of codecs that are made, a number."""
    codecs: tuple[str, ...] = ()
    """Files of codecs that are tried too."""
    fit_tokens: int = 40_000
    """Of `fit_data`."""
    history_tokens: int = 1024
    """That are coded, of each window."""
    behind_tokens: int = 256
    """That are predicted behind them."""
    greedy_tokens: int = 32
    """Of an answer that is held against the one over exact KV, each token the likeliest; it begins as the text does."""
    max_tokens: int = 65_536
    """Of `data`."""
    max_loss: float = 0.001
    """Most by which perplexity may rise, a share, at the upper end of its interval."""

    def __post_init__(self) -> None:
        if min(self.history_tokens, self.behind_tokens, self.greedy_tokens) < 1 or self.history_tokens % BLOCK_TOKENS:
            raise ValueError(
                f"history_tokens must be a multiple of {BLOCK_TOKENS}, behind_tokens and greedy_tokens above 0; "
                f"got {self.history_tokens}, {self.behind_tokens} and {self.greedy_tokens}"
            )
        if not self.max_loss > 0:
            raise ValueError(f"max_loss must be above 0, got {self.max_loss}")
        if self.bits and self.fit_data is None and not self.codecs:
            raise ValueError("fit_data must be a text that codecs are made from, or codecs be files; got neither")


BLOCK_TOKENS = 128
"""Of a block that is coded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvGateRow:
    """One way to code. Intervals are of 95 %, by the bootstrap over windows."""

    name: str
    bits: float
    """That a number took, mean."""
    times_smaller: float
    """Than bfloat16."""
    windows: int
    tokens: int
    """That were predicted."""
    perplexity: float
    """Over exact KV."""
    loss: float
    """By how much perplexity rises, a share of it."""
    loss_interval: Interval
    mean_kl: float
    """Of the next token, from what it is over exact KV, nats."""
    kl_interval: Interval
    same_top1: float
    """Share of places with the same likeliest token."""
    same_greedy_tokens: float
    """With how many tokens an answer begins as the one over exact KV does, mean."""
    same_greedy: float
    """Share of answers that are the same to the end."""
    encode_gb_s: float | None
    """KV as it is computed, a second, on one thread; None of int8, which the device does."""
    decode_gb_s: float | None
    passes: bool
    """Whether the upper end of the loss is within the bound."""


def run_kv_gate(model: LoadedModel, config: KvGateConfig, progress: Progress) -> Evaluation:
    """Measures int8 and every codec, and holds each against the bound."""
    layout = layout_of(model.config, BLOCK_TOKENS)
    token_ids = np.asarray(read_ids(model, Path(config.data), config.max_tokens), np.int32)
    size = config.history_tokens + config.behind_tokens
    windows = token_ids[: len(token_ids) // size * size].reshape(-1, size)
    if len(windows) < 2:
        raise EvaluationError(f"a text must have at least {2 * size} tokens, got {len(token_ids)} in {config.data}")
    coders: dict[str, _Coder] = {"int8": _Int8(model)}
    for name, codec in _codecs(model, config, progress):
        coders[name] = _Codec(codec, layout)
    found: dict[str, list[_Window]] = collections.defaultdict(list)
    losses: list[float] = []
    for number, ids in enumerate(windows):
        first, behind = to_device(ids[None, : config.history_tokens]), to_device(ids[None, config.history_tokens :])
        history = _prefill(model.model, model.params, first)
        exact = _predict(model.model, model.params, history, behind)
        answer = _answer(model.model, model.params, history, behind[0, 0], config.greedy_tokens)
        losses.append(float(_loss(exact, behind)))
        for name, coder in coders.items():
            back = kv.KVCache(coder(history.layers), history.lengths)
            logits = _predict(model.model, model.params, back, behind)
            loss, kl, same = (float(to_host(each)) for each in _compared(exact, logits, behind))
            num_same = int(to_host(_num_same(model.model, model.params, back, answer)))
            found[name].append(_Window(loss, kl, same, num_same))
        progress("windows", number + 1, len(windows))
    rows = [_row(name, coders[name], each, losses, config) for name, each in found.items()]
    items = [{name: dataclasses.asdict(each[i]) for name, each in found.items()} for i in range(len(windows))]
    return Evaluation(rows=rows, items=items)


@dataclasses.dataclass(frozen=True)
class _Window:
    loss: float
    """Above that over exact KV, nats a token, mean."""
    kl: float
    same_top1: float
    same_greedy_tokens: int


def _row(
    name: str, coder: _Coder, windows: Sequence[_Window], losses: Sequence[float], config: KvGateConfig
) -> KvGateRow:
    def interval(field: str) -> Interval:
        return mean_interval([getattr(each, field) for each in windows])

    low, high = (float(np.expm1(each)) for each in interval("loss"))
    return KvGateRow(
        name=name,
        bits=coder.bits,
        times_smaller=_BFLOAT16_BITS / coder.bits,
        windows=len(windows),
        tokens=len(windows) * (config.behind_tokens - 1),
        perplexity=float(np.exp(np.mean(losses))),
        loss=float(np.expm1(np.mean([each.loss for each in windows]))),
        loss_interval=(low, high),
        mean_kl=float(np.mean([each.kl for each in windows])),
        kl_interval=interval("kl"),
        same_top1=float(np.mean([each.same_top1 for each in windows])),
        same_greedy_tokens=float(np.mean([each.same_greedy_tokens for each in windows])),
        same_greedy=float(np.mean([each.same_greedy_tokens == config.greedy_tokens for each in windows])),
        encode_gb_s=coder.encode_gb_s,
        decode_gb_s=coder.decode_gb_s,
        passes=high <= config.max_loss,
    )


def _codecs(model: LoadedModel, config: KvGateConfig, progress: Progress) -> Iterator[tuple[str, KVCodec]]:
    for path in config.codecs:
        try:
            codec = KVCodec.load(path)
            codec.check(layout_of(model.config, BLOCK_TOKENS), model.fingerprint)
        except (OSError, ValueError) as error:
            raise EvaluationError(str(error)) from error
        yield f"{Path(path).name}, {codec.bits:g} bits", codec
    if config.fit_data is None or not config.bits:
        return
    token_ids = read_ids(model, Path(config.fit_data), config.fit_tokens)
    done = 0

    def tell(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        progress("tokens of codecs", done, len(token_ids))

    try:
        made = fit_codecs(
            model,
            token_ids,
            bits=config.bits,
            block_tokens=BLOCK_TOKENS,
            history_tokens=min(config.history_tokens, HISTORY_TOKENS),
            on_step=tell,
        )
    except ValueError as error:
        raise EvaluationError(str(error)) from error
    for codec in made:
        yield f"{codec.bits:g} bits", codec


# Coding.


class _Coder:
    """Codes a row's KV and gives back what comes back of it; and says how small it was, and how long that took."""

    bits: float
    encode_gb_s: float | None = None
    decode_gb_s: float | None = None

    def __call__(self, layers: Sequence[kv.LayerKV]) -> tuple[kv.LayerKV, ...]:
        raise NotImplementedError


class _Int8(_Coder):
    def __init__(self, model: LoadedModel) -> None:
        shapes = model.config.kv_shapes
        numbers, rows = sum(p * k * h for p, k, h in shapes), sum(p * k for p, k, _ in shapes)
        self.bits = 8 * (1 + kv.SCALE_BYTES * rows / numbers)

    def __call__(self, layers: Sequence[kv.LayerKV]) -> tuple[kv.LayerKV, ...]:
        return _rounded(tuple(layers))


class _Codec(_Coder):
    def __init__(self, codec: KVCodec, layout: KVLayout) -> None:
        self._codec, self._layout = codec, layout
        self._sizes: list[int] = []
        self._seconds = {"encode": 0.0, "decode": 0.0}

    def __call__(self, layers: Sequence[kv.LayerKV]) -> tuple[kv.LayerKV, ...]:
        host = [np.concatenate([to_host(part) for part in layer.parts]).astype(np.float32) for layer in layers]
        groups = [np.stack([host[layer] for layer in group.layers]) for group in self._layout.groups]
        back = [np.empty_like(each) for each in groups]
        for start in range(0, groups[0].shape[2], BLOCK_TOKENS):
            part = slice(start, start + BLOCK_TOKENS)
            block = layout_block(self._layout, [each[:, :, part] for each in groups])
            data, sums = self._timed("encode", partial(self._codec.encode, block, self._layout))
            self._sizes.append(len(data))
            into = np.empty_like(block)
            self._timed("decode", partial(self._codec.decode, data, self._layout, into, sums))
            for whole, found in zip(back, self._layout.by_group(into), strict=True):
                whole[:, :, part] = found
        by_layer = {
            layer: each[index]
            for group, each in zip(self._layout.groups, back, strict=True)
            for index, layer in enumerate(group.layers)
        }
        return tuple(kv.LayerKV.of(to_device(by_layer[number], layer.k.dtype)) for number, layer in enumerate(layers))

    def _timed(self, what: str, do: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        result = do()
        self._seconds[what] += time.perf_counter() - began_s
        return result

    @property
    def bits(self) -> float:  # type: ignore[override]
        """That a number took, mean over blocks."""
        numbers = self._layout.block_bytes // self._layout.numpy_dtype.itemsize
        return 8 * float(np.mean(self._sizes)) / numbers

    @property
    def encode_gb_s(self) -> float:  # type: ignore[override]
        """KV as it is computed, a second."""
        return len(self._sizes) * self._layout.block_bytes / self._seconds["encode"] / 1e9

    @property
    def decode_gb_s(self) -> float:  # type: ignore[override]
        """The same of decoding."""
        return len(self._sizes) * self._layout.block_bytes / self._seconds["decode"] / 1e9


# What is computed.


@partial(jax.jit, static_argnames=("model",))
def _prefill(model: nn.Module, params: Params, tokens: jax.Array) -> kv.KVCache:
    history: Any = model.apply(params, tokens, jnp.arange(tokens.shape[1])[None])[1]
    return history


@partial(jax.jit, static_argnames=("model",))
def _predict(model: nn.Module, params: Params, history: kv.KVCache, tokens: jax.Array) -> jax.Array:
    positions = history.capacity + jnp.arange(tokens.shape[1])[None]
    logits = model.apply(params, tokens, positions, history)[0][0]
    return jax.nn.log_softmax(logits.astype(jnp.float32))


@partial(jax.jit, static_argnames=("model", "num_tokens"))
def _answer(model: nn.Module, params: Params, history: kv.KVCache, first: jax.Array, num_tokens: int) -> jax.Array:
    """i32 `[1 + num_tokens]`: a token, and those behind it that are likeliest each."""

    def add(place: jax.Array, tokens: jax.Array) -> jax.Array:
        likeliest = _predict(model, params, history, tokens[None, :-1])[place].argmax()
        return tokens.at[place + 1].set(likeliest.astype(tokens.dtype))

    tokens = jnp.zeros(1 + num_tokens, jnp.int32).at[0].set(first)
    return jax.lax.fori_loop(0, num_tokens, add, tokens)


@partial(jax.jit, static_argnames=("model",))
def _num_same(model: nn.Module, params: Params, history: kv.KVCache, answer: jax.Array) -> jax.Array:
    """With how many tokens the answer over this history begins as that one: up to there both have seen the same."""
    same = _predict(model, params, history, answer[None, :-1]).argmax(-1) == answer[1:]
    return jnp.cumprod(same.astype(jnp.int32)).sum()


@jax.jit
def _loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(logits[:-1], tokens[0, 1:, None], 1).mean()


@jax.jit
def _compared(exact: jax.Array, found: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    divergence = (jnp.exp(exact) * (exact - found)).sum(-1).mean()
    same = (exact.argmax(-1) == found.argmax(-1)).mean()
    return _loss(found, tokens) - _loss(exact, tokens), divergence, same


@jax.jit
def _rounded(layers: tuple[kv.LayerKV, ...]) -> tuple[kv.LayerKV, ...]:
    return jax.tree.map(lambda part: kv.dequantize(kv.quantize(part), part.dtype), layers)
