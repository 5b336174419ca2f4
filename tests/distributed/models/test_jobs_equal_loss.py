"""The jobs that ship, under the rule of equal loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.equal_loss import assert_equal_losses
from helpers.conformance.layouts import ADAMW, SGD, pipeline
from helpers.conformance.training import losses, train
from jobs.names import Names
from jobs.resnet50 import ResNet50
from jobs.sparse import MatrixCompletion, SparseLogistic
from jobs.toy import Toy
from orchestrator import batches_by_length


@pytest.mark.parametrize(
    "options",
    [DDP, pipeline("GPipe", 2), pipeline("1F1B", 2, ("layer3",))],
    ids=["ddp", "pipeline", "pipeline-layer3"],
)
def test_resnet50_on_two_workers_is_one_worker_with_two_micro_batches(gang, options):
    """BatchNorm's statistics are those of the images that pass together."""
    job = ResNet50(width=4, blocks=(1, 1, 1, 1), num_classes=10, num_images=40, lr=0.02)
    whole = having(steps=10, global_batch_size=20)
    halves = having(whole, grad_accumulation=2)
    (alone,) = gang.run(train, Case(job=job, train=halves), world_size=1)
    ranks = gang.run(train, Case(job=job, train=whole, options=options), world_size=2)
    torch.testing.assert_close(losses(ranks), losses([alone]), rtol=SGD, atol=0)
    trained = [name for name, _ in job.model().named_parameters()]
    assert set(trained) <= set().union(*(rank.model for rank in ranks))
    for rank in ranks:
        for name in set(trained) & set(rank.model):
            torch.testing.assert_close(rank.model[name], alone.model[name], rtol=1e-3, atol=1e-4)
    (undivided,) = gang.run(train, Case(job=job, train=whole), world_size=1)
    assert (losses([undivided]) - losses([alone])).abs().max() > 1e-3, "the statistics make no difference"


@pytest.mark.parametrize("grad_accumulation", [1, 2])
def test_toy(gang, grad_accumulation):
    case = Case(job=Toy(), train=having(global_batch_size=30, grad_accumulation=grad_accumulation))
    assert_equal_losses(gang, case, (2, 4), rtol=SGD)


LOGISTIC = SparseLogistic(features=500, words=20, samples=400)
MATRIX = MatrixCompletion(size=40, rank=3, observed=600, lr=0.1)


@pytest.mark.parametrize("grad_accumulation", [1, 3])
@pytest.mark.parametrize(
    "job",
    [LOGISTIC, replace(LOGISTIC, algorithm="sgd", lr=0.02), replace(LOGISTIC, sparse=False), MATRIX],
    ids=["logistic-adagrad", "logistic-sgd", "logistic-dense", "matrix"],
)
def test_sparse_gradients(gang, job, grad_accumulation):
    train = having(global_batch_size=101, grad_accumulation=grad_accumulation)
    assert_equal_losses(gang, Case(job=job, train=train), (2, 4), rtol=SGD)


def test_powersgd_averages_sparse_gradients_in_full(gang):
    assert_equal_losses(gang, Case(job=LOGISTIC, options=replace(DDP, comm_hook="powersgd")), (2,), rtol=SGD)


@pytest.mark.parametrize("job", [LOGISTIC, MATRIX], ids=["logistic", "matrix"])
def test_sparse_gradients_are_clipped_by_the_norm_that_dense_ones_have(gang, job):
    for world_size in (1, 2):
        norms, found = [], []
        for one in (job, replace(job, sparse=False)):
            case = Case(job=one, train=having(grad_accumulation=2, clip_norm=0.1))
            ranks = gang.run(train, case, world_size=world_size)
            norms.append([rank.norms for rank in ranks])
            found.append(losses(ranks))
        torch.testing.assert_close(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=SGD, atol=0)
        torch.testing.assert_close(found[0], found[1], rtol=SGD, atol=0)
        assert min(map(min, norms[0])) > 0.1, "nothing was clipped"


@dataclass(frozen=True, kw_only=True)
class NamesByLength(Names):
    def batch_sampler(self, dataset, batch_size, generator):
        return batches_by_length([len(name) for name in dataset.names], batch_size, generator)


@pytest.mark.parametrize(
    ("job", "grad_accumulation", "world_sizes"),
    [(Names(width=8), 1, (2, 4)), (NamesByLength(width=8), 2, (3,))],
)
def test_names_of_unequal_length(gang, job, grad_accumulation, world_sizes):
    train = having(global_batch_size=25, grad_accumulation=grad_accumulation)
    ranks = assert_equal_losses(gang, Case(job=job, train=train), world_sizes, rtol=ADAMW)
    assert all(len(set(at_step)) > 1 for at_step in zip(*(r.weights for r in ranks), strict=True))
