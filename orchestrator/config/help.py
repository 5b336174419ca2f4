"""The texts of ``--help``, ``--cfg`` and ``--info``. Imports no job, because jobs import torch."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from orchestrator import features
from orchestrator.compat.hydra import write_yaml, yaml_value
from orchestrator.config.build import ConfigError
from orchestrator.config.compose import StrategyConfigs, compose, composed_data
from orchestrator.config.files import GROUPS, Files, choices, summary
from orchestrator.config.job_source import fields_in_source
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.config.synonyms import SIZES
from orchestrator.config.text import did_you_mean, format_override
from orchestrator.config.typed import Typed, merged

WIDTH = 98
KEY_COLUMN = 42
SECTIONS = (
    "train",
    "strategy",
    "job",
    "checkpoint",
    "recovery",
    "data",
    "tracking",
    "display",
    "storage",
    "cluster",
    "sweep",
)
"""In the order of the help: the most used first, after the keys of no section."""

INTRODUCTION = """\
Train a PyTorch job on Ray actors; strategy=<name> selects how it is parallelised.

  python -m orchestrator.launch strategy=ddp                 on every GPU, or 2 workers on CPUs
  python -m orchestrator.launch strategy=ddp plan=true       print what would run where, and exit
  python -m orchestrator.launch job=gpt train.steps=200      a small language model
  python -m orchestrator.launch job=my_module.MyJob job.width=64              a job of your own
  python -m orchestrator.launch resume=auto                  continue the newest unfinished run
  python -m orchestrator.launch -m strategy=single,ddp       several runs, and their comparison
  python -m orchestrator.launch -m experiment=compare        every strategy that fits here
  python -m orchestrator.launch strategy=auto job=gpt        the fastest strategy for the job
  orchestrator submit strategy=ddp                           as a job of a Ray cluster

The command `orchestrator` is short for `python -m orchestrator.launch`.
From Python: orchestrator.run(["strategy=ddp"])."""

_OF_FEATURES = {" -m ": "several_runs.py", "strategy=auto": "choosing.py", "orchestrator submit": "verbs/submit.py"}
"""What a line of the introduction has whose feature may not be here, and a file of that."""

OPTIONS = """\
Options
  -m, --multirun                          run every combination of values: a,b range(1,4) glob(*)
  -h, --help                              print this text, for the given strategy, job and values
  -c, --cfg job|hydra|all                 print the configuration as a file for conf/, and exit
  -p, --package SECTION  --resolve        of --cfg, one section; values in place of interpolations
  -i, --info [defaults|searchpath|...]    print where the configuration comes from, and exit
  -cd, --config-dir DIR                   files of yours (default: conf, if there is one)
  -cn, --config-name NAME                 the file that composition begins with (default: config)
  --check                                 repeat the comparison with the whole model (train.check)
  --restarts=N                            start the command again if its process dies
  --version                               print the version
  --shell-completion install=bash         tab completion for `orchestrator`, also for zsh and fish:
                                          eval "$(orchestrator --shell-completion install=bash)"

