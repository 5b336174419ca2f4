"""A strategy whose ranks have parts of the model: what replicas of a part do for each other when a rank is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.protocol.messages import PENDING, RecoverableSteps
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, receive_state, send_state
from orchestrator.strategies.trainer import Trainer


class PartTrainer(Trainer):
    """A strategy in which the ranks of a ``replicate`` group of the mesh have the same part of the model."""

    _ahead = 0  # the steps completed by a recovery that has not ended

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        """Offer this rank's part to all its replicas."""
        mesh, step = self.context.mesh, step + self._ahead
        pending = (step + 1,) if self.trained.settled else ()
        offered = dict.fromkeys(mesh.group("replicate", self.context.global_rank), (step, *pending))
        return {**offered, PENDING: pending} if pending else offered

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        """Fetch the state of each rank from the rank that provides it.

        A replica sends its tensors from where they are. A new worker receives on its device, a survivor in host memory,
        because on its device there may be no room for two states.
        """
        self._settle(source_step, step + self._ahead)
        step += self._ahead
        samples_consumed += self._ahead * self.context.train.global_batch_size
        own, device = self.context.global_rank, self.context.device
        here: dict[str, int] = {"step": step, "samples_consumed": samples_consumed}
        meta: dict[str, Any] = here
        for receiver, sender in enumerate(sources):
            if own == sender != receiver:
                send_state(self.state_of(receiver, source_step, **here), to=receiver, device=device)
            elif own == receiver != sender:
                onto = device if step == 0 else CPU
                meta = self._load(receive_state(sender, device=device, onto=onto))
        if sources[own] == own and step != source_step:
            meta = self._load(self.state_of(own, source_step, **here), consume=False)
        assert meta["step"] == source_step
        self._ahead = 0
        return meta

    def state_of(self, rank: int, wanted: int, *, step: int, samples_consumed: int) -> TrainState:
        """Return the state of ``rank`` after the step ``wanted``, which this rank has offered.

        Args:
            rank: a replica of this rank.
            wanted: the step.
            step: the last one that this rank has completed.
            samples_consumed: global samples consumed up to ``step``.
        """
        assert wanted == step
        return self.trained.snapshot(step=step, samples_consumed=samples_consumed, live=True)

    def _settle(self, source_step: int, step: int) -> None:
        """Make the update of an interrupted step if other ranks have, with the norm that they have; else undo it.

        Collective. ``step``: the last one that this rank has completed.
        """
        trained, own = self.trained, torch.zeros(2, device=self.context.device)
        if step == source_step and trained.norm is not None:
            own = torch.stack([torch.ones_like(trained.norm), trained.norm])
        norms = [torch.empty_like(own) for _ in range(self.context.mesh.world_size)]
        dist.all_gather(norms, own)
        self.confirm()
        if trained.settled and source_step == step + 1:
            self.end_step(next(norm for known, norm in norms if known))
            self._ahead += 1
        elif trained.in_step:
            trained.undo_step()

    def _load(self, state: TrainState, *, consume: bool = True) -> dict[str, Any]:
        self.load(state, consume=consume)
        return {name: state.meta[name] for name in ("step", "samples_consumed")}
