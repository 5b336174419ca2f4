"""The front door: ``python -m orchestrator.launch strategy=ddp``.

Exit codes: 0 done, 1 training failed, 2 the configuration or the plan is wrong and nothing was
started, 130 and 143 interrupted after a checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from orchestrator.config.build import ConfigError, did_you_mean

BAD_INPUT = 2
OPTIONS = ("-h", "--help", "-m", "--multirun")
COMPLETION = ("-sc", "--shell-completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = [w for w in words if w.startswith("-")]
    overrides = [w for w in words if not w.startswith("-")]
    try:
        if any(o in COMPLETION for o in options):
            _complete()
        elif unknown := [o for o in options if o not in OPTIONS]:
            raise ConfigError(f"{o}: unknown option; {did_you_mean(o, OPTIONS + COMPLETION)}" for o in unknown)
        elif "-h" in options or "--help" in options:
            from orchestrator.config.help import help_text
            from orchestrator.strategies import registry

            print(help_text(overrides, registry.config_class))
        else:
            return _launch(overrides, sweep=bool(options))
    except ConfigError as e:
        from orchestrator.display.report import errors_text

        print(errors_text(e.errors), file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
    return 0


def _launch(overrides: Sequence[str], *, sweep: bool) -> int:
    from orchestrator.config.overrides import expand_sweep

    # Imported here, because torch and Ray take seconds that --help need not wait for.
    from orchestrator.driver.session import check_all, run_all

    candidates = check_all(expand_sweep(overrides) if sweep else [list(overrides)])
    return max((r.exit_code for r in run_all(candidates, owns_process=True)), default=0)


def _complete() -> None:
    from orchestrator.config.compose import shell_completion

    if sys.argv[0].endswith(".py"):
        raise ConfigError(["--shell-completion: only the `orchestrator` command can be completed; install it with pip"])
    shell_completion()


if __name__ == "__main__":
    sys.exit(main())
