"""On a Ray that runs already: from its node, and as a submitted job."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from helpers.records.runs import PYTHONPATH, ROOT, TESTS, events, in_campaign, last_step, wait_for, wait_for_step
from helpers.servers.ports import free_port

BIN = Path(sys.executable).parent
START = ROOT / "cluster" / "start.sh"


@dataclass(frozen=True)
class Head:
    """A head node of its own: addresses, and the environment of a person at it."""

    gcs: str
    dashboard: str
    home: Path
    env: dict[str, str]


@contextlib.contextmanager
def ray_start(*words: str, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """``cluster/start.sh`` with ``--block`` and, afterwards, the end of all that it started."""
    process = subprocess.Popen(
        [str(START), *words, "--block"],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=5)
        for p in alive:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends with the others
                p.kill()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    home = tmp_path_factory.mktemp("home")
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"PATH": f"{BIN}:{env['PATH']}", "HOME": str(home)}
    port, dashboard_port = free_port(), free_port()
    # Ray's sockets live below its temporary directory, and their paths must be short.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        ray_start(
            f"--port={port}", "--num-cpus=2", f"--dashboard-port={dashboard_port}",
            f"--dashboard-agent-listen-port={free_port()}", f"--temp-dir={folder}", env=env,
        ) as process,
    ):  # fmt: skip
        wait_for_port(dashboard_port, process)
        yield Head(
            gcs=f"127.0.0.1:{port}",
            dashboard=f"http://127.0.0.1:{dashboard_port}",
            home=home,
            env={**env, "RAY_AUTH_MODE": "token"},
        )


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "ray start ended"
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError("Ray's dashboard did not come up")


def command(head: Head, *words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, env={**head.env, **env}, capture_output=True, text=True, timeout=300)


@pytest.mark.campaign
def test_another_token_is_explained(head: Head, tmp_path: Path) -> None:
    words = ("python", "-m", "orchestrator.launch", f"cluster.address={head.gcs}")
    done = command(head, *words, cwd=tmp_path, RAY_AUTH_TOKEN="b" * 40)
    assert done.returncode == 2
    assert "cluster.address" in done.stderr
    assert "RAY_AUTH_TOKEN" in done.stderr
    assert not list(tmp_path.glob("outputs/*/*"))


def test_a_token_is_required_by_default(head: Head, tmp_path: Path) -> None:
    token = head.home / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    stranger = {**head.env, "HOME": str(tmp_path)}
    del stranger["RAY_AUTH_MODE"]
    words = [sys.executable, "-m", "orchestrator.launch", f"cluster.address={head.gcs}"]
    done = subprocess.run(words, cwd=tmp_path, env=stranger, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    _, line = done.stderr.strip().splitlines()
    assert line.startswith(f"  - cluster.address={head.gcs}: this Ray requires a token, and yours is missing")


SEVERAL_RUNS = """
import os, sys
import orchestrator
from jobs.digits import Digits

common = {"strategy": "single", "tracking": "none", "train": {"steps": 2, "eval_every": 0}}
before = None
for cluster in ({"cluster": "local"}, {"cluster": "auto"}):
    if cluster == {"cluster": "auto"}:
        os.environ["RAY_ADDRESS"] = sys.argv[1]
    before = dict(os.environ)
    print(orchestrator.run(Digits, common, cluster).status)
    assert dict(os.environ) == before
