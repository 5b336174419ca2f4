"""The layout of a run over ranks, as a strategy decides it: the interface between planning and the strategies.

Imports neither Ray nor torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar, cast

from orchestrator.config.schema import StrategyConfig, TrainConfig
from orchestrator.planning.memory import Division
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.schedules import PipelineLayout


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The ranks of a run and what each needs.

    Attributes:
        devices_per_worker: the number of devices that one worker process drives.
        one_node: whether all ranks must be on one node.
        pipeline: the stages and micro-batches; None if the model is not cut.
        split: the names of the layers at which the stages after the first begin; None to balance the stages by
            measured time.
        notes: remarks for the user, printed with the plan.
    """

    mesh: Mesh
    devices_per_worker: int = 1
    one_node: bool = False
    pipeline: PipelineLayout | None = None
    split: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


Keys = TypeVar("Keys", bound=StrategyConfig)


class LayoutRules(Generic[Keys]):
    """What a strategy with the keys ``Keys`` decides before anything starts.

    Pure class methods, called on the driver: there is no process group, no device and no model yet.
    """

    runs_script: ClassVar[bool] = False
    """Whether a worker runs a program of the user in place of the training loop. The number of its steps is unknown, it
    saves what it needs itself, and every generation starts it anew."""

    cpu_only: ClassVar[str | None] = None
    """The reason why the strategy runs on CPUs only, for messages; None if it runs on GPUs too."""

    averages_weights: ClassVar[bool] = True
    """Whether the strategy supports ``train.ema_decay``."""

    observes_gradients: ClassVar[bool] = True
    """Whether the gradient of the whole batch is on the ranks before the update, for ``train.histograms_every``."""

    refused_precisions: ClassVar[Mapping[str, str]] = {}
    """The values of ``train.precision`` that the strategy does not support, each with the reason."""

    @classmethod
    def keys(cls, options: StrategyConfig) -> Keys:
        """Return ``options``, which are those of this strategy."""
        return cast(Keys, options)

    @classmethod
    def is_synchronous(cls, options: Keys) -> bool:
        """Return whether every step has the same loss as ``single``, for equal seed, data and global batch size."""
        return True

    @classmethod
    def replica_size(cls, options: Keys) -> int:
        """Return the number of workers that have the model together."""
        return 1

    @classmethod
    def default_num_workers(cls, options: Keys, *, gpus: Sequence[int], spares: int) -> int:
        """Return the number of workers for ``strategy.num_workers=auto``: of all complete replicas that fit.

        Args:
            options: the keys of the strategy.
            gpus: the number of GPUs of each node that has any; empty for a run on CPUs.
            spares: the number of idle workers that need GPUs as well.
        """
        size = cls.replica_size(options)
        replicas = (sum(gpus) - spares) // size if gpus else 2
        return max(1, replicas) * size

    @classmethod
    def on_nodes(
        cls, options: Keys, num_workers: int, *, workers_per_node: Sequence[int]
    ) -> tuple[Keys, tuple[str, ...]]:
        """Return ``options`` without the ``auto`` that the nodes decide, and remarks for the user.

        Args:
            options: the keys of the strategy.
            num_workers: the number of its workers.
            workers_per_node: how many fit on each. More nodes are added if they do not fit on those that are known.
        """
        return options, ()

    @classmethod
    def plan_layout(cls, options: Keys, train: TrainConfig, num_workers: int, errors: list[str]) -> Layout:
        """Return the layout of a run with ``num_workers`` workers.

        Args:
            options: the keys of the strategy.
            train: the ``train`` section of the configuration.
            num_workers: ``strategy.num_workers``, or the default for ``auto``.
            errors: receives a line for each reason why there is no such layout, which names the key to change. The
                layout that is then returned only serves to continue the checks.
        """
        return Layout(mesh=Mesh(replicate=num_workers))

    @classmethod
    def extra_processes(cls, options: Keys, num_workers: int) -> int:
        """Return how many processes more than its own the largest run has that this strategy starts for measurements.

        Args:
            options: the keys of the strategy.
            num_workers: the number of its workers.
        """
        return 0

    @classmethod
    def division(cls, options: Keys, mesh: Mesh) -> Division | None:
        """Return over how many workers the model and its training state are divided; None if they have other places."""
        return Division.of(mesh) if cls.is_synchronous(options) and not mesh.num_servers else None

    @classmethod
    def resized(cls, options: Keys, num_workers: int, *, mesh: Mesh, pipeline: PipelineLayout | None) -> Keys | None:
        """Return ``options`` for an elastic run at another size.

        Args:
            options: the options at the largest size of the run.
            mesh: the mesh at the largest size.
            pipeline: the pipeline layout at the largest size; None if the model is not cut.

        Returns:
            The options at the other size, or None if running workers cannot continue at that size.
        """
        return dataclasses.replace(options, num_workers=num_workers)
