"""A model of whose parameters this rank has a part, the modules that gather them, and the sums into its parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.compat.fully_sharded import FullySharded
from orchestrator.compat.modules import own_parameters
from orchestrator.compat.torch import FakeTensor
from orchestrator.model.partial_init import build_divided, build_fake
from orchestrator.model.precision import Precision, gathered_dtypes
from orchestrator.model.repeated_blocks import blocks_of
from orchestrator.model.tensor_slots import move, tensor_slots
from orchestrator.planning.mesh import DENSE
from orchestrator.planning.placement import AxisCut, Box, Index, Placement, Shape, is_divisible
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.parts.wrapping import SeenCalls, groups_of, order_of_calls
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.update.gradients import found_anywhere

ROWS = AxisCut(over=DENSE, axis=0)
"""As ``fully_shard`` divides a tensor."""


class DividedModel:
    """A model, or some of its modules, whose parameters are divided over the ranks of a group along :data:`DENSE`.

    Attributes:
        model: the model. What is not divided is fake.
        parts: this rank's part of each parameter, by each of its names. Optimizers update these.
        distinct: the parts, each once.
        placements: where the parameters are, by each of their names.
        scalars: the parts that are whole parameters, because they have no dimension or no element.
        gathers: the time that gathering parameters takes; paused until a step restarts it.
        scatters: the time that summing gradients into the parts takes; the same.
        calls: what :func:`check_forward` has seen.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        context: Context,
        precision: Precision,
        *,
        wanted: Callable[[str], bool] = lambda name: True,
        placed: Callable[[str, Shape], Placement] = lambda name, shape: Placement(shape=shape),
    ):
        """Compute this rank's part of the initial values, without other ranks.

        Args:
            build: the model's constructor.
            context: of this rank.
            precision: what the passes are computed in.
            wanted: whether the tensor of a given name is divided or kept; see ``build_divided``.
            placed: returns where a parameter of the model is, given its name and shape, before it is divided here.
        """
        index, count = context.mesh.place(DENSE, context.global_rank)

        def part(shape: torch.Size) -> Index:
            if not is_divisible(shape):
                return ()
            return ROWS.box(tuple(shape), index=index, count=count).slices_in(Box.whole(shape))

        self._options = MeshConfig.of(context.options)
        self.model, own = build_divided(
            build,
            part,
            seed=context.seed,
            device=torch.device("cpu") if self._options.cpu_offload else context.device,
            wanted=wanted,
            draws_as=index if context.train.init == "fast" else None,
        )
        move([slot for slot in tensor_slots(self.model) if not isinstance(slot.tensor, FakeTensor)], context.device)
        named = dict(self.model.named_parameters(remove_duplicate=False))
        parts = {named[name]: part for name, part in own.items()}
        self.parts = {name: parts[parameter] for name, parameter in named.items() if parameter in parts}
        outer = {name: placed(name, tuple(named[name].shape)) for name in self.parts}
        self.placements = {
            name: replace(placement, cuts=(*placement.cuts, ROWS)) if is_divisible(placement.shape) else placement
            for name, placement in outer.items()
        }
        self.distinct = list(own.values())
        divided = {self.parts[name] for name, placement in self.placements.items() if ROWS in placement.cuts}
        self.scalars = [part for part in self.distinct if part not in divided]
        for scalar in self.scalars:
            scalar.data = scalar.data.to(context.device)
        self.gathers, self.scatters = (WaitTimer(context.device, counts=False) for _ in range(2))
        self.calls = SeenCalls(inside={}, complete=False)
        self._build = build
        self._recomputes = context.train.activation_checkpointing != "none"
        self._device = context.device
        self._autocast_dtype = precision.autocast_dtype
        self._wrapped: FullySharded | None = None
        self._divided: dict[nn.Parameter, nn.Parameter] | None = None  # as modules hold them, by part

    @property
    def wrapped(self) -> FullySharded:
        """The divided modules, from :meth:`divide` to :meth:`close`."""
        assert self._wrapped is not None
        return self._wrapped

    def renewed(self) -> nn.Module:
        """Return the model, to be divided: with its buffers, and with parameters that have no memory."""
        if self._divided is not None:
            tensors = {slot.name: slot.tensor for slot in tensor_slots(self.model)}
            model = build_fake(self._build, torch.device("cpu")).model
            parameters = {*model.parameters()}
            slots = [slot for slot in tensor_slots(model) if slot.tensor not in parameters]
            kept = {id(slot.tensor): tensors[slot.name] for slot in slots}
            for slot in slots:
                slot.fill(kept)
            self.model = model
        return self.model

    def divide(self, root: nn.Module, group: dist.ProcessGroup, *, calls: Sequence[nn.Module] = ()) -> None:
        """Divide the parameters of a module over ranks; again, over others, after :meth:`close` and :meth:`renewed`.

        Args:
            root: the module that is called. It has the modules of :meth:`renewed` whose tensors are wanted.
            group: the ranks.
            calls: the modules of ``root`` of which one call of it runs one. None are gathered together across them.
        """
        names = {id(parameter): name for name, parameter in self.model.named_parameters(remove_duplicate=False)}
        slots = [slot for slot in tensor_slots(root) if id(slot.tensor) in names]

        def fill(owners: Collection[nn.Module]) -> None:
            """Give modules tensors of any values, which are divided at once, or their scalars."""
            memory: dict[int, Tensor] = {}
            for slot in slots:
                fake, key = slot.tensor, id(slot.tensor)
                if slot.owner in owners and key not in filled:
                    filled.add(key)
                    memory[key] = self.parts[names[key]]
                    if names[key] in divided:
                        memory[key] = torch.empty(fake.shape, dtype=fake.dtype, device=self._device)
            for slot in slots:
                if id(slot.tensor) in memory:
                    slot.fill(memory)

        filled: set[int] = set()
        divided = {name for name, placement in self.placements.items() if ROWS in placement.cuts}
        by_name = gathered_dtypes(self.model, self._autocast_dtype, self.calls.casts)
        by_place = {(slot.owner, slot.attribute): by_name[names[id(slot.tensor)]] for slot in slots}

        def dtypes(module: nn.Module) -> Mapping[Tensor, torch.dtype]:
            return {
                parameter: by_place[inner, attribute]
                for inner in module.modules()
                for attribute, parameter in own_parameters(inner).items()
                if parameter is not None and (inner, attribute) in by_place
            }

        self._wrapped = wrapped = FullySharded(
            root,
            group,
            self._device,
            keep_whole=not self._options.reshard_after_forward,
            all_at_once=self.calls.gathers_all,
            offload=self._options.cpu_offload,
            undivided=self.scalars,
            dtypes=dtypes if self._autocast_dtype is not None else None,
            gathering=self.gathers.waiting,
            scattering=self.scatters.waiting,
        )
        together = [
            modules
            for modules in groups_of(self.model, self._options.wrap, root)
            if not calls or any({*modules} <= {*called.modules()} for called in calls)
        ]
        self._divided = {}
        for modules in (*together, (root,)):
            owners = {inner for module in modules for inner in module.modules()}
            fill(owners)
            wrapped.gather_together(modules)
            for slot in slots:
                part, parameter = self.parts[names[id(slot.tensor)]], own_parameters(slot.owner).get(slot.attribute)
                divisible = names[id(slot.tensor)] in divided
                if slot.owner in owners and divisible and parameter is not None and part not in self._divided:
                    self._divided[part] = parameter
                    part.data = wrapped.local_part(parameter).copy_(part.data)  # frees what the part was
        called, blocks = calls or (root,), blocks_of(self.model) if self._recomputes else ()
        wrapped.gather_in_order(
            order_of_calls(self.model, together, self.calls.inside, called),
            called,
            recomputed={inner for block in blocks for inner in block.modules() if inner is not block},
            equally_often=self.calls.complete,
        )
        if (ahead := self._options.prefetch) != 1:  # 1 is what torch does itself
            for module in called:
                wrapped.gather_ahead(module, ahead)

    def take_gradients(self, group: dist.ProcessGroup) -> None:
        """Give the parts their gradients, after the backward passes of a step, and let those need one that now do.

        What one rank of ``group`` has a gradient of gets one on all of them, which may be zero; the rest gets none.
        """
        assert self._divided is not None
        for part, parameter in self._divided.items():
            part.requires_grad_(part.requires_grad or parameter.requires_grad)
        used, scalars = self.wrapped.take_used(), [scalar for scalar in self.scalars if scalar.requires_grad]
        divided = [(part, parameter) for part, parameter in self._divided.items() if part.requires_grad]
        own = [*(parameter in used for _, parameter in divided), *(scalar.grad is not None for scalar in scalars)]
        found = found_anywhere(group, own, self._device)
        for (part, parameter), exists in zip(divided, found, strict=False):
            if exists and parameter.grad is not None:
                part.grad = self.wrapped.local_part(parameter.grad).to(part.dtype)
            parameter.grad = None
        for scalar, exists in zip(scalars, found[len(divided) :], strict=True):
            if exists and scalar.grad is None:
                scalar.grad = torch.zeros_like(scalar)

    def close(self) -> None:
        """Release everything that refers to the process group. Parts and buffers remain."""
        if self._wrapped is not None:
            self._wrapped.release()
            self._wrapped = None


class IntoShards(Sums):
    """Sums over the ranks that have all parts together, in the backward passes, or once after all of a step."""

    def __init__(self, model: DividedModel, batch: dist.ProcessGroup, *, at_end: bool):
        """Prepare for the sums.

        Args:
            model: has the parts.
            batch: the ranks that compute the same of the model, of other samples.
            at_end: whether the sums are made after all backward passes.
        """
        self._model = model
        self._replicas = batch
        self._at_end = at_end
        self.remaining = model.distinct

    def around_slice(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return self._model.wrapped.around_slice(last=last)

    def finish(self, waits: WaitTimer) -> None:
        with waits.waiting():
            if self._at_end:
                self._model.wrapped.sum_gradients()
            self._model.take_gradients(self._replicas)
