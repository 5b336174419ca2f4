"""Run the rows of the table of faults, and check what each of them promises."""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from helpers.conformance.cases import Case, having
from helpers.conformance.reference import trained_plainly
from helpers.conformance.training import losses
from helpers.faults.layouts import ALL_LAYOUTS, CLOSE, EXACT, Tolerance
from helpers.faults.outcome import Outcome, differences, outcome_of
from helpers.faults.table import EVERY, STEPS, Row
from helpers.ranks.job_trials import one_thread
from helpers.records.runs import events, events_below, series, wait_for
from jobs.digits import Digits
from orchestrator.planning.faults import Fault

WORDS = (
    f"train.steps={STEPS}",
    "train.log_every=1",
    f"train.eval_every={EVERY}",
    f"checkpoint.every={EVERY}",
    "recovery.backoff_s=0.1",
    "recovery.hang_min_s=30",
    "recovery.hang_max_s=60",
    "cluster.stopped_timeout_s=1",
)
REPORTING = "helpers.jobs.faulty_jobs.Reporting"
WITH_REPORTS = (*WORDS, f"job._target_={REPORTING}", "callbacks=[helpers.jobs.faulty_jobs.Begins]")
NOT_COMPUTED = ("recovery.", "cluster.", "checkpoint.", "resume=")
"""Keys that change nothing in what an undisturbed run computes."""
UNTRAINED_LOSS = math.log(10)
_UNDISTURBED: dict[tuple[str, ...], Outcome] = {}
REASONS = {
    "raise": "RuntimeError: planned by recovery.chaos: raise@",
    "exit": "its process .* died",
    "kill": "its process .* died",
    "segv": r"crashed: SIGSEGV \(Segmentation fault\) in string_at",
    "stop": r"is stopped \(SIGSTOP",
    "sleep": "no progress for",
    "gil": "no progress for",
}
"""What the run says of a lost worker."""
NOT_JOINED = "^no progress while the others waited 12 s for it .cluster.rendezvous_timeout_s.$"


@contextmanager
def slow_until(folder: Path, *, recoveries: int) -> Iterator[tuple[str, ...]]:
    """Return the words with which the run below ``folder`` is slow until it has recovered so many times."""

    def hurry() -> None:
        wait_for(lambda: len(events_below(folder, "recovered")) >= recoveries, f"recovery {recoveries}")
        (folder / "until").touch()

    waiting = threading.Thread(target=hurry, daemon=True)
    waiting.start()
    yield ("job.pause_ms=300", f"job.until={folder / 'until'}")
    waiting.join(10)


