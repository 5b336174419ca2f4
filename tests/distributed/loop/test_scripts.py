"""Scripts that run under torchrun, on two ranks of ``strategy=script``, without Ray."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from helpers.ranks.script_runs import SCRIPTS, outcomes, running
from helpers.records.runs import in_campaign
from orchestrator.features.scripts.script_run import WORK_CHECKS
from orchestrator.policy.hang import awaited
from orchestrator.protocol.events import MetricsLogged
from orchestrator.protocol.messages import Outcome
from orchestrator.storage.remote import Remote

pytestmark = pytest.mark.timeout(300)

PUBLIC = {
    "accelerate_loop.py": ("accelerate", "2 processes: 4 batches each, 2 losses"),
    "trainer.py": ("accelerate", "2 processes: 5 steps, DistributedType.MULTI_CPU"),
    "lightning_fit.py": ("lightning", "2 processes: 4 steps"),
}
"""For each script the library that it needs, and what it prints on rank 0."""
SOON_S = 20
"""Less than the time between two looks at the CPU time of a script, so that something else has woken its worker."""


@pytest.mark.campaign
def test_a_script_does_what_it_does_under_torchrun(tmp_path: Path) -> None:
    with running("torch_ddp.py", tmp_path, args="--lr 0.1") as ranks:
        assert {rank: outcome.status for rank, outcome in outcomes(ranks).items()} == {0: "done", 1: "done"}
        lines = [line for rank in ranks for line in rank.outbox.collect({}).lines if line.startswith("rank")]
    for rank, line in zip((0, 1), lines, strict=True):
        assert re.fullmatch(rf"rank {rank} of 2: loss \d\.\d+, lr 0\.1, attempt 0", line)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPTS / "torch_ddp.py"]
    done = subprocess.run([sys.executable, *command, "--lr", "0.1"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert lines == sorted(re.findall(r"rank .*?attempt \d+", done.stdout))


@pytest.mark.campaign
@pytest.mark.parametrize("script", PUBLIC)
def test_scripts_of_other_libraries_run_as_they_are(script: str, tmp_path: Path) -> None:
    library, line = PUBLIC[script]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    with running(script, tmp_path) as ranks:
        ended = outcomes(ranks)
        assert [(ended[rank].status, ended[rank].failure) for rank in (0, 1)] == [("done", None)] * 2
        ranks[0].heartbeats(line, timeout_s=1)


def test_a_restart_on_another_node_has_what_the_script_saved(tmp_path: Path) -> None:
    store = Remote(f"file://{tmp_path}/store", timeout_s=30)
    for attempts, node in enumerate(("first", "second")):
        with running("saving.py", tmp_path / node, world_size=1, remote=store) as ranks:
            assert outcomes(ranks, timeout_s=SOON_S)[0].status == "done"
            ranks[0].heartbeats(f"after {attempts} attempts", timeout_s=1)


def test_the_scalars_that_a_script_writes_for_tensorboard_are_logged(tmp_path: Path) -> None:
    with running("event_file.py", tmp_path / "run", args=str(tmp_path / "events")) as ranks:
        assert {outcome.step for outcome in outcomes(ranks, timeout_s=SOON_S).values()} == {40, 0}
        told = [event for event in ranks[0].outbox.collect({}).events if isinstance(event, MetricsLogged)]
        assert not any(isinstance(event, MetricsLogged) for event in ranks[1].outbox.collect({}).events)
    assert [(event.step, dict(event.metrics)) for event in told] == [
        (20, {"train/loss": 2.0}),
        (1, {"val/acc": 0.25}),
        (40, {"train/loss": 1.0}),
        (2, {"val/acc": 0.5}),
    ]


def test_an_exception_of_one_rank_is_the_failure(tmp_path: Path) -> None:
    with running("silent.py", tmp_path, args="fail") as ranks:
        ended = outcomes(ranks)
    failure = ended[1].failure
    assert failure is not None
    assert failure.message.startswith("ValueError: told to fail (silent.py:")
    assert not failure.collateral
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    other = ended[0]
    assert other.failure is None or other.failure.collateral


def test_a_stopped_script_may_save(tmp_path: Path) -> None:
    with running("silent.py", tmp_path) as ranks:
        for rank in ranks:
            rank.heartbeats("formed")
        ranks[1].gate.hold(1)
        ranks[1].gate.finish_step(1, 0, save=True)
        assert ranks[1].ends.result(timeout=SOON_S) == Outcome(status="stopped", step=0)
        ranks[1].heartbeats("saved at SIGTERM", timeout_s=1)


@pytest.mark.parametrize("end", ["exits at SIGTERM", *in_campaign("goes on", "fails", "ends")])
@pytest.mark.parametrize("how", ["daemon", "without environment", *in_campaign("child", "session")])
def test_what_a_script_has_started_ends_with_it(tmp_path: Path, how: str, end: str) -> None:
    with running("leaving.py", tmp_path, args=f"'{how}' '{end}'", world_size=1) as (rank,):
        left = rank.lines("left ")[0]
        if end in ("exits at SIGTERM", "goes on"):
            rank.gate.hold(1)
            rank.gate.finish_step(1, 0, save=True)
        outcome = outcomes([rank], timeout_s=SOON_S)[0]
    pid = int(left.split()[1])
    if end == "ends":
        assert outcome.status == "done"
        os.kill(pid, signal.SIGKILL)  # what a script leaves running that ends in order goes on
    elif (how, end) != ("without environment", "fails"):  # which nobody has seen before its parent ended
        assert not psutil.pid_exists(pid)


@pytest.mark.campaign
def test_a_script_that_cannot_save_says_so(tmp_path: Path) -> None:
    with running("silent.py", tmp_path, args="fail-at-stop") as ranks:
        for rank in ranks:
            rank.heartbeats("formed")
            rank.gate.hold(1)
            rank.gate.finish_step(1, 0, save=True)
        ended = outcomes(ranks, timeout_s=SOON_S)
    assert {outcome.status for outcome in ended.values()} == {"stopped"}
    assert ended[1].failure is not None
    assert ended[1].failure.message.startswith("OSError: the disk is full (silent.py:")


@pytest.mark.campaign
def test_a_hanging_script_shows_where_it_is(tmp_path: Path) -> None:
    with running("silent.py", tmp_path) as ranks:
        for rank in ranks:
            rank.heartbeats("formed")
        stacks = [rank.run.stacks() for rank in ranks]
    assert [stack.waiting for stack in stacks] == [True, False]
    enqueued = {rank: stack.flight.enqueued for rank, stack in enumerate(stacks) if stack.flight is not None}
    assert awaited(enqueued) == (1, "operation 2 of group 0 (gloo:all_reduce)")
    assert "silent.py" in stacks[1].text


@pytest.mark.campaign
def test_the_cpu_time_of_a_rank_that_waits_for_another_is_no_progress(tmp_path: Path) -> None:
    look_s = 0.2
    words = ("recovery.hang_min_s=1", f"recovery.hang_max_s={look_s * WORK_CHECKS}")
    with running("spinning.py", tmp_path, *words) as ranks:
        for rank in ranks:
            rank.heartbeats("formed")
        ticks, deadline = [(-1, -1)], time.monotonic() + 60
        while time.monotonic() < deadline and (ticks[-1][0] != ticks[0][0] or ticks[-1][1] == ticks[0][1]):
            time.sleep(look_s)
            ticks = [*ticks, (ranks[0].outbox.collect({}).ticks, ranks[1].outbox.collect({}).ticks)][-10:]
    assert ticks[-1][0] == ticks[0][0]
    assert ticks[-1][1] > ticks[0][1], "nobody knows for whom it waits"
