"""A job whose model was traced with tensors without memory: what a device has and does in any layout of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.compat.pipelining import computations
from orchestrator.config.build import ConfigError
from orchestrator.config.schema import Config
from orchestrator.features.plan.model_work import Recomputed, traced
from orchestrator.features.plan.prediction.cost import Step
from orchestrator.features.plan.prediction.forecast import Forecast
from orchestrator.features.plan.prediction.work import ModelWork
from orchestrator.job import Job
from orchestrator.model.failed_call import error_with_place
from orchestrator.model.precision import Precision, gathered_dtypes
from orchestrator.model.repeated_blocks import blocks_of
from orchestrator.planning.layout import Layout
from orchestrator.planning.memory import Division, ParameterSize, WorkerMemory, worker_memory
from orchestrator.planning.plan import Plan
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.strategies import registry
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.checks.memory_plan import UNKNOWN_STATE, parameter_sizes
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.transforms.tensor import assumed_division
from orchestrator.timeline import UNIT_TIMES, busy_s, extent_s, simulate

REPLAYED = 8
"""The workers of a pipeline whose schedule is replayed; longer ones wait in proportion."""

SUMMED_BYTES, UPDATED_BYTES = 8.0, 4.0
"""What replicas exchange for a parameter: the sum of its gradient in float32, there and back, and what is updated."""


class TracedJob:
    """A job, and what its model does and keeps in a step."""

    def __init__(self, config: Config, job: Job, *, on_gpus: bool):
        """Trace the model.

        Args:
            config: the configuration of a launch, whose layout does not matter.
            on_gpus: whether attention runs as on a GPU.

        Raises:
            ConfigError: the model cannot be traced.
        """
        self._job = job
        outline = Outline(job, config.train)
        try:
            self._traced = traced(outline, fused_attention=on_gpus)
        except Exception as e:  # whatever the job raises with fake tensors
            reason = f"the model cannot be traced with tensors that have no values: {error_with_place(e)}"
            raise ConfigError([f"{reason}; let Job.forward and Job.loss read none, as .item() does"]) from e
        model = outline.model
        assert model is not None
        self._model = model
        self._sizes: list[ParameterSize] = parameter_sizes(config, job, model)
        self._gathered: dict[tuple[type[Strategy], int], float] = {}
        self._state = functools.cache(self._state_of)
        self._gathered_more = functools.cache(self._more_of)
        self._divided = functools.cache(functools.partial(assumed_division, model))

    @property
    def work(self) -> ModelWork:
        """The work of the model for a sample."""
        return self._traced.work

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the memory is not known."""
        return () if all(size.state_known for size in self._sizes) else (UNKNOWN_STATE,)

    @property
    def block_width(self) -> int:
        """The largest number that divides both sizes of each matrix in blocks; 0 if there are none."""
        return math.gcd(*(size for matrix in self._divided(1)[0] for size in matrix.shape))

    def forecast(self, config: Config, layout: Layout | Plan, overrides: Sequence[str] = ()) -> Forecast:
        """Return what a device has and does in a layout, without its time.

        Args:
            config: the configuration, with the sizes of the layout.
            layout: where the ranks are.
            overrides: what leads to this layout, as typed on the command line.
        """
        mesh, options = layout.mesh, config.strategy
        rules = registry.load(options.name)
        trainer, division = rules.trainer(rules.keys(options), mesh, self._job), rules.division(options, mesh)
        samples = config.train.global_batch_size / mesh.data_parallel_size
        passes = config.train.grad_accumulation * (layout.pipeline.num_microbatches if layout.pipeline else 1)
        gathers = division is not None and division.parameters > 1
        divides_update = division is not None and division.optimizer > 1 and not gathers
        resharded = gathers and getattr(options, "reshard_after_forward", True)
        again = config.train.activation_checkpointing
        each = 4.0 if config.train.precision in ("fp32", "tf32") else 2.0
        recomputes: Recomputed = "blocks" if again == "blocks" else "none"  # selective keeps less, which cannot be seen
        step = Step(
            mesh=mesh,
            rows=samples / passes,
            passes=passes,
            expert=getattr(options, "expert", 1),
            chunks=1 if layout.pipeline is None else layout.pipeline.num_stages // mesh.pipeline,
            fullest=1.0 if layout.pipeline is None else _fullest(layout.pipeline, mesh.pipeline, self.work.layers),
            bubble=0.0 if layout.pipeline is None else _bubble(layout.pipeline, mesh.pipeline),
            recompute=float(recomputes == "blocks"),
            recompute_attention=float(again != "none"),
            gathers=gathers,
            divides_update=divides_update,
            gathers_each_pass=bool(resharded),
            gathers_again=bool(resharded),
            sums_each_pass=layout.pipeline is None,
            gathered_bytes=each,
            gathered_more=self._gathered_more(config.train.precision, each),
            exchanged_bytes=SUMMED_BYTES,
            updated_bytes=UPDATED_BYTES if divides_update else 0.0,
            divides_sends=False,
            divides_ends=bool(self._divided(mesh.tensor)[1]),
        )
        memory: WorkerMemory | None = None
        refused = f"strategy={options.name}: what a device has of the model is not known"
        if division is not None and layout.devices_per_worker == 1:
            refused = ""
            place = (trainer, mesh.pipeline)
            if place not in self._gathered:
                self._gathered[place] = rules.gathered_bytes(config, mesh, self._model)
            state = replace(self._state(division, mesh.tensor), gathered=self._gathered[place] / mesh.tensor)
            memory = self._traced.kept(recomputes, tensor=mesh.tensor, context=mesh.context).added(
                state, rows=step.rows, mesh=mesh, pipeline=layout.pipeline, is_gathered=gathers
            )
        return Forecast(overrides=tuple(overrides), step=step, memory=memory, refused=refused)

    def _more_of(self, precision: str, each: float) -> float:
        """Return the bytes above ``each`` that parameters outside of blocks have when they are gathered."""
        model = self._model
        dtypes = gathered_dtypes(model, Precision.named(precision, "cpu").autocast_dtype)
        in_blocks = {parameter for block in blocks_of(model) for parameter in block.parameters()}
        outside = ((name, p) for name, p in model.named_parameters() if p not in in_blocks)
        return sum(p.numel() * (dtypes[name].itemsize - each) for name, p in outside)

    def _state_of(self, division: Division, tensor: int) -> WorkerMemory:
        """Return the training state of a worker, if ``tensor`` workers divide what they may.

        Whether they can is proven at the launch, with blocks that have memory.
        """
        inside, outside = self._divided(tensor)
        sizes = [
            replace(size, rows=math.ceil(size.rows / tensor)) if p in inside | outside else size
            for size, p in zip(self._sizes, self._model.parameters(), strict=True)
        ]
        return worker_memory(sizes, division)


