"""Buffers, passes and priorities that cannot be are refused, with what was wanted and what was found."""

from __future__ import annotations

import math

import pytest

import ca_jax
from ca_jax.device import memory as device_memory
from ca_jax.errors import InvalidRequestError
from tests import engine_kit as kit


@pytest.mark.parametrize("name", ["read_buffer_gib", "write_buffer_gib"])
def test_a_buffer_beyond_the_devices_memory_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name} must be at most the device's \d+\.\d\d GiB of memory, got 1000000"):
        kit.small_engine(**{name: 1e6})


def test_buffers_that_fit_each_and_not_together_are_refused(monkeypatch):
    monkeypatch.setattr(device_memory, "device_memory_bytes", lambda: 1 << 30)
    with kit.small_engine(write_buffer_gib=0.5):
        pass
    with pytest.raises(ValueError, match=r"device's 1\.00 GiB of memory together, got .*1\.00 for write_buffer_gib"):
        kit.small_engine(write_buffer_gib=1.0)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        *(
            (name, value, "a number >= 0")
            for name in ("read_buffer_gib", "write_buffer_gib")
            for value in (-1.0, math.nan, math.inf)
        ),
        *(("max_tpot_ms", value, "a number > 0") for value in (0, -1.0, math.nan, math.inf)),
        *(("prefill_chunk_tokens", value, "a multiple of 64") for value in (1, 100, 513)),
        ("read_buffer", "some", "a number of layers or one of auto, all, off"),
        ("read_buffer", 1.5, "a number of layers or one of auto, all, off"),
        ("read_buffer", None, "a number of layers or one of auto, all, off"),
        ("read_buffer", True, "a number of layers or one of auto, all, off"),
        ("read_buffer", -1, "at least 0 layers"),
    ],
)
def test_an_overlap_that_cannot_be_is_refused(name, value, wanted):
    with pytest.raises(ValueError, match=f"{name} .*{wanted}, got {value!r}"):
        ca_jax.EngineConfig(**{name: value})


@pytest.mark.parametrize("priority", ["high", 1.5, None, math.nan, True])
def test_a_priority_that_is_no_whole_number_is_refused(priority):
    with kit.small_engine() as engine:
        session = engine.session()
        for send, message in ((session.send, "Hello."), (session.send_ids, [65])):
            with pytest.raises(InvalidRequestError, match=f"priority must be a whole number, got {priority!r}"):
                send(message, priority=priority)
        assert engine._scheduler.idle
        assert len(kit.say(session, "Hello.", priority=-3)) == 12


def test_a_cap_on_a_buffer_that_is_off_is_refused():
    with pytest.raises(ValueError, match=r"read_buffer_gib must be None with read_buffer off, .*got 0\.5"):
        ca_jax.EngineConfig(read_buffer="off", read_buffer_gib=0.5)
