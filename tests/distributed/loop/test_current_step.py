"""The step that a job may ask for: in training, in evaluations, and after a resume. The conformance matrix has a loss
that changes with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import EVERY
from helpers.jobs.quick_jobs import SteppedDigits
from helpers.ranks.gang import Gang
from helpers.ranks.loops import Ran, run_loop
from helpers.records.runs import in_campaign
from orchestrator.protocol.messages import TrainPoint

SEVEN = having(steps=7, global_batch_size=16, eval_every=3)


def steps_seen(ranks: list[Ran]) -> list[tuple[str, int, float]]:
    """The kind of each point of the run, its step, and the one that the job has seen."""
    seen = []
    for parts in zip(*(ran.points for ran in ranks), strict=True):
        weight = sum(p.step_weight if isinstance(p, TrainPoint) else p.weight for p in parts)
        found = sum(p.sums.get("step", 0.0) for p in parts) / weight
        seen.append((type(parts[0]).__name__, parts[0].step, found))
    return seen


@pytest.mark.parametrize("name", ["dp-2", "1F1B-2", *in_campaign("ddp-2", "parameter_server-2+2")])
def test_training_and_evaluation_have_the_step_also_after_a_resume(gang: Gang, tmp_path: Path, name: str) -> None:
    layout = EVERY[name]
    case = layout.of(Case(job=SteppedDigits(hidden=24, depth=3, val_size=32), train=SEVEN))

    def ran(checkpoint: str | None, case: Case) -> list[tuple[str, int, float]]:
        arguments = (run_loop, case, tmp_path, checkpoint, 3)
        return steps_seen(gang.run(*arguments, world_size=layout.world_size))

    seen = ran(None, case)
    assert [(kind, step) for kind, step, _ in seen if kind == "EvalPoint"] == [("EvalPoint", n) for n in (3, 6, 7)]
    assert [found for _, _, found in seen] == [step for _, step, _ in seen]
    checkpoint = str(tmp_path / "checkpoints" / "step-00000003")
    assert ran(checkpoint, case) == seen[4:]
    assert ran(checkpoint, replace(case, evaluate="last")) == [("EvalPoint", 3, 3.0)]
