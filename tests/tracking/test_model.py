"""The final model of a run in MLflow: it predicts in a process that has none of our code, nor the job's."""

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.records.runs import wait_for
from helpers.records.tracked_runs import artifacts, client_of, end, ended_run, log, new_run, run_of, start, tracking
from jobs.digits import Digits
from orchestrator import sync
from orchestrator.features.export.formats import NotExportedError, export_program, prediction_inputs
from orchestrator.features.tracking.transfer import read_cursor
from orchestrator.features.tracking.uploader import RunUploader
from orchestrator.records.journal import Journal
from orchestrator.records.output_dir import announce, find_run, push_records
from orchestrator.records.run_dir import RunDir
from orchestrator.state import checkpoint
from orchestrator.state.best import BEST, BestSoFar
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.train_state import TrainState
from orchestrator.storage.remote import Remote

PREDICT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("orchestrator", "jobs", "helpers"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import mlflow, numpy as np
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(f"models:/{sys.argv[2]}")
np.save(sys.argv[4], model.predict(np.load(sys.argv[3])))
"""


TRACKING = {"experiment": "tests", "request_timeout_s": 5.0, "flush_timeout_s": 30.0}


def trained(
    tmp_path: Path, uri: str | None, target: str, model: nn.Module, *, log_model: bool = True, **fields: Any
) -> RunDir:
    """A run with a checkpoint of ``model``."""
    settings = {**TRACKING, "uri": uri, "log_model": log_model, "log_dataset": True}
    run_dir = new_run(tmp_path, uri, tracking=settings)
    run_dir.config_file.write_text(json.dumps({"job": {"_target_": target, **fields}}))  # YAML, too
    meta = {"step": 10, "samples_consumed": 640}
    checkpoint.save(run_dir.checkpoints, TrainState(model=model.state_dict(), optimizer={}, meta=meta), run_uid="u")
    return run_dir


def finish(run_dir: RunDir) -> None:
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 11))
    end(journal, run_dir)
    journal.close()


def test_the_model_predicts_without_our_code(tmp_path, uri):
    torch.manual_seed(1)
    job = Digits(hidden=16)
    live = job.model()
    run_dir = trained(tmp_path, uri, "jobs.digits.Digits", live, hidden=16)
    best = BestSoFar(metric="val/loss", direction="minimize", step=10, value=0.5)
    later = TrainState(
        model=job.model().state_dict(),
        optimizer={},
        meta={"step": 20, "samples_consumed": 1280, BEST: best.to_json()},
    )
    checkpoint.save(run_dir.checkpoints, later, run_uid="u")
    finish(run_dir)
    assert sync.main([str(run_dir.path)]) == 0
    run = run_of(uri, run_dir)
    (output,) = run.outputs.model_outputs
    assert (output.step, client_of(uri).get_logged_model(output.model_id).status) == (10, "READY")
    (given,) = run.inputs.dataset_inputs
    assert (given.dataset.name, json.loads(given.dataset.profile)) == ("Digits", {"num_rows": 1438})
    assert len(given.dataset.digest) == 16

    images = torch.stack([job.dataset("val")[i][0] for i in range(7)])
    np.save(tmp_path / "images.npy", images.numpy())
    command = [sys.executable, "-I", "-c", PREDICT, uri, output.model_id]
    command += [str(tmp_path / name) for name in ("images.npy", "predictions.npy")]
    subprocess.run(command, check=True, timeout=100, cwd=tmp_path)
    with torch.no_grad():
        expected = live.eval()(images).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "predictions.npy"), expected, rtol=1e-5, atol=1e-6)

    files = {path.name for path in tmp_path.glob("mlartifacts/**/*")}
    assert files >= {"model.pt2", "model.safetensors", "loader.py", "MLmodel"}
    assert not [name for name in files if name.endswith((".pkl", ".pth"))], "a pickle needs our classes, and runs code"
    assert read_cursor(run_dir).model_at is not None
    assert sync.main([str(run_dir.path)]) == 0
    assert len(run_of(uri, run_dir).outputs.model_outputs) == 1, "once"


def moved_to_a_store(run_dir: RunDir, store: Path) -> str:
    """Leave nothing of a run on this machine, as if its driver and its rank 0 had been on others; returns its URL."""
    remote = Remote(f"file://{store}", timeout_s=5).child("/".join(run_dir.path.parts[-2:]))
    stored = RunDir(run_dir.path, remote)
    (saved,) = checkpoint.list_checkpoints(stored.checkpoints)
    CheckpointStore(stored.checkpoints, stored.remote_checkpoints).upload(saved.name, fence=None)
    stored.update_record(location=stored.location)
    announce(stored)
    push_records(stored)
    shutil.rmtree(stored.path)
    return stored.location


def test_a_model_that_cannot_be_exported_leaves_its_weights_which_are_on_a_store(tmp_path, uri, monkeypatch):
    run_dir = trained(tmp_path, uri, "nowhere.Job", Digits(hidden=4).model(), lr=0.5)
    finish(run_dir)
    url = moved_to_a_store(run_dir, tmp_path / "store")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert sync.main([url]) == 0
    run = run_of(uri, find_run(url))
    assert run.data.tags["model"].startswith("not loadable: job._target_=nowhere.Job: no module nowhere")
    assert artifacts(uri, run.info.run_id, "model") == ["model/README.md", "model/model.safetensors"]
    (readme,) = tmp_path.glob("mlartifacts/**/model/README.md")
    assert "Job(lr=0.5).model()" in readme.read_text()
    assert run.inputs.dataset_inputs == []


def test_the_dataset_is_known_without_the_model(tmp_path, uri):
    run_dir = trained(tmp_path, uri, "jobs.digits.Digits", Digits(hidden=4).model(), log_model=False, hidden=4)
    finish(run_dir)
    assert sync.main([str(run_dir.path)]) == 0
    run = run_of(uri, run_dir)
    assert [given.dataset.name for given in run.inputs.dataset_inputs] == ["Digits"]
    assert run.outputs.model_outputs == []
    assert "model" not in run.data.tags


def test_only_a_run_that_has_finished_has_a_model(tmp_path, uri):
    run_dir = ended_run(tmp_path, uri, "FAILED", tracking={"uri": uri, "experiment": "tests", "log_model": True})
    assert sync.main([str(run_dir.path)]) == 0
    assert read_cursor(run_dir).model_at is None


def test_the_driver_does_not_wait_for_the_model(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    run_dir.config_file.write_text("job: {_target_: jobs.digits.Digits}")
    uploader = RunUploader.start(run_dir, replace(tracking(uri), log_model=True, log_dataset=True))
    finish(run_dir)
    assert uploader.finish(200).complete
    assert read_cursor(run_dir).model_at is None
    wait_for(lambda: read_cursor(run_dir).model_at)
    run = run_of(uri, run_dir)
    assert run.data.tags["model"] == "not loadable: there is no checkpoint"
    assert len(run.inputs.dataset_inputs) == 1


@dataclass(frozen=True, kw_only=True)
class NamedInputs(Digits):
    """A model with inputs and outputs by name, a tied weight and a buffer."""

    def model(self):
        return Tied()

    def forward(self, model, inputs):
        return model(**inputs)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, mask, labels=None):
        hidden = (self.embedding(ids) * mask.unsqueeze(-1)).sum(dim=1)
        return {"logits": self.head(self.norm(hidden)), "loss": None if labels is None else hidden.sum()}


def test_tensors_by_name_and_batches_of_any_size():
    job = NamedInputs()
    model = job.model()
    model.norm.running_mean.add_(0.5)
    batch = {"ids": torch.arange(12).view(4, 3) % 11, "mask": torch.ones(4, 3), "labels": torch.zeros(4)}
    inputs = prediction_inputs(batch)
    assert set(inputs) == {"ids", "mask"}
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    program = export_program(job, job.model(), tensors, inputs)
    assert not program.state_dict, "the weights are an argument"
    one = {name: tensor[:1] for name, tensor in inputs.items()}
    with torch.no_grad():
        torch.testing.assert_close(program.module()(tensors, one)["logits"], model.eval()(**one)["logits"])


class DataDependent(nn.Module):
    def forward(self, inputs):
        return inputs if inputs.sum() > 0 else -inputs


def test_what_cannot_be_a_graph_is_refused():
    with pytest.raises(NotExportedError, match="its input is a tuple"):
        prediction_inputs((torch.ones(2), torch.ones(2)))
    with pytest.raises(NotExportedError, match="data-dependent"):
        export_program(Digits(), DataDependent(), {}, torch.ones(4, 2))
