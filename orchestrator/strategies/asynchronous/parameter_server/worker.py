"""``parameter_server``: shards own the parameters and the optimizer; workers compute gradients.

In a step each worker pushes every shard its part of the gradient, as soon as that is there, and gets the shard's
parameters back, while it loads the next batch. With ``sync`` a shard waits for all workers, and losses are those of
one worker alone; with ``async`` each gradient is an update of its own, however old the parameters were that it was
computed with; with ``stale`` a worker that is too many steps ahead of the slowest waits for its answer.

A lost worker costs nothing that the shards have: they hand their parameters to the new one, and all go on from the step
that the shards stand after. Where nobody waits for anybody, workers that were further make the steps in between again,
so that some gradients are applied twice. Buffers are those of the first worker that is left; where none is, those that
the job begins with. A lost shard's state is in its neighbour's memory with ``recovery.peer_copy_every``; then buffers
stay as they were later on.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.job import Job
from orchestrator.model.sharding import PER_PARAMETER, Extent, extents_of, offsets, optimizer_error
from orchestrator.protocol.metrics import Metric
from orchestrator.state import train_state
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import broadcast_state, gather_states
from orchestrator.strategies.asynchronous.parameter_server.shard import share_meta, with_settings
from orchestrator.strategies.asynchronous.parameter_server.strategy import ParameterServerConfig
from orchestrator.strategies.asynchronous.parameter_server.wire import (
    ANSWER,
    ANSWERED_COUNTS,
    ANSWERED_ROWS,
    NORM,
    Groups,
    Part,
    PendingSends,
    Push,
    RowsSpec,
    parts_of,
    receive_rows,
    whole_bytes,
)
from orchestrator.strategies.base import Context, StepResult
from orchestrator.strategies.replicated.whole_model import WholeModel

CPU = torch.device("cpu")


class ShardConnection:
    """A worker's line to one shard: a push, then the answer."""

    def __init__(
        self,
        rank: int,
        parts: Sequence[Part],
        parameters: Mapping[str, Tensor],
        memory: Tensor,
        compression: str,
        pushes: dist.ProcessGroup | None,
    ):
        """``memory``: of all parameters that are cut anywhere, as bytes. ``pushes``: the group for pushes."""
        taken = whole_bytes(parts)
        self.rank = rank
        self._pushes = pushes
        self.sends = PendingSends()
        self.received_bytes = 0
        self._names = [part.name for part in parts]
        self._push = Push(parts, compression=compression)
        self._whole = memory[taken]
        self._whole_numbers = sum(part.stop - part.start for part in parts if part.row is None)
        self._tables = {
            part.name: (part, part.of(parameters[part.name].detach())) for part in parts if part.row is not None
        }
        self._landing = (
            self._whole if memory.device == CPU else torch.empty_like(self._whole, device=CPU, pin_memory=True)
        )
        self._counts = torch.zeros(len(self._tables), dtype=torch.int64)
        self._arriving: list[dist.Work] = []
        self.begin()

    def begin(self) -> None:
        """The next step."""
        self._push.clear()
        self._missing = set(self._names)
        self._pushed = False

    def put(self, name: str, gradient: Tensor) -> None:
        """Send the push with its last gradient.

        Raises:
            ValueError: it is on its way already.
        """
        if self._pushed:
            raise ValueError(
                f"the gradient of {name} grew after it was complete; where activations are checkpointed, "
                "pass use_reentrant=False, or use strategy=ddp"
            )
        self._push.put(name, gradient)
        self._missing.discard(name)
        if not self._missing:
            self.push()

    def push(self) -> None:
        """Send what there is, whatever is missing."""
        if not self._pushed:
            self._pushed = True
            self._push.send(self.rank, self.sends, self._pushes)

    @property
    def missing(self) -> list[str]:
        return [] if self._pushed else [name for name in self._names if name in self._missing]

    @property
    def is_expecting(self) -> bool:
        return bool(self._arriving)

    def expect(self, group: dist.ProcessGroup | None = None) -> None:
        """Begin to receive an answer. It overwrites parameters, which must not be in use."""
        self._group = group
        for memory, tag in ((self._landing, ANSWER), (self._counts, ANSWERED_COUNTS)):
            if memory.numel():
                work = dist.irecv(memory, self.rank, group=group, tag=tag)
                assert work is not None
                self._arriving.append(work)

    @torch.no_grad()
    def complete(self) -> int:
        """Wait for the answer; how many numbers it had."""
        if not self._arriving:
            return 0
        for work in self._arriving:
            work.wait()
        self._arriving = []
        self.received_bytes += self._landing.nbytes + self._counts.nbytes
        self.sends.wait()
        if self._landing is not self._whole:
            self._whole.copy_(self._landing)
        numbers = self._whole_numbers
        specs = [
            RowsSpec(count, len(table), part.dtype, table.shape[1:])
            for count, (part, table) in zip(self._counts.tolist(), self._tables.values(), strict=True)
        ]
        rows = receive_rows(specs, self.rank, ANSWERED_ROWS, self._group)
        for (at, values), (_, table) in zip(rows, self._tables.values(), strict=True):
            table.index_copy_(0, at.long().to(table.device), values.to(table.device))
            numbers += values.numel()
            self.received_bytes += at.nbytes + values.nbytes
        return numbers