"""


@pytest.mark.campaign
def test_a_program_that_sets_no_mode_runs_several_times(head: Head, tmp_path: Path) -> None:
    env = {name: value for name, value in head.env.items() if name != "RAY_AUTH_MODE"}
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL_RUNS, head.gcs], cwd=tmp_path, env={**env, "PYTHONPATH": PYTHONPATH},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines().count("FINISHED") == 2, done.stdout
    assert ", as RAY_ADDRESS says" in done.stdout


@pytest.mark.campaign
def test_a_plan_leaves_no_job_on_the_cluster(head: Head, tmp_path: Path) -> None:
    before = dashboard(head, "/api/jobs/")
    words = ("python", "-m", "orchestrator.launch", f"cluster.address={head.gcs}", "plan=true", "strategy=single")
    done = command(head, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"cluster +1 node: \S+ \(2 CPUs\)", done.stdout)
    assert dashboard(head, "/api/jobs/") == before


def test_a_node_without_the_token_does_not_join(head: Head, tmp_path: Path) -> None:
    done = command(head, str(START), head.gcs, cwd=tmp_path, HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        "cluster/start.sh: no token: copy ~/.ray/auth_token from the head to this node, or set RAY_AUTH_TOKEN\n"
    )


def submit(head: Head, *words: str, working_dir: Path = ROOT) -> subprocess.CompletedProcess[str]:
    program = ("python", "-m", "orchestrator.submit", "--working-dir", str(working_dir), "--address", head.dashboard)
    return command(head, *program, *words, cwd=ROOT)


def dashboard(head: Head, path: str) -> Any:
    """What Ray's dashboard shows."""
    token = (head.home / ".ray" / "auth_token").read_text().strip()
    request = urllib.request.Request(head.dashboard + path, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def pids_by_title(run: str) -> dict[str, int]:
    """The worker processes of a run by the title that ``ps`` and the dashboard show."""
    titles = {p.pid: " ".join(p.info["cmdline"] or ()).strip() for p in psutil.process_iter(["cmdline"])}
    return {title: pid for pid, title in titles.items() if re.fullmatch(rf"ray::rank-\d+ {run}", title)}


def resumptions(run_dir: Path) -> list[int]:
    """The steps from which the run has been resumed."""
    return [event["resumed_from_step"] for event in events(run_dir, "run_started") if event["resumed_from_step"]]


def check_what_ray_shows(head: Head, submission_id: str, run_dir: Path) -> None:
    """The job names its run; processes and tasks are named after ranks, also that of a worker in place of another."""
    wait_for(lambda: "mlflow" in dashboard(head, f"/api/jobs/{submission_id}")["metadata"])
    metadata = dashboard(head, f"/api/jobs/{submission_id}")["metadata"]
    assert metadata["mlflow"].startswith("http://127.0.0.1:5000/#/experiments/")
    expected = {"job_name": "stopped", "run": "stopped", "strategy": "ddp", "run_dir": str(run_dir), "state": "running"}
    assert metadata.items() >= expected.items()
    before = pids_by_title("stopped")
    assert before.keys() == {"ray::rank-0 stopped", "ray::rank-1 stopped"}
    running = "filter_keys=state&filter_predicates=%3D&filter_values=RUNNING"
    tasks = dashboard(head, f"/api/v0/tasks?{running}")["data"]["result"]["result"]
    assert {t["name"] for t in tasks} >= {"rank-0 stopped", "rank-1 stopped"}
    os.kill(before["ray::rank-1 stopped"], signal.SIGKILL)
    after = wait_for(lambda: len(found := pids_by_title("stopped")) == 2 and found != before and found)
    assert after["ray::rank-0 stopped"] == before["ray::rank-0 stopped"]


def driver_of(run_dir: Path) -> int:
    return int(json.loads((run_dir / "run.json").read_text())["driver"]["pid"])


def next_commands(output: str, head: str) -> list[list[str]]:
    """The commands after ``head`` at the beginning of a line, as words."""
    lines = [line.strip() for line in output.splitlines()]
    return [shlex.split(line.removeprefix(head)) for line in lines if line.startswith(f"{head} ")]


@pytest.mark.campaign
def test_a_submitted_run_is_shown_started_again_stopped_and_continued(head: Head, tmp_path: Path) -> None:
    """With the commands that the submission and the run print."""
    tracking = f"sqlite:///{tmp_path}/mlflow.db"
    sent = submit(
        head, "--no-wait", "--restarts", "1", "strategy=ddp", "job=sleep", "name=stopped", "train.steps=600",
        "train.log_every=1", "checkpoint.every=10", f"tracking.uri={tracking}", "tracking.log_model=false",
        f"output_dir={tmp_path}/outputs", "job.forward_ms=4",
    )  # fmt: skip
    assert sent.returncode == 0, sent.stderr
    submission_id = sent.stdout.split()[1]
    assert submission_id.startswith("stopped-")
    run_dir = wait_for_step(tmp_path, 20)
    check_what_ray_shows(head, submission_id, run_dir)

    killed = driver_of(run_dir)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: driver_of(run_dir) != killed)
    (resumed,) = wait_for(lambda: resumptions(run_dir))
    logged = last_step(tmp_path)  # the dead driver may have logged steps after the checkpoint
    wait_for(lambda: last_step(tmp_path) > logged)
    (stop,) = next_commands(sent.stdout, "stop")
    assert command(head, *stop, cwd=head.home).returncode == 0
    (follow,) = next_commands(sent.stdout, "follow")
    attached = command(head, *follow, cwd=head.home)
    assert attached.returncode == 143, attached.stdout + attached.stderr
    assert "killed by SIGKILL; starting it again (1 of 1)" in attached.stdout
    assert "RAY_JOB_STOP_WAIT_TIME_S" not in attached.stdout
    record = json.loads((run_dir / "run.json").read_text())
    assert shlex.split(record["command"])[:2] == ["orchestrator", "submit"]
    assert record["state"] == dashboard(head, f"/api/jobs/{submission_id}")["metadata"]["state"] == "killed"
    wait_for(lambda: not pids_by_title("stopped"))
    reached = last_step(tmp_path)
    assert (run_dir / "checkpoints" / f"step-{reached:08}").is_dir()
    client = MlflowClient(tracking)
    experiment = client.get_experiment_by_name("orchestrator")
    wait_for(lambda: [run.info.status for run in client.search_runs([experiment.experiment_id])] == ["KILLED"])

    resume, compare, _ = next_commands(attached.stdout, "next:")
    faster = [word.replace("job.forward_ms=4", "job.forward_ms=0.1") for word in resume]
    done = command(head, *faster, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert resumptions(run_dir) == [resumed, reached]
    assert json.loads((run_dir / "run.json").read_text())["state"] == "finished"
    assert last_step(tmp_path) == 600
    compared = command(head, *compare, cwd=ROOT)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert run_dir.name.removesuffix("-stopped") in compared.stdout


@pytest.mark.parametrize("listed", [False, *in_campaign(True)])
def test_a_run_is_listed_read_and_stopped_from_elsewhere(head: Head, tmp_path: Path, listed: bool) -> None:
    """By a person with another home and directory, who has the address and the token. No job of a verb remains."""
    laptop, code = tmp_path / "laptop", tmp_path / "code"
    laptop.mkdir()
    code.mkdir()
    shutil.copy(TESTS / "helpers" / "jobs" / "faulty_jobs.py", code)
    token = (head.home / ".ray" / "auth_token").read_text().strip()
    elsewhere = {"HOME": str(laptop), "RAY_AUTH_TOKEN": token}

    def verb(*words: str, address: str = head.dashboard) -> subprocess.CompletedProcess[str]:
        program = (sys.executable, "-m", "orchestrator", *words, "--address", address)
        return command(head, *program, cwd=laptop, **elsewhere)

    sent = submit(
        head, "--no-wait", "strategy=single", "name=far", "train.steps=1000000", "tracking=none",
        "job._target_=faulty_jobs.Environed", "job.variables=[LANG]", "cluster.env.LANG=C.utf8",
        "job.pause_ms=100", "train.log_every=1",
        f"output_dir={tmp_path}/outputs", working_dir=code,
    )  # fmt: skip
    assert sent.returncode == 0, sent.stderr
    run_dir = wait_for_step(tmp_path, 2)
    if listed:
        refused = verb("stop", "last", address=head.gcs)
        assert (refused.returncode, refused.stdout) == (2, "")
        found = verb("runs", "--state", "running", "--json")
        assert found.returncode == 0, found.stderr
        assert [(run["location"], run["state"]) for run in json.loads(found.stdout)] == [(str(run_dir), "running")]
        queued = verb("queue", "list")
        assert (queued.returncode, run_dir.name in queued.stdout) == (0, True), queued.stdout + queued.stderr
    with contextlib.ExitStack() as stack:
        if listed:
            program = (sys.executable, "-m", "orchestrator.logs", run_dir.name, "--rank", "0", "--follow")
            env = {**head.env, **elsewhere, "RAY_API_SERVER_ADDRESS": head.dashboard}
            followed = subprocess.Popen(program, cwd=laptop, env=env, text=True, stdout=subprocess.PIPE)
            stack.callback(followed.kill)
        stopped = verb("stop", run_dir.name)
        assert stopped.returncode == 0, stopped.stderr
        assert stopped.stdout.startswith(f"{run_dir}: stopped by `orchestrator stop` of ")
        log = followed.communicate(timeout=60)[0] if listed else (run_dir / "logs" / "rank-0.log").read_text()
        assert not listed or followed.returncode == 0
    assert any(line.endswith("LANG=C.utf8") for line in log.splitlines())
    assert json.loads((run_dir / "run.json").read_text())["state"] == "killed"
    assert not [job for job in dashboard(head, "/api/jobs/") if "verb_in_job" in job["entrypoint"]]


@pytest.mark.campaign
def test_runs_of_a_sweep_side_by_side(head: Head, tmp_path: Path) -> None:
    words = ("python", "-m", "orchestrator.launch", "-m", f"cluster.address={head.gcs}", "strategy=single", "name=a,b",
             "job=sleep", "train.steps=300", "tracking=none", "sweep.parallel=auto")  # fmt: skip
    done = command(head, *words, "job.forward_ms=4", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    times = {}
    for record in tmp_path.glob("outputs/*/*/run.json"):
        run = json.loads(record.read_text())
        assert run["state"] == "finished"
        (first,) = events(record.parent, "generation_started")
        times[run["name"]] = (first["time"], run["ended"])
        assert f"[{run['sweep']['run']}] run directory: {record.parent}" in done.stdout
    assert max(began for began, _ in times.values()) < min(ended for _, ended in times.values())
    assert done.stdout.splitlines()[-1].startswith("report: ")
    (report,) = tmp_path.glob("outputs/sweeps/*/report.md")
    assert ", 2 runs |" in report.read_text()


def test_a_submitted_job_whose_training_fails_has_failed_and_says_why_last(head: Head, tmp_path: Path) -> None:
    words = ("ray", "job", "submit", "--address", head.dashboard, "--submission-id=failing",
             "--working-dir", str(tmp_path),
             "--", "python", "-m", "orchestrator.launch", "strategy=single", "train.steps=20", "tracking=none",
             "name=failing", "recovery.max_failures=0", "recovery.chaos=[kill@5:0]")  # fmt: skip
    done = command(head, *words, cwd=head.home)
    (run_dir,) = (head.home / "orchestrator").glob("outputs/*/*-failing")
    assert f"run directory: {run_dir}" in done.stdout
    assert "kills this job after 3 s, and the last checkpoint of a run may take longer" in done.stdout
    job = dashboard(head, "/api/jobs/failing")
    assert (job["status"], job["driver_exit_code"]) == ("FAILED", 1)
    last_lines = job["message"].splitlines()[-8:]
    assert [line for line in last_lines if line.startswith("failed: rank 0 at step ")], job["message"]


@pytest.mark.campaign
def test_submitted_job_with_bad_input_fails(head: Head) -> None:
    words = ("ray", "job", "submit", "--address", head.dashboard, "--working-dir", str(ROOT), "--",
             "python", "-m", "orchestrator.launch", "strategy=ddpp")  # fmt: skip
    done = command(head, *words, cwd=head.home)
    assert done.returncode != 0
    listing = command(head, "ray", "job", "list", "--address", head.dashboard, cwd=head.home)
    assert "FAILED" in listing.stdout
    assert "did you mean ddp?" in listing.stdout
