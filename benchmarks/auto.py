"""How well ``strategy=auto`` predicts and chooses: every candidate of seven jobs, predicted and measured.

The regret is the step time of its choice over that of the best candidate. It chooses by measurements, of the candidates
that a run would measure by default.

python benchmarks/auto.py [--jobs digits gpt]
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.arms import execute
from harness.disturbance import undisturbed
from harness.rounds import Claim, argument_parser, report, table, wait_until_quiet

from orchestrator.features.auto.choice import Contender, best, next_to_measure

JOBS: dict[str, Sequence[str]] = {
    "digits": ("job=digits", "job.hidden=1024"),
    "gpt": ("job=gpt", "train.global_batch_size=32"),
    "gpt, larger": ("job=gpt", "job.layers=6", "job.width=256", "train.global_batch_size=16"),
    "resnet50": ("job=resnet50", "train.global_batch_size=16", "strategy.measured_steps=8"),
    "unbalanced": ("job._target_=auto_jobs.Unbalanced",),
    "tiny layers": ("job._target_=auto_jobs.TinyLayers",),
    "mostly embedding": ("job._target_=auto_jobs.MostlyEmbedding",),
}
MEASURED_BY_AUTO = 3
"""The default of ``strategy.measured``."""
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Outcome:
    """The candidates of a job that were measured, with their predictions, and the time until these were made."""

    contenders: Sequence[Any]
    planning_s: float

    @property
    def predicted(self) -> list[Any]:
        """The candidates that were predicted."""
        return [c for c in self.contenders if c["prediction"] is not None]

    @property
    def errors(self) -> list[float]:
        """The relative errors of the predictions, without their signs."""
        return [abs(c["prediction"]["step_ms"] / c["measured_ms"] - 1) for c in self.predicted]

    @property
    def regret(self) -> float:
        """The step time of the choice over that of the best candidate."""
        known = [
            Contender(
                overrides=(c["name"],),
                world_size=c["world_size"],
                predicted_ms=None if c["prediction"] is None else c["prediction"]["step_ms"],
            )
            for c in self.contenders
        ]
        while (index := next_to_measure(known, MEASURED_BY_AUTO)) is not None:
            known[index] = replace(known[index], measured_ms=float(self.contenders[index]["measured_ms"]))
        chosen = best(known)
        assert chosen is not None
        assert chosen.measured_ms is not None
        return chosen.measured_ms / min(float(c["measured_ms"]) for c in self.contenders)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS), help="the jobs to try")
    arguments = parser.parse_args()
    outcomes = {job: undisturbed(partial(try_out, job)) for job in arguments.jobs}
    errors = [error for outcome in outcomes.values() for error in outcome.errors]
    claims = [
        Claim(name="mean error of the predicted step time", ratios=[statistics.fmean(errors)], at_most=0.08),
        Claim(name="largest error", ratios=[max(errors)], at_most=0.25),
        Claim(
            name="largest step time of the choice / of the best candidate",
            ratios=[max(o.regret for o in outcomes.values())],
            at_most=1.03,
        ),
        Claim(name="longest planning, s", ratios=[max(o.planning_s for o in outcomes.values())], at_most=10),
    ]
    of_jobs = [
        [
            job,
            str(len(o.contenders)),
            f"{100 * statistics.fmean(o.errors):.0f}",
            f"{100 * max(o.errors):.0f}",
            f"{o.regret:.2f}",
            f"{o.planning_s:.1f}",
            min(o.contenders, key=lambda c: float(c["measured_ms"]))["name"],
        ]
        for job, o in outcomes.items()
    ]
    heads = ["job", "candidates", "mean error, %", "largest error, %", "regret", "planning, s", "best"]
    candidates = [
        [job, c["name"], f"{c['prediction']['step_ms']:.4g}" if c["prediction"] else "", f"{c['measured_ms']:.4g}"]
        for job, o in outcomes.items()
        for c in o.contenders
    ]
    notes = "\n\n".join(
        [table(heads, of_jobs), table(["job", "candidate", "predicted, ms", "measured, ms"], candidates)]
    )
    report("auto", claims, ceiling=None, rounds={}, notes=notes, keep=not arguments.quick)


def try_out(job: str) -> Outcome:
    """Predict and measure all candidates of a job in one command."""
    wait_until_quiet()
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        overrides = ["strategy=auto", "strategy.measured=1000", "cluster=local", "tracking=none", "train.steps=2"]
        jobs = Path(__file__).parent / "auto_jobs.py"
        (Path(folder) / jobs.name).write_text(jobs.read_text())
        execute(["-m", "orchestrator.launch", *overrides, *JOBS[job]], Path(folder), timeout_s=TIMEOUT_S)
        (found,) = Path(folder).glob("outputs/[0-9]*/*/auto.json")
        record = json.loads(found.read_text())
    measured = [c for c in record["contenders"] if c["measured_ms"] is not None]
    outcome = Outcome(measured, record["planning_s"])
    print(f"  {job}: mean error {statistics.fmean(outcome.errors):.0%}, regret {outcome.regret:.2f}", flush=True)
    return outcome


if __name__ == "__main__":
    main()
