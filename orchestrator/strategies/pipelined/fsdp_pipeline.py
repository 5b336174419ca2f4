"""``fsdp_pipeline``: stages whose tensors are divided, on a grid of strategy.pipeline_parallel_size x shards workers.

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
from torch.utils.data import Dataset

from orchestrator.config.schema import Config, TrainConfig
from orchestrator.model.boundary import Boundary
from orchestrator.model.cut import Cut
from orchestrator.model.precision import Precision, gathered_share
from orchestrator.model.stages import Stage, state_of
from orchestrator.planning.mesh import DENSE, TOKENS, Mesh
from orchestrator.planning.plan import Plan
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.groups import MeshGroups
from orchestrator.strategies.keys import ShardedConfig
from orchestrator.strategies.measure.job_metrics import EvalSums
from orchestrator.strategies.owner import Own
from orchestrator.strategies.pipelined.pipeline import Pipeline
from orchestrator.strategies.pipelined.stage_builder import StageBuilder
from orchestrator.strategies.sharded.divided_model import DividedModel
from orchestrator.strategies.sharded.rehearsal import check_forward
from orchestrator.strategies.sharded.shard_options import check_shards, gathered_at_once
from orchestrator.strategies.sums.into_shards import IntoShards
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.transforms.blocks import compile_in_place


class FSDPPipeline(Pipeline):
    """A part of each tensor of one stage, or of several."""

    evaluates_padding = True

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        before = len(errors)
        notes = super().check_job(config, outline, plan, errors)
        if len(errors) == before:
            check_shards(config, outline, plan, errors)  # its notes are on whole models
        return notes

    @classmethod
    def gathered_bytes(cls, config: Config, mesh: Mesh, model: nn.Module) -> float:
        options = ShardedConfig.of(config.strategy)
        share = gathered_share(model, Precision.named(config.train.precision, "cpu").autocast_dtype)
        if options.reshard_after_forward:
            return gathered_at_once(options, model, share=share)
        return share * sum(p.nbytes for p in model.parameters()) / mesh.pipeline

    def _build(self, builder: StageBuilder, train_set: Dataset[Any], cut: Cut) -> None:
        sequence = builder.sequence
        divided: list[DividedModel] = []

        def build_layers(indices: Sequence[int]) -> Mapping[int, nn.Module]:
            wanted = sequence.uses(indices)
            own = DividedModel(builder.constructor, self.context, self.precision, wanted=wanted, placed=self.placement)
            divided.append(own)
            return sequence.of(divided[0].model, indices)

        built = builder.build(cut, own=self._own, stage_ranks=self.layout.stage_ranks, build_layers=build_layers)
        self._shared = built.shared
        own = self._divided = DividedStages(divided[0], built.stages)
        options = ShardedConfig.of(self.context.options)
        modules = [stage.module for stage in own.stages]
        self.trained = self.trained_part(modules, Own(own.module, own.model.placements), train_set)
        own.model.calls = check_forward(
            self.job_of_part,
            sequence.whole,
            train_set,
            precision=self.precision,
            options=options,
            layers=nn.Sequential(*sequence.modules),
            begin=functools.partial(self.parts.begin, self.job),
        )
        self._cut = cut

    def undivided(self) -> nn.Module:
        return self._divided.module()

    def _sums(self, groups: MeshGroups) -> Sums:
        shards, batch = groups.over(*DENSE), groups.over(*TOKENS)
        groups.over("replicate")  # on all ranks, although a stage may have nothing that is divided
        assert shards is not None
        assert batch is not None
        self._divided.divide(shards, self.context.train)
        self.stages = self._divided.called
        self.trained.use([stage.module for stage in self.stages])
        return IntoShards(self._divided.model, batch, at_end=True)

    @contextlib.contextmanager
    def around_step(self, *, logged: bool) -> Iterator[None]:
        with super().around_step(logged=logged):
            self._divided.model.wrapped.gather_all()
            yield

    def evaluate(self, batch: Any, valid: int) -> EvalSums:
        self._divided.model.wrapped.gather_all()
        try:
            return super().evaluate(batch, valid)
        finally:
            self._divided.model.wrapped.free()

    def close(self) -> None:
        super().close()
        if self._cut is not None:
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
    """The stages of a rank as one module, which gathers what is outside of blocks, and what several stages have."""

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
