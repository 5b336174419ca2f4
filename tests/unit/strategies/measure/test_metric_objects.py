"""Metric objects: those of several ranks together are what one would be that has seen all samples."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.files.golden import Golden
from helpers.jobs.toys import Toy
from orchestrator.strategies.measure.metric_objects import (
    MetricObjects,
    metric_object_errors,
    misspelled,
    pickled,
    unpickled,
)
from orchestrator.user_code.errors import JobError

Pair = tuple[Any, Any]


class Seen:
    """Counts targets and keeps outputs."""

    def __init__(self, result: Any = None):
        self.counts: Counter[int] = Counter()
        self.outputs: list[Tensor] = []
        self.result = result

    def update(self, output: Tensor, target: Tensor) -> None:
        self.counts.update(target.tolist())
        self.outputs.append(output[:, 0])

    def merge(self, other: Seen) -> None:
        self.counts += other.counts
        self.outputs += other.outputs

    def compute(self) -> Any:
        if self.result is not None:
            return self.result
        return {"ones": self.counts[1], "largest": torch.cat(self.outputs).max()}


class Returning(Seen):
    """Its ``merge`` returns a new object."""

    def merge(self, other: Seen) -> Returning:  # type: ignore[override]
        made = Returning()
        made.counts, made.outputs = self.counts + other.counts, self.outputs + other.outputs
        return made


class Lone(Seen):
    merge = None  # type: ignore[assignment]


class Slotted:
    __slots__ = ("count",)
    update = merge = compute = print


class Unsent(Seen):
    def __init__(self) -> None:
        super().__init__()
        self.key = lambda: None


class Few(Seen):
    def update(self, output: Tensor, target: Tensor) -> None:
        pass


class Unmerged(Seen):
    def merge(self, other: Seen) -> None:
        raise ValueError("bins differ")


@dataclass(frozen=True, kw_only=True)
class Measured(Toy):
    make: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    def metric_objects(self, split: str) -> Mapping[str, Any]:
        return {name: make() for name, make in self.make.items()}


def objects(**make: Callable[[], Any]) -> MetricObjects:
    return MetricObjects(Measured(make=make), "val")


def updated(make: Mapping[str, Callable[[], Any]], pairs: Sequence[Pair]) -> MetricObjects:
    made = objects(**make)
    for output, target in pairs:
        made.update(output, target)
    return made


def joined(make: Mapping[str, Callable[[], Any]], ranks: Sequence[Sequence[Pair]]) -> dict[str, float] | None:
    """What rank 0 computes, given the pairs that each rank is updated with."""
    made = [updated(make, pairs) for pairs in ranks]
    made[0].join([rank.packed(most=2**20) for rank in made])
    return made[0].values()


def in_ranks(pairs: Sequence[Pair]) -> list[Sequence[Pair]]:
    """Uneven shares; two ranks have nothing, among them the one that joins."""
    return [[], pairs[:2], pairs[2:3], [], pairs[3:]]


def pairs_of(*columns: Any) -> list[Pair]:
    return list(zip(*columns, strict=True))


def rows() -> list[Pair]:
    torch.manual_seed(0)
    sizes = [5, 3, 7, 2, 4, 1]
    return [(torch.rand(n, 4).softmax(dim=-1), torch.randint(0, 4, (n,))) for n in sizes]


@pytest.mark.parametrize("cls", [Seen, Returning])
def test_objects_of_the_user_are_joined(cls: type[Seen]) -> None:
    pairs = rows()
    expected = updated({"seen": cls}, pairs).values()
    assert expected["ones"] == sum(int((target == 1).sum()) for _, target in pairs)
    assert joined({"seen": cls}, in_ranks(pairs)) == expected


def test_no_samples_have_no_metrics() -> None:
    assert joined({"seen": Seen}, [[], []]) == {}
    assert objects(seen=Seen).values() == {}


def test_only_data_is_loaded(golden: Golden) -> None:
    own, names = pickled([Few(), Counter("a"), np.zeros((2, 3), dtype=np.float32), torch.ones(2, 0), {1, 2}, len])
    found = unpickled(own, names, module=__name__)
    assert [type(item) for item in found] == [Few, Counter, np.ndarray, Tensor, set, type(len)]
    assert found[3].shape == (2, 0)
    for value in (os.system, Few, eval):
        with golden.raises(UnpicklingError):
            unpickled(pickled(value)[0], [], module="os")
    scalars = [torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(True), np.int64(3), deque([1])]
    assert unpickled(pickled(scalars)[0], [], module="os") == scalars


def test_a_view_is_sent_without_its_storage() -> None:
    whole = torch.zeros(100_000, 2)
    made = updated({"seen": Seen}, [(whole[:3], torch.zeros(3))])
    assert len(made.packed(most=2**20)["seen"]) < 5_000


def test_the_class_of_an_object_need_not_be_importable() -> None:
    class Local(Seen):
        pass

    assert joined({"seen": Local}, in_ranks(rows())) == updated({"seen": Local}, rows()).values()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ({"f1": Lone}, "'f1' is a Lone; it has no merge(): return a metric of torchmetrics, or an object with "),
        ({"f1": lambda: 0.5}, "'f1' is 0.5; it has no update(), merge(), compute(): return a metric of torchm"),
        ({"f1": Slotted}, "'f1' is a Slotted; let its class have no __slots__"),
        ({"f1": Unsent}, "'f1' (Unsent) cannot be sent to another worker: "),
        ({"loss": Seen}, "the run itself logs a metric named 'loss'; choose another name"),
    ],
    ids=["merge", "number", "slots", "lambda", "loss"],
)
def test_what_cannot_be_used_is_refused_before_anything_starts(
    make: Mapping[str, Callable[[], Any]], message: str
) -> None:
    (error,) = metric_object_errors(Measured(make=make), ["val"])
    assert error.startswith(f"job.metric_objects: {message}")


@pytest.mark.parametrize(
    ("metric", "meant"),
    [
        ("val/f1", "val/F1"),
        ("val/F1", None),
        ("val/several", None),
        ("val/needing", None),
        ("val/other", None),
        ("test/f1", None),
    ],
)
def test_a_metric_in_other_capitals_is_known_before_an_evaluation(metric: str, meant: str | None) -> None:
    make = {"F1": lambda: Seen(0.5), "Several": lambda: Seen({"several": 1.0}), "Needing": Seen}
    assert misspelled(Measured(make=make), {"val": "val/"}, metric) == meant


def test_an_object_that_is_kept_would_count_twice(golden: Golden) -> None:
    kept = Seen()
    (error,) = metric_object_errors(Measured(make={"new": Seen, "f1": lambda: kept}), ["val"])
    golden.says(error)


def test_what_cannot_be_merged_is_named(golden: Golden) -> None:
    with golden.raises(JobError):
        joined({"f1": Unmerged}, in_ranks(rows()))


def test_too_much_to_join_is_refused(golden: Golden) -> None:
    made = updated({"few": Few, "many": Seen}, [(torch.zeros(10**6, 2), torch.zeros(10**6))])
    with golden.raises(JobError):
        made.packed(most=3 * 2**20)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(3), "'f1' computes a tensor of shape (3,) and type torch.float32; return a number, or a dict of"),
        ("high", "'f1' computes a str; return a number, or a dict of numbers by name"),
        ({"accuracy": 1}, "'f1' computes 'accuracy', and so does another metric; rename one"),
        ({"loss": 1}, "the run itself logs a metric named 'loss'; choose another name"),
        ({3: 1}, "the name 3 is a int; name metrics by strings"),
    ],
    ids=["vector", "text", "taken", "loss", "number"],
)
def test_what_is_computed_are_numbers(result: Any, message: str) -> None:
    made = updated({"f1": lambda: Seen(result)}, rows())
    with pytest.raises(JobError) as raised:
        made.values(["accuracy"])
    assert str(raised.value).startswith(f"job.metric_objects: {message}")


def test_nan_is_a_value() -> None:
    values = updated({"f1": lambda: Seen(nan)}, rows()).values()
    assert isnan(values["f1"])


@pytest.mark.slow  # the import of torchmetrics
class TestTorchmetrics:
    @pytest.fixture(autouse=True)
    def library(self) -> Any:
        return pytest.importorskip("torchmetrics", reason="the optional package is missing: pip install torchmetrics")

    def make(self) -> dict[str, tuple[Callable[[], Any], list[Pair]]]:
        """Metrics with states of every kind of reduction, and what each is updated with."""
        import torchmetrics as tm

        class Losses(tm.MeanMetric):
            def update(self, output: Any, target: Any = None) -> None:
                super().update(output[:, 0], weight=target.float())

        texts = (["a cat sat on the mat", "it rains"], ["two dogs ran away now"], ["no one is here today"])
        told = pairs_of(texts, [[["the cat sat on the mat"], ["it rains"]], [["two dogs ran away"]], [["no one is"]]])
        classes = rows()
        numbers = [(output[:, 0], output[:, 1] * 2 + target) for output, target in classes]
        tokens = [(output.log()[None], target[None]) for output, target in classes]
        return {
            "f1": (lambda: tm.F1Score(task="multiclass", num_classes=4, average="macro"), classes),
            "auc": (lambda: tm.AUROC(task="multiclass", num_classes=4), classes),
            "binned": (lambda: tm.AUROC(task="multiclass", num_classes=4, thresholds=9), classes),
            "bleu": (tm.text.BLEUScore, told),
            "perplexity": (tm.text.Perplexity, tokens),
            "pearson": (tm.PearsonCorrCoef, numbers),
            "spearman": (tm.SpearmanCorrCoef, numbers),
            "noise": (lambda: tm.image.PeakSignalNoiseRatio(data_range=4.0), numbers),
            "mean": (Losses, classes),
            "of_each": (
                lambda: tm.ClasswiseWrapper(tm.F1Score(task="multiclass", num_classes=4, average=None)),
                classes,
            ),
        }

    def test_metrics_are_joined_as_one_that_has_seen_all(self) -> None:
        for name, (make, pairs) in self.make().items():
            found, expected = joined({name: make}, in_ranks(pairs)), updated({name: make}, pairs).values()
            assert expected is not None
            assert found == pytest.approx(expected, rel=1e-6), name
            assert not any(isnan(value) for value in found.values()), name
            assert joined({name: make}, [[], pairs]) == pytest.approx(expected, rel=1e-6), name
            alone = make()
            for pair in pairs:
                alone.update(*pair)
            assert set(expected.values()) <= {float(v) for v in _all(alone.compute())}, name

    def test_a_metric_does_not_communicate_by_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torchmetrics

        made = updated({"f1": lambda: torchmetrics.F1Score(task="multiclass", num_classes=4)}, rows())
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # and there is no group
        assert made.values()

    def test_a_mean_of_means_is_refused(self) -> None:
        import torchmetrics

        class Mean(torchmetrics.Metric):
            def __init__(self) -> None:
                super().__init__()
                self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

            def update(self, output: Tensor, target: Tensor) -> None:
                self.mean = output.mean()

            def compute(self) -> Tensor:
                return self.mean

        with pytest.raises(JobError, match="cannot be merged: its state mean is a mean; keep a sum and a count"):
            joined({"mean": Mean}, in_ranks([(o[:, :1], t) for o, t in rows()]))

    def test_a_collection_is_refused(self) -> None:
        import torchmetrics

        make = {"all": lambda: torchmetrics.MetricCollection([torchmetrics.MeanMetric()])}
        (error,) = metric_object_errors(Measured(make=make), ["val"])
        assert error.endswith("return its metrics one by one, as dict(collection.items())")


def _all(computed: Any) -> list[Any]:
    return list(computed.values()) if isinstance(computed, Mapping) else [computed]
