"""Why a script has failed: the exception, the signal or the exit code that has ended it."""

import json
import signal

import pytest

from helpers.files.golden import Golden
from orchestrator.features.scripts.script_failure import (
    LONGEST_MESSAGE,
    last_traceback,
    script_failure,
    why_not_stopped,
)
from orchestrator.policy.failure import Outcomes
from orchestrator.protocol.messages import Failure, Outcome

RAISED = """\
loading
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: bad value"""
CAUSED = f"""\
Traceback (most recent call last):
  File "train.py", line 1, in read
KeyError: 'x'

During handling of the above exception, another exception occurred:

{RAISED.partition(chr(10))[2]}
"""


def failure(
    exit_code: int = 1,
    output: str = "",
    error_file: str = "",
    *,
    after_end: bool = False,
    uncaught: str | None = None,
    oom_kill: bool = False,
) -> Failure:
    return script_failure(
        exit_code,
        output,
        error_file=error_file,
        log_tail="tail",
        time=1.0,
        after_end=after_end,
        uncaught=uncaught,
        oom_kill=oom_kill,
    )


@pytest.mark.parametrize(
    "after", ["", "\nException ignored in: <function f>\nTraceback (most recent call last):\n  x\nE: y"]
)
@pytest.mark.parametrize("output", [RAISED, CAUSED])
def test_the_exception_that_ended_it_is_the_message(output: str, after: str) -> None:
    found = failure(output=output + after)
    assert found.message == "ValueError: bad value (train.py:3)"
    assert found.own_frames == '  File "train.py", line 3, in <module>\n    main()\n'
    assert found.traceback == RAISED.partition("\n")[2]
    assert (found.collateral, found.final, found.log_tail) == (False, False, "")


@pytest.mark.parametrize(
    ("exit_code", "output", "message"),
    [
        (3, "", "the script ended with exit code 3"),
        (
            2,
            "usage: train.py\ntrain.py: error: no data\n\n",
            "the script ended with exit code 2: train.py: error: no data",
        ),
        (-9, "step 1", "the script was ended by SIGKILL: step 1"),
        (-200, "", "the script was ended by signal 200"),
    ],
)
def test_without_a_traceback_the_exit_code_and_the_last_line(exit_code: int, output: str, message: str) -> None:
    found = failure(exit_code, output)
    assert (found.message, found.traceback, found.log_tail) == (message, "", "tail")


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [../gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:7",
        "torch.distributed.DistNetworkError: The client socket has failed to connect",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
    ],
)
def test_a_lost_connection_follows_from_another_failure(error: str) -> None:
    output = f'Traceback (most recent call last):\n  File "t.py", line 1\n{error}'
    assert failure(output=output).collateral
    assert failure(output="", after_end=True).collateral


def test_a_taken_port_has_a_remedy() -> None:
    error = "Traceback (most recent call last):\n  x\nOSError: [Errno 98] Address already in use"
    assert "let it use MASTER_PORT" in failure(output=error).message


def test_what_record_has_written_is_preferred() -> None:
    written = {
        "message": {"message": "RuntimeError: x", "extraInfo": {"py_callstack": "Traceback\n  y\n", "timestamp": "1"}}
    }
    found = failure(output=RAISED, error_file=json.dumps(written))
    assert (found.message, found.traceback) == ("RuntimeError: x", "Traceback\n  y")
    assert failure(output=RAISED, error_file="{").message == "ValueError: bad value (train.py:3)"


def test_a_connection_that_others_have_closed_in_order_shows_that_the_ranks_disagree(golden: Golden) -> None:
    closed = failure(output="Traceback (most recent call last):\n  x\nRuntimeError: Connection closed by peer")
    outcomes = Outcomes(3)
    outcomes.add(0, Outcome(status="failed", step=1, failure=closed))
    assert outcomes.failure(0) == closed
    outcomes.add(2, Outcome(status="done", step=1))
    golden.says(outcomes.failure(0).message)


def test_no_traceback() -> None:
    assert last_traceback("a\nb") == ""


CRASHED = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/x/train.py", line 7 in step
  File "/x/train.py", line 9 in <module>

Extension modules: numpy (total: 1)"""
THROWN = """\
step 3
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: device-side assert triggered
Fatal Python error: Aborted
"""
IN_THREAD = f"Exception in thread Thread-1:\n{RAISED.partition(chr(10))[2]}"
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "t.py", line 3, in <module>
  | ExceptionGroup: two failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: bad shard
    +------------------------------------"""


@pytest.mark.parametrize(
    ("exit_code", "output", "message"),
    [
        (-9, f"{RAISED}\ntraining", "the script was ended by SIGKILL: training"),
        (-15, f"{RAISED}\ntraining", "the script was ended by SIGTERM: training"),
        (3, f"{RAISED}\nthe loss is too high", "the script ended with exit code 3: the loss is too high"),
        (2, f"{IN_THREAD}\nno data", "the script ended with exit code 2: no data"),
        (1, f"{IN_THREAD}\nno data", "the script ended with exit code 1: no data"),
        (-11, f"step 3\n{CRASHED}", "the script was ended by SIGSEGV in step (/x/train.py, line 7): step 3"),
        (-6, THROWN, "the script was ended by SIGABRT: c10::Error: CUDA error: device-side assert triggered"),
        (-6, f"{RAISED}\n{THROWN[7:]}", "ValueError: bad value, then it was ended by SIGABRT (train.py:3)"),
        (1, GROUP, "ExceptionGroup: two failed (2 sub-exceptions)"),
        (1, f"{RAISED}\n{GROUP}", "ExceptionGroup: two failed (2 sub-exceptions)"),
    ],
)  # fmt: skip
def test_an_exception_after_which_the_script_went_on_is_not_what_ended_it(
    exit_code: int, output: str, message: str
) -> None:
    assert failure(exit_code, output).message == message