class Worker(WholeModel):
    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        options, train = context.options, context.train
        assert isinstance(options, ParameterServerConfig)
        self._options = options
        self._sync = options.consistency == "sync"
        self._changes_gradient = not self._sync and (train.clip_norm is not None or train.on_nonfinite == "skip")
        self._lines: list[ShardConnection] = []
        self._lines_of: dict[str, list[ShardConnection]] = {}
        self._last_backward = False
        self._finished: int | None = None  # the last step of the run that this worker has come to the end of
        self._ended_at: float | None = None  # when the last step did, if steps follow each other
        self._forget_figures()

    def setup(self, train_set: Dataset[Any]) -> None:
        super().setup(train_set)
        if error := optimizer_error(self.optimizer):
            raise ValueError(f"Job.optimizer: {error}")
        self.optimizer.state.clear()  # it is on the shards; here are the settings alone
        extents = extents_of(self.model)
        self._trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._memory = into_one_memory(self._trained, extents)
        self._parts = parts_of(extents, self._trained, self.context.mesh.num_shards)
        self._numbers = sum(p.numel() for p in self._trained.values())
        for name, parameter in self._trained.items():
            parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, name))

    def attach(self) -> None:
        """Whether to forget an interrupted step, or even the one before it, the shards know: :meth:`hand_over`."""
        self._groups = Groups.form(self.context.mesh)
        pushes = None if self._sync else self._groups.pushes
        self._lines = [
            ShardConnection(rank, parts, self._trained, self._memory, self._options.compression, pushes)
            for rank, parts in zip(self.context.mesh.shards, self._parts, strict=True)
        ]
        self._lines_of = {
            name: [
                line for line, parts in zip(self._lines, self._parts, strict=True) if any(p.name == name for p in parts)
            ]
            for name in self._trained
        }
        self._forget_figures()

    def sync_initial_state(self) -> None:
        self._finished = 0

    @property
    def nonfinite_advice(self) -> str | None:
        bound = self._options.max_staleness
        if self._sync:
            return None
        if self._options.consistency == "stale" and bound:
            return (
                f"gradients of parameters up to {bound} steps old may have made it diverge; "
                f"lower strategy.max_staleness={bound}, or the learning rate"
            )
        return (
            "gradients of parameters that other workers had changed meanwhile may have made it diverge; "
            "bound their age with strategy.consistency=stale or sync, or lower the learning rate"
        )

    @property
    def model(self) -> nn.Module:
        """With the parameters that the last step led to."""
        self._complete()
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model

    def close(self) -> None:
        """Give up all that holds a process group."""
        self._lines, self._lines_of = [], {}
        vars(self).pop("_groups", None)

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool) -> StepResult:
        began, self._waited_s = time.perf_counter(), 0.0
        self._complete()
        for line in self._lines:
            line.begin()
        result = super().train_step(microbatches, want_grad_norm=want_grad_norm)
        if result.skipped and self._changes_gradient:
            self._exchange()
        assert self._finished is not None
        self._finished += 1
        self._steps += 1
        self._waited_in_window_s += self._waited_s
        self._window_s += time.perf_counter() - (self._ended_at or began)
        self._ended_at = time.perf_counter()
        return result

    def capture(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        state = super().capture(step=step, samples_consumed=samples_consumed, into=into)
        if state is not None:
            ranks = [self.context.global_rank, *self.context.mesh.shards]
            parts = gather_states(state, ranks=ranks, rank=self.context.global_rank, device=CPU, into=None)
            assert parts is not None
            shapes = {name: p.shape for name, p in self._trained.items()}
            state.optimizer.update(joined([part.optimizer for part in parts[1:]], shapes, into=into))
        return state

    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        context = self.context
        state = broadcast_state(state, source=source, rank=context.global_rank, device=context.device)
        meta = super().restore(state, source=context.global_rank)
        self.optimizer.state.clear()
        self._finished = meta["step"]
        return meta

    @torch.no_grad()
    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        """Take everything from the shards but what they do not have: buffers, and parameters that are not trained."""
        rank, num_workers = self.context.global_rank, self.context.mesh.num_workers
        meta = share_meta(None, mesh=self.context.mesh, rank=rank)
        own = self.snapshot(step=step, samples_consumed=samples_consumed)
        train_state.restore(with_settings(own, meta), self._model, self.optimizer, self.scheduler)
        if self._finished is not None and source_step < self._finished + self._in_step:
            self.forget_step()  # the shards have not made its update, though this worker may have come to its end
        self._in_step = False
        first = torch.tensor(num_workers if self._finished is None else rank)
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self._groups.workers)
        untrained = [p for p in self._model.parameters() if not p.requires_grad]
        self._share([*untrained, *self._model.buffers()], source=int(first) % num_workers)
        self._buffers_before = [b.clone() for b in self._model.buffers()]
        self._finished = source_step
        for line in self._lines:
            line.expect()
        self._complete()
        self._forget_figures()
        return {name: meta[name] for name in ("step", "samples_consumed")}

    @contextlib.contextmanager
    def quiesced(self) -> Iterator[None]:
        self._complete()
        if not self._sync:
            # The shards answer once all workers are here: with everything that all of them have pushed.
            received = [line.received_bytes for line in self._lines]
            for line in self._lines:
                line.expect(self._groups.long_timeout)
            for line, before in zip(self._lines, received, strict=True):
                line.complete()
                line.received_bytes = before  # the figures are of steps
            self._share(list(self._model.buffers()))
        yield
        self._ended_at = None

    def comm_ms(self) -> float | None:
        return 1e3 * self._waited_s

    def metrics(self) -> Mapping[str, Metric]:
        waited_pct = 100 * self._waited_in_window_s / max(self._window_s, 1e-9)
        sent = sum(line.sends.size_bytes for line in self._lines)
        metrics = {
            f"parameter_server/worker_{self.context.global_rank}_wait_pct": Metric(waited_pct, "max"),
            "parameter_server/wait_pct": Metric(waited_pct, "mean"),
            "parameter_server/bytes_sent_per_step": Metric(sent / max(1, self._steps), "mean"),
        }
        if self._answers:  # the first is received after the first step
            received = sum(line.received_bytes for line in self._lines)
            pulled_pct = 100 * self._pulled / (self._answers * self._numbers)
            metrics["parameter_server/bytes_received_per_step"] = Metric(received / self._answers, "mean")
            metrics["parameter_server/pulled_pct"] = Metric(pulled_pct, "mean")
        self._forget_figures()
        return metrics

    def _forget_figures(self) -> None:
        for line in self._lines:
            line.sends.size_bytes = line.received_bytes = 0
        self._steps = self._answers = self._pulled = 0
        self._waited_s = self._waited_in_window_s = self._window_s = 0.0
        self._ended_at = None

    def _weights(self, targets: Sequence[Any]) -> tuple[Sequence[float | Tensor], float | Tensor]:
        """As for a mean over the workers, where shards add up, or take one worker's gradient for the whole."""
        weights, total = super()._weights(targets)
        if not self._sync:
            total = torch.as_tensor(sum(weights), dtype=torch.float32)
            total = torch.where(total > 0, total, 1.0)
        return weights, total * self.context.mesh.data_parallel_size

    def _sum_over_ranks(self, weight: float | Tensor) -> float | Tensor:
        if not self._sync:
            return weight
        total = torch.as_tensor(weight, dtype=torch.float32).cpu().clone()
        with self._waiting():
            dist.all_reduce(total, group=self._groups.workers)
        return total.to(self.context.device)

    @contextlib.contextmanager
    def _gradient_sync(self, last: bool) -> Iterator[None]:
        self._last_backward = last
        try:
            yield
        finally:
            self._last_backward = False

    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        if self._last_backward and not self._changes_gradient:
            assert parameter.grad is not None
            for line in self._lines_of[name]:
                line.put(name, parameter.grad)

    def _after_backward(self) -> None:
        if not self._changes_gradient:
            self._put_gradients()
            self._exchange()
        if self._sync:
            self._share(list(self._model.buffers()))

    def _gradient_norm(self) -> Tensor:
        if not self._sync:
            return super()._gradient_norm()
        norm = torch.zeros(())
        with self._waiting():
            dist.recv(norm, self._lines[0].rank, tag=NORM)
        return norm

    def _clip(self, norm: Tensor) -> None:
        if not self._sync:
            super()._clip(norm)

    def _update(self) -> None:
        if self._changes_gradient:
            self._put_gradients()
            self._exchange()
        # The shards have made the update; this one is of nothing and counts for the scheduler alone.
        self.optimizer.zero_grad()
        super()._update()

    def _put_gradients(self) -> None:
        """Those that no hook has seen: of parameters that took part in earlier micro-batches alone."""
        for line in self._lines:
            for name in line.missing:
                if (gradient := self._trained[name].grad) is not None:
                    line.put(name, gradient)

    def _exchange(self) -> None:
        """Push what has not been pushed, and begin to receive the answers."""
        for line in self._lines:
            line.push()
            line.expect()

    def _complete(self) -> None:
        """Have every answer that is on its way."""
        with self._waiting():
            self._answers += any(line.is_expecting for line in self._lines)
            self._pulled += sum(line.complete() for line in self._lines)

    def _share(self, tensors: Sequence[Tensor], *, source: int = 0) -> None:
        """Give every worker the numbers that the worker ``source`` has."""
        if not tensors:
            return
        flat = torch.cat([t.reshape(-1).view(torch.uint8).cpu() for t in tensors])
        dist.broadcast(flat, src=source, group=self._groups.workers)
        for tensor, values in zip(tensors, flat.split([t.nbytes for t in tensors]), strict=True):
            tensor.copy_(values.clone().view(tensor.dtype).view(tensor.shape))

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - began


