"""A sweep in MLflow: its runs side by side, a run with the report, and a saved view of its runs."""

import base64
import json
import os
import uuid
import zlib

from mlflow.tracking import MlflowClient

from helpers.records.recorded_sweep import recorded_sweep
from helpers.records.tracked_runs import client_of, end, ended_run, log, new_run, run_of, start
from orchestrator import sync
from orchestrator.features.tracking.mlflow_runs import newest_runs
from orchestrator.features.tracking.mlflow_sweep import open_sweep
from orchestrator.features.tracking.transfer import read_cursor
from orchestrator.features.tracking.views import COMPARE, VIEWS, experiment_tags, obsolete_tags, page, sweep_view
from orchestrator.records.journal import Journal

LINE = "| line |\n"


def own_run(uri, sweep, experiment="tests"):
    client = client_of(uri)
    experiment = client.get_experiment_by_name(experiment)
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`orchestrator.sweep_id` = '{sweep['id']}'")
    return found


def state_of(tag):
    envelope = json.loads(tag)
    assert isinstance(envelope["createdAt"], int), "MLflow's page refuses the view otherwise"
    return json.loads(zlib.decompress(base64.b64decode(envelope["state"].removeprefix("deflate;"))))


def test_the_runs_are_no_children_and_the_sweep_ends_as_the_worst_of_them(tmp_path, uri):
    sweep = {"id": uuid.uuid4().hex, "name": "single-or-ddp"}
    runs = [ended_run(tmp_path, uri, status, sweep=sweep) for status in ("FINISHED", "FAILED", "FINISHED")]
    for run_dir, sweep_status in zip(runs, ("FINISHED", "FAILED", "FAILED"), strict=True):
        assert sync.main([str(run_dir.path)]) == 0
        tags = run_of(uri, run_dir).data.tags
        assert "mlflow.parentRunId" not in tags, "MLflow's page hides the children of a run"
        assert (tags["sweep"], tags["sweep_id"]) == ("single-or-ddp", sweep["id"])
        own = own_run(uri, sweep)
        assert (own.info.run_name, own.info.status) == ("sweep: single-or-ddp", sweep_status)
    tags = client_of(uri).get_experiment_by_name("tests").tags
    view = state_of(tags[f"mlflow.sharedViewState.sweep-{sweep['id'][:8]}"])
    assert view["searchFilter"].startswith(f"tags.sweep_id = '{sweep['id']}' AND ")
    assert read_cursor(runs[0]).page.startswith("http://127.0.0.1:5000/#/experiments/1/runs?viewStateShareKey=sweep-")
    assert {view.id for view in VIEWS} < {key.removeprefix("mlflow.sharedViewState.") for key in tags}


def test_the_report_becomes_the_description_and_is_uploaded_when_it_changes(tmp_path, uri):
    sweep = {"id": uuid.uuid4().hex, "name": "single-or-ddp"}
    run_dir = ended_run(tmp_path, uri, sweep=sweep)
    folder = run_dir.path.parents[1] / "sweeps" / sweep["id"]
    folder.mkdir(parents=True)
    assert sync.main([str(run_dir.path)]) == 0
    assert "mlflow.note.content" not in own_run(uri, sweep).data.tags
    report = folder / "report.md"
    for number, text in enumerate(("ddp is fastest.\n\n| password=x |", f"ddp is fastest.\n\n{1000 * LINE}")):
        report.write_text(text)
        os.utime(report, (number, number))
        (folder / "compare.png").write_bytes(b"\x89PNG\0")
        assert sync.main([str(run_dir.path)]) == 0
        own = own_run(uri, sweep)
        description = own.data.tags["mlflow.note.content"]
        picture = f"[compare.png](get-artifact?path=compare.png&run_uuid={own.info.run_id})"
        if number == 0:
            assert description == f"ddp is fastest.\n\n{picture}\n\n| password=*** |"
    assert picture in description
    assert len(description) <= 5000
    assert description.endswith("| line |\n\nThe rest is in the artifact report.md.")
    files = {file.path for file in client_of(uri).list_artifacts(own.info.run_id)}
    assert files == {"report.md", "compare.png"}


