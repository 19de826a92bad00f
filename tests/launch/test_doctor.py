"""The doctor names what is wrong, and sizes follow from what a machine has."""

import dataclasses
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from ca_jax.config import EngineConfig
from ca_jax.device.adapters import array_bytes
from ca_jax.launch import doctor, serve, sizes
from ca_jax.launch.flags import FlagError
from ca_jax.launch.plan import make_plan
from ca_jax.serving.core import adapter_sizes
from ca_jax.storage.config import GIB, StoreConfig
from tests import engine_kit as kit
from tests.scripts_kit import run_script


def states(rows):
    return {row.name: row.state for row in rows}


def test_a_port_that_is_taken_and_memory_that_is_not_there_are_wrong():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert states(doctor.check_port("127.0.0.1", port)) == {"port": "wrong"}
    assert states(doctor.check_port("127.0.0.1", port)) == {"port": "ok"}
    assert states(doctor.check_memory(1e6)) == {"memory": "wrong"}
    assert states(doctor.check_memory(0.0)) == {"memory": "ok"}


def test_a_directory_is_tried_and_left_as_it_was(tmp_path):
    rows = states(doctor.check_disk(tmp_path / "not" / "there", 1e-3))
    assert rows.keys() == {"ssd", "ssd room"}
    assert rows["ssd"] != "wrong"
    assert rows["ssd room"] == "ok"
    assert not list(tmp_path.iterdir())
    assert states(doctor.check_disk(tmp_path, 1e9))["ssd room"] == "warn"
    (tmp_path / "file").touch()
    assert states(doctor.check_disk(tmp_path / "file" / "below", 1.0)) == {"ssd": "wrong"}
    assert states(doctor.check_disk(None, 1.0)) == {"ssd": "warn"}


def test_a_directory_that_takes_no_file_is_wrong_in_one_row_whoever_asks():
    found = list(doctor.check_disk(Path("/proc/not/there"), 1.0))  # Where root may write, by its permissions.
    assert states(found) == {"ssd": "wrong"}
    assert "/proc:" in found[0].found


def test_versions_that_clash_are_named():
    required = ["numpy>=99", "numpy<1.0", "numpy>=1.2", "numpy~=1.0", f"numpy!={np.__version__}", "not-there>=1"]
    clashes = list(doctor.version_clashes([*required, "x>=1; sys_platform == 'win32'"]))
    assert [each.split()[0] for each in clashes] == ["numpy", "numpy", "numpy", "numpy", "not-there>=1"]
    assert clashes[-2] == f"numpy must be !={np.__version__}, got {np.__version__}"
    assert states(doctor.check_packages())["versions"] == "ok"


def test_versions_that_an_installed_extra_asks_for_count():
    required = ["uvicorn>=99; extra == 'serve'", "numpy>=99; sys_platform != 'win32' and extra == 'plot'"]
    assert [each.split()[0] for each in doctor.version_clashes(required, ["serve", "events"])] == ["uvicorn"]
    assert list(doctor.version_clashes(required)) == []


