"""What the host holds of a model while it is loaded or converted: its largest leaf, however many others there are."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ca_jax.launch.convert import convert
from ca_jax.models.checkpoint import load_checkpoint
from ca_jax.testing import tiny
from tests import gguf_kit

MIB = 1 << 20
CONFIG = tiny.tiny_config(
    vocab_size=12288, embed_dim=512, mlp_dim=3072, num_layers=3, num_heads=16, num_kv_heads=16, head_dim=64
)
LARGEST = 24 * MIB  # The embedding in f32, and the head; all weights take 126 MiB.
TOTAL = 126 * MIB


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The same model in every format, f32."""
    root = tmp_path_factory.mktemp("models")
    params = tiny.tiny_params(CONFIG)
    paths = {"safetensors": tiny.write_tiny_hf(root / "wide", CONFIG, params)}
    paths["gguf"] = gguf_kit.write(paths["safetensors"], root / "wide.gguf")
    convert(str(paths["safetensors"]), root / "converted", "float32")
    paths["orbax"] = root / "converted"
    return paths


class Dropping:
    """A destination that keeps nothing, and counts what is in its hands."""

    def __init__(self):
        self.now = self.most = self.total = 0
        self._lock = threading.Lock()

    def __call__(self, leaf):
        with self._lock:
            self.now += leaf.nbytes
            self.total += leaf.nbytes
            self.most = max(self.most, self.now)
        array = leaf.read()
        assert array.nbytes == leaf.nbytes
        with self._lock:
            self.now -= leaf.nbytes


@pytest.mark.parametrize(("name", "dtype"), [("safetensors", "float32"), ("gguf", "float32"), ("orbax", "bfloat16")])
def test_the_leaves_being_read_take_no_more_than_the_largest(models, name, dtype):
    dropping = Dropping()
    load_checkpoint(str(models[name]), dtype=dtype, destinations=lambda config: dropping)
    itemsize = 4 if dtype == "float32" else 2
    assert dropping.most == LARGEST // 4 * itemsize
    assert dropping.total >= TOTAL // 4 * itemsize


RESIDENT = """
import sys, threading
from pathlib import Path
from ca_jax.launch.convert import convert
from ca_jax.models.checkpoint import load_checkpoint

def resident_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

def grown(function, *args):
    peak = before = resident_bytes()
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    function(*args)
    done.set()
    watcher.join()
    return peak - before

def load(source):
    load_checkpoint(source, destinations=lambda config: lambda leaf: leaf.read() is None)

source, gguf, small, root = sys.argv[1:]
for name, model in (("small", small), ("large", source)):
    converted = Path(root) / name
    told = [grown(convert, model, converted, "float32"), grown(load, str(converted)), grown(load, model)]
print("resident", *told, grown(load, gguf))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_resident_memory_grows_by_little_more(models, tmp_path):
    small = tiny.write_tiny_hf(tmp_path / "tiny", tiny.tiny_config(), tiny.tiny_params(tiny.tiny_config()))
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, *map(str, (models["safetensors"], models["gguf"], small, tmp_path))],
        # What is freed goes back to the system at once, instead of to glibc's own pools.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_TRIM_THRESHOLD_": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = map(int, done.stdout.split("resident ")[1].split())
    for name, grown in zip(("converting", "orbax", "safetensors", "gguf"), told, strict=True):
        assert grown < 1.2 * LARGEST + 24 * MIB < TOTAL / 2, f"{name} grew by {grown / MIB:.0f} MiB"
