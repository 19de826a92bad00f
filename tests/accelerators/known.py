"""What compilers have shown to be wrong, and is not mended: an expected failure each, and an error once it is mended.

Not here: what is checked (test_steps).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.accelerators.chips import A100
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


def _has_half_lanes(setup: Setup) -> bool:
    return _is_tpu(setup) and setup.model.head_dim < 128


def _one_of(*setups: str) -> Callable[[Setup], bool]:
    return lambda setup: str(setup) in setups


_WRITES = "tokens are scattered over pages and places, for which XLA turns the whole pool of a layer, and back"
_HOLDS = "the KV of a whole context is held in all layers at once"

DEFECTS = (
    Defect("pool copied", ("fill_pages", "cut_pages"), _is_tpu, _WRITES),
    Defect("pool copied", ("layer_step", "decode, 8"), _has_half_lanes, _WRITES),
    Defect("temporaries", ("fill_pages",), _one_of("llama3-8b on one TPU v6e"), _WRITES),
    Defect("temporaries", ("cut_pages",), _one_of("llama3-8b on one TPU v6e"), _HOLDS),
    Defect(
        "spilled",
        ("layer_step",),
        lambda setup: setup.chip is A100 and setup.model.head_dim == 128,
        "128 rows of queries of 128 numbers take more registers than there are",
    ),
)


def defects(setup: Setup, step: Step) -> list[Defect]:
    """Those of a step."""
    return [each for each in DEFECTS if step.name.startswith(each.steps) and each.is_in(setup)]
