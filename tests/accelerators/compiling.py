"""Compiling a step for a chip that is not there, and reading from the result what it would do.

    memory        what it takes, gives, keeps in place and needs besides, by the compiler's own count
    copies        what is laid out anew, of the size of a layer's pages and of weights
    collectives   what is sent between devices
    kernels       ours, by their names; of a GPU registers, what is spilled and shared memory; launches, and the bytes
                  that they read and write by the shapes that they are given

Not here: which steps (serving), what of it is right (test_steps).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.metadata as packages
import math
import re
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ca_jax import backend
from ca_jax.models import gpu_attention, int4_product
from tests.accelerators.chips import Chip
from tests.accelerators.serving import Setup, Step

KERNEL = "attend_pages"
"""Ours, over pages."""
_KERNELS = KERNEL, int4_product.NAME
NVCC = "nvidia-cuda-nvcc-cu12"
"""The package of CUDA's assembler."""
LARGE_BYTES = 1 << 20
"""What is copied counts from here on."""

_MOVES = ("copy", "copy-start", "transpose", "convert")
_SENT = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
_WIDTHS = {"pred": 1, "bf16": 2}
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.-]+)")
_IS_NO_KERNEL = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call")
_IN_CACHE = "S(1)"  # A TPU's memory beside its cores, in the layout of what lies there.
_LAUNCH = re.compile(r"k(?:Custom)?Kernel|kGemm|kCublasLt\w*|kCudnn|kConvolution|kMemset\w*|kCopy\w*|kMemcpy\w*")


