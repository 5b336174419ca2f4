"""BatchNorm under ``ddp``: with ``strategy.sync_batchnorm=true`` its statistics are those of ``single``."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.equal_loss import assert_equal_losses
from helpers.conformance.training import Steps, assert_same, losses, make, model_of, piece, steps, train, watched
from helpers.jobs.toys import Toy
from helpers.records.runs import in_campaign
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.replicated.sync_batchnorm import SyncBatchNorm2d

SYNC = replace(DDP, sync_batchnorm=True)
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Convolutions(Toy):
    """A small CNN on images of 2 x 5 pixels; ``options`` are those of its BatchNorm modules."""

    lr: float = 0.1
    momentum: float = 0.0
    affine: bool = True
    running_momentum: float | None = 0.1
    track_running_stats: bool = True
    frozen: bool = False
    shift: float = 0.0
    """Added to the inputs, so that their mean is large against their standard deviation."""

    def model(self) -> nn.Module:
        options: dict[str, Any] = {
            "affine": self.affine,
            "momentum": self.running_momentum,
            "track_running_stats": self.track_running_stats,
        }
        model = nn.Sequential(
            nn.Unflatten(1, (1, 2, 5)),
            nn.BatchNorm2d(1, **options),
            nn.Conv2d(1, 4, 2),
            nn.BatchNorm2d(4, **options),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 8),
            nn.BatchNorm1d(8, **options),
            nn.ReLU(),
            nn.Linear(8, 4),
        )
        if self.frozen:
            model[3].requires_grad_(False)
        return model

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Tensor, int]:
        return inputs + self.shift, target


VARIANTS = {
    "plain": Convolutions(),
    "cumulative average": Convolutions(running_momentum=None),
    "not affine": Convolutions(affine=False),
    "without running statistics": Convolutions(track_running_stats=False),
    "frozen": Convolutions(frozen=True),
    "large mean": Convolutions(shift=100.0),
}


@pytest.mark.parametrize(
    "name",
    [
        "cumulative average",
        "frozen",
        *in_campaign(*(name for name in VARIANTS if name not in ("cumulative average", "frozen"))),
    ],
)
def test_losses_parameters_and_running_statistics_are_those_of_one_worker(gang, name):
    # Uneven shares: 25 samples are 13 and 12, or 9, 8 and 8.
    case = Case(job=VARIANTS[name], options=SYNC, train=having(global_batch_size=25))
    assert_equal_losses(gang, case, (2, 3), rtol=TOLERANCE)


def running_statistics(ranks: list[Steps]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in ranks[0].model.items() if "running" in name or "tracked" in name}


def test_running_statistics_are_exact_and_those_of_the_key_only(gang):
    case = Case(job=Convolutions(), options=SYNC, train=having(steps=8, global_batch_size=25))
    expected = gang.run(train, case, world_size=1)
    found = gang.run(train, case, world_size=3)
    torch.testing.assert_close(running_statistics(found), running_statistics(expected), rtol=TOLERANCE, atol=1e-6)
    other = gang.run(train, replace(case, options=DDP), world_size=3)
    difference = (losses(other) / losses(expected) - 1).abs().max()
    assert difference > 1e-3, "each worker's own statistics give other losses"


def test_bf16_autocast_stays_close(gang):
    case = Case(job=Convolutions(), options=SYNC, train=having(steps=8, global_batch_size=25, precision="bf16"))
    expected = losses(gang.run(train, case, world_size=1))
    torch.testing.assert_close(losses(gang.run(train, case, world_size=2)), expected, rtol=0.02, atol=0)


def test_accumulated_slices_are_normalized_over_all_workers(gang):
    """Slice i holds other samples than with one worker, so the losses are other ones, and equal on every rank."""
    case = Case(job=Convolutions(), options=SYNC, train=having(steps=4, global_batch_size=16, grad_accumulation=2))
    ranks = gang.run(train, case, world_size=2)
    assert_same(ranks[0].model, ranks[1].model)
    assert ranks[0].model["3.num_batches_tracked"] == 8


def test_a_run_continues_under_another_strategy(gang):
    case = Case(job=Convolutions(), options=SYNC, train=having(steps=9, global_batch_size=25))
    ((_, whole),) = gang.run(piece, case, None, 9, world_size=1)
    state = None
    for world_size, stop in ((1, 3), (3, 6), (1, 9)):
        state = gang.run(piece, case, state, stop, world_size=world_size)[0][1]
    assert list(state.model) == list(whole.model)
    torch.testing.assert_close(state.model, whole.model, rtol=1e-4, atol=1e-6)


def wait_and_evaluation(rank: int, case: Case) -> tuple[float | None, float]:
    strategy = make(case, rank)
    for _ in steps(strategy):
        pass
    waited = strategy.comm_ms()
    result = strategy.evaluate(torch.utils.data.default_collate(strategy.job.dataset("val").items[: 9 + rank]), 9)
    assert type(model_of(strategy)[3]) is SyncBatchNorm2d
    return waited, float(result.loss_sum)


def test_evaluation_is_plain_and_waiting_is_measured(gang):
    case = Case(job=Convolutions(), options=SYNC, train=having(steps=3, global_batch_size=25))
    results = gang.run(wait_and_evaluation, case, world_size=2)
    assert results[0][1] == results[1][1], "nobody exchanges statistics in evaluation"
    assert all(waited is not None and waited > 0 for waited, _ in results)


kept: list[Strategy] = []
"""The strategy of this process, from one group to the next."""


def begin(rank: int, case: Case) -> Steps:
    kept[:] = [make(case, rank)]
    return watched(kept[0], steps(kept[0], last=2))


def go_on(rank: int, case: Case) -> Steps:
    strategy = kept.pop()
    strategy.attach()
    try:
        return watched(strategy, steps(strategy, first=3))
    finally:
        strategy.close()


def test_it_survives_a_new_process_group(gang):
    case = Case(job=Convolutions(), options=SYNC, train=having(steps=4, global_batch_size=25))
    whole = gang.run(train, case, world_size=2)
    gang.run(begin, case, world_size=2)
    after = gang.run(go_on, case, world_size=2)
    assert_same(after[0].model, whole[0].model)
