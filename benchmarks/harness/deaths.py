"""What the benchmarks with dying workers share: the commands of the peers that restart, and retries for stuck runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from harness.arms import ArmTimeoutError, Workload, execute, peer_arguments, ray_train_command, torchrun_command

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


def retried_if_stuck(name: str, arm: Callable[[Path], T], stuck: Counter[str]) -> Callable[[Path], T]:
    """Return an arm that runs ``arm`` until one run finishes, and counts the runs that time out in ``stuck[name]``.

    It raises :class:`ArmTimeoutError` if all ``TRIES`` runs time out.
    """

    def run(folder: Path) -> T:
        for number in range(TRIES):
            attempt = folder / str(number)
            attempt.mkdir()
            try:
                return arm(attempt)
            except ArmTimeoutError:
                stuck[name] += 1
                print(f"  {name}: timed out, trying again", flush=True)
        raise ArmTimeoutError(f"{name}: timed out {TRIES} times")

    return run
