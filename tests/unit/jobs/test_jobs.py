"""The jobs that ship: they learn, by the rules that every strategy relies on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.job_trials import accuracy, errors, trained
from jobs.digits import Digits, load_digits
from jobs.gpt import GPT
from jobs.sleep import Sleep
from jobs.toy import Toy

TINY = {"layers": 2, "width": 32, "heads": 2, "context": 16}


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
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


def test_gpt_learns() -> None:
    _, losses = trained(GPT(**TINY), steps=30, batch=32)
    assert losses[0] == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)
    assert losses[-1] < losses[0] - 1.5


def test_gpt_sees_no_later_byte() -> None:
    job = GPT(**TINY)
    torch.manual_seed(0)
    model = job.model().eval()
    text = torch.randint(256, (2, job.context))
    changed = text.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-4)


def test_gpt_can_be_cut_between_any_two_blocks() -> None:
    model = GPT(**TINY).model()
    assert isinstance(model, nn.Sequential)
    assert [name for name, _ in model.named_children()] == ["embed", "block0", "block1", "norm", "head"]
    text = torch.randint(256, (2, 16))
    for cut in range(1, len(model)):
        assert model[cut:](model[:cut](text)).equal(model(text))


def test_gpt_windows_cover_the_text_one_byte_ahead(tmp_path: Path) -> None:
    text = bytes(range(250)) * 8
    (tmp_path / "text").write_bytes(text)
    job = GPT(**TINY, path=str(tmp_path / "text"))
    train: Any = job.dataset("train")
    inputs = [i for k in range(len(train)) for i in train[k][0].tolist()]
    targets = [i for k in range(len(train)) for i in train[k][1].tolist()]
    assert inputs == list(text[: len(inputs)])
    assert targets == list(text[1 : len(inputs) + 1])
    assert 1800 - len(inputs) <= job.context
    assert job.dataset("val")[0][0].tolist() == list(text[1800:1816])


def test_gpt_reads_the_help_texts_of_python() -> None:
    from pydoc_data.topics import topics

    assert GPT().text().startswith(topics[min(topics)][:50].encode())
    assert len(GPT().text()) > 300_000


def test_gpt_counts_accuracy_per_sample() -> None:
    job = GPT(**TINY)
    target = torch.randint(256, (3, job.context))
    output = nn.functional.one_hot(target, 256).float()
    output[0, : job.context // 2] = output[0, : job.context // 2].roll(1, dims=-1)
    assert float(job.metrics(output, target)["accuracy"]) == pytest.approx(2.5)


def test_gpt_schedule_warms_up_decays_and_survives_json() -> None:
    job = GPT(**TINY, warmup_steps=4)
    optimizer = job.optimizer(job.model().parameters())
    scheduler = job.scheduler(optimizer, 50)
    rates = []
    for _ in range(50):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates.index(max(rates)) == 4
    assert max(rates) == pytest.approx(job.lr)
    assert rates[:4] == sorted(rates[:4])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(job.lr / 10)

    other = job.scheduler(job.optimizer(job.model().parameters()), 50)
    other.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    assert other.get_last_lr() == scheduler.get_last_lr()


def test_the_text_of_gpt_is_drawn_from_the_generator() -> None:
    job = GPT(**TINY, dropout=0.5, sample_bytes=40)
    torch.manual_seed(0)
    model = job.model().eval()
    texts = [job.sample(model, torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert all(len(t.encode(errors="replace")) >= 40 for t in texts)


def test_gpt_writes_from_its_last_context_bytes() -> None:
    job = GPT(**TINY, sample_bytes=20)
    model = job.model()
    lengths = []

    def look(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        lengths.append(inputs[0].shape[1])

    model.register_forward_hook(look)
    job.sample(model, torch.Generator().manual_seed(0))
    assert lengths == [*range(1, 17), 16, 16, 16, 16]


@pytest.mark.parametrize(
    "fields",
    [
        {"path": "no/such/file"},
        {"path": "/"},
        {"layers": 0},
        {"context": 0},
        {"sample_bytes": -1},
        {"lr": 0.0},
        {"temperature": 0.0},
        {"dropout": 1.0},
        {"width": 66, "heads": 4},
        {"context": 100_000},
    ],
    ids=str,
)
def test_gpt_names_the_faulty_field(fields: dict[str, Any]) -> None:
    [error] = errors("jobs.gpt.GPT", **fields)
    assert f"job.{next(iter(fields))}=" in error


def test_gpt_refuses_a_text_that_is_too_short(tmp_path: Path) -> None:
    job = {"context": 16, "path": str(tmp_path / "text")}
    (tmp_path / "text").write_bytes(b"x" * 169)
    [error] = errors("jobs.gpt.GPT", **job)
    assert "job.path=" in error
    assert "170" in error
    (tmp_path / "text").write_bytes(b"x" * 170)
    assert errors("jobs.gpt.GPT", **job) == []
    assert len(GPT(**job).dataset("val")) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"hidden": 0}, {"depth": 0}, {"lr": -0.1}, {"momentum": 1.0}], ids=str)
def test_digits_names_the_faulty_field(fields: dict[str, Any]) -> None:
    [error] = errors("jobs.digits.Digits", **fields)
    assert f"job.{next(iter(fields))}=" in error


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


@pytest.mark.parametrize(
    "fields", [{"input_size": 0}, {"output_size": 0}, {"hidden": -1}, {"samples": 0}, {"lr": 0.0}], ids=str
)
def test_toy_names_the_faulty_field(fields: dict[str, Any]) -> None:
    [error] = errors("jobs.toy.Toy", **fields)
    assert error.startswith(f"job.{next(iter(fields))}=")


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


@pytest.mark.parametrize("fields", [{"layers": 0}, {"forward_ms": 0.0}, {"samples": 0}, {"lr": -1.0}], ids=str)
def test_sleep_names_the_faulty_field(fields: dict[str, Any]) -> None:
    [error] = errors("jobs.sleep.Sleep", **fields)
    assert error.startswith(f"job.{next(iter(fields))}=")
