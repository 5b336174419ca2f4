"""What a rank of any world communicates, found in one process: in the order of gloo, in the bytes of the cost model."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.conformance.cases import Case, config_of, having, plan_of
from helpers.conformance.layouts import CONTEXT, FSDP, LAYOUTS, SEQUENCE, TENSOR, Layout, layout, mesh
from helpers.conformance.training import close_strategies, make, steps
from helpers.ranks.allocations import Allocations
from helpers.ranks.gang import Gang
from helpers.ranks.launches import recorded
from helpers.records.runs import in_campaign
from jobs.gpt import GPT
from orchestrator.planning.mesh import Dimension, Mesh
from orchestrator.strategies.replicated.comm_hooks import average_in
from orchestrator.strategies.trainer import Trainer

if TYPE_CHECKING:
    from orchestrator.features.plan.prediction.forecast import Forecast
    from orchestrator.features.plan.prediction.work import ModelWork

T = TypeVar("T")

JOB = GPT(variant="llama", context=32, layers=4, width=64, heads=4, kv_heads=2, hidden=128, vocabulary=256)
TRAIN = having(steps=2, global_batch_size=64, grad_accumulation=2, precision="bf16", clip_norm=1.0, check="never")
EVERY = {
    **LAYOUTS,
    **TENSOR,
    **SEQUENCE,
    **CONTEXT,
    "mesh-tensor-in-stages-4x2": mesh(Mesh(pipeline=4, tensor=2), num_microbatches=4),
}
TRACED = ("hsdp-2x2",)
PRODUCTS = (
    "Interleaved1F1B-2", "ddp-2", "sharded-ddp-2", "fsdp-3", "mesh-zero1-in-stages-2x2", "mesh-sharded-tensor-2x2",
    "mesh-sharded-context-2x2", "1F1B-2x2-replicas-close",
    "mesh-hsdp-in-stages-2x2x2", "mesh-tensor-in-stages-2x2", "mesh-sharded-sequence-2x2",
)  # fmt: skip
SENT = {
    "allreduce": 2, "allreduce_coalesced": 2, "all_reduce": 2, "_allgather_base": 1, "_reduce_scatter_base": 1,
    "all_gather_into_tensor": 2, "broadcast": 0,
}  # fmt: skip
"""How often a rank of two sends half of the largest argument; the last gather shows its part, and weights are small."""
Communicated = list[list[tuple[str, tuple[int, ...], int]]]


def case_of(layout: Layout, job: GPT = JOB, **changes: Any) -> Case:
    """The job in a layout, cut where the options say, because ranks would measure."""
    case = layout.of(Case(job=job, train=having(TRAIN, **changes)))
    pipeline = plan_of(config_of(case, layout.world_size)).pipeline
    if pipeline is None:
        return case
    each = job.layers // pipeline.num_stages
    return layout.of(case, split=tuple(f"block{block}" for block in range(each, job.layers, each)))


def begun(rank: int, case: Case) -> Trainer:
    """The strategy of a rank. On a fake group, whose operations have no results, DDP does not await them."""
    strategy = make(case, rank)
    assert isinstance(strategy, Trainer)
    replica = getattr(strategy.passes, "forward_model", None)
    if isinstance(replica, DistributedDataParallel) and dist.get_backend() == "fake":
        replica.register_comm_hook(None, lambda _, bucket: average_in(bucket.buffer().dtype, bucket))
    return strategy


def second_step(rank: int, case: Case) -> Communicated:
    """The launches of the second step: of each operation the name, the ranks and the bytes."""
    results = steps(begun(rank, case))
    next(results)
    with recorded() as launches:
        next(results)
    return [[(o.name, o.ranks, o.nbytes) for o in launch] for launch in launches]


def largest_bytes(rank: int, case: Case) -> int:
    """The most that the tensors of a rank take at once in its second step."""
    with Allocations() as allocated:
        results = steps(begun(rank, case))
        next(results)
        allocated.peak_bytes = 0
        next(results)
    return allocated.peak_bytes


def on_fake_groups(
    _: int, function: Callable[[int, Case], T], case: Case, ranks: tuple[int, ...], world: int
) -> list[T]:
    """What the function returns on each of the ranks of a world, one after the other in this process."""
    found = []
    for rank in ranks:
        if world > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            found.append(function(rank, case))
        finally:
            close_strategies()
            if world > 1:
                dist.destroy_process_group()
    return found


@pytest.mark.parametrize("name", [*TRACED, *in_campaign(*PRODUCTS)])
def test_a_rank_on_a_fake_group_communicates_as_on_gloo(gang: Gang, name: str) -> None:
    """The first and the last rank, which is on the last stage."""
    world, case = EVERY[name].world_size, case_of(EVERY[name], activation_checkpointing="blocks", global_batch_size=16)
    first, *_, last = gang.run(second_step, case, world_size=world)
    assert gang.run(on_fake_groups, second_step, case, (0, world - 1), world, world_size=1) == [[first, last]]
    assert first


@pytest.mark.parametrize("larger", [1_024, *in_campaign(16_384)])
def test_a_larger_world_has_the_same_order(gang: Gang, larger: int) -> None:
    names = []
    for world in (2, larger):
        case = case_of(layout(FSDP, world), global_batch_size=4 * world)
        [[launches]] = gang.run(on_fake_groups, second_step, case, (0,), world, world_size=1)
        names.append([[name for name, _, _ in launch] for launch in launches])
    assert names[0] == names[1]


def planned(case: Case, world: int) -> "tuple[ModelWork, Forecast]":
    """What the plan knows of the model, and of a layout on CPUs."""
    config = config_of(case, world)
    job = pytest.importorskip("orchestrator.features.plan.traced_job").TracedJob(config, case.job, on_gpus=False)
    return job.work, job.forecast(config, plan_of(config))


def sent_by(rank: int, launches: Communicated, ranks: list[int]) -> float:
    """The bytes that a rank sends in collectives of these ranks, or to one of them."""
    total = 0.0
    for name, group, nbytes in (operation for launch in launches for operation in launch):
        if name == "transfer":
            total += nbytes * (group[0] == rank and group[1] in ranks)
        elif list(group) == ranks:
            total += SENT[name] * nbytes * (len(group) - 1) / len(group)
    return total


@pytest.mark.parametrize(
    ("name", "rank", "axis", "kind"),
    [
        ("hsdp-2x2", 0, "shard", "shards"),
        ("1F1B-4", 1, "pipeline", "stages"),
        ("mesh-tensor-2", 0, "tensor", "tensor"),
        *in_campaign(
            ("ddp-2", 0, "replicate", "replicas"),
            ("sharded-ddp-2", 0, "shard", "replicas"),
            ("fsdp-2", 0, "shard", "shards"),
            ("hsdp-2x2", 0, "replicate", "replicas"),
            ("mesh-tensor-in-stages-4x2", 2, "pipeline", "stages"),
        ),
    ],
)
def test_the_bytes_are_those_that_the_cost_model_counts(
    gang: Gang, name: str, rank: int, axis: Dimension, kind: str
) -> None:
    world, case = EVERY[name].world_size, case_of(EVERY[name])
    work, forecast = planned(case, world)
    step = forecast.step
    [[launches]] = gang.run(on_fake_groups, second_step, case, (rank,), world, world_size=1)
    cost = pytest.importorskip("orchestrator.features.plan.prediction.cost")
    sent, layers = cost.sent_bytes(work, step), work.layers / step.mesh.pipeline
    ends = 2 * step.rows * work.layer.output_bytes  # the sum of the embedding, and that of the gradient of the head
    losses = step.rows * work.tokens * 4 * 4  # four numbers of each row of the logits
    predicted = {
        "replicas": sent.replicas,
        "shards": step.passes * sent.shards_each_pass + sent.shards_once,
        "stages": step.passes * sent.stages,
        "tensor": step.passes * (layers * sent.tensor + ends + losses),
    }
    assert sent_by(rank, launches, step.mesh.group(axis, rank)) == pytest.approx(predicted[kind], rel=0.01)


@pytest.mark.parametrize("name", ["fsdp-2", *in_campaign("single", "ddp-2", "mesh-tensor-2", "1F1B-2", "hsdp-2x2")])
def test_the_memory_is_what_tensors_take_on_cpus(gang: Gang, name: str) -> None:
    """But for gradients of activations, of which there are few at once in a model of some layers."""
    deep, world = replace(JOB, layers=8, context=64), EVERY[name].world_size
    case = case_of(EVERY[name], deep, precision="fp32", grad_accumulation=1, global_batch_size=16)
    memory = planned(case, world)[1].memory
    assert memory is not None
    [[largest]] = gang.run(on_fake_groups, largest_bytes, case, (0,), world, world_size=1)
    assert memory.total == pytest.approx(largest, rel=0.07)
