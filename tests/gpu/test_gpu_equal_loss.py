"""The rule of equal loss on a GPU: every layout has the losses of one worker, at every step."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import nn

import helpers.jobs.stage_toys as of
from helpers.conformance.cases import CLUSTER, DDP, Case, having, options_of
from helpers.conformance.equal_loss import assert_equal_losses, assert_equal_steps
from helpers.conformance.exact_evaluation import assert_evaluated_exactly, assert_scored_exactly, evaluated_in_slices
from helpers.conformance.layouts import ADAMW, LAYOUTS, SGD, STAGED, Layout, assert_as_alone
from helpers.conformance.training import Steps, losses, make, steps, train
from helpers.jobs.quick_jobs import PredictedDigits, ScoredDigits, TinyGPT, digits
from helpers.jobs.step_toys import STEP_JOBS, NormedGAN
from helpers.jobs.toys import Tokens, Toy
from helpers.ranks.gang import Backend, Gang, close_gangs
from helpers.ranks.groups import formed
from jobs.gpt import GPT
from jobs.sparse import MatrixCompletion, SparseLogistic
from orchestrator.compat.torch import watching_compilation
from orchestrator.job import Job
from orchestrator.strategies.mesh_trainer import MeshTrainer
from orchestrator.strategies.parts.gathered import Gathered

ROUNDING = 10
"""Kernels for other shapes add in another order, which the tolerances for CPUs do not allow for."""


@pytest.mark.parametrize("name", ["ddp-2", "ddp-4", "sharded-ddp-2", "fsdp-2", "hsdp-2x2", *STAGED])
def test_every_layout_with_accumulation(gang: Gang, name: str) -> None:
    """If it fails, a strategy, or its order of communication, is wrong under NCCL."""
    case = Case(job=digits(depth=3, lr=0.3), train=having(global_batch_size=32, grad_accumulation=2))
    assert_as_alone(gang, case, name, rtol=ROUNDING * SGD)


@pytest.mark.parametrize(
    "name",
    [
        "ddp-2",
        "sharded-ddp-2",
        "fsdp-2",
        "hsdp-2x2",
        "1F1B-2",
        "Interleaved1F1B-2",
        "ZBVZeroBubble-2",
        "GPipe-2x2",
        "fsdp-1F1B-2x2",
    ],
)
def test_a_language_model_with_adamw_and_clipping(gang: Gang, name: str) -> None:
    """If it fails, gradients are summed, clipped or applied wrongly on a GPU."""
    case = Case(job=TinyGPT(layers=3), train=having(global_batch_size=32, clip_norm=0.5))
    assert_as_alone(gang, case, name, rtol=ROUNDING * ADAMW, want_grad_norm=True)


@pytest.mark.parametrize("changes", [{"cpu_offload": True}, {"prefetch": 2}], ids=["offloaded", "ahead"])
def test_parts_of_a_language_model(gang: Gang, changes: dict[str, Any]) -> None:
    """If it fails, parts in host memory are updated from gradients of another device, or gathered too early."""
    case = Case(job=TinyGPT(layers=3), train=having(global_batch_size=32, grad_accumulation=2, clip_norm=0.5))
    assert_as_alone(gang, case, "fsdp-2", rtol=ROUNDING * ADAMW, want_grad_norm=True, **changes)


class ScaledToy(Toy):
    """Its model has a parameter without dimensions, which is not divided."""

    def model(self) -> nn.Module:
        model = super().model()
        model.scale = nn.Parameter(torch.tensor(0.5))
        return model


def places(rank: int, case: Case) -> tuple[set[str], set[str], bool]:
    """Where the parts are, and what is not divided; and whether what a checkpoint takes of them is finite."""
    strategy = make(case, rank)
    assert isinstance(strategy, MeshTrainer)
    assert isinstance(strategy.part, Gathered)
    divided = strategy.part.passes.divided
    state = strategy.capture(part=True, step=0, samples_consumed=0, into=None)
    assert state is not None
    parts = {part.device.type for part in divided.distinct if part.ndim > 0}
    return parts, {scalar.device.type for scalar in divided.scalars}, state.nonfinite_parameter is None


def test_parts_that_are_offloaded_are_in_host_memory(gang: Gang) -> None:
    """If it fails, ``strategy.cpu_offload=true`` saves no memory of the GPU, or no checkpoint can be saved with it."""
    case = LAYOUTS["fsdp-2"].of(Case(job=ScaledToy(), train=having(global_batch_size=32)), cpu_offload=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert gang.run(places, case, world_size=2) == [({"cpu"}, {device}, True)] * 2


@pytest.mark.parametrize("job", [Tokens(), Tokens(empty=6, lr=0.5)], ids=["weights", "ranks-without-weight"])
def test_uneven_shares_of_weighted_samples(gang: Gang, job: Job) -> None:
    """If it fails, the weights of samples are not summed over all ranks."""
    assert_equal_losses(gang, Case(job=job, train=having(global_batch_size=9)), (2, 4), rtol=ROUNDING * SGD)


@pytest.mark.parametrize("grad_accumulation", [1, 2])
@pytest.mark.parametrize(
    "job",
    [SparseLogistic(features=500, words=20, samples=400), MatrixCompletion(size=40, rank=3, observed=600, lr=0.1)],
    ids=["logistic", "matrix"],
)
def test_sparse_gradients_of_replicas(gang: Gang, job: Job, grad_accumulation: int) -> None:
    """If it fails, what replaces the sparse all-reduce that NCCL lacks is wrong."""
    case = Case(job=job, train=having(global_batch_size=101, grad_accumulation=grad_accumulation))
    assert_equal_losses(gang, case, (2,), rtol=ROUNDING * SGD)


@pytest.mark.parametrize("name", ["1F1B-4", "GPipe-2x2"])
def test_sparse_gradients_of_stages(gang: Gang, name: str) -> None:
    """If it fails, sparse gradients of shared or replicated stages are wrong under NCCL."""
    case = Case(job=Tokens(build=of.sparse_and_tied, momentum=0), train=having(steps=10, global_batch_size=16))
    assert_as_alone(gang, case, name, rtol=ROUNDING * SGD)


@pytest.mark.parametrize("name", ["1F1B-4", "ZBVZeroBubble-2", "InterleavedZeroBubble-2x2"])
@pytest.mark.parametrize(
    "job", [Toy(build=of.skips), Toy(build=of.nested), Tokens(build=of.tied_ends)], ids=["skips", "nested", "tied"]
)
def test_what_flows_between_stages(gang: Gang, job: Toy, name: str) -> None:
    """If it fails, a message between stages has another form or order than its receiver expects."""
    case = Case(job=job, train=having(steps=10, global_batch_size=16))
    assert_as_alone(gang, case, name, rtol=ROUNDING * SGD)


@pytest.mark.parametrize("name", STEP_JOBS)
def test_a_job_that_makes_its_own_updates(gang: Gang, name: str) -> None:
    """If it fails, updates of ``Job.training_step`` differ between ranks."""
    case = Case(job=STEP_JOBS[name], train=having(steps=8, global_batch_size=25))
    assert_equal_steps(gang, case, 2, rtol=ROUNDING * SGD)


def test_synchronized_batchnorm(gang: Gang) -> None:
    """If it fails, BatchNorm does not use the statistics of all ranks."""
    case = Case(job=NormedGAN(), train=having(steps=8, global_batch_size=24), options=replace(DDP, sync_batchnorm=True))
    assert_equal_steps(gang, case, 2, rtol=ROUNDING * SGD)


@pytest.mark.parametrize("hook", ["bf16", "fp16", "powersgd"])
def test_compressed_gradients_stay_close(gang: Gang, hook: str) -> None:
    """If it fails, a communication hook loses more than its number format does."""
    case = Case(job=digits(), options=replace(DDP, comm_hook=hook))
    (alone,), ranks = (gang.run(train, case, world_size=world_size) for world_size in (1, 2))
    torch.testing.assert_close(losses(ranks), losses([alone]), rtol=0.1, atol=0)
    assert not torch.equal(losses(ranks), losses([alone])), "nothing was compressed"


@pytest.mark.parametrize("loss_on", ["device0", "replicas"])
@pytest.mark.parametrize("devices", [1, 2])
def test_dp(gang: Gang, devices: int, loss_on: str) -> None:
    """If it fails, the replicas in one process, or the loss of all of them, are wrong."""
    if gang.backend.device == "cuda" and torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    options = options_of("dp", num_workers=devices, loss_on=loss_on)
    for job in (digits(), Tokens()):
        case = Case(job=job, train=having(global_batch_size=25, grad_accumulation=2))
        (alone,) = gang.run(train, case, world_size=1)
        (parts,) = gang.run(train, Case(job=job, train=case.train, alone=options), world_size=1)
        torch.testing.assert_close(losses([parts]), losses([alone]), rtol=ROUNDING * SGD, atol=0)


@pytest.mark.parametrize(("name", "sizes"), [("1F1B-2", [2]), ("1F1B-2x2", [2, 2, 2])])
def test_groups_have_the_timeout_of_the_run_and_more_than_one_rank(
    gang: Gang, backend: Backend, name: str, sizes: list[int]
) -> None:
    """If it fails, NCCL ends an operation after a time of its own, or has communicators that nothing needs."""
    layout = LAYOUTS[name]
    sizes = sizes if backend.device == "cpu" else [*sizes, 2]  # one more on the hosts
    case = layout.of(Case(job=digits(depth=8, hidden=8), train=having(global_batch_size=32)))
    for found in gang.run(formed, case, world_size=layout.world_size):
        assert found == [(size, CLUSTER.collective_timeout_s) for size in sizes]


# train.compile ------------------------------------------------------------------------------------


SECONDS = 200.0
"""For the compilers, which are called a few times."""
WHERE = {
    "single": LAYOUTS["single"],
    "ddp-2": Layout(options=replace(DDP, bucket_mb=25.0), world_size=2),
    "1F1B-2": LAYOUTS["1F1B-2"],
}


@pytest.fixture(scope="module", autouse=True)
def own_processes() -> Iterator[None]:
    """End the processes with this file, and the compiled code with them."""
    yield
    close_gangs()


def compiled(rank: int, case: Case, cache_dir: str) -> tuple[Steps, int]:
    """What the rank saw, and how often something was compiled there."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_dir
    compilations: list[bool] = []
    with watching_compilation(compilations.append, lambda: None):
        return train(rank, case), len(compilations)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", WHERE)
