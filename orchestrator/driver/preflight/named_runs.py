"""The run that a user names by ``resume``, ``start_from`` or ``evaluate``, found without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.build import ConfigError
from orchestrator.config.schema import Config
from orchestrator.config.text import did_you_mean
from orchestrator.driver.preflight.run_config import output_dir
from orchestrator.records.output_dir import OutputDir, name_of, split_run
from orchestrator.records.run_dir import RunDir
from orchestrator.records.run_search import NEWEST, RunSearch, leaves_model
from orchestrator.storage.remote import is_url


def named_run(config: Config, text: str, *, key: str, warnings: list[str]) -> RunDir:
    """Return the run that the user names by ``key=text``; ``warnings`` receives which one of several it is.

    Raises:
        ConfigError: there is no such run.
    """
    if text == NEWEST:
        return _newest_run(config, key=key, warnings=warnings)
    output = output_dir(config)
    if is_url(text):
        storage = config.storage
        above, name = split_run(text, staging_dir=storage.staging_dir, timeout_s=storage.timeout_s)
        if (found := above.find(name)) is not None:
            return found
        raise ConfigError([f"{key}={text}: no run directory there; its run.json is missing"])
    places = [Path(text).expanduser().absolute(), *([output.path / text] if output.remote is None else [])]
    for path in places:
        if (path / "run.json").is_file():
            return RunDir(path.resolve())
    if (found := next(RunSearch((output,)).named(text, trained=True), None)) is not None:
        if text != name_of(found):
            warnings.append(f"{key}={text} is {found.location}")
        return found
    looked = " or ".join(dict.fromkeys(str(path / "run.json") for path in places))
    names = output.names()
    known = did_you_mean(text, names[:8]) if names else f"there are no runs below {output} (output_dir)"
    raise ConfigError([f"{key}={text}: no run directory there; {known} (looked for {looked})"])


def _newest_run(config: Config, *, key: str, warnings: list[str]) -> RunDir:
    """Return the newest run that has trained, of the name that the user has given, if any."""
    output, name = output_dir(config), config.name
    for run_dir, record in readable(output, output.names(name), warnings):
        if name in (None, record.get("name")) and leaves_model(record):
            warnings.append(f"{key}={NEWEST} is {run_dir.location}")
            return run_dir
    named = "" if name is None else f" named {name}"
    raise ConfigError([f"{key}={NEWEST}: no run{named} below {output} (output_dir) has trained"])


def readable(
    output: OutputDir, names: Sequence[str], warnings: list[str]
) -> Iterator[tuple[RunDir, Mapping[str, Any]]]:
    """Yield the runs called ``names``, each with its record; ``warnings`` receives those whose record is damaged."""
    for run_dir in output.runs(names):
        try:
            yield run_dir, run_dir.read_record()
        except (OSError, ValueError) as e:
            warnings.append(f"run skipped: {e}")
