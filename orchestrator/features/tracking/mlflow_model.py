"""The final model of a run as a model of MLflow, and its training set as the input of the run."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.features.tracking.views import MAX_LENGTH
from orchestrator.records.storable_names import storable, storable_text

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.models import ModelSignature
    from mlflow.tracking import MlflowClient

_NAME = "model"
_REQUIREMENTS = ("mlflow", "torch", "safetensors", "numpy")


def log_model(client: MlflowClient, run_id: str, folder: Path) -> None:
    """Store what ``features.export`` has written into ``folder``: a model, or weights and a README."""
    facts = storable(json.loads((folder / "facts.json").read_text()))
    run = client.get_run(run_id)
    if facts["dataset"] is not None:
        _log_dataset(client, run, facts["dataset"])
    if facts["problem"] is None and facts["step"] is not None:
        kind = {"weights": "moving averages"} if facts["averaged"] else {}
        _log_program(client, run, folder, step=facts["step"], tags=kind)
    elif facts["problem"] is not None:
        client.set_tag(run_id, _NAME, storable_text(f"not loadable: {facts['problem']}", MAX_LENGTH))
        for name in ("model.safetensors", "README.md"):
            if (folder / name).is_file():
                client.log_artifact(run_id, str(folder / name), artifact_path=_NAME)


def _log_dataset(client: MlflowClient, run: Run, facts: Mapping[str, Any]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(
        name=facts["name"],
        digest=facts["digest"],
        source_type="code",
        source=json.dumps({"tags": {"mlflow.source.name": run.data.tags.get("mlflow.source.name", "")}}),
        profile=json.dumps({"num_rows": facts["samples"]}),
    )
    client.log_inputs(run.info.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])


def _log_program(client: MlflowClient, run: Run, folder: Path, *, step: int, tags: Mapping[str, str]) -> None:
    """Create a model of MLflow with ``tags``, unless one of this step exists."""
    import mlflow
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    run_id, experiment_id = run.info.run_id, run.info.experiment_id
    found = client.search_logged_models([experiment_id], filter_string=f"source_run_id = '{run_id}'")
    if any(model.tags.get("step") == str(step) and model.status == "READY" for model in found):
        return
    inputs = _example(folder)
    tags = {**tags, "step": str(step)}
    logged = client.create_logged_model(experiment_id, name=_NAME, source_run_id=run_id, tags=tags)
    with tempfile.TemporaryDirectory(prefix="model-") as parent:
        path = Path(parent) / _NAME
        mlflow.pyfunc.save_model(
            str(path),
            python_model=str(folder / "loader.py"),
            artifacts={"program": str(folder / "model.pt2"), "weights": str(folder / "model.safetensors")},
            signature=_signature(inputs),
            input_example=inputs,
            pip_requirements=[f"{name}=={_version(name)}" for name in _REQUIREMENTS],
            mlflow_model=Model(
                artifact_path=logged.artifact_location,
                run_id=run_id,
                model_uuid=logged.model_id,
                model_id=logged.model_id,
            ),
        )
        client.log_model_artifacts(logged.model_id, str(path))
    client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=step)])
    client.finalize_logged_model(logged.model_id, "READY")


def _example(folder: Path) -> Any:
    """The example input: an array, or arrays by name."""
    import numpy as np  # MLflow brings it; the follower starts without both

    with np.load(folder / "example.npz") as arrays:
        named = {name.removeprefix("input:"): arrays[name] for name in arrays}
    return named[""] if list(named) == [""] else named


def _signature(inputs: Any) -> ModelSignature:
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    named = inputs if isinstance(inputs, dict) else {None: inputs}
    return ModelSignature(
        inputs=Schema([TensorSpec(array.dtype, (-1, *array.shape[1:]), name) for name, array in named.items()])
    )


def _version(package: str) -> str:
    return importlib.metadata.version(package).partition("+")[0]  # without the variant of a build of torch
