"""The fields of a job that its evaluations change: the one way to change them, and what is built without the changes.

A rank has one job. What differs from it, such as the job of a rank with some tokens of each sample, asks it for every
attribute, and what another process has of it is made anew when :func:`changes_of` differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator.user_code.callbacks import Evaluation, Steering
from orchestrator.user_code.errors import JobError

_STEERED = "__steered__"
"""The attribute of a job with what it was steered by."""
BUILDS = frozenset(
    {"model", "dataset", "sample_weights", "parameter_groups", "optimizer", "optimizers", "scheduler", "stages"}
)
"""The methods whose results are kept for the whole run. A worker that calls them later has to build the same."""
AS_CONFIGURED = BUILDS | {"on_evaluation"}
"""The methods that see the fields as they were configured, so that they do not depend on when they are called."""

EVALUATIONS = "evaluations"
"""The key in a checkpoint's metadata of the evaluations up to its step."""

T = TypeVar("T")


@dataclass(frozen=True)
class _Steered:
    """The values of all steerable fields before the first change, those of now, and the number of changes."""

    configured: Mapping[str, Any]
    fields: Mapping[str, Any]
    changes: int


def evaluations_in(meta: Mapping[str, Any]) -> list[Evaluation]:
    """Return the evaluations up to a checkpoint, given its metadata."""
    return [Evaluation(**found) for found in meta.get(EVALUATIONS, [])]


def asked(job: Any, evaluations: Sequence[Evaluation]) -> Steering:
    """Return what a job says of the evaluations. Before the first one, it says nothing.

    Raises:
        JobError: it changes fields that it does not name as steerable.
    """
    steering: Steering | None = job.on_evaluation(tuple(evaluations)) if evaluations else None
    if steering is not None and (others := sorted(set(steering.fields) - set(job.steerable))):
        raise JobError(f"job.on_evaluation changes {', '.join(others)}, not in Job.steerable; name them there")
    return steering or Steering()


def steer_as_trained(job: Any, manifest: Mapping[str, Any]) -> None:
    """Let a job be as in the last step of a checkpoint, given its manifest."""
    before = [evaluation for evaluation in evaluations_in(manifest["meta"]) if evaluation.step < manifest["step"]]
    steer(job, asked(job, before).fields)


def steer(job: Any, fields: Mapping[str, Any]) -> None:
    """Let these ``fields`` of a job have other values, and all others in ``steerable`` those that were configured."""
    before: _Steered | None = getattr(job, _STEERED, None)
    if (before.fields if before else {}) == fields:
        return
    configured = before.configured if before else _values(job, job.steerable)
    _set(job, {**configured, **fields})
    _set(job, {_STEERED: _Steered(configured, dict(fields), before.changes + 1 if before else 1)})


def changes_of(job: Any) -> int:
    """Return how often :func:`steer` has changed the fields of a job."""
    steered: _Steered | None = getattr(job, _STEERED, None)
    return steered.changes if steered else 0


def as_configured(job: Any, call: Callable[[], T]) -> T:
    """Return ``call()``, in which the fields of the job are as they were configured."""
    steered: _Steered | None = getattr(job, _STEERED, None)
    if steered is None:
        return call()
    now = _values(job, steered.configured)
    _set(job, steered.configured)
    try:
        return call()
    finally:
        _set(job, now)


def view_of(job: Any, methods: Mapping[str, Callable[..., Any]]) -> Any:
    """Return an object of the class of ``job`` with other ``methods``, which asks ``job`` for everything else."""
    kind = type(job)

    def attribute(self: Any, name: str) -> Any:
        return object.__getattribute__(self, name) if name in {*methods, "__class__"} else getattr(job, name)

    own = {**methods, "__getattribute__": attribute, "__module__": kind.__module__}
    return object.__new__(type(kind.__name__, (kind,), own))


def _values(job: Any, names: Collection[str]) -> dict[str, Any]:
    return {name: getattr(job, name) for name in names}


def _set(job: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        object.__setattr__(job, name, value)  # a job is frozen against changes on one rank only
