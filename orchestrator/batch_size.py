"""Find the largest batch that fits: ``orchestrator batch-size job=gpt strategy=ddp``.

Real runs of a few steps, each with twice the global batch of the one before, from ``train.global_batch_size`` on, until
memory runs out. On CPUs, the search also ends when larger batches are no faster, or may not fit into the memory of the
host. Nothing of these runs is recorded or uploaded.

Exit codes: 0 done; 1 no batch fits, or a run failed for another reason; 2 wrong arguments; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.config.build import ConfigError
from orchestrator.config.compose import refuse_wrong_keys
from orchestrator.config.redact import Redactor, masked_output
from orchestrator.display.plain_text import first_line, rate, writable
from orchestrator.strategies import registry
from orchestrator.tuning.batch_sizes import Trial, fastest, next_size
from orchestrator.user_code.errors import exits_refused
from orchestrator.verb_options import BAD_INPUT, FAILED, INTERRUPTED, add_files, file_words, positive

if TYPE_CHECKING:
    from orchestrator.driver.process.run_context import RunResult
    from orchestrator.planning.plan import Plan

KEY = "train.global_batch_size"
STEPS = 10
OUT_OF_MEMORY = "out of memory"
"""What the reason of a run has that has failed for want of memory."""
_HEADING = f"{'global batch':>12}  {'per worker':>10}  {'samples/s':>9}  memory of a worker"
FOLDER = "batch-size"
"""The directory below ``output_dir`` in which the runs are until they end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="orchestrator batch-size",
        description="Find the largest batch that fits, by runs of a few steps, each with twice the batch of the one "
        f"before. They begin with {KEY}.",
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="as for `orchestrator launch`")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"steps of each run (default: {STEPS})")
    parser.add_argument("--largest", type=positive, metavar="SAMPLES", help="the largest global batch to try")
    add_files(parser)
    options = parser.parse_intermixed_args(list(sys.argv[1:] if argv is None else argv))
    redactor = Redactor.of_process()
    with masked_output(redactor):
        try:
            with exits_refused(hard=True):
                return _search([*file_words(options), *options.words], options, redactor)
        except ConfigError as e:
            from orchestrator.display.report import errors_text

            print(errors_text(e.errors), file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception:
            traceback.print_exc()  # here, because the interpreter would print it unmasked
            return FAILED


def _search(words: Sequence[str], options: argparse.Namespace, redactor: Redactor) -> int:
    refuse_wrong_keys([words], redactor, registry.config_class)
    # Imported here because this takes seconds.
    import psutil

    from orchestrator.driver.checked_runs import check_all
    from orchestrator.driver.process.origin import this_origin
    from orchestrator.driver.process.signals import StopSignals
    from orchestrator.driver.session import brief_runs

    (checked_run,) = check_all([words], redactor)
    config = checked_run.config
    if config.strategy.name in ("auto", "script"):
        raise ConfigError([f"strategy={config.strategy.name}: it has no batch of its own; choose another strategy"])
    trials: list[Trial] = []
    why, others = "", [word for word in words if not word.startswith(f"{KEY}=")]
    size: int | None = config.train.global_batch_size
    with contextlib.ExitStack() as at_end:
        at_end.callback(shutil.rmtree, Path(config.output_dir) / FOLDER, ignore_errors=True)
        stop = at_end.enter_context(StopSignals(owns_process=True))
        run = at_end.enter_context(brief_runs(checked_run, stop, folder=FOLDER))
        while size is not None:
            try:
                (checked_run,) = check_all([[*others, f"{KEY}={size}"]], redactor)
            except ConfigError as e:
                if not trials:
                    raise
                why = first_line(e.errors[0])
                break
            plan, result = run(checked_run, options.steps)
            if result.status == "KILLED":
                return result.exit_code
            if not trials:
                _say(f"{plan.world_size} x {plan.device}\n\n{_HEADING}")
            trials.append(_trial(size, plan, result))
            _say(_row(trials[-1]))
            if trials[-1].refused and OUT_OF_MEMORY not in trials[-1].refused:
                _say(f"\nfailed for another reason; `orchestrator launch` with {KEY}={size} shows more")
                return FAILED
            size, why = next_size(
                trials,
                first=size,
                least=plan.mesh.data_parallel_size * config.train.grad_accumulation,
                largest=options.largest,
                on_cpu=plan.device == "cpu",
                free_mb=psutil.virtual_memory().available / 2**20 / plan.world_size,
            )
    fitting = [trial for trial in trials if not trial.refused]
    if not fitting:
        return FAILED
    largest, best = max(fitting, key=lambda trial: trial.size), fastest(fitting)
    _say(f"\nlargest that was tried and fits: {largest.size} ({largest.per_worker} per worker); {why}")
    if best.size != largest.size:
        _say(f"{best.size} ({best.per_worker} per worker) is about as fast")
    command = this_origin().relaunch([*others, f"{KEY}={largest.size}"])
    _say(f"next: {shlex.join(command)}")
    return 0


def _trial(size: int, plan: Plan, result: RunResult) -> Trial:
    return Trial(
        size=size,
        per_worker=-(-size // plan.mesh.data_parallel_size),
        samples_per_s=float(result.summary.get("samples_per_s") or 0.0),
        memory_mb=result.summary.get("peak_memory_mb"),
        refused="" if result.status == "FINISHED" else first_line(result.reason),
    )


def _row(trial: Trial) -> str:
    if trial.refused:
        return f"{trial.size:>12,}  {trial.per_worker:>10,}  {trial.refused}"
    memory = "" if trial.memory_mb is None else f"{trial.memory_mb:,.0f} MB"
    return f"{trial.size:>12,}  {trial.per_worker:>10,}  {rate(trial.samples_per_s):>9}  {memory}"


def _say(text: str) -> None:
    print(writable(text, sys.stdout), flush=True)


if __name__ == "__main__":
    sys.exit(main())
