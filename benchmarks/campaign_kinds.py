"""The kinds of trouble of the campaign, each caused for real: faults of workers, slow disks, clock steps, ..."""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ray
from arms import HERE, kill_tree
from campaign_trial import CHECKPOINT_EVERY, STEPS, TRIAL_TIMEOUT_S, Ended, Kind, Layout, Setting, ended, train

from helpers.disks import freezable_disk, mounted
from helpers.runs import events, wait_for
from orchestrator.policy.recovery import GENERATIONS_WITHOUT_PROGRESS
from orchestrator.records.journal import read_metrics
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import list_checkpoints

FAULTY = ("recovery.hang_min_s=2", "recovery.hang_max_s=20")
FAULTS = ("raise", "exit", "kill", "segv", "stop", "sleep")
PHASES = ("train", "train", "train", "join", "build", "eval", "checkpoint", "end")
HEALTHY = (
    "job._target_=stalling_job.Stalling",
    "recovery.hang_min_s=6",
    "recovery.hang_max_s=30",
    "recovery.build_max_s=30",
    "recovery.max_failures=0",
)
STALLS = {
    "job.build_s": (1, 4),
    "job.compile_s": (1, 10),
    "job.open_s": (1, 10),
    "job.disk_s": (0.2, 1),
    "job.val_s": (0.02, 0.1),
}
"""The shortest and the longest pause of each kind, in seconds. Several may fall into one batch."""
CLOCK_STEPS_S = (-86_400, -3600, -60, -2, 2, 60, 3600, 86_400)
FENCES = {"removed": None, "of another generation": '{"generation": "another"}', "damaged": "{"}
"""What happens to the fence file, and its text then; None if it is gone."""
SKIPPED = re.compile(r"the checkpoint of step (\d+) is skipped")
IMPORTS = f"{HERE}:{HERE.parent}"
"""What a command needs on its path to find the jobs of the benchmarks."""
FULL_DISK = "size=4m"
ANOTHER_BOOTTIME = ("unshare", "--map-root-user", "--time", "--boottime", "86400")
"""Runs a command in a time namespace, whose clock of the time since boot is a day ahead."""


def worker_faults(setting: Setting, drawn: list[str]) -> Ended:
    """One to three faults of workers, injected by ``recovery.chaos`` in any phase."""
    drawn += draw_faults(setting.rng, setting.layout)
    return train(setting, *FAULTY, f"recovery.chaos=[{','.join(drawn)}]")


def draw_faults(rng: random.Random, layout: Layout) -> list[str]:
    """Draw one to three faults at different steps, but never so many before the first step that any run would end."""
    faults = []
    for step in sorted(rng.sample(range(2, STEPS), rng.choice((1, 1, 1, 2, 2, 3)))):
        phase, kind, rank = rng.choice(PHASES), rng.choice(FAULTS), rng.randrange(layout.ranks)
        at = {"join": 0, "build": 0, "eval": 10, "checkpoint": 20, "end": STEPS}.get(phase, step)
        if phase in ("join", "build", "end") and kind == "sleep":
            kind = "kill"  # the timeouts of these phases are minutes long
        if phase in ("join", "build") and kind == "raise":
            kind = "exit"  # an exception before the first step ends the run by design
        faults.append(f"{kind}@{at}:{rank}" + ("" if phase == "train" else f":{phase}"))
    before_the_first = [fault for fault in faults if "@0:" in fault]
    return faults if len(before_the_first) < GENERATIONS_WITHOUT_PROGRESS else faults[:-1]


def stalls(setting: Setting, drawn: list[str]) -> Ended:
    """One to three kinds of stalls in the job, and in half of the runs a loader process."""
    rng = setting.rng
    drawn += [f"{key}={rng.uniform(*STALLS[key]):.2f}" for key in rng.sample(list(STALLS), rng.choice((1, 2, 3)))]
    drawn += ["data.num_workers=1"] * rng.randrange(2)
    return train(setting, *HEALTHY, *drawn)


