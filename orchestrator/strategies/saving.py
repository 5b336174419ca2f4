"""How ranks with parts of a model save them, and how each gets its part of a loaded state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.planning.mesh import Coords
from orchestrator.state.merge import merge, without_copies, without_shared
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, broadcast_state, gather_states
from orchestrator.strategies.rank_context import Context

if TYPE_CHECKING:
    from orchestrator.strategies.mesh_trainer import MeshTrainer


class Saving:
    """The part of one rank in what is saved and loaded of a mesh."""

    def __init__(self, trainer: MeshTrainer):
        self._trainer = trainer

    @property
    def _context(self) -> Context:
        return self._trainer.context

    def saves(self, name: str) -> bool:
        """Return whether this rank is the first of its stage that has this part of the parameter."""
        here = replace(self._trainer.trained.placements[name], stages=(self._context.pp_rank,))
        return here.saves(self._context.mesh, self._context.global_rank)

    def is_first_with(self, name: str) -> bool:
        """Return whether no rank before this one has this part of the parameter, by this name."""
        return name not in self._trainer.part.sharing.saved_elsewhere and self.saves(name)

    def share(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        """Return what this rank saves; None if it saves nothing."""
        if not self._writes:
            return None
        trainer = self._trainer
        state = trainer.trained.to_save(
            step=step, samples_consumed=samples_consumed, into=into, left_out=trainer.left_out
        )
        return self._own(state)

    def live_model(self) -> TrainState | None:
        """Return the tensors of the model themselves that this rank would save; None if it saves nothing."""
        if not self._writes:
            return None
        return self._own(replace(self._trainer.trained.snapshot(step=0, samples_consumed=0, live=True), optimizer={}))

    @property
    def _writes(self) -> bool:
        return self._context.global_rank in self._trainer.saved.writers

    def _own(self, state: TrainState) -> TrainState:
        sharing = self._trainer.part.sharing
        state = without_shared(state, sharing.first_names, saved=sharing.saved_elsewhere)
        if self._context.mesh.coords(self._context.global_rank)._replace(pipeline=0) == Coords():
            return state
        return without_copies(state, {name for name in self._trainer.trained.boxes if self.saves(name)})

    def gathered(self, own: TrainState | None) -> TrainState | None:
        """Return the state that the shares of the first replica's ranks make up, on the first of them. Collective."""
        if own is None:
            return None
        part, context = self._trainer.part, self._context
        host = part.host_group
        states = gather_states(
            own,
            ranks=context.mesh.replicas[0],
            rank=context.global_rank,
            device=context.device if host is None else CPU,
            group=host,
        )
        return None if states is None else merge(states, order=part.saved_names)

    def sent(self, state: TrainState | None, *, source: int) -> TrainState:
        """Return this rank's part of the state that ``source`` has. Collective."""
        trainer, context = self._trainer, self._context
        wanted = {*trainer.trained.module().state_dict(), *trainer.part.sharing.first_names.values()}
        has_all = context.mesh.pipeline == 1  # so that a tensor that is not wanted is of another model
        return broadcast_state(
            state,
            source=source,
            rank=context.global_rank,
            device=context.device,
            keep=lambda name: has_all or name in wanted,
            boxes=trainer.trained.boxes,
        )
