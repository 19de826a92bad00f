"""What a user may say about the server.

Not here: the engine's config (`ca_jax.config`), where it listens (`launch.serve`).
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How requests are taken.

    Raises:
      ValueError: a value outside its range.
    """

    served_model_name: str | None = None
    """The name that clients give; None: the model's own."""
    max_queue: int = 256
    """Most turns that wait for a decode slot; a request that comes then gets status 429."""
    request_timeout_s: float = 600.0
    """Most seconds a request takes, waiting included; a client may ask for less (`timeout_s`)."""
    shutdown_grace_s: float = 30.0
    """Seconds that running requests have to end once the server is told to stop; then they are cancelled."""
    max_body_bytes: int = 4 << 20
    """Most bytes of a request's body; a larger one gets status 413."""
    max_choices: int = 16
    """Most answers that one request may ask for (`n`, prompts of `/v1/completions`)."""
    max_open_sessions: int = 4096
    """Most conversations held in memory between turns; of others the store's copy on SSD is gone on with."""

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_body_bytes", "max_choices", "max_open_sessions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} wanted at least 1, found {getattr(self, name)}")
        for name in ("request_timeout_s", "shutdown_grace_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} wanted seconds >= 0, found {value}")
