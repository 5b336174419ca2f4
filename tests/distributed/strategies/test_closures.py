"""Optimizers that ask for the loss at several points of a step: as in plain torch, also where a step is undone."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from helpers.conformance.cases import Case, checked, having
from helpers.conformance.layouts import DDP, EVERY
from helpers.conformance.training import (
    Steps,
    assert_same,
    assert_same_state,
    batches_in,
    losses,
    make,
    snapshot,
    steps,
    train,
    watched,
)
from helpers.jobs.toys import Toy
from helpers.ranks.gang import Gang
from helpers.ranks.loops import losses_by_step, run_loop
from orchestrator.strategies.base import StepResult
from orchestrator.user_code.callbacks import current_step, set_current_step
from orchestrator.user_code.errors import JobError
from orchestrator.worker.control.rendezvous import seed_step
from orchestrator.worker.data.batches import Share


class Sharpness(Optimizer):
    """Foret et al., ICLR 2021: the gradient is that at the worst point nearby, and was computed before ``step``."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        length = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [0.05 * p.grad / length for p in parameters]
        for p, move in zip(parameters, moves, strict=True):
            p.add_(move)
        closure()
        for p, move in zip(parameters, moves, strict=True):
            p.sub_(move).sub_(p.grad, alpha=self.param_groups[0]["lr"])


@dataclass(frozen=True, kw_only=True)
class Searching(Toy):
    """Trained in float64, so that the searches of different layouts make the same decisions."""

    kind: str = "strong_wolfe"
    dropout: float = 0.0

    def model(self) -> nn.Module:
        layers = [nn.Linear(10, 12), nn.BatchNorm1d(12, momentum=0.1), nn.Tanh(), nn.Dropout(self.dropout)]
        return nn.Sequential(*(layers if self.dropout else [layers[0], layers[2]]), nn.Linear(12, 4)).double()

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(inputs.double())

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        if self.kind == "sharpness":
            return Sharpness(parameters, lr=0.5)
        search = "strong_wolfe" if self.kind == "strong_wolfe" else None
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=5, history_size=4, line_search_fn=search)


SIX = having(steps=6, global_batch_size=64)


def trained_plainly(case: Case) -> Steps:
    """Train as the documentation of torch says, with the samples and the seeds of a run."""
    torch.manual_seed(case.seed)
    job, model = case.job, case.job.model().train()
    optimizer = job.optimizer(model.parameters())
    share = Share(global_batch_size=case.train.global_batch_size, data_parallel_size=1, dp_rank=0, grad_accumulation=1)
    seen = Steps(loss_sums=[], weights=[], norms=[], skipped=[], metrics=[], model={})
    for step, (batch,) in enumerate(batches_in(job, case.seed, share, range(1, case.train.steps + 1)), 1):
        found: list[tuple[float, float]] = []

        def closure(step: int = step, batch: Any = batch, found: Any = found) -> Tensor:
            optimizer.zero_grad()
            seed_step(case.seed, step, 0)
            with torch.enable_grad():
                loss = job.loss(job.forward(model, batch[0]), batch[1])
                loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            found.append((loss.item(), float(norm)))
            return loss

        if case.job.kind == "sharpness":  # type: ignore[attr-defined]
            closure()
        optimizer.step(closure)
        seen.loss_sums.append(found[0][0] * len(batch[1]))
        seen.weights.append(len(batch[1]))
        seen.norms.append(found[0][1])
    seen.model.update(snapshot(model))
    return seen


@pytest.mark.parametrize(
    ("kind", "dropout", "sizes", "slices"),
    [
        ("strong_wolfe", 0.0, (1, 2, 3), 2),
        ("fixed", 0.0, (1, 3), 1),
        ("sharpness", 0.0, (1, 3), 2),
        ("strong_wolfe", 0.3, (1,), 1),
    ],
)
def test_a_closure_is_as_in_plain_torch(
    gang: Gang, kind: str, dropout: float, sizes: tuple[int, ...], slices: int
) -> None:
    case = Case(job=Searching(kind=kind, dropout=dropout), train=having(SIX, grad_accumulation=slices))
    expected = trained_plainly(case)
    assert losses([expected])[-1] < 0.8 * losses([expected])[0], "nothing was learned"
    for world_size in sizes:
        ranks = gang.run(train, case, True, world_size=world_size)
        torch.testing.assert_close(losses(ranks), losses([expected]), rtol=1e-8, atol=0)
        for rank in ranks:
            torch.testing.assert_close(rank.norms, expected.norms, rtol=1e-6, atol=0)
            assert_same(rank.model, ranks[0].model)
            torch.testing.assert_close(rank.model, expected.model, rtol=1e-6, atol=1e-8)


