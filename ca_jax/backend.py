"""What kind of device computes, and what is best there: made once for a process, asked everywhere.

No other code of the package asks for the platform's name, but for reports that print it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Literal

import jax

_LOG = logging.getLogger(__name__)
_TRIAL_ATOL = 0.05  # Of numbers of order one in 16 bits.

Kernel = Literal["cpu", "triton", "mosaic"]
"""A form of attention over pages that we wrote: in C++ for a CPU, in Pallas for a GPU and for a TPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """A kind of device."""

    platform: str
    """As jax names it."""
    kernel: Kernel | None
    """Which of our kernels it runs, for pages that fit one."""
    dtype: str
    """Of weights and KV where none is asked for."""
    shares_memory: bool
    """Whether host and device have one memory: the host reads arrays where they are."""
    pool_share: int
    """One part in so many of the memory that weights leave is pages by default."""
    coarse_steps: bool
    """Whether few sizes of a step are best: padding costs little, and compiling much."""
    least_rows: int
    """Rows that decode at least, padding too; a power of two."""
    whole_tokens: int
    """Most tokens of a pass that is one function for all layers, where no history is brought: a call for each layer
    costs more than they compute, and their KV need not leave before the last one is done."""
    draft_sizes: tuple[int, ...]
    """Padded numbers of tokens of a step that checks drafts, of those of all jobs together."""
    layers_ahead: int
    """Layers whose copies are issued before the layer in front of them is dispatched: a copy into a new buffer waits
    for all compute that was dispatched before."""
    writes_whole_pages: bool
    """Whether KV is put into pages a page at a time: where tokens are scattered, XLA would lay out the pool anew."""


CPU = Backend(
    platform="cpu",
    kernel="cpu",
    dtype="float32",  # bfloat16 is slower.
    shares_memory=True,
    pool_share=4,  # Memory is the store's and everybody's there.
    coarse_steps=False,
    least_rows=1,
    whole_tokens=32,
    draft_sizes=(4, 8),
    layers_ahead=0,
    writes_whole_pages=False,
)
GPU = Backend(
    platform="gpu",
    kernel="triton",
    dtype="bfloat16",
    shares_memory=False,
    pool_share=2,
    coarse_steps=True,
    least_rows=2,  # XLA multiplies weights by one row in memory, and then adds up: twice the bytes for small models.
    whole_tokens=128,
    draft_sizes=(16, 64),
    layers_ahead=1,
    writes_whole_pages=False,
)
TPU = dataclasses.replace(GPU, platform="tpu", kernel="mosaic", least_rows=1, writes_whole_pages=True)

_assumed: list[Backend] = []


def here() -> Backend:
    """That of the default device. One that jax knows and this does not is served as a GPU without kernels."""
    return _assumed[-1] if _assumed else _of_default_device()


@functools.cache
def _of_default_device() -> Backend:
    platform = jax.default_backend()
    known = {each.platform: each for each in (CPU, GPU, TPU)}
    return known.get(platform, dataclasses.replace(GPU, platform=platform, kernel=None))


@contextlib.contextmanager
def assumed(backend: Backend) -> Iterator[None]:
    """Has all code believe that it is on another kind of device: to compile for one, or to test. Not for threads."""
    _assumed.append(backend)
    jax.clear_caches()  # What was traced for another kind must not be found.
    try:
        yield
    finally:
        _assumed.pop()
        jax.clear_caches()


def passes_trial(name: str, error: Callable[[], jax.Array]) -> bool:
    """Whether a kernel runs on the default device and computes what it should. A warning says why it does not.

    May be called while a function is traced.

    Args:
      name: of the kernel, in the warning.
      error: how far it is off on small arrays, whose results are of order one; compiled here.
    """

    def run() -> float:
        with jax.transfer_guard("allow"):
            return float(jax.jit(error)())

    try:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # A function that is traced on this one is not there.
            found = thread.submit(run).result()
    except Exception as failure:  # Whatever it is, another implementation serves.
        _LOG.warning("%s is not used, it does not run here: %s", name, failure)
        return False
    if not found <= _TRIAL_ATOL:
        _LOG.warning("%s is not used, it was off by %g", name, found)
    return found <= _TRIAL_ATOL
