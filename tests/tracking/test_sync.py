"""`orchestrator sync`: runs of any state, other servers, and what it refuses."""

import shlex
import shutil
from pathlib import Path

from helpers.records.tracked_runs import (
    DEAD_PROCESS,
    client_of,
    ended_run,
    expected,
    history,
    log,
    new_run,
    run_of,
    start,
)
from orchestrator import sync
from orchestrator.records.ended_runs import exclusive
from orchestrator.records.journal import Journal


def test_sync_of_a_run_whose_driver_was_killed(tmp_path, uri, capsys):
    run_dir = new_run(tmp_path, uri, driver=DEAD_PROCESS)
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 4))
    journal.close()
    assert sync.main([str(run_dir.path)]) == 0
    assert "all 6 are on" in capsys.readouterr().out
    assert run_of(uri, run_dir).info.status == "KILLED"


def test_sync_of_a_run_that_goes_on_leaves_it_running(tmp_path, uri, capsys):
    run_dir = new_run(tmp_path, uri)
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 4))
    assert sync.main([str(run_dir.path)]) == 0
    assert "still training" in capsys.readouterr().out
    assert run_of(uri, run_dir).info.status == run_dir.read_record()["state"].upper() == "RUNNING"


def test_a_run_that_the_server_has_lost_is_uploaded_again(tmp_path, uri, empty_database):
    run_dir = ended_run(tmp_path, uri)
    assert sync.main([str(run_dir.path)]) == 0
    first = run_of(uri, run_dir).info.run_id
    shutil.copy(empty_database, tmp_path / "other.db")
    other = f"sqlite:///{tmp_path / 'other.db'}"
    assert sync.main([str(run_dir.path), "--uri", other]) == 0
    assert history(other, run_of(other, run_dir).info.run_id) == expected(run_dir)
    client_of(other).delete_run(run_of(other, run_dir).info.run_id)
    assert sync.main([str(run_dir.path), "--uri", other]) == 0
    assert history(other, run_of(other, run_dir).info.run_id) == expected(run_dir)
    assert sync.main([str(run_dir.path)]) == 0
    assert run_of(uri, run_dir).info.run_id == first
    assert history(uri, first) == expected(run_dir)


def test_sync_of_a_run_whose_record_cannot_be_written(tmp_path, uri, capsys):
    run_dir = ended_run(tmp_path, uri)
    run_dir.lock_file.unlink()
    run_dir.lock_file.mkdir()
    assert sync.main([str(run_dir.path)]) == 0
    assert "all 20 are on" in capsys.readouterr().out


def test_the_command_to_try_again_is_for_a_shell(tmp_path, capsys):
    run_dir = ended_run(tmp_path / "it's (a) $HOME", None)
    assert sync.main([str(run_dir.path), "--uri", "http://127.0.0.1:1"]) == 1
    _, _, again = capsys.readouterr().err.splitlines()[-1].partition("try again with: ")
    assert shlex.split(again)[2:] == [str(run_dir.path), "--uri", "http://127.0.0.1:1"]


def test_sync_refuses_what_it_cannot_do(tmp_path, capsys):
    assert sync.main([str(tmp_path)]) == 2
    assert "no such run" in capsys.readouterr().err
    damaged = ended_run(tmp_path, None)
    damaged.record_file.write_text('{"state": "fin')
    assert sync.main([str(damaged.path)]) == 2
    assert f"{damaged.record_file} is damaged" in capsys.readouterr().err
    masked = ended_run(tmp_path, "postgresql://me:***@db/mlflow")
    assert sync.main([str(masked.path)]) == 2
    assert "--uri" in capsys.readouterr().err
    untracked = ended_run(tmp_path, None)
    assert sync.main([str(untracked.path)]) == 2
    assert "--uri" in capsys.readouterr().err
    assert sync.main([str(untracked.path), "--uri", "mlruns"]) == 2
    assert "sqlite:///" in capsys.readouterr().err
    with exclusive(untracked):
        assert sync.main([str(untracked.path), "--uri", f"sqlite:///{tmp_path}/m.db"]) == 2
    assert "still being uploaded" in capsys.readouterr().err
    assert not Path(tmp_path / "m.db").exists()