def noted(message: str) -> str:
    return json.dumps({"message": message, "traceback": "Traceback\n  y"})


def test_what_python_tells_of_the_exception_is_certain() -> None:
    assert failure(1, f"{RAISED}\nlater", uncaught="").message == "the script ended with exit code 1: later"
    found = failure(1, f"{RAISED}\nlater", uncaught=noted("KeyError: 'x'\na note\n"))
    assert (found.message, found.traceback) == ("KeyError: 'x'", "Traceback\n  y")


@pytest.mark.parametrize(("exit_code", "end"), [(-6, ""), (-11, ""), (-9, ", then it was ended by SIGKILL")])
def test_a_crash_while_python_exits_is_not_what_ended_a_script(exit_code: int, end: str) -> None:
    assert failure(exit_code, THROWN, uncaught=noted("KeyError: 'x'")).message == f"KeyError: 'x'{end}"
    assert (
        failure(exit_code, THROWN, error_file=json.dumps({"message": "KeyError: 'x'"})).message == f"KeyError: 'x'{end}"
    )


TORCHRUN = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
Root Cause (first observed failure):
[0]:
  time      : 2026
  rank      : 3 (local_rank: 1)
  exitcode  : {code} (pid: 1293)
  error_file: <N/A>
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('  File "t.py", line 1\n    f(:\n      ^\nSyntaxError: invalid syntax\n', "SyntaxError: invalid syntax"),
        ("ValueError: first\nsecond\n", "ValueError: first"),
        ("RuntimeError: \nfirst\nsecond\n", "RuntimeError: first"),
        (
            "ValueError: Caught ValueError in DataLoader worker process 0.\n"
            "Original Traceback (most recent call last):\n  x\nValueError: bad row\n",
            "ValueError: Caught ValueError in DataLoader worker process 0.: ValueError: bad row",
        ),
        (
            "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 1 terminated:\n"
            "Traceback (most recent call last):\n  x\nOSError: disk\n",
            "torch.multiprocessing.spawn.ProcessRaisedException: OSError: disk",
        ),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        (f"ValueError: {'x' * 2 * LONGEST_MESSAGE}", f"ValueError: {'x' * (LONGEST_MESSAGE - 12)}..."),
    ],
)  # fmt: skip
def test_of_a_text_of_several_lines_the_cause(text: str, message: str) -> None:
    assert failure(1, "", uncaught=noted(text)).message == message


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (1, "ChildFailedError: its rank 3 ended with exit code 1: ValueError: bad value"),
        (7, "ChildFailedError: its rank 3 ended with exit code 7"),
        (-9, "ChildFailedError: its rank 3 was ended by SIGKILL"),
    ],
)
def test_of_torchrun_the_process_that_failed(code: int, message: str) -> None:
    text = TORCHRUN.format(code=code)
    output = f"{RAISED}\nE1128 failed\nTraceback (most recent call last):\n  x\n{text}"
    assert failure(1, output, uncaught=noted(text)).message == message
    assert failure(1, output).message == message


def test_a_kill_beside_the_out_of_memory_killer_is_probably_its_own() -> None:
    assert "out-of-memory killer" in failure(-9, "step 1", oom_kill=True).message
    assert "out-of-memory killer" not in failure(-11, "step 1", oom_kill=True).message


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: Timed out waiting 3000ms for recv operation to complete",
        "torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /x",
        "RuntimeError: Rank 0 failed to pass monitoredBarrier in 3000 ms",
    ],
)
def test_who_waits_in_vain_names_the_rank_that_has_ended(error: str) -> None:
    outcomes = Outcomes(2)
    outcomes.add(0, Outcome(status="done", step=1))
    outcomes.add(1, Outcome(status="failed", step=1, failure=failure(uncaught=noted(error))))
    assert outcomes.failure(1).message.startswith(f"{error}; rank 0 ended without an error before")


def test_what_a_stopped_script_could_not_save_is_no_failure_of_the_generation() -> None:
    why = failure(uncaught=noted("OSError: disk full"))
    outcomes = Outcomes(2)
    for rank, found in enumerate((None, why)):
        outcomes.add(rank, Outcome(status="stopped", step=3, failure=found))
    assert (outcomes.first_failed, outcomes.any_failed, outcomes.all_ended("stopped")) == (None, False, True)
    assert outcomes.unsaved == {1: "OSError: disk full"}
    assert outcomes.survivors().keys() == {0, 1}
    assert why_not_stopped(why) == "OSError: disk full"
    assert why_not_stopped(failure(-signal.SIGINT, uncaught=noted("KeyboardInterrupt"))) is None
    signalled = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15"
    assert why_not_stopped(failure(uncaught=noted(signalled))) is None
