"""The job's own metrics: their names, their values, and the run's value of those of a training batch."""

from typing import Any, Literal

import pytest
import torch

from orchestrator.planning.mesh import Mesh
from orchestrator.policy.aggregate import Aggregator
from orchestrator.protocol.messages import TrainPoint
from orchestrator.strategies.measure.job_metrics import checked_metrics


@pytest.mark.parametrize(
    "name", ["accuracy", "top 5", "per_class/3.recall", "a:b-c", "acc/猫", "hit@1", "a/../b", "x" * 300]
)
@pytest.mark.parametrize("value", [torch.tensor(3), torch.tensor([2.5]), True, 4, 0.5])
def test_a_scalar_may_have_any_name(name: str, value: Any) -> None:
    (scalar,) = checked_metrics({name: value}, "train_metrics").values()
    assert scalar.shape == ()
    assert float(scalar) == float(value)


@pytest.mark.parametrize(
    ("method", "values", "text"),
    [
        ("train_metrics", {"loss": 1.0}, "the run itself logs a metric named 'loss'"),
        ("train_metrics", {"lr": 1.0}, "the run itself logs a metric named 'lr'"),
        ("train_metrics", {"lr_group_1": 1.0}, "the run itself logs a metric named 'lr_group_1'"),
        ("train_metrics", {"epoch": 1.0}, "the run itself logs a metric named 'epoch'"),
        ("train_metrics", {"grad_norm": 1.0}, "the run itself logs a metric named 'grad_norm'"),
        ("train_metrics", {"samples_seen": 1.0}, "the run itself logs a metric named 'samples_seen'"),
        ("metrics", {"loss": 1.0}, "the run itself logs a metric named 'loss'"),
        ("metrics", {"": 1.0}, "'' cannot be the name of a metric"),
        ("metrics", {"a\nb": 1.0}, r"'a\nb' cannot be the name of a metric; give it one without control characters"),
        ("metrics", {"a\udcff": 1.0}, r"'a\udcff' cannot be the name of a metric"),
        ("metrics", {3: 1.0}, "the name 3 is a int"),
        (
            "metrics",
            {"a": torch.ones(2)},
            "'a' is a tensor of shape (2,) and type torch.float32; return a scalar tensor of real numbers, a sum",
        ),
        (
            "metrics",
            {"a": torch.ones((), dtype=torch.complex64)},
            "'a' is a tensor of shape () and type torch.complex64; return a scalar tensor of real numbers",
        ),
        ("train_metrics", {"a": "1"}, "'a' is a str; return a scalar tensor"),
        ("train_metrics", [1.0], "returned a list; return a dict of scalar tensors by name"),
        ("metrics", None, "returned None; return a dict"),
    ],
)
def test_anything_else_is_refused_with_the_method_and_the_name(
    method: Literal["metrics", "train_metrics"], values: Any, text: str
) -> None:
    with pytest.raises(ValueError, match="job") as refused:
        checked_metrics(values, method)
    assert str(refused.value).startswith(f"job.{method}")
    assert text in str(refused.value)


def test_metrics_of_an_evaluation_may_have_the_names_of_training() -> None:
    assert list(checked_metrics({"epoch": 1.0, "lr": 2.0}, "metrics")) == ["epoch", "lr"]


def point(sums: dict[str, float], step_weight: float) -> TrainPoint:
    return TrainPoint(
        step=10,
        time=0.0,
        loss_sum=40.0,
        weight=20.0,  # of all steps since the last point
        step_ms=(),
        data_wait_ms=0.0,
        comm_share=None,
        step_weight=step_weight,
        sums=sums,
    )


def test_a_train_metric_is_the_sum_over_ranks_by_the_weight_of_its_step() -> None:
    parts = Aggregator(mesh=Mesh(replicate=3), global_batch_size=8, tokens_per_sample=None)
    parts.add(0, point({"correct": 1.0}, 3.0))
    parts.add(1, point({"correct": 4.0, "rare": 1.0}, 5.0))
    logged = parts.add(2, point({}, 0.0))  # such as a stage without the loss
    assert logged.metrics["train/loss"] == 2
    assert (logged.metrics["train/correct"], logged.metrics["train/rare"]) == (5 / 8, 1 / 8)


def test_without_weight_there_is_no_train_metric() -> None:
    parts = Aggregator(mesh=Mesh(), global_batch_size=8, tokens_per_sample=None)
    logged = parts.add(0, point({"correct": 0.0}, 0.0))
    assert "train/correct" not in logged.metrics
