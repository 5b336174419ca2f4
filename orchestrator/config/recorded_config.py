"""The configuration as a run records it, and as runs and verbs read it that begin with its checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from orchestrator.config.arguments import read_arguments
from orchestrator.config.compose import job_spec, recorded_data
from orchestrator.config.files import GROUPS, group_values
from orchestrator.config.job_loader import unmasked
from orchestrator.config.overrides import values
from orchestrator.config.schema import Config, JobSpec
from orchestrator.config.synonyms import GONE, SIZES
from orchestrator.config.typed import plain

_OF_ITS_TRAINING = frozenset(
    {"name", "resume", "evaluate", "start_from", "plan", "debug", "profile", "callbacks", "checkpoint", "sweep"}
)
"""Keys and sections that say how the run was trained, or have no meaning for another one."""
_KEYS_OF_ITS_TRAINING = (
    *GONE,
    *("train.epochs", "train.stop_after", "train.stop_min_delta", "recovery.chaos", "recovery.peer_copy_every"),
    "strategy.consistency",
)


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
    replaced = (*_KEYS_OF_ITS_TRAINING, *keys, *(["train.steps"] if "train.epochs" in keys else []))
    sections = tuple(f"{key}." for key in keys if key in GROUPS)
    words = read_arguments([recorded], {}).overrides
    return [word for word in words if word.partition("=")[0] not in replaced and not word.startswith(sections)] + list(
        given
    )


def why_no_checkpoint(config_file: Path) -> str:
    """Return what is wrong with a run that has no checkpoint, and what to name instead if it was an evaluation."""
    evaluated = recorded_data(config_file).get("evaluate") if config_file.exists() else None
    return "it has no checkpoint" + (f", because it evaluated {evaluated}; name that run" if evaluated else "")


def why_no_best(record: Mapping[str, Any]) -> str:
    """Return why a run has no checkpoint of its best evaluation, of its ``record``."""
    best = record.get("best")
    if not isinstance(best, Mapping):
        return "the run was trained without checkpoint.best"
    return f"the checkpoint of its best evaluation, {best.get('metric')} at step {best.get('step')}, is no longer there"


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as nested plain values, with the job's class under ``_target_`` as in the files."""
    data = plain(dataclasses.asdict(config, dict_factory=_with_lists))
    written = {"job": _written(data["job"]), "callbacks": [_written(callback) for callback in data["callbacks"]]}
    return {**data, **written, "strategy": _opened(data["strategy"])}


def _opened(strategy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a strategy that can be set, by the names in its file."""
    return {key: strategy[SIZES.get(key, key)] for key in group_values("strategy", strategy["name"])}


def _written(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"_target_": spec["target"], **spec["fields"]}


def _with_lists(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items}


def recorded_job(path: Path) -> JobSpec:
    """Return the job of the recorded configuration ``path``.

    Raises:
        ValueError: it names no class.
    """
    errors: list[str] = []
    spec = job_spec(recorded_data(path).get("job"), errors)
    if spec is None:
        raise ValueError(errors[0])
    return spec


def to_yaml(data: Mapping[str, Any]) -> str:
    """Return nested plain values as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(data)))
