"""Runs whose workers die on the way: the commands of the peers that begin anew, and what to do with a run that never
comes back."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from arms import WORKERS, Stuck, Work, execute, python_of_torchrun, words_of
from rounds import HERE

CHECKPOINT_EVERY = 20
"""Of every arm, in steps."""
TRIES = 5

T = TypeVar("T")


def peers(address: str) -> dict[str, list[str]]:
    """What begins anew from its last checkpoint, by name: the command. Ray Train uses the Ray at ``address``."""
    folder = HERE / "peers"
    return {
        "torchrun": [*python_of_torchrun("--max-restarts=20"), str(folder / "torchrun_elastic.py")],
        "Ray Train": [str(folder / "ray_train_elastic.py"), f"--workers={WORKERS}", f"--address={address}"],
    }


def run_peer(
    command: list[str], work: Work, folder: Path, *, kill_at: int, kill_every: int = 0, stuck_after_s: float
) -> None:
    """Rank 1 kills itself before step ``kill_at``, and again each ``kill_every`` steps.

    Raises:
        Stuck: it takes longer than ``stuck_after_s``.
    """
    faults = [f"--kill-at={kill_at}", f"--kill-every={kill_every}", f"--checkpoint-every={CHECKPOINT_EVERY}"]
    execute([*command, *words_of(work, folder / "result.json"), *faults], folder, timeout_s=stuck_after_s)


def until_it_comes_back(name: str, arm: Callable[[Path], T], stuck: Counter[str]) -> T:
    """What the arm says; it is tried again, and counted, when it never comes to its end.

    Raises:
        Stuck: it never does.
    """
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
            try:
                return arm(Path(folder))
            except Stuck:
                stuck[name] += 1
                print(f"  {name}: stuck, once more", flush=True)
    raise Stuck(f"{name}: {TRIES} times")
