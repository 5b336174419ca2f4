"""What the upload relies on in MLflow: equal points and images are stored once, and long texts are cut visibly."""

import json
import math
import re

import pytest
from mlflow.entities import Param
from mlflow.utils import validation
from PIL import Image

from helpers.records.tracked_runs import artifacts, client_of, history, new_run, save_samples
from orchestrator.features.tracking.mlflow import MAX_PARAM_LENGTH, MlflowBackend, _small_batches, param_text
from orchestrator.features.tracking.views import MAX_LENGTH
from orchestrator.records.journal import Journal, Point, Sample


def test_the_same_batch_twice_leaves_each_point_once(uri):
    """What the whole upload relies on: MLflow's store knows an equal point again."""
    client = client_of(uri)
    run_id = client.create_run(client.create_experiment("twice")).info.run_id
    values = [(0.5, 1000.0, 1), (math.nan, 1001.0, 2), (math.inf, 1002.0, 3), (0.25, 1003.0, 4)]
    points = [Point("a", value, at, step) for value, at, step in values]
    backend = MlflowBackend(uri, request_timeout_s=10)
    backend.log_points(run_id, points[:3])
    backend.log_points(run_id, points)
    assert [step for step, _ in history(uri, run_id, "a")] == [1, 2, 3, 4]


def test_an_image_is_stored_as_mlflow_stores_its_own_and_the_same_twice_is_one(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    journal = Journal(run_dir)
    save_samples(journal, run_dir, 7)
    journal.close()
    client = client_of(uri)
    experiment = client.create_experiment("images", artifact_location=str(tmp_path / "images"))
    ours, theirs = (client.create_run(experiment).info.run_id for _ in range(2))
    image = Sample(name="digits", step=7, time=1700000000.25, path=run_dir.sample_file(7, "digits", "png"))
    for _ in range(2):
        MlflowBackend(uri, request_timeout_s=10).log_sample(ours, image)
    client.log_image(theirs, Image.open(image.path), key="digits", step=7, timestamp=1700000000250)
    named = [
        [re.sub(r"[0-9a-f]{8}(-[0-9a-f]+)+", "<uuid>", path) for path in artifacts(uri, r, "images")]
        for r in (ours, theirs)
    ]
    assert (
        named[0]
        == named[1]
        == [f"images/digits+step+7+timestamp+1700000000250+<uuid>{end}" for end in ("+compressed.webp", ".png")]
    )
    sizes = [
        [Image.open(path).size for path in sorted((tmp_path / "images" / r / "artifacts" / "images").iterdir())]
        for r in (ours, theirs)
    ]
    assert sizes[0] == sizes[1] == [(128, 256), (300, 600)]
    tags = [client.get_run(run_id).data.tags["mlflow.loggedImages"] for run_id in (ours, theirs)]
    assert tags[0] == tags[1]


def test_long_values_are_stored_as_far_as_mlflow_takes_them_and_stay_apart(tmp_path, uri):
    assert validation.MAX_PARAM_VAL_LENGTH == MAX_PARAM_LENGTH
    assert validation.MAX_TAG_VAL_LENGTH >= MAX_LENGTH
    found = []
    for end in "XY":
        run_dir = new_run(tmp_path, uri)
        long = {f"job.p{i}": "ä" * 6000 + end for i in range(40)}
        params = {"job.prompt": "a" * 600 + end, **long}
        record = {**run_dir.read_record(), "uid": end, "params": params, "command": "b" * 7000 + end, "name": end * 300}
        run_id = MlflowBackend(uri, request_timeout_s=10).open_run(record, run_id=None, start_time=0.0, running=True).id
        found.append(client_of(uri).get_run(run_id))
    one, other = found
    assert [run.data.params["job.prompt"] for run in found] == ["a" * 600 + end for end in "XY"]
    assert one.data.params["job.p39"] != other.data.params["job.p39"]
    assert re.fullmatch(r"ä+\.\.\. \(cut: 6,001 characters, [0-9a-f]{8}\)", one.data.params["job.p39"])
    assert one.data.tags["mlflow.note.content"] != other.data.tags["mlflow.note.content"]
    assert one.info.run_name != other.info.run_name
    assert max(map(len, [*one.data.tags.values(), *one.data.params.values()])) <= MAX_PARAM_LENGTH


def test_a_request_is_small_enough_for_a_server():
    items = [Param(str(i), "ä" * 6000) for i in range(60)]
    batches = list(_small_batches(items))
    assert [item for batch in batches for item in batch] == items
    assert (
        max(len(json.dumps([item.value for item in batch])) for batch in batches)
        < validation.MAX_BATCH_LOG_REQUEST_SIZE
    )
    assert [len(batch) for batch in _small_batches([Param(str(i), "1") for i in range(250)])] == [100, 100, 50]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((3.0, "3"), (0.1, "0.1"), (1e-5, "1e-5"), (1e16, "1e16"), (-2.0, "-2"), (2.5e-07, "2.5e-7")),
        *((math.nan, "nan"), (3, "3"), (True, "True"), (None, "None"), ("3.0", "3.0"), ("1e-05", "1e-05")),
    ],
)
def test_a_number_is_stored_as_it_is_typed(value, text):
    assert param_text(value) == text
