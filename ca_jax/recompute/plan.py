"""What of a sequence of stored KV is computed anew: which tokens, in which layers. Host data, no jax.

    layer            0    1    2    3    4  ...        tokens that are computed anew (x); for all others
    token  0         x    x    x    x    x             the stored KV stands, or moves as theirs has moved
           1         x    .    .    .    .
           2         x    x    x    .    .
           3         x    .    .    .    .

A truncated history is repaired (`repair_plan`): its tokens have seen others that left. A context of text chunks becomes
whole (`plan_blend`): what a chunk lacks is what it would have seen of the tokens before it.

    place    0 1 2   3 4 5 6   7   8 9 10 ...
    kind     exact   stored    new  stored
    chunk            A              B

Tokens are chosen by how far their KV is from what computing gives (`deviating`, the paper's HKVD), fewer from layer to
layer; or evenly apart (`spread`), and then say how the KV of all others moves: by a linear map, fitted to them in each
layer and head. What moves KV when others left, or came before it, is mostly common to the tokens of a text. Or some of
them are those that the question attends to most (`query`), which its first layers tell over the KV as it is stored.

Not here: one layer (layers), doing it (recomputer), which KV there is (kv.load).
Source: CacheBlend (Yao et al., EuroSys 2025), section 4; the question's attention: ProphetKV (arXiv 2602.02579).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from ca_jax.config import SELECTIONS, BlendConfig, Selection
from ca_jax.overflow.config import OverflowConfig
from ca_jax.turns.text import ChunkSpan

_COUNT_STEP = 8  # A repair computes a multiple of so many tokens: each number is compiled for.
_ROW_STEP = 64  # Rows of a blend are padded to a multiple of it: each number is compiled for.
_SMALL_ROW_STEP = 16  # The same up to `_SMALL_ROWS`.
_SMALL_ROWS = 256
_MAX_STEPS = 6  # Times that a blend's tokens become fewer, about.
_SLOPE = 0.6  # By how much more than the mean the first filtered layer computes, and the last one less.
_SPREAD_FIRST = 2  # Tokens of every chunk's start that are computed, where others are evenly apart.
_ASKED_SHARE = 0.75  # Of the tokens that `query` computes: those that the question attends to most.
_ASKING_SHARE = 0.25  # Of the layers: those whose attention says which these are.
_SINK_TOKENS = 1  # First ones of a prompt that begins with a chunk which was computed behind others.
_UNFIT_TOKENS = 16  # First tokens of a history, which move as no others do: nothing is fitted to them.
_UNFIT_CHUNK_TOKENS = 4  # The same of a chunk.


class TokenKind(enum.IntEnum):
    """What is known of a token's KV."""

    STORED = 0
    """That of its chunk computed behind the head: it may be computed anew."""
    NEW = 1
    """None is there, the place may hold anything: it is computed in every layer."""
    EXACT = 2
    """It is right as it stands: it is never computed."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Which tokens of a sequence are computed anew in which layer. `n` tokens are described, from `start` on."""

    start: int = 0
    """Place of the first token that is described; those before it are right as they stand."""
    num_tokens: int
    """n."""
    num_new: int = 0
    """Of these, those without KV."""
    counts: tuple[int, ...]
    """Tokens computed in each layer, new ones among them; never more than in the layer before."""
    rows: tuple[int, ...]
    """The same, padded: what is compiled for."""
    first_rows: np.ndarray
    """Which tokens are computed in the first layer, counted from `start`: i32 `[counts[0]]`, ascending."""
    always: np.ndarray
    """Those that are computed in every layer: bool `[n]`."""
    moves: np.ndarray | None = None
    """Those that move as the computed ones have moved, unless they are computed: bool `[n]`; None: none."""
    fitted: np.ndarray | None = None
    """Those that say how, if they are computed: bool `[n]`."""
    moves_from: int = 0
    """The first layer in which any moves."""

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.counts)

    @property
    def num_recomputed(self) -> float:
        """Tokens with stored KV that are computed anew; of some layers alone, times their share of the layers."""
        return sum(self.counts) / self.num_layers - self.num_new


