"""The files in deploy/: flags that they give are served, metrics that they name are told, and linters find nothing."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from absl import flags
from prometheus_client.parser import text_string_to_metric_families

from ca_jax.engine import Engine
from ca_jax.kv.costs import PrefillRate, Rates, TransferRate
from ca_jax.launch import serve
from ca_jax.storage.records import MissReason
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.conftest import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
COMPOSE, KUBERNETES = DEPLOY / "compose.yml", DEPLOY / "kubernetes" / "ca-jax.yaml"
UNIT = DEPLOY / "systemd" / "ca-jax.service"
DASHBOARD, ALERTS = DEPLOY / "grafana" / "ca_jax.json", DEPLOY / "prometheus" / "alerts.yml"
_NAME = re.compile(r"\b((?:vllm|ca_jax):\w+)(?:\{([^}]*)\})?")


def expressions():
    """All expressions of the dashboard and of the alerts."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    alerts = yaml.safe_load(ALERTS.read_text())["groups"]
    told = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return told + [rule["expr"] for group in alerts for rule in group["rules"]]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Samples of a server that has answered, refused, stored and lost something: label names by metric."""
    store = sk.ssd_store(tmp_path_factory.mktemp("ssd"), dram_gib=12 * kit.BLOCK_TOKENS * kit.TOKEN_BYTES / 2**30)
    labels = {}
    line = TransferRate(bytes_per_s=1e9)
    rates = Rates(num_layers=2, layer_token_bytes=64, load=line, save=line, prefill=PrefillRate(token_s=1e-3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "rates", property(lambda engine: rates))  # To measure them takes a warm engine.
        with sk.running(store=store) as server, server.client() as client, server.http() as http:
            for number in range(6):  # The second turn of each loads what the first one stored.
                said = [sk.user(f"{number} is said here at some length " * 2)]
                sk.chat(client, [*said, sk.assistant(sk.text_of(sk.chat(client, said))), sk.user("and then?")])
            http.post("/v1/chat/completions", json={})
            sk.wait_until_idle(server)
            for family in text_string_to_metric_families(http.get("/metrics").text):
                labels.setdefault(family.name, set())
                if family.type == "counter":
                    labels.setdefault(f"{family.name}_total", set())
                for sample in family.samples:
                    labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_every_metric_and_label_of_dashboard_and_alerts_is_one_that_a_server_tells(told):
    assert len(expressions()) > 30
    for expression in expressions():
        found = _NAME.findall(expression)
        assert found or expression.startswith("up{"), expression
        by = {name for each in re.findall(r"by \(([^)]*)\)", expression) for name in re.findall(r"\w+", each)}
        known = by if not found else set()
        for name, of_name in found:
            assert name in told, f"{name} is not told: {expression}"
            known |= told[name]
            of_labels = set(re.findall(r"(\w+)\s*=", of_name))
            assert of_labels <= told[name], expression
        assert by - {"instance", "le"} <= known, expression
        if "le" in by:
            assert all(name.endswith("_bucket") for name, _ in found), expression


def test_reasons_that_alerts_name_are_there():
    (reasons,) = re.findall(r'reason=~"([^"]*)"', ALERTS.read_text())
    assert set(reasons.split("|")) <= {str(reason) for reason in MissReason}


def test_expressions_are_balanced_and_panels_do_not_overlap():
    for expression in expressions():
        assert all(expression.count(a) == expression.count(b) for a, b in ("()", "[]", "{}")), expression
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in panels})


def served(arguments):
    """What `ca_jax serve` makes of flags."""
    values = flags.FlagValues()
    serve.define_flags(values)
    values(["serve", *(each for each in arguments if not each.startswith("--api_keys_file"))])
    return values, *serve.read_flags(values)[1:]


def flags_of_image():
    text = (DEPLOY / "Dockerfile").read_text()
    entry, command = (
        json.loads(re.search(rf"^{name} (\[.*\])$", text, re.MULTILINE)[1]) for name in ("ENTRYPOINT", "CMD")
    )
    assert entry[:2] == ["ca_jax", "serve"]
    return entry[2:], command


def test_the_image_serves_on_its_port_as_another_user():
    entry, command = flags_of_image()
    values, config, engine = served([*entry, *command])
    text = (DEPLOY / "Dockerfile").read_text()
    assert f"EXPOSE {values['port'].value}\n" in text
    assert f"VOLUME {engine.store.ssd_dir}\n" in text
    assert serve.sizes_to_find(values) == ["dram_gib", "ssd_gib"]
    assert config.access_log == "-"
    assert re.search(r"^USER [1-9]\d*$", text, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK --start-period=\d+m .*", text, re.MULTILINE)
    for name in re.search(r"^COPY (pyproject.*) \./$", text, re.MULTILINE)[1].split():
        assert (REPOSITORY / name).is_file()


def test_compose_gives_flags_that_are_served_and_lets_the_server_end():
    compose = yaml.safe_load(COMPOSE.read_text())
    server = compose["services"]["server"]
    values, config, engine = served([*flags_of_image()[0], *server["command"]])
    assert server["ports"] == [f"127.0.0.1:{values['port'].value}:{values['port'].value}"]
    assert f"kv:{engine.store.ssd_dir}" in server["volumes"]
    assert config.shutdown_grace_s < 120
    assert server["stop_grace_period"] == "2m"
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    (target,) = scraped["static_configs"][0]["targets"]
    assert target.partition(":")[0] in config.allowed_hosts  # Else it would be refused.
    assert f'up{{job="{scraped["job_name"]}"}}' in ALERTS.read_text()


def test_kubernetes_probes_mounts_and_drains_what_is_served():
    service, kept = yaml.safe_load_all(KUBERNETES.read_text())
    pod = kept["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    values, config, engine = served([*flags_of_image()[0], *container["args"]])
    assert container["ports"][0]["containerPort"] == values["port"].value == service["spec"]["ports"][0]["port"]
    assert service["spec"]["selector"] == kept["spec"]["template"]["metadata"]["labels"]
    assert service["metadata"]["name"] == kept["spec"]["serviceName"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 600
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    claimed = {each["metadata"]["name"] for each in kept["spec"]["volumeClaimTemplates"]}
    assert mounted.keys() == claimed | {each["name"] for each in pod["volumes"]}
    assert mounted["kv"] == engine.store.ssd_dir
    waits_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1]) + config.shutdown_grace_s
    assert waits_s < pod["terminationGracePeriodSeconds"]
    assert f"USER {pod['securityContext']['runAsUser']}\n" in (DEPLOY / "Dockerfile").read_text()


def test_the_unit_gives_flags_that_are_served_and_lets_the_server_end():
    unit = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#")
    words = shlex.split(unit["ExecStart"])
    assert words[:2] == ["/opt/ca_jax/bin/ca_jax", "serve"]
    _, config, engine = served(words[2:])
    assert config.shutdown_grace_s < int(unit["TimeoutStopSec"])
    assert engine.store.ssd_dir.startswith(f"/var/lib/{unit['StateDirectory']}/")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path):
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/ca_jax/bin/ca_jax", sys.executable))
    ended = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(importlib.util.find_spec("check_jsonschema") is None, reason="check-jsonschema is not installed")
def test_compose_is_as_its_specification_says():
    schema = ["--builtin-schema", "vendor.compose-spec"]
    command = [sys.executable, "-m", "check_jsonschema", *schema, COMPOSE]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize(("tool", "arguments"), [("hadolint", [DEPLOY / "Dockerfile"]), ("kubeconform", [KUBERNETES])])
def test_linters_find_nothing(tool, arguments):
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    ended = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
