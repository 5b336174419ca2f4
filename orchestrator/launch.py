"""Train a job: ``orchestrator launch strategy=ddp``, or ``python -m orchestrator.launch strategy=ddp``.

``--restarts=3`` starts the command again if its process dies, for example killed by a signal, to continue the same run.

Exit codes: 0 done; 1 training failed; 2 the configuration or the plan is wrong, the run to resume is running, or the
cluster has become too small for the run, and nothing was trained; 3 all steps are done, but the last checkpoint is
lost; 129, 130 and 143 stopped by SIGHUP (a closed terminal), SIGINT or SIGTERM; the reason says whether a checkpoint
was saved.
"""

from __future__ import annotations

import atexit
import gc
import sys
import traceback
from collections.abc import Mapping, Sequence

from orchestrator.config.build import ConfigError
from orchestrator.config.redact import Redactor, masked_output
from orchestrator.config.text import did_you_mean
from orchestrator.display.terminal import lasting_output
from orchestrator.exit_codes import BAD_INPUT, FAILED, INTERRUPTED
from orchestrator.user_code.exits import exits_refused

HELP_OPTIONS = ("-h", "--help")
COMPLETION_OPTIONS = ("-sc", "--shell-completion")
RESTARTS_OPTION = "--restarts"
_OPTIONS = (*HELP_OPTIONS, "-m", "--multirun", RESTARTS_OPTION)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    atexit.register(_spare_garbage_search)
    redactor = Redactor.of_process()
    with lasting_output(), masked_output(redactor):
        try:
            with exits_refused(hard=True):
                return _launch(list(sys.argv[1:] if argv is None else argv), redactor)
        except ConfigError as e:
            from orchestrator.display.report import errors_text

            print(errors_text(e.errors), file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception:
            traceback.print_exc()  # here, because the interpreter would print it unmasked
            return FAILED


def _spare_garbage_search() -> None:
    """Keep the interpreter from searching torch's objects for garbage at its end, which takes a second."""
    if "triton" not in sys.modules:  # triton reports each of its objects that are not collected as a leak
        gc.freeze()


def _launch(arguments: Sequence[str], redactor: Redactor) -> int:
    options = [w for w in arguments if w.startswith("-")]
    overrides = [w for w in arguments if not w.startswith("-")]
    if any(o in COMPLETION_OPTIONS for o in options):
        _complete()
        return 0
    if unknown := [o for o in options if o.partition("=")[0] not in _OPTIONS]:
        valid = _OPTIONS + COMPLETION_OPTIONS
        raise ConfigError(f"{o}: unknown option; {did_you_mean(o, valid)}" for o in unknown)
    if any(o in HELP_OPTIONS for o in options):
        from orchestrator.config.help import help_text
        from orchestrator.strategies import registry

        print(help_text(overrides, registry.config_class))
        return 0
    if restarts := [o for o in options if o.partition("=")[0] == RESTARTS_OPTION]:
        from orchestrator.driver.submit.restarts import launch_with_restarts

        return launch_with_restarts(overrides, _number_of_restarts(restarts[-1], options), redactor)
    preset, runs = _runs(overrides, sweep=bool(options))
    if runs is None:
        return _search(overrides, preset, redactor)
    if len(runs) > 1:
        return _sweep(overrides, runs, redactor)
    from orchestrator.driver.process.early_start import early_start
    from orchestrator.driver.process.signals import StopSignals

    with StopSignals(owns_process=True) as stop, early_start(runs[0]):
        # Imported here because this takes seconds, in which Ray's processes start.
        from orchestrator.driver.candidates import check_all
        from orchestrator.driver.process.reports import report_end
        from orchestrator.driver.session import run_all
        from orchestrator.records.process import process_started_at

        results = run_all(check_all(runs, redactor), stop, started_at=process_started_at())
        report_end()  # of plan=true, too
    return max((result.exit_code for result in results), default=0)


def _runs(overrides: Sequence[str], *, sweep: bool) -> tuple[Mapping[str, str], Sequence[Sequence[str]] | None]:
    """Return what the preset of a sweep sets, and the overrides of each run; None for these if they are searched."""
    # Imported here because --help must not wait seconds for torch and Ray.
    from orchestrator.config.compose import preset_sweep
    from orchestrator.config.overrides import expand_sweep, values
    from orchestrator.config.search_space import example, is_search

    preset, given = preset_sweep(overrides), values(overrides)
    if not sweep and preset.keys() - given.keys():
        raise ConfigError([f"experiment={given['experiment']}: a sweep of several runs; add -m"])
    if not is_search(overrides, preset):
        return preset, expand_sweep(overrides, preset) if sweep else [list(overrides)]
    if not sweep:
        raise ConfigError(["sweep.trials: a search of several runs; add -m"])
    return preset, [example(overrides, preset)] if given.get("plan") else None


def _sweep(overrides: Sequence[str], runs: Sequence[Sequence[str]], redactor: Redactor) -> int:
    from orchestrator.driver.candidates import check_all
    from orchestrator.driver.sweep.sweep import open_sweep
    from orchestrator.driver.sweep_session import run_sweep

    sweep, remaining = open_sweep(overrides, runs, redactor)
    return run_sweep(check_all(remaining, redactor, sweep=sweep), sweep)


def _search(overrides: Sequence[str], preset: Mapping[str, str], redactor: Redactor) -> int:
    from orchestrator.driver.sweep.search import open_search
    from orchestrator.driver.sweep_session import run_search

    return run_search(open_search(overrides, preset, redactor))


def _number_of_restarts(option: str, options: Sequence[str]) -> int:
    number = option.partition("=")[2]
    if not number.isdecimal():
        raise ConfigError([f"{option}: expected a whole number, as in {RESTARTS_OPTION}=3"])
    if len(options) > 1:
        raise ConfigError([f"{option}: only for a single run, without other options"])
    return int(number)


def _complete() -> None:
    from orchestrator.config.compose import shell_completion

    if sys.argv[0].endswith(".py"):
        raise ConfigError(["--shell-completion: works only for the `orchestrator` command; install it with pip"])
    shell_completion()


if __name__ == "__main__":
    sys.exit(main())
