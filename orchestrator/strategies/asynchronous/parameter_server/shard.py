"""A shard of ``parameter_server``: it owns pieces of the parameters and their part of the optimizer.

In a synchronous step it adds up the gradients of all workers in the order of their ranks, updates and answers all.
Otherwise it takes them as they come, one at a time, and answers each worker at once, or with ``stale`` as soon as
that one is not too far ahead. Either way a step is over when every worker's gradient of it has been applied.

Synchronous shards update once all of them have all gradients, so that whenever a worker dies they stand after the same
step. Where that fails, because a shard died too, and where a shard is to be replaced, their copies have a common step
(``recovery.peer_copy_every``), or the checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from orchestrator.job import Job
from orchestrator.model.sharding import PER_PARAMETER, extents_of, optimizer_error, touches_rows_alone
from orchestrator.model.stages import module_of
from orchestrator.planning.mesh import Mesh
from orchestrator.protocol.metrics import Metric
from orchestrator.state import train_state
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import broadcast_json, broadcast_state, gather_states, receive_state, send_state
from orchestrator.strategies.asynchronous.parameter_server.strategy import ParameterServerConfig
from orchestrator.strategies.asynchronous.parameter_server.wire import (
    ANSWER,
    ANSWERED_COUNTS,
    ANSWERED_ROWS,
    NORM,
    READY,
    Groups,
    Part,
    PendingSends,
    Push,
    PushReceiver,
    number_dtype,
    pack_rows,
    parts_of,
    whole_bytes,
)
from orchestrator.strategies.asynchronous.staleness import staleness_figures
from orchestrator.strategies.base import Context, EvalSums, StepResult, Strategy
from orchestrator.strategies.peer_copies import PeerCopies
from orchestrator.strategies.replicated.whole_model import entries

CPU = torch.device("cpu")
STEPS_APART = 2
"""Where nobody waits for anybody, shards may be so far apart, since a worker goes on when all of them have answered; a
shard may take its parameters for those of any of these steps."""


class Shard(Strategy):
    reads_data = False

    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        options, shard = context.options, context.mesh.shard(context.global_rank)
        assert isinstance(options, ParameterServerConfig)
        assert shard is not None
        self._options, self._shard = options, shard
        self._workers = range(context.mesh.num_workers)
        self._sync = options.consistency == "sync"
        self._lead = options.max_staleness if options.consistency == "stale" else None
        self._at: int | None = None  # the step of the run after which its parameters are
        self._copies: PeerCopies | None = None
        if context.peer_copy_every and context.mesh.num_shards > 1:
            self._copies = PeerCopies()

    def setup(self, train_set: Dataset[Any]) -> None:
        self._take_over(None)

    def attach(self) -> None:
        mesh = self.context.mesh
        self._groups = Groups.form(mesh)
        self._sends = PendingSends()
        self._pushes = {w: Push(self._parts, compression=self._options.compression) for w in self._workers}
        self._arrivals = None if self._sync else PushReceiver(self._pushes, self._groups.pushes)
        if self._copies is not None:
            self._copies.attach(self._groups.copies, mesh.shards, rank=self.context.global_rank)
        self._unanswered: set[int] = set()
        self._updates = 0
        self._seen = dict.fromkeys(self._workers, 0)  # updates in the parameters that a worker has
        self._staleness: list[int] = []
        self._most_ahead = 0
        self._told_at, self._told_updates = time.perf_counter(), 0

    def sync_initial_state(self) -> None:
        self._begin_after(0)

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool) -> StepResult:
        assert self._at is not None
        self._waited_s = 0.0
        norm: Tensor | None = None
        skipped = False
        if self._sync:
            norm, skipped = self._serve_all(want_grad_norm)
        else:
            while min(self._done.values()) <= self._at:
                self._serve_one()
            self._end_step()
        self._wait_for(self._sends)
        nothing = torch.zeros(())
        return StepResult(loss_sum=nothing, weight=nothing, grad_norm=norm, skipped=skipped)

    def after_step(self, *, step: int, samples_consumed: int) -> None:
        copies, every = self._copies, self.context.peer_copy_every
        if copies is not None and step % every == 0:
            copies.submit(lambda into: self._snapshot(samples_consumed, into=into))

    def evaluate(self, batch: Any, valid: int) -> EvalSums:
        return EvalSums(loss_sum=torch.zeros(()), weight=torch.zeros(()), metrics={})

    def capture(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        tensors = {
            f"{name}/{key}": value
            for name, piece in self._pieces.items()
            for key, value in self.optimizer.state.get(piece, {}).items()
            if isinstance(value, Tensor)
        }
        ranks = [0, *self.context.mesh.shards]
        state = TrainState(model={}, optimizer=tensors, meta={})
        gather_states(state, ranks=ranks, rank=self.context.global_rank, device=CPU, into=None)
        return None

    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        state = broadcast_state(state, source=source, rank=self.context.global_rank, device=CPU)
        self._take_over(state)
        self._begin_after(state.step)
        return state.meta

    def recoverable_steps(self, step: int, *, update_complete: bool) -> Mapping[int, tuple[int, ...]]:
        """Its own state, that of any worker, which can have its parameters, and the copy of the shard before it."""
        if self._at is None:
            return {}
        own = (self._at,) if self._sync else tuple(range(max(0, self._at - STEPS_APART), self._at + 1))
        found: dict[int, tuple[int, ...]] = {}
        if self._copies is not None:
            own = (*own, *self._copies.own_steps)
            found[self.context.mesh.shards[self._shard - 1]] = self._copies.neighbours_steps
        return {**found, self.context.global_rank: own, **dict.fromkeys(self._workers, own)}

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        """Have the state of this shard, then give every worker its part of the parameters, and what the optimizer's
        options and the schedule are."""
        mesh, rank, copies = self.context.mesh, self.context.global_rank, self._copies
        for receiver in mesh.shards:
            sender = sources[receiver]
            if rank == sender != receiver:
                assert copies is not None
                send_state(copies.neighbours(source_step), to=receiver, device=CPU)
            elif rank == receiver != sender:
                self._load(receive_state(sender, device=CPU))
        if copies is not None:
            if sources[rank] == rank and self._at != source_step and source_step in copies.own_steps:
                self._load(copies.own(source_step))
            copies.forget_after(source_step)
        assert self._at is not None
        samples_consumed += (self._at - step) * self.context.train.global_batch_size
        own = self._snapshot(samples_consumed)
        meta = share_meta(own.meta if self._at == source_step else None, mesh=mesh, rank=rank)
        if self._at != source_step:
            self._load(with_settings(own, meta))
        self._begin_after(source_step)
        for unseen in self._unseen.values():
            unseen.fill_(True)
        for worker in self._workers:
            self._answer(worker)
        self._sends.wait()
        return {name: meta[name] for name in ("step", "samples_consumed")}

    def close(self) -> None:
        """Give up all that holds a process group."""
        if self._copies is not None:
            self._copies.detach()
        if (arrivals := vars(self).pop("_arrivals", None)) is not None:
            arrivals.end()
        for owner in ("_groups", "_sends", "_pushes"):
            vars(self).pop(owner, None)

    @contextlib.contextmanager
    def quiesced(self) -> Iterator[None]:
        if not self._sync:
            for worker in self._workers:
                self._answer(worker, self._groups.long_timeout)
            self._sends.wait()
        yield

    def comm_ms(self) -> float | None:
        return 1e3 * self._waited_s

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def metrics(self) -> Mapping[str, Metric]:
        now = time.perf_counter()
        rate = (self._updates - self._told_updates) / (now - self._told_at)
        metrics = {"parameter_server/updates_per_s": Metric(rate, "max")}
        if not self._sync:
            metrics |= staleness_figures(self._staleness)
            metrics["async/steps_ahead_max"] = Metric(self._most_ahead, "max")
        self._staleness, self._most_ahead = [], 0
        self._told_at, self._told_updates = now, self._updates
        return metrics

    def _take_over(self, state: TrainState | None) -> None:
        """Build everything as a worker alone would, or as it was saved, and keep this shard's part."""
        torch.manual_seed(self.context.seed)
        model = self.job.model()
        optimizer = self.job.optimizer([p for p in model.parameters() if p.requires_grad])
        if error := optimizer_error(optimizer):
            raise ValueError(f"Job.optimizer: {error}")
        self.scheduler = self.job.scheduler(optimizer, self.context.train.steps)
        if state is not None:
            train_state.restore(state, model, optimizer, self.scheduler)
        parameters = dict(model.named_parameters())
        extents = extents_of(model)
        self._parts = parts_of(extents, parameters, self.context.mesh.num_shards)[self._shard]
        taken = whole_bytes(self._parts)
        self._memory = torch.zeros(taken.stop - taken.start, dtype=torch.uint8)
        self._pieces: dict[str, nn.Parameter] = {}
        self._unseen: dict[str, Tensor] = {}  # of each table the rows that changed, by worker
        for part in self._parts:
            values = part.of(parameters[part.name].detach())
            if part.row is None:
                piece = self._memory[part.begin - taken.start : part.end - taken.start].view(part.dtype)
                piece.copy_(values)
            else:
                piece = values.clone()
                self._unseen[part.name] = torch.zeros(len(self._workers), len(piece), dtype=torch.bool)
            self._pieces[part.name] = nn.Parameter(piece)
        self._module = module_of(self._pieces)
        keep_parts(optimizer, {parameters[p.name]: (p, self._pieces[p.name]) for p in self._parts})
        self.optimizer = optimizer
        group_of = {piece: group for group in optimizer.param_groups for piece in group["params"]}
        self._whole_tables = {
            name
            for name in self._unseen
            if not touches_rows_alone(optimizer, group_of.get(self._pieces[name], optimizer.defaults))
        }

    def _begin_after(self, step: int) -> None:
        self._at = step
        self._done = dict.fromkeys(self._workers, step)  # the last step whose gradient of a worker is applied

    def _end_step(self, *, skipped: bool = False) -> None:
        assert self._at is not None
        self._at += 1
        if self.scheduler is not None and not skipped:
            self.scheduler.step()

    def _snapshot(self, samples_consumed: int, *, into: TrainState | None = None) -> TrainState:
        """The state of this shard's pieces."""
        assert self._at is not None
        return train_state.capture(
            self._module, self.optimizer, self.scheduler, step=self._at, samples_consumed=samples_consumed, into=into
        )

    def _load(self, state: TrainState) -> None:
        train_state.restore(state, self._module, self.optimizer, self.scheduler)
        self._at = state.step

    def _serve_all(self, want_grad_norm: bool) -> tuple[Tensor | None, bool]:
        """A synchronous step; the norm of the whole gradient where it is needed, and whether it was skipped."""
        train = self.context.train
        others = [rank for rank in self.context.mesh.shards if rank != self.context.global_rank]
        # More direct than a collective operation, which small steps would feel.
        ready = [dist.irecv(torch.zeros(1), other, tag=READY) for other in others]
        arriving = {worker: push.expect(worker) for worker, push in self._pushes.items()}
        for worker, work in arriving.items():
            self._wait_for(work)
            self._pushes[worker].complete(worker)
        for other in others:
            self._sends.send(torch.zeros(1), other, READY)
        self._set_gradients(list(self._pushes.values()))
        for word in ready:
            self._wait_for(word)
        norm: Tensor | None = None
        if train.clip_norm is not None or train.on_nonfinite == "skip" or want_grad_norm:
            norm = self._norm()
            if self._shard == 0:
                for worker in self._workers:
                    self._sends.send(norm, worker, NORM)
        skipped = norm is not None and train.on_nonfinite == "skip" and not torch.isfinite(norm)
        if not skipped:
            if norm is not None and train.clip_norm is not None:
                nn.utils.clip_grads_with_norm_(self._pieces.values(), train.clip_norm, norm)
            self._update()
        self._end_step(skipped=skipped)
        for worker in self._workers:
            self._answer(worker)
        return norm, skipped

    def _serve_one(self) -> None:
        """Apply the gradient that comes first, and answer those who may go on."""
        assert self._arrivals is not None
        began = time.perf_counter()
        worker, push = self._arrivals.next()
        self._waited_s += time.perf_counter() - began
        self._staleness.append(self._updates - self._seen[worker])
        self._wait_for(self._sends)
        self._set_gradients([push])
        self._update()
        self._arrivals.free(worker)
        self._done[worker] += 1
        self._unanswered.add(worker)
        slowest = min(self._done.values())
        for waiting in sorted(self._unanswered):
            ahead = self._done[waiting] - slowest
            if self._lead is None or ahead <= self._lead:
                self._most_ahead = max(self._most_ahead, ahead)
                self._unanswered.remove(waiting)
                self._answer(waiting)

    def _wait_for(self, arriving: dist.Work | PendingSends | None) -> None:
        assert arriving is not None
        began = time.perf_counter()
        arriving.wait()
        self._waited_s += time.perf_counter() - began

    def _set_gradients(self, pushes: Sequence[Push]) -> None:
        """The sum over the pushes; None where none has a gradient."""
        for part in self._parts:
            piece = self._pieces[part.name]
            if part.row is None:
                piece.grad = _sum([g for p in pushes if (g := p.whole(part.name)) is not None], part.dtype)
            else:
                piece.grad = self._sum_of_rows(part, pushes)

    def _sum_of_rows(self, part: Part, pushes: Sequence[Push]) -> Tensor | None:
        rows = [pair for p in pushes if (pair := p.rows(part.name)) is not None]
        if not rows:
            return None
        numbers = torch.cat([n.long() for n, _ in rows])
        values = torch.cat([v for _, v in rows]).to(part.dtype)
        shape = self._pieces[part.name].shape
        total = torch.sparse_coo_tensor(numbers[None], values, shape, check_invariants=False).coalesce()
        if part.name in self._whole_tables:
            self._unseen[part.name].fill_(True)
            return total.to_dense()
        self._unseen[part.name][:, total.indices()[0]] = True
        return total

    def _norm(self) -> Tensor:
        """Of the gradients on all shards together."""
        gradients = [entries(p.grad) for p in self._pieces.values() if p.grad is not None]
        square = nn.utils.get_total_norm(gradients).double().square() if gradients else torch.zeros(()).double()
        dist.all_reduce(square, group=self._groups.shards)
        return square.sqrt().float()

    def _update(self) -> None:
        self.optimizer.step()
        self._updates += 1

    def _answer(self, worker: int, group: dist.ProcessGroup | None = None) -> None:
        """Send a worker the parameters, of tables the rows that it has not seen."""
        if self._memory.numel():
            self._sends.send(self._memory, worker, ANSWER, group)
        if self._unseen:
            rows = []
            for name, unseen in self._unseen.items():
                numbers = unseen[worker].nonzero()[:, 0]
                unseen[worker] = False
                rows.append((numbers.to(number_dtype(unseen.shape[1])), self._pieces[name].detach()[numbers]))
            self._sends.send(torch.tensor([len(n) for n, _ in rows]), worker, ANSWERED_COUNTS, group)
            if any(len(n) for n, _ in rows):
                self._sends.send(pack_rows(rows), worker, ANSWERED_ROWS, group)
        self._seen[worker] = self._updates


