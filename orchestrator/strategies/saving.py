"""Which rank saves what of a model whose parts are on several ranks."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.planning.mesh import Coords
from orchestrator.state.merge import merge, without_copies, without_shared
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, gather_states
from orchestrator.strategies.parts.part import ModelPart
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.trained import Trained


def saves(name: str, trained: Trained, context: Context) -> bool:
    """Return whether a rank is the first of its stage that has this part of the parameter."""
    here = replace(trained.placements[name], stages=(context.pp_rank,))
    return here.saves(context.mesh, context.global_rank)


def own_share(state: TrainState, part: ModelPart, trained: Trained, context: Context) -> TrainState:
    """Return what of the ``state`` of a rank that saves no other one before it has."""
    state = without_shared(state, part.sharing.first_names, saved=part.sharing.saved_elsewhere)
    if context.mesh.coords(context.global_rank)._replace(pipeline=0) == Coords():
        return state
    return without_copies(state, {name for name in trained.boxes if saves(name, trained, context)})


def gathered(own: TrainState | None, part: ModelPart, context: Context) -> TrainState | None:
    """Return the state that the shares of the first replica's ranks make up, on the first of them. Collective.

    ``own``: the share of this rank; None if it saves nothing.
    """
    if own is None:
        return None
    host = part.host_group
    states = gather_states(
        own,
        ranks=context.mesh.replicas[0],
        rank=context.global_rank,
        device=context.device if host is None else CPU,
        group=host,
    )
    return None if states is None else merge(states, order=part.saved_names)
