"""What rank 0 says before training of a batch that is divided is what then happens to the losses or to the state."""

from dataclasses import dataclass

import torch

from helpers.conformance.cases import DDP, SINGLE, Case, having
from helpers.conformance.training import Steps, close_strategies, make, steps, watched
from helpers.conformance.training import losses as losses_of
from helpers.jobs.batch_toys import DEPEND, EQUAL, FAR_APART
from helpers.ranks.gang import Gang
from orchestrator.config.schema import StrategyConfig

JOBS = {name: job for name, (job, _, _) in DEPEND.items()} | {
    name: EQUAL[name]
    for name in EQUAL
    if name not in ("dropout", "random numbers", "Python's random numbers", "BatchNorm", "a loss that draws")
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a rank warned of, and what became of the model."""

    warnings: str
    seen: Steps


def train_all(rank: int, options: StrategyConfig, accumulation: int) -> dict[str, Trained]:
    found = {}
    for name, job in JOBS.items():
        train = having(steps=3, global_batch_size=16, grad_accumulation=accumulation)
        strategy = make(Case(job=job, train=train, options=options), rank)
        seen = watched(strategy, steps(strategy))
        found[name] = Trained(warnings="\n".join(remark.text for remark in strategy.setup_warnings()), seen=seen)
        close_strategies()
    return found


def test_a_warning_is_given_where_a_model_differs(gang: Gang) -> None:
    (alone,) = gang.run(train_all, SINGLE, 1, world_size=1)
    for ranks in (
        gang.run(train_all, DDP, 1, world_size=2),
        gang.run(train_all, SINGLE, 2, world_size=1),
    ):
        for name in JOBS:
            losses, expected = losses_of([rank[name].seen for rank in ranks]), losses_of([alone[name].seen])
            equal = torch.allclose(losses, expected, rtol=1e-5, atol=0) and all(
                torch.allclose(tensor.float(), alone[name].seen.model[key].float(), rtol=1e-3, atol=1e-4)
                for key, tensor in ranks[0][name].seen.model.items()
            )
            if FAR_APART in ranks[0][name].warnings:
                continue  # it differs once losses are that far apart
            assert equal == (ranks[0][name].warnings == ""), (
                f"{name}: {losses} and {expected}; {ranks[0][name].warnings}"
            )
