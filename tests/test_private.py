"""What is used of dependencies without their promise is there, does what it did, and is used in one place."""

import ast
import collections
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ca_jax.errors import ProcessesError
from ca_jax.private import gguf_reader
from ca_jax.private.key_values import KeyValues
from ca_jax.storage.config import StoreConfig
from ca_jax.testing import tiny
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit
from tests import gguf_kit, private_kit
from tests.test_imports import imports_of
from tests.test_two_processes import free_address

REPOSITORY = Path(__file__).resolve().parents[1]


def is_private(name: str) -> bool:
    """Whether a name that is imported is jax's own business, or has a part that begins with an underscore."""
    parts = name.split(".")
    outside = parts[0] not in ("ca_jax", "tests", "benchmarks", "tools", "__future__")
    return outside and (any(part.startswith("_") for part in parts) or name.startswith(("jaxlib.", "jax.lib")))


def test_private_names_are_imported_in_one_place_of_the_package_and_one_of_the_tests():
    folders = [REPOSITORY / name for name in ("ca_jax", "benchmarks", "tools", "tests")]
    places = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (path for folder in folders for path in folder.rglob("*.py"))
        if any(map(is_private, imports_of(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert places == {"ca_jax/private/key_values.py", "tests/private_kit.py"}


@pytest.mark.parametrize(
    ("name", "expected"), [("jax._src.lib", True), ("jaxlib.xla_client", True), ("jax.lax", False)]
)
def test_a_private_name_is_known_as_one(name, expected):
    assert is_private(name) == expected


# Key-values.


def test_key_values_need_processes():
    with pytest.raises(ProcessesError, match="initialize must be called before"):
        KeyValues()


def say_what_key_values_do(address: str) -> None:
    """In a process of its own."""
    jax.distributed.initialize(address, 1, 0)
    values, timeout_s = KeyValues(), 0.05
    values.set("one", "text, also of λ")
    assert values.get("one", timeout_s) == "text, also of λ"
    with pytest.raises(jax.errors.JaxRuntimeError):
        values.set("one", "another text")
    values.delete("one")
    with pytest.raises(jax.errors.JaxRuntimeError):
        values.get("one", timeout_s)
    values.set("one", "again")
    assert values.get("one", timeout_s) == "again"


def test_key_values():
    code = "import sys; from tests.test_private import say_what_key_values_do as run; run(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, free_address()], cwd=REPOSITORY, check=True, timeout=120)


# The interpreter's end.


def leave_an_engine_open(directory: str) -> None:
    """In a process of its own, which ends behind it."""
    engine = kit.small_engine(store=StoreConfig(dram_gib=0.01, ssd_dir=directory, ssd_gib=0.1))
    globals()["left"] = engine  # It lives until the interpreter ends.
    session = engine.session(session_id="left open")
    list(session.send_ids([1, 2, 3] * 10, sampling=SamplingParams(max_tokens=4, ignore_eos=True)))


def test_an_engine_that_is_left_open_keeps_its_sessions(tmp_path):
    code = "import sys; from tests.test_private import leave_an_engine_open as run; run(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=240)
    assert "Traceback" not in ended.stderr
    with kit.small_engine(store=StoreConfig(dram_gib=0.01, ssd_dir=str(tmp_path), ssd_gib=0.1)) as engine:
        assert engine.stored.find("left open").ssd_tokens == 33


# The reader of GGUF files.


class Counted(gguf_reader.Reader):
    """Counts which of the steps that are ours the package's reader takes."""

    def __init__(self, path: Path) -> None:
        self.steps = collections.Counter()
        super().__init__(path)

    def _get_field_parts(self, *arguments):
        self.steps["fields"] += 1
        return super()._get_field_parts(*arguments)

    def _build_tensors(self, *arguments):
        self.steps["tensors"] += 1
        return super()._build_tensors(*arguments)


def test_the_reader_finds_what_the_package_finds_by_steps_of_its_own(tmp_path):
    path = gguf_kit.write_tiny(tmp_path / "tiny.gguf", tiny.tiny_config())
    ours, theirs = Counted(path), gguf.GGUFReader(path)
    of_file = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    assert ours.steps == {"fields": len(theirs.fields.keys() - of_file), "tensors": 1}
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert ours.fields[name].types == field.types, name
        assert ours.fields[name].contents() == field.contents(), name
    assert any(field.types[0] == gguf.GGUFValueType.ARRAY for field in theirs.fields.values())
    assert [tensor.name for tensor in ours.tensors] == [tensor.name for tensor in theirs.tensors]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        np.testing.assert_array_equal(mine.data, other.data)


# Races on a TPU.


@pytest.mark.parametrize("waits_first", [True, False])
def test_the_interpreter_sees_a_read_of_what_is_still_copied(waits_first):
    def kernel(source, out, room, semaphore):
        copy = pltpu.make_async_copy(source, room, semaphore)
        copy.start()
        if waits_first:
            copy.wait()
        out[...] = room[...]
        if not waits_first:
            copy.wait()

    pltpu.reset_tpu_interpret_mode_state()
    x = jnp.ones((8, 128), jnp.float32)
    run = pl.pallas_call(
        kernel,
        out_shape=x,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=private_kit.watching_races(),
    )
    jax.block_until_ready(run(x))
    assert private_kit.races_found() == (not waits_first)
    pltpu.reset_tpu_interpret_mode_state()
    assert not private_kit.races_found()
