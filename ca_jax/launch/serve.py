"""Serves a model over HTTP with OpenAI's API; every conversation's KV is kept, so that each turn prefills what is new.

    python -m ca_jax.launch.serve --model=smollm2-135m-instruct --port=8000 --dram_gib=4 --ssd_dir=~/kv --ssd_gib=50

    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

`GET /health` says whether it is ready: the model is loaded and, unless --nowarmup, everything compiled. `/metrics` is
for Prometheus, and http://127.0.0.1:8000/ shows the store at work. Ctrl-C or SIGTERM lets running answers end, saves
what is not saved, and leaves; with --ssd_dir conversations are gone on with by the next server of the directory.

With --api_keys_file=FILE requests need a key, and each tenant has KV of its own (`ca_jax.server.tenants`). Without one
whoever reaches the address is served, and only for a `Host` that is an address, localhost or one of --allowed_hosts.

Not here: the routes (`ca_jax.server`), the engine.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

import rich.console
import uvicorn
from absl import app, flags, logging

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.errors import CaJaxError
from ca_jax.launch import engine_flags, store_flags
from ca_jax.launch.progress import progress_bars
from ca_jax.launch.serve_flags import define_server_flags, server_config
from ca_jax.server.app import make_app
from ca_jax.server.hosts import is_loopback
from ca_jax.server.tenants import Tenants

FLAGS = flags.FLAGS

_DEFAULT_CONFIG = EngineConfig()
_KEEP_ALIVE_S = 75


def _define_flags() -> None:
    """Only where this is the program: scripts share names of flags, and a test imports several of them."""
    flags.DEFINE_string(
        "model",
        "smollm2-135m-instruct",
        "Preset, .gguf file, Hugging Face directory, hub name (org/name) or checkpoint.",
    )
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Of weights and KV; by default what is fast here.")
    flags.DEFINE_integer("context_window", None, "Most tokens of a conversation; by default the model's, up to 4,096.")
    flags.DEFINE_boolean("warmup", True, "Compile what turns need before the first one comes.")
    define_server_flags()
    engine_flags.define(_DEFAULT_CONFIG)
    store_flags.define()


class _Server(uvicorn.Server):
    """Tells the application that it is to stop as soon as it is, so that streams that never end do."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of SIGINT and SIGTERM; the second one does not wait."""
        self.config.app.state.server.begin_shutdown()  # type: ignore[union-attr]
        super().handle_exit(sig, frame)


def load_engine(model: str, config: EngineConfig, *, warmup: bool = False, console: rich.console.Console) -> Engine:
    """The engine of a model, which may serve at once; its host memory is made resident in the background.

    Args:
      model: as `load_model` takes it.
      config: of the engine.
      warmup: whether to compile what turns need.
      console: is told how far it is, and why it failed.

    Raises:
      CaJaxError, ValueError, OSError, MemoryError: as `Engine.from_pretrained` does.
    """
    try:
        with progress_bars(console) as progress:
            engine = Engine.from_pretrained(model, config, progress=progress)
            if warmup:
                engine.warmup(progress=progress)
    except (CaJaxError, ValueError, OSError, MemoryError) as error:
        console.print(f"serve: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise
    return engine


def main(argv: Sequence[str]) -> None:
    """Runs from the command line."""
    if len(argv) > 1:
        raise app.UsageError(f"wanted flags only, found {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # jax reports each backend that it does not find.
    console = rich.console.Console(stderr=True)
    try:
        tenants = Tenants.read(FLAGS.api_keys_file) if FLAGS.api_keys_file else Tenants()
        config = server_config()
        store = store_flags.store_config()
        engine_config = dataclasses.replace(
            engine_flags.engine_config(_DEFAULT_CONFIG),
            dtype=FLAGS.dtype,
            context_window=FLAGS.context_window,
            store=dataclasses.replace(store, tenant_quotas=tenants.quotas(dict(store.tenant_quotas))),
        )
    except (ValueError, OSError) as error:
        print(f"serve: {error}", file=sys.stderr)
        sys.exit(2)
    failed = threading.Event()

    def make_engine() -> Engine:
        engine = load_engine(FLAGS.model, engine_config, warmup=FLAGS.warmup, console=console)
        console.print(f"ready: {engine.model.name} on {url}", markup=False, highlight=False, soft_wrap=True)
        return engine

    def fail() -> None:
        failed.set()
        signal.raise_signal(signal.SIGTERM)

    url = f"http://{FLAGS.host}:{FLAGS.port}/"
    console.print(f"{engine_config}\n{config}", markup=False, highlight=False, soft_wrap=True, style="dim")
    if not (tenants.asks_for_keys or is_loopback(FLAGS.host)):
        warning = f"--host={FLAGS.host} without --api_keys_file: whoever reaches it is served, and reads conversations"
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    served = make_app(make_engine, config, tenants, on_failure=fail)
    server = _Server(
        uvicorn.Config(
            served,
            host=FLAGS.host,
            port=FLAGS.port,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(config.shutdown_grace_s) + 1,
            h11_max_incomplete_event_size=1 << 16,
        )
    )
    server.run()
    if failed.is_set() or not server.started:
        sys.stderr.flush()
        os._exit(1)  # A thread that still loads a model would keep the process.


if __name__ == "__main__":
    _define_flags()
    app.run(main)
