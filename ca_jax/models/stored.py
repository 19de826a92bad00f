"""One tensor of a checkpoint file, whatever its format, and tensors of all experts taken apart.

Not here: opening files (`gguf`, `huggingface`, `orbax`), which leaf of the tree a tensor becomes (`weights`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint file, read by rows."""

    shape: tuple[int, ...]
    """Its shape, outermost first."""
    read_rows: Callable[[int, int], np.ndarray]
    """Rows `[start, stop)` along the first axis, as floating point numbers of any dtype; called by several threads."""
    chunk_rows: int | None = None
    """Rows that the file can only read together, from a multiple of this on; None: each by itself."""
    part: Callable[[int], StoredTensor] | None = None
    """Of a stacked tensor, the one at an index of the first axis, read by rows of its own; None: it is no stack."""
    is_optional: bool = False
    """Whether it changes nothing where no leaf asks for it."""


def of_each_expert(name: str, tensor: StoredTensor, transposed: bool) -> dict[str, StoredTensor]:
    """Takes a tensor that holds the matrices or the biases of all experts apart.

    Args:
      name: the tensor's.
      tensor: `[E, ...]`.
      transposed: whether matrices lie `[in, out]`, and not `[out, in]`.

    Returns:
      The tensor of each expert as `name[expert]`, matrices `[out, in]`; each is read at once.
    """

    def read_rows(expert: int, start: int, stop: int) -> np.ndarray:
        [found] = tensor.read_rows(expert, expert + 1)
        return (found.T if transposed else found)[start:stop]

    num_experts, *shape = tensor.shape
    shape = shape[::-1] if transposed else shape
    return {
        f"{name}[{i}]": StoredTensor(shape=tuple(shape), read_rows=functools.partial(read_rows, i), chunk_rows=shape[0])
        for i in range(num_experts)
    }


def of_fused_experts(name: str, tensor: StoredTensor, parts: Sequence[str]) -> dict[str, StoredTensor]:
    """Takes a tensor that holds several matrices of all experts apart, one behind the other in each.

    Args:
      name: of one expert's matrix, with `{expert}` and `{part}` in it.
      tensor: `[E, out, in]`, of as many matrices as there are parts.
      parts: what they are called, in order.
    """

    def read_rows(expert: int, first: int, start: int, stop: int) -> np.ndarray:
        [found] = tensor.read_rows(expert, expert + 1)
        return found[first + start : first + stop]

    num_experts, num_rows, *shape = tensor.shape
    size, found = num_rows // len(parts), dict[str, StoredTensor]()
    for expert in range(num_experts):
        for i, part in enumerate(parts):
            rows = functools.partial(read_rows, expert, i * size)
            found[name.format(expert=expert, part=part)] = StoredTensor(shape=(size, *shape), read_rows=rows)
    return found
