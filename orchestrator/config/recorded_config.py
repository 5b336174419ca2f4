"""The configuration that a run has recorded, for the runs and verbs that begin with its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.arguments import read_arguments
from orchestrator.config.compose import recorded_data, recorded_job
from orchestrator.config.files import GROUPS
from orchestrator.config.job_loader import unmasked
from orchestrator.config.overrides import values

_OF_ITS_TRAINING = frozenset(
    {"name", "resume", "evaluate", "start_from", "plan", "profile", "callbacks", "checkpoint", "sweep"}
)
"""Keys and sections that say how the run was trained, or have no meaning for another one."""
_KEYS_OF_ITS_TRAINING = ("train.stop_after", "train.stop_min_delta", "recovery.chaos")


def overrides_to_evaluate(config_file: Path, given: Sequence[str]) -> list[str]:
    """Return overrides that compose the recorded configuration for an evaluation, with those ``given`` in their place.

    A group among them, such as ``strategy=ddp``, replaces the whole recorded section.

    Args:
        config_file: ``config.yaml`` of a run.
        given: overrides as typed.

    Raises:
        ValueError: the recorded configuration cannot be read, or lacks a secret that neither ``given`` nor a default
            of the job has.
    """
    recorded = {key: value for key, value in recorded_data(config_file).items() if key not in _OF_ITS_TRAINING}
    keys = {"job" if key == "job._target_" else key for key in values(given)}
    if "job" in recorded and "job" not in keys:
        errors: list[str] = []
        job = unmasked(recorded_job(config_file), errors, given=keys)
        if errors:
            raise ValueError("; ".join(errors))
        recorded["job"] = {"_target_": job.target, **job.fields}
    replaced = (*_KEYS_OF_ITS_TRAINING, *keys)
    sections = tuple(f"{key}." for key in keys if key in GROUPS)
    words = read_arguments([recorded], {}).overrides
    return [word for word in words if word.partition("=")[0] not in replaced and not word.startswith(sections)] + list(
        given
    )


def why_no_checkpoint(config_file: Path) -> str:
    """Return what is wrong with a run that has no checkpoint, and what to name instead if it was an evaluation."""
    evaluated = recorded_data(config_file).get("evaluate") if config_file.exists() else None
    return "it has no checkpoint" + (f", because it evaluated {evaluated}; name that run" if evaluated else "")
