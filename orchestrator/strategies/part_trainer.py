"""A strategy whose ranks have parts of the model: what replicas of a part do for each other when a rank is lost.

With ``recovery.peer_copy_every``, each rank also has copies of its own part and of the part of a neighbour, in host
memory. All ranks then continue from the last step of which all parts are left.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.compat.generators import kept_generators
from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.model.partial_init import build_fake
from orchestrator.planning.memory import size_text
from orchestrator.planning.mesh import DENSE, Coords
from orchestrator.planning.placement import AxisCut, Placement, Shape
from orchestrator.planning.plan import Plan
from orchestrator.protocol.messages import PENDING, RecoverableSteps
from orchestrator.protocol.metrics import Metric, MetricSpec, measured, wait_metric
from orchestrator.state.merge import merge, without_copies, without_shared
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, broadcast_state, gather_states, receive_state, send_state
from orchestrator.strategies.constructor import Outline, constructor_of
from orchestrator.strategies.data.batch_parts import BatchDivision, not_compared
from orchestrator.strategies.groups import NOTHING_SHARED, Sharing, divided
from orchestrator.strategies.measure.device import TensorSize, WaitTimer, free_memory, sizes_of
from orchestrator.strategies.measure.job_metrics import SumCheck, train_metrics
from orchestrator.strategies.owner import Own, Shards
from orchestrator.strategies.peer_copies import PeerCopies
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.sums.mesh_reduction import MeshReduction
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.transforms.every import outline_of_parts, own_parts
from orchestrator.strategies.transforms.part import Parts
from orchestrator.strategies.update.job_optimizer import optimizer_of_part
from orchestrator.strategies.whole_model import WholeModel

COMPARED_BYTES = 2**30
"""The size of a model that rank 0 builds in a second or two, to compare a batch with its halves."""


ALL_REDUCE_MS = wait_metric("all_reduce")


class PartTrainer(Trainer):
    """A strategy in which the ranks of a ``replicate`` group of the mesh have the same part of the model.

    Attributes:
        parts: the parts of this rank where several compute the same samples together, from :meth:`setup` on.
        job_of_part: the job, for passes through a model of :meth:`constructor`.
        owner: the elements that this rank updates, from when they are built.
    """

    compares_whole = True
    _sharing: Sharing = NOTHING_SHARED
    parts: Parts = Parts()
    owner: Own
    _ahead = 0  # the steps completed by a recovery that has not ended
    _host: dist.ProcessGroup | None = None  # the writers with gloo, if they have GPUs and send what is in host memory

    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        self.job_of_part = job
        self._copies = PeerCopies() if context.peer_copy_every and len(self._ring) > 1 else None

    @property
    def kept(self) -> Sequence[object]:
        return self.job, self.job_of_part

    @classmethod
    def outline_of_worker(cls, config: Config, outline: Outline, plan: Plan) -> Outline:
        return outline_of_parts(outline, plan.mesh)

    def find_parts(self, train_set: Dataset[Any]) -> None:
        """Find what of a sample this rank computes, and of the layers."""
        self.parts = own_parts(self.context, self.job, train_set)
        self.job_of_part = self.parts.job(self.job)
        self._train_metrics = SumCheck("train_metrics", functools.partial(train_metrics, self.job_of_part))

    def attach(self) -> None:
        """Undo an interrupted step, and connect the ring of neighbours that have copies of each other's parts."""
        super().attach()
        if self._copies is not None:
            mesh = self.context.mesh
            group = divided(self.context, mesh.groups(mesh.neighbours_along), backend="gloo")
            self._copies.attach(group, self._ring, rank=self.context.global_rank)

    def warning_of_whole(self, division: BatchDivision, model: nn.Module, train_set: Dataset[Any]) -> str | None:
        """Compare a batch with its halves in the whole model, which rank 0 builds for this unless it is large.

        Beside the parameters, there are two sets of gradients and activations.
        """
        context = self.context
        size = self.parts.count * sum(parameter.nbytes for parameter in model.parameters())  # of what is divided
        limit = min(COMPARED_BYTES, *(free_memory(device) // 4 for device in (CPU, context.device)))
        if size > limit:
            return not_compared(
                division, f"rank 0 would build the whole model of {size_text(size)}, more than {size_text(limit)}"
            )
        with kept_generators(context.device):
            whole = WholeModel(self.job, context, self.precision)
        return super().warning_about(division, whole.model, train_set)

    def constructor(self) -> Callable[[], nn.Module]:
        """Return the constructor of what this rank has of the model, before that is divided into shards and stages."""
        return self.parts.of(constructor_of(self.job, self.context.train, self.precision))

    def whole_model(self) -> nn.Module:
        """Return the model of which ranks have parts, without memory; the optimizer is made for it."""
        return build_fake(constructor_of(self.job, self.context.train, self.precision), CPU).model

    def placement(self, name: str, shape: Shape) -> Placement:
        """Return where a parameter of a model of :meth:`constructor` is that has this shape there."""
        return self.parts.placement(name, shape)

    def flop_share(self) -> float:
        return self.parts.flop_share()

    def undivided(self) -> nn.Module:
        """Return a module with the whole parameters that this rank calls, unless it gathers them."""
        raise NotImplementedError

    def trained_part(
        self,
        modules: Sequence[nn.Module],
        owner: Own,
        train_set: Dataset[Any],
        *,
        whole: nn.Module | None = None,
    ) -> Trained:
        """Return what this rank trains.

        Args:
            modules: what it calls.
            owner: the elements that it updates.
            train_set: the samples.
            whole: the whole model, maybe without memory; None to build it.
        """
        self.owner = owner
        trained = Trained(
            self.job,
            self.context,
            modules,
            {"": optimizer_of_part(self.job, self.whole_model() if whole is None else whole, owner.module())},
            train_set,
            module=owner.module,
            placements=self.placed(owner.placements),
        )
        trained.moving = owner.whole_of(trained.moving)
        return trained

    def shards_of(self, cuts: Mapping[str, AxisCut]) -> Shards:
        """Return this rank's shards of the parameters that it calls whole."""
        index, count = self.context.mesh.place(DENSE, self.context.global_rank)
        return Shards(self.undivided, cuts, index=index, count=count, placed=self.placement)

    @property
    def divides_optimizer(self) -> bool:
        """Whether each rank updates a shard of the parameters that it has whole."""
        return getattr(self.context.options, "shard_optimizer", False)

    def share_parameters(self) -> None:
        self.owner.exchange()

    def sync_initial_state(self) -> None:
        super().sync_initial_state()
        self.owner.exchange()

    def apply(self) -> None:
        self.owner.take_frozen()
        super().apply()

    def end_step(self, norm: Tensor | None) -> bool:
        admitted = super().end_step(norm)
        if admitted:
            self._ahead = 1  # if the exchange fails, the step is not counted, but this rank's part has been updated
            self.owner.exchange(trained=True)
            self._ahead = 0
        return admitted

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        with super().averaged_weights():
            self.owner.exchange(trained=True)
            yield
        self.owner.exchange(trained=True)

    def tensor_sizes(self) -> Iterable[TensorSize]:
        own = [*super().tensor_sizes()]
        if not isinstance(self.owner, Shards):
            return own
        of_shards = [size for size in own if size.kind == "optimizer state"]
        whole = sizes_of(self.undivided(), self.trained.optimizer)
        return [*of_shards, *(size for size in whole if size not in of_shards)]

    def placed(self, placements: Mapping[str, Placement]) -> Mapping[str, Placement]:
        """Return the placements of this rank's parameters, from those in a model that is not cut into stages."""
        return placements

    @property
    def timers(self) -> Mapping[MetricSpec, WaitTimer]:
        """What a step waits for, by metric."""
        reduction, of_parts = self.reduction, self.parts.timers(self.context.train)
        if isinstance(reduction, MeshReduction) and (reduction.batch is not None or self.parts.count > 1):
            return {ALL_REDUCE_MS: reduction.waits, **of_parts}
        return of_parts

    @contextlib.contextmanager
    def around_step(self, *, logged: bool) -> Iterator[None]:
        """Count what a step waits for, if it is logged; evaluations wait too, and those times are not reported."""
        timers = self.timers.values()
        for timer in timers:
            timer.restart(counts=logged)
        try:
            with super().around_step(logged=logged):
                yield
        finally:
            for timer in timers:
                timer.pause()

    def comm_ms(self) -> float | None:
        timers = self.timers.values()
        return math.fsum(timer.total_ms() for timer in timers) if timers else super().comm_ms()

    def metrics(self) -> Mapping[str, Metric]:
        return {**super().metrics(), **measured({spec: timer.total_ms() for spec, timer in self.timers.items()})}

    @property
    def writers(self) -> Sequence[int]:
        return self.context.mesh.replicas[0]

    def own_share(self, state: TrainState) -> TrainState:
        """Return what of the ``state`` of this rank, one of the ``writers``, no writer before it has."""
        state = without_shared(state, self._sharing.first_names, saved=self._sharing.saved_elsewhere)
        coords = self.context.mesh.coords(self.context.global_rank)
        if coords._replace(pipeline=0) == Coords():
            return state
        return without_copies(state, {name for name in self.trained.boxes if self._saves(name)})

    def frozen(self) -> Mapping[str, int]:
        """Return the checksums of parameters under the names by which no rank before this one has them."""
        elsewhere = self._sharing.saved_elsewhere
        return self.trained.frozen(lambda name: name not in elsewhere and self._saves(name))

    def _saves(self, name: str) -> bool:
        """Return whether this is the first rank of its stage that has this part of the parameter."""
        here = replace(self.trained.placements[name], stages=(self.context.pp_rank,))
        return here.saves(self.context.mesh, self.context.global_rank)

    def capture_part(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        if self.context.global_rank not in self.writers:
            return None
        state = self.trained.to_save(step=step, samples_consumed=samples_consumed, into=into, left_out=self.left_out)
        return self.own_share(state)

    def capture(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        return self._gathered(self.capture_part(step=step, samples_consumed=samples_consumed, into=None))

    def gather_model(self) -> Mapping[str, Tensor] | None:
        own = None
        if self.context.global_rank in self.writers:
            live = self.trained.snapshot(step=0, samples_consumed=0, live=True)
            own = self.own_share(replace(live, optimizer={}))
        whole = self._gathered(own)
        return None if whole is None else whole.model

    def _gathered(self, own: TrainState | None) -> TrainState | None:
        """Return the state that the shares of all writers make up, on the first of them."""
        if own is None:
            return None
        states = gather_states(
            own,
            ranks=self.writers,
            rank=self.context.global_rank,
            device=self.context.device if self._host is None else CPU,
            group=self._host,
        )
        return None if states is None else merge(states, order=self.saved_names)

    def restore_part(self, state: TrainState) -> dict[str, Any]:
        self.load(state, partial=self.context.mesh.pipeline > 1)
        self.owner.exchange()
        return state.meta

    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        wanted = {*self.trained.module().state_dict(), *self._sharing.first_names.values()}
        has_all = self.context.mesh.pipeline == 1  # so that a tensor that is not wanted is of another model
        return self.restore_part(
            broadcast_state(
                state,
                source=source,
                rank=self.context.global_rank,
                device=self.context.device,
                keep=lambda name: has_all or name in wanted,
                boxes=self.trained.boxes,
            )
        )

    def after_step(self, *, step: int, samples_consumed: int) -> None:
        copies, every = self._copies, self.context.peer_copy_every
        if copies is not None and step % every == 0:
            copies.submit(lambda into: self.trained.snapshot(step=step, samples_consumed=samples_consumed, into=into))

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        """Offer this rank's part to all its replicas, and the copies of it and of the preceding rank's part."""
        mesh, own, step = self.context.mesh, self.context.global_rank, step + self._ahead
        pending = (step + 1,) if self.trained.settled else ()
        copied = () if self._copies is None else self._copies.own_steps
        offered = dict.fromkeys(mesh.group("replicate", own), (step, *pending, *copied))
        if self._copies is not None:
            preceding = self._ring[self._ring.index(own) - 1]
            offered |= dict.fromkeys(mesh.group("replicate", preceding), self._copies.neighbours_steps)
        return {**offered, PENDING: pending} if pending else offered

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        """Fetch the state of each rank from the rank that provides it, or from this rank's own copy.

        A replica sends its tensors from where they are. A new worker receives where its parameters are, the model in
        place; a survivor in host memory, because on its device there may be no room for two states.
        """
        completed = step
        self._settle(source_step, step + self._ahead)
        step += self._ahead
        samples_consumed += self._ahead * self.context.train.global_batch_size
        own, device = self.context.global_rank, self.context.device
        here: dict[str, int] = {"step": step, "samples_consumed": samples_consumed}
        received: TrainState | None = None
        for receiver, sender in enumerate(sources):
            if own == sender != receiver:
                send_state(self.state_of(receiver, source_step, **here), to=receiver, device=device)
            elif own == receiver != sender:
                on_device = all(parameter.device == device for parameter in self.trained.parameters)
                onto = device if step == 0 and on_device else CPU
                into = self.initial_model() if step == 0 else None
                received = receive_state(sender, device=device, onto=onto, into=into)
        meta: dict[str, Any] = here
        if received is not None:  # not before this rank has sent what others need, which may fail
            meta = self._load(received)
        elif step != source_step:
            meta = self._load(self.state_of(own, source_step, **here), consume=False)
        assert meta["step"] == source_step
        if self._copies is not None:
            self._copies.forget_after(source_step)
        self._ahead = source_step - completed  # if the exchange fails, the step is not counted
        self.owner.exchange()
        self._ahead = 0
        return meta

    def state_of(self, rank: int, wanted: int, *, step: int, samples_consumed: int) -> TrainState:
        """Return the state of ``rank`` after the step ``wanted``, which this rank has offered.

        Args:
            rank: a replica of this rank, or of the preceding one of the ring.
            step: the last one that this rank has completed.
            samples_consumed: global samples consumed up to ``step``.
        """
        is_own = rank in self.context.mesh.group("replicate", self.context.global_rank)
        if is_own and wanted == step:
            return self.trained.snapshot(step=step, samples_consumed=samples_consumed, live=True)
        assert self._copies is not None
        return self._copies.own(wanted) if is_own else self._copies.neighbours(wanted)

    def close(self) -> None:
        """Stop exchanging copies. Existing copies are kept."""
        super().close()
        if self._copies is not None:
            self._copies.detach()
        self.parts.close(self.context.device)
        if hasattr(self, "owner"):  # otherwise setup() has failed, or nothing is built yet
            self.owner.group = None

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
            super().end_step(next(norm for known, norm in norms if known))  # what follows an update needs all ranks
            self._ahead += 1
        elif trained.in_step:
            trained.undo_step()
        trained.drop_gradients()

    def _load(self, state: TrainState, *, consume: bool = True) -> dict[str, Any]:
        self.load(state, consume=consume)
        return {name: state.meta[name] for name in ("step", "samples_consumed")}

    @property
    def _ring(self) -> list[int]:
        mesh = self.context.mesh
        return mesh.group(mesh.neighbours_along, self.context.global_rank)