def _fullest(layout: PipelineLayout, workers: int, layers: int) -> float:
    """Return the layers of the worker that has most, relative to the mean, if stages begin at layers."""
    of_stage = layout.num_stages // workers if layers < layout.num_stages else 1
    return of_stage * math.ceil(layers / (workers * of_stage)) * workers / layers


def _bubble(layout: PipelineLayout, workers: int) -> float:
    """Return the time that a pipeline waits relative to the time that it computes, by a replay of its schedule.

    What it waits does not grow with the micro-batches, of which two for each stage are replayed, and is in proportion
    to the workers after the first.
    """
    stages, replayed = layout.num_stages // workers, min(workers, REPLAYED)
    microbatches = min(layout.num_microbatches, 2 * stages * replayed)
    microbatches -= microbatches % replayed if microbatches > replayed else 0  # whole rounds, as some schedules need
    waits = _waits(layout.schedule, replayed, microbatches, stages) * (workers - 1) / (replayed - 1)
    return waits / layout.num_microbatches


@functools.cache
def _waits(schedule: str, workers: int, microbatches: int, stages: int) -> float:
    """Return how many passes of a micro-batch through a worker's stages the busiest one waits."""
    spans = simulate(computations(schedule, workers, microbatches, stages))
    busy = max(busy_s(worker) for worker in spans)
    return (extent_s(spans) - busy) / (stages * (UNIT_TIMES["F"] + UNIT_TIMES["B"]))
