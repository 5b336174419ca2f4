"""What a run has computed, how two runs differ in that, and what a run has left behind."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import Tensor

from helpers.faults.layouts import Tolerance
from helpers.records.runs import losses, series
from orchestrator.state.checkpoint import load, path_of

EVALUATED = ("val/loss", "val/ema_loss")
WORKERS = ("/worker-", "ray::Worker", "ray::ScriptWorker", "ray::rank-")
"""What the command line of a process contains that runs one of our actors."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The training losses of a run by step, its evaluations by name and step, and its final weights by name.

    ``weights`` is None if they are not saved.
    """

    losses: dict[int, float]
    evaluations: dict[tuple[str, int], float] = field(default_factory=dict)
    weights: dict[str, Tensor] | None


def outcome_of(run_dir: Path, steps: int) -> Outcome:
    """Read what a run of ``steps`` steps has computed."""
    last = path_of(run_dir / "checkpoints", steps)
    has_metrics = (run_dir / "metrics.jsonl").exists()
    return Outcome(
        losses=losses(run_dir) if has_metrics else {},
        evaluations={
            (name, step): value for name in EVALUATED * has_metrics for step, value in series(run_dir, name).items()
        },
        weights=dict(load(last).model) if last.is_dir() else None,
    )


def differences(found: Outcome, expected: Outcome, tolerance: Tolerance | None) -> list[str]:
    """Describe the first three weights, losses and evaluations that differ; none if ``tolerance`` is None.

    Only what both outcomes have is compared.
    """
    if tolerance is None:
        return []
    weights = expected.weights or {}
    differing = ["other names of weights"] * (found.weights is not None and found.weights.keys() != weights.keys())
    differing += [
        f"{name} differs"
        for name, tensor in (found.weights or {}).items()
        if name in weights and not torch.allclose(tensor, weights[name], rtol=tolerance.rtol, atol=tolerance.atol)
    ]
    for what, seen, wanted in (
        ("loss of step", found.losses, expected.losses),
        ("evaluation", found.evaluations, expected.evaluations),
    ):
        differing += [
            f"{what} {key}: {seen[key]}, not {wanted[key]}"
            for key in seen.keys() & wanted.keys()
            if abs(seen[key] - wanted[key]) > tolerance.losses * abs(wanted[key])
        ]
    return differing[:3]


def leftovers(*, timeout_s: float) -> list[str]:
    """Describe the placement groups of Ray, and the worker processes after ``timeout_s``, that outlive their run."""
    from ray.util.placement_group import placement_group_table

    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    workers = [p for p in psutil.Process().children(recursive=True) if _is_worker(p)]
    _, alive = psutil.wait_procs(workers, timeout=timeout_s)
    return [f"left: {thing}" for thing in (*groups, *alive)]


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(title in " ".join(process.cmdline()) for title in WORKERS)
    return False
