"""Crossing between host and device on a CPU: nothing is moved or registered for DMA that need not be.

What is sharded is tested on several devices (on_mesh), in the process that `test_mesh.py` starts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.device import transfer

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="only on CPU are host and device one memory")


@on_cpu
def test_on_cpu_what_is_saved_stays_where_it_was_computed():
    array = jnp.ones((2, 16, 2, 16))
    assert transfer.to_host_memory(array) is array
    assert transfer.host_view(array).ctypes.data == array.unsafe_buffer_pointer()


def test_small_data_is_copied_and_not_referred_to():
    tokens = np.arange(4)
    array = transfer.to_device(tokens, np.int32)
    tokens[...] = 9
    assert array.dtype == np.int32
    np.testing.assert_array_equal(transfer.to_host(array), range(4))


# Registered memory.


class Client:
    """A backend's client that registers memory, or does not."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.mapped: list[tuple[int, int]] = []
        self.num_mapped = 0

    def dma_map(self, address: int, num_bytes: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.mapped.append((address, num_bytes))
        self.num_mapped += 1

    def dma_unmap(self, address: int) -> None:
        (found,) = [each for each in self.mapped if each[0] == address]
        self.mapped.remove(found)


@pytest.fixture
def memory() -> np.ndarray:
    return np.zeros(4096, np.uint8)


def test_every_client_registers_all_of_the_memory_until_it_is_let_go_of(memory, monkeypatch):
    if jax.default_backend() == "cpu":
        assert transfer.pin_host_memory(memory) is False
    clients = [Client(), Client()]
    monkeypatch.setattr(transfer, "_clients", lambda: clients)
    assert transfer.pin_host_memory(memory[:0]) is False
    assert transfer.pin_host_memory(memory) is True
    assert [client.mapped for client in clients] == [[(memory.ctypes.data, 4096)]] * 2
    transfer.unpin_host_memory(memory)
    assert [client.mapped for client in clients] == [[], []]


@pytest.mark.parametrize("refusal", [RuntimeError("not supported"), NotImplementedError(), AttributeError("dma_map")])
def test_where_one_client_refuses_what_others_registered_is_undone(memory, monkeypatch, refusal):
    clients = [Client(), Client(), Client(refusal), Client()]
    monkeypatch.setattr(transfer, "_clients", lambda: clients)
    assert transfer.pin_host_memory(memory) is False
    assert [client.num_mapped for client in clients] == [1, 1, 0, 0]
    assert [client.mapped for client in clients] == [[]] * 4
    monkeypatch.setattr(transfer, "_clients", lambda: [Client(MemoryError("no memory to lock"))])
    with pytest.raises(MemoryError, match="no memory to lock"):  # Another failure is not hidden.
        transfer.pin_host_memory(memory)
