"""Runs whose drivers died with their machine: marked, and uploaded in the background."""

import shutil
import sys
import time

import psutil
import pytest

from helpers.records.runs import events, wait_for
from helpers.records.tracked_runs import DEAD_PROCESS, ended_run, history, log, new_run, run_of, start
from orchestrator.driver.orphans import recover_orphans
from orchestrator.features.tracking.transfer import read_cursor
from orchestrator.protocol.events import RunEnded
from orchestrator.records.ended_runs import exclusive, mark_killed
from orchestrator.records.journal import Journal
from orchestrator.records.output_dir import OutputDir


def test_orphans_of_a_dead_machine_are_marked_at_once_and_mended_in_the_background(tmp_path, uri):
    orphan = new_run(tmp_path, uri, driver=DEAD_PROCESS)
    journal = Journal(orphan)
    start(journal)
    log(journal, range(1, 4))
    journal.close()
    alive = new_run(tmp_path, uri)
    followed = new_run(tmp_path, uri, driver=DEAD_PROCESS)
    ended_run(tmp_path, uri, driver=DEAD_PROCESS)
    for _ in range(50):
        new_run(tmp_path, uri, state="finished")
    with exclusive(followed):
        assert [r.path for r in recover_orphans(OutputDir(tmp_path / "outputs"))] == [orphan.path]
        assert not read_cursor(orphan).closed_at, "the upload is not waited for"
    assert orphan.read_record()["state"] == "killed"
    assert alive.read_record()["state"] == followed.read_record()["state"] == "running"
    wait_for(lambda: read_cursor(orphan).closed_at)
    with exclusive(orphan, timeout_s=20) as ended:
        assert ended
    run = run_of(uri, orphan)
    assert (run.info.status, len(history(uri, run.info.run_id))) == ("KILLED", 3)


@pytest.mark.campaign
def test_an_orphan_whose_server_does_not_answer_holds_up_no_other(tmp_path, uri):
    nowhere = {"uri": "http://127.0.0.1:9", "experiment": "tests", "request_timeout_s": 5.0, "flush_timeout_s": 1.0}
    before = set(psutil.Process().children())
    reachable = new_run(tmp_path, uri, driver=DEAD_PROCESS)
    unreachable = new_run(tmp_path, None, driver=DEAD_PROCESS, tracking=nowhere)
    assert recover_orphans(OutputDir(tmp_path / "outputs")) == [unreachable, reachable], "in the order of their upload"
    wait_for(lambda: read_cursor(reachable).closed_at)
    assert run_of(uri, reachable).info.status == "KILLED"
    assert not read_cursor(unreachable).closed_at
    wait_for(lambda: set(psutil.Process().children()) <= before, "the process that started the upload to be reaped")


def test_an_end_that_only_the_journal_has_is_recorded_and_not_written_again(tmp_path):
    """As after a process that was killed between the two; the end of an earlier launch is none."""
    run_dir = new_run(tmp_path, None, driver=DEAD_PROCESS)
    journal = Journal(run_dir)
    start(journal)
    journal.emit(RunEnded(status="FAILED", exit_code=1, reason="", summary={}))
    journal.close()
    mark_killed(run_dir, reason="")
    assert (run_dir.read_record()["state"], len(events(run_dir.path, "run_ended"))) == ("failed", 1)
    run_dir.update_record(state="waiting", started=time.time())
    mark_killed(run_dir, reason="")
    assert (run_dir.read_record()["state"], len(events(run_dir.path, "run_ended"))) == ("killed", 2)


def test_orphans_are_marked_also_if_no_follower_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    long_uri = f"http://127.0.0.1:9/{'x' * 3000}"  # together, the options are more than a pipe holds
    orphans = [new_run(tmp_path, long_uri, driver=DEAD_PROCESS) for _ in range(30)]
    assert len(recover_orphans(OutputDir(tmp_path / "outputs"))) == 30
    assert {orphan.read_record()["state"] for orphan in orphans} == {"killed"}
