"""The page ``cluster/README.md`` covers every file beside it, with commands that exist."""

import re
import shlex

import pytest

from helpers.files.cluster_files import CLUSTER, check_ray_command, launched, ray_commands
from orchestrator.config.compose import compose
from orchestrator.strategies import registry

PAGE = (CLUSTER / "README.md").read_text()
LINES = [line.strip() for line in re.sub(r"\\\n\s*", "", PAGE).splitlines() if line.startswith("    ")]
LAUNCHES = [line for line in LINES if "python -m orchestrator.launch" in line]
SUBMISSIONS = [line for line in LINES if line.startswith("orchestrator submit ") and "=" in line]


@pytest.mark.parametrize("line", LAUNCHES)
def test_a_launch_composes(line: str) -> None:
    launched(line[line.index("python -m orchestrator.launch") :].partition("#")[0])


@pytest.mark.parametrize("line", SUBMISSIONS)
def test_a_submission_composes(line: str) -> None:
    overrides = [word for word in shlex.split(line, comments=True) if re.match(r"[a-z_.]+=", word)]
    errors: list[str] = []
    compose(overrides, errors, registry.config_class)
    assert errors == []


@pytest.mark.parametrize("line", [line for line in LINES if re.match(r"(RAY_\w+=\S+ )?ray ", line)])
def test_ray_has_the_command(line: str) -> None:
    for name, arguments in ray_commands(line):
        if name != "job":  # a group of commands
            check_ray_command(name, arguments)


def test_every_file_has_its_place_on_the_page() -> None:
    files = [
        path for path in CLUSTER.rglob("*") if path.is_file() and path.suffix in (".yaml", ".json", ".sbatch", ".sh")
    ]
    mounted = (CLUSTER / "container" / "compose.yaml").read_text()
    assert [path.name for path in files if path.name not in PAGE and path.name not in mounted] == []


def test_links_lead_to_sections() -> None:
    sections = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", PAGE, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) <= sections
