"""Samples from the model: the job draws them, and this rank writes them into the run directory."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.config.redact import Redactor
from orchestrator.job import Job
from orchestrator.protocol.events import SampleSaved
from orchestrator.records.json_file import write_atomically
from orchestrator.records.run_dir import RunDir
from orchestrator.worker.control.control import Outbox
from orchestrator.worker.reports.job_calls import call_without_effect
from orchestrator.worker.reports.pictures import picture
from orchestrator.worker.reports.predictions import rebuilt

_NAME = re.compile(r"[a-zA-Z0-9_-][a-zA-Z0-9_.-]{0,99}")
_TEXT = "sample"
"""The name of a text that the job returns without one."""


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
