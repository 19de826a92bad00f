"""Counts what XLA compiles.

Not here: what is compiled ahead (`ca_jax.device.warmup`).
"""

from __future__ import annotations

import threading

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts functions that XLA compiled, or took from the compile cache, within a `with` block, in all threads."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> CompileCounter:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self.count += 1
                self.seconds += duration_secs
