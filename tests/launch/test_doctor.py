"""The doctor names what is wrong, and sizes follow from what a machine has."""

import dataclasses
import json
import os
import socket

import pytest
from absl import flags

from ca_jax.launch import doctor, serve, sizes
from ca_jax.launch.flags import FlagError
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
    assert rows.keys() == {"ssd permissions", "ssd room", "ssd speed"}
    assert rows["ssd permissions"] == rows["ssd room"] == "ok"
    assert not list(tmp_path.iterdir())
    assert states(doctor.check_disk(tmp_path, 1e9))["ssd room"] == "warn"
    (tmp_path / "file").touch()
    assert states(doctor.check_disk(tmp_path / "file" / "below", 1.0)) == {"ssd permissions": "wrong"}
    assert states(doctor.check_disk(None, 1.0)) == {"ssd": "warn"}


def test_versions_that_clash_are_named():
    clashes = list(
        doctor.version_clashes(["numpy>=99", "numpy<1.0", "numpy>=1.2", "not-there>=1", 'x>=1; extra == "y"'])
    )
    assert [each.split()[0] for each in clashes] == ["numpy", "numpy", "not-there>=1"]
    assert states(doctor.check_packages())["versions"] == "ok"


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
    (tmp_path / "blocks").write_bytes(os.urandom(64 << 20))  # What the store has there already is its own.
    assert sizes.sized(store, ("ssd_gib",), 0).ssd_gib == pytest.approx(80.05)
    with pytest.raises(FlagError, match="dram_gib=auto must find"):
        sizes.sized(store, ("dram_gib",), needed_bytes=12 * GIB)
    with pytest.raises(FlagError, match="ssd_dir must be given"):
        sizes.sized(StoreConfig(), ("ssd_gib",), 0)


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
    with pytest.raises(flags.IllegalFlagValueError, match="dram_gib"):
        values(["serve", "--dram_gib=automatic"])
