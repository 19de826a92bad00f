"""Serves a model over HTTP with OpenAI's API; every conversation's KV is kept, so that each turn prefills what is new.

    python -m ca_jax.launch.serve --model=smollm2-135m-instruct --port=8000 --dram_gib=4 --ssd_dir=~/kv --ssd_gib=50

    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

`GET /health` says whether it is ready: the model is loaded and, unless --nowarmup, everything compiled. `/metrics` is
for Prometheus, and http://127.0.0.1:8000/ shows the store at work. Ctrl-C or SIGTERM lets running answers end, saves
what is not saved, and leaves; with --ssd_dir conversations are gone on with by the next server of the directory.

With --api_keys_file=FILE requests need a key, and each tenant has KV of its own (`ca_jax.server.tenants`). Without one
anybody who reaches the address is served, but only for a `Host` that is an address, localhost or in --allowed_hosts.

Not here: the routes (`ca_jax.server`), the engine.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

import rich.console
import uvicorn
from absl import flags

from ca_jax import backend
from ca_jax.config import EngineConfig
from ca_jax.device.adapters import array_bytes
from ca_jax.device.buckets import history_buckets
from ca_jax.engine import Engine
from ca_jax.kv.layout import pool_bytes, pool_size, rest_layout, state_bytes, wanted_bytes
from ca_jax.launch.flags import ConfigFlags, define_model
from ca_jax.launch.script import note, run
from ca_jax.launch.sizes import SIZES, sized, sizes_to_find
from ca_jax.launch.terminal import progress_bars
from ca_jax.pretrained import Progress, load_model
from ca_jax.server.app import make_app
from ca_jax.server.config import ServerConfig
from ca_jax.server.guards import is_loopback
from ca_jax.server.tenants import Tenants
from ca_jax.serving.core import DEFAULT_WINDOW_TOKENS, adapter_sizes, enable_compile_cache, layout_of
from ca_jax.serving.drafts import draft_pool

FLAGS = flags.FLAGS

_ENGINE = ConfigFlags(EngineConfig(), auto=SIZES)
_SERVER = ConfigFlags(ServerConfig())
_KEEP_ALIVE_S = 75


def define_flags(flag_values: flags.FlagValues = FLAGS) -> None:
    """Only where this is the program: scripts share names of flags, and a test imports several of them."""
    define_model(flag_values)
    text = "Compile what turns need before the first one comes."
    flags.DEFINE_boolean("warmup", True, text, flag_values=flag_values)
    text = "Address to listen on; 0.0.0.0 for all of the machine's."
    flags.DEFINE_string("host", "127.0.0.1", text, flag_values=flag_values)
    flags.DEFINE_integer("port", 8000, "Port to listen on.", 0, 65535, flag_values=flag_values)
    text = "TOML file of tenants and their keys; by default keys are not asked for."
    flags.DEFINE_string("api_keys_file", None, text, flag_values=flag_values)
    _SERVER.define(flag_values)
    _ENGINE.define(flag_values)


def read_flags(flag_values: flags.FlagValues = FLAGS) -> tuple[Tenants, ServerConfig, EngineConfig]:
    """Whose requests are served, how they are taken, and by which engine, as parsed flags say.

    Raises:
      ValueError: a flag's value, or the file of keys, is wrong.
      OSError: that file cannot be read.
    """
    path = flag_values["api_keys_file"].value
    tenants = Tenants.read(path) if path else Tenants()
    config, engine_config = _SERVER.read(flag_values), _ENGINE.read(flag_values)
    name = config.served_model_name or flag_values["model"].value
    quotas = tenants.quotas(dict(engine_config.store.tenant_quotas))
    store = dataclasses.replace(engine_config.store, tenant_quotas=quotas)
    config = dataclasses.replace(config, served_model_name=name)
    return tenants, config, dataclasses.replace(engine_config, store=store)


def warn_if_open(console: rich.console.Console, tenants: Tenants, host: str) -> None:
    """Warns where anybody who reaches an address is served."""
    if not (tenants.asks_for_keys or is_loopback(host)):
        warning = "without --api_keys_file: anybody who reaches it is served and reads conversations"
        note(console, f"warning: --host={host} {warning}", "yellow")


def make_sized(model: str, config: EngineConfig, auto: Sequence[str], progress: Progress | None = None) -> Engine:
    """An engine whose sizes follow from what the machine has left once the weights are there.

    Args:
      model: as `--model` names it.
      config: of the engine; its sizes that are named in `auto` do not count.
      auto: which: `dram_gib`, `ssd_gib`.
      progress: of loading.

    Raises:
      FlagError: there is too little room.
      Exception: as `Engine.from_pretrained`.
    """
    if not auto:
        return Engine.from_pretrained(model, config, progress=progress)
    enable_compile_cache(config.compile_cache_dir)
    load = functools.partial(load_model, dtype=config.dtype, weight_dtype=config.weight_dtype)
    loaded = load(model, layout=layout_of(config), progress=progress)
    draft = None if config.draft_model is None else load(config.draft_model, progress=progress)
    needed_bytes = 0  # Where devices have memory of their own.
    if backend.here().shares_memory:
        window = config.context_window or min(loaded.config.steady_positions, DEFAULT_WINDOW_TOKENS)
        size = pool_size(loaded.config, loaded.dtype, config, window)
        wanted = wanted_bytes(
            config,
            rest_layout(loaded.config, loaded.dtype, config),
            max_tokens=history_buckets(window)[-1],
            num_parts=1,
            param_bytes=0,  # They are there.
            pool_bytes=sum(of(loaded.config, loaded.dtype, size, None) for of in (pool_bytes, state_bytes)),
        )
        needed_bytes = sum(wanted.values()) + array_bytes(loaded.config, adapter_sizes(config), loaded.dtype, None)
        if draft is not None:
            needed_bytes += pool_bytes(draft.config, draft.dtype, draft_pool(draft.config, config, window), None)
    store = sized(config.store, auto, needed_bytes, weights=loaded.fingerprint)
    return Engine(loaded, dataclasses.replace(config, store=store), draft_model=draft)


class _Server(uvicorn.Server):
    """Tells the application that it is to stop as soon as it is, so that streams that never end do."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of SIGINT and SIGTERM; the second one does not wait."""
        self.config.app.state.server.stopping = True  # type: ignore[union-attr]
        super().handle_exit(sig, frame)


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    console = rich.console.Console(stderr=True)
    try:
        tenants, config, engine_config = read_flags()
    except (ValueError, OSError) as error:
        print(f"serve: {error}", file=sys.stderr)
        sys.exit(2)
    auto, failed = sizes_to_find(), threading.Event()

    def make_engine() -> Engine:
        with progress_bars(console) as progress:
            engine = make_sized(FLAGS.model, engine_config, auto, progress)
            if auto:
                sizes = (f"--{name}={getattr(engine.config.store, name):g}" for name in auto)
                note(console, f"{engine.config}\nsizes of this machine: {' '.join(sizes)}", None)
            if FLAGS.warmup:
                engine.warmup(progress=progress)
        note(console, f"ready: {engine.model.name} on {url}", None)
        return engine

    def fail(error: Exception) -> None:
        note(console, f"serve: {error}", "red")
        failed.set()
        signal.raise_signal(signal.SIGTERM)

    url = f"http://{FLAGS.host}:{FLAGS.port}/"
    note(console, str(config) if auto else f"{engine_config}\n{config}")  # Sizes are known once the weights are there.
    warn_if_open(console, tenants, FLAGS.host)
    try:
        served = make_app(make_engine, config, tenants, on_failure=fail)
    except (ImportError, OSError) as error:
        print(f"serve: {error}", file=sys.stderr)
        sys.exit(2)
    listening = uvicorn.Config(
        served,
        host=FLAGS.host,
        port=FLAGS.port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(config.shutdown_grace_s) + 1,
        h11_max_incomplete_event_size=1 << 16,
    )
    server = _Server(listening)
    server.run()
    if failed.is_set() or not server.started:
        sys.stderr.flush()
        os._exit(1)  # A thread that still loads a model would keep the process.


if __name__ == "__main__":
    define_flags()
    run(main, errors=())
