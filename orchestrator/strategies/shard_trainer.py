"""A strategy whose ranks have parts of tensors: how they save them together, and load them again."""

from __future__ import annotations

from typing import Any

from orchestrator.state.merge import without_copies
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import broadcast_state
from orchestrator.strategies.part_trainer import PartTrainer


class ShardTrainer(PartTrainer):
    """A strategy in which the ranks of a ``shard`` group of the mesh have boxes of the tensors, ``trained.boxes``."""

    def own_share(self, state: TrainState) -> TrainState:
        return state if self.context.global_rank == 0 else without_copies(state)

    def is_first_with(self, name: str) -> bool:
        rank = self.context.global_rank
        return rank == 0 or (rank in self.writers and name in self.trained.boxes)

    def restore_part(self, state: TrainState) -> dict[str, Any]:
        self.load(state)
        return state.meta

    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        context, boxes = self.context, self.trained.boxes
        return self.restore_part(
            broadcast_state(state, source=source, rank=context.global_rank, device=context.device, boxes=boxes)
        )
