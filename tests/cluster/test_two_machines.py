"""The section "Two machines" of ``cluster/README.md``, followed from nothing to a finished run and to the end of Ray.

The commands are those of the page, typed on two hosts that share nothing but the directory of the runs: each has a home
of its own, with its own checkout and its own token. The jobs are in the home of ``alpha`` alone.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from helpers.files.cluster_files import CLUSTER
from helpers.files.wheels import make_wheel
from helpers.machines import ssh
from helpers.machines.hosts import Host, hosts
from helpers.records.runs import ROOT, events, wait_for

CHECKOUT = ("cluster", "conf", "jobs", "orchestrator", "pyproject.toml", ".rayignore", ".gitignore")
LIBRARIES = [path for path in sys.path if path.endswith("-packages")]
PROGRAMS = {"ray": "ray.scripts.scripts", "orchestrator": "orchestrator.cli"}
SHELL = """
python3() { command python3 "$@" --without-pip; }
pip() { command python3 "$INSTALL"; }
cd ~
[ ! -d orchestrator ] || { cd orchestrator && . .venv/bin/activate; }
"""
"""A terminal in which the earlier steps were typed. The hosts reach no package index, which ``INSTALL`` replaces."""
INSTALL = f"""
import sys, sysconfig
from pathlib import Path

Path(sysconfig.get_path("purelib"), "installed.pth").write_text("\\n".join([str(Path.cwd()), *{LIBRARIES}]))
for name, module in {PROGRAMS}.items():
    program = Path(sys.prefix, "bin", name)
    program.write_text(f"#!{{sys.executable}}\\nimport sys\\nfrom {{module}} import main\\nsys.exit(main())\\n")
    program.chmod(0o755)
"""
JOB = """
from jobs.digits import Digits

import module_of_driver
import wheel_of_driver

class Mine(Digits):
    def model(self):
        print("loaded", __file__, module_of_driver.__file__, wheel_of_driver.__file__, flush=True)
        return super().model()
"""
OPTIONS = {
    "cluster/start.sh": "--num-cpus=8",
    "orchestrator doctor": "job._target_=my_job.Mine cluster.rendezvous_timeout_s=100",
    "python -m orchestrator.launch": "job._target_=my_other_job.Mine cluster.pip=../requirements.txt "
    "cluster.py_modules=[../library/module_of_driver.py] train.steps=10 train.eval_every=0 tracking=none",
}
"""What is added to a command of the page."""


@dataclass(frozen=True)
class Step:
    """A numbered step of the page: the lines that are typed on each of ``machines``."""

    machines: tuple[str, ...]
    lines: tuple[str, ...]


def steps() -> Iterator[Step]:
    section = (CLUSTER / "README.md").read_text().partition("\n## Two machines\n")[2].partition("\n## ")[0]
    for text in re.split(r"^\d+\. On ", section, flags=re.MULTILINE)[1:]:
        machines = ("alpha", "beta") if text.startswith("both,") else tuple(re.findall(r"\A`(\w+)`,", text))
        yield Step(machines, tuple(line.strip() for line in text.splitlines() if line.startswith(" " * 8)))


@dataclass(frozen=True)
class Machines:
    """The two hosts, and the paths at which each has its home and both have the directory of the runs."""

    by_name: dict[str, Host]
    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def type(self, name: str, lines: tuple[str, ...]) -> tuple[int, str]:
        """Type lines of the page in the terminal of a machine; returns the last exit code, and the output."""
        given = {
            "REPOSITORY": str(self.folder / "repository"),
            "192.0.2.10": self.by_name["alpha"].address,
            "/shared/runs": str(self.runs),
        }
        text = "\n".join(lines)
        for placeholder, value in given.items():
            text = text.replace(placeholder, value)
        for command, option in OPTIONS.items():
            text = re.sub(rf"^{re.escape(command)}.*", rf"\g<0> {option}", text, flags=re.MULTILINE)
        return self.by_name[name].run(
            "env", "-u", "RAY_AUTH_MODE", "bash", "-ec", SHELL + text,
            HOME=str(self.home), INSTALL=str(self.folder / "install.py"), PYTHONPATH=str(self.home / "library"),
            PATH=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", timeout_s=150,
        )  # fmt: skip

    def copy_token(self) -> None:
        """Copy the token from ``alpha`` to ``beta``, as the page asks for where ssh cannot."""
        code, token = self.by_name["alpha"].run("cat", self.home / ".ray" / "auth_token")
        assert code == 0, token
        script = 'umask 077 && mkdir -p ~/.ray && printf %s "$TOKEN" >~/.ray/auth_token'
        self.by_name["beta"].script(script, HOME=str(self.home), TOKEN=token)

    def write_jobs(self) -> None:
        """Write two jobs in the checkout of ``alpha``, and what one of them imports beside it."""
        make_wheel(self.folder, "wheel_of_driver")
        for path, text in {
            "orchestrator/my_job.py": "from jobs.digits import Digits\n\nclass Mine(Digits): ...\n",
            "orchestrator/my_other_job.py": JOB,
            "library/module_of_driver.py": "",
            "requirements.txt": f"--no-index\n--find-links={self.folder}\nwheel_of_driver\n",
        }.items():
            script = 'mkdir -p "$(dirname "$FILE")" && printf %s "$TEXT" >"$FILE"'
            self.by_name["alpha"].script(script, FILE=str(self.home / path), TEXT=text)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Two machines with empty homes, and a repository with the files of this checkout."""
    repository = tmp_path / "repository"
    for name in CHECKOUT:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, repository / name)
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=all"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, "-C", repository, *words], check=True, timeout=60)
    (tmp_path / "install.py").write_text(INSTALL)
    with hosts("alpha", "beta") as pair:
        made = Machines({host.name: host for host in pair}, tmp_path)
        made.home.mkdir()
        made.runs.mkdir()
        for host in pair:
            host.mount_empty(made.home)
        yield made


