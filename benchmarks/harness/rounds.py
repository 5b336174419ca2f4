"""Rounds of arms, and the claims about them.

Arms run in turn and are compared within a round, because disturbances on the machine affect neighbours in time alike.
A claim is the median of a ratio over the rounds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TypeVar

import psutil

from harness.arms import RESULTS, Timing
from harness.disturbance import DISTURBED_FROM, QUIET_SHARE, undisturbed
from orchestrator.records.git import git_facts

QUIET_PCT = 20.0
QUIET_TIMEOUT_S = 20.0
"""Longest wait before an arm for the machine's CPU load to fall below ``QUIET_PCT``, for example after the last arm."""

T = TypeVar("T")

Rounds = Sequence[Mapping[str, Timing]]


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option that all benchmarks share; ``doc`` is the script's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run a single round and do not save the results")
    return parser


def interleave(
    arms: Mapping[str, Callable[[Path], T]], *, rounds: int, text: Callable[[T], str] = str
) -> list[dict[str, T]]:
    """Run every arm once in each round; see :func:`run_round`."""
    return [run_round(arms, number, text) for number in range(rounds)]


def in_turn(names: Iterable[str], number: int) -> list[str]:
    """Return the order of the arms in round ``number``: reversed in every other round."""
    order = list(names)
    return order if number % 2 == 0 else order[::-1]


def run_round(arms: Mapping[str, Callable[[Path], T]], number: int, text: Callable[[T], str] = str) -> dict[str, T]:
    """Run every arm once, each in a new directory; once more if other programs have disturbed that.

    Args:
        arms: The arms, by name.
        number: The number of the round, from 0.
        text: Describes the result of an arm in one line.

    Raises:
        SystemExit: see :func:`undisturbed`.
    """

    def measure() -> dict[str, T]:
        results: dict[str, T] = {}
        for name in in_turn(arms, number):
            wait_until_quiet()
            with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
                results[name] = arms[name](Path(folder))
            print(f"  round {number + 1}, {name}: {text(results[name])}", flush=True)
        return results

    return undisturbed(measure)


def wait_until_quiet() -> None:
    """Wait until the CPU load of the machine is below ``QUIET_PCT``, for ``QUIET_TIMEOUT_S`` at most."""
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    while psutil.cpu_percent(interval=1.0) > QUIET_PCT and time.monotonic() < deadline:
        pass


def ratios(rounds: Rounds, numerator: str, denominator: str, metric: str) -> list[float]:
    """Return a metric of one arm divided by that of another, for each round."""
    return [getattr(r[numerator], metric) / getattr(r[denominator], metric) for r in rounds]


def median(rounds: Rounds, arm: str, metric: str) -> float:
    """Return the median of an arm's metric over the rounds."""
    return float(statistics.median(getattr(r[arm], metric) for r in rounds))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A goal for the median of some ratios: either ``at_least`` or ``at_most``, or none."""

    name: str
    ratios: Sequence[float]
    at_least: float = 0.0
    at_most: float = math.inf

    def row(self) -> list[str]:
        """Return the claim's row in the table of claims."""
        middle = statistics.median(self.ratios)
        goal = (
            f">= {self.at_least:.2f}" if self.at_least else "" if self.at_most == math.inf else f"<= {self.at_most:.2f}"
        )
        reached = "" if not goal else "yes" if self.at_least <= middle <= self.at_most else "no"
        spread = f"{min(self.ratios):.3f} to {max(self.ratios):.3f}"
        each = " ".join(f"{r:.3f}" for r in self.ratios)
        return [self.name, f"**{middle:.3f}**", goal, reached, spread, each]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def slug(name: str) -> str:
    """Return a name for a file: ``NVIDIA H100 80GB HBM3`` is ``nvidia-h100-80gb-hbm3``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def rates_table(rounds: Rounds) -> str:
    """Return a table of each arm's throughput and step time."""
    rows = [[arm, f"{median(rounds, arm, 'samples_per_s'):,.0f}", f"{median(rounds, arm, 'step_ms_p50'):.2f}"]
            for arm in rounds[0]]  # fmt: skip
    return table(["arm", "samples/s", "median step, ms"], rows)


def report(
    name: str, claims: Sequence[Claim], *, ceiling: float | None, rounds: Mapping[str, Rounds], notes: str, keep: bool
) -> None:
    """Print the result and, with ``keep``, save it.

    Args:
        name: The base name of the files: ``results/<name>.md``, and ``.json`` if there are ``rounds``.
        claims: The rows of the table of claims.
        ceiling: The machine's C; None if the benchmark does not measure it.
        rounds: Every timing, by the name of the comparison.
        notes: Markdown that follows the table.
        keep: Whether to write the files.
    """
    machine = _machine() if ceiling is None else f"{_machine()}; C = {ceiling:.2f}"
    if DISTURBED_FROM > QUIET_SHARE:
        machine += f"; other programs used up to {DISTURBED_FROM:.0%} of the CPUs"
    where = f"{date.today()}, {code_version()}: {machine}. Compare the ratios: absolute times depend on the machine."
    head = ["claim", "median", "goal", "reached", "spread", "each round"]
    text = "\n\n".join([f"# {name}", where, table(head, [c.row() for c in claims]), notes]) + "\n"
    print("\n" + text)
    if not keep:
        return
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    if not rounds:
        return
    timings = {key: [{arm: asdict(t) for arm, t in r.items()} for r in rs] for key, rs in rounds.items()}
    (RESULTS / f"{name}.json").write_text(json.dumps({"ceiling": ceiling, "rounds": timings}, indent=1) + "\n")


def code_version() -> str:
    """Return the commit of the code that is measured, and whether it has been changed since."""
    facts = git_facts(Path(__file__).parent)
    return "no commit" if facts is None else f"commit {facts.commit[:9]}{', changed' if facts.dirty else ''}"


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0))
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "ray", "mlflow"))
    return f"{cores} cores ({model or platform.machine()}), Python {platform.python_version()}, {versions}"
