"""A strategy whose ranks have parts of tensors: how they save them together, and load them again."""

from __future__ import annotations

from typing import Any

from orchestrator.state.merge import merge, without_copies
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import broadcast_state, gather_states
from orchestrator.strategies.part_trainer import PartTrainer


class ShardTrainer(PartTrainer):
    """A strategy in which the ranks of a ``shard`` group of the mesh have boxes of the tensors, ``trained.boxes``."""

    def capture(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        state = self.capture_part(step=step, samples_consumed=samples_consumed, into=into)
        if state is None:
            return None
        states = gather_states(
            state,
            ranks=self.writers,
            rank=self.context.global_rank,
            device=self.context.device,
            into=None,
        )
        return None if states is None else merge(states, order=self.saved_names)

    def capture_part(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        if self.context.global_rank not in self.writers:
            return None
        state = self.trained.snapshot(step=step, samples_consumed=samples_consumed, into=into, left_out=self.left_out)
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
