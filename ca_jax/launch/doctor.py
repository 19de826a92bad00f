"""Says what of this machine stands in the way of serving, and which flag or setting mends it.

    ca_jax doctor --ssd_dir=~/kv --port=8000
    ca_jax doctor --model=org/name --dram_gib=auto --json

Flags of the engine are those of `ca_jax serve`. It writes and removes one file of 64 MiB in --ssd_dir, and changes
nothing else; of a model's files it reads what they say of its architecture, and of the hub fetches that alone. The exit
code is 1 where something is wrong, 0 where there are warnings at most.

Not here: what a model takes of devices that are elsewhere (`ca_jax plan`), how fast it is (`ca_jax bench`).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, NoReturn

from absl import flags
from packaging.requirements import Requirement

from ca_jax import backend
from ca_jax.config import EngineConfig
from ca_jax.device.transfer import device_memory_bytes
from ca_jax.errors import CaJaxError
from ca_jax.launch.flags import ConfigFlags, FlagError
from ca_jax.launch.plan import make_plan
from ca_jax.launch.script import make_console, make_table, run
from ca_jax.launch.sizes import SIZES, block_disk_bytes, free_disk_bytes, free_memory_bytes, sized, sizes_to_find
from ca_jax.models.checkpoint import load_checkpoint
from ca_jax.models.config import ModelConfig
from ca_jax.models.huggingface import config_from_hf, read_json
from ca_jax.storage.config import GIB

State = Literal["ok", "warn", "wrong"]
_TRIED_BYTES = 64 << 20
_SLOW_WRITE, _SLOW_READ = 100e6, 200e6  # Bytes a second, below which a tier is of little use.
_FEW_FILES = 4096
_EXTRAS = {
    "serve": ("fastapi", "uvicorn", "prometheus_client", "asgi_correlation_id"),
    "grammar": ("llguidance",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "cluster": ("ray",),
    "events": ("zmq", "msgpack"),
}
"""Modules that each extra brings."""
_ENGINE = ConfigFlags(EngineConfig(), auto=SIZES)
FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class Row:
    """What was looked at."""

    name: str
    state: State
    found: str
    """What there is."""
    mend: str = ""
    """What to do; empty where nothing is."""


def check_disk(directory: Path | None, ssd_gib: float) -> Iterator[Row]:
    """Whether the SSD tier's directory, or the one that it will be made in, can be written, how fast, and has room."""
    if directory is None:
        yield Row("ssd", "warn", "no --ssd_dir was given", "give --ssd_dir=DIR, or conversations end with the process")
        return
    made = directory
    try:
        while not made.exists():
            made = made.parent
        write, read = disk_speed(made, _TRIED_BYTES)
        free_gib = (free_disk_bytes(made) + block_disk_bytes(directory)) / GIB
    except OSError as error:
        found = f"user {os.getuid()} cannot write to {made}: {error.strerror or error}"
        yield Row("ssd", "wrong", found, "let this user write there, free space, or name another --ssd_dir")
        return
    found = f"{made}: {write / 1e6:,.0f} MB/s written durably, {read / 1e6:,.0f} MB/s read"
    is_slow = write < _SLOW_WRITE or read < _SLOW_READ
    mend = "name a local NVMe disk in --ssd_dir; KV is recomputed where that is faster" if is_slow else ""
    yield Row("ssd", "warn" if is_slow else "ok", found, mend)
    if free_gib < ssd_gib:
        wanted = f"set --ssd_gib={max(int(free_gib * 0.8), 1)} or --ssd_gib=auto"
        yield Row("ssd room", "warn", f"{free_gib:.1f} GiB free or its own, --ssd_gib={ssd_gib:g}", wanted)
    else:
        yield Row("ssd room", "ok", f"{free_gib:.1f} GiB free or its own, for --ssd_gib={ssd_gib:g}")


