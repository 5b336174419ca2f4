"""Jobs in which something goes wrong at a given step on a given rank."""

import ctypes
import os
import signal
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs.digits import Digits
from orchestrator.job import Split
from orchestrator.protocol.messages import Outcome
from orchestrator.user_code.callbacks import Callback, RunBegin, StepEnd, current_step


class Reporting(Digits):
    """Draws samples and measures its batches; its callbacks fail after 5 steps."""

    def train_metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return self.metrics(output, target)

    def sample(self, model: nn.Module, generator: torch.Generator) -> Mapping[str, str | Tensor]:
        return {"image": torch.rand(3, 8, 8, generator=generator), "text": "To be"}

    def on_step_end(self, info: StepEnd) -> None:
        if info.step > 5:
            raise RuntimeError("the service does not answer")


class Begins(Callback):
    """Writes down on every rank from where the run begins, and continues."""

    every_rank = True

    def on_run_begin(self, info: RunBegin) -> None:
        with (info.run_dir / "begins").open("a") as file:
            file.write(f"generation {info.generation}: rank {info.rank} after {info.step}\n")


@dataclass(frozen=True, kw_only=True)
class OneModel(Digits):
    """Builds no model in a process in which an earlier one is alive."""

    built: ClassVar[list[weakref.ref[nn.Module]]] = []

    def model(self) -> nn.Module:
        assert [reference() for reference in self.built if reference() is not None] == []
        model = super().model()
        self.built.append(weakref.ref(model))
        return model


def _listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections()
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


@dataclass(frozen=True, kw_only=True)
class Faulty(Digits):
    """Prints where its process listens, apart from what Ray has opened there before, until it fails."""

    how: str = "raise"
    rank: int = 1
    at_step: int = 5
    seen: list[int] = field(default_factory=lambda: [0], init=False, repr=False)
    before: set[tuple[str, int]] = field(default_factory=set, init=False, repr=False)

    def check(self) -> None:
        self.before.update(_listening())

    def loss(self, output: Any, target: Any) -> Tensor:
        print("listens on", sorted({address for address, _ in _listening() - self.before}))
        loss = super().loss(output, target)
        if not torch.is_grad_enabled() or current_step() == 1:  # in an evaluation, or maybe before training
            return loss
        self.seen[0] += 1
        if self.seen[0] == self.at_step - 1 and dist.get_rank() == self.rank:
            if self.how == "raise":
                raise RuntimeError("the planted fault")
            if self.how == "segfault":
                ctypes.string_at(0)
            if self.how == "memory":
                torch.empty(2**60, dtype=torch.uint8)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return loss


@dataclass(frozen=True, kw_only=True)
class SlowToBuild(Digits):
    """The last rank takes ``build_s`` to build its model."""

    build_s: float

    def model(self) -> nn.Module:
        if dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(self.build_s)
        return super().model()


@dataclass(frozen=True, kw_only=True)
class Environed(Digits):
    """Prints environment variables where the model is built, and sleeps in each step."""

    variables: tuple[str, ...] = ()
    pause_ms: float = 0.0

    def model(self) -> nn.Module:
        print(" ".join(f"{name}={os.environ.get(name)}" for name in self.variables))
        return super().model()

    def loss(self, output: Any, target: Any) -> Tensor:
        time.sleep(self.pause_ms / 1e3)
        return super().loss(output, target)


@dataclass(frozen=True, kw_only=True)
class NoStore(Digits):
    """Rank 0 cannot open another rendezvous store: that raises or hangs. The file ``marker`` lets it happen once."""

    marker: str
    how: str = "raise"
    hidden: int = 16

    def loss(self, output: Any, target: Any) -> Tensor:
        if dist.get_rank() == 0 and not Path(self.marker).exists():
            Path(self.marker).touch()
            dist.TCPStore = self._fail  # type: ignore[assignment,misc]
        return super().loss(output, target)

    def _fail(self, *_: Any, **__: Any) -> Any:
        if self.how == "raise":
            raise OSError("no port is free")
        time.sleep(1e6)


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Faulty):
    """A rank runs out of memory, and as with NCCL, no process group can be destroyed before all ranks do it."""

    how: str = "memory"

    def loss(self, output: Any, target: Any) -> Tensor:
        dist.destroy_process_group = _wait_for_ever
        return super().loss(output, target)


def _wait_for_ever(*_: Any) -> None:
    time.sleep(1e6)


def _stay(_: Outcome) -> Any:
    raise RuntimeError("this outcome stays here")


class Secretive(Digits):
    """Its workers cannot send their outcome to the driver."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        Outcome.__reduce__ = _stay  # type: ignore[method-assign, assignment]
        return super().loss(output, target)


class NoData(Digits):
    """The training set has no samples."""

    def dataset(self, split: Split) -> Any:
        return [] if split == "train" else super().dataset(split)