def test_sizes_that_are_auto_are_worked_out(monkeypatch, tmp_path):
    monkeypatch.setattr(sizes, "free_memory_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(sizes, "free_disk_bytes", lambda directory: 21 * GIB)
    ended = run_script("doctor", "--json", f"--ssd_dir={tmp_path}", "--dram_gib=auto", "--ssd_gib=auto")
    rows = {row["name"]: row["found"] for row in json.loads(ended.out)}
    assert rows["dram_gib"] == "auto is 8 GiB less what a model takes, which --model=NAME says"
    assert rows["ssd_gib"] == "auto is 16 GiB"


def test_what_a_model_takes_is_held_against_what_there_is(monkeypatch, tmp_path):
    kit.write_tiny_model(tmp_path)
    engine = EngineConfig(context_window=64, write_buffer_gib=0.1)
    plan = make_plan(doctor.architecture_of(str(tmp_path)), engine, dtype="float32", device_bytes=GIB)
    row, needed_bytes = doctor.check_model(str(tmp_path), engine)
    assert (row.state, needed_bytes) == ("ok", sum(plan.parts.values()))
    assert f"{plan.parts['the weights'] / GIB:.2f} for the weights" in row.found
    assert f"{needed_bytes / GIB:.2f} GiB of memory" in row.found
    too_large = EngineConfig(context_window=64, write_buffer_gib=1e6)
    assert doctor.check_model(str(tmp_path), too_large)[0].state == "wrong"
    assert doctor.check_model(str(tmp_path), EngineConfig(tensor_parallel_size=2))[0].state == "wrong"
    assert doctor.check_model(str(tmp_path / "nothing"), engine)[0].state == "wrong"
    monkeypatch.setattr(sizes, "free_memory_bytes", lambda: GIB)
    found = {row.name: row for row in doctor.check_sizes(engine, ["dram_gib"], str(tmp_path))}
    assert found["dram_gib"].found == f"auto is {int((GIB - needed_bytes) / GIB * 80) / 100:g} GiB"


def test_an_architecture_is_told_without_reading_weights(tmp_path):
    kit.write_tiny_model(tmp_path)
    told = doctor.architecture_of(str(tmp_path))
    for each in tmp_path.glob("*.safetensors"):
        each.unlink()
    assert doctor.architecture_of(str(tmp_path)) == told
    assert doctor.architecture_of("smollm2-135m-instruct").num_layers == 30


@pytest.mark.slow
def test_the_command_ends_with_1_where_something_is_wrong(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        asked = ["--json", f"--ssd_dir={tmp_path}", f"--port={taken.getsockname()[1]}"]
        ended = run_script("doctor", *asked)
    assert ended.code == 1
    assert {row["name"]: row["state"] for row in json.loads(ended.out)}["port"] == "wrong"


def cgroup(directory, most, used, cache):
    directory.mkdir()
    (directory / "memory.max").write_text(f"{most}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    return directory


def test_free_memory_is_the_machines_or_what_a_cgroup_leaves(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    limited = cgroup(tmp_path / "limited", 500 << 10, 300 << 10, 100 << 10)
    assert sizes.free_memory_bytes(tmp_path, limited) == 300 << 10
    assert sizes.free_memory_bytes(tmp_path, cgroup(tmp_path / "free", "max", 300, 100)) == 800 << 10
    assert sizes.free_memory_bytes(tmp_path / "nowhere", tmp_path / "nowhere") is None


def test_sizes_follow_from_what_is_free(monkeypatch, tmp_path):
    monkeypatch.setattr(sizes, "free_memory_bytes", lambda: 12 * GIB)
    monkeypatch.setattr(sizes, "free_disk_bytes", lambda directory: 101 * GIB)
    store = StoreConfig(ssd_dir=str(tmp_path), ssd_free_floor_gib=1.0)
    found = sizes.sized(store, ("dram_gib", "ssd_gib"), needed_bytes=2 * GIB)
    assert (found.dram_gib, found.ssd_gib) == (8.0, 80.0)
    assert sizes.sized(store, (), 0) == store
    with pytest.raises(FlagError, match="dram_gib=auto must find"):
        sizes.sized(store, ("dram_gib",), needed_bytes=12 * GIB)
    with pytest.raises(FlagError, match="ssd_dir must be given"):
        sizes.sized(StoreConfig(), ("ssd_gib",), 0)


def test_only_blocks_of_the_store_are_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(sizes, "free_disk_bytes", lambda directory: 2 * GIB)
    (tmp_path / "others.bin").write_bytes(bytes(64 << 20))
    (tmp_path / "blocks-of-others").mkdir()
    (tmp_path / "blocks-of-others" / "b").write_bytes(bytes(64 << 20))
    store = StoreConfig(ssd_dir=str(tmp_path), ssd_free_floor_gib=1.0, dram_gib=0.05, block_tokens=16)
    assert sizes.block_disk_bytes(tmp_path) == 0
    assert sizes.sized(store, ("ssd_gib",), 0).ssd_gib == 0.8
    with kit.small_engine(store=store) as engine:
        kit.say(engine.session(session_id="own"), "Tell me about tides.", 4)
        engine.wait_for_saves()
        fingerprint = engine.model.fingerprint
    own = sizes.block_disk_bytes(tmp_path)
    assert 0 < own == sizes.block_disk_bytes(tmp_path, fingerprint)
    assert sizes.block_disk_bytes(tmp_path, "of another model") == 0
    assert sizes.sized(store, ("ssd_gib",), 0).ssd_gib == int((GIB + own) / GIB * 80) / 100


def test_start_up_lines_say_the_sizes_that_were_worked_out(tmp_path):
    kit.write_tiny_model(tmp_path / "model")
    flags_given = [f"--model={tmp_path / 'model'}", "--dram_gib=auto", f"--ssd_dir={tmp_path / 'kv'}", "--ssd_gib=auto"]
    small = ["--context_window=64", "--write_buffer_gib=0.1", "--nowarmup", "--port=0"]
    command = [sys.executable, "-m", "ca_jax.launch.serve", *flags_given, *small]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as serving:
        lines = []
        for line in serving.stderr:
            lines.append(line)
            if line.startswith("ready:"):
                serving.terminate()
    told = "".join(lines)
    for name in ("dram_gib", "ssd_gib"):
        sizes_told = re.findall(rf"\b{name}=([\d.]+)", told)
        assert len(sizes_told) == 2, told
        assert len(set(map(float, sizes_told))) == 1, told
    assert "EngineConfig(" in told


def test_auto_makes_an_engine_of_the_size_that_was_found(monkeypatch, tmp_path):
    kit.write_tiny_model(tmp_path)
    monkeypatch.setattr(sizes, "free_memory_bytes", lambda: GIB)
    values = flags.FlagValues()
    serve.define_flags(values)
    values(["serve", "--dram_gib=auto", "--ssd_gib=0.5", "--context_window=64"])
    config = serve.read_flags(values)[2]
    assert serve.sizes_to_find(values) == ["dram_gib"]
    assert config.store.ssd_gib == 0.5
    small = dataclasses.replace(config, write_buffer_gib=0.1, compile_cache_dir=None)
    with serve.make_sized(str(tmp_path), small, ["dram_gib"]) as engine:
        assert 0.5 < engine.config.store.dram_gib < 0.8
        assert engine.store_stats().capacity_bytes <= engine.config.store.dram_bytes
        found_gib, model = engine.config.store.dram_gib, engine.model
    adapted = dataclasses.replace(small, max_adapters=512)
    taken = array_bytes(model.config, adapter_sizes(adapted), model.dtype, None)
    with serve.make_sized(str(tmp_path), adapted, ["dram_gib"]) as engine:
        assert 0.05 < 0.7 * taken / GIB < found_gib - engine.config.store.dram_gib < 1.2 * taken / GIB
    with pytest.raises(flags.IllegalFlagValueError, match="dram_gib"):
        values(["serve", "--dram_gib=automatic"])
