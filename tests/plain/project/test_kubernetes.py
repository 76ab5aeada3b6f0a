"""The manifests of deploy/kubernetes: they are consistent, and their statements about blinkpy are true. `make
test-kubernetes` holds them against Kubernetes' own schemas."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import blinkpy.dpu.link.connectors  # noqa: F401  the options of transports are those of their files
from blinkpy.cli import make_parser, resolve
from blinkpy.config import Config
from blinkpy.dpu.http.endpoints import ENDPOINTS

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
Object = dict[str, Any]


class Pods(NamedTuple):
    """A Deployment or StatefulSet, and its only container."""

    name: str
    replicas: int
    labels: dict[str, str]
    spec: Object
    container: Object


def objects(file: Path) -> list[Object]:
    return list(yaml.safe_load_all(file.read_text()))


def of_kind(file: Path, *kinds: str) -> list[Object]:
    return [each for each in objects(file) if each["kind"] in kinds]


def pods(file: Path) -> list[Pods]:
    found = []
    for each in of_kind(file, "Deployment", "StatefulSet"):
        template = each["spec"]["template"]
        assert each["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        (container,) = template["spec"]["containers"]
        labels = template["metadata"]["labels"]
        found.append(Pods(each["metadata"]["name"], each["spec"]["replicas"], labels, template["spec"], container))
    return found


def volume(one: Pods, path: str) -> tuple[Object, str]:
    """The volume of a path, and the path's name there."""
    for mount in one.container["volumeMounts"]:
        if path.startswith(f"{mount['mountPath']}/"):
            (found,) = [each for each in one.spec["volumes"] if each["name"] == mount["name"]]
            return found, path.removeprefix(f"{mount['mountPath']}/")
    raise AssertionError(f"{one.name} mounts nothing at {path}")


def config(file: Path, one: Pods, tmp_path: Path) -> tuple[str, Config]:
    """The command of a container, and its options as blinkpy reads them."""
    entrypoint = json.loads(re.search(r"^ENTRYPOINT (.*)$", (ROOT / "deploy" / "Containerfile").read_text(), re.M)[1])
    words = one.container.get("command", entrypoint) + one.container.get("args", [])
    assert words[0] == "blinkpy"
    arguments = make_parser().parse(words[1:])
    place, name = volume(one, arguments["config"])
    (table,) = [each for each in of_kind(file, "ConfigMap") if each["metadata"]["name"] == place["configMap"]["name"]]
    (tmp_path / name).write_text(table["data"][name])
    return arguments["command"], resolve({**arguments, "config": tmp_path / name}, {"BLINKPY_API_KEY": "x"})[0]


def test_there_are_manifests() -> None:
    assert [file.name for file in FILES] == ["rdma.yaml", "serve.yaml"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_names_lead_somewhere(file: Path) -> None:
    every, named = pods(file), {(each["kind"], each["metadata"]["name"]) for each in objects(file)}
    assert len(named) == len(objects(file))
    for service in of_kind(file, "Service"):
        chosen = [one for one in every if service["spec"]["selector"].items() <= one.labels.items()]
        assert chosen, service
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            for one in chosen:
                assert any(target in (own["name"], own["containerPort"]) for own in one.container["ports"])
    for budget in of_kind(file, "PodDisruptionBudget"):
        assert any(budget["spec"]["selector"]["matchLabels"].items() <= one.labels.items() for one in every)
    for scaler in of_kind(file, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in named
    for named_set in of_kind(file, "StatefulSet"):
        assert ("Service", named_set["spec"]["serviceName"]) in named
    for one in every:
        assert {mount["name"] for mount in one.container["volumeMounts"]} == {each["name"] for each in one.spec["volumes"]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_options_ports_probes_and_times_are_blinkpys(file: Path, tmp_path: Path) -> None:
    paths = {endpoint.path for endpoint in ENDPOINTS if endpoint.method == "GET"}
    for one in pods(file):
        command, options = config(file, one, tmp_path)
        (port,) = [port["containerPort"] for port in one.container["ports"]]
        stop = one.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert one.spec["terminationGracePeriodSeconds"] > int(stop[1]) + options.frontend.shutdown_s
        probes = [one.container[name]["httpGet"] for name in one.container if name.endswith("Probe")]
        if command == "engine":
            assert not probes
            continue
        assert (options.frontend.host, options.frontend.port) == ("0.0.0.0", port)
        assert [probe["path"] for probe in probes] == ["/livez", "/livez", "/health"] and {"/livez", "/health"} <= paths
        assert {probe["port"] for probe in probes} == {one.container["ports"][0]["name"]}
        assert "BLINKPY_API_KEY" in {each["name"] for each in one.container["env"]}


def test_images_are_those_that_the_heads_say_to_build() -> None:
    for file in FILES:
        (image,) = {one.container["image"] for one in pods(file)}
        (name,) = set(re.findall(r"Build the image with (deploy/[\w.]+\w)", file.read_text()))
        assert f"build {'--format docker ' if image == 'blinkpy' else ''}-t {image} -f {name} ." in (ROOT / name).read_text()
        options = [text for each in of_kind(file, "ConfigMap") for text in each["data"].values()]
        assert ("python3-pyverbs" in (ROOT / name).read_text()) == any('transport = "rdma"' in text for text in options)


def test_front_ends_find_the_engines_and_a_queue_pair_each(tmp_path: Path) -> None:
    (file,) = [file for file in FILES if file.name == "rdma.yaml"]
    engine, front = pods(file)
    (command, engines), (other, fronts) = (config(file, one, tmp_path) for one in (engine, front))
    assert (command, other) == ("engine", "frontend")
    (service,) = [each["spec"]["serviceName"] for each in of_kind(file, "StatefulSet")]
    of_engine, of_front = (next(iter(c.extensions.values())) for c in (engines, fronts))
    port = of_engine.listen.rpartition(":")[2]
    assert of_front.engine.split(",") == [f"{engine.name}-{i}.{service}:{port}" for i in range(engine.replicas)]
    assert engines.frontend.workers >= fronts.frontend.workers * front.replicas
    assert engines.model.model == fronts.model.model
    for one, options in ((engine, of_engine), (front, of_front)):
        place, name = volume(one, options.link_key_file)
        assert name == "link.key"
        assert place["secret"]["defaultMode"] & 0o027 == 0, "link_key.py refuses a key that others can read"
