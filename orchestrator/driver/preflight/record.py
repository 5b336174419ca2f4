"""Open the run directory and write the record of the run, with the origin of its code."""

from __future__ import annotations

import dataclasses
import getpass
import importlib.metadata
import inspect
import os
import platform
import shlex
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from orchestrator.compat.ray_job import submission_id
from orchestrator.config.build import ConfigError
from orchestrator.config.overrides import masked
from orchestrator.config.recorded_config import to_yaml
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.config.text import settings_of_run
from orchestrator.driver.preflight.resume import Resume, refuse_if_taken
from orchestrator.driver.preflight.run_config import output_dir, params_of, recorded_config, unwritable
from orchestrator.driver.process.origin import HERE, Origin
from orchestrator.job import Job
from orchestrator.planning.plan import Plan
from orchestrator.records.git import VARIABLE, git_facts, name_in_repository
from orchestrator.records.lock import machine_facts, this_process
from orchestrator.records.output_dir import OutputDir, announce, take_over
from orchestrator.records.run_dir import RunDir
from orchestrator.records.run_search import SUBMISSION_TAG
from orchestrator.strategies.external.job import Script

VERSIONED = ("torch", "ray", "mlflow", "hydra-core")
_RECORDED_TRACKING = (
    "uri",
    "experiment",
    "request_timeout_s",
    "flush_timeout_s",
    "background_timeout_s",
    "log_model",
    "log_dataset",
)


def open_run(
    config: Config,
    job: Job,
    plan: Plan,
    resume: Resume | None,
    *,
    seen: Collection[str] = (),
    command: str,
    settings: str = "",
    sweep: Mapping[str, str] | None,
    redactor: Redactor,
) -> tuple[RunDir, str]:
    """Create or reopen the run directory and write its records.

    If several processes resume a run at once, or start one of this name with ``resume=auto``, the first one succeeds.

    Args:
        config: with absolute paths.
        job: its fields are part of the recorded configuration.
        plan: how the run begins.
        resume: the run to continue; None for a new one.
        seen: the directories of runs that the search for one to continue has found.
        command: the command line of the run.
        settings: what tells the run from others of its job, with secrets masked.
        sweep: what :meth:`Sweep.membership` returned; None if the run belongs to none.
        redactor: masks secrets in everything that is written.

    Returns:
        The run directory and the uid of the run.

    Raises:
        ConfigError: the directory cannot be written; or another process drives the run, and nothing has been written.
    """
    recorded = recorded_config(config, job, redactor)
    tracking = recorded["tracking"]
    record = {
        "name": plan.run_name,
        "state": "waiting",
        "driver": this_process(),
        "command": command,
        "strategy": plan.strategy,
        "job": plan.job,
        "plan": {**dataclasses.asdict(plan), "world_size": plan.world_size},
        "params": params_of(recorded) | script_arguments(job, redactor),
        "settings": settings,
        "tags": _tags(plan) | ({} if resume is None else {"resumed_from_step": str(resume.step)}),
        "source": source_of(job),
        "tracking": {k: tracking[k] for k in _RECORDED_TRACKING},
        "sweep": sweep,
    }
    text, record = to_yaml(recorded), redactor.data(record)  # before the lock, under which other commands wait
    output = output_dir(config)
    if resume is not None and resume.run_dir.remote is not None:
        output = OutputDir.containing(resume.run_dir)  # its URL may be another one than output_dir
    try:
        output.prepare()
        with output.locked():
            refuse_if_taken(config, resume, seen)
            run_dir = take_over(resume.run_dir) if resume else output.create(plan.run_name)
            run_dir.reserve_space()
            run_dir.config_file.write_text(text)
            uid = str(run_dir.read_record().get("uid") or uuid.uuid4().hex)
            started = {"uid": uid, "started": time.time(), "location": run_dir.location}
            run_dir.update_record(**record, **redactor.data(started))
            announce(run_dir)
    except OSError as e:
        raise ConfigError([unwritable(config, e)]) from e
    return run_dir, uid


def command_line(overrides: Sequence[str], redactor: Redactor, *, job: str = "", origin: Origin = HERE) -> str:
    """Return the command of a run, with secrets masked and only the last of several ``resume=``.

    This is a command line for where the user types. A ``job`` that was passed as an object has none, so
    that a call in Python starts it.
    """
    *_, last = [-1, *(number for number, o in enumerate(overrides) if o.startswith("resume="))]
    kept = [masked(o, redactor) for n, o in enumerate(overrides) if n == last or not o.startswith("resume=")]
    if job:
        return f"orchestrator.run({', '.join([redactor.text(job), *map(repr, kept)])})"
    return shlex.join(origin.relaunch(kept))


def settings_for_name(overrides: Sequence[str], job: Job, redactor: Redactor) -> str:
    """Return what tells a run from others, for its name; of a script, its arguments by name."""
    words = [masked(word, redactor) for word in overrides]
    if isinstance(job, Script):
        arguments = [f"{key}={value}" for key, value in script_arguments(job, redactor).items()]
        words = [*arguments, *(word for word in words if not word.startswith("job."))]
    return settings_of_run(words)


def script_arguments(job: Job, redactor: Redactor) -> dict[str, str]:
    """Return the arguments of a script as parameters of their own, secrets masked; empty for another job."""
    if not isinstance(job, Script):
        return {}
    masked_arguments: dict[str, str] = redactor.data(job.arguments())
    return {f"args.{key}": value for key, value in masked_arguments.items()}


def _tags(plan: Plan) -> dict[str, str]:
    tags = {
        "strategy": plan.strategy,
        "job": plan.job,
        "world_size": str(plan.world_size),
        "device": plan.device,
        "backend": "nccl" if plan.device == "cuda" else "gloo",
        "generation": "1",
        **machine_facts(),
        "version.python": platform.python_version(),
    }
    if (submitted := submission_id()) is not None:
        tags[SUBMISSION_TAG] = submitted
    for package in VERSIONED:
        tags[f"version.{package}"] = importlib.metadata.version(package)
    return tags


def source_of(job: Job) -> dict[str, str]:
    """Return the origin of the code of ``job``, or of its script, under MLflow's names without their ``mlflow.``.

    Git's values are left out if no commit has the job's file, or if git is missing or slow.
    """
    script = job if isinstance(job, Script) else None
    target = f"{type(job).__module__}.{type(job).__qualname__}" if script is None else script.script
    found = {"user": _user(), "source.type": "LOCAL", "source.name": target}
    if script is not None and script.kind != "file":
        return found
    try:
        file = Path(inspect.getfile(type(job)) if script is None else script.script).resolve()
    except (OSError, TypeError):  # a class of a notebook or of standard input
        return found
    name = name_in_repository(file)
    facts = git_facts(file.parent) if name or VARIABLE in os.environ else None
    if facts is None:
        return found
    return {
        **found,
        **({"source.name": name} if name else {}),
        "source.git.commit": facts.commit,
        "source.git.branch": facts.branch,
        "source.git.dirty": str(facts.dirty).lower(),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return "unknown"
