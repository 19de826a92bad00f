"""Every jitted step of serving compiles for chips that are not there, and is what it should be.

Its pages stay in place, byte for byte, and nothing as large as a layer of them is copied; weights in 8 bits or 4 are
not written out in more; the kernels that should be are called and spill nothing; what is sent between devices is two
sums a layer, never KV; and what a model takes of a chip is what `launch.plan` says. Run by `make test-accelerators`,
and a part by `make test-accelerators-quick`; skipped where the compilers are not.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import jax
import pytest

from ca_jax.launch.plan import Plan, make_plan
from tests.accelerators import compiling
from tests.accelerators.chips import A100, CHIPS, GIB, H100, V5E, V6E, Chip
from tests.accelerators.models import KINDS
from tests.accelerators.serving import Setup, Step
from tests.accelerators.shapes import DTYPE

if any(importlib.util.find_spec(name) is None for name in ("libtpu", "jax_cuda12_plugin")):
    pytest.skip("there are no compilers: make test-accelerators", allow_module_level=True)

_LOG = logging.getLogger(__name__)

MOST_TEMPORARIES = 129 << 20
"""Bytes of any step: activations of 512 tokens in the widest layers, logits of 64 tokens twice in the largest
vocabulary, and no KV of a whole context in all layers."""
PLAN_TOLERANCE = 0.02

SETUPS = [
    *(Setup(chip, "smollm2-135m") for chip in CHIPS),
    *(Setup(chip, "llama3-8b") for chip in (H100, A100, V6E)),
    *(Setup(chip, "llama3-8b", weight_dtype=bits) for bits in ("int8", "int4") for chip in (H100, V6E)),
    *(Setup(chip, "qwen3-moe, 4 layers", weight_dtype=bits) for bits in ("int8", "int4") for chip in (H100, V6E)),
    *(
        Setup(chip, name, weight_dtype="int8")
        for name in ("deepseek-v2-lite, 4 layers", "gemma-4, 4 layers")
        for chip in (H100, V6E)
    ),
    Setup(H100, "llama2-70b", weight_dtype="int4"),
    Setup(H100, "mixtral-8x7b", 4, weight_dtype="int4"),
    Setup(V5E, "llama3-8b", 4),
    *(Setup(chip, "llama2-70b", 4) for chip in (H100, A100)),
    Setup(A100, "llama-65b", 4),
    *(Setup(chip, preset, 4) for preset in ("mixtral-8x7b", "falcon-40b") for chip in (H100, A100, V6E)),
    *(Setup(chip, name) for name in KINDS for chip in (H100, V6E)),
    Setup(H100, "qwen3-next, 4 layers", 4),
]
UNFIT = [
    *((chip, preset, 1) for preset in ("llama2-70b", "llama-65b", "mixtral-8x7b", "falcon-40b") for chip in CHIPS),
    (V5E, "llama3-8b", 1),
    *((chip, preset, 4) for preset in ("llama2-70b", "llama-65b") for chip in (V5E, V6E)),
    *((V5E, preset, 4) for preset in ("mixtral-8x7b", "falcon-40b")),
]
STEPS = [(setup, step) for setup in SETUPS for step in setup.steps()]


@pytest.fixture(scope="module", autouse=True)
def no_cache() -> Iterator[None]:
    """What is compiled for a device that is not there can be read, but not written down and read again."""
    is_on = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", is_on)


def complaints(setup: Setup, step: Step, found: compiling.Figures) -> dict[str, str]:
    """What is not as it should be, by the name of the check."""
    wrong, plan = {}, planned(setup)
    x_bytes = found.donated_bytes - setup.bytes_of([each for each in jax.tree.leaves(step.donated) if each.ndim == 5])
    padding = x_bytes // 4 if setup.chip.platform == "tpu" else 0
    if not found.donated_bytes <= found.alias_bytes <= found.donated_bytes + padding:
        wrong["aliased"] = f"{found.alias_bytes:,} bytes are in place, of {found.donated_bytes:,} that were donated"
    if found.num_pool_copies:
        wrong["pool copied"] = f"{found.num_pool_copies} times, {found.pool_copy}"
    if found.temp_bytes > MOST_TEMPORARIES:
        wrong["temporaries"] = f"{found.temp_bytes:,} bytes, at most {MOST_TEMPORARIES:,} should be"
    if found.widened:
        wrong["widened"] = found.widened
    sent = found.collectives
    # XLA may also gather by adding zeros of the others.
    most_sent = {"all-reduce": step.num_sums + step.num_gathers, "all-gather": step.num_gathers}
    allowed = most_sent if setup.num_devices > 1 else {}
    if any(each.count > allowed.get(kind, 0) for kind, each in sent.items()):
        counts = {kind: each.count for kind, each in sent.items()}
        wrong["collectives"] = f"{counts}, at most {allowed} should be"
    if too_large := [each for each in sent.values() if each.largest_bytes > step.sent_bytes]:
        wrong["sent"] = f"{too_large[0].largest}, at most {step.sent_bytes:,} bytes should be"
    if found.num_kernels != step.num_kernels:
        wrong["kernels"] = f"{found.num_kernels} calls, {step.num_kernels} should be"
    if found.kernel is not None and found.kernel.spilled_bytes:
        wrong["spilled"] = f"{found.kernel.spilled_bytes} bytes a thread, {found.kernel.registers} registers"
    if step.takes_everything:
        taken = sum(plan.parts.get(name, 0) for name in ("the weights", "the pool of KV", "the states of rows"))
        if abs(found.argument_bytes - taken) > PLAN_TOLERANCE * taken:
            wrong["planned"] = f"{found.argument_bytes:,} bytes of arguments, {taken:,} are planned"
    if found.temp_bytes > plan.left_bytes:
        wrong["fits"] = f"{found.temp_bytes:,} bytes of temporaries, {plan.left_bytes:,} are left"
    return wrong


def recorded(setup: Setup, step: Step, found: compiling.Figures) -> dict[str, Any]:
    """A step as the page of results has it."""
    of_setup = {"setup": str(setup), "chip": setup.chip.name, "preset": setup.preset, "devices": setup.num_devices}
    of_chip = {"memory_bytes": setup.chip.memory_bytes, "rates": setup.chip.rates}
    of_step = {
        "step": step.name,
        "flops": step.flops,
        "read_bytes": step.read_bytes,
        "product_bytes": step.product_bytes,
        "parts": dict(planned(setup).parts),
    }
    return {**of_setup, **of_chip, **of_step, "wrong": complaints(setup, step, found), "figures": asdict(found)}


@cache
def planned(setup: Setup) -> Plan:
    """What `launch.plan` says of it."""
    return make_plan(setup.model, setup.engine, dtype=DTYPE, device_bytes=setup.chip.memory_bytes)


def ids(value: object) -> str:
    return value.name if isinstance(value, Step | Chip) else str(value)


@pytest.mark.parametrize(("setup", "step"), STEPS, ids=ids)
def test_step(setup, step, record_property):
    with compiling.as_on(setup.chip):
        found = compiling.figures(setup, step)
    record = recorded(setup, step, found)
    record_property("step", record)
    record_property("versions", {"chip": setup.chip.name, "by": compiling.compiler_version(setup.chip)})
    _LOG.info("%s, %s: %s", setup, step.name, found)
    assert not record["wrong"]


@pytest.mark.parametrize(("chip", "preset", "num_devices"), UNFIT, ids=ids)
def test_what_does_not_fit_is_refused_before_it_is_compiled(chip, preset, num_devices, record_property):
    setup = Setup(chip, preset, num_devices)
    with pytest.raises(ValueError, match="a device's memory must be") as refusal:
        make_plan(setup.model, setup.engine, dtype=DTYPE, device_bytes=chip.memory_bytes)
    described = {"setup": str(setup), "chip": chip.name, "memory_bytes": chip.memory_bytes}
    record_property("unfit", {**described, "said": str(refusal.value)})


def test_the_compiler_refuses_it_too():
    """The memory that it says is there is that of `chips`."""
    setup = Setup(V5E, "llama3-8b")
    step = next(step for step in setup.steps() if step.takes_everything)
    message = rf"exceeds available HBM \({V5E.memory_bytes / GIB:.2f}G\)"
    with compiling.as_on(V5E), pytest.raises(jax.errors.JaxRuntimeError, match=message):
        compiling.figures(setup, step)
