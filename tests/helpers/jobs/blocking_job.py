"""A job that does not come to an end of one of its phases, until it is cut off or a file is there."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from helpers.jobs.quick_jobs import PredictedDigits
from orchestrator import Callback, current_step
from orchestrator.job import Split

LONG_S = 600.0


def is_worker() -> bool:
    import ray

    with suppress(Exception):
        return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    return False


@dataclass(frozen=True, kw_only=True)
class Blocking(PredictedDigits):
    """Blocks in ``phase`` when it first comes there at or after step ``at``, on a worker, and notes that in ``folder``.

    Where nothing else can end it, it goes on when the file ``go`` is there.
    """

    hidden: int = 16
    val_size: int | None = 80
    phase: str = ""
    folder: str = ""
    at: int = 0

    def block(self, phase: str, step: int, most_s: float = LONG_S) -> None:
        if phase != self.phase or step < self.at or not is_worker():
            return
        folder, deadline = Path(self.folder), time.monotonic() + most_s
        with (folder / "blocked").open("a") as file:
            file.write(f"{step}\n")
        while time.monotonic() < deadline and not (folder / "go").exists():
            time.sleep(0.01)

    def model(self) -> nn.Module:
        self.block("model", 0)
        return super().model()

    def dataset(self, split: Split) -> Any:
        self.block("dataset", 0)
        return super().dataset(split)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.block("comparison", current_step())
        if torch.is_grad_enabled():
            self.block("step", current_step())
        return super().loss(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        self.block("evaluation", current_step(), most_s=0.7)
        return super().metrics(output, target)

    def predictions(self, model: nn.Module, split: Split, part: int, parts: int) -> Iterable[tuple[Any, Any]]:
        if part == 0:
            self.block("predictions", current_step())
        yield from super().predictions(model, split, part, parts)

    def sample(self, model: nn.Module, generator: Generator) -> str:
        self.block("sample", current_step())
        return "drawn"


class BlockingCallback(Callback):
    """Blocks in the method of the same name as the phase of a :class:`Blocking`."""

    def __init__(self, phase: str, folder: str, at: int = 0):
        self.job = Blocking(phase=phase, folder=folder, at=at)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda info: self.job.block(name, info.step)
        return super().__getattribute__(name)

    def on_run_begin(self, info: Any) -> None: ...
    def on_step_end(self, info: Any) -> None: ...
    def on_evaluation_end(self, info: Any) -> None: ...
    def on_run_end(self, info: Any) -> None: ...


def blocked_at(folder: Path) -> Iterator[int]:
    """The steps at which a job was blocked."""
    with suppress(FileNotFoundError):
        yield from map(int, (folder / "blocked").read_text().split())
