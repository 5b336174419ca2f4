"""A server of ``parameter_server``: owns shards of the parameters and of the optimizer's state.

With ``strategy.consistency=sync`` a server waits for the pushes of all workers, sums them in the order of the ranks,
updates, and answers every worker with its parameters. With ``async`` it applies pushes one at a time as they arrive,
and answers each worker at once. In both cases a step ends when every worker's gradient of that step has been applied.

Synchronous servers update only after all of them have all pushes, so they stand at the same step when a worker dies. If
a server dies, the run continues from the checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from orchestrator.features.asynchronous.parameter_server import wire
from orchestrator.features.asynchronous.parameter_server.server_shards import ServerShards
from orchestrator.features.asynchronous.parameter_server.shared import Groups, share_meta, with_settings
from orchestrator.features.asynchronous.staleness import staleness_metrics
from orchestrator.features.asynchronous.strategies import ParameterServerConfig
from orchestrator.job import Job
from orchestrator.protocol.messages import RecoverableSteps
from orchestrator.protocol.metrics import Metric
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, broadcast_state, gather_states
from orchestrator.strategies.base import StepResult, Strategy, Traits
from orchestrator.strategies.data.datasets import steps_per_epoch
from orchestrator.strategies.measure.job_metrics import EvalSums
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.update.gradients import norm_over

STEPS_APART = 2
"""How many steps asynchronous servers may be apart, because a worker continues only when all servers have answered. On
recovery, a server may offer its parameters for any of these steps."""


@dataclass(frozen=True, kw_only=True)
class _Connected:
    """What refers to the process groups of one generation.

    Attributes:
        receiver: None if the consistency is ``sync``.
    """

    groups: Groups
    sends: wire.PendingSends
    pushes: Mapping[int, wire.Push]
    receiver: wire.PushReceiver | None


class Server(Strategy):
    """One server."""

    traits = Traits(reads_data=False)

    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        options, server = ParameterServerConfig.of(context.options), context.mesh.server(context.global_rank)
        assert server is not None
        self._index = server
        self._workers = range(context.mesh.num_workers)
        self._sync = options.consistency == "sync"
        self._step: int | None = None  # the last completed step of the run; None before there is a state
        self._max_lead = 0  # of a worker over the slowest, in steps
        self._connections: _Connected | None = None

    def setup(self, train_set: Dataset[Any]) -> None:
        self._steps_per_epoch = steps_per_epoch(self.job, train_set, self.context.train)
        self._build(None)

    def attach(self) -> None:
        self._shards.drop_gradients()  # they may be the memory of pushes of another generation
        groups = Groups.form(self.context)
        pushes = {w: wire.Push(self._shards.shards) for w in self._workers}
        self._connections = _Connected(
            groups=groups,
            sends=wire.PendingSends(),
            pushes=pushes,
            receiver=None if self._sync else wire.PushReceiver(pushes, groups.pushes),
        )
        self._updates = 0
        self._answered_at = dict.fromkeys(self._workers, 0)  # updates contained in the parameters of each worker
        self._staleness: list[int] = []
        self._window_start, self._window_updates = time.perf_counter(), 0

    def sync_initial_state(self) -> None:
        self._continue_from(0)

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool, want_metrics: bool) -> StepResult:
        assert self._step is not None
        self._waited_s = 0.0
        norm: Tensor | None = None
        skipped = False
        if self._sync:
            norm, skipped = self._serve_all(want_grad_norm)
        else:
            while min(self._applied.values()) <= self._step:
                self._serve_one()
            self._end_step()
        self._wait_for(self._connected.sends)
        nothing = torch.zeros(())
        return StepResult(loss_sum=nothing, weight=nothing, grad_norm=norm, skipped=skipped)

    def evaluate(self, batch: Any, valid: int) -> EvalSums:
        return EvalSums(loss_sum=torch.zeros(()), weight=torch.zeros(()), metrics={})

    def capture(
        self, *, step: int, samples_consumed: int, into: TrainState | None, part: bool = False
    ) -> TrainState | None:
        """Send this server's shards of the optimizer's state to worker 0, which saves."""
        ranks = [0, *self.context.mesh.servers]
        gather_states(self.state_to_save(), ranks=ranks, rank=self.context.global_rank, device=CPU)
        return None

    def state_to_save(self) -> TrainState:
        return TrainState(model={}, optimizer=self._shards.optimizer_tensors(), meta={})

    def restore(self, state: TrainState | None, *, source: int | None) -> dict[str, Any]:
        assert source is not None  # there is one writer
        state = broadcast_state(state, source=source, rank=self.context.global_rank, device=CPU)
        self._build(state)
        self._continue_from(state.step)
        return state.meta

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        """Offer this server's state, to itself and to every worker."""
        if self._step is None:
            return {}
        own = (self._step,) if self._sync else tuple(range(max(0, self._step - STEPS_APART), self._step + 1))
        return {self.context.global_rank: own, **dict.fromkeys(self._workers, own)}

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        """Send the workers this server's parameters, and the optimizer's settings and the schedule of one server."""
        mesh, rank = self.context.mesh, self.context.global_rank
        assert self._step is not None
        samples_consumed += (self._step - step) * self.context.train.global_batch_size
        own = self._shards.live_state(step=self._step, samples_consumed=samples_consumed)
        meta = share_meta(own.meta if self._step == source_step else None, mesh=mesh, rank=rank)
        if self._step != source_step:
            self._shards.load(with_settings(own, meta))
        self._continue_from(source_step)
        self._shards.forget_seen()
        for worker in self._workers:
            self._answer(worker)
        self._connected.sends.wait()
        return {name: meta[name] for name in ("step", "samples_consumed")}

    def close(self) -> None:
        """Release everything that refers to a process group."""
        if self._connections is not None and self._connections.receiver is not None:
            self._connections.receiver.end()
        self._connections = None

    @contextlib.contextmanager
    def quiesced(self) -> Iterator[None]:
        if not self._sync:
            for worker in self._workers:
                self._answer(worker, self._connected.groups.long_timeout)
            self._connected.sends.wait()
        yield

    def comm_ms(self) -> float | None:
        return 1e3 * self._waited_s

    @property
    def group_lrs(self) -> Sequence[float]:
        return (float(self._shards.optimizer.param_groups[0]["lr"]),)

    @property
    def follows_evaluations(self) -> bool:
        return self._shards.scheduler is not None and self._shards.scheduler.follows_evaluations

    def steer(self, lr_factor: float, measured: Sequence[float], *, new_run: bool = False) -> None:
        if self._shards.scheduler is not None:
            self._shards.scheduler.steer(lr_factor, measured, new_run=new_run)

    def metrics(self) -> Mapping[str, Metric]:
        now = time.perf_counter()
        rate = (self._updates - self._window_updates) / (now - self._window_start)
        metrics = {"parameter_server/updates_per_s": Metric(rate, "max")}
        if not self._sync:
            metrics |= staleness_metrics(self._staleness)
            metrics["async/steps_ahead_max"] = Metric(self._max_lead, "max")
        self._staleness, self._max_lead = [], 0
        self._window_start, self._window_updates = now, self._updates
        return metrics

    @property
    def _connected(self) -> _Connected:
        assert self._connections is not None, "attach() has not been called"
        return self._connections

    def _build(self, state: TrainState | None) -> None:
        context = self.context
        self._shards = ServerShards(
            self.job,
            state,
            server=self._index,
            num_servers=context.mesh.num_servers,
            num_workers=len(self._workers),
            seed=context.seed,
            train=context.train,
            steps_per_epoch=self._steps_per_epoch,
        )

    def _continue_from(self, step: int) -> None:
        self._step = step
        self._applied = dict.fromkeys(self._workers, step)  # the last step of each worker that has been applied
        self._max_lead = 0

    def _end_step(self, *, skipped: bool = False) -> None:
        assert self._step is not None
        self._step += 1
        if self._shards.scheduler is not None and not skipped:
            self._shards.scheduler.step()

    def _serve_all(self, want_grad_norm: bool) -> tuple[Tensor | None, bool]:
        """Run a synchronous step.

        Returns:
            The norm of the whole gradient, or None if it is not needed, and whether the update was skipped.
        """
        train, sends, pushes = self.context.train, self._connected.sends, self._connected.pushes
        others = [rank for rank in self.context.mesh.servers if rank != self.context.global_rank]
        # Point-to-point messages instead of a barrier: a collective operation would slow down small steps.
        ready = [dist.irecv(torch.zeros(1), other, tag=wire.READY) for other in others]
        arriving = {worker: push.expect(worker) for worker, push in pushes.items()}
        for worker, work in arriving.items():
            self._wait_for(work)
            pushes[worker].complete(worker)
        for other in others:
            sends.send(torch.zeros(1), other, wire.READY)
        self._shards.set_gradients(list(pushes.values()))
        for message in ready:
            self._wait_for(message)
        norm: Tensor | None = None
        if train.clip_norm is not None or train.on_nonfinite == "skip" or want_grad_norm:
            norm = norm_over(self._connected.groups.servers, self._shards.tensors, CPU)
            if self._index == 0:
                for worker in self._workers:
                    sends.send(norm, worker, wire.NORM)
        skipped = norm is not None and train.on_nonfinite == "skip" and not torch.isfinite(norm)
        if not skipped:
            self._shards.clip(train, norm)
            self._update()
        self._end_step(skipped=skipped)
        for worker in self._workers:
            self._answer(worker)
        return norm, skipped

    def _serve_one(self) -> None:
        """Apply the next push, and answer its worker."""
        receiver = self._connected.receiver
        assert receiver is not None
        began = time.perf_counter()
        worker, push = receiver.next()
        self._waited_s += time.perf_counter() - began
        self._staleness.append(self._updates - self._answered_at[worker])
        self._wait_for(self._connected.sends)
        self._shards.set_gradients([push])
        self._update()
        receiver.free(worker)
        self._applied[worker] += 1
        self._max_lead = max(self._max_lead, self._applied[worker] - min(self._applied.values()))
        self._answer(worker)

    def _wait_for(self, arriving: dist.Work | wire.PendingSends | None) -> None:
        assert arriving is not None
        began = time.perf_counter()
        arriving.wait()
        self._waited_s += time.perf_counter() - began

    def _update(self) -> None:
        self._shards.update()
        self._updates += 1

    def _answer(self, worker: int, group: dist.ProcessGroup | None = None) -> None:
        """Send a worker the dense parameters, and the rows of tables that it has not seen."""
        sends, memory = self._connected.sends, self._shards.memory
        if memory.numel():
            sends.send(memory, worker, wire.ANSWER, group)
        if self._shards.has_tables:
            rows = self._shards.take_unseen(worker)
            sends.send(torch.tensor([len(n) for n, _ in rows]), worker, wire.ANSWERED_COUNTS, group)
            if any(len(n) for n, _ in rows):
                sends.send(wire.pack_rows(rows), worker, wire.ANSWERED_ROWS, group)
        self._answered_at[worker] = self._updates
