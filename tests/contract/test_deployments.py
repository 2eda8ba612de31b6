"""What docker/ deploys: files that parse, options that exist, probes that are served."""

from __future__ import annotations

import ast
import configparser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import triptych
from triptych import cli
from triptych.core.http.auth import PUBLIC_ROUTES
from triptych.core.options.table import declared, make_config
from triptych.core.transport.supervisor import DRAIN_SLACK_S
from triptych.replicas.plan import ReplicaPlan

DOCKER = Path(__file__).parents[2] / "docker"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DOCKER / name).read_text(encoding="utf-8")))


def check_application(serve_config: dict[str, Any]) -> ReplicaPlan:
    """The application exists, and takes these options as `triptych serve` does."""
    (application,) = serve_config["applications"]
    module, _, builder = application["import_path"].partition(":")
    file = Path(triptych.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    functions = {each.name for each in ast.parse(file.read_text()).body if hasattr(each, "name")}
    assert builder in functions
    args = {
        name: tuple(given) if isinstance(given, list) else given
        for name, given in application["args"].items()
    }
    assert serve_config["http_options"] == {"host": "0.0.0.0", "port": 8000}
    return ReplicaPlan.of(make_config(args))


def test_the_serve_config_deploys_replicas() -> None:
    (config,) = documents("serve.yaml")
    plan = check_application(config)
    assert (plan.least, plan.most) == (2, 8)


def test_kuberay_deploys_the_same_on_workers_with_gpus() -> None:
    claim, service = documents("kuberay.yaml")
    assert (claim["kind"], service["kind"]) == ("PersistentVolumeClaim", "RayService")
    plan = check_application(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (plan.least, plan.most)
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    (config,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert pod["initContainers"][0]["args"][2:] == config["args"]["model"]
    claims = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]]
    assert claim["metadata"]["name"] in claims


def test_kubernetes_probes_what_needs_no_key() -> None:
    stateful, service, headless, budget = documents("kubernetes.yaml")
    pod = stateful["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    for probe in probes.values():
        assert ("GET", probe["httpGet"]["path"]) in PUBLIC_ROUTES
    assert probes["liveness"]["httpGet"]["path"] != probes["readiness"]["httpGet"]["path"]
    waits_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > waits_s + make_config({}).server.drain_timeout_s
    labels = stateful["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"] == headless["spec"]["selector"] == labels
    assert headless["metadata"]["name"] == stateful["spec"]["serviceName"]
    assert budget["spec"]["selector"]["matchLabels"] == labels
    assert stateful["spec"]["replicas"] >= 2
    assert "sessionAffinity" not in service["spec"], "it sends a whole NAT to one pod"
    claims = {each["metadata"]["name"] for each in stateful["spec"]["volumeClaimTemplates"]}
    assert claims == {"cache"}, "weights outlive a pod"


def pods() -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Every pod that a manifest makes, with the services of the manifest."""
    for name in ("kubernetes.yaml", "kuberay.yaml"):
        found = documents(name)
        services = [each for each in found if each["kind"] in ("Service", "RayService")]
        for each in found:
            if each["kind"] == "StatefulSet":
                yield name, each["spec"]["template"]["spec"], services
            if each["kind"] == "RayService":
                cluster = each["spec"]["rayClusterConfig"]
                groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
                yield from ((name, group["template"]["spec"], services) for group in groups)


def environment(pod: dict[str, Any], container: dict[str, Any], services: Any) -> dict[str, str]:
    """The variables that Kubernetes gives a container, those of the services included."""
    found = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_PORT": "tcp://10.96.0.1:443"}
    if pod.get("enableServiceLinks", True):
        for service in services:
            prefix = service["metadata"]["name"].upper().replace("-", "_")
            found[f"{prefix}_SERVICE_HOST"] = "10.96.0.7"
            found[f"{prefix}_SERVICE_PORT"] = "80"
            found[f"{prefix}_PORT"] = "tcp://10.96.0.7:80"
            found[f"{prefix}_PORT_80_TCP_ADDR"] = "10.96.0.7"
    found.update({each["name"]: each["value"] for each in container.get("env", ())})
    return found


def containers() -> Iterator[Any]:
    for name, pod, services in pods():
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            given = pod, container, services
            yield pytest.param(*given, id=f"{name}-{container['name']}")


@pytest.mark.parametrize(("pod", "container", "services"), list(containers()))
def test_a_container_starts_with_the_variables_of_kubernetes(
    pod: dict[str, Any],
    container: dict[str, Any],
    services: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its command line and its variables give options that `triptych` accepts."""
    for name, value in {**image_variables(), **environment(pod, container, services)}.items():
        monkeypatch.setenv(name, value)
    command, *options = container.get("args", ["serve"])
    if command == "models":
        assert options[0] == "fetch"
        options = []
    assert cli.main(["config", *options]) == 0
    assert "host" in capsys.readouterr().out


def image_variables() -> dict[str, str]:
    """The variables of Triptych that the image sets."""
    text = (DOCKER / "Dockerfile.cpu").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("ENV ")]
    pairs = (word.split("=", 1) for word in line.split()[1:])
    return {name: value for name, value in pairs if name.startswith("TRIPTYCH_")}


@pytest.mark.parametrize(("pod", "container", "services"), list(containers()))
def test_a_container_has_no_rights_that_it_does_not_need(
    pod: dict[str, Any], container: dict[str, Any], services: Any
) -> None:
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert "memory" in container["resources"]["limits"]
    volumes = {volume["name"] for volume in pod["volumes"]} | {"cache"}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_manifests_fit_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for name in ("kubernetes.yaml", "kuberay.yaml"):
        for each in documents(name):
            if each["kind"] != "RayService":
                validate(each, "1.31", strict=True)
    for _, pod, _ in pods():
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
        mounted = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
        claims = mounted - {volume["name"] for volume in pod["volumes"]}  # of the set's templates
        added = [{"name": claim, "emptyDir": {}} for claim in claims]
        whole["spec"] = {**pod, "volumes": [*pod["volumes"], *added]}
        validate(whole, "1.31", strict=True)


def test_the_service_monitor_finds_the_service() -> None:
    (monitor,) = documents("servicemonitor.yaml")
    _, service, *_ = documents("kubernetes.yaml")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    (config,) = documents("prometheus/prometheus.yaml")
    assert [job["job_name"] for job in config["scrape_configs"]] == ["triptych"]
    assert config["rule_files"] == ["alerts.yaml"]


def test_the_systemd_unit_starts_what_exists_and_waits_for_the_drain() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DOCKER / "systemd" / "triptych.service").read_text())
    service = unit["Service"]
    program, command, *options = service["ExecStart"].split()
    assert options[2:] == ["--api-key-file", "${CREDENTIALS_DIRECTORY}/keys"]
    assert service["LoadCredential"].startswith("keys:")
    assert program.endswith("/bin/triptych")
    assert command == "serve"
    assert options[0] in {flag for option in declared().values() for flag in option.flags} | {
        "--config-file"
    }
    assert int(service["TimeoutStopSec"]) > make_config({}).server.drain_timeout_s + DRAIN_SLACK_S
    assert service["Type"] == "exec", "the server does not notify systemd"
    assert "WatchdogSec" not in service
    for name in ("NoNewPrivileges", "PrivateTmp", "ProtectHome", "DynamicUser"):
        assert service[name] == "yes"


def test_compose_has_two_replicas() -> None:
    (compose,) = documents("compose.yaml")
    service = compose["services"]["replicas"]
    command = service["command"]
    assert command[command.index("--replicas") + 1] == "2"
    assert service["build"]["args"]["EXTRAS"] == "[ray]"
    assert "ARG EXTRAS" in (DOCKER / "Dockerfile.cpu").read_text()