def disk_speed(directory: Path, num_bytes: int) -> tuple[float, float]:
    """Bytes a second of a file that is written and made durable, and of reading it from the disk.

    Raises:
      OSError: it cannot be written.
    """
    block = os.urandom(1 << 20)  # Some disks compress.
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".ca_jax-doctor-") as file:
        began_s = time.perf_counter()
        for _ in range(num_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written_s = time.perf_counter() - began_s
        if hasattr(os, "posix_fadvise"):  # Else it would be read from memory.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began_s = time.perf_counter()
        while file.read(len(block)):
            pass
        return num_bytes / written_s, num_bytes / (time.perf_counter() - began_s)


def check_memory(dram_gib: float, needed_bytes: int = 0) -> Iterator[Row]:
    """Whether there is memory for the DRAM tier, which is taken at start, beside what the engine needs."""
    free = free_memory_bytes()
    if free is None:
        yield Row("memory", "warn", "the system does not say how much is free", "")
        return
    free_gib = (free - needed_bytes) / GIB
    rest = "free" if not needed_bytes else "free beside the model"
    if dram_gib > free_gib:
        found = f"{free_gib:.1f} GiB {rest}, --dram_gib={dram_gib:g} is more"
        yield Row("memory", "wrong", found, f"set --dram_gib={max(int(free_gib * 0.6), 0)} or --dram_gib=auto")
    elif dram_gib > 0.8 * free_gib:
        found = f"{free_gib:.1f} GiB {rest}, of which --dram_gib={dram_gib:g} leaves little"
        yield Row("memory", "warn", found, "set --dram_gib=auto; --model=NAME says what a model takes")
    else:
        yield Row("memory", "ok", f"{free_gib:.1f} GiB {rest} for --dram_gib={dram_gib:g}")


class _Known(Exception):
    """Ends loading a model as soon as its architecture is known."""


def architecture_of(model: str) -> ModelConfig:
    """The architecture of a model, as `--model` names it. No weights are read, and none fetched from the hub.

    Raises:
      CaJaxError: there is no such model, or it is not served.
      OSError: a file cannot be read.
    """
    path = Path(model).expanduser()
    if not path.exists() and path.suffix != ".gguf" and model.count("/") == 1:
        import huggingface_hub  # Only here: most models are local.

        return config_from_hf(read_json(Path(huggingface_hub.hf_hub_download(model, "config.json"))))
    if (path / "config.json").is_file():
        return config_from_hf(read_json(path / "config.json"))

    def stop(config: ModelConfig) -> NoReturn:
        raise _Known(config)

    try:
        load_checkpoint(model, destinations=stop)
    except _Known as known:
        return known.args[0]
    raise AssertionError("a model cannot be loaded without a place for its weights")


def check_model(model: str, engine: EngineConfig) -> tuple[Row, int]:
    """What an engine takes of each device for a model, held against what the device, or the machine, has.

    Returns:
      The row, and bytes of it that are of the host's memory.
    """
    import jax

    shares_memory, num_devices = backend.here().shares_memory, jax.device_count()
    try:
        config = architecture_of(model)
        draft = None if engine.draft_model is None else architecture_of(engine.draft_model)
        dtype = engine.dtype or backend.here().dtype
        plan = make_plan(config, engine, dtype=dtype, device_bytes=sys.maxsize, draft=draft)
    except (CaJaxError, OSError, ValueError) as error:
        return Row("model", "wrong", str(error), "name another --model, or other sizes"), 0
    wanted_bytes = sum(plan.parts.values())
    most_bytes = free_memory_bytes() if shares_memory else device_memory_bytes()
    parts = ", ".join(f"{num_bytes / GIB:.2f} for {name}" for name, num_bytes in plan.parts.items())
    has = "an unknown size" if most_bytes is None else f"{most_bytes / GIB:.2f}"
    found = f"{wanted_bytes / GIB:.2f} GiB of {'memory' if shares_memory else 'each device'}, which has {has}: {parts}"
    mend = ""
    if plan.num_devices > num_devices:
        found, mend = f"it is asked for {plan.num_devices} devices, there are {num_devices}", "a smaller mesh"
    elif most_bytes is not None and wanted_bytes > most_bytes:
        mend = "a smaller --context_window, --max_batch_size or --kv_pool_gib, or a larger --tensor_parallel_size"
    return Row("model", "wrong" if mend else "ok", found, mend), wanted_bytes if shares_memory else 0


def check_limits() -> Iterator[Row]:
    """Whether the process may have the files and the memory that it needs, and large pages."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _FEW_FILES
    mend = f"ulimit -n 65536 (LimitNOFILE= of a systemd unit; at most {hard} now)" if few else ""
    yield Row("open files", "warn" if few else "ok", f"at most {soft}", mend)
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        yield Row("address space", "warn", f"at most {most / GIB:.1f} GiB", "ulimit -v unlimited")
    try:
        pages = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        return
    never = "[never]" in pages
    mend = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: copies of KV are faster" if never else ""
    yield Row("large pages", "warn" if never else "ok", pages, mend)


def check_devices() -> Iterator[Row]:
    """Which devices jax finds, and whether there is a GPU that it does not."""
    try:
        import jax

        devices = jax.devices()
    except Exception as error:  # Whatever a plugin raises: that is what is wrong.
        yield Row("devices", "wrong", f"jax finds none: {error}", "mend the driver, or set JAX_PLATFORMS=cpu")
        return
    found = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    if devices[0].platform == "cpu" and Path("/dev/nvidiactl").exists():
        yield Row("devices", "warn", f"{found}, but there is an NVIDIA GPU", "pip install 'ca-jax[cuda12]'")
    else:
        yield Row("devices", "ok", found)


def check_port(host: str, port: int) -> Iterator[Row]:
    """Whether the server's port is free."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], address[1]) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address[4])
    except OSError as error:
        mend = "end what listens there, or set another --port or --host"
        yield Row("port", "wrong", f"{host}:{port} cannot be listened on: {error.strerror or error}", mend)
        return
    yield Row("port", "ok", f"{host}:{port} is free")


def check_packages() -> Iterator[Row]:
    """Which extras are missing, and whether required packages have versions that are asked for."""
    for extra, modules in _EXTRAS.items():
        missing = [name for name in modules if not _is_there(name)]
        needed: State = "wrong" if extra == "serve" else "warn"
        if missing:
            yield Row(f"extra {extra}", needed, f"no {', '.join(missing)}", f"pip install 'ca-jax[{extra}]'")
        else:
            yield Row(f"extra {extra}", "ok", "installed")
    installed = [extra for extra, modules in _EXTRAS.items() if all(map(_is_there, modules))]
    clashes = list(version_clashes(importlib.metadata.requires("ca-jax") or [], installed))
    mend = "pip install --upgrade ca-jax, or with -c constraints.txt of a checkout" if clashes else ""
    yield Row("versions", "wrong" if clashes else "ok", "; ".join(clashes) or "as ca-jax asks for", mend)


def version_clashes(required: Sequence[str], extras: Collection[str] = ()) -> Iterator[str]:
    """Packages that are required here, always or by one of some extras, and are missing or of another version."""
    for each in map(Requirement, required):
        if each.marker is not None and not any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        try:
            found = importlib.metadata.version(each.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{each.name}{each.specifier} is missing"
            continue
        if not each.specifier.contains(found, prereleases=True):
            yield f"{each.name} must be {each.specifier}, got {found}"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def check_sizes(engine: EngineConfig, auto: Collection[str], model: str | None) -> Iterator[Row]:
    """What the model, the DRAM tier and the SSD tier take of this machine; sizes that are `auto` are worked out."""
    needed_bytes = 0
    if model is not None:
        row, needed_bytes = check_model(model, engine)
        yield row
    store = engine.store
    for name in auto:
        try:
            store = sized(store, [name], needed_bytes)
        except FlagError as error:
            yield Row(name, "wrong", str(error), f"name a size in --{name}")
            continue
        less = " less what a model takes, which --model=NAME says" if name == "dram_gib" and model is None else ""
        yield Row(name, "ok", f"auto is {getattr(store, name):g} GiB{less}")
    yield from check_memory(store.dram_gib, needed_bytes)
    directory = store.ssd_directory
    yield from check_disk(None if directory is None else directory.resolve(), store.ssd_gib)


def diagnose(
    engine: EngineConfig, *, auto: Collection[str] = (), model: str | None = None, host: str, port: int
) -> list[Row]:
    """Everything that is looked at, in order; starts jax's backend.

    Args:
      engine: as it will be served.
      auto: sizes of it that follow from the machine: `dram_gib`, `ssd_gib`.
      model: as `--model` names it; None: what it takes is not looked at.
      host: that the server will listen on.
      port: likewise.
    """
    devices = list(check_devices())
    rest = (check_sizes(engine, auto, model), check_limits(), check_port(host, port), check_packages())
    return [*devices, *(row for check in rest for row in check)]


def define_flags() -> None:
    """Defines the flags; those of the engine and addresses are as of `ca_jax serve`."""
    flags.DEFINE_string("model", None, "Also say what the engine takes for this model, as `serve` loads it.")
    flags.DEFINE_string("host", "127.0.0.1", "Address that the server will listen on.")
    flags.DEFINE_integer("port", 8000, "Port that it will listen on.", 0, 65535)
    flags.DEFINE_boolean("json", False, "Print rows as JSON.")
    _ENGINE.define()


def main(_: Sequence[str]) -> int:
    """Prints what was found; the exit code is 1 where something is wrong."""
    rows = diagnose(_ENGINE.read(), auto=sizes_to_find(), model=FLAGS.model, host=FLAGS.host, port=FLAGS.port)
    if FLAGS.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        cells = [(row.name, row.state, row.found, row.mend) for row in rows]
        make_console().print(make_table(("", "", "found", "what to do"), cells))
    return int(any(row.state == "wrong" for row in rows))


if __name__ == "__main__":
    define_flags()
    run(main)
