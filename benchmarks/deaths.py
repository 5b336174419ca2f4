"""What the benchmarks with dying workers share: the commands of the peers that restart, and retries for stuck runs."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from arms import ArmTimeoutError, Workload, execute, peer_arguments, ray_train_command, torchrun_command

CHECKPOINT_EVERY = 20
"""Steps between two checkpoints, in every arm."""
TRIES = 5

T = TypeVar("T")


def peers(address: str) -> dict[str, list[str]]:
    """Return the commands, by name, that restart from the last checkpoint. Ray Train uses the Ray at ``address``."""
    return {
        "torchrun": torchrun_command("torchrun_elastic.py", "--max-restarts=20"),
        "Ray Train": ray_train_command("ray_train_elastic.py", address),
    }


def run_peer(
    command: list[str], workload: Workload, folder: Path, *, kill_at: int, kill_every: int = 0, timeout_s: float
) -> None:
    """Run a peer whose rank 1 kills itself before step ``kill_at``, and again every ``kill_every`` steps.

    Raises:
        ArmTimeoutError: It ran longer than ``timeout_s``.
    """
    faults = [f"--kill-at={kill_at}", f"--kill-every={kill_every}", f"--checkpoint-every={CHECKPOINT_EVERY}"]
    execute([*command, *peer_arguments(workload, folder / "result.json"), *faults], folder, timeout_s=timeout_s)


def retry_if_stuck(name: str, arm: Callable[[Path], T], stuck: Counter[str]) -> T:
    """Run an arm until one run finishes, and count the runs that time out in ``stuck[name]``.

    Raises:
        ArmTimeoutError: All ``TRIES`` runs timed out.
    """
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
            try:
                return arm(Path(folder))
            except ArmTimeoutError:
                stuck[name] += 1
                print(f"  {name}: timed out, trying again", flush=True)
    raise ArmTimeoutError(f"{name}: timed out {TRIES} times")