def test_a_sweep_has_the_figures_of_its_fastest_run_and_its_verdict_is_on_the_page_of_the_experiment(tmp_path, uri):
    runs = recorded_sweep(tmp_path, uri)
    sweep = runs[0].read_record()["sweep"]
    folder = runs[0].path.parents[1] / "sweeps" / sweep["id"]
    folder.mkdir(parents=True)
    (folder / "report.md").write_text("# Sweep\n\nFastest: single.\n\n| strategy |\n| --- |\n| single |\n")
    for run_dir in runs:
        assert sync.main([str(run_dir.path)]) == 0
    own = own_run(uri, sweep, "orchestrator")
    assert own.data.tags["fastest"] == "digits-single"
    summary = runs[0].read_record()["summary"]
    assert own.data.metrics["summary/samples_per_s"] == float(f"{summary['samples_per_s']:.5g}")
    assert own.data.metrics["summary/restarts"] == 0
    client = client_of(uri)
    experiment = client.get_experiment_by_name("orchestrator")
    described = experiment.tags["mlflow.note.content"]
    assert described.startswith("Runs of `orchestrator`. Charts: [Compare strategies](./#/experiments/")
    assert f"viewStateShareKey=sweep-{sweep['id'][:8]}&" in described
    assert described.endswith(
        f" Fastest: single. [Report](./#/experiments/{own.info.experiment_id}/runs/{own.info.run_id})"
    )
    view = state_of(experiment.tags[f"mlflow.sharedViewState.sweep-{sweep['id'][:8]}"])
    for condition in (COMPARE.filter, view["searchFilter"]):
        shown = client.search_runs([experiment.experiment_id], condition)
        assert len(shown) == 4, "the charts do not show the fastest run twice"
    client.set_experiment_tag(experiment.experiment_id, "mlflow.note.content", "Mine.")
    (folder / "report.md").write_text("Fastest: single again.")
    assert sync.main([str(runs[0].path)]) == 0
    assert client.get_experiment(experiment.experiment_id).tags["mlflow.note.content"] == "Mine."


def test_runs_of_one_strategy_are_told_apart_and_a_pruned_one_is_neither_a_failure_nor_the_best(tmp_path, uri):
    sweep = {"id": uuid.uuid4().hex, "name": "job.lr=1,2,3"}
    runs = []
    for number, (status, loss) in enumerate((("FINISHED", 0.3), ("FINISHED", 0.2), ("PRUNED", 0.1)), start=1):
        member = {**sweep, "run": str(number), "settings": f"lr={number}"}
        params = {"job.lr": number, "sweep.metric": "val_loss", "sweep.direction": "minimize"}
        run_dir = new_run(tmp_path, uri, sweep=member, params=params, strategy="ddp", reason="pruned at step 10")
        journal = Journal(run_dir)
        start(journal)
        log(journal, range(1, 3))
        if status == "PRUNED":
            assert sync.main([str(run_dir.path)]) == 0
            assert run_of(uri, run_dir).info.run_name == "digits-ddp lr=3"
        end(journal, run_dir, status, val_loss=loss, samples_per_s=100.0 * number)
        journal.close()
        runs.append(run_dir)
    folder = runs[0].path.parents[1] / "sweeps" / sweep["id"]
    folder.mkdir(parents=True)
    (folder / "report.md").write_text("Report.")
    for run_dir in runs:
        assert sync.main([str(run_dir.path)]) == 0
    tracked = [run_of(uri, run_dir) for run_dir in runs]
    assert [run.info.run_name for run in tracked] == ["digits-ddp lr=1", "digits-ddp lr=2", "digits-ddp lr=3 (pruned)"]
    assert {run.info.status for run in tracked} == {"FINISHED"}
    assert len({run.data.tags["mlflow.runColor"] for run in tracked}) == 3
    assert [run.data.tags["settings"] for run in tracked] == ["lr=1", "lr=2", "lr=3"]
    tags = client_of(uri).get_experiment_by_name("tests").tags
    columns = state_of(tags[f"mlflow.sharedViewState.sweep-{sweep['id'][:8]}"])["selectedColumns"]
    assert columns[:2] == ["tags.`settings`", "tags.`strategy`"]
    assert tracked[2].data.tags["pruned"] == "pruned at step 10"
    own = own_run(uri, sweep)
    assert own.info.status == "FINISHED"
    assert {key: own.data.tags[key] for key in ("fastest", "best", "pruned")} == {
        "fastest": "digits-ddp lr=2",
        "best": "digits-ddp lr=2: val_loss 0.2",
        "pruned": "1",
    }
    states = [run.record["state"] for run in newest_runs(uri, most=3, sweep=sweep["id"])]
    assert sorted(states) == ["finished", "finished", "pruned"]


