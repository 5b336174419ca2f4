"""The workflow on GitHub, and what CONTRIBUTING.md says of tests that are skipped."""

import re
import shlex

from helpers.files.cluster_files import documents
from helpers.records.runs import ROOT

(WORKFLOW,) = documents(ROOT / ".github" / "workflows" / "ci.yml")
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
COMMANDS = [step["run"] for step in STEPS if "run" in step]


def test_an_action_has_a_fixed_version() -> None:
    assert all(re.fullmatch(r"[\w/-]+@v\d+", step["uses"]) for step in STEPS if "uses" in step)


def test_every_test_runs_in_a_job() -> None:
    words = [shlex.split(line) for commands in COMMANDS for line in commands.splitlines() if "pytest -rs" in line]
    of_folder = "not campaign and ${{ matrix.folder }}"
    assert [line[line.index("-m") + 1] for line in words] == [of_folder, "not campaign", "campaign"]
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert folders - {"gpu"} == {*WORKFLOW["jobs"]["tests"]["strategy"]["matrix"]["folder"]}
    nightly = {"schedule", "workflow_dispatch"}
    assert nightly <= WORKFLOW[True].keys(), "YAML 1.1 reads the key `on` as true"
    assert set(re.findall(r"event_name == '(\w+)'", WORKFLOW["jobs"]["nightly"]["if"])) == nightly


def test_the_checks_are_those_of_the_script() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    checks = [command for command in COMMANDS if command.startswith(("ruff", "mypy", "mkdocs"))]
    assert len(checks) == 4
    assert all(check in script for check in checks)
    (readme,) = (command for command in COMMANDS if command.endswith("&& pytest"))
    assert f"    {readme}\n" in (ROOT / "README.md").read_text()


def test_the_files_of_which_tests_are_skipped_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("### What is skipped")[2].partition("\n## ")[0]
    paths = re.findall(r"`(tests/[\w/]+(?:\.py)?)`", section)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