class Instruction(NamedTuple):
    """A line of a compiled program's text."""

    line: int
    """Its number, from 1."""
    name: str
    """Of its result."""
    shape: str
    """The result's, as it is written, with its layout."""
    opcode: str
    """What it does."""
    source: str
    """Where in the step's own functions it is from."""
    is_stored: bool
    """Whether its result lies in memory: not within a fused computation, but for the last one there."""
    operands: tuple[str, ...]
    """Names of what it is given."""
    is_fused: bool
    """Whether it is within a fused computation: part of a kernel, and none itself."""

    @property
    def num_bytes(self) -> int:
        """Of its largest array, without padding."""
        sizes = (_width(kind) * math.prod(map(int, filter(None, dims.split(",")))) for kind, dims in self._arrays)
        return max(sizes, default=0)

    @property
    def all_bytes(self) -> int:
        """Of all arrays of its result; without the scratch memory of a library's product."""
        kept = [each for each in self._arrays if self.opcode != "custom-call" or each[0] != "s8"]
        return sum(_width(kind) * math.prod(map(int, filter(None, dims.split(",")))) for kind, dims in kept)

    def is_of(self, layers: Collection[tuple[int, ...]]) -> bool:
        """Whether an array of its result is all pages `[P, 2, K, page, H]` of a layer, or their keys, however laid out.

        Args:
          layers: the shapes of these.
        """
        shapes = [list(map(int, dims.split(","))) for _, dims in self._arrays if dims]
        sizes = {(size, pages[0]) for pages in layers for size in (math.prod(pages), math.prod(pages) // pages[1])}
        return any(math.prod(shape) == size and count in shape for shape in shapes for size, count in sizes)

    def widens(self, shapes: Collection[tuple[int, ...]]) -> bool:
        """Whether it writes an array of one of these shapes, in two bytes a number or more, and not to a cache."""
        if self.is_fused or self.opcode in _IS_NO_KERNEL or _IN_CACHE in self.shape:
            return False
        found = [(_width(kind), tuple(map(int, dims.split(",")))) for kind, dims in self._arrays if dims]
        return any(width > 1 and sizes in shapes for width, sizes in found)

    @property
    def _arrays(self) -> list[tuple[str, str]]:
        return _ARRAY.findall(re.sub(r"\{[^}]*\}", "", self.shape))

    def __str__(self) -> str:
        return f"line {self.line}: {self.name} = {self.shape} {self.opcode}, {self.source}"


def _width(kind: str) -> int:
    bits = re.search(r"\d+", kind)
    return _WIDTHS[kind] if kind in _WIDTHS else max(int(bits.group()) // 8, 1) if bits else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One of ours, as `ptxas` compiles it."""

    registers: int
    """Of a thread; more than 255 there are not."""
    spilled_bytes: int
    """Of a thread, stored for want of registers."""
    shared_bytes: int
    """Of a program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """What is sent between devices by collectives of a kind."""

    count: int
    """Of them."""
    largest_bytes: int
    """Of one, as it comes out."""
    largest: str
    """The line of that."""

    @classmethod
    def of(cls, each: list[Instruction]) -> Sent:
        """These."""
        largest = max(each, key=lambda one: one.num_bytes)
        return cls(count=len(each), largest_bytes=largest.num_bytes, largest=str(largest))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """What a compiled step is, on each device."""

    compile_s: float
    """Tracing and compiling; on whatever machine that was."""
    argument_bytes: int
    """All it is given."""
    output_bytes: int
    """All it gives."""
    donated_bytes: int
    """Of the arguments that it is to give back in place, without padding."""
    alias_bytes: int
    """What it gives in place of arguments."""
    temp_bytes: int
    """What it needs besides."""
    pool_bytes: int
    """Of the largest layer's pages."""
    num_pool_copies: int
    """What copies, turns or converts as much as a layer's pages, or their keys alone."""
    pool_copy: str | None
    """The line of the first."""
    num_copies: int
    """Copies of `LARGE_BYTES` and more, of whatever; each once, also within a loop."""
    copied_bytes: int
    """Of these."""
    largest_copy: str | None
    """The line of the largest."""
    widened: str | None
    """The line of the first that writes a matrix which is held small, in two bytes a number."""
    collectives: dict[str, Sent]
    """By kind."""
    num_kernels: int
    """Ours that it calls."""
    kernel: Kernel | None
    """The one that takes most registers, of a GPU."""
    num_launches: int | None
    """Kernels of any kind that a GPU is given, those of loops once."""
    moved_bytes: int | None
    """What they read and write, of a GPU, pages apart: all that each is given, and its result."""
    flops: float | None
    """By XLA's count, which not every compiler gives; of loops one turn."""
    accessed_bytes: float | None
    """Likewise."""
    optimal_s: float | None
    """XLA's estimate for the chip, of all but what it cannot estimate; None where it makes none."""
    num_unknown: int
    """Loops and the like that it cannot estimate: it counts -1 s for each, which is taken out again here."""


@contextlib.contextmanager
def as_on(chip: Chip) -> Iterator[None]:
    """Has functions be traced and lowered as on a device of that kind, whose kernels are what they should be.

    Whether a kernel fits is still asked; that it computes what it should is taken for granted, since nothing runs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_attention, "kernel_is_served", lambda dtype, head_dim: True)
        patch.setattr(int4_product, "kernel_is_served", lambda kernel, dtype: True)
        with chip.as_default(), backend.assumed(chip.served_as):
            yield


def figures(setup: Setup, step: Step) -> Figures:
    """Compiles a step.

    Raises:
      jax.errors.JaxRuntimeError: the compiler refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} if setup.chip.platform == "gpu" else {}
        started_s = time.perf_counter()
        compiled = step.lower().compile({**setup.chip.options, **dump})
        compile_s = time.perf_counter() - started_s
        launches = list(_launches(Path(folder)))
        kernel = _kernel(setup.chip, Path(folder), launches)
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    instructions = list(read(compiled.as_text()))
    pages = {each.sharding.shard_shape(each.shape) for each in setup.all_pages}
    moves = [each for each in instructions if each.opcode in _MOVES]
    copies = [each for each in moves if each.is_stored and each.num_bytes >= LARGE_BYTES and each.opcode != "convert"]
    of_pool = [each for each in moves if each.is_of(pages)]
    sent = collections.defaultdict(list)
    for each in instructions:
        if (kind := each.opcode.removesuffix("-start")) in _SENT:
            sent[kind].append(each)
    optimal_s = cost.get("optimal_seconds")
    num_unknown = 0 if optimal_s is None else max(math.ceil(-optimal_s), 0)
    return Figures(
        compile_s=round(compile_s, 1),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        donated_bytes=setup.bytes_of(step.donated),
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        pool_bytes=max(map(setup.bytes_of, setup.all_pages)),
        num_pool_copies=len(of_pool),
        pool_copy=str(of_pool[0]) if of_pool else None,
        num_copies=len(copies),
        copied_bytes=sum(each.num_bytes for each in copies),
        largest_copy=str(max(copies, key=lambda each: each.num_bytes)) if copies else None,
        widened=next((str(each) for each in instructions if each.widens(setup.small_shapes)), None),
        collectives={kind: Sent.of(each) for kind, each in sent.items()},
        num_kernels=sum(each.opcode == "custom-call" and f"/{KERNEL}/" in each.source for each in instructions),
        kernel=kernel,
        num_launches=len(launches) if setup.chip.platform == "gpu" else None,
        moved_bytes=_moved_bytes(instructions, pages) if setup.chip.platform == "gpu" else None,
        flops=cost.get("flops"),
        accessed_bytes=cost.get("bytes accessed"),
        optimal_s=None if optimal_s is None else optimal_s + num_unknown,
        num_unknown=num_unknown,
    )


def read(text: str) -> Iterator[Instruction]:
    """The instructions of a compiled program."""
    fused = set(re.findall(r" fusion\(.*?\bcalls=%([\w.-]+)", text))
    is_fused = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.endswith("{") and " -> " in line:
            is_fused = line.split(" ", 1)[0].lstrip("%") in fused
        elif found := _INSTRUCTION.match(line):
            root, *parts = found.groups()
            source = re.search(r'op_name="([^"]*)"', line)
            operands = tuple(_NAME.findall(line[found.end() :].split(")", 1)[0]))
            is_stored = root is not None or not is_fused
            yield Instruction(number, *parts, source.group(1) if source else "", is_stored, operands, is_fused)


def _moved_bytes(instructions: list[Instruction], pages: Collection[tuple[int, ...]]) -> int:
    """What kernels read and write, those of loops once. Of pages only some are touched: they do not count."""
    sizes = {each.name: 0 if each.is_of(pages) else each.all_bytes for each in instructions}
    kernels = [each for each in instructions if not each.is_fused and not each.opcode.endswith("-done")]
    return sum(
        sizes[each.name] + sum(sizes.get(operand, 0) for operand in each.operands)
        for each in kernels
        if each.opcode not in _IS_NO_KERNEL
    )


def compiler_version(chip: Chip) -> str:
    """What compiled: jax, and libtpu or CUDA's plugin and assembler."""
    names = ("libtpu",) if chip.platform == "tpu" else ("jax-cuda12-plugin", NVCC)
    return ", ".join(f"{name} {packages.version(name)}" for name in ("jax", "jaxlib", *names))


def _launches(folder: Path) -> Iterator[str]:
    for path in folder.glob("*.thunk_sequence.txt"):
        yield from (line for line in path.read_text().splitlines() if _LAUNCH.search(line))


def _kernel(chip: Chip, folder: Path, launches: list[str]) -> Kernel | None:
    """Assembles ours once more, for what the assembler says of it."""
    found = []
    for path in folder.glob("*.ptx"):
        text = path.read_text()
        if not any(f".entry {name}" in text for name in _KERNELS):
            continue
        arch = re.search(r"^\.target (\w+)", text, re.MULTILINE)
        command = [_assembler(), "-v", f"-arch={arch.group(1) if arch else 'sm_80'}", str(path), "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
        found.append((registers, sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))))
    shared = [
        int(line.rsplit("shared_memory: ", 1)[1].split()[0])
        for line in launches
        if any(f" {name}" in line for name in _KERNELS)
    ]
    if not found:
        return None
    registers, spilled = max(found)
    return Kernel(registers=registers, spilled_bytes=spilled, shared_bytes=max(shared, default=0))


def _assembler() -> str:
    """CUDA's assembler, out of its package."""
    return next(str(file.locate()) for file in packages.files(NVCC) or () if file.name == "ptxas")