def share_meta(own: Mapping[str, Any] | None, *, mesh: Mesh, rank: int) -> dict[str, Any]:
    """What the first of the ranks that know it passes, on every rank; the others pass None."""
    first = torch.tensor(mesh.world_size if own is None else rank)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    meta: dict[str, Any] = broadcast_json(own, source=int(first), rank=rank, device=CPU)
    return meta


def with_settings(state: TrainState, meta: Mapping[str, Any]) -> TrainState:
    """``state`` with the step, the options of the optimizer and the schedule of ``meta``, which is another rank's."""
    groups = [
        {**theirs, "params": own["params"]}
        for theirs, own in zip(meta["param_groups"], state.meta["param_groups"], strict=True)
    ]
    taken = {name: meta[name] for name in ("step", "samples_consumed", "scheduler")}
    return replace(state, meta={**state.meta, **taken, "param_groups": groups})


def keep_parts(optimizer: Optimizer, parts: Mapping[Tensor, tuple[Part, nn.Parameter]]) -> None:
    """Let an optimizer of whole parameters go on with parts of some of them, and of its state for them."""
    state: dict[Tensor, Any] = {}
    for parameter, (part, piece) in parts.items():
        if values := optimizer.state.get(parameter):
            state[piece] = {
                key: part.of(value).clone() if isinstance(value, Tensor) and key not in PER_PARAMETER else value
                for key, value in values.items()
            }
    optimizer.state.clear()
    optimizer.state.update(state)
    for group in optimizer.param_groups:
        group["params"] = [parts[p][1] for p in group["params"] if p in parts]


def _sum(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """In the memory of the first, if it has this type."""
    if not gradients:
        return None
    total = gradients[0].to(dtype)
    for gradient in gradients[1:]:
        total.add_(gradient)
    return total
