"""Shell scripts and YAML files, judged by shellcheck and by the schemas of check-jsonschema."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.files.cluster_files import documents
from helpers.records.runs import ROOT

WORKFLOW = ".github/workflows/ci.yml"
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def check(*words: str | Path, text: str | None = None) -> None:
    done = subprocess.run(words, cwd=ROOT, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shellcheck_has_no_remark_on_a_script() -> None:
    check(SHELLCHECK, ".ci/run", ".ci/versions", "cluster/start.sh", "cluster/slurm/train.sbatch")


def test_shellcheck_has_no_remark_on_the_commands_of_the_workflow() -> None:
    (workflow,) = documents(ROOT / WORKFLOW)
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    check(SHELLCHECK, "--shell=bash", "-", text=re.sub(r"\$\{\{.*?\}\}", "value", "\n".join(commands)))


@pytest.mark.parametrize(
    ("schema", "file"), [("github-workflows", WORKFLOW), ("compose-spec", "cluster/container/compose.yaml")]
)
def test_a_file_follows_its_schema(schema: str, file: str) -> None:
    check(sys.executable, "-m", "check_jsonschema", f"--builtin-schema=vendor.{schema}", file)
