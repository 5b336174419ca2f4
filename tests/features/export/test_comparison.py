"""Another process loads an export, and what it computes is compared with the trained model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from helpers.files.golden import Golden
from helpers.jobs.exporting_jobs import Exporting
from orchestrator import export
from orchestrator.config.recorded_config import to_yaml
from orchestrator.features.export.comparison import _first_module, _other_form, difference
from orchestrator.records import run_dir as rundir
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import save
from orchestrator.state.train_state import capture


def run_of(tmp_path: Path, how: str) -> RunDir:
    job = Exporting(how=how)
    run = rundir.create(tmp_path, "a")
    run.update_record(name="a", uid="first", state="finished")
    run.config_file.write_text(to_yaml({"job": {"_target_": "helpers.jobs.exporting_jobs.Exporting", "how": how}}))
    model = job.model()
    state = capture(model, job.optimizer(model.parameters()), None, step=5, samples_consumed=30)
    save(run.checkpoints, state, run_uid="a")
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("", 0), ("no data", 0), ("bfloat16", 2), ("other weight", 2), ("NaN", 2), ("other form", 2),
        ("cannot load", 2), ("ends", 2), ("random", 0), ("no input", 0), ("no package", 0), ("no way", 0),
        ("killed", 0),
    ],
)  # fmt: skip
def test_an_export_is_what_was_trained_or_is_not_there(
    tmp_path: Path, how: str, code: int, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    run = run_of(tmp_path, how)
    new = tmp_path / "exports" / "new"
    assert export.main([str(run.path), "--format", "mine", "--to", str(new)]) == code
    assert new.is_dir() == (code == 0)
    assert [file.name for file in new.parent.iterdir()] == (["new"] if code == 0 else [])
    output = capsys.readouterr()
    golden.says(output.out.splitlines()[1].split(" (difference")[0] if code == 0 else output.err.splitlines()[-1])


def test_a_model_that_does_not_fit_into_memory_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    run = run_of(tmp_path, "other weight")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert export.main([str(run.path), "--format", "mine", "--to", str(tmp_path / "new")]) == 0
    golden.says(capsys.readouterr().out.splitlines()[1])


NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 3.0], [1.0, 2.0], 0.5),
        ([NAN, -INF], [NAN, -INF], 0.0),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([INF, 1.0], [-INF, 1.0], INF),
        ([0.1], [0.0], INF),
        ([], [], 0.0),
    ],
)
def test_differences_are_relative_to_the_largest_number(found: Any, expected: Any, error: float) -> None:
    assert difference([torch.tensor(found)], [torch.tensor(expected)]) == error


def test_integers_and_the_number_of_tensors_count() -> None:
    assert difference([torch.tensor([3])], [torch.tensor([2])]) == 0.5
    one: list[Tensor] = [torch.zeros(2)]
    assert _other_form(one, one) is None
    assert _other_form(one, [torch.zeros(3)]) == (
        "its output has the shapes [[2]], and that of the trained model [[3]]"
    )


def test_the_first_module_that_differs_is_found_below_adapters() -> None:
    trained = {"model.base.model.embed.base_layer": 1.0, "model.base.model.embed": 2.0, "model.base.model.head": 3.0}
    assert _first_module({"model.embed": 2.0, "model.head": 3.0}, trained, 1e-4) == ""
    assert _first_module({"model.embed": 1.0, "model.head": 4.0}, trained, 1e-4).endswith("differs is model.embed")
    assert _first_module({"model.embed": 2.0, "model.other": 4.0}, trained, 1e-4) == ""