def test_runs_that_open_at_once_share_the_run_of_their_sweep_which_ends_with_them(tmp_path, uri):
    sweep = {"id": uuid.uuid4().hex, "name": "single-or-ddp"}
    runs = [ended_run(tmp_path, uri, sweep=sweep) for _ in range(3)]
    for run_dir in runs[:2]:
        assert sync.main([str(run_dir.path)]) == 0
    own = own_run(uri, sweep)
    experiment_id = own.info.experiment_id

    class Late(MlflowClient):
        """Others open the sweep between the search of this client and what it creates."""

        def create_run(self, *args, **kwargs):
            open_sweep(client_of(uri), experiment_id, sweep, start_ms=2, running=True)
            return super().create_run(*args, **kwargs)

    client_of(uri).delete_run(own.info.run_id)
    open_sweep(Late(uri), experiment_id, sweep, start_ms=1, running=True)
    assert own_run(uri, sweep).info.status == "RUNNING"
    assert sync.main([str(runs[2].path)]) == 0
    assert own_run(uri, sweep).info.status == "FINISHED"


def test_a_sweep_of_any_name_is_shown(tmp_path, uri):
    name = "job.text=[x](y)|`z`|</script>'\"" + 9000 * "."
    sweep = {"id": uuid.uuid4().hex, "name": name}
    run_dir = ended_run(tmp_path, uri, sweep=sweep)
    folder = run_dir.path.parents[1] / "sweeps" / sweep["id"]
    folder.mkdir(parents=True)
    (folder / "report.md").write_text("Fastest: single.")
    assert sync.main([str(run_dir.path)]) == 0
    own = own_run(uri, sweep)
    shown, tag = own.info.run_name, own.data.tags["sweep"]
    assert len(shown) == 250, "the length of the column in PostgreSQL and MySQL"
    assert shown.startswith(f"sweep: {name[:200]}")
    assert shown.endswith(")"), "with the mark of a cut"
    assert len(tag) == 5000
    assert tag.startswith(name[:4900])
    assert tag == run_of(uri, run_dir).data.tags["sweep"]
    tags = client_of(uri).get_experiment_by_name("tests").tags
    view = state_of(tags[f"mlflow.sharedViewState.sweep-{sweep['id'][:8]}"])
    assert view["compareRunSections"][0]["name"].startswith(name[:150])
    assert r"Newest sweep: [job.text=\[x\](y)\|\`z\`\|\</script>" in tags["mlflow.note.content"]


def test_a_view_has_what_the_page_needs():
    for view in (*VIEWS, sweep_view("1234", "lr=1,2", created_ms=5)):
        (tag,) = experiment_tags([view]).values()
        assert len(tag) < 5000, "older servers refuse longer tags"
        state = state_of(tag)
        assert state["selectedColumns"] == list(view.columns)
        assert len({chart["uuid"] for chart in state["compareRunCharts"]}) == len(view.charts)
        sections = {section["uuid"] for section in state["compareRunSections"]}
        assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} <= sections
        names = [section["name"] for section in state["compareRunSections"] if section["display"]]
        assert names == [view.name], "the groups of all other metrics are closed"
    assert page("http://host", "3", COMPARE) == (
        "http://host/#/experiments/3/runs?viewStateShareKey=compare&compareRunsMode=CHART&workflowType=machine_learning"
    )


def test_the_views_of_old_sweeps_go():
    tags = {"mlflow.user": "x", **experiment_tags()}
    for i in range(12):
        tags |= experiment_tags([sweep_view(str(i), f"sweep {i}", created_ms=i)])
    gone = obsolete_tags(tags)
    assert gone == [f"mlflow.sharedViewState.sweep-{i}" for i in (2, 1, 0)], "with the next one, ten are left"
