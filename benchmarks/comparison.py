"""Seconds of the comparison with the whole model before step 1, of each job that ships: the first time, and once known.

python benchmarks/comparison.py [JOB ...]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from harness.arms import execute, run_dir_in
from harness.rounds import table

JOBS: dict[str, tuple[str, ...]] = {
    "digits": (),
    "gpt": (),
    "gpt, fsdp": ("strategy=fsdp",),
    "gpt, pipeline": ("strategy=pipeline",),
    "gpt, tensor": ("strategy=mesh", "strategy.tensor=2"),
    "names": (),
    "matrix_completion": (),
    "resnet50": (),
    "sparse": (),
    "toy": (),
}
"""The jobs of ``conf/job`` that need no files, and how two workers train them; none for ``ddp``."""
COMMON = ("tracking=none", "cluster=local", "train.steps=1", "train.eval_every=0", "checkpoint.every=0")


def main() -> None:
    rows = []
    for name in sys.argv[1:] or JOBS:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            seconds = [seconds_of(name) for _ in range(2)]
        rows.append([name, *(f"{s:.2f} s" for s in seconds), f"{os.getloadavg()[0]:.0f}"])
        print(rows[-1], flush=True)
    print(table(["job", "first", "known", "load"], rows))


def seconds_of(name: str) -> float:
    """Return how long the comparison takes in a new run."""
    job, *_ = name.split(",")
    strategy = JOBS[name] or ("strategy=ddp",)
    words = ("-m", "orchestrator.launch", f"job={job}", *strategy, "strategy.num_workers=2", *COMMON)
    with tempfile.TemporaryDirectory() as folder:
        execute(words, Path(folder))
        return float(run_dir_in(Path(folder)).read_record()["summary"]["startup"]["compare_s"])


if __name__ == "__main__":
    main()
