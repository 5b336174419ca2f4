"""A rank that fails ends the run with its own reason, and leaves nothing behind."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.records.runs import events

SHORT = ("strategy=ddp", "train.steps=40", "train.eval_every=0", "recovery.max_failures=0")


def test_too_little_memory_is_explained_although_no_group_can_be_destroyed(run: Callable[..., Any]) -> None:
    result = run(*SHORT, "job._target_=helpers.jobs.faulty_jobs.OutOfMemory")
    assert (result.status, result.exit_code) == ("FAILED", 1)
    assert result.reason.startswith("rank 1 failed at step 4: CPU out of memory: tried to allocate 1073741824.00 GiB; ")
    assert "largest tensors: " in result.reason
    assert "weight (parameter, " in result.reason
    assert "train.grad_accumulation=1" in result.reason
    (failure,) = events(result.run_dir, "worker_failed")
    assert failure["rank"] == 1
    assert "torch.empty(2**60, dtype=torch.uint8)" in failure["traceback"]
    assert failure["log"].endswith("rank-1.log")
    assert "Cannot allocate memory" in failure["log_tail"]
    for number in (0, 1):
        lines = (result.run_dir / "logs" / f"rank-{number}.log").read_text().splitlines()
        assert {line for line in lines if line.startswith("listens on")} == {"listens on ['127.0.0.1']"}


@pytest.mark.campaign
def test_crash_names_the_signal_and_shows_both_stacks(run: Callable[..., Any]) -> None:
    result = run(*SHORT, "job._target_=helpers.jobs.faulty_jobs.Faulty", "job.how=segfault")
    assert result.exit_code == 1
    (failure,) = events(result.run_dir, "worker_failed")
    assert failure["rank"] == 1
    assert "crashed: SIGSEGV (Segmentation fault) in string_at" in result.reason
    assert "faulty_jobs.py" in failure["log_tail"]
    assert "ffi_call" in failure["log_tail"]


@pytest.mark.campaign
def test_a_worker_that_lives_is_not_reported_as_dead(run: Callable[..., Any]) -> None:
    result = run(*SHORT, "job._target_=helpers.jobs.faulty_jobs.Secretive", "job.hidden=16")
    assert result.exit_code == 1
    assert "lives, but a call to it failed: " in result.reason
    assert "this outcome stays here" in result.reason
    (failure,) = events(result.run_dir, "worker_failed")
    assert "in _stay" in failure["traceback"]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("how", "reason"),
    [("raise", "a call to it failed: OSError: no port is free"), ("hang", "has not opened the rendezvous store")],
)
def test_a_rank_that_cannot_open_the_store_is_replaced(
    run: Callable[..., Any], tmp_path: Path, how: str, reason: str
) -> None:
    job = ("job._target_=helpers.jobs.faulty_jobs.NoStore", f"job.marker={tmp_path / 'marker'}", f"job.how={how}")
    words = ("recovery.max_failures=2", "recovery.chaos=[kill@13:1]", "cluster.rendezvous_timeout_s=15")
    result = run("strategy=ddp", "train.steps=40", "train.eval_every=0", *job, *words)
    assert result.exit_code == 0, result.reason
    assert [(e["rank"], e["step"]) for e in events(result.run_dir, "worker_lost")] == [(1, 12), (0, 12)]
    assert reason in events(result.run_dir, "worker_lost")[1]["reason"]


FIRST = "rank 0 failed at step 4: RuntimeError: the planted fault"
KILLED = "rank 1 failed at step .* died without a report: killed by SIGKILL from outside"
NO_DATA = r".*failed at step 0: job\.dataset\('train'\): the dataset is empty; give it at least one sample$"
ASYNC = ("strategy=parameter_server", "strategy.num_shards=1", "strategy.consistency=async")
DIVERGING = (*ASYNC, "job.lr=1e6", "job.hidden=64", "train.steps=50")


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("words", "reason", "num_lost"),
    [
        ((*SHORT, "job._target_=helpers.jobs.faulty_jobs.Faulty", "job.rank=0"), FIRST, 0),
        ((*SHORT, "job._target_=helpers.jobs.faulty_jobs.Faulty", "job.how=kill"), KILLED, 0),
        (("job._target_=helpers.jobs.faulty_jobs.NoData",), NO_DATA, 0),
        (DIVERGING, ".*set strategy.consistency=sync", 0),
        (("recovery.chaos=[kill@13:1,kill@13:1,kill@13:1]",), ".*3 failures in a row without progress", 2),
        (("recovery.chaos=[raise@13:1,raise@13:1]",), ".*the same error occurred twice at the same step", 1),
    ],
    ids=["an error of the first rank", "a death", "no data", "a divergence", "a crash loop", "an error twice"],
)
def test_the_cause_is_said_once(run: Callable[..., Any], words: tuple[str, ...], reason: str, num_lost: int) -> None:
    result = run("strategy.num_workers=2", *words)
    assert (result.status, result.exit_code) == ("FAILED", 1)
    assert re.match(reason, result.reason, re.DOTALL), result.reason
    (failure,) = events(result.run_dir, "worker_failed")
    assert failure["rank"] in (0, 1)
    assert "Traceback" not in failure["traceback"] + failure["log_tail"] or "dataset" not in reason
    assert len(events(result.run_dir, "worker_lost")) == num_lost