Exit codes: 0 done; 1 training failed; 2 the configuration or the plan is wrong, nothing was
started; 3 all steps are done, but the last checkpoint or the upload of the records is missing;
129, 130 and 143 stopped by SIGHUP, SIGINT or SIGTERM, after a checkpoint if training had begun."""


def _introduction() -> list[str]:
    missing = [word for word, file in _OF_FEATURES.items() if not features.paths(file)]
    return [line for line in INTRODUCTION.splitlines() if not any(word in line for word in missing)]


def help_text(overrides: Sequence[str], strategy_config: StrategyConfigs) -> str:
    """Return the help for the configuration with ``overrides``, as each strategy and job has keys of its own.

    Raises:
        ConfigError: the overrides are wrong.
    """
    errors: list[str] = []
    config, _ = compose(overrides, errors, strategy_config)
    if config is None:
        raise ConfigError(errors)
    files = Files.of(overrides)
    lines = [*_introduction(), "", "Groups (group=name)"]
    lines += [_entry(group, ", ".join(choices(group, files))) for group in GROUPS]
    lines += ["", "Strategies"]
    lines += [_entry(name, summary("strategy", name, files)) for name in choices("strategy", files)]
    lines += ["", "Keys (key=value; shown with their current values)", *_keys(config, "")]
    for section in SECTIONS:
        of = strategy_config(config.strategy.name) if section == "strategy" else None
        entries = _job_fields(config) if section == "job" else _keys(getattr(config, section), f"{section}.", of)
        lines += ["", *entries]
    return "\n".join([*lines, "", OPTIONS])


def _keys(section: Any, prefix: str, cls: type[Any] | None = None) -> Iterator[str]:
    cls = cls or type(section)
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if "meaning" not in field.metadata:
            continue
        value, meaning = getattr(section, SIZES.get(field.name, field.name)), field.metadata["meaning"]
        if get_origin(hints[field.name]) is Literal:
            meaning += f" ({', '.join(get_args(hints[field.name]))})"
        key = f"{prefix}{field.name}"
        given = f"{key}={value:g}" if isinstance(value, float) else format_override(key, value)
        yield _entry(given, meaning)


def _job_fields(config: Config) -> Iterator[str]:
    yield _entry("job.<field>", f"fields of {config.job.target}:")
    fields = fields_in_source(config.job.target)
    if fields is not None:
        yield _wrapped("  ".join(_job_field(field, config.job.fields) for field in fields.values()))


def _job_field(field: ast.AnnAssign, given: Mapping[str, Any]) -> str:
    name = ast.unparse(field.target)
    if name in given:
        return format_override(f"job.{name}", given[name])
    try:
        return format_override(f"job.{name}", ast.literal_eval(field.value)) if field.value else f"job.{name}"
    except ValueError:
        return f"job.{name}"


def _entry(key: str, meaning: str) -> str:
    return _wrapped(f"{key:<{KEY_COLUMN - 3}} {meaning}", " " * KEY_COLUMN)


def _wrapped(text: str, indent: str = "    ") -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent=indent, break_long_words=False)


def config_text(words: Sequence[str], redactor: Redactor, *, kind: str, package: str | None, resolved: bool) -> str:
    """Return what ``words`` compose, as a file that may be put into ``conf/``.

    Args:
        words: options that choose files, and overrides.
        redactor: learns the secrets, and masks them.
        kind: one of :data:`~orchestrator.config.files.KINDS`: our keys, those of Hydra, or both.
        package: the key of the section to return; None for everything.
        resolved: replace interpolations by their values.

    Raises:
        ConfigError: the words cannot be composed, or there is no such section.
    """
    data: Any = composed_data(words, kind, resolved=resolved)
    redactor.learn(data)
    data = merged(data, redactor.data(data), lambda value, masked: _written(value, masked, resolved=resolved))
    for name in [] if package in (None, "_global_") else str(package).split("."):
        if not isinstance(data, Mapping) or name not in data:
            hint = did_you_mean(name, data) if isinstance(data, Mapping) else "valid: none"
            raise ConfigError([f"--package={package}: no such section; {hint}"])
        data = data[name]
    if not isinstance(data, (dict, list)):
        return f"{data}\n"
    return f"# @package {package or '_global_'}\n{write_yaml(data, Typed)}"


def _written(value: Any, masked: Any, *, resolved: bool) -> Any:
    """Return a value for a file: typed text as it is if a file says the same with it."""
    if isinstance(value, Typed) and str(value) == masked:
        if isinstance(value.value, float) and not math.isfinite(value.value):
            return str(value)  # no field takes it as a number
        return value if yaml_value(str(value)) == value.value else value.value
    if resolved and isinstance(masked, str):
        return re.sub(r"(\\*)\$\{", lambda m: f"{m[1] * 2}\\${{", masked)
    return masked
