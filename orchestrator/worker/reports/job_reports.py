"""What the code of the user is told during training: callbacks, and the model to draw samples from."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.config.redact import Redactor
from orchestrator.job import Job
from orchestrator.protocol.events import CheckpointSaved, SampleSaved
from orchestrator.protocol.messages import Assignment, EvalPoint
from orchestrator.records.json_file import write_atomically
from orchestrator.records.run_dir import RunDir
from orchestrator.state.transport import broadcast_json, gather_json
from orchestrator.strategies.base import StepResult, Strategy
from orchestrator.user_code.callbacks import Callback, Evaluation, RunBegin, RunEnd, SavedCheckpoint, StepEnd
from orchestrator.user_code.errors import JobError
from orchestrator.user_code.results import kind_of
from orchestrator.worker.control.control import CutOff, Outbox, Warner
from orchestrator.worker.process.output import print_error
from orchestrator.worker.reports import evaluation


class JobReports:
    """Calls the callbacks of a run, of which the job is the first, and the job's ``sample``.

    An error in them is a warning, and training continues, unless a callback ends the run then.

    Attributes:
        why_stop: why a callback ends the run; None if it goes on.
    """

    def __init__(
        self,
        job: Job,
        callbacks: Sequence[Callback],
        assignment: Assignment,
        *,
        strategy: Strategy,
        device: torch.device,
        outbox: Outbox,
        warner: Warner,
        redactor: Redactor,
        interruptible: evaluation.Interruptible = evaluation.run,
    ):
        """``interruptible``: makes the calls that may be cut off when the ranks have to stop."""
        self.why_stop: str | None = None
        self._interruptible = interruptible
        self._callbacks: dict[str, Callback] = {"job": job}
        self._callbacks |= {f"callbacks[{i}]": callback for i, callback in enumerate(callbacks)}
        self._strategy = strategy
        self._device = device
        self._outbox = outbox
        self._warner = warner
        self._run_dir = RunDir(Path(assignment.run_dir), assignment.remote)
        self._samples = Samples(
            job,
            run_dir=self._run_dir,
            outbox=outbox,
            device=device,
            seed=assignment.config.seed,
            redactor=redactor,
            interruptible=interruptible,
        )
        self.reassign(assignment)

    @property
    def texts(self) -> Mapping[str, str]:
        """The last text of each name that the job has drawn on this rank."""
        return self._samples.texts

    def reassign(self, assignment: Assignment) -> None:
        """Continue with the rank of ``assignment``."""
        self._assignment = assignment

    def run_begins(self, *, step: int) -> None:
        """Tell callbacks that training begins after ``step``, or continues there."""
        assignment = self._assignment
        info = RunBegin(
            step=step,
            steps=assignment.config.train.steps,
            generation=assignment.generation,
            rank=assignment.global_rank,
            world_size=assignment.plan.world_size,
            run_dir=self._run_dir.path,
        )
        self._tell("on_run_begin", info, step=step)

    def step_ended(self, result: StepResult, *, step: int, samples_consumed: int) -> None:
        """Tell callbacks that a step has ended."""
        if not self._called("on_step_end"):
            return
        info = StepEnd(
            step=step,
            steps=self._assignment.config.train.steps,
            samples_seen=samples_consumed,
            loss=result.loss_sum / result.weight,  # a scalar of the host needs no copy
            lr=self._strategy.group_lrs[0],
            model=self._whole_model(),
        )
        self._tell("on_step_end", info, step=step, model=info.model)

    def add(self, point: EvalPoint, *, rank: int, world_size: int, confirm: Callable[[], None]) -> None:
        """Tell callbacks of an evaluation, of which ``point`` is this rank's part; see :meth:`Improvement.add`."""
        on_any_rank = [c for c in self._callbacks.values() if _has_own(c, "on_evaluation_end")]
        if not on_any_rank:
            return
        parts = gather_json(dataclasses.asdict(point), world_size=world_size, device=self._device)
        confirm()
        info = Evaluation(step=point.step, metrics=evaluation.metrics_of(parts))
        reasons = self._tell("on_evaluation_end", info, step=point.step)
        if any(callback.may_stop for callback in on_any_rank):
            if world_size > 1:
                reasons = broadcast_json(reasons, source=0, rank=rank, device=self._device)
                confirm()
            self.why_stop = next((f"{name}: {reason}" for name, reason in reasons.items()), None)

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        """Tell callbacks of a checkpoint."""
        self._tell("on_checkpoint_saved", SavedCheckpoint(step=event.step, path=event.path), step=event.step)

    def run_ended(self, info: RunEnd) -> None:
        """Tell callbacks that the run ends."""
        self._tell("on_run_end", info, step=info.step)

    def _called(self, method: str) -> Mapping[str, Callback]:
        """Return the callbacks that have the method and belong on this rank, by name."""
        is_first = self._assignment.global_rank == 0
        return {n: c for n, c in self._callbacks.items() if _has_own(c, method) and (c.every_rank or is_first)}

    def _tell(self, method: str, info: Any, *, step: int, model: nn.Module | None = None) -> dict[str, Any]:
        """Call a method of the callbacks. Return what is not None of what it returns, by their names.

        Raises:
            JobError: one has failed that ends the run then.
            ModelChangedError: one has changed the model.
        """
        answers: dict[str, Any] = {}
        for name, callback in self._called(method).items():
            title, call = f"{name}.{method}", functools.partial(getattr(callback, method), info)
            if method != "on_run_end":  # before which everything is saved
                call = functools.partial(self._interruptible, call)
            try:
                with self._outbox.within("callback"):
                    answer = evaluation.call_without_effect(call, method=title, model=model, device=self._device)
                if method == "on_evaluation_end" and answer is not None:
                    answers[name] = _reason(answer, callback)
            except evaluation.ModelChangedError:
                raise
            except CutOff:
                self._warner.warn_from_any_rank(f"{title} was cut off at step {step}, because the run has to stop")
            except Exception as e:
                text = f"{title} {e}" if isinstance(e, JobError) else f"{title} raised {evaluation.error_with_place(e)}"
                if callback.errors_end_run:
                    print_error()
                    raise JobError(text) from e
                self._warner.warn_of_call(text, method=title, step=step)
        return answers

    def sample(self, *, step: int) -> None:
        """Let the job sample from the model, on the rank that has all of it, or gathers its shards.

        All ranks call this at the same step.

        Raises:
            ModelChangedError: the job has changed the model.
            CutOff: the job took too long, and the ranks have to stop.
        """
        model, weights = self._whole_model(), None
        self._outbox.enter(step, "sample")
        if self._strategy.traits.divides_model:
            weights = self._strategy.gather_model()
            self._strategy.hooks.confirm()
        drawn = functools.partial(self._sample, model, weights, step=step)
        evaluation.cut_off_together(drawn, self._strategy, self._device)

    def _whole_model(self) -> nn.Module | None:
        """Return the model on the rank that shows it to the job, if that has all of it."""
        return self._strategy.own_model if self._strategy.context.global_rank == 0 else None

    def _sample(self, model: nn.Module | None, weights: Mapping[str, Tensor] | None, *, step: int) -> None:
        if model is None and weights is None:
            return
        try:
            self._samples.take(model, weights, step=step)
        except evaluation.ModelChangedError:
            raise
        except Exception as e:
            text = str(e) if isinstance(e, SampleError) else f"job.sample raised {evaluation.error_with_place(e)}"
            self._warner.warn_of_call(text, method="job.sample", step=step)


