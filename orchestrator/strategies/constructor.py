"""How a strategy builds the model of a job."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from orchestrator.compat.torch import setting_fake_data
from orchestrator.config.schema import TrainConfig
from orchestrator.config.text import to_cli
from orchestrator.job import Job
from orchestrator.model.blocks import Block, ForwardPass, blocks_of, likeness, with_blocks
from orchestrator.model.modes import in_train_mode
from orchestrator.model.partial_init import FakeModel, build_fake
from orchestrator.model.precision import Precision
from orchestrator.strategies.measure.flop_counter import FlopCounter
from orchestrator.user_code.errors import JobError

T = TypeVar("T")


def constructor_of(job: Job, train: TrainConfig, precision: Precision) -> Callable[[], nn.Module]:
    """Return a constructor of the job's model in ``precision``, whose blocks run as ``train`` says."""
    return _as_trained(job.model, train, precision)


def _as_trained(build: Callable[[], nn.Module], train: TrainConfig, precision: Precision) -> Callable[[], nn.Module]:
    build = precision.converted(in_train_mode(build))
    return with_blocks(build, recomputes=train.activation_checkpointing) if _uses_blocks(train) else build


def compile_in_place(module: nn.Module, train: TrainConfig) -> None:
    """Let later calls of ``module``, or of its blocks, run compiled code, if ``train`` says so.

    The names of its tensors do not change. Blocks that are alike share their compiled code.
    """
    if train.compile is False:
        return
    autotuned = "max-autotune-no-cudagraphs"
    mode = autotuned if train.compile == autotuned else "default"
    if not train.compiles_blocks:
        forward = module.forward
        module.forward = functools.partial(compiled(lambda _, *args, **kw: forward(*args, **kw), mode=mode), module)
        return
    shared: dict[Hashable, ForwardPass] = {}
    for block in module.modules():
        if isinstance(block, Block):
            block.compiled = shared.setdefault(likeness(block), compiled(block.kind.forward, mode=mode))


def compiled(forward: ForwardPass, *, mode: str) -> ForwardPass:
    """Return ``forward`` as compiled code, whose FLOPs can be counted. It is compiled when it is called.

    ``nn.Module.compile`` does not serve: up to torch 2.13 it compiles nothing of an ``nn.Sequential``, because the
    compiler skips functions that are defined in torch. It inlines them when they are called by another function.
    """

    def inlined(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    # The compiler keeps what it has compiled, up to a limit, with the code object. So each function gets one.
    inlined.__code__ = inlined.__code__.replace()
    fast = torch.compile(inlined, mode=mode)

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (counter := FlopCounter.active) is None:
            return fast(module, *args, **kwargs)
        with counter.running_compiled(forward, module, args, kwargs):
            return fast(module, *args, **kwargs)

    return run


@dataclass(frozen=True)
class Outline:
    """A job and its model as it is trained, without memory. The model is built once, when it is first asked for.

    Attributes:
        transform: returns the constructor of what a worker has of the model, given that of the model.
        found: what checks have found of it, so that they look once.
    """

    job: Job
    train: TrainConfig
    transform: Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]] = lambda build: build
    found: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def precision(self) -> Precision:
        """What a CPU would compute the model in."""
        return Precision.named(self.train.precision, "cpu")

    @property
    def build(self) -> Callable[[], nn.Module]:
        """The constructor of the model."""
        return self.transform(constructor_of(self.job, self.train, self.precision))

    @functools.cached_property
    def model(self) -> nn.Module | None:
        """The model; None if its constructor needs memory, or fails. A worker, which has memory, reports the failure.

        Raises:
            JobError: ``Job.model`` does not return a model.
        """
        if self._of_fakes is not None:
            return self._of_fakes.model
        with torch.device("meta"):  # where parameters may have no shape yet
            return _unless_it_fails(self.build)

    @functools.cached_property
    def whole(self) -> FakeModel:
        """The model, which has memory while it is built if fake tensors do not suffice.

        Raises:
            Exception: whatever ``Job.model`` raises.
        """
        return self._of_fakes or self._built()

    @functools.cached_property
    def _of_fakes(self) -> FakeModel | None:
        return _unless_it_fails(lambda: self._built(without_memory=True))

    def _built(self, *, without_memory: bool = False) -> FakeModel:
        whole = build_fake(self.transform(self.job.model), torch.device("cpu"), without_memory=without_memory)
        with setting_fake_data():  # after the look at what shares memory, because conversion would part it
            _as_trained(lambda: whole.model, self.train, self.precision)()
        return whole


def _unless_it_fails(build: Callable[[], T]) -> T | None:
    try:
        return build()
    except JobError:
        raise
    except Exception:
        return None


def blocks_note(model: nn.Module, train: TrainConfig) -> str | None:
    """Return a note if the model lacks the blocks that ``train`` asks for; None if it has some."""
    if not _uses_blocks(train) or blocks_of(model):
        return None
    keys = [f"train.compile={to_cli(train.compile)}"] if train.compiles_blocks else []
    if train.activation_checkpointing != "none":
        keys.append(f"train.activation_checkpointing={train.activation_checkpointing}")
    return (
        f"{' with '.join(keys)} has no effect: the model has no nn.ModuleList or nn.Sequential with several blocks of "
        "one class; put the repeated part of the model into one"
    )


def lazy_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that get their shapes in the first forward pass, as in ``LazyLinear``."""
    return [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]


def _uses_blocks(train: TrainConfig) -> bool:
    return train.compiles_blocks or train.activation_checkpointing != "none"
