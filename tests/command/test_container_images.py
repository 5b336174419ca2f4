"""The container images, built from the Dockerfile. This downloads Python, torch, Ray and MLflow."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.records.runs import ROOT

BUILDERS = ("docker", "podman", "buildah")
CHECKS = {
    "node": "orchestrator strategy=ddp strategy.num_workers=2 plan=true && ray --version && wget --version",
    "mlflow": "mlflow --version && python -c 'import psycopg2'",
}
"""What a user of the image of each stage can do."""

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def builder() -> str:
    """A program that can build images on this machine."""
    for program in filter(shutil.which, BUILDERS):
        if subprocess.run([program, "info"], capture_output=True, timeout=60).returncode == 0:
            return program
    pytest.skip("no docker whose daemon runs, no podman and no buildah")


def build(builder: str, dockerfile: Path, context: Path, *options: str) -> None:
    words = [builder, "build", "--file", dockerfile, *options, context]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.fixture(params=CHECKS)
def stage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def image(builder: str, stage: str) -> Iterator[str]:
    """The image of a stage of the Dockerfile, under a name of its own."""
    name = f"localhost/orchestrator-test-{os.getpid()}-{stage}"
    build(builder, ROOT / "cluster" / "container" / "Dockerfile", ROOT, "--target", stage, "--tag", name)
    yield name
    for made in (checked(name), name):
        subprocess.run([builder, "rmi", made], capture_output=True, timeout=120)


def checked(image: str) -> str:
    return f"{image}-checked"


def test_an_image_has_its_programs_and_an_ordinary_user(builder: str, stage: str, image: str, tmp_path: Path) -> None:
    """Shown by the build of another image from it, which all builders do alike."""
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(f"FROM {image}\nRUN {CHECKS[stage]} && test $(id -u) = 1000\n")
    build(builder, dockerfile, tmp_path, "--no-cache", "--tag", checked(image))
