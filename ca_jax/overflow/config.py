"""Context-window overflow: how many tokens leave, which, and how what is left is used. Pure, and knows no jax.

A context of n tokens under a window of W overflows when it would hold more than W. Then a share of the window leaves at
once, the oldest first, behind a few first tokens that stay:

    before    k k k k o o o o o o o o r r r r r r        k kept first, o leave, r stay
    after     k k k k r r r r r r                        at positions 0 to 9, as they are stored

The first tokens stay since models put the attention they have no use for there; without them quality breaks down.

Not here: forgetting it (session_kv, storage), attention statistics (discarding), computing anew (blend).
Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.4; first tokens: StreamingLLM (Xiao et al., 2024).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ca_jax.errors import check, is_count
from ca_jax.overflow.discarding import DISCARDERS, TokenDiscarder

METHODS = ("ca", "tt", "of")
"""What becomes of the KV of the tokens that stay. `ca`: it is used as it is stored, at its new positions. `tt`: it is
computed anew. `of`: as `tt`, since what is stored has its positions in it and is lost."""

REPAIRS = ("none", "deviating", "spread")
"""Which of the tokens that stay have their KV computed anew. `none`: no token, the way of the paper. `deviating`: the
anchors, and the tokens whose KV is farthest from what computing it anew would give, as CacheBlend chooses them.
`spread`: the anchors and tokens evenly apart, and all others are moved as these have moved, see `blend`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverflowConfig:
    """What happens when a conversation outgrows the context window.

    Raises:
      ValueError: a value outside its range; the message says what was wanted.
    """

    method: str = "ca"
    """What becomes of the KV of the tokens that stay, one of `METHODS`."""
    truncation_ratio: float = 0.5
    """Share of the window that leaves at once, in (0, 1]. Half, as in the paper: less overflows more often."""
    keep_first_tokens: int = 4
    """First tokens that never leave. Models put the attention they have no use for there."""
    repair: str = "spread"
    """Which of the tokens that stay have their KV computed anew, one of `REPAIRS`: with the next turn's prefill, once.
    The default, with the two numbers below, is what was chosen on half of LongEval's questions, see
    `results/quality.md`. Other methods than `ca` ignore it, and so do models whose layers all see less than the context
    window: what leaves there is first what no layer looks back to."""
    anchor_tokens: int = 32
    """First tokens, of those that stay, that `repair` computes anew, as the beginning that they are now; in the middle
    of an answer at once."""
    repair_ratio: float = 0.1
    """Share of the tokens that stay that `repair` computes anew, the anchors among them, in [0, 1]."""
    drift: str | None = None
    """File of the model's drift (`ca_jax.recompute.drift`), which is added to what stays; None adds nothing."""
    whole_turns: bool = False
    """Only whole turns leave, as far as that makes room."""
    discarder: str | TokenDiscarder = "oldest"
    """Which tokens leave: a name in `discarding.DISCARDERS`, or one's own."""

    def __post_init__(self) -> None:
        check(self.method in self.methods, "overflow method", f"one of {', '.join(self.methods)}", self.method)
        check(0 < self.truncation_ratio <= 1, "truncation_ratio", "a share in (0, 1]", self.truncation_ratio)
        check(0 <= self.repair_ratio <= 1, "repair_ratio", "a share in [0, 1]", self.repair_ratio)
        for name in ("keep_first_tokens", "anchor_tokens"):
            value = getattr(self, name)
            check(is_count(value), name, "a number of tokens >= 0", value)
        check(self.repair in REPAIRS, "repair", f"one of {', '.join(REPAIRS)}", self.repair)
        discarder = self.token_discarder.name
        check(not self.whole_turns or discarder == "oldest", "the discarder of whole_turns", "'oldest'", discarder)

    @property
    def methods(self) -> tuple[str, ...]:
        """What `method` may be."""
        return METHODS

    @property
    def token_discarder(self) -> TokenDiscarder:
        """The one that `discarder` names.

        Raises:
          ValueError: there is none of that name.
        """
        if not isinstance(self.discarder, str):
            return self.discarder
        check(self.discarder in DISCARDERS, "token discarder", f"one of {', '.join(DISCARDERS)}", self.discarder)
        return DISCARDERS[self.discarder]

    @property
    def recomputes(self) -> bool:
        """Whether some of what stays is computed anew, and the rest used as it is stored."""
        return self.method == "ca" and self.repair != "none" and bool(self.anchor_tokens or self.repair_ratio)

    @property
    def needs_everything(self) -> bool:
        """Whether KV that no layer looks back to has a use: what stays is changed by it, or what leaves chosen."""
        looks = self.token_discarder.needs_attention or self.token_discarder.needs_kv
        return self.method != "ca" or self.drift is not None or looks

    def check_window(self, window: int) -> None:
        """Refuses what does not fit a window of so many tokens.

        Raises:
          ValueError: the first tokens that stay fill it.
        """
        wanted = f"fewer than the context window of {window} tokens"
        check(self.keep_first_tokens < window, "keep_first_tokens", wanted, self.keep_first_tokens)


def leaving_at_once(config: OverflowConfig, window: int) -> int:
    """How many tokens leave a full window at once, unless more are in the way."""
    return max(1, round(config.truncation_ratio * window))


def num_leaving(config: OverflowConfig, *, window: int, num_tokens: int, num_wanted: int) -> int:
    """How many tokens of a context leave so that some more fit.

    Args:
      config: the share that leaves at once, and how many first tokens stay.
      window: most tokens of a context.
      num_tokens: of the context.
      num_wanted: tokens that are to fit behind it.

    Returns:
      0 where they fit; else whole shares of the window, as many as it takes, at most all that may leave. The rest may
      be too much still.
    """
    excess = num_tokens + num_wanted - window
    if excess <= 0:
        return 0
    share = leaving_at_once(config, window)
    return max(0, min(math.ceil(excess / share) * share, num_tokens - config.keep_first_tokens))


def oldest_first(
    num_tokens: int, num_leaving: int, keep_first: int, turn_starts: Sequence[int] = (), num_needed: int = 0
) -> np.ndarray:
    """Which tokens leave, the oldest first: bool `[num_tokens]`.

    Args:
      num_tokens: of the context.
      num_leaving: how many leave.
      keep_first: first tokens that stay.
      turn_starts: where turns begin; if any is given, tokens leave up to the nearest one that makes room for
        `num_needed`, where there is one.
      num_needed: least number of tokens that must leave.
    """
    stop = min(keep_first + num_leaving, num_tokens)
    fitting = [start for start in turn_starts if start - keep_first >= max(num_needed, 1)]
    if fitting:
        stop = min(fitting, key=lambda start: (abs(start - stop), start))
    mask = np.zeros(num_tokens, bool)
    mask[keep_first:stop] = True
    return mask
