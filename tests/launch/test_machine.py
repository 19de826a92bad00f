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
    gpu = {"cpu": "Foo", "cores": 2, "memory_gib": None, "platform": "gpu", "device": "Bar 100", "num_devices": 4}
    assert machine.summarize_machine(gpu) == "Foo, 2 cores, 4 x Bar 100"


def test_versions_are_of_what_is_installed():
    found = machine.describe_versions(("numpy", "no-such-package-here"))
    assert found == {
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
        "no-such-package-here": None,
    }
    assert {"jax", "jaxlib", "flax", "numpy", "tensorstore"} <= set(machine.describe_versions())
