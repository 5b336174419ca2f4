"""The state of a shard: its parts of the parameters, their optimizer and what each worker has not seen of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.compat.generators import seed_generators
from orchestrator.config.schema import TrainConfig
from orchestrator.job import Job
from orchestrator.model.modes import in_train_mode
from orchestrator.model.sharding import PER_PARAMETER, extents_of, optimizer_error, touches_rows_alone
from orchestrator.model.stages import module_of
from orchestrator.state import train_state
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.asynchronous.parameter_server.parts import Part, dense_bytes, parts_of
from orchestrator.strategies.asynchronous.parameter_server.wire import Push, Rows, number_dtype
from orchestrator.strategies.update.gradients import clip
from orchestrator.strategies.update.job_optimizer import optimizer_of, schedule_of
from orchestrator.user_code.errors import JobError


class ShardPieces:
    """The pieces of one shard.

    Attributes:
        parts: which parts of the parameters the shard has.
        memory: the dense pieces as bytes, of shape (n,), in the layout of an answer.
        optimizer: updates the pieces.
        scheduler: the learning-rate schedule, or None.
    """

    def __init__(
        self,
        job: Job,
        state: TrainState | None,
        *,
        shard: int,
        num_shards: int,
        num_workers: int,
        seed: int,
        steps: int,
        steps_per_epoch: float | None,
    ):
        """Build the whole model and its optimizer as a worker does, and keep this shard's pieces.

        Args:
            job: builds model, optimizer and scheduler.
            state: a saved state of the whole model, whose tensors are removed as they are loaded; None for the initial
                one.
            shard: the index of this shard.
            num_shards: the number of shards.
            num_workers: the number of workers.
            seed: the seed of the model's initialization.
            steps: the steps of the run, for the scheduler.
            steps_per_epoch: the steps of an epoch, for the scheduler; None if they are not known.

        Raises:
            ValueError: shards cannot own parts of this optimizer, or there are more shards than elements.
        """
        seed_generators(seed)
        model = in_train_mode(job.model)()
        optimizer = optimizer_of(job, model)
        if error := optimizer_error(optimizer):
            raise JobError(f"Job.optimizer: {error}")
        self.scheduler = schedule_of(job, [optimizer], steps=steps, steps_per_epoch=steps_per_epoch)
        if state is not None:
            train_state.restore(state, model, optimizer, self.scheduler, consume=True)
        parameters = dict(model.named_parameters())
        self.parts = parts_of(extents_of(model), parameters, num_shards)[shard]
        taken = dense_bytes(self.parts)
        self.memory = torch.zeros(taken.stop - taken.start, dtype=torch.uint8)
        self._pieces: dict[str, nn.Parameter] = {}
        self._unseen: dict[str, Tensor] = {}  # by table, of shape (workers, rows): the rows a worker does not have
        for part in self.parts:
            values = part.of(parameters[part.name].detach())
            if part.row is None:
                piece = self.memory[part.begin - taken.start : part.end - taken.start].view(part.dtype)
                piece.copy_(values)
            else:
                piece = values.clone()
                self._unseen[part.name] = torch.zeros(num_workers, len(piece), dtype=torch.bool)
            self._pieces[part.name] = nn.Parameter(piece)
        self._module = module_of(self._pieces)
        _keep_pieces(optimizer, {parameters[p.name]: (p, self._pieces[p.name]) for p in self.parts})
        self.optimizer = optimizer
        group_of = {piece: group for group in optimizer.param_groups for piece in group["params"]}
        self._changing_tables = {  # whose updates change rows without a gradient, too
            name
            for name in self._unseen
            if not touches_rows_alone(optimizer, group_of.get(self._pieces[name], optimizer.defaults))
        }

    @property
    def has_tables(self) -> bool:
        """Whether some of the pieces are tables, which are sent row by row."""
        return bool(self._unseen)

    def set_gradients(self, pushes: Sequence[Push]) -> None:
        """Set each gradient to the sum over the pushes, or to None if no push has it."""
        for part in self.parts:
            piece = self._pieces[part.name]
            if part.row is None:
                piece.grad = _sum([g for p in pushes if (g := p.dense(part.name)) is not None], part.dtype)
            else:
                piece.grad = self._sum_of_rows(part, pushes)

    def clip(self, train: TrainConfig, norm: Tensor | None) -> None:
        """Clip the gradients; ``norm`` is the norm of the whole gradient, for ``train.clip_norm``."""
        clip(self._pieces.values(), train, norm)

    @property
    def pieces(self) -> Sequence[nn.Parameter]:
        """The pieces themselves."""
        return list(self._pieces.values())

    def update(self) -> None:
        """Apply the gradients."""
        self.optimizer.step()

    def take_unseen(self, worker: int) -> list[Rows]:
        """Return the rows of each table that changed since the last call for ``worker``."""
        rows = []
        for name, unseen in self._unseen.items():
            numbers = unseen[worker].nonzero()[:, 0]
            unseen[worker] = False
            rows.append((numbers.to(number_dtype(unseen.shape[1])), self._pieces[name].detach()[numbers]))
        return rows

    def forget_seen(self) -> None:
        """Let the next :meth:`take_unseen` return all rows, for every worker."""
        for unseen in self._unseen.values():
            unseen.fill_(True)

    def drop_gradients(self) -> None:
        """Free the gradients."""
        for piece in self._pieces.values():
            piece.grad = None

    def snapshot(
        self, *, step: int, samples_consumed: int, into: TrainState | None = None, live: bool = False
    ) -> TrainState:
        """Return the state of the pieces: the ``live`` tensors, or a copy that reuses the memory of ``into``."""
        return train_state.capture(
            self._module,
            self.optimizer,
            self.scheduler,
            step=step,
            samples_consumed=samples_consumed,
            into=into,
            live=live,
        )

    def load(self, state: TrainState, *, consume: bool = False) -> None:
        """Load a state of :meth:`snapshot`; ``consume``: remove each tensor from it as it is loaded."""
        train_state.restore(state, self._module, self.optimizer, self.scheduler, consume=consume)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors under ``"<parameter name>/<state key>"``."""
        return {
            f"{name}/{key}": value
            for name, piece in self._pieces.items()
            for key, value in self.optimizer.state.get(piece, {}).items()
            if isinstance(value, Tensor)
        }

    def _sum_of_rows(self, part: Part, pushes: Sequence[Push]) -> Tensor | None:
        rows = [pair for p in pushes if (pair := p.rows(part.name)) is not None]
        if not rows:
            return None
        numbers = torch.cat([n.long() for n, _ in rows])
        values = torch.cat([v for _, v in rows]).to(part.dtype)
        shape = self._pieces[part.name].shape
        total = torch.sparse_coo_tensor(numbers[None], values, shape, check_invariants=False).coalesce()
        if part.name in self._changing_tables:
            self._unseen[part.name].fill_(True)
            return total.to_dense()
        self._unseen[part.name][:, total.indices()[0]] = True
        return total


def _keep_pieces(optimizer: Optimizer, pieces: Mapping[Tensor, tuple[Part, nn.Parameter]]) -> None:
    """Replace whole parameters by pieces in the optimizer and in its state, and remove the other parameters."""
    state: dict[Tensor, Any] = {}
    for parameter, (part, piece) in pieces.items():
        if values := optimizer.state.get(parameter):
            state[piece] = {
                key: part.of(value).clone() if isinstance(value, Tensor) and key not in PER_PARAMETER else value
                for key, value in values.items()
            }
    optimizer.state.clear()
    optimizer.state.update(state)
    for group in optimizer.param_groups:
        group["params"] = [pieces[p][1] for p in group["params"] if p in pieces]


def _sum(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return the sum in ``dtype``. It reuses the memory of the first gradient if that has this dtype."""
    if not gradients:
        return None
    total = gradients[0].to(dtype)
    for gradient in gradients[1:]:
        total.add_(gradient)
    return total
