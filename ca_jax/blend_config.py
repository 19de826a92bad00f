"""How the KV of text chunks is used that were computed alone, wherever in a prompt they come: config of CacheBlend.

Not here: which tokens are computed anew and how (fusion), what ratio hides behind loading (blend_costs), the chunks of
a prompt (chunks).
Source: CacheBlend (Yao et al., EuroSys 2025), sections 4 and 5.1; what it is compared with: section 7.1.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

MODES = ("blend", "reuse", "prefix", "recompute")
"""What becomes of the stored KV of chunks. `blend`: CacheBlend, it is put at its new positions and the tokens that
deviate most are computed anew. `reuse`: full reuse, it is put at its new positions and nothing of it is computed anew.
`prefix`: prefix caching, chunks are ordinary text, and only KV that was computed with the very same text before it is
used. `recompute`: full recompute, no stored KV is used for a prompt with chunks."""

Selection = Literal["hkvd", "spread", "random", "first"]
"""Which tokens of chunks are computed anew. `hkvd`: the paper's, those whose KV deviates most (High KV Deviation),
fewer from layer to layer. `spread`: the first two of every chunk and others evenly apart; all the rest are moved as
these have moved, by a linear map in each layer and head. `random`: any, and `first`: the first ones of every chunk,
to compare with."""

SELECTIONS: tuple[Selection, ...] = get_args(Selection)
"""All of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendConfig:
    """How a prompt with chunks is served.

    Raises:
      ValueError: a value outside its range; the message says what was wanted.
    """

    mode: str = "blend"
    """What becomes of the stored KV of chunks, one of `MODES`."""
    recompute_ratio: float | None = None
    """Share of the chunks' tokens that is computed anew, in the mean over the layers behind the check layers, in
    [0, 1]. None: what measured rates say that loading hides, see `blend_costs.choose_ratio`."""
    min_recompute_ratio: float = 0.15
    """Least ratio that is chosen by measured rates, in [0, 1]. The paper saw next to no loss of quality from there on
    (section 7.3)."""
    check_layers: int = 1
    """First layers in which all tokens are computed, to see which deviate; `hkvd` alone has any."""
    selection: Selection = "hkvd"
    """Which tokens are computed anew, a `Selection`."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"blend mode wanted one of {', '.join(MODES)}; found {self.mode!r}")
        if self.recompute_ratio is not None and not 0 <= self.recompute_ratio <= 1:
            raise ValueError(f"recompute_ratio wanted a share in [0, 1] or None, found {self.recompute_ratio}")
        if not 0 <= self.min_recompute_ratio <= 1:
            raise ValueError(f"min_recompute_ratio wanted a share in [0, 1], found {self.min_recompute_ratio}")
        if not isinstance(self.check_layers, int) or isinstance(self.check_layers, bool) or self.check_layers < 1:
            raise ValueError(f"check_layers wanted a number of layers >= 1, found {self.check_layers!r}")
        if self.selection not in SELECTIONS:
            raise ValueError(f"blend selection wanted one of {', '.join(SELECTIONS)}; found {self.selection!r}")

    @property
    def reuses_chunks(self) -> bool:
        """Whether the KV of chunks that were computed alone is used."""
        return self.mode in ("blend", "reuse")
