"""What compilers have shown to be wrong, and is not mended: an expected failure each, and an error once it is mended.

Not here: what is checked (test_steps).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.accelerators.serving import Setup, Step


class Defect(NamedTuple):
    """A check that some steps fail."""

    check: str
    """Its name, as `test_steps.complaints` gives it."""
    steps: tuple[str, ...]
    """What their names begin with."""
    is_in: Callable[[Setup], bool]
    """Which setups have it."""
    reason: str
    """What is wrong, in a sentence."""


def _is_tpu(setup: Setup) -> bool:
    return setup.chip.platform == "tpu"


def _fits_fast_memory(setup: Setup) -> bool:
    return _is_tpu(setup) and (setup.num_devices > 1 or setup.model.head_dim < 128)


_BRINGS = "XLA brings all pages of a layer into fast memory, where they fit, before some are read"

DEFECTS = (
    Defect(
        "pool copied",
        ("read_pages",),
        _fits_fast_memory,
        _BRINGS,
    ),
    Defect(
        "pool copied",
        ("recompute_layer", "cut_pages, drift"),
        lambda setup: str(setup) == "falcon-40b on 4 TPU v6e",
        _BRINGS,
    ),
)


def defects(setup: Setup, step: Step) -> list[Defect]:
    """Those of a step."""
    return [each for each in DEFECTS if step.name.startswith(each.steps) and each.is_in(setup)]