def _has_own(callback: Callback, method: str) -> bool:
    return getattr(type(callback), method) is not getattr(Callback, method)


def _reason(answer: Any, callback: Callback) -> str:
    """Return why a callback ends the run.

    Raises:
        JobError: it may not, or does not say it.
    """
    if not callback.may_stop:
        raise JobError(f"returns {kind_of(answer)}; return None, or let the class say may_stop = True")
    if not isinstance(answer, str) or not answer:
        raise JobError(f"returns {kind_of(answer)}; return why the run ends, as a text, or None")
    return answer


_NAME = re.compile(r"[a-zA-Z0-9_-][a-zA-Z0-9_.-]{0,99}")
_TEXT = "sample"
"""The name of a text that the job returns without one."""
_GAP = 2
"""Pixels between the images of a grid."""
_TOLERANCE = 0.01
"""How far a value may be outside [0, 1], as interpolation may leave it."""


class SampleError(ValueError):
    """What the job returned is not a sample, or cannot be written; the text says why."""


class Samples:
    """Takes the job's samples on one rank.

    Attributes:
        texts: the last text of each name.
    """

    def __init__(
        self,
        job: Job,
        *,
        run_dir: RunDir,
        outbox: Outbox,
        device: torch.device,
        seed: int,
        redactor: Redactor,
        interruptible: evaluation.Interruptible = evaluation.run,
    ):
        self.texts: dict[str, str] = {}
        self._job = job
        self._run_dir = run_dir
        self._outbox = outbox
        self._device = device
        self._seed = seed
        self._redactor = redactor
        self._interruptible = interruptible

    def take(self, model: nn.Module | None, weights: Mapping[str, Tensor] | None, *, step: int) -> None:
        """Let the job draw samples, and write them.

        Args:
            model: the model; None to build it on the CPU with ``weights``.
            weights: the tensors of the whole model, if there is no ``model``.
            step: the last completed step.

        Raises:
            ModelChangedError: the job has changed ``model``.
            SampleError: the job returned something else than samples, or one cannot be written; those before it stay.
            Exception: whatever the job raises.
        """

        def draw() -> Any:
            whole = evaluation.rebuilt(self._job, weights or {}) if model is None else model
            whole.eval()
            return self._job.sample(whole, torch.Generator().manual_seed(self._seed))

        call = functools.partial(self._interruptible, draw)
        result = evaluation.call_without_effect(call, method="job.sample", model=model, device=self._device)
        if result is None:
            return
        if isinstance(result, str):
            result = {_TEXT: result}
        if not isinstance(result, Mapping):
            kind = type(result).__name__
            raise SampleError(f"job.sample returned a {kind}; return a text, or a dict of texts and images")
        for name, sample in result.items():
            self._save(name, sample, step)

    def _save(self, name: Any, sample: Any, step: int) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SampleError(
                f"job.sample: {name!r} cannot be the name of a sample; use at most 100 letters, digits, '_', '-' and "
                "'.', and no '.' at the beginning"
            )
        if isinstance(sample, str):
            self.texts[name] = text = self._redactor.text(sample)
            path, data = self._run_dir.sample_file(step, name, "txt"), text.encode(errors="replace")
        elif isinstance(sample, Tensor):
            path, data = self._run_dir.sample_file(step, name, "png"), _png(sample, name)
        else:
            raise SampleError(f"job.sample: {name!r} is a {type(sample).__name__}; return texts, and images as tensors")
        try:
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, data)
        except OSError as e:
            raise SampleError(f"the sample {name!r} cannot be written: {e}") from e
        self._outbox.put_event(SampleSaved(step=step, name=name, path=str(path.relative_to(self._run_dir.path))))


