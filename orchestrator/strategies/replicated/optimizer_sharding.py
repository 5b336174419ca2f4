"""``strategy.shard_optimizer``: each rank trains a part of parameters that it has whole, and gets the others' parts.

The parts are the state of a rank. What has been exchanged is a copy of them, which a recovery makes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.planning.mesh import DENSE
from orchestrator.planning.placement import AxisCut
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.measure.device import TensorSize, sizes_of
from orchestrator.strategies.part_trainer import PartTrainer
from orchestrator.strategies.replicated.optimizer_shards import OptimizerShards
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.update.job_optimizer import optimizer_of_part


class OptimizerSharding(PartTrainer):
    """What a strategy with whole parameters on each rank does in addition."""

    shards: OptimizerShards

    def trained_part_of(
        self,
        modules: Sequence[nn.Module],
        whole: nn.Module,
        cuts: Mapping[str, AxisCut],
        train_set: Dataset[Any],
    ) -> Trained:
        """Return what this rank trains of its part.

        Args:
            modules: what it calls.
            whole: the whole model, maybe without memory.
            cuts: how its parameters are divided.
            train_set: the samples.
        """
        index, count = self.context.mesh.place(DENSE, self.context.global_rank)
        self.shards = OptimizerShards(self.undivided, cuts, index=index, count=count, placed=self.placement)
        trained = Trained(
            self.job,
            self.context,
            modules,
            {"": optimizer_of_part(self.job, whole, self.shards.module())},
            train_set,
            module=self.shards.module,
            placements=self.placed(self.shards.placements),
        )
        moving = {*trained.moving}
        trained.moving = [self.shards.whole[name] for name, shard in self.shards.shards.items() if shard in moving]
        return trained

    def sync_initial_state(self) -> None:
        super().sync_initial_state()
        self.shards.exchange()

    def apply(self) -> None:
        self.shards.take(self.shards.frozen)  # which forward passes may have changed
        super().apply()

    def end_step(self, norm: Tensor | None) -> bool:
        admitted = super().end_step(norm)
        if admitted:
            self._ahead = 1  # if the exchange fails, the step is not counted, but this rank's part has been updated
            self.shards.exchange(self.shards.trained)
            self._ahead = 0
        return admitted

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        with super().averaged_weights():
            self.shards.exchange(self.shards.trained)
            yield
        self.shards.exchange(self.shards.trained)

    def restore_part(self, state: TrainState) -> dict[str, Any]:
        meta = super().restore_part(state)
        self.shards.exchange()
        return meta

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        meta = super().recover_state(sources, source_step=source_step, step=step, samples_consumed=samples_consumed)
        self._ahead = source_step - step  # if the exchange fails, the step is not counted
        self.shards.exchange()
        self._ahead = 0
        return meta

    def tensor_sizes(self) -> Iterable[TensorSize]:
        of_parts = [size for size in super().tensor_sizes() if size.kind == "optimizer state"]
        whole = sizes_of(self.undivided(), self.trained.optimizer)
        return [*of_parts, *(s for s in whole if s not in of_parts)]

    def close(self) -> None:
        super().close()
        if hasattr(self, "shards"):  # otherwise setup() has failed, or nothing is built yet
            self.shards.group = None
