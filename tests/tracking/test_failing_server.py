"""The upload to a real server through a network that fails."""

import pytest

from helpers.records.runs import wait_for
from helpers.records.tracked_runs import (
    artifacts,
    end,
    expected,
    follower_of,
    history,
    log,
    new_run,
    run_of,
    save_samples,
    start,
    tracking,
)
from orchestrator import sync
from orchestrator.features.tracking.transfer import read_cursor
from orchestrator.features.tracking.uploader import RunUploader
from orchestrator.protocol.events import SampleSaved
from orchestrator.records.journal import Journal

PASSWORD = "correct-horse"


def test_no_point_is_lost_or_doubled_whatever_the_server_does(tmp_path, proxy, server_port):
    uri = f"http://me:{PASSWORD}@127.0.0.1:{proxy.port}"
    run_dir = new_run(tmp_path, f"http://***@127.0.0.1:{proxy.port}")
    journal = Journal(run_dir)
    start(journal)
    proxy.mode = "refuse"
    uploader = RunUploader.start(run_dir, tracking(uri))
    log(journal, range(1, 100))
    assert "MlflowException" in wait_for(uploader.problem)
    assert not files_with(run_dir, PASSWORD)
    proxy.mode = "pass"
    wait_for(lambda: read_cursor(run_dir).points == 2 * 99)
    assert uploader.problem() is None

    for mode, steps in (("refuse", range(100, 150)), ("lose answers", range(150, 200))):
        proxy.mode = mode
        log(journal, steps)
        wait_for(uploader.problem)
        assert read_cursor(run_dir).points == 2 * (steps.start - 1), "unconfirmed points do not count"
        proxy.mode = "pass"
        wait_for(lambda all_points=2 * (steps.stop - 1): read_cursor(run_dir).points == all_points)

    log(journal, range(200, 300))
    end(journal, run_dir, steps=299)
    upload = uploader.finish(200)
    assert (upload.missing, upload.complete) == (0, True)
    direct = f"http://127.0.0.1:{server_port}"
    assert run_of(direct, run_dir).info.status == "FINISHED"
    for name in ("train/loss", "perf/step_ms"):
        assert history(direct, upload.run_id, name) == expected(run_dir, name)
    assert not files_with(run_dir, PASSWORD)


def files_with(run_dir, text):
    files = [p for p in run_dir.path.rglob("*") if p.is_file()]
    assert len(files) >= 4
    return [p for p in files if text in p.read_text()]


def test_a_slow_server_delays_nothing_and_sync_uploads_the_rest(tmp_path, proxy, server_port, capsys):
    uri = f"http://127.0.0.1:{proxy.port}"
    run_dir = new_run(tmp_path, uri)
    proxy.delay_s = 60.0
    uploader = RunUploader.start(run_dir, tracking(uri, request_timeout_s=60.0))
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 2))
    wait_for(lambda: proxy.requests > 0)
    log(journal, range(2, 501))
    end(journal, run_dir)
    upload = uploader.finish(0.5)
    assert read_cursor(run_dir).points == 0, "the run ended before the server's first answer"
    assert (upload.missing, upload.complete) == (1000, False)

    proxy.mode = "refuse"
    assert upload.in_progress
    follower_of(run_dir).kill()
    assert sync.main([str(run_dir.path)]) == 1
    message = capsys.readouterr().err
    assert "1000 points are not uploaded" in message
    assert f"orchestrator sync {run_dir.path}" in message
    proxy.mode, proxy.delay_s = "pass", 0.0
    assert sync.main([str(run_dir.path)]) == 0
    assert capsys.readouterr().out == f"uploaded 1000 points; all 1000 are on {uri}\n"
    run = run_of(uri, run_dir)
    assert run.info.status == "FINISHED"
    assert run_dir.read_record()["mlflow_run_id"] == run.info.run_id
    assert history(uri, run.info.run_id) == expected(run_dir)
    assert sync.main([str(run_dir.path)]) == 0
    assert capsys.readouterr().out.startswith("uploaded 0 points; all 1000")


@pytest.mark.campaign
def test_samples_arrive_once_whatever_the_server_does(tmp_path, proxy, server_port):
    uri = f"http://127.0.0.1:{proxy.port}"
    run_dir = new_run(tmp_path, uri)
    journal = Journal(run_dir)
    start(journal)
    uploader = RunUploader.start(run_dir, tracking(uri))
    log(journal, [10])
    save_samples(journal, run_dir, 10)
    wait_for(lambda: read_cursor(run_dir).samples_offset == run_dir.events_file.stat().st_size)
    proxy.mode = "lose answers"
    save_samples(journal, run_dir, 20, 30)
    wait_for(uploader.problem)
    proxy.mode = "pass"
    journal.emit(SampleSaved(step=40, name="deleted", path="samples/step-000040-deleted.txt"))
    end(journal, run_dir, steps=40)
    upload = uploader.finish(200)
    journal.close()
    assert (upload.complete, upload.error) == (True, None)
    direct = f"http://127.0.0.1:{server_port}"
    assert artifacts(direct, upload.run_id, "samples") == [f"samples/step-0000{step}-says.txt" for step in (10, 20, 30)]
    images = artifacts(direct, upload.run_id, "images")
    assert [path.split("+timestamp")[0] for path in images] == [
        f"images/digits+step+{s}" for s in (10, 10, 20, 20, 30, 30)
    ]
