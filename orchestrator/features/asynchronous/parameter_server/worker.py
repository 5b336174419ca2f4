"""``parameter_server``: servers own the parameters and the optimizer, workers compute gradients.

Li et al., OSDI 2014, "Scaling Distributed Machine Learning with the Parameter Server". Each worker computes the loss of
its own share of the data. In a step it pushes to every server the gradients of the server's shards, as soon as they are
complete, and receives its updated parameters while it loads the next batch. With ``consistency=sync`` a server waits
for the pushes of all workers, and the losses equal the losses of ``single``. With ``async`` every push is an update of
its own, however stale its gradient is.

A lost worker loses no parameters: the replacement receives them from the servers, and the run continues from their
step. With ``async``, workers that were ahead repeat their steps, so some gradients are applied twice. Buffers are
copied from the first surviving worker; if there is none, they are the job's initial ones. After the loss of a server
the run continues from the checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle

from orchestrator.features.asynchronous.parameter_server.placed_shards import (
    join_optimizer_state,
    make_contiguous,
    shards_of,
)
from orchestrator.features.asynchronous.parameter_server.server_connection import ServerConnection
from orchestrator.features.asynchronous.parameter_server.shared import Groups, share_meta, with_settings
from orchestrator.features.asynchronous.parameter_server.wire import NORM
from orchestrator.features.asynchronous.strategies import ParameterServerConfig
from orchestrator.job import Job
from orchestrator.model.parameter_division import extents_of, optimizer_error
from orchestrator.protocol.messages import RecoverableSteps
from orchestrator.protocol.metrics import Metric
from orchestrator.state import train_state
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, broadcast_tensors, gather_states
from orchestrator.strategies.base import Traits
from orchestrator.strategies.measure.job_metrics import EvalSums
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.reduction import Reduction, Weight, weight_sum
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.whole_model import WholeModel
from orchestrator.user_code.errors import JobError

NONFINITE_ADVICE = (
    "stale gradients may have made training diverge; set strategy.consistency=sync, or lower the learning rate"
)


class ParameterWorker(Trainer, Reduction):
    """One worker: computes gradients with a replica of the model, and is the reduction that gives them to the servers.

    Synchronous servers sum the gradients of all workers.
    """

    passes: WholeModel
    traits = Traits(moves_parameters=True)

    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        self.reduction = self
        options, train = ParameterServerConfig.of(context.options), context.train
        self._sync = options.consistency == "sync"
        self.traits = replace(self.traits, nonfinite_advice=None if self._sync else NONFINITE_ADVICE)
        clips = train.clip_norm is not None or train.clip_value is not None
        self._changes_gradient = not self._sync and (clips or train.on_nonfinite == "skip")
        self._group_set: Groups | None = None
        self._hooks: list[RemovableHandle] = []
        self._connections: list[ServerConnection] = []
        self._connections_of: dict[str, list[ServerConnection]] = {}  # by parameter
        self._last_backward = False
        self._step: int | None = None  # the last step that this worker has completed; None before it has a state
        self._last_step_end: float | None = None  # None if something else than a step came last
        self._reset_metrics()

    def setup(self, train_set: Dataset[Any]) -> None:
        super().setup(train_set)
        optimizer, model = self.trained.optimizer, self.passes.model
        if error := optimizer_error(optimizer):
            raise JobError(f"Job.optimizer: {error}")
        optimizer.state.clear()  # the servers have it; the worker needs only the settings
        extents = extents_of(model)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._memory = make_contiguous(self._parameters, extents)
        self._shards = shards_of(extents, self._parameters, self.context.mesh.num_servers)
        self._elements = sum(p.numel() for p in self._parameters.values())

    def attach(self) -> None:
        # No super().attach(): recover_state() discards an interrupted step, because only the servers know its outcome.
        groups = self._group_set = Groups.form(self.context)
        pushes = None if self._sync else groups.pushes
        self._connections = [
            ServerConnection(rank, shards, self._parameters, self._memory, pushes)
            for rank, shards in zip(self.context.mesh.servers, self._shards, strict=True)
        ]
        self._connections_of = {
            name: [
                connection
                for connection, shards in zip(self._connections, self._shards, strict=True)
                if any(shard.name == name for shard in shards)
            ]
            for name in self._parameters
        }
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, name))
            for name, parameter in self._parameters.items()
        ]
        self._reset_metrics()

    def sync_initial_state(self) -> None:
        self._step = 0

    def pull(self) -> None:
        """Wait for the parameters that the servers are sending, if any."""
        with self._waiting():
            self._answers += any(connection.is_expecting for connection in self._connections)
            self._pulled += sum(connection.complete() for connection in self._connections)

    def close(self) -> None:
        """Release everything that refers to a process group.

        The hooks of the parameters go too: the garbage collector does not see them, and they refer to this object.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._connections, self._connections_of = [], {}
        self._group_set = None

    def evaluate(self, batch: Any, valid: int) -> EvalSums:
        self.pull()
        return super().evaluate(batch, valid)

    @contextlib.contextmanager
    def around_step(self, *, logged: bool) -> Iterator[None]:
        began, self._waited_s = time.perf_counter(), 0.0
        self.pull()
        for connection in self._connections:
            connection.begin_step()
        yield
        assert self._step is not None
        self._step += 1
        self._window_steps += 1
        self._waited_in_window_s += self._waited_s
        self._window_s += time.perf_counter() - (self._last_step_end or began)
        self._last_step_end = time.perf_counter()

    def end_step(self, norm: Tensor | None) -> bool:
        admitted = super().end_step(norm)
        if not admitted and self._changes_gradient:
            self._exchange()
        return admitted

    @property
    def own_model(self) -> nn.Module | None:
        self.pull()
        return super().own_model

    def capture(
        self, *, step: int, samples_consumed: int, into: TrainState | None, part: bool = False
    ) -> TrainState | None:
        self.pull()
        state = super().capture(step=step, samples_consumed=samples_consumed, into=into)
        if state is not None:
            ranks = [self.context.global_rank, *self.context.mesh.servers]
            states = gather_states(state, ranks=ranks, rank=self.context.global_rank, device=CPU)
            assert states is not None
            shapes = {name: p.shape for name, p in self._parameters.items()}
            state.optimizer.update(join_optimizer_state([theirs.optimizer for theirs in states[1:]], shapes, into=into))
        return state

    def restore(self, state: TrainState | None, *, source: int | None) -> dict[str, Any]:
        self.pull()
        meta = super().restore(state, source=source)
        self.trained.optimizer.state.clear()
        self._step = meta["step"]
        return meta

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        """Return nothing: the servers have the state of every worker."""
        return {}

    @torch.no_grad()
    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        """Receive parameters from the servers, and buffers and frozen parameters from the first surviving worker."""
        rank, num_workers = self.context.global_rank, self.context.mesh.num_workers
        meta = share_meta(None, mesh=self.context.mesh, rank=rank)
        trained = self.trained
        trained.drop_gradients()
        own = trained.snapshot(step=step, samples_consumed=samples_consumed, live=True)
        train_state.restore(with_settings(own, meta), trained.module(), trained.optimizer, trained.scheduler)
        if self._step is not None and source_step < self._step + trained.in_step:
            trained.undo_step()  # the servers have not applied the update of this worker's last step
        trained.in_step = False
        first = torch.tensor(num_workers if self._step is None else rank)
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self._groups.workers)
        untrained = [p for p in self.passes.model.parameters() if not p.requires_grad]
        self._share([*untrained, *trained.buffers], source=int(first) % num_workers)
        trained.keep()
        self._step = source_step
        for connection in self._connections:
            connection.expect()
        self.pull()
        self._reset_metrics()
        return {name: meta[name] for name in ("step", "samples_consumed")}

    @contextlib.contextmanager
    def quiesced(self) -> Iterator[None]:
        self.pull()
        if not self._sync:
            # Servers answer again once all workers are here, so the parameters contain all pushes.
            for connection in self._connections:
                connection.expect(self._groups.long_timeout)
            for connection in self._connections:
                connection.complete(count_bytes=False)  # the metric is per step
            self._share(self.trained.buffers)
        yield
        self._last_step_end = None

    def comm_ms(self) -> float | None:
        return 1e3 * self._waited_s

    def metrics(self) -> Mapping[str, Metric]:
        waited_pct = 100 * self._waited_in_window_s / max(self._window_s, 1e-9)
        sent = sum(connection.sends.size_bytes for connection in self._connections)
        metrics = {
            f"parameter_server/worker_{self.context.global_rank}_wait_pct": Metric(waited_pct, "max"),
            "parameter_server/wait_pct": Metric(waited_pct, "mean"),
            "parameter_server/bytes_sent_per_step": Metric(sent / max(1, self._window_steps), "mean"),
        }
        if self._answers:  # the first one arrives after the first step
            received = sum(connection.received_bytes for connection in self._connections)
            pulled_pct = 100 * self._pulled / (self._answers * self._elements)
            metrics["parameter_server/bytes_received_per_step"] = Metric(received / self._answers, "mean")
            metrics["parameter_server/pulled_pct"] = Metric(pulled_pct, "mean")
        self._reset_metrics()
        return metrics

    @property
    def _groups(self) -> Groups:
        assert self._group_set is not None, "attach() has not been called"
        return self._group_set

    def _reset_metrics(self) -> None:
        for connection in self._connections:
            connection.reset_counters()
        self._window_steps = self._answers = self._pulled = 0
        self._waited_s = self._waited_in_window_s = self._window_s = 0.0
        self._last_step_end = None

    def total_weight(self, own: Weight, *, counts_samples: bool) -> Weight:
        if not self._sync:
            return super().total_weight(own, counts_samples=counts_samples)
        if counts_samples:
            return self.context.train.global_batch_size
        with self._waiting():
            return weight_sum(own, device=CPU, group=self._groups.workers).to(self.context.device)

    @contextlib.contextmanager
    def around_slice(self, *, last: bool) -> Iterator[None]:
        """Push each gradient as soon as the last backward pass has completed it."""
        self._last_backward = last
        try:
            yield
        finally:
            self._last_backward = False

    def finish(self) -> None:
        if not self._changes_gradient:
            self._put_gradients()
            self._exchange()
        if self._sync:
            self._share(self.trained.buffers)
            self.trained.drop_gradients()  # the servers clip and apply them

    def norm(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        if not self._sync:
            return super().norm(parameters, device)
        norm = torch.zeros(())
        with self._waiting():
            dist.recv(norm, self._connections[0].rank, tag=NORM)
        return norm

    def apply(self) -> None:
        """Let the servers apply the gradients, and advance the schedule of this worker."""
        if self._changes_gradient:
            self._put_gradients()
            self._exchange()
        self.trained.drop_gradients()
        super().apply()

    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        if self._last_backward and not self._changes_gradient:
            assert parameter.grad is not None
            for connection in self._connections_of[name]:
                connection.put(name, parameter.grad)

    def _put_gradients(self) -> None:
        """Add gradients that no hook reported, of parameters used only in earlier micro-batches of the step."""
        for connection in self._connections:
            for name in connection.missing:
                if (gradient := self._parameters[name].grad) is not None:
                    connection.put(name, gradient)

    def _exchange(self) -> None:
        """Send what has not been pushed yet, and start to receive the answers."""
        for connection in self._connections:
            connection.push()
            connection.expect()

    def _share(self, tensors: Sequence[Tensor], *, source: int = 0) -> None:
        """Copy the tensors of the worker ``source`` to all workers. Collective over the workers."""
        broadcast_tensors(tensors, source=source, device=CPU, group=self._groups.workers)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - began