def into_one_memory(parameters: Mapping[str, nn.Parameter], extents: Sequence[Extent]) -> Tensor:
    """Move the parameters that are cut anywhere into one memory, which is returned as bytes, so that what a shard
    answers can be received right where it belongs."""
    starts = offsets(extents)
    device = next(iter(parameters.values())).device
    end = max((starts[e.name] + e.size_bytes for e in extents if e.name in starts), default=0)
    memory = torch.zeros(end, dtype=torch.uint8, device=device)
    for name, start in starts.items():
        parameter = parameters[name]
        place = memory[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        parameter.data = place.copy_(parameter.detach())
    return memory


def joined(
    parts: Sequence[Mapping[str, Tensor]], shapes: Mapping[str, torch.Size], *, into: TrainState | None
) -> dict[str, Tensor]:
    """The optimizer's state of whole parameters, of which each shard has a part, under ``"<name>/<key>"``.

    ``into`` is an old state whose memory may be used.
    """
    whole: dict[str, Tensor] = {}
    for path in dict.fromkeys(path for part in parts for path in part):
        name, _, key = path.rpartition("/")
        tensors = [part[path] for part in parts if path in part]
        if key in PER_PARAMETER:
            whole[path] = tensors[0]
            continue
        old = None if into is None else into.optimizer.get(path)
        fits = old is not None and old.shape == shapes[name] and old.dtype == tensors[0].dtype
        memory = old if fits and old is not None else torch.empty(shapes[name], dtype=tensors[0].dtype)
        torch.cat([t.reshape(-1) for t in tensors], out=memory.view(-1))
        whole[path] = memory
    return whole
