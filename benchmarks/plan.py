"""How far off ``orchestrator plan`` is on this machine: ten layouts of a small ``gpt`` on two of its CPUs, with gloo.

Each is predicted twice: with the rates of a core, and with the shares of them that a run of the replicas reaches, as
``--measured`` takes them. All layouts run in turn, in each round in the opposite order.

python benchmarks/plan.py
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path

from harness.arms import Workload, launch, workload_overrides
from harness.rounds import Claim, argument_parser, interleave, report, table

from orchestrator.config.redact import Redactor
from orchestrator.features.plan.forecasts import answer
from orchestrator.features.plan.model_work import with_cpus
from orchestrator.features.plan.prediction.cost import step_time
from orchestrator.features.plan.prediction.devices import parse_cluster, read_tables
from orchestrator.features.plan.prediction.forecast import Answer, Forecast
from orchestrator.features.plan.shown import name
from orchestrator.records.run_dir import RunDir

WORKLOAD = Workload(
    job="jobs.gpt.GPT",
    fields={"layers": 4, "width": 256, "context": 128, "sample_tokens": 0},
    global_batch_size=32,
    steps=24,
    log_every=8,
)
LAYOUTS, ROUNDS = 10, 2
QUICK_LAYOUTS = 2
HERE = ["cluster.address=local", "tracking=none"]


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    cluster = parse_cluster("1x2xcpu", with_cpus(read_tables()))
    words = [*workload_overrides(WORKLOAD), *HERE]
    found = answer(words, cluster, Redactor())
    reference = next(f for f in found.fitting if f.mesh.replicate == 2 and not f.step.recompute)
    others = [f for f in found.fitting if f is not reference][: QUICK_LAYOUTS if arguments.quick else LAYOUTS]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as parent:
        arms = {name(f): partial(measure, found, f, Path(parent)) for f in (reference, *others)}
        rounds = interleave(arms, rounds=1 if arguments.quick else ROUNDS, text=lambda run: f"{step_ms(run):.4g} ms")
        measured = {layout: statistics.median(step_ms(r[layout]) for r in rounds) for layout in arms}
        stack = answer(words, cluster, Redactor(), measured=rounds[-1][name(reference)]).question.stack
    fitted = [1e3 * step_time(found.question.work, f.step, cluster, stack).total for f in others]
    compared = [(name(f), 1e3 * f.seconds, own, measured[name(f)]) for f, own in zip(others, fitted, strict=True)]
    by_rates = [abs(rates / real - 1) for _, rates, _, real in compared]
    by_run = [abs(own / real - 1) for _, _, own, real in compared]
    claims = [
        Claim(
            name="mean error of the predicted step time, with the rates of a core",
            ratios=[statistics.fmean(by_rates)],
            at_most=0.10,
        ),
        Claim(name="mean error, with the shares that a run reaches", ratios=[statistics.fmean(by_run)], at_most=0.10),
    ]
    rows = [[layout, f"{rates:.4g}", f"{own:.4g}", f"{real:.4g}"] for layout, rates, own, real in compared]
    run_ms = measured[name(reference)]
    shares = f"The run of {name(reference)} took {run_ms:.4g} ms; products reach {stack.products:.0%}."
    heads = ["layout", "predicted by rates, ms", "predicted by a run, ms", "measured, ms"]
    report("plan", claims, ceiling=None, rounds={}, notes=f"{shares}\n\n{table(heads, rows)}", keep=not arguments.quick)


def measure(found: Answer, forecast: Forecast, parent: Path, _: Path) -> RunDir:
    """Train with a layout, and return the run, whose directory is below ``parent``."""
    return launch(WORKLOAD, [*HERE, *found.assumed, *forecast.overrides], Path(tempfile.mkdtemp(dir=parent)))


def step_ms(run: RunDir) -> float:
    return float(run.read_record()["summary"]["step_ms_p50"])


if __name__ == "__main__":
    main()
