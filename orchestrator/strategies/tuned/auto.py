"""``auto``: measures the job on its workers. The driver then predicts every strategy, and trains with the fastest.

A run of this strategy makes no updates. In its first step, the ranks measure together; the steps that follow only show
what the training loop costs. Its checkpoint is the profile.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from orchestrator.job import Job
from orchestrator.planning.mesh import Mesh
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.base import StepResult, Strategy, Traits
from orchestrator.strategies.groups import new_group
from orchestrator.strategies.keys import AutoConfig, mesh_config
from orchestrator.strategies.measure.device import free_memory
from orchestrator.strategies.measure.job_metrics import EvalSums
from orchestrator.strategies.mesh_trainer import MeshTrainer
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.registry import register
from orchestrator.strategies.rules import Rules
from orchestrator.strategies.tuned import passes
from orchestrator.strategies.tuned.machinery import MachineryCost, group_cost, machinery_cost, message_cost
from orchestrator.tuning.choice import server_counts, stage_counts, worker_counts
from orchestrator.tuning.predict import step_in_parts_ms, step_of_replicas_ms
from orchestrator.tuning.profile import NO_COST, GroupCost, Profile

PROFILE_STEPS = 21
"""The steps of a profile: one in which the ranks measure, and those that show what the training loop costs."""
PROFILE_KEY = "profile"
"""The entry of a checkpoint's metadata that holds the profile."""


@register("auto")
class AutoRules(Rules[AutoConfig]):
    """Workers that each have the whole model."""

    @classmethod
    def is_synchronous(cls, options: AutoConfig) -> bool:
        return False

    @classmethod
    def extra_processes(cls, options: AutoConfig, num_workers: int) -> int:
        return server_counts(num_workers)[-1] if options.with_servers else 0

    @classmethod
    def trainer(cls, options: AutoConfig, mesh: Mesh, job: Job) -> type[Auto]:
        return Auto


class Auto(Strategy):
    """Measures what passes, updates and messages cost on all workers."""

    traits = Traits(runs_training_step=True, counts_flops=False)

    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        self._profile: Profile | None = None
        self._returned_at = 0.0
        self._loop_ms: list[float] = []

    def setup(self, train_set: Dataset[Any]) -> None:
        self._train_set = train_set

    def attach(self) -> None:
        self._control = new_group(self.context, backend="gloo") if dist.is_initialized() else None

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool, want_metrics: bool) -> StepResult:
        """Measure in the first step, and only the time since the last one in all others."""
        if self._profile is None:
            self._profile = self._measured()
        else:
            self._loop_ms.append((time.perf_counter() - self._returned_at) * 1e3)
        self._returned_at = time.perf_counter()
        return StepResult(loss_sum=torch.zeros(()), weight=torch.ones(()), grad_norm=None)

    @property
    def group_lrs(self) -> Sequence[float]:
        return (0.0,)

    def evaluate(self, batch: Any, valid: int) -> EvalSums:
        return EvalSums(loss_sum=torch.zeros(()), weight=torch.zeros(()), metrics={})

    def capture(
        self, *, step: int, samples_consumed: int, into: TrainState | None, part: bool = False
    ) -> TrainState | None:
        """Return the profile, in the metadata of a state without tensors."""
        if self.context.global_rank != 0:
            return None
        assert self._profile is not None
        context, profile = self.context, self._profile
        share = context.train.global_batch_size / context.mesh.world_size
        if self._loop_ms:
            loop_ms = max(0.0, statistics.median(self._loop_ms) - profile.data.at(share))
            profile = dataclasses.replace(profile, loop_ms=loop_ms)
        meta = {
            "step": step,
            "samples_consumed": samples_consumed,
            "param_groups": [],
            PROFILE_KEY: dataclasses.asdict(profile),
        }
        return TrainState(model={}, optimizer={}, meta=meta)

    def restore(self, state: TrainState | None, *, source: int | None) -> dict[str, Any]:
        raise NotImplementedError("a profile is measured anew, not resumed")

    def close(self) -> None:
        self._control = None

    def _measured(self) -> Profile:
        """Measure on all ranks together. Collective."""
        context, job, train_set, control = self.context, self.job, self._train_set, self._control
        free_bytes = free_memory(context.device)
        options = AutoConfig.of(context.options)
        with_servers = options.with_servers and context.device.type == "cpu"
        counts = worker_counts(context.mesh.world_size)
        stages = stage_counts(context.mesh.world_size, options.schedules)
        divided = passes.divisions(job, train_set, context, stages) if context.global_rank == 0 else ()
        layers = next((division.layers for division in divided if division.layers), ())
        activation_bytes = sum(layer.activation_bytes for layer in layers)
        whole = passes.whole_model_cost(
            job,
            train_set,
            context,
            counts,
            control=control,
            free_bytes=free_bytes / (context.mesh.world_size if context.device.type == "cpu" else 1),
            activation_bytes=activation_bytes,
            cast_bytes=sum(layer.cast_bytes for layer in layers),
            with_servers=with_servers,
        )
        groups: tuple[GroupCost, ...] = ()
        message = NO_COST
        added = MachineryCost()
        on_devices_ms = None
        if control is not None:
            if whole.passes and options.with_devices:
                on_devices_ms = passes.devices_ms(job, train_set, context, control)
            groups = tuple(group_cost(n, context, control) for n in counts if n > 1)
            message = message_cost(context, control)
            pipelines = options.with_pipelines
            added = machinery_cost(context, control, with_pipelines=pipelines, with_servers=with_servers)
        profile = Profile(
            device="cuda" if context.device.type == "cuda" else "cpu",
            divisions=divided,
            layer_rows=passes.layer_rows(context),
            passes=whole.passes,
            parameter_bytes=whole.parameter_bytes,
            gradient_bytes=whole.gradient_bytes,
            optimizer_bytes=whole.optimizer_bytes,
            activation_bytes=activation_bytes,
            data=passes.data_cost(job, train_set, passes.slice_rows(context)),
            loop_ms=0.0,
            bytes_by_group=whole.bytes_by_group,
            gathered_share=whole.gathered_share,
            groups=groups,
            message=message,
            server=added.server,
            base_ms=added.base_ms,
            ddp_ms=0.0,
            devices_ms=on_devices_ms,
            parts_ms=0.0,
            pipeline=added.pipeline,
            interleaved=added.interleaved,
            free_bytes=free_bytes,
        )
        return profile if control is None or not profile.passes else self._with_rest(profile, control)

    def _with_rest(self, profile: Profile, control: dist.ProcessGroup) -> Profile:
        """Return a profile with what ``ddp`` and ``fsdp`` take longer than the parts that were measured. Collective."""
        context, n = self.context, self.context.mesh.world_size
        measured = functools.partial(
            passes.together_ms, MeshTrainer, job=self.job, train_set=self._train_set, context=context, control=control
        )
        rows, threads = passes.slice_rows(context) / n, torch.get_num_threads()
        known_ms = step_of_replicas_ms(profile, n, rows=rows, threads=threads)
        ddp_ms = measured(mesh_config("ddp", num_workers=n), Mesh(replicate=n), expected_ms=known_ms)
        profile = dataclasses.replace(profile, ddp_ms=0.0 if ddp_ms is None else ddp_ms - known_ms)
        if not AutoConfig.of(context.options).with_parts:
            return profile
        known_ms = step_in_parts_ms(profile, n, rows=rows, threads=threads)
        parts_ms = measured(mesh_config("fsdp", num_workers=n), Mesh(shard=n), expected_ms=known_ms)
        return dataclasses.replace(profile, parts_ms=0.0 if parts_ms is None else parts_ms - known_ms)