def repair_plan(overflow: OverflowConfig, num_layers: int, num_tokens: int) -> Plan | None:
    """How the first tokens of a truncated context are repaired, as a config says; None where none is computed anew.

    Those that deviate: all tokens in the first layer, which says how far each does at the next one, whose KV is the
    first that can; then as many in each as bring the mean over all layers to the ratio. Where they are spread: the same
    ones in all layers, evenly apart, and the others move along, but for those that never leave.
    """
    if not num_tokens or not overflow.recomputes:
        return None
    ratio, num_first, place = overflow.repair_ratio, overflow.anchor_tokens, np.arange(num_tokens)
    if overflow.repair == "spread" and ratio > 0:
        count = _spread_count(num_tokens, ratio, num_first)
        start = max(overflow.keep_first_tokens, num_first)  # How first tokens moved says nothing of others.
        plan = Plan(
            num_tokens=num_tokens,
            counts=(count,) * num_layers,
            rows=(repaired_rows(count),) * num_layers,
            first_rows=_spread_places(num_tokens, count, num_first),
            always=place < num_first,
            moves=place >= start,
            fitted=place >= max(start, _UNFIT_TOKENS),
        )
    else:
        counts = _repair_counts(num_layers, num_tokens, ratio, num_first)
        plan = Plan(
            num_tokens=num_tokens,
            counts=counts,
            rows=tuple(map(repaired_rows, counts)),
            first_rows=np.arange(counts[0], dtype=np.int32),
            always=place < num_first,
        )
    return plan if any(plan.counts) else None  # Of few tokens a small share is none.


def _spread_count(num_tokens: int, ratio: float, num_first: int) -> int:
    count = int(ratio * num_tokens) // _COUNT_STEP * _COUNT_STEP
    return num_tokens if ratio >= 1 else max(count, min(num_first, num_tokens))


def _spread_places(num_tokens: int, count: int, num_first: int) -> np.ndarray:
    """i32 `[count]`: first tokens, and others evenly apart."""
    num_first = min(num_first, count)
    rest = num_first + np.arange(count - num_first) * (num_tokens - num_first) // max(count - num_first, 1)
    return np.concatenate([np.arange(num_first), rest]).astype(np.int32)


