"""What ranks that have parts of the model do for each other when a rank is lost.

Replicas of a part have its state. With ``recovery.peer_copy_every``, each rank also has copies of its own part and of
the part of a neighbour, in host memory. All ranks then continue from the last step of which all parts are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from orchestrator.protocol.messages import PENDING, RecoverableSteps
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, receive_state, send_state
from orchestrator.strategies.groups import divided
from orchestrator.strategies.peer_copies import PeerCopies
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.trainer import Trainer

if TYPE_CHECKING:
    from orchestrator.strategies.mesh_trainer import MeshTrainer


class Recovery:
    """The part of one rank in the recoveries of a run.

    Attributes:
        ahead: the steps completed by a recovery, or an exchange, that has not ended.
        copies: None if none are kept.
    """

    ahead = 0

    def __init__(self, trainer: MeshTrainer):
        """Prepare for the recoveries of the ``trainer`` of this rank."""
        self._trainer = trainer
        self.copies = PeerCopies() if self._context.peer_copy_every and len(self._ring) > 1 else None

    @property
    def _context(self) -> Context:
        return self._trainer.context

    def attach(self) -> None:
        """Connect the ring of neighbours that have copies of each other's parts. Collective."""
        if self.copies is not None:
            mesh = self._context.mesh
            group = divided(self._context, mesh.groups(mesh.neighbours_along), backend="gloo")
            self.copies.attach(group, self._ring, rank=self._context.global_rank)

    def detach(self) -> None:
        """Stop exchanging copies. Existing ones are kept."""
        if self.copies is not None:
            self.copies.detach()

    def after_step(self, *, step: int, samples_consumed: int) -> None:
        """Copy the state after a completed step, if it is time."""
        trained = self._trainer.trained
        if self.copies is not None and step % self._context.peer_copy_every == 0:
            self.copies.submit(lambda into: trained.snapshot(step=step, samples_consumed=samples_consumed, into=into))

    def offered(self, step: int) -> RecoverableSteps:
        """Offer this rank's part to all its replicas, and the copies of it and of the preceding rank's part."""
        mesh, own, step = self._context.mesh, self._context.global_rank, step + self.ahead
        pending = (step + 1,) if self._trainer.trained.settled else ()
        copied = () if self.copies is None else self.copies.own_steps
        offered = dict.fromkeys(mesh.group("replicate", own), (step, *pending, *copied))
        if self.copies is not None:
            preceding = self._ring[self._ring.index(own) - 1]
            offered |= dict.fromkeys(mesh.group("replicate", preceding), self.copies.neighbours_steps)
        return {**offered, PENDING: pending} if pending else offered

    def recover(self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int) -> dict[str, Any]:
        """Fetch the state of each rank from the rank that provides it, or from this rank's own copy.

        A replica sends its tensors from where they are. A new worker receives where its parameters are, the model in
        place; a survivor in host memory, because on its device there may be no room for two states.
        """
        completed = step
        self._settle(source_step, step + self.ahead)
        step += self.ahead
        samples_consumed += self.ahead * self._context.train.global_batch_size
        own, device = self._context.global_rank, self._context.device
        here: dict[str, int] = {"step": step, "samples_consumed": samples_consumed}
        received: TrainState | None = None
        for receiver, sender in enumerate(sources):
            if own == sender != receiver:
                send_state(self.state_of(receiver, source_step, **here), to=receiver, device=device)
            elif own == receiver != sender:
                on_device = all(parameter.device == device for parameter in self._trainer.trained.parameters)
                onto = device if step == 0 and on_device else CPU
                into = self._trainer.initial_model() if step == 0 else None
                received = receive_state(sender, device=device, onto=onto, into=into)
        meta: dict[str, Any] = here
        if received is not None:  # not before this rank has sent what others need, which may fail
            meta = self._load(received)
        elif step != source_step:
            meta = self._load(self.state_of(own, source_step, **here), consume=False)
        assert meta["step"] == source_step
        if self.copies is not None:
            self.copies.forget_after(source_step)
        self.ahead = source_step - completed  # if the exchange fails, the step is not counted
        self._trainer.owner.exchange()
        self.ahead = 0
        return meta

    def state_of(self, rank: int, wanted: int, *, step: int, samples_consumed: int) -> TrainState:
        """Return the state of ``rank`` after the step ``wanted``, which this rank has offered.

        Args:
            rank: a replica of this rank, or of the preceding one of the ring.
            step: the last one that this rank has completed.
            samples_consumed: global samples consumed up to ``step``.
        """
        is_own = rank in self._context.mesh.group("replicate", self._context.global_rank)
        if is_own and wanted == step:
            return self._trainer.trained.snapshot(step=step, samples_consumed=samples_consumed, live=True)
        assert self.copies is not None
        return self.copies.own(wanted) if is_own else self.copies.neighbours(wanted)

    def _settle(self, source_step: int, step: int) -> None:
        """Make the update of an interrupted step if other ranks have, with the norm that they have; else undo it.

        Collective. ``step``: the last one that this rank has completed.
        """
        trained, own = self._trainer.trained, torch.zeros(2, device=self._context.device)
        if step == source_step and trained.norm is not None:
            own = torch.stack([torch.ones_like(trained.norm), trained.norm])
        norms = [torch.empty_like(own) for _ in range(self._context.mesh.world_size)]
        dist.all_gather(norms, own)
        self._trainer.hooks.confirm()
        if trained.settled and source_step == step + 1:
            norm = next(norm for known, norm in norms if known)
            Trainer.end_step(self._trainer, norm)  # without what follows an update, which needs all ranks
            self.ahead += 1
        elif trained.in_step:
            trained.undo_step()
        trained.drop_gradients()

    def _load(self, state: TrainState, *, consume: bool = True) -> dict[str, Any]:
        self._trainer.load(state, consume=consume)
        return {name: state.meta[name] for name in ("step", "samples_consumed")}

    @property
    def _ring(self) -> list[int]:
        mesh = self._context.mesh
        return mesh.group(mesh.neighbours_along, self._context.global_rank)
