"""The state of a server: its shards of the parameters, their optimizer and what each worker has not seen of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.compat.generators import seed_generators
from orchestrator.config.schema import TrainConfig
from orchestrator.features.asynchronous.parameter_server.placed_shards import PlacedShard, dense_bytes, shards_of
from orchestrator.features.asynchronous.parameter_server.wire import Push, Rows, number_dtype
from orchestrator.job import Job
from orchestrator.model.modes import in_train_mode
from orchestrator.model.parameter_division import PER_PARAMETER, extents_of, optimizer_error, touches_rows_alone
from orchestrator.model.stages.own_stages import module_of
from orchestrator.state import train_state
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.update.gradients import clip
from orchestrator.strategies.update.job_optimizer import optimizer_of, schedule_of
from orchestrator.user_code.errors import JobError


class ServerShards:
    """The shards of one server, as tensors.

    Attributes:
        shards: which shards of the parameters the server has.
        memory: the dense tensors as bytes, of shape (n,), in the layout of an answer.
        scheduler: the learning-rate schedule, or None.
    """

    def __init__(
        self,
        job: Job,
        state: TrainState | None,
        *,
        server: int,
        num_servers: int,
        num_workers: int,
        seed: int,
        train: TrainConfig,
        steps_per_epoch: float | None,
    ):
        """Build the whole model and its optimizer as a worker does, and keep this server's shards.

        Args:
            job: builds model, optimizer and scheduler.
            state: a saved state of the whole model, whose tensors are removed as they are loaded; None for the initial
                one.
            server: the index of this server.
            seed: the seed of the model's initialization.
            train: the section of the configuration, for the scheduler.
            steps_per_epoch: the steps of an epoch, for the scheduler; None if they are not known.

        Raises:
            ValueError: servers cannot own shards of this optimizer, or there are more servers than elements.
        """
        seed_generators(seed)
        model = in_train_mode(job.model)()
        optimizer = optimizer_of(job, model)
        if error := optimizer_error(optimizer):
            raise JobError(f"Job.optimizer: {error}")
        self.scheduler = schedule_of(job, [optimizer], train, steps_per_epoch=steps_per_epoch)
        if state is not None:
            train_state.restore(state, model, optimizer, self.scheduler, consume=True)
        parameters = dict(model.named_parameters())
        self.shards = shards_of(extents_of(model), parameters, num_servers)[server]
        taken = dense_bytes(self.shards)
        self.memory = torch.zeros(taken.stop - taken.start, dtype=torch.uint8)
        self._tensors: dict[str, nn.Parameter] = {}
        self._unseen: dict[str, Tensor] = {}  # by table, of shape (workers, rows): the rows a worker does not have
        for shard in self.shards:
            values = shard.of(parameters[shard.name].detach())
            if shard.row is None:
                tensor = self.memory[shard.begin - taken.start : shard.end - taken.start].view(shard.dtype)
                tensor.copy_(values)
            else:
                tensor = values.clone()
                self._unseen[shard.name] = torch.zeros(num_workers, len(tensor), dtype=torch.bool)
            self._tensors[shard.name] = nn.Parameter(tensor)
        self._module = module_of(self._tensors)
        _keep_shards(optimizer, {parameters[p.name]: (p, self._tensors[p.name]) for p in self.shards})
        self.optimizer = optimizer
        group_of = {tensor: group for group in optimizer.param_groups for tensor in group["params"]}
        self._changing_tables = {  # whose updates change rows without a gradient, too
            name
            for name in self._unseen
            if not touches_rows_alone(optimizer, group_of.get(self._tensors[name], optimizer.defaults))
        }

    @property
    def has_tables(self) -> bool:
        """Whether some of the tensors are tables, which are sent row by row."""
        return bool(self._unseen)

    def set_gradients(self, pushes: Sequence[Push]) -> None:
        """Set each gradient to the sum over the pushes, or to None if no push has it."""
        for shard in self.shards:
            tensor = self._tensors[shard.name]
            if shard.row is None:
                tensor.grad = _sum([g for p in pushes if (g := p.dense(shard.name)) is not None])
            else:
                tensor.grad = self._sum_of_rows(shard, pushes)

    def clip(self, train: TrainConfig, norm: Tensor | None) -> None:
        """Clip the gradients; ``norm`` is the norm of the whole gradient, for ``train.clip_norm``."""
        clip(self._tensors.values(), train, norm)

    @property
    def tensors(self) -> Sequence[nn.Parameter]:
        """The tensors themselves."""
        return list(self._tensors.values())

    def update(self) -> None:
        """Apply the gradients."""
        self.optimizer.step()

    def take_unseen(self, worker: int) -> list[Rows]:
        """Return the rows of each table that changed since the last call for ``worker``."""
        rows = []
        for name, unseen in self._unseen.items():
            numbers = unseen[worker].nonzero()[:, 0]
            unseen[worker] = False
            rows.append((numbers.to(number_dtype(unseen.shape[1])), self._tensors[name].detach()[numbers]))
        return rows

    def forget_seen(self) -> None:
        """Let the next :meth:`take_unseen` return all rows, for every worker."""
        for unseen in self._unseen.values():
            unseen.fill_(True)

    def drop_gradients(self) -> None:
        """Free the gradients."""
        for tensor in self._tensors.values():
            tensor.grad = None

    def live_state(self, *, step: int, samples_consumed: int) -> TrainState:
        """Return the state of the tensors, with the tensors themselves."""
        return train_state.capture(
            self._module, self.optimizer, self.scheduler, step=step, samples_consumed=samples_consumed, live=True
        )

    def load(self, state: TrainState) -> None:
        """Load a state of :meth:`live_state`."""
        train_state.restore(state, self._module, self.optimizer, self.scheduler)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors under ``"<parameter name>/<state key>"``."""
        return {
            f"{name}/{key}": value
            for name, tensor in self._tensors.items()
            for key, value in self.optimizer.state.get(tensor, {}).items()
            if isinstance(value, Tensor)
        }

    def _sum_of_rows(self, shard: PlacedShard, pushes: Sequence[Push]) -> Tensor | None:
        rows = [pair for p in pushes if (pair := p.rows(shard.name)) is not None]
        if not rows:
            return None
        numbers = torch.cat([n.long() for n, _ in rows])
        values = torch.cat([v for _, v in rows])
        shape = self._tensors[shard.name].shape
        total = torch.sparse_coo_tensor(numbers[None], values, shape, check_invariants=False).coalesce()
        if shard.name in self._changing_tables:
            self._unseen[shard.name].fill_(True)
            return total.to_dense()
        self._unseen[shard.name][:, total.indices()[0]] = True
        return total


def _keep_shards(optimizer: Optimizer, tensors: Mapping[Tensor, tuple[PlacedShard, nn.Parameter]]) -> None:
    """Replace whole parameters by tensors in the optimizer and in its state, and remove the other parameters."""
    state: dict[Tensor, Any] = {}
    for parameter, (shard, tensor) in tensors.items():
        if values := optimizer.state.get(parameter):
            state[tensor] = {
                key: shard.of(value).clone() if isinstance(value, Tensor) and key not in PER_PARAMETER else value
                for key, value in values.items()
            }
    optimizer.state.clear()
    optimizer.state.update(state)
    for group in optimizer.param_groups:
        group["params"] = [tensors[p][1] for p in group["params"] if p in tensors]


def _sum(gradients: Sequence[Tensor]) -> Tensor | None:
    """Return the sum, in the memory of the first gradient."""
    if not gradients:
        return None
    total = gradients[0]
    for gradient in gradients[1:]:
        total.add_(gradient)
    return total
