"""What rank 0 of a large world communicates, in one process: in the order of gloo, with the bytes of the cost model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.ranks.gang import Gang
from jobs.gpt import GPT
from orchestrator.config.compose import compose
from orchestrator.model.batch import tensors_in
from orchestrator.model.repeated_blocks import blocks_of
from orchestrator.planning.mesh import Mesh
from orchestrator.prediction.cost import Step
from orchestrator.strategies import registry
from orchestrator.strategies.base import Context
from orchestrator.strategies.data.datasets import example_batch

JOB = GPT(variant="llama", context=32, layers=4, width=128, heads=4, kv_heads=2, hidden=256, vocabulary=256)


class Watch(TorchDispatchMode):
    """The collectives of this rank: the name of each, and the bytes of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [tensor.nbytes for tensor in tensors_in((args, kwargs))]
            self.seen.append((func.name().removeprefix("c10d::"), max(sizes, default=0)))
        return func(*args, **(kwargs or {}))


def collectives(rank: int, world: int, fake: bool) -> list[tuple[str, int]]:
    """Those of the second step of the mesh whose only dimension is ``shard``."""
    if fake:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    errors: list[str] = []
    words = ["job=gpt", "strategy=mesh", f"strategy.shard={world}", "train.precision=bf16"]
    config, _ = compose(words, errors, registry.config_class)
    assert config is not None, errors
    mesh, rules = Mesh(shard=world, replicas_close=True), registry.load("mesh")
    context = Context(
        mesh=mesh,
        global_rank=rank,
        device=torch.device("cpu"),
        seed=0,
        train=config.train,
        options=config.strategy,
        collective_timeout_s=60,
    )
    strategy = rules.trainer(rules.keys(config.strategy), mesh, JOB)(context, JOB)
    train_set = JOB.dataset("train")
    try:
        strategy.setup(train_set)
        strategy.attach()
        for _ in range(2):
            with Watch() as watch:
                strategy.train_step([example_batch(JOB, train_set, 2)], want_grad_norm=False, want_metrics=False)
        return watch.seen
    finally:
        strategy.close()
        if fake:
            dist.destroy_process_group()


def on_a_fake_group(gang: Gang, world: int) -> list[tuple[str, int]]:
    [seen] = gang.run(collectives, world, True, world_size=1)
    return seen


def test_the_order_on_a_fake_group_is_the_one_on_gloo(gang: Gang) -> None:
    recorded, _ = gang.run(collectives, 2, False, world_size=2)
    assert on_a_fake_group(gang, 2) == recorded


@pytest.mark.parametrize("world", [64, 16_384])
def test_a_larger_world_has_the_same_order(gang: Gang, world: int) -> None:
    names = [[name for name, _ in on_a_fake_group(gang, size)] for size in (2, world)]
    assert names[0] == names[1]


def test_the_bytes_are_those_that_the_cost_model_counts(gang: Gang) -> None:
    seen = on_a_fake_group(gang, 64)
    model = JOB.model()
    of_model = sum(p.numel() for p in model.parameters())
    of_blocks = sum(p.numel() for block in blocks_of(model) for p in block.parameters())
    step = Step(mesh=Mesh(shard=64), rows=1, passes=1)
    gathered = sum(size for name, size in seen if "allgather" in name)
    summed = sum(size for name, size in seen if "reduce_scatter" in name)
    assert gathered == pytest.approx(step.gathered_bytes * (of_model + of_blocks), rel=0.01)  # the rest once
    assert summed == pytest.approx(step.summed_bytes * of_model, rel=0.01)
