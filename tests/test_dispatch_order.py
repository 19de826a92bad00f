"""The order in which an accelerator is given copies and compute: the one that hides the copies.

The engine runs on the CPU and believes that it has a device with memory of its own; what it would give that device is
recorded, and replayed on paper by the device's rules: compute runs in order; so do copies in, each of which waits for
all compute that was dispatched before it, since it goes to a new buffer; a copy out waits for what it copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from ca_jax import backend
from ca_jax.device import sampler, steps, transfer
from ca_jax.kv import async_saver
from tests import engine_kit as kit

Events = list[tuple[str, int]]
"""What was dispatched, in order, each with how many of its kind were before it."""


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Events:
    events: Events = []

    def record(owner: object, name: str, kind: str) -> None:
        original: Callable = getattr(owner, name)

        def recording(*args, **kwargs):
            events.append((kind, sum(kind == other for other, _ in events)))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, recording)

    record(transfer, "staging_to_device", "copy in")
    record(steps, "layer_step", "compute")
    record(async_saver, "to_host_memory", "copy out")
    record(steps, "decode", "decode")
    record(sampler.Draw, "wait", "read tokens")
    return events


def turn_of(events: Events, layers_ahead: int, **changes: object) -> Events:
    """What a second turn dispatches, whose history is in the store, on a device with memory of its own."""
    device = dataclasses.replace(backend.CPU, shares_memory=False, layers_ahead=layers_ahead)
    with backend.assumed(device), kit.small_engine(**changes) as engine:
        session = engine.session()
        kit.say(session, kit.prompt(60))
        engine.wait_for_saves()
        events.clear()
        list(session.send_ids(kit.prompt(20), max_tokens=6))
        engine.wait_for_saves()
        assert engine.metrics.failed_loads == engine.metrics.failed_saves == 0
    return list(events)


def seconds(events: Events, copy_s: float, compute_s: float) -> float:
    """How long the layers of a turn take on paper."""
    copied_s, computed_s, last_copy_s = dict[int, float](), 0.0, 0.0
    for kind, layer in events:
        if kind == "copy in":
            last_copy_s = copied_s[layer] = max(last_copy_s, computed_s) + copy_s
        elif kind == "compute":
            computed_s = max(computed_s, copied_s[layer]) + compute_s
    return computed_s


@pytest.mark.parametrize("read_buffer", ["all", 1])
def test_a_layers_copy_is_dispatched_before_the_layer_in_front_of_it_computes(dispatched, read_buffer):
    events = turn_of(dispatched, layers_ahead=backend.GPU.layers_ahead, read_buffer=read_buffer)
    assert [kind for kind, _ in events].count("copy in") == kit.NUM_LAYERS
    assert seconds(events, 1.0, 1.0) == kit.NUM_LAYERS + 1, "all copies but the first hide"
    one_by_one = turn_of(dispatched, layers_ahead=0, read_buffer=1)
    assert seconds(one_by_one, 1.0, 1.0) == 2 * kit.NUM_LAYERS, "the rules tell a bad order from a good one"


def test_a_layers_kv_leaves_before_the_next_layer_is_dispatched(dispatched):
    events = turn_of(dispatched, layers_ahead=backend.GPU.layers_ahead)
    prefill = [event for event in events if event[0] in ("compute", "copy out")][: 2 * kit.NUM_LAYERS]
    assert prefill == [(kind, layer) for layer in range(kit.NUM_LAYERS) for kind in ("compute", "copy out")]


def test_a_decode_step_is_dispatched_before_the_tokens_of_the_last_one_are_read(dispatched):
    events = turn_of(dispatched, layers_ahead=backend.GPU.layers_ahead)
    steps_and_reads = [event for event in events if event[0] in ("decode", "read tokens")]
    # The first token is the prefill's, and is read alone; of the others each is read behind the next one's step.
    assert steps_and_reads[:6] == [
        ("read tokens", 0),
        ("decode", 0),
        ("decode", 1),
        ("read tokens", 1),
        ("decode", 2),
        ("read tokens", 2),
    ]
