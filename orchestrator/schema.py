"""Print the JSON Schema of configuration files, for an editor: ``orchestrator schema > conf/schema.json``.

Exit codes: 0 done; 2 the section or the configuration is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence

from orchestrator.config.build import ConfigError
from orchestrator.config.redact import Redactor
from orchestrator.display.plain_text import writable
from orchestrator.verb_options import add_files, file_words
from orchestrator.verb_outcome import outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="orchestrator schema",
        description="Print the JSON Schema of configuration files, for an editor.",
        epilog="In a file: # yaml-language-server: $schema=schema.json",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="SECTION | key=value",
        help="the section that a file has, such as strategy (default: all); job=<name> for the fields of a job",
    )
    add_files(parser)
    options = parser.parse_intermixed_args(argv)
    overrides = [word for word in options.words if "=" in word]
    sections = [word for word in options.words if "=" not in word]
    if len(sections) > 1:
        parser.error(f"{' '.join(sections)}: name one section")
    redactor = Redactor.of_process()

    made: list[dict[str, object]] = []

    def body() -> int:
        with contextlib.redirect_stdout(sys.stderr):  # what the module of the job prints
            made.append(_schema([*file_words(options), *overrides], redactor, *sections))
        return 0

    code = outcome("schema", body, redactor)
    for schema in made:  # has its masks, which are JSON
        print(writable(json.dumps(schema, indent=2, ensure_ascii=False), sys.stdout))
    return code


def _schema(words: Sequence[str], redactor: Redactor, section: str | None = None) -> dict[str, object]:
    from orchestrator.config.compose import compose
    from orchestrator.config.files import choices
    from orchestrator.config.json_schema import json_schema
    from orchestrator.config.recorded_config import to_dict
    from orchestrator.strategies import registry

    errors: list[str] = []
    config, job = compose(words, errors, registry.config_class)
    if errors:
        raise ConfigError(errors)
    from orchestrator.config.job_loader import find_class  # imports torch

    cls = None if job is None else find_class(job.target, errors)
    if errors or config is None:
        raise ConfigError(errors)
    redactor.learn(to_dict(config))
    strategies = {name: registry.config_class(name) for name in choices("strategy")}
    return json_schema(config, strategies, cls, redactor, section)


if __name__ == "__main__":
    sys.exit(main())
