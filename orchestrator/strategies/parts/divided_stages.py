"""Stages whose tensors are divided, on a grid of workers.

The workers that have one stage together, its shards, each train on a part of the batch. The blocks of a stage are
gathered while micro-batches pass through them. The gradients of a step are kept whole on each worker and summed into
the parts once, after its last backward pass, so that schedules may compute backward passes in halves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from orchestrator.config.schema import TrainConfig
from orchestrator.model.stages.boundary import Boundary
from orchestrator.model.stages.own_stages import Stage, state_of
from orchestrator.planning.mesh import DENSE, TOKENS
from orchestrator.planning.placement import Placement
from orchestrator.strategies.groups import MeshGroups
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.owner import Own
from orchestrator.strategies.parts.divided_model import DividedModel, IntoShards
from orchestrator.strategies.parts.rehearsal import check_forward
from orchestrator.strategies.parts.stage_builder import StageBuilder
from orchestrator.strategies.parts.stages import Stages
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.transforms.blocks import compile_in_place


class GatheredStages(Stages):
    """A part of each tensor of one stage, or of several."""

    def _build(self, builder: StageBuilder, context: Context, train_set: Dataset[Any]) -> None:
        sequence = builder.sequence
        divided: list[DividedModel] = []

        def build_layers(indices: Sequence[int]) -> Mapping[int, nn.Module]:
            wanted, placed = sequence.uses(indices), self.parts.placement
            divided.append(DividedModel(builder.constructor, context, self.precision, wanted=wanted, placed=placed))
            return sequence.of(divided[0].model, indices)

        stage_ranks = self.layout.stage_ranks
        built = builder.build(self._agreed, own=self._own, stage_ranks=stage_ranks, build_layers=build_layers)
        self._shared = built.shared
        self._divided = DividedStages(divided[0], built.stages)
        self._sequence, self._train_set = sequence, train_set
        self._options = MeshConfig.of(context.options)

    def module(self) -> nn.Module:
        return self._divided.module()

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [stage.module for stage in self.stages or self._divided.stages]

    def optimizer(self, owner: Own) -> Optimizer:
        optimizer = super().optimizer(owner)
        sequence = self._sequence
        self._divided.model.calls = check_forward(
            self.job_of_part,
            sequence.whole,
            self._train_set,
            precision=self.precision,
            options=self._options,
            layers=nn.Sequential(*sequence.modules),
            begin=functools.partial(self.parts.begin, self.job),
        )
        del self._sequence, self._train_set
        return optimizer

    def placements(self) -> Mapping[str, Placement]:
        return self._divided.model.placements

    def divide(self, context: Context, groups: MeshGroups, trained: Trained) -> None:
        super().divide(context, groups, trained)
        shards = groups.over(*DENSE)
        groups.over("replicate")  # on all ranks, although a stage may have nothing that is divided
        assert shards is not None
        self._divided.divide(shards, context.train)
        self.stages = self._divided.called
        trained.use(self.modules)

    def sums(self, context: Context, groups: MeshGroups, owner: Own) -> Sums:
        batch = groups.over(*TOKENS)
        assert batch is not None
        return IntoShards(self._divided.model, batch, at_end=True)

    def gather_for_step(self) -> None:
        self._divided.model.wrapped.gather_all()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        self._divided.model.wrapped.gather_all()
        try:
            yield
        finally:
            self._divided.model.wrapped.free()

    def close(self) -> None:
        super().close()
        if hasattr(self, "_divided"):  # otherwise nothing is built yet
            self._divided.model.close()
            self.stages = ()


class DividedStages:
    """The stages of a rank, of whose parameters it has a part.

    Attributes:
        model: the parts.
        stages: the stages, in ascending order.
        called: the same, as a schedule calls them, from :meth:`divide` on.
    """

    def __init__(self, model: DividedModel, stages: Sequence[Stage]):
        """Take ``stages`` of the model."""
        self.model = model
        self.stages = stages
        self.called: Sequence[Stage] = ()

    def divide(self, group: dist.ProcessGroup, train: TrainConfig) -> None:
        """Divide the stages over the ranks of ``group``; their blocks run as ``train`` says."""
        model = self.model.renewed()
        self.stages = [stage.of(model) for stage in self.stages]
        for stage in self.stages:
            compile_in_place(stage.module, train)
        root = _Together([stage.module for stage in self.stages])
        self.model.divide(root, group, calls=[stage.module for stage in self.stages])
        self.model.wrapped.keep_gradients()
        self.called = [
            dataclasses.replace(stage, module=_Called(root, number, stage.outputs))
            for number, stage in enumerate(self.stages)
        ]

    def module(self) -> nn.Module:
        """Return a bare module with this rank's parts, and the buffers that are saved, under the model's own names."""
        return state_of(self.stages, self.model.parts)


class _Together(nn.Module):
    """The stages of a rank as one module, which gathers the tensors outside of blocks, and those of several stages."""

    def __init__(self, stages: Sequence[nn.Module]):
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, number: int, value: Any) -> Any:
        return self.stages[number](value)


class _Called(nn.Module):
    """A stage as its schedule calls it. To torch's pipelines it is a plain module: they would make sums themselves."""

    def __init__(self, root: _Together, number: int, outputs: Boundary | None):
        super().__init__()
        self.stage = root.stages[number]
        self._outputs = outputs
        self._call = functools.partial(root, number)  # without being a module of this one

    def forward(self, value: Any) -> Any:
        out = self._call(value)
        return out if self._outputs is None else self._outputs.converted(out)
