"""The first quarter of an hour on a GPU: verdicts of probes that answer, fail, hang or die, and the table of them."""

import inspect
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "benchmarks"))

import gpu_quarter  # noqa: E402
from gpu_probes import probe  # noqa: E402
from gpu_probes.probe import Verdict, judge  # noqa: E402

ANSWER = "import sys; from pathlib import Path; Path(sys.argv[1]).write_text('found'); sys.exit({code})"
HANG = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(sys.argv[1]).with_name("child").write_text(str(child.pid))
print("waits", flush=True)
time.sleep(600)
"""


def verdict(folder: Path, code: str, *, limit_s: float = 60.0, left_s: float = 600.0) -> Verdict:
    file = folder / "found.txt"
    return judge([sys.executable, "-c", code, str(file)], limit_s=limit_s, left_s=left_s, log=folder / "log", file=file)


@pytest.mark.parametrize(("code", "outcome"), probe.CODES.items())
def test_the_exit_code_of_a_probe_is_its_outcome(tmp_path: Path, code: int, outcome: str) -> None:
    found = verdict(tmp_path, ANSWER.format(code=code))
    assert (found.outcome, found.text) == (outcome, "found")


def test_a_probe_that_dies_fails_with_its_last_words(tmp_path: Path) -> None:
    found = verdict(tmp_path, "raise RuntimeError('no device')")
    assert (found.outcome, found.text) == ("FAIL", "exited with 1 without an answer: RuntimeError: no device")


@pytest.mark.slow
def test_a_probe_that_hangs_costs_its_limit_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MIN_S", 1.0)
    found = verdict(tmp_path, HANG, limit_s=3.0)
    assert (found.outcome, found.text) == ("FAIL", "no answer within 3 s: waits")
    child = Path("/proc") / (tmp_path / "child").read_text()
    deadline = time.monotonic() + 10
    while child.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists()


@pytest.mark.slow
def test_a_probe_that_the_budget_cuts_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(tmp_path, HANG, left_s=9.0) == Verdict(outcome="not run", text="no time left")
    monkeypatch.setattr(probe, "MIN_S", 1.0)
    found = verdict(tmp_path, HANG, left_s=1.0)
    assert (found.outcome, found.text) == ("not run", "cut after 1 s, no time left")


def test_the_page_has_a_row_for_each_verdict() -> None:
    verdicts = {"recovery": Verdict(outcome="FAIL", text="one | two\nthree", seconds=4.4)}
    assert gpu_quarter.page("NVIDIA H100 80GB HBM3", verdicts).splitlines()[-1] == (
        "| recovery | a rank is killed in a step, three times | FAIL | one / two three | 4 |"
    )


@pytest.mark.slow
def test_every_probe_exists_and_takes_its_arguments() -> None:
    sys.path.append(str(ROOT / "tests"))
    for asked in gpu_quarter.PROBES.values():
        inspect.signature(asked.load()).bind(on_cpu=True, **asked.arguments)


@pytest.mark.campaign
def test_the_command_saves_its_table_and_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["gpu_quarter.py", *words])
        return gpu_quarter.main()

    patient = replace(gpu_quarter.PROBES["facts"], limit_s=300)
    monkeypatch.setitem(gpu_quarter.PROBES, "facts", patient)
    assert command("--cpu", "--only", "facts", "--out", str(tmp_path)) == 0
    row = (tmp_path / "table.md").read_text().splitlines()[-1]
    assert row.split(" | ")[2] == "ok"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        command("--only", "speeed")
    assert "no probe is named 'speeed'; there are facts, recovery, " in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command() == 2
    message = "gpu_quarter.py: torch sees no GPU; run it on a machine with one, or with --cpu\n"
    assert capsys.readouterr() == ("", message)
