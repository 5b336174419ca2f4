"""The batch script in ``cluster/slurm``, without running it."""

import re

from helpers.files.cluster_files import CLUSTER, check_ray_command, launched, ray_commands
from orchestrator.driver.process.signals import STOP_MARGIN_S

TEXT = (CLUSTER / "slurm" / "train.sbatch").read_text()
OPTIONS = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", TEXT, re.MULTILINE))
COMMANDS = TEXT.replace("\\\n", " ").splitlines()
(STEP,) = (line for line in COMMANDS if line.startswith("srun --cpus-per-task="))


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
