"""The files in examples/ that start a cluster: what they name is there, and their sizes go together."""

import importlib
import shlex
from pathlib import Path

import pytest
import yaml

from ca_jax.launch import cluster, serve
from ca_jax.launch.flags import FlagError
from tests.conftest import REPOSITORY
from tests.scripts_kit import run_script

COMPOSE = REPOSITORY / "examples" / "compose" / "compose.yaml"
RAYSERVICE = REPOSITORY / "examples" / "kubernetes" / "rayservice.yaml"


def config_of(arguments):
    """What the engine's store and the cluster are told by flags."""
    values = cluster.parse_args(arguments)
    return serve.read_flags(values)[2].store, cluster._CLUSTER.read(values)


def test_kubernetes_is_told_of_an_application_that_is_there_and_fits(monkeypatch, tmp_path):
    service = yaml.safe_load(RAYSERVICE.read_text())
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    assert getattr(importlib.import_module(module), name) is cluster.build
    keys = tmp_path / "keys.toml"
    keys.write_text('[lab]\nkeys = ["sk-secret-key"]\n')
    args = application["args"]
    mounted = Path(args["api_keys_file"])
    store, config = config_of([f"--{key}={value}" for key, value in {**args, "api_keys_file": keys}.items()])
    spec = service["spec"]["rayClusterConfig"]
    [workers] = spec["workerGroupSpecs"]
    heads, engines = (each["template"]["spec"] for each in (spec["headGroupSpec"], workers))
    for pod in (heads, engines):
        [container] = pod["containers"]
        assert {each["name"]: each["value"] for each in container["env"]} == cluster.RAY_SETTINGS
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert set(mounts.values()) <= {each["name"] for each in pod["volumes"]}
        assert str(mounted.parent) in mounts
    assert str(store.ssd_directory) in mounts
    cpus = int(container["resources"]["limits"]["cpu"])
    assert cpus >= config.cpus_per_replica
    assert workers["replicas"] * (cpus // config.cpus_per_replica) >= config.num_replicas
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert spec["authOptions"]["mode"] == "token"


def test_compose_starts_an_ingress_and_replicas_that_fit():
    services = yaml.safe_load(COMPOSE.read_text())
    ingress, replica = services["services"]["ingress"], services["services"]["replica"]
    words = shlex.split(ingress["command"][2])
    arguments = words[words.index("cluster") + 1 :]
    store, config = config_of(arguments)
    assert f"--port={cluster.parse_args(arguments)['port'].value}" in arguments
    assert [each.split(":") for each in replica["volumes"]] == [["kv", str(store.ssd_directory)]]
    assert set(services["volumes"]) >= {"kv"}
    started = dict(word.partition("=")[::2] for word in shlex.split(replica["command"]))
    assert int(started["--num-cpus"]) >= config.cpus_per_replica
    assert replica["deploy"]["replicas"] == config.num_replicas
    assert started["--address"] == "ingress:6379"
    assert "--port=6379" in words
    for service in (ingress, replica):
        assert service["environment"].items() >= {"RAY_AUTH_MODE": "token", **cluster.RAY_SETTINGS}.items()
        assert "[cluster]" in service["build"]["dockerfile_inline"]
    assert (COMPOSE.parent / ingress["build"]["context"] / "pyproject.toml").resolve() == REPOSITORY / "pyproject.toml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_replicas=0"], "num_replicas must be at least 1, got 0"),
        (["--min_replicas=3", "--max_replicas=2"], "max_replicas must be at least min_replicas"),
        (["--nonesuch=1"], "nonesuch"),
        (["--dram_gib=much"], "dram_gib"),
    ],
)
def test_wrong_args_of_a_config_file_are_refused(arguments, message):
    with pytest.raises(FlagError, match=message):
        config_of(arguments)


def test_without_ray_the_script_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    ran = run_script("cluster", "--model=nonesuch")
    assert (ran.code, "pip install 'ca-jax[cluster]'" in ran.err) == (2, True)
