"""What docker/ deploys: files that parse, options that exist, probes that are served."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import yaml

import triptych
from triptych.core.http.auth import PUBLIC_ROUTES
from triptych.core.options.table import make_config
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
    (service,) = documents("kuberay.yaml")
    assert service["kind"] == "RayService"
    plan = check_application(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (plan.least, plan.most)
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_kubernetes_probes_what_needs_no_key() -> None:
    deployment, service, budget = documents("kubernetes.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    for probe in probes.values():
        assert ("GET", probe["httpGet"]["path"]) in PUBLIC_ROUTES
    assert probes["liveness"]["httpGet"]["path"] != probes["readiness"]["httpGet"]["path"]
    waits_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > waits_s + make_config({}).server.drain_timeout_s
    labels = deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels
    assert deployment["spec"]["replicas"] >= 2


def test_compose_has_two_replicas() -> None:
    (compose,) = documents("compose.yaml")
    service = compose["services"]["replicas"]
    command = service["command"]
    assert command[command.index("--replicas") + 1] == "2"
    assert service["build"]["args"]["EXTRAS"] == "[ray]"
    assert "ARG EXTRAS" in (DOCKER / "Dockerfile.cpu").read_text()
