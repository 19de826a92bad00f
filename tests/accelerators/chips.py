"""Chips that programs are compiled for without having one: what describes them to the compiler, and their data sheets.

For TPU libtpu has the description by name; for CUDA it is a text of ours in `targets/`. A device of such a topology
runs nothing: arrays cannot be put on it.

Not here: what is compiled (serving), how (compiling).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from ca_jax import backend

TARGETS = Path(__file__).parent / "targets"
GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of chip."""

    name: str
    """As in tables."""
    platform: Literal["gpu", "tpu"]
    """As `jax.default_backend` has it."""
    target: str
    """For TPU the name of its smallest topology, of four chips; for CUDA the file in `targets/`."""
    memory_bytes: int
    """Of each, as its compiler counts: the file's, or what libtpu says is there where a program does not fit."""
    flops: float
    """Of bfloat16 products, dense, a second: data sheet."""
    bytes_per_s: float
    """Of its memory: data sheet."""

    @functools.cache  # noqa: B019 (there are four chips)
    def devices(self, count: int) -> tuple[Any, ...]:
        """So many of one host, 1 or 4."""
        from jax.experimental import topologies

        if self.platform == "tpu":
            return tuple(topologies.get_topology_desc(self.target, "tpu").devices[:count])
        text = (TARGETS / self.target).read_text(encoding="utf-8")
        options = {"target_config": text, "topology": f"1x1x{count}"}
        return tuple(topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices)

    @contextlib.contextmanager
    def as_default(self) -> Iterator[None]:
        """Has jax 0.11 and later lower kernels for this chip: they ask which GPU there is, and none is here."""
        if self.platform != "gpu":
            yield
            return
        device = AbstractDevice(f"NVIDIA {self.name}", None, self.platform)
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            yield

    @property
    def served_as(self) -> backend.Backend:
        """What is best on it."""
        return backend.GPU if self.platform == "gpu" else backend.TPU

    @property
    def options(self) -> dict[str, Any]:
        """Of the compiler: no device is there to try variants of a kernel on."""
        return {"xla_gpu_autotune_level": 0} if self.platform == "gpu" else {}

    @property
    def rates(self) -> dict[str, float]:
        """Of its roofline."""
        return {"flops": self.flops, "bytes_per_s": self.bytes_per_s}


H100 = Chip(
    name="H100 SXM 80",
    platform="gpu",
    target="h100_sxm_80.txtpb",
    memory_bytes=84_942_979_072,
    flops=989.4e12,
    bytes_per_s=3.352e12,
)
A100 = Chip(
    name="A100 SXM 80",
    platform="gpu",
    target="a100_sxm_80.txtpb",
    memory_bytes=85_100_068_864,
    flops=312e12,
    bytes_per_s=2.039e12,
)
V5E = Chip(
    name="TPU v5e",
    platform="tpu",
    target="v5e:2x2",
    memory_bytes=int(15.75 * GIB),
    flops=197e12,
    bytes_per_s=819e9,
)
V6E = Chip(
    name="TPU v6e",
    platform="tpu",
    target="v6e:2x2",
    memory_bytes=int(31.25 * GIB),
    flops=918e12,
    bytes_per_s=1.638e12,
)
CHIPS = (H100, A100, V5E, V6E)
