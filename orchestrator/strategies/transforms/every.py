"""The dimensions along which workers compute the same samples together, and what they say of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.transforms.context import TokenPart
from orchestrator.strategies.transforms.part import Part, Parts
from orchestrator.strategies.transforms.tensor import TensorPart

TRANSFORMS: Sequence[type[Part]] = (TensorPart, TokenPart)
"""The innermost first, in which order they change a model."""


def used_in(mesh: Mesh) -> Sequence[type[Part]]:
    """Return the dimensions along which a mesh has several workers."""
    return [part for part in TRANSFORMS if mesh.size(part.dimension) > 1]


def own_parts(context: Context, job: Job, train_set: Any) -> Parts:
    """Return the parts of a rank."""
    return Parts([part.find(context, job, train_set) for part in used_in(context.mesh)])


def check_parts(config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Check that the job can be divided as planned; return notes for the user."""
    return tuple(note for part in used_in(plan.mesh) for note in part.check(config, outline, plan, errors))


def outline_of_parts(outline: Outline, mesh: Mesh) -> Outline:
    """Return the outline of what a worker computes, after :func:`check_parts`."""
    found = outline.found
    for part in used_in(mesh):
        outline = part.outline(outline, mesh.size(part.dimension), found)
    return outline


def divides_layers(mesh: Mesh) -> bool:
    """Return whether workers have parts of parameters without gathering them."""
    return any(part.divides_layers for part in used_in(mesh))
