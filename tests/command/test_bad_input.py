"""Bad input: exit code 2, one clear message that names the key and the remedy, nothing started, nothing left.

Most cases run in this process, because importing torch and Ray takes seconds; some of each kind are real commands.
"""

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from torch import nn

import orchestrator
from helpers.files.golden import Golden
from jobs.digits import Digits
from orchestrator.driver.process import cluster
from orchestrator.job import Job
from orchestrator.launch import main
from orchestrator.records import run_dir as rundir
from orchestrator.records.lock import this_process
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import save
from orchestrator.state.train_state import capture

Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and no Ray that the environment would lead to."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "no-ray"))
    return here


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> Refused:
    """Runs a command line that must be refused, and returns its faults, a line each."""

    def refused(*words: str) -> str:
        before = contents(elsewhere)
        children = psutil.Process().children(recursive=True)
        code = main(list(words))
        output = capsys.readouterr()
        assert (code, output.out) == (2, ""), output
        assert not ray.is_initialized()
        assert psutil.Process().children(recursive=True) == children
        assert contents(elsewhere) == before
        return message(output.err)

    return refused


def contents(directory: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in directory.rglob("*")}


def message(text: str) -> str:
    heading, *errors = text.strip().splitlines()
    assert heading.startswith("cannot start: "), text
    assert "Traceback" not in text
    assert errors
    assert all(line.startswith("  - ") for line in errors), text
    return "\n".join(line.removeprefix("  - ") for line in errors)


def command(*words: str, cwd: Path, program: tuple[str, ...] = (), **environment: str) -> tuple[int, str]:
    """Run a real command and return its exit code and what it wrote to stderr. No process of it may be left."""
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [*(program or (sys.executable, "-m", "orchestrator.launch")), *words],
        cwd=cwd,
        env={**os.environ, "STARTED_BY_TEST": mark, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [p for p in psutil.process_iter() if environment_of(p).get("STARTED_BY_TEST") == mark] == []
    assert done.stdout == ""
    return done.returncode, done.stderr


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


# Real commands ------------------------------------------------------------------------------------

SOMEONES_JOB = """
from dataclasses import dataclass
from orchestrator import Job

@dataclass(frozen=True, kw_only=True)
class Half(Job):
    def model(self): ...
    def dataset(self, split): ...
    def optimizer(self, parameters): ...
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["strategy=ddpp", "train.step=3", "strategy.num_workers=2.5", "job.hiden=3"],
            ["strategy=ddpp: unknown; did you mean ddp?", "train.step: ", "did you mean train.steps?", "job.hiden: "],
        ),
        (["job._target_=half.Half", "output_dir=runs"], ["job._target_=half.Half: the class has to define loss()"]),
        (["output_dir=file/runs", "tracking.uri=nonsense"], ["output_dir=", "tracking.uri=nonsense: "]),
        (["cluster.address=127.0.0.1:1"], ["cluster.address=127.0.0.1:1: no Ray answers there"]),
        (["job._target_=left.Job"], ["job._target_=left.Job: importing left calls os._exit(0) (left.py, line 1)"]),
    ],
)
def test_a_command_is_refused(words: list[str], said: list[str], elsewhere: Path) -> None:
    (elsewhere / "half.py").write_text(SOMEONES_JOB)
    (elsewhere / "left.py").write_text("import os; os._exit(0)")
    (elsewhere / "file").touch()
    before = contents(elsewhere)
    code, text = command(*words, cwd=elsewhere, PYTHONDONTWRITEBYTECODE="1")
    assert code == 2, text
    found = message(text)
    for part in said:
        assert part in found
    assert contents(elsewhere) == before


def test_the_installed_command_finds_a_job_beside_it_too(elsewhere: Path) -> None:
    script = Path(sys.executable).with_name("orchestrator")
    if not script.exists():
        pytest.skip("orchestrator is not installed in this environment")
    (elsewhere / "half.py").write_text(SOMEONES_JOB)
    code, text = command("job._target_=half.Half", cwd=elsewhere, program=(str(script),))
    assert code == 2
    assert message(text) == "job._target_=half.Half: the class has to define loss()"


# Words and values ---------------------------------------------------------------------------------


def test_words_are_refused(refused: Refused, golden: Golden) -> None:
    golden.answers("errors/command", refused)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("output_dir=/proc/nowhere/at/all", "output_dir=/proc/nowhere/at/all: cannot be written ("),
        ("cluster.device=cuda strategy.num_workers=999 train.global_batch_size=999", " CPUs and "),
        ("cluster.address=nowhere.invalid:6379", "cluster.address=nowhere.invalid:6379: no Ray answers there"),
    ],
)
def test_what_is_not_there_is_refused(words: str, said: str, refused: Refused) -> None:
    found = refused(*words.split())
    assert said in found
    assert len(found.splitlines()) == 1, "one fault, one line"


def test_the_surroundings_come_in_the_same_message(refused: Refused) -> None:
    found = refused("output_dir=/proc/nowhere", "tracking.uri=nonsense", "resume=yesterday")
    assert len(found.splitlines()) == 3


@pytest.mark.parametrize("word", ["cluster.address=127.0.0.1:1", "train.global_batch_size=1"])
def test_the_job_comes_in_the_same_message_as_the_cluster_and_the_plan(refused: Refused, word: str) -> None:
    assert len(refused(word, "job.hidden=0").splitlines()) == 2


def test_python_callers_get_the_same_errors(elsewhere: Path) -> None:
    with pytest.raises(orchestrator.ConfigError) as error:
        orchestrator.run(["strategy=ddpp", "train.steps=0"])
    assert len(error.value.errors) == 2
    assert contents(elsewhere) == {}


def test_a_secret_is_not_repeated(refused: Refused) -> None:
    found = refused("tracking.uri=htp://me:hunter2@host", "job.password=hunter2")
    assert "hunter2" not in found


# The cluster --------------------------------------------------------------------------------------


def test_an_address_from_the_environment_is_called_by_its_name(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    assert refused("strategy=ddp").startswith("RAY_ADDRESS=http://127.0.0.1:8265: ")


def test_a_machine_on_which_ray_does_not_start(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because its directory cannot be made; a machine that is too busy ends in the same message."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    message = refused("strategy=single", "job=digits")
    assert f"cluster=local: Ray does not start on this machine: [Errno 20] Not a directory: '{tmp_path}" in message
    assert f"its files and logs are in {tmp_path}/file/ray (RAY_TMPDIR sets another place)" in message


def test_an_address_that_a_dead_ray_left_behind(refused: Refused, tmp_path: Path) -> None:
    left = tmp_path / "no-ray" / "ray" / "ray_current_cluster"
    left.parent.mkdir(parents=True)
    left.write_text("127.0.0.1:1\n")
    assert "no Ray answers there" in refused("cluster=auto")


class Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...


@contextlib.contextmanager
def a_web_server() -> Iterator[int]:
    """Ray's dashboard is one: its port is taken for the cluster's now and then."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join(timeout=10)


@contextlib.contextmanager
def a_silent_server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (a_web_server, "a web server answers there, as Ray's dashboard does on port 8265; give the port of the GCS"),
        (a_silent_server, "no Ray answers there"),
    ],
)
def test_a_server_that_is_no_ray(
    server: Callable[[], Any], said: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "BUSY_TIMEOUT_S", 1.0)
    with server() as port:
        assert f"cluster.address=127.0.0.1:{port}: {said}" in refused(f"cluster.address=127.0.0.1:{port}")


