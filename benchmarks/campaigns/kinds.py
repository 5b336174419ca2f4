"""The kinds of trouble of the campaign, each caused for real: faults of workers, slow disks, clock steps, ..."""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

from harness.arms import HERE, kill_tree

from campaigns.commands import HEALTHY, IMPORTS, beside, ended_process, last_step, launched, run_dir
from campaigns.company import reader_on_node, second_driver, sweep_and_run, two_resume, two_users
from campaigns.trial import (
    CHECKPOINT_EVERY,
    STEPS,
    STOPPED,
    TRIAL_TIMEOUT_S,
    Ended,
    Kind,
    Setting,
    train,
    wrong_upload,
)
from helpers.faults.layouts import Layout
from helpers.faults.outcome import differences
from helpers.machines.disks import freezable_disk, mounted
from helpers.records.runs import events, wait_for
from orchestrator.policy.recovery import GENERATIONS_WITHOUT_PROGRESS
from orchestrator.state.checkpoint import path_of
from orchestrator.state.checkpoint_store import CheckpointStore

FAULTY = ("recovery.hang_min_s=2", "recovery.hang_max_s=20")
FAULTS = ("raise", "exit", "kill", "segv", "stop", "sleep")
PHASES = ("train", "train", "train", "join", "build", "eval", "checkpoint", "end")
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
KEEPS_BEST = ("checkpoint.best=val/loss", "checkpoint.keep=1")
SKIPPED = re.compile(r"the checkpoint of step (\d+) is skipped")
FULL_DISK, SMALL_DISK = "size=4m", "size=2m"
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""A program that uses a core until its parent has ended."""


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


def loader_processes(setting: Setting, drawn: list[str]) -> Ended:
    """Faults of workers that have loader processes, which die with them; then the same with data drawn at random.

    Such data equals that of an undisturbed run without loader processes, unless the number of workers changes.
    """
    number = setting.rng.randrange(1, 3)
    drawn += [f"data.num_workers={number}", *draw_faults(setting.rng, setting.layout)]
    words = (*FAULTY, drawn[0], f"recovery.chaos=[{','.join(drawn[1:])}]")
    run = train(setting, *words)
    if setting.layout.tolerance is None or any("[" in word for word in setting.layout.words):
        return run
    noisy = ("job._target_=stalling_job.Stalling", "job.noise=0.1")
    here, there = (train(setting.part(name), *noisy, *more) for name, more in (("here", ()), ("there", words)))
    return replace(run, problems=tuple(differences(there.outcome, here.outcome, setting.layout.tolerance)))


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
    with filling_disk(setting, step, None):
        run = train(setting, *HEALTHY, "job.loss_s=0.05")
    contradiction = run.exit_code != 0 and run.outcome.weights is not None
    return replace(run, problems=(f"exit {run.exit_code}, but the last checkpoint is there",) * contradiction)


def full_for_one_write(setting: Setting, drawn: list[str]) -> Ended:
    """The file system of the run directory is full for a moment, in which a better checkpoint may be due."""
    step, pause_s = setting.rng.randrange(CHECKPOINT_EVERY - 1, STEPS - 2), setting.rng.uniform(0.3, 1.5)
    drawn += [f"full after step {step} for {pause_s:.1f} s"]
    with filling_disk(setting, step, pause_s):
        return with_best(setting, train(setting, *HEALTHY, *KEEPS_BEST, "job.loss_s=0.05"))


@contextlib.contextmanager
def filling_disk(setting: Setting, step: int, pause_s: float | None) -> Iterator[None]:
    """Fill the file system of the run directory after ``step``, for ``pause_s``; None if until the end of the block."""
    setting.output_dir.mkdir()

    def fill(over: threading.Event) -> None:
        wait_for(lambda: over.is_set() or last_step(setting) >= step, f"step {step}")
        filler = setting.output_dir / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while not over.is_set():
                file.write(bytes(4096))
        over.wait(pause_s)
        filler.unlink()

    with mounted(setting.output_dir, "-t", "tmpfs", "-o", FULL_DISK, "tmpfs"), beside(fill):
        yield


def death_in_save_of_best(setting: Setting, drawn: list[str]) -> Ended:
    """A worker dies when a better checkpoint is saved, or in the next step, while it may still be written."""
    step, rank = setting.rng.choice(range(CHECKPOINT_EVERY, STEPS, CHECKPOINT_EVERY)), setting.layout.ranks
    rank = setting.rng.choice((0, setting.rng.randrange(rank)))
    drawn += [setting.rng.choice((f"kill@{step}:{rank}:checkpoint", f"kill@{step + 1}:{rank}"))]
    return with_best(setting, train(setting, *FAULTY, *KEEPS_BEST, f"recovery.chaos=[{','.join(drawn)}]"))


def with_best(setting: Setting, run: Ended) -> Ended:
    """Return how a run of one directory ended, with a problem if it has lost the checkpoint of its best evaluation."""
    directory, best = run_dir(setting), run.record.get("best")
    found = CheckpointStore(directory.checkpoints, None).best()
    is_there = best is not None and found is not None and found.step == best["step"]
    is_there = is_there and path_of(directory.checkpoints, best["step"]).is_dir()
    return replace(run, problems=(f"best: {best} by run.json, {found} by the checkpoints",) * (not is_there))


def busy_machine(setting: Setting, drawn: list[str]) -> Ended:
    """Other processes use all cores from before the run until its upload has ended."""
    with other_processes(drawn), launched(setting, *HEALTHY, address="local") as process:
        return uploaded_process(setting, process)


@contextlib.contextmanager
def other_processes(drawn: list[str]) -> Iterator[None]:
    """Keep more processes than there are cores busy during the block."""
    count = len(os.sched_getaffinity(0)) + 1
    drawn += [f"{count} other processes"]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            # In a session of its own, it competes as another user's process does (sched_autogroup).
            busy = subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True)
            stack.callback(kill_tree, busy)
        yield


def small_tmpdir(setting: Setting, drawn: list[str]) -> Ended:
    """TMPDIR is a file system that is smaller than the log of a rank, which the upload copies."""
    log_kb = setting.rng.randrange(200, 400)
    drawn += [f"job.log_kb={log_kb}"]
    folder = setting.folder / "tmp"
    folder.mkdir()
    words = (*HEALTHY, f"job.log_kb={log_kb}", f"cluster.env.TMPDIR={folder}")
    with (
        mounted(folder, "-t", "tmpfs", "-o", SMALL_DISK, "tmpfs"),
        launched(setting, *words, environment={"TMPDIR": str(folder)}) as process,
    ):
        return uploaded_process(setting, process)


def cut_json(setting: Setting, drawn: list[str]) -> Ended:
    """Every step prints the beginning of a sample in JSON, with a field that has the name of a secret."""
    drawn += [f"job.cut_json={setting.rng.choice((100, 3000, 300_000))}"]
    return train(setting, *HEALTHY, *drawn)


def uploaded_process(setting: Setting, process: subprocess.Popen[bytes]) -> Ended:
    """Wait for the end of a command and for its upload, and read what its run has left behind."""
    process.wait(TRIAL_TIMEOUT_S)
    run = ended_process(setting, process)
    return replace(run, problems=tuple(wrong_upload(setting, [run])))


KINDS = {
    "worker faults": Kind(disturb=worker_faults, loses_workers=True),
    "loader processes": Kind(disturb=loader_processes, loses_workers=True),
    "slow file system": Kind(disturb=slow_file_system),
    "clock step": Kind(disturb=clock_step),
    "lost fence": Kind(disturb=lost_fence),
    "full disk": Kind(disturb=full_disk, exit_codes=(0, 3), tracked=True),
    "full for one write": Kind(disturb=full_for_one_write, exit_codes=(0, 3)),
    "death in a save of the best": Kind(disturb=death_in_save_of_best, loses_workers=True),
    "second driver": Kind(disturb=second_driver, tracked=True),
    "two resume at once": Kind(disturb=two_resume, tracked=True),
    "reader on a node": Kind(disturb=reader_on_node),
    "two users": Kind(disturb=two_users, exit_codes=(0, STOPPED), tracked=True),
    "sweep and run": Kind(disturb=sweep_and_run, tracked=True),
    "busy machine": Kind(disturb=busy_machine, tracked=True),
    "small TMPDIR": Kind(disturb=small_tmpdir, tracked=True),
    "cut JSON": Kind(disturb=cut_json),
    "stalls": Kind(disturb=stalls),
}
