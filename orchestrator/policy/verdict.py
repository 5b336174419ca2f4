"""How a run ended: its status, its exit code and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

REFUSED = 2
"""The exit code of a run that could not begin because of what it asks for."""
RESULT_LOST = 3
"""The exit code of a run that has completed its steps without saving the result, or all of its records."""


@dataclass(frozen=True)
class Verdict:
    """How a run ended.

    Attributes:
        reason: why it ended; empty if it has done all its steps.
    """

    status: Literal["FINISHED", "PRUNED", "FAILED", "KILLED"]
    exit_code: int
    reason: str = ""


def completed(step: int, *, ended_early: str | None = None, checkpoint_missing: str | None) -> Verdict:
    """Return the verdict on a run that has done all its steps, the last of them ``step``, or has ended early.

    Args:
        step: the last step.
        ended_early: why there are no further steps; None if there were to be none.
        checkpoint_missing: why the last checkpoint is missing, as a predicate; None if it is there.
    """
    if checkpoint_missing is None:
        return Verdict("FINISHED", 0, "" if ended_early is None else f"ended early: {ended_early}")
    done = f"all {step} steps are done" if ended_early is None else f"{step} steps are done ({ended_early})"
    lost = f"{done}, but their result is lost: the checkpoint of step {step} {checkpoint_missing}"
    return Verdict("FAILED", RESULT_LOST, lost)


def pruned(step: int) -> Verdict:
    """Return the verdict on a run that a search has ended after ``step``, because others were better there."""
    return Verdict("PRUNED", 0, f"pruned at step {step}")


def failed(reason: str) -> Verdict:
    """Return the verdict on a run that could not go on because of ``reason``."""
    return Verdict("FAILED", 1, reason)


def refused(reason: str) -> Verdict:
    """Return the verdict on a run that has not begun because of ``reason``, and must be changed to do so."""
    return Verdict("FAILED", REFUSED, reason)


def stopped(
    signal_number: int,
    cause: str,
    *,
    at_step: int | None,
    trained: bool,
    checkpoint_missing: str | None = None,
    runs_script: bool = False,
) -> Verdict:
    """Return the verdict on a run that was stopped by a signal.

    Args:
        signal_number: the signal.
        cause: who sent it, in words.
        at_step: the step after which all ranks have stopped; None if they have not.
        trained: whether any step was done.
        checkpoint_missing: why there is no checkpoint of ``at_step``, as a predicate; None if there is one.
        runs_script: whether a script trains, which need not report steps and saves what it needs itself.
    """
    if runs_script:
        when = f"at step {at_step}" if at_step else "while its script ran" if trained else "before its first report"
    elif at_step is not None:
        when = f"at step {at_step}" + (f"; its checkpoint {checkpoint_missing}" if checkpoint_missing else "")
    elif trained:
        when = "without a last checkpoint"
    else:
        when = "before training began"
    return Verdict("KILLED", 128 + signal_number, f"stopped by {cause} {when}")
