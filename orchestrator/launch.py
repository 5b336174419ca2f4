"""Train a job: ``orchestrator launch strategy=ddp``, or ``python -m orchestrator.launch strategy=ddp``.

``--check`` is ``train.check=always``. ``--restarts=3`` starts the command again if its process dies, for example killed
by a signal, to continue the same run.

Exit codes: 0 done; 1 training failed; 2 the configuration or the plan is wrong, the run to resume is running, or the
cluster has become too small for the run, and nothing was trained; 3 all steps are done, but the last checkpoint is
lost; 129, 130 and 143 stopped by SIGHUP (a closed terminal), SIGINT or SIGTERM; the reason says whether a checkpoint
was saved.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import NoReturn

from orchestrator import __version__, features
from orchestrator.config.build import ConfigError
from orchestrator.config.files import INFO_TOPICS, INFO_WITH_CONFIG, KINDS, OPTIONS
from orchestrator.config.redact import Redactor
from orchestrator.config.synonyms import instead_of_override
from orchestrator.config.text import did_you_mean
from orchestrator.verb_options import add_files, file_words
from orchestrator.verb_outcome import outcome, spare_garbage_search

HELP_OPTIONS = ("-h", "--help")
COMPLETION_OPTIONS = ("-sc", "--shell-completion")
VERSION_OPTION = "--version"
RESTARTS_OPTION = "--restarts"
CHECK_OPTION = "--check"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    atexit.register(spare_garbage_search)
    redactor = Redactor.of_process()
    words = list(sys.argv[1:] if argv is None else argv)
    return outcome("launch", lambda: _launch(words, redactor), redactor)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([message.removeprefix("argument ")])


def _read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return Hydra's options, and as ``words`` the overrides and the options that choose files.

    Raises:
        ConfigError: an option is unknown, or has no effect here.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument(*HELP_OPTIONS, action="store_true")
    parser.add_argument(*COMPLETION_OPTIONS, action="store_true")
    parser.add_argument(VERSION_OPTION, action="store_true")
    parser.add_argument(RESTARTS_OPTION)
    parser.add_argument(CHECK_OPTION, action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-r", "--run", action="store_true")
    parser.add_argument("-c", "--cfg", choices=KINDS)
    parser.add_argument("-p", "--package")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-i", "--info", nargs="?", const="all", choices=INFO_TOPICS)
    add_files(parser)
    # Hydra would take an override after --info as its value.
    pairs = zip(arguments, [*arguments[1:], ""], strict=False)
    words = ["--info=all" if w in ("-i", "--info") and after not in INFO_TOPICS else w for w, after in pairs]
    options, rest = parser.parse_known_intermixed_args(words)
    if rest:
        valid = [option for option in parser._option_string_actions if option not in ("-r", "--run")]
        instead = {o: f"has no effect here; {OPTIONS[n]}" for o in rest if (n := o.partition("=")[0]) in OPTIONS}
        unknown = [o for o in rest if o.startswith("-")]
        instead |= {o: f"keys are written key=value; {key}" for o in unknown if (key := _as_key(o))}
        raise ConfigError(f"{o}: {instead.get(o) or f'unknown option; {did_you_mean(o, valid)}'}" for o in unknown)
    options.words = [*file_words(options), *options.words, *(["train.check=always"] if options.check else [])]
    return options


def _as_key(option: str) -> str | None:
    """Return what to write in place of an option that is meant as a key; None if it is none."""
    name, _, value = option.lstrip("-").partition("=")
    section, _, key = name.rpartition(".")
    remedy = instead_of_override(key, value)
    if remedy is not None or not section:
        return remedy
    return f"write {name}={value or '...'}"


def _launch(arguments: Sequence[str], redactor: Redactor) -> int:
    options = _read_options(arguments)
    words = options.words
    if options.shell_completion:
        _complete()
        return 0
    if options.version:
        print(version_text())
        return 0
    if options.help:
        from orchestrator.config.help import help_text
        from orchestrator.strategies import registry

        print(help_text(words, registry.config_class))
        return 0
    if options.cfg or options.info or options.package or options.resolve:
        return _show(options, redactor)
    if options.restarts is not None:
        from orchestrator.driver.process.restarts import launch_with_restarts

        return launch_with_restarts(words, _number_of_restarts(options), redactor)
    from orchestrator.config.overrides import last_of_each, values
    from orchestrator.display.plain_text import say_note
    from orchestrator.driver.preflight.early_checks import refuse_early

    words = last_of_each(words, say_note)
    preset, runs = _runs(words, sweep=options.multirun)
    if runs is None:
        return int(_several_runs().run_search(words, preset, redactor))
    if {**preset, **values(words)}.get("sweep.unfit") != "skip":
        refuse_early(runs, redactor, starts_here=True)
    if len(runs) > 1:
        return int(_several_runs().run_sweep(words, runs, redactor))
    from orchestrator.driver.process.early_start import early_start
    from orchestrator.driver.process.signals import StopSignals

    with StopSignals(owns_process=True) as stop, early_start(runs[0]):
        # Imported here because this takes seconds, in which Ray's processes start.
        from orchestrator.driver.checked_runs import check_all
        from orchestrator.driver.process.origin import report_end
        from orchestrator.driver.session import run_all
        from orchestrator.records.lock import process_started_at

        results = run_all(check_all(runs, redactor), stop, started_at=process_started_at())
        report_end()  # of plan=true, too
    return max((result.exit_code for result in results), default=0)


def _runs(overrides: Sequence[str], *, sweep: bool) -> tuple[Mapping[str, str], Sequence[Sequence[str]] | None]:
    """Return what the preset of a sweep sets, and the overrides of each run; None for these if they are searched."""
    # Imported here because --help must not wait seconds for torch and Ray.
    from orchestrator.config.compose import preset_sweep
    from orchestrator.config.overrides import example, expand_sweep, is_search, values

    preset, given = preset_sweep(overrides), values(overrides)
    if not sweep and preset.keys() - given.keys() - {"sweep.unfit"}:
        chosen = f"experiment={given['experiment']}" if "experiment" in given else "the chosen files"
        raise ConfigError([f"{chosen}: a sweep of several runs; add -m"])
    if not is_search(overrides, preset):
        return preset, expand_sweep(overrides, preset) if sweep else [list(overrides)]
    if not sweep:
        raise ConfigError(["sweep.trials: a search of several runs; add -m"])
    return preset, [example(overrides, preset)] if given.get("plan") else None


def _several_runs() -> ModuleType:
    """Return what executes several runs of one command."""
    for found in features.modules("several_runs"):
        return found
    raise ConfigError(["-m: this installation executes one run at a time; give one value of each key"])


def _show(options: argparse.Namespace, redactor: Redactor) -> int:
    if options.multirun:
        raise ConfigError(["--cfg, --info: for a single run; leave out -m"])
    if not (options.cfg or options.info):
        raise ConfigError(["--package, --resolve: only with --cfg, as in --cfg job --package train"])
    from orchestrator.config.compose import print_info
    from orchestrator.config.help import config_text

    shown = config_text(
        options.words, redactor, kind=options.cfg or "job", package=options.package, resolved=options.resolve
    )
    if options.info:
        print_info(options.words, INFO_TOPICS[options.info])
    if options.cfg or options.info in INFO_WITH_CONFIG:
        print(shown, end="")
    return 0


def version_text() -> str:
    """Return what ``--version`` prints."""
    return f"orchestrator {__version__}, Hydra {version('hydra-core')}"


def _number_of_restarts(options: argparse.Namespace) -> int:
    option = f"{RESTARTS_OPTION}={options.restarts}"
    if not options.restarts.isdecimal():
        raise ConfigError([f"{option}: expected a whole number, as in {RESTARTS_OPTION}=3"])
    if options.multirun:
        raise ConfigError([f"{option}: only for a single run, without -m"])
    return int(options.restarts)


def _complete() -> None:
    """Answer a shell that completes the command line in ``COMP_LINE``, or print what installs the completion in it."""
    if sys.argv[0].endswith(".py"):
        raise ConfigError(["--shell-completion: works only for the `orchestrator` command; install it with pip"])
    line = os.environ.get("COMP_LINE")
    if line is None:
        from orchestrator.config.compose import shell_completion

        shell_completion([])
        return
    from orchestrator.completion import of_launch

    _, *typed = line.split() or [""]
    prefix = "" if line.endswith(" ") or not typed else typed.pop()
    try:
        words = _read_options(typed).words
    except ConfigError:  # options of other verbs, or a line that is not complete
        words = [word for word in typed if "=" in word and not word.startswith("-")]
    print("\n".join(sorted(of_launch(words, prefix))))


if __name__ == "__main__":
    sys.exit(main())