# Resuming -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Adam(Digits):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=self.lr)


def an_earlier_run(job: Job, *, state: str = "failed") -> RunDir:
    """As a run leaves it that failed after step 3 of 500."""
    run = rundir.create(Path("outputs"), "digits-ddp")
    run.update_record(name="digits-ddp", uid="first", state=state, driver=this_process())
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    save(run.checkpoints, capture(model, optimizer, None, step=3, samples_consumed=192), run_uid="first")
    return run


def test_no_such_run(refused: Refused) -> None:
    assert refused("resume=yesterday").startswith("resume=yesterday: no run directory there; ")


def test_a_run_that_is_still_alive(refused: Refused) -> None:
    an_earlier_run(Digits(), state="running")
    assert f"is still running (pid {os.getpid()} on " in refused("resume=auto")


def test_the_checkpoint_of_another_model_names_the_parameters(refused: Refused) -> None:
    run = an_earlier_run(Digits(hidden=8))
    found = refused(f"resume='{run.path}'", "train.steps=2")
    assert "train.steps=2: the run to resume already has 3 steps; raise it" in found
    assert f"resume={run.path}: of another model: " in found
    assert "hidden0.weight: [8, 64] in the checkpoint, [512, 64] in the model" in found


def test_the_checkpoint_of_another_optimizer(refused: Refused) -> None:
    an_earlier_run(Adam())
    assert "resume=auto: of another optimizer: Adam in the checkpoint, SGD in the job" in refused("resume=auto")


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def bit_flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", [truncated, bit_flipped, Path.unlink])
def test_a_damaged_checkpoint_is_named(harm: Callable[[Path], None], name: str, refused: Refused) -> None:
    run = an_earlier_run(Digits(hidden=8))
    model = Digits(hidden=8).model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(run.checkpoints, capture(model, optimizer, None, step=3, samples_consumed=192), run_uid="first")
    harm(run.checkpoints / "step-00000003" / name)
    found = refused("resume=auto", "job.hidden=8")
    assert found.startswith(f"resume=auto: checkpoint {run.checkpoints / 'step-00000003'}: ")
    assert name in found
    assert "resume=never starts a new run" in found
