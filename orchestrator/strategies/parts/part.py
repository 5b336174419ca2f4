"""What of the model is on a rank: how it is built, what its tensors are called, and how a batch passes through it."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from orchestrator.job import Job
from orchestrator.model.partial_init import build_fake
from orchestrator.model.precision import Precision
from orchestrator.planning.mesh import DENSE
from orchestrator.planning.placement import Placement
from orchestrator.protocol.events import StageSummary
from orchestrator.protocol.metrics import MetricSpec
from orchestrator.state.transport import CPU
from orchestrator.strategies.constructor import constructor_of
from orchestrator.strategies.groups import NOTHING_SHARED, MeshGroups, Sharing
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.owner import Own, Shards, cuts_of
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.replicated.comm_hooks import PowerSGD
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.transforms.part import Parts
from orchestrator.strategies.whole_model import Passes
from orchestrator.timeline import Span


class ModelPart(abc.ABC):
    """What one rank has of the model.

    Methods are listed in the order of a run.

    Attributes:
        passes: through what is on this rank.
        parts: what of each sample and of the layers this rank computes.
        sharing: the tensors that belong to stages on several ranks.
        powersgd: compresses the gradients that are exchanged, if the keys ask for it.
        num_microbatches: the parts of a slice.
        shares_tensors: whether stages share tensors, on any rank.
    """

    is_built_alone: ClassVar[bool] = True
    """Whether :meth:`setup` builds all, so that what is trained can be prepared before there are other ranks."""

    remedy: ClassVar[str] = ""
    """What to do about a difference from the whole model that such a part may cause."""

    passes: Passes
    sharing: Sharing = NOTHING_SHARED
    powersgd: PowerSGD | None = None
    num_microbatches = 1
    shares_tensors = False

    def __init__(self, context: Context, job: Job, precision: Precision):
        self.job = job
        self.precision = precision
        self.parts = Parts()
        self.job_of_part = job
        self._train = context.train

    def reassign(self, context: Context) -> None:
        """Take another place in the run."""

    def setup(self, context: Context, parts: Parts, train_set: Any) -> None:
        """Build as much as needs no other rank, with the initial values that the whole model would have."""
        self.parts = parts
        self.job_of_part = parts.job(self.job)

    def meet(self, context: Context, groups: MeshGroups) -> None:
        """Agree with the other ranks on who has what. Collective."""

    def complete(self, context: Context, train_set: Any) -> None:
        """Build the rest, once, after the ranks have met if need be."""

    @abc.abstractmethod
    def module(self) -> nn.Module:
        """Return a module with the tensors of this rank, under the model's own names."""

    @property
    @abc.abstractmethod
    def modules(self) -> Sequence[nn.Module]:
        """The modules as they are called."""

    @property
    @abc.abstractmethod
    def outline(self) -> nn.Module:
        """The model that is cut into stages or shards, maybe without memory."""

    @property
    @abc.abstractmethod
    def saved_names(self) -> Sequence[str]:
        """The names of all tensors of a checkpoint, in the order of the whole model."""

    def whole_model(self) -> nn.Module:
        """Return the model of which ranks have parts, without memory; the optimizer is made for it."""
        return build_fake(constructor_of(self.job, self._train, self.precision), CPU).model

    @abc.abstractmethod
    def optimizer(self, owner: Own) -> Optimizer:
        """Return the optimizer of what ``owner`` updates."""

    def placements(self) -> Mapping[str, Placement]:
        """Return where the parameters of this rank are, by each of their names, if it updates all of them."""
        named = dict(self.outline.named_parameters(remove_duplicate=False))
        return {name: self.parts.placement(name, tuple(p.shape)) for name, p in named.items()}

    def on_stages(self, placements: Mapping[str, Placement]) -> Mapping[str, Placement]:
        """Return the placements with the stages that have the parameters."""
        return placements

    def owner(self, context: Context, *, divides: bool) -> Own:
        """Return the elements that this rank updates; ``divides``: only its shards of what it has."""
        if not divides:
            return Own(self.module, self.on_stages(self.placements()))
        index, count = context.mesh.place(DENSE, context.global_rank)
        # Divided as in the outline, so that stages that share a tensor have the same part of it on each rank.
        cuts = cuts_of(self.outline, count)
        return Shards(
            self.module, cuts, index=index, count=count, placed=self.parts.placement, on_stages=self.on_stages
        )

    def prepare_sums(self, context: Context) -> None:
        """Let the model, and what its sums keep from step to step, be as the keys say."""

    def divide(self, context: Context, groups: MeshGroups, trained: Trained) -> None:
        """Prepare for the passes with the ranks of this generation. Collective."""

    @abc.abstractmethod
    def sums(self, context: Context, groups: MeshGroups, owner: Own) -> Sums:
        """Return the first sums of gradients. Collective."""

    def connect(self, context: Context, groups: MeshGroups, sums: Sums) -> None:
        """Complete the passes, which tell ``sums`` of each part. Collective."""

    def begin_step(self, *, logged: bool) -> None:
        """Begin to measure a step, if it is logged."""

    def gather_for_step(self) -> None:
        """Gather what stays gathered in a step. Collective."""

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for an evaluation. Collective."""
        return contextlib.nullcontext()

    @property
    def timers(self) -> Mapping[MetricSpec, WaitTimer]:
        """What a step waits for, by metric, beside its sums."""
        return {}

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """The ranks of a replica, to send what is in host memory; None if their default group serves."""
        return None

    def eval_batch_size(self, of_slice: int) -> int:
        """Return the number of samples that are evaluated at once, given that of a slice."""
        return of_slice

    def spans(self) -> tuple[Span, ...]:
        """Return what the stages did in the last step."""
        return ()

    def stage_summaries(self) -> tuple[StageSummary, ...]:
        """Return the content of each stage of the model; empty if it is not cut."""
        return ()

    def close(self) -> None:
        """Release everything that refers to a process group. The tensors remain."""
