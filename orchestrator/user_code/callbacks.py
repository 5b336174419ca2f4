"""What a run tells the code of the user while it trains, and what the evaluations of a run may change."""

from __future__ import annotations

import contextlib
import json
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from orchestrator.user_code.errors import JobError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class RunBegin:
    """The state from which a run begins or continues.

    Attributes:
        step: the last completed step; 0 in a run that begins anew.
        steps: the steps of the run, ``train.steps``.
        generation: 1, and one more after each failure or pause that the run has survived.
        rank: the rank of this process.
        world_size: the number of ranks.
        run_dir: the run directory.
    """

    step: int
    steps: int
    generation: int
    rank: int
    world_size: int
    run_dir: Path


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """A completed training step.

    Attributes:
        step: the step, from 1 to ``steps``.
        steps: the steps of the run, ``train.steps``.
        samples_seen: samples that the whole run has trained on.
        loss: the mean loss of the step over this rank's samples, a scalar on the device; reading its value waits for
            the device. NaN if this rank computes no loss, as the first stage of a pipeline.
        lr: the learning rate of the next step; with several parameter groups, the rate of the first.
        model: the whole model after the step, on rank 0; None on other ranks, and if no worker has all of it.
    """

    step: int
    steps: int
    samples_seen: int
    loss: Tensor
    lr: float
    model: nn.Module | None


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is complete.

    Attributes:
        step: the last step in it.
        path: its directory, or its URL if ``output_dir`` is one.
    """

    step: int
    path: str


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """The end of a run that has not failed.

    Attributes:
        step: the last completed step.
        stopped: whether the run was stopped, and can be resumed.
        reason: why the run ends before all of its steps, as ``train.stop_after`` or a callback says; None otherwise.
    """

    step: int
    stopped: bool
    reason: str | None


class Callback:
    """A part of a run that reports what it sees, and does not change the training.

    ``callbacks=[my_package.Beep]`` adds one to any job, and ``callbacks=[{_target_:my_package.Beep,every:10}]`` gives
    arguments to its ``__init__``. A :class:`~orchestrator.Job` is the first callback of its own run. Callbacks are
    called in order, in the training thread, so hand slow work to a thread. An object lives as long as its process: a
    worker that replaces a lost one has a new object.

    Gradients are off, the random generators and the modes of the modules are restored, and a change of a parameter or a
    buffer ends the run. ``SystemExit`` ends the run as a failure.
    """

    every_rank: ClassVar[bool] = False
    """Whether every rank calls it; otherwise rank 0 alone does."""

    may_stop: ClassVar[bool] = False
    """Whether :meth:`on_evaluation_end` may end the run."""

    errors_end_run: ClassVar[bool] = False
    """Whether an exception ends the run; otherwise it is a warning, once for each text, and training continues."""

    def on_run_begin(self, info: RunBegin) -> None:
        """Take note that training begins, or continues after a resume, a failure or a pause.

        Steps after ``info.step`` that were reported before are made again.
        """

    def on_step_end(self, info: StepEnd) -> None:
        """Take note of a completed step. A step that is repeated after a failure is reported again."""

    def on_evaluation_end(self, info: Evaluation) -> str | None:
        """Take note of an evaluation, with the metrics over all ranks.

        Returns:
            None, or if the callback :attr:`may_stop`, why the run ends. The answer of rank 0 counts.
        """
        return None

    def on_checkpoint_saved(self, info: SavedCheckpoint) -> None:
        """Take note of a checkpoint, at the first logged step after it is complete, or at the end.

        Rank 0 alone calls this: the others do not know.
        """

    def on_run_end(self, info: RunEnd) -> None:
        """Take note that the run has ended, and its last checkpoint is saved. A run that fails does not call this."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""The methods that a run calls."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation that has ended.

    Attributes:
        step: the step after which it was made.
        metrics: its metrics over all ranks, under the names that are logged, such as ``val/loss``.
    """

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Steering:
    """What holds from the next step on; what is not given is as without evaluations.

    Attributes:
        lr_factor: what every learning rate is multiplied by, of what :meth:`Job.scheduler` or the optimizer says.
        stop: why the run ends, which is shown at its end; None to go on.
        fields: values of fields of the job, by name; only those in :attr:`Job.steerable`.

    Raises:
        JobError: a value cannot be used.
    """

    lr_factor: float = 1.0
    stop: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        factor = self.lr_factor
        if not isinstance(factor, numbers.Real) or isinstance(factor, bool) or not 0 <= float(factor) < math.inf:
            raise JobError(f"Steering(lr_factor={factor!r}): give a number of at least 0")
        if not (self.stop is None or (isinstance(self.stop, str) and self.stop)):
            raise JobError(f"Steering(stop={self.stop!r}): give a text that says why the run ends, or None")
        try:
            json.dumps(dict(self.fields))
        except (TypeError, ValueError) as e:
            raise JobError(
                f"Steering(fields=...): {e}; give numbers, texts, lists and dicts by the names of fields"
            ) from e


_step = 1  # of all threads: replicas and backward passes have threads of their own
_on_read: Callable[[], None] | None = None


def current_step() -> int:
    """Return the step that is being made, from 1, for example in ``Job.loss`` and ``Job.training_step``.

    It is the same on all ranks of a synchronous strategy, and after a resume or a failure. In an evaluation, it is the
    step after which that is made. A model that is compiled should not call this, because it would be compiled again for
    each number.
    """
    if _on_read is not None:
        _on_read()
    return _step


@contextlib.contextmanager
def reading_steps(on_read: Callable[[], None]) -> Iterator[None]:
    """Call ``on_read`` at each call of :func:`current_step` in the block."""
    global _on_read
    _on_read = on_read
    try:
        yield
    finally:
        _on_read = None


def set_current_step(step: int) -> None:
    """Let :func:`current_step` return ``step``."""
    global _step
    _step = step
