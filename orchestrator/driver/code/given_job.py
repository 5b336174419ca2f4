"""Jobs that a caller in Python passes as objects, on their way to the workers."""

from __future__ import annotations

from dataclasses import dataclass

import ray.cloudpickle as cloudpickle

from orchestrator.config.arguments import GivenJob
from orchestrator.config.overrides import quote_text
from orchestrator.job import Job


@dataclass(frozen=True)
class PickledJob:
    """A job for processes that cannot import its class, or not build it from text.

    Attributes:
        data: in the format of cloudpickle, which includes the class if a notebook or a script defines it.
        display: the job as it stands in a call of ``orchestrator.run``.
    """

    data: bytes
    display: str


def job_override(given: GivenJob) -> str:
    """Return the override that records which class a run has trained."""
    cls = given if isinstance(given, type) else type(given)
    return f"job._target_={quote_text(f'{cls.__module__}.{cls.__qualname__}')}"


def pickle_job(given: GivenJob, job: Job, errors: list[str]) -> PickledJob | None:
    """Pickle ``job``, which is the instance ``given``, or was built from the class ``given``.

    Returns:
        None if something that the job refers to cannot be pickled; ``errors`` then says what.
    """
    name = type(job).__name__
    try:
        data = cloudpickle.dumps(job)
    except Exception as e:  # pickling calls code of any class that the job refers to
        errors.append(
            f"job {name}: cannot be sent to the workers: {type(e).__name__}: {' '.join(str(e).split())[:300]}; create "
            "such objects in a method of the job, or put the class into a module"
        )
        return None
    return PickledJob(data, name if isinstance(given, type) else f"{name}(...)")
