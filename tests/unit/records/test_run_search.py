"""Where the verbs look for runs, and what they ask a cluster for."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from helpers.files.golden import Golden
from orchestrator import logs, runs, stop
from orchestrator.driver.reporting import KnownOutput, readable
from orchestrator.records import run_dir as rundir
from orchestrator.records.lock import this_process
from orchestrator.records.run_dir import RunDir
from orchestrator.records.run_search import NoSuchRunError, RunSearch


def make_run(output_dir: Path, directory: str, **record: Any) -> RunDir:
    run_dir = RunDir((output_dir / directory).resolve())
    run_dir.path.mkdir(parents=True)
    run_dir.update_record(**{"name": "digits-ddp", "state": "finished", "driver": this_process(), **record})
    return run_dir


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home; the working directory is elsewhere."""
    folder, here = tmp_path / "home", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.chdir(here)
    return folder


def test_runs_of_submitted_jobs_are_found_from_any_directory(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = home / "orchestrator" / "outputs"
    old = make_run(outputs, "2026-05-01/12-30-01-a")
    make_run(Path("outputs"), "2026-05-01/12-31-01-b")
    new = make_run(outputs, "2026-05-02/12-30-01-c")
    assert runs.main(["--json"]) == 0
    assert [run["run"] for run in json.loads(capsys.readouterr().out)] == [
        str(new.path), "2026-05-01/12-31-01-b", str(old.path),
    ]  # fmt: skip
    search = RunSearch.of(None)
    assert search.look_up("12-30-01-a") == old
    assert search.look_up("last") == new
    with pytest.raises(NoSuchRunError, match=f"zzz: no such run in outputs or {outputs}; "):
        search.look_up("zzz")
    with pytest.raises(NoSuchRunError):
        RunSearch.of("outputs").look_up("12-30-01-a")


def test_the_last_run_that_trained_is_the_one_before_its_evaluation(home: Path) -> None:
    trained = make_run(Path("outputs"), "2026-05-01/12-30-01-a")
    evaluation = make_run(Path("outputs"), "2026-05-01/12-31-01-a-evaluation")
    evaluation.update_record(evaluated={"run": trained.location, "step": 6})
    search = RunSearch.of(None)
    assert search.look_up("last", trained=True).path.resolve() == trained.path.resolve()
    assert search.look_up("last").path.resolve() == evaluation.path.resolve()
    assert search.look_up(evaluation.location, trained=True).path.resolve() == evaluation.path.resolve()


def test_a_run_is_found_by_its_name_and_by_the_id_of_its_job(home: Path) -> None:
    submitted, id_of = home / "orchestrator" / "outputs", "alice.s-run-0501-123000-a1b2"
    old = make_run(Path("outputs"), "2026-05-01/12-30-01-alice", name="alice")
    newest = make_run(submitted, "2026-05-02/12-30-01-alice-2", name="alice")  # the second one of a second
    make_run(submitted, "2026-05-03/12-30-01-alice-2", name="alice-2")
    make_run(submitted, "2026-05-03/12-30-01-malice", name="malice")
    job = make_run(submitted, "2026-05-03/12-30-01-alice.s run", name="alice.s run", tags={"submission": id_of})
    make_run(submitted, "2026-05-04/12-30-01-alice", name="alice", evaluated={"run": old.location})
    search = RunSearch.of(None)
    assert search.look_up("alice", trained=True) == newest
    assert [run.path.parts[-2] for run in search.named("alice")] == ["2026-05-04", "2026-05-02", "2026-05-01"]
    assert search.look_up("12-30-01-alice-2").path.parts[-2] == "2026-05-03"  # a directory comes before a name
    assert search.look_up(id_of) == job
    for other in ("alic", "ALICE", "alice-3", "alice.s-run-0501-123000-ffff", "", "*"):
        with pytest.raises(NoSuchRunError):
            search.look_up(other)


def test_a_directory_without_runs_and_a_word_of_others_are_answered(home: Path) -> None:
    nothing = f"last: there are no runs in {Path('outputs').resolve()}; go to the directory where they were started"
    with pytest.raises(NoSuchRunError, match=nothing):
        RunSearch.of(None).look_up("last")
    make_run(Path("outputs"), "2026-05-01/12-30-01-a")
    with pytest.raises(NoSuchRunError, match=r"^latest: no such run in .*; last is the newest one$"):
        RunSearch.of(None).look_up("latest")


def test_a_run_is_found_by_what_mlflow_and_the_list_of_runs_show(home: Path) -> None:
    single = make_run(Path("outputs"), "2026-05-01/12-30-01-digits-ddp", settings="lr=0.1 steps=20")
    swept = make_run(Path("outputs"), "2026-05-02/12-30-01-digits-ddp", settings="-", sweep={"settings": "lr=0.3"})
    make_run(Path("outputs"), "2026-05-03/12-30-01-digits-ddp")
    search = RunSearch.of(None)
    for text in ("digits-ddp lr=0.1 steps=20", "lr=0.1 steps=20"):
        assert search.look_up(text) == single
    for text in ("digits-ddp lr=0.3", "lr=0.3", "digits-ddp lr=0.3 (pruned)"):
        assert search.look_up(text) == swept
    for text in ("lr=0.1", "digits lr=0.3", "digits-ddp ", "", "-"):
        with pytest.raises(NoSuchRunError):
            search.look_up(text)


def test_of_several_runs_of_a_name_the_one_that_runs_is_stopped(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = [
        make_run(Path("outputs"), f"2026-05-0{day}/12-30-01-alice", name="alice", state="running") for day in (1, 2)
    ]
    make_run(Path("outputs"), "2026-05-03/12-30-01-alice", name="alice")
    assert stop.main(["alice", "--wait=0"]) == 2
    assert (
        f"several runs of this name are running; give the directory of one: {running[1].path}, {running[0].path}"
        in (capsys.readouterr().err)
    )
    running[1].update_record(state="finished")
    assert stop.main(["alice", "--wait=0"]) == 1
    assert running[0].stop_file.exists()
    assert not running[1].stop_file.exists()


def test_a_directory_that_is_known_twice_is_searched_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = home / "orchestrator" / "outputs"
    run_dir = make_run(outputs, "2026-05-01/12-30-01-a")
    monkeypatch.chdir(outputs.parent)
    (home / "link").symlink_to(outputs)
    search = RunSearch.of(None, [str(outputs), str(home / "link"), "s3://bucket/runs"])
    assert str(search) == "outputs or s3://bucket/runs"
    assert list(RunSearch.of(None, [str(outputs)]).runs()) == [run_dir]


def test_directories_of_a_cluster_that_cannot_be_read_are_named(tmp_path: Path, golden: Golden) -> None:
    here = socket.gethostname()
    mine, shared, local = (tmp_path / name for name in ("mine", "shared", "local"))
    for folder in (mine, shared, local):
        make_run(folder, "2026-05-01/12-30-01-a")
    newest = "2026-05-01/12-30-01-a"
    directories, notes = readable(
        KnownOutput(location=str(folder), host=host, newest=f"{folder}/{run}")
        for folder, host, run in (
            (mine, here, "2026-05-01/removed"),
            (tmp_path / "removed", here, newest),
            (shared, "other", newest),
            (local, "other", "2026-05-02/12-30-01-b"),
            (tmp_path / "far", "other", newest),
        )
    )
    assert directories == [str(mine), str(shared), str(local)]
    golden.says(notes)


@pytest.mark.needs("submit")
def test_the_cluster_of_the_environment_is_asked_unless_the_runs_are_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    run = rundir.create(Path("outputs"), "digits-ddp")
    run.update_record(name="digits-ddp", state="finished")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    assert runs.main([]) == 2
    golden.says(capsys.readouterr().err)
    assert runs.main(["--output-dir", "outputs"]) == 0
    assert logs.main([str(run.path)]) == 0
    assert runs.main(["--address="]) == 0
    assert "digits-ddp" in capsys.readouterr().out
