"""The jobs that ship: they learn, by the rules that every strategy relies on."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from helpers.files.golden import Golden
from helpers.ranks.job_trials import accuracy, errors, trained
from jobs.digits import Digits, load_digits
from jobs.sleep import Sleep
from jobs.toy import Toy


@pytest.mark.slow  # a run at defaults has seed 0
@pytest.mark.parametrize("seed", [1, 2])
def test_digits_reaches_97_percent_at_the_defaults(seed: int) -> None:
    model, _ = trained(Digits(), steps=500, batch=64, seed=seed)
    assert accuracy(Digits(), model) >= 0.97


def test_digits_split_is_whole_and_fixed() -> None:
    def images(seed: int) -> list[list[tuple[float, ...]]]:
        torch.manual_seed(seed)
        parts = [Digits().dataset("train"), Digits().dataset("val")]
        return [[tuple(part[i][0].tolist()) for i in range(len(part))] for part in parts]  # type: ignore[arg-type]

    train, val = images(0)
    assert images(1) == [train, val]
    assert (len(train), len(val)) == (1438, 359)
    assert sorted(train + val) == sorted(tuple(row) for row in load_digits()[0].tolist())


@pytest.mark.slow
def test_digits_are_those_of_scikit_learn_without_importing_it() -> None:
    check = (
        "import sys; from jobs.digits import Digits; Digits().dataset('train'); "
        "assert 'sklearn' not in sys.modules, 'costs seconds'"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60, cwd=Path(__file__).parents[3])
    from sklearn import datasets

    images, labels = load_digits()
    expected_images, expected_labels = datasets.load_digits(return_X_y=True)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert (images.numpy() * 16 == expected_images).all()
    assert (labels.numpy() == expected_labels).all()


def test_a_wrong_field_is_named(golden: Golden) -> None:
    def answer(target: str, *fields: str) -> str:
        values = {name: yaml.safe_load(value) for name, _, value in (field.partition("=") for field in fields)}
        (error,) = errors(target, **values)
        assert f"job.{next(iter(values))}=" in error
        return error

    golden.answers("errors/jobs", answer)
    # Whether the package is installed or not.
    assert "job.tokenizer=no/such/file: " in answer("jobs.gpt.GPT", "tokenizer=no/such/file")


TUTORIAL_NETS = [
    (Toy(), {"fc.weight": (2, 5), "fc.bias": (2,)}),
    (
        Toy(input_size=10, hidden=10, output_size=5),
        {"net1.weight": (10, 10), "net1.bias": (10,), "net2.weight": (5, 10), "net2.bias": (5,)},
    ),
]


@pytest.mark.parametrize(("job", "shapes"), TUTORIAL_NETS, ids=["one layer", "two layers"])
def test_toy_is_the_tutorials_net_and_learns(job: Toy, shapes: dict[str, tuple[int, ...]]) -> None:
    assert {name: tuple(p.shape) for name, p in job.model().named_parameters()} == shapes
    train, val = job.dataset("train"), job.dataset("val")
    assert (len(train), len(val)) == (100, 100)  # type: ignore[arg-type]
    assert not torch.equal(train[0][0], val[0][0])
    _, losses = trained(job, steps=200, batch=30)
    assert losses[-1] < losses[0] / 20


def test_sleep_sleeps_once_forward_and_once_for_each_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    layer = Sleep(layers=1, forward_ms=20).model()
    inputs = torch.ones(3, 2, requires_grad=True)
    output = layer(inputs)
    assert naps == [0.02]
    torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    assert naps == [0.02] * 2
    output.sum().backward()
    assert naps == [0.02] * 4


def test_sleep_learns() -> None:
    _, losses = trained(Sleep(layers=4, forward_ms=0.01), steps=50, batch=32)
    assert losses[-1] < 0.1 * losses[0]
