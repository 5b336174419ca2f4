"""``debug=true``: one process that a debugger may hold for as long as it likes, and the records of any run."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.files.golden import Golden
from orchestrator.launch import main

JOB = ("debug=true", "job._target_=helpers.jobs.debugged_job.Debugged", "train.steps=6", "train.eval_every=0")
PATIENCE_S = 60.0
HERE = Path(__file__).resolve().parents[1]


class Terminal:
    """A command at a terminal, which answers what it is asked."""

    def __init__(self, folder: Path, *words: str):
        self.shown = ""
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}", "TERM": "xterm"}
        environment.pop("PYTHONBREAKPOINT", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.launch", *words],
            cwd=folder,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def until(self, text: str) -> str:
        """Wait for ``text``; what was shown up to it since the last call."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown}"
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._ours, 65536).decode(errors="replace")
                except OSError:
                    break  # the process has closed the terminal
        before, found, self.shown = self.shown.partition(text)
        assert found, f"no {text!r} in {before}"
        return before + found

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def ask(self, expression: str) -> str:
        """The answer of the debugger to an expression."""
        self.type(f"p 'it is', {expression}\n")
        self.until("('it is', ")
        return self.until("(Pdb) ").partition(")\r\n")[0]

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_a_debugger_stops_where_it_is_asked_to_and_where_an_error_was_raised(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    terminal = Terminal(tmp_path, *JOB, "strategy=ddp", "job.stops_at=2", "job.fails_at=4")
    terminals.append(terminal)
    terminal.until("(Pdb) ")
    assert terminal.ask("step") == "2"
    assert terminal.ask("len(__import__('psutil').Process().children())") == "0"
    assert terminal.ask("__import__('ray').is_initialized()") == "False"
    terminal.type("c\n")
    assert "KeyError: 'label' (debugged_job.py:" in terminal.until("post mortem")
    terminal.until("(Pdb) ")
    assert terminal.ask("name") == "'label'", "the frame that has raised it"
    terminal.type("u\n")
    terminal.until("(Pdb) ")
    assert terminal.ask("answer") == "42"
    terminal.type("q\n")
    end = terminal.until("run directory: ")
    assert "failed: rank 0 at step 3: KeyError: 'label' (debugged_job.py:" in end
    assert terminal.exit_code() == 1
    (run,) = tmp_path.glob("outputs/*/*/run.json")
    assert json.loads(run.read_text())["state"] == "failed"
    log = (run.parent / "logs" / "rank-0.log").read_text()
    assert "in train_step" in log, "the whole traceback"


def test_the_end_of_the_debugger_is_the_end_of_the_run(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, *JOB, "strategy=single", "job.stops_at=2")
    terminals.append(terminal)
    terminal.until("(Pdb) ")
    terminal.type("q\n")
    assert "stopped by `q` in the debugger" in terminal.until("run directory: ")
    assert terminal.exit_code() == 130


@pytest.mark.parametrize("strategy", ["ddp", "dp", "mesh", "pipeline", "fsdp", "parameter_server", "auto"])
def test_every_strategy_trains_in_one_process_and_says_what_that_is(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["debug=true", f"strategy={strategy}", "train.steps=2", "train.eval_every=0"]) == 0
    note = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("note: debug=true"))
    golden.says(note)
    (run,) = tmp_path.glob("outputs/*/*/run.json")
    assert json.loads(run.read_text())["state"] == "finished"
    assert [path.name for path in run.parent.glob("checkpoints/*")] == ["step-00000002"]


SCRIPT = """
import sys, torch, torch.distributed as dist
from orchestrator import report
dist.init_process_group("gloo")
for step in range(1, 6):
    report(step=step, steps=5, loss=1 / step, samples=8)
    if step == 3 and "fail" in sys.argv:
        {}["label"]
assert (dist.get_world_size(), __name__) == (1, "__main__")
print("arguments", sys.argv[1:])
dist.destroy_process_group()
"""


def test_a_script_runs_in_the_process_with_its_arguments_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["debug=true", "strategy=script", "job.script=train.py"]
    arguments = list(sys.argv)
    assert main([*words, "job.args=--lr 0.1"]) == 0
    shown = capsys.readouterr().out
    assert "arguments ['--lr', '0.1']" in shown
    assert "step 5/5  loss 0.2000" in shown
    assert main([*words, "job.args=fail"]) == 1
    assert """failed: rank 0 at step 3: KeyError: 'label' (train.py:8: {}["label"])""" in capsys.readouterr().out
    assert sys.argv == arguments