def test_a_compiled_model_has_the_losses_of_the_plain_one(
    gang: Gang, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """If it fails, compiled code computes other values, or something is compiled again at every step."""
    layout = WHERE[name]
    plain = layout.of(Case(job=digits(depth=3), train=having(steps=2, global_batch_size=32)))
    case = replace(plain, train=having(plain.train, compile=True))
    cache_dir = str(tmp_path_factory.getbasetemp() / "inductor")
    counted = gang.run(compiled, case, cache_dir, world_size=layout.world_size, timeout_s=SECONDS)
    assert all(compilations for _, compilations in counted)
    expected = gang.run(train, plain, world_size=layout.world_size)
    torch.testing.assert_close(losses([seen for seen, _ in counted]), losses(expected), rtol=1e-4, atol=0)


# Evaluation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ddp-2", "fsdp-2", *STAGED])
def test_every_layout_evaluates_exactly(gang: Gang, name: str) -> None:
    """If it fails, stages wait for each other in an evaluation, or its incomplete last batch counts wrongly."""
    case = Case(job=digits(depth=3, val_size=37), train=having(steps=2, global_batch_size=16))
    assert_evaluated_exactly(gang, case, name, rtol=1e-4)


@pytest.mark.parametrize("job", [ScoredDigits(depth=3, val_size=75), PredictedDigits(depth=3, val_size=75)])
@pytest.mark.parametrize("name", ["ddp-2", "fsdp-2", "1F1B-2"])
def test_metrics_of_the_whole_set_are_those_of_one_worker(gang: Gang, name: str, job: Job) -> None:
    """If it fails, what the ranks have counted on the device is not what one of them gets."""
    assert_scored_exactly(gang, job, LAYOUTS[name], rtol=1e-4)


@pytest.mark.parametrize("name", ["single", "ddp-2", "1F1B-2", "GPipe-2x2"])
def test_an_evaluation_takes_as_few_samples_at_once_as_training(gang: Gang, name: str) -> None:
    """If it fails, an evaluation can run out of memory where training does not."""
    layout = LAYOUTS[name]
    whole = Case(job=digits(depth=3, val_size=45), train=having(global_batch_size=32))
    sliced = layout.of(Case(job=whole.job, train=having(whole.train, grad_accumulation=4)))
    ((rows, expected),) = gang.run(evaluated_in_slices, whole, world_size=1)
    ranks = gang.run(evaluated_in_slices, sliced, world_size=layout.world_size)
    assert rows == 32
    assert {rows for rows, _ in ranks} == {4 if name in ("ddp-2", "GPipe-2x2") else 8}
    assert sum(point.loss_sum for _, point in ranks) == pytest.approx(expected.loss_sum, rel=1e-5)
    assert sum(point.sums.get("accuracy", 0.0) for _, point in ranks) == expected.sums["accuracy"]


# Precision ----------------------------------------------------------------------------------------


LAYOUT_NAMES = ("ddp-2", "1F1B-2", "ZBVZeroBubble-2", "GPipe-2x2")
TOLERANCE = {"tf32": 0.005, "bf16": 0.03, "bf16-true": 0.08, "fp16": 0.01}
"""Relative, of every loss: about the unit roundoff of the dtype, times the number of steps."""


@pytest.mark.parametrize("precision", TOLERANCE)
def test_every_layout_has_the_losses_of_one_worker(gang: Gang, precision: str) -> None:
    """If it fails, a precision is applied differently on one worker and on several."""
    case = Case(job=TinyGPT(width=64), train=having(precision=precision, grad_accumulation=2, clip_norm=0.5))
    seen = assert_as_alone(gang, case, *LAYOUT_NAMES, rtol=TOLERANCE[precision])
    (exact,) = gang.run(train, replace(case, train=having(case.train, precision="fp32")), world_size=1)
    for ranks in seen.values():
        torch.testing.assert_close(losses(ranks), losses([exact]), rtol=2 * TOLERANCE[precision], atol=0)
    if precision != "tf32":
        assert not any(torch.equal(losses(ranks), losses([exact])) for ranks in seen.values())
    dtypes = {t.dtype for ranks in seen.values() for r in ranks for t in r.model.values() if t.is_floating_point()}
    assert dtypes == {torch.bfloat16 if precision == "bf16-true" else torch.float32}


@pytest.mark.parametrize("how", ["blocks", "selective"])
@pytest.mark.parametrize("name", ["single", "ddp-2", "1F1B-2"])
def test_recomputed_blocks_have_the_same_losses(gang: Gang, name: str, how: Literal["blocks", "selective"]) -> None:
    """If it fails, a block that is computed again differs, such as by its random numbers."""
    layout = LAYOUTS[name]
    kept = layout.of(Case(job=TinyGPT(layers=4), train=having(steps=6, grad_accumulation=2)))
    recomputed = replace(kept, train=having(kept.train, activation_checkpointing=how))
    expected, found = (gang.run(train, case, world_size=layout.world_size) for case in (kept, recomputed))
    torch.testing.assert_close(losses(found), losses(expected), rtol=1e-4, atol=0)


@dataclass(frozen=True, kw_only=True)
class DeepGPT(GPT):
    """Its activations take far more memory than its parameters."""

    layers: int = 8
    width: int = 128
    heads: int = 4
    context: int = 256


def peak_memory(rank: int, case: Case) -> int:
    """The most bytes that three steps have taken, with the model and without what was there before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    list(steps(make(case, rank), last=3))
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.usefixtures("gpu")
def test_recomputed_blocks_take_less_memory(gang: Gang) -> None:
    """If it fails, ``train.activation_checkpointing`` keeps the activations."""
    case = Case(job=DeepGPT(), train=having(global_batch_size=32))
    (kept,) = gang.run(peak_memory, case, world_size=1)
    (recomputed,) = gang.run(
        peak_memory, replace(case, train=having(case.train, activation_checkpointing="blocks")), world_size=1
    )
    assert recomputed < 0.6 * kept
