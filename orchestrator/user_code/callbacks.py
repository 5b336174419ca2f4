"""What a run tells the code of the user while it trains, and the base class of what is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from orchestrator.user_code.steering import Evaluation

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
