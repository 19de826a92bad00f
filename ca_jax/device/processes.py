"""Several processes that serve as one: each runs the same scheduler on the same inputs, over its share of the devices.

What they compute together they must dispatch alike. So whatever a process finds out by itself (what its store holds,
what has arrived, how long something took) and that decides what is dispatched is agreed upon first: all take the least
of it. Bytes of KV are never exchanged, and devices take no part: values of a few bytes go through the key-value service
of `jax.distributed`, 1.3 ms an agreement between two processes of one machine.

Not here: what is agreed upon (batch, load, prefilling, session_kv), who has which heads (models.sharding).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ca_jax.errors import ProcessesError
from ca_jax.private.key_values import KeyValues

_TIMEOUT_S = 600.0  # Longer than a compile takes. Of a process that died jax tells the others sooner, and ends them.
_KEPT = 2  # Agreements whose values stay where others may still read them: nobody is further behind.


class Processes:
    """The processes of an engine: this one alone. Of several, every method waits for all, in the same order on each."""

    index: int = 0
    """Of this one, from 0."""
    count: int = 1
    """How many there are."""

    def gather(self, what: str, value: Any) -> list[Any]:
        """What each process says, by index.

        Args:
          what: is being asked; processes that ask different things have gone apart.
          value: this process's answer: numbers, strings, lists of them, or None.

        Raises:
          ProcessesError: another process asks something else, or none answers in time.
        """
        return [value]


class JaxProcesses(Processes):
    """The processes of `jax.distributed`. Belongs to the engine's thread.

    Args:
      name: of what agrees, for instance an engine: the same on all processes, and no other's.
      timeout_s: how long the others are waited for.

    Raises:
      ProcessesError: `jax.distributed` is not initialised.
    """

    def __init__(self, name: str, timeout_s: float = _TIMEOUT_S) -> None:
        import jax  # Here: what runs without it imports this module too.

        self._values = KeyValues()
        self.index = jax.process_index()
        self.count = jax.process_count()
        self._name = f"ca_jax/{name}"
        self._timeout_s = timeout_s
        self._num_agreed = 0

    def gather(self, what: str, value: Any) -> list[Any]:
        """See `Processes`."""
        number, self._num_agreed = self._num_agreed, self._num_agreed + 1
        self._values.set(self._key(number, self.index), json.dumps([what, value]))
        if number >= _KEPT:
            self._values.delete(self._key(number - _KEPT, self.index))
        values = []
        for index in range(self.count):
            asked, answer = (what, value) if index == self.index else self._answer(number, index, what)
            if asked != what:
                raise ProcessesError(
                    f"all {self.count} processes must do the same, got process {self.index} at {what!r} and "
                    f"process {index} at {asked!r}: they must be given the same calls in the same order"
                )
            values.append(answer)
        return values

    def _answer(self, number: int, index: int, what: str) -> tuple[str, Any]:
        import jax

        try:
            text = self._values.get(self._key(number, index), self._timeout_s)
        except jax.errors.JaxRuntimeError as error:
            raise ProcessesError(
                f"process {index} must agree on {what!r}, and did not answer in {self._timeout_s:g} s"
            ) from error
        asked, answer = json.loads(text)
        return asked, answer

    def _key(self, number: int, index: int) -> str:
        return f"{self._name}/{number}/{index}"


_names = itertools.count()  # Of what is made by all processes in the same order.


def current() -> Processes:
    """The processes of `jax.distributed`; one, where that is not initialised or has no other."""
    import jax  # Here: what runs without it imports this module too.

    return JaxProcesses(f"engine {next(_names)}") if jax.process_count() > 1 else Processes()


def check_alike(processes: Processes, mine: Mapping[str, str]) -> None:
    """Checks that all processes say the same.

    Args:
      processes: which.
      mine: what this one says, by what it is called.

    Raises:
      ProcessesError: another one says otherwise.
    """
    for index, theirs in enumerate(processes.gather("what is served", dict(mine))):
        for name, wanted in mine.items():
            if theirs[name] != wanted:
                raise ProcessesError(
                    f"{name} must be the same on all processes, got {wanted} on process {processes.index} "
                    f"and {theirs[name]} on process {index}"
                )


def all_agree(processes: Processes, what: str, holds: bool) -> bool:
    """Whether something holds on every process."""
    return all(processes.gather(what, holds))


def any_agrees(processes: Processes, what: str, holds: bool) -> bool:
    """Whether something holds on any process."""
    return any(processes.gather(what, holds))


def least(processes: Processes, what: str, values: Sequence[int]) -> list[int]:
    """The smallest of each of some numbers over all processes."""
    return [min(column) for column in zip(*processes.gather(what, list(values)), strict=True)]


def from_first(processes: Processes, what: str, value: Any) -> Any:
    """What the first process says."""
    return processes.gather(what, value if processes.index == 0 else None)[0]
