"""Says what of this machine stands in the way of serving, and which flag or setting mends it.

    ca_jax doctor --ssd_dir=~/kv --port=8000
    ca_jax doctor --json

It writes and removes one file of 64 MiB in --ssd_dir, and changes nothing else. The exit code is 1 where something is
wrong, 0 where there are warnings at most.

Not here: what a model takes of each device (`ca_jax plan`), how fast it is (`ca_jax bench`).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from absl import flags

from ca_jax.launch.script import make_console, make_table, run
from ca_jax.launch.sizes import free_disk_bytes, free_memory_bytes
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
_REQUIRED = re.compile(r"^([\w.-]+)(?:\[[\w,-]+\])?\s*([^;]*)$")
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
    """Whether the SSD tier's directory can be written, has room, and how fast it is."""
    if directory is None:
        yield Row("ssd", "warn", "no --ssd_dir was given", "give --ssd_dir=DIR, or conversations end with the process")
        return
    made = directory
    while not made.exists():
        made = made.parent
    if not made.is_dir() or not os.access(made, os.W_OK | os.X_OK):
        wanted = "let this user write there, or name another --ssd_dir"
        yield Row("ssd permissions", "wrong", f"{made} is not a directory that user {os.getuid()} may write", wanted)
        return
    yield Row("ssd permissions", "ok", f"{made} may be written")
    free_gib = free_disk_bytes(made) / GIB
    if free_gib < ssd_gib:
        wanted = f"set --ssd_gib={max(int(free_gib * 0.8), 1)} or --ssd_gib=auto"
        yield Row("ssd room", "warn", f"{free_gib:.1f} GiB free, --ssd_gib={ssd_gib:g}", wanted)
    else:
        yield Row("ssd room", "ok", f"{free_gib:.1f} GiB free")
    try:
        write, read = disk_speed(made, _TRIED_BYTES)
    except OSError as error:
        yield Row("ssd speed", "wrong", f"a file cannot be written there: {error}", "free space, or name another disk")
        return
    found = f"{write / 1e6:,.0f} MB/s written durably, {read / 1e6:,.0f} MB/s read"
    is_slow = write < _SLOW_WRITE or read < _SLOW_READ
    mend = "name a local NVMe disk in --ssd_dir; KV is recomputed where that is faster" if is_slow else ""
    yield Row("ssd speed", "warn" if is_slow else "ok", found, mend)


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


def check_memory(dram_gib: float) -> Iterator[Row]:
    """Whether there is memory for the DRAM tier, which is taken at start."""
    free = free_memory_bytes()
    if free is None:
        yield Row("memory", "warn", "the system does not say how much is free", "")
        return
    free_gib = free / GIB
    if dram_gib > free_gib:
        found = f"{free_gib:.1f} GiB free, --dram_gib={dram_gib:g} is more"
        yield Row("memory", "wrong", found, f"set --dram_gib={max(int(free_gib * 0.6), 0)} or --dram_gib=auto")
    elif dram_gib > 0.8 * free_gib:
        found = f"{free_gib:.1f} GiB free, of which --dram_gib={dram_gib:g} leaves little for weights"
        yield Row("memory", "warn", found, "set --dram_gib=auto; ca_jax plan says what a model takes")
    else:
        yield Row("memory", "ok", f"{free_gib:.1f} GiB free for --dram_gib={dram_gib:g} and the model")


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
    clashes = list(version_clashes(importlib.metadata.requires("ca-jax") or []))
    mend = "pip install --upgrade ca-jax, or with -c constraints.txt of a checkout" if clashes else ""
    yield Row("versions", "wrong" if clashes else "ok", "; ".join(clashes) or "as ca-jax asks for", mend)


def version_clashes(required: Sequence[str]) -> Iterator[str]:
    """Packages that are required, without an extra, and are missing or of another version."""
    for each in required:
        match = _REQUIRED.match(each.strip())
        if match is None:  # Of an extra, or of another platform.
            continue
        name, wanted = match[1], match[2].strip()
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{name}{wanted} is missing"
            continue
        if not all(_fits(found, clause.strip()) for clause in wanted.split(",") if clause.strip()):
            yield f"{name} must be {wanted}, got {found}"


def _fits(found: str, clause: str) -> bool:
    match = re.match(r"(>=|<|==)\s*([\d.]+)$", clause)
    if match is None:
        return True
    numbers, bound = ([int(part) for part in re.findall(r"\d+", text)] for text in (found, match[2]))
    width = max(len(numbers), len(bound))
    left, right = (each + [0] * (width - len(each)) for each in (numbers, bound))
    return {">=": left >= right, "<": left < right, "==": left == right}[match[1]]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def diagnose(*, ssd_dir: Path | None, ssd_gib: float, dram_gib: float, host: str, port: int) -> list[Row]:
    """Everything that is looked at, in order; starts jax's backend."""
    checks: tuple[Callable[[], Iterator[Row]], ...] = (
        check_devices,
        lambda: check_memory(dram_gib),
        lambda: check_disk(ssd_dir, ssd_gib),
        check_limits,
        lambda: check_port(host, port),
        check_packages,
    )
    return [row for check in checks for row in check()]


def define_flags() -> None:
    """Defines the flags; sizes and addresses as of `ca_jax serve`."""
    flags.DEFINE_string("ssd_dir", None, "Directory that the SSD tier will have.")
    flags.DEFINE_float("ssd_gib", 8.0, "Room that it will have, GiB.", 0.0)
    flags.DEFINE_float("dram_gib", 2.0, "Room that the DRAM tier will have, GiB.", 0.0)
    flags.DEFINE_string("host", "127.0.0.1", "Address that the server will listen on.")
    flags.DEFINE_integer("port", 8000, "Port that it will listen on.", 0, 65535)
    flags.DEFINE_boolean("json", False, "Print rows as JSON.")


def main(_: Sequence[str]) -> int:
    """Prints what was found; the exit code is 1 where something is wrong."""
    directory = None if FLAGS.ssd_dir is None else Path(FLAGS.ssd_dir).expanduser().resolve()
    sizes = {"ssd_gib": FLAGS.ssd_gib, "dram_gib": FLAGS.dram_gib}
    rows = diagnose(ssd_dir=directory, host=FLAGS.host, port=FLAGS.port, **sizes)
    if FLAGS.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        cells = [(row.name, row.state, row.found, row.mend) for row in rows]
        make_console().print(make_table(("", "", "found", "what to do"), cells))
    return int(any(row.state == "wrong" for row in rows))


if __name__ == "__main__":
    define_flags()
    run(main)
