"""Samples from the model: the job draws them, and this rank writes them into the run directory."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.config.redact import Redactor
from orchestrator.job import Job
from orchestrator.protocol.events import SampleSaved
from orchestrator.records.json_file import write_atomically
from orchestrator.records.run_dir import RunDir
from orchestrator.worker.control.control import Outbox
from orchestrator.worker.reports.evaluation import call_without_effect, rebuilt

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
        self, job: Job, *, run_dir: RunDir, outbox: Outbox, device: torch.device, seed: int, redactor: Redactor
    ):
        self.texts: dict[str, str] = {}
        self._job = job
        self._run_dir = run_dir
        self._outbox = outbox
        self._device = device
        self._seed = seed
        self._redactor = redactor

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
            whole = rebuilt(self._job, weights or {}) if model is None else model
            whole.eval()
            return self._job.sample(whole, torch.Generator().manual_seed(self._seed))

        result = call_without_effect(draw, method="job.sample", model=model, device=self._device)
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
