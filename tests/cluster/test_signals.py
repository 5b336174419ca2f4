"""The command as a process: its exit codes, its end under signals, and what it leaves behind."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from helpers.jobs.leisurely_job import Leisurely
from helpers.machines.commands import environment
from helpers.records.runs import events, events_below, in_campaign, last_step, losses, run_dirs, wait_for, wait_for_step
from orchestrator import stop
from orchestrator.records import run_dir as rundir
from orchestrator.records.json_file import read_json
from orchestrator.state.checkpoint import save
from orchestrator.state.train_state import capture

SLOW = ("strategy=ddp", "job._target_=helpers.jobs.leisurely_job.Leisurely", "job.pause_ms=20", "train.steps=3000",
        "train.eval_every=0", "cluster=local")  # fmt: skip


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def killed_run(folder: Path) -> tuple[MlflowClient, Any]:
    """The run that MLflow has as killed, once the follower is done with it."""
    (run_dir,) = run_dirs(folder)
    # Two processes that both find no tables would both make them: the follower comes first.
    wait_for(lambda: read_json(run_dir / "tracking.json").get("run_id"))
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    killed = "attributes.status = 'KILLED'"
    found = wait_for(lambda: client.search_runs(["0", "1"], filter_string=killed))
    return client, found[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), *in_campaign((signal.SIGINT, 130))])
def test_a_stop_while_ray_starts_starts_nothing(
    launch: Callable[..., Any], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = launch(*SLOW)
    wait_for(lambda: len(family(process.pid)) > 2)
    everyone = family(process.pid)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=45)
    assert (process.returncode, output) == (code, f"stopped by {number.name}: nothing was started\n")
    assert not psutil.wait_procs(everyone, timeout=45)[1]
    assert not list(tmp_path.glob("outputs/*/*"))


@pytest.mark.campaign
def test_a_ray_that_dies_with_the_signal_does_not_hold_the_end_up(launch: Callable[..., Any], tmp_path: Path) -> None:
    """A service manager stops a job so: every process of it gets the signal."""
    process = launch(*SLOW, "checkpoint.every=10", "cluster.stop_grace_s=60")
    run_dir = wait_for_step(tmp_path, 20)
    everyone = family(process.pid)
    for one in everyone:
        one.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=50)  # Ray by itself would wait 60 s, and then abort
    assert process.returncode == 143, output
    assert "stopped by SIGTERM" in output
    assert f"resume={run_dir}" in "".join(output.strip().splitlines()[-4:])
    assert json.loads((run_dir / "run.json").read_text())["state"] == "killed"
    assert list((run_dir / "checkpoints").glob("step-*"))
    assert not psutil.wait_procs(everyone, timeout=45)[1]
    assert killed_run(tmp_path)


@pytest.mark.campaign
def test_a_run_is_followed_and_stopped_by_other_commands(launch: Callable[..., Any], tmp_path: Path) -> None:
    process = launch(*SLOW, "tracking=none")
    run_dir = wait_for_step(tmp_path, 20)
    following = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.logs", str(run_dir), "--follow", "--rank", "1"],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert stop.main([str(run_dir)]) == 0
    output, _ = process.communicate(timeout=45)
    assert process.returncode == 143
    assert "stopped by `orchestrator stop` of " in output
    assert list((run_dir / "checkpoints").glob("step-*"))
    assert following.communicate(timeout=45)[0] == (run_dir / "logs" / "rank-1.log").read_text()
    assert following.returncode == 0


@pytest.mark.campaign
def test_a_closed_terminal_saves_a_checkpoint(tmp_path: Path) -> None:
    terminal, end = pty.openpty()

    def own_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    words = (*SLOW, "tracking=none", f"output_dir={tmp_path}/outputs")
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.launch", *words],
        stdin=end, stdout=end, stderr=end, cwd=tmp_path, env=environment(), start_new_session=True,
        preexec_fn=own_terminal,
    )  # fmt: skip
    os.close(end)
    closing = threading.Event()
    reader = threading.Thread(target=read_until, args=(closing, terminal), daemon=True)
    reader.start()
    run_dir = wait_for_step(tmp_path, 20)
    everyone = family(process.pid)
    closing.set()
    reader.join()
    os.close(terminal)
    assert process.wait(timeout=45) == 129
    record = read_json(run_dir / "run.json")
    assert (record["state"], record["reason"]) == ("killed", f"stopped by SIGHUP at step {record['summary']['steps']}")
    assert (run_dir / "checkpoints" / f"step-{record['summary']['steps']:08d}").is_dir()
    assert events(run_dir, "run_ended")
    assert not psutil.wait_procs(everyone, timeout=45)[1]


def read_until(closing: threading.Event, terminal: int) -> None:
    os.set_blocking(terminal, False)  # a pending read would keep the terminal open
    while not closing.wait(0.05):
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 1 << 16)


@pytest.mark.campaign
def test_second_signal_ends_at_once(launch: Callable[..., Any], tmp_path: Path) -> None:
    """The run would otherwise wait for the end of its step, longer than this test does."""
    process = launch("strategy=single", SLOW[1], *SLOW[3:], "cluster.stop_grace_s=60", "job.pause_ms=60000")
    wait_for(lambda: events_below(tmp_path, "generation_started"))
    everyone = family(process.pid)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: events_below(tmp_path, "stop_requested"), "the first signal")
    time.sleep(0.5)  # a second one within 0.2 s is the first one again
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=45)
    assert process.returncode == 143
    assert not psutil.wait_procs(everyone, timeout=45)[1]


def test_killed_driver_leaves_nothing(launch: Callable[..., Any], tmp_path: Path) -> None:
    """Ray's own two agents, which hold nothing, end by themselves a minute later."""
    process = launch("strategy=single", *SLOW[1:])
    run_dir = wait_for_step(tmp_path, 20)
    everyone = [p for p in family(process.pid) if "Agent" not in p.name()]
    assert len(everyone) > 5
    process.kill()
    process.communicate(timeout=45)
    assert not psutil.wait_procs(everyone, timeout=60)[1]
    record = wait_for(lambda: json.loads((run_dir / "run.json").read_text())["state"] == "killed")
    assert record
    client, run = killed_run(tmp_path)
    uploaded = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "train/loss")}
    assert uploaded == losses(run_dir)


