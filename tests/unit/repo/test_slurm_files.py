"""The batch script in ``cluster/slurm``, without running it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from helpers.files.cluster_files import CLUSTER, check_ray_command, launched, ray_commands
from orchestrator.driver.process.stop_wait import STOP_MARGIN_S

SCRIPT = CLUSTER / "slurm" / "train.sbatch"
TEXT = SCRIPT.read_text()
OPTIONS = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", TEXT, re.MULTILINE))
COMMANDS = TEXT.replace("\\\n", " ").splitlines()
(STEP,) = (line for line in COMMANDS if line.startswith("srun --cpus-per-task="))


def test_the_shell_accepts_the_script() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=10)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_no_remark() -> None:
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""


def test_the_job_is_requeued_and_has_its_nodes_alone() -> None:
    assert {"requeue", "exclusive"} <= OPTIONS.keys()
    assert OPTIONS["ntasks-per-node"] == "1", "one Ray on each node"
    assert OPTIONS["open-mode"] == "append"


def test_ray_has_the_options_that_are_used() -> None:
    ((name, arguments),) = ray_commands(STEP)
    assert name == "symmetric-run"
    check_ray_command(name, arguments)


def test_there_is_time_for_a_checkpoint_before_the_limit() -> None:
    config = launched(re.sub(r'.* -- |"\$@"|"| &$', "", STEP).replace("$output_dir", "/runs"))
    assert config.resume == "auto"
    (wait_s,) = re.findall(r"orchestrator\.stop .* --wait (\d+)", TEXT)
    to, name, before_s = re.split("[:@]", OPTIONS["signal"])
    assert (to, name) == ("B", "TERM"), "to the script only: SIGTERM would end the processes of Ray"
    assert config.cluster.stop_grace_s + STOP_MARGIN_S <= int(wait_s) < int(before_s)
