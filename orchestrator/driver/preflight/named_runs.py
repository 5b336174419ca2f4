"""The run that a user names by ``resume``, ``start_from`` or ``evaluate``, found without torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.build import ConfigError
from orchestrator.config.overrides import values
from orchestrator.config.recorded_config import recorded_job
from orchestrator.config.schema import Config
from orchestrator.config.text import did_you_mean, format_override, path_override
from orchestrator.driver.preflight.run_config import output_dir
from orchestrator.records.output_dir import OutputDir, name_of, split_run
from orchestrator.records.run_dir import RunDir
from orchestrator.records.run_search import NEWEST, NEWEST_ELSEWHERE, RunSearch, leaves_model
from orchestrator.storage.remote import is_url

_NEWEST = "last is the newest run that has trained"
_BEST = "the best checkpoint of the newest run is last/checkpoints/best"
_UNFINISHED = "auto is the newest unfinished run of this name"
_MEANT = {
    "resume": {
        **dict.fromkeys(("true", "yes", "on", "1", "always", "must", "allow"), f"{_UNFINISHED}, and {_NEWEST}"),
        **dict.fromkeys(("false", "no", "off", "0", "none"), "never begins a new run"),
        "best": "a run continues from its newest checkpoint; start_from=last/checkpoints/best begins a new one",
    },
    "start_from": {**dict.fromkeys(("auto", "true"), _NEWEST), "best": _BEST},
    "evaluate": {**dict.fromkeys(("auto", "true"), _NEWEST), "best": _BEST},
}
"""What to say of words that other launchers take, if no run is named so."""
_CHOOSES_JOB = re.compile(r"\+*(job|experiment)\b|-")
"""The beginning of a word that chooses a job, or files that may do so."""
_CALL = "orchestrator.run("
"""The beginning of the command of a run that a program has started."""


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
    meant = {**dict.fromkeys(NEWEST_ELSEWHERE, _NEWEST), **_MEANT[key]}
    if text.lower() in meant:
        raise ConfigError([f"{key}={text}: no run is named so; {meant[text.lower()]}"])
    looked = " or ".join(dict.fromkeys(str(path / "run.json") for path in places))
    names = output.names()
    known = did_you_mean(text, names[:8]) if names else f"there are no runs below {output} (output_dir)"
    raise ConfigError([f"{key}={text}: no run directory there; {known} (looked for {looked})"])


def chooses_job(words: Sequence[str]) -> bool:
    """Return whether any of the words that the user has typed chooses a job, or files that may do so."""
    return any(map(_CHOOSES_JOB.match, words))


def other_job(config: Config, run_dir: RunDir, *, key: str, words: Sequence[str] = ()) -> str | None:
    """Return an error if the run that ``key`` names has trained another job than ``config`` has; None otherwise.

    Args:
        words: what the user has typed, if it is known, so that the error has the whole command.
    """
    try:
        recorded, record = recorded_job(run_dir.config_file), run_dir.read_record()
    except (OSError, ValueError):
        return None
    if config.job is None or recorded.target == config.job.target:
        return None
    before = _typed_before(record)
    named = next((word for word in before if word.startswith("job=")), f"job={recorded.target}")
    remedy = _remedy(run_dir, before, words, key=key, to_add=f"{named}, and the fields that it was given", kept={"job"})
    jobs = f"{run_dir.location} has trained {recorded.target}, not {config.job.target}"
    return f"{key}={getattr(config, key)}: {jobs}; {remedy}"


def other_fields(
    config: Config,
    run_dir: RunDir,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    key: str,
    words: Sequence[str] = (),
) -> str | None:
    """Return the fields of the job that differ in the run that ``key`` names; None if none do.

    Args:
        before: the parameters of the run, of which those of its job begin with ``job.``.
        now: those of ``config``.
        words: as of :func:`other_job`.
    """
    fields = {k: value for k, value in now.items() if k.startswith("job.") and k in before and before[k] != value}
    if not fields:
        return None
    typed = _typed_before(run_dir.read_record())
    to_add = [format_override(k, before[k]) for k in fields]
    if typed and fields.keys().isdisjoint(values(typed)):  # the defaults of the class have changed, maybe
        typed += to_add
    remedy = _remedy(run_dir, typed, words, key=key, to_add=" ".join(to_add), kept=fields)
    differ = "; ".join(f"{k} was {before[k]}, is {value}" for k, value in fields.items())
    return f"{key}={getattr(config, key)}: the job of {run_dir.location} differs: {differ}; {remedy}"


def _typed_before(record: Mapping[str, Any]) -> list[str]:
    """Return the words of the command of a run; empty if a program has started it."""
    command = str(record.get("command") or "")
    return [] if command.startswith(_CALL) else shlex.split(command)


def _remedy(
    run_dir: RunDir, before: Sequence[str], words: Sequence[str], *, key: str, to_add: str, kept: Collection[str]
) -> str:
    """Return how to go on with the job of the run.

    Args:
        before: the words of the command of the run.
        words: those that the user has typed now.
        to_add: what makes another command right.
        kept: the keys whose values are those of before.
    """
    if key == "evaluate":
        return f"`orchestrator evaluate {shlex.quote(run_dir.location)}` evaluates it with its own job"
    if key == "start_from" or not before:
        return f"add {to_add}"
    own = _without(before, {"resume", *values(words)} - set(kept))
    added = _without(words, {"resume", *kept})
    return f"to resume it: {shlex.join([*own, *added, path_override('resume', run_dir.location)])}"


def _without(words: Sequence[str], keys: Collection[str]) -> list[str]:
    return [word for word in words if word.partition("=")[0].lstrip("+") not in keys]


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
