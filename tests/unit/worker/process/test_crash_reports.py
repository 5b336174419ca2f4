"""A process that crashes says why in its log, and the run repeats it."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from helpers.files.golden import Golden
from orchestrator.policy.failure import death, describe_crash
from orchestrator.records.rank_log import LogReader, crash_report, log_header, log_tail, newest_part
from orchestrator.records.run_dir import RunDir
from orchestrator.worker.process.node_facts import kernel_oom_kills

CRASH = """
import ctypes, os, signal, sys, threading
from orchestrator.worker.process.output import enable_crash_reports
enable_crash_reports()
enable_crash_reports()  # a process that changes its rank does it again
how = sys.argv[1]
print("before the crash", file=sys.stderr, flush=True)

def crash():
    if how == "SIGSEGV":
        ctypes.string_at(0)
    elif how == "abort":
        ctypes.CDLL(None).abort()
    else:
        signal.raise_signal(getattr(signal, how))  # os.kill may interrupt the other thread

thread = threading.Thread(target=crash)
thread.start()
thread.join()
"""


def crashed(tmp_path: Path, how: str) -> tuple[int, str]:
    """The exit code and the crash report of a process."""
    log = tmp_path / "rank-1.log"
    with log.open("ab") as out:
        process = subprocess.Popen([sys.executable, "-c", CRASH, how], stderr=out, env={**os.environ})
        out.write(log_header(process.pid, "here").encode())
        out.flush()
        return process.wait(timeout=60), crash_report(log, process.pid)


def test_both_stacks_of_the_thread_that_crashed_are_in_the_report(tmp_path: Path) -> None:
    code, report = crashed(tmp_path, "SIGSEGV")
    assert code == -11
    assert report.startswith("before the crash\nFatal Python error: Segmentation fault\nCurrent thread 0x")
    assert "in crash\n" in report, "the Python stack"
    c_stack = report.partition("C stack (most recent call first):\n")[2]
    assert "ffi_call" in c_stack
    assert "gsignal" not in c_stack, "the handlers are left out"
    assert "in wait" not in report, "other threads are in the log"
    assert describe_crash(report).startswith("SIGSEGV (Segmentation fault) in string_at (")


@pytest.mark.parametrize(
    ("how", "number", "name"),
    [
        ("abort", 6, "SIGABRT (Aborted)"),
        ("SIGBUS", 7, "SIGBUS (Bus error)"),
        ("SIGFPE", 8, "SIGFPE (Floating"),
        ("SIGILL", 4, "SIGILL (Illegal instruction)"),
    ],
)
def test_every_fatal_signal_is_named_and_ends_the_process(tmp_path: Path, how: str, number: int, name: str) -> None:
    code, report = crashed(tmp_path, how)
    assert code == -number
    assert describe_crash(report).startswith(name)
    assert "C stack (most recent call first):\n  " in report


def test_sigint_and_sigkill_leave_no_report(tmp_path: Path) -> None:
    assert crashed(tmp_path, "SIGKILL") == (-9, "")
    code, report = crashed(tmp_path, "SIGINT")
    assert (code in (1, -2), report) == (True, "")


PYTHON = """Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  File "other.py", line 3 in waiting

Current thread 0x2 (most recent call first):
  File "model.py", line 7 in forward
  File "loop.py", line 1 in run

