"""How far off ``orchestrator plan`` is on this machine: every layout of a small ``gpt`` on two of its CPUs, with gloo.

Each is predicted twice: with the rates of a core, and with the shares of them that a run of the replicas reaches, as
``--measured`` takes them.

python benchmarks/plan.py
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path

from harness.arms import Workload, launch, workload_overrides
from harness.disturbance import undisturbed
from harness.rounds import Claim, argument_parser, report, table, wait_until_quiet

from orchestrator.config.redact import Redactor
from orchestrator.display.forecasts import name
from orchestrator.driver.layouts import answer
from orchestrator.prediction.devices import parse_cluster, read_tables
from orchestrator.prediction.forecast import Answer, Forecast
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies.this_machine import with_cpus

WORKLOAD = Workload(
    job="jobs.gpt.GPT",
    fields={"layers": 4, "width": 256, "context": 128, "sample_tokens": 0},
    global_batch_size=32,
    steps=24,
    log_every=8,
)
QUICK_LAYOUTS = 2
HERE = ["cluster.address=local", "tracking=none"]


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    cluster = parse_cluster("1x2xcpu", with_cpus(read_tables()))
    words = [*workload_overrides(WORKLOAD), *HERE]
    found = answer(words, cluster, Redactor())
    reference = next(f for f in found.fitting if f.mesh.replicate == 2 and not f.step.recompute)
    others = [f for f in found.fitting if f is not reference][: QUICK_LAYOUTS if arguments.quick else None]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as parent:
        run = undisturbed(partial(measure, found, reference, Path(parent)))
        measured = {f.overrides: step_ms(undisturbed(partial(measure, found, f, Path(parent)))) for f in others}
        again, run_ms = answer(words, cluster, Redactor(), measured=run), step_ms(run)
    fitted = {f.overrides: 1e3 * f.seconds for f in again.fitting}
    compared = [(name(f), 1e3 * f.seconds, fitted.get(f.overrides), measured[f.overrides]) for f in others]
    by_rates = [abs(rates / real - 1) for _, rates, _, real in compared]
    by_run = [abs(own / real - 1) for _, _, own, real in compared if own is not None]
    claims = [
        Claim(
            name="mean error of the predicted step time, with the rates of a core", ratios=[statistics.fmean(by_rates)]
        ),
        Claim(name="mean error, with the shares that a run reaches", ratios=[statistics.fmean(by_run)], at_most=0.10),
    ]
    rows = [
        [layout, f"{rates:.4g}", "" if own is None else f"{own:.4g}", f"{real:.4g}"]
        for layout, rates, own, real in compared
    ]
    shares = f"The run of {name(reference)} took {run_ms:.4g} ms; products reach {again.question.stack.products:.0%}."
    heads = ["layout", "predicted by rates, ms", "predicted by a run, ms", "measured, ms"]
    report("plan", claims, ceiling=None, rounds={}, notes=f"{shares}\n\n{table(heads, rows)}", keep=not arguments.quick)


def measure(found: Answer, forecast: Forecast, parent: Path) -> RunDir:
    """Train with a layout, and return the run."""
    wait_until_quiet()
    folder = Path(tempfile.mkdtemp(dir=parent))
    run = launch(WORKLOAD, [*HERE, *found.assumed, *forecast.overrides], folder)
    print(f"  {name(forecast)}: {step_ms(run):.4g} ms, predicted {1e3 * forecast.seconds:.4g} ms", flush=True)
    return run


def step_ms(run: RunDir) -> float:
    return float(run.read_record()["summary"]["step_ms_p50"])


if __name__ == "__main__":
    main()
