"""Every step of serving can be compiled for CUDA as far as that can be told without one: jax lowers it for CUDA.

In bfloat16, once as steps are traced on this machine and once as they are traced on a GPU.

Not here: what compilers make of them (tests/accelerators).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import pytest

from ca_jax import backend
from ca_jax.device import steps
from ca_jax.models import gpu_attention
from ca_jax.models.paged_attention import paged_attention
from ca_jax.recompute.layers import recompute_layer
from ca_jax.testing import tiny
from tests.accelerators.chips import H100, Chip
from tests.accelerators.models import MODELS
from tests.accelerators.serving import Setup


class Here(Chip):
    """This machine's device, as if it were that chip."""

    def devices(self, count: int) -> tuple[jax.Device, ...]:
        return tuple(jax.devices()[:count])


@pytest.fixture(params=["here", "on a GPU"])
def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    """A model of its own for each way: what was traced for one must not be found for the other."""
    monkeypatch.setitem(MODELS, "tiny", tiny.tiny_config(head_dim=64, mlp_dim=96 if request.param == "here" else 160))
    monkeypatch.setattr(gpu_attention, "kernel_is_served", lambda dtype, head_dim: True)
    with backend.assumed(backend.GPU if request.param == "on a GPU" else backend.here()):
        yield Setup(Here(**dataclasses.asdict(H100)), "tiny")


def lowered(function: object, *arguments: object, **options: object) -> str:
    with H100.as_default():
        return function.trace(*arguments, **options).lower(lowering_platforms=("cuda",)).as_text()


def num_donated(text: str) -> int:
    return text.count("tf.aliasing_output") + text.count("jax.buffer_donor")


def test_each_step_takes_what_is_donated_and_the_kernel_where_that_is_served(setup):
    has_kernel = paged_attention(setup.pages_of(0)) == "triton"
    for step in {step.function: step for step in reversed([*setup.steps()])}.values():  # The first of several sizes.
        attending = [{}, {"with_attention": True}] if step.function in (steps.layer_step, steps.decode) else [{}]
        for options in attending:
            text = lowered(step.function, *step.arguments, **step.options | options)
            assert num_donated(text) == len(jax.tree.leaves(step.donated)), step.name
            assert ("triton" in text) == (has_kernel and step.num_kernels > 0), step.name


def test_a_layer_of_a_history_computed_anew_where_nothing_moved_yet(setup):
    (step,) = (step for step in setup.steps() if step.function is recompute_layer)
    text = lowered(recompute_layer, *step.arguments, **step.options | {"carried": ()})
    assert num_donated(text) == 2
    assert ("triton" in text) == (paged_attention(setup.pages_of(0)) == "triton")
