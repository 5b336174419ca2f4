"""The kinds of trouble of the campaign in which other commands are at work: on the run itself, or with other runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections import Counter
from dataclasses import replace

import ray

from campaigns.commands import (
    HEALTHY,
    beside,
    ended_process,
    gcs_address,
    last_step,
    last_words,
    launched,
    run_dir,
    run_dirs,
    verb_problems,
)
from campaigns.trial import (
    CHECKPOINT_EVERY,
    STEPS,
    STOPPED,
    TRIAL_TIMEOUT_S,
    Ended,
    Setting,
    ended,
    train,
)
from helpers.faults.layouts import Layout
from helpers.machines.disks import require_mounts
from helpers.machines.nodes import node_with_its_own
from helpers.records.runs import wait_for
from orchestrator.records.rank_log import LogReader
from orchestrator.state.checkpoint import list_checkpoints

ANOTHER_BOOTTIME = ("unshare", "--map-root-user", "--time", "--boottime", "86400")
"""Runs a command in a time namespace, whose clock of the time since boot is a day ahead."""
READERS = (("runs",), ("show", "last"), ("logs", "last"), ("compare", "--no-picture"))
"""Verbs that read runs, with their arguments."""
STOPS = (("stop",), ("queue", "cancel"))
"""Verbs that stop the run whose directory follows."""


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


def reader_on_node(setting: Setting, drawn: list[str]) -> Ended:
    """Verbs read the run again and again on the node of its workers; the run is on a store, its driver on another node.

    Each node stages the store in a directory of its own. The run that counts is the one on the store.
    """
    require_mounts()
    step = setting.rng.choice((0, setting.rng.randrange(STEPS)))
    readers = setting.rng.sample(READERS, len(READERS))
    drawn += [f"after step {step}:", *(verb for verb, *_ in readers)]
    setting = replace(setting, scheme="file://")
    temporary = setting.folder / "tmp"
    temporary.mkdir()
    problems: list[str] = []

    def read(over: threading.Event) -> None:
        on_node = ("nsenter", f"--target={node}", "--mount", "--uts", "env", f"TMPDIR={temporary}")
        wait_for(lambda: over.is_set() or (run_dirs(setting) and last_step(setting) >= step), f"step {step}")
        for words in itertools.cycle(readers):
            if over.is_set():
                break
            problems.extend(verb_problems(setting, *words, "--output-dir", setting.location, prefix=on_node))

    overrides = (
        "job.loss_s=0.3",
        f"storage.staging_dir={temporary}/orchestrator-{os.getuid()}",
        "storage.upload_every_s=0.5",
        f"cluster.exclude_nodes=[{socket.gethostname()}]",
    )
    workers = setting.layout.ranks + setting.layout.spares
    with (
        node_with_its_own(temporary, gcs_address(), count_nodes, num_cpus=workers, name="of-workers") as node,
        beside(read),
    ):
        run = train(setting, *HEALTHY, *overrides)
    stored = run_dir(setting)
    starts = Counter(line.rank for line in LogReader(stored).read() if line.text.startswith("worker process "))
    if any(starts[rank] != 1 for rank in range(setting.layout.ranks)):
        problems.append(f"the logs on the store tell of so many workers: {dict(starts)}")
    return replace(ended(stored, exit_code=run.exit_code, reason=run.reason), problems=tuple(problems))


def count_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def two_users(setting: Setting, drawn: list[str]) -> Ended:
    """Two users start runs at once on CPUs for one, and one of them stops their own run, which trains or waits."""
    rng = setting.rng
    step, state, stop = rng.randrange(STEPS // 2), rng.choice(("running", "waiting")), rng.choice(STOPS)
    drawn += [f"{' '.join(stop)} of the run that is {state}, after step {step}"]
    users = {name: setting.part(name) for name in ("anna", "ben")}
    slow = (*HEALTHY, "job.loss_s=0.4", cpus_for(setting.layout, 1))

    def by_state() -> dict[str, str]:
        return {run.read_record()["state"]: name for name, own in users.items() for run in run_dirs(own)}

    with contextlib.ExitStack() as stack:
        commands = {
            name: stack.enter_context(launched(own, *slow, environment={"LOGNAME": name}))
            for name, own in users.items()
        }
        names = wait_for(
            lambda: (found := by_state()).keys() == {"running", "waiting"} and found,
            "a run that trains and one that waits",
        )
        wait_for(lambda: last_step(users[names["running"]]) >= step, f"step {step}")
        stopper = names.pop(state)
        (other,) = names.values()
        words = (*stop, str(run_dir(users[stopper]).path))
        problems = verb_problems(users[stopper], *words, environment={"LOGNAME": stopper, "RAY_ADDRESS": gcs_address()})
        for command in commands.values():
            command.wait(TRIAL_TIMEOUT_S)
    stopped, run = (ended_process(users[name], commands[name]) for name in (stopper, other))
    if (codes := (stopped.exit_code, run.exit_code)) != (STOPPED, 0):
        problems.append(f"exit codes {codes[0]} of the stopped run and {codes[1]} of the other one")
    if (who := f"of {stopper} on {socket.gethostname()}") not in stopped.record.get("reason", ""):
        problems.append(f"stopped {who}, but run.json says: {stopped.record.get('reason')}")
    return replace(run, problems=tuple(problems), others=(stopped,))


def sweep_and_run(setting: Setting, drawn: list[str]) -> Ended:
    """A sweep of two runs, in turn or side by side, and a run of another command compete for the CPUs of one or two."""
    rng = setting.rng
    parallel, priority, room = rng.choice((1, 2)), rng.choice((0, 1)), rng.choice((1, 2))
    drawn += [f"sweep.parallel={parallel}", f"cluster.priority={priority}", f"room for {room}"]
    sweep, alone = setting.part("sweep"), setting.part("alone")
    slow = (*HEALTHY, "job.loss_s=0.1", cpus_for(setting.layout, room))
    sweep_words = ("-m", "checkpoint.keep=3,4", f"sweep.parallel={parallel}")
    with (
        launched(sweep, *slow, *sweep_words) as of_sweep,
        launched(alone, *slow, f"cluster.priority={priority}") as of_run,
    ):
        for command in (of_sweep, of_run):
            command.wait(TRIAL_TIMEOUT_S)
    problems = [] if of_sweep.returncode == 0 else [f"the sweep: exit {of_sweep.returncode}: {last_words(sweep)}"]
    of_the_sweep = tuple(ended(run, exit_code=of_sweep.returncode, reason="of the sweep") for run in run_dirs(sweep))
    if len(of_the_sweep) != 2:
        problems.append(f"the sweep has {len(of_the_sweep)} runs")
    return replace(ended_process(alone, of_run), problems=tuple(problems), others=of_the_sweep)


def cpus_for(layout: Layout, runs: int) -> str:
    """Return the override with which this Ray has room for so many runs of the layout and no more."""
    share = ray.cluster_resources()["CPU"] / (layout.ranks + layout.spares) / runs
    return f"cluster.cpus_per_worker={share}"
