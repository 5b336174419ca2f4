"""Generated sparse problems: data of the promised shape, gradients that touch little, and a truth that is found."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from helpers.files.golden import Golden
from helpers.ranks.job_trials import accuracy, errors, trained
from jobs.sparse import MatrixCompletion, SparseJob, SparseLogistic

SMALL = [SparseLogistic(features=500, words=20, samples=400), MatrixCompletion(size=40, rank=3, observed=600)]
both = pytest.mark.parametrize("job", SMALL, ids=["logistic", "matrix"])


def batch(job: SparseJob, indices: list[int], split: Any = "train") -> tuple[torch.Tensor, torch.Tensor]:
    dataset: Any = job.dataset(split)
    collate = job.collate
    inputs, targets = collate(dataset.__getitems__(indices))
    return inputs, targets


@both
def test_only_the_rows_of_a_batch_have_gradients_unless_they_are_to_be_dense(job: SparseJob) -> None:
    inputs, targets = batch(job, [3, 1, 2])
    gradients = []
    for one in (job, replace(job, sparse=False)):
        torch.manual_seed(0)
        model = one.model()
        one.loss(model(inputs), targets).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.ndim == 2})
    for name, dense in gradients[1].items():
        sparse = gradients[0][name]
        assert sparse.is_sparse
        assert not dense.is_sparse
        assert sparse.coalesce().values().shape[0] < dense.shape[0] / 5
        torch.testing.assert_close(sparse.to_dense(), dense)


@both
def test_a_batch_is_its_samples(job: SparseJob) -> None:
    dataset: Any = job.dataset("train")
    inputs, targets = batch(job, [5, 0, 5])
    joined_inputs, joined_targets = job.collate([dataset[5], dataset[0], dataset[5]])
    assert joined_inputs.equal(inputs)
    assert joined_targets.equal(targets)
    for row, index in enumerate([5, 0, 5]):
        assert dataset[index][0].equal(inputs[row])
        assert dataset[index][1].equal(targets[row])


@both
def test_data_is_the_same_each_time_and_validates_on_other_samples(job: SparseJob) -> None:
    torch.manual_seed(0)
    first, val = batch(job, list(range(40))), batch(job, list(range(40)), "val")
    torch.manual_seed(1)
    again = batch(job, list(range(40)))
    assert first[0].equal(again[0])
    assert first[1].equal(again[1])
    assert not first[0].equal(val[0])
    assert not first[1].equal(val[1])


def test_words_follow_zipfs_law() -> None:
    dataset: Any = SparseLogistic().dataset("train")
    texts = dataset.inputs
    assert texts.shape == (20_000, 90)
    counts = torch.bincount(texts.flatten(), minlength=50_000)
    assert len(counts) == 50_000
    for rank in (2, 10, 100):
        assert float(counts[0] / counts[rank - 1]) == pytest.approx(rank, rel=0.1)
    different = sum(len(text.unique()) for text in texts[:1000]) / 1000
    assert different == pytest.approx(72, abs=1)
    assert float(dataset.targets.mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.slow
def test_logistic_regression_learns_what_the_labels_come_from() -> None:
    job = SparseLogistic()
    model, losses = trained(job, steps=300, batch=64)
    assert losses[0] == pytest.approx(torch.tensor(2.0).log().item())
    assert accuracy(job, job.truth()) == pytest.approx(0.88, abs=0.02)
    assert accuracy(job, model) > 0.7


def test_the_matrix_is_completed() -> None:
    job = MatrixCompletion(size=60, rank=2, observed=2000)
    model, _ = trained(job, steps=400, batch=200)
    inputs, values = batch(job, list(range(200)), "val")
    assert float(values.std()) == pytest.approx(1, abs=0.3)
    with torch.no_grad():
        assert float(F.mse_loss(model(inputs), values)) < 4 * job.noise**2


def test_entries_that_validate_are_never_trained_on() -> None:
    job = MatrixCompletion(size=20, observed=360)
    train, val = (
        {tuple(place) for place in batch(job, list(range(n)), s)[0].tolist()} for s, n in (("train", 360), ("val", 36))
    )
    assert (len(train), len(val)) == (360, 36)
    assert not train & val


@both
def test_gradients_are_delayed_and_evaluation_is_not(job: SparseJob, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("jobs.sparse.wait", waits.append)
    slow = replace(job, delay_us=5e5)
    inputs, targets = batch(job, [0, 1])
    model = slow.model()
    with torch.no_grad():
        slow.loss(model(inputs), targets)
    assert waits == []
    slow.loss(model(inputs), targets)
    assert sum(waits) == pytest.approx(0.5)


@both
@pytest.mark.parametrize(("algorithm", "sparse"), [("sgd", True), ("adagrad", True), ("adam", False)])
def test_every_algorithm_learns(job: SparseJob, algorithm: Any, sparse: bool) -> None:
    one = replace(job, algorithm=algorithm, sparse=sparse, lr=0.01)
    one.check()
    _, losses = trained(one, steps=10, batch=100)
    assert losses[-1] < losses[0]


def test_adam_with_sparse_gradients_is_refused_with_the_remedy(golden: Golden) -> None:
    [error] = errors("jobs.sparse.SparseLogistic", algorithm="adam")
    golden.says(error)
    assert errors("jobs.sparse.SparseLogistic", algorithm="adam", sparse=False) == []