def keys_of(words: tuple[str, ...]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def merged(*words: str) -> tuple[str, ...]:
    """Return overrides, of each key the last one."""
    return tuple(f"{key}={value}" for key, value in keys_of(words).items())


def plain_outcome(words: tuple[str, ...]) -> Outcome:
    """Train the digits of a run with these overrides in plain torch."""
    keys = keys_of(words)
    kinds = {"job.hidden": int, "job.lr": float, "job.momentum": float}
    job = Digits(**{key.removeprefix("job."): kind(keys[key]) for key, kind in kinds.items() if key in keys})
    batch, steps = int(keys.get("train.global_batch_size", 64)), int(keys["train.steps"])
    with one_thread():
        seen = trained_plainly(Case(job=job, train=having(steps=steps, global_batch_size=batch), seed=0)).steps
    return Outcome(losses=dict(enumerate(losses([seen]).tolist(), 1)), weights=seen.model)


def checked(
    run: Callable[..., Any],
    row: Row,
    words: tuple[str, ...] = WITH_REPORTS,
    *,
    tolerance: Tolerance | None = None,
) -> Any:
    """Return the result of a run that keeps the promises of ``row``.

    Args:
        run: starts a run in the current directory, an empty one.
        row: the row.
        words: the overrides of all runs.
        tolerance: between this run and an undisturbed one; None to compare as the row says.
    """
    words = merged(*words, *ALL_LAYOUTS[row.layout].words, *row.overrides)
    faults = ",".join(str(fault) for group in row.faults for fault in group)
    with slow_until(Path.cwd(), recoveries=2) if row.workers else nullcontext(()) as slow:
        result = run(*words, *slow, *(f"recovery.chaos=[{faults}]",) * row.injected)
    assert (result.status, result.exit_code) == ("FINISHED", 0), result.reason
    assert_recovered(row, result)
    assert_kept(result.run_dir)
    keys = keys_of(words)
    if keys.get("job._target_") == REPORTING:
        assert_reported(row, result.run_dir)
    found = assert_complete(result, steps=int(keys["train.steps"]), every=int(keys["train.eval_every"]))
    if row.weights == "learned":
        assert found.losses[STEPS] < 0.97 * UNTRAINED_LOSS
    elif row.weights == "close" and tolerance is None:
        assert differences(found, plain_outcome(words), CLOSE) == []
    else:
        assert differences(found, undisturbed(run, words), tolerance or EXACT) == []
    return result


def assert_complete(result: Any, *, steps: int, every: int) -> Outcome:
    """Return what a run has computed, which has reported every step and every evaluation once."""
    found = outcome_of(result.run_dir, steps)
    assert result.summary["steps"] == steps
    assert sorted(found.losses) == list(range(1, steps + 1))
    evaluated = [step for name, step in found.evaluations if name == "val/loss"]
    assert evaluated == list(range(every or steps, steps + 1, every or steps))
    assert found.weights
    return found


def undisturbed(run: Callable[..., Any], words: tuple[str, ...]) -> Outcome:
    """Return the outcome of a run without faults, which is trained once."""
    words = tuple(word for word in words if not word.startswith(NOT_COMPUTED))
    if words not in _UNDISTURBED:
        result = run(*words)
        assert result.exit_code == 0, result.reason
        _UNDISTURBED[words] = outcome_of(result.run_dir, STEPS)
    return _UNDISTURBED[words]


def assert_recovered(row: Row, result: Any) -> None:
    """Assert that a run has recovered as ``row`` says, and has recorded that."""
    recovered = events(result.run_dir, "recovered")
    failures = [event for event in recovered if event["planned"] is None]
    for event, lost, faults, steps in zip(failures, lost_workers(result.run_dir), row.faults, row.steps, strict=True):
        assert event["step"] in steps, event
        assert event["in_place"] == (row.source in ("in place", "copies"))
        assert event["steps_lost"] == max(0, max(each["step"] for each in lost) - event["step"])
        assert event["steps_lost"] == 0 or row.source != "in place" or len(steps) > 1
        assert_lost(lost, faults, injected=row.injected, generation=event["generation"] - 1)
        hit = [fault.rank for fault in faults if fault.step == faults[0].step]
        hit = [faults[-1].rank] if faults[-1].phase == "build" else sorted(hit)
        if not row.workers and faults[0].phase != "connect":  # who connects with NCCL cannot be freed
            assert event["replaced"] == hit
    summary = result.summary
    assert (summary["restarts"], summary["steps_lost"]) == (len(failures), sum(e["steps_lost"] for e in recovered))
    assert summary["recovery_s"] == pytest.approx([event["seconds"] for event in failures])
    sizes = [(event["num_workers_before"], event["num_workers"], event["planned"]) for event in recovered]
    _, fewer, most = row.workers or (0, sizes[0][0], sizes[0][0])
    assert sizes == [(most, fewer, None)] * len(failures) + [(fewer, most, "growing")] * bool(row.workers)


def lost_workers(run_dir: Path) -> list[list[dict[str, Any]]]:
    """Return the workers that were lost before each recovery from that."""
    lost: list[list[dict[str, Any]]] = [[]]
    for event in events(run_dir, "worker_lost", "recovered"):
        if event["event"] == "worker_lost":
            lost[-1].append(event)
        elif event["planned"] is None:
            lost.append([])
    assert lost.pop() == []
    return lost


def assert_lost(lost: list[dict[str, Any]], faults: tuple[Fault, ...], *, injected: bool, generation: int) -> None:
    """Assert that only workers were lost that the faults hit, each once, and for the reasons of injected faults."""
    by_rank = {fault.rank: fault for fault in faults}
    assert len({event["rank"] for event in lost}) == len(lost) > 0
    for event in lost:
        fault = by_rank[event["rank"]]
        wanted = NOT_JOINED if (fault.kind, fault.phase) == ("sleep", "join") else REASONS[fault.kind]
        assert re.search(wanted, event["reason"]) or not injected, event["reason"]
        if fault.kind == "segv":
            assert "control.py" in event["log_tail"], "the Python stack"
            assert "ffi_call" in event["log_tail"], "the C stack"
        if fault.kind in ("sleep", "gil") and fault.phase == "train":
            stacks = Path(event["log"]).with_name(f"stacks-generation-{generation}.txt").read_text()
            assert "training thread:" in stacks.split(f"==== rank {fault.rank}")[0]


def assert_kept(run_dir: Path) -> None:
    """Assert that the survivors of each recovery are the same processes, and the others are new ones."""
    workers = {event["generation"]: event["workers"] for event in events(run_dir, "generation_started")}
    for event in events(run_dir, "recovered"):
        before, after = workers.get(event["generation"] - 1, ()), workers[event["generation"]]
        if len(before) == len(after):
            anew = [rank for rank, pair in enumerate(zip(before, after, strict=True)) if len({*pair}) > 1]
            assert anew == event["replaced"]


def assert_reported(row: Row, run_dir: Path) -> None:
    """Assert that the callbacks of the job ``Reporting`` were called once, their error reported once, and its samples
    saved once.
    """
    recovered, begins = events(run_dir, "recovered"), (run_dir / "begins").read_text().splitlines()
    for event in recovered:
        generation = f"generation {event['generation']}: "
        expected = [f"{generation}rank {rank} after {event['step']}" for rank in range(ALL_LAYOUTS[row.layout].ranks)]
        assert sorted(line for line in begins if line.startswith(generation)) == expected
    assert series(run_dir, "train/accuracy").keys() == {*range(1, STEPS + 1)}
    if row.source == "in place":
        samples = [(event["step"], event["name"]) for event in events(run_dir, "sample_saved")]
        assert samples == [*itertools.product(range(EVERY, STEPS + 1, EVERY), ("image", "text"))]
        warnings = [event["message"] for event in events(run_dir, "warned")]
        raised = [w for w in warnings if "job.on_step_end raised RuntimeError: the service" in w]
        assert len(raised) == 1 + sum(0 in e["replaced"] and e["step"] < STEPS for e in recovered)