@dataclass(frozen=True, kw_only=True)
class Interrupted(Searching):
    """Its loss fails once: at this call in step 4."""

    fails_at: int
    calls: list[int] = field(default_factory=list)

    def loss(self, output: Any, target: Any) -> Tensor:
        if current_step() == 4:
            self.calls.append(4)
            if len(self.calls) == self.fails_at:
                raise ConnectionError("a rank is lost")
        return super().loss(output, target)


def trained_with_a_pause(rank: int, case: Case) -> tuple[Steps, Any]:
    set_current_step(1)
    strategy = make(case, rank)
    kept: list[StepResult] = []
    try:
        for result in steps(strategy):
            kept.append(result)
    except ConnectionError:
        assert len(kept) == 3
        strategy.close()
        strategy.attach()
        kept += steps(strategy, first=4)
    return watched(strategy, kept), strategy.capture(step=0, samples_consumed=0, into=None)


@pytest.mark.parametrize("kind", ["strong_wolfe", "sharpness"])
def test_a_step_that_fails_in_its_search_leaves_no_trace(gang: Gang, kind: str) -> None:
    case = Case(job=Searching(kind=kind), train=SIX)
    whole = gang.run(trained_with_a_pause, case, world_size=2)
    for fails_at in (1, 2, 3) if kind == "strong_wolfe" else (1, 2):
        paused = gang.run(
            trained_with_a_pause, replace(case, job=Interrupted(kind=kind, fails_at=fails_at)), world_size=2
        )
        for (seen, _), (expected, _) in zip(paused, whole, strict=True):
            assert seen.loss_sums == expected.loss_sums
            assert_same(seen.model, expected.model)
        assert_same_state(paused[0][1], whole[0][1])


@pytest.mark.parametrize("name", ["single", "ddp-2"])
def test_a_checkpoint_has_the_history_of_the_search(gang: Gang, tmp_path: Path, name: str) -> None:
    layout = EVERY[name]
    case = layout.of(Case(job=Searching(), train=having(SIX, eval_every=3)))

    def run(checkpoint: str | None, layout: Any) -> dict[int, float]:
        arguments = (run_loop, layout.of(case), tmp_path, checkpoint, 3)
        return losses_by_step(gang.run(*arguments, world_size=layout.world_size))

    expected = run(None, layout)
    checkpoint = str(tmp_path / "checkpoints" / "step-00000003")
    again = run(checkpoint, layout)
    assert again == {step: loss for step, loss in expected.items() if step > 3}
    other = EVERY["ddp-2" if name == "single" else "single"]
    assert run(checkpoint, other) == pytest.approx(again, rel=1e-8)


@pytest.mark.parametrize(
    ("changes", "options", "error"),
    [
        ({}, EVERY["fsdp-2"].options, "strategy=fsdp: job.optimizer returns a LBFGS, whose step() needs a closure, "),
        ({}, EVERY["1F1B-2"].options, "strategy=pipeline: job.optimizer returns a LBFGS, whose step() needs a "),
        ({}, EVERY["hogwild-2"].options, "strategy=hogwild: job.optimizer returns a LBFGS, whose step() needs a "),
        ({"clip_norm": 1.0}, DDP, "train.clip_norm=1.0: job.optimizer returns a LBFGS, whose step() needs a closure"),
        ({"precision": "fp16"}, DDP, "train.precision=fp16: job.optimizer returns a LBFGS, whose step() needs a "),
        ({}, replace(DDP, comm_hook="powersgd"), "strategy.comm_hook=powersgd: job.optimizer returns a LBFGS, whose "),
        ({}, replace(DDP, shard_optimizer=True), "strategy.shard_optimizer=true: "),
    ],
)
def test_what_cannot_have_a_closure_is_refused_before_anything_starts(
    changes: dict[str, Any], options: Any, error: str
) -> None:
    errors, _ = checked(Case(job=Searching(), train=having(SIX, **changes), options=options), 2)
    assert [text[: len(error)] for text in errors] == [error], errors


def test_a_job_that_may_have_one_is_accepted() -> None:
    assert checked(Case(job=Searching(), train=SIX), 1)[0] == []


def test_a_worker_refuses_what_the_driver_could_not_see() -> None:
    with pytest.raises(JobError, match=r"train\.clip_norm=1\.0: job\.optimizer returns a LBFGS"):
        make(Case(job=Searching(), train=having(SIX, clip_norm=1.0)), 0)
