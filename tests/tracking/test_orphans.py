"""Runs whose drivers died with their machine: marked, and uploaded in the background."""

from helpers.runs import wait_for
from helpers.tracked_runs import DEAD_PROCESS, ended_run, history, log, new_run, run_of, start
from orchestrator.records.journal import Journal
from orchestrator.tracking.transfer import exclusive, read_cursor
from orchestrator.tracking.uploader import recover_orphans


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
        assert [r.path for r in recover_orphans(tmp_path / "outputs")] == [orphan.path]
        assert not read_cursor(orphan).closed_at, "the upload is not waited for"
    assert orphan.read_record()["state"] == "killed"
    assert alive.read_record()["state"] == followed.read_record()["state"] == "running"
    wait_for(lambda: read_cursor(orphan).closed_at)
    with exclusive(orphan, timeout_s=20) as ended:
        assert ended
    run = run_of(uri, orphan)
    assert (run.info.status, len(history(uri, run.info.run_id))) == ("KILLED", 3)


def test_any_number_of_orphans_is_uploaded_by_one_process(tmp_path, uri):
    orphans = [new_run(tmp_path, uri, driver=DEAD_PROCESS) for _ in range(6)]
    assert len(recover_orphans(tmp_path / "outputs")) == 6
    wait_for(lambda: all(read_cursor(orphan).closed_at for orphan in orphans))
    assert {run_of(uri, orphan).info.status for orphan in orphans} == {"KILLED"}
    with exclusive(orphans[0], timeout_s=20) as ended:
        assert ended