def slow_file_system(setting: Setting, drawn: list[str]) -> Ended:
    """A file server that stops answering for seconds, again and again, and data that is slow to read.

    The run directory is on a disk that is frozen (FIFREEZE): every write waits in the kernel, as on NFS.
    """
    pauses_s = [setting.rng.uniform(0.5, 2.5) for _ in range(100)]
    between_s = setting.rng.uniform(1.5, 3)
    drawn += [f"job.disk_s={setting.rng.uniform(0.05, 0.3):.2f}", "job.loss_s=0.05"]

    def stall(over: threading.Event) -> None:
        for pause_s in pauses_s:
            if over.wait(between_s):
                return
            disk.freeze()
            over.wait(pause_s)
            disk.thaw()

    with freezable_disk(setting.folder, megabytes=32, folder=setting.output_dir) as disk, beside(stall):
        return train(setting, *HEALTHY, *drawn)


def clock_step(setting: Setting, drawn: list[str]) -> Ended:
    """The wall clock of all Python processes of the run jumps (``stepped_clock/sitecustomize.py``)."""
    step, jump_s = setting.rng.randrange(1, STEPS), setting.rng.choice(CLOCK_STEPS_S)
    drawn += [f"{jump_s:+} s after step {step}"]
    offset = setting.folder / "offset"
    offset.write_text("0")
    environment = {"CLOCK_OFFSET_FILE": str(offset), "PYTHONPATH": f"{HERE / 'stepped_clock'}:{IMPORTS}"}
    slow = (*HEALTHY, "job.loss_s=0.1")
    with launched(setting, *slow, address="local", environment=environment) as process:
        wait_for(lambda: process.poll() is not None or last_step(setting) >= step, f"step {step}")
        stepped = offset.with_suffix(".new")
        stepped.write_text(str(jump_s))
        stepped.replace(offset)
        process.wait(TRIAL_TIMEOUT_S)
    return ended_process(setting, process)


def lost_fence(setting: Setting, drawn: list[str]) -> Ended:
    """The fence file is removed, overwritten with another generation or damaged, at any moment of the run.

    The checkpoint that waits for it is saved, and the last one of the run. One that is due meanwhile may be skipped.
    """
    step, how = setting.rng.randrange(1, STEPS), setting.rng.choice(list(FENCES))
    drawn += [f"{how} after step {step}"]

    def lose(over: threading.Event) -> None:
        wait_for(lambda: over.is_set() or last_step(setting) >= step, f"step {step}")
        fence, text = run_dir(setting).fence_file, FENCES[how]
        fence.unlink() if text is None else fence.write_text(text)

    with beside(lose):
        run = train(setting, *HEALTHY, "job.loss_s=0.1")
    saved = [event["step"] for event in events(run_dir(setting).path, "checkpoint_saved")]
    warnings = [event["message"] for event in events(run_dir(setting).path, "warned")]
    skipped = [int(match[1]) for text in warnings if (match := SKIPPED.match(text))]
    wanted = list(range(CHECKPOINT_EVERY, STEPS + 1, CHECKPOINT_EVERY))
    is_complete = sorted(saved + skipped) == wanted and STEPS in saved
    return replace(run, problems=(f"checkpoints saved: {saved}, skipped: {skipped}",) * (not is_complete))


