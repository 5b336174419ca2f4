"""The container images, the compose file, and the versions in all files below ``cluster/``."""

import re
import shlex
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from helpers.files.cluster_files import CLUSTER, KUBERNETES, check_ray_command, documents, ray_commands
from helpers.records.runs import ROOT
from orchestrator.compat.ray.internals import CHECKED_VERSION
from orchestrator.version import __version__

DOCKERFILE = (CLUSTER / "container" / "Dockerfile").read_text()
ARGUMENTS = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
(COMPOSE,) = documents(CLUSTER / "container" / "compose.yaml")
FILES = [path for path in sorted(CLUSTER.rglob("*")) if path.is_file() and path.suffix != ".md"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]


def stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile."""
    parts = re.split(r"^FROM \S+ AS (\w+)$", DOCKERFILE, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_versions_of_the_image_are_supported() -> None:
    assert ARGUMENTS["PYTHON_VERSION"] in SpecifierSet(PROJECT["requires-python"])
    assert f"Programming Language :: Python :: {ARGUMENTS['PYTHON_VERSION']}" in PROJECT["classifiers"]
    wanted = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    for library in ("torch", "ray", "mlflow"):
        assert ARGUMENTS[f"{library.upper()}_VERSION"] in wanted[library]
    assert ARGUMENTS["RAY_VERSION"] == CHECKED_VERSION


@pytest.mark.parametrize(
    ("pattern", "version"),
    [
        (r"torch==([\d.]+)", ARGUMENTS["TORCH_VERSION"]),
        (r"ray\[default\]==([\d.]+)", ARGUMENTS["RAY_VERSION"]),
        (r"rayVersion: ([\d.]+)", ARGUMENTS["RAY_VERSION"]),
        (r"mlflow==([\d.]+)", ARGUMENTS["MLFLOW_VERSION"]),
        (r"(?:image:|-t) orchestrator(?:-mlflow)?:([\d.]+)", __version__),
    ],
)
def test_all_files_name_the_same_versions(pattern: str, version: str) -> None:
    found = {number for path in FILES for number in re.findall(pattern, path.read_text())}
    assert found == {version}


@pytest.mark.parametrize("stage", stages())
def test_an_image_runs_as_an_ordinary_user_and_holds_no_secret(stage: str) -> None:
    text = stages()[stage]
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1:] == ["1000"], "a number, for runAsNonRoot of Kubernetes"
    assert not re.search(r"^(ARG|ENV) .*(TOKEN|PASSWORD|SECRET)", text, re.MULTILINE)


def test_only_what_the_package_is_built_from_is_copied_into_the_image() -> None:
    ignored = (CLUSTER / "container" / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    copied = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    folders = {SETUPTOOLS["package-dir"].get(name, name).split(".")[0] for name in SETUPTOOLS["packages"]}
    assert copied == {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], *folders}
    assert all((ROOT / name).exists() for name in copied)


def test_the_page_builds_the_images_that_all_files_start() -> None:
    lines = re.findall(r"^    docker build (.+)$", (CLUSTER / "README.md").read_text(), re.MULTILINE)
    built = {}
    for line in lines:
        *words, context = shlex.split(line)
        options = dict(zip(words[::2], words[1::2], strict=True))
        assert (context, ROOT / options["-f"]) == (".", CLUSTER / "container" / "Dockerfile")
        built[options["-t"]] = options.get("--target", list(stages())[-1])
    started = {s["image"]: s["build"]["target"] for s in COMPOSE["services"].values() if "build" in s}
    assert built == started
    kubernetes = "".join(path.read_text() for path in KUBERNETES.glob("*.yaml"))
    assert set(re.findall(r"image: (orchestrator\S*)$", kubernetes, re.MULTILINE)) == set(built)


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_of_the_compose_file(name: str) -> None:
    service = COMPOSE["services"][name]
    if "build" in service:
        assert service["build"]["target"] in stages()
        assert (CLUSTER / "container" / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()
    for other, waiting in service.get("depends_on", {}).items():
        assert waiting == {"condition": "service_healthy"}
        assert "healthcheck" in COMPOSE["services"][other]
    for published in service.get("ports", []):
        assert published.startswith("127.0.0.1:"), "only this machine may connect"
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        assert source in COMPOSE["volumes"] or (CLUSTER / "container" / source).is_file()


def test_every_secret_of_the_compose_file_comes_from_the_environment() -> None:
    variables = {k: v for s in COMPOSE["services"].values() for k, v in s.get("environment", {}).items()}
    secret = {name: value for name, value in variables.items() if re.search("TOKEN|PASSWORD", name)}
    assert secret.keys() == {"RAY_AUTH_TOKEN", "POSTGRES_PASSWORD", "PGPASSWORD"}
    assert all(re.fullmatch(r"\$\{\w+:\?.+\}", value) for value in secret.values()), "required, without a default"


def test_the_nodes_of_the_compose_file_form_one_cluster() -> None:
    options: dict[str, Any] = {}
    for name in ("head", "worker"):
        service = COMPOSE["services"][name]
        ((command, arguments),) = ray_commands(service["command"])
        assert command == "start"
        check_ray_command(command, arguments)
        options[name] = dict(a.removeprefix("--").partition("=")[::2] for a in arguments)
        assert "block" in options[name], "the container lives as long as its Ray"
    assert options["worker"]["address"] == f"head:{options['head']['port']}"
    _, _, probe, *arguments = COMPOSE["services"]["head"]["healthcheck"]["test"]
    check_ray_command(probe, arguments)
    (prometheus,) = documents(CLUSTER / "grafana" / "prometheus.yaml")
    (target,) = prometheus["scrape_configs"][0]["dns_sd_configs"]
    assert target["names"] == ["head", "worker"]
    assert {str(target["port"])} == {o["metrics-export-port"] for o in options.values()}


def test_the_mlflow_server_of_the_compose_file() -> None:
    words = shlex.split(COMPOSE["services"]["mlflow"]["command"])
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options["--backend-store-uri"] == "postgresql+psycopg2://mlflow@postgres/mlflow"
    assert "mlflow:5000" in options["--allowed-hosts"].split(",")
