"""What a user may say about the server.

Not here: the engine's config (`ca_jax.config`), where it listens (`launch.serve`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ca_jax.errors import check
from ca_jax.server.tool_formats import ReasoningFamily, ToolFamily


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How requests are taken.

    Raises:
      ValueError: a value outside its range.
    """

    served_model_name: str | None = None
    """The name that clients give; None: the model's own."""
    max_queue: int = 256
    """Most turns that wait for a slot; a request that comes then gets status 429."""
    request_timeout_s: float = 600.0
    """Most seconds a request takes, waiting included; a client may ask for less (`timeout_s`)."""
    shutdown_grace_s: float = 30.0
    """Seconds that running requests have to end once the server is told to stop; then they are cancelled."""
    max_body_bytes: int = 4 << 20
    """Most bytes of a request's body; a larger one gets status 413."""
    max_choices: int = 16
    """Most answers that one request may ask for (`n`, prompts of `/v1/completions`)."""
    max_chunks: int = 64
    """Most chunks of text that one request may give (`context`, `/v1/chunks`): each may be a prefill of its own."""
    max_chunk_tokens: int = 65_536
    """Most tokens of all chunks of one `/v1/chunks`; a `context` has to fit the context window."""
    max_lookups: int = 64
    """Most requests of one tenant at a time that ask the engine for something else than answers, and most of its
    streams of `/live`; others get status 429."""
    max_open_sessions: int = 4096
    """Most conversations held in memory between turns, an equal share of them for each tenant; of others the store's
    copy on SSD is gone on with."""
    max_step_s: float = 120.0
    """Seconds that a step of the engine may take before `/health` says that it is stuck. A step may compile."""
    strict_fields: bool = False
    """Refuse requests that have fields which are not known; else they are ignored, and named in a header of the answer,
    `x-ca-jax-ignored-fields`."""
    kv_events_url: str | None = None
    """Where routers follow what KV is stored here: ZeroMQ's address to listen on, `tcp://127.0.0.1:5557` say; vLLM's
    events. Who reaches it reads the token ids of all conversations. None: nobody is told."""
    kv_events_replay_url: str | None = None
    """Where they ask again for events that they missed, an address likewise; None: nowhere."""
    kv_events_topic: str = ""
    """In front of each event: llm-d's indexer, for one, wants `kv@POD@MODEL`."""
    tool_call_parser: ToolFamily = "auto"
    """How the model writes calls of tools; auto: as its chat template says."""
    reasoning_parser: ReasoningFamily = "auto"
    """How the model writes what it thinks before it answers, which is told apart as `reasoning_content`; auto likewise,
    none: it is content."""
    access_log: str | None = None
    """File of a line of JSON for each request: who, what, how long, how many tokens; never what was said. `-`: standard
    output; None: none is written."""
    otlp_traces_endpoint: str | None = None
    """Collector that gets a trace of each answer by OTLP over HTTP, `http://127.0.0.1:4318` say; None: none is made."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which the server is reached, beside addresses and localhost; a request for another `Host` gets status
    403. Empty: where keys are asked for, any name is."""

    def __post_init__(self) -> None:
        counts = ("max_queue", "max_body_bytes", "max_choices", "max_open_sessions")
        for name in (*counts, "max_chunks", "max_chunk_tokens", "max_lookups"):
            check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        has_url = self.kv_events_url is not None or self.kv_events_replay_url is None
        check(has_url, "kv_events_url", "given with a kv_events_replay_url", self.kv_events_url)
        url = self.otlp_traces_endpoint
        check(url is None or url.startswith(("http://", "https://")), "otlp_traces_endpoint", "an http(s):// URL", url)
        for name in ("request_timeout_s", "shutdown_grace_s", "max_step_s"):
            check(0 <= getattr(self, name) < math.inf, name, "seconds >= 0", getattr(self, name))

    def of_replica(self, number: int) -> ServerConfig:
        """That of one of several replicas of a machine: addresses of KV events have ports of their own, one behind
        the other."""
        urls: dict[str, Any] = {}
        for name in ("kv_events_url", "kv_events_replay_url"):
            url = getattr(self, name)
            if url is not None:
                head, _, port = url.rpartition(":")
                check(port.isdecimal(), name, "an address with a port, where there are replicas", url)
                urls[name] = f"{head}:{int(port) + number}"
        return dataclasses.replace(self, **urls)