def _png(images: Tensor, name: str) -> bytes:
    from PIL import Image

    try:
        pixels = picture(images)
    except ValueError as e:
        raise SampleError(f"job.sample: {name!r}: {e}") from None
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def picture(images: Tensor) -> np.ndarray:
    """Return an image, or a grid of images, as 8-bit pixels of shape (height, width) or (height, width, 3).

    Args:
        images: shape (H, W), (C, H, W) or (N, C, H, W) with C of 1 or 3; floats in [0, 1], or uint8.

    Raises:
        ValueError: the tensor has another shape, type or range.
    """
    shape = tuple(images.shape)
    batch = images.detach().cpu()[(None,) * max(0, 4 - images.ndim)]
    if images.ndim not in (2, 3, 4) or batch.shape[1] not in (1, 3) or batch.numel() == 0:
        raise ValueError(
            f"a tensor of shape {shape} is not an image; images have shape (H, W), (C, H, W) or (N, C, H, W), where C "
            "is 1 or 3"
        )
    grid = _grid(_as_bytes(batch))
    pixels: np.ndarray = grid.permute(1, 2, 0).squeeze(-1).contiguous().numpy()
    return pixels


def _as_bytes(images: Tensor) -> Tensor:
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise ValueError(f"an image of type {images.dtype}; images are floats in [0, 1], or torch.uint8")
    values = images.float()
    low, high = float(values.min()), float(values.max())
    if not (low >= -_TOLERANCE and high <= 1 + _TOLERANCE):  # also if one of them is NaN
        raise ValueError(f"an image with values from {low:g} to {high:g}; images are floats in [0, 1], or torch.uint8")
    return (values.clamp(0, 1) * 255).round().to(torch.uint8)


def _grid(images: Tensor) -> Tensor:
    """Return images of shape (N, C, H, W) in rows and columns, as one of shape (C, height, width)."""
    count, channels, height, width = images.shape
    if count == 1:
        return images[0]
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    padded = F.pad(images, (0, _GAP, 0, _GAP))
    cells = padded.new_zeros(rows * columns, channels, height + _GAP, width + _GAP)
    cells[:count] = padded
    grid = cells.view(rows, columns, channels, height + _GAP, width + _GAP).permute(2, 0, 3, 1, 4)
    return grid.reshape(channels, rows * (height + _GAP), columns * (width + _GAP))[:, :-_GAP, :-_GAP]
