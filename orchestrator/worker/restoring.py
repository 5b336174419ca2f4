"""How a rank comes to the state of its generation: that of survivors, of a checkpoint, or the initial one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from orchestrator.protocol.messages import Assignment
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import load
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.model_state import LEFT_OUT, check_built, total
from orchestrator.state.optimizers import without_length
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import gather_json
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.update.weight_average import forget_average
from orchestrator.worker.data.job_data import JobData
from orchestrator.worker.evaluating import Evaluations


@dataclass
class Position:
    """The progress of the run: optimizer steps, and samples over all ranks."""

    step: int = 0
    samples_consumed: int = 0


def loaded_checkpoint(
    assignment: Assignment, strategy: Strategy, *, on_progress: Callable[[], None]
) -> TrainState | None:
    """Load the checkpoint that the generation starts from, after its download if it is on a store.

    Returns:
        Its state, on rank 0 and on ranks that read their own part; None on the others, and without a checkpoint.
    """
    if assignment.checkpoint is None or assignment.sources is not None:
        return None
    if assignment.global_rank != 0 and not _reads_own_part(assignment, strategy):
        return None
    checkpoint, config = Path(assignment.checkpoint), assignment.config
    store = CheckpointStore(checkpoint.parent, assignment.checkpoint_remote)
    state = load(store.fetch(checkpoint.name, on_progress=on_progress))
    if config.train.ema_decay is None:
        forget_average(state)
    if config.evaluate is not None:
        without_length(state.meta)
    return state


def restore_state(
    checkpoint: TrainState | None,
    assignment: Assignment,
    position: Position,
    *,
    strategy: Strategy,
    data: JobData,
    evaluations: Evaluations,
    device: torch.device,
) -> None:
    """Bring model, data, evaluations and ``position`` to one state on every rank. A collective operation.

    ``checkpoint``: what :func:`loaded_checkpoint` returned.
    """
    rank = assignment.global_rank
    if assignment.sources is not None:
        meta = strategy.recover_state(
            assignment.sources,
            source_step=assignment.source_step,
            step=position.step,
            samples_consumed=position.samples_consumed,
        )
    elif assignment.checkpoint is not None:
        only_trained, world_size = assignment.config.checkpoint.only_trained, assignment.plan.world_size
        built = _frozen(strategy, world_size, device) if only_trained else {}
        meta = strategy.restore(checkpoint, source=None if _reads_own_part(assignment, strategy) else 0)
        if (left_out := meta.get(LEFT_OUT)) is not None or only_trained:
            found = _frozen(strategy, world_size, device)
            check_built(*((found, built) if left_out is None else (left_out, found)))
        is_own = Path(assignment.checkpoint).parent == RunDir(Path(assignment.run_dir)).checkpoints
        data.restore(meta, is_own=is_own)
        evaluations.improvement.restore(meta if is_own else {}, rank=rank)
        goes_on = is_own or assignment.config.evaluate is not None
        evaluations.steered.restore(meta if goes_on else None, rank=rank, world_size=world_size)
        evaluations.restore(meta if is_own else {})
    else:
        strategy.sync_initial_state()
        evaluations.improvement.restore({})
        return
    position.step, position.samples_consumed = meta["step"], meta["samples_consumed"]
    if assignment.sources is not None:
        data.share_position(assignment.sources, samples_consumed=position.samples_consumed)
        evaluations.cut_off = None  # newcomers do not know of it, so that all repeat all of it
        evaluations.improvement.share(assignment.sources, source_step=position.step, rank=rank)
        evaluations.steered.share(assignment.sources, source_step=position.step, rank=rank)


def _reads_own_part(assignment: Assignment, strategy: Strategy) -> bool:
    """Return whether this rank reads its part of a checkpoint, from a directory that all ranks share."""
    return assignment.remote is None and len(strategy.saved.writers) > 1


def _frozen(strategy: Strategy, world_size: int, device: torch.device) -> dict[str, int]:
    """Return the checksums of the frozen parameters of the whole model. A collective operation."""
    return total(gather_json(dict(strategy.frozen()), world_size=world_size, device=device))