@pytest.mark.campaign
def test_a_killed_driver_is_started_again(launch: Callable[..., Any], tmp_path: Path) -> None:
    """The points are there of every step of which a checkpoint was saved after the driver's last heartbeat."""
    process = launch("--restarts=1", *SLOW[:2], "job.pause_ms=100", f"job.until={tmp_path / 'until'}", "cluster=local",
                     "train.steps=120", "train.eval_every=0", "checkpoint.every=10", "tracking=none")  # fmt: skip
    run_dir = wait_for_step(tmp_path, 20)
    (driver,) = psutil.Process(process.pid).children()
    driver.suspend()
    try:
        (tmp_path / "until").touch()
        unseen = last_step(tmp_path) + 20
        wait_for(lambda: list((run_dir / "checkpoints").glob(f"step-{unseen:08}")))
    finally:
        driver.kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "killed by SIGKILL; starting it again (1 of 1)" in output
    assert run_dirs(tmp_path) == [run_dir]
    assert events(run_dir, "run_started")[-1]["resumed_from_step"] >= unseen
    assert sorted(losses(run_dir)) == [1, *range(10, 121, 10)]
    assert not (run_dir / ".spools").exists()


@pytest.mark.campaign
def test_a_driver_that_died_after_the_last_step_is_ended_by_the_next(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    words = (*SLOW[:2], "cluster=local", "train.steps=20", "train.eval_every=0", "tracking=none")
    process = launch(*words)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    (run_dir,) = map(rundir.RunDir, run_dirs(tmp_path))
    run_dir.update_record(state="running", driver={**run_dir.read_record()["driver"], "pid": process.pid})
    process = launch(*words, "resume=auto")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert run_dir.read_record()["state"] == "finished"
    assert run_dirs(tmp_path) == [run_dir.path]


@pytest.mark.campaign
@pytest.mark.timeout(180)
def test_of_two_commands_that_resume_at_once_one_trains(launch: Callable[..., Any], tmp_path: Path) -> None:
    job = Leisurely(pause_ms=20)
    run = rundir.create(tmp_path / "outputs", "leisurely-ddp")
    run.update_record(name="leisurely-ddp", uid="first", state="failed")
    model = job.model()
    state = capture(model, job.optimizer(model.parameters()), None, step=3, samples_consumed=192)
    save(run.checkpoints, state, run_uid="first")
    words = [w for w in SLOW if not w.startswith("train.steps")]
    both = [launch(*words, "train.steps=60", "train.log_every=1", "resume=auto") for _ in range(2)]
    outputs = [process.communicate(timeout=150)[0] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], outputs
    refused = outputs[codes.index(2)]  # the other one may have ended by then
    assert f"{run.path} is still running (pid " in refused or "another process has continued" in refused
    assert [r.path for r in rundir.all_runs(tmp_path / "outputs")] == [run.path]
    assert list((tmp_path / "outputs").glob("*/*")) == [run.path]
    assert sorted(losses(run.path)) == list(range(4, 61))
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (tracked,) = client.search_runs([client.get_experiment_by_name("orchestrator").experiment_id])
    assert tracked.info.status == "FINISHED"
    assert len(client.get_metric_history(tracked.info.run_id, "train/loss")) == 57
