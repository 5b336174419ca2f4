"""CPU seconds of answers that start nothing: a wrong key, and ``--help``; ours, and a program with Hydra alone.

python benchmarks/refusal.py

The program with Hydra composes a file of three keys, so that it shows what the interpreter and Hydra take.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from harness.rounds import Claim, argument_parser, interleave, report, table

ROUNDS = 7
PROGRAM = """
import hydra

@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config):
    print(config)

main()
"""
OURS, HYDRA = ("-m", "orchestrator.launch"), ("program.py",)
ARMS = {
    "a wrong key, ours": (*OURS, "train.stps=3"),
    "a wrong key, Hydra": (*HYDRA, "train.stps=3"),
    "--help, ours": (*OURS, "--help"),
    "--help, Hydra": (*HYDRA, "--help"),
}
GOALS = {"a wrong key": 1.0, "--help": 0.7}
"""CPU seconds."""


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = interleave(
        {name: partial(cpu_s, words) for name, words in ARMS.items()},
        rounds=1 if arguments.quick else ROUNDS,
        text=lambda seconds: f"{seconds:.2f} s",
    )
    claims = [
        Claim(name=f"{what}, CPU seconds", ratios=[r[f"{what}, ours"] for r in rounds], at_most=goal)
        for what, goal in GOALS.items()
    ]
    claims += [
        Claim(name=f"{what}, ours / Hydra", ratios=[r[f"{what}, ours"] / r[f"{what}, Hydra"] for r in rounds])
        for what in GOALS
    ]
    notes = table(["arm", "median, CPU s"], [[arm, f"{statistics.median(r[arm] for r in rounds):.2f}"] for arm in ARMS])
    report("refusal", claims, ceiling=None, rounds={}, notes=notes, keep=not arguments.quick)


def cpu_s(words: Sequence[str], directory: Path) -> float:
    """Return the CPU seconds of a command in an empty directory."""
    (directory / "conf").mkdir()
    (directory / "conf" / "config.yaml").write_text("train:\n  steps: 1\n  lr: 0.1\n  seed: 0\n")
    (directory / "program.py").write_text(PROGRAM)
    own = directory / "elsewhere"  # where no conf/ of a user is
    own.mkdir()
    where = own if words[0] == "-m" else directory
    before = _children_s()
    subprocess.run([sys.executable, *words], cwd=where, capture_output=True, timeout=120, check=False)
    return _children_s() - before


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
