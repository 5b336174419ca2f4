"""Rounds of arms, and what they say: arms run in turn and are compared within a round, because what the machine does
besides hits neighbours alike. A claim is the median of a ratio over the rounds."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import psutil
from arms import HERE, Arm, Timing

QUIET_PCT = 20.0
QUIET_TIMEOUT_S = 20.0
"""Before an arm, the longest wait until the machine does little else: what the arm before left, other people's work."""

Rounds = Sequence[Mapping[str, Timing]]


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, for a look; the results are not kept")
    return parser


def interleave(arms: Mapping[str, Arm], *, rounds: int) -> Rounds:
    return [run_round(arms, number) for number in range(rounds)]


def run_round(arms: Mapping[str, Arm], number: int) -> dict[str, Timing]:
    """Every arm once, each in a new directory; in odd rounds in reverse order."""
    timings: dict[str, Timing] = {}
    for name in arms if number % 2 == 0 else reversed(list(arms)):
        _wait_until_quiet()
        with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
            timings[name] = t = arms[name](Path(folder))
        said = f"start {t.startup_s:.2f} s, {t.samples_per_s:,.0f} samples/s, median step {t.step_ms_p50:.2f} ms"
        print(f"  round {number + 1}, {name}: {said}", flush=True)
    return timings


def _wait_until_quiet() -> None:
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    while psutil.cpu_percent(interval=1.0) > QUIET_PCT and time.monotonic() < deadline:
        pass


def ratios(rounds: Rounds, over: str, under: str, figure: str) -> list[float]:
    """A figure of the arm ``over`` divided by that of the arm ``under``, in each round."""
    return [getattr(r[over], figure) / getattr(r[under], figure) for r in rounds]


def median(rounds: Rounds, arm: str, figure: str) -> float:
    return float(statistics.median(getattr(r[arm], figure) for r in rounds))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the median of some ratios should be: ``at_least`` or ``at_most``, one of the two."""

    name: str
    ratios: Sequence[float]
    at_least: float = 0.0
    at_most: float = math.inf

    def row(self) -> list[str]:
        middle = statistics.median(self.ratios)
        goal = f">= {self.at_least:.2f}" if self.at_least else f"<= {self.at_most:.2f}"
        reached = "yes" if self.at_least <= middle <= self.at_most else "no"
        each = " ".join(f"{r:.3f}" for r in self.ratios)
        return [self.name, f"**{middle:.3f}**", goal, reached, each]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def rates_table(rounds: Rounds) -> str:
    """Each arm's throughput and step time."""
    rows = [[arm, f"{median(rounds, arm, 'samples_per_s'):,.0f}", f"{median(rounds, arm, 'step_ms_p50'):.2f}"]
            for arm in rounds[0]]  # fmt: skip
    return table(["arm", "samples/s", "median step, ms"], rows)


def report(
    name: str, claims: Sequence[Claim], *, ceiling: float | None, rounds: Mapping[str, Rounds], notes: str, keep: bool
) -> None:
    """Print the result; ``keep`` it in ``results/<name>.md``, with every timing of the ``rounds`` in ``.json``."""
    machine = _machine() if ceiling is None else f"{_machine()}; C = {ceiling:.2f}"
    where = f"{date.today()}: {machine}. Times are of this machine on this day, ratios travel."
    head = ["claim", "median", "goal", "reached", "each round"]
    text = "\n\n".join([f"# {name}", where, table(head, [c.row() for c in claims]), notes]) + "\n"
    print("\n" + text)
    if not keep:
        return
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / f"{name}.md").write_text(text)
    if not rounds:
        return
    timings = {key: [{arm: asdict(t) for arm, t in r.items()} for r in rs] for key, rs in rounds.items()}
    (results / f"{name}.json").write_text(json.dumps({"ceiling": ceiling, "rounds": timings}, indent=1) + "\n")


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0))
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "ray", "mlflow"))
    return f"{cores} cores ({model or platform.machine()}), Python {platform.python_version()}, {versions}"