def _repair_counts(num_layers: int, num_tokens: int, ratio: float, num_first: int) -> tuple[int, ...]:
    """Tokens of each layer: no more than the ratio says, unless there are more first ones; multiples of 8."""
    if ratio >= 1:
        return (num_tokens,) * num_layers
    budget, num_rest = (ratio * num_layers - 1) * num_tokens, num_layers - 1
    num_first = min(-(-num_first // _COUNT_STEP) * _COUNT_STEP, num_tokens)
    count = 0
    if budget > 0 and num_rest:
        count = max(int(budget / num_rest) // _COUNT_STEP * _COUNT_STEP, num_first)
    return (num_tokens, *(count,) * num_rest) if count else (num_first,) * num_layers


def plan_blend(
    *,
    num_layers: int,
    start: int,
    kinds: Iterable[int],
    chunk_starts: Sequence[int],
    ratio: float,
    check_layers: int = 1,
    selection: Selection = "hkvd",
    order: np.ndarray | None = None,
    attention: np.ndarray | None = None,
) -> Plan:
    """How a context of chunks becomes whole.

    `hkvd`: all tokens in the first layers, which says how far each deviates at the next one; then fewer from layer to
    layer, as many as bring the mean of those layers to the ratio. Others: the same tokens in all layers.

    Args:
      start: place of the first token that is described; those before it are exact.
      kinds: `TokenKind` of the n tokens from there on.
      chunk_starts: places where stored chunks begin, ascending.
      ratio: share of the stored tokens that is computed anew, in [0, 1]: the mean of the layers behind the check
        layers.
      check_layers: first layers of which all tokens are computed; `hkvd` alone has any.
      order: in which order stored tokens are taken where the selection is `first`, a permutation of them; None: the
        first ones of every chunk.
      attention: f32 `[n]`, what each token received from the question, where the selection is `query`; None: it is
        not known yet, and how many tokens are computed does not depend on it.

    Raises:
      ValueError: a number out of range, or chunks that do not begin one behind the other among the tokens.
    """
    kinds = np.array(list(kinds), np.int32)
    if num_layers <= 0 or start < 0:
        raise ValueError(f"there must be layers, and a start of at least 0; got {num_layers} and {start}")
    if not np.isin(kinds, list(TokenKind)).all():
        raise ValueError(f"kinds must be values of TokenKind, got {sorted({int(kind) for kind in kinds})}")
    bounds = [start - 1, *chunk_starts, start + len(kinds)]
    if any(low >= high for low, high in itertools.pairwise(bounds)):
        raise ValueError(
            f"chunk_starts must be ascending places from {start} to below {bounds[-1]}, got {tuple(chunk_starts)}"
        )
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio must be a share of the tokens in [0, 1], got {ratio}")
    if not 1 <= check_layers <= num_layers:
        raise ValueError(f"check_layers must be 1 to {num_layers} layers, got {check_layers}")
    if selection not in SELECTIONS:
        raise ValueError(f"selection must be one of {', '.join(SELECTIONS)}, got {selection!r}")
    is_stored, is_new = kinds == TokenKind.STORED, kinds == TokenKind.NEW
    num_stored, num_new = int(is_stored.sum()), int(is_new.sum())
    has_choice = ratio < 1 and ratio * num_stored >= 1 and check_layers < num_layers
    if ratio >= 1:
        counts = (num_new + num_stored,) * num_layers
    elif selection == "hkvd" and has_choice:
        counts = _filtered_counts(num_stored, num_new, ratio, check_layers, num_layers)
    else:
        counts = (num_new + int(ratio * num_stored),) * num_layers
    offsets = _offsets(start, len(kinds), chunk_starts)
    carries = selection in ("spread", "query") and 0 < counts[0] - num_new < num_stored
    stored = np.flatnonzero(is_stored)
    asked = attention if selection == "query" else None
    chosen, num_alike = _taken(stored, offsets[stored], counts[0] - num_new, selection, order, asked)
    # How others move is told by tokens like them: what a question attends to moves otherwise.
    is_alike = np.ones(len(kinds), bool)
    is_alike[chosen[num_alike:]] = False
    return Plan(
        start=start,
        num_tokens=len(kinds),
        num_new=num_new,
        counts=counts,
        rows=tuple(map(padded_rows, counts)),
        first_rows=np.sort(np.concatenate([chosen, np.flatnonzero(is_new)])).astype(np.int32),
        always=is_new,
        moves=is_stored if carries else None,
        fitted=is_stored & is_alike & (offsets >= _UNFIT_CHUNK_TOKENS) if carries else None,
        moves_from=1,  # The KV of layer 0 is of the token alone.
    )


def blend_plan(
    config: BlendConfig,
    num_layers: int,
    num_places: int,
    num_own: int,
    spans: Sequence[ChunkSpan],
    ratio: float,
    attention: np.ndarray | None = None,
    order: np.ndarray | None = None,
) -> Plan:
    """How a prompt's context is blended, of which chunks are loaded.

    Args:
      num_places: of the context.
      num_own: its first tokens whose KV is the session's own.
      spans: chunks that are loaded, in order.
      ratio: share of their tokens that is computed anew.
      attention: f32 `[num_places]`, as of `plan_blend`.
      order: as of `plan_blend`.
    """
    kinds = kinds_of(num_places, num_own, spans)
    is_exact = kinds == TokenKind.EXACT
    start = len(kinds) if is_exact.all() else int(np.argmin(is_exact))
    return plan_blend(
        num_layers=num_layers,
        start=start,
        kinds=kinds[start:],
        chunk_starts=tuple(span.start for span in spans if span.start >= start and not span.is_exact),
        ratio=ratio,
        check_layers=config.check_layers,
        selection=config.selection,
        order=order,
        attention=None if attention is None else attention[start:],
    )


def kinds_of(num_places: int, num_own: int, spans: Sequence[ChunkSpan]) -> np.ndarray:
    """The `TokenKind` of each place of a context, i8 `[num_places]`; see `blend_plan`.

    A prompt's first token takes much attention and says nothing (an attention sink). That of a chunk which was computed
    behind others does not: where such a chunk begins the prompt, it is as good as new.
    """
    kinds = np.full(num_places, TokenKind.NEW, np.int8)
    kinds[:num_own] = TokenKind.EXACT
    for span in spans:
        kinds[span.start : span.stop] = TokenKind.EXACT if span.is_exact else TokenKind.STORED
        if not span.start and not span.is_exact:
            kinds[: min(_SINK_TOKENS, span.stop)] = TokenKind.NEW
    return kinds


def num_asking(num_layers: int) -> int:
    """The first layers whose attention says which tokens a question looks at."""
    return math.ceil(_ASKING_SHARE * num_layers)


def repaired_rows(count: int) -> int:
    """Rows that a repair computes for so many tokens: 32, 48, 64, 96, 128, doublings beyond."""
    return next((rows for rows in (32, 48, 64, 96) if count <= rows), 1 << (count - 1).bit_length())


def step_width(step_tokens: int, rows: int) -> int:
    """Places for tokens of a step that computes so many rows: those of other steps; beyond, powers of 4."""
    return step_tokens if rows <= step_tokens else 1 << (-(-(rows - 1).bit_length() // 2) * 2)


def padded_rows(count: int) -> int:
    """Rows that a blend computes for so many tokens."""
    step = _ROW_STEP if count > _SMALL_ROWS else _SMALL_ROW_STEP
    return -(-count // step) * step


def _filtered_counts(stored: int, new: int, ratio: float, check_layers: int, num_layers: int) -> tuple[int, ...]:
    """Tokens of each layer, fewer from layer to layer: behind the check layers no more in the mean than the ratio."""
    num_rest = num_layers - check_layers
    budget = int(ratio * stored * num_rest) + num_rest * new
    mean = budget / num_rest
    step = _ROW_STEP if mean >= _SMALL_ROWS else _SMALL_ROW_STEP
    while num_rest > _MAX_STEPS and 2 * _SLOPE * mean > _MAX_STEPS * step:
        step *= 2
    levels = np.array([new, *range((new // step + 1) * step, new + stored, step), new + stored])
    targets = new + (mean - new) * (1 + _SLOPE * np.linspace(1, -1, num_rest))
    steps = np.abs(levels[:, None] - targets).argmin(0)  # Of each layer the level, descending.
    while levels[steps].sum() > budget:
        steps[np.flatnonzero(steps == steps.max())[-1]] -= 1
    while True:  # What rounding has left over goes to the first layers that compute least.
        raised = steps.copy()
        raised[np.flatnonzero(steps == steps.min())[0]] += 1
        if raised.max() >= len(levels) or levels[raised].sum() > budget:
            break
        steps = raised
    return (new + stored,) * check_layers + tuple(int(count) for count in levels[steps])


def _offsets(start: int, num_tokens: int, chunk_starts: Sequence[int]) -> np.ndarray:
    """How many tokens of its chunk are before each token, i64 `[n]`; of what is in no chunk it means nothing."""
    places = start + np.arange(num_tokens)
    starts = np.array([start, *chunk_starts])
    return places - starts[np.searchsorted(starts, places, side="right") - 1]


def _taken(
    stored: np.ndarray,
    offsets: np.ndarray,
    count: int,
    selection: Selection,
    order: np.ndarray | None,
    attention: np.ndarray | None,
) -> tuple[np.ndarray, int]:
    """Which stored tokens are computed in the first layer, `offsets` of each in its chunk; and how many of them, the
    first ones, were chosen whatever the question is.
    """
    in_order = stored[np.argsort(offsets, kind="stable") if order is None else order]
    if selection not in ("spread", "query"):
        return in_order[:count], count
    num_first = min(count, int((offsets < _SPREAD_FIRST).sum()))
    first, rest, asked = in_order[:num_first], np.sort(in_order[num_first:]), stored[:0]
    if attention is not None:
        asked = rest[np.argsort(-attention[rest], kind="stable")][: int(_ASKED_SHARE * (count - num_first))]
        rest = np.setdiff1d(rest, asked)
    num_alike = count - len(asked)
    return np.concatenate([first, _evenly(rest, num_alike - num_first), asked]), num_alike


def _evenly(tokens: np.ndarray, count: int) -> np.ndarray:
    """So many of them, evenly apart."""
    return tokens[(2 * np.arange(count) + 1) * len(tokens) // (2 * max(count, 1))]
