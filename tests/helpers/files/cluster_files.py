"""The files below ``cluster/``, and the commands in them."""

import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from helpers.records.runs import ROOT
from orchestrator.config.compose import compose
from orchestrator.config.job_loader import load_job
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.strategies import registry

CLUSTER = ROOT / "cluster"
KUBERNETES = CLUSTER / "kubernetes"
LAUNCH = ["python", "-m", "orchestrator.launch"]


def documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return list(yaml.safe_load_all(path.read_text()))


def launched(command: str) -> Config:
    """The configuration that a command composes, whose job and fields exist."""
    words = shlex.split(command)
    assert words[:3] == LAUNCH, command
    errors: list[str] = []
    config, job = compose([w for w in words[3:] if not w.startswith("-")], errors, registry.config_class)
    if job is not None:
        load_job(job, errors, Redactor.of_process())
    assert not errors, errors
    assert config is not None
    return config


def ray_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """The subcommands of ``ray`` that shell commands call, with their arguments up to ``--``."""
    for command in text.split(";"):
        words = shlex.split(command, comments=True)
        program = next((i for i, word in enumerate(words) if Path(word).name == "ray"), None)
        if program is not None:
            arguments = words[program + 2 :]
            yield words[program + 1], arguments[: arguments.index("--")] if "--" in arguments else arguments


def check_ray_command(name: str, arguments: list[str]) -> None:
    """Check that the installed Ray has this subcommand with these options."""
    with warnings.catch_warnings(action="ignore"):  # of the libraries that the import brings
        from ray.scripts.scripts import cli
    takes_options_of_start = name == "symmetric-run"
    commands = [cli.commands[name], *([cli.commands["start"]] if takes_options_of_start else [])]
    known = {option for command in commands for parameter in command.params for option in parameter.opts}
    used = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    assert used <= known, f"ray {name}: no option {used - known}"