def processes(host: Host) -> list[str]:
    """The processes that run on a host, except for its first one and its ssh server."""
    names = []
    for process in psutil.Process(host.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(process.name())
    return [name for name in names if name != "sshd"]


@pytest.mark.campaign
@pytest.mark.timeout(400)
def test_from_nothing_to_a_finished_run(machines: Machines) -> None:
    install, head, join, doctor, train, stop = steps()
    for name in install.machines:
        code, output = machines.type(name, install.lines)
        assert code == 0, output
    assert head.machines == doctor.machines == train.machines == ("alpha",)
    assert join.machines == ("beta",)
    assert install.machines == stop.machines == ("alpha", "beta")

    alpha, beta = (machines.by_name[name] for name in ("alpha", "beta"))
    code, output = machines.type("alpha", head.lines)
    assert code == 0, output
    if ssh.SERVER is not None:
        ssh.let_in(beta, alpha, home=machines.home)
    else:
        code, output = machines.type("beta", join.lines)
        assert code == 1
        assert "no token: copy ~/.ray/auth_token from the head to this node" in output
        machines.copy_token()
    code, output = machines.type("beta", join.lines)
    assert code == 0, output

    code, output = machines.type("beta", ("orchestrator queue list",))
    assert code == 0, output  # the file with the token is enough on every node

    machines.write_jobs()
    code, output = machines.type("alpha", doctor.lines)
    assert "all-reduce across 2 nodes" in output
    assert code < 2, output  # at most warnings, such as a small /dev/shm

    code, output = machines.type("alpha", train.lines)
    assert code == 0, output
    (record,) = machines.runs.glob("*/*/run.json")
    run_dir = record.parent
    assert json.loads(record.read_text())["state"] == "finished"
    assert f"run directory: {run_dir}" in output.splitlines()[-6:]
    (started,) = events(run_dir, "generation_started")
    places = [worker.partition(" pid ")[0] for worker in started["workers"]]
    assert places == [f"{host.name} ({host.address})" for host in (alpha, beta)]
    assert all(place in output for place in places)
    (loaded,) = [s for s in (run_dir / "logs" / "rank-1.log").read_text().splitlines() if s.startswith("loaded ")]
    job, module, wheel = loaded.split()[1:]
    assert "/working_dir_files/" in job
    assert "/py_modules_files/" in module
    assert "/pip-" in wheel

    for host in (alpha, beta):
        # `ray stop` ends all processes of Ray that it sees: on a host, those in its own PID namespace.
        assert host.run("cat", "/proc/1/comm") == (0, "sleep\n")
    with ThreadPoolExecutor() as both:
        for code, output in both.map(lambda name: machines.type(name, stop.lines), stop.machines):
            assert code == 0, output
    # `ray stop` does not wait for the processes that the dashboard has started.
    wait_for(lambda: [processes(host) for host in (alpha, beta)] == [[], []], "the end of both Rays")