def full_disk(setting: Setting, drawn: list[str]) -> Ended:
    """The file system of the run directory fills up at any moment of its last third.

    The run ends with exit code 0 if its last checkpoint was written before, and with 3 otherwise.
    """
    step = setting.rng.randrange(2 * STEPS // 3, STEPS + 1)
    drawn += [f"full after step {step}"]
    setting.output_dir.mkdir()

    def fill(over: threading.Event) -> None:
        wait_for(lambda: over.is_set() or last_step(setting) >= step, f"step {step}")
        with (setting.output_dir / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while not over.is_set():
                file.write(bytes(4096))

    with mounted(setting.output_dir, "-t", "tmpfs", "-o", FULL_DISK, "tmpfs"), beside(fill):
        run = train(setting, *HEALTHY, "job.loss_s=0.05")
    contradiction = run.exit_code != 0 and run.outcome.weights is not None
    return replace(run, problems=(f"exit {run.exit_code}, but the last checkpoint is there",) * contradiction)


def second_driver(setting: Setting, drawn: list[str]) -> Ended:
    """A second command with ``resume=auto`` starts while the first one trains.

    In half of the trials it starts in a time namespace, in which every process has another start time.
    """
    prefix = setting.rng.choice(((), ANOTHER_BOOTTIME))
    step = setting.rng.randrange(STEPS // 3)
    drawn += [f"after step {step}", *prefix]
    problems = []

    def interfere(over: threading.Event) -> None:
        wait_for(lambda: over.is_set() or last_step(setting) >= step, f"step {step}")
        first = run_dir(setting)
        before = first.read_record()
        with launched(setting, *slow, prefix=prefix) as second:
            second.wait(TRIAL_TIMEOUT_S)
        if over.is_set():
            problems.append("the first command has ended too early to say anything about the second")
        elif second.returncode != 2:
            problems.append(f"the second command: exit {second.returncode}")
        if any(run_dir(setting).read_record()[key] != before[key] for key in ("uid", "driver", "started")):
            problems.append("the second command has left a trace")

    slow = (*HEALTHY, "job.loss_s=0.4", "resume=auto")
    with beside(interfere):
        run = train(setting, *slow)
    return replace(run, problems=tuple(problems))


def two_resume(setting: Setting, drawn: list[str]) -> Ended:
    """The driver is killed, and then two commands with ``resume=auto`` start at the same moment: one of them trains."""
    step = setting.rng.randrange(CHECKPOINT_EVERY + 2, STEPS - 5)
    drawn += [f"killed after step {step}"]
    slow = (*HEALTHY, "job.loss_s=0.1", "resume=auto")
    with launched(setting, *slow) as process:
        wait_for(lambda: last_step(setting) >= step, f"step {step}")
        first = run_dir(setting)
        wait_for(lambda: list_checkpoints(first.checkpoints), "a checkpoint")
        process.kill()
    with launched(setting, *slow) as one, launched(setting, *slow) as other:
        for process in (one, other):
            process.wait(TRIAL_TIMEOUT_S)
    codes = {process.returncode: process for process in (one, other)}
    problems = []
    if set(codes) != {0, 2}:
        problems.append(f"exit codes {one.returncode} and {other.returncode}")
    if run_dir(setting) != first:
        problems.append("another run directory")
    run = ended_process(setting, codes.get(0, one))
    return replace(run, problems=tuple(problems))


KINDS = {
    "worker faults": Kind(disturb=worker_faults, loses_workers=True),
    "slow file system": Kind(disturb=slow_file_system),
    "clock step": Kind(disturb=clock_step),
    "lost fence": Kind(disturb=lost_fence),
    "full disk": Kind(disturb=full_disk, exit_codes=(0, 3), tracked=True),
    "second driver": Kind(disturb=second_driver, tracked=True),
    "two resume at once": Kind(disturb=two_resume, tracked=True),
    "stalls": Kind(disturb=stalls),
}


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Call ``work(over)`` in a thread during the block; the event ``over`` is set when the block ends.

    Raises:
        Exception: what ``work`` raised.
    """
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work, over)
        try:
            yield
        finally:
            over.set()
    future.result()


@contextlib.contextmanager
def launched(
    setting: Setting,
    *overrides: str,
    address: str = "",
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the layout as a command, which is killed with its children if it is still running after the block.

    ``address``: that of the Ray to use; empty for the Ray of this process. ``prefix``: a command that runs the command.
    """
    cluster = f"cluster.address={address or ray.get_runtime_context().gcs_address}"
    with (setting.folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "orchestrator.launch", cluster, *setting.overrides, *overrides],
            cwd=setting.folder,
            env={**os.environ, "PYTHONPATH": IMPORTS, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        kill_tree(process)


def ended_process(setting: Setting, process: subprocess.Popen[bytes]) -> Ended:
    """Read what the run of a command has left behind."""
    last_lines = " ".join((setting.folder / "output.txt").read_text().split()[-60:])
    return ended(run_dir(setting), exit_code=process.returncode, reason=last_lines)


def run_dir(setting: Setting) -> RunDir:
    """Return the only run of a trial.

    Raises:
        AssertionError: there are others, or none appears.
    """
    runs = wait_for(lambda: list(setting.output_dir.glob("*/*/run.json")), "a run")
    assert len(runs) == 1, f"{len(runs)} runs"
    return RunDir(runs[0].parent)


def last_step(setting: Setting) -> int:
    """Return the last step that a trial has logged; 0 before the first."""
    runs = setting.output_dir.glob("*/*/run.json")
    return max((step for run in runs for step, _, _ in read_metrics(RunDir(run.parent))), default=0)