Extension modules: a, b
"""
C = """C stack (most recent call first):
/lib/libffi.so.8(+0x1)[0x1]
/lib/libc.so.6(+0x3c050)[0x2]
/lib/libc.so.6(gsignal+0x12)[0x3]
/lib/libc.so.6(+0x3c050)[0x2]
/lib/guilty.so(_Z6guiltyv+0x7)[0x4]
python(+0x5)[0x5]
"""
RAY = "*** SIGABRT received at time=1795317249 on cpu 0 ***\nPC: @ 0x1 (unknown)\n"


def written(tmp_path: Path, *parts: str) -> Path:
    log = tmp_path / "rank-0.log"
    log.write_text("".join(parts))
    return log


def test_a_report_has_what_matters(tmp_path: Path) -> None:
    log = written(tmp_path, log_header(7, "here"), "free(): invalid pointer\n", RAY, PYTHON, C)
    report = crash_report(log, 7)
    assert report.splitlines() == [
        *("free(): invalid pointer", "Fatal Python error: Aborted", "Current thread 0x2 (most recent call first):"),
        *('  File "model.py", line 7 in forward', '  File "loop.py", line 1 in run'),
        *("C stack (most recent call first):", "  /lib/guilty.so(_Z6guiltyv+0x7)[0x4]", "  python(+0x5)[0x5]"),
    ]
    assert log_tail(log) == report
    assert describe_crash(report) == "SIGABRT (Aborted) in forward (model.py, line 7)"


def test_a_crash_of_an_earlier_process_is_not_that_of_a_later_one(tmp_path: Path) -> None:
    log = written(tmp_path, log_header(7, "here"), PYTHON, log_header(8, "here"), "step 3\n")
    assert crash_report(log, 8) == ""
    assert crash_report(log, 9) == "", "its output was never redirected"
    assert log_tail(log).endswith("step 3")
    assert crash_report(tmp_path / "none.log", 8) == ""


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    long = "a line of output\n" * 2_000_000
    log = written(tmp_path, PYTHON, log_header(7, "here"), long, "free(): invalid pointer\n", PYTHON)
    tracemalloc.start()
    report = crash_report(log, 7)
    assert log_tail(log) == report
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.startswith("a line of output\na line of output\nfree(): invalid pointer\nFatal Python error: Aborted")
    assert crash_report(log, 8) == ""
    assert peak < 16 * 2**20


LARGE_LOG = """
import ctypes, sys, time
from pathlib import Path
from orchestrator.worker.process.output import RankOutput
log = Path(sys.argv[1])
RankOutput(lambda stream: stream, most_bytes=1000, check_every_s=0.01).redirect(log)
for number in range(200_000):
    print("line", number)
    part = log.with_name("rank-0.2.log")
    if part.exists() and part.stat().st_size:  # the output goes there: it begins with a line that says whose it is
        break
    time.sleep(0.001)
ctypes.string_at(0)
"""


def test_a_large_log_continues_in_other_parts(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    log = run_dir.log_file(0)
    process = subprocess.Popen([sys.executable, "-c", LARGE_LOG, str(log)])
    assert process.wait(timeout=60) == -11
    assert sorted(path.name for path in log.parent.iterdir()) == ["rank-0.1.log", "rank-0.2.log", "rank-0.log"]
    assert newest_part(log).name == "rank-0.2.log"
    assert "SIGSEGV" in describe_crash(crash_report(log, process.pid))
    reader = LogReader(run_dir)
    assert reader.ranks() == [0]
    texts = [line.text for line in reader.read()]
    numbers = [int(text.split()[1]) for text in texts if text.startswith("line ")]
    assert numbers == list(range(len(numbers)))
    assert sum(text.startswith(f"worker process {process.pid} on ") for text in texts) == 3


ODD_TEXT = """
import sys
from pathlib import Path
from orchestrator.worker.process.output import RankOutput
RankOutput(lambda stream: stream).redirect(Path(sys.argv[1]))
print("of a file: \\udcff")
raise ValueError("\\ud800")
"""


def test_text_that_utf_8_does_not_have_is_escaped_in_the_log(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "", "LC_ALL": "C"}
    process = subprocess.Popen([sys.executable, "-c", ODD_TEXT, str(tmp_path / "rank-0.log")], env=environment)
    assert process.wait(timeout=60) == 1
    lines = (tmp_path / "rank-0.log").read_text(encoding="utf-8").splitlines()
    assert (lines[1], lines[-1]) == (r"of a file: \udcff", r"ValueError: \ud800")


def test_the_message_names_what_is_known(golden: Golden) -> None:
    def message(**known: object) -> str:
        return death("unknown", pid=7, hostname="here", time=0.0, **known).message  # type: ignore[arg-type]

    golden.says(message())
    lost = death("node lost", pid=7, hostname="there", time=0.0).message
    golden.says(lost)
    golden.says(message(kernel_oom_kill=True))
    fatal = "Fatal Python error: deallocating None\nFatal Python error: Aborted"
    golden.says(message(crash_report=fatal))
    assert death("unknown", pid=7, hostname="here", time=0.0, crash_report=fatal).log_tail == fatal


def test_the_kernel_counts_what_it_kills() -> None:
    kills = kernel_oom_kills()
    assert kills is None or kills >= 0
