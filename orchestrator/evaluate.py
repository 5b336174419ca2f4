"""Evaluate a checkpoint of a run, without training: ``orchestrator evaluate <run> strategy=ddp``.

The evaluation is a run of its own, with the configuration of the other one and ``evaluate=<run>``. Exit codes are those
of ``launch``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.config.eval_splits import VAL
from orchestrator.config.redact import Redactor
from orchestrator.records.output_dir import fetch
from orchestrator.records.run_search import RunSearch
from orchestrator.user_code.results import kind_of
from orchestrator.verb_options import add_files, add_run, file_words
from orchestrator.verb_outcome import outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="orchestrator evaluate",
        description="Evaluate a checkpoint of a run, without training, as a run of its own.",
    )
    add_run(parser)
    add_files(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="what differs from the run, as for launch")
    parser.add_argument("--best", action="store_true", help="the checkpoint of its best evaluation, not the newest one")
    parser.add_argument(
        "--split",
        action="append",
        metavar="NAME",
        help="data to evaluate, instead of train.eval_splits; may be repeated",
    )
    parser.add_argument(
        "--data",
        action="append",
        metavar="PATH",
        help="files to evaluate as the validation set of the job, without the recorded data; may be repeated",
    )
    options = parser.parse_intermixed_args(argv)
    return outcome("evaluate", lambda: _evaluate(options), Redactor.of_process(), refused=(OSError, ValueError))


def _evaluate(options: argparse.Namespace) -> int:
    if options.address is not None:
        raise ValueError(f"--address={options.address}: on a cluster, use `orchestrator submit` with evaluate=<run>")
    run_dir = RunSearch.of(options.output_dir).look_up(options.run, trained=True)
    fetch(run_dir, [run_dir.config_file.name])
    # Imported here because --help must not wait for Hydra.
    from orchestrator import launch
    from orchestrator.config.overrides import quote_text, values
    from orchestrator.config.recorded_config import overrides_to_evaluate

    words = [*file_words(options), *options.overrides]
    if options.data:
        words += _data_overrides(run_dir.config_file, options.data)
    if splits := options.split or (options.data and [VAL]):
        words.append(f"train.eval_splits=[{','.join(splits)}]")
    if "name" not in values(words):
        name = f"{run_dir.read_record().get('name', 'run')}-evaluation"
        words.append(f"name={quote_text(name)}")
    evaluated = f"{run_dir.location}/checkpoints/best" if options.best else run_dir.location
    return launch.main([*overrides_to_evaluate(run_dir.config_file, words), f"evaluate={quote_text(evaluated)}"])


def _data_overrides(config_file: Path, paths: Sequence[str]) -> list[str]:
    """Return the overrides that let the job of a run evaluate the files ``paths``.

    Raises:
        ValueError: the class of the job cannot be imported, or has no fields for them.
    """
    from orchestrator.config.arguments import read_arguments
    from orchestrator.config.job_loader import find_class
    from orchestrator.config.recorded_config import recorded_job

    target, errors = recorded_job(config_file).target, list[str]()
    cls = find_class(target, errors)
    if cls is None:
        raise ValueError("; ".join(errors))
    fields = cls.fields_to_evaluate(paths)
    if fields is None:
        raise ValueError(
            f"--data {paths[0]}: {target} names no fields for its data (Job.fields_to_evaluate); override those that "
            "it has, as in job.<field>=<value>"
        )
    if not isinstance(fields, Mapping):
        raise ValueError(f"{target}.fields_to_evaluate returns {kind_of(fields)}; return a dict of fields, or None")
    return list(read_arguments([{"job": dict(fields)}], {}).overrides)


if __name__ == "__main__":
    sys.exit(main())
