"""A hidden state that is carried from batch to batch: as in plain torch, over evaluations and a resume."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset, TensorDataset

from helpers.conformance.cases import SINGLE, Case, checked, having
from helpers.conformance.layouts import DDP
from helpers.ranks.gang import SOON_S, Gang
from helpers.ranks.loops import Ran, losses_by_step, run_loop
from orchestrator.job import Job, Split
from orchestrator.protocol.messages import TrainPoint

ROWS, WINDOWS, LENGTH = 4, 9, 5
"""Sequences side by side, the windows of each, and the values of a window."""


class Recurrent(nn.Module):
    hidden: Tensor

    def __init__(self, rows: int, persistent: bool):
        super().__init__()
        self.cell, self.head = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1)
        self.register_buffer("hidden", torch.zeros(rows, 8), persistent=persistent)

    def forward(self, inputs: Tensor) -> Tensor:
        output, hidden = self.cell(inputs, self.hidden[: len(inputs)].unsqueeze(0).contiguous())
        self.hidden = hidden[0].detach()
        return self.head(output)


@dataclass(frozen=True, kw_only=True)
class Waves(Job):
    """The next value of each of several waves, whose windows are read one after the other."""

    carried: ClassVar[tuple[str, ...]] = ("hidden",)
    kind: str = "AdamW"
    rows: int = ROWS
    persistent: bool = True

    def model(self) -> nn.Module:
        return Recurrent(self.rows, self.persistent)

    def dataset(self, split: Split) -> Dataset[Any]:
        phases = torch.arange(ROWS).unsqueeze(1) + (0 if split == "train" else 0.5)
        waves = torch.sin(0.7 * torch.arange(WINDOWS * LENGTH + 1) + phases)
        cut = [waves[:, i : i + WINDOWS * LENGTH].reshape(-1, LENGTH, 1) for i in (0, 1)]
        return TensorDataset(*cut)

    def batch_sampler(self, dataset: Any, batch_size: int, generator: torch.Generator) -> Iterable[Sequence[int]]:
        return [[row * WINDOWS + window for row in range(ROWS)] for window in range(WINDOWS)]

    def loss(self, output: Any, target: Any) -> Tensor:
        return mse_loss(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        rate = 0.02 if self.kind == "AdamW" else 0.1
        return getattr(torch.optim, self.kind)(parameters, lr=rate)


TWELVE = having(steps=12, global_batch_size=ROWS, eval_every=3)


def trained_plainly(case: Case) -> tuple[dict[int, float], dict[int, float]]:
    """The loss and the norm of the gradient at each step."""
    torch.manual_seed(case.seed)
    losses: dict[int, float] = {}
    norms: dict[int, float] = {}
    job, model = case.job, case.job.model()
    dataset: Any = job.dataset("train")
    optimizer = job.optimizer(model.parameters())
    batches = list(job.batch_sampler(dataset, ROWS, torch.Generator()) or ())
    for step in range(1, 13):
        items = [dataset[i] for i in batches[(step - 1) % WINDOWS]]
        inputs, target = (torch.stack(part) for part in zip(*items, strict=True))
        loss = job.loss(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
        norms[step] = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    return losses, norms


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_the_state_goes_from_batch_to_batch_and_over_evaluations_and_a_resume(
    gang: Gang, tmp_path: Path, kind: str
) -> None:
    case = Case(job=Waves(kind=kind), train=TWELVE)
    losses, norms = trained_plainly(case)

    def run(checkpoint: str | None) -> list[Ran]:
        return gang.run(run_loop, case, tmp_path, checkpoint, 3, world_size=1)

    (whole,) = run(None)
    assert losses_by_step([whole]) == pytest.approx(losses, rel=1e-5)
    points = [p for p in whole.points if isinstance(p, TrainPoint) and p.step in (1, 10)]
    found = {p.step: p.metrics["train/grad_norm"].value for p in points}
    assert found == pytest.approx({step: norms[step] for step in (1, 10)}, rel=1e-4)
    resumed = losses_by_step(run(str(tmp_path / "checkpoints" / "step-00000006")))
    assert resumed == {step: loss for step, loss in losses_by_step([whole]).items() if step > 6}


class Shuffled(Waves):
    def batch_sampler(self, dataset: Any, batch_size: int, generator: torch.Generator) -> None:
        return None


@pytest.mark.parametrize(
    ("job", "error"),
    [
        (
            Shuffled(),
            "DatasetError: Job.carried: row i of hidden belongs to row i of every batch, and samples are read in",
        ),
        (Waves(kind="LBFGS"), "JobError: Job.carried: hidden would change at each point that the closure of a LBFGS"),
    ],
)
def test_a_worker_refuses_what_would_mix_states(gang: Gang, tmp_path: Path, job: Job, error: str) -> None:
    case = Case(job=job, train=TWELVE)
    (answer,) = gang.ask(run_loop, case, tmp_path, world_size=1, timeout_s=SOON_S)
    assert answer.error.startswith(error), answer.error


@dataclass(frozen=True, kw_only=True)
class Misnamed(Waves):
    carried: ClassVar[tuple[str, ...]] = ("hiden",)


@pytest.mark.parametrize(
    ("job", "changes", "options", "error"),
    [
        (Waves(), {}, replace(DDP, num_workers=2), "strategy=ddp: Job.carried: row i of hidden belongs to row i of ev"),
        (Waves(), {"grad_accumulation": 2}, SINGLE, "train.grad_accumulation=2: Job.carried: "),
        (
            Waves(),
            {"activation_checkpointing": "blocks"},
            SINGLE,
            "train.activation_checkpointing=blocks: Job.",
        ),
        (
            Waves(rows=8),
            {},
            SINGLE,
            "train.global_batch_size=4: Job.carried: row i of hidden belongs to row i of every ",
        ),
        (Waves(persistent=False), {}, SINGLE, "Job.carried: the buffer hidden is in no checkpoint; register it with "),
        (Misnamed(), {}, SINGLE, "Job.carried: the model has no buffer hiden; did you mean hidden?"),
        (Waves(), {}, SINGLE, ""),
    ],
)
def test_what_cannot_be_carried_is_refused_before_anything_starts(
    job: Job, changes: dict[str, Any], options: Any, error: str
) -> None:
    errors, _ = checked(Case(job=job, train=having(TWELVE, **changes), options=options), 1 if options is SINGLE else 2)
    assert [text[: len(error)] for text in errors] == ([error] if error else []), errors
