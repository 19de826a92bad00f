"""The adapters that an engine serves, by name: which are loaded, in which slots, and whose turns may have them.

Not here: reading them (models.adapters), their arrays (device.adapters), what uses them (open_sessions, prompts).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from ca_jax.device.processes import Processes, check_alike
from ca_jax.device.runner import Runner
from ca_jax.errors import AdapterError, AdapterInUseError, InvalidRequestError, UnknownAdapterError
from ca_jax.models.adapters import Adapter, read_adapter
from ca_jax.session import Job, Session
from ca_jax.turns.conversations import Conversation, Message
from ca_jax.turns.requests import NO_ADAPTER, UsedAdapter


class LoadedAdapters:
    """Adapters of one engine, oldest first. Belongs to the engine's thread; any may iterate."""

    def __init__(self, runner: Runner, processes: Processes) -> None:
        self._runner, self._processes = runner, processes
        self._sizes = runner.adapters.sizes
        self._loaded: dict[str, tuple[int, Adapter]] = {}  # Another dict at each change: other threads look at it.

    def __iter__(self) -> Iterator[Adapter]:
        return iter([adapter for _, adapter in self._loaded.values()])

    def check_new(self, name: str) -> None:
        """Checks that an adapter of that name may be loaded.

        Raises:
          InvalidRequestError: there is no room for any, or for another; or the name is none, or is taken.
        """
        most = self._sizes.num_slots
        if not most:
            raise InvalidRequestError("adapters are loaded by engines with max_adapters above 0, got max_adapters=0")
        if not name or name != "".join(name.split()):
            raise InvalidRequestError(f"an adapter's name must be text without spaces, got {name!r}")
        if name in self._loaded:
            raise InvalidRequestError(f"an adapter's name must be one that is not taken, got {name!r}: unload it first")
        if len(self._loaded) >= most:
            raise InvalidRequestError(
                f"adapters must be at most max_adapters={most}, got as many already: {', '.join(self._loaded)}"
            )

    def load(
        self, name: str, path: str | Path | Adapter, is_open: Callable[[], AbstractContextManager[None]]
    ) -> Adapter:
        """Reads an adapter, and has it be there from the next step on. Waits until it is on the device.

        Args:
          name: of it.
          path: a directory as PEFT writes it, or what `read_adapter` has read there.
          is_open: gives a block that has the engine's lock; the files are read without it.

        Raises:
          InvalidRequestError: as of `check_new`.
          AdapterError: it cannot be read or served; the message names the field or the tensor.
          ProcessesError: another process loads another one.
        """
        with is_open():
            self.check_new(name)
        read = path if isinstance(path, Adapter) else read_adapter(path, name, self._runner.config)
        adapter = dataclasses.replace(read, name=name)
        with is_open():
            self._put(adapter)
        return adapter

    def _put(self, adapter: Adapter) -> None:
        self.check_new(adapter.name)
        if adapter.rank > self._sizes.rank:
            raise AdapterError(
                f"{adapter.path}: ranks must be at most max_adapter_rank={self._sizes.rank}, got {adapter.rank}"
            )
        if self._processes.count > 1:
            check_alike(self._processes, {"adapter": f"{adapter.name} {adapter.fingerprint}"})
        taken = {slot for slot, _ in self._loaded.values()}
        slot = next(slot for slot in range(self._sizes.num_slots) if slot not in taken)
        try:
            self._runner.put_adapter(slot, adapter)
        except Exception:  # No memory, say: steps go on with the arrays that they had.
            self._runner.adapters.put(slot, None)
            raise
        self._loaded = {**self._loaded, adapter.name: (slot, adapter)}

    def unload(self, name: str, jobs: Iterable[Job], sessions: Iterable[Session]) -> None:
        """Gives an adapter's slot back.

        Args:
          jobs: that run or wait.
          sessions: that are open.

        Raises:
          UnknownAdapterError: it is not loaded.
          AdapterInUseError: some of them use it.
        """
        self._check_known(name)
        num_jobs = sum(job.adapter.name == name for job in jobs)
        num_sessions = sum(session.adapter == name for session in sessions)
        if num_jobs or num_sessions:
            raise AdapterInUseError(
                f"adapter {name!r} must be used by nothing to be unloaded, got {num_jobs} jobs that run or wait and "
                f"{num_sessions} open sessions: end them, or release the sessions"
            )
        slot, _ = self._loaded[name]
        self._loaded = {other: held for other, held in self._loaded.items() if other != name}
        self._runner.put_adapter(slot, None)

    def begin(self, messages: Iterable[Message] = (), adapter: str | None = None) -> Conversation:
        """A conversation without a turn, held with an adapter or with none; see `Conversation.begin`.

        Raises:
          UnknownAdapterError: it is not loaded.
        """
        if adapter is None:
            return Conversation.begin(list(messages))
        self._check_known(adapter)
        weights = self._loaded[adapter][1].fingerprint
        return Conversation.begin(list(messages), adapter=adapter, adapter_weights=weights)

    def of(self, conversation: Conversation) -> UsedAdapter:
        """The adapter that a conversation is held with, for a job of it.

        Raises:
          UnknownAdapterError: it is not loaded, or with other weights.
        """
        name, weights = conversation.adapter, conversation.adapter_weights
        if not name:
            return NO_ADAPTER
        self._check_known(name)
        slot, adapter = self._loaded[name]
        if adapter.fingerprint != weights:
            raise UnknownAdapterError(
                f"the conversation must go on with the adapter {name!r} whose fingerprint is {weights}, got the one "
                f"from {adapter.path} loaded by that name: {adapter.fingerprint}"
            )
        return UsedAdapter(name, weights, slot)

    def _check_known(self, name: str) -> None:
        if name not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise UnknownAdapterError(f"the adapter must be one that is loaded ({known}), got {name!r}: load it first")
