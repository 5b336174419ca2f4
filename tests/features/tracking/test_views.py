"""What MLflow shows of a run: its name, its tags, its page."""

from orchestrator.display.run_end import run_page
from orchestrator.features.tracking.views import COMPARE, page, run_name, run_tags

RECORD = {
    "job": "digits",
    "strategy": "ddp",
    "started": 100.0,
    "ended": 103.3,
    "plan": {"device": "cpu", "mesh": {"data_parallel_size": 2, "pipeline_parallel_size": 1, "num_shards": 0}},
}


def test_the_tags_of_a_run() -> None:
    source = {"user": "ada", "source.git.commit": "abc"}
    sweep = {"id": "12", "name": "lr=1,2"}
    record = {**RECORD, "tags": {"a b": 1}, "source": source, "sweep": sweep, "description": "Text.", "command": "go"}
    assert run_tags(record) == {
        "a b": "1",
        "workers": "2",
        "mlflow.runColor": "#2272b4",
        "sweep": "lr=1,2",
        "sweep_id": "12",
        "mlflow.user": "ada",
        "mlflow.source.git.commit": "abc",
        "mlflow.note.content": "Text.\n\n`go`",
    }
    assert run_tags({}) == {}
    assert run_tags({"summary": {"restarts": 2}, "tags": {"resumed_from_step": "40"}}) == {
        "recoveries": "2",
        "resumed_from_step": "40",
    }


def test_the_name_and_the_page_of_a_run() -> None:
    alone = {"name": "digits-ddp", "settings": "lr=0.03"}
    assert run_name(alone) == "digits-ddp lr=0.03"
    assert run_name({**alone, "settings": ""}) == run_name({"name": "digits-ddp"}) == "digits-ddp"
    assert run_name({**alone, "settings": "", "evaluated": {"step": 40}}) == "digits-ddp (step 40)"
    assert run_name({**alone, "sweep": {"settings": "hidden=8"}}) == "digits-ddp hidden=8"
    charts = page("https://host/mlflow", "7", COMPARE)
    assert run_page(charts, "abc") == "https://host/mlflow/#/experiments/7/runs/abc?workflowType=machine_learning"
