"""Start of a run on a Ray on which another run trains, relative to a Ray without one.

python benchmarks/shared_cluster.py

There is room for both, so neither waits. The steps of the other run sleep, so that the two share Ray and not the cores
of this machine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.arms import WORKERS, Arm, Timing, Workload, basic_overrides, environment, ours, running_ray
from harness.rounds import Claim, argument_parser, interleave, median, ratios, report, table, wait_until_quiet

ROUNDS = 4
TIMEOUT_S = 60.0
ALONE, BESIDE = "alone", "beside another run"
WORKLOAD = Workload(job="jobs.digits.Digits", fields={}, steps=20, global_batch_size=64, log_every=1000)


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    with running_ray(num_cpus=2 * WORKERS) as address:
        arm = ours(WORKLOAD, address=address)
        rounds = interleave({ALONE: arm, BESIDE: beside(arm, address)}, rounds=1 if arguments.quick else ROUNDS)
    report(
        "shared-cluster",
        [
            Claim(
                name="start to the end of the first step, beside another run / alone",
                ratios=ratios(rounds, BESIDE, ALONE, "startup_s"),
                at_most=1.05,
            )
        ],
        ceiling=None,
        rounds={"one Ray": rounds},
        notes=table(
            ["arm", "start to the end of the first step"],
            [[name, f"{median(rounds, name, 'startup_s'):.2f} s"] for name in (ALONE, BESIDE)],
        ),
        keep=not arguments.quick,
    )


def beside(arm: Arm, address: str) -> Arm:
    """Return ``arm``, run while another run trains on the Ray at ``address``."""

    def run(folder: Path) -> Timing:
        with another_run(address):
            wait_until_quiet()
            return arm(folder)

    return run


@contextmanager
def another_run(address: str) -> Iterator[None]:
    """Train on the Ray at ``address``.

    Raises:
        TimeoutError: The training has not begun within ``TIMEOUT_S``.
    """
    words = [*basic_overrides(address), "job=sleep", "train.steps=1000000", "train.eval_every=0", "tracking=none"]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.launch", *words],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not any("first_step_done" in f.read_text() for f in Path(folder).glob("outputs/*/*/events.jsonl")):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no step within {TIMEOUT_S:g} s: {' '.join(words)}")
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)


if __name__ == "__main__":
    main()
