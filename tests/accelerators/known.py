"""What the compiler has shown to be wrong, and is not mended: an expected failure each, and an error once it is mended.

Not here: what is checked (test_steps).
"""

from __future__ import annotations

from typing import NamedTuple

from tests.accelerators.serving import Setup, Step


class Defect(NamedTuple):
    """A check that some steps fail."""

    check: str
    """Its name, as `test_steps.complaints` gives it."""
    step: str
    """What their names begin with."""
    platform: str
    """`gpu` or `tpu`."""
    reason: str
    """What is wrong, in a sentence."""
    setups: tuple[str, ...] = ()
    """Those in which it is, as text; empty: all."""


DEFECTS: tuple[Defect, ...] = ()


def defects(setup: Setup, step: Step) -> list[Defect]:
    """Those of a step."""
    return [
        each
        for each in DEFECTS
        if each.platform == setup.chip.platform
        and step.name.startswith(each.step)
        and (not each.setups or str(setup) in each.setups)
    ]
