"""What is said of the machine and of versions."""

import datetime
import importlib.metadata
import json
import os
import platform

from ca_jax.launch import machine


def test_the_description_is_of_this_process_and_fits_json(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = machine.describe_machine()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["cpu"]
    assert 1 <= found["cores"] <= os.cpu_count()
    assert found["memory_gib"] > 0.1
    assert found["os"] == platform.platform()
    assert found["environment"]["OMP_NUM_THREADS"] == "3"
    assert datetime.datetime.fromisoformat(found["date"]).utcoffset() == datetime.timedelta(0)


def test_the_cpu_is_named_by_the_kernel_where_it_says(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nmodel\t\t: 17\nmodel name\t: Foo 3000 @ 2 GHz\nprocessor\t: 1\nmodel name\t: Bar\n"
    )
    monkeypatch.setattr(machine, "_CPU_INFO", info)
    assert machine.describe_machine()["cpu"] == "Foo 3000 @ 2 GHz"
    info.write_text("Features\t: fp asimd\n")  # as on Arm
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert machine.describe_machine()["cpu"] == platform.machine()


def test_versions_are_of_what_is_installed():
    found = machine.describe_versions(("numpy", "no-such-package-here"))
    assert found == {
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
        "no-such-package-here": None,
    }
    assert {"jax", "jaxlib", "flax", "numpy", "tensorstore"} <= set(machine.describe_versions())


def test_the_summary_names_an_accelerator_and_leaves_out_what_is_not_known():
    known = {"cpu": "Foo", "cores": 2, "memory_gib": 23.4, "platform": "cpu", "device": "cpu", "num_devices": 1}
    assert machine.summarize_machine(known) == "Foo, 2 cores, 23 GiB"
    gpu = known | {"memory_gib": None, "platform": "gpu", "device": "Bar 100", "num_devices": 4}
    assert machine.summarize_machine(gpu) == "Foo, 2 cores, 4 x Bar 100"
